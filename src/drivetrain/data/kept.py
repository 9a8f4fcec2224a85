"""What a loader keeps from pass to pass: generators of the user's own, and workers that persist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.base.seed import isolate_rng
from drivetrain.data.combined import CombinedLoader


@contextmanager
def generators_kept(loaders: Iterable[Any]) -> Iterator[None]:
    """A block after which the users' own generators of ``loaders`` are as they were."""
    parts = [part for loader in loaders for part in parts_of(loader)]
    kept = [(generator, generator.get_state()) for part in parts for generator in generators_of(part)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


@contextmanager
def workers_kept(loaders: Iterable[Any]) -> Iterator[None]:
    """A block in which ``loaders`` start workers of their own; those that persist are as they were after it."""
    parts = [part for loader in loaders for part in parts_of(loader)]
    kept = [(part, part._iterator) for part in parts if isinstance(part, DataLoader) and part.persistent_workers]
    for part, _ in kept:
        part._iterator = None
    try:
        yield
    finally:
        for part, iterator in kept:
            part._iterator = iterator


def loader_states(loaders: Iterable[Any]) -> list[dict[str, Any]]:
    """Of each of ``loaders``, the users' own generators, and whether it has workers that persist."""
    return [
        {
            "generators": [generator.get_state() for part in parts_of(loader) for generator in generators_of(part)],
            "workers": [getattr(part, "_iterator", None) is not None for part in parts_of(loader)],
        }
        for loader in loaders
    ]


def set_loader_states(loaders: Iterable[Any], states: Iterable[Mapping[str, Any]]) -> None:
    """Bring fresh loaders to what :func:`loader_states` returned of them; no global generator is disturbed.

    Workers that persist are started now: their seed was drawn when they were, and must not be drawn again.
    """
    for loader, state in zip(loaders, states, strict=False):
        for part, alive in zip(parts_of(loader), state["workers"], strict=False):
            if alive and isinstance(part, DataLoader) and part.persistent_workers and part._iterator is None:
                with isolate_rng():
                    iter(part)
        generators = [generator for part in parts_of(loader) for generator in generators_of(part)]
        for generator, saved in zip(generators, state["generators"], strict=False):
            generator.set_state(saved)


def parts_of(loader: Any) -> list[Any]:
    """The loaders in a combined one; of any other itself."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of the user's own that a pass draws from."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found
