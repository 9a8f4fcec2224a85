"""Lightning's ``fabric.strategies`` for XLA devices, with Fabric's signatures; see docs/xla.md."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import strategies as plain
from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base import files
from drivetrain.base.introspect import calls
from drivetrain.base.packages import xla_fsdp, xla_fsdp_wrap
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.compat import fabric_strategies as fabric
from drivetrain.engine import snapshots
from drivetrain.errors import CheckpointError, ConfigurationError, unknown_value
from drivetrain.precision.precision import Precision
from drivetrain.strategies._xla import run_recorded

_METADATA = "shard_metadata"  # torch_xla reads this entry when it merges the files of the ranks


class FabricSingleDeviceXLAStrategy(fabric.FabricSingleDeviceStrategy, plain.SingleDeviceXLAStrategy):
    """One XLA device, one process; see :class:`drivetrain.strategies.SingleDeviceXLAStrategy`.

    Args:
        device: the device of the model, as a number or a device; ``None``: the first device.
        accelerator, checkpoint_io, precision: as for every strategy.
    """

    _plain: type = plain.SingleDeviceXLAStrategy
    __init__ = fabric.constructor(plain.SingleDeviceXLAStrategy, "device", "accelerator", "checkpoint_io", "precision")

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step ``optimizer``. The XLA device now executes the operations that it has recorded."""
        return super().optimizer_step(optimizer, **kwargs)


