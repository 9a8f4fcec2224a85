"""Ranks of tasks that ``jsrun`` has started in IBM's LSF."""

from __future__ import annotations

import socket
from pathlib import Path

from drivetrain.clusters.environment import ClusterEnvironment, reading
from drivetrain.errors import ConfigurationError


class LSFEnvironment(ClusterEnvironment):
    """Reads the ranks from the variables that ``jsrun`` sets. Each process is one task of ``jsrun``.

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 300
    evidence = "LSF's jsrun has set JSM_NAMESPACE_SIZE"
    variables = ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE")

    def _address_of_cluster(self) -> str:
        return self._hosts()[0]

    def _port_of_cluster(self) -> int:
        """Return a port from 10000 to 10999. Every task computes the same port from the job's id."""
        return 10_000 + self.number("LSB_JOBID") % 1_000

    world_size = reading("JSM_NAMESPACE_SIZE", ClusterEnvironment.world_size)
    global_rank = reading("JSM_NAMESPACE_RANK", ClusterEnvironment.global_rank)
    local_rank = reading("JSM_NAMESPACE_LOCAL_RANK", ClusterEnvironment.local_rank)

    def node_rank(self) -> int:
        """Return the index of this machine in the job's list of hosts.

        Raises:
            ConfigurationError: this machine is not in the list.
        """
        hosts, own = self._hosts(), socket.gethostname()
        for rank, host in enumerate(hosts):
            if own == host or own.partition(".")[0] == host.partition(".")[0]:
                return rank
        raise ConfigurationError(
            f"This machine calls itself {own!r}, but the hosts of the LSF job are {', '.join(hosts)}, as "
            "LSB_DJOB_RANKFILE says. Start the program with jsrun."
        )

    def _hosts(self) -> list[str]:
        """Return the compute hosts in the order of LSF's file, each once. The first line is the launching host, and is
        skipped.
        """
        path = Path(self.environ.get("LSB_DJOB_RANKFILE", ""))
        try:
            lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ConfigurationError(
                f"The list of hosts that LSB_DJOB_RANKFILE names cannot be read: {error}. Start the program with "
                "jsrun, or set MASTER_ADDR."
            ) from error
        if len(lines) < 2:
            raise ConfigurationError(
                f"LSB_DJOB_RANKFILE={path} lists {len(lines)} hosts: the one that launches and none that computes. Ask "
                "LSF for at least one more."
            )
        return list(dict.fromkeys(lines[1:]))
