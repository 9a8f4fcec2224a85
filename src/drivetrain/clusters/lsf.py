"""IBM's LSF: tasks that ``jsrun`` has started."""

from __future__ import annotations

import socket
from pathlib import Path

from drivetrain.clusters.environment import ClusterEnvironment, reading
from drivetrain.errors import ConfigurationError


class LSFEnvironment(ClusterEnvironment):
    """Each process is one task. ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence over values from the job.

    Args:
        environ: the environment variables; ``None``: the variables of this process.
    """

    detect_priority = 300
    evidence = "LSF's jsrun has set JSM_NAMESPACE_SIZE"
    variables = ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE")

    def _address_of_cluster(self) -> str:
        return self._hosts()[0]

    def _port_of_cluster(self) -> int:
        """A port between 10000 and 10999 that every task derives from the job's id."""
        return 10_000 + self.number("LSB_JOBID") % 1_000

    world_size = reading("JSM_NAMESPACE_SIZE", ClusterEnvironment.world_size)
    global_rank = reading("JSM_NAMESPACE_RANK", ClusterEnvironment.global_rank)
    local_rank = reading("JSM_NAMESPACE_LOCAL_RANK", ClusterEnvironment.local_rank)

    def node_rank(self) -> int:
        """The index of this machine in the job's list of hosts.

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
        """Return the compute hosts, each once, in order. The first line of LSF's file is skipped, because it names the
        launching host.
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
