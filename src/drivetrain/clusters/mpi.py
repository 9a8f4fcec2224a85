"""Ranks of processes that ``mpirun`` has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from drivetrain.base.packages import mpi
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.clusters.local import free_port

# Variables that contain the number of processes. Open MPI sets the first, MPICH and Intel MPI set the second, and
# MVAPICH sets the third. If none is set, mpi4py is not imported, because importing it without a launcher can end the
# process.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class _Job:
    """The information from MPI: this process's rank, the host of each rank in order, and rank 0's port."""

    rank: int
    hosts: tuple[str, ...]
    port: int


class MPIEnvironment(ClusterEnvironment):
    """Takes the ranks from MPI's world communicator, through mpi4py.

    The first read of a rank or a size is a collective operation of MPI, so all ranks must read one. This is also true
    for the main address and port, unless ``MASTER_ADDR`` and ``MASTER_PORT`` are set.

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 200
    evidence = "mpirun has started several processes"

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether MPI's world has several processes. Warns if ``mpirun`` has started several processes and mpi4py is
        missing.
        """
        started = next((environ[name] for name in _SIZES if environ.get(name, "1") != "1"), None)
        if started is None:
            return False
        if find_spec("mpi4py") is None:
            rank_zero_warn(
                f"mpirun has started {started} processes, but mpi4py is not installed, so each would train alone. "
                "Install it: pip install mpi4py"
            )
            return False
        return bool(mpi.COMM_WORLD.Get_size() > 1)

    _told: _Job | None = None

    @property
    def _job(self) -> _Job:
        if self._told is None:
            world = mpi.COMM_WORLD
            told: list[tuple[str, int]] = world.allgather((socket.gethostname(), free_port()))
            self._told = _Job(world.Get_rank(), tuple(host for host, _ in told), told[0][1])
        return self._told

    def _address_of_cluster(self) -> str:
        return self._job.hosts[0]

    def _port_of_cluster(self) -> int:
        return self._job.port

    def world_size(self) -> int:
        return len(self._job.hosts)

    def global_rank(self) -> int:
        return self._job.rank

    def local_rank(self) -> int:
        """Return how many lower ranks are on this machine."""
        job = self._job
        return job.hosts[: job.rank].count(job.hosts[job.rank])

    def node_rank(self) -> int:
        """Return the index of this machine in the list of all machines, sorted by name."""
        job = self._job
        return sorted(set(job.hosts)).index(job.hosts[job.rank])
