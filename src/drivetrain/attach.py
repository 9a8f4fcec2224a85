"""What a Trainer ends up with: its callbacks in order, its loggers, and a module that can do what is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback, Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.hooks import overrides
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import TrainerFn
from drivetrain.module import LightningModule
from drivetrain.plan import Plan
from drivetrain.rank_zero import rank_zero_warn
from drivetrain.registry import load
from drivetrain.settings import Settings

if TYPE_CHECKING:
    from drivetrain.loggers.logger import Logger

_POSITIONS = {"first": 0, "any": 1, "last": 2}


def callbacks_of(settings: Settings) -> list[Callback]:
    """The callbacks that were passed and the default ones, in the order in which they run (trap T48).

    Raises:
        ConfigurationError: something passed is no callback, or contradicts an ``enable_...`` argument.
    """
    given = settings.callbacks or []
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"Trainer(callbacks=...) got a {type(callback).__name__}: {callback!r}. "
                "Pass instances of drivetrain.Callback."
            )
    summary, bar = load("drivetrain.callbacks:ModelSummary"), load("drivetrain.callbacks:ProgressBar")
    defaults: tuple[tuple[str, type[Callback], str], ...] = (
        ("enable_checkpointing", Checkpoint, "drivetrain.callbacks:ModelCheckpoint"),
        ("enable_model_summary", summary, "drivetrain.callbacks:ModelSummary"),
        ("enable_progress_bar", bar, "drivetrain.callbacks.progress_bar:default_progress_bar"),
    )
    for argument, kind, default in defaults:
        wanted = getattr(settings, argument)
        own = next((callback for callback in found if isinstance(callback, kind)), None)
        if wanted is False and own is not None:
            raise ConfigurationError(
                f"Trainer({argument}=False) contradicts the {type(own).__name__} in callbacks. Drop one of the two."
            )
        if wanted is not False and own is None and not (kind is Checkpoint and settings.fast_dev_run):
            found.append(load(default)())
    return ordered(found)


def ordered(callbacks: Iterable[Callback]) -> list[Callback]:
    """Tuners first, checkpoints last, the rest as listed between them.

    Raises:
        ConfigurationError: two of them would keep their state under the same name.
    """
    found = sorted(callbacks, key=lambda callback: _POSITIONS[callback.position])
    stateful: dict[str, Callback] = {}
    for callback in found:
        if overrides(callback, "state_dict", Callback):
            if callback.state_key in stateful:
                raise ConfigurationError(
                    f"Two {type(callback).__name__} callbacks would save their state under {callback.state_key!r}. "
                    "Give them different arguments, or override state_key."
                )
            stateful[callback.state_key] = callback
    return found


def with_module_callbacks(callbacks: Sequence[Callback], module: LightningModule) -> list[Callback]:
    """``callbacks`` with those that the module configures; each of these replaces the ones of its own class."""
    returned = module.configure_callbacks()
    own = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    replaced = {type(callback) for callback in own}
    return ordered([*(c for c in callbacks if type(c) not in replaced), *own]) if own else list(callbacks)


def loggers_of(settings: Settings, plan: Plan, root_dir: str) -> list[Logger]:
    """The loggers that were passed, or the plan's default one.

    Raises:
        ConfigurationError: something passed is no logger.
    """
    if plan.default_logger is None:
        return []
    if settings.logger in (None, True) or settings.fast_dev_run:
        return [load(f"drivetrain.loggers:{plan.default_logger}")(root_dir)]
    given: Any = settings.logger
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    contract = load("drivetrain.loggers:Logger")
    for logger in found:
        if not isinstance(logger, contract):
            raise ConfigurationError(
                f"Trainer(logger=...) got a {type(logger).__name__}: {logger!r}. "
                "Pass a drivetrain.loggers.Logger, a list of them, True or False."
            )
    return found


def check_module(module: Any, fn: TrainerFn) -> None:
    """Whether ``module`` has what ``fn`` needs, before anything is built (trap T53).

    Raises:
        ConfigurationError: it is no LightningModule, or lacks a step or its optimizers.
    """
    if not isinstance(module, LightningModule):
        raise ConfigurationError(
            f"trainer.{fn.value} needs a LightningModule, not a {type(module).__name__}. "
            "Subclass drivetrain.LightningModule."
        )
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name}.automatic_optimization is False, and this version only optimizes automatically. "
            "Return the loss from training_step and leave automatic_optimization True."
        )
    for removed, instead in (
        ("training_epoch_end", "on_train_epoch_end"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("test_epoch_end", "on_test_epoch_end"),
    ):
        if hasattr(module, removed):
            raise ConfigurationError(
                f"{name}.{removed} is never called: this hook is gone since 2.0. Write {instead}(self), and keep the "
                "steps' outputs on self if you need them."
            )
    needed = {
        TrainerFn.FITTING: ("training_step", "configure_optimizers"),
        TrainerFn.VALIDATING: ("validation_step",),
        TrainerFn.TESTING: ("test_step",),
        TrainerFn.PREDICTING: (),
    }[fn]
    for method in needed:
        if not overrides(module, method, LightningModule):
            raise ConfigurationError(f"{name} has no {method}, and trainer.{fn.value} calls it. Define it.")


def check_loaders(module: LightningModule, loaders: Loaders, fn: TrainerFn, validates: bool) -> None:
    """Whether the loaders that ``fn`` needs exist, and, if a fit ``validates``, steps and loaders match (trap T53).

    Raises:
        ConfigurationError: the loader of ``fn`` itself is missing.
    """
    if not loaders.available(fn.value):
        hook = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}[fn.value]
        raise ConfigurationError(
            f"trainer.{fn.value} has no loader. Pass one, or define {hook} on {type(module).__name__} or a datamodule."
        )
    if fn is not TrainerFn.FITTING or not validates:
        return
    has_step = overrides(module, "validation_step", LightningModule)
    has_loader = loaders.available("validate")
    if has_step and not has_loader:
        rank_zero_warn(
            f"{type(module).__name__} has a validation_step but there is no validation loader, so it is not validated. "
            "Pass val_dataloaders, or define val_dataloader."
        )
    if has_loader and not has_step:
        rank_zero_warn(
            f"There is a validation loader but {type(module).__name__} has no validation_step, so it is not validated. "
            "Define it."
        )
