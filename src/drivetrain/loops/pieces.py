"""Bind the parts of a training step (forward, backward, clipping, clearing) to the methods that the module, callbacks,
precision and strategy override.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides, positional_arity
from drivetrain.base.tree import rescale
from drivetrain.errors import ConfigurationError
from drivetrain.loops.run import Run
from drivetrain.loops.window import Window
from drivetrain.module.trainable import TrainableModule
from drivetrain.precision.precision import Precision
from drivetrain.strategies import familiar
from drivetrain.strategies.step import Step as StepVerbs

Step = Callable[[Any, int, int, bool, int], Any]
"""``step(batch, batch_idx, position, last, divisor)`` returns what ``training_step`` returned.

``position`` is the number of the batch in its window (the batches of one optimizer step), from 1. ``last``: whether the
window ends with this batch. The step divides the loss by ``divisor``, the expected number of batches in the window, and
adds its optimizer steps to ``progress.global_step``.
"""

TrainingStep = Callable[[Any, int], Any]
Backward = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


def measured(run: Run, action: str, call: F) -> F:
    """Return ``call``. If there is a profiler, return a wrapper whose calls are measured as ``action``."""
    return call if run.hooks.spans is None else cast("F", run.hooks.spans.wrap(action, call))


def in_forward_context(run: Run, call: F) -> F:
    """Return a function that runs ``call`` in the precision's context for forward passes; ``call`` if there is no
    context.
    """
    context = run.engine.forward_context()
    if context is None:
        return call

    def inside(*args: Any, **kwargs: Any) -> Any:
        with context:
            return call(*args, **kwargs)

    return cast("F", inside)


def bind_training_step(run: Run) -> TrainingStep:
    """Return a function of a batch and its index that calls ``training_step``, without the index if the signature has
    none.
    """
    step = measured(run, "training_step", familiar.bind_step_of(run.engine.strategy, "training_step"))
    if (batches := run.batches) is not None:
        return batches.bound(step)
    if positional_arity(run.module.training_step) > 1:
        return step
    return lambda batch, batch_idx: step(batch)


def training_step_arguments(module: Any, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return the arguments for ``module.training_step``: the batch, and the batch's index if the signature accepts an
    index.
    """
    return (batch, batch_idx) if positional_arity(module.training_step) > 1 else (batch,)


def bind_backward(run: Run, optimizer: Optimizer | None = None, direct: Backward = Tensor.backward) -> Backward:
    """Return the function that computes the gradients of a loss; ``direct`` if no code overrides ``backward``."""
    strategy, differentiate = run.engine.strategy, _bind_differentiate(run, direct)
    strategy.driver.differentiate = differentiate
    return measured(run, "backward", familiar.bind_backward(strategy, differentiate, optimizer))


