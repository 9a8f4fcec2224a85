"""Compute the batches of one optimizer step a second time, to find out whether the training step is deterministic."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base import torch_private
from drivetrain.base.compiled import plain_names
from drivetrain.base.operations import Operation, Operations, innermost_line
from drivetrain.base.seed import isolate_rng, rng_state, set_rng_state
from drivetrain.base.torch_private import own_buffers
from drivetrain.base.tree import map_leaves
from drivetrain.data.kept import generators_among, objects_kept, restorer
from drivetrain.logbook.parts import without_logging
from drivetrain.loops import pieces
from drivetrain.loops.graph_parts import same_bits
from drivetrain.loops.metrics import copied_states, set_states
from drivetrain.loops.run import Run
from drivetrain.loops.step import BoundStep, make_forward_backward
from drivetrain.module.losses import loss_of
from drivetrain.strategies.peers import some
from drivetrain.strategies.sharded_state import local_shard

_DRIVETRAIN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LINE = re.compile(r'  File "(.+)", line (\d+)')


class Replay:
    """Computes some windows (the batches of one optimizer step) of a run twice, from the same state.

    Args:
        run: the run.
        is_due: called when a window begins; returns whether to replay the window.
        judge: called with the window after the window's last backward pass, and before the gradients are clipped. The
            function compares the results, and may raise.
    """

    def __init__(self, run: Run, is_due: Callable[[], bool], judge: Callable[[ReplayedWindow], None]) -> None:
        self._run, self._is_due, self._judge = run, is_due, judge
        self._window: ReplayedWindow | None = None

    def bind(self, bound: BoundStep) -> BoundStep:
        """Return a step that runs ``bound``, and replays the windows for which ``is_due`` returns true."""
        run_batch = bound.run

        def step(batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
            if position == 1:
                self._window = ReplayedWindow(self._run) if self._is_due() else None
            if (window := self._window) is None:
                return run_batch(batch, batch_idx, position, last, divisor)
            window.keep(batch, batch_idx, position, last, divisor)
            output = run_batch(batch, batch_idx, position, last, divisor)
            window.losses.append(_loss_in(output))
            window.random.append(rng_state())
            if last:
                self._window = None
                with window.undone():
                    self._judge(window)
            return output

        return bound._replace(run=step)


@dataclass
class _Outcome:
    """The results of a window, on the host: losses, random states, gradients and clipped gradients."""

    losses: list[Tensor | None]
    gradients: dict[str, Tensor | None]
    random: list[dict[str, Any]]
    clipped: dict[str, Tensor | None]


class ReplayedWindow:
    """The batches of a window, and the state before the window's first batch.

    Attributes:
        losses: the batches' losses, on the host.
        random: the random states after each batch.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._state = run, _Tensors(run.module)
        self._at_start, self._gradients_at_start = copy.copy(run.window), self._gradients()
        self._batches: list[tuple[tuple[Any, ...], float, bool, Callable[[], None]]] = []
        self.losses, self.random = list[Tensor | None](), list[dict[str, Any]]()

    def keep(self, batch: Any, *others: Any) -> None:
        """Keep the inputs for a replay of this batch: the batch, the step's other arguments, and the random states.
        Each batch needs its own random states, because a validation or a loader may draw numbers between two batches.

        Tensors are copied, because the step may write into them.
        """
        arguments, run, rng = (map_leaves(_copied, batch), *others), self._run, rng_state()
        restore_generators = restorer(generators_among(run.module.modules()))

        def restore() -> None:
            set_rng_state(rng)
            restore_generators()

        self._batches.append((arguments, run.window.factor_here, run.progress.is_last_batch, restore))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Context that undoes the effects of replays at its end. The context restores parameters, buffers, gradients,
        random generators, metric objects, and attributes of the module and of its layers. Values that are logged inside
        the context are discarded.
        """
        module, progress, driver = self._run.module, self._run.progress, self._run.engine.strategy.driver
        self._first = _Outcome(self.losses, self._gradients(), self.random, {})
        with ExitStack() as back:
            back.callback(vars(driver).update, dict(vars(driver)))
            back.callback(progress.show_batch, progress.batch_idx, progress.is_last_batch)
            back.callback(_set_gradients, [(each, each.grad) for each in module.parameters()], self._first.gradients)
            back.callback(_Tensors(module).put)
            back.callback(set_states, module, copied_states(module))
            back.enter_context(isolate_rng())
            back.enter_context(objects_kept([vars(each) for each in module.modules()]))
            back.enter_context(without_logging(module))
            self._first.clipped = self._clipped()
            yield

    def differences(self) -> list[str]:
        """Replay the window. Return phrases such as "the loss of batch 3", one for each kind of result that differs in
        any bit from the first result.
        """
        first, other = self._first, self._again()
        pairs = zip(self._batches, first.losses, other.losses, strict=True)
        batches = [str(arguments[1]) for (arguments, *_), *losses in pairs if not same_bits(*losses)]
        found = [f"the loss of batch {', '.join(batches)}"] if batches else []
        for kind in ("gradients", "clipped"):
            before, after = getattr(first, kind), getattr(other, kind)
            names = [name for name, gradient in before.items() if not same_bits(gradient, after[name])]
            if names:
                found.append(f"the {'clipped ' if kind == 'clipped' else ''}gradients of {some(names)}")
                break
        random = [*zip(first.random, other.random, strict=True)]
        states = [key for key in random[0][0] if not all(same_bits(one.get(key), two.get(key)) for one, two in random)]
        return [*found, f"the random state of {', '.join(states)}"] if states else found

    def operations(self) -> list[Operation]:
        """Replay the window, and return its operations. An operation's place is the user's line that called the
        operation. For a backward operation, the line of its forward operation is the place.
        """
        mode = Operations(_place)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # nodes then store the forward stack
            self._again(mode)
        return mode.found

    def _again(self, mode: AbstractContextManager[Any] | None = None) -> _Outcome:
        run, losses, random = self._run, list[Tensor | None](), list[dict[str, Any]]()
        self._state.put()
        before = self._gradients_at_start  # replay from these gradients, because a step need not clear all gradients
        pairs = zip(run.module.parameters(), before.values(), strict=True)
        own = [(each, None if value is None else each.grad) for each, value in pairs]
        _set_gradients(own, before)
        again = replace(run, hooks=run.hooks.without_callbacks(), window=copy.copy(self._at_start))
        optimizer = self._optimizer
        clear = None if optimizer is None else pieces.bind_clear(again, optimizer)
        step = make_forward_backward(again, optimizer, clear, pieces.bind_backward(again, optimizer), None, steps=False)
        with mode or nullcontext():
            for (batch, *others), factor, is_last, restore_random in self._batches:
                restore_random()
                again.window.factor_here = factor
                run.progress.show_batch(others[0], is_last)
                losses.append(_loss_in(step(map_leaves(_copied, batch), *others)))
                random.append(rng_state())
        return _Outcome(losses, self._gradients(), random, self._clipped())

    @property
    def _optimizer(self) -> Any:
        return next(iter(self._run.engine.strategy.optimizers), None)

    def _gradients(self) -> dict[str, Tensor | None]:
        named = plain_names(dict(self._run.module.named_parameters()))
        return {name: None if each.grad is None else _on_host(each.grad) for name, each in named.items()}

    def _clipped(self) -> dict[str, Tensor | None]:
        """Clip the gradients, and return copies of the clipped gradients. Return {} if clipping is off, or if the
        precision scales the loss.
        """
        run, settings = replace(self._run, hooks=self._run.hooks.without_callbacks()), self._run.settings
        clip = pieces.bind_clipping(run)
        if clip is None or self._optimizer is None or run.engine.precision.scales_loss:
            return {}
        clip(self._optimizer, settings.gradient_clip_val, settings.gradient_clip_algorithm)
        return self._gradients()


class _Tensors:
    """Host copies of the values of a module's parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(own_buffers(each), dict(own_buffers(each))) for each in module.modules()]
        self._values = [(each, _on_host(each)) for each in (*module.parameters(), *module.buffers())]

    def put(self) -> None:
        """Restore the values."""
        for buffers, before in self._buffers:
            buffers.clear()
            buffers.update(before)
        for tensor, value in self._values:
            local_shard(tensor.data).copy_(value)


