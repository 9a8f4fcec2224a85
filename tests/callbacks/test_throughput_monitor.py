from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Validated, regression_data
from torch.utils.data import DataLoader

from drivetrain import Callback, Engine
from drivetrain.accelerators.peak_flops import get_available_flops, peak_of
from drivetrain.callbacks import ThroughputMonitor
from drivetrain.engine.throughput import EngineThroughput, Throughput
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, Logger


class Rows(Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name, version = "rows", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def of(self, stage: str) -> list[tuple[int | None, dict[str, float]]]:
        return [row for row in self.rows if any(name.startswith(f"{stage}/") for name in row[1])]


class Clock(Callback):
    """A training batch takes two seconds, and one of a validation a hundred."""

    position = "first"

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def on_train_batch_end(self, *_: Any) -> None:
        self.now += 2

    def on_validation_batch_end(self, *_: Any) -> None:
        self.now += 100


class Counted(Validated):
    flops_per_batch = 1000


def fitted(make_trainer: Any, epochs: int = 2, resume: Path | None = None, **arguments: Any) -> tuple[Rows, Any]:
    rows, clock = Rows(), Clock()
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), 5000.0, **arguments)
    monitor._clock = clock
    trainer = make_trainer(max_epochs=epochs, callbacks=[monitor, clock], logger=rows, log_every_n_steps=2)
    loader = DataLoader(regression_data(), batch_size=8)
    trainer.fit(Counted(), loader, loader, ckpt_path=resume)
    return rows, trainer


def test_rates_and_totals_are_those_of_a_clock_by_hand(make_trainer: Any) -> None:
    rows, _ = fitted(make_trainer)
    found = rows.of("train")
    assert [step for step, _ in found] == [1, 3, 5, 7]
    assert found[-1][1] == {
        "train/time": 16.0, "train/batches": 8, "train/samples": 64, "train/lengths": 256,
        "train/device/batches_per_sec": 0.5, "train/device/samples_per_sec": 4.0, "train/device/items_per_sec": 16.0,
        "train/device/flops_per_sec": 500.0, "train/device/mfu": 0.1,
    }  # fmt: skip
    _, validation = rows.of("validate")[-1]
    assert validation["validate/device/samples_per_sec"] == 0.08


def test_a_resumed_run_continues_to_count(make_trainer: Any, tmp_path: Path) -> None:
    _, trainer = fitted(make_trainer, epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    rows, _ = fitted(make_trainer, resume=tmp_path / "one.ckpt")
    assert {name: rows.of("train")[-1][1][f"train/{name}"] for name in ("time", "batches", "samples")} == {
        "time": 16.0, "batches": 8, "samples": 64,
    }  # fmt: skip
    assert rows.of("train")[-1][1]["train/device/samples_per_sec"] == 4.0


def test_a_logger_that_fails_ends_no_fit(make_trainer: Any) -> None:
    class Full(Rows):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("No space left on device")

    loader = DataLoader(regression_data(), batch_size=8)
    trainer = make_trainer(callbacks=ThroughputMonitor(len), logger=Full(), log_every_n_steps=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"Full\.log_metrics failed"):
        trainer.fit(Counted(), loader)
    assert trainer.global_step == 4


def test_what_it_refuses(make_trainer: Any, loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch_size_fn"):
        ThroughputMonitor(8)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has nowhere to log to"):
        make_trainer(callbacks=ThroughputMonitor(len)).fit(Counted(), loader, loader)
    with pytest.raises(ConfigurationError, match="available_flops"):
        Throughput(available_flops=-1)
    throughput = Throughput()
    throughput.update(time=1.0, batches=2, samples=2)
    with pytest.raises(ConfigurationError, match="is less than before, 2"):
        throughput.update(time=2.0, batches=1, samples=3)


def test_rates_of_all_devices_over_a_window() -> None:
    throughput = Throughput(available_flops=100, world_size=2, window_size=3)
    assert throughput.compute() == {}
    for step in range(5):
        throughput.update(time=float(step), batches=step, samples=10 * step, flops=50)
    throughput.update(time=6.0, batches=6, samples=90, flops=40)
    found = throughput.compute()
    assert found["device/samples_per_sec"] == (90 - 30) / 3
    assert found["samples_per_sec"] == 2 * found["device/samples_per_sec"]
    assert found["device/flops_per_sec"] == 90 / 3
    assert found["device/mfu"] == 0.3
    throughput.reset()
    assert throughput.compute() == {}


def test_a_loop_of_ones_own_logs_it_through_its_engine(tmp_path: Path) -> None:
    rows = Rows()
    engine = Engine(accelerator="cpu", devices=1, loggers=rows)
    throughput = EngineThroughput(engine, window_size=4)
    for step in range(3):
        throughput.update(time=step / 2, batches=step, samples=8 * step)
        found = throughput.compute_and_log()
    assert found["device/samples_per_sec"] == 16.0
    assert rows.rows[-1] == (2, found)
    assert isinstance(CSVLogger(tmp_path), Logger)


def test_the_peaks_of_devices() -> None:
    assert get_available_flops(torch.device("cpu"), torch.float32) is None
    assert peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989_400_000_000_000
    assert peak_of("NVIDIA H100 PCIe", torch.float16) == 756_000_000_000_000
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == 19_500_000_000_000
    with pytest.warns(UserWarning, match="The peak of Abacus"):
        assert peak_of("Abacus", torch.float32) is None
