"""The table of the modules of Lightning 1.1, and also 1.0, for ``drivetrain exec --generation 1.1``.

See :mod:`drivetrain.compat.rows` for the format of a row; "=" is the row of Lightning 1.3.
"""

from __future__ import annotations

from drivetrain.compat.rows import table_of
from drivetrain.legacy.v1_3.served import SERVED as LATER

SERVED = table_of(
    """
- .legacy.v1_1: Callback LightningDataModule LightningModule Trainer | .legacy.v1_1.results: EvalResult TrainResult |
    .compat.seed: seed_everything | .base.rank_zero: _logger=log
accelerators *
accelerators.{accelerator:Accelerator cpu_accelerator:CPUAccelerator ddp2_accelerator:DDP2Accelerator
    ddp_accelerator:DDPAccelerator ddp_cpu_hpc_accelerator:DDPCPUHPCAccelerator
    ddp_cpu_spawn_accelerator:DDPCPUSpawnAccelerator ddp_hpc_accelerator:DDPHPCAccelerator
    ddp_spawn_accelerator:DDPSpawnAccelerator dp_accelerator:DataParallelAccelerator gpu_accelerator:GPUAccelerator
    horovod_accelerator:HorovodAccelerator tpu_accelerator:TPUAccelerator} .legacy.v1_1
callbacks *
callbacks.base .legacy.v1_1: Callback
callbacks.{early_stopping:EarlyStopping model_checkpoint:ModelCheckpoint} .legacy.v1_1._callbacks
callbacks.{gpu_stats_monitor gradient_accumulation_scheduler lr_monitor progress} =
cluster_environments *
cluster_environments.{cluster_environment:ClusterEnvironment slurm_environment:SLURMEnvironment
    torchelastic_environment:TorchElasticEnvironment} .clusters
core .legacy.v1_1: LightningDataModule LightningModule
core.{datamodule:LightningDataModule lightning:LightningModule} .legacy.v1_1
core.{decorators hooks memory optimizer saving} =
core.step_result .legacy.v1_1.results: EvalResult Result TrainResult
loggers =
loggers.{base comet csv_logs mlflow neptune tensorboard test_tube wandb} =
metrics =metrics.classification
metrics.{classification functional metric regression} =
metrics.functional.{average_precision confusion_matrix precision_recall_curve roc explained_variance mean_absolute_error
    mean_squared_error mean_squared_log_error classification f_beta nlp psnr ssim} =
overrides
overrides.data_parallel torch.nn.parallel: LightningDistributedDataParallel=DistributedDataParallel
plugins *
plugins.{apex:ApexPlugin ddp_plugin:DDPPlugin native_amp:NativeAMPPlugin sharded_plugin:DDPShardedPlugin} .legacy.v1_1
plugins.ddp_sequential_plugin .legacy.absent: DDPSequentialPlugin
profiler =profiler.profilers
profiler.{profilers} =
trainer .legacy.v1_1: Trainer | .compat.seed: seed_everything
trainer.{states} =
trainer.trainer .legacy.v1_1: Trainer
utilities * | .legacy.v1_3.availability: BOLTS_AVAILABLE=_BOLTS_AVAILABLE
    FAIRSCALE_PIPE_AVAILABLE=_FAIRSCALE_PIPE_AVAILABLE OMEGACONF_AVAILABLE=_OMEGACONF_AVAILABLE _module_available |
    .legacy.v1_1.availability | .compat.enums: GradClipAlgorithmType LightningEnum | .legacy.v1_3.helpers: AMPType
    DeviceType DistributedType
utilities.{apply_func cloud_io data distributed exceptions memory parsing seed} =
utilities.argparse_utils =utilities.argparse
utilities.model_utils .compat.parsing: is_overridden
utilities.warning_utils .compat.rank_zero: WarningCache
""",
    LATER,
)
