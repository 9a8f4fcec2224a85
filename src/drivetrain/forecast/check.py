"""``Trainer(plan_check="warn")``: compare the peak of memory that a plan predicts with the peak that the device
reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import pickle
import signal
import sys
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.tree import map_leaves
from drivetrain.callback import Callback
from drivetrain.errors import check_choice
from drivetrain.forecast import child, torch_tools
from drivetrain.forecast.allowance import WORKSPACE, gib
from drivetrain.forecast.standins import Job, drop_values
from drivetrain.forecast.tries import Copy, Planner, TryError, cause
from drivetrain.launchers.board import leave_board
from drivetrain.loops.progress import TrainerFn

APART = 0.1
"""If the device's peak differs from the plan's peak by a larger fraction, the callback warns."""
LONGEST_WAIT_S = 60.0
_KEEPS = {
    "start": "what is kept between steps (parameters, gradients, the optimizer's state, or tensors of other objects)",
    "passes": "activations, or temporary tensors of the forward and backward pass",
    "step": "temporary tensors of the optimizer's step",
}
_CURES = {
    "start": "Look for tensors on the device that no module and no optimizer holds",
    "passes": 'See which layers take more or less with Trainer(profiler="memory")',
    "step": "Look for what hooks and the optimizer allocate in its step",
}


class PlanCheck(Callback):
    """Compares the peak of memory that a plan of this run predicts with the peak that the device reports. Both are
    peaks of the second window, the batches of the second optimizer step.

    ``Trainer(plan_check="warn")`` adds this callback. Rank 0 computes the plan in a fork of its process. The fork
    shares no open file with rank 0. The callback warns if the two peaks differ by more than 10 %.

    Args:
        action: "warn".
    """

    changes_in_validation = False

    def __init__(self, action: str = "warn") -> None:
        super().__init__()
        check_choice("PlanCheck", "action", action, ["warn"])
        self.action = action
        self._copy: Copy | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fork the process before any tensor is on the device."""
        self._end()
        if stage != "fit" or trainer.global_rank:
            return
        strategy = trainer.strategy
        self._accelerator, self._device = strategy.accelerator, strategy.root_device
        if self._accelerator.max_memory_allocated(self._device) is None:
            kind = type(self._accelerator).__name__
            self._nothing(f"{kind} reports no memory of tensors on {self._device}.")
        elif not hasattr(os, "fork"):
            self._nothing("this system cannot copy a process.")
        else:
            reader, self._batch = os.pipe()
            self._copy = Copy(functools.partial(_plan, trainer, pl_module, reader), alone_with=reader)
            os.close(reader)
            self._done, self._window, self._found = 0, trainer.accumulate_grad_batches, dict[str, int]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._copy is None:
            return
        if self._done == 0:
            self._send(batch)
        if self._done == self._window:
            self._accelerator.reset_peak_memory(self._device)
            self._found["start"] = self._accelerator.memory_allocated(self._device)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._copy is not None and self._window <= self._done < 2 * self._window and "passes" not in self._found:
            self._found["passes"] = self._accelerator.max_memory_allocated(self._device)
            self._accelerator.reset_peak_memory(self._device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._copy is None:
            return
        self._done += 1
        if self._done == 2 * self._window:
            self._found["step"] = self._accelerator.max_memory_allocated(self._device)
        if "step" in self._found and self._copy.is_done():
            self._compare()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._copy is None:
            return
        if "step" not in self._found:
            self._nothing("training ended before its second optimizer step.")
        elif self._copy.is_done(LONGEST_WAIT_S):
            self._compare()
        else:
            self._nothing(f"the plan was not ready {LONGEST_WAIT_S:g} s after the training.")
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copy": None}

    def _send(self, batch: Any) -> None:
        """Send the shapes of the first batch to the fork."""

        def shape(leaf: Any) -> Any:
            return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf

        with os.fdopen(self._batch, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            try:
                data = pickle.dumps(map_leaves(shape, batch))
            except Exception as error:  # the pickling of a user's batch can raise any exception
                data = pickle.dumps(TryError(f"the batch cannot be pickled: {cause(error)}"))
            pipe.write(data)
        self._batch = -1

    def _compare(self) -> None:
        assert self._copy is not None
        plan: Any = self._copy.result()
        self._copy = None
        if isinstance(plan, TryError):
            self._nothing(f"the plan failed: {plan}.")
            return
        there = self._found
        there.setdefault("passes", there["step"])  # "passes" is missing if no optimizer has made a step
        found, peak = max(there["passes"], there["step"]), max(plan["passes"], plan["step"])
        share = (found - peak) / max(peak, 1)
        text = f"the plan's peak of tensors is {gib(peak)}, and {self._device} reported {gib(found)}"
        if abs(found - peak) <= max(APART * peak, WORKSPACE):
            rank_zero_info(f"plan_check: {text} in the second optimizer step.")
            return
        kept = there["start"] - plan["start"]
        differs = {each: abs(there[each] - plan[each] - kept) for each in ("passes", "step")}
        kind = max({"start": abs(kept), **differs}.items(), key=lambda each: each[1])[0]
        rank_zero_warn(
            f"plan_check: {text} in the second optimizer step, {abs(share):.0%} {'more' if share > 0 else 'less'}. "
            f"What differs is probably {_KEEPS[kind]}. {_CURES[kind]}, and allow for the difference when you use "
            "`drivetrain plan`."
        )

    def _nothing(self, why: str) -> None:
        self._end()
        rank_zero_info(f"plan_check compares nothing: {why}")

    def _end(self) -> None:
        """End the fork if it still runs."""
        if self._copy is not None:
            self._copy.end()
            self._copy = None
            if self._batch >= 0:
                os.close(self._batch)


def _plan(trainer: Any, module: Any, reader: int) -> Any:
    """Wait for the batch, and plan the fit. Runs in the fork.

    This function must run in the fork's first thread. The plan forks again. If a second thread forked, the new process
    would free the objects that torch keeps for the first thread. Some of these objects are process groups, whose
    threads do not exist in the new process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork gets Ctrl-C, too, but only rank 0 may end the fork
    torch.set_default_device(None)  # the plan's fake tensors need no device
    gc.freeze()  # the fork must not free garbage of the run
    with os.fdopen(reader, "rb") as pipe:
        # pipe.read() would not return, because a loader's workers keep the pipe's other end open
        batch = pickle.load(pipe)
    with torch_tools.real():  # real() switches off the torch modes that are active in the run
        return _planned(trainer, module, batch)


def _planned(trainer: Any, module: Any, batch: Any) -> Any:
    try:
        if isinstance(batch, TryError):
            return batch
        nodes = max(1, trainer.num_nodes)
        job = Job(trainer.world_size, trainer.world_size // nodes, 0, trainer.strategy.root_device.type == "cpu")
        settings = {each.name: getattr(trainer.settings, each.name) for each in dataclasses.fields(trainer.settings)}
        own = [each for each in trainer._callbacks if type(each).__module__.startswith("drivetrain.")]
        own = [each for each in own if not isinstance(each, PlanCheck)]
        leave_board()
        torch_tools.forget_ranks()
        mode = child.become(job)
        drop_values(mode, module)
        module.configure_callbacks, module.prepare_data = list, lambda: None
        for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
            # the run has already called these hooks with the batch
            setattr(module, name, lambda batch, dataloader_idx: batch)
        module.transfer_batch_to_device = lambda batch, device, dataloader_idx: batch
        again = type(trainer)(**{**settings, "callbacks": own, "plan_check": None})
        started = again._job(TrainerFn.FITTING, module, {"fit": [batch], "validate": None}, None, None, None)
        planner = Planner(job, mode, sys.argv[0], {"tries": False, "batch": batch, "values": {}, "rank": 0})
        found = planner.run(again, started, lambda measured: True)
        if "base" not in found:
            return TryError(found.get("refused") or found["failed"])
        base = found["base"]
        start = sum(size for kind, size in base.start.items() if kind not in base.on_host)
        step = [each.total for key, each in base.stretches.items() if key[1] == "optimizer"]
        passes = [each.total for key, each in base.stretches.items() if key[1] != "optimizer"]
        return {"start": start, "passes": max(passes, default=0), "step": max(step, default=0)}
    except BaseException as error:
        return TryError(cause(error))
