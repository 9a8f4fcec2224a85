"""The step of a strategy that owns it: the parts that it is given, and which hooks it must call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError
from drivetrain.loops.pieces import (
    Step,
    as_one_of_many,
    bind_backward,
    bind_before_step,
    bind_training_step,
    bind_zero_grad,
)
from drivetrain.loops.run import Run
from drivetrain.module.losses import cannot_be_differentiated, loss_of
from drivetrain.strategies.stepping import HOOKS_IN_A_STEP, StepParts


def own_step(run: Run) -> Step | None:
    """The strategy's own step, if it has one.

    Raises:
        ConfigurationError: it does not call a hook that somebody overrides.
    """
    progress = run.progress
    own = run.engine.strategy.bind_step(_parts(run))
    if own is None:
        return None
    _check_honoured(run)

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output, steps = own(batch, batch_idx, position - 1, last, divisor)
        progress.global_step += steps
        return output

    return step


def _check_honoured(run: Run) -> None:
    """Whether the strategy calls every hook inside the step that somebody overrides.

    Raises:
        ConfigurationError: it does not call one of them, or does not clip, and the Trainer is told to.
    """
    strategy, hooks = run.engine.strategy, run.hooks
    if strategy.honoured_hooks == "all":
        return
    name, left_out = type(strategy).__name__, HOOKS_IN_A_STEP - strategy.honoured_hooks
    ignored = sorted(hook for hook in left_out if hooks.overridden(hook))
    if ignored:
        raise ConfigurationError(
            f"{name} owns its training step and does not call {', '.join(ignored)}, which "
            f"{hooks.overridden(ignored[0])} overrides. Do it in training_step, use another strategy, or let {name} "
            "call it and name it in its honoured_hooks."
        )
    if run.settings.gradient_clip_val is not None and "configure_gradient_clipping" in left_out:
        raise ConfigurationError(
            f"{name} owns its training step and does not clip, and Trainer(gradient_clip_val="
            f"{run.settings.gradient_clip_val}) asks for it. Leave the argument out, or let {name} clip "
            '(parts.before_step does) and name "configure_gradient_clipping" in its honoured_hooks.'
        )


def _parts(run: Run) -> StepParts:
    """What a step is made of, each piece bound as the loop's own step would bind it."""
    strategy, precision, window = run.engine.strategy, run.engine.precision, run.window
    optimizers, shared = strategy.optimizers, window.gather is not None
    first = optimizers[0] if optimizers else None
    step, context = bind_training_step(run)
    zero_grads = {id(each): bind_zero_grad(run, each) for each in optimizers}
    before_steps = {id(each): bind_before_step(run, each, window) for each in optimizers}
    differentiate = bind_backward(run, first)

    def training_step(batch: Any, batch_idx: int) -> Any:
        with context or nullcontext():
            return step(batch, batch_idx)

    def begin(size: int = 1, optimizer: Optimizer | None = first) -> None:
        window.begin(size)
        if optimizer is not None:
            zero_grads[id(optimizer)]()

    def part_of_window(output: Any, index: int = 0, last: bool = True) -> Tensor | None:
        loss, weight = loss_of(output, shared)
        if shared:
            loss, weight = as_one_of_many(window, loss, weight)
        return None if loss is None else window.part(loss, weight, first, index + 1, last)

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            differentiate(loss, *args, **kwargs)
        except RuntimeError as error:
            if (why := cannot_be_differentiated(loss)) is not None:
                raise ConfigurationError(why) from error
            raise

    def before_step(optimizer: Optimizer | None = first) -> None:
        if (prepare := before_steps.get(id(optimizer))) is not None:
            prepare()

    def optimizer_step(optimizer: Optimizer | None = first) -> bool:
        return optimizer is not None and precision.step(optimizer)

    assert strategy.model is not None  # it was set up
    return StepParts(
        training_step, begin, part_of_window, backward, before_step, optimizer_step, run.module, strategy.model,
        tuple(optimizers), precision, strategy.data,
    )  # fmt: skip
