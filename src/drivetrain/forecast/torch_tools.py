"""Functions for a plan that use or patch torch's internals. A plan also works if the installed torch lacks one of the
internals.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.base import torch_private
from drivetrain.base.packages import device_mesh
from drivetrain.base.torch_private import number_of_node, operation_name


def fake_mode() -> AbstractContextManager[Any]:
    """Return a context in which operations only compute shapes. Operations also accept real tensors in this context."""
    return torch_private.FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Whether ``tensor`` is a fake tensor, which has a shape and no values."""
    return isinstance(tensor, torch_private.FakeTensor)


def hide_devices() -> None:
    """Hide all accelerators from torch in this process. A plan needs no accelerator. A plan forks this process, and a
    fork cannot use an accelerator that this process has already used.
    """
    accelerators = cast("Any", torch.accelerator)
    if (found := accelerators.current_accelerator()) is not None:
        module: Any = torch.get_device_module(found)
        module.is_available, module.device_count = lambda: False, lambda: 0
    accelerators.is_available = lambda: False


def alike(mode: Any, tensor: Tensor) -> Tensor:
    """Return a new fake tensor or parameter with the shape of ``tensor``.

    ``mode.from_tensor`` would keep a weak reference to the new tensor, and ``module.to`` cannot swap a parameter that
    has a weak reference.
    """
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def depends_on_values(func: Any) -> bool:
    """Whether the result of an operator, or its shape, depends on the values of tensors."""
    return not _DEPENDS.isdisjoint(func.tags)


_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def real() -> AbstractContextManager[Any]:
    """Return a context in which no torch mode is active. Tensors are real, and nothing is recorded."""
    return torch_private.without_modes()


def forget_ranks() -> None:
    """Forget the process group of the process from which this process was forked. The group is not destroyed, because
    this fork is not one of its ranks.
    """
    cast("Any", dist).GroupMember.WORLD = None


def keep_meshes_real() -> None:
    """Patch torch's device meshes in this process, so that a mesh's tensor of rank numbers is real even in the fake
    mode.
    """

    def outside(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            with real():
                return function(*args, **options)

        return called

    mesh: Any = device_mesh.DeviceMesh
    mesh.__init__ = outside(mesh.__init__)
    # in other versions of torch, ``mesh`` is an attribute that the constructor sets
    if "mesh" in vars(mesh):
        mesh.mesh = property(outside(mesh.mesh.fget))
    if hasattr(mesh, torch_private.JOIN_MESHES):
        setattr(mesh, torch_private.JOIN_MESHES, staticmethod(outside(getattr(mesh, torch_private.JOIN_MESHES))))
    device_mesh.init_device_mesh = outside(device_mesh.init_device_mesh)


def join_fake_ranks(rank: int, world_size: int, timeout: Any) -> None:
    """Make this process rank ``rank`` of ``world_size`` in a process group that exchanges nothing."""
    store = torch_private.FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size, timeout=timeout)
    _ = torch_private.collectives  # older versions of torch need this import for collectives in FakeTensorMode


def stages_know_shapes(stage: Any) -> None:
    """Patch torch's ``PipelineStage``. Its ranks would communicate to find out whether every rank knows the shapes of
    its stages. A plan always knows these shapes.
    """
    known = SimpleNamespace(item=lambda: 1)
    for name in torch_private.VOTES_OF_A_STAGE:
        setattr(stage, name, lambda own, *args, **options: known)


@contextlib.contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage, int, int], None]) -> Iterator[None]:
    """Context in which ``seen(storage, before, after)`` is called for each storage that is resized in place. ``before``
    and ``after`` are the storage's bytes.
    """
    own = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = own(storage, size)
        seen(storage, before, storage.nbytes())
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # to see it
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]  # as before


@contextlib.contextmanager
def arrays_seen(seen: Callable[[Any, Tensor, bool], Any]) -> Iterator[None]:
    """Context in which ``tensor.numpy(force=force)`` calls ``seen(own, tensor, force)``. The argument ``own`` is
    torch's method.

    A fake tensor without dimensions is formatted as the result of its ``item()``.
    """
    tensors = cast("Any", Tensor)
    numpy, written = tensors.numpy, tensors.__format__

    def as_text(tensor: Tensor, form: str) -> str:
        return format(tensor.item(), form) if is_fake(tensor) and not tensor.ndim else written(tensor, form)

    tensors.numpy, tensors.__format__ = lambda tensor, *, force=False: seen(numpy, tensor, force), as_text
    try:
        yield
    finally:
        del tensors.numpy  # this restores torch's method, which a base class defines
        tensors.__format__ = written


# ---- autocast --------------------------------------------------------------------------------------------------------

_WIDE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar softplus "
    "layer_norm group_norm cosine_similarity nll_loss nll_loss2d kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "binary_cross_entropy_with_logits logsumexp softmax.int log_softmax.int cumsum cumprod sum sum.dim_IntList prod"
)
"""The operations that autocast computes in float32 on accelerators, but not always on the CPU."""


def autocast_as_devices_do() -> Any:
    """Let autocast on the CPU use float32 for the same operations as autocast on accelerators. The change lasts until
    the returned object is freed.
    """
    library: Any = cast("Any", torch.library).Library("aten", "IMPL")
    for name in _WIDE.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        # RuntimeError: this process has already registered the kernel
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about replaced kernels
            library.impl(name, functools.partial(_widened, operator), "AutocastCPU")
    return library


def _widened(operator: Any, *args: Any, **options: Any) -> Any:
    def wide(value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if narrow else value

    with torch.autocast("cpu", enabled=False):
        return operator(*map(wide, args), **{name: wide(value) for name, value in options.items()})


# ---- the forward operation of each backward operation ----------------------------------------------------------------

KNOWS_NODES = None not in (torch_private.running_node, torch_private.newest_node)
"""Whether torch tells which node of the autograd graph is running. If False, a plan does not know the program's lines
for operations of the backward pass.
"""


def running_node() -> int | None:
    """Return the number of the running autograd node, or ``None`` outside of a backward pass."""
    node = torch_private.running_node() if KNOWS_NODES else None
    return None if node is None else number_of_node(node)


def newest_node() -> int:
    """Return the number of the newest autograd node."""
    return int(torch_private.newest_node()) - 1 if KNOWS_NODES else -1


# ---- collectives -----------------------------------------------------------------------------------------------------

_NAMES = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "reduce_": "reduce",
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter", "broadcast_": "broadcast", "broadcast": "broadcast",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all", "send": "send", "recv_": "recv", "isend": "send", "irecv": "recv",
}  # fmt: skip
_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def collective_name(func: Any) -> str | None:
    """Return the name of the collective that the operation ``func`` calls, or ``None``."""
    return _NAMES.get(operation_name(func)) if func.namespace in _SPACES else None


def ranks_of(func: Any, args: Any) -> list[int]:
    """Return the global ranks that take part in a collective."""
    return dist.get_process_group_ranks(torch_private.group_of_collective(func, args))


def largest(tensors: list[Tensor]) -> Tensor | None:
    """Return the tensor with the most bytes: the output of a gather, or the input of a reduce-scatter."""
    return max(tensors, key=lambda each: each.numel() * each.element_size(), default=None)
