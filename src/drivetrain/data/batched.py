"""Fetch a batch of tensors with one index operation per tensor, instead of one per sample.

[Note: which loaders]
The module handles a ``DataLoader`` with torch's default collate over a ``TensorDataset``, a ``StackDataset`` of
tensors, or a ``Subset`` of these. These classes must be torch's own and unchanged, so that no user code is skipped. A
batch equals the stacked samples in values, dtype, strides and type. The batches of all other loaders are fetched sample
by sample, as torch does. A single batch is also fetched sample by sample if its indices are not plain integers, or are
out of range. Every batch is fetched sample by sample if a tensor of the data set is not dense and contiguous in host
memory.

If there are no workers, and the device can copy from pinned memory, the batch is fetched directly into pinned memory.
The host then need not wait while the batch is copied to the device. A separate copy into pinned memory would cost more
time than it saves.

The user's loader and data set do not change. This module iterates a copy of the loader. The copy shares the loader's
samplers and generator, and so draws the same random numbers.

[Note: without torch's iterator]
If there are no workers, torch's iterator first draws a seed. Inside a profiler range, torch's iterator then gets
indices from the batch sampler and samples from the data set. :func:`iterate` does the same with fewer function calls.
If torch's BatchSampler draws from torch's RandomSampler or SequentialSampler, the indices of a batch are a slice of a
tensor or range. There is then no Python number for each sample. Each random number is drawn from the same generator,
and at the same point of the pass, as in torch.

Before the first such pass, this module iterates toy loaders with and without torch's iterator, and compares the batches
and random states. The module uses torch's iterator if the batches or states differ, or if code has replaced a function
of torch's iterator. It also uses torch's iterator if a profiler or a torch mode is active when a pass starts.
"""

from __future__ import annotations

import functools
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from drivetrain.base import torch_private
from drivetrain.base.rank_zero import log, rank_zero_only
from drivetrain.data.resample import SamplerProxy, replaced

L = TypeVar("L")
MANY = 10**8
"""A permutation of this many samples or more has 32-bit indices."""
TOGETHER = 64
"""The number of batches for which one call of ``torch.split`` slices the indices. One call per batch would take twice
as long.
"""
Order = Tensor | range
"""The order of samples, as indices in a data set."""


def start_pass(loader: Any, pins: bool = False) -> Iterator[Any]:
    """Start a pass over any loader, like ``iter(loader)``. If possible, fetch each batch as a whole.

    If the pass starts persistent workers, ``loader`` keeps them, as after ``iter(loader)``.

    Args:
        loader: the loader.
        pins: whether to fetch batches into pinned memory, from which the device copies faster.
    """
    source = batched(loader, pins)
    if source is loader:
        return iter(loader)
    torch_private.keep_iterator(source, torch_private.kept_iterator(loader))
    iterator = iterate(source)
    torch_private.keep_iterator(loader, torch_private.kept_iterator(source))
    return iterator


def iterate(source: DataLoader[Any]) -> Iterator[Any]:
    """Start a pass over ``source``: a result of :func:`batched`, or a copy of a result with another sampler."""
    return _iterate_plainly(source) if _can_iterate_plainly(source) else iter(source)


def batched(loader: L, pins: bool = False) -> L:
    """Return a copy of ``loader`` that fetches each batch as a whole, or ``loader`` itself if that is not possible.

    ``pins``: whether to write batches into pinned memory, if this process (and not a worker) fetches them.
    """
    if not isinstance(loader, DataLoader) or reason_for_samples(loader) is not None:
        return loader
    fetch = _Fetch(loader.dataset, pins and loader.num_workers == 0)
    changes: dict[str, Any] = {"dataset": fetch, "collate_fn": fetch.collate}
    if loader.worker_init_fn is not None:
        changes["worker_init_fn"] = SeesDataset(loader.worker_init_fn, fetch)
    return replaced(loader, **changes)


@rank_zero_only
def log_fetching(loader: Any) -> None:
    """Log at level DEBUG, on the logger "drivetrain", whether batches of ``loader`` are fetched as a whole."""
    if not (isinstance(loader, DataLoader) and log.isEnabledFor(logging.DEBUG)):
        return
    reason = reason_for_samples(loader)
    way = "with one index operation per tensor" if reason is None else f"sample by sample, because {reason}"
    log.debug("%s over %s: batches are fetched %s", type(loader).__name__, type(loader.dataset).__name__, way)


