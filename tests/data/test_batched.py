"""Batches that are fetched as a whole are those of a ``for`` loop over the user's loader, and nobody can tell."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from drivetrain import Callback, Engine, LightningModule, Trainer
from drivetrain.base.rank_zero import log
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.data import CombinedLoader, batched
from drivetrain.data.batched import reason_for_samples, start_pass
from drivetrain.data.indices import RecordedIndices
from drivetrain.data.passes import passes_over
from drivetrain.data.samplers import share
from drivetrain.testing import FakeAccelerator

# ---- random loaders --------------------------------------------------------------------------------------------------

SHAPES = [(), (), (1,), (3,), (2, 3), (1, 1, 1), (2, 1, 3), (3, 4, 4), (0,), (2, 0, 3)]
DTYPES = [
    torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool,
    torch.uint8, torch.uint16, torch.int32, torch.int64, torch.complex64,
]  # fmt: skip


class Draws:
    """A sampler of the user's: counts what is called, draws from Python's generator, and yields any kind of index."""

    def __init__(self, count: int, kind: Callable[[int], Any], size: int | None = None, form: Any = list) -> None:
        self.count, self.kind, self.size, self.form = count, kind, size, form
        self.calls: Counter[str] = Counter()

    def __len__(self) -> int:
        self.calls["len"] += 1
        return self.count if self.size is None else -(-self.count // self.size)

    def __iter__(self) -> Iterator[Any]:
        self.calls["iter"] += 1
        drawn = [self.kind(random.randrange(self.count)) for _ in range(self.count)]
        groups = drawn if self.size is None else map(self.form, zip(*[iter(drawn)] * self.size, strict=False))
        for each in groups:
            self.calls["next"] += 1
            random.random()
            yield each


def make_tensor(draw: random.Random, count: int) -> Tensor:
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    tensor = torch.randint(0, 2 if dtype is torch.bool else 9, (count, *shape), generator=generator).to(dtype)
    odd = draw.random()
    if odd < 0.05 and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    elif odd < 0.1 and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    elif odd < 0.13 and tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.requires_grad_()
    elif odd < 0.15 and tensor.is_complex():
        tensor = tensor.conj()
    elif odd < 0.18:
        tensor = tensor[:1].expand(count, *shape)
    return tensor


def make_dataset(draw: random.Random) -> Any:
    count = draw.randrange(5, 30)
    tensors = [make_tensor(draw, count) for _ in range(draw.randrange(1, 4))]
    data: Any = draw.choice(
        [
            lambda: TensorDataset(*tensors), lambda: TensorDataset(*tensors), lambda: StackDataset(*tensors),
            lambda: StackDataset(**{f"part_{number}": each for number, each in enumerate(tensors)}),
            lambda: tensors[0],
        ]
    )()  # fmt: skip
    for _ in range(draw.choice([0, 0, 1, 2, 3])):
        low = -count if draw.random() < 0.1 else 0
        chosen = [draw.randrange(low, count) for _ in range(draw.randrange(4, 30))]
        form = draw.choice([list, list, tuple, torch.tensor, numpy.array, numpy.int32, "range", "bool", Listed])
        if form == "range":
            chosen = range(count - 1, -1, -1)  # type: ignore[assignment]
        elif form == "bool" and draw.random() < 0.3:
            chosen = [bool(each % 2) for each in chosen]
        elif form is numpy.int32:
            chosen = numpy.array(chosen, dtype=numpy.int32)  # type: ignore[assignment]
        elif callable(form):
            chosen = form(chosen)
        data, count = Subset(data, chosen), len(chosen)
    return data


class Listed(list):  # type: ignore[type-arg]
    """A list of the user's own."""


