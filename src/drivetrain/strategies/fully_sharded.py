"""Base class of the strategies for FSDP and model parallelism. These strategies shard the blocks of a model with
torch's ``fully_shard``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base import torch_private
from drivetrain.base.introspect import defined_by_user, overrides, temporarily
from drivetrain.base.packages import fsdp
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import shown_error
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.tree import parameters_of
from drivetrain.checkpoints import sharded
from drivetrain.checkpoints.file import writes_files
from drivetrain.errors import CheckpointError, ConfigurationError, first_of
from drivetrain.launchers.launcher import LauncherRegistry
from drivetrain.precision.familiar import clips_by_members
from drivetrain.precision.precision import ClipAlgorithm, Precision
from drivetrain.strategies import fsdp_blocks, fsdp_kept, sharded_gradients, sharded_state
from drivetrain.strategies.alone import STATE_VERBS, Alone, alone
from drivetrain.strategies.fsdp_options import Options, checkpoint_activations
from drivetrain.strategies.group import Group
from drivetrain.strategies.parallel import ParallelStrategy
from drivetrain.strategies.placement import place
from drivetrain.strategies.sharded_files import save
from drivetrain.strategies.sharded_state import is_dtensor, local_shard, shard_like
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FullySharded(Strategy):
    """Base class of strategies that shard a model with ``fully_shard``; each subclass creates its own mesh of ranks."""

    _check_met: Callable[[], None]
    share_from_rank_zero: Callable[..., None]

    facts = ParallelStrategy.facts.but(
        calls_through_forward=True,  # fully_shard gathers parameters around the module's __call__
        allows_inference_mode=False,  # fully_shard cannot gather parameters under inference mode
        restores_after_setup=True,  # weights are loaded into the shards, which setup creates
    )
    large: tuple[str, ...] = ("model.", "optimizers.")
    """Prefixes of names of tensors in a checkpoint. Each rank reads only its own shards of the tensors with these
    prefixes.
    """

    _loads = False  # whether a checkpoint will be loaded after the set-up
    _mesh: tuple[Any, DeviceMesh] | None = None  # the default process group, and the mesh that was made for it

    def _shard_by(self, options: Options, init_on_meta: bool, start_method: str) -> None:
        """Store arguments of the constructor, and declare which arguments of the Trainer contradict them."""
        LauncherRegistry.of(start_method, "FSDPStrategy")
        self.options, self.init_on_meta = options, init_on_meta
        refused = dict(self.facts.refuses)
        if options.gradient_exchange == "window":
            refused["split_on_oom"] = (
                "keeps the gradients of a window itself, which "
                f'{type(self).__name__}(gradient_exchange="window") does too.'
            )
        if self.saves_shards:
            refused["save_trainable_only"] = (
                "needs complete weights, and this strategy saves shards. Write "
                f'{type(self).__name__}(state_dict_type="full").'
            )
        self.facts = self.facts.but(start_method=start_method, refuses=refused)

    def agreed_options(self) -> dict[str, Any]:
        options = self.options
        own = {"sharding_strategy": options.sharding, "cpu_offload": options.offloads}
        names = ("mixed_precision", "auto_wrap_policy", "activation_checkpointing_policy", "gradient_exchange")
        return {**super().agreed_options(), **own, **{name: getattr(options, name) for name in names}}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mesh": None}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the model is divided. A module reads the mesh as ``self.device_mesh``."""
        self._check_met()
        world = dist.group.WORLD
        if self._mesh is None or self._mesh[0] is not world:  # the mesh belongs to an earlier process group
            self._mesh = world, self._make_mesh(self.root_device.type)
        return self._mesh[1]

    def _make_mesh(self, kind: str) -> DeviceMesh:
        """Return the mesh of all ranks, whose devices have the type ``kind``."""
        raise NotImplementedError

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh that ``fully_shard`` gets: :attr:`device_mesh`, or one of its dimensions."""
        return self.device_mesh

    def _share(self, block: nn.Module) -> None:
        """Broadcast the first rank's weights, as DDP does, because the ranks may have initialised their weights
        differently.
        """
        tensors = [*block.parameters(), *block.buffers()]
        self.share_from_rank_zero([each for each in tensors if not each.is_meta and not is_dtensor(each)])

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
        if module in _SHARDED:  # an earlier run has sharded this module
            fsdp_kept.forget_iteration(module)
        module = super().setup_module(module, move_to_device=False)  # the complete module may not fit on the device
        if module not in _SHARDED:
            self._shard(module)
            _SHARDED.add(module)
        for group in fsdp_kept.groups_in(module):
            self._set_divide_factor(group)
        shards_on = HOST if self.options.offloads else self.root_device
        if materialise(module, self.root_device, shards_on, self.world, self._loads):
            for _, parameter in fsdp_kept.parameters_in(module):
                parameter.reset_sharded_param()
        self._place(module)
        if overrides(self, "model_to_device", Strategy):
            self.model = module
            self.model_to_device()
            module = self.model
        return module

    def _shard(self, module: nn.Module) -> None:
        options, kind = self.options, self.root_device.type
        if not hasattr(torch, kind):
            raise ConfigurationError(
                f"FSDPStrategy got a device of type {kind!r}, and torch has no module torch.{kind}, which fully_shard "
                'needs for its streams. Write strategy="ddp", or import the package that adds this module.'
            )
        own: list[Any] = [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]
        if own and options.auto_wrap_policy is not None:
            raise ConfigurationError(
                f"{type(module).__name__} has sharded layers itself, and FSDPStrategy got an auto_wrap_policy. Use one "
                "of the two."
            )
        # no blocks, if configure_model has already sharded some layers
        blocks = [] if own else fsdp_blocks.apart_from_tied(module, options.blocks_of(module))
        fsdp_blocks.make_contiguous(module)
        again = checkpoint_activations(module, options.activation_checkpointing_policy)
        text = fsdp_blocks.summary(module, own or blocks)
        mesh = self.sharding_mesh
        rank_zero_info(
            f"{type(self).__name__} shards {type(module).__name__} over {options.described(mesh)}, in these blocks"
            f"{' of its own' if own else ''}: {text}. {again}".rstrip()
        )
        if not own and not blocks and options.auto_wrap_policy is None:
            rank_zero_warn(_ONE_BLOCK.format(*2 * [type(module).__name__]))
        arguments = options.for_fully_shard(mesh, pins=self.root_device != HOST)
        on_device = torch.empty(0, device=self.root_device)
        if not torch_private.can_move_in_place(torch.empty(0), on_device):
            # fully_shard would move parameters in place, which this type of device does not support
            module = place(module, self.root_device)
        chosen = {module, *blocks} - set(own)
        kept = []
        for block in reversed([each for each in module.modules() if each in chosen]):
            self._share(block)  # inner blocks first, because an outer block gets only the remaining parameters
            # Backward starts with the root's own parameters. If these parameters were freed after forward, FSDP would
            # have to gather the parameters again at once.
            if keeps := block is module or not options.reshards_after_forward:
                kept.append(block)
            fsdp.fully_shard(block, **arguments, reshard_after_forward=not keeps)
        fsdp_kept.keep_until_backward(module, kept)

    def _set_divide_factor(self, group: Any) -> None:
        """Let torch average gradients over the ranks of the data group, because the code for weighted losses assumes
        averages over these ranks.

        torch divides gradients by a factor. The default is the size of the mesh. If the mesh has as many ranks as the
        data group, this function keeps the default. With one shard, torch would divide by an explicit factor twice. A
        factor from ``configure_model`` is always replaced.
        """
        size = self.data.size
        if group.mesh_info.mesh.size() == size:
            group.gradient_divide_factor = None
        else:
            group.gradient_divide_factor = float(size)
            # sum and divide separately, because only NCCL supports a premultiplied sum
            group.force_sum_reduction_for_comms = True

    def _place(self, module: nn.Module) -> None:
        """Move to the device all buffers that ``fully_shard`` has not moved, and all parameters that an earlier run has
        moved to the host.
        """
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
        for name, parameter in fsdp_kept.parameters_in(self.lightning_module):
            held = parameter.unsharded_accumulated_grad
            if held is None and (gathered := torch_private.gathered_of(parameter)) is not None:
                held = gathered.grad
            if held is None:  # the gradient may be in the shard, even if the parameter is gathered
                held = parameter.sharded_param.grad
            if held is not None:
                found[name] = sharded_state.local_shard(held)
        return found

    def load_open_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        if self.options.gradient_exchange == "batch":
            super().load_open_gradients(gradients)
            return
        for name, parameter in fsdp_kept.parameters_in(self.lightning_module):
            if name in gradients:
                found, expected = tuple(gradients[name].shape), tuple(torch_private.shape_of(parameter))
                if found != expected:
                    raise CheckpointError(
                        "The checkpoint was saved inside a window of batches, where each rank keeps its shard of the "
                        f'gradients. This rank\'s gradient of {name} had shape {found}, but gradient_exchange="window" '
                        f'needs the complete gradient, of shape {expected}. Resume with gradient_exchange="batch", or '
                        "from a checkpoint that was saved between two windows."
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
        state_of = sharded_state.sharded_model_state if self.saves_shards else sharded_state.whole_model_state
        return state_of(module)

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        with self._on_all_ranks():
            sharded_state.load_whole_model_state(module, state, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict() if self.saves_shards else sharded_state.whole_optimizer_state(optimizer)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        with self._on_all_ranks():
            sharded_state.load_whole_optimizer_states(optimizers, states)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Context for loading this rank's shards. If one rank fails, all ranks raise an exception, so that no rank
        waits for the failed rank.
        """
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
        options = dataclasses.replace(self.options, state_dict_type="sharded")
        with temporarily(vars(self), options=options), alone(self, "shards") as what:
            yield what

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self.saves_shards:
            save(self, checkpoint, filepath, storage_options)
        else:  # the states of callbacks may also contain shards
            super().save_checkpoint(sharded_state.whole_state(checkpoint), filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        if self.checkpoint_io.is_sharded(checkpoint_path):
            return sharded.read(sharded.place(checkpoint_path), lazy=self.large)
        return super().load_checkpoint(checkpoint_path, weights_only, into)


_SHARDED: WeakSet[nn.Module] = WeakSet()  # the modules that were sharded; they stay sharded after a run

_ONE_BLOCK = (
    "FSDPStrategy found no repeated layers in {}, so the whole model is one block: each process gathers all parameters "
    "at once, waits for them, and keeps them until the backward pass ends: the memory of the complete model. Pass "
    "FSDPStrategy(auto_wrap_policy={{Block}}) with the classes of layers to gather one at a time, or with {}'s own "
    "class to keep it as one."
)


@contextmanager
def _without_exchange(model: Any) -> Iterator[None]:
    """Context in which backward passes exchange no gradients. Each process keeps its own complete gradients."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


# ---- the meta device ------------------------------------------------------------------------------------------------


def materialise(root: nn.Module, device: torch.device, shards_on: torch.device, group: Group, loads: bool) -> bool:
    """Replace the tensors on the meta device, and let each layer initialise its own new tensors. Return whether any
    tensor was on the meta device.

    A layer's ``reset_parameters`` fills complete tensors, and each rank then keeps only its shards of these tensors.
    The values are therefore the same as in a model that one process has created. Besides the shards, only one complete
    layer is in memory at a time. All ranks draw the same random numbers as rank 0.

    Args:
        root: the model, whose parameters may be DTensors.
        device: the device on which the layers compute.
        shards_on: the device of the shards.
        group: the ranks that must get the same values.
        loads: whether weights will be loaded from a checkpoint later. If so, a layer without ``reset_parameters``
            causes an error only if the layer has non-persistent buffers.

    Raises:
        ConfigurationError: layers lack ``reset_parameters``. The message names these layers.
    """
    layers = [
        each
        for each in root.modules()
        if any(tensor.is_meta for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)))
    ]
    if not layers:
        return False
    names = fsdp_blocks.names_of(root)
    without = [each for each in layers if not callable(getattr(each, "reset_parameters", None))]
    if loads:
        without = [each for each in without if torch_private.non_persistent_buffers(each)]
    if without:
        raise ConfigurationError(
            "These layers have parameters or buffers on the meta device, and no method reset_parameters() that gives "
            "them first values: "
            f"{first_of((f'{names[each]} ({fsdp_blocks.class_name(each)})' for each in without), 10)}. Define it for "
            "the layer's own parameters and buffers, or create these layers outside of the meta device."
        )
    replaced = _replace(layers, device, shards_on)
    before = rng_state()
    first = group.broadcast(before)
    set_rng_state(first)
    filled: set[int] = set()
    for layer in layers:
        if callable(getattr(layer, "reset_parameters", None)):
            _reset(layer, replaced, device, filled)
    if not torch.equal(before["torch"], first["torch"]):
        set_rng_state(before)  # this rank's random state was different from rank 0's, so restore this rank's own state
    return True


def _replace(layers: list[nn.Module], device: torch.device, shards_on: torch.device) -> set[int]:
    """Allocate memory for each tensor on the meta device. Tied parameters stay tied. Return the ``id`` of each new
    parameter.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for layer in layers:
        for name, parameter in torch_private.own_parameters(layer).items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    where = shards_on if is_dtensor(parameter) else device
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=where), parameter.requires_grad)
                torch_private.own_parameters(layer)[name] = made[parameter]
        for name, buffer in torch_private.own_buffers(layer).items():
            if buffer is not None and buffer.is_meta:
                torch_private.own_buffers(layer)[name] = torch.empty_like(buffer, device=device)
    return set(map(id, made.values()))


@torch.no_grad()
def _reset(layer: Any, replaced: set[int], device: torch.device, filled: set[int]) -> None:
    """Let ``layer`` initialise complete parameters, and keep this rank's shards of these parameters. A tied parameter
    that an earlier layer has initialised keeps its values.
    """
    own = {name: each for name, each in torch_private.own_parameters(layer).items() if id(each) in replaced}
    whole = {name: nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device=device)) for name, each in own.items()}
    torch_private.own_parameters(layer).update(whole)
    try:
        layer.reset_parameters()
    finally:
        torch_private.own_parameters(layer).update(own)
    for name, parameter in own.items():
        if id(parameter) not in filled:
            local_shard(parameter).copy_(local_shard(shard_like(whole[name].detach(), parameter)))
            filled.add(id(parameter))
