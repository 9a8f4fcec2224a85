"""``Trainer(sample_seeds=True)``: make the random numbers of a sample depend only on the seed, the epoch and the
sample's index.

[Note: one seed per sample]
Before each sample, the generators of ``random``, numpy and torch's CPU are seeded. Their seed is a hash of the run's
seed, the epoch and the sample's index. The numbers therefore do not depend on the worker or rank that fetches the
sample, or on the samples fetched before. Before ``collate_fn``, the generators are seeded from the indices of the
batch. After the batch, the generators' earlier states are restored. Dropout then draws the same numbers in a training
process with workers as in one without workers.

The sampler runs in the training process, and sends the epoch to the workers along with the indices. Persistent workers
do not know the epoch, because their copies of objects are from an earlier epoch.
"""

from __future__ import annotations

import hashlib
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.seed import seed_from_environ
from drivetrain.data.batched import SeesDataset, reason_for_samples
from drivetrain.data.kept import set_worker_state, worker_state
from drivetrain.data.resample import SamplerProxy, drawn_by, draws_samples, replaced
from drivetrain.data.stateful import is_stateful


@dataclass
class SampleSeeds:
    """The values that, together with the index, determine a sample's random numbers. They are read when a pass begins.

    Attributes:
        seed: the seed of the run.
        epoch: returns the index of the current epoch.
        passes: the number of passes over the loader that have begun in this epoch. The number exceeds 1 if a
            CombinedLoader has started a shorter loader again.
    """

    seed: int
    epoch: Callable[[], int]
    passes: int = 1

    def key(self) -> tuple[int, ...]:
        """Return the present values of the seed, the epoch and the number of passes."""
        return self.seed, self.epoch(), self.passes


def seed_of_program() -> int:
    """Return the seed that ``seed_everything`` has set. If no seed was set, log a line and return 0."""
    seed = seed_from_environ()
    if seed is None:
        rank_zero_info(
            "sample_seeds=True: no seed was set, so the seed of the samples' random numbers is 0. Call "
            "seed_everything(seed) before fit to choose another."
        )
    return seed or 0


def seeded(loader: Any, seeds: SampleSeeds) -> Any:
    """Return a copy of ``loader`` whose samples draw the same random numbers in any process.

    A loader whose batches are fetched as a whole draws no random numbers for samples, and is returned unchanged. In
    three cases, the indices of samples are unknown: the loader is no DataLoader, has an iterable-style dataset, or has
    a ``state_dict``. The function then warns, and returns the loader unchanged.

    Args:
        loader: any loader.
        seeds: the seed, the epoch and the number of the pass. They are read at the start of each pass.
    """
    if not draws_samples(loader) or is_stateful(loader):
        over = f" over {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
        rank_zero_warn(
            f"sample_seeds=True has no effect on the loader {type(loader).__name__}{over}, because the indices of its "
            "samples are unknown. Pass a torch DataLoader over a dataset that is indexed, with torch's own __iter__ "
            "and no state_dict, or leave sample_seeds out."
        )
        return loader
    if reason_for_samples(loader) is None:
        return loader
    with suppress(ImportError):
        import numpy  # noqa: F401  # numpy's generator must exist before a dataset imports numpy in its first sample
    place = drawn_by(loader)
    samples = _Samples(loader)
    changes = {
        place: _Keyed(getattr(loader, place), seeds),
        "dataset": samples,
        "collate_fn": samples.collate,
        "worker_init_fn": SeesDataset(loader.worker_init_fn, samples),
    }
    return replaced(loader, **changes)


class _Keyed(SamplerProxy):
    """A sampler or batch sampler that yields each draw together with the seed, the epoch and the number of the pass."""

    def __init__(self, sampler: Any, seeds: SampleSeeds) -> None:
        super().__init__(sampler)
        self._seeds = seeds

    def __iter__(self) -> Iterator[Any]:
        key = self._seeds.key()
        return ((key, draw) for draw in iter(self._sampler))  # iter() is called here, not at the first draw


class _Samples:
    """Replaces the dataset of a DataLoader whose sampler is a :class:`_Keyed`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset: Any = loader.dataset
        self._collate: Any = loader.collate_fn
        self._batched = loader.batch_sampler is not None

    def __getitem__(self, draw: Any) -> Any:
        return draw

    __getitems__ = __getitem__

    def collate(self, draw: tuple[tuple[int, ...], Any]) -> Any:
        """Fetch the samples of a draw, and return their batch. Replaces ``collate_fn``. The argument is the draw,
        because ``__getitem__`` returns the draw unchanged. If the loader has no batch size, the batch is a single
        sample.
        """
        key, drawn = draw
        indices = list(drawn) if self._batched else [drawn]
        before = worker_state()
        try:
            samples = [self._sample(key, index) for index in indices]
            _seed(key, [_plain(index) for index in indices])
            return self._collate(samples if self._batched else samples[0])
        finally:
            set_worker_state(before)

    def _sample(self, key: tuple[int, ...], index: Any) -> Any:
        _seed(key, _plain(index))
        return self.dataset[index]


def _plain(index: Any) -> Any:
    """Return ``index``. A number of numpy or torch is converted to a Python int."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _seed(key: tuple[int, ...], index: Any) -> None:
    """Seed this process's generators on the host from a 64-bit BLAKE2b hash of ``key`` and ``index``.

    ``torch.manual_seed`` is not called, because it would also seed the generators of devices. The CPU's generator uses
    the lower 32 bits of the hash. Numpy's generator gets the upper 32 bits, because with equal seeds both generators
    would draw equal numbers.
    """
    text = repr((*key, index)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number >> 32)
