"""Warnings about settings without effect, such as a misspelt attribute, or an argument that requires another
argument.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.errors import ConfigurationError, UnknownArgumentError, closest, number_of, shown, unknown_argument
from drivetrain.loops.progress import TrainerFn
from drivetrain.module.trainable import TrainableModule
from drivetrain.settings import Settings

_ALIKE = 0.87  # the lowest ratio of difflib at which a name such as "automatic_optimisation" counts as misspelt
_OF_MODULE = ("automatic_optimization", "example_input_array", "strict_loading")


def warn_of_attribute(owner: Any, name: str, known: Iterable[str]) -> None:
    """Warn if the attribute ``name``, which was set on ``owner``, is probably a misspelling of a ``known`` name."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_ALIKE)
    # not for a name such as "logger2", which is intended
    if close and not name.startswith(close[0]) and not name.startswith("_"):
        rank_zero_warn(
            f"{type(owner).__name__} has no attribute {name!r}, so setting it has no effect. Did you mean "
            f"{close[0]!r}? If the name is your own, nothing is wrong."
        )


# callback -> the Trainer and the module of its last fit
_FITTED: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def warn_of_used_callbacks(trainer: Any, module: TrainableModule, base: type) -> None:
    """Warn about callbacks whose state is from a fit of another Trainer with another model. ``base``: the base class of
    callbacks.
    """
    for callback in trainer.callbacks:
        if not overrides(callback, "state_dict", base):
            continue
        of_trainer, of_module = _FITTED.get(callback, (None, None))
        _FITTED[callback] = ref(trainer), ref(module)
        if of_trainer is not None and of_trainer() is not trainer and of_module() is not module:
            rank_zero_warn(
                f"This {type(callback).__name__} has been used by another Trainer for another model, and continues "
                "with its state, such as the best score or the counts of that fit. Make a new one for each Trainer."
            )


def tell_of_used_trainer(trainer: Any, module: TrainableModule) -> None:
    """Log a message if a fit continues the step counters of another model's fit. This happens, for example, when a
    notebook cell is run again.
    """
    progress, earlier = trainer.progress, trainer.lightning_module
    if progress.global_step and earlier is not None and earlier is not module:
        rank_zero_info(
            f"This Trainer continues at epoch {progress.current_epoch}, step {progress.global_step}, with another "
            "model than before. To train it from the beginning, make a new Trainer."
        )


def warn_of_the_overlooked(module: TrainableModule, settings: Settings) -> None:
    """Warn about settings that would have no effect in a fit of ``module``."""
    for name in vars(module):
        if not hasattr(type(module), name):
            warn_of_attribute(module, name, _OF_MODULE)
    algorithm, clips = settings.gradient_clip_algorithm, settings.gradient_clip_val is not None
    if algorithm is not None and not clips and not overrides(module, "configure_gradient_clipping", TrainableModule):
        rank_zero_warn(
            f"Trainer(gradient_clip_algorithm={str(algorithm)!r}) has no effect without gradient_clip_val. Give it, "
            "for example gradient_clip_val=1.0, or leave both out."
        )
    if shortened := _shortened(settings):
        rank_zero_info(shortened)


def _shortened(settings: Settings) -> str:
    """Return a sentence about the argument that limits each epoch to a part of its batches; "" if none does."""
    if settings.fast_dev_run:
        count = int(settings.fast_dev_run)
        return (
            f"fast_dev_run={settings.fast_dev_run!r}: this fit is a trial, of {number_of(count, 'batch')} of "
            "each loader, without loggers and checkpoints. Leave it out to train."
        )
    name = "overfit_batches" if settings.overfit_batches else "limit_train_batches"
    given = getattr(settings, name)
    if not given or (isinstance(given, float) and given == 1.0):
        return ""
    part = f"{given:.3g} of its batches" if isinstance(given, float) else f"{number_of(given, 'batch')} at most"
    return f"{name}={given!r}: each epoch trains on {part}."


def check_manual(name: str, settings: Settings) -> None:
    """Check that a Trainer for manual optimization has no arguments for clipping or accumulation, which would do
    nothing.

    Raises:
        ConfigurationError: clipping or accumulation is set.
    """
    for argument, off, instead in (
        (
            "gradient_clip_val",
            (None, 0),
            "self.clip_gradients(optimizer, gradient_clip_val=...) before optimizer.step()",
        ),
        ("accumulate_grad_batches", (1,), "optimizer.step() in every n-th training_step only"),
    ):
        if (value := getattr(settings, argument)) not in off:
            raise ConfigurationError(
                f"{name}.automatic_optimization is False, so Trainer({argument}={value!r}) would do nothing. "
                f"Leave it out and call {instead}."
            )


def unknown_of(fn: TrainerFn, unknown: Mapping[str, Any], own: list[str]) -> UnknownArgumentError:
    """Return the error for an unknown argument of a Trainer's method, such as ``fit``. ``fn``: the method. ``own``: the
    names of the method's arguments.
    """
    name = next(iter(unknown))
    arguments = [field.name for field in dataclasses.fields(Settings)]
    if name in arguments:
        return UnknownArgumentError(
            f"trainer.{fn.value} has no argument {name}={shown(unknown[name])}: it is one of the Trainer. "
            f"Write Trainer({name}=...)."
        )
    if name in ("resume_from_checkpoint", "checkpoint_path", "checkpoint"):
        return UnknownArgumentError(f"trainer.{fn.value} has no argument {name}. Write ckpt_path=...")
    likely = f"max_{name}"  # epochs=3
    argument = likely if likely in arguments else closest(name, arguments)
    if closest(name, own) is None and argument is not None:
        return UnknownArgumentError(
            f"trainer.{fn.value} has no argument {name}={shown(unknown[name])}. Did you mean Trainer({argument}=...)?"
        )
    return unknown_argument(f"trainer.{fn.value}", unknown, own)
