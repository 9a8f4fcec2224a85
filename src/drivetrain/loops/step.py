"""Run a training batch: forward, backward and, on the last batch of a window, the optimizer's step.

A *window* is the batches of one optimizer step (``accumulate_grad_batches``). When an epoch begins, this module chooses
one of three kinds of step:

flat
    ``training_step``; zero_grad hooks and zero_grad on the window's first batch; backward hooks and backward; on the
    last batch unscaling, on_before_optimizer_step, clipping, ``optimizer.step()``.
closure
    The same calls in the same order, but on the window's last batch a closure makes them. ``module.optimizer_step``
    receives the closure, because LBFGS and an overridden ``optimizer_step`` call it.
manual
    Only ``training_step``. In ``training_step``, the user's code calls ``manual_backward`` and the optimizers'
    ``step``. Both methods call the hooks.

A strategy can override methods of :mod:`drivetrain.strategies.step` to change parts of the step. This module then calls
these methods in place of torch's operations. A strategy can also run the complete step itself (``own_step.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides
from drivetrain.base.tree import parameters_of, rescale
from drivetrain.engine.wrappers import TakeStep, check_closure, requires_closure
from drivetrain.errors import ConfigurationError, RunError, shown
from drivetrain.loops import direct, own_step, pieces, split
from drivetrain.loops.pieces import Backward, Step
from drivetrain.loops.progress import Phase
from drivetrain.loops.run import Run
from drivetrain.module.losses import cannot_be_differentiated, check_manual_output, loss_of
from drivetrain.module.optimizers import LightningOptimizer, loses_gradients
from drivetrain.strategies.step import Step as StepVerbs
from drivetrain.strategies.step import steps_itself

if TYPE_CHECKING:
    from drivetrain.loops.direct import Calls

# The step uses integers, because in Python 3.10 and 3.11 each access to an enumeration's member is a function call.
_FORWARD, _BACKWARD, _OPTIMIZER_STEP = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OPTIMIZER_STEP)

Clear = Callable[[], None] | None


class BoundStep(NamedTuple):
    """A training step that is bound to a run.

    Attributes:
        run: called for each batch.
        finish_window: called after ``run`` for a window's last batch, and steps the optimizer. ``None``: ``run`` itself
            steps the optimizer.
    """

    run: Step
    finish_window: Callable[[], None] | None = None


def make_step(run: Run) -> BoundStep:
    """Return the step for the run's module and optimizers.

    Raises:
        ConfigurationError: the optimizers do not fit the Trainer's arguments or automatic optimization.
    """
    run.unbind()
    strategy = run.engine.strategy
    strategy.driver.rebind = run.mark_stale
    run.window.exchanges_always = run.window.gather is not None and pieces.exchanges_always(run)
    optimizers, automatic = strategy.optimizers, run.module.automatic_optimization
    strategy.driver.window_factor = run.window.factor if automatic else None
    if not automatic:
        return BoundStep(_manual(run))
    if overrides(strategy, "bind_step", StepVerbs) and (step := own_step.own_step(run)) is not None:
        return BoundStep(step)
    if len(optimizers) > 1:
        raise RunError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization steps one. "
            "Put all parameters into one optimizer, or set self.automatic_optimization = False and "
            "step them yourself. [DT1004]"
        )
    optimizer = optimizers[0] if optimizers else None
    calls = None if optimizer is None else direct.bind(run, optimizer)
    zero_grad = None if optimizer is None else pieces.bind_zero_grad(run, optimizer, calls and calls.zero_grad)
    backward = pieces.bind_backward(run, optimizer, Tensor.backward if calls is None else calls.backward)
    before_step = pieces.bind_before_step(run, optimizer)
    is_bare = calls is not None and (zero_grad, backward) == (calls.zero_grad, calls.backward)
    steps = is_bare and before_step is None and _ends_with_step(run)
    forward_backward = make_forward_backward(run, optimizer, zero_grad, backward, calls if is_bare else None, steps)
    if optimizer is None:
        return BoundStep(forward_backward, _optimizer_step(run, before_step, None, None))
    accumulate = run.limits.accumulate
    check_closure(
        optimizer,
        run.engine.precision,
        (accumulate > 1, f"accumulate_grad_batches={accumulate} cannot repeat. Write accumulate_grad_batches=1."),
        (run.settings.split_on_oom, "Trainer(split_on_oom=True) cannot split. Leave split_on_oom out."),
    )
    if requires_closure(optimizer) or steps_itself(strategy) or run.hooks.bind_method("optimizer_step") is not None:
        bound = BoundStep(_closure(run, forward_backward, before_step, run.optimizers.handles[0]))
    else:
        handle, clear = run.optimizers.handles[0], optimizer.zero_grad
        handle.bind(_not_by_hand, _keeping_window(run, clear) if accumulate > 1 else clear)
        run.optimizers.unbinders.append(lambda: handle.bind(None, clear))
        finish = None if steps else _optimizer_step(run, before_step, optimizer, calls)
        bound = BoundStep(forward_backward, finish)
    if run.settings.split_on_oom:
        parts = split.SplitWindow(run, optimizer, before_step)
        return BoundStep(parts.step, pieces.measured(run, "optimizer_step", parts.finish_window))
    return _strategy_accumulates(run, bound) if strategy.facts.handles_gradient_accumulation else bound


def _not_by_hand(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
    raise ConfigurationError(
        "self.optimizers().step() was called under automatic optimization, in which the Trainer steps the optimizer "
        "after each window. Leave the call out, or set self.automatic_optimization = False and also call "
        "self.manual_backward(loss) and zero_grad() yourself."
    )


def _keeping_window(run: Run, clear: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls ``clear``, but raises if the call would delete gradients of the window's earlier
    batches.
    """

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if run.window.batches_done > 0:
            raise loses_gradients("self.optimizers().zero_grad()", run.limits.accumulate)
        clear(*args, **kwargs)

    return zero_grad