class _Replicas(fabric.Strategy):
    """Base of the strategies with a replica on each device."""

    facts = plain.XLAStrategy.facts.but(engine_verbs=fabric.FabricVerbs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step ``optimizer``. The XLA device now executes the operations that it has recorded."""
        return super().optimizer_step(optimizer, **kwargs)

    def all_reduce(self, output: Any, group: Any = None, reduce_op: Any = None) -> Any:
        """Return ``output``, a tensor or a number, reduced over the ranks, by default the sum."""
        if not isinstance(output, Tensor):
            output = torch.tensor(output, device=self.root_device)
        return super().all_reduce(output, group, "sum" if reduce_op is None else reduce_op)


class FabricXLAStrategy(  # type: ignore[misc]  # Fabric's signatures, on purpose
    _Replicas, fabric.FabricParallelStrategy, plain.XLAStrategy
):
    """One replica per XLA device; see :class:`drivetrain.strategies.XLAStrategy`.

    Args:
        accelerator, parallel_devices, checkpoint_io, precision: as for every strategy.
        sync_module_states: broadcast the parameters and buffers of rank 0 to all replicas before training.
    """

    _plain: type = plain.XLAStrategy
    __init__ = fabric.constructor(
        plain.XLAStrategy, "accelerator", "parallel_devices", "checkpoint_io", "precision", "sync_module_states"
    )


class FabricXLAFSDPStrategy(_Replicas, fabric.FabricParallelStrategy, plain.XLAStrategy):  # type: ignore[misc]  # as above
    """A model sharded over XLA devices by torch_xla's ``XlaFullyShardedDataParallel``.

    Set up the module first, then the optimizers created from its parameters. Checkpoints have torch_xla's form: a
    folder with a file for each rank, or one file with all weights.

    Args:
        accelerator, parallel_devices, checkpoint_io, precision: as for every strategy. torch_xla keeps shards in 32
            bits. With a precision of 16 bits, it gathers parameters and computes in 16 bits.
        auto_wrap_policy: which layers gather their parameters separately: a set of classes, or one of torch_xla's
            policies.
        activation_checkpointing_policy: classes of layers that recompute their activations in the backward pass.
        state_dict_type: "sharded": a checkpoint is a folder. "full": a checkpoint is a file with only the weights. Load
            it before the module is set up.
        sequential_save: whether the ranks of a machine write their files one after another, which needs less memory.
        fsdp_arguments: further arguments of ``XlaFullyShardedDataParallel``.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        ConfigurationError: an argument is wrong, or two arguments contradict each other.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        auto_wrap_policy: set[type[nn.Module]] | Callable[..., bool] | None = None,
        activation_checkpointing_policy: set[type[nn.Module]] | None = None,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        sequential_save: bool = False,
        **fsdp_arguments: Any,
    ) -> None:
        plain.XLAStrategy.__init__(self, accelerator, parallel_devices, checkpoint_io, precision)
        if state_dict_type not in ("full", "sharded"):
            raise unknown_value("XLAFSDPStrategy", "state_dict_type", state_dict_type, ("full", "sharded"))
        if activation_checkpointing_policy and "auto_wrapper_callable" in fsdp_arguments:
            raise ConfigurationError(
                "XLAFSDPStrategy got activation_checkpointing_policy and auto_wrapper_callable, which both say how "
                "layers are wrapped. Pass one of them."
            )
        self._wraps_layers = auto_wrap_policy
        self._checkpointed = tuple(activation_checkpointing_policy or ())
        self._saves_shards = state_dict_type == "sharded"
        self._sequential_save = sequential_save
        self._fsdp_arguments = fsdp_arguments

    # ---- set up --------------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, because the complete module can be too large for the device; ``setup_module`` moves the
        shards.
        """

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which to create layers on the host, in the precision's dtype. With ``empty_init``, layers do not
        initialise their parameters.
        """
        return fabric.entered(fabric.not_drawn(empty_init), self.precision_plugin.module_init_context())

    module_sharded_context = calls("model_sharded_context")
    """Context that does nothing, because ``setup_module`` shards the layers."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return ``module`` inside torch_xla's ``XlaFullyShardedDataParallel``."""
        if type(module) is xla_fsdp.XlaFullyShardedDataParallel:
            return module
        computes_in = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
        arguments: dict[str, Any] = {"compute_dtype": computes_in, **self._fsdp_arguments}
        policy = self._wraps_layers
        if isinstance(policy, (set, frozenset)):
            policy = partial(xla_fsdp_wrap.transformer_auto_wrap_policy, transformer_layer_cls=policy)
        if policy is not None:
            arguments["auto_wrap_policy"] = policy
        if self._checkpointed:
            arguments["auto_wrapper_callable"] = partial(_computed_again, self._checkpointed)
        # torch_xla shards only float32 parameters
        return xla_fsdp.XlaFullyShardedDataParallel(module.float(), **arguments)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        raise NotImplementedError(
            "XLAFSDPStrategy replaces the module's parameters by shards, which these optimizers do not have. Call "
            "model = fabric.setup_module(model), build the optimizer on model.parameters(), and call "
            "fabric.setup_optimizers(optimizer)."
        )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer`` itself.

        Raises:
            ValueError: no parameter of the optimizer is a shard.
        """
        if not any(getattr(each, "_is_sharded", False) for group in optimizer.param_groups for each in group["params"]):
            raise ValueError(
                f"The {type(optimizer).__name__} has no parameter that XLAFSDPStrategy has sharded. Build it on "
                "model.parameters() after model = fabric.setup_module(model)."
            )
        return optimizer

    # ---- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self, model: Any) -> Iterator[None]:
        with model.no_sync():
            yield
        run_recorded()

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients by their total norm over all ranks, and return the norm. ``error_if_nonfinite`` is
        ignored.
        """
        self.precision_plugin.unscale_gradients(optimizer)
        return module.clip_grad_norm_(max_norm=max_norm, norm_type=norm_type)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        raise NotImplementedError(
            "XLAFSDPStrategy cannot clip gradients by value, because torch_xla clips shards by their norm. Write "
            "fabric.clip_gradients(model, optimizer, max_norm=...)."
        )

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(  # type: ignore[override]
        self,
        path: str | Path,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: snapshots.Filters | None = None,
    ) -> None:
        """Write a folder with a file for each rank, or one file with all weights; every rank must call this method.

        Raises:
            FileExistsError: the folder exists and is not empty.
        """
        folder = Path(self.broadcast(path))
        if folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(f"The checkpoint {folder} exists. Remove it, or save under another name.")
        modules = [each for each in state.values() if isinstance(each, xla_fsdp.XlaFullyShardedDataParallel)]
        if len(modules) != 1:
            raise ValueError(
                f"A checkpoint of XLAFSDPStrategy holds one module that was set up, and this state has {len(modules)}. "
                'Write fabric.save(path, {"model": model, ...}).'
            )
        run_recorded()
        held = snapshots.of(state, filter or {}, self.states(self))
        held[_METADATA] = modules[0].get_shard_metadata()
        self.barrier("no rank has begun to write")
        file = self._file_in(folder)
        for rank in range(self.num_processes) if self._sequential_save else (self.local_rank,):
            if rank == self.local_rank:
                self.checkpoint_io.save_checkpoint(held, file, storage_options)
            if self._sequential_save:
                self.barrier(f"rank {rank} has written")
        if not self._saves_shards:
            self._put_together(folder)

    def _file_in(self, folder: Path) -> Path:
        return folder / f"checkpoint_rank-{self.global_rank:08d}-of-{self.world_size:08d}.pth"

    def _put_together(self, folder: Path) -> None:
        """Replace the folder, in which each rank has written a file, by one file with all weights."""
        if self.num_processes != self.world_size:
            raise CheckpointError(
                'XLAFSDPStrategy(state_dict_type="full"): the shards are on several machines, and one of them cannot '
                'consolidate them. Write state_dict_type="sharded".'
            )

        self.barrier("all shards are written")
        if self.is_global_zero:
            whole = folder.with_name(f"{folder.name}.consolidated")
            xla_fsdp.consolidate_sharded_model_checkpoints(str(folder / "checkpoint"), "_rank-*-of-*.pth", str(whole))
            shutil.rmtree(folder)
            files.move(whole, folder)
        self.barrier("the shards are consolidated")

    def load_checkpoint(  # type: ignore[override]
        self, path: str | Path, state: fabric.Target = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load this rank's file from a folder. If ``path`` is a file with all weights, the module must not be set up
        yet.
        """
        place = Path(self.broadcast(path))
        if place.is_dir():
            place = self._file_in(place)
            if not place.is_file():
                raise CheckpointError(
                    f"There is no {place}: another number of replicas has saved this checkpoint. Start as many, or "
                    "consolidate it with python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts."
                )
        rest = super().load_checkpoint(place, state, strict, weights_only)
        rest.pop(_METADATA, None)
        return rest


def _computed_again(classes: tuple[type[nn.Module], ...], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return xla_fsdp.XlaFullyShardedDataParallel(
        xla_fsdp.checkpoint_module(module) if isinstance(module, classes) else module, *args, **kwargs
    )
