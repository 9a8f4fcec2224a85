"""Tensor parallelism and FSDP2 on a two-dimensional mesh. Layers are split over the ranks along one dimension, and each
rank's part is sharded along the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base import torch_private
from drivetrain.base.packages import device_mesh, fsdp
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.tree import gradients_of
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, number_of
from drivetrain.precision.mixed import torch_scaler
from drivetrain.precision.precision import Precision
from drivetrain.strategies import fsdp_blocks, sharded_state
from drivetrain.strategies.context_parallel import CONTEXT, Context, Dims, Kind, check_arguments, dims_for, leave_all
from drivetrain.strategies.context_parallel import split as split_sequences
from drivetrain.strategies.fsdp_options import Options, checkpoint_activations, precision_policy
from drivetrain.strategies.fully_sharded import FullySharded
from drivetrain.strategies.group import Group, TorchGroup
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy
from drivetrain.strategies.strategy import Strategy, StrategyRegistry
from drivetrain.strategies.tp_plan import declared_plan, split

DATA, TENSOR = "data_parallel", "tensor_parallel"
Size = int | Literal["auto"]

_PREPARED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that an earlier run has split and compiled
_TO_DEVICE = "batch_to_device"
_TESTED_TORCH = (2, 13)  # torch 2.9 computed wrong values on a two-dimensional mesh


def torch_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed torch."""
    return tuple(int(part) for part in str(torch.__version__).split(".")[:2])


