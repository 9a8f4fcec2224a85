"""Check that all ranks of a job have the same arguments and the same model. The ranks first exchange digests. If the
digests differ, the ranks exchange the complete values.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.base import VERSION
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.torch_private import names_ignored_by_ddp
from drivetrain.errors import ConfigurationError, shown
from drivetrain.strategies.group import Group, TorchGroup
from drivetrain.strategies.peers import COMPARISON, owners_of, peers_of, some
from drivetrain.strategies.strategy import Strategy

_MOST = 8  # the number of differences that a message shows
_MISSING = "none"
METHOD = "the method called"  # a key of ``Facts.job``; the value is the Trainer's method, such as "fit"
# For these types, the ``repr`` of an option is compared. The ``repr`` of other objects may contain a memory address.
_OWN_VALUES = (bool, int, float, str, type(None))


@dataclass
class Facts:
    """Texts about the arguments and the model of one rank. The ranks compare these texts.

    Attributes:
        job: texts that must be equal on all ranks.
        model: texts that must be equal on all ranks that have the same part of the model.
        seed: the seed of ``seed_everything``; different ranks may have different seeds.
        loggers: the loggers; different ranks may have different loggers.
        changes: whether this rank's model may still change before training. If the model of any rank may still change,
            models are not compared.
    """

    job: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    seed: str = ""
    loggers: str = ""
    changes: bool = False


@dataclass(frozen=True)
class Agreement:
    """The result of the exchange, equal on all ranks.

    Attributes:
        changes: whether the model of at least one rank may still change. If so, the models were not compared.
        loggers: whether all ranks have the same loggers.
    """

    changes: bool = False
    loggers: bool = True


def compare(world: Group, data: Group, facts: Facts) -> Agreement:
    """Compare the arguments and models of the ranks. Every rank must call this function.

    Each rank sends one text of fixed size with digests. If digests differ, the ranks exchange the values. Different
    seeds cause only a warning. Rank 0 decides the initial parameters and the order of the samples, whatever the seeds
    are. Different seeds can be useful, because each rank then augments samples differently.

    Args:
        world: all ranks.
        data: the ranks that have the same part of the model as this rank.
        facts: the facts of this rank.

    Raises:
        ConfigurationError: arguments or models differ between ranks. Every rank raises this error, and the message
            shows each rank's value.
    """
    if world.size == 1:
        return Agreement(facts.changes)
    own = [
        facts.job.get(METHOD, "compare_models").replace(" ", "_"),  # no spaces: error messages show only the first word
        _digest(facts.job), str(data.ranks[0]), _digest(facts.model), _digest({"seed": facts.seed})[:8],
        _digest({"loggers": facts.loggers})[:8], str(int(facts.changes)),
    ]  # fmt: skip
    rows = [text.split() for text in _gathered(world, " ".join(own))]
    _, jobs, parts, models, seeds, loggers, changes = zip(*rows, strict=True)
    final = "1" not in changes  # if a model may still change, the models are compared later
    same = len(set(jobs)) == 1 and not (final and len(set(zip(parts, models, strict=True))) > len(set(parts)))
    if not same or len(set(seeds)) > 1:
        everyones: list[Facts] = world.gather_objects(facts)
        if not same:
            raise ConfigurationError(_differing(everyones, parts if final else [], world.ranks))
        each = _each([theirs.seed for theirs in everyones], world.ranks)
        rank_zero_warn(
            f"The ranks have different seeds: {each}. DDP takes the parameters and the order of the data from rank 0, "
            "but what your code draws itself differs, for example a random split of a dataset. Write the same "
            "seed_everything(...) on every rank unless you want that."
        )
    return Agreement(not final, len(set(loggers)) == 1)


def _digest(texts: Mapping[str, str]) -> str:
    """Return a digest of ``texts``. The digest depends on the order of the texts, because DDP matches parameters by
    order.
    """
    return hashlib.sha256(repr(list(texts.items())).encode()).hexdigest()[:16]


def _gathered(world: Group, text: str) -> list[str]:
    if not isinstance(world, TorchGroup):
        return world.gather_objects(text)
    peers = peers_of(COMPARISON, world.handle, world.device)
    assert peers is not None  # peers_of returns None only if the group has one rank
    rows, _ = peers.meet(text)
    if any(row.call != COMPARISON for row in rows):
        peers.check(rows)  # always raises: some ranks call a different operation
    return [row.text.removeprefix(f"{COMPARISON}(").removesuffix(")") for row in rows]


def _differing(everyones: Sequence[Facts], parts: Sequence[str], ranks: Sequence[int]) -> str:
    found = _differences([facts.job for facts in everyones], ranks)
    for part in dict.fromkeys(parts):
        members = [index for index, other in enumerate(parts) if other == part]
        found += _differences([everyones[index].model for index in members], [ranks[index] for index in members])
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return (
        f"The ranks of this job differ. {'; '.join(found[:_MOST])}{more}. Give every rank the same, outside of "
        "conditions that differ between ranks."
    )


def _differences(each: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    names = dict.fromkeys(name for texts in each for name in texts)
    missing = {name for name in names if any(name not in texts for texts in each)}
    found = [
        f"{name}: {_each([_cut(texts.get(name, _MISSING)) for texts in each], ranks)}"
        for name in names
        if len({texts.get(name) for texts in each}) > 1 and name.partition(" of ")[2].partition(",")[0] not in missing
    ]
    orders = [list(texts) for texts in each]
    if not found and any(order != orders[0] for order in orders):
        first = next(index for index in range(len(names)) if len({order[index] for order in orders}) > 1)
        found.append(f"entry {first} of the same list: {_each([order[first] for order in orders], ranks)}")
    return found


def _each(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return each different text once, with the ranks that have the text, such as "rank 0 has 1.0, ranks 1, 2 have
    None".
    """
    return ", ".join(
        f"rank {whose[0]} has {text}" if len(whose) == 1 else f"ranks {some(whose)} have {text}"
        for text, whose in owners_of(texts, ranks).items()
    )


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- the facts to compare --------------------------------------------------------------------------------------------


