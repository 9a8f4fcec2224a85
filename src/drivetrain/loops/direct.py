"""Clear gradients, run backward passes and step optimizers without torch's checks and hooks.

[Note: what is left out]
Torch's public methods do more than the computation. ``zero_grad`` and ``step`` open a profiler range, ``step`` looks
for hooks, ``backward`` checks its arguments. The *direct calls*, which :func:`bind` returns, skip this work. They clear
the gradients of the optimizer's parameters, call the autograd engine, and run the undecorated ``step`` of the
optimizer's class under ``no_grad``. Public and direct calls compute tensors that are equal bit for bit.

User code cannot observe whether a step makes public or direct calls. :func:`bind` checks what cannot change from one
step to the next, for example whether user code overrides ``backward``. Each direct call checks the rest, for example
whether a profiler is active. If a check fails, the step makes the public call. Before the first step with an optimizer
class, :func:`bind` trains two toy models, one with public and one with direct calls, and compares the results. A step
makes the public calls if the results differ, or if torch lacks a private name that direct calls need.

``DRIVETRAIN_DIRECT_STEP=0`` in the environment makes every step use the public calls.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler

from drivetrain.base import torch_private
from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import log, rank_zero_info
from drivetrain.base.torch_private import AFTER_STEP, BEFORE_STEP, RUN_ENGINE, STEPPED, WATCHED, comm_hooks_of
from drivetrain.loops.kernels import Kernel, choose, loops, with_kernels
from drivetrain.loops.progress import Phase
from drivetrain.loops.run import KeptStates, Run
from drivetrain.plan import Decision
from drivetrain.precision.precision import Precision
from drivetrain.strategies import familiar
from drivetrain.strategies.step import Step as StepVerbs
from drivetrain.strategies.step import steps_itself

SWITCH = "DRIVETRAIN_DIRECT_STEP"
"""The name of an environment variable that turns direct calls off if the value is 0."""

_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients")
_CLIPPING_OF_PRECISIONS = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
_CLIPPING_OF_STRATEGIES = {
    "clip_gradients": StepVerbs, "clip_gradients_norm": familiar.Familiar, "clip_gradients_value": familiar.Familiar,
}  # fmt: skip
_CLASSES = (each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer))
_KINDS = {*_CLASSES} - {Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}  # these need closures or sparse gradients
_EQUAL: dict[type[Optimizer], bool] = {}  # optimizer class -> whether public and direct calls train a toy alike


Train = Callable[[Tensor | None, bool, bool], None]
"""A function of ``loss``, ``clears`` and ``steps``. If ``clears``, the function clears the gradients. If ``loss`` is
not ``None``, the function computes the gradients of ``loss``. If ``steps``, the function steps the optimizer.
"""


class Calls(NamedTuple):
    """The direct calls of a step. ``train`` makes one, two or all three of them."""

    train: Train

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.train(None, True, False)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``."""
        if args or kwargs:
            Tensor.backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]  # torch gives it no types
        else:
            self.train(loss, False, False)


def bind(run: Run, optimizer: Optimizer) -> Calls | None:
    """Return the direct calls of a step; ``None`` if the step must make the public calls, for example because user code
    overrides ``backward``.

    The function writes its choice and the reason into the run's plan (the list of the Trainer's decisions). If the
    choice or the reason has changed, the function also logs both at level DEBUG.
    """
    reason = _reason(run, optimizer)
    choice = "public calls" if reason else "direct calls"
    equal = f"a small model, trained with {_name(optimizer)} both ways, had equal weights"
    why = reason or f"no code overrides or watches zero_grad, backward and step, and {equal}"
    if _show(run, Decision("step", choice, why)):
        log.debug("A step makes %s of zero_grad, backward and step, because %s", choice, why)
    wanted = run.settings.optimizer_kernels
    kernels = [] if reason or _toys_are_seen() else choose(optimizer, wanted)
    if kernels:
        names = " and ".join(sorted({each.name for each in kernels}))
        numbers = "equal bit for bit and " if wanted == "equal" else ""
        count = sum(each.size for each in kernels)
        _show(run, Decision("kernels", names, f"they are {numbers}faster for {count} parameters on the host"))
    elif wanted == "fastest":
        why = "a step makes public calls" if reason else "none is known to be faster for these parameters"
        _show(run, Decision("kernels", "torch's choice", why))
    if reason:
        return None
    return _direct(optimizer, _names(), kernels, run)


def _show(run: Run, decision: Decision) -> bool:
    """Replace the plan's decision on the same subject by ``decision``. Return whether the plan has changed."""
    plan = run.engine.plan
    if decision in plan.decisions:
        return False
    others = (each for each in plan.decisions if each.what != decision.what)
    run.engine.plan = dataclasses.replace(plan, decisions=(*others, decision))
    return True


