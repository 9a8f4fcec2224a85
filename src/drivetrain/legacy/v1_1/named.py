"""The accelerators that flags of Lightning 1.1's Trainer can name; each uses a strategy of drivetrain."""

from __future__ import annotations

from typing import Any

from drivetrain.legacy.v1_1.accelerators import Accelerator


class _Spawns(Accelerator):
    """Base class of accelerators that start the other processes from this process.

    Args:
        trainer, cluster_environment, ddp_plugin: as for :class:`Accelerator`.
        nprocs: the number of processes; ``None``: the Trainer's number.
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
    """One process for all devices of the machine; each device gets a part of every batch."""

    strategy_name, nickname = "dp", "dp"


class DDPAccelerator(Accelerator):
    """One process per device; each process runs the program, and gradients are averaged."""

    nickname = "ddp"


class DDP2Accelerator(Accelerator):
    """One process per machine, which uses all devices of the machine; gradients are averaged over the machines."""

    strategy_name, nickname = "ddp2", "ddp2"


class DDPSpawnAccelerator(_Spawns):
    """:class:`DDPAccelerator`, with child processes of this process."""

    nickname = "ddp"


class DDPCPUSpawnAccelerator(_Spawns):
    """:class:`DDPSpawnAccelerator` on the CPU."""

    hardware, nickname = "cpu", "ddp_cpu"


class DDPHPCAccelerator(Accelerator):
    """:class:`DDPAccelerator` with processes started by a cluster."""

    nickname, made_by_cluster = "ddp", True


class DDPCPUHPCAccelerator(DDPHPCAccelerator):
    """:class:`DDPHPCAccelerator` on the CPU."""

    hardware, nickname = "cpu", "ddp_cpu"


class HorovodAccelerator(Accelerator):
    """``horovodrun`` or ``mpirun`` starts the processes; gradients are averaged asynchronously."""

    strategy_name, nickname = "horovod", "horovod"


class TPUAccelerator(Accelerator):
    """One process per TPU core, with ``torch_xla``."""

    hardware, strategy_name = "tpu", "xla"
