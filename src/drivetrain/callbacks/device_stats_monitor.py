"""Log statistics of the device, such as its memory, at the start and the end of batches."""

from __future__ import annotations

from typing import Any

from drivetrain.accelerators.accelerator import HOST
from drivetrain.accelerators.cpu import CPUAccelerator
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import check_choice
from drivetrain.trainer.telling import check_loggers, keep, tell_one


class DeviceStatsMonitor(Callback):
    """Logs the statistics that the accelerator reports for the device, at the start and at the end of batches.

    The logged names are ``DeviceStatsMonitor.<hook>/<statistic>``, for example
    ``DeviceStatsMonitor.on_train_batch_end/cpu_percent``, where ``/`` stands for the separator of the logger. In
    training, the callback logs whenever the Trainer writes to the loggers. In validation and testing, the callback logs
    at every ``log_every_n_steps``-th batch. There, the logged step counts the batches of all loaders and all
    validations (or tests) of the run. Reading the statistics never waits for the device.

    Args:
        cpu_stats: ``None`` logs the statistics of the device. True also logs those of the CPU. False never logs those
            of the CPU, even if the CPU is the device.

    Raises:
        ConfigurationError: ``cpu_stats`` has another value; or a run without a logger starts.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        super().__init__()
        check_choice("DeviceStatsMonitor", "cpu_stats", cpu_stats, (True, False, None))
        self.cpu_stats = cpu_stats

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is a logger."""
        if stage != "predict":
            check_loggers(trainer, self)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.logbook.copies:  # True if the Trainer writes to the loggers after this batch
            self._log(trainer, "on_train_batch_start", trainer.logger_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.logbook.copies:
            self._log(trainer, "on_train_batch_end", trainer.logger_step)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "start", batch_idx)

    on_test_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._log_evaluation(trainer, "end", batch_idx)

    on_test_batch_end = on_validation_batch_end

    def _log_evaluation(self, trainer: Trainer, when: str, batch_idx: int) -> None:
        stage, word = ("test", "test") if trainer.testing else ("validate", "validation")
        every = trainer.limits.log_every_n_steps
        step = sum(trainer.progress.eval_steps.get(stage, ())) + batch_idx
        if every > 0 and (step + 1) % every == 0 and not trainer.sanity_checking:
            self._log(trainer, f"on_{word}_batch_{when}", step)

    def _log(self, trainer: Trainer, hook: str, step: int) -> None:
        figures = self._figures(trainer)
        for logger in trainer.loggers if figures else ():
            prefix = f"{type(self).__qualname__}.{hook}{logger.group_separator}"
            values = {f"{prefix}{name}": value for name, value in figures.items()}
            if logger is trainer.loggers[0]:
                keep(trainer, values, step)
            tell_one(trainer, logger, "log_metrics", metrics=values, step=step)

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        accelerator, device = trainer.accelerator, trainer.strategy.root_device
        if device == HOST:
            return {} if self.cpu_stats is False else accelerator.get_device_stats(HOST)
        figures = accelerator.get_device_stats(device)
        return {**figures, **CPUAccelerator().get_device_stats(HOST)} if self.cpu_stats else figures
