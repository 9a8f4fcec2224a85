"""One batch: forward, backward and, on the last batch of a window, the optimizer.

A *window* is the batches of one optimizer step (``accumulate_grad_batches``). There are three ways to run one, chosen
when the run starts:

flat
    ``training_step``; zero_grad hooks and zero_grad on the window's first batch; backward hooks and backward; on the
    last batch unscaling, on_before_optimizer_step, clipping, ``optimizer.step()``.
closure
    The same events in the same order, but on the window's last batch they happen inside a closure that is handed
    to ``module.optimizer_step``, as LBFGS and an overridden ``optimizer_step`` need it.
manual
    ``training_step`` alone. It calls ``manual_backward`` and ``step`` of the optimizers, which run their hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides, positional_arity
from drivetrain.engine.wrappers import TakeStep, requires_closure
from drivetrain.errors import ConfigurationError
from drivetrain.loops.run import Run
from drivetrain.module.losses import Window, cannot_be_differentiated, loss_of, rescale
from drivetrain.module.optimizers import LightningOptimizer, parameters_of
from drivetrain.precision.precision import Precision

Step = Callable[[Any, int, int, bool, int], Any]
"""``step(batch, batch_idx, position, last, divisor)`` returns what ``training_step`` returned.

``position`` counts the window's batches from 1, ``last`` says that the window ends here; the loss is divided by
``divisor``, the number of batches the window was expected to hold. Counts its optimizer steps in
``progress.global_step``.
"""

TrainingStep = Callable[[Any, int], Any]
ForwardBackward = Callable[[Any, int, int, bool, int], Any]
Backward = Callable[..., Any]


def make_step(run: Run) -> Step:
    """The way to run a window that this module and its optimizers need.

    Raises:
        ConfigurationError: the optimizers, the arguments and the way do not go together.
    """
    run.unbind()
    optimizers = run.engine.strategy.optimizers
    if not run.module.automatic_optimization:
        return _manual(run)
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization steps one. "
            "Put all parameters into one optimizer, or set self.automatic_optimization = False and step them yourself."
        )
    window = run.window  # the run's: a window goes on when its step is bound anew in its middle
    optimizer = optimizers[0] if optimizers else None
    forward_backward = _make_forward_backward(run, optimizer, window)
    before_step = _make_before_step(run, optimizer, window)
    if optimizer is None:
        return _flat(run, window, forward_backward, before_step, None)
    needs_closure = requires_closure(optimizer)
    if needs_closure:
        _check_closure(run, type(optimizer).__name__)
    if needs_closure or run.hooks.bind_method("optimizer_step") is not None:
        return _closure(run, window, forward_backward, before_step, run.handles[0])
    step = _flat(run, window, forward_backward, before_step, optimizer)
    return _strategy_accumulates(run, step) if run.engine.strategy.handles_gradient_accumulation else step


def _check_closure(run: Run, optimizer: str) -> None:
    accumulate, precision = run.limits.accumulate, run.engine.precision
    if accumulate > 1:
        raise ConfigurationError(
            f"{optimizer} evaluates the loss several times per step, which accumulate_grad_batches={accumulate} cannot "
            "repeat. Write accumulate_grad_batches=1."
        )
    if precision.scales_loss:
        raise ConfigurationError(
            f"{optimizer} evaluates the loss several times per step, which the scaled loss of precision="
            f'{precision.name!r} does not allow. Write precision="bf16-mixed" or "32-true".'
        )


def _bind_training_step(run: Run) -> tuple[TrainingStep, AbstractContextManager[Any] | None]:
    """``training_step`` with the arguments its signature asks for, and the context to run it in (traps T37, T51)."""
    training_step = run.engine.strategy.bind("training_step")
    context = run.engine.forward_context()
    if (batches := run.batches) is not None:
        return batches.bound(training_step), context
    if positional_arity(run.module.training_step) > 1:
        return training_step, context
    return lambda batch, batch_idx: training_step(batch), context


# ---- the three ways --------------------------------------------------------------------------------------------------


def _flat(
    run: Run,
    window: Window,
    forward_backward: ForwardBackward,
    before_step: Callable[[], None] | None,
    optimizer: Optimizer | None,
) -> Step:
    progress = run.progress
    scaled_step = run.engine.precision.step if run.engine.precision.scales_loss else None

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output = forward_backward(batch, batch_idx, position, last, divisor)
        if last and window.graded:
            if optimizer is not None:
                if before_step is not None:
                    before_step()
                if scaled_step is None:
                    optimizer.step()
                elif not scaled_step(optimizer):
                    return output  # the gradients overflowed: nothing was stepped
            progress.global_step += 1
        return output

    return step


def _strategy_accumulates(run: Run, flat: Step) -> Step:
    """Step after every batch with its undivided loss; only the last step of a window is one (trap T13)."""
    progress = run.progress

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        steps = progress.global_step
        output = flat(batch, batch_idx, position, True, 1)
        if not last:
            progress.global_step = steps
        return output

    return step


def _closure(
    run: Run,
    window: Window,
    forward_backward: ForwardBackward,
    before_step: Callable[[], None] | None,
    handle: LightningOptimizer,
) -> Step:
    progress, book = run.progress, run.book
    optimizer_step: Callable[..., Any] = run.hooks.bind_method("optimizer_step") or run.module.optimizer_step
    training_scope = run.hooks.scope("training_step")
    must_have_loss, shared = requires_closure(handle.optimizer), window.gather is not None

    def finish(optimizer: Optimizer) -> None:
        if not window.graded:  # zeroed gradients would still make momentum and weight decay move the parameters
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        elif before_step is not None:
            before_step()

    _attach(run, handle, finish, lambda: window.graded > 0)

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output: Any = None

        def closure() -> Any:
            nonlocal output
            outer, book.scope = book.scope, training_scope  # it logs as the window's other batches do
            try:
                output = forward_backward(batch, batch_idx, position, True, divisor)
            finally:
                book.scope = outer
            loss, weight = loss_of(output, shared)
            if loss is None and must_have_loss:
                raise ConfigurationError(
                    f"training_step returned no loss, and {type(handle.optimizer).__name__} cannot do without. "
                    "Return a loss for every batch."
                )
            return window.mean_over_ranks(loss, weight) if shared and must_have_loss else loss

        if not last:
            return forward_backward(batch, batch_idx, position, False, divisor)
        optimizer_step(progress.current_epoch, batch_idx, handle, closure)
        return output

    return step


def _manual(run: Run) -> Step:
    training_step, context = _bind_training_step(run)
    hooks = run.hooks.bind("on_before_optimizer_step")

    def before_step(optimizer: Optimizer) -> None:
        for hook in hooks:
            hook(optimizer)

    for handle in run.handles:
        _attach(run, handle, before_step, lambda: True)
    backward, window = _make_backward(run), run.window

    strategy, shared = run.engine.strategy, run.window.gather is not None

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        window.graded += 1  # until the next step: a checkpoint in between must hold the gradients
        if not shared:
            backward(loss, *args, **kwargs)
            return
        strategy.before_manual_backward(loss)
        backward(loss if window.factor_here == 1 else loss * window.factor_here, *args, **kwargs)
        strategy.after_manual_backward()

    run.manual_backward = manual_backward

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        if context is None:
            return training_step(batch, batch_idx)
        with context:
            return training_step(batch, batch_idx)

    return step


def _attach(
    run: Run, handle: LightningOptimizer, before_step: Callable[[Optimizer], None], graded: Callable[[], bool]
) -> None:
    """Make ``handle.step`` go through the run, until the run is bound anew or ends.

    What counts as a step is what was done through it: an override of ``optimizer_step`` may skip some. A hook on the
    optimizer would count one twice whose class calls ``super().step()``.
    """
    progress, precision = run.progress, run.engine.precision

    def plain(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        if closure is None:
            before_step(optimizer)
            loss = optimizer.step(**kwargs)
        else:

            def evaluate() -> Any:  # an optimizer that evaluates twice sees finished gradients twice
                value = closure()
                before_step(optimizer)
                return value

            loss = optimizer.step(closure=evaluate, **kwargs)
        progress.global_step += graded()
        return loss

    def scaled(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        loss = None
        if closure is not None:  # before the step and not inside: the scaler looks at the gradients first (trap T21)
            with torch.enable_grad():
                loss = closure()
        if graded():
            precision.unscale(optimizer)
            before_step(optimizer)
            progress.global_step += precision.step(optimizer, **kwargs)
        return loss

    take_step: TakeStep = scaled if precision.scales_loss else plain
    if not run.module.automatic_optimization:
        take_step = _closing_window(run, take_step)
    handle.take_step = take_step
    run.unbinders.append(lambda: setattr(handle, "take_step", None))


def _closing_window(run: Run, take_step: TakeStep) -> TakeStep:
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        result = take_step(optimizer, closure, kwargs)
        run.window.graded = 0
        return result

    return step


# ---- what they share -------------------------------------------------------------------------------------------------


def _make_backward(run: Run) -> Backward:
    """Scaling, the backward hooks and backward, for a loss that is ready."""
    precision = run.engine.precision
    scale = precision.scale if precision.scales_loss else None
    before_backward = run.hooks.bind("on_before_backward")
    after_backward = run.hooks.bind("on_after_backward")
    backward: Backward = run.hooks.bind_method("backward") or (
        precision.backward if overrides(precision, "backward", Precision) else Tensor.backward
    )

    def differentiate(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if scale is not None:
            loss = scale(loss)
        for hook in before_backward:
            hook(loss)
        backward(loss, *args, **kwargs)
        for hook in after_backward:
            hook()

    bare = scale is None and not before_backward and not after_backward
    return backward if bare else differentiate


def _make_forward_backward(run: Run, optimizer: Optimizer | None, window: Window) -> ForwardBackward:
    progress = run.progress
    training_step, context = _bind_training_step(run)
    before_zero_grad = run.hooks.bind("on_before_zero_grad")
    own_zero_grad = run.hooks.bind_method("optimizer_zero_grad")
    backward = _make_backward(run)
    shared = window.gather is not None

    def forward_backward(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        if context is None:
            output = training_step(batch, batch_idx)
        else:
            with context:
                output = training_step(batch, batch_idx)
        loss, weight = (output, None) if type(output) is Tensor else loss_of(output, shared)
        if position == 1:
            window.expected, window.graded, window.position, window.reference = divisor, 0, 0, None
            if optimizer is not None:
                for hook in before_zero_grad:
                    hook(optimizer)
                if own_zero_grad is None:
                    optimizer.zero_grad()
                else:
                    own_zero_grad(progress.current_epoch, batch_idx, optimizer)
        if shared:
            loss, weight = _as_one_of_many(window, loss, weight)
        if loss is not None:
            if weight is not None:
                if shared and last:
                    loss = window.weigh_together(loss, weight, optimizer)
                else:
                    loss = window.weigh(loss, weight, optimizer, again=position == window.position)
            elif divisor != 1:
                loss = window.divide(loss)
            if position != window.position:  # a closure may be run twice
                window.position = position
                window.graded += 1
            try:
                backward(loss)
            except RuntimeError as error:
                if (why := cannot_be_differentiated(loss)) is not None:
                    raise ConfigurationError(why) from error
                raise
        return output

    return _exchanging_last(run, forward_backward) if shared else forward_backward


def _as_one_of_many(
    window: Window, loss: Tensor | None, weight: float | Tensor | None
) -> tuple[Tensor, float | Tensor | None]:
    """A rank's loss as its part of the mean over the ranks' batches.

    Raises:
        ConfigurationError: there is none, and the other ranks would wait for its gradients (trap T21).
    """
    if loss is None:
        raise ConfigurationError(
            "training_step returned no loss on one of several ranks, and the others wait for its gradients. "
            "Return a loss of zero that depends on the parameters, or a WeightedLoss of weight 0."
        )
    factor = window.factor_here
    if weight is not None:
        return loss, weight if factor else weight * 0
    return (loss if factor == 1 else loss * factor), None


def _exchanging_last(run: Run, forward_backward: ForwardBackward) -> ForwardBackward:
    """``forward_backward`` of a strategy whose ranks exchange gradients: on the window's last batch only."""
    strategy = run.engine.strategy
    model = strategy.model
    assert model is not None  # it was set up

    def exchange_last(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        if last:
            return forward_backward(batch, batch_idx, position, last, divisor)
        with strategy.block_backward_sync(model):
            return forward_backward(batch, batch_idx, position, last, divisor)

    return exchange_last


def _make_before_step(run: Run, optimizer: Optimizer | None, window: Window) -> Callable[[], None] | None:
    """What happens to the finished gradients before the optimizer takes them; ``None`` if nothing does."""
    hooks, settings, precision = run.hooks, run.settings, run.engine.precision
    before_step_hooks = hooks.bind("on_before_optimizer_step")
    clip_val, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
    clip = hooks.bind_method("configure_gradient_clipping")
    if clip is None and clip_val is not None:
        clip = run.module.configure_gradient_clipping
    unscale = precision.unscale if precision.scales_loss else None
    # A window may have begun under another limit; several ranks divide by the weights of all.
    several = run.limits.accumulate > 1 or run.progress.held > 0 or window.gather is not None
    may_rescale = several and not run.engine.strategy.handles_gradient_accumulation
    if optimizer is None or not (before_step_hooks or clip or unscale or may_rescale):
        return None

    def before_step() -> None:
        if unscale is not None:
            unscale(optimizer)
        if may_rescale and (factor := window.factor()) is not None:
            rescale(optimizer, factor)
        for hook in before_step_hooks:
            hook(optimizer)
        if clip is not None:
            clip(optimizer, clip_val, algorithm)

    return before_step
