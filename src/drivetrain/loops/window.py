"""The window (the batches of one optimizer step): its state, and the scaling of its losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.restoring import COUNT, Form, number
from drivetrain.base.tree import rescale
from drivetrain.errors import ConfigurationError

Stepped = Optimizer | Sequence[Optimizer] | None
"""The optimizer or optimizers whose parameters have a window's gradients; ``None`` if there is no optimizer."""


@dataclass(slots=True, eq=False)
class Window:
    """The state of the current window, which is the batches of one optimizer step.

    The loop counts the batches. This class scales the batches' losses, so that the sum of the scaled losses' gradients
    is the gradient of the mean loss.

    Attributes:
        size: the expected number of batches. A window has fewer batches if the epoch ends first.
        batches_done: the number of finished batches; 0 between windows.
        divisor: the number by which losses without weights are divided: ``size``, or a divisor that the strategy sets.
        batches_with_gradients: the number of batches that have computed gradients. last_counted: the position in the
            window, from 1, of the last batch with gradients.
        reference: the largest weight so far; ``None`` if losses have no weights. A loss is multiplied by its weight
            divided by ``reference``. This factor is at most 1, so 16-bit floats do not overflow.
        total: the sum of the weights.
        factor_here: the factor of this rank's loss in the mean over the ranks: see
            :class:`drivetrain.data.samplers.Share`. The factor is 0 if the rank repeats a batch, because repeated
            batches do not count.
        gather: a function that stacks the tensors of all ranks of the data group (the ranks that divide the data);
            ``None`` with one rank. With several ranks, the backward pass of a window's last batch averages the
            gradients over the ranks.
        exchanges_always: whether every backward pass averages the gradients over the ranks, not only the window's last.
        rescale: a function that multiplies the gradients of an optimizer's parameters by a factor.
        holds_own: whether a strategy with its own training step has computed gradients, but not stepped yet.
        keeps_divisor: whether losses without weights are divided by the full size even if the window ends early
            (``drivetrain.parity``).
    """

    # key in a checkpoint -> attribute. The keys must never change, because old checkpoints contain them.
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
    """The types of the entries of :meth:`state_dict`."""

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
        """Start a window; called with the window's first loss. Losses without weights are divided by ``divisor``."""
        self.divisor, self.batches_with_gradients, self.last_counted, self.reference = divisor, 0, 0, None

    def part(
        self, loss: Tensor, weight: float | Tensor | None, optimizer: Stepped, position: int, last: bool
    ) -> Tensor:
        """Return ``loss``, scaled for the window's mean. Count the batch. ``position``: the batch's number in the
        window, from 1.

        Raises:
            ConfigurationError: some losses of the window have weights, and some have none.
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
        """Return the state of an incomplete window for a checkpoint, without the window's gradients."""
        state = {key: getattr(self, name) for key, name in self._STATE.items()}
        return {**state, "exchanged": self.exchanges_always}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""
        for key, name in self._STATE.items():
            setattr(self, name, state[key])

    def place(self) -> dict[str, int]:
        """Return the number of finished batches and the window's size, which every checkpoint of a fit contains."""
        return {"held": self.batches_done, "divisor": self.size}

    def restore_place(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`place`."""
        self.batches_done, self.size = state.get("held", 0), state.get("divisor", 1)

    def weigh(self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, again: bool = False) -> Tensor:
        """Return ``loss`` times its weight, divided by the largest weight so far. If the largest weight changes,
        rescale the existing gradients.

        ``again``: the optimizer calls the closure again for this batch, whose weight is already counted.

        Raises:
            ConfigurationError: an earlier batch of this window returned a loss without a weight.
        """
        reference = self.reference
        if reference is None:
            if self.batches_with_gradients:
                raise _mixed()
            self.reference, self.total = weight, weight
            return loss * (weight > 0) if isinstance(weight, Tensor) else loss
        if isinstance(weight, Tensor) or isinstance(reference, Tensor):
            # Weights are added in float32 or float64, because sums of 8-bit counts or 16-bit floats would overflow.
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
        """Return ``loss`` times its weight, divided by the largest weight so far on any rank. Called before a backward
        pass that averages the gradients over the ranks.

        The ranks exchange two numbers each. The method does not wait for the device.
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
        self.reference = unit * len(everyones)  # averaging over the ranks divides by the number of ranks
        self.total = everyones[:, 1].sum()
        return loss * (here / unit)

    def _weigh_further(
        self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, reference: float | Tensor
    ) -> Tensor:
        """Return the result of :meth:`weigh_together` for a window whose existing gradients are already averages over
        the ranks.
        """
        assert self.gather is not None  # checked by the caller
        everyones = self.gather(_wide(weight, loss).reshape(1)).flatten()  # (ranks,)
        held = _wide(reference, loss) / len(everyones)
        unit = _at_least_tiny(torch.maximum(held, everyones.amax()))
        self.rescale(optimizer, held / unit)
        self.reference = unit * len(everyones)
        self.total = _wide(self.total, loss) + everyones.sum()
        return loss * (_wide(weight, loss) / unit)

    def mean_over_ranks(self, loss: Tensor | None, weight: float | Tensor | None) -> Tensor:
        """Return the mean of the ranks' losses, for an optimizer such as LBFGS that uses the loss.

        The optimizer decides from the loss how often it evaluates the closure and how far it steps. If the ranks had
        different losses, the ranks would deadlock or diverge.
        """
        assert self.gather is not None  # checked by the caller
        assert loss is not None
        here = self.factor_here if weight is None else weight * (self.factor_here > 0)
        scale = torch.as_tensor(here, dtype=loss.dtype, device=loss.device)
        sums = self.gather(torch.stack([loss.detach() * scale, scale])).sum(0)
        return sums[0] / sums[1]

    def factor(self) -> float | Tensor | None:
        """Return the factor by which the final gradients must be multiplied; ``None`` for 1.

        If the window ended early or a batch had no loss, the losses were divided by a number that was too large. The
        factor corrects this.
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
    """Return a weight as a tensor on the device of ``loss``, in float32, or in float64 if ``loss`` is float64."""
    return torch.as_tensor(number, dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device)


def _at_least_tiny(value: Tensor) -> Tensor:
    """Return ``value``, or the smallest positive float if ``value`` is 0, so that a caller can divide by the result."""
    return value.clamp(min=torch.finfo(torch.float32).tiny)