# ---- the three kinds of step -----------------------------------------------------------------------------------------


def _optimizer_step(
    run: Run, before_step: Callable[[], None] | None, optimizer: Optimizer | None, calls: Calls | None
) -> Callable[[], None]:
    """Return the function that steps the optimizer after a window's last batch, for the flat step."""
    progress, precision, window, slot = run.progress, run.engine.precision, run.window, run.progress.slot
    scaled_step = precision.optimizer_step if precision.scales_loss else None
    train = None if calls is None else calls.train

    def finish_window() -> None:
        if not window.batches_with_gradients:
            return
        if optimizer is not None:
            slot[0] = _OPTIMIZER_STEP
            if before_step is not None:
                before_step()
            if train is not None:
                train(None, False, True)
            elif scaled_step is None:
                optimizer.step()
            else:
                scaled_step(optimizer)
                if not precision.stepped:
                    return  # the gradients overflowed
        progress.global_step += 1

    return pieces.measured(run, "optimizer_step", finish_window)


def _strategy_accumulates(run: Run, whole: BoundStep) -> BoundStep:
    """Return a step for a strategy that accumulates gradients itself. The strategy's optimizer is stepped after every
    batch, and the loss is not divided. Only the last step of a window is counted.
    """
    progress = run.progress

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        steps = progress.global_step
        output = whole.run(batch, batch_idx, position, True, 1)
        if whole.finish_window is not None:
            whole.finish_window()
        if not last:
            progress.global_step = steps
        return output

    return BoundStep(step)


def _closure(
    run: Run,
    forward_backward: Step,
    before_step: Callable[[], None] | None,
    handle: LightningOptimizer,
) -> Step:
    progress, book, window = run.progress, run.book, run.window
    optimizer_step: Callable[..., Any] = run.hooks.bind_method("optimizer_step") or run.module.optimizer_step
    optimizer_step = pieces.measured(run, "optimizer_step", optimizer_step)
    training_scope = run.hooks.scope("training_step")
    must_have_loss, shared = requires_closure(handle.optimizer), window.gather is not None

    def finish(optimizer: Optimizer) -> None:
        if not window.batches_with_gradients:  # with zeros, momentum would still change parameters
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        elif before_step is not None:
            before_step()

    _attach(run, handle, finish, lambda: window.batches_with_gradients > 0)

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output: Any = None
        called = False

        def closure() -> Any:
            nonlocal output, called
            called = True
            outer = book.enter(training_scope)  # log as in training_step, not as in optimizer_step
            try:
                with torch.enable_grad():  # the user's optimizer_step may run under no_grad
                    output = forward_backward(batch, batch_idx, position, True, divisor)
            finally:
                book.enter(outer)
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
        if not called:
            raise ConfigurationError(_closure_not_called(run, handle.optimizer))
        return output

    return step


