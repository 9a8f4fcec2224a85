"""Check the result of ``training_step``: a loss, a weighted loss, or a mapping that contains one of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from drivetrain.base.tree import detach
from drivetrain.errors import ConfigurationError, WrongTypeError, described, is_number, shown


class WeightedLoss(NamedTuple):
    """A mean loss and its weight (the number of samples or tokens), for accumulated batches of unequal sizes.

    With weights, accumulated batches have the gradient of one large batch. It is the sum of ``weight * gradient`` over
    the batches, divided by the sum of the weights.

    Attributes:
        loss: the mean over ``weight`` samples or tokens, as a tensor with one element and a graph. The loss must be
            finite, even if the weight is 0.
        weight: the number of samples or tokens, as a number or as a tensor with one element. A tensor on the device is
            never copied to the host. If the weights are tensors, each accumulated batch after the first costs one pass
            over all gradients.

    If the weight is the number 0 (not a tensor), the batch has no effect, and its backward pass is skipped.
    """

    loss: Tensor
    weight: float | Tensor


def loss_of(output: Any, keeps_zero: bool = False) -> tuple[Tensor | None, float | Tensor | None]:
    """Return the loss in the result of ``training_step``, and its weight if it has one.

    Args:
        output: the result of ``training_step``.
        keeps_zero: if the weight is 0, return the loss in place of ``None``. The backward pass then runs, as it must if
            other ranks wait for this rank's gradients.

    Raises:
        ConfigurationError: the result is not a loss, a mapping with a loss under "loss", or ``None``.
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
        raise WrongTypeError(
            f"training_step returned a dictionary with {sorted(map(str, output))} and no tensor under 'loss'{instead}. "
            "Put the loss there, as the tensor it was computed as. [DT1002]"
        )
    raise ConfigurationError(
        f"training_step returned {described(output)}. Return the loss (a tensor), a WeightedLoss, a dictionary "
        "with one of them under 'loss', or None to skip the batch. [DT1001]"
    )


def check_manual_output(output: Any) -> None:
    """Check the result of ``training_step`` in manual optimization.

    Raises:
        ConfigurationError: the result is not a tensor, a mapping, a :class:`WeightedLoss`, or ``None``.
    """
    if not (output is None or isinstance(output, (Tensor, Mapping, WeightedLoss))):
        raise ConfigurationError(
            f"training_step returned {described(output)} under manual optimization. Return a tensor, a dictionary, or "
            "None."
        )


def cannot_be_differentiated(loss: Tensor, module: nn.Module | None = None) -> str | None:
    """Return why ``loss.backward()`` has failed, and what to change; ``None`` if ``loss`` is not the cause."""
    if loss.numel() != 1:
        return (
            f"training_step returned a loss of shape {tuple(loss.shape)}, and only one number can be differentiated. "
            "Reduce it first, for example with loss.mean()."
        )
    if not loss.requires_grad:
        if module is not None and not any(parameter.requires_grad for parameter in module.parameters()):
            return (
                f"No parameter of {type(module).__name__} requires a gradient, so there is nothing to train. Leave out "
                "requires_grad_(False) or freeze() for the part that is to be trained."
            )
        return (
            f"training_step returned a loss that depends on no parameter that requires a gradient: {shown(loss)}. "
            "Compute it from the module's output, without detach(), item(), numpy() or torch.no_grad() on the way."
        )
    return None


def outputs_for_hooks(output: Any) -> dict[str, Any]:
    """Return the argument ``outputs`` of ``on_train_batch_end``: the step's unscaled loss and other entries, all
    detached.

    If the step returned ``None``, the result is an empty dictionary.
    """
    if output is None:
        return {}
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, WeightedLoss):
        return {"loss": output.loss.detach(), "weight": output.weight}
    extras: dict[str, Any] = dict(output)
    loss = extras.pop("loss", None)  # a loss is optional in manual optimization
    return {**outputs_for_hooks(loss), **detach(extras)}
