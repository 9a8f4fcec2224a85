"""Read the ranks in a worker of Ray Train, a process in which ``TorchTrainer`` runs a training function."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError


def is_worker(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a worker of Ray Train's TorchTrainer."""
    train = sys.modules.get("ray.train")
    if train is None or "RANK" not in environ:
        return False
    try:
        return environ["RANK"] == str(train.get_context().get_world_rank())
    except Exception:  # outside of a worker, the exception depends on the version of Ray
        return False


class RayTrainEnvironment(ClusterEnvironment):
    """Reads the ranks in a worker of Ray Train, where ``TorchTrainer`` has already created the process group.

    The variables are ``RANK``, ``LOCAL_RANK``, ``NODE_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``.
    ``ScalingConfig`` sets the number of workers, and Ray chooses their machines. The Trainer therefore ignores
    ``num_nodes``. Leave ``devices`` out.

    Args:
        environ: the environment variables, by default those of this process.
    """

    # Higher than the priorities of SLURM and torchrun, because a worker inherits their variables if they have started
    # Ray.
    detect_priority = 600
    evidence = "this process is a worker of Ray Train"
    report_callback = "drivetrain.integrations.ray:RayTrainReportCallback"

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        return is_worker(environ)

    def node_rank(self) -> int:
        return self.number("NODE_RANK")

    def nodes_meant(self, given: int) -> int:
        """Return the number of machines. Each machine must have the same number of workers."""
        return self.world_size() // self.local_world_size(given)

    def local_world_size(self, num_nodes: int) -> int:
        return self.number("LOCAL_WORLD_SIZE")

    def devices_of_processes(self, count: int) -> list[int]:
        """Return the index of each worker's first device.

        A worker sees the devices of all workers of its machine, in the order of the workers. All workers have the same
        number of devices, or several workers share one device.
        """
        workers = self.local_world_size(1)
        return [rank * count // workers for rank in range(workers)]

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check that there is one device for each worker on this machine.

        Raises:
            ConfigurationError: the numbers of devices and workers differ.
        """
        if num_devices != (workers := self.local_world_size(num_nodes)):
            raise ConfigurationError(
                f"devices={num_devices}, but Ray Train runs {workers} workers on this machine. Leave devices out, and "
                "write the number of all workers in ScalingConfig(num_workers=...)."
            )
