# The public names, for type checkers and for base/lazy.py.

from drivetrain.legacy.v1_3.accelerators import Accelerator as Accelerator
from drivetrain.legacy.v1_3.accelerators import CPUAccelerator as CPUAccelerator
from drivetrain.legacy.v1_3.accelerators import GPUAccelerator as GPUAccelerator
from drivetrain.legacy.v1_3.accelerators import TPUAccelerator as TPUAccelerator
from drivetrain.legacy.v1_3.datamodule import LightningDataModule as LightningDataModule
from drivetrain.legacy.v1_3.module import Callback as Callback
from drivetrain.legacy.v1_3.module import LightningModule as LightningModule
from drivetrain.legacy.v1_3.precision_plugins import ApexMixedPrecisionPlugin as ApexMixedPrecisionPlugin
from drivetrain.legacy.v1_3.precision_plugins import DoublePrecisionPlugin as DoublePrecisionPlugin
from drivetrain.legacy.v1_3.precision_plugins import MixedPrecisionPlugin as MixedPrecisionPlugin
from drivetrain.legacy.v1_3.precision_plugins import NativeMixedPrecisionPlugin as NativeMixedPrecisionPlugin
from drivetrain.legacy.v1_3.precision_plugins import PrecisionPlugin as PrecisionPlugin
from drivetrain.legacy.v1_3.trainer import Trainer as Trainer
from drivetrain.legacy.v1_3.training_type_plugin import TrainingTypePlugin as TrainingTypePlugin
from drivetrain.legacy.v1_3.training_type_plugins import DataParallelPlugin as DataParallelPlugin
from drivetrain.legacy.v1_3.training_type_plugins import DDP2Plugin as DDP2Plugin
from drivetrain.legacy.v1_3.training_type_plugins import DDPPlugin as DDPPlugin
from drivetrain.legacy.v1_3.training_type_plugins import DDPShardedPlugin as DDPShardedPlugin
from drivetrain.legacy.v1_3.training_type_plugins import DDPSpawnPlugin as DDPSpawnPlugin
from drivetrain.legacy.v1_3.training_type_plugins import DDPSpawnShardedPlugin as DDPSpawnShardedPlugin
from drivetrain.legacy.v1_3.training_type_plugins import HorovodPlugin as HorovodPlugin
from drivetrain.legacy.v1_3.training_type_plugins import ParallelPlugin as ParallelPlugin
from drivetrain.legacy.v1_3.training_type_plugins import SingleDevicePlugin as SingleDevicePlugin
from drivetrain.legacy.v1_3.training_type_plugins import SingleTPUPlugin as SingleTPUPlugin
from drivetrain.legacy.v1_3.training_type_plugins import TPUSpawnPlugin as TPUSpawnPlugin
from drivetrain.legacy.v1_3.training_type_plugins import TrainingTypePluginsRegistry as TrainingTypePluginsRegistry
