"""With ``sample_seeds``, a sample's random numbers depend on seed, epoch and index, and on nothing else."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from drivetrain import Callback, Engine, LightningModule, Trainer
from drivetrain.base.seed import rng_state, seed_everything, set_rng_state
from drivetrain.data import CombinedLoader
from drivetrain.data.passes import passes_over
from drivetrain.data.sample_seeds import SampleSeeds, seed_of_program
from drivetrain.data.samplers import share
from drivetrain.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")  # on a small machine
SAMPLES = 14


def noise() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand((), dtype=torch.float64).item()]


class Augmented(Dataset[Any]):
    """Samples of their index, an attribute, and a number of each generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count, self.added = count, 0.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if self.count > SAMPLES:  # not all samples draw equally many numbers
            noise()
        return torch.tensor([float(index), self.added, *noise()], dtype=torch.float64)


def epochs_of(loader: Any, count: int = 2, seed: int | None = 7, before: Callable[[int], None] | None = None) -> Any:
    """The batches of ``count`` epochs from the same random state, and that state afterwards."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    now = [0]
    passes = passes_over(loader, seeds=None if seed is None else SampleSeeds(seed, lambda: now[0]))
    found: list[Any] = []
    for now[0] in range(count):
        passes.start_epoch()
        if before is not None:
            before(now[0])
        found.append(list(passes))
    passes.close()
    return found, noise()


def by_index(epochs: Any) -> dict[tuple[int, int], list[float]]:
    """The numbers of each sample, by its epoch and its index."""
    rows = [(epoch, row) for epoch, batches in enumerate(epochs) for batch in batches for row in batch.tolist()]
    return {(epoch, int(row[0])): row[2:] for epoch, row in rows}


def equal(found: Any, other: Any) -> bool:
    flat, rest = ([as_tensor(batch) for epoch in each for batch in epoch] for each in (found, other))
    return len(flat) == len(rest) and all(map(torch.equal, flat, rest))


def as_tensor(batch: Any) -> Tensor:
    return torch.cat(batch) if isinstance(batch, list) else batch  # the batches of a CombinedLoader


def shuffled(workers: int, persistent: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), 3, shuffle=True, num_workers=workers, persistent_workers=persistent, **options)


@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (1, True), (4, False), (4, True)])
def test_batches_and_the_random_state_are_the_same_with_any_number_of_workers(workers: int, persistent: bool) -> None:
    (expected, state), (found, after) = epochs_of(shuffled(0)), epochs_of(shuffled(workers, persistent))
    assert equal(found, expected)
    assert after == state
    assert len({number for numbers in by_index(found).values() for number in numbers}) == 2 * SAMPLES * 3


def test_without_the_argument_they_depend_on_the_workers() -> None:
    (plain, state), (found, after) = epochs_of(shuffled(0), seed=None), epochs_of(shuffled(1), seed=None)
    assert not equal(found, plain)
    assert after != state
    assert len(by_index(plain)) == 2 * SAMPLES  # the same samples, with other numbers


@pytest.mark.parametrize("own_batches", [False, True])
def test_ranks_draw_what_one_process_draws(own_batches: bool) -> None:
    order = {"batch_sampler": BatchSampler(SequentialSampler(range(SAMPLES)), 4, False)} if own_batches else {}
    loader: Any = DataLoader(Augmented(), **(order or {"batch_size": 4}))  # type: ignore[arg-type]
    whole = by_index(epochs_of(loader)[0])
    for ranks in (2, 3):
        parts: list[Any] = [share(loader, rank, ranks, lambda value: value) for rank in range(ranks)]
        found = [by_index(epochs_of(part)[0]) for part in parts]
        assert {key: numbers for each in found for key, numbers in each.items()} == whole
        assert all(len(each) < len(whole) for each in found)


def test_other_epochs_and_seeds_have_other_numbers() -> None:
    loader = DataLoader(Augmented(), 5)
    first, second = epochs_of(loader)[0]
    [other] = epochs_of(loader, 1, seed=8)[0]
    assert equal([first], epochs_of(loader, 1)[0])
    for each in (second, other):
        assert not set(torch.cat(first)[:, 2:].flatten().tolist()) & set(torch.cat(each)[:, 2:].flatten().tolist())


def of_length(count: int, workers: int) -> DataLoader[Any]:
    return DataLoader(Augmented(count), 3, num_workers=workers)


class Words(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([float(len(index)), 0.0, *noise()], dtype=torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        lambda workers: DataLoader(Subset(Augmented(), [9, 3, 4]), 2, num_workers=workers),
        lambda workers: DataLoader(ConcatDataset([Augmented(), Augmented(20)]), 5, num_workers=workers),
        lambda workers: DataLoader(Augmented(), None, num_workers=workers),
        lambda workers: DataLoader(Augmented(), batch_sampler=[[1, 2], [0, 5, 1]], num_workers=workers),
        lambda workers: DataLoader(Augmented(), 2, sampler=torch.arange(5), num_workers=workers),
        lambda workers: DataLoader(Words(), None, sampler=["a", "to", "one"], num_workers=workers),  # type: ignore[arg-type]
        lambda workers: DataLoader(Words(), None, num_workers=workers, sampler=BatchSampler(range(5), 2, False)),  # type: ignore[arg-type]
        lambda workers: CombinedLoader([of_length(9, workers), of_length(5, workers)], "max_size_cycle"),
    ],
    ids=["subset", "concatenated", "samples", "batch sampler", "tensors", "words", "lists", "combined"],
)  # fmt: skip
def test_kinds_of_loaders(make: Callable[[int], Any]) -> None:
    (expected, state), (found, after) = epochs_of(make(0)), epochs_of(make(2))
    assert equal(found, expected)
    assert after == state
    for epochs in (expected, found):
        assert not equal(epochs[:1], epochs[1:])


def test_each_pass_over_a_shorter_loader_has_its_own_numbers_and_goes_on_with_them() -> None:
    def passes() -> Any:
        loader = CombinedLoader([DataLoader(Augmented(8), 2), DataLoader(Augmented(2), 2)], "max_size_cycle")
        return passes_over(loader, seeds=SampleSeeds(7, lambda: 3))

    (whole, positions), one = ([], []), passes()
    for batch in one:
        whole.append(batch)
        positions.append(one.position())
    shorter = [batch[1] for batch in whole]
    assert len({float(batch[0, 2]) for batch in shorter}) == 4
    (again := passes()).resume(positions[1])
    rest = list(again)
    assert equal([rest], [whole[2:]])


@pytest.mark.parametrize("limit", [2, 5], ids=["abandoned", "complete"])
@pytest.mark.parametrize("resumed_with", [(2, True), (0, False)], ids=["persistent workers", "no workers"])
def test_a_pass_after_a_resume_between_epochs_is_the_same(limit: int, resumed_with: tuple[int, bool]) -> None:
    now = [0]

    def epoch_of(passes: Any) -> tuple[list[Any], list[float]]:
        passes.start_epoch()
        passes.limit = limit
        batches = list(passes)
        return batches, noise()

    torch.manual_seed(1)
    first = passes_over(shuffled(2, True), seeds=SampleSeeds(7, lambda: now[0]))
    epoch_of(first)
    position, state, now[0] = first.position(), rng_state(), 1
    batches, after = epoch_of(first)
    first.close()
    then = passes_over(shuffled(*resumed_with), seeds=SampleSeeds(8, lambda: now[0]))
    then.carry_over(position)
    set_rng_state(state)
    found, found_after = epoch_of(then)
    then.close()
    assert equal([found], [batches])
    assert found_after == after


def noisy(samples: Any) -> Any:
    return torch.cat([default_collate(samples), torch.tensor([[0.0, 0.0, *noise()]])])


def test_numbers_of_a_collate_fn_do_not_depend_on_the_workers() -> None:
    (expected, state), (found, after) = (epochs_of(shuffled(workers, collate_fn=noisy)) for workers in (0, 2))
    assert equal(found, expected)
    assert after == state
    assert len({float(batch[-1, 2]) for epoch in found for batch in epoch}) == 10


def test_the_state_is_kept_if_a_sample_raises() -> None:
    class Fails(Augmented):
        def __getitem__(self, index: int) -> Tensor:
            super().__getitem__(index)
            raise ValueError("no such sample")

    passes = passes_over(DataLoader(Fails(), 2), seeds=SampleSeeds(7, lambda: 0))
    batches = iter(passes)
    before = rng_state()
    with pytest.raises(ValueError, match="no such sample"):
        next(batches)
    assert torch.equal(rng_state()["torch"], before["torch"])
    assert [rng_state()[name] for name in ("python", "numpy")] == [before[name] for name in ("python", "numpy")]


class Informed(Augmented):
    """Its samples say whether its worker's dataset is one of this class, and which worker was initialized."""

    def __getitem__(self, index: int) -> Tensor:
        info: Any = get_worker_info()
        return torch.tensor([float(isinstance(info.dataset, Informed)), INITIALIZED[0], self.added])