# ---- when: checked once ----------------------------------------------------------------------------------------------


def _reason(run: Run, optimizer: Optimizer) -> str:
    """Return why a step must make the public calls; "" if the step can make direct calls."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if (missing := _names().missing) is not None:
        return f"torch {torch.__version__} has not the private name that they need: {missing}"
    return _overridden(run) or _of_model(run) or _of_optimizer(optimizer) or _of_toy(type(optimizer))


def _overridden(run: Run) -> str:
    """Return which overridden method or which argument requires the public calls; "" if there is none."""
    strategy, precision = run.engine.strategy, run.engine.precision
    for hook in _HOOKS:
        if owner := run.hooks.overridden(hook):
            return f"{owner} overrides {hook}"
    if precision.scales_loss:
        return f"precision {precision.name} scales the loss"
    if steps_itself(strategy):
        return f"{_name(strategy)} or {_name(precision)} overrides optimizer_step"
    if not familiar.differentiates_plainly(strategy):
        return f"{_name(strategy)} or {_name(precision)} overrides backward"
    if overrides(strategy, "zero_grad", familiar.Familiar):
        return f"{_name(strategy)} overrides zero_grad"
    if any(overrides(precision, name, Precision) for name in _CLIPPING_OF_PRECISIONS):
        return f"{_name(precision)} clips gradients"
    if any(overrides(strategy, name, base) for name, base in _CLIPPING_OF_STRATEGIES.items()):
        return f"{_name(strategy)} clips gradients"
    return "split_on_oom may run a batch in parts" if run.settings.split_on_oom else ""


def _of_model(run: Run) -> str:
    """Return which wrapper or hook of the model requires the public calls; "" if there is none."""
    model = run.engine.strategy.model
    if type(model) is DistributedDataParallel:
        return "a communication hook exchanges the gradients" if _comm_hooks(model) else ""
    if model is not run.module or run.engine.strategy.facts.is_distributed:
        return f"{_name(run.engine.strategy)} changes how gradients are computed"
    return ""


def _of_optimizer(optimizer: Optimizer) -> str:
    """Return how ``optimizer`` differs from an unmodified torch optimizer; "" if there is no difference."""
    kind = type(optimizer)
    if kind not in _KINDS:
        return f"{kind.__name__} is not one of torch's optimizers that step without a closure"
    if optimizer.defaults.get("differentiable"):
        return "the optimizer is differentiable"
    if _undecorated_step(kind) is None or not _is_schedulers(vars(optimizer).get("step"), optimizer):
        return f"{kind.__name__}.step was replaced"
    if kind.zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
        return f"{kind.__name__}.zero_grad was replaced"
    return ""


def _of_toy(kind: type[Optimizer]) -> str:
    """Train a toy model with public and with direct calls. Return why a step must make the public calls; "" if both
    train the toy alike.
    """
    if kind not in _EQUAL:
        if _toys_are_seen():
            return "a profiler, a mode or a hook on all optimizers is active, which would see a toy that is trained"
        _EQUAL[kind] = _trains_alike(kind)
        if not _EQUAL[kind]:
            rank_zero_info(
                f"torch {torch.__version__} trains a toy with {kind.__name__} to other numbers when its functions are "
                "called directly. Steps make the public calls, which take longer."
            )
    return "" if _EQUAL[kind] else f"a toy trained with {kind.__name__} is not equal"


def _toys_are_seen() -> bool:
    """Whether a profiler, a torch mode or a hook on all optimizers would see the training of a toy model."""
    names = _names()
    return bool(names.is_watched() or names.before_steps or names.after_steps)


def _name(part: object) -> str:
    return type(part).__name__


def _comm_hooks(model: nn.Module | None) -> list[Any]:
    """Return the list to which DistributedDataParallel adds its communication hooks."""
    return comm_hooks_of(model) if type(model) is DistributedDataParallel else []


def _is_schedulers(step: Any, optimizer: Optimizer) -> bool:
    """Whether ``step``, an attribute of the optimizer, is ``None`` or the wrapper that a torch scheduler puts there."""
    if step is None:
        return True
    cells = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
    return (
        hasattr(step, WATCHED)
        and step.__globals__ is vars(lr_scheduler)
        and step.__wrapped__ is type(optimizer).step
        and any(isinstance(cell, weakref.ref) and cell() is optimizer for cell in cells)
    )


def _undecorated_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any] | None:
    """Return the undecorated ``step`` of torch's optimizer class; ``None`` if other code has replaced ``step``."""
    step: Any = kind.step
    while getattr(step, "__code__", None) in _names().decorators:
        cells = (cell.cell_contents for cell in step.__closure__)
        contexts = [each for cell in cells if (each := getattr(cell, "__self__", None)) is not None]
        if any(type(each) is not torch.no_grad for each in contexts):
            return None
        step = step.__wrapped__
    home = sys.modules.get(str(getattr(step, "__module__", None)))
    is_torchs = home is not None and home.__name__.startswith("torch.optim.")
    is_plain = not hasattr(step, "__wrapped__") and getattr(step, "__globals__", None) is getattr(home, "__dict__", ())
    return step if is_torchs and is_plain else None


