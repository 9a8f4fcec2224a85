"""A trial leaves no trace: what a fit sees and logs after a finder is what it does without one, whatever its loader.

The sanity check is such a trial too.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Regression
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from drivetrain import Callback, LightningDataModule
from drivetrain.callbacks import BatchSizeFinder, LearningRateFinder
from drivetrain.data import CombinedLoader
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger


class Rows(Dataset[Any]):
    """Counts what is asked of it, and draws from generators of its own."""

    def __init__(self) -> None:
        self.asked, self.cache = 0, dict[int, Any]()
        self.python, self.torch = random.Random(3), torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        noise = self.python.random() + torch.rand((), generator=self.torch) + torch.rand(())
        row = self.cache.setdefault(index, torch.full((4,), float(index) + float(noise) / 8))
        return row, row.sum(0, keepdim=True) / 10


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.generator, self.passes = torch.Generator().manual_seed(1), 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for index in range(12):
            row = torch.full((4,), index + float(torch.rand((), generator=self.generator)) + self.passes)
            yield row, row.sum(0, keepdim=True) / 10


class Stateful:
    """A loader that continues where it is."""

    def __init__(self) -> None:
        self.inner = {"at": 0, "past": [0]}

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = copy.deepcopy(state)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self.inner["at"] += 1
            self.inner["past"].append(self.inner["at"])
            row = torch.full((2, 4), float(self.inner["at"]))
            yield row, row.sum(1, keepdim=True) / 10


class Native:
    """The same; its state is nowhere but in what it returns."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self.at += 1
            row = torch.full((2, 4), float(self.at))
            yield row, row.sum(1, keepdim=True) / 10


class Order(Sampler[int]):
    def __init__(self) -> None:
        self.order, self.turns = torch.Generator().manual_seed(2), [0]

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.turns[0] += 1
        yield from torch.randperm(12, generator=self.order).roll(self.turns[0]).tolist()


