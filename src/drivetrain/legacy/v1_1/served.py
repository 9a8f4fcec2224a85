"""The table of the modules of Lightning 1.1 that ``drivetrain exec --generation 1.1`` serves; it is that of 1.0, too.

It is read as the table of :mod:`drivetrain.compat.table` is.
"""

from __future__ import annotations

from drivetrain.compat.table import Table
from drivetrain.legacy.v1_3 import served as later

_C, _L, _LATER = "drivetrain.compat", "drivetrain.legacy.v1_1", "drivetrain.legacy.v1_3"

_SEED = f"{_C}.seed: seed_everything"
_MODULES = f"{_L}: LightningDataModule LightningModule"
_ACCELERATORS = {
    "accelerator": "Accelerator", "cpu_accelerator": "CPUAccelerator", "ddp2_accelerator": "DDP2Accelerator",
    "ddp_accelerator": "DDPAccelerator", "ddp_cpu_hpc_accelerator": "DDPCPUHPCAccelerator",
    "ddp_cpu_spawn_accelerator": "DDPCPUSpawnAccelerator", "ddp_hpc_accelerator": "DDPHPCAccelerator",
    "ddp_spawn_accelerator": "DDPSpawnAccelerator", "dp_accelerator": "DataParallelAccelerator",
    "gpu_accelerator": "GPUAccelerator", "horovod_accelerator": "HorovodAccelerator",
    "tpu_accelerator": "TPUAccelerator",
}  # fmt: skip
_CLUSTERS: dict[str, tuple[str, ...]] = {
    "cluster_environment": ("drivetrain.clusters: ClusterEnvironment",),
    "slurm_environment": ("drivetrain.clusters: SLURMEnvironment",),
    "torchelastic_environment": ("drivetrain.clusters: TorchElasticEnvironment",),
}
_CALLBACKS: dict[str, tuple[str, ...]] = {
    "base": (f"{_L}: Callback",),
    "early_stopping": (f"{_L}._callbacks: EarlyStopping",),
    "gpu_stats_monitor": (f"{_LATER}._callbacks: GPUStatsMonitor",),
    "gradient_accumulation_scheduler": ("drivetrain.callbacks.gradient_accumulation: GradientAccumulationScheduler",),
    "lr_monitor": ("drivetrain.callbacks.lr_monitor: LearningRateMonitor",),
    "model_checkpoint": (f"{_L}._callbacks: ModelCheckpoint",),
    "progress": later.SERVED["callbacks.progress"],
}
_PLUGINS: dict[str, tuple[str, ...]] = {
    "apex": (f"{_L}: ApexPlugin",),
    "ddp_plugin": (f"{_L}: DDPPlugin",),
    "ddp_sequential_plugin": ("drivetrain.legacy.absent: DDPSequentialPlugin",),
    "native_amp": (f"{_L}: NativeAMPPlugin",),
    "sharded_plugin": (f"{_L}: DDPShardedPlugin",),
}
_AVAILABILITY = (
    f"{_LATER}.availability: BOLTS_AVAILABLE=_BOLTS_AVAILABLE FAIRSCALE_PIPE_AVAILABLE=_FAIRSCALE_PIPE_AVAILABLE "
    "OMEGACONF_AVAILABLE=_OMEGACONF_AVAILABLE _module_available",
    f"{_L}.availability",
    *later.SERVED["utilities.enums"],
)
_UTILITIES: dict[str, tuple[str, ...]] = {
    "apply_func": later.SERVED["utilities.apply_func"],
    "argparse_utils": later.SERVED["utilities.argparse"],
    "cloud_io": later.SERVED["utilities.cloud_io"],
    "data": later.SERVED["utilities.data"],
    "distributed": later.SERVED["utilities.distributed"],
    "exceptions": later.SERVED["utilities.exceptions"],
    "memory": later.SERVED["utilities.memory"],
    "model_utils": later.SERVED["utilities.model_helpers"],
    "parsing": later.SERVED["utilities.parsing"],
    "seed": (_SEED,),
    "warning_utils": (f"{_C}.rank_zero: WarningCache",),
}
_folder = later.folder

SERVED: dict[str, tuple[str, ...]] = {
    "": (
        f"{_L}: Callback LightningDataModule LightningModule Trainer",
        f"{_L}.results: EvalResult TrainResult",
        _SEED,
        "drivetrain.base.rank_zero: _logger=log",
    ),
    **_folder("accelerators", {file: (f"{_L}: {name}",) for file, name in _ACCELERATORS.items()}),
    **_folder("callbacks", _CALLBACKS),
    **_folder("cluster_environments", _CLUSTERS),
    "core": (_MODULES,),
    "core.datamodule": (f"{_L}: LightningDataModule",),
    "core.decorators": later.SERVED["core.decorators"],
    "core.hooks": later.SERVED["core.hooks"],
    "core.lightning": (f"{_L}: LightningModule",),
    "core.memory": later.SERVED["core.memory"],
    "core.optimizer": later.SERVED["core.optimizer"],
    "core.saving": later.SERVED["core.saving"],
    "core.step_result": (f"{_L}.results: EvalResult Result TrainResult",),
    **{path: sources for path, sources in later.SERVED.items() if path.split(".")[0] == "loggers"},
    "metrics": later.SERVED["metrics.classification"],
    **{path: sources for path, sources in later.SERVED.items() if path.startswith("metrics.")},
    "overrides": (),
    "overrides.data_parallel": ("torch.nn.parallel: LightningDistributedDataParallel=DistributedDataParallel",),
    **_folder("plugins", _PLUGINS),
    "profiler": later.SERVED["profiler.profilers"],
    "profiler.profilers": later.SERVED["profiler.profilers"],
    "trainer": (f"{_L}: Trainer", _SEED),
    "trainer.states": later.SERVED["trainer.states"],
    "trainer.trainer": (f"{_L}: Trainer",),
    **_folder("utilities", _UTILITIES, *_AVAILABILITY),
}

TABLE = Table("1.1.0", {"pytorch_lightning": ""}, SERVED, ("pytorch-lightning",))
