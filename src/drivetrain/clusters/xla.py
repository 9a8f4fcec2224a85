"""torch_xla, whose runtime numbers the replicas of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from drivetrain.base.packages import xla_runtime
from drivetrain.clusters.environment import DEFAULT_ADDRESS, ClusterEnvironment

_NO_PORT = -1


class XLAEnvironment(ClusterEnvironment):
    """Takes the ranks from torch_xla's runtime, for a job whose processes ``xmp.spawn`` starts.

    Reading a rank starts the runtime in this process. The replicas find each other without an address. ``XLAStrategy``
    creates this environment; the Trainer never detects it.

    Args:
        environ: ignored.
    """

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether torch_xla is installed, and ``PJRT_DEVICE`` selects its device."""
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

    def set_world_size(self, size: int) -> None:
        """Do nothing: the runtime defines the world size."""

    def global_rank(self) -> int:
        return int(xla_runtime.global_ordinal())

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the runtime defines the rank."""

    def local_rank(self) -> int:
        return int(xla_runtime.local_ordinal())

    def node_rank(self) -> int:
        return int(xla_runtime.host_index())

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any number, because the replicas start later, and torch_xla's runtime determines their number."""
