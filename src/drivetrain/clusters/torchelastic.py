"""``torchrun``, and everything else that is built on torch's elastic agent."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain.clusters.environment import ClusterEnvironment


class TorchElasticEnvironment(ClusterEnvironment):
    """Started by ``torchrun``, which exports what the contract reads.

    Args:
        environ: the variables; ``None``: those of this process.
    """

    detect_priority = 500
    evidence = "torchrun has set TORCHELASTIC_RUN_ID"

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ
