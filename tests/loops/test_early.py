"""The switch ``early_iterators``: loaders start when Lightning starts them, so they draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningDataModule, LightningModule, parity
from drivetrain.data.combined import CombinedLoader

pytestmark = pytest.mark.filterwarnings("ignore:.* has a validation_step but there is no validation loader")

SAMPLES = torch.ones(4, 1)


@pytest.fixture
def early() -> Iterator[None]:
    before = parity.use(parity.Parity(early_iterators=True))
    yield
    parity.use(before)


class Loader:
    """Notes when it is started and what is fetched of it."""

    def __init__(self, name: str, events: list[str], sized: bool = True) -> None:
        self.name, self.events = name, events
        if sized:
            self.__class__ = Sized

    def __iter__(self) -> Iterator[list[Tensor]]:
        self.events.append(f"{self.name} starts")
        return self.batches()

    def batches(self) -> Iterator[list[Tensor]]:
        for number in range(2):
            self.events.append(f"{self.name} {number}")
            yield [SAMPLES[:2]]


class Sized(Loader):
    def __len__(self) -> int:
        return 2


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noting(Callback):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("on_train_start")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("on_train_epoch_start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.events.append("on_train_batch_end")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("on_validation_start")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("on_predict_start")


def fitted(make_trainer: Any, sized: bool = True, **arguments: Any) -> list[str]:
    events: list[str] = []
    trainer = make_trainer(callbacks=[Noting(events)], num_sanity_val_steps=0, **arguments)
    trainer.fit(Net(), Loader("train", events, sized), Loader("val", events, sized))
    return events


EPOCH = ["train 0", "on_train_batch_end", "train 1", "on_train_batch_end"]
VALIDATION = ["val starts", "on_validation_start", "val 0", "val 1"]


def test_passes_start_before_the_hooks_and_loaders_are_tried_out(make_trainer: Any, early: None) -> None:
    assert fitted(make_trainer, max_epochs=2) == [
        "train starts", "train starts", "val starts", "on_train_start",
        "on_train_epoch_start", *EPOCH, *VALIDATION,
        "on_train_epoch_start", "train starts", *EPOCH, *VALIDATION,
    ]  # fmt: skip


def test_without_the_switch_a_loader_starts_when_its_first_batch_is_wanted(make_trainer: Any) -> None:
    ours = ["on_validation_start", "val starts", "val 0", "val 1"]
    assert fitted(make_trainer, max_epochs=2) == [
        "on_train_start", *2 * ["on_train_epoch_start", "train starts", *EPOCH, *ours],
    ]  # fmt: skip


def test_the_first_batch_is_fetched_early_where_a_loader_has_no_length(make_trainer: Any, early: None) -> None:
    assert fitted(make_trainer, sized=False) == [
        "train starts", "train starts", "train 0", "val starts", "on_train_start",
        "on_train_epoch_start", "train 1", "on_train_batch_end", "on_train_batch_end",
        "val starts", "val 0", "on_validation_start", "val 1",
    ]  # fmt: skip


def test_with_a_limit_nothing_is_fetched_ahead(make_trainer: Any, early: None) -> None:
    found = fitted(make_trainer, sized=False, limit_train_batches=2, limit_val_batches=0)
    assert found == ["train starts", "train starts", "on_train_start", "on_train_epoch_start", *EPOCH]


def test_a_loader_that_ends_before_its_limit_warns(make_trainer: Any, early: None) -> None:
    with pytest.warns(UserWarning, match="Loader was limited to 3 batches, and gave 2.* Limit it to the batches"):
        fitted(make_trainer, sized=False, limit_train_batches=3, limit_val_batches=0)


class Data(LightningDataModule):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def train_dataloader(self) -> Any:
        return Loader("train", self.events)


@pytest.mark.parametrize("passed", [True, False])
def test_reloaded_loaders_are_started_again(make_trainer: Any, early: None, passed: bool) -> None:
    events: list[str] = []
    trainer = make_trainer(callbacks=[Noting(events)], max_epochs=2, reload_dataloaders_every_n_epochs=1)
    if passed:
        trainer.fit(Net(), Loader("train", events))
    else:
        trainer.fit(Net(), datamodule=Data(events))
    second = events[events.index("on_train_epoch_start") + 1 + len(EPOCH) :]
    assert second == [  # tried out, started, and once more for the epoch's pass
        "train starts", "train starts", "on_train_epoch_start", "train starts", *EPOCH,
    ]  # fmt: skip


def test_evaluations_and_predictions_start_before_their_hooks(make_trainer: Any, early: None) -> None:
    events: list[str] = []
    make_trainer(callbacks=[Noting(events)]).validate(Net(), Loader("val", events), verbose=False)
    assert events == ["val starts", *VALIDATION]
    events.clear()
    make_trainer(callbacks=[Noting(events)]).predict(Net(), Loader("val", events))
    assert events == ["val starts", "val starts", "on_predict_start", "val 0", "val 1"]


def test_a_data_loader_is_not_tried_out_and_draws_its_seed_before_the_hook(make_trainer: Any, early: None) -> None:
    drawn: list[Tensor] = []

    class Drawing(Net):
        def on_train_start(self) -> None:
            drawn.append(torch.rand(1))

    torch.manual_seed(1)
    module = Drawing()
    torch.manual_seed(2)
    make_trainer().fit(module, DataLoader(TensorDataset(SAMPLES), shuffle=True))
    torch.manual_seed(2)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(drawn[0], torch.rand(1))


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_combined_loaders_start_early_one_by_one(make_trainer: Any, early: None, mode: str) -> None:
    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch["a"][0] + batch["b"][0]).mean()

    events: list[str] = []
    loaders = CombinedLoader({"a": Loader("a", events), "b": Loader("b", events)}, mode)
    make_trainer(callbacks=[Noting(events)]).fit(Both(), loaders)
    starts = ["a starts", "b starts"]
    assert events == [
        *starts, *starts, "on_train_start", "on_train_epoch_start",
        "a 0", "b 0", "on_train_batch_end", "a 1", "b 1", "on_train_batch_end",
    ]  # fmt: skip


class Samples(Net):
    """Keeps the order of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[0].int().flatten().tolist()
        return super().training_step(batch, batch_idx)


