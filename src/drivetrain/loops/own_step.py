"""Bind the training step of a strategy that overrides ``bind_step``. The strategy builds its step from functions of
this module. Its step must call the hooks that user code overrides, and this module checks that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, described
from drivetrain.loops import pieces
from drivetrain.loops.pieces import Step
from drivetrain.loops.run import Run
from drivetrain.module.losses import cannot_be_differentiated, loss_of
from drivetrain.strategies.redirection import leaves_gradients
from drivetrain.strategies.step import steps_itself
from drivetrain.strategies.step_parts import HOOKS_IN_A_STEP, StepParts


def own_step(run: Run) -> Step | None:
    """Return the strategy's own step; ``None`` if the strategy has none.

    Raises:
        ConfigurationError: the strategy's step would not call an overridden hook.
    """
    progress, strategy = run.progress, run.engine.strategy
    own = strategy.bind_step(_parts(run))
    if own is None:
        return None
    _check_honoured(run)
    accumulates_itself = strategy.facts.handles_gradient_accumulation
    of_strategy = f"The step of {type(strategy).__name__}.bind_step"

    def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        result = own(batch, batch_idx, position - 1, last, divisor)
        if type(result) is not tuple or len(result) != 2 or type(result[1]) is not int or result[1] < 0:
            raise ConfigurationError(
                f"{of_strategy} returned {described(result)}. Return (output, optimizer_steps): what training_step "
                "returned, and how many optimizer steps were made, an int."
            )
        output, steps = result
        if steps and not last and not accumulates_itself:
            raise ConfigurationError(
                f"{of_strategy} made an optimizer step before its window's last batch, and Trainer("
                f"accumulate_grad_batches={run.limits.accumulate}) asks for one at its end. Step where `last` is true, "
                "write accumulate_grad_batches=1, or set handles_gradient_accumulation = True if "
                f"{type(strategy).__name__} counts differently."
            )
        progress.count_steps(steps)
        run.window.holds_own = steps == 0 and run.window.batches_with_gradients > 0
        return output

    return step


def _check_honoured(run: Run) -> None:
    """Check that the strategy's step calls every overridden hook.

    Raises:
        ConfigurationError: the strategy does not call an overridden hook, or gradient_clip_val is set and the strategy
            does not clip.
    """
    strategy, hooks = run.engine.strategy, run.hooks
    if strategy.facts.honoured_hooks == "all":
        return
    name, left_out = type(strategy).__name__, HOOKS_IN_A_STEP - strategy.facts.honoured_hooks
    ignored = sorted(hook for hook in left_out if hooks.overridden(hook))
    if ignored:
        raise ConfigurationError(
            f"{name} owns its training step and does not call {', '.join(ignored)}, which "
            f"{hooks.overridden(ignored[0])} overrides. Do it in training_step, use another strategy, or let {name} "
            "call it and name it in its honoured_hooks."
        )
    if run.settings.gradient_clip_val and "configure_gradient_clipping" in left_out:
        raise ConfigurationError(
            f"{name} owns its training step and does not clip, and Trainer(gradient_clip_val="
            f"{run.settings.gradient_clip_val}) asks for it. Leave the argument out, or let {name} clip "
            '(parts.before_step does) and name "configure_gradient_clipping" in its honoured_hooks.'
        )


def _parts(run: Run) -> StepParts:
    """Return the functions from which the strategy builds its step."""
    strategy, precision, window = run.engine.strategy, run.engine.precision, run.window
    optimizers, shared = strategy.optimizers, window.gather is not None
    first = optimizers[0] if optimizers else None
    training_step = pieces.in_forward_context(run, pieces.bind_training_step(run))
    zero_grads = {id(each): pieces.bind_zero_grad(run, each) for each in optimizers}
    before_steps = {id(each): pieces.bind_before_step(run, each) for each in optimizers}
    differentiate, hold = pieces.bind_backward(run, first), pieces.hold_back(run)
    held = False  # true inside accumulating(), where backward passes do not exchange gradients

    def begin(size: int = 1, optimizer: Optimizer | None = first) -> None:
        window.begin(size)
        if optimizer is not None:
            zero_grads[id(optimizer)]()

    def part_of_window(output: Any, index: int = 0, last: bool = True) -> Tensor | None:
        loss, weight = loss_of(output, shared)
        if shared:
            loss, weight = pieces.as_one_of_many(window, loss, weight)
            if not last:
                stays = held or leaves_gradients(strategy.model)
                if index == 0:
                    window.exchanges_always = not stays
                elif window.exchanges_always is stays:
                    raise ConfigurationError(
                        f"The step of {type(strategy).__name__}.bind_step exchanged gradients in some passes of a "
                        "window before its last one, and not in others. Run all of them inside parts.accumulating(), "
                        "or none."
                    )
        return None if loss is None else window.part(loss, weight, optimizers, index + 1, last)

    @contextmanager
    def accumulating() -> Iterator[None]:
        nonlocal held
        with nullcontext() if hold is None else hold():
            held = hold is not None
            try:
                yield
            finally:
                held = False

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

    own_verb = strategy.optimizer_step if steps_itself(strategy) else None

    def optimizer_step(optimizer: Optimizer | None = first) -> bool:
        if optimizer is None:
            return False
        precision.stepped = True
        if own_verb is None:
            precision.optimizer_step(optimizer)
        else:
            own_verb(optimizer, lambda: None, strategy.model)  # the closure does nothing, because the gradients exist
        return precision.stepped

    assert strategy.model is not None  # setup() has run
    return StepParts(
        training_step, begin, part_of_window, backward, accumulating, before_step, optimizer_step,
        run.module, strategy.model, tuple(optimizers), precision, strategy.data,
    )  # fmt: skip
