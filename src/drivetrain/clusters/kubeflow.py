"""Kubeflow's PyTorchJob (Training Operator v1): one pod per process."""

from __future__ import annotations

from drivetrain.clusters.environment import ClusterEnvironment


class KubeflowEnvironment(ClusterEnvironment):
    """Reads ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE`` and ``RANK``. Every pod is a machine with one process.

    This environment is for the operator's first version. A TrainJob of Kubeflow Trainer v2 needs no such environment,
    because its pods start torchrun.

    The Trainer never detects this environment, because other systems set the same variables. Pass it in
    ``Trainer(plugins=[...])``.

    Args:
        environ: the environment variables; ``None``: the variables of this process.
    """

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()

    def is_one_machine(self, num_nodes: int) -> bool:
        return self.world_size() == 1
