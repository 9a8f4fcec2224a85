"""One batch: forward, backward and, on the last batch of a window, the optimizer.

A *window* is the batches of one optimizer step (``accumulate_grad_batches``). There are two ways to run one, chosen
when the run starts:

flat
    ``training_step``; zero_grad hooks and zero_grad on the window's first batch; backward hooks and backward; on the
    last batch on_before_optimizer_step, clipping, ``optimizer.step()``.
closure
    The same events in the same order, but on the window's last batch they happen inside a closure that is handed
    to ``module.optimizer_step``, as LBFGS and an overridden ``optimizer_step`` need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError
from drivetrain.hooks import overrides
from drivetrain.loops.run import Run
from drivetrain.precision.precision import Precision
from drivetrain.tree import detach

Step = Callable[[Any, int, int, bool, int], Any]
"""``step(batch, batch_idx, position, last, divisor)`` returns what ``training_step`` returned.

``position`` counts the window's batches from 1, ``last`` says that the window ends here; the loss is divided by
``divisor``, the number of batches the window was expected to hold. Counts its optimizer step in
``progress.global_step``.
"""


def positional_arity(fn: Callable[..., Any]) -> int:
    """How many positional arguments ``fn`` takes; many, if it takes ``*args`` (trap T51)."""
    kinds = [parameter.kind for parameter in inspect.signature(fn).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 1_000
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


class _Window:
    """Whether any batch of the window that is being accumulated gave gradients."""

    __slots__ = ("graded",)

    def __init__(self) -> None:
        self.graded = False


ForwardBackward = Callable[[Any, int, int, int], Any]
BeforeStep = Callable[[int, int], None]


def make_step(run: Run, optimizer: Optimizer | None) -> Step:
    """The way to run a window that this module and this optimizer need.

    Raises:
        ConfigurationError: the optimizer re-evaluates the loss, which accumulated gradients cannot honour.
    """
    window = _Window()
    forward_backward = _make_forward_backward(run, optimizer, window)
    before_step = _make_before_step(run, optimizer)
    if optimizer is None:
        return _flat(run, window, forward_backward, before_step, None)
    needs_closure = _requires_closure(optimizer)
    if needs_closure and run.limits.accumulate > 1:
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, which "
            f"accumulate_grad_batches={run.limits.accumulate} cannot repeat. Write accumulate_grad_batches=1."
        )
    if needs_closure or run.hooks.bind_method("optimizer_step") is not None:
        return _closure(run, window, forward_backward, before_step, optimizer)
    return _flat(run, window, forward_backward, before_step, optimizer)


def _requires_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure (LBFGS)."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _flat(
    run: Run,
    window: _Window,
    forward_backward: ForwardBackward,
    before_step: BeforeStep | None,
    optimizer: Optimizer | None,
) -> Step:
    progress = run.progress

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output = forward_backward(batch, batch_idx, position, divisor)
        if last and window.graded:
            if optimizer is not None:
                if before_step is not None:
                    before_step(position, divisor)
                optimizer.step()
            progress.global_step += 1
        return output

    return step


def _closure(
    run: Run,
    window: _Window,
    forward_backward: ForwardBackward,
    before_step: BeforeStep | None,
    optimizer: Optimizer,
) -> Step:
    progress, book = run.progress, run.book
    optimizer_step = run.hooks.bind_method("optimizer_step") or run.module.optimizer_step
    training_scope = run.hooks.scope("training_step")

    def count(*_: Any) -> None:
        if window.graded:
            progress.global_step += 1

    # The override may skip steps, so what counts is what the optimizer really did.
    run.cleanups.append(optimizer.register_step_post_hook(count).remove)

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        output: Any = None

        def closure() -> Any:
            nonlocal output
            outer, book.scope = book.scope, training_scope  # it logs as the window's other batches do
            try:
                output = forward_backward(batch, batch_idx, position, divisor)
            finally:
                book.scope = outer
            if window.graded and before_step is not None:
                before_step(position, divisor)
            return loss_of(output)

        if not last:
            return forward_backward(batch, batch_idx, position, divisor)
        optimizer_step(progress.current_epoch, batch_idx, optimizer, closure)
        return output

    return step


def _make_forward_backward(run: Run, optimizer: Optimizer | None, window: _Window) -> ForwardBackward:
    hooks, progress = run.hooks, run.progress
    training_step = run.module.training_step
    takes_index = positional_arity(training_step) > 1
    context = run.engine.forward_context()
    before_zero_grad = hooks.bind("on_before_zero_grad")
    before_backward = hooks.bind("on_before_backward")
    after_backward = hooks.bind("on_after_backward")
    own_zero_grad = hooks.bind_method("optimizer_zero_grad")
    precision = run.engine.precision
    backward: Callable[[Tensor], Any] = hooks.bind_method("backward") or (
        precision.backward if overrides(precision, "backward", Precision) else Tensor.backward
    )

    def forward_backward(batch: Any, batch_idx: int, position: int, divisor: int) -> Any:
        if context is None:
            output = training_step(batch, batch_idx) if takes_index else training_step(batch)
        else:
            with context:
                output = training_step(batch, batch_idx) if takes_index else training_step(batch)
        loss = output if type(output) is Tensor else loss_of(output)
        if position == 1:
            window.graded = False
            if optimizer is not None:
                for hook in before_zero_grad:
                    hook(optimizer)
                if own_zero_grad is None:
                    optimizer.zero_grad()
                else:
                    own_zero_grad(progress.current_epoch, batch_idx, optimizer)
        if loss is not None:
            window.graded = True
            if divisor != 1:
                loss = loss / divisor
            for hook in before_backward:
                hook(loss)
            backward(loss)
            for hook in after_backward:
                hook()
        return output

    return forward_backward


def _make_before_step(run: Run, optimizer: Optimizer | None) -> BeforeStep | None:
    """What happens to the finished gradients before the optimizer takes them; ``None`` if nothing does."""
    hooks, settings = run.hooks, run.settings
    before_step_hooks = hooks.bind("on_before_optimizer_step")
    clip_val, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
    clip = hooks.bind_method("configure_gradient_clipping")
    if clip is None and clip_val is not None:
        clip = run.module.configure_gradient_clipping
    may_end_early = run.limits.accumulate > 1
    if optimizer is None or not (before_step_hooks or clip or may_end_early):
        return None

    def before_step(position: int, divisor: int) -> None:
        if position != divisor:
            _rescale(optimizer, divisor / position)
        for hook in before_step_hooks:
            hook(optimizer)
        if clip is not None:
            clip(optimizer, clip_val, algorithm)

    return before_step


def _rescale(optimizer: Optimizer, factor: float) -> None:
    """A window that ended early, in an epoch whose length nobody knew, was divided by too much (trap T12)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned (trap T23).

    Raises:
        ConfigurationError: it is no tensor, no mapping with a tensor under "loss", and not ``None``.
    """
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss
        raise ConfigurationError(
            f"training_step returned a dictionary with {sorted(map(str, output))} and no tensor under 'loss'. "
            "Put the loss there."
        )
    raise ConfigurationError(
        f"training_step returned a {type(output).__name__}. Return the loss (a tensor), a dictionary with it under "
        "'loss', or None to skip the batch."
    )


def outputs_for_hooks(output: Any) -> dict[str, Any] | None:
    """What ``on_train_batch_end`` gets: the unscaled loss and the extras, all without their graph (trap T23)."""
    if output is None:
        return None
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    detached: dict[str, Any] = detach(dict(output))
    return detached
