"""Collectives over torch.distributed: gather, broadcast, reduce, barrier, decisions.

Before each operation, the ranks exchange one small message of fixed size that describes the operation. If the
operations, shapes or names differ, every rank raises the same error, and no rank waits forever. If the group has a
backend for the host ("cpu:gloo,cuda:nccl"), the message is exchanged in host memory. Without such a backend, the
exchange waits for the device. If a rank calls no collective at all, the other ranks wait until the group's timeout. The
message makes ``all_gather`` and ``reduce`` several times slower, so ``Peers.checks`` can turn it off for them. Without
the message, ranks that call different operations hang or get wrong values, as with torch's own collectives.

:class:`drivetrain.strategies.group.TorchGroup` calls these functions. ``peers`` are the ranks that take part. If the
group's backends do not support a tensor's device, the exchange uses a copy of the tensor on the peers' device or on the
host. The result is then copied to the device of the input. Ranks are always global ranks.

Objects are pickled. A rank unpickles only data from other ranks of the same job. Unpickling can run code. A process
that can send data to the group can therefore run code in the ranks, as with torch's own object collectives.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import ConfigurationError, UnknownNameError, described, did_you_mean, shown
from drivetrain.strategies.peers import CURES, Peers, as_bytes, differing_names, dumped, loaded, nearest

_OPERATIONS = {"avg": "mean", "prod": "product"}
_BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor
}  # fmt: skip
_CONSTANTS = (type(None), bool, int, float, str)
_SMALL = 4096  # bytes; objects up to this size are not exchanged if they are equal on all ranks
_KNOWN = ["mean", "avg", "sum", "min", "max", "product", "prod"]
_TORCHS = ["avg", "sum", "min", "max", "product", *_BITWISE]

Exchange = Callable[[Tensor], Tensor]


# ---- the functions ---------------------------------------------------------------------------------------------------


def all_gather(peers: Peers, tensor: Tensor, sync_grads: bool = False) -> Tensor:
    """Return every rank's tensor, stacked in the order of ranks.

    Args:
        peers: the participating ranks.
        tensor: any shape and dtype, equal on every rank; a scalar tensor gives ``(world_size,)``.
        sync_grads: let gradients flow back. The gradient of ``tensor`` is the sum of all ranks' gradients for its slice
            of the result. Every rank must run the backward pass. With ``sync_grads=False`` the result is detached.

    Returns:
        ``(world_size, *tensor.shape)``.

    Raises:
        ConfigurationError: on every rank, if shapes, dtypes or ``sync_grads`` differ between ranks.
    """
    problem = _unsendable(tensor)
    with_gradients = problem is None and sync_grads and tensor.requires_grad and torch.is_grad_enabled()
    peers.agree_on_tensor("" if problem else f"{_kind(tensor)}{', with gradients' * with_gradients}", problem)
    if with_gradients:
        return with_gradient(tensor, partial(_stacked, peers=peers), partial(_own_sum, peers=peers))
    return _stacked(tensor.detach(), peers)


def broadcast(peers: Peers, obj: Any, src: int = 0) -> Any:
    """Return rank ``src``'s ``obj`` on every rank.

    Args:
        peers: the participating ranks.
        obj: on rank ``src``, a tensor or any picklable object; ignored on the other ranks.
        src: the source rank; as in torch, a *global* rank even inside a group.

    Returns:
        Rank ``src`` gets ``obj`` itself, all other ranks get a copy. The copy of a tensor has the same shape, dtype and
        ``requires_grad``, and is a leaf.

    Raises:
        ConfigurationError: on every rank, if ranks name different sources, the source is not in the group, or the
            object cannot be pickled.
    """
    data, problem = b"", None
    form: Any = None
    if src not in peers.ranks:
        problem = f"src={shown(src)}, which is not among the group's global ranks {peers.ranks}"
    elif src == peers.rank:
        plain = type(obj) is Tensor and _unsendable(obj) is None
        form = (obj.shape, obj.dtype, obj.requires_grad, obj.device.type) if plain else None
        data, problem = dumped((form, None if plain else obj))
    [(_, size), _] = peers.agree(problem or f"src={src}", len(data), failed=problem is not None)
    packed = peers.send(_padded(data, size), src)
    if src == peers.rank:
        if form is not None:
            peers.send(_bytes(obj.detach()), src)
        return obj
    form, received = loaded(as_bytes(packed), peers.device)
    if form is None:
        return received
    shape, dtype, requires_grad, kind = form
    values = torch.empty(shape, dtype=dtype, device=nearest(kind, peers.device))
    return _unpacked(peers.send(_bytes(values), src), dtype, shape).requires_grad_(requires_grad)


def reduce(peers: Peers, tensor: Any, reduce_op: Any = "mean") -> Any:
    """Return the element-wise reduction of all ranks' tensors. A value that is no tensor is returned unchanged.

    Sums are computed in a wider dtype to keep precision: float64 for float32, float32 for 16-bit types, int64 for
    integers. A mean is this sum divided by the number of ranks. The mean of integers or booleans is float64: the mean
    of 1 and 2 is 1.5. Sums and products of integers or booleans are int64, as in torch. All other results have the
    input's dtype. NaN on one rank makes the result NaN on all ranks.

    Args:
        peers: the participating ranks.
        tensor: the same shape and dtype on every rank. ``tensor`` is not changed. The result is detached.
        reduce_op: "mean" (or "avg"), "sum", "min", "max", "product" (or "prod"), or torch's ``ReduceOp`` for one of
            these or for a bitwise operation; ``None``: the mean.

    Returns:
        The result, the same on every rank.

    Raises:
        UnknownNameError: the operation is unknown.
        ConfigurationError: on every rank, if tensors or operations differ, or the dtype does not support the operation.
    """
    operation = operation_of(reduce_op)
    if not isinstance(tensor, Tensor):
        return tensor
    problem = _unsendable(tensor) or _irreducible(tensor, operation)
    peers.agree_on_tensor(f"{operation} of {_kind(tensor)}", problem)
    return _reduced(tensor.detach(), operation, peers)


def barrier(peers: Peers, name: str | None = None) -> None:
    """Wait until every rank of the group has called this function.

    Args:
        peers: the participating ranks.
        name: a name that the error message shows if ranks wait at different barriers.

    Raises:
        ConfigurationError: on every rank, if the ranks wait at barriers of different names or call different functions.
    """
    peers.agree("" if name is None else repr(name))


def reduce_boolean_decision(peers: Peers, decision: bool, all: bool = True) -> bool:
    """Return whether every rank passes True. With ``all=False``, return whether at least one rank passes True.

    Raises:
        ConfigurationError: on every rank, if the ranks' values of ``all`` differ.
    """
    [(least, most), _] = peers.agree(f"all={all}", int(bool(decision)))
    return bool(least if all else most)


def gather_keyed(peers: Peers, names: Sequence[str], values: Tensor) -> Tensor:
    """Check that all ranks pass the same ``names``. Return the ``values`` of every rank.

    The ranks first compare the names in a message of fixed size, and then exchange all numbers. The numbers are not
    reduced, because the caller may need an exact reduction of sums and counts.

    Args:
        peers: the participating ranks.
        names: the name of each number, in order; several numbers may have the same name.
        values: ``(n,)``, the same length and dtype on every rank. Should be float64 if the device supports float64.

    Returns:
        ``(world_size, n)``, on the device of ``values``.

    Raises:
        ConfigurationError: on every rank, if names or lengths differ; the message shows the differing names.
    """
    _agree_on_names(peers, names, _kind(values), values.ndim != 1)
    return _stacked(values.detach(), peers)


def reduce_keyed(peers: Peers, names: Sequence[str], sums: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Check that all ranks pass the same ``names``. Return the element-wise sum of all ranks' ``sums`` and the
    element-wise maximum of all ranks' ``most``. NaN on one rank makes the result NaN on all ranks.

    The size of the exchange does not depend on the number of ranks. Arguments and errors: see :func:`gather_keyed`.
    """
    _agree_on_names(peers, names, f"{_kind(sums)}, {_kind(most)}", sums.ndim != 1 or most.ndim != 1)
    largest = _reduced(most.detach(), "max", peers) if most.numel() else most.detach()
    return _reduced(sums.detach(), "sum", peers), largest


