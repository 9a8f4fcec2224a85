"""Log the throughput of a run: samples, batches and operations per second, and the share of the device's peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from drivetrain.accelerators.peak_flops import get_available_flops
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import entry, number
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.engine.throughput import Throughput, compute_dtype
from drivetrain.errors import wrong_value
from drivetrain.trainer.telling import check_loggers, log

_TOTALS = ("batches", "samples", "lengths")


class ThroughputMonitor(Callback):
    """Logs how fast a run is, under ``train/``, ``validate/``, ``test/`` and ``predict/``.

    In training, the callback logs whenever the Trainer writes to the loggers. In an evaluation, the callback logs at
    the end. The callback waits for the device only before it logs. The time of a validation does not count as training.
    A logged name, such as ``train/device/samples_per_sec``, consists of the stage and a key of
    :meth:`Throughput.compute`. If the module has ``flops_per_batch``, the number of operations of one batch on one
    device, the callback also logs ``train/device/flops_per_sec`` and ``train/device/mfu``. A resumed run adds to the
    totals in the checkpoint.

    Args:
        batch_size_fn: a function that returns the number of samples in a batch.
        length_fn: a function that returns the number of items, such as tokens, in a batch.
        available_flops: the peak of one device, in operations per second; ``None`` takes the peak from a table of
            common GPUs. If the table lacks the device, ``mfu`` is not logged.
        window_size: the number of logged values over which a rate is computed.
        separator: the text between the parts of a logged name.

    Raises:
        ConfigurationError: a function is not callable; or a run without a logger begins.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        available_flops: float | None = None,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        super().__init__()
        for name, value in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if not callable(value) and not (name == "length_fn" and value is None):
                cure = f"{name}=lambda batch: len(batch[0])"
                raise wrong_value("ThroughputMonitor", name, value, "a function of a batch", cure)
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.available_flops, self.window_size, self.separator = available_flops, window_size, separator
        Throughput(available_flops, window_size=window_size)  # checks its arguments
        self._clock = time.monotonic
        self._peak: float | None = None
        self._stages: dict[str, Throughput] = {}
        self._totals: dict[str, dict[str, int]] = {}
        self._starts: dict[str, float] = {}
        self._batches_before: dict[str, int] = {}  # the number of batches at the last update, by stage
        self._earlier_s = 0.0  # the training time in the checkpoint
        self._paused_at = 0.0
        self._told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_loggers(trainer, self)
        if stage == "fit":
            self._totals.pop("train", None)
            self._earlier_s = 0.0

    def _begin(self, trainer: Trainer) -> None:
        stage = _stage(trainer)
        device, precision = trainer.strategy.root_device, trainer.precision_plugin
        if self._peak is None and self.available_flops is None:
            self._peak = get_available_flops(device, compute_dtype(precision))
        peak = self.available_flops or self._peak
        size = trainer.strategy.data.size
        self._stages[stage] = Throughput(peak, size, self.window_size, self.separator)
        totals = self._totals.get(stage, {}) if stage == "train" else {}
        self._totals[stage] = {name: totals.get(name, 0) for name in _TOTALS}
        self._batches_before[stage] = self._totals[stage]["batches"]
        trainer.accelerator.synchronize(device)
        self._starts[stage] = self._clock()
        self._update(trainer, stage)

    def _count(self, stage: str, batch: Any) -> None:
        totals = self._totals[stage]
        totals["batches"] += 1
        totals["samples"] += int(self.batch_size_fn(batch))
        if self.length_fn is not None:
            totals["lengths"] += int(self.length_fn(batch))

    def _update(self, trainer: Trainer, stage: str) -> None:
        module: Any = trainer.lightning_module
        trainer.accelerator.synchronize(trainer.strategy.root_device)
        totals = self._totals[stage]
        done = totals["batches"] - self._batches_before[stage]
        self._batches_before[stage] = totals["batches"]
        per_batch = getattr(module, "flops_per_batch", None)
        if per_batch is None and not self._told:
            self._told = True
            rank_zero_info(
                f"ThroughputMonitor: {type(module).__name__} has no flops_per_batch, so operations per second and mfu "
                "are not logged."
            )
        per_batch = per_batch() if callable(per_batch) else per_batch
        self._stages[stage].update(
            time=self._clock() - self._starts[stage] + (self._earlier_s if stage == "train" else 0.0),
            batches=totals["batches"],
            samples=totals["samples"],
            lengths=None if self.length_fn is None else totals["lengths"],
            flops=None if per_batch is None else int(per_batch) * done,
        )

    def _log(self, trainer: Trainer, stage: str) -> None:
        self._update(trainer, stage)
        values = self._stages[stage].compute()
        metrics = {f"{stage}{self.separator}{name}": float(value) for name, value in values.items()}
        log(trainer, metrics, trainer.logger_step)

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer)

    on_test_start = on_predict_start = on_train_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._count("train", batch)
        if trainer.progress.flush_due:
            self._log(trainer, "train")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused_at = self._clock()
        if not trainer.sanity_checking:
            self._begin(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not trainer.sanity_checking:
            self._count(_stage(trainer), batch)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._log(trainer, "validate")
        if "train" in self._starts:
            self._starts["train"] += self._clock() - self._paused_at

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, _stage(trainer))

    on_predict_end = on_test_end

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if "train" not in self._totals:
            return {}
        running = self._clock() - self._starts["train"] if "train" in self._starts else 0.0
        return {**self._totals["train"], "time": self._earlier_s + running}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "time" in state_dict:
            self._totals["train"] = {name: entry(state_dict, name, int) for name in _TOTALS}
            self._earlier_s = float(entry(state_dict, "time", (int, float, number)))
            self._starts.pop("train", None)


def _stage(trainer: Any) -> str:
    return trainer.progress.loop_stage.value
