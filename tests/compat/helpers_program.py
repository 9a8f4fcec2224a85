"""Prints what helper functions of Lightning answer. It runs under Lightning and under drivetrain.compat."""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities import is_shared_filesystem
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, convert_to_tensors
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len, suggested_max_num_workers
from lightning.fabric.utilities.logger import (
    _add_prefix,
    _convert_params,
    _flatten_dict,
    _sanitize_callable_params,
    _sanitize_params,
)
from lightning.fabric.utilities.rank_zero import _get_rank, rank_prefixed_message
from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.core.saving import (
    convert,
    load_hparams_from_tags_csv,
    save_hparams_to_tags_csv,
    update_hparams,
)
from lightning.pytorch.demos import (
    LightningLSTM,
    LightningTransformer,
    SequenceSampler,
    SimpleLSTM,
    Transformer,
    WikiText2,
)
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset, RandomIterableDataset
from lightning.pytorch.loggers.logger import merge_dicts
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.utilities import (
    find_shared_parameters,
    grad_norm,
    is_picklable,
    measure_flops,
    rank_zero_only,
    set_shared_parameters,
)
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from lightning.pytorch.utilities.data import extract_batch_size, has_len_all_ranks
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import ModelSummary, parse_batch_shape
from lightning.pytorch.utilities.parsing import (
    collect_init_args,
    get_init_args,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
    parse_class_init_keys,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight


class Given:
    def __init__(self, a: int, *rest: int, b: int = 2, **more: int) -> None:
        super().__init__()
        self.found = get_init_args(inspect.currentframe())  # type: ignore[arg-type]

    def hook(self, batch: Any, batch_idx: int) -> None: ...

    def starred(self, *args: Any) -> None: ...


class Collected:
    def __init__(self, a: int = 1) -> None:
        super().__init__()
        self.found = collect_init_args(inspect.currentframe(), [], classes=(Collected,))  # type: ignore[arg-type]


class CollectedToo(Collected):
    def __init__(self, b: int, **more: int) -> None:
        super().__init__(a=b + 1)


def tags(values: dict[str, Any]) -> list[Any]:
    save_hparams_to_tags_csv("tags.csv", values)
    return [Path("tags.csv").read_bytes().decode(), load_hparams_from_tags_csv("tags.csv")]


def spike(losses: list[float], **arguments: Any) -> Any:
    """The batch at which the loop ends, and what is written for the next run."""
    fabric = Fabric(accelerator="cpu", callbacks=[SpikeDetection(exclude_batches_path="bad/list.json", **arguments)])
    for batch_idx, loss in enumerate(losses):
        try:
            fabric.call("on_train_batch_end", fabric, torch.tensor(loss), None, batch_idx)
        except TrainingSpikeException:
            return [batch_idx, json.loads(Path("bad/list.json").read_text())]
    return None


def demos() -> list[Any]:
    """What the demonstrations' models answer and learn, and the words of a text."""
    Path("data").mkdir(exist_ok=True)
    Path("data/wikitext-2.txt").write_text("a b c d\n" * 40 + "e f\n")
    WikiText2.download = staticmethod(lambda destination: None)  # it is there, and takes no package to fetch it
    text = WikiText2(block_size=5)
    inputs, target = (torch.stack(parts) for parts in zip(text[0], text[1], strict=True))
    found: list[Any] = [inputs.tolist(), target.tolist(), len(text), text.vocab_size, text.dictionary.idx2word]
    torch.manual_seed(1)
    transformer, lstm = Transformer(7, 4, 2, 4), SimpleLSTM(7, 4, 4, 2)
    found += [transformer(inputs, target).tolist(), lstm(inputs, lstm.init_hidden(2))[0].tolist()]
    found += [[*transformer.state_dict()], [*lstm.state_dict()], list(SequenceSampler(range(11), 3))]
    loader = DataLoader(text, batch_sampler=SequenceSampler(text, batch_size=4))
    for model in (LightningTransformer(7), LightningLSTM(7)):
        trainer = Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, loader)
        found.append(float(sum(weight.double().sum() for weight in model.state_dict().values())))
    return found


def shared_out(cls: Any, dataset: Any, **arguments: Any) -> list[Any]:
    return [list(cls(dataset, num_replicas=3, rank=rank, **arguments)) for rank in range(3)]


def compiled() -> list[Any]:
    wrapped = torch.compile(BoringModel(), backend="eager")
    module = from_compiled(wrapped)
    found = [type(module).__name__, to_uncompiled(module) is module, to_uncompiled(wrapped) is module]
    for turn in (to_uncompiled, from_compiled):
        try:
            turn(module)
        except ValueError:
            found.append("value")
    return found


def outcome(fn: Any) -> Any:
    """What ``fn`` returns, or the kind of error it raises."""
    try:
        return fn()
    except (MisconfigurationException, ValueError, AttributeError) as error:
        known = {"misconfigured": MisconfigurationException, "attribute": AttributeError, "value": ValueError}
        return next(name for name, kind in known.items() if isinstance(error, kind))


def set_and_get(model: Any) -> Any:
    lightning_setattr(model, "learning_rate", 0.5)
    return lightning_getattr(model, "learning_rate")


def updated(hparams: dict[str, Any], updates: dict[str, Any]) -> dict[str, Any]:
    update_hparams(hparams, updates)
    return hparams


