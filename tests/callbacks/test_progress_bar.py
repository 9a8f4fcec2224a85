"""The thread behind the bars: what it reads, when it draws, and that it goes."""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain import Trainer
from drivetrain.callback import Callback
from drivetrain.callbacks import PlainProgressBar, ProgressBar, RichProgressBar
from drivetrain.callbacks.progress_bar import Snapshot, default_progress_bar
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.errors import ConfigurationError
from drivetrain.loops.progress import Progress


class FakeTrainer:
    def __init__(self, max_epochs: int | None = 3) -> None:
        self.progress = Progress(num_training_batches=10)
        self.logbook = SimpleNamespace(bar_metrics={})
        self.max_epochs = max_epochs
        endless = max_epochs is None or max_epochs < 0
        self.limits = SimpleNamespace(max_epochs=math.inf if endless else max_epochs, max_steps=math.inf, accumulate=1)
        self.callbacks: list[Callback] = []
        self.is_global_zero = True
        self.sanity_checking = False


class Recorder(ProgressBar):
    tick_s = 0.001

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[tuple[Snapshot, bool]] = []
        self.closed = 0
        self.by_thread = threading.Event()
        self.broken = False

    def draw(self, snapshot: Snapshot) -> None:
        if self.broken:
            raise OSError("terminal gone")
        in_thread = threading.current_thread() is not threading.main_thread()
        self.seen.append((snapshot, in_thread))
        if in_thread:
            self.by_thread.set()

    def close(self) -> None:
        self.closed += 1

    def finals(self) -> list[Snapshot]:
        return [snapshot for snapshot, _ in self.seen if snapshot.final]


class OnlyAtEnds(Recorder):
    tick_s = 3600.0  # the thread sleeps through the test


def bar_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drivetrain-progress"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert bar_threads() == []


def run_hooks(bar: ProgressBar, trainer: Any, *hooks: str) -> None:
    for hook in hooks:
        args = {"teardown": ("fit",), "on_exception": (RuntimeError(),)}.get(hook, ())
        getattr(bar, hook)(trainer, None, *args)


def test_the_thread_shows_counters_and_flushed_floats() -> None:
    bar, trainer = Recorder(), FakeTrainer()
    trainer.progress.current_epoch, trainer.progress.batches_done = 1, 4
    trainer.logbook.bar_metrics = {"loss": 0.5}
    run_hooks(bar, trainer, "on_train_start", "on_train_epoch_start")
    assert bar.by_thread.wait(10)
    run_hooks(bar, trainer, "teardown")
    snapshot = bar.seen[0][0]
    assert (snapshot.stage, snapshot.epoch, snapshot.max_epochs) == ("train", 1, 3)
    assert (snapshot.batch, snapshot.num_batches, snapshot.metrics) == (4, 10, {"loss": 0.5})
    assert (snapshot.title, snapshot.count_text, snapshot.metrics_text) == ("Epoch 2/3", "4/10", "loss=0.5")
    assert snapshot.rate >= 0
    assert not snapshot.final


def test_a_fit_that_is_stopped_early_shows_no_time_left() -> None:
    bar, trainer = OnlyAtEnds(), FakeTrainer(max_epochs=9)
    run_hooks(bar, trainer, "on_train_start")
    for epoch in range(2):
        trainer.progress.current_epoch, trainer.progress.batches_done = epoch, 0
        run_hooks(bar, trainer, "on_train_epoch_start")
        trainer.progress.batches_done, trainer.progress.earlier_batches = 10, 10 * epoch
        run_hooks(bar, trainer, "on_train_epoch_end")
    run_hooks(bar, trainer, "on_train_end", "teardown")
    assert [snapshot.fit_left_s is None for snapshot in bar.finals()] == [False, True]


def test_no_hook_runs_per_batch() -> None:
    for cls in (ProgressBar, PlainProgressBar, RichProgressBar):
        overridden = {name for name in vars(Callback) if getattr(cls, name) is not getattr(Callback, name)}
        assert not [name for name in overridden if "batch" in name or "grad" in name or "backward" in name]


