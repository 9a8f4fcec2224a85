"""FSDPStrategy's arguments, checked and converted to arguments of torch's ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.base.packages import fsdp
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError, described, number_of, unknown_argument, unknown_value
from drivetrain.strategies import fsdp_blocks

# The value of ``reshard_after_forward`` for each sharding strategy: whether a block's gathered parameters are freed
# after forward.
_SHARDING = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False,
             "NO_SHARD": False}  # fmt: skip
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

# The arguments of torch's first FSDP that have no effect here. The values say how FSDP2 always behaves.
_WITHOUT_MEANING = {
    "use_orig_params": "parameters are always the module's own",
    "sync_module_states": "all processes start with the weights of rank 0",
    "limit_all_gathers": "memory is always limited",
    "forward_prefetch": "the next block is gathered early by itself",
    "backward_prefetch": "the next block is gathered early by itself",
}


class FirstFSDPArguments(TypedDict, total=False):
    """The arguments in ``_WITHOUT_MEANING``, for type checkers and for the command line."""

    use_orig_params: bool
    sync_module_states: bool
    limit_all_gathers: bool
    forward_prefetch: bool
    backward_prefetch: Any


@dataclass(frozen=True)
class Options:
    """FSDPStrategy's arguments; the docstring of FSDPStrategy describes them."""

    cpu_offload: Any
    mixed_precision: Any
    auto_wrap_policy: fsdp_blocks.Policy | None
    activation_checkpointing_policy: fsdp_blocks.Policy | None = None
    sharding: str = "FULL_SHARD"
    state_dict_type: str = "full"
    device_mesh: Any = None
    gradient_exchange: str = "batch"
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None

    def __post_init__(self) -> None:
        """Check ``state_dict_type``, ``gradient_exchange`` and ``device_mesh``."""
        for name, known in (("state_dict_type", ("full", "sharded")), ("gradient_exchange", ("batch", "window"))):
            if (value := getattr(self, name)) not in known:
                raise unknown_value("FSDPStrategy", name, value, known)
        mesh = self.device_mesh
        if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
            numbers = isinstance(mesh, Sequence) and all(type(each) is int for each in mesh)
            if not numbers or len(mesh) != 2:
                raise ConfigurationError(
                    f"FSDPStrategy(device_mesh={mesh!r}) is no mesh. Write (replicas, shards), such as (2, 4), "
                    "or pass a DeviceMesh."
                )

    def blocks_of(self, root: nn.Module) -> list[nn.Module]:
        """Return the layers of ``root`` that ``auto_wrap_policy`` selects."""
        if self.auto_wrap_policy is None:
            return fsdp_blocks.find_blocks(root)
        return fsdp_blocks.matching(root, self.auto_wrap_policy, "auto_wrap_policy")

    @property
    def offloads(self) -> bool:
        """Whether shards are kept in host memory."""
        return bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload))

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a block's gathered parameters are freed between forward and backward."""
        return _SHARDING[self.sharding]

    def for_fully_shard(self, mesh: Any, pins: bool) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``, except ``reshard_after_forward``.

        Args:
            mesh: the mesh over which parameters are sharded.
            pins: whether offloaded shards are in pinned memory. The device copies faster from pinned memory.
        """
        own = isinstance(self.cpu_offload, fsdp.CPUOffloadPolicy)
        policy = self.cpu_offload if own else fsdp.CPUOffloadPolicy(pins)
        arguments = {
            "mesh": mesh, "offload_policy": policy if self.offloads else None, "mp_policy": self.mixed_precision,
            "shard_placement_fn": self.shard_placement_fn,
        }  # fmt: skip
        return {name: value for name, value in arguments.items() if value is not None}

    def described(self, mesh: Any) -> str:
        """Return a text such as "2 processes, replicated 2 times, with shards in host memory"."""
        parts = [number_of(mesh.size(mesh.ndim - 1), "process")]
        if mesh.ndim > 1 and mesh.size(0) > 1:
            parts.append(f"replicated {mesh.size(0)} times")
        if self.offloads:
            parts.append("with shards in host memory")
        return ", ".join(parts)


def ignore_first_arguments(others: Mapping[str, Any]) -> None:
    """Warn that arguments of torch's first FSDP have no effect.

    Raises:
        UnknownArgumentError: torch's first FSDP does not have the argument.
    """
    for name in others:
        if name not in _WITHOUT_MEANING:
            raise unknown_argument("FSDPStrategy", {name: others[name]}, Options.__annotations__)
        rank_zero_warn(f"FSDPStrategy ignores {name}: {_WITHOUT_MEANING[name]}. Leave it out.", stacklevel=5)


def sharding_of(given: Any) -> str:
    """Return the name of a ``sharding_strategy``; the argument may be a name or a member of torch's enumeration.

    Raises:
        ConfigurationError: the name is unknown.
    """
    name = str(getattr(given, "name", given))
    known = {each.lower(): each for each in _SHARDING} | {"hybrid": "HYBRID_SHARD"}
    if name.lower() not in known:
        raise unknown_value("FSDPStrategy", "sharding_strategy", name, _SHARDING)
    return known[name.lower()]


def precision_policy(given: Any) -> Any:
    """Return ``given``. A ``MixedPrecision`` of torch's first FSDP is converted to a ``MixedPrecisionPolicy``.

    Raises:
        ConfigurationError: ``given`` is neither a ``MixedPrecisionPolicy`` nor a ``MixedPrecision``.
    """
    if given is None or type(given).__name__ == "MixedPrecisionPolicy":
        return given
    if not all(hasattr(given, name) for name in ("param_dtype", "reduce_dtype")):
        raise ConfigurationError(
            f"FSDPStrategy(mixed_precision=...) got {described(given)}. Write "
            "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )

    return fsdp.MixedPrecisionPolicy(param_dtype=given.param_dtype, reduce_dtype=given.reduce_dtype)


def hybrid_shape(options: Options, world_size: int, num_nodes: int) -> tuple[int, int] | None:
    """Return (replicas, shards) for a two-dimensional mesh, or ``None`` for a mesh with one dimension.

    Raises:
        ConfigurationError: the product of replicas and shards is not the number of processes, or hybrid sharding on one
            machine has no ``device_mesh``.
    """
    if options.device_mesh is not None:
        replicas, shards = options.device_mesh
        if replicas * shards != world_size:
            raise ConfigurationError(
                f"FSDPStrategy(device_mesh={options.device_mesh!r}) is a mesh of {replicas * shards} processes, and "
                f"there are {world_size}. Write (replicas, shards) whose product is {world_size}."
            )
        return replicas, shards
    if options.sharding in _HYBRID:
        if num_nodes == 1:
            raise ConfigurationError(
                f"FSDPStrategy(sharding_strategy={options.sharding!r}) shards over the processes of one machine and "
                f"replicates over machines, and there is one machine. Pass device_mesh=(replicas, shards), or write "
                'sharding_strategy="FULL_SHARD".'
            )
        return num_nodes, world_size // num_nodes
    return (world_size, 1) if options.sharding == "NO_SHARD" else None


def checkpoint_activations(root: nn.Module, policy: fsdp_blocks.Policy | None) -> str:
    """Let the modules that ``policy`` selects recompute their activations in the backward pass. Return a sentence that
    names these modules, or "".

    The names of parameters, and therefore checkpoints, do not change.
    """
    if policy is None:
        return ""
    found = fsdp_blocks.matching(root, policy, "activation_checkpointing_policy")
    chosen = fsdp_blocks.outermost([each for each in found if each is not root])
    for module in chosen:
        forward: Any = module.forward
        if not isinstance(forward, functools.partial) or forward.func is not checkpoint:
            module.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    where = fsdp_blocks.summary(root, chosen).rpartition(", the rest of")[0] or type(root).__name__
    return f"Activations are computed again in {where}."