def main() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    summary = ModelSummary(BoringModel())
    dicts: list[dict[str, Any]] = [{"a": 1, "d": {"x": 2, "y": 3}}, {"a": 2, "b": 3, "d": {"x": 3}}]
    params = {"a": {"b": 1, "c": {"d": 2}}, "e": [1], "f": Namespace(g=1), 5: 6}
    tied = set_shared_parameters(Tied(), [["a.weight", "b.weight"]])
    answers = {
        "grad_norm": outcome(lambda: {k: float(v) for k, v in grad_norm(layer, 2).items()}),
        "grad_norm inf": outcome(lambda: list(grad_norm(layer, "inf", "-"))),
        "grad_norm bad": outcome(lambda: grad_norm(layer, -1)),
        "shared": [find_shared_parameters(Tied()), tied.a.weight is tied.b.weight],
        "workers": [outcome(lambda n=n: suggested_max_num_workers(n)) for n in (0, 1, 2)],
        "flops": measure_flops(layer, lambda: layer(torch.ones(3, 2)), torch.sum),
        "size": [outcome(lambda b=b: extract_batch_size(b)) for b in (torch.ones(3, 2), {"a": torch.tensor(1)}, "x")],
        "lengths": [sized_len([1]), sized_len(iter([])), has_iterable_dataset(DataLoader(RandomIterableDataset(2, 2)))],
        "scalars": convert_tensors_to_scalars({"a": torch.tensor(1.5), "b": [torch.tensor(2)]}),
        "tensors": {k: str(v.dtype) for k, v in convert_to_tensors({"a": 1, "b": 2.5, "c": True}, "cpu").items()},
        "overridden": [is_overridden(name, BoringModel()) for name in ("training_step", "on_fit_start", "nothing")],
        "overridden bad": outcome(lambda: is_overridden("nothing", object())),
        "hooks": [
            is_param_in_hook_signature(Given.hook, "batch"),
            is_param_in_hook_signature(Given(1).hook, "self"),
            is_param_in_hook_signature(Given.starred, "batch", explicit=True),
            is_param_in_hook_signature(Given.hook, "other", min_args=2),
            is_param_in_hook_signature(Given.hook, "other", min_args=3),
        ],
        "arguments": [Given(1, 5, b=3, c=4).found, parse_class_init_keys(Given)],
        "attributes": [lightning_hasattr(DemoModel(), "learning_rate"), set_and_get(DemoModel())],
        "no attribute": outcome(lambda: lightning_getattr(DemoModel(), "nothing")),
        "pickle": [is_picklable(1), is_picklable(lambda: 1)],
        "memory": [is_oom_error(RuntimeError(text)) for text in ("CUDA out of memory", "shapes")],
        "clip": [*GradClipAlgorithmType.supported_types(), GradClipAlgorithmType("norm") == "NORM"],
        "rank": [_get_rank(), rank_zero_only.rank, rank_zero_only(lambda: 3)(), rank_prefixed_message("m", 1)],
        "merged": merge_dicts(dicts, {"a": min, "d": {"x": sum}}),
        "params": [_convert_params(None), _convert_params(Namespace(a=1)), _flatten_dict(params)],
        "callables": _sanitize_callable_params({"a": lambda: 3, "b": nn.Linear, "c": 4}),
        "plain": _sanitize_params({"a": 1, "b": [1], "c": None, "d": True}),
        "prefixed": [_add_prefix({"a": 1}, "p", "/"), _add_prefix({"a": 1}, "", "/")],
        "summary": [summary.layer_names, summary.layer_types, summary.param_nums, summary.total_parameters],
        "modes": [summary.training_modes, summary.total_training_modes, summary.in_sizes, summary.total_flops],
        "shapes": [parse_batch_shape(torch.ones(1, 2)), parse_batch_shape([torch.ones(1), "x"]), parse_batch_shape(3)],
        "update": updated({"a": {"b": 1}}, {"a": {"c": 2}, "d": 1}),
        "literals": [convert(text) for text in ("1", "1.5", "True", "[1]", "a b", "./x", "")],
        "tags": tags({"lr": 0.1, "name": 'a "b", c', "flags": [1, True], "nothing": None}),
        "collected": [Collected().found, CollectedToo(3, c=4).found],
        "bars": [convert_inf(number) for number in (3, 2.5, None, float("inf"), float("nan"))],
        "port": find_free_network_port() > 0,
        "closure": do_nothing_closure(),  # type: ignore[func-returns-value]
        "shared files": is_shared_filesystem(Fabric(accelerator="cpu").strategy),
        "all ranks": [
            has_len_all_ranks(loader, Trainer(accelerator="cpu", logger=False).strategy)
            for loader in ([1], [], iter([]))
        ],
        "spikes": [
            spike(losses, **arguments)
            for losses, arguments in (
                ([1.0, 1.1, 5.0], {}),
                ([1.0, 1.1, 2.5], {}),
                ([1.0, 1.1, 2.5], {"rtol": 0.5}),
                ([1.0, 9.0, 9.0], {"warmup": 2}),
                ([1.0, 1.0, float("nan")], {}),
                ([5.0, 5.0, 5.0, 0.1], {"mode": "max", "rtol": 0.5}),
                ([1.0, 9.0], {"rtol": None, "atol": 10.0}),
                ([9.0, 1.0, 1.0, 4.5], {"window": 2}),
                ([9.0, 1.0, 1.0, 4.5], {"window": 3}),
            )
        ],
        "demos": demos(),
        "shared out": [
            shared_out(UnrepeatedDistributedSampler, range(7), shuffle=False),
            shared_out(UnrepeatedDistributedSampler, range(7), seed=3),
            shared_out(UnrepeatedDistributedSamplerWrapper, SequentialSampler(range(7)), shuffle=False),
        ],
        "compiled": compiled(),
        "data": [len(RandomDataset(3, 5)), list(RandomDataset(3, 5)[0].shape)],
    }
    print(json.dumps(answers, indent=1, default=str))


if __name__ == "__main__":
    main()