def test_a_whole_fit_uses_one_thread_and_shows_every_end() -> None:
    bar, trainer = OnlyAtEnds(), FakeTrainer(max_epochs=2)
    progress = trainer.progress
    trainer.sanity_checking = True
    run_hooks(bar, trainer, "on_sanity_check_start", "on_validation_start")
    (thread,) = bar_threads()
    progress.num_eval_batches, progress.eval_batch_idx = 2, 1
    run_hooks(bar, trainer, "on_validation_end", "on_sanity_check_end")
    trainer.sanity_checking = False
    run_hooks(bar, trainer, "on_train_start")
    for epoch in range(2):
        progress.batches_done = 0
        run_hooks(bar, trainer, "on_train_epoch_start")
        progress.batches_done = 10
        run_hooks(bar, trainer, "on_validation_start")
        progress.num_eval_batches, progress.eval_batch_idx = 4, 3
        trainer.logbook.bar_metrics = {**trainer.logbook.bar_metrics, "val": float(epoch)}
        run_hooks(bar, trainer, "on_validation_end")
        assert bar_threads() == [thread]
        run_hooks(bar, trainer, "on_train_epoch_end")
        trainer.logbook.bar_metrics = {"val": float(epoch), "train": float(epoch)}
        progress.current_epoch, progress.batches_done = epoch + 1, 0
    run_hooks(bar, trainer, "on_train_end", "teardown")
    shown = [(s.title, s.count_text, s.metrics, s.transient) for s in bar.finals()]
    assert shown == [
        ("Sanity check", "2/2", {}, True),
        ("Validation", "4/4", {"val": 0.0}, True),
        ("Epoch 1/2", "10/10", {"val": 0.0, "train": 0.0}, False),
        ("Validation", "4/4", {"val": 1.0, "train": 0.0}, True),
        ("Epoch 2/2", "10/10", {"val": 1.0, "train": 1.0}, False),
    ]
    assert all(snapshot.rate > 0 for snapshot in bar.finals())
    assert bar.closed == 1


@pytest.mark.parametrize(
    ("stage", "title"), [("validation", "Validation"), ("test", "Test"), ("predict", "Prediction")]
)
def test_evaluation_on_its_own(stage: str, title: str) -> None:
    bar, trainer = OnlyAtEnds(), FakeTrainer()
    run_hooks(bar, trainer, f"on_{stage}_start")
    trainer.progress.num_eval_batches, trainer.progress.eval_batch_idx = float("inf"), 6
    run_hooks(bar, trainer, f"on_{stage}_end", "teardown")
    (snapshot,) = bar.finals()
    assert (snapshot.title, snapshot.count_text, snapshot.num_batches) == (title, "7", None)
    assert not snapshot.transient


@pytest.mark.parametrize("max_epochs", [None, -1])
def test_endless_training_has_no_last_epoch(max_epochs: int | None) -> None:
    bar, trainer = OnlyAtEnds(), FakeTrainer(max_epochs)
    run_hooks(bar, trainer, "on_train_start", "on_train_epoch_end", "on_train_end", "teardown")
    assert [snapshot.title for snapshot in bar.finals()] == ["Epoch 1"]


def test_between_epochs_the_thread_draws_nothing() -> None:
    class Ticks(threading.Event):
        counted = threading.Semaphore(0)

        def wait(self, timeout: float | None = None) -> bool:
            self.counted.release()
            return super().wait(timeout)

    bar, trainer = Recorder(), FakeTrainer()
    run_hooks(bar, trainer, "on_train_start", "on_train_epoch_end")
    before = len(bar.seen)
    trainer.progress.batches_done = 99
    assert bar._thread is not None
    bar._thread._stopped = ticks = Ticks()
    for _ in range(3):
        assert ticks.counted.acquire(timeout=10)
    assert len(bar.seen) == before
    run_hooks(bar, trainer, "teardown")


def test_refresh_rate_counts_batches() -> None:
    bar, trainer = OnlyAtEnds(refresh_rate=5), FakeTrainer()
    run_hooks(bar, trainer, "on_train_start")
    thread = bar._thread
    assert thread is not None
    for done in range(11):
        trainer.progress.batches_done = done
        thread.show(thread.snapshot())
    run_hooks(bar, trainer, "teardown")
    assert [snapshot.batch for snapshot, _ in bar.seen] == [0, 5, 10]


@pytest.mark.parametrize("how", ["refresh_rate", "disable", "rank"])
def test_switched_off_there_is_no_thread(how: str) -> None:
    bar, trainer = Recorder(refresh_rate=0 if how == "refresh_rate" else 1), FakeTrainer()
    if how == "disable":
        bar.disable()
    trainer.is_global_zero = how != "rank"
    assert bar.is_enabled is (how == "rank")
    run_hooks(bar, trainer, "on_train_start", "on_train_epoch_start")
    assert bar_threads() == []
    run_hooks(bar, trainer, "on_train_epoch_end", "on_train_end", "teardown")
    assert bar.seen == []