def reason_for_samples(loader: DataLoader[Any]) -> str | None:
    """Return why the samples of ``loader`` are fetched one by one, or ``None`` if each batch is fetched as a whole."""
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is a subclass of DataLoader"
    if loader.batch_sampler is None:
        return "it has no batch size"
    if loader.collate_fn is not default_collate or not all(map(_is_torchs, torch_private.collate_functions.values())):
        return "its collate_fn is not torch's default"
    data: Any = loader.dataset
    while type(data) is Subset:
        if not _is_unchanged(data):
            return "Subset was changed"
        if type(data.indices) not in _SEQUENCES and not _is_array(data.indices):
            return f"the indices of its Subset are a {type(data.indices).__name__}"
        data = data.dataset
    tensors = _tensors(data)
    if tensors is None:
        return f"its dataset contains a {type(data).__name__} that is not one of torch's, made of tensors"
    return None if all(map(_is_plain, tensors)) else "a tensor is not dense and contiguous in the memory of the host"


class _Fetch:
    """Replaces the data set of a DataLoader. Its method ``collate`` replaces ``default_collate``.

    ``__getitems__`` returns the indices themselves instead of samples, and ``collate`` then fetches the samples.

    Attributes:
        dataset: the user's data set.
        pins: whether batches are written into pinned memory.
        checked: the tensors of a TensorDataset whose last batch was fetched with one index operation per tensor,
            otherwise ``None``. For the next batch, only the changeable properties of these tensors are checked again.
    """

    def __init__(self, dataset: Any, pins: bool) -> None:
        self.dataset, self.pins = dataset, pins
        self.checked: Any = None

    def __getitems__(self, indices: Any) -> Any:
        return indices

    def collate(self, indices: Any, are_slice: bool = False) -> Any:
        """Return the batch of the samples ``indices``. ``are_slice`` is true if :func:`slices` has yielded them."""
        batch = _whole(self, indices, are_slice)
        return self._by_sample(indices, are_slice) if batch is None else batch

    def fetch(self, indices: Any, are_slice: bool) -> Any:
        """Do the same as :meth:`collate`, in a pass without torch's iterator."""
        if _is_profiling() or _has_modes() or _has_function_modes():  # torch's iterator opens a profiler range here
            with torch.autograd.profiler.record_function(_PROFILER_RANGE):
                return self.collate(indices, are_slice)
        data, checked = self.dataset, self.checked
        if (
            are_slice
            and checked is not None
            and data.tensors is checked
            and TensorDataset.__getitem__ is _GET_ITEM
            and not hasattr(data, "__getitems__")
            and set(map(_CHANGEABLE, checked)) == _PLAIN
            and all(map(Tensor.is_contiguous, checked))
        ):
            try:
                return list(map(torch.index_select, checked, repeat(0), repeat(indices)))
            except IndexError:
                pass  # a tensor has fewer rows than before
        return self.collate(indices, are_slice)

    def _by_sample(self, indices: Any, are_slice: bool) -> Any:
        if are_slice:
            indices = as_list(indices)
        several = getattr(self.dataset, "__getitems__", None)
        return default_collate(several(indices) if several else [self.dataset[index] for index in indices])


class SeesDataset:
    """Wraps a user's ``worker_init_fn``, so that ``get_worker_info().dataset`` is the user's data set.

    Args:
        user: the user's function, or ``None``.
        replacement: the object that has replaced the data set in the loader. Its attribute ``dataset`` is the user's
            data set.
    """

    def __init__(self, user: Callable[[int], None] | None, replacement: Any) -> None:
        self._user, self._replacement = user, replacement

    def __call__(self, worker_id: int) -> None:
        # object.__setattr__, because the worker info's own __setattr__ raises an error
        object.__setattr__(get_worker_info(), "dataset", self._replacement.dataset)
        if self._user is not None:
            self._user(worker_id)


def _whole(fetch: _Fetch, indices: Any, are_slice: bool) -> Any:
    """Return the batch, or ``None`` if its samples must be fetched one by one."""
    data, pins = fetch.dataset, fetch.pins
    if not are_slice and type(indices) is not list:
        return None
    try:
        while type(data) is Subset:
            if "__getitems__" in vars(data) or not (are_slice or set(map(type, indices)) == _INTEGERS):
                return None
            chosen: Any = data.indices
            if type(chosen) in _SEQUENCES:
                indices = list(map(chosen.__getitem__, as_list(indices)))
            elif _is_array(chosen):
                indices = chosen[as_list(indices)].tolist()
            else:
                return None
            data, are_slice = data.dataset, False
        tensors = _tensors(data)
        if tensors is None or not (are_slice or set(map(type, indices)) == _INTEGERS):
            return None
        indices = _as_tensor(indices)
        if not all(map(_is_plain, tensors)):
            return None
        outs = [_pinned_rows(each, len(indices)) if pins else None for each in tensors]
        parts = [torch.index_select(each, 0, indices, out=out) for each, out in zip(tensors, outs, strict=True)]
    # an index is negative or out of range, or torch has no kernel for the type
    except (IndexError, OverflowError, NotImplementedError):
        return None
    if data is fetch.dataset and type(data) is TensorDataset and not pins:
        fetch.checked = tensors
    if type(data) is Tensor:
        return parts[0]
    if type(data) is StackDataset and type(data.datasets) is dict:
        return dict(zip(data.datasets, parts, strict=True))
    return parts


