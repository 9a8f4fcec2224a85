# The public names, for type checkers and for base/lazy.py.

from drivetrain.clusters.aws_batch import AWSBatchEnvironment as AWSBatchEnvironment
from drivetrain.clusters.dstack import DstackEnvironment as DstackEnvironment
from drivetrain.clusters.environment import ClusterEnvironment as ClusterEnvironment
from drivetrain.clusters.environment import ClusterRegistry as ClusterRegistry
from drivetrain.clusters.environment import detect as detect
from drivetrain.clusters.horovod import HorovodEnvironment as HorovodEnvironment
from drivetrain.clusters.htcondor import HTCondorEnvironment as HTCondorEnvironment
from drivetrain.clusters.kubeflow import KubeflowEnvironment as KubeflowEnvironment
from drivetrain.clusters.kubernetes import KubernetesEnvironment as KubernetesEnvironment
from drivetrain.clusters.local import LightningEnvironment as LightningEnvironment
from drivetrain.clusters.local import LocalEnvironment as LocalEnvironment
from drivetrain.clusters.lsf import LSFEnvironment as LSFEnvironment
from drivetrain.clusters.mpi import MPIEnvironment as MPIEnvironment
from drivetrain.clusters.ray_train import RayTrainEnvironment as RayTrainEnvironment
from drivetrain.clusters.sagemaker import SageMakerEnvironment as SageMakerEnvironment
from drivetrain.clusters.skypilot import SkyPilotEnvironment as SkyPilotEnvironment
from drivetrain.clusters.slurm import SLURMEnvironment as SLURMEnvironment
from drivetrain.clusters.torchelastic import TorchElasticEnvironment as TorchElasticEnvironment
from drivetrain.clusters.vertex import VertexEnvironment as VertexEnvironment
from drivetrain.clusters.xla import XLAEnvironment as XLAEnvironment
