"""Ranks of processes that ``horovodrun`` has started. If mpi4py is missing, also ranks of processes that Open MPI's
``mpirun`` has started.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from importlib.util import find_spec

from drivetrain.clusters.environment import DEFAULT_ADDRESS, ClusterEnvironment
from drivetrain.errors import ConfigurationError

_BY_HOROVOD = {
    "rank": "HOROVOD_RANK", "size": "HOROVOD_SIZE", "local rank": "HOROVOD_LOCAL_RANK",
    "local size": "HOROVOD_LOCAL_SIZE", "job": "HOROVOD_GLOO_RENDEZVOUS_PORT",
}  # fmt: skip
_BY_OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK", "size": "OMPI_COMM_WORLD_SIZE", "local rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local size": "OMPI_COMM_WORLD_LOCAL_SIZE", "job": "PMIX_NAMESPACE",
}  # fmt: skip
_PORTS = range(15_000, 20_000)  # lower than the ports that operating systems choose for outgoing connections


class HorovodEnvironment(ClusterEnvironment):
    """Reads the ranks from the variables of ``horovodrun``, or of Open MPI's ``mpirun``.

    On a single machine, the processes connect at the loopback address. The port is ``MASTER_PORT``, by default a port
    derived from the job's id. On several machines, set ``MASTER_ADDR`` and ``MASTER_PORT``, for example with ``mpirun
    -x MASTER_ADDR -x MASTER_PORT``. Every machine must have the same number of processes.

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 250
    evidence = "horovodrun or mpirun has started several processes"

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether ``horovodrun`` has started several processes. Also True if ``mpirun`` has started several processes
        and mpi4py is missing.
        """
        if environ.get(_BY_HOROVOD["size"], "1") != "1":
            return True
        if environ.get(_BY_OPEN_MPI["size"], "1") == "1" or find_spec("mpi4py") is not None:
            return False
        return "MASTER_ADDR" in environ or environ[_BY_OPEN_MPI["size"]] == environ.get(_BY_OPEN_MPI["local size"])

    def _number(self, what: str) -> int:
        names = _BY_HOROVOD if _BY_HOROVOD["rank"] in self.environ else _BY_OPEN_MPI
        return self.number(names[what])

    def _address_of_cluster(self) -> str:
        if self._number("local size") == self._number("size"):
            return DEFAULT_ADDRESS
        raise ConfigurationError(
            f"{self._number('size')} processes on several machines were started, and MASTER_ADDR is not set. Set "
            "MASTER_ADDR to the name of the machine of rank 0, and MASTER_PORT to a free port there, for all of them."
        )

    def _port_of_cluster(self) -> int:
        names = _BY_HOROVOD if _BY_HOROVOD["rank"] in self.environ else _BY_OPEN_MPI
        return _PORTS[zlib.crc32(self.environ.get(names["job"], "").encode()) % len(_PORTS)]

    def world_size(self) -> int:
        return self._number("size")

    def global_rank(self) -> int:
        return self._number("rank")

    def local_rank(self) -> int:
        return self._number("local rank")

    def node_rank(self) -> int:
        """The index of this machine. The ranks of a machine are consecutive, and all machines have the same number of
        ranks.
        """
        return self._number("rank") // self._number("local size")
