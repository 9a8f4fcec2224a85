"""Random programs with frozen, shared and unused parameters train under each strategy as they do in one process.

They also draw an average of the weights, and parameters that freeze and thaw inside of epochs and windows.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, WeightedLoss
from drivetrain.callbacks import EMAWeightAveraging
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.strategies import (
    DDP2Strategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    PipelineStrategy,
    Strategy,
    context_parallel,
)

pytestmark = pytest.mark.timeout(3600)  # the long form takes minutes

PARTS, BATCH, LENGTH, WIDTH = 4, 8, 4, 4


class Part(nn.Module):
    """Layers around which a sum goes; ``again`` and ``back`` may have one weight, ``spare`` may be out of use."""

    def __init__(self, attends: bool, shares: bool, spare: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.again, self.back, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if shares:
            self.back.weight = self.again.weight
        self.attends, self.uses, self.batch_idx = attends, spare, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.attends:
            q = x.unflatten(-1, (2, -1)).transpose(1, 2)
            x = x + context_parallel.attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.second(torch.tanh(self.first(x)))
        x = x + self.back(torch.tanh(self.again(x)))
        if self.uses == "always" or (self.uses == "sometimes" and self.batch_idx % 3 == 1):
            return x + self.spare(x)  # type: ignore[no-any-return]
        if self.uses == "by sample" and (large := x[:, 0, 0] > 1.2).any():
            return x.masked_scatter(large[:, None, None], x[large] + self.spare(x[large]))
        return x


class Net(LightningModule):
    """Made of a drawn program; a pipeline calls its parts instead of ``training_step``."""

    tp_plan: ClassVar[Any] = {"parts.*.first": "colwise", "parts.*.second": "rowwise"}
    sequence_dims: ClassVar[Any] = {0: 1, 1: 1, 2: 1}

    def __init__(self, drawn: Mapping[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.drawn = drawn
        self.parts = nn.ModuleList(Part(*each) for each in drawn["parts"])
        self.all_names = [name for name, _ in self.named_parameters()]
        self.freeze("frozen")

    def freeze(self, which: str) -> None:
        self.train_parameters(self.drawn[which], which == "thawed")

    def train_parameters(self, numbers: Sequence[int], trained: bool) -> None:
        named = dict(self.named_parameters())
        for number in numbers:
            named[self.all_names[number % len(self.all_names)]].requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.clone()

    def loss(self, output: Tensor, y: Tensor, tokens: Tensor) -> Any:
        if not self.drawn["weighted"]:
            return F.mse_loss(output, y)
        each = F.mse_loss(output, y, reduction="none").mean(-1)
        return WeightedLoss((each * tokens).sum() / tokens.sum(), int(tokens.sum()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        return self.loss(self(x), y, tokens)

    def configure_pipeline(self, num_stages: int) -> Any:
        size = PARTS // num_stages
        return [nn.Sequential(*self.parts[first : first + size]) for first in range(0, PARTS, size)], self.loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.freeze("frozen later")
            self.freeze("thawed")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for part in self.parts:
            part.batch_idx = batch_idx
        for trained, numbers in self.drawn["changes"].get((self.current_epoch, batch_idx), ()):
            self.train_parameters(numbers, trained)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.drawn["logs"]:
            self.log("loss", outputs["loss"], sync_dist=True, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        groups: list[dict[str, Any]] = [{"params": [], **each} for each in self.drawn["groups"]]
        for number, name in enumerate(self.all_names):
            groups[(number * 7 + self.drawn["turn"]) % len(groups)]["params"].append(named[name])
        kind, arguments = self.drawn["optimizer"]
        optimizer = getattr(torch.optim, kind)(groups, **arguments)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.8, "nesterov": True}), ("SGD", {}), ("AdamW", {}),
    ("Adam", {"amsgrad": True}), ("RMSprop", {"momentum": 0.5}), ("Adagrad", {}),
]  # fmt: skip


def draw(seed: int, name: str) -> dict[str, Any]:
    """A program for a strategy, as plain data."""
    rng, more, by_sample = random.Random(seed), random.Random(-seed), name in BY_SAMPLE
    uses = ["always", "never", "sometimes", *(["by sample"] if by_sample else [])]
    parts = [(rng.random() < 0.4, rng.random() < 0.5, rng.choice(uses)) for _ in range(PARTS)]
    some = [*range(10 * PARTS)]
    frozen = rng.sample(some, rng.choice([0, 3, 12]))
    if rng.random() < 0.4:  # complete parts
        per = len(some) // PARTS
        frozen += [each for part in rng.sample(range(PARTS), rng.choice([1, 2])) for each in some[part * per :][:per]]
    clip = rng.choice([{}, {"gradient_clip_val": 0.05}, {
        "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}])  # fmt: skip
    changes = {
        (more.randrange(2), more.randrange(5)): [(False, more.sample(some, 4)), (True, more.sample(some, 4))]
        for _ in range(more.choice([0, 1, 2]))
    }
    drawn: dict[str, Any] = {
        "parts": parts, "frozen": frozen, "turn": rng.randrange(7), "logs": rng.random() < 0.5,
        "frozen later": rng.sample(some, rng.choice([0, 0, 5])),
        "thawed": rng.sample(frozen, min(len(frozen), rng.choice([0, 0, 3]))),
        "weighted": rng.random() < 0.5, "count": rng.choice([40, 48]),
        "optimizer": rng.choice(OPTIMIZERS),
        "groups": [{"lr": 0.003 * (1 + number), "weight_decay": rng.choice([0.0, 0.1])}
                   for number in range(rng.choice([1, 2, 3]))],
        "arguments": {"accumulate_grad_batches": rng.choice([1, 1, 2, 3]), **clip},
        "averages": more.random() < 0.4, "changes": {} if "pipeline" in name else changes,
    }  # fmt: skip
    if "split" in name:
        drawn["weighted"] = False  # refused
    if name == "model averaging":  # after each step that is the same for what is linear in the gradients
        arguments = {"accumulate_grad_batches": drawn["arguments"]["accumulate_grad_batches"]}
        groups = [{**each, "lr": each["lr"] / 50} for each in drawn["groups"]]  # nothing clips
        drawn.update(optimizer=OPTIMIZERS[seed % 3], arguments=arguments, averages=False, groups=groups)
    return drawn


def _pipeline(schedule: str, size: int) -> Callable[[], Strategy]:
    return lambda: PipelineStrategy(schedule, num_microbatches=2, pipeline_parallel_size=size)  # type: ignore[arg-type]


def _mesh(**sizes: Any) -> Callable[[], Strategy]:
    return lambda: ModelParallelStrategy(**{"data_parallel_size": 1, **sizes}, save_distributed_checkpoint=False)


def _model_averaging() -> Strategy:
    """Each rank trains by itself, and parameters are averaged after each step."""
    state = post_localSGD_hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    return DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, model_averaging_period=1,
        find_unused_parameters=True,
    )  # fmt: skip


STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], int, dict[str, Any]]] = {
    "dp": (lambda: "dp", 1, {"devices": 2}),
    "ddp": (lambda: "ddp_find_unused_parameters_true", 2, {}),
    "horovod": (lambda: "horovod", 2, {}),
    "ddp2": (lambda: DDP2Strategy(find_unused_parameters=True), 2, {"devices": 2, "num_nodes": 2}),
    "ddp, split": (lambda: "ddp", 2, {"split_on_oom": True}),
    "model averaging": (_model_averaging, 2, {}),
    "fsdp": (lambda: "fsdp", 2, {}),
    "fsdp by window": (lambda: FSDPStrategy(gradient_exchange="window"), 2, {}),
    "fsdp, split": (lambda: "fsdp", 2, {"split_on_oom": True}),
    "tp": (_mesh(tensor_parallel_size=2), 2, {}),
    "cp": (_mesh(context_parallel_size=2, tensor_parallel_size=1), 2, {}),
    "pipeline": (_pipeline("1f1b", 2), 2, {}),
    "pipeline, interleaved": (_pipeline("interleaved_1f1b", 2), 2, {}),
    "pipeline of four": (_pipeline("1f1b", 4), 4, {}),
    "two pipelines": (_pipeline("gpipe", 2), 4, {}),
    "tp and fsdp": (_mesh(data_parallel_size=2, tensor_parallel_size=2), 4, {}),
    "tp and fsdp by window": (_mesh(data_parallel_size=2, tensor_parallel_size=2, gradient_exchange="window"), 4, {}),
}
BY_SAMPLE = ("dp", "ddp", "horovod", "ddp2")  # where ranks may disagree about what is unused


def train(drawn: Mapping[str, Any], name: str, path: Path) -> None:
    """Train a program and save its end."""
    make, processes, more = STRATEGIES[name] if name else (lambda: "auto", 1, {})
    if "num_nodes" in more:  # this process of the pool is the only one of a machine of its own
        os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"
    trainer = Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu", precision="64-true", max_epochs=2, split_batches=processes > 1,
        **{"strategy": make(), "devices": processes, **drawn["arguments"], **more},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(drawn["count"], LENGTH, WIDTH, generator=generator) for _ in range(2))
    tokens = torch.randint(1, 9, (drawn["count"], LENGTH), generator=generator)
    if drawn["averages"]:
        trainer.callbacks.append(EMAWeightAveraging(decay=0.7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that are frozen, and others that train
        trainer.fit(Net(drawn), DataLoader(TensorDataset(x, y, tokens), batch_size=BATCH))
    trainer.save_checkpoint(path)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(each, f"{path}/{key}")
    else:
        yield path, value


WEIGHTS = ("state_dict", "averaged_state_dict", "global_step")


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], kept: Sequence[str] = (*WEIGHTS, "optimizer_states")
) -> list[str]:
    """What two checkpoints differ in: weights, their average, states and groups of the optimizer."""
    found = []
    mine, expected = (dict(_flat({key: file.get(key) for key in kept})) for file in (one, other))
    found += [f"{key}: only in one" for key in sorted(mine.keys() ^ expected.keys())]
    for key in mine.keys() & expected.keys():
        left, right = (torch.as_tensor(each[key]) if each[key] is not None else None for each in (mine, expected))
        if (left is None) is not (right is None):
            found.append(f"{key}: {left}, and {right} is right")
        elif left is not None and not torch.allclose(left.double(), right.double(), rtol=1e-9, atol=1e-9):
            found.append(f"{key}: {(left.double() - right.double()).abs().max():.1e} apart")
    return found


def train_all(name: str, seeds: Sequence[int], folder: Path) -> None:
    """Train the programs of these seeds."""
    for seed in seeds:
        drawn = draw(seed, name)
        try:
            train(drawn, name, folder / f"{seed}.ckpt")
        except Exception as error:
            error.add_note(f"program {seed} of {name}: {drawn}")
            raise


LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
PROGRAMS = 40  # of each strategy
TOGETHER = 5  # programs in one job


@pytest.mark.skipif(not LONG, reason="takes minutes; make test-faults runs it")
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_random_programs_train_as_in_one_process(pool: Any, name: str, seed: int, tmp_path: Path) -> None:
    processes, compared = STRATEGIES[name][1], 0
    last = seed + PROGRAMS
    for first in range(seed, last, TOGETHER):
        seeds = range(first, min(last, first + TOGETHER))
        if processes == 1:
            train_all(name, seeds, tmp_path)
        else:
            pool.run(train_all, name, seeds, tmp_path, world_size=processes, group=False, timeout=300)
        for each in seeds:
            drawn = draw(each, name)
            train(drawn, "", tmp_path / "alone.ckpt")
            files = [TorchCheckpointIO().load_checkpoint(tmp_path / f"{file}.ckpt") for file in (each, "alone")]
            if not all(weight.abs().max() < 1e3 for weight in files[1]["state_dict"].values() if weight.numel()):
                continue  # training diverges, which amplifies differences of rounding without bound
            compared += 1
            # a rank that trains by itself has momentum of its own
            found = differences(*files, *([WEIGHTS] if name == "model averaging" else []))
            assert not found, f"program {each} of {name} differs: {found[:5]}\n{drawn}"
    assert compared > PROGRAMS / 2