def make_loader(seed: int, workers: int = 0) -> DataLoader[Any]:
    draw = random.Random(seed)
    data = make_dataset(draw)
    count, size = len(data), draw.randrange(1, 8)
    generator = torch.Generator().manual_seed(seed) if draw.random() < 0.5 else None
    index = draw.choice([int, int, int, numpy.int64, torch.tensor, lambda number: number - count])
    if draw.random() < 0.05:
        index = lambda number: number + 2  # noqa: E731  # out of range at times
    persists = workers > 0 and draw.random() < 0.5
    shared: dict[str, Any] = {"num_workers": workers, "generator": generator, "persistent_workers": persists}
    some = draw.sample(range(count), max(1, count // 2))
    loader: DataLoader[Any] = draw.choice(
        [
            lambda: DataLoader(data, size, shuffle=True, drop_last=draw.random() < 0.5, **shared),
            lambda: DataLoader(data, size, shuffle=True, collate_fn=default_collate, **shared),
            lambda: DataLoader(data, size, drop_last=draw.random() < 0.5, **shared),
            lambda: DataLoader(data, size, sampler=RandomSampler(data, True, 20, generator), **shared),
            lambda: DataLoader(data, size, sampler=WeightedRandomSampler([1.0] * count, 20, True), **shared),
            lambda: DataLoader(data, size, sampler=SubsetRandomSampler(some, generator), **shared),
            lambda: DataLoader(data, size, sampler=some, **shared),
            lambda: DataLoader(data, size, sampler=Draws(count, index), **shared),
            lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), size, True), **shared),
            lambda: DataLoader(data, size, sampler=RandomSampler(data, num_samples=2 * count + 1), **shared),
            lambda: DataLoader(data, size, sampler=RandomSampler(range(count), generator=generator), **shared),
            lambda: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), size, False), **shared),
            lambda: DataLoader(
                data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator), size, False), **shared
            ),
            lambda: DataLoader(
                data, batch_sampler=Draws(count, index, size, draw.choice([list, list, tuple, numpy.array])), **shared
            ),
            lambda: DataLoader(data, batch_size=None, sampler=Draws(count, int), **shared),
        ]
    )()
    if draw.random() < 0.1 and isinstance(getattr(loader.batch_sampler, "sampler", None), RandomSampler):
        loader = share(loader, 0, 2, lambda value: value) or loader
    return loader


# ---- comparing -------------------------------------------------------------------------------------------------------


def facts(value: Any) -> Any:
    """All that a program can see of a batch, as plain data."""
    if isinstance(value, Tensor):
        words = value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) if value.numel() else value
        return (
            type(value), value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad,
            value.is_inference(), value._is_view(), value.untyped_storage().nbytes(), words.tolist(), value.is_conj(),
        )  # fmt: skip
    if isinstance(value, dict):
        return type(value), [(key, facts(each)) for key, each in value.items()]
    return (type(value), [facts(each) for each in value]) if isinstance(value, (list, tuple)) else value


def storages(value: Any) -> set[int]:
    """Where the tensors in a batch or a data set are in memory."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} if value.numel() else set()
    if isinstance(value, Subset):
        return storages(value.dataset)
    parts = getattr(value, "tensors", None) or getattr(value, "datasets", value)
    return {each for part in (parts.values() if isinstance(parts, dict) else parts) for each in storages(part)}


def random_states(loader: Any) -> Any:
    generator = None if loader.generator is None else loader.generator.get_state().tolist()
    state = rng_state()
    return generator, state["torch"].tolist(), pickle.dumps(state["python"]), repr(state["numpy"])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def trace(loader: Any, batches: Iterator[Any]) -> tuple[list[Any], Any, Any]:
    """Each batch with the random states behind it; how the pass ended; what was called of a user's sampler."""
    seen: list[Any] = []
    end: Any = None
    try:
        for batch in batches:
            seen.append((facts(batch), random_states(loader)))
    except Exception as error:
        end = type(error), str(error) if not loader.num_workers else None
    calls = [getattr(place, "calls", None) for place in (loader.sampler, loader.batch_sampler)]
    return seen, (end, random_states(loader)), calls


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch that reached this module, whether it was fetched as a whole."""
    seen, running, samples = list[bool](), list[str](), list[Any]()
    by_sample = batched._Fetch._by_sample

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(batched._Fetch, name)

        def fetch(*args: Any) -> Any:
            count = len(samples)
            running.append(name)
            try:
                return original(*args)
            finally:
                running.pop()
                if not running:  # one of them calls the other
                    seen.append(len(samples) == count)

        return fetch

    for name in ("fetch", "collate"):
        monkeypatch.setattr(batched._Fetch, name, noted(name))
    monkeypatch.setattr(batched._Fetch, "_by_sample", lambda *args: samples.append(args) or by_sample(*args))
    return seen


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batch samplers of the passes whose indices are slices of an order, drawn without torch's iterator."""
    seen: list[Any] = []
    original = batched._slices

    def start(batch_sampler: Any, sampler: Any) -> Any:
        seen.append(batch_sampler)
        return original(batch_sampler, sampler)

    assert batched._toys_are_equal()  # before, because the toys are sliced too
    monkeypatch.setattr(batched, "_slices", start)
    return seen


