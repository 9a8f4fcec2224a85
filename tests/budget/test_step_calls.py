"""What a training step may cost in calls, beside the hand-written loop. Counted, so exact; times are benchmarks.

A step that calls torch's functions directly makes fewer calls than the hand-written loop; one that makes the public
calls makes as many and what the Trainer adds. Both are counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Callback, LightningModule
from drivetrain.callbacks import GoodputMonitor, OnExceptionCheckpoint
from drivetrain.loggers import CSVLogger
from drivetrain.loops.direct import SWITCH
from drivetrain.profilers import PassThroughProfiler


@pytest.fixture(scope="module")
def by_hand(budget: Any) -> Any:
    return budget.hand_written()


@pytest.fixture(scope="module")
def bare(budget: Any) -> Any:
    return budget.trained()


@pytest.fixture(scope="module")
def public(budget: Any) -> Any:
    """A step that makes the public calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        return budget.trained()


def test_a_step_makes_at_most_60_python_calls(bare: Any) -> None:
    """The hand-written loop makes 94 with torch 2.13, and from 86 to 138 with those from 2.9 to 2.14."""
    # the forward pass alone makes 18, the functions behind the optimizer's step 6: fewer calls mean a bad count
    assert 30 <= bare.python <= 60


def test_a_step_makes_at_most_7_own_calls(bare: Any) -> None:
    assert 5 <= bare.own <= 7


@pytest.mark.parametrize("name", ["weight", "running", "layer"])
def test_a_layer_is_found_in_one_call_and_no_more_bytecodes_than_in_torch(name: str) -> None:
    def cost_in(cls: type) -> tuple[int, int]:
        module, seen = cls(), Counter[str]()
        module.weight, module.layer = nn.Parameter(torch.ones(1)), nn.ReLU()
        module.register_buffer("running", torch.ones(1))

        def count(frame: Any, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes = True
            seen[event] += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        getattr(module, name)
        sys.settrace(before)
        return seen["call"], seen["opcode"]

    calls, bytecodes = cost_in(LightningModule)
    assert calls == 1
    assert 10 <= bytecodes <= cost_in(nn.Module)[1]


def test_a_step_makes_fewer_calls_of_any_kind_than_the_hand_written_loop(by_hand: Any, bare: Any) -> None:
    assert bare.all < by_hand.all


def test_public_calls_add_at_most_15_percent_python_calls(by_hand: Any, public: Any) -> None:
    assert public.python <= 1.15 * by_hand.python
    # the hand-written loop is a floor: the Trainer runs the same model and optimizer, so fewer calls mean a bad count
    assert public.python >= by_hand.python


def test_public_calls_add_at_most_25_percent_calls_of_any_kind(by_hand: Any, public: Any) -> None:
    assert public.all <= 1.25 * by_hand.all


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


def test_a_ledger_adds_at_most_12_python_calls(budget: Any, bare: Any, tmp_path: Path) -> None:
    measured = budget.trained(callbacks=[GoodputMonitor(tmp_path)])
    assert bare.python < measured.python <= bare.python + 12


def test_saving_on_exceptions_adds_at_most_40_python_calls(budget: Any, bare: Any, tmp_path: Path) -> None:
    saving = budget.trained(enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(tmp_path)])
    assert bare.python < saving.python <= bare.python + 40
    assert saving.all <= bare.all + 70


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


def test_the_default_trainer_adds_at_most_5_python_calls(budget: Any, bare: Any, tmp_path: Any) -> None:
    """Logger, checkpoint, summary and progress bar are attached and cost a step nothing."""
    attached = budget.trained(
        logger=True, enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True,
        default_root_dir=tmp_path,
    )  # fmt: skip
    assert abs(attached.python - bare.python) <= 5


def test_clipping_and_a_log_add_at_most_10_own_calls(budget: Any, bare: Any) -> None:
    clipped = budget.trained(lambda module, loss: module.log("loss", loss), gradient_clip_val=1.0)
    assert bare.own + 3 <= clipped.own <= bare.own + 10


def test_a_flush_to_a_table_and_a_bar_makes_at_most_75_own_calls(budget: Any, tmp_path: Any) -> None:
    def log(module: Any, loss: Any) -> None:
        module.log("loss", loss, prog_bar=True)

    read_by_none = budget.trained(log)
    shown = budget.trained(log, logger=CSVLogger(tmp_path), enable_progress_bar=True)
    assert 10 <= 50 * (shown.own - read_by_none.own) <= 75
