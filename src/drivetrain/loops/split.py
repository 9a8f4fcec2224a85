"""``Trainer(split_on_oom=True)``: if a batch does not fit into memory, run it again in parts (micro-batches).

The ranks do not communicate while they run the batches of a window (the batches of one optimizer step). A rank that
runs out of memory drops the gradients of the window. The rank then runs the window's batches again, each in twice as
many parts, until the parts fit into memory. After a window's last batch, the ranks exchange their numbers of parts. If
a rank could not run its batch, the fit ends on all ranks. Otherwise all ranks use the largest number of parts from then
on, and exchange gradients once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.memory import free_memory, is_out_of_memory
from drivetrain.base.rank_zero import log
from drivetrain.base.registry import load
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.torch_private import version_of
from drivetrain.base.tree import detach
from drivetrain.errors import ConfigurationError
from drivetrain.logbook.parts import PartBook, logging_into, merge
from drivetrain.loops import pieces
from drivetrain.loops.metrics import copied_states, set_states
from drivetrain.loops.progress import Phase
from drivetrain.loops.run import Run
from drivetrain.module.losses import loss_of
from drivetrain.strategies.batch_parts import Joiner, samples_in, split_batch
from drivetrain.strategies.local_passes import LocalPasses

_BACKWARD, _OPTIMIZER_STEP = int(Phase.BACKWARD), int(Phase.OPTIMIZER_STEP)


@dataclass
class _Kept:
    """A batch of the current window, the step's other arguments, and the random state before the batch."""

    batch: Any
    batch_idx: int
    position: int
    divisor: int
    factor: float
    rng: dict[str, Any]


