"""Lightning's ``fabric.strategies`` for sharded models: FSDP and model parallelism, with Fabric's signatures.

Both use torch's FSDP2; see docs/fsdp.md and docs/model_parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain import strategies as plain
from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.compiled import compiled_in_place
from drivetrain.base.introspect import calls, reads, temporarily
from drivetrain.base.packages import fsdp, fsdp_wrap
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.compat.fabric_strategies import FabricParallelStrategy, States, Strategy, Target, entered
from drivetrain.errors import CheckpointNameError, described
from drivetrain.precision.precision import Precision
from drivetrain.strategies import fsdp_blocks
from drivetrain.strategies.model_parallel import Size
from drivetrain.strategies.optimizer_states import by_number, parameter_names
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_ON_ONE_MACHINE = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


class _ShardedStates(States):
    """Loads the shards of this rank from optimizer states, for the strategies of this file."""

    loads_optimizers = True
    _strategy: _Sharded

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._strategy.load_optimizer_states([optimizer], [self._numbered(optimizer, state)], {})

    def _numbered(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace the parameters' names, which Lightning's files contain, by their numbers in the optimizer."""
        if not any(isinstance(each, str) for group in state["param_groups"] for each in group["params"]):
            return state
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = [each for each in self._strategy.loading if not own.isdisjoint(map(id, each.parameters()))]
        return by_number(state, parameter_names(modules[0], optimizer)) if modules else state


class _Sharded(Strategy):
    """Base class of both strategies.

    It never moves a complete module to a device, only this rank's shards.
    """

    states = _ShardedStates
    large: tuple[str, ...]
    loading: Sequence[nn.Module] = ()  # the modules into which a checkpoint is being loaded

    def load_checkpoint(  # type: ignore[override]
        self, path: str | Path, state: Target = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file or a folder into the objects of ``state``, and return the other entries. Each rank reads its own
        shards.

        Raises:
            CheckpointError: the checkpoint does not fit, or is a folder that Lightning has written.
        """
        if Path(path, ".metadata").is_file():  # torch.distributed.checkpoint unpickles this file
            raise CheckpointNameError(
                f"{path} is a folder that Lightning has written, and drivetrain's folders have another format. Run "
                f"python -m lightning.fabric.utilities.consolidate_checkpoint {path} where Lightning is installed, and "
                "load the file that it writes."
            )
        named = state if isinstance(state, Mapping) else {}
        self.large = tuple(f"{name}." for name, each in named.items() if isinstance(each, (nn.Module, Optimizer)))
        self.loading = [each for each in named.values() if isinstance(each, nn.Module)]
        try:
            return super().load_checkpoint(path, state, strict, weights_only)
        finally:
            self.loading = ()

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, because the complete module can be too large for the device; ``setup_module`` moves the
        shards.
        """

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which to create layers in the precision's dtype; with ``empty_init``, on the device "meta".

        For a layer on "meta", ``setup_module`` allocates this rank's shards and calls ``reset_parameters``.
        """
        on_meta = torch.device("meta") if empty_init else None
        return entered(on_meta, self.precision_plugin.module_init_context(), self.module_sharded_context())

    module_sharded_context: Any = calls("model_sharded_context")
    """Context in which a strategy may shard each layer when it is created. ``setup_module`` shards the rest."""
    get_module_state_dict: Any = calls("module_state")
    """``get_module_state_dict(module)``: return the state of ``module`` for a checkpoint. It contains shards, or (only
    on rank 0) complete tensors. Every rank must call this method.
    """

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shards of ``module`` from complete tensors or from shards."""
        self.load_module_state(module, state_dict, strict)


class FabricFSDPStrategy(  # type: ignore[misc]  # Fabric's signatures, on purpose
    _Sharded, FabricParallelStrategy, plain.FSDPStrategy
):
    """FSDP2, with Fabric's signatures; see :class:`drivetrain.strategies.FSDPStrategy`.

    Args:
        accelerator, parallel_devices, cluster_environment, precision, process_group_backend, timeout: as for DDP.
        cpu_offload, mixed_precision, auto_wrap_policy, activation_checkpointing, activation_checkpointing_policy,
            sharding_strategy, device_mesh: as for drivetrain's FSDPStrategy. Objects of torch's FSDP1, such as
            ``CPUOffload``, are also accepted.
        state_dict_type: "sharded": checkpoints are folders, and each process writes its own shards; "full": checkpoints
            are files.
        others: further arguments of torch's FSDP1, which are ignored with a warning.
    """

    _plain: type = plain.FSDPStrategy

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: fsdp_blocks.Policy | None = None,
        activation_checkpointing: fsdp_blocks.Policy | None = None,
        activation_checkpointing_policy: fsdp_blocks.Policy | None = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "sharded",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        **others: Any,
    ) -> None:
        plain.FSDPStrategy.__init__(
            self, accelerator, parallel_devices, cluster_environment, None, precision, process_group_backend, timeout,
            cpu_offload, mixed_precision, auto_wrap_policy, activation_checkpointing, activation_checkpointing_policy,
            sharding_strategy, state_dict_type, device_mesh,
            gradient_exchange="window",  # the program's no_backward_sync decides when gradients are exchanged
            **others,
        )  # fmt: skip
        self.mixed_precision = mixed_precision
        self._asked_sharding = self.options.sharding
        self._wrapped: WeakSet[nn.Module] = WeakSet()  # the layers that the program has wrapped
        self._wraps_layers = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_wrapped": WeakSet()}

    def set_ranks(self, environment: ClusterEnvironment, num_nodes: int) -> None:
        super().set_ranks(environment, num_nodes)
        on_one = _ON_ONE_MACHINE.get(self._asked_sharding)
        if num_nodes == 1 and on_one is not None and self.options.device_mesh is None:
            self.options = replace(self.options, sharding=on_one)  # one machine needs no hybrid sharding

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Context in which to call torch's ``wrap(layer)``. FSDP later gathers this layer's parameters separately."""
        if self._wraps_layers:  # torch's context cannot be entered twice
            return nullcontext()
        return entered(temporarily(vars(self), _wraps_layers=True), fsdp_wrap.enable_wrap(wrapper_cls=self._wrap))

    def _wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        self._wrapped.add(module)
        return module

    def _shard(self, module: nn.Module) -> None:
        chosen = [each for each in module.modules() if each in self._wrapped]
        if not chosen:
            super()._shard(module)
            return
        given = self.options
        if given.auto_wrap_policy is not None:
            rank_zero_warn(
                "FSDPStrategy got an auto_wrap_policy, and the program has also wrapped layers itself. Use one "
                "of the two."
            )
        policy = replace(given, auto_wrap_policy=lambda each: any(each is own for own in chosen))
        with temporarily(vars(self), options=policy):
            super()._shard(module)

    @property
    def _fsdp_kwargs(self) -> dict[str, Any]:
        """The arguments that Lightning would pass to torch's FSDP1, for programs that read this attribute."""
        policy = {} if (given := self.options.auto_wrap_policy) is None else {"auto_wrap_policy": given}
        return {"use_orig_params": True, **policy}

    @property
    def cpu_offload(self) -> Any:
        """A ``torch.distributed.fsdp.CPUOffload`` that tells whether shards are kept in host memory."""
        return fsdp.CPUOffload(offload_params=self.options.offloads)

    @property
    def sharding_strategy(self) -> Any:
        """The sharding, as a member of torch's ``ShardingStrategy``."""
        return fsdp.ShardingStrategy[self._asked_sharding]

    mixed_precision_config: Any = reads(
        "mixed_precision", "The dtypes in which parameters are gathered and gradients reduced; None: the parameters'."
    )


