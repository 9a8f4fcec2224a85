"""FSDP2: each process keeps a shard of every parameter, gradient and optimizer state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.introspect import defined_by_user, overrides
from drivetrain.base.rank_zero import lightning_deprecation, rank_zero_info, rank_zero_warn
from drivetrain.base.registry import Registry
from drivetrain.base.restoring import WrongForm, shown_error
from drivetrain.checkpoints.file import writes_files
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.launchers.launcher import LauncherRegistry
from drivetrain.precision.familiar import clips_by_members
from drivetrain.precision.precision import ClipAlgorithm, Precision
from drivetrain.strategies import fsdp_blocks, fsdp_kept, sharded_gradients
from drivetrain.strategies import sharded_state as sharded
from drivetrain.strategies.alone import STATE_VERBS, Alone, alone
from drivetrain.strategies.fsdp_options import (
    FirstFSDPArguments,
    Options,
    checkpointed,
    hybrid_shape,
    ignore_first_arguments,
    precision_policy,
    sharding_of,
)
from drivetrain.strategies.optimizer_states import parameters_of
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy
from drivetrain.strategies.placement import place
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

LARGE = ("model.", "optimizers.")
"""How the names of tensors begin of which each rank reads its own shards."""


class FSDPStrategy(ParallelStrategy):
    """torch's ``fully_shard`` around the blocks of the model, and around the model for its other parameters.

    A block's parameters are gathered for its computation and freed afterwards. See docs/fsdp.md.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for :class:`ParallelStrategy`.
        cpu_offload: keep unused shards in host memory, where the optimizer then steps. True, or torch's
            ``CPUOffloadPolicy``.
        mixed_precision: torch's ``MixedPrecisionPolicy``: the dtypes in which parameters are gathered and gradients are
            reduced. ``None``: the parameters' own dtype.
        auto_wrap_policy: the layers that are blocks: classes, class names, a function ``policy(module) -> bool``, or
            one of torch's policies. ``None``: the model's declaration, or otherwise its repeated layers.
        activation_checkpointing: an alias of ``activation_checkpointing_policy``.
        activation_checkpointing_policy: the layers that recompute their activations in the backward pass, in the same
            forms as ``auto_wrap_policy``.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP" keeps the parameters gathered from forward to backward;
            "HYBRID_SHARD" shards over the processes of one machine and replicates over machines; "NO_SHARD" replicates.
        state_dict_type: "full": checkpoints are single files, as with one process. "sharded": they are folders, into
            which each process writes its shards. With either value, both forms can be read.
        device_mesh: a ``DeviceMesh``, or (replicas, shards), for hybrid sharding; ``None``: one dimension with all
            processes.
        gradient_exchange: "batch": reduce gradients to shards in each backward pass; "window": once per optimizer step;
            until then each process holds the gradients of all parameters.
        shard_placement_fn: torch's argument: the dimension along which a parameter is sharded.
        init_on_meta: ``configure_model`` creates parameters on the meta device, without memory. After sharding, each
            layer initialises its own with ``reset_parameters``. Without it, this happens only for parameters that
            ``configure_model`` itself has put on the meta device.
        start_method: how processes start if no launcher has: "popen", "spawn", "fork", "forkserver" or "ray".
        others: arguments of torch's first FSDP that have no effect here; they cause a warning.

    Raises:
        ConfigurationError: an argument is wrong, or two contradict each other.
    """

    strategy_name = "fsdp"
    facts = ParallelStrategy.facts.but(
        local_passes="drivetrain.strategies.local_passes:of_fsdp",
        calls_through_forward=True,  # fully_shard gathers parameters around the module's __call__
        allows_inference_mode=False,  # it cannot gather them under inference mode
        restores_after_setup=True,  # weights are loaded into the shards
    )
    large: tuple[str, ...] = LARGE  # names of large entries in a checkpoint to read

    @classmethod
    def register_strategies(cls, strategy_registry: Registry[Strategy]) -> None:
        strategy_registry.register("fsdp", cls)
        strategy_registry.register("fsdp_cpu_offload", cls, cpu_offload=True)

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
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout,
        )  # fmt: skip
        LauncherRegistry.of(start_method, "FSDPStrategy")
        self.facts = self.facts.but(start_method=start_method)
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
        ignore_first_arguments(others)
        self.options = Options(
            cpu_offload, precision_policy(mixed_precision), auto_wrap_policy, activation_checkpointing_policy,
            sharding_of(sharding_strategy), state_dict_type, device_mesh, gradient_exchange, shard_placement_fn,
        )  # fmt: skip
        self._refuse_arguments()
        self.init_on_meta = init_on_meta
        self._loads = False  # whether a checkpoint will be loaded after the set-up
        self._mesh: tuple[Any, DeviceMesh] | None = None

    def _refuse_arguments(self) -> None:
        """Declare the Trainer's arguments that contradict the constructor's."""
        refused = dict(self.facts.refuses)
        if self.options.gradient_exchange == "window":
            refused["split_on_oom"] = (
                "keeps the gradients of a window itself, which "
                f'{type(self).__name__}(gradient_exchange="window") does too.'
            )
        if self.saves_shards:
            refused["save_trainable_only"] = (
                "needs complete weights, and this strategy saves shards. Write "
                f'{type(self).__name__}(state_dict_type="full").'
            )
        self.facts = self.facts.but(refuses=refused)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mesh": None}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded, for a ``configure_model`` that shards layers itself."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if isinstance(self.options.device_mesh, DeviceMesh):
            return self.options.device_mesh
        self._check_met()
        world = dist.group.WORLD
        if self._mesh is None or self._mesh[0] is not world:  # of an earlier process group
            kind, shape = self.root_device.type, hybrid_shape(self.options, self.world_size, self.num_nodes)
            if shape is not None:
                made = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
            elif self.data.size < self.world_size:
                made = DeviceMesh.from_group(self.data.handle, kind)
            else:
                made = init_device_mesh(kind, (self.world_size,))
            self._mesh = world, made
        return self._mesh[1]

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The part of the mesh that ``fully_shard`` gets."""
        return self.device_mesh

    # ---- the model -----------------------------------------------------------------------------------------------

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta") if self.init_on_meta else super().model_sharded_context()

    def setup(self, trainer: Any) -> None:
        self._loads = trainer is not None and trainer.ckpt_path is not None
        super().setup(trainer)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        if self.precision_plugin.packs_weights:
            raise ConfigurationError(
                f"{type(self.precision_plugin).__name__} packs weights into integers, which {type(self).__name__} "
                'cannot shard. Write strategy="ddp", which keeps all of them in each process.'
            )
        if module in _SHARDED:  # by an earlier run
            _forget_iteration(module)
        module = super().setup_module(module, move_to_device=False)  # the complete module may be larger than the device
        if module not in _SHARDED:
            self._shard(module)
            _SHARDED.add(module)
        for group in _groups(module):
            self._set_divide_factor(group)
        from drivetrain.strategies.meta import materialise

        shards_on = HOST if self.options.offloads else self.root_device
        if materialise(module, self.root_device, shards_on, self.world, self._loads):
            for _, parameter in _fsdp_parameters(module):
                parameter.reset_sharded_param()
        self._place(module)
        if overrides(self, "model_to_device", Strategy):
            self.model = module
            self.model_to_device()
            module = self.model
        return module

    def _shard(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        options, kind = self.options, self.root_device.type
        if not hasattr(torch, kind):
            raise ConfigurationError(
                f"FSDPStrategy got a device of type {kind!r}, and torch has no module torch.{kind}, which fully_shard "
                'needs for its streams. Write strategy="ddp", or import the package that adds this module.'
            )
        own: list[Any] = [each for each in module.modules() if isinstance(each, FSDPModule)]
        blocks: list[nn.Module] = []
        if own:  # configure_model has already sharded some blocks
            if options.auto_wrap_policy is not None:
                raise ConfigurationError(
                    f"{type(module).__name__} has sharded layers itself, and FSDPStrategy got an auto_wrap_policy. "
                    "Use one of the two."
                )
        elif options.auto_wrap_policy is None:
            blocks = fsdp_blocks.find_blocks(module)
        else:
            blocks = fsdp_blocks.matching(module, options.auto_wrap_policy, "auto_wrap_policy")
        blocks = fsdp_blocks.apart_from_tied(module, blocks)
        fsdp_blocks.make_contiguous(module)
        again = ""
        if options.activation_checkpointing_policy is not None:
            found = fsdp_blocks.matching(
                module, options.activation_checkpointing_policy, "activation_checkpointing_policy"
            )
            again = f" Activations are computed again in {checkpointed(found, module)}."
        text = fsdp_blocks.summary(module, own or blocks)
        mesh = self.sharding_mesh
        rank_zero_info(
            f"{type(self).__name__} shards {type(module).__name__} over {options.described(mesh)}, in these blocks"
            f"{' of its own' if own else ''}: {text}.{again}"
        )
        if not own and not blocks and options.auto_wrap_policy is None:
            rank_zero_warn(_ONE_BLOCK.format(*2 * [type(module).__name__]))
        arguments = options.for_fully_shard(mesh, pins=self.root_device != HOST)
        on_device = torch.empty(0, device=self.root_device)
        if not torch._has_compatible_shallow_copy_type(torch.empty(0), on_device):
            # fully_shard moves parameters in place, which tensors on this device do not support
            module = place(module, self.root_device)
        chosen = {module, *blocks} - set(own)
        kept = []
        for block in reversed([each for each in module.modules() if each in chosen]):
            self._share(block)  # inner blocks first: each block takes the parameters that no inner block has taken
            # backward starts with the root's own parameters; freeing them after forward would gather them twice in a
            # row
            if keeps := block is module or not options.reshards_after_forward:
                kept.append(block)
            fully_shard(block, **arguments, reshard_after_forward=not keeps)
        fsdp_kept.keep_until_backward(module, kept)

    def _share(self, block: nn.Module) -> None:
        """Broadcast the first rank's weights, as DDP does: ranks may have drawn different ones."""
        tensors = [*block.parameters(), *block.buffers()]
        self.share_from_rank_zero([each for each in tensors if not each.is_meta and not sharded.is_dtensor(each)])

    def _set_divide_factor(self, group: Any) -> None:
        """Make gradients means over the ranks that see different samples, as weighted losses assume.

        torch divides by the factor that ``configure_model`` has set, or by the size of the mesh; if that is the number
        of these ranks, it stays unset, because with one shard torch would divide by a set factor twice.
        """
        size = self.data.size
        if group.mesh_info.mesh.size() == size:
            group.gradient_divide_factor = None
        else:
            group.gradient_divide_factor = float(size)
            group.force_sum_reduction_for_comms = True  # only NCCL supports a premultiplied sum

    def _place(self, module: nn.Module) -> None:
        """Move buffers that ``fully_shard`` has not moved, and parameters that an earlier run has moved to the host."""
        for tensor in module.buffers():
            if tensor.device != self.root_device and not tensor.is_meta:
                tensor.data = tensor.data.to(self.root_device)
        if not self.options.offloads and self.root_device != HOST:
            module.to(self.root_device)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return super().accumulating(model) if self.options.gradient_exchange == "batch" else _without_exchange(model)

    def open_gradients(self) -> dict[str, Tensor]:
        found = super().open_gradients()
        for name, parameter in _fsdp_parameters(self.lightning_module):
            held = parameter.unsharded_accumulated_grad
            if held is None and hasattr(parameter, "_unsharded_param"):
                held = parameter._unsharded_param.grad
            if held is None:  # between forward and backward the module may hold gathered parameters without gradients
                held = parameter.sharded_param.grad
            if held is not None:
                found[name] = sharded.local_shard(held)
        return found

    def load_open_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        if self.options.gradient_exchange == "batch":
            super().load_open_gradients(gradients)
            return
        for name, parameter in _fsdp_parameters(self.lightning_module):
            if name in gradients:
                found, expected = tuple(gradients[name].shape), tuple(parameter._orig_size)
                if found != expected:
                    raise WrongForm(
                        f"[{name!r}]",
                        f'is a gradient of shape {found}, and gradient_exchange="window" expects {expected}',
                    )
                parameter.unsharded_accumulated_grad = gradients[name].to(self.root_device, copy=True)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float,
        algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        precision = self.precision_plugin
        if clips_by_members(precision) or overrides(precision, "clip_gradients", Precision):
            return super().clip_gradients(module, optimizer, clip_val, algorithm, norm_type, error_if_nonfinite)
        if clip_val <= 0:
            return None
        precision.unscale_gradients(optimizer)
        parameters = parameters_of(optimizer)
        if algorithm == "value":
            sharded_gradients.clip_by_value(parameters, clip_val)
            return None
        return sharded_gradients.clip_by_norm(parameters, clip_val, norm_type, error_if_nonfinite)

    # ---- state ---------------------------------------------------------------------------------------------------

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        return sharded.sharded_model_state(module) if self.saves_shards else sharded.whole_model_state(module)

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        with self._on_all_ranks():
            sharded.load_whole_model_state(module, state, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict() if self.saves_shards else sharded.whole_optimizer_state(optimizer)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        with self._on_all_ranks():
            sharded.load_whole_optimizer_states(optimizers, states)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Context in which ranks read their own shards: if one fails, all of them raise, and none waits for it."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        texts = self.world.gather_objects(failure and shown_error(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text:
                raise CheckpointError(f"Rank {rank} could not load its part of the checkpoint: {text}")

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints are folders into which each process writes its shards."""
        return self.options.state_dict_type == "sharded"

    @contextmanager
    def alone(self) -> Iterator[Alone]:
        own = any(defined_by_user(self, name) for name in STATE_VERBS)
        if own or not writes_files(self.checkpoint_io):
            yield ""
            return
        options = self.options
        self.options = dataclasses.replace(options, state_dict_type="sharded")
        try:
            with alone(self, "shards") as what:
                yield what
        finally:
            self.options = options

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self.saves_shards:
            from drivetrain.strategies.sharded_files import save

            save(self, checkpoint, filepath, storage_options)
        else:  # callbacks' states may contain shards too
            super().save_checkpoint(sharded.whole_state(checkpoint), filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        if self.checkpoint_io.is_sharded(checkpoint_path):
            from drivetrain.checkpoints.sharded import place, read

            found: dict[str, Any] = read(place(checkpoint_path), lazy=self.large)
            return found
        return super().load_checkpoint(checkpoint_path, weights_only, into)

    # ---- errors --------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> Exception | None:
        """Explain that a step has used a parameter that is not gathered."""
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            return ConfigurationError(
                "A step used a parameter while each process had only its shard of it. FSDP gathers the parameters of "
                "a block when the block is called. Call the layer itself, not another method of it and not its weight, "
                "or leave it out of auto_wrap_policy."
            )
        return None


_SHARDED: WeakSet[nn.Module] = WeakSet()  # modules of earlier set-ups, which stay sharded after a run

_ONE_BLOCK = (
    "FSDPStrategy found no repeated layers in {}, so the whole model is one block: each process gathers all parameters "
    "at once, waits for them, and keeps them until the backward pass ends: the memory of the complete model. Pass "
    "FSDPStrategy(auto_wrap_policy={{Block}}) with the classes of layers to gather one at a time, or with {}'s own "
    "class to keep it as one."
)


@contextmanager
def _without_exchange(model: Any) -> Iterator[None]:
    """Context whose backward passes keep the gradients of all parameters on this process."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _groups(module: nn.Module) -> Iterator[Any]:
    """Yield torch's groups of parameters that are gathered together."""
    from torch.distributed.fsdp import FSDPModule

    for each in module.modules():
        if isinstance(each, FSDPModule):
            yield from fsdp_kept.groups_of(each)


def _fsdp_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield torch's object for each sharded parameter, with its name in ``module``."""
    names = {each: f"{name}." if name else "" for name, each in module.named_modules()}
    for group in _groups(module):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            yield f"{names[info.module]}{info.param_name}", parameter


def _forget_iteration(module: Any) -> None:
    """Reset the state of an unfinished pass that an exception in an earlier run has left."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    for _, parameter in _fsdp_parameters(module):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
