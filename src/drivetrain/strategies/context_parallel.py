"""Split sequences over ranks, and compute attention over the complete sequences.

Each rank of a context-parallel group computes on a part of every sequence. Only attention needs the parts of other
ranks. Before attention, an exchange gives each rank complete sequences for some of the heads (arXiv 2309.14509,
"Ulysses"). Each rank then computes plain attention for these heads. A second exchange gives each rank the results for
its own positions. With "ring", torch's ring attention replaces both exchanges. A module calls :func:`attention`,
:func:`positions` and :func:`gather`. In a run that does not split sequences, these functions work on complete
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.packages import device_mesh, ring
from drivetrain.base.torch_private import keep_order_in_ring
from drivetrain.base.tree import like_list, like_mapping, map_leaves
from drivetrain.errors import ConfigurationError, check_count, described, did_you_mean, unknown_value
from drivetrain.strategies.collectives import with_gradient
from drivetrain.strategies.group import Group

Kind = Literal["ulysses", "ring"]
CONTEXT = "context_parallel"
Part = Callable[[Tensor, int], Tensor]
Dims = int | Mapping[Any, int] | Callable[[Any, Part], Any]
"""The type of ``ModelParallelStrategy(sequence_dims=...)``: the dimensions along which a batch's tensors are sequences.
"""


@dataclass(frozen=True)
class Context:
    """The ranks among which a run splits sequences.

    Attributes:
        group: these ranks; the first rank has the first part of each sequence.
        kind: how attention exchanges the parts, "ulysses" or "ring".
    """

    group: Group
    kind: str = "ulysses"
    _open: ExitStack = field(default_factory=ExitStack)

    def enter(self, device: torch.device) -> None:
        """Let the functions of this module use this context.

        Raises:
            ConfigurationError: torch has no ring attention for the device.
        """
        leave_all()
        if self.kind == "ring":
            self._open.enter_context(_ring(self.group.handle, self.group.size, device))
        _ENTERED.append(self)


_ENTERED: list[Context] = []  # the context of the current run; empty if the run does not split sequences


def leave_all() -> None:
    """Undo :meth:`Context.enter`."""
    while _ENTERED:
        _ENTERED.pop()._open.close()


# ---- for modules -----------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of ``torch.nn.functional.scaled_dot_product_attention``, for this rank's part of the sequences.

    Args:
        query, key, value: this rank's parts, (batch, heads, positions of this rank, features).
        attn_mask: a mask for complete sequences, (..., positions, positions). Every rank must pass the complete mask.
            The mask has one head, or as many heads as ``query``.
        dropout_p, is_causal, scale, enable_gqa: as in torch's function; a causal mask applies to complete sequences.

    Raises:
        ConfigurationError: the number of heads is not divisible by the number of ranks, or the mask does not cover
            complete sequences.
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    context = _ENTERED[-1] if _ENTERED else None
    if context is None or context.group.size == 1 or context.kind == "ring":
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    size, handle, heads = context.group.size, context.group.handle, query.shape[1]
    key, value = (_with_heads_for(size, each, heads, enable_gqa) for each in (key, value))
    to_heads, to_positions = (partial(_exchange, handle=handle, split_dim=a, join_dim=b) for a, b in ((1, 2), (2, 1)))
    query, key, value = (with_gradient(each, to_heads, to_positions) for each in (query, key, value))
    if attn_mask is not None:
        attn_mask = _own_heads(attn_mask, heads, (query.shape[2], key.shape[2]), context.group)
    found = F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    return with_gradient(found, to_positions, to_heads)


def positions(length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of this rank's part in the complete sequences; ``length`` is the length of the part."""
    first = length * _ENTERED[-1].group.index if _ENTERED else 0
    return torch.arange(first, first + length, device=device)


def gather(tensor: Tensor, dim: int) -> Tensor:
    """Join the parts of all ranks, and return the complete sequences. Gradients flow back to the parts."""
    if not _ENTERED:
        return tensor
    return torch.cat(list(_ENTERED[-1].group.all_gather(tensor, sync_grads=tensor.requires_grad)), dim)


