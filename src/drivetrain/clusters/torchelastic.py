"""Ranks of processes that ``torchrun``, or another launcher based on torch's elastic agent, has started."""

from __future__ import annotations

from drivetrain.clusters.environment import ClusterEnvironment


class TorchElasticEnvironment(ClusterEnvironment):
    """The environment of ``torchrun``. The base class reads the variables of ``torchrun``.

    Args:
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 500
    evidence = "torchrun has set TORCHELASTIC_RUN_ID"
    variables = ("TORCHELASTIC_RUN_ID",)