# ---- equal to a loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(0, 200, 50 if os.environ.get("DRIVETRAIN_FAULTS") == "long" else 100))
def test_two_passes_over_200_random_loaders_are_those_of_a_for_loop(
    start: int, whole: list[bool], sliced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if start >= 100:
        monkeypatch.setattr(batched, "TOGETHER", 2)  # most passes slice their indices in some calls
    ways: Counter[Any] = Counter()
    for seed in range(start, start + 50):
        workers = int(seed % 25 == 0)
        plain, own, fitted = (make_loader(seed, workers) for _ in range(3))
        before = dict(vars(own))
        expected, found, passed = [], [], []
        seed_all(seed)
        for _ in range(2):
            expected.append(trace(plain, iter(plain)))
        seed_all(seed)
        for _ in range(2):
            before_pass, batches = len(sliced), start_pass(own)
            ways[type(batches) is map, len(sliced) > before_pass] += 1
            found.append(trace(own, batches))
        seed_all(seed)
        passes = passes_over(fitted)
        for _ in range(2):
            passed.append(trace(fitted, iter(passes)))
        passes.close()
        assert found == expected, seed
        assert passed == expected, seed
        assert {**vars(own), "_iterator": None} == before, seed  # an iterator is there where workers persist
        if not workers and own.batch_sampler is not None and end_of(expected) is None:
            assert not storages(next(start_pass(own), ())) & storages(own.dataset), seed
        for loader in (plain, own):
            loader._iterator = None
    assert sum(whole) > 100
    assert whole.count(False) > 10
    # without torch's iterator, with slices and without; and with torch's iterator
    assert min(ways[True, True], ways[True, False], ways[False, False]) > 5
    assert ways.total() == 100


def test_batches_in_pinned_memory_are_those_of_a_for_loop(whole: list[bool]) -> None:
    for seed in range(60):
        plain, own = make_loader(seed, 0), make_loader(seed, 0)
        seed_all(seed)
        expected = trace(plain, iter(plain))
        seed_all(seed)
        with FakeAccelerator.recording():
            assert trace(own, start_pass(own, pins=True)) == expected, seed
    assert sum(whole) > 30
    with FakeAccelerator.recording():
        batches = DataLoader(TensorDataset(IMAGES), 2)
        assert all(batch[0].is_pinned() for batch in start_pass(batches, pins=True))
        assert not any(batch[0].is_pinned() for batch in start_pass(batches))


def end_of(traces: list[Any]) -> Any:
    """The error in which one of the passes ended, or ``None``."""
    return next((end for _, (end, _), _ in traces if end is not None), None)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_a_pass_is_resumed_in_its_middle(seed: int) -> None:
    workers = int(seed % 20 == 0)
    loader = make_loader(seed, workers)
    seed_all(seed)
    passes = passes_over(loader)
    positions, states, batches = [], [], []
    try:
        for batch in passes:
            batches.append(facts(batch))
            positions.append(passes.position())
            states.append(rng_state())
    except Exception:
        return  # an index was out of range
    end = random_states(loader)
    passes.close()
    for done in sorted({1, len(batches) // 2, len(batches)} - {0}) if batches else ():
        seed_all(done)
        fresh = make_loader(seed, workers)
        again = passes_over(fresh)
        again.resume(positions[done - 1])
        set_rng_state(states[done - 1])
        assert [facts(batch) for batch in again] == batches[done:], done
        assert random_states(fresh) == end
        again.close()


def shuffled(way: str, generator: bool, drop_last: bool) -> DataLoader[Any]:
    data: Any = TensorDataset(torch.arange(11), torch.arange(22.0).reshape(11, 2))
    if way == "subset":
        data = Subset(data, [10, 3, 5, 1, 0, 7, 8])
    own = torch.Generator().manual_seed(5) if generator else None
    return DataLoader(data, 3, shuffle=way != "in order", generator=own, drop_last=drop_last)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("way", ["shuffled", "subset", "in order"])
def test_positions_are_those_of_passes_with_torchs_iterator_and_each_resumes_the_others(
    way: str, generator: bool, drop_last: bool, sliced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    for with_torchs in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(batched, "_can_iterate_plainly", lambda source: False) if with_torchs else None
            loader = shuffled(way, generator, drop_last)
            seed_all(1)
            passes = passes_over(loader)
            seen.append([(facts(batch), passes.position(), rng_state()) for _ in range(2) for batch in passes])
            seen[-1].append((None, passes.position(), rng_state()))
            assert bool(sliced) is not with_torchs
    expected, found = seen
    assert plain(found) == plain(expected)
    length = len(loader)
    for start in range(1, length + 1):
        for others, with_torchs in ((found, True), (expected, False)):
            with monkeypatch.context() as patched:
                patched.setattr(batched, "_can_iterate_plainly", lambda source: False) if with_torchs else None
                fresh = shuffled(way, generator, drop_last)
                seed_all(start)
                again = passes_over(fresh)
                _, position, state = others[start - 1]
                again.resume(position)
                set_rng_state(state)
                rest = [(facts(batch), again.position(), rng_state()) for batch in again]
            assert plain(rest)[:1] == plain(expected[start:length])[:1]
            assert [batch for batch, *_ in rest] == [batch for batch, *_ in expected[start:length]]


@pytest.mark.parametrize("together", [2, 64])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_a_program_changes_in_samplers_and_data_is_seen_as_torch_sees_it(
    drop_last: bool, together: int, sliced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "TOGETHER", together)
    seen: list[Any] = []
    for start in (iter, start_pass):
        loader = shuffled("shuffled", True, drop_last)
        data, drawn = loader.dataset, loader.batch_sampler
        assert isinstance(data, TensorDataset)
        found = []
        for number in range(4):
            for index, (x, _) in enumerate(start(loader)):
                found.append((x.tolist(), random_states(loader)))
                if number == 1 and index == 1:
                    drawn.batch_size = 2  # type: ignore[union-attr]
                if number == 2 and index == 0:
                    data.tensors[0][:] += 100
                    drawn.drop_last = not drop_last  # type: ignore[union-attr]
            found.append(random_states(loader))
            data.tensors = tuple(each[: len(each) - 2] for each in data.tensors)
        seen.append(found)
    assert seen[0] == seen[1]
    assert len(sliced) == 4


def test_an_empty_data_set_raises_what_torchs_sampler_raises(sliced: list[Any]) -> None:
    for start in (iter, start_pass):
        loader = shuffled("subset", False, False)
        loader.dataset.indices.clear()  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            next(start(loader))
    assert len(sliced) == 1


def test_a_change_of_the_data_in_a_pass_is_seen_at_the_next_batch(whole: list[bool]) -> None:
    data = TensorDataset(torch.arange(12))
    part = Subset(data, list(range(12)))
    batches = start_pass(DataLoader(part, 2))
    assert next(batches)[0].tolist() == [0, 1]
    data.tensors = (torch.arange(100, 112),)
    assert next(batches)[0].tolist() == [102, 103]
    part.indices[4] = 11  # type: ignore[index]
    assert next(batches)[0].tolist() == [111, 105]
    data.tensors = (torch.arange(12.0, requires_grad=True),)
    assert next(batches)[0].requires_grad
    data.tensors = (torch.arange(12), torch.arange(3))
    with pytest.raises(IndexError, match="index 8 is out of bounds for dimension 0 with size 3"):
        next(batches)
    assert whole == [True, True, True, False, False]


class OfProgram(Tensor):
    pass


def needs_gradients(data: TensorDataset) -> None:
    data.tensors[0].requires_grad_()


def is_transposed(data: TensorDataset) -> None:
    data.tensors[1].data = torch.arange(48.0).reshape(2, 24).t()


def has_another_class(data: TensorDataset) -> None:
    data.tensors[1].__class__ = OfProgram


def is_shorter(data: TensorDataset) -> None:
    data.tensors[1].resize_(3, 2)


@pytest.mark.parametrize("changes", [needs_gradients, is_transposed, has_another_class, is_shorter])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_change_of_a_tensor_in_place_is_seen_at_the_next_batch(
    changes: Callable[[TensorDataset], None], shuffle: bool, whole: list[bool]
) -> None:
    found = []
    for start in (iter, start_pass):
        data = TensorDataset(torch.arange(24.0), torch.arange(48.0).reshape(24, 2))
        batches = start(DataLoader(data, 4, shuffle=shuffle, generator=torch.Generator().manual_seed(1)))
        found.append([facts(next(batches)), facts(next(batches))])
        changes(data)
        try:
            found[-1].append(facts(next(batches)))
        except IndexError as error:
            found[-1].append(str(error))
    assert found[0] == found[1]
    assert whole[-3:] == [True, True, False]  # toys may have been fetched before


IMAGES = torch.arange(96.0).reshape(4, 2, 3, 4)


@pytest.mark.parametrize("indices", [[0, 1], [True, False], [numpy.int64(1), 0], [torch.tensor(1), 0], [-1, 0]])
@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(IMAGES), TensorDataset(IMAGES.contiguous(memory_format=torch.channels_last)),
        TensorDataset(IMAGES.transpose(0, 1)), TensorDataset(torch.complex(IMAGES, IMAGES).conj()),
        TensorDataset(torch.complex(IMAGES, IMAGES).conj().imag), TensorDataset(IMAGES.expand(4, 2, 3, 4)[:, :1]),
        Subset(TensorDataset(IMAGES), [True, False]), Subset(TensorDataset(IMAGES), [3, 2]),
        Subset(TensorDataset(IMAGES), torch.tensor([3, 2])),  # type: ignore[arg-type]
        Subset(TensorDataset(IMAGES), numpy.array([3, 2])),  # type: ignore[arg-type]
        Subset(TensorDataset(IMAGES), numpy.array([True, False])),  # type: ignore[arg-type]
        Subset(TensorDataset(IMAGES), torch.tensor([3, 2], dtype=torch.uint8)),  # type: ignore[arg-type]
    ],
    ids=lambda data: type(data).__name__,
)  # fmt: skip
def test_odd_indices_and_tensors_give_what_torch_gives(data: Any, indices: list[Any]) -> None:
    for form in (list, tuple):
        loader = DataLoader(data, batch_sampler=[form(indices), form(indices[:1])])  # type: ignore[arg-type]
        seen = []
        for start in (iter, start_pass):
            batches = start(loader)
            for _ in range(2):
                try:
                    seen.append(facts(next(batches)))
                except Exception as error:
                    seen.append((type(error), str(error)))
        assert seen[:2] == seen[2:]


def test_a_default_device_changes_nothing(whole: list[bool]) -> None:
    batches = start_pass(DataLoader(TensorDataset(torch.arange(6)), 3))
    with torch.device("meta"):
        assert next(batches)[0].tolist() == [0, 1, 2]
    with torch.inference_mode():
        assert next(batches)[0].is_inference()
    assert whole == [True, True]


def test_a_default_device_that_torchs_sampler_cannot_use_raises_what_torch_raises(sliced: list[Any]) -> None:
    messages = []
    for start in (iter, start_pass):
        batches = start(shuffled("shuffled", False, False))
        with torch.device("meta"), pytest.raises(Exception, match="meta") as error:
            next(batches)
        messages.append((type(error.value), str(error.value)))
    assert messages[0] == messages[1]
    assert len(sliced) == 1


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_profilers_and_modes_see_the_ranges_of_torchs_iterator(sliced: list[Any]) -> None:
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    found = []
    for start in (iter, start_pass):
        with torch.autograd.profiler.profile(use_kineto=False) as all_of_it:
            batches = list(start(shuffled("shuffled", False, False)))
        batches = start(shuffled("shuffled", False, False))
        next(batches)
        with torch.autograd.profiler.profile(use_kineto=False) as two:
            next(batches), next(batches)
        with Counts() as mode:
            next(batches)
        found.append([[each.name for each in profile.function_events].count(name) for profile in (all_of_it, two)])
        found[-1].append(sum(count for each, count in mode.seen.items() if "record_function" in each))
    assert found[0] == found[1]
    assert found[0][:2] == [5, 2]
    assert len(sliced) == 1


def test_recorded_and_combined_loaders_are_those_of_a_for_loop(whole: list[bool]) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10), torch.randn(10, 2)), 4, shuffle=True)
    torch.manual_seed(3)
    expected = [facts(batch) for batch in loader]
    torch.manual_seed(3)
    recorded = RecordedIndices(loader)
    for batch, plain in zip(recorded, expected, strict=True):
        assert facts(batch) == plain
        assert recorded.pop() == batch[0].tolist()
    torch.manual_seed(3)
    combined = CombinedLoader([loader], "sequential")
    assert [facts(batch) for batch, _, _ in combined] == expected
    assert whole == [True] * 6


