"""Every argument of the Trainer: its name, type, default and one line of documentation. The one list.

``Trainer.__init__`` spells the same names with the same types and defaults, because editors, type checkers and the
command line read signatures; a test holds the two equal. The values are checked here, one by one; what they mean
together, and on this machine, is decided in :mod:`drivetrain.plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.errors import ConfigurationError, NotSupportedError

if TYPE_CHECKING:
    from drivetrain.accelerators.accelerator import Accelerator
    from drivetrain.callback import Callback
    from drivetrain.loggers.logger import Logger
    from drivetrain.strategies.strategy import Strategy


def _argument(default: Any, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The Trainer's arguments as they were given, each checked on its own.

    Raises:
        ConfigurationError: a value is outside of what the argument accepts.
        NotSupportedError: a value is legal, but this version cannot honour it.
    """

    accelerator: str | Accelerator = _argument("auto", 'hardware: "auto", "gpu", a device type, or an Accelerator')
    strategy: str | Strategy = _argument("auto", 'how the model is spread: "auto", a name, or a Strategy')
    devices: list[int] | str | int = _argument("auto", 'how many or which devices; "auto" for all, -1 for all')
    num_nodes: int = _argument(1, "number of machines")
    precision: int | str | None = _argument(None, '"32-true" (the default) or "bf16-mixed"')
    logger: Logger | Iterable[Logger] | bool | None = _argument(
        None, "where metrics go; True or None: TensorBoard if it is installed, else CSV; False: nowhere"
    )
    callbacks: list[Callback] | Callback | None = _argument(None, "callbacks, in the order in which they run")
    fast_dev_run: int | bool = _argument(False, "try n (True: 1) batches of everything; no logger, no checkpoint")
    max_epochs: int | None = _argument(None, "stop after so many epochs; None: 1000 without max_steps; -1: endless")
    min_epochs: int | None = _argument(None, "train at least so many epochs, whoever asks to stop")
    max_steps: int = _argument(-1, "stop after so many optimizer steps; -1: no limit")
    min_steps: int | None = _argument(None, "train at least so many optimizer steps, whoever asks to stop")
    max_time: str | timedelta | dict[str, int] | None = _argument(None, '"DD:HH:MM:SS", a timedelta or its arguments')
    limit_train_batches: int | float | None = _argument(None, "batches per training epoch: a count or a fraction")
    limit_val_batches: int | float | None = _argument(None, "batches per validation loader: a count or a fraction")
    limit_test_batches: int | float | None = _argument(None, "batches per test loader: a count or a fraction")
    limit_predict_batches: int | float | None = _argument(None, "batches per prediction loader: a count or a fraction")
    overfit_batches: int | float = _argument(0.0, "train and validate on the same few batches")
    val_check_interval: int | float | str | timedelta | dict[str, int] | None = _argument(
        None, "validate every n batches, or after a fraction of the epoch; None: once, at its end"
    )
    check_val_every_n_epoch: int | None = _argument(
        1, "validate in every n-th epoch; None: count batches across epochs"
    )
    num_sanity_val_steps: int | None = _argument(None, "validation batches tried before training; None: 2; -1: all")
    log_every_n_steps: int | None = _argument(None, "flush logged values every n optimizer steps; None: 50")
    enable_checkpointing: bool | None = _argument(None, "add a ModelCheckpoint if none is given; None: yes")
    enable_progress_bar: bool | None = _argument(None, "show a progress bar; None: yes")
    enable_model_summary: bool | None = _argument(None, "print a table of the model; None: yes")
    accumulate_grad_batches: int = _argument(1, "batches whose gradients are averaged for one optimizer step")
    gradient_clip_val: int | float | None = _argument(None, "clip gradients to this norm or value; None: do not")
    gradient_clip_algorithm: str | None = _argument(None, '"norm" (the default) or "value"')
    deterministic: bool | Literal["warn"] | None = _argument(None, "torch.use_deterministic_algorithms while it runs")
    benchmark: bool | None = _argument(None, "torch.backends.cudnn.benchmark while it runs; None: leave it")
    inference_mode: bool = _argument(True, "validate and test under torch.inference_mode instead of no_grad")
    use_distributed_sampler: bool = _argument(True, "split the data over the processes; of one process, no difference")
    profiler: Any | str | None = _argument(None, "a profiler or its name")
    detect_anomaly: bool = _argument(False, "torch.autograd.set_detect_anomaly while it trains")
    barebones: bool = _argument(False, "switch off everything that costs time beyond the step")
    plugins: Any | list[Any] | None = _argument(None, "a Precision and a CheckpointIO of one's own")
    sync_batchnorm: bool = _argument(False, "batch norm over all processes")
    reload_dataloaders_every_n_epochs: int = _argument(0, "build the loaders anew every n epochs; 0: never")
    default_root_dir: str | Path | None = _argument(None, "where logs and checkpoints go; None: the working directory")
    enable_autolog_hparams: bool = _argument(
        True, "give the module's hyperparameters to the loggers; this version keeps none"
    )
    model_registry: str | None = _argument(None, "name of a model registry")

    def __post_init__(self) -> None:
        if isinstance(self.logger, Iterator):  # so that it can be looked at more than once
            object.__setattr__(self, "logger", list(self.logger))
        for name, rule in _RULES.items():
            rule(name, getattr(self, name))
        for name, only in NOT_YET.items():
            if (value := getattr(self, name)) != only:
                raise NotSupportedError(
                    f"Trainer({name}={value!r}) is not supported by this version of drivetrain, which only knows "
                    f"{name}={only!r}. Leave {name} out."
                )
        if isinstance(self.val_check_interval, (str, timedelta, dict)):
            raise NotSupportedError(
                f"Trainer(val_check_interval={self.val_check_interval!r}): this version cannot validate by the clock. "
                "Write a number of batches or a fraction of an epoch."
            )


