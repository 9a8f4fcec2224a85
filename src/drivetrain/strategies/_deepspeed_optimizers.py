"""Give DeepSpeed's engine an optimizer of the same class as the user's optimizer. Copy options, such as the learning
rate, between the two optimizers.

DeepSpeed's ZeRO replaces the parameters in the parameter groups of the engine's optimizer by flat tensors. The user's
optimizer keeps the module's parameters. Checkpoints, schedulers and callbacks use the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer

from drivetrain.base.torch_private import update_scale
from drivetrain.errors import ConfigurationError
from drivetrain.precision.mixed import torch_scaler


def check(optimizers: Sequence[Optimizer], has_scheduler: bool, config: Mapping[str, Any]) -> None:
    """Check that DeepSpeed's engine supports the results of ``configure_optimizers``.

    Args:
        optimizers: the optimizers that ``configure_optimizers`` returned.
        has_scheduler: whether ``configure_optimizers`` also returned a scheduler.
        config: the configuration of the engine.

    Raises:
        ConfigurationError: the engine does not support these optimizers, ``config`` names another optimizer or
            scheduler, or there is no optimizer.
    """
    named = "optimizer" in config
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed's engine steps one. "
            "Put all parameters into one optimizer, with a parameter group for each kind."
        )
    if named == bool(optimizers):
        both = "and DeepSpeed's configuration names one too" if named else "and DeepSpeed cannot train without one"
        count = "one optimizer" if optimizers else "no optimizer"
        raise ConfigurationError(f"configure_optimizers returned {count}, {both}. Name it in one of the two places.")
    if has_scheduler and "scheduler" in config:
        raise ConfigurationError(
            "configure_optimizers returned a scheduler, and DeepSpeed's configuration names one too. Give one of them."
        )
    if any(isinstance(each, LBFGS) for each in optimizers):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times per step, and DeepSpeed's engine steps once after a "
            'backward pass. Use another optimizer, or strategy="ddp".'
        )


def trained_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups with at least one trained parameter. DeepSpeed's engine gets only these groups."""
    return [group for group in optimizer.param_groups if any(each.requires_grad for each in group["params"])]


def pass_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for theirs, mine in zip(source, target, strict=True):
        mine.update({name: value for name, value in theirs.items() if name != "params"})


def pass_options_to(engine: Any, optimizer: Optimizer) -> None:
    """Copy the current options of the user's optimizer to the engine's optimizer."""
    pass_options(trained_groups(optimizer), engine.basic_optimizer.param_groups)


def take_options_of(engine: Any, optimizer: Optimizer) -> None:
    """Copy the current options of the engine's optimizer to the user's optimizer."""
    pass_options(engine.basic_optimizer.param_groups, trained_groups(optimizer))


def stand_in(optimizer: Optimizer) -> Optimizer:
    """Return a new optimizer of the same class as ``optimizer``, for DeepSpeed's engine. The engine replaces the
    tensors in the parameter groups of the returned optimizer.
    """
    groups = [
        {**group, "params": [each for each in group["params"] if each.requires_grad]}
        for group in trained_groups(optimizer)
    ]
    return like(optimizer, groups)


def like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    # Do not copy the method ``step``, because a scheduler may have replaced the method on the user's optimizer.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.param_groups, made.state = groups, type(optimizer.state)(optimizer.state.default_factory)
    return made


# ---- the gradient scaler --------------------------------------------------------------------------------------------


_LEFT_TO_THE_ENGINE = ("scale", "unscale", "unscale_gradients")


class EngineScaler:
    """Wraps torch's gradient scaler, so that DeepSpeed's ZeRO optimizer can use the scaler as its ``loss_scaler``.

    With "16-mixed" the parameters are float32, and DeepSpeed's own scaler does not scale the loss for float32
    parameters. The run's precision owns the wrapped scaler, so checkpoints contain the state of the scaler.

    Args:
        scaler: the gradient scaler of the run's precision.
    """

    dynamic = True

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler: Any = scaler

    @property
    def cur_scale(self) -> float:
        """The factor by which :meth:`scale_loss` multiplies losses."""
        return float(self._scaler.get_scale())

    loss_scale = cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied by the scale, for the backward pass."""
        return self._scaler.scale(loss)

    def update_scale(self, overflow: bool) -> None:
        """Change the scale after a step, as torch's scaler does."""
        update_scale(self._scaler, overflow)


def hand_over(precision: Any, zero: Any) -> None:
    """Let the engine's optimizer use the scaler of ``precision``. Afterwards ``precision`` neither scales losses nor
    unscales gradients.
    """
    if (scaler := torch_scaler(precision)) is None:
        return
    zero.loss_scaler, zero.dynamic_loss_scale = EngineScaler(scaler), True
    vars(precision).update(dict.fromkeys(_LEFT_TO_THE_ENGINE, _as_it_is))


def take_back(precision: Any) -> None:
    """Undo :func:`hand_over`."""
    for name in _LEFT_TO_THE_ENGINE:
        vars(precision).pop(name, None)


def _as_it_is(value: Any) -> Any:
    return value