def workers(persistent: bool) -> Any:
    return DataLoader(Rows(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=persistent)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [(torch.full((2, 4), float(index)), torch.ones(2, 1)) for index in range(4)],
    "plain": lambda: DataLoader(Rows(), batch_size=3),
    "shuffled": lambda: DataLoader(Rows(), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(Rows(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(9)),
    "workers": lambda: workers(False),
    "persistent workers": lambda: workers(True),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "stateful": Stateful,
    "stateful without attributes": Native,
    "own sampler": lambda: DataLoader(Rows(), batch_size=3, sampler=Order()),
    "combined": lambda: CombinedLoader([DataLoader(Rows(), batch_size=3, sampler=Order()), Stateful()], "max_size"),
    "combined in order": lambda: CombinedLoader({"a": Stateful(), "b": DataLoader(Stream(), 3)}, "max_size_cycle"),
}


class Data(LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.moved, self.batch_size = loader, 0, 2

    def train_dataloader(self) -> Any:
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved += 1
        return batch


class Sees(Regression):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(dropout=0.2)
        self.lr, self.generator, self.seen = 0.01, torch.Generator().manual_seed(6), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else [batch] if torch.is_tensor(batch[0]) else batch
        parts = [part for part in parts if part is not None]
        noise = float(torch.rand((), generator=self.generator))
        self.seen.append((float(sum(part[0].sum() for part in parts)), noise, float(torch.rand(())), random.random()))
        return torch.stack([self.loss(part) for part in parts]).sum()


class Counts(Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.filterwarnings("ignore:There are . finite losses", "ignore:.*num_workers", "ignore:.*multi-threaded")
def test_a_fit_after_a_finder_sees_what_it_sees_without(make_trainer: Any, kind: str, passed: bool) -> None:
    if passed is False and "worker" in kind:
        pytest.skip("covered where they are passed")

    def seen(finders: list[Callback]) -> Any:
        module, loader, counts = Sees(), LOADERS[kind](), Counts()
        data = Data(loader)
        torch.manual_seed(8)
        random.seed(8)
        trainer = make_trainer(max_epochs=2, callbacks=[counts, *finders])
        trainer.fit(module, **({"train_dataloaders": loader} if passed else {"datamodule": data}))
        return module.seen, counts.batches, data.moved, torch.get_rng_state(), random.getstate()

    finders: list[Callback] = [LearningRateFinder(num_training_steps=6, update_attr=False)]
    if not passed:
        finders.append(BatchSizeFinder(max_trials=2, init_val=2, max_val=2))
    for one, other in zip(seen([]), seen(finders), strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other


# ---- loaders that can be iterated only once --------------------------------------------------------------------------


def batches() -> Iterator[Any]:
    yield from LOADERS["list"]()


class Again:
    """An iterator of its own, which begins again with each pass."""

    def __iter__(self) -> Iterator[Any]:
        self.rest = batches()
        return self

    def __next__(self) -> Any:
        return next(self.rest)


ONCE: dict[str, Callable[[], Any]] = {
    "generator": batches,
    "iter()": lambda: iter(LOADERS["list"]()),
    "map()": lambda: map(tuple, LOADERS["list"]()),
    "combined": lambda: CombinedLoader({"a": LOADERS["plain"](), "b": batches()}, "max_size"),
}


def fitted(make_trainer: Any, train: Any, validate: Any = None, finders: Sequence[Callback] = (), **more: Any) -> Any:
    random.seed(8)
    trainer = make_trainer(max_epochs=1, callbacks=[*finders], **more)
    trainer.fit(module := Sees(), train, validate)
    return module


@pytest.mark.parametrize("kind", ONCE)
def test_a_finder_refuses_a_loader_whose_batches_it_would_take(make_trainer: Any, kind: str) -> None:
    loader, finder = ONCE[kind](), LearningRateFinder(num_training_steps=3, update_attr=False)
    with pytest.raises(ConfigurationError, match="can be iterated only once.*leave the finder out"):
        fitted(make_trainer, loader, None, [finder])
    assert len(fitted(make_trainer, loader).seen) == 4  # and has taken none


@pytest.mark.filterwarnings("ignore:There are . finite losses")
def test_an_iterator_that_begins_again_is_tried(make_trainer: Any) -> None:
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    assert fitted(make_trainer, Again(), None, [finder]).seen == fitted(make_trainer, Again()).seen


# ---- loggers ---------------------------------------------------------------------------------------------------------


class Logs(Sees):
    """Logs in each way in which a module can."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.logger.log_metrics({"direct": loss.item()}, step=self.global_step)
        self.logger.log_hyperparams({"seen": len(self.seen)})
        self.logger.experiment.log_metrics({"experiment": loss.item()}, step=self.global_step)
        return loss


class Slices(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), self.batch_size)


@pytest.mark.filterwarnings("ignore:There are . finite losses")
@pytest.mark.parametrize("kind", ["learning rate", "batch size"])
def test_the_files_of_a_logger_hold_nothing_of_a_trial(make_trainer: Any, tmp_path: Path, kind: str) -> None:
    def written(folder: Path, finders: Sequence[Callback]) -> dict[str, str]:
        torch.manual_seed(8)
        random.seed(8)
        logger = CSVLogger(folder)
        trainer = make_trainer(max_epochs=2, callbacks=[*finders], logger=logger, log_every_n_steps=1)
        trainer.fit(Logs(), datamodule=Slices(None))
        [record] = [json.loads(path.read_text()) for path in folder.rglob("run.json")]
        assert len(record["attempts"]) == 1
        files = (path for path in folder.rglob("*.*") if path.is_file() and path.name != "run.json")  # it has times
        return {str(path.relative_to(folder)): path.read_text() for path in files}

    finder = LearningRateFinder(num_training_steps=6, update_attr=False)
    other = BatchSizeFinder(max_trials=2, init_val=2, max_val=2)
    expected = written(tmp_path / "without", [])
    assert "direct" in expected["lightning_logs/version_0/metrics.csv"]
    assert written(tmp_path / "with", [finder if kind == "learning rate" else other]) == expected


# ---- the sanity check ------------------------------------------------------------------------------------------------


class Validates(Sees):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(float(batch[0].sum()))


VALIDATED = {**{name: LOADERS[name] for name in LOADERS if "combined" not in name}, "generator": batches}


@pytest.mark.parametrize("kind", VALIDATED)
@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:.*multi-threaded", "ignore:.*generator")
def test_validations_see_the_same_after_a_sanity_check(make_trainer: Any, kind: str) -> None:
    def seen(sanity_steps: int) -> list[float]:
        torch.manual_seed(8)
        random.seed(8)
        trainer = make_trainer(max_epochs=1, num_sanity_val_steps=sanity_steps, limit_val_batches=2)
        trainer.fit(module := Validates(), LOADERS["list"](), VALIDATED[kind]())
        return module.seen

    assert seen(1) == seen(0)
    assert len(seen(0)) == 2