def _bind_differentiate(run: Run, direct: Backward) -> Backward:
    """Return a function that scales the loss, and calls ``on_before_backward``, ``backward`` and
    ``on_after_backward``.
    """
    precision = run.engine.precision
    scale = precision.scale if precision.scales_loss else None
    before_backward = run.hooks.bind("on_before_backward")
    after_backward = run.hooks.bind("on_after_backward")
    backward: Backward = run.hooks.bind_method("backward") or (
        precision.backward if overrides(precision, "backward", Precision) else direct
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


def bind_zero_grad(run: Run, optimizer: Optimizer, direct: Callable[[], None] | None = None) -> Callable[[], None]:
    """Return the function that calls ``on_before_zero_grad``, then clears the gradients.

    ``direct``: a function that clears the gradients. Pass it only if neither the module nor the strategy overrides how
    they are cleared.
    """
    if run.engine.strategy.facts.earlier.clears_last:
        return lambda: None
    before, clear = run.hooks.bind("on_before_zero_grad"), bind_clear(run, optimizer, direct)

    def zero_grad() -> None:
        for hook in before:
            hook(optimizer)
        clear()

    return measured(run, "optimizer_zero_grad", zero_grad if before else clear)


def bind_clear(run: Run, optimizer: Optimizer, direct: Callable[[], None] | None = None) -> Callable[[], None]:
    """Return the function that clears the gradients, without calling ``on_before_zero_grad``."""
    progress, strategy, own = run.progress, run.engine.strategy, run.hooks.bind_method("optimizer_zero_grad")
    if own is not None and not strategy.facts.earlier.zero_grad:
        return lambda: own(progress.current_epoch, progress.batch_idx, optimizer)
    return direct or familiar.bind_zero_grad(strategy, optimizer)


def as_one_of_many(
    window: Window, loss: Tensor | None, weight: float | Tensor | None
) -> tuple[Tensor, float | Tensor | None]:
    """Return this rank's loss and weight, prepared for the mean over all ranks.

    A rank that has no batch left repeats its last batch. The repeated batch gets the weight 0, so that it does not
    change the mean.

    Raises:
        ConfigurationError: there is no loss, so the other ranks would wait for this rank's gradients.
    """
    if loss is None:
        raise ConfigurationError(
            "training_step returned no loss on one of several ranks, and the others wait for its gradients. "
            "Return a loss of zero that depends on the parameters, or a WeightedLoss of weight 0. [DT1059]"
        )
    factor = window.factor_here
    if weight is not None:
        return loss, weight if factor else weight * 0
    return (loss if factor == 1 else loss * factor), None


def hold_back(run: Run) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return the strategy's context in which backward passes do not exchange gradients; ``None`` if there is no such
    context.
    """
    strategy = run.engine.strategy
    assert strategy.model is not None  # setup() has run
    return familiar.bind_accumulating(strategy, strategy.model)


def exchanges_always(run: Run) -> bool:
    """Whether the ranks exchange gradients in every backward pass.

    The strategy's context ``accumulating`` usually prevents the exchange. The base class's context does not, and sets
    ``driver.exchanges_always``. The function enters the context to see whether the flag is set.
    """
    held_back, driver = hold_back(run), run.engine.strategy.driver
    if held_back is None:
        return True
    driver.exchanges_always = False
    with held_back():
        pass
    return driver.exchanges_always


def bind_clipping(run: Run) -> Callable[..., Any] | None:
    """Return the function that clips gradients; ``None`` if no gradients are clipped. The function takes the optimizer,
    the value and the algorithm. If the user overrides a clipping method of the module, the result is this method.
    Otherwise the result is a method of the strategy or of the precision.
    """
    if (own := run.hooks.bind_method("configure_gradient_clipping")) is not None:
        return own
    if run.settings.gradient_clip_val is None:
        return None
    if overrides(run.module, "clip_gradients", TrainableModule):
        return run.module.configure_gradient_clipping
    return familiar.bind_clipping(run.engine.strategy, run.module, run.settings.gradient_clip_algorithm)


def bind_before_step(run: Run, optimizer: Optimizer | None) -> Callable[[], None] | None:
    """Return the function that unscales, rescales and clips the gradients before the optimizer step; ``None`` if these
    operations are not needed.
    """
    hooks, settings, precision, window = run.hooks, run.settings, run.engine.precision, run.window
    before_step_hooks = hooks.bind("on_before_optimizer_step")
    clip_val, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
    clip = bind_clipping(run)
    unscale = precision.unscale_gradients if precision.scales_loss else None
    # Gradients may need a factor if a window has several batches, or if several ranks have losses with weights. A
    # window that has begun keeps its size even if accumulate_grad_batches is set to 1.
    several = run.limits.accumulate > 1 or window.batches_done > 0 or window.gather is not None
    may_rescale = several and not run.engine.strategy.facts.handles_gradient_accumulation
    if optimizer is None or not (before_step_hooks or clip or unscale or may_rescale):
        return None
    own = overrides(run.engine.strategy, "rescale_gradients", StepVerbs)
    # a strategy that overrides rescale_gradients may keep gradients elsewhere than in parameter.grad
    rescale_complete = window.rescale if own else rescale

    def before_step() -> None:
        if unscale is not None:
            unscale(optimizer)
        if may_rescale and (factor := window.factor()) is not None:
            rescale_complete(optimizer, factor)
        for hook in before_step_hooks:
            hook(optimizer)
        if clip is not None:
            clip(optimizer, clip_val, algorithm)

    return before_step