# ---- workers ---------------------------------------------------------------------------------------------------------


def set_third_sample(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Subset
    info.dataset.dataset.tensors[0][2] = 100 + worker_id


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_init_fn_finds_the_users_data_set(context: str) -> None:
    seen = []
    for start in (iter, start_pass, passes_over):
        data = TensorDataset(torch.arange(6))
        seen.append([
            batch[0].tolist()
            for batch in start(
                DataLoader(
                    Subset(data, range(6)), 3, num_workers=1, worker_init_fn=set_third_sample,
                    multiprocessing_context=context,
                )
            )
        ])  # fmt: skip
    assert seen == [[[0, 1, 100], [3, 4, 5]]] * 3


def test_workers_that_persist_live_in_the_users_loader() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), 3, num_workers=1, persistent_workers=True)
    first = start_pass(loader)
    assert [batch[0].tolist() for batch in first] == [[0, 1, 2], [3, 4, 5]]
    assert loader._iterator is first
    second = start_pass(loader)
    assert second is first
    assert [batch[0].tolist() for batch in second] == [[0, 1, 2], [3, 4, 5]]
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    assert loader._iterator is first


# ---- everything else takes torch's way -------------------------------------------------------------------------------


class Own(TensorDataset):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        type(self).calls += 1
        return super().__getitem__(index)


