"""The window: the batches of one optimizer step, and how their losses are combined into one gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.restoring import COUNT, Form, number
from drivetrain.errors import ConfigurationError
from drivetrain.module.optimizers import parameters_of

Stepped = Optimizer | Sequence[Optimizer] | None
"""Which optimizers step the parameters whose gradients a window holds."""


def rescale(optimizer: Stepped, factor: float | Tensor) -> None:
    """Multiply the gradients of this optimizer's parameters, or of these parameters, by ``factor``."""
    for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        for parameter in [] if each is None else parameters_of(each):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@dataclass(slots=True, eq=False)
class Window:
    """The batches of one optimizer step that are done so far.

    The loop counts its batches; this class combines their losses into one gradient.

    Attributes:
        size: the expected number of batches. The window ends early with its epoch.
        batches_done: the number of finished batches; 0 between windows.
        divisor: the number by which plain losses are divided: ``size``, or the divisor of a strategy that owns its
            step.
        batches_with_gradients: the number of batches that have produced gradients. last_counted: the last of those,
            counted from 1.
        reference: the largest weight so far; ``None`` while losses are plain. Weighted gradients are stored in units of
            this weight, so that no batch is scaled up and 16-bit floats do not overflow.
        total: the sum of the weights.
        factor_here: the factor of this rank's loss in the mean over the ranks: see
            :class:`drivetrain.data.samplers.Share`. It is 0 for a repeated batch, which does not count.
        gather: returns the tensor of every rank of the data group, stacked; ``None`` with one rank. Gradients are then
            averaged over these ranks in the backward pass of a window's last batch.
        exchanges_always: gradients are averaged over the ranks in every backward pass, not only in the last.
        rescale: multiplies the current gradients of an optimizer's parameters by a factor.
        holds_own: a strategy that owns its step has computed gradients, and has not stepped yet.
        keeps_divisor: the losses of a window that ends early are still divided by its full size; for plain losses only
            (``drivetrain.parity``).
    """

    # A checkpoint uses the names of its first version.
    _STATE: ClassVar = {
        "expected": "divisor",
        "graded": "batches_with_gradients",
        "position": "last_counted",
        "reference": "reference",
        "total": "total",
    }
    FORM: ClassVar[Form] = {
        "expected": COUNT, "graded": COUNT, "position": COUNT, "total": (Tensor, int, float, number),
        "reference": (Tensor, int, float, None, number), "exchanged?": bool,
    }  # fmt: skip
    """The form of a result of :meth:`state_dict`."""

    keeps_divisor: bool = False
    size: int = 1
    batches_done: int = 0
    exchanges_always: bool = False
    holds_own: bool = False
    factor_here: float = 1.0
    gather: Callable[[Tensor], Tensor] | None = None
    rescale: Callable[[Stepped, float | Tensor], None] = rescale
    divisor: int = 1
    batches_with_gradients: int = 0
    last_counted: int = 0
    reference: float | Tensor | None = None
    total: float | Tensor = 0

    def begin(self, divisor: int) -> None:
        """Called with the window's first loss; plain losses are divided by ``divisor``."""
        self.divisor, self.batches_with_gradients, self.last_counted, self.reference = divisor, 0, 0, None

    def part(
        self, loss: Tensor, weight: float | Tensor | None, optimizer: Stepped, position: int, last: bool
    ) -> Tensor:
        """Return ``loss`` as its share of the window's mean, and count it; ``position`` counts its batches from 1.

        Raises:
            ConfigurationError: the window holds both weighted and plain losses.
        """
        if weight is None:
            if self.reference is not None:
                raise _mixed()
            loss = loss / self.divisor
        elif self.gather is not None and (last or self.exchanges_always):
            loss = self.weigh_together(loss, weight, optimizer)
        else:
            loss = self.weigh(loss, weight, optimizer, again=position == self.last_counted)
        if position != self.last_counted:  # a closure may run twice
            self.last_counted = position
            self.batches_with_gradients += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an incomplete window for a checkpoint, apart from the gradients."""
        state = {key: getattr(self, name) for key, name in self._STATE.items()}
        return {**state, "exchanged": self.exchanges_always}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""
        for key, name in self._STATE.items():
            setattr(self, name, state[key])

    def place(self) -> dict[str, int]:
        """Return the position in the window, which every checkpoint of a fit contains."""
        return {"held": self.batches_done, "divisor": self.size}

    def restore_place(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`place`."""
        self.batches_done, self.size = state.get("held", 0), state.get("divisor", 1)

    def weigh(self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, again: bool = False) -> Tensor:
        """Return ``loss`` in units of the largest weight; existing gradients are converted to the same unit.

        ``again``: this batch's weight was already counted, and its closure runs once more.

        Raises:
            ConfigurationError: an earlier batch of this window returned a plain loss.
        """
        reference = self.reference
        if reference is None:
            if self.batches_with_gradients:
                raise _mixed()
            self.reference, self.total = weight, weight
            return loss * (weight > 0) if isinstance(weight, Tensor) else loss
        if isinstance(weight, Tensor) or isinstance(reference, Tensor):
            # In their own dtype, 8-bit counts and 16-bit floats would overflow in the sum.
            here, before, total = (_wide(number, loss) for number in (weight, reference, self.total))
            self.total = total if again else total + here
            self.reference = torch.maximum(before, here)
            unit = _at_least_tiny(self.reference)
            self.rescale(optimizer, before / unit)
            return loss * (here / unit)
        if not again:
            self.total = self.total + weight
        if not (weight or reference):
            return loss * 0
        if weight > reference:
            self.rescale(optimizer, reference / weight)
            self.reference = weight
            return loss
        return loss * (weight / reference)

    def weigh_together(self, loss: Tensor, weight: float | Tensor, optimizer: Stepped) -> Tensor:
        """Do :meth:`weigh` in units of the largest weight of all ranks, for a backward pass that averages over them.

        It makes one small exchange between the ranks, and reads nothing from the device.
        """
        assert self.gather is not None  # checked by the caller
        before, there = self.reference, self.batches_with_gradients > 0
        if before is None and there:
            raise _mixed()
        if self.exchanges_always and before is not None and there:
            return self._weigh_further(loss, weight, optimizer, before)
        here, held, total = (
            _wide(number, loss)
            for number in (weight, 0 if before is None or not there else before, self.total if there else 0)
        )
        total = total + here
        everyones = self.gather(torch.stack([torch.maximum(held, here), total]))  # (ranks, 2)
        unit = _at_least_tiny(everyones[:, 0].amax())
        if there:
            self.rescale(optimizer, held / unit)
        self.reference = unit * len(everyones)  # averaging over the ranks divides by their number
        self.total = everyones[:, 1].sum()
        return loss * (here / unit)

    def _weigh_further(
        self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, reference: float | Tensor
    ) -> Tensor:
        """Do :meth:`weigh_together` if the existing gradients are already averages over the ranks."""
        assert self.gather is not None  # checked by the caller
        everyones = self.gather(_wide(weight, loss).reshape(1)).flatten()  # (ranks,)
        held = _wide(reference, loss) / len(everyones)
        unit = _at_least_tiny(torch.maximum(held, everyones.amax()))
        self.rescale(optimizer, held / unit)
        self.reference = unit * len(everyones)
        self.total = _wide(self.total, loss) + everyones.sum()
        return loss * (_wide(weight, loss) / unit)

    def mean_over_ranks(self, loss: Tensor | None, weight: float | Tensor | None) -> Tensor:
        """Return the mean loss over the batches of all ranks, for an optimizer that uses the loss.

        Such an optimizer decides by the loss how often it evaluates the closure and how far it steps. Ranks with
        different decisions would deadlock or diverge.
        """
        assert self.gather is not None  # checked by the caller
        assert loss is not None
        here = self.factor_here if weight is None else weight * (self.factor_here > 0)
        scale = torch.as_tensor(here, dtype=loss.dtype, device=loss.device)
        sums = self.gather(torch.stack([loss.detach() * scale, scale])).sum(0)
        return sums[0] / sums[1]

    def factor(self) -> float | Tensor | None:
        """Return the factor by which the final gradients must be multiplied; ``None`` for 1.

        If the window ended early, or a batch had no loss, the losses were divided by too large a number.
        """
        if self.reference is None:
            is_divided = self.keeps_divisor or self.batches_with_gradients == self.divisor
            return None if is_divided else self.divisor / self.batches_with_gradients
        if self.batches_with_gradients == 1 and self.gather is None:
            return None
        total = self.total
        return self.reference / (_at_least_tiny(total) if isinstance(total, Tensor) else total)


def _mixed() -> ConfigurationError:
    return ConfigurationError(
        "training_step returned a WeightedLoss for some batches of a window and a plain loss for others. "
        "Return a WeightedLoss for all of them, or for none."
    )


def _wide(number: float | Tensor, loss: Tensor) -> Tensor:
    """Return a weight as a tensor on the device of ``loss``, in float32, or float64 if the loss is."""
    return torch.as_tensor(number, dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device)


def _at_least_tiny(value: Tensor) -> Tensor:
    """Avoid a division by zero: if all weights are 0, all gradients are 0 too."""
    return value.clamp(min=torch.finfo(torch.float32).tiny)