# ---- how -------------------------------------------------------------------------------------------------------------


def _direct(optimizer: Optimizer, names: _Names, kernels: Sequence[Kernel] = (), run: Run | None = None) -> Calls:
    """Return the direct calls of a step. They make public calls if a hook, a profiler or a replaced method appears.
    A direct step sets ``kept.stepping`` without calling ``kept.step_hooks``, the hooks that set it.
    """
    kept, slot = KeptStates() if run is None else run.kept, [0] if run is None else run.progress.slot
    comm_hooks = [] if run is None else _comm_hooks(run.engine.strategy.model)
    is_watched, before_steps, after_steps, ones = names.is_watched, names.before_steps, names.after_steps, names.ones
    roots, kind, decorated = names.multiplying, type(optimizer), type(optimizer).step
    step_plainly = with_kernels(_undecorated_step(kind) or decorated, [*kernels, *loops(optimizer, kernels)])
    step_publicly = with_kernels(lambda optimizer: optimizer.step(), kernels)
    schedulers, may_differentiate = vars(optimizer).get("step"), "differentiable" in optimizer.defaults
    engine: Any = torch.autograd
    of_engine = vars(engine)
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch_private.set_grad_enabled
    # With an accelerator, torch's wrapper of the engine is needed, because it passes compiler settings to other
    # threads.
    around_engine = None if torch.accelerator.is_available() else names.around_engine
    run_engine, logs_nodes = names.run_engine, names.logger.isEnabledFor

    def train(loss: Tensor | None, clears: bool, steps: bool) -> None:
        watched, own = is_watched(), optimizer.__dict__
        if clears:
            if watched or type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in own:
                optimizer.zero_grad()
            else:
                for group in own["param_groups"]:
                    parameters = group["params"]
                    if set(map(type, parameters)) != _PARAMETERS:
                        parameters = [each for each in parameters if each.grad is not None]
                    for parameter in parameters:
                        parameter.grad = None
        if loss is not None:
            if (
                watched
                or type(loss) is not Tensor
                or loss.ndim > 0
                or (one := ones.get(loss.dtype)) is None
                or loss.layout is not torch.strided
                or (node := loss.grad_fn) is None
                or comm_hooks
                or engine.backward is not _AUTOGRAD_BACKWARD
                or Tensor.backward is not _BACKWARD
            ):
                Tensor.backward(loss)  # type: ignore[no-untyped-call]  # torch gives it no types
            else:
                if type(node) not in roots or not loss.is_cpu or one._version or loss._backward_hooks is not None:
                    one = torch.ones_like(loss, memory_format=torch.preserve_format)
                around = of_engine[RUN_ENGINE]
                run_backward = run_engine if around is around_engine and not logs_nodes(_DEBUG) else around
                run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        if not steps:
            return
        slot[0] = _OPTIMIZER_STEP
        before, after = own[BEFORE_STEP], own[AFTER_STEP]
        if (
            watched
            or type(optimizer) is not kind
            or kind.step is not decorated
            or (own["step"] if "step" in own else None) is not schedulers  # noqa: SIM401  # without a call
            or ((before or after) and [*before.values(), *after.values()] != kept.step_hooks)
            or before_steps
            or after_steps
            or (may_differentiate and own["defaults"]["differentiable"])
        ):
            step_publicly(optimizer)
            return
        if schedulers is not None:
            own[STEPPED] = True  # torch's scheduler warns if this is not set
        if before:
            kept.stepping = True
        enabled = is_grad_enabled()
        set_grad_enabled(False)
        try:
            step_plainly(optimizer)
        finally:
            set_grad_enabled(enabled)
        if after:
            kept.stepping = False

    return Calls(train)


# ---- a toy, trained both ways ----------------------------------------------------------------------------------------


def _trains_alike(kind: type[Optimizer]) -> bool:
    """Train one toy model by direct calls and one by public calls. Return whether both have equal parameters, gradients
    and optimizer states.

    The toy model draws no random numbers, so the user's random generators do not change.
    """
    try:
        with torch.enable_grad():
            _names().multiplying.update(_multiplying_nodes())
            public, direct = _train_toy(kind, is_direct=False), _train_toy(kind, is_direct=True)
    except Exception:  # this torch version's private functions take other arguments
        return False
    return len(public) == len(direct) and all(map(torch.equal, public, direct))


