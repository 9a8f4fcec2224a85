"""FSDP2: each process keeps a shard of every parameter, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.packages import device_mesh
from drivetrain.base.rank_zero import lightning_deprecation
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.precision.precision import Precision
from drivetrain.strategies import fsdp_blocks, fsdp_options
from drivetrain.strategies.fsdp_options import FirstFSDPArguments, Options, precision_policy, sharding_of
from drivetrain.strategies.fully_sharded import FullySharded
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy
from drivetrain.strategies.strategy import StrategyRegistry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


@StrategyRegistry.register("fsdp")
@StrategyRegistry.register("fsdp_cpu_offload", cpu_offload=True)
class FSDPStrategy(FullySharded, ParallelStrategy):
    """torch's ``fully_shard``, applied to the blocks of the model, and to the model itself for all other parameters.

    The parameters of a block are gathered for the computation of the block, and freed afterwards. See docs/fsdp.md.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for :class:`ParallelStrategy`.
        cpu_offload: keep unused shards in host memory; the optimizer then steps on the host. True, or torch's
            ``CPUOffloadPolicy``.
        mixed_precision: torch's ``MixedPrecisionPolicy``: the dtypes in which parameters are gathered and gradients are
            reduced. ``None``: the parameters' own dtype.
        auto_wrap_policy: which layers are blocks. Can be classes, class names, a function ``policy(module) -> bool``,
            or one of torch's policies. ``None``: the blocks that the model declares. A model without declared blocks is
            divided into its repeated layers.
        activation_checkpointing: an alias of ``activation_checkpointing_policy``.
        activation_checkpointing_policy: the layers that recompute their activations in the backward pass, given in the
            same forms as ``auto_wrap_policy``.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP" keeps the parameters gathered from forward to backward;
            "HYBRID_SHARD" shards over the processes of one machine and replicates over machines; "NO_SHARD" replicates.
        state_dict_type: "full": checkpoints are single files, as with one process. "sharded": checkpoints are folders,
            into which each process writes its shards. The strategy can read both forms, whatever the value of this
            argument.
        device_mesh: a ``DeviceMesh``, or (replicas, shards), for hybrid sharding; ``None``: one dimension with all
            processes.
        gradient_exchange: "batch": reduce gradients to shards in each backward pass; "window": reduce gradients once
            per optimizer step. Until this reduction, each process keeps complete gradients of all parameters.
        shard_placement_fn: torch's argument: a function that returns the dimension along which a parameter is sharded.
        init_on_meta: ``configure_model`` creates parameters on the meta device, without memory. After sharding, each
            layer initialises its own parameters with ``reset_parameters``. With False, layers initialise only
            parameters that ``configure_model`` itself has put on the meta device.
        start_method: how the strategy starts processes if no launcher has started them: "popen", "spawn", "fork",
            "forkserver" or "ray".
        others: arguments of torch's first FSDP. These arguments have no effect here, and cause a warning.

    Raises:
        ConfigurationError: an argument is wrong, or two arguments contradict each other.
    """

    strategy_name = "fsdp"
    facts = FullySharded.facts.but(local_passes="drivetrain.strategies.local_passes:FSDPPasses")

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: fsdp_blocks.Policy | None = None,
        activation_checkpointing: fsdp_blocks.Policy | None = None,
        activation_checkpointing_policy: fsdp_blocks.Policy | None = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        gradient_exchange: Literal["batch", "window"] = "batch",
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
        init_on_meta: bool = False,
        start_method: str = "popen",
        **others: Unpack[FirstFSDPArguments],
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.process_group_backend, self.timeout = process_group_backend, timeout
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise ConfigurationError(
                "FSDPStrategy got activation_checkpointing and activation_checkpointing_policy, which mean the same. "
                "Write activation_checkpointing_policy alone."
            )
        if activation_checkpointing is not None:
            lightning_deprecation(
                "FSDPStrategy(activation_checkpointing=...) is the former name of activation_checkpointing_policy, "
                "which takes the same. Write activation_checkpointing_policy=..."
            )
            activation_checkpointing_policy = activation_checkpointing
        fsdp_options.ignore_first_arguments(others)
        options = Options(
            cpu_offload, precision_policy(mixed_precision), auto_wrap_policy, activation_checkpointing_policy,
            sharding_of(sharding_strategy), state_dict_type, device_mesh, gradient_exchange, shard_placement_fn,
        )  # fmt: skip
        self._shard_by(options, init_on_meta, start_method)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded. ``configure_model`` can shard layers over this mesh."""
        given = self.options.device_mesh
        return super().device_mesh if given is None or isinstance(given, Sequence) else given

    def _make_mesh(self, kind: str) -> DeviceMesh:
        if (shape := fsdp_options.hybrid_shape(self.options, self.world_size, self.num_nodes)) is not None:
            return device_mesh.init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        if self.data.size < self.world_size:
            return device_mesh.DeviceMesh.from_group(self.data.handle, kind)
        return device_mesh.init_device_mesh(kind, (self.world_size,))

    # ---- errors --------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> Exception | None:
        """Return an explanation if a step has used a parameter that was not gathered."""
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            return ConfigurationError(
                "A step used a parameter while each process had only its shard of it. FSDP gathers the parameters of "
                "a block when the block is called. Call the layer itself, not another method of it and not its weight, "
                "or leave it out of auto_wrap_policy."
            )
        return None