@StrategyRegistry.register("model_parallel")
class ModelParallelStrategy(FullySharded, ParallelStrategy):
    """Split layers over the ranks of a tensor-parallel group, and shard each rank's part over the data-parallel ranks.

    ``configure_model`` splits the layers, with torch's ``parallelize_module(..., self.device_mesh["tensor_parallel"],
    plan)``. For a model with a ``tp_plan``, the strategy splits the layers. Ranks of one tensor-parallel group see the
    same samples. After the split, the strategy applies activation checkpointing, compiles the blocks, and shards the
    blocks with ``fully_shard``. See docs/model_parallel.md. For sequences that are split over ranks, see
    docs/context_parallel.md.

    Args:
        data_parallel_size: the number of ranks that see different samples; with context parallelism, the number of
            context-parallel groups. "auto": the number of processes divided by the other sizes. Parameters are sharded
            over these ranks; with context parallelism, over all ranks of these groups.
        tensor_parallel_size: the number of neighbouring ranks over which each layer is split; "auto": the number of
            processes divided by the other sizes. If ``data_parallel_size`` is also "auto", the number of processes on
            one machine.
        save_distributed_checkpoint: True: checkpoints are folders, into which each process writes its parts. False:
            checkpoints are single files, as with one process. The strategy can read both forms, whatever the value of
            this argument.
        process_group_backend, timeout, accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin: as for :class:`ParallelStrategy`.
        context_parallel_size: the number of neighbouring ranks over which each sequence is split.
        sequence_dims: the dimensions along which a batch's tensors are sequences: a number for all tensors that have
            this dimension; a mapping from fields to dimensions; or a function ``(batch, part)`` that returns the batch
            with ``part(tensor, dim)`` in place of each sequence. ``None``: the module's attribute ``sequence_dims``.
        context_parallel_attention: how ranks exchange parts of sequences in
            :func:`drivetrain.strategies.context_parallel.attention`. "ulysses" gives each rank complete sequences for
            some of the heads; "ring" is torch's ring attention, which some devices do not support.
        tp_plan: how layers are split. The keys are layer names, in which ``*`` matches one component. The values are
            "colwise", "rowwise" or a ``ParallelStyle`` of torch. ``None``: the plan that the model declares.
        compile: compile the forward pass of each block with ``torch.compile``. Can be a dictionary with arguments for
            ``torch.compile``.
        auto_wrap_policy, activation_checkpointing_policy, mixed_precision, cpu_offload, gradient_exchange,
            init_on_meta, start_method: as for :class:`FSDPStrategy`.

    Raises:
        ConfigurationError: an argument is wrong, or two arguments contradict each other.
    """

    strategy_name = "modelparallelstrategy"  # other libraries identify this strategy by its class name

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        *,
        context_parallel_size: int = 1,
        sequence_dims: Dims | None = None,
        context_parallel_attention: Kind = "ulysses",
        tp_plan: Mapping[str, Any] | None = None,
        compile: bool | Mapping[str, Any] = False,
        auto_wrap_policy: fsdp_blocks.Policy | None = None,
        activation_checkpointing_policy: fsdp_blocks.Policy | None = None,
        mixed_precision: Any = None,
        cpu_offload: Any = None,
        gradient_exchange: Literal["batch", "window"] = "batch",
        init_on_meta: bool = False,
        start_method: str = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout,
        )  # fmt: skip
        options = Options(
            cpu_offload, precision_policy(mixed_precision), auto_wrap_policy,
            state_dict_type="sharded" if save_distributed_checkpoint else "full", gradient_exchange=gradient_exchange,
        )  # fmt: skip
        self._shard_by(options, init_on_meta, start_method)
        for name, size in ((DATA, data_parallel_size), (TENSOR, tensor_parallel_size)):
            if size != "auto" and (type(size) is not int or size < 1):
                raise ConfigurationError(
                    f'ModelParallelStrategy({name}_size={size!r}) is no size. Write a number of processes, or "auto".'
                )
        self._asked = data_parallel_size, tensor_parallel_size
        self.context_parallel_size, self.sequence_dims = context_parallel_size, sequence_dims
        check_arguments(type(self).__name__, context_parallel_size, sequence_dims, context_parallel_attention)
        self._attention = context_parallel_attention
        self._context: tuple[Group, Context] | None = None  # a data group, and the Context created for this data group
        self._own_plan = tp_plan
        self._compile: Mapping[str, Any] | None = {} if compile is True else compile or None
        if self._compile is not None:
            why = f"{type(self).__name__}(compile=...) compiles layers already."
            self.facts = self.facts.but(refuses={**self.facts.refuses, "compile": why})
        # this class applies activation checkpointing itself, before it compiles the blocks
        self._checkpointing = activation_checkpointing_policy
        self._hooks: dict[nn.Parameter, Any] = {}  # for each parameter, the handle of its hook
        self._scaler: Any = None  # the precision's GradScaler, whose method for unscaling is replaced during this run

    def agreed_options(self) -> dict[str, Any]:
        sizes = dict(zip((DATA, TENSOR), self._asked, strict=True))
        return {**super().agreed_options(), **sizes, CONTEXT: self.context_parallel_size}

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_hooks": {}, "_scaler": None, "_context": None}
        state.pop(_TO_DEVICE, None)
        return state

    # ---- sizes and groups ----------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the mesh's two dimensions: the number of ranks over which parameters are sharded, and the number
        of ranks over which layers are split.

        Raises:
            ConfigurationError: the product of the sizes is not the number of processes.
        """
        data, tensor = self._asked
        world, context = self.world_size, self.context_parallel_size
        if data == "auto":
            if tensor == "auto":
                tensor = world // self.num_nodes if context == 1 else 1
            data = world // tensor // context
        elif tensor == "auto":
            tensor = world // data // context
        if data * tensor * context != world:
            sizes = dict(zip((DATA, TENSOR), self._asked, strict=True)) | ({CONTEXT: context} if context > 1 else {})
            asked = ", ".join(f"{name}_size={size!r}" for name, size in sizes.items())
            raise ConfigurationError(
                f"ModelParallelStrategy({asked}) does not fit the {number_of(world, 'process')} of this job. "
                f"Write sizes whose product is {world}, or start another number of processes."
            )
        return data * context, tensor

    @property
    def context(self) -> Context:
        """The group of ranks, including this process, over which each sequence is split."""
        data, size = self.data, self.context_parallel_size
        if self._context is None or self._context[0] is not data:
            first = data.index - data.index % size
            self._context = data, Context(self.world.new(data.ranks[first : first + size]), self._attention)
        return self._context[1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        data, size = self.data, self.context_parallel_size
        return {"num_replicas": max(1, data.size // size), "rank": data.index // size}

    def setup_environment(self) -> None:
        super().setup_environment()
        leave_all()
        if self.context_parallel_size > 1:
            self.context.enter(self.root_device)

    def leave_process_group(self) -> None:
        leave_all()
        super().leave_process_group()

    def make_data_group(self, world: Group) -> Group:
        _, tensor = self.sizes
        return world if tensor == 1 else world.new(range(world.rank % tensor, world.size, tensor))

    def _make_mesh(self, kind: str) -> device_mesh.DeviceMesh:
        """Return the mesh with the dimensions "data_parallel" and "tensor_parallel"."""
        return device_mesh.init_device_mesh(kind, self.sizes, mesh_dim_names=(DATA, TENSOR))

    @property
    def sharding_mesh(self) -> device_mesh.DeviceMesh:
        return self.device_mesh[DATA]

    # ---- random numbers ------------------------------------------------------------------------------------------

    def _draw_alike(self) -> None:
        """Give the ranks of a tensor-parallel group the random state of its first rank.

        Between split layers, all ranks of the group have the same activations, so dropout must drop the same elements
        on all ranks. The ranks of a context-parallel group also get one random state, because these ranks must augment
        samples identically.
        """
        if self.sizes[1] > 1:
            group = TorchGroup(self.device_mesh.get_group(TENSOR), self.root_device, self._checks, self.timeout)
            set_rng_state(group.broadcast(rng_state()))
        if self.context_parallel_size > 1:
            set_rng_state(self.context.group.broadcast(rng_state()))

    def on_train_start(self) -> None:
        self._draw_alike()  # the checkpoint may contain the states of fewer ranks

    on_test_start = on_predict_start = on_train_start

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._draw_alike()

    # ---- the model -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.context_parallel_size == 1:
            return
        owner = f"{type(self).__name__}({CONTEXT}_size={self.context_parallel_size})"
        dims = dims_for(self.lightning_module, self.sequence_dims, owner)

        def parts_to_device(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
            return split_sequences(Strategy.batch_to_device(self, batch, device, dataloader_idx), dims)

        # set on the instance, because runs without split sequences must not call this function
        vars(self)[_TO_DEVICE] = parts_to_device

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        if self.sizes[0] == 1:
            self._complete_gradients(module)
        self._draw_alike()
        precision = self.precision_plugin
        if (scaler := torch_scaler(precision)) is not None:
            self._scaler = scaler
            vars(self._scaler)[torch_private.UNSCALE] = self._unscale_shards
        return module

    def _shard(self, module: nn.Module) -> None:
        """Apply tensor parallelism, activation checkpointing, compilation and FSDP, in this order."""
        if module not in _PREPARED:
            self._split(module)
            if again := checkpoint_activations(module, self._checkpointing):
                rank_zero_info(again)
            if self._compile is not None:
                self._compile_blocks(module, self._compile)
            _PREPARED.add(module)
        if min(self.sizes) > 1 and torch_version() < _TESTED_TORCH:
            rank_zero_warn(
                "Tensor parallelism together with FSDP gave wrong numbers with torch 2.9, right ones with torch 2.13. "
                f"This is torch {torch.__version__}. Use torch 2.13, or one of the two alone."
            )
        if self.sizes[0] > 1:
            super()._shard(module)
        else:  # with one data-parallel rank, FSDP would neither shard nor gather
            self._share(module)

    def _split(self, module: nn.Module) -> None:
        """Split layers by the plan of the strategy or of the model. Do nothing if ``configure_model`` has already split
        layers.

        Raises:
            ConfigurationError: neither ``configure_model`` nor a plan splits layers; or ``configure_model`` has split
                layers although there is a ``tp_plan``.
        """
        _, tensor = self.sizes
        if tensor == 1:
            return
        mesh, name = self.device_mesh, fsdp_blocks.class_name(module)
        parameters: list[Any] = list(module.parameters())
        own = any(sharded_state.is_dtensor(each) and each.device_mesh != mesh[DATA] for each in parameters)
        if own and self._own_plan is None:
            return
        if own:
            raise ConfigurationError(
                f"{name} has split layers itself, and ModelParallelStrategy got a tp_plan. Use one of the two."
            )
        plan = declared_plan(module) if self._own_plan is None else self._own_plan
        if not plan:
            raise ConfigurationError(
                f"ModelParallelStrategy splits the layers of {name} over {tensor} processes, but {name} has no plan. "
                "Split them in configure_model with torch's parallelize_module(layers, "
                'self.device_mesh["tensor_parallel"], {...}), pass ModelParallelStrategy(tp_plan={"blocks.*.first": '
                '"colwise", "blocks.*.second": "rowwise"}), or write tensor_parallel_size=1.'
            )
        self.share_from_rank_zero([each for each in parameters if not each.is_meta], self.world)
        rank_zero_info(f"ModelParallelStrategy splits over {tensor} processes: {split(module, mesh[TENSOR], plan)}.")

    def _compile_blocks(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        blocks = [each for each in self.options.blocks_of(module) if each is not module]
        if not blocks:
            raise ConfigurationError(
                f"ModelParallelStrategy(compile=...) compiles blocks, and {type(module).__name__} has no repeated "
                "layers. Name their classes in auto_wrap_policy, or compile layers in configure_model."
            )
        for block in blocks:  # FSDP's hooks are added later, and run outside the compiled function
            block.forward = torch.compile(block.forward, **arguments)
        rank_zero_info(f"ModelParallelStrategy compiles {fsdp_blocks.summary(module, blocks).rpartition(',')[0]}.")

    def _share(self, block: nn.Module) -> None:
        """Broadcast the weights of rank 0. Broadcast the parts of split layers within each data-parallel group."""
        tensors = [each for each in (*block.parameters(), *block.buffers()) if not each.is_meta]
        self.share_from_rank_zero([each for each in tensors if not sharded_state.is_dtensor(each)], self.world)
        parts: list[Any] = [each for each in tensors if sharded_state.is_dtensor(each)]
        split_only = [sharded_state.local_shard(each) for each in parts if each.device_mesh.mesh_dim_names == (TENSOR,)]
        self.share_from_rank_zero(split_only)

    def _complete_gradients(self, module: nn.Module) -> None:
        """Give each gradient of a split layer the placements of its parameter, as FSDP does for sharded parameters.

        A layer that is not split may run on a different part of the activations on each rank. Its gradient must then be
        summed over the ranks. ``redistribute`` computes this sum.
        """
        for parameter in module.parameters():
            if sharded_state.is_dtensor(parameter) and parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(_placed_like(parameter))  # type: ignore[no-untyped-call]

    def _unscale_shards(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients as torch's ``GradScaler`` does. Unlike torch's, this function accepts DTensors on different
        meshes together with plain tensors.

        The ranks exchange whether any shard is not finite, so that all ranks skip the same steps.
        """
        found = {self.root_device: found_inf.to(self.root_device, copy=True)}
        for shard in map(sharded_state.local_shard, gradients_of(optimizer)):
            if shard.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            here = found.setdefault(shard.device, found_inf.to(shard.device, copy=True))
            torch_private.unscale_([shard], here, inv_scale.to(shard.device))
        flag = torch.stack([each.to(self.root_device).reshape(()) for each in found.values()]).amax()
        return {self.root_device: self.world.all_reduce(flag.reshape(1), "max")}

    def teardown(self) -> None:
        while self._hooks:
            self._hooks.popitem()[1].remove()
        if self._scaler is not None:
            del vars(self._scaler)[torch_private.UNSCALE]
            self._scaler = None
        leave_all()
        vars(self).pop(_TO_DEVICE, None)
        super().teardown()

    # ---- gradients -----------------------------------------------------------------------------------------------

    def accumulating(self, model: nn.Module) -> Any:
        if self.context_parallel_size > 1:  # each gradient depends on all ranks' losses, so the ranks use one scale
            self.driver.exchanges_always = True
        return super().accumulating(model) if isinstance(model, fsdp.FSDPModule) else nullcontext()

    # ---- errors --------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> Exception | None:
        """Explain torch's error about a step that mixes DTensors of split layers with plain tensors."""
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            if "aten._f" in str(error):  # _foreach_mul_, _fused_adamw_
                return ConfigurationError(
                    "An optimizer with foreach=True or fused=True has parameters that are split over processes and "
                    "parameters that are not, and torch cannot step both in one call. Leave foreach and fused out of "
                    "the optimizer's arguments."
                )
            return ConfigurationError(
                "A step used a parameter of which each process has only a part together with a plain tensor. Call the "
                "layer itself, not another method of it and not its weight. If configure_model splits layers, each "
                "layer between a split one and a whole one needs a place in the plan: a ParallelStyle whose "
                "use_local_output=False returns DTensors, which plain layers cannot take."
            )
        return None


def _placed_like(parameter: Any) -> Callable[[Any], Any]:
    placements = parameter.placements

    def placed(gradient: Any) -> Any:
        return gradient if gradient.placements == placements else gradient.redistribute(placements=placements)

    return placed
