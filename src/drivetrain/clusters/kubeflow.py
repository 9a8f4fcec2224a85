"""Ranks in a PyTorchJob of Kubeflow (Training Operator v1), where each pod runs one process."""

from __future__ import annotations

from drivetrain.clusters.environment import ClusterEnvironment


class KubeflowEnvironment(ClusterEnvironment):
    """Reads ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE`` and ``RANK``. Every pod counts as a machine with one
    process.

    A TrainJob of Kubeflow Trainer v2 does not need this environment, because its pods start torchrun.

    The Trainer never detects this environment, because other systems set the same variables. Pass the environment in
    ``Trainer(plugins=[...])``.

    Args:
        environ: the environment variables, by default those of this process.
    """

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()

    def is_one_machine(self, num_nodes: int) -> bool:
        return self.world_size() == 1