def of_program(strategy: Strategy) -> dict[str, str]:
    """Return the versions of packages, and the options that affect every run with ``strategy``."""
    return {
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the version of torch": str(torch.__version__),
        "the version of drivetrain": VERSION,
        "accelerator": type(strategy.accelerator).__name__,
        "precision": f"{strategy.precision_plugin.name!r} ({type(strategy.precision_plugin).__name__})",
        "the checkpoint store": type(strategy.checkpoint_io).__name__,
        "the layer sync": "None" if strategy.layer_sync is None else type(strategy.layer_sync).__name__,
        **{name: text_of(value) for name, value in strategy.agreed_options().items()},
    }


def of_module(module: nn.Module) -> dict[str, str]:
    """Return the model's class, and the dtype and shape of each parameter and buffer. Parameters and buffers that DDP
    ignores are left out.
    """
    ignored = names_ignored_by_ddp(module)
    texts = {"the class of the model": f"{type(module).__module__}.{type(module).__qualname__}"}
    for name, tensor in module.named_parameters():
        frozen = "" if tensor.requires_grad else ", frozen"
        texts[f"parameter {name}"] = f"{_kind(tensor)}{frozen}"
    for name, tensor in module.named_buffers():  # type: ignore[assignment]
        texts[f"buffer {name}"] = _kind(tensor)
    return {name: text for name, text in texts.items() if name.partition(" ")[2] not in ignored}


def of_optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[Any] = ()) -> dict[str, str]:
    """Return the classes and options of optimizers and schedulers. The parameters are left out, because an optimizer
    may divide its parameters among the ranks.
    """
    texts = {"the number of optimizers": str(len(optimizers)), "the number of schedulers": str(len(schedulers))}
    for index, optimizer in enumerate(optimizers):
        texts[f"optimizer {index}"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    texts[f"{name} of optimizer {index}, group {number}"] = text_of(value)
    for index, config in enumerate(schedulers):
        scheduler = getattr(config, "scheduler", config)
        parts = [type(scheduler).__name__]
        parts += [f"{name}={getattr(config, name, None)!r}" for name in ("interval", "frequency", "monitor")]
        texts[f"scheduler {index}"] = " ".join(parts)
    return texts


def seed() -> str:
    """Return the seed of ``seed_everything`` in this process."""
    return os.environ.get("PL_GLOBAL_SEED", "none")


def text_of(value: Any) -> str:
    """Return a text for ``value`` that can be compared between ranks: for example the ``repr`` of a number, the name of
    a function or class, or the class of any other object.
    """
    if isinstance(value, _OWN_VALUES):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {text_of(item)}' for name, item in value.items())}}}"
    if isinstance(value, (torch.dtype, torch.Size)) or type(value).__module__ in ("datetime", "pathlib", "enum"):
        return shown(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__qualname__


def _kind(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "without a shape so far"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
