# The public names, for type checkers and for base/lazy.py.

from drivetrain.strategies.batchnorm import TorchSyncBatchNorm as TorchSyncBatchNorm
from drivetrain.strategies.ddp import DDPStrategy as DDPStrategy
from drivetrain.strategies.ddp2 import DDP2Strategy as DDP2Strategy
from drivetrain.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
from drivetrain.strategies.dp import DataParallelStrategy as DataParallelStrategy
from drivetrain.strategies.facts import Earlier as Earlier
from drivetrain.strategies.facts import Facts as Facts
from drivetrain.strategies.fsdp import FSDPStrategy as FSDPStrategy
from drivetrain.strategies.group import Group as Group
from drivetrain.strategies.group import LoneGroup as LoneGroup
from drivetrain.strategies.group import TorchGroup as TorchGroup
from drivetrain.strategies.horovod import HorovodStrategy as HorovodStrategy
from drivetrain.strategies.layer_sync import LayerSync as LayerSync
from drivetrain.strategies.layer_sync import LayerSyncRegistry as LayerSyncRegistry
from drivetrain.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from drivetrain.strategies.parallel import ParallelStrategy as ParallelStrategy
from drivetrain.strategies.pipeline import PipelineStrategy as PipelineStrategy
from drivetrain.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
from drivetrain.strategies.single_xla import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
from drivetrain.strategies.strategy import Strategy as Strategy
from drivetrain.strategies.strategy import StrategyRegistry as StrategyRegistry
from drivetrain.strategies.xla import XLAStrategy as XLAStrategy
from drivetrain.strategies.xla_spmd import XLASPMDStrategy as XLASPMDStrategy
