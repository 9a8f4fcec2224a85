"""Split a batch into parts for several devices, and join the outputs of the parts.

A batch may be nested: see :mod:`drivetrain.base.tree`. The size of a batch is the length of its first tensor along the
first dimension. Every tensor with dimensions must have this length, and is split along the first dimension. A list of
strings, numbers or other plain objects is also split if the list has this length. Tensors without dimensions and all
other values go to every part, unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.tree import Movable, like_dataclass, like_list, like_mapping
from drivetrain.errors import ConfigurationError, described


def split_batch(batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
    """Split ``batch`` over ``devices``; return the parts, each on its device, and the number of samples in each part.

    If the batch cannot be split evenly, the first parts have one more sample than the other parts. A batch with fewer
    samples than devices is split into parts of one sample.

    Raises:
        ConfigurationError: a value in the batch cannot be split.
    """
    samples = next(_lengths(batch), None)
    if samples is None:
        raise ConfigurationError(
            f"A batch is split over {len(devices)} devices, and {described(batch)} has no tensor with dimensions. Use "
            "plain tensors, or override split_batch in a subclass of the strategy."
        )
    count = max(1, min(len(devices), samples))
    each, more = divmod(samples, count)
    sizes = [each + (index < more) for index in range(count)]
    return list(_split(batch, sizes, devices[:count])), sizes


def samples_in(batch: Any) -> int:
    """Return the number of samples in ``batch``, or 1 if the batch contains no tensor or list with a length."""
    return next(_lengths(batch), 1)


def _lengths(batch: Any) -> Iterator[int]:
    """Yield the length of each tensor that has dimensions, and then the length of each list of plain objects."""
    leaves = list(_leaves(batch))
    yield from (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
    yield from (len(leaf) for leaf in leaves if _is_plain_list(leaf))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif _is_list(tree) and not _is_plain_list(tree):
        for value in tree:
            yield from _leaves(value)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _leaves(getattr(tree, field.name))
    else:
        yield tree


def _split(tree: Any, sizes: Sequence[int], devices: Sequence[torch.device]) -> Sequence[Any]:
    """Return the part of ``tree`` for each device."""
    count, samples = len(devices), sum(sizes)
    if isinstance(tree, Tensor):
        if tree.ndim and tree.shape[0] != samples:
            raise ConfigurationError(
                f"A batch of {samples} samples is split along its first dimension over {count} devices, and it has a "
                f"tensor of shape {tuple(tree.shape)}. Give all its tensors the length {samples}, keep what all "
                "samples share in the module, or override split_batch in a subclass of the strategy."
            )
        parts: Sequence[Tensor] = tree.split(list(sizes)) if tree.ndim else [tree] * count  # type: ignore[no-untyped-call]
        return [part.to(device, non_blocking=True) for part, device in zip(parts, devices, strict=True)]
    if isinstance(tree, Mapping):
        split_values = {key: _split(value, sizes, devices) for key, value in tree.items()}
        return [like_mapping(tree, {key: parts[i] for key, parts in split_values.items()}) for i in range(count)]
    if _is_list(tree):
        if len(tree) == samples and _is_plain_list(tree):
            starts = [sum(sizes[:index]) for index in range(count)]
            return [like_list(tree, tree[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        split_items = [_split(item, sizes, devices) for item in tree]
        return [like_list(tree, [parts[i] for parts in split_items]) for i in range(count)]
    if _is_dataclass(tree):
        fields = {field.name: _split(getattr(tree, field.name), sizes, devices) for field in dataclasses.fields(tree)}
        return [like_dataclass(tree, {name: parts[i] for name, parts in fields.items()}) for i in range(count)]
    if isinstance(tree, Movable) and not isinstance(tree, type):
        raise ConfigurationError(
            f"A batch is split over {count} devices, and it holds a {type(tree).__name__}, which cannot be split. Use "
            "plain tensors, or override split_batch in a subclass of the strategy."
        )
    return [tree] * count


class Joiner:
    """Joins the outputs of the parts into one output.

    Args:
        sizes: the number of samples in each part.
        device: the device of the joined output.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes = sizes
        self._device = device

    # ---- for hooks such as training_step_end ---------------------------------------------------------------------

    def gathered(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the parts into one tree. Tensors are concatenated. Numbers and tensors without dimensions
        become a tensor with one element per part.

        Other values become a list with one item for each part. If all parts return ``None``, the result is ``None``.
        """
        first = outputs[0]
        if isinstance(first, Mapping) and all(
            isinstance(each, Mapping) and set(each) == set(first) for each in outputs
        ):
            return like_mapping(first, {key: self.gathered([each[key] for each in outputs]) for key in first})
        if _is_list(first) and all(_is_list(each) and len(each) == len(first) for each in outputs):
            return like_list(first, [self.gathered(items) for items in zip(*outputs, strict=True)])
        if all(each is None for each in outputs):
            return None
        if all(isinstance(each, (Tensor, int, float)) for each in outputs):
            tensors = [torch.as_tensor(each) for each in outputs]
            return torch.cat([each.to(self._device, non_blocking=True).reshape(each.shape or (1,)) for each in tensors])
        return list(outputs)

    # ---- for steps without a hook --------------------------------------------------------------------------------

    def joined(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the parts into the output for the complete batch. Numbers in the outputs must be means
        over samples.

        Numbers and tensors with one element are averaged, weighted by the numbers of samples. Other tensors, and lists
        with an item for each sample, are concatenated. Parts that return ``None`` are left out.
        """
        if len(outputs) == 1:
            return outputs[0]
        present = [index for index, output in enumerate(outputs) if output is not None]
        if len(present) < len(outputs):
            joiner = Joiner([self._sizes[index] for index in present], self._device)
            return joiner.joined([outputs[index] for index in present]) if present else None
        if all(_is_weighted(output) for output in outputs):
            return self._weighted(outputs)
        if isinstance(outputs[0], Mapping) and all(isinstance(output, Mapping) for output in outputs):
            keys = [key for key in outputs[0] if all(key in output for output in outputs)]
            return like_mapping(outputs[0], {key: self.joined([output[key] for output in outputs]) for key in keys})
        if _is_list(outputs[0]) and all(_is_list(output) for output in outputs):
            if all(_is_per_sample(output, size) for output, size in zip(outputs, self._sizes, strict=True)):
                return like_list(outputs[0], [item for output in outputs for item in output])
            if len({len(output) for output in outputs}) == 1:
                return like_list(outputs[0], [self.joined(items) for items in zip(*outputs, strict=True)])
        return self._join_leaves(outputs)

    def _join_leaves(self, leaves: Sequence[Any]) -> Any:
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            moved = [leaf.to(self._device, non_blocking=True) for leaf in leaves]
            if all(leaf.ndim and len(leaf) == size for leaf, size in zip(leaves, self._sizes, strict=True)):
                return torch.cat(moved)
            return self._mean(moved) if all(leaf.numel() == 1 for leaf in leaves) else torch.cat(moved)
        if all(isinstance(leaf, (int, float)) and not isinstance(leaf, bool) for leaf in leaves):
            if all(leaf == leaves[0] for leaf in leaves):
                return leaves[0]
            return sum(leaf * size for leaf, size in zip(leaves, self._sizes, strict=True)) / sum(self._sizes)
        return leaves[0] if all(leaf is leaves[0] for leaf in leaves) else list(leaves)

    def _mean(self, values: Sequence[Tensor]) -> Tensor:
        total = sum(self._sizes)
        parts = [value * (size / total) for value, size in zip(values, self._sizes, strict=True)]
        return functools.reduce(torch.add, parts)

    def _weighted(self, outputs: Sequence[Any]) -> Any:
        """Return the weighted mean of the losses, and the sum of the weights."""
        losses = [loss.to(self._device, non_blocking=True) for loss, _ in outputs]
        weights = [
            weight.detach().reshape(()).to(self._device, non_blocking=True) if isinstance(weight, Tensor) else weight
            for _, weight in outputs
        ]
        counted = [index for index, weight in enumerate(weights) if isinstance(weight, Tensor) or weight]
        if counted:  # leave out losses of weight 0, because such a loss may be NaN
            losses, weights = [losses[index] for index in counted], [weights[index] for index in counted]
        total: Any = functools.reduce(lambda one, other: one + other, weights)
        if isinstance(total, Tensor):
            unit: Any = total.to(torch.promote_types(losses[0].dtype, torch.float32))
            unit = unit.clamp(min=torch.finfo(unit.dtype).tiny)
        else:
            unit = total or 1
        loss = functools.reduce(
            torch.add, [loss * (weight / unit) for loss, weight in zip(losses, weights, strict=True)]
        )
        return type(outputs[0])(loss, total)


def _is_list(tree: Any) -> bool:
    return isinstance(tree, (list, tuple)) and not hasattr(tree, "to")  # a PackedSequence has its own method ``to``


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not hasattr(tree, "to")


def _is_plain(item: Any) -> bool:
    return not (isinstance(item, (Tensor, Mapping, Movable)) or _is_list(item) or _is_dataclass(item))


def _is_plain_list(tree: Any) -> bool:
    """Whether ``tree`` is a list or tuple of plain objects, such as the strings that a loader collates."""
    return _is_list(tree) and len(tree) > 0 and not hasattr(tree, "_fields") and all(_is_plain(item) for item in tree)


def _is_per_sample(items: Any, size: int) -> bool:
    """Whether ``items`` is a list with one item per sample. A list with a scalar tensor or a tensor of length ``size``
    does not count, because these tensors describe all samples.
    """
    if type(items) is not list or len(items) != size:
        return False
    return not any(isinstance(each, Tensor) and (each.ndim == 0 or len(each) == size) for each in items)


def _is_weighted(output: Any) -> bool:
    """Whether ``output`` is a ``WeightedLoss``. ``WeightedLoss`` belongs to a higher layer, so this module must not
    import the class.
    """
    return getattr(output, "_fields", None) == ("loss", "weight") and isinstance(output.loss, Tensor)
