# The public names, for type checkers and for base/lazy.py.

from drivetrain.legacy.v1_1.accelerators import Accelerator as Accelerator
from drivetrain.legacy.v1_1.named import CPUAccelerator as CPUAccelerator
from drivetrain.legacy.v1_1.named import DataParallelAccelerator as DataParallelAccelerator
from drivetrain.legacy.v1_1.named import DDP2Accelerator as DDP2Accelerator
from drivetrain.legacy.v1_1.named import DDPAccelerator as DDPAccelerator
from drivetrain.legacy.v1_1.named import DDPCPUHPCAccelerator as DDPCPUHPCAccelerator
from drivetrain.legacy.v1_1.named import DDPCPUSpawnAccelerator as DDPCPUSpawnAccelerator
from drivetrain.legacy.v1_1.named import DDPHPCAccelerator as DDPHPCAccelerator
from drivetrain.legacy.v1_1.named import DDPSpawnAccelerator as DDPSpawnAccelerator
from drivetrain.legacy.v1_1.named import GPUAccelerator as GPUAccelerator
from drivetrain.legacy.v1_1.named import HorovodAccelerator as HorovodAccelerator
from drivetrain.legacy.v1_1.named import TPUAccelerator as TPUAccelerator
from drivetrain.legacy.v1_1.plugins import ApexPlugin as ApexPlugin
from drivetrain.legacy.v1_1.plugins import DDPPlugin as DDPPlugin
from drivetrain.legacy.v1_1.plugins import DDPShardedPlugin as DDPShardedPlugin
from drivetrain.legacy.v1_1.plugins import NativeAMPPlugin as NativeAMPPlugin
from drivetrain.legacy.v1_1.trainer import Trainer as Trainer
from drivetrain.legacy.v1_3.datamodule import LightningDataModule as LightningDataModule
from drivetrain.legacy.v1_3.module import Callback as Callback
from drivetrain.legacy.v1_3.module import LightningModule as LightningModule
