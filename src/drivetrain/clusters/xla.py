"""Ranks of replicas that torch_xla starts and numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from drivetrain.base.packages import xla_runtime
from drivetrain.clusters.environment import DEFAULT_ADDRESS, ClusterEnvironment
from drivetrain.errors import ConfigurationError

_NO_PORT = -1


class XLAEnvironment(ClusterEnvironment):
    """Takes the ranks from torch_xla's runtime, in a job whose processes ``xmp.spawn`` starts.

    Reading a rank starts torch_xla's runtime in this process. The replicas need no address to find each other.
    ``XLAStrategy`` creates this environment, and the Trainer never detects it.

    Args:
        environ: ignored.
    """

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether torch_xla is installed and the variable ``PJRT_DEVICE`` is set."""
        return "PJRT_DEVICE" in environ and find_spec("torch_xla") is not None

    @property
    def creates_processes_externally(self) -> bool:
        return False

    @property
    def main_address(self) -> str:
        return DEFAULT_ADDRESS

    @property
    def main_port(self) -> int:
        return _NO_PORT

    def world_size(self) -> int:
        return int(xla_runtime.world_size())

    def global_rank(self) -> int:
        return int(xla_runtime.global_ordinal())

    def local_rank(self) -> int:
        return int(xla_runtime.local_ordinal())

    def node_rank(self) -> int:
        return int(xla_runtime.host_index())

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any settings, because torch_xla's runtime counts the replicas after they have started."""


def check_no_launcher() -> None:
    """Check that no launcher has started several processes, because torch_xla itself starts the replicas.

    Raises:
        ConfigurationError: a launcher has started several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that a launcher has started several processes, but torch_xla "
            "starts the replicas itself. Start the program once on each machine, without a launcher."
        )
