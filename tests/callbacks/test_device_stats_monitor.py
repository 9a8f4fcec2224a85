"""DeviceStatsMonitor: which figures, under which names, at which batches."""

from __future__ import annotations

import csv
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.accelerators import Accelerator, CPUAccelerator
from drivetrain.callbacks import DeviceStatsMonitor
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.loggers.logger import Logger

Calls = list[tuple[int | None, dict[str, float]]]
HOST = {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}


class Meter(Accelerator):
    """Devices that are the host, and count how often they were asked."""

    def __init__(self) -> None:
        self.asked: list[torch.device] = []

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        if threading.current_thread() is threading.main_thread():  # and not what measures where the time goes
            self.asked.append(device)
        return {"reading": float(len(self.asked))}


class ListLogger(Logger):
    name, version = "list", 0

    def __init__(self, separator: str = "/") -> None:
        self.group_separator = separator
        self.calls: Calls = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("DeviceStatsMonitor") for name in metrics):
            self.calls.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any) -> None:
        pass


@pytest.fixture
def run(make_trainer: Any, regression: Any, loader: Any) -> Any:
    """Trains four batches on a Meter; gives the trainer and the calls of the logger."""

    def train(monitor: Callback | None = None, **arguments: Any) -> tuple[Any, Calls]:
        logger = ListLogger()
        given: dict[str, Any] = {
            "accelerator": Meter(), "devices": [1], "logger": logger, "log_every_n_steps": 2,
            "callbacks": [monitor or DeviceStatsMonitor()],
        }  # fmt: skip
        trainer = make_trainer(**{**given, **arguments})
        trainer.fit(regression(), loader)
        return trainer, logger.calls

    return train


START, END = "DeviceStatsMonitor.on_train_batch_start/reading", "DeviceStatsMonitor.on_train_batch_end/reading"


def test_s0_6_training_logs_around_the_batches_that_are_flushed(run: Any) -> None:
    trainer, calls = run()
    assert calls == [(1, {START: 1.0}), (1, {END: 2.0}), (3, {START: 3.0}), (3, {END: 4.0})]
    assert trainer.accelerator.asked == [torch.device("cpu", 1)] * 4  # and on no other batch
    assert trainer.callback_metrics == {}


def test_s0_6_the_table_of_a_csv_logger_has_its_columns(run: Any, tmp_path: Path) -> None:
    run(logger=CSVLogger(tmp_path, name="", version=0))
    with open(tmp_path / "version_0" / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row[START], row[END]) for row in rows] == [("1", "1.0", "2.0"), ("3", "3.0", "4.0")]


def test_each_logger_has_its_own_separator(run: Any) -> None:
    slash, dot = ListLogger(), ListLogger(".")
    trainer, _ = run(logger=[slash, dot], log_every_n_steps=4)
    assert slash.calls == [(3, {START: 1.0}), (3, {END: 2.0})]
    assert dot.calls == [(3, {START.replace("/", "."): 1.0}), (3, {END.replace("/", "."): 2.0})]
    assert len(trainer.accelerator.asked) == 2  # asked once for both


def test_a_window_is_logged_at_its_last_batch(run: Any) -> None:
    _, calls = run(accumulate_grad_batches=2, log_every_n_steps=1)
    assert calls == [(0, {START: 1.0}), (0, {END: 2.0}), (1, {START: 3.0}), (1, {END: 4.0})]


@pytest.mark.parametrize(("every", "batches"), [(0, 0), (1, 4), (3, 1), (50, 0)])
def test_only_logging_steps_ask_the_device(run: Any, every: int, batches: int) -> None:
    trainer, calls = run(log_every_n_steps=every)
    assert len(calls) == len(trainer.accelerator.asked) == 2 * batches


def test_a_step_that_is_not_logged_costs_a_look_at_one_flag(run: Any) -> None:
    class Watched(DeviceStatsMonitor):
        def _log(self, trainer: Any, hook: str, step: int) -> None:
            raise AssertionError("this must not be called between flushes")

    trainer, _ = run(Watched(), log_every_n_steps=5)
    assert trainer.global_step == 4
    with pytest.raises(AssertionError, match="must not be called"):  # the control
        run(Watched(), log_every_n_steps=4)


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluates(make_trainer: Any) -> Any:
    """A Trainer on a Meter, and the calls of its logger."""

    def make(**arguments: Any) -> tuple[Any, Calls]:
        logger = ListLogger()
        given: dict[str, Any] = {"accelerator": Meter(), "devices": 1, "callbacks": [DeviceStatsMonitor()]}
        return make_trainer(**{**given, "logger": logger, **arguments}), logger.calls

    return make


