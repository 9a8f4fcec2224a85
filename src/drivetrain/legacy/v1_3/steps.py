"""The training step of Lightning 1.3 with several optimizers, or over parts of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

from drivetrain.base.introspect import overrides
from drivetrain.base.tree import detach
from drivetrain.module.losses import outputs_for_hooks
from drivetrain.module.module import LightningModule
from drivetrain.strategies.step_parts import OwnStep, StepParts


def bind_step(strategy: Any, parts: StepParts) -> OwnStep | None:
    """Return the step of a module with several optimizers or ``truncated_bptt_steps``; ``None`` for any other
    module.
    """
    module: Any = parts.module
    split_size = getattr(module, "truncated_bptt_steps", 0) or 0
    if len(parts.optimizers) < 2 and not split_size:
        return None

    def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> tuple[Any, int]:
        outputs: list[Any] = [None] * len(parts.optimizers)
        hiddens, stepped = None, False
        for part in module.tbptt_split_batch(batch, split_size) if split_size else [batch]:
            for number in _chosen(parts.optimizers, strategy.source.optimizer_frequencies, batch_idx):
                further = {"optimizer_idx": number} if len(parts.optimizers) > 1 else {}
                strategy.further_arguments = {**further, **({"hiddens": hiddens} if split_size else {})}
                once = _Once(strategy, parts, number, (batch_idx, index, last, size))
                stepped = once.run(part) or stepped
                outputs[number] = once.output
                if split_size and isinstance(once.output, Mapping):
                    hiddens = detach(once.output.get("hiddens"))
        strategy.further_arguments = {}
        several = [None if each is None else outputs_for_hooks(each) for each in outputs]
        strategy.outputs_of_batch = several if len(several) > 1 else None
        output = next((each for each in reversed(outputs) if each is not None), None)
        return output, int(stepped)

    return step


def _chosen(optimizers: Sequence[Any], frequencies: Sequence[int], batch_idx: int) -> Sequence[int]:
    """Return the indices of the optimizers to step for this batch: all indices, or with ``frequencies`` the index of
    one optimizer.
    """
    if not frequencies:
        return range(len(optimizers))
    ends = list(accumulate(frequencies))
    place = batch_idx % ends[-1]
    return [next(number for number, end in enumerate(ends) if place < end)]


class _Once:
    """The forward pass, backward pass and step of one optimizer.

    Attributes:
        output: the result of ``training_step``.
    """

    def __init__(self, strategy: Any, parts: StepParts, number: int, place: tuple[int, int, bool, int]) -> None:
        self.strategy, self.parts, self.number, self.place = strategy, parts, number, place
        self.optimizer = parts.optimizers[number]
        self.output: Any = None
        self.stepped = False

    def run(self, batch: Any) -> bool:
        """Train on ``batch``; return whether the optimizer has stepped."""
        module: Any = self.parts.module
        several, last = len(self.parts.optimizers) > 1, self.place[2]
        if several:
            module.toggle_optimizer(self.optimizer)
        with nullcontext() if last else self.parts.accumulating():
            if not last:
                self._forward_backward(batch)
            elif overrides(module, "optimizer_step", LightningModule):
                self._by_module(batch)
            elif self._forward_backward(batch) is not None:
                self._finish()
        if several:
            module.untoggle_optimizer(self.optimizer)
        return self.stepped

    def _forward_backward(self, batch: Any) -> Any:
        batch_idx, index, last, size = self.place
        self.output = self.parts.training_step(batch, batch_idx)
        if index == 0:
            self.parts.begin(size, self.optimizer)
        loss = self.parts.loss_of(self.output, index, last)
        if loss is not None:
            self.parts.backward(loss)
        return loss

    def _finish(self) -> None:
        self.parts.before_step(self.optimizer)
        self.stepped = self.parts.optimizer_step(self.optimizer)

    def _by_module(self, batch: Any) -> None:
        """Call the module's ``optimizer_step``. The module's call of ``optimizer.step(closure=closure)`` runs
        ``take_step`` below.
        """
        run = self.strategy.trainer.current_run
        handle = run.optimizers.handles[self.number]

        def take_step(optimizer: Any, closure: Any, kwargs: Any) -> Any:
            result = None if closure is None else closure()
            if closure is None or result is not None:
                self._finish()
            return result

        handle.take_step = take_step
        epoch = self.strategy.trainer.current_epoch
        self.parts.module.optimizer_step(epoch, self.place[0], handle, lambda: self._forward_backward(batch))  # type: ignore[operator]
        handle.take_step = None
