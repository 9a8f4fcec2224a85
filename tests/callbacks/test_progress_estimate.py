"""What a bar estimates: the remaining time, the number of epochs, the rate, and the share of waiting for data."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import Trainer
from drivetrain.callbacks import ProgressBar, Timer
from drivetrain.callbacks._progress_estimate import Meter, Rest, Waiting
from drivetrain.callbacks._progress_thread import ProgressThread, duration_text, lay_out
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.loops.progress import Phase, Progress, RunningStage


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the test: the first number."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def trainer(**given: Any) -> Any:
    counters = Progress(num_training_batches=given.pop("batches", 400))
    limits = {"max_epochs": math.inf, "max_steps": math.inf, "accumulate": 1}
    limits |= {name: given.pop(name) for name in limits if name in given}
    several = {"max_epochs": None, "callbacks": [], "logbook": SimpleNamespace(bar_metrics={}), **given}
    return SimpleNamespace(progress=counters, limits=SimpleNamespace(**limits), **several)


def test_until_max_epochs() -> None:
    fit = trainer(max_epochs=3)
    fit.progress.current_epoch, fit.progress.batches_done = 1, 100
    assert Rest(fit).batches() == 700


def test_an_endless_fit_has_no_rest() -> None:
    rest = Rest(trainer())
    assert rest.batches() == math.inf
    assert rest.seconds(math.inf, 10.0) is None


@pytest.mark.parametrize(
    ("batches", "window", "steps", "done", "expected"),
    [
        (400, 1, 700, 0, 700), (400, 1, 700, 150, 700), (400, 1, 0, 300, 0), (10, 4, 3, 0, 10), (10, 4, 4, 0, 14),
        (10, 4, 6, 0, 20), (10, 4, 2, 5, 5), (10, 4, 1, 5, 3), (math.inf, 4, 5, 2, 18),
    ],
)  # fmt: skip
def test_until_max_steps(batches: float, window: int, steps: int, done: int, expected: int) -> None:
    fit = trainer(batches=batches, max_steps=1000 + steps, accumulate=window)
    fit.progress.global_step, fit.progress.batches_done, fit.progress.earlier_batches = 1000, done, 5000
    assert Rest(fit).batches() == expected


def test_two_optimizers_step_twice_in_a_batch() -> None:
    fit = trainer(max_steps=700)
    fit.progress.global_step, fit.progress.batches_done = 200, 100
    assert Rest(fit).batches() == 250


def test_the_rest_of_a_fit_is_measured_with_its_validations_and_without_its_first_batch(now: list[float]) -> None:
    fit = trainer(max_epochs=1)
    rest, progress = Rest(fit), fit.progress
    assert rest.seconds(400, 0.0) is None
    now[0], progress.batches_done = 160.0, 1  # it was compiled
    assert rest.seconds(399, 2.0) == 199.5
    now[0], progress.batches_done = 170.0, 21
    assert rest.seconds(379, 5.0) == 379 * 10 / 20


def test_a_timer_bounds_the_rest() -> None:
    timer = Timer("00:00:01:00")
    fit = trainer(max_epochs=1, callbacks=[Timer(), timer])
    assert Rest(fit).seconds(400, 1.0) == 60
    assert Rest(fit).seconds(40, 1.0) == 40
    assert Rest(trainer(callbacks=[timer])).seconds(math.inf, 1.0) == 60


def test_the_rate_of_slow_batches_is_steady_and_falls_when_one_takes_longer(now: list[float]) -> None:
    meter = Meter()
    meter.restart(0)
    rates = []
    for tick in range(1, 401):  # 0.25 s each, a batch each 10 s
        now[0] = 100.0 + tick / 4
        rates.append(meter.measure(tick // 40))
    assert rates[200:] == pytest.approx([0.1] * 200)
    now[0] += 100
    assert meter.measure(10) < 0.06


def test_waiting_is_the_share_of_looks_that_find_a_fetch() -> None:
    waiting = Waiting()
    for _ in range(19):
        waiting.look(Phase.FETCH)
    assert waiting.share is None
    waiting.look(Phase.VALIDATION_FETCH)
    assert waiting.share == 1
    for _ in range(60):
        waiting.look(Phase.FORWARD)
    assert waiting.share == 0.25
    for _ in range(240):
        waiting.look(Phase.BACKWARD)
    assert waiting.share == 0


def test_max_steps_ends_the_last_epoch_early() -> None:
    fit = trainer(max_steps=700)
    thread = ProgressThread(fit, lambda snapshot: None, 1.0)
    thread.enter(RunningStage.TRAINING)
    first = thread.snapshot()
    fit.progress.current_epoch, fit.progress.earlier_batches = 1, 400
    fit.progress.global_step, fit.progress.batches_done = 700, 300
    last = thread.exit()
    assert last is not None
    assert [(each.title, each.count_text) for each in (first, last)] == [
        ("Epoch 1/2", "0/400"),
        ("Epoch 2/2", "300/300"),
    ]


@pytest.mark.parametrize(
    ("left_s", "fit_left_s", "epoch", "final", "text"),
    [
        (14.6, 14520.0, 1, False, "left: epoch 15s, fit 4h02m"), (14.6, 14.6, 9, False, "15s left"),
        (None, None, 1, False, ""),
        (None, 61.0, 1, False, "left: fit 1m01s"), (0.0, 61.0, 1, True, "left: fit 1m01s"), (0.0, 0.2, 1, True, ""),
    ],
)  # fmt: skip
def test_what_is_left(left_s: float | None, fit_left_s: float | None, epoch: int, final: bool, text: str) -> None:
    snapshot = Snapshot("train", epoch, 10, 5, 20, final=final, left_s=left_s, fit_left_s=fit_left_s)
    assert snapshot.left_text == text


def test_durations_have_two_units() -> None:
    seconds = [0, 59.4, 59.6, 3599.7, 3600, 86399, 190000]
    assert [duration_text(each) for each in seconds] == ["0s", "59s", "1m00s", "1h00m", "1h00m", "23h59m", "2d04h"]


def test_texts_are_left_out_and_names_shortened_but_no_number_is_cut() -> None:
    texts = ["loss=0.5", "accuracy=0.25", "learning_rate=1e-05"]
    assert lay_out(texts, 40, 2) == ["loss=0.5, accuracy=0.25", "learning_rate=1e-05"]
    assert lay_out(texts, 30) == ["loss=0.5, accuracy=0.25, +1"]
    assert lay_out(texts, 20) == ["loss=0.5, +2"]
    assert lay_out(texts, 12, 4) == ["loss=0.5", "accur..=0.25", "lear..=1e-05"]
    assert lay_out(texts, 1) == []
    assert lay_out([], 20) == []


# ---- the loss, in a fit ----------------------------------------------------------------------------------------------


class Recorder(ProgressBar):
    tick_s = 3600.0  # the thread sleeps through the test

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Snapshot] = []

    def draw(self, snapshot: Snapshot) -> None:
        self.seen.append(snapshot)


class Losses(BoringModel):
    """Its losses are 0, 1, 2 and so on."""

    def __init__(self, logs: bool, returns: Any = lambda loss: loss) -> None:
        super().__init__()
        self.logs, self.returns = logs, returns
        self.first: list[float | None] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.first.append(self.trainer.progress.loss)
        loss = self.layer(batch).sum() * 0 + self.trainer.progress.total_batches
        if self.logs:
            self.log("mine", loss, prog_bar=True)
        return self.returns(loss)


def fitted(module: BoringModel, bar: ProgressBar, **arguments: Any) -> None:
    Trainer(
        accelerator="cpu", callbacks=bar, logger=False, enable_checkpointing=False, enable_model_summary=False,
        limit_train_batches=4, limit_val_batches=0, max_epochs=2, **arguments,
    ).fit(module)  # fmt: skip


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: {"loss": loss, "more": torch.ones(2)}])
def test_a_loss_is_read_after_the_first_batch_and_at_the_end_of_each_epoch(returns: Any) -> None:
    bar, module = Recorder(), Losses(False, returns)
    fitted(module, bar)
    assert module.first[0] == 0
    assert [each.metrics for each in bar.seen if each.final] == [{"loss": 3.0}, {"loss": 7.0}]


def test_values_that_are_logged_for_the_bar_replace_the_loss() -> None:
    bar = Recorder()
    fitted(Losses(True), bar)
    assert [each.metrics for each in bar.seen if each.final] == [{"mine": 3.0}, {"mine": 7.0}]


def test_without_a_bar_no_loss_is_read() -> None:
    bar, module = Recorder(), Losses(False)
    bar.disable()
    fitted(module, bar)
    assert module.first == [None, None]


def test_a_fit_says_how_many_epochs_its_steps_take() -> None:
    bar = Recorder()
    fitted(Losses(False), bar, max_steps=6)
    assert [(each.title, each.count_text, each.step) for each in bar.seen if each.final] == [
        ("Epoch 1/2", "4/4", 4),
        ("Epoch 2/2", "2/2", 6),
    ]
