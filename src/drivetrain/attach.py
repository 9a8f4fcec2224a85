"""What a Trainer ends up with: its callbacks in order, its loggers, and a module that can do what is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callback import Callback, Checkpoint
from drivetrain.datamodule import LightningDataModule
from drivetrain.errors import ConfigurationError
from drivetrain.introspect import near_misses, overrides
from drivetrain.loops.loaders import LOADER_HOOKS, Loaders
from drivetrain.loops.progress import TrainerFn
from drivetrain.module import LightningModule
from drivetrain.plan import Plan
from drivetrain.rank_zero import rank_zero_warn
from drivetrain.registry import load
from drivetrain.settings import Settings

if TYPE_CHECKING:
    from drivetrain.loggers.logger import Logger
    from drivetrain.trainer import Trainer

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
    if settings.max_time is not None:
        found.append(_timer(settings, found))
    defaults: tuple[tuple[str, type[Callback], str], ...] = (
        ("enable_checkpointing", Checkpoint, "drivetrain.callbacks:ModelCheckpoint"),
        ("enable_model_summary", summary, "drivetrain.callbacks:ModelSummary"),
        ("enable_progress_bar", bar, "drivetrain.callbacks.progress_bar:default_progress_bar"),
    )
    for argument, kind, default in defaults:
        wanted = False if settings.barebones else getattr(settings, argument)
        own = next((callback for callback in found if isinstance(callback, kind)), None)
        if wanted is False and own is not None:
            said = "barebones=True" if settings.barebones else f"{argument}=False"
            raise ConfigurationError(
                f"Trainer({said}) contradicts the {type(own).__name__} in callbacks. Drop one of the two."
            )
        if wanted is not False and own is None and not (kind is Checkpoint and settings.fast_dev_run):
            found.append(load(default)())
    return ordered(found)


def _timer(settings: Settings, given: Sequence[Callback]) -> Callback:
    timer = load("drivetrain.callbacks:Timer")
    if own := next((callback for callback in given if isinstance(callback, timer)), None):
        raise ConfigurationError(
            f"Trainer(max_time={settings.max_time!r}) and the {type(own).__name__} in callbacks both limit the time. "
            "Keep one."
        )
    made: Callback = timer(duration=settings.max_time)
    return made


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


_RENAMED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "get_progress_bar_dict": "log",
    "configure_sharded_model": "configure_model",
    "tbptt_split_batch": "training_step",
}
"""Hooks that are called no longer, and what does their work."""


def check_module(module: Any, fn: TrainerFn, settings: Settings) -> None:
    """Whether ``module`` has what ``fn`` needs, before anything is built (trap T53).

    Raises:
        ConfigurationError: it is no LightningModule, lacks a step or its optimizers, or optimizes by hand what the
            Trainer's arguments would do.
    """
    if not isinstance(module, LightningModule):
        raise ConfigurationError(
            f"trainer.{fn.value} needs a LightningModule, not a {type(module).__name__}. "
            "Subclass drivetrain.LightningModule."
        )
    name = type(module).__name__
    if "_book" not in module.__dict__:
        raise ConfigurationError(f"{name}.__init__ has not called its base class's. Begin it with super().__init__().")
    for removed, instead in _RENAMED.items():
        if callable(getattr(module, removed, None)):
            raise ConfigurationError(
                f"{name}.{removed} is never called: this hook is gone. Do its work in {instead}, and keep the steps' "
                "outputs on self if you need them."
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
    predicts = overrides(module, "predict_step", LightningModule) or overrides(module, "forward", LightningModule)
    if fn is TrainerFn.PREDICTING and not predicts:
        raise ConfigurationError(f"{name} has neither predict_step nor forward, so it cannot predict. Define one.")
    if fn is TrainerFn.FITTING and not module.automatic_optimization:
        _check_manual(name, settings)


def _check_manual(name: str, settings: Settings) -> None:
    """Under manual optimization the arguments that act on the step have nobody to act on (trap T19)."""
    for argument, off, instead in (
        ("gradient_clip_val", None, "self.clip_gradients(optimizer, gradient_clip_val=...) before optimizer.step()"),
        ("accumulate_grad_batches", 1, "optimizer.step() in every n-th training_step only"),
    ):
        if (value := getattr(settings, argument)) != off:
            raise ConfigurationError(
                f"{name}.automatic_optimization is False, so Trainer({argument}={value!r}) would do nothing. "
                f"Leave it out and call {instead}."
            )


def warn_of_near_misses(parties: Iterable[Any]) -> None:
    """Say so where a method is nearly, but not quite, called like a hook: it would never run (trap T53)."""
    for party in parties:
        base = next((b for b in (LightningModule, LightningDataModule, Callback) if isinstance(party, b)), None)
        if base is None or not type(party).__module__ or type(party) is base:
            continue
        hooks = {name for name in dir(base) if not name.startswith("_") and callable(getattr(base, name))}
        if base is LightningModule:
            hooks -= set(dir(torch.nn.Module))
        for method, hook in near_misses(type(party), base, hooks):
            rank_zero_warn(
                f"{type(party).__name__}.{method} is never called by the Trainer. Did you mean {hook}? "
                "If the name is meant, nothing is wrong."
            )


def log_hyperparameters(trainer: Trainer) -> None:
    """Give what module and datamodule saved of their hyperparameters to the loggers.

    Raises:
        ConfigurationError: both have one of the same name, with different values.
    """
    if not trainer.loggers or not trainer.settings.enable_autolog_hparams:
        return
    params: dict[str, Any] = {}
    for party in (trainer.datamodule, trainer.lightning_module):
        if party is None or not party._log_hyperparams:
            continue
        own = party.hparams_initial
        for name in set(own) & set(params):
            if not _same(own[name], params[name]):
                raise ConfigurationError(
                    f"The module and the datamodule both have a hyperparameter {name!r}, {own[name]!r} and "
                    f"{params[name]!r}. Rename one, or call save_hyperparameters(logger=False) in one of them."
                )
        params.update(own)
    for logger in trainer.loggers:
        if params:
            logger.log_hyperparams(params)
        logger.log_graph(trainer.lightning_module)
        logger.save()


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays and tensors compare to arrays
        return one is other


def check_loaders(module: LightningModule, loaders: Loaders, fn: TrainerFn, validates: bool) -> None:
    """Whether the loaders that ``fn`` needs exist, and, if a fit ``validates``, steps and loaders match (trap T53).

    Raises:
        ConfigurationError: the loader of ``fn`` itself is missing.
    """
    if not loaders.available(fn.value):
        hook = LOADER_HOOKS[fn.value]
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
