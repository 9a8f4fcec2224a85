"""Cures are changes that can make a fit faster. This file finds the cures for a program, says what to write for each
one, and applies a cure in a trial.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    TensorDataset,
    default_collate,
)

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.digest import digest, leaves
from drivetrain.callback import Trainer
from drivetrain.data.batched import reason_for_samples
from drivetrain.data.resample import draws_samples, replaced
from drivetrain.loops import kernels
from drivetrain.strategies.fsdp_blocks import find_blocks
from drivetrain.trials import NAMES

_WORKERS = (0, 1, 2, 4)
_COMPARED = 4  # how many samples to fetch twice and compare
_MOST_MEMORY = 0.5  # the part of the free memory that a data set of tensors may use
_IN_USE = "it is in use already"


@dataclasses.dataclass
class Cure:
    """One change of a program.

    Attributes:
        name: one of :data:`~drivetrain.trials.NAMES`. If several values are tried, the name includes the value:
            ``num_workers=4``.
        write: what to write in the program.
        loader: attributes of the training loader that the cure changes.
        settings: arguments of the Trainer that the cure changes.
        factor: multiplies the batch size, and divides the number of batches per optimizer step.
        holds: whether the cure keeps the data set in memory as tensors.
        why_not: why the cure is not tried; "" if it is.
        note: what the cure costs, and what else it changes.
    """

    name: str
    write: str = ""
    loader: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    factor: int = 1
    holds: bool = False
    why_not: str = ""
    note: str = ""


def cures_of(trainer: Trainer, given: Any, batches: int) -> list[Cure]:
    """Return all cures for the running fit.

    Args:
        trainer: the Trainer, in its fit.
        given: the training data that the program passes.
        batches: the number of batches in a trial.
    """
    if isinstance(given, DataLoader) and draws_samples(given):
        counts = [count for count in _WORKERS if count != given.num_workers]
        found = [Cure(f"num_workers={n}", f"DataLoader(..., num_workers={n})", _with_workers(given, n)) for n in counts]
        found += [_tensors(given), _pinned(trainer, given), _persistent(trainer, given, batches)]
        found += _larger(trainer, given)
    else:
        why = f"a trial changes a DataLoader with a map-style dataset, and the training data is {_described(given)}"
        found = [Cure(name, why_not=why) for name in NAMES[:5]]
    return [*found, _compiled(trainer), _kernels(trainer)]


def _described(given: Any) -> str:
    if isinstance(given, DataLoader):
        own = "an __iter__ of its own" if type(given).__iter__ is not DataLoader.__iter__ else "an iterable-style one"
        return f"a {type(given).__name__} with {own}"
    return f"a {type(given).__name__}"


def _with_workers(loader: DataLoader[Any], count: int) -> dict[str, Any]:
    if not count:
        return {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    return {"num_workers": count, "prefetch_factor": loader.prefetch_factor or 2}


def _tensors(loader: DataLoader[Any]) -> Cure:
    name, dataset = "tensors", loader.dataset
    if (reason := reason_for_samples(loader)) is None:
        return Cure(name, why_not="batches are fetched as a whole already")
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(loader) is not DataLoader or loader.collate_fn is not default_collate:
        return Cure(name, why_not=f"batches cannot be fetched as a whole, because {reason}")
    if type(loader.batch_sampler) is not BatchSampler or type(sampler) not in (RandomSampler, SequentialSampler):
        return Cure(name, why_not="the samples are drawn by a sampler or a batch sampler that is not torch's own")
    indices = range(min(_COMPARED, len(dataset)))  # type: ignore[arg-type]  # in the stubs a Dataset has no length
    try:
        held, again = (default_collate([dataset[index] for index in indices]) for _ in range(2))
        _as_dataset(held)
    except (TypeError, ValueError, RuntimeError) as error:
        return Cure(name, why_not=f"the samples are not tensors of equal shapes: {str(error).splitlines()[0]}")
    if digest(leaves(held)) != digest(leaves(again)):
        return Cure(name, why_not="a sample is different each time that it is fetched")
    size = sum(each.nbytes for each in leaves(held)) * len(dataset) / len(indices)  # type: ignore[arg-type]  # the same
    if size > _MOST_MEMORY * psutil.virtual_memory().available:
        return Cure(name, why_not=f"all samples together take {size / 2**30:.1f} GB, too much for the memory")
    kind = {Tensor: "", dict: "StackDataset(**"}.get(type(held), "TensorDataset(*")
    held_text = f"{kind}default_collate([dataset[i] for i in range(len(dataset))]){')' if kind else ''}"
    note = f"All samples are fetched once at the start and take {size / 2**20:.0f} MB; later changes are not seen."
    return Cure(name, f"DataLoader({held_text}, num_workers=0, ...)", _with_workers(loader, 0), holds=True, note=note)


def _as_dataset(held: Any) -> Any:
    """Return a dataset, for example a ``TensorDataset``, for the tensors in a result of ``default_collate``.

    Raises:
        TypeError: the result does not consist of tensors.
    """
    if isinstance(held, Tensor):
        return held
    parts = held.values() if type(held) is dict else held
    if type(held) not in (dict, list, tuple) or not all(isinstance(each, Tensor) for each in parts):
        raise TypeError(f"a sample is a {type(held).__name__} of other things than tensors")
    return StackDataset(**held) if isinstance(held, dict) else TensorDataset(*held)


def _pinned(trainer: Trainer, loader: DataLoader[Any]) -> Cure:
    name, kind = "pin_memory", trainer.accelerator
    if not kind.supports_pinned_memory:
        return Cure(name, why_not=f"it has no effect on copies to {trainer.strategy.root_device.type}")
    if loader.pin_memory or (loader.num_workers == 0 and reason_for_samples(loader) is None):
        return Cure(name, why_not=_IN_USE)
    return Cure(name, "DataLoader(..., pin_memory=True)", {"pin_memory": True})


def _persistent(trainer: Trainer, loader: DataLoader[Any], batches: int) -> Cure:
    name, length = "persistent_workers", trainer.num_training_batches
    if not loader.num_workers:
        return Cure(name, why_not="the training loader has no workers")
    if loader.persistent_workers:
        return Cure(name, why_not=_IN_USE)
    if length >= batches:
        return Cure(
            name, why_not=f"workers start once in an epoch, which has {length} batches, and a trial has {batches}"
        )
    note = "Workers keep their copy of the dataset and their random generators from epoch to epoch."
    return Cure(name, "DataLoader(..., persistent_workers=True)", {"persistent_workers": True}, note=note)


def _larger(trainer: Trainer, loader: DataLoader[Any]) -> Iterator[Cure]:
    name, window, size = "batch_size", trainer.limits.accumulate, loader.batch_size
    if window == 1:
        yield Cure(name, why_not="accumulate_grad_batches is 1, so a larger batch would be another training")
    elif window != trainer.settings.accumulate_grad_batches:
        yield Cure(name, why_not="a callback chooses accumulate_grad_batches")
    elif type(loader.batch_sampler) is not BatchSampler or size is None:
        yield Cure(name, why_not="the loader has a batch sampler that is not torch's own")
    else:
        for factor in sorted({window, *([2] if window % 2 == 0 else [])}):
            text = f"DataLoader(..., batch_size={size * factor}), Trainer(accumulate_grad_batches={window // factor})"
            note = "Each optimizer step sees as many samples as before; batch norm sees larger batches."
            yield Cure(f"{name}={size * factor}", text, factor=factor, note=note)


def _compiled(trainer: Trainer) -> Cure:
    name, strategy, model = "compile", trainer.strategy, trainer.lightning_module
    if trainer.settings.compile:
        return Cure(name, why_not=_IN_USE)
    if why := strategy.facts.refuses.get("compile"):
        return Cure(name, why_not=f"it does not work with {type(strategy).__name__}: {why}")
    if not [each for each in find_blocks(model) if each is not model]:
        return Cure(name, why_not=f"{type(model).__name__} has no repeated layers that could be compiled as blocks")
    note = "Results are equal up to rounding. The first steps, in which torch compiles, are not in the ratio."
    return Cure(name, 'Trainer(compile="blocks")', settings={"compile": "blocks"}, note=note)


def _kernels(trainer: Trainer) -> Cure:
    name, now, optimizers = "optimizer_kernels", trainer.settings.optimizer_kernels, trainer.strategy.optimizers
    if trainer.strategy.root_device != HOST:
        return Cure(name, why_not=f"on {trainer.strategy.root_device.type}, torch chooses foreach itself")
    levels: tuple[Any, ...] = (None, "equal", "fastest")
    chosen = {each: _choice(optimizers, each) for each in levels}
    for value in levels[levels.index(now) + 1 :]:
        if chosen[value] != chosen[now] and any(chosen[value]):
            note = "" if value == "equal" else "Results are equal up to rounding."
            return Cure(name, f'Trainer(optimizer_kernels="{value}")', settings={"optimizer_kernels": value}, note=note)
    used = ", ".join(sorted({each for group in chosen[now] for each in group}))
    return Cure(name, why_not=f"{used} is in use already" if used else "there is none for these optimizers")


def _choice(optimizers: Any, wanted: str | None) -> list[list[str]]:
    return [[each.name for each in kernels.choose(optimizer, wanted)] for optimizer in optimizers]


# ---- in a trial ------------------------------------------------------------------------------------------------------


def changed(loader: Any, cure: Mapping[str, Any], batches: int) -> Any:
    """Return a copy of the training loader with the changes of a cure.

    Args:
        loader: the training loader, for which :func:`cures_of` has returned the cure.
        cure: the attributes of the :class:`Cure`, by name.
        batches: the number of batches, of the original size, in a trial.
    """
    changes = dict(cure["loader"])
    if (factor := cure["factor"]) > 1:
        size = loader.batch_size * factor
        sampler = BatchSampler(loader.sampler, size, loader.drop_last)
        changes.update(batch_size=size, batch_sampler=sampler)
    if cure["holds"]:
        count = min(len(loader.dataset), batches * loader.batch_size)
        held = _as_dataset(default_collate([loader.dataset[index] for index in range(count)]))
        draws = RandomSampler(held) if type(loader.sampler) is RandomSampler else SequentialSampler(held)
        drawn = BatchSampler(draws, loader.batch_size, loader.drop_last)
        changes.update(dataset=held, sampler=draws, batch_sampler=drawn)
    return replaced(loader, **changes) if changes else loader
