"""Ranks in a custom training job of Google's Vertex AI, which runs the program once on each replica."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.clusters._machines import MachinesEnvironment, json_of
from drivetrain.clusters.environment import DEFAULT_PORT
from drivetrain.errors import ConfigurationError

# the pool of the primary replica, and the pool of the workers. Other pools contain parameter servers and evaluators,
# which do not train.
_POOLS = ("workerpool0", "workerpool1")


class VertexEnvironment(MachinesEnvironment):
    """Reads ``CLUSTER_SPEC``. The first ranks are in ``workerpool0``, and the other ranks in ``workerpool1``.

    Source: https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-spec-format

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 50
    evidence = "Vertex AI has set CLUSTER_SPEC"
    variables: ClassVar = ("CLUSTER_SPEC",)

    def _address_of_cluster(self) -> str:
        return self._replicas()[0].partition(":")[0]

    def _port_of_cluster(self) -> int:
        return int(self._replicas()[0].partition(":")[2] or DEFAULT_PORT)

    def num_nodes(self) -> int:
        return len(self._replicas())

    def node_rank(self) -> int:
        """Return the index of this replica among the replicas that train.

        Raises:
            ConfigurationError: this replica is a parameter server or an evaluator, or the replica's index is too large
                for the pool.
        """
        task = json_of(self.environ, "CLUSTER_SPEC")["task"]
        pool, index = task.get("type"), task.get("index", 0)
        if pool not in _POOLS:
            raise ConfigurationError(
                f"CLUSTER_SPEC says that this replica is in {pool!r}, but the replicas of workerpool0 and workerpool1 "
                "train. Run another program in the other pools, or move their replicas to workerpool1."
            )
        if not str(index).isdecimal() or int(index) >= self._size(pool):
            raise ConfigurationError(
                f"CLUSTER_SPEC says that this is replica {index!r} of {pool}, which has {self._size(pool)}. Replicas "
                "are numbered from 0: leave the variable as Vertex AI sets it, or unset it."
            )
        return int(index) + (0 if pool == _POOLS[0] else self._size(_POOLS[0]))

    def _size(self, pool: str) -> int:
        return len(json_of(self.environ, "CLUSTER_SPEC")["cluster"].get(pool, []))

    def _replicas(self) -> list[str]:
        spec = json_of(self.environ, "CLUSTER_SPEC")
        cluster = spec.get("cluster") if isinstance(spec, dict) and isinstance(spec.get("task"), dict) else None
        if not isinstance(cluster, dict):  # another program than Vertex AI has set the variable
            return []
        return [str(replica) for pool in _POOLS for replica in cluster.get(pool, [])]