def test_disable_and_enable_within_a_run() -> None:
    bar, trainer = OnlyAtEnds(), FakeTrainer()
    run_hooks(bar, trainer, "on_train_start")
    bar.disable()
    run_hooks(bar, trainer, "on_validation_start", "on_validation_end")
    bar.enable()
    run_hooks(bar, trainer, "on_validation_start", "on_validation_end", "teardown")
    assert len(bar.finals()) == 1


@pytest.mark.parametrize("by_thread", [True, False])
def test_a_failing_draw_does_not_stop_the_run(by_thread: bool) -> None:
    bar, trainer = (Recorder if by_thread else OnlyAtEnds)(), FakeTrainer()
    bar.broken = True
    run_hooks(bar, trainer, "on_train_start")
    if by_thread:
        bar_threads()[0].join(10)  # it ends by itself
    hooks = ("on_validation_start", "on_validation_end") * 3
    with pytest.warns(UserWarning, match="OSError: terminal gone") as caught:
        run_hooks(bar, trainer, *hooks, "on_train_epoch_end", "on_train_end", "teardown")
    assert len(caught) == 1
    assert not bar.is_enabled
    assert bar.seen == []


def test_a_failing_close_does_not_fail_a_finished_run() -> None:
    class Stuck(OnlyAtEnds):
        def close(self) -> None:
            raise OSError("terminal gone")

    bar = Stuck()
    run_hooks(bar, FakeTrainer(), "on_train_start", "teardown")
    assert not bar.is_enabled


def test_an_exception_shows_the_last_epoch_and_stops_the_thread() -> None:
    bar, trainer = OnlyAtEnds(), FakeTrainer()
    run_hooks(bar, trainer, "on_exception")  # before anything began (trap T58)
    run_hooks(bar, trainer, "on_train_start", "on_train_epoch_end", "on_exception", "teardown")
    assert len(bar.finals()) == 1
    assert bar.closed == 1


def test_after_the_run_the_trainer_is_let_go() -> None:
    bar, trainer = Recorder(), FakeTrainer()
    run_hooks(bar, trainer, "on_train_start")
    assert bar.by_thread.wait(10)
    run_hooks(bar, trainer, "teardown")
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def test_a_bar_serves_many_runs_and_can_be_pickled_in_one() -> None:
    bar, trainer = PlainProgressBar(interval_s=3600), FakeTrainer()
    for _ in range(2):
        run_hooks(bar, trainer, "on_train_start")
        assert len(bar_threads()) == 1
        assert pickle.loads(pickle.dumps(bar)).is_enabled
        run_hooks(bar, trainer, "teardown")
        assert bar_threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_until_nothing_is_drawn() -> None:
    drawing, go_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        def draw(self, snapshot: Snapshot) -> None:
            drawing.set()
            go_on.wait(10)
            super().draw(snapshot)

    bar, trainer = Slow(), FakeTrainer()
    run_hooks(bar, trainer, "on_train_start")
    assert drawing.wait(10)
    threading.Timer(0.02, go_on.set).start()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        bar.print("from the child", file=sys.stderr)  # hangs if the lock came along
        os._exit(len(bar.seen) != 1)
    assert os.waitpid(child, 0)[1] == 0
    run_hooks(bar, trainer, "teardown")


def test_negative_refresh_rate_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="refresh_rate=-1"):
        ProgressBar(refresh_rate=-1)


@pytest.mark.parametrize(
    ("tty", "term", "expected"),
    [(True, "xterm", RichProgressBar), (True, "dumb", PlainProgressBar), (False, "xterm", PlainProgressBar)],
)
def test_default_bar(monkeypatch: pytest.MonkeyPatch, tty: bool, term: str, expected: type[ProgressBar]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    monkeypatch.setenv("TERM", term)
    assert type(default_progress_bar()) is expected


def test_default_bar_of_a_program_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert type(default_progress_bar()) is PlainProgressBar


def test_an_epoch_without_a_validation_has_no_validation_batches() -> None:
    totals = []

    class Reads(ProgressBar):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            totals.append(self.total_val_batches)

    bar = Reads()
    trainer = Trainer(
        accelerator="cpu", callbacks=bar, logger=False, enable_checkpointing=False, enable_model_summary=False,
        max_epochs=4, limit_train_batches=1, limit_val_batches=3, check_val_every_n_epoch=2, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert totals == [0, 3, 0, 3]
