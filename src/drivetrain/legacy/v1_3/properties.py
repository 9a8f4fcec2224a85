"""Properties of Lightning 1.x's Trainer that drivetrain's Trainer does not have, or defines differently."""

from __future__ import annotations

import os
from typing import Any

import drivetrain.trainer.trainer
from drivetrain.base.introspect import reads
from drivetrain.loops.progress import Phase, TrainerFn
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.ddp2 import DDP2Strategy
from drivetrain.strategies.dp import DataParallelStrategy
from drivetrain.strategies.horovod import HorovodStrategy


def _today(name: str) -> Any:
    """Return the property ``name`` of drivetrain's Trainer."""
    return getattr(drivetrain.trainer.trainer.Trainer, name)


def _none_for_unlimited(name: str, doc: str) -> Any:
    """Return the property ``name`` of drivetrain's Trainer, with ``None`` in place of -1 for "no limit"."""
    today = _today(name)
    return property(
        lambda trainer: None if (limit := today.fget(trainer)) == -1 else limit,
        lambda trainer, value: today.fset(trainer, -1 if value is None else value),
        doc=doc,
    )


_BITS = {"16-mixed": 16, "16-true": 16, "bf16-mixed": "bf16", "bf16-true": "bf16", "32-true": 32, "64-true": 64}

_EPOCH_OVER = (Phase.BETWEEN_EPOCHS, Phase.TRAIN_END, Phase.NONE)


class Asked(drivetrain.trainer.trainer.Trainer):
    """Properties for the position in the run, the Trainer's objects, and the values of the flags."""

    def _is_on(self, kind: str) -> bool:
        return self.strategy.root_device.type == kind

    on_cpu = property(lambda self: self._is_on("cpu"), doc="Whether the model is trained on the CPU.")
    on_gpu = property(lambda self: self._is_on("cuda"), doc="Whether the model is trained on a GPU.")
    on_tpu = use_tpu = property(lambda self: self._is_on("xla"), doc="Whether the model is trained on a TPU.")
    use_dp = property(lambda self: isinstance(self.strategy, DataParallelStrategy), doc="Whether ``dp`` trains.")
    use_ddp2 = property(lambda self: isinstance(self.strategy, DDP2Strategy), doc="Whether ``ddp2`` trains.")
    use_horovod = property(lambda self: isinstance(self.strategy, HorovodStrategy), doc="Whether Horovod trains.")

    @property
    def use_ddp(self) -> bool:
        """Whether the strategy is ``ddp`` or a variant such as ``ddp_spawn``."""
        return isinstance(self.strategy, DDPStrategy) and not self.use_ddp2

    @property
    def use_single_gpu(self) -> bool:
        """Whether the model is trained on a single GPU."""
        return self.on_gpu and self.num_devices == self.world_size == 1

    @property
    def num_gpus(self) -> int:
        """The number of this machine's GPUs that the run uses."""
        return self.num_devices if self.on_gpu else 0

    @property
    def root_gpu(self) -> int | None:
        """The index of this process's GPU."""
        return self.strategy.root_device.index if self.on_gpu else None

    @property
    def data_parallel_device_ids(self) -> list[int] | None:
        """The indices of this machine's GPUs that the run uses."""
        return self.device_ids if self.on_gpu else None

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return int(getattr(self.strategy, "num_processes", 1))

    @property
    def slurm_job_id(self) -> int | None:
        """SLURM's id of the job; ``None`` in an interactive job."""
        number = os.environ.get("SLURM_JOB_ID", "")
        return int(number) if number.isdigit() else None

    @property
    def use_amp(self) -> bool:
        """Whether automatic mixed precision is used."""
        return "mixed" in self.strategy.precision_plugin.name

    @property
    def amp_backend(self) -> str | None:
        """The implementation of automatic mixed precision: torch's own, or none."""
        return "native" if self.use_amp else None

    # ---- limits; ``None`` instead of -1 means "no limit" -------------------------------------------------------------

    _flags: dict[str, Any]

    max_steps = _none_for_unlimited("max_steps", "Optimizer steps at most; ``None``: no limit.")
    max_epochs = _none_for_unlimited("max_epochs", "Epochs at most; ``None``: no limit.")

    @property
    def min_epochs(self) -> Any:
        """The minimum number of epochs. Lightning 1.3's default 1 has the same effect as drivetrain's default 0."""
        given = self._flags["min_epochs"]
        return _today("min_epochs").fget(self) or (1 if given is None else given)

    @min_epochs.setter
    def min_epochs(self, value: Any) -> None:
        _today("min_epochs").fset(self, value)

    # ---- positions; in Lightning 1.x a step ends after the validation that follows the step --------------------------

    validates_last = True

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far. A validation after a batch still sees the number before this batch."""
        progress = self.progress
        phase, _, before_step = progress.slot[:3]
        if Phase.FORWARD <= phase <= Phase.OPTIMIZER_STEP:
            return before_step
        under_way = Phase.BATCH_END <= phase <= Phase.EPOCH_END or phase >= Phase.VALIDATION_START
        return progress.global_step - (under_way and progress.stepped)

    @property
    def current_epoch(self) -> int:
        """Index of the epoch; after a fit, the index of the last epoch."""
        progress = self.progress
        epoch = _today("current_epoch").fget(self)
        return max(0, int(epoch) - (progress.slot[0] in _EPOCH_OVER or progress.fn is not TrainerFn.FITTING))

    def __getattr__(self, name: str) -> Any:
        """Return a flag that is not an attribute of drivetrain's Trainer."""
        given = self.__dict__.get("_flags", {})
        if name in given:
            return given[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def precision(self) -> Any:
        """The precision in Lightning 1.3's form: 16, 32, 64 or "bf16"."""
        return _BITS.get(name := super().precision, name)

    @property
    def batch_idx(self) -> int:
        """The index of the training batch; 0 before the first batch."""
        return max(0, self.progress.batch_idx)

    @property
    def total_batch_idx(self) -> int:
        """The index of the training batch over all epochs. Between batches, this is the index of the next batch."""
        progress = self.progress
        in_batch = Phase.BATCH_START <= progress.slot[0] <= Phase.VALIDATED
        return progress.earlier_batches + (progress.batch_idx if in_batch else progress.batches_done)

    running_sanity_check: bool = reads("sanity_checking", "Whether the sanity check is running.")

    disable_validation = property(lambda self: not self.enable_validation, doc="Whether the fit never validates.")

    @property
    def lr_schedulers(self) -> list[dict[str, Any]]:
        """The schedulers, each as a dictionary with its options."""
        return [dict(vars(config)) for config in self.lr_scheduler_configs]

    early_stop_callback: Any = reads("early_stopping_callback", "The first EarlyStopping among the callbacks.")

    @property
    def progress_bar_dict(self) -> dict[str, Any]:
        """The values for the progress bar."""
        return dict(self.progress_bar_metrics)

    def get_model(self) -> Any:
        """The user's module."""
        return self.lightning_module