def _closure_not_called(run: Run, optimizer: Optimizer) -> str:
    owner = run.hooks.overridden("optimizer_step")
    if not owner and steps_itself(run.engine.strategy):
        owner = type(run.engine.strategy).__name__
    name = f"{owner}.optimizer_step" if owner else f"{type(optimizer).__name__}.step"
    return (
        f"{name} has not called the closure that it was given, so training_step and the backward pass were not run. "
        "Write optimizer.step(closure=closure), or call closure() alone to compute gradients without a step."
    )


def _manual(run: Run) -> Step:
    training_step = pieces.in_forward_context(run, pieces.bind_training_step(run))
    hooks = run.hooks.bind("on_before_optimizer_step")

    def before_step(optimizer: Optimizer) -> None:
        for hook in hooks:
            hook(optimizer)

    for handle in run.optimizers.handles:
        _attach(run, handle, before_step, lambda: True)
    backward, window = pieces.bind_backward(run), run.window

    strategy, shared = run.engine.strategy, run.engine.strategy.facts.is_distributed

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # While this number is above 0, a checkpoint contains the gradients. The optimizer's step sets the number to 0.
        window.batches_with_gradients += 1
        if not shared:
            backward(loss, *args, **kwargs)
            return
        with strategy.manual_backward_context(loss):
            backward(loss if window.factor_here == 1 else loss * window.factor_here, *args, **kwargs)

    run.optimizers.manual_backward = manual_backward

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output = training_step(batch, batch_idx)
        if output is not None and type(output) is not Tensor:
            check_manual_output(output)
        return output

    return step