class OwnSubset(Subset[Any]):
    calls = 0

    def __getitems__(self, indices: Any) -> Any:
        type(self).calls += 1
        return super().__getitems__(indices)


class OwnStack(StackDataset[Any]):
    pass


class OwnLoader(DataLoader[Any]):
    pass


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


X = torch.arange(4.0)
PLAIN = TensorDataset(X)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Own(X), 2), "contains a Own"),
        (DataLoader(Subset(Own(X), [0, 1, 2, 3]), 2), "contains a Own"),
        (DataLoader(OwnSubset(PLAIN, [0, 1, 2, 3]), 2), "contains a OwnSubset"),
        (DataLoader(OwnStack(X), 2), "contains a OwnStack"),
        (DataLoader(Rows(), 2), "contains a Rows"),
        (DataLoader([1, 2, 3, 4], 2), "contains a list"),  # type: ignore[arg-type]
        (DataLoader(StackDataset(PLAIN, Rows()), 2), "not dense"),
        (DataLoader(Subset(PLAIN, Listed([0, 1, 2, 3])), 2), "indices of its Subset are a Listed"),
        (DataLoader(Subset(PLAIN, torch.ones(4, dtype=torch.bool)), 2), "indices of its Subset are a Tensor"),  # type: ignore[arg-type]
        (OwnLoader(PLAIN, 2), "OwnLoader is a subclass of DataLoader"),
        (DataLoader(PLAIN, 2, collate_fn=lambda samples: default_collate(samples)), "collate_fn"),
        (DataLoader(PLAIN, None), "no batch size"),
        (DataLoader(TensorDataset(torch.nn.Parameter(X)), 2), "not dense"),
        (DataLoader(TensorDataset(X.to_sparse()), 2), "not dense"),
        (DataLoader(TensorDataset(X.reshape(2, 2).T), 2), "not dense"),
        (DataLoader(TensorDataset(torch.complex(X, X).conj()), 2), "not dense"),
        (DataLoader(Subset(PLAIN, numpy.array([1.0, 2.0])), 2), "indices of its Subset are a ndarray"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_other_loaders_are_iterated_as_they_are(loader: Any, reason: str, whole: list[bool]) -> None:
    assert reason in str(reason_for_samples(loader))
    assert batched.batched(loader) is loader
    seen = []
    for start in (iter, start_pass, passes_over):
        try:
            seen.append([facts(batch) for batch in start(loader)])
        except (RuntimeError, IndexError) as error:  # of sparse tensors, and of numbers that are no indices
            seen.append([str(error)])
    assert seen[0] == seen[1] == seen[2]
    assert whole == []


@pytest.mark.parametrize("start", [iter, start_pass, passes_over])
def test_a_users_data_set_is_called_as_often_as_torch_calls_it(start: Any) -> None:
    Own.calls = OwnSubset.calls = 0
    assert len(list(start(DataLoader(Own(X), 2)))) == 2
    assert Own.calls == 4
    assert len(list(start(DataLoader(OwnSubset(PLAIN, [0, 1, 2, 3]), 2)))) == 2
    assert OwnSubset.calls == 2


def test_methods_that_a_program_has_replaced_are_called(monkeypatch: pytest.MonkeyPatch, whole: list[bool]) -> None:
    data = TensorDataset(X)
    batches = start_pass(DataLoader(data, 2))
    next(batches)
    data.__getitems__ = lambda indices: [torch.tensor(7)]  # type: ignore[attr-defined]
    assert next(batches).tolist() == [7]
    assert whole == [True, False]
    assert [batch.tolist() for batch in start_pass(DataLoader(data, 2))] == [[7], [7]]
    part = Subset(PLAIN, [3, 2, 1, 0])
    batches = start_pass(DataLoader(part, 2))
    assert next(batches)[0].tolist() == [3, 2]
    part.__getitems__ = lambda indices: [torch.tensor(6)]  # type: ignore[method-assign]
    assert next(batches).tolist() == [6]
    assert whole == [True, False, True, False]
    for name, replaced in {
        "__getitem__": lambda self, index: torch.tensor(8),
        "__getitems__": lambda self, indices: [torch.tensor(8)] * 2,
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(TensorDataset, name, replaced, raising=False)
            assert [batch.tolist() for batch in start_pass(DataLoader(PLAIN, 2))] == [[8, 8]] * 2
    with monkeypatch.context() as patched:
        patched.setattr(Subset, "__getitems__", lambda self, indices: [torch.tensor(9)])
        assert [batch.tolist() for batch in start_pass(DataLoader(Subset(PLAIN, [1, 2]), 2))] == [[9]]
    assert len(whole) == 4


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DataLoader, "__iter__"), (DataLoader, "_get_iterator"), (_SingleProcessDataLoaderIter, "__next__"),
        (_SingleProcessDataLoaderIter, "_next_data"), (BatchSampler, "__iter__"), (RandomSampler, "__iter__"),
        (_MapDatasetFetcher, "fetch"),
    ],
)  # fmt: skip
def test_methods_of_torchs_iterator_and_samplers_that_a_program_has_replaced_are_called(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch, sliced: list[Any]
) -> None:
    calls: list[str] = []
    original = getattr(kind, name)

    @functools.wraps(original)
    def replaced(*args: Any) -> Any:
        calls.append(name)
        return original(*args)

    monkeypatch.setattr(kind, name, replaced)
    for start in (iter, start_pass, passes_over):
        assert len(list(start(shuffled("shuffled", False, False)))) == 4
        calls.append("end")
    ended = [index for index, each in enumerate(calls) if each == "end"]
    assert ended[0] > 0
    assert ended == [ended[0], 2 * ended[0] + 1, 3 * ended[0] + 2]
    assert sliced == []


