from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.test_throughput_monitor import Rows
from tests.conftest import Regression, Validated
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, Trainer
from drivetrain.callbacks import GoodputMonitor, ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loops.goodput import FIRST_SAVE_S, WITHOUT_FAILURE_S, account, best_interval_s, read


class Passing(Callback):
    """A clock. A batch takes 10 s to fetch, its step 100 s, a validation batch 1000 s, and a save 10,000 s."""

    now, save_s = 0.0, 10_000.0

    def __init__(self) -> None:
        self.saved_at: list[int] = []

    def __call__(self) -> float:
        return self.now

    def on_train_batch_end(self, *_: Any) -> None:
        self.now += 100

    def on_validation_batch_end(self, *_: Any) -> None:
        self.now += 1000

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        self.now += self.save_s
        self.saved_at.append(trainer.global_step)


class Fetched(Dataset[Any]):
    def __init__(self, data: Any, clock: Passing) -> None:
        self.data, self.clock = data, clock

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.clock.now += 10 / 8
        return self.data[index]


@pytest.fixture
def measured(make_trainer: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fit with four batches an epoch, measured by a clock that runs on from fit to fit; return its Trainer."""
    clock = Passing()
    monkeypatch.setattr("drivetrain.loops.ledger.time.monotonic", clock)
    monkeypatch.setattr("drivetrain.loops.ledger.time.time", clock)
    monkeypatch.setattr("drivetrain.loops.ledger.TimedSlot.__init__.__defaults__", (0.0, clock))
    monkeypatch.setattr("drivetrain.callbacks.goodput_monitor.since_process_start_s", lambda: 0.0)

    def fit(
        epochs: int, *callbacks: Callback, saver: Any = None, resume: str | None = None, **arguments: Any
    ) -> Trainer:
        saver = saver or ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        own = [GoodputMonitor(), clock, saver, *callbacks]
        trainer: Trainer = make_trainer(
            max_epochs=epochs, callbacks=own, enable_checkpointing=True, num_sanity_val_steps=0, **arguments
        )
        train = DataLoader(Fetched(data, clock), batch_size=8)
        trainer.fit(Validated(), train, DataLoader(data, batch_size=16), ckpt_path=resume)
        return trainer

    fit.clock = clock  # type: ignore[attr-defined]
    return fit


def test_each_part_of_a_fit_is_measured(measured: Any, tmp_path: Path) -> None:
    trainer = measured(2)
    report = account(*read(tmp_path / "ledger.jsonl"))
    assert report.seconds == {
        "step": 800.0, "data": 80.0, "validation": 4000.0, "save": 20_000.0, "start": 0.0, "lost": 0.0, "idle": 0.0,
    }  # fmt: skip
    assert report.wall_s == 24_880.0
    assert trainer.goodput == report.goodput == 800 / 24_880
    assert (report.saves, report.failures, report.open) == (2, 0, False)


class Fails(Callback):
    def __init__(self, at_step: int, error: type[BaseException] = RuntimeError) -> None:
        self.at_step, self.error = at_step, error

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.at_step:
            raise self.error


def test_work_after_the_last_save_is_lost_when_the_fit_resumes(
    measured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError):
        measured(2, Fails(5))
    measured.clock.now += 50_000
    caplog.set_level("INFO", "drivetrain")
    trainer = measured(2, resume=str(tmp_path / "step=3.ckpt"))
    report = account(*read(tmp_path / "ledger.jsonl"))
    # steps 4 and 5, the validation between them, and three batches: the last one had begun
    assert report.seconds["lost"] == 200 + 2000 + 30
    assert report.seconds["idle"] == 50_000
    assert (report.seconds["step"], report.seconds["data"], report.seconds["validation"]) == (800, 80, 4000)
    assert report.wall_s == sum(report.seconds.values()) == measured.clock.now
    assert (report.runs, report.failures) == (2, 1)
    assert trainer.goodput == 800 / report.wall_s
    assert [each for each in caplog.messages if each.startswith(f"Goodput {report.goodput:.1%} of")] != []


def test_a_second_fit_of_the_trainer_continues_the_first(measured: Any, loader: Any, tmp_path: Path) -> None:
    trainer = measured(1)
    first = account(*read(tmp_path / "ledger.jsonl"))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Validated(), loader, loader)
    report = account(*read(tmp_path / "ledger.jsonl"))
    assert (report.runs, report.seconds["lost"]) == (2, 0.0)
    assert report.seconds["step"] == first.seconds["step"] + 100 * len(loader)


def test_a_resumed_fit_that_trains_nothing_adds_no_step(measured: Any, tmp_path: Path) -> None:
    class EndsLate(Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            measured.clock.now += 7

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    measured(1, saver=saver)
    assert account(*read(tmp_path / "ledger.jsonl")).seconds["step"] == 400
    measured(1, EndsLate(), saver=saver, resume=saver.best_model_path)
    seconds = account(*read(tmp_path / "ledger.jsonl")).seconds
    assert (seconds["step"], seconds["start"], seconds["lost"]) == (400, 7, 2000)


def test_goodput_stays_right_after_a_fit_whose_ledger_could_not_be_written(measured: Any, tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").mkdir()
    with pytest.warns(UserWarning, match="could not be written"):
        trainer = measured(1)
    measured.clock.now += 5000
    assert trainer.goodput == 400 / (400 + 40 + 2000 + 10_000)


def test_a_request_to_stop_is_no_failure(measured: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        measured(2, Fails(2, KeyboardInterrupt))
    assert account(*read(tmp_path / "ledger.jsonl")).failures == 0


def test_with_every_auto_the_saves_follow_from_what_they_cost_and_from_the_failures(
    measured: Any, tmp_path: Path
) -> None:
    clock, saver = measured.clock, ModelCheckpoint(tmp_path, every="auto")
    clock.save_s = 10.0
    with pytest.raises(RuntimeError):
        measured(10, Fails(30), saver=saver, limit_val_batches=0)
    before, running_s = due(1, 30, FIRST_SAVE_S, 0.0, failures=0)
    # sqrt(2 * 10 s * 720 s) - 10 s = 112 s after the first save, which are two steps; later the intervals grow
    assert clock.saved_at == before
    assert before[:3] == [1, 3, 5]
    assert before[-1] - before[-2] == 3

    again = ModelCheckpoint(tmp_path, every="auto")
    measured(10, saver=again, resume=saver.best_model_path, limit_val_batches=0)
    running_s += 10  # the batch in which it failed was fetched
    after, _ = due(before[-1] + 1, 40, best_interval_s(10.0, running_s), running_s, failures=1)
    assert clock.saved_at[len(before) :] == after


def due(step: int, last: int, interval_s: float, running_s: float, failures: int) -> tuple[list[int], float]:
    """After which steps of 110 s a save of 10 s is due, and the running time at the end."""
    saved, since_s = [], 0.0
    for each in range(step, last + 1):
        running_s, since_s = running_s + 110, since_s + 110
        if since_s >= interval_s:
            saved.append(each)
            running_s, since_s = running_s + 10, 0.0
            failure_interval_s = running_s / failures if failures else running_s + WITHOUT_FAILURE_S
            interval_s = best_interval_s(10.0, failure_interval_s)
    return saved, running_s


def test_with_every_auto_the_trainer_adds_a_monitor(make_trainer: Any, tmp_path: Path) -> None:
    def kinds(*callbacks: Callback) -> list[str]:
        return [type(each).__name__ for each in make_trainer(callbacks=[*callbacks], **saving).callbacks]

    saving, auto = {"enable_checkpointing": True}, ModelCheckpoint(tmp_path, every="auto")
    assert kinds(auto) == kinds(auto, GoodputMonitor()) == ["GoodputMonitor", "ModelCheckpoint"]
    assert kinds(ModelCheckpoint(tmp_path)) == ["ModelCheckpoint"]


def test_a_saver_that_the_module_brings_needs_a_monitor_of_its_own(
    make_trainer: Any, loader: Any, tmp_path: Path
) -> None:
    class Brings(Regression):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(tmp_path, every="auto")]

    with pytest.raises(ConfigurationError, match="needs a GoodputMonitor"):
        make_trainer().fit(Brings(), loader)


def test_it_logs_goodput_on_the_steps_of_the_loggers_and_at_the_end_of_epochs(measured: Any) -> None:
    rows = Rows()
    measured(1, logger=rows, log_every_n_steps=2)
    logged = [(step, values["goodput"]) for step, values in rows.rows if "goodput" in values]
    assert [step for step, _ in logged] == [1, 3, 3]
    assert logged[0][1] == 100 / 120  # the clock's hook at the end of the second batch comes after the monitor's


def test_without_loggers_it_has_no_batch_hook(measured: Any) -> None:
    monitor = measured(1).callbacks[0]
    assert isinstance(monitor, GoodputMonitor)
    assert monitor.idle_hooks == {"on_train_batch_end"}


def test_a_fit_leaves_the_progress_and_no_thread_behind(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    for error in (None, RuntimeError):
        own = [GoodputMonitor(tmp_path), *([Fails(2, error)] if error else [])]
        trainer = make_trainer(callbacks=own)
        before = trainer.progress.slot
        with contextlib.suppress(RuntimeError):
            trainer.fit(Regression(), loader)
        assert trainer.progress.slot is before
        assert not [each for each in threading.enumerate() if each.name == "drivetrain ledger"]


def test_without_a_monitor_and_without_a_ledger_there_is_no_goodput(make_trainer: Any) -> None:
    assert make_trainer().goodput is None
    assert make_trainer(callbacks=GoodputMonitor()).goodput is None


def test_without_checkpoints_the_ledger_is_in_the_root_folder_and_in_a_dry_run_nowhere(
    make_trainer: Any, loader: Any, tmp_path: Path
) -> None:
    make_trainer(callbacks=GoodputMonitor(), fast_dev_run=True).fit(Regression(), loader)
    assert list(tmp_path.iterdir()) == []
    make_trainer(callbacks=GoodputMonitor()).fit(Regression(), loader)
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_checkpoints_at_an_address_leave_the_ledger_in_the_root_folder(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        callbacks=[monitor := GoodputMonitor(), ModelCheckpoint("memory://run")], enable_checkpointing=True
    )
    assert monitor.path(trainer) == str(tmp_path / "ledger.jsonl")


def test_an_evaluation_is_not_measured(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    make_trainer(callbacks=GoodputMonitor(tmp_path)).validate(Validated(), loader, verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_two_monitors_are_refused(make_trainer: Any, loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="two GoodputMonitors"):
        make_trainer(callbacks=[GoodputMonitor(), GoodputMonitor()]).fit(Regression(), loader)


def test_an_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a local folder"):
        GoodputMonitor("memory://bucket/run")
