"""The table of the modules of Lightning 1.3 that ``drivetrain exec --generation 1.3`` serves.

It is read as the table of :mod:`drivetrain.compat.table` is.
"""

from __future__ import annotations

from drivetrain.compat.table import Table

_C, _L = "drivetrain.compat", "drivetrain.legacy.v1_3"
_ABSENT = "drivetrain.legacy.absent"  # they can be imported, and raise an error when they are used

_SEED = f"{_C}.seed: seed_everything"
_MODULES = f"{_L}: LightningDataModule LightningModule"
_RANK_ZERO = (
    "drivetrain.base.rank_zero: rank_zero_warn",
    f"{_C}.rank_zero: rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only",
)
_ACCELERATORS = "Accelerator CPUAccelerator GPUAccelerator TPUAccelerator"
_PRECISION = (
    "ApexMixedPrecisionPlugin DoublePrecisionPlugin MixedPrecisionPlugin NativeMixedPrecisionPlugin PrecisionPlugin"
)
_TRAINING_TYPE = (
    "DDP2Plugin DDPPlugin DDPShardedPlugin DDPSpawnPlugin DDPSpawnShardedPlugin DataParallelPlugin HorovodPlugin "
    "ParallelPlugin SingleDevicePlugin SingleTPUPlugin TPUSpawnPlugin TrainingTypePlugin "
    "TrainingTypePluginsRegistry"
)
_ENVIRONMENTS = (
    "drivetrain.plugins.environments: ClusterEnvironment LightningEnvironment SLURMEnvironment TorchElasticEnvironment"
)
_CALLBACKS: dict[str, tuple[str, ...]] = {
    "base": (f"{_L}: Callback",),
    "early_stopping": (f"{_L}._callbacks: EarlyStopping",),
    "gpu_stats_monitor": (f"{_L}._callbacks: GPUStatsMonitor",),
    "gradient_accumulation_scheduler": ("drivetrain.callbacks.gradient_accumulation: GradientAccumulationScheduler",),
    "lambda_function": (f"{_L}._callbacks: LambdaCallback",),
    "lr_monitor": ("drivetrain.callbacks.lr_monitor: LearningRateMonitor",),
    "model_checkpoint": (f"{_L}._callbacks: ModelCheckpoint",),
    "prediction_writer": ("drivetrain.callbacks.prediction_writer: BasePredictionWriter WriteInterval",),
    "progress": (f"{_L}.progress: ProgressBar ProgressBarBase",),
    "finetuning": ("drivetrain.callbacks.finetuning: BackboneFinetuning BaseFinetuning multiplicative",),
    "pruning": ("drivetrain.callbacks.pruning: ModelPruning",),
    "stochastic_weight_avg": (f"{_L}._callbacks: StochasticWeightAveraging",),
    "timer": ("drivetrain.callbacks.timer: Timer",),
}
_LOGGERS: dict[str, tuple[str, ...]] = {
    "base": (
        "drivetrain.loggers: DummyLogger LightningLoggerBase=Logger",
        f"{_C}.loggers: merge_dicts rank_zero_experiment",
        f"{_L}.loggers: LoggerCollection",
    ),
    "comet": ("drivetrain.loggers.comet: CometLogger",),
    "csv_logs": ("drivetrain.loggers.csv: CSVLogger",),
    "mlflow": ("drivetrain.loggers.mlflow: MLFlowLogger",),
    "neptune": ("drivetrain.loggers.neptune: NeptuneLogger",),
    "tensorboard": ("drivetrain.loggers.tensorboard: TensorBoardLogger",),
    "test_tube": (f"{_ABSENT}: TestTubeLogger",),
    "wandb": ("drivetrain.loggers.wandb: WandbLogger",),
}
_PROFILERS: dict[str, tuple[str, ...]] = {
    "advanced": ("drivetrain.profilers: AdvancedProfiler",),
    "base": ("drivetrain.profilers: BaseProfiler=Profiler PassThroughProfiler",),
    "pytorch": ("drivetrain.profilers: PyTorchProfiler",),
    "simple": ("drivetrain.profilers: SimpleProfiler",),
}
_PARSING = (
    f"{_C}.parsing: clean_namespace collect_init_args get_init_args is_picklable lightning_getattr lightning_hasattr "
    "lightning_setattr parse_class_init_keys save_hyperparameters"
)
_UTILITIES: dict[str, tuple[str, ...]] = {
    "apply_func": (f"{_C}.batches: move_data_to_device", f"{_L}.helpers: apply_to_collection"),
    "argparse": (f"{_L}.arguments: add_argparse_args from_argparse_args",),
    "cli": (
        f"{_L}.cli: LightningCLI",
        "drivetrain.cli: LightningArgumentParser SaveConfigCallback",
    ),
    "cloud_io": (f"{_C}.files: get_filesystem load=_load",),
    "data": (f"{_C}.batches: has_iterable_dataset has_len",),
    "distributed": _RANK_ZERO,
    "enums": (
        f"{_C}.enums: GradClipAlgorithmType LightningEnum",
        f"{_L}.helpers: AMPType DeviceType DistributedType",
    ),
    "exceptions": ("drivetrain.errors: MisconfigurationException=DrivetrainError",),
    "grads": (f"{_L}.helpers: grad_norm",),
    "imports": (
        f"{_L}.availability: _BOLTS_AVAILABLE _FAIRSCALE_PIPE_AVAILABLE _OMEGACONF_AVAILABLE _TORCHTEXT_AVAILABLE "
        "_TORCHVISION_AVAILABLE _module_available",
    ),
    "memory": (
        f"{_C}.memory: garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory "
        "recursive_detach",
    ),
    "model_helpers": (f"{_C}.parsing: is_overridden",),
    "parsing": ("drivetrain.module.hparams: AttributeDict", _PARSING),
    "seed": (_SEED,),
    "signature_utils": (f"{_C}.parsing: is_param_in_hook_signature",),
    "types": (f"{_C}.type_names: STEP_OUTPUT",),
    "warnings": (f"{_C}.user_warnings: PossibleUserWarning",),
}


