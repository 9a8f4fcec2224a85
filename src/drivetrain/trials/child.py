"""The process of a trial of ``drivetrain advise``. It runs a program until its first fit has made enough optimizer
steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from drivetrain.base.introspect import reads
from drivetrain.base.tree import batch_sizes
from drivetrain.callback import Callback, Checkpoint
from drivetrain.callbacks import GoodputMonitor, ModelSummary, ProgressBar, Timer
from drivetrain.cli.program import parse_program, run_program
from drivetrain.engine.parts import listed
from drivetrain.loggers.dummy import DummyLogger
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import TrainerFn
from drivetrain.trainer.trainer import Trainer
from drivetrain.trials import VARIABLE
from drivetrain.trials.cures import changed, cures_of
from drivetrain.tuner.batch_size_finder import BatchSizeFinder
from drivetrain.tuner.lr_finder import LearningRateFinder

PROG = "drivetrain advise"
LEFT_OUT = (Checkpoint, GoodputMonitor, ModelSummary, ProgressBar, Timer, BatchSizeFinder, LearningRateFinder)
"""Callbacks that a trial leaves out, because they write to files or to the terminal, limit the time, or train more."""

_LEAST_STEPS = 20
_LEAST_S = 1.0  # in less time, the machine's load would change the result


class NoLogger(DummyLogger):
    """Replaces the program's loggers, and writes nothing. Its ``log_dir`` is the trial's folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    save_dir: str = reads("folder")
    log_dir: str = reads("folder")


