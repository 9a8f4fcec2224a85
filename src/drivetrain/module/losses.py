"""What ``training_step`` may return, and how the losses of a window add up to one gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.tree import detach
from drivetrain.errors import ConfigurationError, described, is_number, shown
from drivetrain.module.optimizers import parameters_of

Stepped = Optimizer | Sequence[Optimizer] | None
"""Who steps the parameters whose gradients a window holds."""


class WeightedLoss(NamedTuple):
    """A loss with what it is the mean over, so that unequal micro-batches add up to one large batch.

    The gradient of a window is the weighted mean over its micro-batches: the sum of ``weight * gradient`` divided
    once, when the optimizer steps, by the sum of the weights.

    Attributes:
        loss: the mean over ``weight`` samples or tokens, a tensor with one element and a graph. It must be finite
            even where the weight is 0.
        weight: how many those are: a number, or a tensor with one element where the device has counted them (it is
            never read back, but each further micro-batch of a window then costs a pass over the gradients).

    A micro-batch whose weight is the number 0 counts for nothing and is not differentiated.
    """

    loss: Tensor
    weight: float | Tensor


def loss_of(output: Any, keeps_zero: bool = False) -> tuple[Tensor | None, float | Tensor | None]:
    """The loss in what ``training_step`` returned, and its weight if it has one (trap T23).

    Args:
        output: what it returned.
        keeps_zero: a loss of weight 0 is one too: the other ranks wait for its gradients.

    Raises:
        ConfigurationError: it is no loss, no mapping with one under "loss", and not ``None``.
    """
    if output is None or isinstance(output, Tensor):
        return output, None
    if isinstance(output, WeightedLoss):
        loss, weight = output
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                f"training_step returned a WeightedLoss whose loss is {described(loss)}. "
                "Write WeightedLoss(loss, weight) with the loss as the tensor it was computed as."
            )
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise ConfigurationError(
                    f"training_step returned a WeightedLoss whose weight has the shape {tuple(weight.shape)}. "
                    "A weight is one number: sum it first."
                )
            return loss, weight.detach().reshape(())
        if not (is_number(weight) and 0 <= weight < float("inf")):
            raise ConfigurationError(
                f"training_step returned a WeightedLoss with the weight {shown(weight)}. "
                "A weight counts samples or tokens: give a finite number of at least 0."
            )
        return (loss, weight) if weight or keeps_zero else (None, None)
    if isinstance(output, Mapping):
        inner = output.get("loss")
        if isinstance(inner, (Tensor, WeightedLoss)):
            return loss_of(inner, keeps_zero)
        instead = f", but {described(inner)}" if "loss" in output else ""
        raise ConfigurationError(
            f"training_step returned a dictionary with {sorted(map(str, output))} and no tensor under 'loss'{instead}. "
            "Put the loss there, as the tensor it was computed as."
        )
    raise ConfigurationError(
        f"training_step returned {described(output)}. Return the loss (a tensor), a WeightedLoss, a dictionary "
        "with one of them under 'loss', or None to skip the batch."
    )


def cannot_be_differentiated(loss: Tensor) -> str | None:
    """Why backward fails on ``loss``, and the cure; ``None`` if it is no fault of the loss."""
    if loss.numel() != 1:
        return (
            f"training_step returned a loss of shape {tuple(loss.shape)}, and only one number can be differentiated. "
            "Reduce it first, for example with loss.mean()."
        )
    if not loss.requires_grad:
        return (
            f"training_step returned a loss that depends on no parameter that requires a gradient: {shown(loss)}. "
            "Compute it from the module's output, without detach(), item(), numpy() or torch.no_grad() on the way."
        )
    return None


def outputs_for_hooks(output: Any) -> dict[str, Any] | None:
    """What ``on_train_batch_end`` gets: the unscaled loss and the extras, all without their graph (trap T23)."""
    if output is None:
        return None
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, WeightedLoss):
        return {"loss": output.loss.detach(), "weight": output.weight}
    extras: dict[str, Any] = dict(output)
    loss = extras.pop("loss")
    return {**(outputs_for_hooks(loss) or {}), **detach(extras)}


class Window:
    """The batches of one optimizer step, as far as they are done.

    Attributes:
        total: the sum of the weights.
        factor_here: what this rank's mean over the current batch counts for among the ranks': see
            :class:`drivetrain.data.samplers.Share`. 0 for a batch that is repeated: it counts for nothing.
        gather: the tensor of every rank of the data group, stacked; ``None`` where one is alone. Gradients are then
            averaged over these ranks in the backward pass of a window's last batch.
        exchanges_always: gradients are averaged over the ranks in every backward pass, not only in the last.
        undersized: a plain window that ended early keeps what the full one has divided by (``drivetrain.parity``).
        expected: how many batches the window was thought to have when it began: plain losses are divided by it.
        graded: how many gave gradients. position: the last of those, counted from 1.
        reference: the largest weight so far; ``None`` while losses are plain. Weighted gradients are held in units of
            it, so that no micro-batch is scaled up and 16-bit floats do not overflow.
    """

    _STATE = ("expected", "graded", "position", "reference", "total")
    __slots__ = ("exchanges_always", "factor_here", "gather", "undersized", *_STATE)

    def __init__(self, undersized: bool = False) -> None:
        self.undersized = undersized
        self.exchanges_always = False
        self.factor_here = 1.0
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.expected = 1
        self.graded = 0
        self.position = 0
        self.reference: float | Tensor | None = None
        self.total: float | Tensor = 0

    def begin(self, size: int) -> None:
        """A window begins, of ``size`` batches."""
        self.expected, self.graded, self.position, self.reference = size, 0, 0, None

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
            loss = loss / self.expected
        elif self.gather is not None and (last or self.exchanges_always):
            loss = self.weigh_together(loss, weight, optimizer)
        else:
            loss = self.weigh(loss, weight, optimizer, again=position == self.position)
        if position != self.position:  # a closure may be run twice
            self.position = position
            self.graded += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint inside of a window keeps, next to the gradients."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        for name in self._STATE:
            setattr(self, name, state[name])

    def weigh(self, loss: Tensor, weight: float | Tensor, optimizer: Stepped, again: bool = False) -> Tensor:
        """``loss`` in units of the largest weight; gradients that are there already are brought to the same unit.

        ``again``: this batch's weight has been counted; its closure is run once more.

        Raises:
            ConfigurationError: an earlier batch of this window returned a plain loss.
        """
        reference = self.reference
        if reference is None:
            if self.graded:
                raise _mixed()
            self.reference, self.total = weight, weight
            return loss * (weight > 0) if isinstance(weight, Tensor) else loss
        if isinstance(weight, Tensor) or isinstance(reference, Tensor):
            # 8-bit counts and 16-bit floats could not be added up as they are.
            here, before, total = (_wide(number, loss) for number in (weight, reference, self.total))
            self.total = total if again else total + here
            self.reference = torch.maximum(before, here)
            unit = _at_least_tiny(self.reference)
            rescale(optimizer, before / unit)
            return loss * (here / unit)
        if not again:
            self.total = self.total + weight
        if not (weight or reference):
            return loss * 0
        if weight > reference:
            rescale(optimizer, reference / weight)
            self.reference = weight
            return loss
        return loss * (weight / reference)

    def weigh_together(self, loss: Tensor, weight: float | Tensor, optimizer: Stepped) -> Tensor:
        """:meth:`weigh` for a backward pass that averages over the ranks: in units of the largest weight of all.

        One small exchange; nothing is read from the device.
        """
        assert self.gather is not None  # the caller has looked
        before, there = self.reference, self.graded > 0
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
            rescale(optimizer, held / unit)
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
        rescale(optimizer, held / unit)
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

        A window that ended early, or a batch that gave no loss, has divided by too much (trap T12).
        """
        if self.reference is None:
            return None if self.graded == self.expected or self.undersized else self.expected / self.graded
        if self.graded == 1 and self.gather is None:
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