_METRICS = (
    "torchmetrics: AveragePrecision ExplainedVariance MeanAbsoluteError MeanSquaredError MeanSquaredLogError Metric "
    "MetricCollection PSNR=PeakSignalNoiseRatio PrecisionRecallCurve ROC SSIM=StructuralSimilarityIndexMeasure",
    f"{_L}.metrics: Accuracy ConfusionMatrix F1 FBeta Precision Recall",
)
_FUNCTIONS = "drivetrain.legacy.v1_1.functional"
_OF_TORCHMETRICS = "torchmetrics.functional"
_SAME_NAME = ("average_precision", "confusion_matrix", "precision_recall_curve", "roc")
_SAME_NAME_TODAY = ("explained_variance", "mean_absolute_error", "mean_squared_error", "mean_squared_log_error")
_FUNCTIONAL: dict[str, tuple[str, ...]] = {
    **{name: (f"{_FUNCTIONS}: {name}",) for name in _SAME_NAME},
    **{name: (f"{_OF_TORCHMETRICS}: {name}",) for name in _SAME_NAME_TODAY},
    "classification": (_FUNCTIONS,),
    "f_beta": (f"{_FUNCTIONS}: f1 fbeta",),
    "nlp": (f"{_OF_TORCHMETRICS}: bleu_score",),
    "psnr": (f"{_OF_TORCHMETRICS}: psnr=peak_signal_noise_ratio",),
    "ssim": (f"{_OF_TORCHMETRICS}: ssim=structural_similarity_index_measure",),
}
_REGRESSION = f"{_OF_TORCHMETRICS}: image_gradients"


def folder(name: str, files: dict[str, tuple[str, ...]], *more: str) -> dict[str, tuple[str, ...]]:
    """Return a package that offers what its modules do, and these modules."""
    return {
        name: (*(source for sources in files.values() for source in sources), *more),
        **{f"{name}.{file}": sources for file, sources in files.items()},
    }