@pytest.mark.parametrize(("stage", "word"), [("validate", "validation"), ("test", "test")])
def test_s0_6_validation_and_test_have_an_axis_of_their_own(
    evaluates: Any, validated: Any, loader: Any, stage: str, word: str
) -> None:
    class Twice(validated):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.loss(batch)

        test_step = validation_step

    trainer, calls = evaluates(log_every_n_steps=3)
    getattr(trainer, stage)(Twice(), [loader, DataLoader(loader.dataset, batch_size=16)], verbose=False)
    start, end = (f"DeviceStatsMonitor.on_{word}_batch_{moment}/reading" for moment in ("start", "end"))
    # four batches and two: the third of the first loader, and the second of the second
    assert [(step, *values) for step, values in calls] == [(2, start), (2, end), (5, start), (5, end)]


def test_s0_6_validation_inside_of_fit_counts_on(evaluates: Any, validated: Any, loader: Any) -> None:
    trainer, calls = evaluates(max_epochs=2, log_every_n_steps=3, num_sanity_val_steps=4)
    trainer.fit(validated(), loader, loader)
    end = "DeviceStatsMonitor.on_validation_batch_end/reading"
    assert [step for step, values in calls if end in values] == [2, 5]  # and nothing of the sanity check
    assert len(trainer.accelerator.asked) == len(calls) == 8


@pytest.mark.parametrize("every", [0, 5])
def test_an_evaluation_without_logging_steps_asks_nothing(
    evaluates: Any, validated: Any, loader: Any, every: int
) -> None:
    trainer, calls = evaluates(log_every_n_steps=every)
    trainer.test(validated(), loader, verbose=False)
    assert (calls, trainer.accelerator.asked) == ([], [])


# ---- which figures ---------------------------------------------------------------------------------------------------


def figures(calls: Calls) -> set[str]:
    return {name.rpartition("/")[2] for _, values in calls for name in values}


@pytest.mark.parametrize(
    ("accelerator", "cpu_stats", "expected"),
    [
        (Meter, None, {"reading"}), (Meter, False, {"reading"}), (Meter, True, {"reading", *HOST}),
        (CPUAccelerator, None, HOST), (CPUAccelerator, True, HOST), (CPUAccelerator, False, set()),
    ],
)  # fmt: skip
def test_s0_6_whose_figures(run: Any, accelerator: Any, cpu_stats: bool | None, expected: set[str]) -> None:
    trainer, calls = run(DeviceStatsMonitor(cpu_stats), accelerator=accelerator(), devices=1)
    assert figures(calls) == expected
    assert trainer.global_step == 4


def test_a_device_without_figures_logs_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "get_device_stats", lambda self, device: {})
    assert run()[1] == []


def test_a_subclass_logs_under_its_own_name(run: Any) -> None:
    mine = type("DeviceStatsMonitorOfMine", (DeviceStatsMonitor,), {})
    _, calls = run(mine(), log_every_n_steps=4)
    assert [name for _, values in calls for name in values] == [
        START.replace("Monitor.", "MonitorOfMine."), END.replace("Monitor.", "MonitorOfMine."),
    ]  # fmt: skip


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_without_a_logger_the_cure_is_named(make_trainer: Any, validated: Any, loader: Any, stage: str) -> None:
    trainer = make_trainer(logger=False, callbacks=[DeviceStatsMonitor()])
    message = r"DeviceStatsMonitor has nowhere to log to: Trainer\(logger=False\) has no logger. Pass logger=True"
    with pytest.raises(ConfigurationError, match=message):
        getattr(trainer, stage)(validated(), *[loader] * (2 if stage == "fit" else 1))


def test_prediction_and_a_trial_run_need_no_logger(make_trainer: Any, validated: Any, loader: Any) -> None:
    class Predicts(validated):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    assert len(make_trainer(callbacks=[DeviceStatsMonitor()]).predict(Predicts(), loader)) == 4
    trainer = make_trainer(callbacks=[DeviceStatsMonitor()], logger=None, fast_dev_run=True)
    trainer.fit(validated(), loader, loader)
    assert trainer.global_step == 1


@pytest.mark.parametrize("given", ["yes", 2, 0.5, [True]])
def test_wrong_arguments_are_answered(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="cpu_stats is True, False or None. Write one of these") as caught:
        DeviceStatsMonitor(given)
    assert repr(given) in str(caught.value)