def shuffled() -> DataLoader[Any]:
    samples = TensorDataset(torch.arange(6.0).unsqueeze(1))
    return DataLoader(samples, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))


def orders(asked_for_end: bool) -> list[int]:
    """The orders of three epochs; torch's sampler draws a permutation more when the loader is asked for its end."""
    loader, seen = shuffled(), list[int]()
    for _ in range(3):
        batches = iter(loader)
        seen += [int(sample) for _ in range(2) for [sample] in next(batches)[0]]
        if asked_for_end:
            assert next(batches, None) is None
    return seen


@pytest.mark.parametrize("switched", [True, False])
def test_a_data_loader_is_not_asked_for_its_end_with_the_switch(make_trainer: Any, switched: bool) -> None:
    before = parity.use(parity.Parity(early_iterators=switched))
    try:
        make_trainer(max_epochs=3).fit(model := Samples(), shuffled())
    finally:
        parity.use(before)
    assert model.seen == orders(asked_for_end=not switched)
    assert model.seen != orders(asked_for_end=switched)


def test_a_resumed_run_goes_on_with_its_orders(make_trainer: Any, early: None, tmp_path: Any) -> None:
    for hook in ("on_train_epoch_end", "on_train_batch_end"):
        path, saves = tmp_path / f"{hook}.ckpt", Callback()
        setattr(saves, hook, lambda trainer, *args, path=path: path.exists() or trainer.save_checkpoint(path))
        make_trainer(max_epochs=3, callbacks=[saves]).fit(whole := Samples(), shuffled())
        make_trainer(max_epochs=3).fit(model := Samples(), shuffled(), ckpt_path=str(path))
        assert whole.seen == orders(asked_for_end=False)
        assert model.seen == whole.seen[-len(model.seen) :]
        assert len(model.seen) == {"on_train_epoch_end": 12, "on_train_batch_end": 15}[hook]