class FabricModelParallelStrategy(  # type: ignore[misc]  # as above
    _Sharded, FabricParallelStrategy, plain.ModelParallelStrategy
):
    """Lets a user's function split and shard the model; see :class:`drivetrain.strategies.ModelParallelStrategy`.

    Args:
        parallelize_fn: called with the module and the device mesh; returns the module to train. Parameters that this
            function does not shard are sharded over the dimension "data_parallel" of the mesh.
        data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout: as for
            drivetrain's ModelParallelStrategy.
    """

    _plain: type = plain.ModelParallelStrategy

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        plain.ModelParallelStrategy.__init__(
            self, data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout,
            gradient_exchange="window",  # the program's no_backward_sync decides when gradients are exchanged
        )  # fmt: skip
        self._parallelize_fn = parallelize_fn

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Copy rank 0's weights to every rank. Call ``parallelize_fn``, and shard the parameters that it has not
        sharded.

        Raises:
            TypeError: ``parallelize_fn`` does not return a module.
        """
        self._share(module)  # the ranks' random weights can differ
        made = self._parallelize_fn(module, self.device_mesh)
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"ModelParallelStrategy(parallelize_fn=...): the function returned {described(made)}. Return the "
                "module that is trained."
            )
        return super().setup_module(compiled_in_place(made))

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        self._loads = bool(empty_init)  # a checkpoint will set all parameters
        return super().module_init_context(empty_init)

    def _split(self, module: nn.Module) -> None:
        """Do nothing, because ``parallelize_fn`` has split the layers."""
