"""The environment of ``torchrun``, and of other launchers that are based on torch's elastic agent."""

from __future__ import annotations

from drivetrain.clusters.environment import ClusterEnvironment


class TorchElasticEnvironment(ClusterEnvironment):
    """The process was started by ``torchrun``, which sets the variables that the base class reads.

    Args:
        environ: the environment variables; ``None``: the variables of this process.
    """

    detect_priority = 500
    evidence = "torchrun has set TORCHELASTIC_RUN_ID"
    variables = ("TORCHELASTIC_RUN_ID",)