INITIALIZED = [-1]


def initialize(worker: int) -> None:
    info: Any = get_worker_info()
    assert isinstance(info.dataset, Informed)
    INITIALIZED[0] = worker


def test_workers_see_the_users_dataset_and_its_changes() -> None:
    loader = DataLoader(data := Informed(4), 1, num_workers=1, worker_init_fn=initialize)
    epochs, _ = epochs_of(loader, before=lambda epoch: setattr(data, "added", float(epoch)))
    assert [torch.cat(epoch).tolist() for epoch in epochs] == [[[1.0, 0.0, added]] * 4 for added in (0.0, 1.0)]
    without, _ = epochs_of(DataLoader(data, 1, num_workers=1))
    assert float(without[0][0][0, 0]) == 1.0


def test_tensors_are_still_fetched_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("drivetrain.data.sample_seeds._Samples")
    epochs, _ = epochs_of(DataLoader(TensorDataset(torch.arange(6.0)), 3))
    assert [batch.tolist() for [batch] in epochs[0]] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(NameError):  # the check can fail
        epochs_of(DataLoader(Augmented(), 3))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(4.0))


@pytest.mark.parametrize(
    ("loader", "named"), [(DataLoader(Stream()), "DataLoader over Stream, "), ([torch.zeros(1)], "list, ")]
)
def test_a_loader_without_indices_is_named(loader: Any, named: str) -> None:
    with pytest.warns(UserWarning, match=f"sample_seeds=True has no effect on the loader {named}"):
        passes_over(loader, seeds=SampleSeeds(7, lambda: 0))


@pytest.mark.usefixtures("no_seed")
def test_an_engine_draws_what_a_trainer_draws() -> None:
    loader, tensors = DataLoader(Augmented(), 5), DataLoader(TensorDataset(torch.arange(6.0)), 3)
    seed_everything(7)
    found, whole = Engine(accelerator="cpu").setup_dataloaders(loader, tensors, sample_seeds=True)
    assert equal([list(found) for _ in range(2)], epochs_of(loader)[0])
    assert found.dataset is loader.dataset
    assert len(list(whole)) == 2
    with pytest.warns(UserWarning, match="no effect on the loader DataLoader over Stream, "):
        Engine(accelerator="cpu").setup_dataloaders(DataLoader(Stream()), sample_seeds=True)


# ---- fits ------------------------------------------------------------------------------------------------------------


class Net(LightningModule):
    """Learns with dropout, and keeps the numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.seen: dict[tuple[int, int], list[float]] = {}
        self.counts = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.counts:
            self.seen |= {(self.current_epoch, int(row[0])): row[2:] for row in batch.tolist()}
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)


class Saves(Callback):
    """Saves in the middle of the second epoch, after which no sample counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            trainer.save_checkpoint(self.path)
            trainer.should_stop, module.counts = True, False


def fitted(
    workers: int = 0, saves: Path | None = None, resumes: Path | None = None, seed: int | None = 3, seeds: bool = True
) -> tuple[Tensor, dict[tuple[int, int], list[float]]]:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if seed is None:
        os.environ.pop("PL_GLOBAL_SEED", None)
    else:
        seed_everything(seed)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=3, sample_seeds=seeds,
        split_batches=ranks > 1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Saves(saves)] if saves else [],
    )  # fmt: skip
    torch.manual_seed(3)
    loader = DataLoader(Augmented(), 6, shuffle=True, num_workers=workers, persistent_workers=workers > 1)
    trainer.fit(module := Net(), loader, ckpt_path=resumes)
    return nn.utils.parameters_to_vector(module.parameters()).detach(), module.seen


@pytest.fixture
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # so that it is restored


@pytest.mark.usefixtures("no_seed")
def test_dropout_is_the_same_with_workers() -> None:
    (weights, seen), (found, also) = fitted(), fitted(workers=2)
    assert torch.equal(found, weights)
    assert also == seen
    assert not torch.equal(fitted(seeds=False)[0], fitted(workers=2, seeds=False)[0])  # the control


@pytest.mark.usefixtures("no_seed")
def test_a_fit_resumed_inside_an_epoch_equals_one_that_was_not_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain")
    weights, seen = fitted()
    _, first = fitted(workers=2, saves=tmp_path / "a.ckpt")
    found, rest = fitted(resumes=tmp_path / "a.ckpt", seed=4)
    assert "continue with the checkpoint's seed 3, not with 4." in caplog.text
    assert torch.equal(found, weights)
    assert first | rest == seen
    assert not first.keys() & rest.keys()


@pytest.mark.usefixtures("no_seed")
def test_other_ranks_draw_the_same_and_go_on_inside_an_epoch(pool: Any, tmp_path: Path) -> None:
    _, seen = fitted()
    first = [each for _, each in pool.run(fitted, 0, tmp_path / "a.ckpt", world_size=3, group=False)]
    rest = [each for _, each in pool.run(fitted, 0, None, tmp_path / "a.ckpt", world_size=2, group=False)]
    assert {key: numbers for each in [*first, *rest] for key, numbers in each.items()} == seen
    assert {key for each in first for key in each}.isdisjoint(key for each in rest for key in each)


@pytest.mark.usefixtures("no_seed")
def test_without_a_seed_it_is_0_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "drivetrain")
    _, seen = fitted(seed=None)
    assert caplog.text.count("the seed of the samples' random numbers is 0.") == 1
    caplog.clear()
    assert fitted(seed=0)[1] == seen
    assert "the seed of the samples" not in caplog.text
    os.environ["PL_GLOBAL_SEED"] = "one"
    with pytest.raises(ConfigurationError, match="PL_GLOBAL_SEED must be an integer"):
        seed_of_program()
