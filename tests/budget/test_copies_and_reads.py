"""On a simulated device: how batches get there, and what makes the host wait between two flushes of the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Engine, LightningModule
from drivetrain.base.tree import BLOCKING
from drivetrain.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    SpikeDetection,
    TerminateOnNaN,
    Timer,
)
from drivetrain.loggers import CSVLogger
from drivetrain.testing import FakeAccelerator

BATCHES, FLUSH = 20, 10


class Measured(LightningModule):
    """Logs its loss, the norm of its gradients and a counter of samples, all of them tensors on the device."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.samples += len(x)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("samples", self.samples)
        if self.reads:
            loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", torch.stack(norms).double().norm())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Judged(Measured):
    """Is validated, tells its predictions, and keeps them on the device."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class Items(Dataset[Any]):
    """The samples of a TensorDataset in a class of the user's, so that they are fetched one by one."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def tensors(batches: int = BATCHES) -> TensorDataset:
    x = torch.randn(8 * batches, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def device(make_trainer: Any, **arguments: Any) -> Any:
    return make_trainer(accelerator="fake", devices=1, log_every_n_steps=FLUSH, **arguments)


# ---- what makes the host wait ----------------------------------------------------------------------------------------


def syncs_of_steps(
    make_trainer: Any, folder: Path, module: LightningModule, **arguments: Any
) -> tuple[Counter[int], int]:
    """How often the host waits after each optimizer step but the last, after which the run ends; and the steps."""
    with FakeAccelerator.recording() as record:
        trainer = device(make_trainer, logger=CSVLogger(folder), **arguments)
        trainer.fit(module, DataLoader(tensors(), 8, shuffle=True), DataLoader(tensors(3), 8))
    steps = len(record.steps)
    return Counter(sync.step for sync in record.syncs if 0 < sync.step < steps), steps


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"enable_progress_bar": True}, {"precision": "bf16-mixed"}, {"split_on_oom": True}, {"profiler": "simple"},
        {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ],
    ids=str,
)  # fmt: skip
def test_one_read_a_flush_for_loss_norm_and_counter(make_trainer: Any, tmp_path: Path, arguments: Any) -> None:
    callbacks = [
        EarlyStopping("val_loss"), ModelCheckpoint(tmp_path, monitor="val_loss"), LearningRateMonitor(),
        DeviceStatsMonitor(), Timer(),
    ]  # fmt: skip
    arguments = {"callbacks": callbacks, "enable_checkpointing": True, **arguments}
    assert syncs_of_steps(make_trainer, tmp_path, Judged(), **arguments) == ({FLUSH: 1}, BATCHES)


def test_a_read_in_the_step_makes_the_host_wait_in_each(make_trainer: Any, tmp_path: Path) -> None:
    """Negative control."""
    waits, _ = syncs_of_steps(make_trainer, tmp_path, Judged(reads=True))
    assert waits == {step: 1 + (step == FLUSH) for step in range(1, BATCHES)}


@pytest.mark.parametrize(
    ("arguments", "every"),
    [
        ({"callbacks": TerminateOnNaN()}, 1),
        ({"callbacks": TerminateOnNaN(every_n_batches=5)}, 5),
        ({"callbacks": SpikeDetection(rtol=1e9)}, 1),
    ],
    ids=["TerminateOnNaN", "TerminateOnNaN-5", "SpikeDetection"],
)
def test_what_asks_for_a_value_in_a_step_waits_once(
    make_trainer: Any, tmp_path: Path, arguments: Any, every: int
) -> None:
    """The exceptions that docs/logging.md lists; tests/testing/test_fake.py has the one of ``precision="16-mixed"``."""
    waits, steps = syncs_of_steps(make_trainer, tmp_path, Judged(), **arguments)
    assert waits.total() == (steps - 1) // every + 1  # and the flush


def test_an_engine_reads_all_that_it_logs_together() -> None:
    class Rows(list[Any]):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.append(metrics)

    rows = Rows()
    with FakeAccelerator.recording() as record:
        engine = Engine(accelerator="fake", devices=1)
        engine.loggers.append(rows)  # type: ignore[arg-type]
        values = {"loss": torch.tensor(0.1), "norm": torch.tensor(0.1).double(), "samples": torch.tensor(7), "lr": 0.5}
        metrics = {name: engine.to_device(each) if name != "lr" else each for name, each in values.items()}
        before = len(record.syncs)
        engine.log_dict(metrics)
        assert len(record.syncs) - before == 1
    assert rows == [
        {"loss": torch.tensor(0.1).item(), "norm": torch.tensor(0.1).double().item(), "samples": 7, "lr": 0.5}
    ]
    assert type(rows[0]["samples"]) is int


# ---- how a batch gets to the device ----------------------------------------------------------------------------------


