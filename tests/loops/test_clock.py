"""Validation by the clock. Nothing waits: each training step moves a clock of the test's own."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.loops import run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Ticking(Callback):
    """A step takes ten seconds and a validation thirty; notes after how many steps validation ran."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.validated_after: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.now += 10.0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_after.append(trainer.global_step)
        self.clock.now += 30.0


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("00:00:00:25", [3, 6, 9, 12]),
        (timedelta(seconds=20), [2, 4, 6, 8, 10, 12]),
        ({"seconds": 50}, [5, 10]),
        ("00:01:00:00", []),
    ],
)
def test_t17_validation_runs_when_so_much_time_has_passed_since_the_last(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, clock: Any, interval: Any, expected: list[int]
) -> None:
    ticking = Ticking(clock)
    trainer = make_trainer(max_epochs=3, val_check_interval=interval, callbacks=ticking)
    trainer.fit(validated(), loader, loader)

    assert ticking.validated_after == expected


def test_t17_only_epochs_that_validate_look_at_the_clock(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, clock: Any
) -> None:
    ticking = Ticking(clock)
    make_trainer(
        max_epochs=4, val_check_interval=timedelta(seconds=20), check_val_every_n_epoch=2, callbacks=ticking
    ).fit(validated(), loader, loader)

    assert ticking.validated_after == [5, 7, 13, 15]


def test_t17_a_stop_request_forces_a_last_validation(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, clock: Any
) -> None:
    class Stopping(Ticking):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 2

    ticking = Stopping(clock)
    make_trainer(val_check_interval="01:00:00:00", callbacks=ticking).fit(validated(), loader, loader)

    assert ticking.validated_after == [2]