SERVED: dict[str, tuple[str, ...]] = {
    "": (
        f"{_L}: Callback LightningDataModule LightningModule Trainer",
        _SEED,
        "drivetrain.base.rank_zero: _logger=log",
    ),
    "accelerators": (f"{_L}: {_ACCELERATORS}",),
    "accelerators.accelerator": (f"{_L}: Accelerator",),
    "accelerators.cpu": (f"{_L}: CPUAccelerator",),
    "accelerators.gpu": (f"{_L}: GPUAccelerator",),
    "accelerators.tpu": (f"{_L}: TPUAccelerator",),
    **folder("callbacks", _CALLBACKS),
    "core": (_MODULES,),
    "core.datamodule": (f"{_L}: LightningDataModule",),
    "core.decorators": (f"{_L}.module: auto_move_data",),
    "core.hooks": ("drivetrain.module.hooks: CheckpointHooks=ModelHooks DataHooks ModelHooks",),
    "core.lightning": (f"{_L}: LightningModule",),
    "core.memory": (
        f"{_L}.helpers: ModelSummary",
        f"{_C}.model_summary: UNKNOWN_SIZE get_formatted_model_size get_human_readable_count parse_batch_shape",
    ),
    "core.optimizer": ("drivetrain.module.optimizers: LightningOptimizer",),
    "core.saving": (f"{_C}.files: load_hparams_from_yaml save_hparams_to_yaml update_hparams",),
    **folder("loggers", _LOGGERS),
    "tuner": (f"{_L}.tuner: Tuner",),
    "tuner.tuning": (f"{_L}.tuner: Tuner",),
    "metrics": (f"{_L}.metrics", _METRICS[0]),
    "metrics.classification": _METRICS,
    **folder("metrics.functional", _FUNCTIONAL, _REGRESSION),
    "metrics.metric": ("torchmetrics: Metric MetricCollection",),
    "metrics.regression": _METRICS,
    "plugins": (f"{_L}: {_PRECISION} {_TRAINING_TYPE}", _ENVIRONMENTS, f"{_ABSENT}: RPCSequentialPlugin"),
    "plugins.environments": (_ENVIRONMENTS,),
    "plugins.precision": (f"{_L}: {_PRECISION}",),
    "plugins.precision.apex_amp": (f"{_L}: ApexMixedPrecisionPlugin",),
    "plugins.precision.double": (f"{_L}: DoublePrecisionPlugin",),
    "plugins.precision.mixed": (f"{_L}: MixedPrecisionPlugin",),
    "plugins.precision.native_amp": (f"{_L}: NativeMixedPrecisionPlugin",),
    "plugins.precision.precision_plugin": (f"{_L}: PrecisionPlugin",),
    "plugins.training_type": (f"{_L}: {_TRAINING_TYPE}",),
    "plugins.training_type.ddp": (f"{_L}: DDPPlugin",),
    "plugins.training_type.ddp2": (f"{_L}: DDP2Plugin",),
    "plugins.training_type.ddp_spawn": (f"{_L}: DDPSpawnPlugin",),
    "plugins.training_type.dp": (f"{_L}: DataParallelPlugin",),
    "plugins.training_type.horovod": (f"{_L}: HorovodPlugin",),
    "plugins.training_type.parallel": (f"{_L}: ParallelPlugin",),
    "plugins.training_type.rpc_sequential": (f"{_ABSENT}: RPCSequentialPlugin",),
    "plugins.training_type.sharded": (f"{_L}: DDPShardedPlugin",),
    "plugins.training_type.single_device": (f"{_L}: SingleDevicePlugin",),
    "plugins.training_type.single_tpu": (f"{_L}: SingleTPUPlugin",),
    "plugins.training_type.tpu_spawn": (f"{_L}: TPUSpawnPlugin",),
    "plugins.training_type.training_type_plugin": (f"{_L}: TrainingTypePlugin",),
    **folder("profiler", _PROFILERS),
    "profiler.profilers": (
        "drivetrain.profilers: AdvancedProfiler BaseProfiler=Profiler PassThroughProfiler SimpleProfiler",
    ),
    "trainer": (f"{_L}: Trainer", _SEED),
    "trainer.states": ("drivetrain.loops.progress: RunningStage TrainerFn TrainerState=Progress TrainerStatus",),
    "trainer.supporters": ("drivetrain.data.combined: CombinedLoader",),
    "trainer.trainer": (f"{_L}: Trainer",),
    **folder("utilities", _UTILITIES),
}

TABLE = Table("1.3.8", {"pytorch_lightning": ""}, SERVED, ("pytorch-lightning",))