def _agree_on_names(peers: Peers, names: Sequence[str], kinds: str, wrong: bool) -> None:
    rows, _ = peers.meet(f"{len(names)} names, {kinds}", failed=wrong, also="\0".join(names))
    if len({row.digest for row in rows}) > 1 and builtins.all(row.call == peers.call for row in rows):
        each = gather_objects(peers, list(names))  # on every rank, because ``rows`` are equal on all ranks
        if any(other != each[0] for other in each):
            raise ConfigurationError(differing_names(each, peers.ranks))
    peers.check(rows)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def as_tensor(leaf: Any, device: torch.device, reduce_op: Any = "max") -> Any:
    """Return a number or a numpy array as a tensor on ``device``; return any other value unchanged.

    Args:
        leaf: any value. An int becomes int64; a float becomes float64, or float32 on a device without float64.
        device: the device of this rank.
        reduce_op: the reduction that the caller will apply. The tensor already has the dtype of the reduction's result:
            a float for a mean of integers, int64 for a sum of integers. A single process, which reduces nothing,
            therefore gets the same dtype.

    Raises:
        UnknownNameError: the operation is unknown.
    """
    numpy = sys.modules.get("numpy")  # numpy is optional; no value has a numpy type before numpy is imported
    if numpy is not None and isinstance(leaf, (numpy.generic, numpy.ndarray)):
        if leaf.dtype.kind not in "biufc":
            return leaf
        tensor = torch.tensor(leaf, device=device)
    elif isinstance(leaf, (int, float, complex)):
        floating = {float: _float64(device), complex: _wide(torch.complex64, device)}
        dtype = next((dtype for kind, dtype in floating.items() if isinstance(leaf, kind)), None)
        tensor = torch.tensor(leaf, dtype=dtype, device=device)
    else:
        return leaf
    operation = operation_of(reduce_op)
    if tensor.is_floating_point() or tensor.is_complex() or operation in ("min", "max", *_BITWISE):
        return tensor
    return tensor.to(_float64(device) if operation == "mean" else torch.int64)


