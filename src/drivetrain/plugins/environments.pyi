# The public names, for type checkers and for base/lazy.py.

from drivetrain.clusters import AWSBatchEnvironment as AWSBatchEnvironment
from drivetrain.clusters import ClusterEnvironment as ClusterEnvironment
from drivetrain.clusters import DstackEnvironment as DstackEnvironment
from drivetrain.clusters import HorovodEnvironment as HorovodEnvironment
from drivetrain.clusters import HTCondorEnvironment as HTCondorEnvironment
from drivetrain.clusters import KubeflowEnvironment as KubeflowEnvironment
from drivetrain.clusters import KubernetesEnvironment as KubernetesEnvironment
from drivetrain.clusters import LightningEnvironment as LightningEnvironment
from drivetrain.clusters import LocalEnvironment as LocalEnvironment
from drivetrain.clusters import LSFEnvironment as LSFEnvironment
from drivetrain.clusters import MPIEnvironment as MPIEnvironment
from drivetrain.clusters import RayTrainEnvironment as RayTrainEnvironment
from drivetrain.clusters import SageMakerEnvironment as SageMakerEnvironment
from drivetrain.clusters import SkyPilotEnvironment as SkyPilotEnvironment
from drivetrain.clusters import SLURMEnvironment as SLURMEnvironment
from drivetrain.clusters import TorchElasticEnvironment as TorchElasticEnvironment
from drivetrain.clusters import VertexEnvironment as VertexEnvironment
from drivetrain.clusters import XLAEnvironment as XLAEnvironment
