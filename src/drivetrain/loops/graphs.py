"""``Trainer(cuda_graphs=...)``: record complete training steps as graphs of the device, and replay them.

One graph belongs to one signature: the shapes and types of a batch's tensors, and its other values. The first steps
with a signature run without a graph, on a side stream. Then the step is recorded. Each of the next three batches runs
twice from the same state: once without the graph, once as a replay. The graph is kept if the changed, logged and
returned values are equal bit for bit. With "auto", the replay must also be faster.

A replay runs no Python code. This module therefore advances the loop's counters after a replay. The module also watches
the Python objects that the step has read (:class:`Watched`), and drops all graphs if such an object has changed.

[Note: the same numbers with and without a graph]
In a run with graphs, the optimizer always reads its learning rates and step counts from the device, as torch does with
``capturable=True``. This includes the steps that are not replayed, so the results do not depend on which steps were
replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base import torch_private
from drivetrain.base.introspect import reads
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.torch_private import version_of
from drivetrain.base.tree import cloned, detach
from drivetrain.errors import ConfigurationError, RunError
from drivetrain.logbook.parts import logging_into, replaced_in
from drivetrain.loops import graph_parts as parts
from drivetrain.loops.progress import Phase
from drivetrain.loops.run import Run
from drivetrain.loops.step import BoundStep
from drivetrain.loops.step_checks import no_graphs, why_not_now, why_not_recorded

WARM_UPS, TRIALS = 3, 3
FASTER = 0.98
"""With "auto", a graph is kept if a replay takes less than this fraction of the time without a graph. The fraction is
below 1, because measured times vary by about 1 %.
"""
MOST_GRAPHS = 8
"""The limit on the number of recorded signatures. Each graph holds the memory of a step."""
MOST_CHANGES = 8
"""The limit on changes of watched objects. After each change, steps are recorded again. Beyond the limit, steps run
without graphs for the rest of the fit.
"""

_OPTIMIZER_STEP = int(Phase.OPTIMIZER_STEP)
_clock = time.perf_counter


def bind_graphs(run: Run, bound: BoundStep) -> BoundStep:
    """Return a step that replays graphs of ``bound``; if that is impossible, log the reason and return ``bound``."""
    strategy = run.engine.strategy
    if run.graphs is None:
        run.graphs = GraphedSteps(run)
    why = why_not_recorded(run.module, run.settings, strategy) or why_not_now(run) or run.graphs.use(bound)
    if why:
        if run.settings.cuda_graphs is True:
            raise ConfigurationError(no_graphs(why))
        run.graphs.say(f"steps run without graphs: {why}")
        run.graphs.end()
        return bound
    return BoundStep(run.graphs.step)


@dataclass
class _Recorded:
    """The steps whose batches have one signature, and their graph.

    Attributes:
        seen: the number of steps so far. times: two lists: the seconds of each trial without the graph, and of each
            replayed trial.
        replay: a function that runs the graph, or ``None``.
        inputs: the tensors from which the graph reads the batch. output, calls: the recorded step's result and its
            calls of ``self.log``.
        steps: the number of optimizer steps in a recorded step. window: the state of ``run.window`` after a recorded
            step.
        gradients: pairs of a parameter and the gradient that the graph writes for it.
    """

    seen: int = 0
    replay: Callable[[], None] | None = None
    kept: bool = False
    rejected: bool = False
    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    inputs: list[Tensor] = field(default_factory=list)
    output: Any = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    steps: int = 0
    window: dict[str, Any] = field(default_factory=dict)
    gradients: list[tuple[nn.Parameter, Tensor | None]] = field(default_factory=list)


class GraphedSteps:
    """The training steps of a fit, grouped by the signature of their batch."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._recorder: Any = None
        self._rates: parts.DeviceRates  # set by use()
        self._optimizer: Optimizer | None = None  # the optimizer whose learning rates are on the device
        self._known: dict[Any, _Recorded] = {}
        self._watched: parts.Watched | None = None
        self._changes = 0
        self._off = False  # True: no graphs for the rest of the fit
        self._said: set[str] = set()
        self._returns = True

    # ---- for the run ---------------------------------------------------------------------------------------------

    def use(self, bound: BoundStep) -> str:
        """Prepare to replay ``bound``; return why that is impossible, or ""."""
        strategy, accelerator = self._run.engine.strategy, self._run.engine.accelerator
        if self._recorder is None:
            try:
                self._recorder = accelerator.graph_recorder(strategy.root_device)
            except (RuntimeError, NotImplementedError) as error:
                return str(error)
            if self._recorder is None:
                return f"the accelerator {accelerator.name!r} has no graphs"
        if self._optimizer is not strategy.optimizers[0]:
            self.end()
            self._rates = parts.DeviceRates(strategy.optimizers[0], strategy.root_device)
            self._optimizer = strategy.optimizers[0]
        self._bound = bound
        self._returns = bool(self._run.hooks.bind("on_train_batch_end"))
        return ""

    def end(self) -> None:
        """Drop all graphs, and restore the optimizer."""
        self._known.clear()
        self._watched = None
        if self._optimizer is not None:
            self._rates.end()
            self._optimizer = None

    def say(self, what: str, figures: str = "") -> None:
        """Log ``what`` and ``figures``, unless ``what`` was already logged in this fit."""
        if what not in self._said:
            self._said.add(what)
            rank_zero_info(f"Trainer(cuda_graphs={self._run.settings.cuda_graphs!r}): {what}{figures}.")

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self, batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        """Run a training step, including the optimizer's step; a :data:`drivetrain.loops.pieces.Step`."""
        self._rates.refresh()
        if self._off:
            return self._run_step(batch, batch_idx)
        try:
            key, tensors = parts.signature(batch, self._device)
        except parts.CannotRecord as error:
            self._give_up(str(error))
            return self._run_step(batch, batch_idx)
        if self._watched is not None and (changed := self._watched.changed()):
            self._forget(changed)
        known = self._known.get(key)
        if known is not None and known.kept:
            return self._replayed(known, tensors)
        if self._off or (known is not None and known.rejected):
            return self._run_step(batch, batch_idx)
        if known is None and len(self._known) >= MOST_GRAPHS:
            self.say(
                f"batches come in more than {MOST_GRAPHS} signatures (shapes, types and values other than tensors), "
                "and only the first ones are recorded; pad the others to these shapes, and leave out values that "
                "differ from batch to batch"
            )
            return self._run_step(batch, batch_idx)
        known = self._known.setdefault(key, known or _Recorded())
        known.seen += 1
        if known.seen <= WARM_UPS:
            return self._warm_up(known, batch, batch_idx, tensors)
        return self._trial(known, batch, batch_idx, tensors)

    def _watch(self) -> parts.Watched:
        self._watched = parts.Watched(self._run.module, self._rates.optimizer)
        return self._watched

    _device: torch.device = reads("_run.engine.strategy.root_device")

    def _run_step(self, batch: Any, batch_idx: Any) -> Any:
        """Run a step without a graph. Detach the step's output, so that the output does not keep its autograd graph."""
        output = self._bound.run(batch, batch_idx, 1, True, 1)
        if self._bound.finish_window is not None:
            with self._rates:
                self._bound.finish_window()
        return detach(output)

    def _replayed(self, known: _Recorded, tensors: Sequence[Tensor]) -> Any:
        run = self._run
        run.progress.slot[0] = _OPTIMIZER_STEP
        run.kept.stepping = True  # a checkpoint saved now would contain half a step
        self._replay(known, tensors)
        run.progress.count_steps(known.steps)
        run.kept.stepping = False
        run.window.load_state_dict(known.window)
        self._log(known.calls, known)
        return cloned(known.output) if self._returns else known.output

    def _replay(self, known: _Recorded, tensors: Sequence[Tensor]) -> None:
        assert known.replay is not None
        assert self._watched is not None
        if tensors:
            torch_private.foreach_copy_(known.inputs, list(tensors))
        known.replay()
        torch.autograd.graph.increment_version(self._watched.tensors)
        first, own = known.gradients[0]
        if first.grad is not own:  # other code has replaced the gradients since the last replay
            for parameter, gradient in known.gradients:
                parameter.grad = gradient

    def _log(self, calls: Sequence[tuple[Any, ...]], known: _Recorded | None = None) -> None:
        """Repeat the ``self.log`` calls of a step. ``known``: the object whose graph has computed the values, or
        ``None``. A graph's next replay overwrites its values.
        """
        book = self._run.book
        for name, value, options, batch_size in calls:
            entry = None if book.scope is None else book.scope.entries.get(name)
            if entry is None or entry.options != options:
                entry = book.open_entry(name, value, options, batch_size)
            if known is None or book.copies or entry.on_epoch or not isinstance(value, Tensor):
                entry.push(value, batch_size)
            else:
                entry.lend(value)

    # ---- before a graph is kept ----------------------------------------------------------------------------------

    def _warm_up(self, known: _Recorded, batch: Any, batch_idx: int, tensors: Sequence[Tensor]) -> Any:
        """Run a step without a graph, and check for effects that a replay would not have, such as changed
        attributes.
        """
        watched, host = self._watched or self._watch(), self._host_rng()
        versions = list(map(version_of, tensors))
        waits: list[str] = []
        with self._recorder.beside(waits):
            output = self._run_step(batch, batch_idx)
        why, changed = "", watched.changed()
        if known.seen == 1:  # also watch objects that the first step has created
            if changed and any(each.replay is not None for each in self._known.values()):
                self._forget(changed)
            self._watch()
            return output
        if changed:
            why = f"the step changes {changed}, which a replay would not"
        elif self._host_rng() != host:
            why = "the step draws random numbers on the host"
        elif versions != list(map(version_of, tensors)):
            why = "training_step changes its batch in place"
        elif waits:
            why = f"the step waits for the device at {waits[0]}"
        if why:
            self._give_up(why)
        return output

    def _host_rng(self) -> Any:
        """The states of the random generators on the host. A graph does not use or advance these generators."""
        states = rng_state()
        own = states["torch"].tolist() if self._device.type != HOST.type else None
        return states["python"], states.get("numpy"), own

    def _trial(self, known: _Recorded, batch: Any, batch_idx: int, tensors: Sequence[Tensor]) -> Any:
        """Run a step without the graph, then replay it from the same state, and compare the results."""
        run, why = self._run, ""
        try:
            if known.replay is None:
                self._record(known, batch)
            assert self._watched is not None
            changing = parts.changed_by_step(self._watched, self._rates.optimizer)
            before, rng = parts.copies(changing), rng_state()
        except Exception as error:
            self._give_up(str(error) if isinstance(error, parts.CannotRecord) else f"recording failed with {error!r}")
            return self._run_step(batch, batch_idx)
        counted = run.progress.global_step
        with logging_into(run.module, logs := parts.RecordedLogs()), self._recorder.beside():
            began = self._now()
            output = self._run_step(batch, batch_idx)
            known.times[0].append(self._now() - began)
        after, rng_after, gradients = parts.copies(changing), rng_state(), self._gradients()
        window, steps = run.window.state_dict(), run.progress.global_step - counted
        run.kept.stepping, same = True, False
        try:
            parts.put(changing, before)
            set_rng_state(rng)
            began = self._now()
            self._replay(known, tensors)
            known.times[1].append(self._now() - began)
            compared = {
                "its parameters, buffers or optimizer state": (changing, after),
                "its gradients": ([each.grad for each, _ in gradients], [gradient for _, gradient in gradients]),
                "what it logs": (known.calls, logs.calls), "what it returns": (known.output, output),
                "its loss": ((known.window, known.steps), (window, steps)),
            }  # fmt: skip
            differ = [part for part, pair in compared.items() if not parts.same_bits(*pair)]
            same = not differ
            why = "" if same else f"a replayed step differs from the same step without a graph in {', '.join(differ)}"
        except Exception as error:
            why = f"replaying failed with {error!r}"
        finally:
            if not same:
                parts.put(changing, after)
                set_rng_state(rng_after)
                for parameter, gradient in gradients:
                    parameter.grad = gradient
            run.kept.stepping = False
        self._log(logs.calls)
        if why:
            self._give_up(why)
        elif changed := self._watched.changed():
            self._forget(changed)
        elif known.seen == WARM_UPS + TRIALS:
            self._judge(known)
        return output

    def _judge(self, known: _Recorded) -> None:
        """Keep a graph whose trials had equal results if ``cuda_graphs=True`` or if its replays are faster; else drop
        it.
        """
        plain, replayed = (min(each) * 1000 for each in known.times)  # the minimum, because the first replay is slow
        shapes = " + ".join("x".join(map(str, each.shape)) or "1" for each in known.inputs)
        figures = f"{replayed:.3f} ms replayed, {plain:.3f} ms without a graph, equal bit for bit in {TRIALS} steps"
        known.kept = self._run.settings.cuda_graphs is True or replayed < FASTER * plain
        known.rejected = not known.kept
        if known.rejected:
            known.replay, known.gradients, known.inputs, known.output, known.calls = None, [], [], None, []
        what = f"steps with batches of {shapes} {'are replayed' if known.kept else 'run without a graph'}"
        self.say(what, f": {figures}")

    def _now(self) -> float:
        self._run.engine.accelerator.synchronize(self._device)
        return _clock()

    def _record(self, known: _Recorded, batch: Any) -> None:
        run, module, reads = self._run, self._run.module, list[str]()
        static = cloned(batch)
        known.inputs = parts.signature(static, self._device)[1]
        counted, window, gradients = run.progress.global_step, run.window.state_dict(), self._gradients()
        watched = self._watched or self._watch()
        try:
            hidden = replaced_in(module, "_trainer", lambda own: own and parts.TrainerWhileRecording(own, reads))
            with logging_into(module, logs := parts.RecordedLogs()), hidden:
                index = parts.index_while_recording(reads)
                known.output, replay = self._recorder.record(lambda: self._run_step(static, index))
            known.calls, known.window = logs.calls, run.window.state_dict()
            known.steps = run.progress.global_step - counted
            known.gradients = sorted(self._gradients(), key=lambda pair: pair[1] is None)
        finally:
            run.progress.count_steps(counted - run.progress.global_step)
            run.window.load_state_dict(window)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        if reads:  # the user's step may have caught the exception
            raise parts.CannotRecord(reads[0])
        if changed := watched.changed():
            raise parts.CannotRecord(f"the step changes {changed}, which a replay would not")
        logs.check()
        if not known.gradients or known.gradients[0][1] is None:
            raise parts.CannotRecord("the step computes no gradients")
        known.replay = replay

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        return [(each, each.grad) for each in self._run.module.parameters()]

    # ---- when a graph cannot be used -----------------------------------------------------------------------------

    def _forget(self, changed: str) -> None:
        """Drop all graphs, because a watched object has changed."""
        self._known.clear()
        self._watched = None
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self._give_up(f"{changed} has changed, after {MOST_CHANGES} earlier changes of what the steps read")
        else:
            self.say(f"steps are recorded again, because {changed} has changed")

    def _give_up(self, why: str) -> None:
        """Run steps without graphs for the rest of the fit.

        Raises:
            RunError: the user has passed ``cuda_graphs=True``.
        """
        self._known.clear()
        self._watched = None
        self._off = True
        if self._run.settings.cuda_graphs is True:
            raise RunError(no_graphs(why))
        self.say(f"steps run without graphs: {why}")