def _wrong(name: str, value: Any, expected: str, cure: str) -> ConfigurationError:
    return ConfigurationError(f"Trainer({name}={value!r}): {name} is {expected}. Write {cure}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(lowest: int, optional: bool) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if not _is_int(value) or value < lowest:
            tail = " or None" if optional else ""
            raise _wrong(name, value, f"an int of at least {lowest}{tail}", f"{name}={max(lowest, 1)}")

    return check


def _limit(name: str, value: Any) -> None:
    if value is None or (_is_int(value) and value >= 0) or (isinstance(value, float) and 0.0 <= value <= 1.0):
        return
    raise _wrong(name, value, "a number of batches (int) or a fraction from 0.0 to 1.0 (float)", f"{name}=10 or 0.5")


def _interval(name: str, value: Any) -> None:
    if value is None or isinstance(value, (str, timedelta, dict)):
        return
    if (_is_int(value) and value >= 1) or (isinstance(value, float) and 0.0 < value <= 1.0):
        return
    raise _wrong(name, value, "a number of batches (int) or a fraction above 0.0 up to 1.0 (float)", f"{name}=0.5")


def _one_of(*allowed: Any) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        # `in` would take 0 for False and 1 for True
        if not any(value is item or (isinstance(item, str) and value == item) for item in allowed):
            raise _wrong(name, value, f"one of {', '.join(map(repr, allowed))}", f"{name}={allowed[0]!r}")

    return check


def _clip_val(name: str, value: Any) -> None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0):
        return
    raise _wrong(name, value, "a number of at least 0 or None", f"{name}=1.0")


def _fast_dev_run(name: str, value: Any) -> None:
    if not isinstance(value, bool) and not (_is_int(value) and value >= 0):
        raise _wrong(name, value, "a bool or a number of batches", f"{name}=True")


_RULES: dict[str, Callable[[str, Any], None]] = {
    "num_nodes": _count(1, optional=False),
    "fast_dev_run": _fast_dev_run,
    "max_epochs": _count(-1, optional=True),
    "min_epochs": _count(0, optional=True),
    "max_steps": _count(-1, optional=False),
    "min_steps": _count(0, optional=True),
    "limit_train_batches": _limit,
    "limit_val_batches": _limit,
    "limit_test_batches": _limit,
    "limit_predict_batches": _limit,
    "overfit_batches": _limit,
    "val_check_interval": _interval,
    "check_val_every_n_epoch": _count(1, optional=True),
    "num_sanity_val_steps": _count(-1, optional=True),
    "log_every_n_steps": _count(0, optional=True),
    "enable_checkpointing": _one_of(True, False, None),
    "enable_progress_bar": _one_of(True, False, None),
    "enable_model_summary": _one_of(True, False, None),
    "accumulate_grad_batches": _count(1, optional=False),
    "gradient_clip_val": _clip_val,
    "gradient_clip_algorithm": _one_of("norm", "value", None),
    "deterministic": _one_of(True, False, "warn", None),
    "benchmark": _one_of(True, False, None),
    "inference_mode": _one_of(True, False),
    "use_distributed_sampler": _one_of(True, False),
    "detect_anomaly": _one_of(True, False),
    "barebones": _one_of(True, False),
    "sync_batchnorm": _one_of(True, False),
    "reload_dataloaders_every_n_epochs": _count(0, optional=False),
    "enable_autolog_hparams": _one_of(True, False),
}

NOT_YET: dict[str, Any] = {
    "num_nodes": 1,
    "max_time": None,
    "limit_predict_batches": None,
    "overfit_batches": 0.0,
    "profiler": None,
    "barebones": False,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "model_registry": None,
}
"""The one value that this version honours for each argument whose feature is not built yet."""
