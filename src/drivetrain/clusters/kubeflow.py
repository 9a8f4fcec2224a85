"""Kubeflow's PyTorchJob: one pod per process."""

from __future__ import annotations

from drivetrain.clusters.environment import ClusterEnvironment


class KubeflowEnvironment(ClusterEnvironment):
    """Reads ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE`` and ``RANK``. Every pod is a machine with one process.

    The Trainer never detects it, because these variables alone are ambiguous: pass it in ``Trainer(plugins=[...])``.

    Args:
        environ: the environment variables; ``None``: the variables of this process.
    """

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()

    def is_one_machine(self, num_nodes: int) -> bool:
        return self.world_size() == 1
