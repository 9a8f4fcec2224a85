"""All arguments of the Trainer: their names, types, defaults and documentation.

``Trainer.__init__`` repeats the names, types and defaults, because editors, type checkers and the command line read
signatures. A test compares both. This module checks each value separately. :mod:`drivetrain.plan` then
chooses the parts of the run from all values and this machine.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import numbers
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from drivetrain.base import files
from drivetrain.base.introspect import describe_arguments
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.supplied import instead_of
from drivetrain.errors import (
    ConfigurationError,
    NotSupportedError,
    UnknownArgumentError,
    check_count,
    count_meant,
    did_you_mean,
    is_count,
    is_number,
    shown,
    wrong_value,
)

with on_first_use:
    from drivetrain.base import compile_options  # compile_options imports torch

if TYPE_CHECKING:
    from drivetrain.accelerators.accelerator import Accelerator
    from drivetrain.loggers.logger import Logger
    from drivetrain.profilers.profiler import Profiler
    from drivetrain.strategies.strategy import Plugin, Strategy

T = TypeVar("T")

KnownPrecision = Literal[
    "64", "64-true", "32", "32-true", "16", "16-mixed", "16-true", "bf16", "bf16-mixed", "bf16-true", "float8",
    "transformer-engine", "transformer-engine-float16", 64, 32, 16
]  # fmt: skip
KnownStrategy = Literal[
    "auto", "single_device", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "ddp_fork",
    "ddp_forkserver", "ddp_notebook", "ddp_ray", "ddp_spawn",
]  # fmt: skip
if TYPE_CHECKING:
    # Type checkers report an unknown name of a precision, because precisions of other packages are usually passed as
    # objects, in plugins=. Type checkers accept any name of a strategy, because strategies of other packages are often
    # given by name. Editors complete the known names.
    PrecisionName = KnownPrecision
    StrategyName = KnownStrategy | str
else:  # at run time, a command line that reads the signature must accept any registered name
    PrecisionName = int | str
    StrategyName = str


class Callback(Protocol):
    """The members of a :class:`drivetrain.callback.Callback` that the settings use."""

    ends_training: bool


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """The Trainer's arguments as passed, each checked separately.

    Args:
        accelerator: hardware: "auto", "gpu", a device type, or an Accelerator.
        strategy: how the model is spread over devices: "auto", a name, or a Strategy.
        devices: a number of devices, a list of their indices, or "auto" or -1 for all.
        num_nodes: number of machines; a cluster that starts the program on several machines overrides the default.
        precision: "32-true" (the default), "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true" or "float8".
        logger: loggers or their names ("csv"); True or None: TensorBoard if it is installed, else CSV; False: none.
        callbacks: callbacks, in the order in which they run.
        fast_dev_run: run n (True: 1) batches of every stage, without loggers and checkpoints.
        max_epochs: stop after this many epochs; None: 1000 if there is no other limit; -1: no limit.
        min_epochs: train at least this many epochs, even if a callback asks to stop.
        max_steps: stop after this many optimizer steps; -1: no limit.
        min_steps: train at least this many optimizer steps, even if a callback asks to stop.
        max_time: stop training after this time: "DD:HH:MM:SS", a timedelta or its arguments.
        stop_timeout_s: seconds to save and to end after SIGTERM, Ctrl-C or a time limit.
        limit_train_batches: batches per training epoch: a count or a fraction.
        limit_val_batches: batches per validation loader: a count or a fraction.
        limit_test_batches: batches per test loader: a count or a fraction.
        limit_predict_batches: batches per prediction loader: a count or a fraction.
        overfit_batches: train and validate on the same few batches: a number or a fraction; 0.0: off.
        val_check_interval: validate every n batches, at a fraction of the epoch, or after a time; None: at the end.
        check_val_every_n_epoch: validate in every n-th epoch; None: count batches across epochs.
        num_sanity_val_steps: validation batches that the sanity check runs before training; None: 2; -1: all.
        log_every_n_steps: log values per step every n optimizer steps; None: 50.
        enable_checkpointing: add a ModelCheckpoint if none is given; None: yes.
        enable_progress_bar: show a progress bar; None: yes.
        enable_model_summary: print a table of the model; None: yes.
        accumulate_grad_batches: batches of one optimizer step; their gradients are averaged.
        gradient_clip_val: clip gradients to this norm or value; None: do not clip.
        gradient_clip_algorithm: "norm" (the default) or "value".
        deterministic: torch.use_deterministic_algorithms during the run; None: unchanged.
        benchmark: torch.backends.cudnn.benchmark during the run; None: unchanged.
        inference_mode: validate and test under torch.inference_mode instead of no_grad.
        use_distributed_sampler: split the data over the processes; no effect with one process.
        split_batches: True: divide batch_size by the number of processes; False: each process uses batch_size.
        profiler: a profiler object, "simple", "advanced", "pytorch", "memory" or "xla"; None: no profiler.
        detect_anomaly: torch.autograd.set_detect_anomaly during training.
        barebones: switch off logging, checkpoints, progress bar, summary and sanity check.
        plugins: a Precision, CheckpointIO, ClusterEnvironment or LayerSync of your own, or their names.
        sync_batchnorm: batch norm over the batches of all processes; no effect with one process.
        check_collectives: check that processes make equal calls of tensor collectives; None: the first 100 of a run.
        stall_timeout_s: after this many seconds without progress, report where each rank waits; None: never.
        reload_dataloaders_every_n_epochs: call the loader hooks again every n epochs; 0: never.
        default_root_dir: folder of logs and checkpoints; None: the working directory.
        enable_autolog_hparams: log the hyperparameters of module and datamodule.
        model_registry: name of a model registry.
        compile: torch.compile. True: the model; "blocks" or classes: these layers; a dict: its arguments; None: off.
        split_on_oom: if a batch does not fit into memory, run the batch in parts, and add up their gradients.
        cuda_graphs: replay steps as device graphs. "auto": if this is possible and faster; True: always; False: never.
        optimizer_kernels: use faster kernels on the host. "equal": if bitwise equal; "fastest": always; None: never.
        save_trainable_only: save only fingerprints of frozen weights in checkpoints, and not the weights.
        sample_seeds: the random numbers of a training sample depend only on seed, epoch and index.
        replica_check_every: compare the model's replicas every n optimizer steps and before each save; None: never.
        replay_every: compute every n-th optimizer step twice, and warn if its two results differ; None: never.
        plan_check: "warn": warn if the device's peak memory differs from the estimate of drivetrain plan by a tenth.

    Raises:
        ConfigurationError: an argument does not accept its value.
        NotSupportedError: this version does not support a valid value.
    """

    accelerator: str | Accelerator = "auto"
    strategy: StrategyName | Strategy = "auto"
    devices: int | list[int] | str = "auto"
    num_nodes: int = 1
    precision: PrecisionName | None = None
    logger: Logger | Iterable[Logger | str] | bool | None = None
    callbacks: list[Callback] | Callback | None = None
    fast_dev_run: int | bool = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | timedelta | dict[str, int] | None = None
    stop_timeout_s: float = 600.0
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | str | timedelta | dict[str, int] | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    split_batches: bool = False
    profiler: Profiler | str | None = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Plugin | list[Plugin] | None = None
    sync_batchnorm: bool = False
    check_collectives: bool | None = None
    stall_timeout_s: float | None = 300.0
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str | Path | None = None
    enable_autolog_hparams: bool = True
    model_registry: str | None = None
    compile: bool | str | type | list[str | type] | dict[str, Any] | None = None
    split_on_oom: bool = False
    cuda_graphs: bool | Literal["auto"] = False
    optimizer_kernels: Literal["equal", "fastest"] | None = "equal"
    save_trainable_only: bool = False
    sample_seeds: bool = False
    replica_check_every: int | None = None
    replay_every: int | None = None
    plan_check: Literal["warn"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.logger, Iterator):  # an iterator could be read only once
            object.__setattr__(self, "logger", list(self.logger))
        for name, rule in _RULES.items():
            rule(name, getattr(self, name))
        for name, only in NOT_YET.items():
            if (value := getattr(self, name)) != only:
                raise NotSupportedError(
                    f"Trainer({name}={shown(value)}) is not supported by this version of drivetrain, which only knows "
                    f"{name}={only!r}. Leave {name} out."
                )
        for name, harmless in _NOT_IN_BAREBONES.items() if self.barebones else ():
            if (value := getattr(self, name)) not in harmless:
                raise ConfigurationError(
                    f"Trainer(barebones=True, {name}={shown(value)}): barebones switches {name} off. "
                    "Leave one of them out."
                )
        if self.overfit_batches and self.fast_dev_run:
            raise ConfigurationError(
                f"Trainer(overfit_batches={self.overfit_batches!r}, fast_dev_run={self.fast_dev_run!r}) both say how "
                "many batches to take. Leave one out."
            )
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise ConfigurationError(
                f"Trainer(check_val_every_n_epoch=None, val_check_interval={self.val_check_interval!r}): a fraction is "
                "one of an epoch, and batches are counted across epochs. Write val_check_interval=100, or a duration."
            )

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        text = ", ".join(f"{name}={shown(value)}" for name, value, default in given if shown(value) != shown(default))
        return f"{type(self).__name__}({text})"

    @property
    def has_own_end(self) -> bool:
        """Whether a callback has its own limit that ends training."""
        given = self.callbacks or []
        callbacks = given if isinstance(given, (list, tuple)) else [given]
        return any(getattr(callback, "ends_training", False) for callback in callbacks)


_ENTRIES = re.compile(r"^    ([a-z]\w*): (.+(?:\n        .+)*)", re.MULTILINE)
DOCS = {name: " ".join(text.split())[:-1] for name, text in _ENTRIES.findall(inspect.getdoc(Settings) or "")}
"""The text of each argument in the docstring of :class:`Settings`."""


def doc_of(field: dataclasses.Field[Any]) -> str:
    """Return the line that documents an argument."""
    doc = DOCS.get(field.name, "")  # "": ``python -OO`` removes docstrings
    return f"{doc}; not supported yet: only the default is accepted" if field.name in NOT_YET else doc


def documents_arguments(cls: type[T]) -> type[T]:
    """Class decorator: add the documentation of the arguments in :class:`Settings` to the class's docstring."""
    return describe_arguments(cls, {field.name: doc_of(field) for field in dataclasses.fields(Settings)})


