"""Ranks in a distributed task of dstack, which runs the commands once on each node."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.clusters._machines import MachinesEnvironment
from drivetrain.clusters.environment import ClusterEnvironment, reading


class DstackEnvironment(MachinesEnvironment):
    """Reads ``DSTACK_MASTER_NODE_IP``, ``DSTACK_NODE_RANK``, ``DSTACK_NODES_NUM`` and ``DSTACK_GPUS_PER_NODE``.

    Source: https://dstack.ai/docs/concepts/tasks#system-environment-variables

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 80
    evidence = "dstack has set DSTACK_NODES_NUM"
    variables: ClassVar = ("DSTACK_MASTER_NODE_IP", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM")

    def _address_of_cluster(self) -> str:
        return self.environ["DSTACK_MASTER_NODE_IP"]

    num_nodes = reading("DSTACK_NODES_NUM", MachinesEnvironment.num_nodes)

    def reserved_devices(self) -> int | None:
        return self._reserved("DSTACK_GPUS_PER_NODE")

    node_rank = reading("DSTACK_NODE_RANK", ClusterEnvironment.node_rank)