@pytest.mark.parametrize("fault", ["_slices", "_iterate_plainly"])
def test_torchs_iterator_is_used_if_a_toy_differs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(start_pass(DataLoader(PLAIN, 2))) is map
    original = getattr(batched, fault)

    def draws_more(*args: Any) -> Any:
        torch.rand(1)
        return original(*args)

    monkeypatch.setattr(batched, fault, draws_more)
    monkeypatch.setattr(batched, "_toys_are_equal", batched._toys_are_equal.__wrapped__)
    before = torch.get_rng_state()
    assert not batched._toys_are_equal()
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(start_pass(DataLoader(PLAIN, 2)), _SingleProcessDataLoaderIter)


@pytest.mark.parametrize("options", [{"pin_memory": True}, {"num_workers": 1}])
def test_loaders_that_pin_memory_or_have_workers_keep_torchs_iterator(options: Any) -> None:
    loader: DataLoader[Any] = DataLoader(PLAIN, 2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no accelerator to pin memory for
        batches = start_pass(loader)
        assert isinstance(batches, _BaseDataLoaderIter)
        assert [batch[0].tolist() for batch in batches] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", [Tensor, tuple])
def test_a_collate_function_that_a_program_has_registered_is_called(kind: type) -> None:
    saved = dict(default_collate_fn_map)
    try:
        default_collate_fn_map[kind] = lambda samples, collate_fn_map: len(samples)  # type: ignore[index]
        expected = list(DataLoader(PLAIN, 2))
        assert list(start_pass(DataLoader(PLAIN, 2))) == expected
        assert expected in ([2, 2], [[2], [2]])
    finally:
        default_collate_fn_map.clear()
        default_collate_fn_map.update(saved)


# ---- in a run --------------------------------------------------------------------------------------------------------


class Sums(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[Any] = []

    def step(self, batch: Any) -> Tensor:
        self.seen.append(batch[0].tolist())
        return self.layer(batch[0]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def make_trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(max_epochs=2, accelerator="cpu", devices=1, **{**quiet, **arguments})


class SeesLoader(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.loader = trainer.train_dataloader


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_a_trainer_fetches_batches_as_a_whole_in_every_stage(method: str, whole: list[bool], sliced: list[Any]) -> None:
    loader = DataLoader(TensorDataset(torch.randn(12, 2), torch.arange(12)), 4, shuffle=method == "fit")
    kept = dict(vars(loader))
    torch.manual_seed(4)
    plain = [batch[0].tolist() for _ in range(2 if method == "fit" else 1) for batch in loader]
    drawn = torch.get_rng_state()
    module, callback = Sums(), SeesLoader()
    torch.manual_seed(4)
    getattr(make_trainer(callbacks=[callback], limit_val_batches=1.0 if method == "validate" else 0), method)(
        module, loader
    )
    assert module.seen == plain
    assert torch.equal(torch.get_rng_state(), drawn)
    assert vars(loader) == kept
    assert whole == [True] * len(plain)
    assert len(sliced) == len(plain) // 3
    assert method != "fit" or callback.loader is loader


def test_an_engine_fetches_batches_as_a_whole(whole: list[bool], sliced: list[Any]) -> None:
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), 4)
    wrapped = Engine(accelerator="cpu", devices=1).setup_dataloaders(loader)
    assert [facts(batch) for batch in wrapped] == [facts(batch) for batch in loader]
    assert whole == [True] * 3
    assert len(sliced) == 1


def test_a_log_line_says_how_batches_are_fetched(caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.randn(4, 2))
    with caplog.at_level(logging.DEBUG, log.name):
        make_trainer().validate(Sums(), DataLoader(data, 2), verbose=False)
        make_trainer().validate(Sums(), DataLoader(Own(*data.tensors), 2), verbose=False)
        Engine(accelerator="cpu", devices=1).setup_dataloaders([1, 2], DataLoader(data, 2))
    lines = [message for message in caplog.messages if "fetched" in message]
    by_tensor = "DataLoader over TensorDataset: batches are fetched with one index operation per tensor"
    assert lines == [
        by_tensor,
        "DataLoader over Own: batches are fetched sample by sample, because its dataset contains a Own that is not one "
        "of torch's, made of tensors",
        by_tensor,
    ]


def test_a_loader_can_still_be_copied() -> None:
    loader = batched.batched(DataLoader(PLAIN, 2))
    assert [facts(each) for each in copy.copy(loader)] == [facts(each) for each in itertools.islice(loader, 2)]
