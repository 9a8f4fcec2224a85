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
accelerators.accelerator .legacy.v1_1: Accelerator
accelerators.cpu_accelerator .legacy.v1_1: CPUAccelerator
accelerators.ddp2_accelerator .legacy.v1_1: DDP2Accelerator
accelerators.ddp_accelerator .legacy.v1_1: DDPAccelerator
accelerators.ddp_cpu_hpc_accelerator .legacy.v1_1: DDPCPUHPCAccelerator
accelerators.ddp_cpu_spawn_accelerator .legacy.v1_1: DDPCPUSpawnAccelerator
accelerators.ddp_hpc_accelerator .legacy.v1_1: DDPHPCAccelerator
accelerators.ddp_spawn_accelerator .legacy.v1_1: DDPSpawnAccelerator
accelerators.dp_accelerator .legacy.v1_1: DataParallelAccelerator
accelerators.gpu_accelerator .legacy.v1_1: GPUAccelerator
accelerators.horovod_accelerator .legacy.v1_1: HorovodAccelerator
accelerators.tpu_accelerator .legacy.v1_1: TPUAccelerator
callbacks *
callbacks.base .legacy.v1_1: Callback
callbacks.early_stopping .legacy.v1_1._callbacks: EarlyStopping
callbacks.{gpu_stats_monitor gradient_accumulation_scheduler lr_monitor progress} =
callbacks.model_checkpoint .legacy.v1_1._callbacks: ModelCheckpoint
cluster_environments *
cluster_environments.cluster_environment .clusters: ClusterEnvironment
cluster_environments.slurm_environment .clusters: SLURMEnvironment
cluster_environments.torchelastic_environment .clusters: TorchElasticEnvironment
core .legacy.v1_1: LightningDataModule LightningModule
core.datamodule .legacy.v1_1: LightningDataModule
core.{decorators hooks memory optimizer saving} =
core.lightning .legacy.v1_1: LightningModule
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
plugins.apex .legacy.v1_1: ApexPlugin
plugins.ddp_plugin .legacy.v1_1: DDPPlugin
plugins.ddp_sequential_plugin .legacy.absent: DDPSequentialPlugin
plugins.native_amp .legacy.v1_1: NativeAMPPlugin
plugins.sharded_plugin .legacy.v1_1: DDPShardedPlugin
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