def _as_tensor(indices: Any) -> Tensor:
    return indices if type(indices) is Tensor else torch.frombuffer(array("q", indices), dtype=torch.int64)


def _pinned_rows(tensor: Tensor, count: int) -> Tensor:
    return torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device, pin_memory=True)


def _tensors(data: Any) -> Any:
    """Return the tensors or datasets in an unchanged ``TensorDataset`` or ``StackDataset``. For a tensor, return
    ``(data,)``. For any other object, return ``None``.
    """
    kind = type(data)
    if kind is Tensor:
        return (data,)
    if (kind is not TensorDataset and kind is not StackDataset) or not _is_unchanged(data):
        return None
    parts = data.tensors if kind is TensorDataset else data.datasets
    if type(parts) is dict:
        return parts.values()
    return parts if type(parts) is tuple else None


def _is_plain(tensor: Any) -> bool:
    """Whether selecting rows of ``tensor`` gives the same result as stacking its samples."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel() > 0  # torch does not check indices of empty rows
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_array(indices: Any) -> bool:
    """Whether ``indices`` is a 1-D array of integers, from torch or NumPy."""
    if type(indices) is Tensor:
        return indices.dtype is torch.int64 and indices.dim() == 1
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(indices) is numpy.ndarray and indices.dtype.kind == "i" and indices.ndim == 1


def _is_unchanged(data: Any) -> bool:
    """Whether no code has replaced the torch methods that return the samples of ``data``."""
    kind = type(data)
    unchanged = _METHODS[kind] == (kind.__getitem__, getattr(kind, "__getitems__", None))
    return unchanged and "__getitems__" not in vars(data)


def _is_torchs(function: Any) -> bool:
    return function is None or getattr(function, "__module__", None) in _TORCHS


_CHANGEABLE, _PLAIN = attrgetter("__class__", "is_cpu", "requires_grad"), {(Tensor, True, False)}
"""The function ``_CHANGEABLE`` returns three attributes of a tensor that code can change. ``_PLAIN`` contains their
values for a tensor on the CPU that requires no gradient.
"""

_SEQUENCES = (list, tuple, range)
_INTEGERS = {int}
_TORCHS = (TensorDataset.__module__, default_collate.__module__)
_METHODS = {
    kind: tuple(method if _is_torchs(method) else _is_torchs for method in methods)
    for kind in (TensorDataset, StackDataset, Subset)
    for methods in [(kind.__getitem__, getattr(kind, "__getitems__", None))]
}
"""The methods of torch's data sets that return samples. ``_is_torchs`` stands for a method that code had replaced
before this module was imported. It is not equal to any method, so later comparisons are false.
"""

_GET_ITEM = _METHODS[TensorDataset][0]


# ---- without torch's iterator ----------------------------------------------------------------------------------------


def _can_iterate_plainly(source: Any) -> bool:
    """Whether a pass without torch's iterator yields the same batches, and no profiler or torch mode is active."""
    return (
        type(source.dataset) is _Fetch
        and not (source.num_workers or source.pin_memory or source.timeout)
        and torch_private.GET_ITERATOR not in vars(source)
        and not any(is_active() for is_active in _WATCHERS)
        and _are_torchs(torch_private.methods_of_a_pass())
        and _toys_are_equal()
    )


def _iterate_plainly(source: Any) -> Iterator[Any]:
    fetch = source.dataset
    draws = slices(source.batch_sampler, fetch.dataset)
    are_slices = draws is not None
    if draws is None:
        draws = iter(source.batch_sampler)
    torch.empty((), dtype=torch.int64).random_(generator=source.generator).item()  # torch draws the workers' seed
    return map(fetch.fetch, draws, repeat(are_slices))