def _attach(
    run: Run, handle: LightningOptimizer, before_step: Callable[[Optimizer], None], graded: Callable[[], bool]
) -> None:
    """Make ``handle.step`` also prepare and count the optimizer's step, until the run ends or binds a new step.

    The run counts calls of ``handle.step``, not calls of ``optimizer_step``, because an override of ``optimizer_step``
    need not step. A hook of the optimizer alone would count a step twice if the optimizer's class calls
    ``super().step()``, because torch then calls the hook twice.
    """
    progress, strategy, precision = run.progress, run.engine.strategy, run.engine.precision
    slot = progress.slot
    step_of_strategy, model, scales = strategy.optimizer_step, strategy.model, precision.scales_loss

    def plain(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        if closure is None:
            before_step(optimizer)
            slot[0] = _OPTIMIZER_STEP
            loss = optimizer.step(**kwargs)
        else:

            def evaluate() -> Any:  # an optimizer may call this repeatedly
                try:
                    value = closure()
                except TypeError as error:
                    if callable(closure):
                        raise
                    raise ConfigurationError(
                        f"optimizer.step(closure={shown(closure)}): a closure is a function that computes the loss. "
                        "Pass the optimizer_closure that optimizer_step got, or leave it out."
                    ) from error
                before_step(optimizer)
                slot[0] = _OPTIMIZER_STEP
                return value

            loss = optimizer.step(closure=evaluate, **kwargs)
        progress.global_step += graded()
        return loss

    own = scales or steps_itself(strategy)
    uncounted = False

    def count(*_: Any) -> None:  # a hook, so that a step counts even if an exception follows
        nonlocal uncounted
        progress.global_step += uncounted
        uncounted = False

    # a user-defined optimizer may lack this method
    if own and (register := getattr(handle.optimizer, "register_step_post_hook", None)):
        run.optimizers.unbinders.append(register(count).remove)

    def by_strategy(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        nonlocal uncounted
        applied: float | Tensor | None = None

        def evaluate() -> Any:
            nonlocal applied, uncounted
            if applied is not None:  # in a second call, undo the factor of the first call
                rescale(optimizer, 1 / applied)
            value = None if closure is None else closure()
            uncounted = bool(graded())
            if closure is not None and uncounted and run.module.automatic_optimization:
                applied = run.window.factor()
            if scales and graded():
                precision.unscale_gradients(optimizer)
            before_step(optimizer)
            slot[0] = _OPTIMIZER_STEP
            return value

        precision.stepped, uncounted = True, closure is None and bool(graded())
        loss = step_of_strategy(optimizer, evaluate, model, **kwargs)
        if uncounted and precision.stepped:
            count()  # other code made the step without calling the hook
        uncounted = False
        return loss

    take_step: TakeStep = by_strategy if own else plain
    if not run.module.automatic_optimization:
        take_step = pieces.measured(run, "optimizer_step", _closing_window(run, take_step))
    handle.take_step = take_step
    run.optimizers.unbinders.append(lambda: setattr(handle, "take_step", None))


def _closing_window(run: Run, take_step: TakeStep) -> TakeStep:
    slot = run.progress.slot

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        result = take_step(optimizer, closure, kwargs)
        run.window.batches_with_gradients, slot[0] = 0, _FORWARD
        return result

    return step


# ---- shared parts ----------------------------------------------------------------------------------------------------


def _ends_with_step(run: Run) -> bool:
    """Whether one direct call can also step the optimizer. The result is false if a window may have several batches, or
    if an observer, a device graph or the strategy needs the optimizer's step as a separate call.
    """
    is_window = run.limits.accumulate == 1 and run.window.batches_done == 0
    takes_parts = run.hooks.bind_observers("step_bound") or run.settings.cuda_graphs
    return is_window and not takes_parts and not run.engine.strategy.facts.handles_gradient_accumulation


def make_forward_backward(
    run: Run, optimizer: Optimizer | None, zero_grad: Clear, backward: Backward, calls: Calls | None, steps: bool
) -> Step:
    """Return the function that computes a batch's loss and gradients, and that calls ``zero_grad`` for a window's first
    batch.

    ``calls``: direct calls (``direct.py``), or ``None``. One direct call replaces both ``zero_grad`` and ``backward``.
    ``steps``: whether the direct call also steps the optimizer; only possible if each batch is a window.
    """
    train = None if calls is None else calls.train
    training_step, context = pieces.bind_training_step(run), run.engine.forward_context()
    progress, window, shared, slot = run.progress, run.window, run.window.gather is not None, run.progress.slot

    accumulates = run.limits.accumulate > 1 or window.batches_done > 0
    # a context that prevents the exchange of gradients in all backward passes of a window but the last
    held_back = pieces.hold_back(run) if accumulates and run.engine.strategy.facts.is_distributed else None

    def forward_backward(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        block = None if last or held_back is None else held_back()
        if block is not None:
            block.__enter__()  # called directly, because a wrapper function would take time
        try:
            if context is None:
                output = training_step(batch, batch_idx)
            else:
                with context:
                    output = training_step(batch, batch_idx)
            loss, weight = output, None
            if type(output) is not Tensor:
                loss, weight = loss_of(output, shared)
            if position == 1:
                window.divisor, window.batches_with_gradients = divisor, 0
                window.last_counted, window.reference = 0, None
                if zero_grad is not None and (train is None or loss is None):
                    zero_grad()
            if shared and (loss is None or window.factor_here != 1):
                loss, weight = pieces.as_one_of_many(window, loss, weight)
            if loss is not None:
                if weight is not None or divisor != 1:
                    loss = window.part(loss, weight, optimizer, position, last)
                elif position != window.last_counted:  # a closure may run twice
                    window.last_counted = position
                    window.batches_with_gradients += 1
                slot[0] = _BACKWARD
                try:
                    if train is None:
                        backward(loss)
                    else:
                        train(loss, position == 1, steps)
                        progress.global_step += steps
                except RuntimeError as error:
                    if (why := cannot_be_differentiated(loss, run.module)) is not None:
                        raise RunError(why) from error
                    raise
            return output
        finally:
            if block is not None:
                block.__exit__(*sys.exc_info())

    return forward_backward