class Trial(Callback):
    """Measures the first fit of this process, and then ends the process.

    Args:
        result: the file to which the result is written.
        folder: an empty folder, in place of the Trainer's ``default_root_dir``.
        steps: the number of measured optimizer steps; ``None``: 20.
        warmup: how many optimizer steps to make before the measurement.
        cure: the attributes of the :class:`drivetrain.trials.cures.Cure` to apply; ``None``: the program is not
            changed.
        looks: whether to also write the cures that apply to this program, and ``steps`` for further trials. If
            ``steps`` is ``None``, these steps will take at least a second.
    """

    position = "last"

    def __init__(
        self, result: str, folder: str, steps: int | None, warmup: int, cure: dict[str, Any] | None = None,
        looks: bool = False,
    ) -> None:  # fmt: skip
        self._result, self._folder, self._cure, self._looks = result, folder, cure, looks
        self._steps, self._warmup, self._is_timed = steps or _LEAST_STEPS, warmup, steps is None
        self._window = 1  # batches per optimizer step in the program
        self._given: Any = None  # the training data that the program passes
        self._batches = self._samples = 0
        self._began = 0.0

    def install(self) -> None:
        """Patch drivetrain in this process, so that the next fit is a trial."""
        trainers, loaders = cast("Any", Trainer), cast("Any", Loaders)
        make_job, unshared = trainers._job, loaders.unshared

        def job(trainer: Any, fn: TrainerFn, model: Any, passed: Any, datamodule: Any, *checkpoint: Any) -> Any:
            leave_no_trace(trainer, model, self._folder)
            if fn is not TrainerFn.FITTING:
                return make_job(trainer, fn, model, passed, datamodule, *checkpoint)
            self._prepare(trainer)
            return make_job(trainer, fn, model, passed, datamodule, None, None)

        def loaders_of(owner: Any, stage: str) -> Any:
            made = unshared(owner, stage)
            if stage != "fit":
                return made
            self._given = made
            batches = (self._warmup + self._steps) * self._window + 1  # + 1, because the loop fetches a batch ahead
            return made if self._cure is None else changed(made, self._cure, batches)

        trainers._job, loaders.unshared = job, loaders_of
        trainers.save_checkpoint = lambda *args, **options: None

    def write(self, **found: Any) -> None:
        """Write the result of this trial."""
        Path(self._result).write_text(json.dumps(found), encoding="utf-8")

    def _end(self, **found: Any) -> None:
        self.write(**found)
        sys.stdout.flush()
        os._exit(0)  # do not run the program's code after the fit, nor exit handlers

    def _prepare(self, trainer: Any) -> None:
        """Check that the fit can be measured, limit validations, and apply the cure's settings."""
        if trainer.world_size > 1 or not trainer.engine.launcher.is_external:
            self._end(
                refused=f"The program trains with {trainer.world_size} processes, and a trial measures one. Let the "
                "program read its number of devices from the command line, and try it with one: what makes a rank "
                "faster there makes each rank faster."
            )
        trainer._callbacks, trainer._set_ckpt_path = [*trainer._callbacks, self], None
        trainer.settings = dataclasses.replace(trainer.settings, **(self._cure["settings"] if self._cure else {}))
        limits = trainer.limits
        self._window = limits.accumulate
        limits.sanity_batches, limits.val_batches = 0, 1 if limits.val_batches else 0
        if self._cure and (factor := self._cure["factor"]) > 1:
            limits.accumulate //= factor
            if type(limits.train_batches) is int:
                limits.train_batches = max(1, limits.train_batches // factor)

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch. Start to measure after the warm-up, and end the trial after the last step."""
        self._batches += 1
        window = trainer.limits.accumulate
        if self._batches == self._warmup * window:
            trainer.accelerator.synchronize(trainer.strategy.root_device)
            self._samples, self._began = 0, time.perf_counter()
            return
        self._samples += next(batch_sizes(batch), 1)
        if self._batches == (self._warmup + self._steps) * window:
            self._finish(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the trial early: the program's own limits have ended the fit."""
        if not self._began or not self._samples:
            self._end(
                refused=f"The program's fit ends after {trainer.global_step} optimizer steps, and the first "
                f"{self._warmup} of a trial are not measured. Let it train longer."
            )
        self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        trainer.accelerator.synchronize(trainer.strategy.root_device)
        seconds = time.perf_counter() - self._began
        found: dict[str, Any] = {"samples_per_s": self._samples / seconds}
        if self._looks:
            if self._is_timed:
                measured = self._batches / self._window - self._warmup
                self._steps = max(self._steps, math.ceil(measured * _LEAST_S / seconds))
            batches, found["steps"] = (self._warmup + self._steps) * self._window, self._steps
            found["cures"] = [dataclasses.asdict(each) for each in cures_of(trainer, self._given, batches)]
        self._end(**found)


def leave_no_trace(trainer: Any, model: Any, folder: str, **settings: Any) -> None:
    """Switch off loggers, callbacks and settings that write to files or to the terminal, or that take additional time.

    Args:
        trainer: the Trainer before its run.
        model: the module.
        folder: an empty folder, in place of the Trainer's own.
        settings: further settings of the Trainer to replace.
    """
    own = model.configure_callbacks
    model.configure_callbacks = lambda: _without_traces(listed(own()))
    trainer._callbacks = _without_traces(trainer._callbacks)
    trainer._loggers = [NoLogger(folder)] if trainer._loggers else []
    trainer.default_root_dir, trainer._profiler = folder, None
    trainer.settings = dataclasses.replace(trainer.settings, max_time=None, profiler=None, **settings)


def _without_traces(callbacks: Iterable[Any]) -> list[Any]:
    return [each for each in callbacks if not isinstance(each, LEFT_OUT)]


def main() -> int:
    """Run the program on the command line as the trial that the environment variable :data:`VARIABLE` describes."""
    given = parse_program(PROG)
    trial = Trial(**json.loads(os.environ[VARIABLE]))
    trial.install()
    try:
        return run_program(given, PROG)
    except Exception as error:
        trial.write(failed=_cause(error))
        raise


def _cause(error: Exception) -> str:
    """Return an exception as one line."""
    lines = str(error).strip().splitlines() or [""]
    # torch's message has the traceback of a DataLoader worker
    if lines[0].startswith("Caught "):
        return f"{lines[-1]} (in a worker)"
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    sys.exit(main())