def copies(record: Any) -> Counter[tuple[bool, bool]]:
    """The copies of batches by ``(pinned, blocking)``: those that ``move`` made."""
    return Counter((move.pinned, move.blocking) for move in record.moves if "tree.py" in move.through)


@pytest.mark.parametrize("method", ["fit", "validate", "predict"])
def test_batches_of_tensors_are_copied_from_pinned_memory(make_trainer: Any, method: str) -> None:
    module = Measured() if method == "fit" else Judged()
    with FakeAccelerator.recording() as record:
        getattr(device(make_trainer), method)(module, DataLoader(tensors(), 8))
    assert copies(record)[True, False] == 2 * BATCHES
    assert set(copies(record)) <= {(True, False), (False, True)}  # predictions come back, which waits


def test_an_engine_copies_from_pinned_memory() -> None:
    with FakeAccelerator.recording() as record:
        for _ in Engine(accelerator="fake", devices=1).setup_dataloaders(DataLoader(tensors(), 8)):
            pass
    assert copies(record) == {(True, False): 2 * BATCHES}


class Pageable(FakeAccelerator):
    supports_pinned_memory = False  # type: ignore[assignment]


class HooksSeeBatches(Measured):
    """Keeps the batch on the host, and writes into it later."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("accelerator", "module", "data"),
    [(Pageable(), Measured, tensors), (FakeAccelerator(), HooksSeeBatches, tensors),
     (FakeAccelerator(), Measured, lambda: Items(tensors()))],
    ids=["not-declared", "transfer-hook", "user-code"],
)  # fmt: skip
def test_other_batches_are_not(make_trainer: Any, accelerator: Any, module: Any, data: Any) -> None:
    """Negative control: what is not pinned is copied without ``blocking`` too."""
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator=accelerator, devices=1).fit(module(), DataLoader(data(), 8))
    assert copies(record) == {(False, False): 2 * BATCHES}


def test_pinned_batches_train_to_the_same_bits(make_trainer: Any) -> None:
    def trained(accelerator: Any) -> list[Any]:
        torch.manual_seed(3)
        module = Measured()
        make_trainer(accelerator=accelerator, devices=1, max_epochs=2).fit(
            module, DataLoader(tensors(), 8, shuffle=True)
        )
        return [each.tolist() for each in module.parameters()]

    with FakeAccelerator.recording() as record:
        pinned = trained("fake")
    assert (True, False) in copies(record)
    assert pinned == trained("cpu")


class Blocking(FakeAccelerator):
    supports_non_blocking = False


@pytest.fixture
def blocking_types() -> Iterator[set[str]]:
    """The types of devices that this process has found to need blocking copies; restored after the test."""
    before = set(BLOCKING)
    yield BLOCKING
    BLOCKING.clear()
    BLOCKING.update(before)


def test_a_device_that_reads_freed_memory_gets_blocking_copies(make_trainer: Any, blocking_types: set[str]) -> None:
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator=Blocking(), devices=1).fit(Measured(), DataLoader(tensors(), 8))
    assert copies(record) == {(True, True): 2 * BATCHES}


# ---- when it gets there ----------------------------------------------------------------------------------------------


class Noted(list[Any]):
    """A list that also appends to a list of the events of all kinds."""

    def __init__(self, events: list[str], name: str) -> None:
        super().__init__()
        self.events, self.name = events, name

    def append(self, event: Any) -> None:
        super().append(event)
        self.events.append(self.name)


def copied_before_each_read(make_trainer: Any, **options: Any) -> list[int]:
    """How many batches were copied when each step first waits for the device."""
    events: list[str] = []
    with FakeAccelerator.recording() as record:
        trainer, module = device(make_trainer), Measured(reads=True)
        module.on_train_start = lambda: setattr(record, "moves", Noted(events, "copy"))  # type: ignore[method-assign]
        record.syncs = Noted(events, "sync")
        trainer.fit(module, DataLoader(Items(tensors()), 8, **options))
    before = events[events.index("copy") :]
    reads = [place for place, event in enumerate(before) if event == "sync"]
    return [before[:place].count("copy") // 2 for place in reads][:BATCHES]


def test_the_next_batch_is_copied_before_a_step_first_waits(make_trainer: Any) -> None:
    copied = copied_before_each_read(make_trainer, num_workers=1)
    assert copied[: FLUSH - 1] == list(range(2, FLUSH + 1))


def test_without_workers_it_is_fetched_when_a_loop_would_fetch_it(make_trainer: Any) -> None:
    """Negative control. A step may change the data or draw random numbers, and the next batch depends on both."""
    copied = copied_before_each_read(make_trainer)
    assert copied[: FLUSH - 1] == list(range(1, FLUSH))