_NOT_IN_BAREBONES: dict[str, tuple[Any, ...]] = {
    "enable_checkpointing": (None, False),
    "logger": (None, False),
    "enable_progress_bar": (None, False),
    "enable_model_summary": (None, False),
    "log_every_n_steps": (None, 0),
    "num_sanity_val_steps": (None, 0),
    "fast_dev_run": (False,),
    "detect_anomaly": (False,),
    "profiler": (None,),
}


_wrong = functools.partial(wrong_value, "Trainer")


def seconds_of(name: str, value: Any, owner: str = "Trainer") -> float:
    """Return a duration in seconds; ``value`` is "DD:HH:MM:SS", a timedelta, or a dictionary of timedelta's arguments.

    Raises:
        ConfigurationError: the duration has another form, or is not positive.
    """
    seconds = 0.0
    with suppress(ValueError, TypeError):
        if isinstance(value, str):
            days, hours, minutes, rest = (int(part) for part in value.split(":"))
            seconds = timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
        elif isinstance(value, Mapping):
            seconds = timedelta(**value).total_seconds()
        elif isinstance(value, timedelta):
            seconds = value.total_seconds()
    if seconds <= 0:
        raise wrong_value(
            owner, name, value, 'a duration: "DD:HH:MM:SS", a timedelta or a dictionary of its arguments',
            f'{name}="00:01:30:00" for an hour and a half', (str, timedelta),
        )  # fmt: skip
    return seconds