class SplitWindow:
    """Runs the batches of a window, in parts if memory runs out.

    Args:
        run: the run.
        optimizer: the only optimizer of the run.
        before_step: processes the final gradients before the optimizer's step.
    """

    def __init__(self, run: Run, optimizer: Optimizer, before_step: Callable[[], None] | None) -> None:
        self._run, self._optimizer, self._before_step = run, optimizer, before_step
        self._training_step = pieces.in_forward_context(run, pieces.bind_training_step(run))
        self._zero_grad, self._backward = pieces.bind_zero_grad(run, optimizer), pieces.bind_backward(run, optimizer)
        self._strategy, self._window = run.engine.strategy, run.window
        self._shared = run.window.gather is not None
        self._parameters = [each for each in run.module.parameters() if each.requires_grad]
        before: SplitWindow | None = run.splitter
        new_passes = load(self._strategy.facts.local_passes)
        self.passes: LocalPasses = new_passes(self._strategy) if before is None else before.passes
        # the previous object's state, because the loop may bind a new step inside a window
        self._kept: list[_Kept] = [] if before is None else before._kept
        # the gradients of a checkpoint that was saved inside this window
        self._gradients: list[Tensor | None] | None = None if before is None else before._gradients
        self._at_start: dict[str, Any] = {} if before is None else before._at_start
        self._parts: int = 1 if before is None else before._parts  # the number of parts of each batch
        self._again = False
        run.splitter = self

    # ---- a batch -------------------------------------------------------------------------------------------------

    def step(self, batch: Any, batch_idx: int, position: int, last: bool, divisor: int) -> Any:
        """Run a batch; a :data:`drivetrain.loops.pieces.Step`. After a window's last batch, the ranks exchange their
        gradients.
        """
        if not self._kept:
            self._begin(position)
        module = self._run.module
        self._kept.append(_Kept(batch, batch_idx, position, divisor, self._window.factor_here, rng_state()))
        metrics, buffers = copied_states(module), [each.detach().clone() for each in module.buffers()]
        begins = len(self._kept) - 1
        self._again = False
        while True:
            try:
                with self.passes.without_exchange():
                    for kept in self._kept[begins:-1]:
                        self._run_batch(kept, logs=False)
                        self._restore_module(metrics, buffers)
                    output = self._run_batch(self._kept[-1], logs=True)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._grow(error)
            # not in the except clause, because there the error's frames keep the step's tensors in memory
            self.passes.forget()
            self._drop_gradients()
            self._restore_module(metrics, buffers)
            free_memory()
            begins, self._again = 0, True
        if last:
            if self._shared:
                self._vote(failed=False)
                self.passes.exchange()
            self._kept, self._gradients = [], None
        return output

    def _begin(self, position: int) -> None:
        if self._shared:
            self.passes.begin()
        self._at_start = self._window.state_dict()
        if position > 1:
            self._gradients = [None if each.grad is None else each.grad.clone() for each in self._parameters]

    def _run_batch(self, kept: _Kept, logs: bool) -> Any:
        """Run one batch of the window in the current number of parts. ``logs``: whether to keep the values that it
        logs.
        """
        run, window = self._run, self._window
        if self._again:
            set_rng_state(kept.rng)
        device = self._strategy.root_device
        if self._parts == 1:
            parts, sizes = [kept.batch], [1]
        else:
            parts, sizes = split_batch(kept.batch, [device] * self._parts)
        total, outputs, books = sum(sizes), [], []
        for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            book = PartBook(run.book, size)
            with logging_into(run.module, book):  # logged values are kept only after success
                output = self._training_step(part, kept.batch_idx)
            loss, weight = loss_of(output, self._shared)
            if weight is not None:
                raise ConfigurationError(
                    "training_step returned a WeightedLoss, whose parts Trainer(split_on_oom=True) cannot weigh. "
                    "Return the mean loss, or leave split_on_oom out."
                )
            if kept.position == 1 and index == 0:
                window.begin(kept.divisor)
                self._zero_grad()
            if self._shared and (loss is None or kept.factor != 1):
                window.factor_here = kept.factor
                loss, _ = pieces.as_one_of_many(window, loss, None)
            if loss is not None:
                loss = loss if len(parts) == 1 else loss * (size / total)
                loss = window.part(loss, None, self._optimizer, kept.position, False)
                run.progress.slot[0] = _BACKWARD
                self._backward(loss)
                del loss
            outputs.append(output if len(parts) == 1 else detach(output))
            books.append(book)
        if logs:
            merge(books, device)
        return Joiner(sizes, device).joined(outputs)

    # ---- when memory runs out ------------------------------------------------------------------------------------

    def _grow(self, error: RuntimeError) -> None:
        """Double the number of parts into which a batch is split.

        Raises:
            RuntimeError: ``error``, if a part is already a single sample.
        """
        samples = max(samples_in(each.batch) for each in self._kept)
        if self._parts >= samples:
            if self._shared:
                self._vote(failed=True)
            if hasattr(error, "add_note"):
                error.add_note(
                    "Trainer(split_on_oom=True) cannot split further: a micro-batch is one sample, and it does not fit."
                )
            raise error
        self._parts = min(2 * self._parts, samples)
        progress = self._run.progress
        rank = f"Rank {self._strategy.global_rank}" if self._strategy.world.size > 1 else "The device"
        size = -(-samples // self._parts)
        log.warning(
            f"{rank} ran out of memory in epoch {progress.current_epoch}, batch {progress.batch_idx}: from here on, "
            f"each batch runs in {self._parts} micro-batches of at most {size} samples (split_on_oom=True)."
        )

    def _drop_gradients(self) -> None:
        self._window.load_state_dict(self._at_start)
        for index, parameter in enumerate(self._parameters):
            held = None if self._gradients is None else self._gradients[index]
            parameter.grad = None if held is None else held.clone()

    def _restore_module(self, metrics: dict[str, Any], buffers: list[Tensor]) -> None:
        """Restore the metric objects and buffers (such as batch norm's statistics) from before the batch."""
        set_states(self._run.module, metrics)
        with torch.no_grad():
            for buffer, before in zip(self._run.module.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def _vote(self, failed: bool) -> None:
        """Exchange the ranks' numbers of parts, and use the largest. ``failed``: whether this rank cannot run its
        batch.

        Raises:
            RuntimeError: another rank cannot run its batch.
        """
        data = self._strategy.data
        votes = data.gather_objects((self._parts, failed))
        if failed:
            return
        without = [rank for rank, (_, stuck) in zip(data.ranks, votes, strict=True) if stuck]
        if without:
            raise RuntimeError(
                f"Rank {without[0]} has run out of memory with micro-batches of one sample, so this fit ends on all "
                "ranks. Its own error says what took the memory."
            )
        self._parts = max(parts for parts, _ in votes)

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def finish_window(self) -> None:
        """Step the optimizer.

        If memory runs out before the optimizer has changed a tensor, free memory and step the optimizer again.
        """
        run = self._run
        if not self._window.batches_with_gradients:
            return
        run.progress.slot[0] = _OPTIMIZER_STEP
        if self._before_step is not None:
            self._before_step()
        known, versions = set(self._optimizer.state), self._versions()
        stepped: bool | None = None
        try:
            stepped = self._step_optimizer()
        except RuntimeError as error:
            if not is_out_of_memory(error) or versions != self._versions(known):
                raise
            log.warning(
                "The optimizer step ran out of memory before it had changed anything: it is repeated once, after "
                "unused memory was freed (split_on_oom=True)."
            )
        if stepped is None:
            for parameter in set(self._optimizer.state) - known:
                del self._optimizer.state[parameter]  # the state may be incomplete
            free_memory()
            stepped = self._step_optimizer()
        run.progress.count_steps(stepped)

    def _step_optimizer(self) -> bool:
        precision = self._run.engine.precision
        precision.stepped = True
        precision.optimizer_step(self._optimizer)
        return precision.stepped

    def _versions(self, known: set[Any] | None = None) -> list[int]:
        """Return the version counters (torch's counters of in-place changes) of all parameters and of the optimizer's
        state tensors. ``known``: leave out the states of parameters that are not in ``known``.
        """
        state = self._optimizer.state
        found: list[Any] = list(self._parameters)
        for parameter in state if known is None else [each for each in state if each in known]:
            found += [each for each in state[parameter].values() if isinstance(each, Tensor)]
        return list(map(version_of, found))
