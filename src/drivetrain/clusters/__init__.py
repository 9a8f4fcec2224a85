"""Who am I in this job: one file per kind of cluster."""

from drivetrain.clusters.environment import ClusterEnvironment, ClusterRegistry, detect
from drivetrain.clusters.htcondor import HTCondorEnvironment
from drivetrain.clusters.kubeflow import KubeflowEnvironment
from drivetrain.clusters.local import LocalEnvironment
from drivetrain.clusters.lsf import LSFEnvironment
from drivetrain.clusters.mpi import MPIEnvironment
from drivetrain.clusters.slurm import SLURMEnvironment
from drivetrain.clusters.torchelastic import TorchElasticEnvironment

LightningEnvironment = LocalEnvironment  # its name in the original

__all__ = [
    "ClusterEnvironment", "ClusterRegistry", "HTCondorEnvironment", "KubeflowEnvironment", "LSFEnvironment",
    "LightningEnvironment", "LocalEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment",
    "detect",
]  # fmt: skip