# ---- tensors ---------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """Autograd function of a linear exchange. The backward pass runs ``transpose``. The backward pass of ``transpose``
    runs ``exchange``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange, transpose: Exchange) -> Tensor:
        ctx.backward = transpose, exchange
        return exchange(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return with_gradient(gradients[0], *ctx.backward), None, None


def with_gradient(tensor: Tensor, exchange: Exchange, transpose: Exchange) -> Tensor:
    """Return ``exchange(tensor)``. The backward pass calls ``transpose`` with the gradient; every rank must run the
    backward pass.
    """
    return _Linear.apply(tensor, exchange, transpose)  # type: ignore[no-untyped-call]


def _own_sum(stack: Tensor, peers: Peers) -> Tensor:
    """Sum ``stack`` over the ranks, and return this rank's slice. This is the transpose of :func:`_stacked`."""
    return _reduced(stack, "sum", peers)[peers.ranks.index(peers.rank)].clone()


def _stacked(tensor: Tensor, peers: Peers) -> Tensor:
    rows = peers.gather(_bytes(tensor)).to(tensor.device)  # sent as bytes, so that every dtype works
    return _unpacked(rows, tensor.dtype, (len(peers.ranks), *tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor with one element may have any stride, but view(torch.uint8) requires the stride 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _unpacked(packed: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return packed.view(dtype).view(shape) if packed.numel() else packed.new_empty(shape, dtype=dtype)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _unsendable(tensor: Any) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"{described(tensor)}, which is not a tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"a tensor that is no dense block of numbers ({tensor.layout}, on {tensor.device})"
    return None


def operation_of(reduce_op: Any) -> str:
    """Return the name of a reduction. ``reduce_op`` is a name or a ``ReduceOp`` of torch.

    Raises:
        UnknownNameError: the operation is unknown.
    """
    if reduce_op is None:
        return "mean"
    name = reduce_op.lower() if isinstance(reduce_op, str) and reduce_op.lower() in _KNOWN else ""
    if dist.is_available() and isinstance(reduce_op, dist.ReduceOp):
        name = next((name for name in _TORCHS if reduce_op == getattr(dist.ReduceOp, name.upper())), "")
    if not name:
        raise UnknownNameError(f"reduce(reduce_op={shown(reduce_op)}): unknown. {did_you_mean(str(reduce_op), _KNOWN)}")
    return _OPERATIONS.get(name, name)


def reduction_of(rows: Tensor, reduce_op: Any) -> Tensor:
    """Reduce ``rows`` over their first dimension, with the same precision as :func:`reduce`.

    Raises:
        UnknownNameError: the operation is unknown.
        ConfigurationError: the dtype of ``rows`` does not support the operation.
    """
    operation = operation_of(reduce_op)
    if problem := _irreducible(rows, operation):
        raise ConfigurationError(f"reduce() got {problem}. {CURES['reduce']}")
    return _combined(rows, operation)


def _combined(rows: Tensor, operation: str) -> Tensor:
    if operation in _BITWISE:
        return functools.reduce(_BITWISE[operation], rows.unbind())
    if operation in ("min", "max"):
        return rows.amin(0) if operation == "min" else rows.amax(0)
    wide = rows.to(_wide(rows.dtype, rows.device))
    values = wide.prod(0) if operation == "product" else wide.sum(0)
    return _finished(values, operation, len(rows), rows.dtype, rows.device)


def _finished(values: Tensor, operation: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert ``values``, the reduction of ``count`` tensors in a wider dtype, to the dtype of the result. For a mean,
    first divide by ``count``.
    """
    exact = dtype.is_floating_point or dtype.is_complex or operation in ("min", "max")
    if operation == "mean":
        values = (values if exact else values.to(_float64(device))) / count
    return (values.to(dtype) if exact else values).to(device)


def _irreducible(tensor: Tensor, operation: str) -> str | None:
    fraction = tensor.is_floating_point() or tensor.is_complex()
    unordered = tensor.is_complex() and operation in ("min", "max")
    if tensor.dtype is torch.uint64 or unordered or (fraction and operation in _BITWISE):
        return f"{operation} of {_kind(tensor)}, a type that has no such operation"
    return None


def _reduced(tensor: Tensor, operation: str, peers: Peers) -> Any:
    """Reduce a tensor over the ranks. The caller must have checked that all ranks make the same call."""
    dtype, home = tensor.dtype, tensor.device
    if operation in _BITWISE:
        return _combined(_stacked(tensor, peers), operation)
    values = tensor.to(peers.wire(home)).to(_wide(dtype, home), copy=True, memory_format=torch.contiguous_format)
    if dtype.is_complex and operation == "product":
        values = _stacked(values, peers).prod(0)  # on the device of the exchange: the input's may not support prod()
    elif dtype.is_complex:
        values = torch.view_as_complex(peers.all_reduce(torch.view_as_real(values), dist.ReduceOp.SUM))
    elif operation in ("min", "max") and dtype.is_floating_point:
        values = _extreme(values, operation, peers)
    else:
        name = "SUM" if operation == "mean" else operation.upper()
        values = peers.all_reduce(values, getattr(dist.ReduceOp, name))
    return _finished(values, operation, len(peers.ranks), dtype, home)


def _wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a dtype that is wide enough for sums of ``dtype`` and that ``device`` supports."""
    if dtype.is_complex:
        return torch.complex128 if _float64(device) is torch.float64 else torch.complex64
    if not dtype.is_floating_point:
        return torch.int64
    return _float64(device) if dtype.itemsize >= 4 else torch.float32


@functools.cache
def _float64(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if creating a float64 tensor on the device fails."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def _extreme(values: Tensor, operation: str, peers: Peers) -> Tensor:
    """Return the element-wise minimum or maximum of all ranks' values. Different backends treat NaN differently, so a
    mask of the NaNs is reduced separately.
    """
    sign = 1.0 if operation == "max" else -1.0
    nan = values.isnan()
    both = torch.stack([values.masked_fill(nan, 0.0), nan.to(values.dtype) * sign])
    extreme, flags = peers.all_reduce(both, getattr(dist.ReduceOp, operation.upper())).unbind()
    return extreme.masked_fill(flags != 0, torch.nan)


# ---- objects ---------------------------------------------------------------------------------------------------------


def gather_objects(peers: Peers, obj: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. This rank's own object is ``obj`` itself, not a copy.

    Args:
        peers: the participating ranks.
        obj: any picklable object.

    Raises:
        ConfigurationError: on every rank, if a rank's object cannot be pickled.
    """
    data, problem = dumped(obj)
    # If ``content`` is equal on all ranks, all objects are small and equal. No object needs to be exchanged.
    content = int.from_bytes(hashlib.sha256(data).digest()[:7], "big") if len(data) <= _SMALL else peers.rank
    (least, size), (low, high) = peers.agree(problem or "", len(data), content, failed=problem is not None)
    if least == size <= _SMALL and low == high:
        if isinstance(obj, _CONSTANTS) or (type(obj) is tuple and builtins.all(isinstance(x, _CONSTANTS) for x in obj)):
            return [obj] * len(peers.ranks)
        return [obj if rank == peers.rank else loaded(data, peers.device) for rank in peers.ranks]
    rows = zip(peers.ranks, peers.gather(_padded(len(data).to_bytes(8, "big") + data, 8 + size)), strict=True)
    return [obj if rank == peers.rank else loaded(_after_length(as_bytes(row)), peers.device) for rank, row in rows]


def _after_length(packed: bytearray) -> bytearray:
    return packed[8 : 8 + int.from_bytes(packed[:8], "big")]


def _padded(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
