"""Ranks in a task of SkyPilot, which runs the program once on each node."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.clusters._machines import MachinesEnvironment
from drivetrain.clusters.environment import ClusterEnvironment, reading


class SkyPilotEnvironment(MachinesEnvironment):
    """Reads ``SKYPILOT_NODE_IPS``, ``SKYPILOT_NODE_RANK`` and ``SKYPILOT_NUM_GPUS_PER_NODE``.

    ``SKYPILOT_NODE_IPS`` has one address per line.

    Source: https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 90
    evidence = "SkyPilot has set SKYPILOT_NODE_IPS"
    variables: ClassVar = ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK")

    def _address_of_cluster(self) -> str:
        return self.environ["SKYPILOT_NODE_IPS"].split()[0]

    def num_nodes(self) -> int:
        return len(self.environ["SKYPILOT_NODE_IPS"].split())

    def reserved_devices(self) -> int | None:
        return self._reserved("SKYPILOT_NUM_GPUS_PER_NODE")

    node_rank = reading("SKYPILOT_NODE_RANK", ClusterEnvironment.node_rank)
