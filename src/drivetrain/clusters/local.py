"""Ranks without a cluster. The user starts the program on one machine, or by hand on each machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters.environment import DEFAULT_ADDRESS, ClusterEnvironment
from drivetrain.errors import ConfigurationError


class LocalEnvironment(ClusterEnvironment):
    """The environment without a cluster: one process of each machine starts the other processes of the machine.

    For a job on several machines, the user starts the program once on each machine, with the variables ``MASTER_ADDR``,
    ``MASTER_PORT`` and ``NODE_RANK``. In a process that another process has started, ``LOCAL_RANK`` is set.

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 0
    evidence = "no launcher or cluster has started the program"

    _main_port: int | None = None

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" not in environ:
            rank_zero_warn(
                f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, but not LOCAL_RANK: each "
                "process trains alone. Start the program with torchrun; or, with one process on each machine as in a "
                "PyTorchJob of Kubeflow, pass Trainer(plugins=[KubeflowEnvironment()])."
            )
        return True

    @property
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in self.environ

    def _address_of_cluster(self) -> str:
        return DEFAULT_ADDRESS

    def _port_of_cluster(self) -> int:
        """Return a free port. Later calls return the port of the first call."""
        if self._main_port is None:
            self._main_port = free_port()
        return self._main_port

    def world_size(self) -> int:
        if self._world_size is not None:
            return self._world_size
        return self.number("WORLD_SIZE", 1) if self.creates_processes_externally else 1

    def global_rank(self) -> int:
        if self._global_rank is not None:
            return self._global_rank
        return self.number("RANK", self.local_rank()) if self.creates_processes_externally else 0

    def local_rank(self) -> int:
        return self.number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        return self.number("NODE_RANK" if "NODE_RANK" in self.environ else "GROUP_RANK", 0)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the environment variables. For several machines, ``MASTER_ADDR`` and ``MASTER_PORT`` must be set.
        If another process has started this process, and the job has more processes, ``MASTER_PORT`` must be set, too.

        Raises:
            ConfigurationError: a variable is missing, or this machine's node rank is too large.
        """
        meeting = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in self.environ]
        if num_nodes > 1 and meeting:
            missing = f"{' and '.join(meeting)} {'are' if len(meeting) > 1 else 'is'} not set"
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but {missing}, and no cluster says where the machines meet. Start the program "
                "on each machine with MASTER_ADDR and MASTER_PORT of the first one and with NODE_RANK=0, 1, ..., or "
                "start it with torchrun."
            )
        if not 0 <= self.node_rank() < num_nodes:
            raise ConfigurationError(
                f"This machine is number {self.node_rank()} by NODE_RANK or GROUP_RANK, but num_nodes={num_nodes}. "
                "Number the machines from 0, or write num_nodes."
            )
        if self.creates_processes_externally and num_devices * num_nodes > 1 and "MASTER_PORT" in meeting:
            raise ConfigurationError(
                f"LOCAL_RANK={self.environ['LOCAL_RANK']} says that this process was started by another one, but "
                "MASTER_PORT is not set, and each would choose its own. Unset LOCAL_RANK, or set MASTER_PORT for all."
            )
        if "WORLD_SIZE" in self.environ:
            super().validate_settings(num_devices, num_nodes)

    def teardown(self) -> None:
        """Reset the number of processes, the rank and the port, so that a later Trainer chooses new values."""
        self.environ.pop("WORLD_SIZE", None)
        self._world_size = self._global_rank = self._main_port = None


def free_port() -> int:
    """Return a free TCP port that the system chooses."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


LightningEnvironment = LocalEnvironment
"""Lightning's name for :class:`LocalEnvironment`."""