def val_interval_of(
    value: int | float | str | timedelta | Mapping[str, int] | None,
) -> tuple[int | float, float | None]:
    """Return two values for ``val_check_interval``: a number of batches (int) or a fraction (float), and the seconds of
    a duration or ``None``.
    """
    if value is None:
        return 1.0, None
    return (value, None) if isinstance(value, (int, float)) else (1.0, seconds_of("val_check_interval", value))


_NUMBER = (numbers.Real,)


def _duration(name: str, value: Any) -> None:
    if value is not None:
        seconds_of(name, value)


def _count(lowest: int, optional: bool) -> Callable[[str, Any], None]:
    return lambda name, value: check_count("Trainer", name, value, lowest, max(lowest, 1), optional)


def _limit(name: str, value: Any) -> None:
    if value is None or is_count(value) or (isinstance(value, float) and 0.0 <= value <= 1.0):
        return
    cure = f"{name}={_limit_meant(value, 0, '10 or 0.5')}"
    raise _wrong(name, value, "a number of batches (int) or a fraction from 0.0 to 1.0 (float)", cure, _NUMBER)


def _interval(name: str, value: Any) -> None:
    if isinstance(value, (str, timedelta, Mapping)):
        seconds_of(name, value)
        return
    if value is None or is_count(value, 1) or (isinstance(value, float) and 0.0 < value <= 1.0):
        return
    cure = f"{name}={_limit_meant(value, 1, '0.5')}"
    raise _wrong(name, value, "a number of batches (int) or a fraction above 0.0 up to 1.0 (float)", cure, _NUMBER)


def _limit_meant(value: Any, lowest: int, otherwise: str) -> str:
    """Return a text with the number of batches or the fraction that a wrong ``value`` probably means."""
    count = count_meant(value, -1, lowest)
    return otherwise if count < 0 else str(count)


