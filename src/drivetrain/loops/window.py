"""The window: the batches of one optimizer step, and how their losses add up to one gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.restoring import COUNT, Form, number
from drivetrain.errors import ConfigurationError
from drivetrain.module.optimizers import parameters_of

Stepped = Optimizer | Sequence[Optimizer] | None
"""Which optimizers step the parameters whose gradients a window holds."""


class Window:
    """The batches of one optimizer step, as far as they are done.

    The loop counts its batches; the losses of these batches add up to one gradient here.

    Attributes:
        size: how many batches it is expected to hold. It ends early with its epoch.
        batches_done: how many of them are done; 0 between windows.
        divisor: plain losses are divided by it: ``size``, or what a strategy that owns its step divides by.
        batches_with_gradients: how many batches have given gradients. last_counted: the last of those, counted from 1.
        reference: the largest weight so far; ``None`` while losses are plain. Weighted gradients are held in units of
            it, so that no batch is scaled up and 16-bit floats do not overflow.
        total: the sum of the weights.
        factor_here: what this rank's mean over the current batch counts for among the ranks': see
            :class:`drivetrain.data.samplers.Share`. 0 for a batch that is repeated: it counts for nothing.
        gather: the tensor of every rank of the data group, stacked; ``None`` with one rank. Gradients are then
            averaged over these ranks in the backward pass of a window's last batch.
        exchanges_always: gradients are averaged over the ranks in every backward pass, not only in the last.
        rescale: multiplies the gradients that are there, of an optimizer's parameters, by a factor.
        holds_own: a strategy that owns its step has made gradients, and has not stepped.
        keeps_divisor: a plain window that ends early stays divided by the full number (``drivetrain.parity``).
    """

    # The names in a checkpoint are those of its first version.
    _STATE: ClassVar = {
        "expected": "divisor",
        "graded": "batches_with_gradients",
        "position": "last_counted",
        "reference": "reference",
        "total": "total",
    }
    FORM: ClassVar[Form] = {
        "expected": COUNT, "graded": COUNT, "position": COUNT, "total": (Tensor, int, float, number),
        "reference": (Tensor, int, float, None, number),
    }  # fmt: skip
    """Of what :meth:`state_dict` returns."""
    __slots__ = (
        "batches_done",
        "exchanges_always",
        "factor_here",
        "gather",
        "holds_own",
        "keeps_divisor",
        "rescale",
        "size",
        *_STATE.values(),
    )

    def __init__(self, keeps_divisor: bool = False) -> None:
        self.size = 1
        self.batches_done = 0
        self.keeps_divisor = keeps_divisor
        self.exchanges_always = self.holds_own = False
        self.factor_here = 1.0
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.rescale: Callable[[Stepped, float | Tensor], None] = rescale
        self.divisor = 1
        self.batches_with_gradients = 0
        self.last_counted = 0
        self.reference: float | Tensor | None = None
        self.total: float | Tensor = 0

    def begin(self, divisor: int) -> None:
        """Its first loss is there; plain losses are divided by ``divisor``."""
        self.divisor, self.batches_with_gradients, self.last_counted, self.reference = divisor, 0, 0, None

    def part(
        self, loss: Tensor, weight: float | Tensor | None, optimizer: Stepped, position: int, last: bool
    ) -> Tensor:
        """``loss`` as its part of the window's mean, which is counted; ``position`` counts its batches from 1.

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
        if position != self.last_counted:  # a closure may be run twice
            self.last_counted = position
            self.batches_with_gradients += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint inside of a window keeps, next to the gradients."""
        return {key: getattr(self, name) for key, name in self._STATE.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for key, name in self._STATE.items():
            setattr(self, name, state[key])

    def place(self) -> dict[str, int]:
        """What a checkpoint keeps anywhere in a fit: how far the window is."""
        return {"held": self.batches_done, "divisor": self.size}

    def restore_place(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`place` returned."""
        self.batches_done, self.size = state.get("held", 0), state.get("divisor", 1)

    def weigh(self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, again: bool = False) -> Tensor:
        """``loss`` in units of the largest weight; gradients that are there already are brought to the same unit.

        ``again``: this batch's weight has been counted; its closure is run once more.

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
            # 8-bit counts and 16-bit floats could not be added up as they are.
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
        """:meth:`weigh` for a backward pass that averages over the ranks: in units of the largest weight of all.

        One small exchange; nothing is read from the device.
        """
        assert self.gather is not None  # the caller has looked
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
        self.reference = unit * len(everyones)  # the mean over the ranks has divided by their number
        self.total = everyones[:, 1].sum()
        return loss * (here / unit)

    def _weigh_further(
        self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, reference: float | Tensor
    ) -> Tensor:
        """:meth:`weigh_together` where the gradients that are there are averages over the ranks already."""
        assert self.gather is not None  # the caller has looked
        everyones = self.gather(_wide(weight, loss).reshape(1)).flatten()  # (ranks,)
        held = _wide(reference, loss) / len(everyones)
        unit = _at_least_tiny(torch.maximum(held, everyones.amax()))
        self.rescale(optimizer, held / unit)
        self.reference = unit * len(everyones)
        self.total = _wide(self.total, loss) + everyones.sum()
        return loss * (_wide(weight, loss) / unit)

    def mean_over_ranks(self, loss: Tensor | None, weight: float | Tensor | None) -> Tensor:
        """Return the loss of the batches of all ranks: what an optimizer that looks at the loss must see on each.

        Such an optimizer decides by the loss how often it evaluates the closure and how far it steps. Ranks that decide
        differently would wait for each other, or part.
        """
        assert self.gather is not None  # the caller has looked
        assert loss is not None
        here = self.factor_here if weight is None else weight * (self.factor_here > 0)
        scale = torch.as_tensor(here, dtype=loss.dtype, device=loss.device)
        sums = self.gather(torch.stack([loss.detach() * scale, scale])).sum(0)
        return sums[0] / sums[1]

    def factor(self) -> float | Tensor | None:
        """What the finished gradients must still be multiplied by; ``None`` for 1.

        A window that ended early, or a batch that gave no loss, has divided by too much.
        """
        if self.reference is None:
            return (
                None
                if self.batches_with_gradients == self.divisor or self.keeps_divisor
                else self.divisor / self.batches_with_gradients
            )
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
    """A weight as a tensor beside ``loss``, in 32 bits or more: in 64 where the loss is."""
    return torch.as_tensor(number, dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device)


def _at_least_tiny(value: Tensor) -> Tensor:
    """Nothing is divided by zero: where all weights are 0, all gradients are too."""
    return value.clamp(min=torch.finfo(torch.float32).tiny)


def rescale(optimizer: Stepped, factor: float | Tensor) -> None:
    """Multiply the gradients of the parameters of this optimizer, or of these, by ``factor``."""
    for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        for parameter in [] if each is None else parameters_of(each):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