def _set_gradients(own: list[tuple[nn.Parameter, Tensor | None]], values: dict[str, Tensor | None]) -> None:
    for (parameter, gradient), value in zip(own, values.values(), strict=True):
        parameter.grad = gradient
        if gradient is not None and value is not None:
            local_shard(gradient.data).copy_(value)


def _on_host(tensor: Tensor) -> Tensor:
    return local_shard(tensor.data).to(HOST, copy=True)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _loss_in(output: Any) -> Tensor | None:
    loss, _ = loss_of(output, True)
    return None if loss is None else _on_host(loss)


def _place(frame: Any) -> str:
    """Return the user's line that called an operation; "" if this package called the operation. For an operation of a
    backward pass, return the line that called the forward operation.
    """
    if (line := _line(_frames(frame))) is not None:
        return line
    node: Any = torch_private.running_node() if torch_private.running_node else None
    stack = [] if node is None else node.metadata.get("traceback_", [])
    lines = (_LINE.match(entry) for entry in reversed(stack))
    line = _line((found[1], int(found[2])) for found in lines if found is not None)
    return "" if line is None else f"the backward pass of {line}"


def _line(places: Iterator[tuple[str, int]]) -> str | None:
    return innermost_line(takewhile(lambda place: not place[0].startswith(_DRIVETRAIN), places))


def _frames(frame: Any) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