def _accumulation(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        raise _wrong(
            name, value, "an int of at least 1, the same in every epoch",
            f"callbacks=[GradientAccumulationScheduler(scheduling={shown(dict(value))})]",
        )  # fmt: skip
    _count(1, optional=False)(name, value)


def _seconds(name: str, value: Any) -> None:
    if not (is_number(value) and value > 0):
        raise _wrong(name, value, "a number of seconds above 0", f"{name}=600")


def _one_of(*allowed: Any) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        # `in` would treat 0 as False and 1 as True
        if not any(value is item or (isinstance(item, str) and value == item) for item in allowed):
            raise _wrong(name, value, f"one of {', '.join(map(repr, allowed))}", f"{name}={allowed[0]!r}")

    return check


def _amount(cure: str, name: str, value: Any) -> None:
    if value is not None and not (is_number(value) and value >= 0):
        raise _wrong(name, value, "a number of at least 0 or None", f"{name}={cure}", _NUMBER)


def _folder(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (str, os.PathLike)):
        raise _wrong(name, value, "a path or None", f'{name}="runs"', (str,))
    path = files.spelled(value)
    files.check_folder("Trainer", name, path, path, "runs")


def _fast_dev_run(name: str, value: Any) -> None:
    if not isinstance(value, bool) and not is_count(value):
        raise _wrong(name, value, "a bool or a number of batches", f"{name}=True")


def _compile(name: str, value: Any) -> None:
    if value:
        compile_options.CompileOptions.of(value)
    elif value is not None and value is not False:
        raise _wrong(name, value, "True, layers or arguments of torch.compile", f"{name}=True")


_STAGES = ("train", "val", "test", "predict")
_RULES: dict[str, Callable[[str, Any], None]] = {
    **{field.name: _one_of(True, False) for field in dataclasses.fields(Settings) if field.type == "bool"},
    **{field.name: _one_of(True, False, None) for field in dataclasses.fields(Settings) if field.type == "bool | None"},
    "num_nodes": _count(1, optional=False),
    "fast_dev_run": _fast_dev_run,
    **dict.fromkeys(("max_epochs", "num_sanity_val_steps"), _count(-1, optional=True)),
    **dict.fromkeys(("min_epochs", "min_steps", "log_every_n_steps"), _count(0, optional=True)),
    "max_steps": _count(-1, optional=False),
    "max_time": _duration,
    "stop_timeout_s": _seconds,
    **dict.fromkeys((*(f"limit_{name}_batches" for name in _STAGES), "overfit_batches"), _limit),
    "val_check_interval": _interval,
    "check_val_every_n_epoch": _count(1, optional=True),
    "accumulate_grad_batches": _accumulation,
    "gradient_clip_val": functools.partial(_amount, "1.0"),
    "gradient_clip_algorithm": _one_of("norm", "value", None),
    "deterministic": _one_of(True, False, "warn", None),
    "stall_timeout_s": functools.partial(_amount, "300.0"),
    "reload_dataloaders_every_n_epochs": _count(0, optional=False),
    "default_root_dir": _folder,
    "compile": _compile,
    "cuda_graphs": _one_of("auto", True, False),
    **dict.fromkeys(("replica_check_every", "replay_every"), _count(1, optional=True)),
    "optimizer_kernels": _one_of("equal", "fastest", None),
    "plan_check": _one_of("warn", None),
}


def check(name: str, value: Any) -> None:
    """Check that the argument ``name`` accepts ``value``.

    Raises:
        ConfigurationError: the argument does not accept this value.
    """
    _RULES[name](name, value)


ENV_PREFIX = "PL_TRAINER_"
"""The prefix of environment variables: ``PL_TRAINER_MAX_EPOCHS=3`` means ``Trainer(max_epochs=3)``. An argument that
the program passes has precedence.
"""

_WORDS = {"true": True, "false": False, "none": None}


def complete(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the arguments in ``given``, and the arguments that environment variables set.

    The value of a variable is parsed as a Python literal if possible, and otherwise kept as a string.

    Raises:
        UnknownArgumentError: an argument does not exist.
    """
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in given:
        if name not in known:
            raise UnknownArgumentError(
                f"Trainer has no argument {name}={shown(given[name])}. {_cure(name, given[name], known)} [DT1049]"
            )
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        # the command line reads variables that begin with PL_TRAINER__
        if not variable.startswith(ENV_PREFIX) or name.startswith("_"):
            continue
        if name in known:
            found[name] = _parsed(text)
        else:
            rank_zero_warn(
                f"The environment variable {variable}={text!r} names no argument of the Trainer. "
                f"{did_you_mean(name, known)}"
            )
    return {**found, **given}


def _cure(name: str, value: Any, known: Iterable[str]) -> str:
    if callable(getattr(value, "training_step", None)):
        return "Pass the model to trainer.fit(model) instead."
    return instead_of("Trainer", name) or did_you_mean(name, known)


def _parsed(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


NOT_YET: dict[str, Any] = {"model_registry": None}
"""For each argument whose feature does not exist yet, the only value that the argument accepts."""
