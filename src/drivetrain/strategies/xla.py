"""The complete model on every XLA device, in replicas that torch_xla starts; gradients are averaged over them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.packages import torch_xla, xla_multiprocessing
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.clusters.xla import XLAEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.precision.precision import Precision
from drivetrain.strategies import rank_files
from drivetrain.strategies._xla import XLAExecution, checked, run_recorded
from drivetrain.strategies._xla_group import XLAGroup
from drivetrain.strategies._xla_loader import on_device
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.gradient_exchange import GradientExchanges
from drivetrain.strategies.group import Group, LoneGroup
from drivetrain.strategies.parallel import until_thawed
from drivetrain.strategies.strategy import Strategy, StrategyRegistry


@StrategyRegistry.register("xla")
@StrategyRegistry.register("xla_debug", debug=True)
class XLAStrategy(XLAExecution, DDPStrategy):
    """One replica per XLA device, each in a process that torch_xla starts; gradients are averaged after each window.

    It does not use ``torch.distributed``. With one device, this process is the only replica; results of collectives
    have the same form as with several replicas: :meth:`all_gather` stacks. Before the replicas
    run, the ranks are 0, the world size is 1, and there is no root device.

    Args:
        accelerator, parallel_devices, precision_plugin: as for every strategy.
        checkpoint_io: the checkpoint store; ``None``: an ``XLACheckpointIO``.
        debug: let torch_xla report why it compiles and where values are read (``PT_XLA_DEBUG``).
        sync_module_states: give all replicas the parameters and buffers of rank 0 before training.
        unknown: refused by name.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        TypeError: ``checkpoint_io`` or ``precision_plugin`` has another type.
    """

    strategy_name = "xla"

    facts = XLAExecution.facts.but(is_distributed=True, start_method="xla")
    synchronises_batchnorm = False

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        **unknown: Any,
    ) -> None:
        checkpoint_io, precision_plugin = checked(type(self), unknown, checkpoint_io, precision_plugin)
        super().__init__(
            accelerator, parallel_devices, XLAEnvironment(), checkpoint_io, precision_plugin, start_method="xla"
        )
        self.debug = debug
        self.sync_module_states = sync_module_states
        self._device: torch.device | None = None  # the device of this replica, once it runs
        self._exchanges = GradientExchanges()
        self._loaders: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_device": None, "_exchanges": GradientExchanges(), "_loaders": []}

    def agreed_options(self) -> dict[str, Any]:
        return {**super().agreed_options(), "sync_module_states": self.sync_module_states}

    # ---- replicas ------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this replica.

        Raises:
            RuntimeError: the replicas do not run yet.
        """
        if self._device is None:
            raise RuntimeError(
                f"{type(self).__name__}.root_device is known when the replicas run, inside of fit, validate, test, "
                "predict or a function that Engine.launch has called, and this is before."
            )
        return self._device

    def set_ranks(self, environment: ClusterEnvironment, num_nodes: int) -> None:
        """Reset the ranks of an earlier job; torch_xla's runtime determines the ranks of this job."""
        self.num_nodes, self._outlived = num_nodes, False
        self._groups = self._device = None
        self._store_ranks(world_size=1, node_rank=0, global_rank=0, local_rank=0)

    def setup_environment(self) -> None:
        if self.num_processes == 1:
            self._be_the_replica()
        self._device = torch.device(torch_xla.device())
        super().setup_environment()

    def _be_the_replica(self) -> None:
        """Let torch_xla set up this process for one device.

        Raises:
            ConfigurationError: a launcher has started several processes.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that a launcher has started several processes, and "
                f"{type(self).__name__} starts its replicas itself. Start the program once on each machine, without "
                "a launcher."
            )
        xla_multiprocessing.spawn(_nothing, nprocs=1)

    def _check_group(self) -> None:
        """Do nothing: a process group that the user has created is not used."""

    def _meet(self) -> None:
        """Do nothing: the runtime has connected the replicas."""

    def make_world(self) -> Group:
        if self._device is None or self._outlived:
            return LoneGroup(self.global_rank)
        return XLAGroup(self._device)

    def _make_groups(self) -> tuple[Group, Group, Group]:
        made = super()._make_groups()
        if self._device is None:
            self._groups = None  # at the next call, the replicas may run
        return made

    # ---- between ranks -------------------------------------------------------------------------------------------

    def reduce(  # type: ignore[override]  # this strategy's first argument has another name in the field
        self, output: Any = None, group: Any = None, reduce_op: Any = "mean", *, tensor: Any = None
    ) -> Any:
        """Return the reduction of a tensor over all ranks; return other values unchanged.

        Args:
            output: a tensor of the same shape and dtype on every rank; ``tensor`` is an alias of this argument.
            tensor: the name of this argument in the other strategies.
            group: ignored, unless it is a ``drivetrain.strategies.Group``: torch_xla reduces over all replicas.
            reduce_op: "mean" (the default, also for ``None``), "sum", "min", "max", "product", or a ``ReduceOp``.
        """
        return super().reduce(output if tensor is None else tensor, group, reduce_op)

    def _group_of(self, group: Any) -> Group:
        return Familiar._group_of(self, group)  # torch_xla's collectives involve all replicas

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked to ``(world_size, *tensor.shape)``, also with one replica.

        Args:
            tensor: the same shape and dtype on every rank; before the replicas run, it is returned unchanged.
            group: ignored, unless it is a ``drivetrain.strategies.Group``: torch_xla gathers from all replicas.
            sync_grads: let gradients flow back to the source rank of each slice.

        Raises:
            NotImplementedError: ``tensor`` is not a tensor.
        """
        if not isinstance(tensor, Tensor):
            raise NotImplementedError(
                f"{type(self).__name__}.all_gather() takes tensors, and got a {type(tensor).__name__}. Pass a tensor, "
                "or call world.gather_objects(obj)."
            )
        if self._device is None:
            return tensor
        return self._group_of(group).all_gather(tensor, sync_grads)

    # ---- the model -----------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = Strategy.setup_module(self, module, move_to_device)
        if self.sync_module_states and self.world.size > 1:
            self.share_from_rank_zero([*module.parameters(), *module.buffers()])
        if self._wraps and self.world.size > 1:
            self._exchanges.begin(module, self.world.size, self._total, lambda handle: None)
        run_recorded()
        return module

    def _total(self, tensor: Tensor, name: str) -> None:
        world = self.world
        assert isinstance(world, XLAGroup)  # the replicas run
        world.total(tensor)

    def bind(self, name: str) -> Any:
        if name != "training_step":
            return super().bind(name)
        self._exchanges.include_thawed(self.model)
        return until_thawed(super().bind(name), self._exchanges.frozen(self.model), lambda: self.bind(name))

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        with self._exchanges.paused(model), super().accumulating(model):
            yield

    # ---- data and checkpoints ------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return ``dataloader`` as torch_xla's ``MpDeviceLoader``, whose batches are on the device."""
        loader = on_device(dataloader, self.root_device)
        if hasattr(loader, "close"):
            self._loaders.append(loader)
        return loader

    def save_checkpoint(self, checkpoint: Any, filepath: str | Path, storage_options: Any = None) -> None:
        run_recorded()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete on the first rank of every machine; every rank may call it."""
        if self.local_rank == 0:
            self.checkpoint_io.remove_checkpoint(filepath)
            rank_files.remove(self, filepath)

    def teardown(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._exchanges.close()
        before = self._device
        self._device = HOST if before is None else before  # the model's device before the replicas run
        try:
            super().teardown()
        finally:
            self._device = before


def _nothing(index: int) -> None:
    """Do nothing."""
