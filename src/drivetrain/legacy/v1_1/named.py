"""The named accelerators of the 1.1 generation, each on top of one of today's strategies."""

from __future__ import annotations

from typing import Any

from drivetrain.legacy.v1_1.accelerators import Accelerator


class _Spawns(Accelerator):
    """Starts its processes from this one.

    Args:
        trainer, cluster_environment, ddp_plugin: as for :class:`Accelerator`.
        nprocs: how many processes; ``None``: as many as the Trainer is told.
    """

    strategy_name = "ddp_spawn"

    def __init__(
        self, trainer: Any = None, nprocs: int | None = None, cluster_environment: Any = None, ddp_plugin: Any = None
    ) -> None:
        super().__init__(trainer, cluster_environment, ddp_plugin)
        self.nprocs = nprocs


class CPUAccelerator(Accelerator):
    """One process on the CPU."""

    hardware, strategy_name = "cpu", "single_device"


class GPUAccelerator(Accelerator):
    """One process on one GPU."""

    hardware, strategy_name = "gpu", "single_device"


class DataParallelAccelerator(Accelerator):
    """One process on all devices of the machine: each works on its part of every batch."""

    strategy_name, nickname = "dp", "dp"


class DDPAccelerator(Accelerator):
    """A process for each device, each of which runs the program; gradients are averaged."""

    nickname = "ddp"


class DDP2Accelerator(Accelerator):
    """A process for each machine, which works on all devices there; gradients are averaged between machines."""

    strategy_name, nickname = "ddp2", "ddp2"


class DDPSpawnAccelerator(_Spawns):
    """:class:`DDPAccelerator` whose processes are started from this one."""

    nickname = "ddp"


class DDPCPUSpawnAccelerator(_Spawns):
    """The same on the CPU."""

    hardware, nickname = "cpu", "ddp_cpu"


class DDPHPCAccelerator(Accelerator):
    """:class:`DDPAccelerator` in processes that a cluster has started."""

    nickname, made_by_cluster = "ddp", True


class DDPCPUHPCAccelerator(DDPHPCAccelerator):
    """The same on the CPU."""

    hardware, nickname = "cpu", "ddp_cpu"


class HorovodAccelerator(Accelerator):
    """Processes that ``horovodrun`` or ``mpirun`` has started; gradients are averaged asynchronously."""

    strategy_name, nickname = "horovod", "horovod"


class TPUAccelerator(Accelerator):
    """A process for each core of a TPU, by ``torch_xla``."""

    hardware, strategy_name = "tpu", "xla"
