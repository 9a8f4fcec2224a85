"""Create the passes over a training loader, or over the loaders of a CombinedLoader. A run can resume in the middle of
a pass.

[Note: how a pass is resumed]
A loader with ``state_dict`` and ``load_state_dict`` saves its position itself. For a torch DataLoader over a map-style
dataset, the random state from the start of the interrupted pass is restored first. The sampler then draws the same
order. The sampler skips the indices of finished batches, so that these batches are not fetched. Any other loader is
iterated again from its start, and finished batches are discarded. The remaining batches are then correct if batches
depend only on random numbers that the loader itself draws.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from drivetrain.data.combined import CombinedLoader
from drivetrain.data.loader_passes import Passes, Position, StatefulPasses
from drivetrain.data.resample import draws_samples
from drivetrain.data.sample_seeds import SampleSeeds, seeded
from drivetrain.data.sampled_passes import SampledPasses
from drivetrain.data.stateful import is_stateful
from drivetrain.errors import CheckpointError

_INF = float("inf")


def passes_over(loader: Any, pins: bool = False, seeds: SampleSeeds | None = None) -> Passes:
    """Return the passes over a training loader. :class:`SampledPasses` explains ``pins`` and ``seeds``."""
    combined = isinstance(loader, CombinedLoader)
    return CombinedPasses(loader, pins, seeds) if combined else _passes_over_one(loader, pins, seeds)


def _passes_over_one(loader: Any, pins: bool, seeds: SampleSeeds | None) -> Passes:
    if draws_samples(loader) and not is_stateful(loader):
        return SampledPasses(loader, pins, seeds)
    if seeds is not None:
        seeded(loader, seeds)  # warns that seeds have no effect
    return StatefulPasses(loader) if is_stateful(loader) else Passes(loader)


def is_replayed(loader: Any) -> bool:
    """Whether a pass over ``loader`` can only be resumed by fetching the finished batches again."""
    if isinstance(loader, CombinedLoader):
        return any(map(is_replayed, loader.flattened))
    return not (is_stateful(loader) or draws_samples(loader))


class CombinedPasses(Passes):
    """The passes over a CombinedLoader. Each loader inside the CombinedLoader is resumed at a position of its own."""

    can_repeat = False  # the loaders cannot go back by one batch

    def __init__(self, loader: CombinedLoader, pins: bool = False, seeds: SampleSeeds | None = None) -> None:
        super().__init__(loader)
        self._parts = [_passes_over_one(part, pins, seeds) for part in loader.flattened]
        self._combined = copy.copy(loader)
        self._combined.flattened = self._parts
        self._combined.limits = None
        self._over = False  # whether the resumed pass has no batches left
        self.fetches_here = True  # restarting a shorter loader draws random numbers in this process
        self._limit_parts()

    def start_epoch(self) -> None:
        """Mark the next pass as the first of an epoch."""
        self.flight = None
        self._limit_parts()
        for part in self._parts:
            part.start_epoch()

    def _limit_parts(self) -> None:
        """Set the limit of each loader's passes. After a resume, the limit also counts the batches from before the
        resume.
        """
        limits = self.loader.limits or [_INF] * len(self._parts)
        for part, limit in zip(self._parts, limits, strict=True):
            part.limit = limit

    def close(self) -> None:
        """Stop persistent workers."""
        for part in self._parts:
            part.close()

    def __iter__(self) -> Iterator[Any]:
        over, self._over = self._over, False
        return iter(()) if over else (batch for batch, _, _ in self._combined)

    def start_early(self, takes_first: bool) -> None:
        """Start the next pass of every loader now, and fetch the first batches if ``takes_first``."""
        for part in self._parts:
            part.start_early(takes_first)

    def position(self, states: bool = True) -> Position:
        """Return the position of every loader."""
        return {"parts": [part.position(states) for part in self._parts]}

    def carry_over(self, position: Position) -> None:
        """Restore the states in ``position`` that the loaders keep between passes."""
        for part, its_position in zip(self._parts, position.get("parts", ()), strict=False):
            part.carry_over(its_position)

    def resume(self, position: Position) -> None:
        """Let the next iteration continue at ``position``."""
        parts = position.get("parts", ())
        if len(parts) != len(self._parts):
            raise CheckpointError(
                f"The checkpoint was saved with {len(parts) or 1} training loaders, and there are {len(self._parts)}. "
                "Resume with the loaders it was saved with."
            )
        if self.loader.mode == "min_size" and any(its_position["ended"] for its_position in parts):
            self.carry_over(position)  # resume() would fetch another batch from longer loaders
            self._over = True
            return
        for part, its_position in zip(self._parts, parts, strict=True):
            part.resume(its_position)
        self._combined.resume_at([its_position["begun"] > 1 for its_position in parts])
