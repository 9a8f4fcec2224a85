"""All XLA devices from one process: batches, and optionally parameters, are sharded over a mesh of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.packages import torch_xla, xla_runtime, xla_spmd
from drivetrain.base.tree import map_leaves
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.errors import ConfigurationError, unknown_value
from drivetrain.precision.precision import Precision
from drivetrain.strategies._xla import XLAExecution, checked, run_recorded
from drivetrain.strategies.strategy import StrategyRegistry

Sharding = Literal["data", "full"]
_AXIS = "data"


@StrategyRegistry.register("xla_spmd")
@StrategyRegistry.register("xla_spmd_full", sharding="full")
class XLASPMDStrategy(XLAExecution):
    """One process drives all XLA devices of this machine: the compiler divides the work over a mesh of devices (GSPMD).

    The module sees the complete batch. Losses and metrics are therefore values of the complete batch, and need no
    reduction. A loader's batch size is the global batch size. If the first dimension of a batch is not divisible by the
    number of devices, every device computes the complete batch. The result is correct, but the computation is slow.

    Before the first tensor on a device is created, the strategy switches torch_xla to SPMD mode
    (``torch_xla.runtime.use_spmd``). The mode lasts until the process ends.

    Args:
        accelerator, precision_plugin: as for every strategy.
        parallel_devices: all devices of this machine; ``None``: the devices that the Trainer's arguments select.
        checkpoint_io: the checkpoint store; ``None``: an ``XLACheckpointIO``.
        debug: let torch_xla report the reasons for compilations and the places where values are read
            (``PT_XLA_DEBUG``).
        sharding: "data": batches are sharded, and every device has all parameters. "full": parameters, gradients and
            optimizer states are also sharded, each along the largest dimension that is divisible by the number of
            devices. Checkpoints contain complete tensors in both cases.
        unknown: any other argument raises an error.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.
        TypeError: ``checkpoint_io`` or ``precision_plugin`` has a wrong type.
        ConfigurationError: ``sharding`` is unknown.
    """

    facts = XLAExecution.facts.but(drives_all_devices=True)

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sharding: Sharding = "data",
        **unknown: Any,
    ) -> None:
        checkpoint_io = checked(type(self), unknown, checkpoint_io, precision_plugin)
        if sharding not in get_args(Sharding):
            raise unknown_value(type(self).__name__, "sharding", sharding, get_args(Sharding))
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.own_parts.devices = tuple(parallel_devices or ())
        self.debug = debug
        self.sharding: Sharding = sharding
        self._mesh: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mesh": None}

    @property
    def root_device(self) -> torch.device:
        """The virtual device that represents all devices."""
        return torch.device("xla", 0)

    @property
    def num_devices(self) -> int:
        """The number of devices in the mesh."""
        return len(self.parallel_devices or self.own_parts.devices)

    def setup_environment(self) -> None:
        if not xla_runtime.is_spmd():
            xla_runtime.use_spmd()
        count = int(xla_runtime.global_runtime_device_count())
        if self.num_devices != count:
            raise ConfigurationError(
                f"{type(self).__name__} computes on all {count} XLA devices, not on devices={self.num_devices}. "
                f'Write devices={count} or devices="auto".'
            )
        self._mesh = xla_spmd.Mesh(range(count), (count,), (_AXIS,))
        xla_spmd.set_global_mesh(self._mesh)
        super().setup_environment()

    # ---- the model -----------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        if self.sharding == "full" and move_to_device:
            for parameter in module.parameters():
                self._shard(parameter)
        run_recorded()
        return module

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._shard_state(optimizer)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        super().load_optimizer_states(optimizers, states, module_state)
        for optimizer in optimizers:
            self._shard_state(optimizer)

    def _shard_state(self, optimizer: Optimizer) -> None:
        """Shard the optimizer's state of each parameter in the same way as the parameter."""
        if self.sharding == "full":
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        self._shard(value)

    def _shard(self, tensor: Tensor) -> None:
        dimension = largest_divisible(tensor.shape, self.num_devices)
        if dimension is not None:
            self._mark(tensor, dimension)

    def _mark(self, tensor: Tensor, dimension: int) -> None:
        if tensor.device.type == "xla" and not torch_xla._XLAC._get_xla_sharding_spec(tensor):
            axes = [_AXIS if each == dimension else None for each in range(tensor.dim())]
            xla_spmd.mark_sharding(tensor, self._mesh, tuple(axes))

    # ---- data ----------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        map_leaves(self._shard_samples, batch)
        return batch

    def _shard_samples(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) and len(leaf) % self.num_devices == 0:
            self._mark(leaf, 0)
        return leaf


def largest_divisible(shape: Sequence[int], devices: int) -> int | None:
    """Return the index of the largest dimension that is divisible by ``devices``, or ``None`` if no dimension is
    divisible. Of several equally large dimensions, return the first.
    """
    divisible = [index for index, size in enumerate(shape) if size and size % devices == 0]
    return max(divisible, key=lambda index: (shape[index], -index)) if divisible else None
