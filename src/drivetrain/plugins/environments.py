"""``drivetrain.plugins.environments``: see :mod:`drivetrain.clusters`."""

from drivetrain.clusters import (
    ClusterEnvironment,
    HTCondorEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LocalEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

__all__ = [
    "ClusterEnvironment", "HTCondorEnvironment", "KubeflowEnvironment", "LSFEnvironment", "LightningEnvironment",
    "LocalEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment",
]  # fmt: skip