def part(tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's part of complete sequences.

    Raises:
        ConfigurationError: the length is not divisible by the number of ranks.
    """
    if not _ENTERED:
        return tensor
    group = _ENTERED[-1].group
    if tensor.shape[dim] % group.size:
        raise ConfigurationError(
            f"A tensor of shape {tuple(tensor.shape)} cannot be split into {group.size} parts along dimension {dim}. "
            f"Pad sequences to a multiple of {group.size} in collate_fn, and return a WeightedLoss with the number of "
            "tokens that count."
        )
    share = tensor.shape[dim] // group.size
    return tensor.narrow(dim, share * group.index, share).contiguous()


# ---- arguments of a strategy -----------------------------------------------------------------------------------------


def check_arguments(owner: str, size: int, dims: Dims | None, kind: str) -> None:
    """Check ``context_parallel_size``, ``sequence_dims`` and ``context_parallel_attention`` of the strategy ``owner``.

    Raises:
        ConfigurationError: an argument is wrong, or two arguments contradict each other.
    """
    check_count(owner, f"{CONTEXT}_size", size, lowest=1)
    if kind not in get_args(Kind):
        raise unknown_value(owner, f"{CONTEXT}_attention", kind, get_args(Kind))
    if dims is not None and size == 1:
        raise ConfigurationError(
            f"{owner}(sequence_dims=...) splits sequences over the ranks of a context-parallel group, and "
            f"{CONTEXT}_size is 1. Write both, or none."
        )


def dims_for(module: nn.Module, given: Dims | None, owner: str) -> Dims:
    """Return the dimensions along which a batch's tensors are sequences: ``given``, or the module's attribute
    ``sequence_dims`` if ``given`` is ``None``. ``owner`` is the strategy's name, for the error message.

    Raises:
        ConfigurationError: neither the argument nor the attribute names the dimensions.
    """
    dims: Dims | None = getattr(module, "sequence_dims", None) if given is None else given
    if dims is None:
        raise ConfigurationError(
            f"{owner} splits sequences, but the dimensions that are sequences are unknown. Write "
            'sequence_dims={"input_ids": 1, "labels": 1} with the fields of a batch, or set sequence_dims in '
            f"{type(module).__name__}."
        )
    return dims


# ---- batches ---------------------------------------------------------------------------------------------------------


def split(batch: Any, dims: Dims) -> Any:
    """Return ``batch`` with only this rank's part of each sequence.

    Raises:
        ConfigurationError: the batch has no entry named in ``dims``, or a length is not divisible by the number of
            ranks.
    """
    if callable(dims):
        return dims(batch, part)
    if isinstance(dims, Mapping):
        return _split_fields(batch, dims)
    done: list[Tensor] = []

    def split_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not -leaf.dim() <= dims < leaf.dim():
            return leaf
        done.append(leaf)
        return part(leaf, dims)

    found = map_leaves(split_leaf, batch)
    if not done:
        raise ConfigurationError(
            f"sequence_dims={dims}, and no tensor of the batch, {described(batch)}, has this dimension. Write the "
            'dimension for each field, such as {"input_ids": 1}.'
        )
    return found


def _split_fields(batch: Any, dims: Mapping[Any, int]) -> Any:
    if isinstance(batch, MutableMapping):
        found = dict(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        found = dict(zip(getattr(batch, "_fields", range(len(batch))), batch, strict=True))
    else:
        raise ConfigurationError(
            f"sequence_dims names fields, and the batch is {described(batch)}. Pass a function, which gets the batch "
            "and part(tensor, dim)."
        )
    for name, dim in dims.items():
        if not isinstance(found.get(name), Tensor):
            raise ConfigurationError(
                f"sequence_dims names the field {name!r}, and the batch has no such tensor. "
                f"{did_you_mean(str(name), map(str, found))}"
            )
        found[name] = part(found[name], dim)
    return like_mapping(batch, found) if isinstance(batch, Mapping) else like_list(batch, list(found.values()))


# ---- the exchange ----------------------------------------------------------------------------------------------------


def _exchange(tensor: Tensor, handle: Any, split_dim: int, join_dim: int) -> Tensor:
    """All-to-all exchange.

    Each rank splits a tensor along ``split_dim``, and sends one slice to each rank. Each rank then joins the received
    slices along ``join_dim``.
    """
    cut: Tensor = tensor.unflatten(split_dim, (dist.get_world_size(handle), -1))  # type: ignore[no-untyped-call]
    given = cut.movedim(split_dim, 0).contiguous()
    got = torch.empty_like(given)
    dist.all_to_all_single(got, given, group=handle)
    return got.movedim(0, join_dim).flatten(join_dim, join_dim + 1)


def _with_heads_for(size: int, tensor: Tensor, heads: int, enable_gqa: bool) -> Tensor:
    """Return ``tensor`` (keys or values), with heads repeated until their number is divisible by ``size``."""
    own = tensor.shape[1]
    if heads % size:
        raise ConfigurationError(
            f"context_parallel.attention exchanges heads for positions, and {heads} heads cannot be divided among "
            f"{size} processes. Write a context_parallel_size that divides {heads}."
        )
    if own % size == 0:
        return tensor
    if not enable_gqa or heads % own:
        raise ConfigurationError(
            f"context_parallel.attention got {heads} heads of queries and {own} of keys and values, which {size} "
            "processes cannot divide. Pass enable_gqa=True if queries share them, or repeat them."
        )
    times = size // math.gcd(own, size)
    return tensor.repeat_interleave(times if heads % (own * times) == 0 else heads // own, dim=1)


def _own_heads(mask: Tensor, heads: int, lengths: tuple[int, int], group: Group) -> Tensor:
    """Return the part of ``mask`` for the heads of this rank."""
    if any(have not in (1, want) for have, want in zip(mask.shape[-2:], lengths, strict=True)):
        raise ConfigurationError(
            f"context_parallel.attention got a mask of shape {tuple(mask.shape)}, and complete sequences have "
            f"{lengths[0]} positions. Leave the mask out of sequence_dims, so that each process has it complete."
        )
    if mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    share = heads // group.size
    return mask.narrow(-3, share * group.index, share)


def _ring(handle: Any, size: int, device: torch.device) -> Any:
    """Return a context in which torch's ring attention replaces plain attention. The parts of a sequence remain in the
    order of ranks.

    Raises:
        ConfigurationError: torch has no ring attention for this device.
    """
    if device == HOST:
        raise ConfigurationError(
            'context_parallel_attention="ring": torch has ring attention for devices with flash or memory-efficient '
            f'attention, and no rule for it on {device.type!r}. Write context_parallel_attention="ulysses".'
        )

    keep_order_in_ring()
    buffer = torch.zeros(size, device=device)  # torch requires at least one buffer to split
    mesh = device_mesh.DeviceMesh.from_group(handle, device.type)
    return ring.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})
