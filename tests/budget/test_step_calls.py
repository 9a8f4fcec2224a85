"""What a training step may cost in calls, beyond the hand-written loop. Counted, so exact; times are benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import Callback
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import PassThroughProfiler


@pytest.fixture(scope="module")
def by_hand(budget: Any) -> Any:
    return budget.hand_written()


@pytest.fixture(scope="module")
def bare(budget: Any) -> Any:
    return budget.trained()


def test_a_step_adds_at_most_15_percent_python_calls(by_hand: Any, bare: Any) -> None:
    assert bare.python <= 1.15 * by_hand.python
    # the hand-written loop is a floor: the Trainer runs the same model and optimizer, so fewer calls mean a bad count
    assert bare.python >= by_hand.python


def test_a_step_adds_at_most_25_percent_calls_of_any_kind(by_hand: Any, bare: Any) -> None:
    assert bare.all <= 1.25 * by_hand.all


def test_ten_callbacks_that_override_nothing_add_no_call(budget: Any, bare: Any) -> None:
    idle = [type(f"Idle{i}", (Callback,), {})() for i in range(10)]
    assert budget.trained(callbacks=idle) == bare


def test_a_callback_that_overrides_a_batch_hook_is_counted(budget: Any, bare: Any) -> None:
    """Negative control of the test above."""

    class Busy(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    assert budget.trained(callbacks=[Busy()]).python >= bare.python + 1


def test_a_step_without_a_profiler_makes_no_call_more(budget: Any, bare: Any) -> None:
    assert budget.trained(profiler=PassThroughProfiler()) == bare


def test_a_profiler_is_counted(budget: Any, bare: Any) -> None:
    """Negative control of the test above."""
    assert budget.trained(profiler="simple").python >= bare.python + 10


@pytest.mark.parametrize(
    "options",
    [{}, {"prog_bar": True}, {"on_epoch": True}, {"on_step": False, "on_epoch": True, "reduce_fx": "max"}],
    ids=["default", "prog_bar", "step and epoch", "epoch maximum"],
)
def test_one_log_adds_at_most_10_python_calls(budget: Any, bare: Any, options: Any) -> None:
    logged = budget.trained(lambda module, loss: module.log("loss", loss, **options))
    assert bare.python < logged.python <= bare.python + 10


def test_log_dict_of_10_adds_at_most_40_python_calls(budget: Any, bare: Any) -> None:
    names = [f"value{i}" for i in range(10)]
    logged = budget.trained(lambda module, loss: module.log_dict(dict.fromkeys(names, loss)))
    assert bare.python < logged.python <= bare.python + 40


def test_the_default_trainer_adds_at_most_15_percent_python_calls(budget: Any, by_hand: Any, tmp_path: Any) -> None:
    """Logger, checkpoint, summary and progress bar are attached and cost a step nothing."""
    attached = budget.trained(
        logger=True, enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True,
        default_root_dir=tmp_path,
    )  # fmt: skip
    assert attached.python <= 1.15 * by_hand.python


def test_clipping_and_a_log_add_at_most_7_own_calls(budget: Any, bare: Any) -> None:
    clipped = budget.trained(lambda module, loss: module.log("loss", loss), gradient_clip_val=1.0)
    assert bare.own + 3 <= clipped.own <= bare.own + 7


def test_a_flush_to_a_table_and_a_bar_makes_at_most_75_own_calls(budget: Any, tmp_path: Any) -> None:
    def log(module: Any, loss: Any) -> None:
        module.log("loss", loss, prog_bar=True)

    read_by_none = budget.trained(log)
    shown = budget.trained(log, logger=CSVLogger(tmp_path), enable_progress_bar=True)
    assert 10 <= 50 * (shown.own - read_by_none.own) <= 75