def slices(batch_sampler: Any, dataset: Any) -> Iterator[Any] | None:
    """Start a pass over ``batch_sampler`` that yields the indices of each batch as a tensor. Return ``None`` unless
    torch's own samplers draw the indices from ``dataset``.
    """
    if isinstance(batch_sampler, SamplerProxy):
        return batch_sampler.slices(dataset)
    if type(batch_sampler) is not BatchSampler or not _are_torchs([(BatchSampler, "__iter__")]):
        return None
    sampler: Any = batch_sampler.sampler
    return _slices(batch_sampler, sampler) if draws_each_once(sampler) and sampler.data_source is dataset else None


def draws_each_once(sampler: Any) -> bool:
    """Whether ``sampler`` is a sampler of torch that draws each sample of its data source once."""
    kind = type(sampler)
    if kind is RandomSampler:
        once = not sampler.replacement and getattr(sampler, torch_private.NUMBER_OF_DRAWS, sampler) is None
    else:
        once = kind is SequentialSampler
    return once and _are_torchs([(kind, "__iter__")])


def drawn_order(sampler: Any) -> Order:
    """Return the order of samples of a sampler for which :func:`draws_each_once` is true, as a tensor or range.

    At the end of a pass, a RandomSampler with a generator draws another permutation. This function does not.
    """
    count = len(sampler.data_source)
    if type(sampler) is SequentialSampler:
        return range(count)
    # RandomSampler draws its seed with the same calls
    own = sampler.generator or torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return _permutation(count, own)


def _permutation(count: int, generator: torch.Generator) -> Tensor:
    """Return torch's random permutation. For very many samples, the indices have 32 bits, to halve the memory."""
    return torch.randperm(count, generator=generator, dtype=torch.int32 if MANY <= count < 2**31 else torch.int64)


def as_list(indices: Any) -> list[Any]:
    """Return a batch of indices as a list."""
    return indices.tolist() if type(indices) is Tensor else list(indices)


def _slices(batch_sampler: BatchSampler, sampler: Any) -> Iterator[Any]:
    if len(sampler.data_source) == 0:  # a RandomSampler without samples may raise an error
        yield from batch_sampler
        return
    generator = getattr(sampler, "generator", None)
    size, drop_last, drawn = batch_sampler.batch_size, batch_sampler.drop_last, drawn_order(sampler)
    # if a default device was set, the tensor is on this device
    order = drawn.tolist() if isinstance(drawn, Tensor) and not drawn.is_cpu else drawn
    begin, count = 0, len(order)
    while begin + size <= count:
        end = begin + size * min((count - begin) // size, TOGETHER)
        for indices in torch.split(_as_tensor(order[begin:end]), size):
            yield indices
            begin += size
            if not drop_last and batch_sampler.batch_size != size:  # torch reads batch_size for each batch
                size = batch_sampler.batch_size
                break
    if generator is not None:
        _permutation(count, generator)
    if begin < count and not drop_last:
        yield _as_tensor(order[begin:])


@functools.cache
def _toys_are_equal() -> bool:
    """Whether toy loaders have the same batches and random states with torch's iterator and with this module's."""
    toys = ((True, True, True), (True, True, False), (True, False, True))
    state = torch.get_rng_state()
    try:
        pairs = [(_iterate_toy(iter, *toy, state), _iterate_toy(_iterate_plainly, *toy, state)) for toy in toys]
    except Exception:  # this version of torch has another iterator
        return False
    finally:
        torch.set_rng_state(state)
    return all(len(expected) == len(found) and all(map(torch.equal, expected, found)) for expected, found in pairs)


def _iterate_toy(
    start: Callable[[Any], Iterator[Any]], shuffle: bool, has_generator: bool, drop_last: bool, state: Tensor
) -> list[Tensor]:
    torch.set_rng_state(state)
    own = torch.Generator() if has_generator else None
    drawn = own or torch.default_generator
    loader = DataLoader(TensorDataset(torch.arange(5)), 2, shuffle=shuffle, generator=own, drop_last=drop_last)
    batches = start(batched(loader))
    seen = [drawn.get_state()]
    for (batch,) in batches:
        seen += [batch, drawn.get_state()]
    return [*seen, drawn.get_state()]


def _are_torchs(methods: Iterable[tuple[type, str]]) -> bool:
    """Whether no code has replaced ``methods`` of torch. torch defines each of these functions in the module of its
    class.
    """
    return all(
        getattr(getattr(kind, name, None), "__globals__", None) is vars(sys.modules[kind.__module__])
        for kind, name in methods
    )


_PROFILER_RANGE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_WATCHERS: tuple[Callable[[], Any], ...] = tuple(
    getattr(torch_private, name, lambda: True)
    for name in ("is_profiling", "count_dispatch_modes", "count_function_modes")
)
_is_profiling, _has_modes, _has_function_modes = _WATCHERS