def _train_toy(kind: type[Optimizer], is_direct: bool) -> list[Tensor]:
    values = torch.arange(1.0, 7.0, dtype=torch.float32)
    first, second = nn.Parameter(values.reshape(3, 2) / 4), nn.Parameter(values.reshape(2, 3) / -3)
    make: Any = kind  # called without options
    optimizer = make([first, second])

    names = _names() if is_direct else _names()._replace(is_watched=lambda: True)  # else: make the public calls
    train = _direct(optimizer, names).train
    found: list[Tensor] = []
    for number in range(4):
        losses = first @ second - 1
        loss = losses.square().sum() if number % 2 else losses.square().mean()
        train(loss, True, False)
        found += [each.grad.clone() for each in (first, second) if each.grad is not None]
        train(None, False, True)
        found += [first.detach().clone(), second.detach().clone()]
    states = [optimizer.state[each] for each in (first, second)]
    return found + [each for state in states for _, each in sorted(state.items()) if isinstance(each, Tensor)]


def _multiplying_nodes() -> set[type]:
    """Return types of autograd nodes that multiply the incoming gradient, so that their backward pass writes to new
    memory.

    Other nodes, such as ``SumBackward0``, may return the incoming gradient itself. If such a node computed the loss, a
    parameter's gradient could share memory with a tensor of ``_Names.ones``, from which every backward pass starts.
    """
    x = torch.full((1, 2), 0.5, dtype=torch.float32, requires_grad=True)
    y = torch.zeros(1, 2, dtype=torch.float32)
    losses = [
        F.mse_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y), F.binary_cross_entropy(x, y), x.mean(),
        F.cross_entropy(x, torch.tensor([0])), x[0, 0] * 2, x[0, 0] / 2,
    ]  # fmt: skip
    return {type(loss.grad_fn) for loss in losses}


# ---- names of torch's ------------------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """The private names of torch that direct calls need.

    Attributes:
        is_watched: returns whether a profiler, a torch mode or another observer of calls or tensors is active.
        before_steps, after_steps: the hooks that torch calls before and after the steps of all optimizers.
        decorators: the code objects of the functions that torch puts around ``step``.
        ones: for each dtype, a host tensor with the number 1, from which the backward pass starts. If a hook has
            changed or could change the tensor, a step creates a new one.
        multiplying: the result of :func:`_multiplying_nodes`; empty until the first toy model is trained.
        around_engine: torch's wrapper of ``run_engine``, the autograd engine. The wrapper also logs the graph's nodes
            if ``logger`` has the level DEBUG.
        missing: the first private name that the installed torch lacks; ``None`` if torch has all of them.
    """

    is_watched: Callable[[], Any] = lambda: True
    before_steps: Mapping[int, Any] = {}
    after_steps: Mapping[int, Any] = {}
    decorators: frozenset[Any] = frozenset()
    ones: Mapping[torch.dtype, Tensor] = {}
    multiplying: set[type] = set()  # noqa: RUF012  # nothing is added where a name is missing
    around_engine: Callable[..., Any] | None = None
    run_engine: Callable[..., Any] = lambda *args, **kwargs: None
    logger: logging.Logger = log
    missing: str | None = None


@functools.cache
def _names() -> _Names:
    """Look up torch's private names; cached for the process."""
    try:
        is_watched = torch_private.watching()
        before_steps, after_steps = torch_private.before_all_steps, torch_private.after_all_steps
        bare = lambda self: None  # noqa: E731
        decorated = (
            Optimizer.profile_hook_step(bare), torch_private.differentiable_step(bare), torch.no_grad()(bare),
        )  # fmt: skip
        around_engine = vars(torch.autograd)[RUN_ENGINE]
        run_engine, _ = torch_private.engine.run_backward, torch_private.set_grad_enabled
    except (ImportError, LookupError, AttributeError) as error:
        return _Names(missing=str(getattr(error, "name", None) or error))

    decorators = frozenset(each.__code__ for each in decorated)
    ones = {each: torch.ones((), dtype=each) for each in _FLOATS}
    logger = logging.getLogger(around_engine.__module__)
    return _Names(is_watched, before_steps, after_steps, decorators, ones, set(), around_engine, run_engine, logger)


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OPTIMIZER_STEP = int(Phase.OPTIMIZER_STEP)
_DEBUG = logging.DEBUG
_PARAMETERS = {nn.Parameter}
_ZERO_GRAD, _BACKWARD, _AUTOGRAD_BACKWARD = Optimizer.zero_grad, Tensor.backward, torch.autograd.backward
