"""The table of the modules of the latest Lightning that are available, and of the drivetrain names behind them.

A key is a module's path below ``lightning``. ``pytorch_lightning`` is another spelling of "pytorch" and
``lightning_fabric`` of "fabric". A value lists sources. "drivetrain.callbacks" alone offers everything that is in the
``__all__`` of that module; with names behind a colon it offers only those, and ``Fabric=Engine`` offers our ``Engine``
as ``Fabric``. Nothing is imported before a name is requested. A module that is not here, and a name that no
source offers, does not exist for the program: see docs/compat.md.
"""

from __future__ import annotations

VERSION = "2.6.6"
"""The version of the original whose names these are."""

ROOTS = {"lightning": "", "pytorch_lightning": "pytorch", "lightning_fabric": "fabric"}
"""Top-level packages that are replaced, and the path below ``lightning`` for which each of them stands."""

_C = "drivetrain.compat"  # names that exist for such programs only
_SEED_EVERYTHING = f"{_C}.seed: seed_everything"
_FRONT = ("drivetrain: Callback LightningDataModule LightningModule Trainer", _SEED_EVERYTHING)
_MISCONFIGURATION = "drivetrain.errors: MisconfigurationException=DrivetrainError"  # catches all that we diagnose
_LOGGERS = "drivetrain.loggers: CSVLogger TensorBoardLogger"
_ASYNC_IO = "drivetrain.checkpoints: AsyncCheckpointIO"
_XLA_IO = "drivetrain.checkpoints: XLACheckpointIO"
_ATTRIBUTE_DICT = "drivetrain.module.hparams: AttributeDict"
_RANK_ZERO = (
    "drivetrain.base.rank_zero: rank_zero_warn",
    f"{_C}.rank_zero: rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only",
)
_RANK_ZERO_MODULE = (
    *_RANK_ZERO,
    f"{_C}.rank_zero: LightningDeprecationWarning WarningCache rank_prefixed_message _get_rank",
)
_SAID_OF_BOTH = (
    _ATTRIBUTE_DICT,
    *_RANK_ZERO,
    f"{_C}.batches: move_data_to_device suggested_max_num_workers",
    f"{_C}.enums: LightningEnum",
    f"{_C}.files: is_shared_filesystem",
    f"{_C}.parameters: measure_flops",
    f"{_C}.user_warnings: disable_possible_user_warnings",
)
_SUMMARY_MODULE = (
    f"{_C}.model_summary: ModelSummary get_formatted_model_size get_human_readable_count parse_batch_shape summarize",
)
_CHECKPOINT_IO = "drivetrain.checkpoints.io: CheckpointIO"
_TORCH_IO = "drivetrain.checkpoints.file: TorchCheckpointIO"
_PRECISIONS = {
    "amp": ("drivetrain.precision.mixed: MixedPrecision",),
    "bitsandbytes": ("drivetrain.precision.bitsandbytes: BitsandbytesPrecision",),
    "deepspeed": ("drivetrain.precision.by_strategy: DeepSpeedPrecision",),
    "double": ("drivetrain.precision.double: DoublePrecision",),
    "fsdp": ("drivetrain.precision.by_strategy: FSDPPrecision",),
    "half": ("drivetrain.precision.half: HalfPrecision",),
    "precision": (
        "drivetrain.precision.precision: Precision",
        f"{_C}.type_names: _PRECISION_INPUT _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS",
    ),
    "transformer_engine": ("drivetrain.precision.transformer_engine: TransformerEnginePrecision",),
    "xla": ("drivetrain.precision.xla: XLAPrecision",),
}
_ACCELERATORS = {
    "accelerator": ("drivetrain.accelerators.accelerator: Accelerator",),
    "cpu": ("drivetrain.accelerators.cpu: CPUAccelerator",),
    "cuda": ("drivetrain.accelerators.cuda: CUDAAccelerator",),
    "mps": ("drivetrain.accelerators.mps: MPSAccelerator",),
    "xla": ("drivetrain.accelerators.xla: XLAAccelerator",),
}
_ENVIRONMENTS = {
    "": (
        "drivetrain.clusters: ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment "
        "MPIEnvironment SLURMEnvironment TorchElasticEnvironment XLAEnvironment",
    ),
    ".cluster_environment": ("drivetrain.clusters: ClusterEnvironment",),
    ".kubeflow": ("drivetrain.clusters: KubeflowEnvironment",),
    ".lightning": ("drivetrain.clusters: LightningEnvironment", f"{_C}.devices: find_free_network_port"),
    ".lsf": ("drivetrain.clusters: LSFEnvironment",),
    ".mpi": ("drivetrain.clusters: MPIEnvironment",),
    ".slurm": ("drivetrain.clusters: SLURMEnvironment",),
    ".torchelastic": ("drivetrain.clusters: TorchElasticEnvironment",),
    ".xla": ("drivetrain.clusters: XLAEnvironment",),
}
_FORMER = f"{_C}.deprecated"
_FORMER_PRECISIONS = (
    f"{_FORMER}: BitsandbytesPrecisionPlugin DeepSpeedPrecisionPlugin DoublePrecisionPlugin FSDPMixedPrecisionPlugin "
    "FSDPPrecisionPlugin HPUPrecisionPlugin HalfPrecisionPlugin MixedPrecisionPlugin PrecisionPlugin "
    "TPUBf16PrecisionPlugin TPUPrecisionPlugin TransformerEnginePrecisionPlugin XLABf16PrecisionPlugin "
    "XLAPrecisionPlugin"
)
_FORMER_PRECISIONS_OF_FABRIC = f"{_FORMER}: TPUBf16Precision TPUPrecision XLABf16Precision"
_FORMER_PRECISION = {
    "amp": "MixedPrecisionPlugin",
    "bitsandbytes": "BitsandbytesPrecisionPlugin",
    "deepspeed": "DeepSpeedPrecisionPlugin",
    "double": "DoublePrecisionPlugin",
    "fsdp": "FSDPMixedPrecisionPlugin FSDPPrecisionPlugin",
    "half": "HalfPrecisionPlugin",
    "precision": "PrecisionPlugin",
    "transformer_engine": "TransformerEnginePrecisionPlugin",
    "xla": "XLAPrecisionPlugin",
}
FORMER_PATHS = frozenset({
    "fabric.accelerators.tpu", "fabric.plugins.precision.tpu", "fabric.plugins.precision.tpu_bf16",
    "fabric.plugins.precision.xlabf16", "fabric.strategies.single_tpu", "pytorch.accelerators.tpu",
    "pytorch.plugins.precision.precision_plugin", "pytorch.plugins.precision.tpu", "pytorch.plugins.precision.tpu_bf16",
    "pytorch.plugins.precision.xlabf16", "pytorch.strategies.single_tpu",
})  # fmt: skip
"""Modules whose paths the original answers, though it has no file there."""

_REDUCED_TYPES = f"{_C}.type_names: TBroadcast TReduce"
_FABRIC_LOGGERS = f"{_C}.fabric_loggers: CSVLogger=FabricCSVLogger TensorBoardLogger=FabricTensorBoardLogger"
_OF_FABRIC = f"{_C}.fabric_strategies"
_SHARDED_OF_FABRIC = f"{_C}.fabric_sharded: FSDPStrategy=FabricFSDPStrategy"
_SPLIT_OF_FABRIC = f"{_C}.fabric_sharded: ModelParallelStrategy=FabricModelParallelStrategy"
_DP_OF_FABRIC = f"{_C}.fabric_dp: DataParallelStrategy=FabricDataParallelStrategy"
_DEEPSPEED_OF_FABRIC = f"{_C}.fabric_deepspeed: DeepSpeedStrategy=FabricDeepSpeedStrategy"
_XLA_OF_FABRIC = f"{_C}.fabric_xla: XLAStrategy=FabricXLAStrategy"
_SINGLE_XLA_OF_FABRIC = f"{_C}.fabric_xla: SingleDeviceXLAStrategy=FabricSingleDeviceXLAStrategy"
_XLA_FSDP_OF_FABRIC = f"{_C}.fabric_xla: XLAFSDPStrategy=FabricXLAFSDPStrategy"
_CONNECTORS = "drivetrain.compat.connector_views"

SERVED: dict[str, tuple[str, ...]] = {
    "": (*_FRONT, "drivetrain.engine.engine: Fabric=Engine"),
    # ---- lightning.pytorch ------------------------------------------------------------------------------------------
    "pytorch": _FRONT,
    "pytorch.accelerators": ("drivetrain.accelerators", f"{_FORMER}: HPUAccelerator TPUAccelerator"),
    "pytorch.accelerators.tpu": (f"{_FORMER}: TPUAccelerator",),
    **{f"pytorch.accelerators.{name}": source for name, source in _ACCELERATORS.items()},
    "pytorch.accelerators.cpu": (*_ACCELERATORS["cpu"], f"{_C}.devices: get_cpu_stats"),
    "pytorch.accelerators.cuda": (*_ACCELERATORS["cuda"], f"{_C}.devices: get_nvidia_gpu_stats"),
    "pytorch.accelerators.mps": (*_ACCELERATORS["mps"], f"{_C}.devices: get_device_stats"),
    "pytorch.callbacks": ("drivetrain.callbacks",),
    "pytorch.callbacks.batch_size_finder": ("drivetrain.callbacks.batch_size_finder: BatchSizeFinder",),
    "pytorch.callbacks.callback": ("drivetrain.callback: Callback",),
    "pytorch.callbacks.checkpoint": ("drivetrain.callback: Checkpoint",),
    "pytorch.callbacks.device_stats_monitor": ("drivetrain.callbacks.device_stats_monitor: DeviceStatsMonitor",),
    "pytorch.callbacks.early_stopping": ("drivetrain.callbacks.early_stopping: EarlyStopping EarlyStoppingReason",),
    "pytorch.callbacks.finetuning": (
        "drivetrain.callbacks.finetuning: BackboneFinetuning BaseFinetuning multiplicative",
    ),
    "pytorch.callbacks.gradient_accumulation_scheduler": (
        "drivetrain.callbacks.gradient_accumulation: GradientAccumulationScheduler",
    ),
    "pytorch.callbacks.lambda_function": ("drivetrain.callbacks.lambda_function: LambdaCallback",),
    "pytorch.callbacks.lr_finder": ("drivetrain.callbacks.lr_finder: LearningRateFinder",),
    "pytorch.callbacks.lr_monitor": ("drivetrain.callbacks.lr_monitor: LearningRateMonitor",),
    "pytorch.callbacks.model_checkpoint": ("drivetrain.callbacks.model_checkpoint: ModelCheckpoint",),
    "pytorch.callbacks.model_summary": ("drivetrain.callbacks.model_summary: ModelSummary",),
    "pytorch.callbacks.on_exception_checkpoint": (
        "drivetrain.callbacks.on_exception_checkpoint: OnExceptionCheckpoint",
    ),
    "pytorch.callbacks.prediction_writer": (
        "drivetrain.callbacks.prediction_writer: BasePredictionWriter WriteInterval",
    ),
    "pytorch.callbacks.progress": ("drivetrain.callbacks: ProgressBar RichProgressBar TQDMProgressBar",),
    "pytorch.callbacks.progress.progress_bar": (
        "drivetrain.callbacks.progress_bar: ProgressBar",
        f"{_C}.progress: get_standard_metrics",
    ),
    "pytorch.callbacks.progress.rich_progress": (
        "drivetrain.callbacks.rich_progress: RichProgressBar RichProgressBarTheme",
    ),
    "pytorch.callbacks.progress.tqdm_progress": (
        "drivetrain.callbacks.tqdm_progress: TQDMProgressBar",
        f"{_C}.progress: Tqdm convert_inf",
    ),
    "pytorch.callbacks.rich_model_summary": ("drivetrain.callbacks.rich_model_summary: RichModelSummary",),
    "pytorch.callbacks.timer": ("drivetrain.callbacks.timer: Timer", f"{_C}.enums: Interval"),
    "pytorch.callbacks.stochastic_weight_avg": (
        "drivetrain.callbacks.stochastic_weight_avg: StochasticWeightAveraging",
    ),
    "pytorch.callbacks.throughput_monitor": ("drivetrain.callbacks.throughput_monitor: ThroughputMonitor",),
    "pytorch.callbacks.spike": ("drivetrain.callbacks.spike: SpikeDetection",),
    "pytorch.callbacks.pruning": ("drivetrain.callbacks.pruning: ModelPruning",),
    "pytorch.callbacks.weight_averaging": (
        "drivetrain.callbacks.weight_averaging: EMAWeightAveraging WeightAveraging",
    ),
    "pytorch.tuner": ("drivetrain.tuner: Tuner",),
    "pytorch.tuner.lr_finder": ("drivetrain.callbacks.lr_finder: _LRFinder=LRSweep",),
    "pytorch.tuner.tuning": ("drivetrain.tuner: Tuner",),
    "pytorch.cli": (
        "drivetrain.cli",
        f"{_C}.type_names: ArgsType LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion",
        f"{_C}.instantiating: ModuleType instantiate_module",
    ),
    "pytorch.core": ("drivetrain: LightningDataModule LightningModule",),
    "pytorch.core.datamodule": ("drivetrain.module.datamodule: LightningDataModule",),
    "pytorch.core.hooks": ("drivetrain.module.hooks: CheckpointHooks=ModelHooks DataHooks ModelHooks",),
    "pytorch.core.mixins": ("drivetrain.module.hparams: HyperparametersMixin",),
    "pytorch.core.mixins.hparams_mixin": ("drivetrain.module.hparams: HyperparametersMixin",),
    "pytorch.core.module": ("drivetrain.module.module: LightningModule", f"{_C}.type_names: MODULE_OPTIMIZERS"),
    "pytorch.core.optimizer": (
        "drivetrain.module.optimizers: LightningOptimizer",
        f"{_C}.connectors: _MockOptimizer do_nothing_closure",
    ),
    "pytorch.core.saving": (
        f"{_C}.files: CHECKPOINT_PAST_HPARAMS_KEYS convert get_filesystem load_hparams_from_tags_csv "
        "load_hparams_from_yaml save_hparams_to_tags_csv save_hparams_to_yaml update_hparams "
        "_load_from_checkpoint _load_state",
    ),
    "pytorch.demos": (
        f"{_C}.boring_classes: BoringDataModule BoringModel DemoModel",
        f"{_C}.demo_language: LightningLSTM LightningTransformer SequenceSampler SimpleLSTM Transformer WikiText2",
    ),
    "pytorch.demos.boring_classes": (
        f"{_C}.boring_classes: BoringDataModule BoringDataModuleNoLen BoringModel DemoModel IterableBoringDataModule "
        "ManualOptimBoringModel Net RandomDataset RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen",
    ),
    "pytorch.demos.lstm": (f"{_C}.demo_language: LightningLSTM SequenceSampler SimpleLSTM",),
    "pytorch.demos.mnist_datamodule": (f"{_C}.demo_mnist: MNIST MNISTDataModule",),
    "pytorch.demos.transformer": (
        f"{_C}.demo_language: Dictionary LightningTransformer PositionalEncoding Transformer WikiText2 tokenize",
        "torch.nn: MultiheadAttention",
    ),
    "pytorch.loggers": (_LOGGERS, "drivetrain.loggers: CometLogger Logger MLFlowLogger NeptuneLogger WandbLogger"),
    "pytorch.loggers.comet": ("drivetrain.loggers.comet: CometLogger",),
    "pytorch.loggers.csv_logs": ("drivetrain.loggers.csv: CSVLogger ExperimentWriter=CSVExperiment",),
    "pytorch.loggers.logger": (
        "drivetrain.loggers: DummyLogger Logger",
        f"{_C}.loggers: merge_dicts rank_zero_experiment",
    ),
    "pytorch.loggers.mlflow": ("drivetrain.loggers.mlflow: MLFlowLogger",),
    "pytorch.loggers.neptune": ("drivetrain.loggers.neptune: NeptuneLogger",),
    "pytorch.loggers.tensorboard": ("drivetrain.loggers.tensorboard: TensorBoardLogger",),
    "pytorch.loggers.utilities": (f"{_C}.loggers: _scan_checkpoints",),
    "pytorch.loggers.wandb": ("drivetrain.loggers.wandb: WandbLogger",),
    # There are no loop objects here; these are the views that trainer.fit_loop and its relatives are.
    "pytorch.loops": (
        "drivetrain.compat.loop_views: _EvaluationLoop=EvaluationView _FitLoop=FitView _PredictionLoop=PredictionView",
    ),
    "pytorch.loops.evaluation_loop": ("drivetrain.compat.loop_views: _EvaluationLoop=EvaluationView",),
    "pytorch.loops.fit_loop": ("drivetrain.compat.loop_views: _FitLoop=FitView",),
    "pytorch.loops.prediction_loop": ("drivetrain.compat.loop_views: _PredictionLoop=PredictionView",),
    "pytorch.loops.training_epoch_loop": ("drivetrain.compat.loop_views: _TrainingEpochLoop=TrainingEpochView",),
    "pytorch.overrides": (),
    "pytorch.overrides.distributed": (
        f"{_C}.samplers: UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper prepare_for_backward",
    ),
    "pytorch.plugins": ("drivetrain.plugins", _FORMER_PRECISIONS, f"{_FORMER}: HPUCheckpointIO"),
    "pytorch.plugins.environments": _ENVIRONMENTS[""],
    "pytorch.plugins.io": (_ASYNC_IO, _CHECKPOINT_IO, _TORCH_IO, _XLA_IO, f"{_FORMER}: HPUCheckpointIO"),
    "pytorch.plugins.io.async_plugin": (_ASYNC_IO,),
    "pytorch.plugins.io.checkpoint_plugin": (_CHECKPOINT_IO,),
    "pytorch.plugins.io.torch_plugin": (_TORCH_IO,),
    "pytorch.plugins.io.xla_plugin": (_XLA_IO,),
    "pytorch.plugins.layer_sync": ("drivetrain.plugins.layer_sync",),
    "pytorch.plugins.precision": ("drivetrain.precision", _FORMER_PRECISIONS),
    **{
        f"pytorch.plugins.precision.{name}": (*source, f"{_FORMER}: {_FORMER_PRECISION[name]}")
        for name, source in _PRECISIONS.items()
    },
    "pytorch.plugins.precision.precision_plugin": (
        *_PRECISIONS["precision"],
        f"{_FORMER}: {_FORMER_PRECISION['precision']}",
    ),
    "pytorch.plugins.precision.tpu": (f"{_FORMER}: TPUPrecisionPlugin",),
    "pytorch.plugins.precision.tpu_bf16": (f"{_FORMER}: TPUBf16PrecisionPlugin",),
    "pytorch.plugins.precision.xlabf16": (f"{_FORMER}: XLABf16PrecisionPlugin",),
    "pytorch.profilers": ("drivetrain.profilers",),
    "pytorch.profilers.advanced": ("drivetrain.profilers.advanced: AdvancedProfiler",),
    "pytorch.profilers.base": ("drivetrain.profilers.passthrough: PassThroughProfiler",),
    "pytorch.profilers.profiler": ("drivetrain.profilers.profiler: Profiler",),
    "pytorch.profilers.pytorch": ("drivetrain.profilers.pytorch: PyTorchProfiler",),
    "pytorch.profilers.simple": ("drivetrain.profilers.simple: SimpleProfiler",),
    "pytorch.profilers.xla": ("drivetrain.profilers.xla: XLAProfiler",),
    "pytorch.strategies": (
        "drivetrain.strategies",
        f"{_FORMER}: HPUParallelStrategy SingleHPUStrategy SingleTPUStrategy",
    ),
    "pytorch.strategies.single_tpu": (f"{_FORMER}: SingleTPUStrategy",),
    "pytorch.strategies.ddp": ("drivetrain.strategies.ddp: DDPStrategy",),
    "pytorch.strategies.deepspeed": ("drivetrain.strategies.deepspeed: DeepSpeedStrategy",),
    "pytorch.strategies.fsdp": ("drivetrain.strategies.fsdp: FSDPStrategy",),
    "pytorch.strategies.model_parallel": ("drivetrain.strategies.model_parallel: ModelParallelStrategy",),
    "pytorch.strategies.parallel": ("drivetrain.strategies.parallel: ParallelStrategy",),
    "pytorch.strategies.single_device": ("drivetrain.strategies.single_device: SingleDeviceStrategy",),
    "pytorch.strategies.single_xla": ("drivetrain.strategies.single_xla: SingleDeviceXLAStrategy",),
    "pytorch.strategies.xla": ("drivetrain.strategies.xla: XLAStrategy",),
    "pytorch.strategies.strategy": ("drivetrain.strategies.strategy: Strategy", _REDUCED_TYPES),
    "pytorch.trainer": ("drivetrain: Trainer", _SEED_EVERYTHING),
    "pytorch.trainer.connectors": (),
    "pytorch.trainer.call": (
        f"{_C}.calls: _call_callback_hooks _call_lightning_datamodule_hook _call_lightning_module_hook "
        "_call_strategy_hook",
    ),
    "pytorch.trainer.connectors.accelerator_connector": (
        f"{_C}.connectors: _AcceleratorConnector",
        f"{_C}.type_names: _PRECISION_INPUT",
    ),
    "pytorch.trainer.connectors.callback_connector": (f"{_CONNECTORS}: _CallbackConnector=CallbackView",),
    "pytorch.trainer.connectors.checkpoint_connector": (f"{_CONNECTORS}: _CheckpointConnector=CheckpointView",),
    "pytorch.trainer.connectors.data_connector": (
        f"{_CONNECTORS}: _DataConnector=DataView _DataLoaderSource=LoaderSource",
    ),
    "pytorch.trainer.connectors.logger_connector": (f"{_CONNECTORS}: _LoggerConnector=LoggerView",),
    "pytorch.trainer.connectors.logger_connector.logger_connector": (f"{_CONNECTORS}: _LoggerConnector=LoggerView",),
    "pytorch.trainer.connectors.logger_connector.result": (
        f"{_CONNECTORS}: _ResultCollection=ResultsView _ResultMetric=ResultView",
        f"{_C}.type_names: _METRICS _OUT_DICT _PBAR_DICT",
    ),
    "pytorch.trainer.states": (
        "drivetrain.loops.progress: RunningStage TrainerFn TrainerState=Progress TrainerStatus",
    ),
    "pytorch.trainer.trainer": ("drivetrain.trainer.trainer: Trainer",),
    "pytorch.utilities": (
        *_SAID_OF_BOTH,
        "drivetrain.data.combined: CombinedLoader",
        f"{_C}.enums: GradClipAlgorithmType",
        f"{_C}.parameters: find_shared_parameters grad_norm set_shared_parameters",
        f"{_C}.parsing: is_picklable",
        f"{_C}.type_names: FLOAT16_EPSILON FLOAT32_EPSILON FLOAT64_EPSILON",
    ),
    "pytorch.utilities.combined_loader": ("drivetrain.data.combined: CombinedLoader",),
    "pytorch.utilities.compile": (f"{_C}.compiled: _maybe_unwrap_optimized from_compiled to_uncompiled",),
    "pytorch.utilities.data": (
        f"{_C}.batches: extract_batch_size has_iterable_dataset has_len has_len_all_ranks sized_len",
        f"{_C}.type_names: BType",
    ),
    "pytorch.utilities.deepspeed": (
        f"{_C}.deepspeed_files: CPU_DEVICE convert_zero_checkpoint_to_fp32_state_dict ds_checkpoint_dir",
    ),
    "pytorch.utilities.enums": (f"{_C}.enums: GradClipAlgorithmType LightningEnum _FaultTolerantMode",),
    "pytorch.utilities.exceptions": (_MISCONFIGURATION, "drivetrain.errors: SIGTERMException"),
    "pytorch.utilities.grads": (f"{_C}.parameters: grad_norm",),
    "pytorch.utilities.imports": (
        f"{_C}.versions: _OMEGACONF_AVAILABLE _PYTHON_GREATER_EQUAL_3_11_0 _RICH_AVAILABLE "
        "_TORCHMETRICS_GREATER_EQUAL_0_11 _TORCHMETRICS_GREATER_EQUAL_0_9_1 _TORCHMETRICS_GREATER_EQUAL_1_0_0 "
        "_TORCHVISION_AVAILABLE _TORCH_GREATER_EQUAL_2_6",
    ),
    "pytorch.utilities.memory": (
        f"{_C}.memory: garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory "
        "recursive_detach",
    ),
    "pytorch.utilities.migration": (f"{_C}.migration: migrate_checkpoint pl_legacy_patch",),
    "pytorch.utilities.migration.utils": (
        f"{_C}.migration: _pl_migrate_checkpoint migrate_checkpoint pl_legacy_patch",
    ),
    "pytorch.utilities.model_helpers": (f"{_C}.parsing: get_torchvision_model is_overridden",),
    "pytorch.utilities.model_summary": _SUMMARY_MODULE,
    "pytorch.utilities.model_summary.model_summary": (*_SUMMARY_MODULE, f"{_C}.model_summary: UNKNOWN_SIZE"),
    "pytorch.utilities.parameter_tying": (f"{_C}.parameters: find_shared_parameters set_shared_parameters",),
    "pytorch.utilities.parsing": (
        _ATTRIBUTE_DICT,
        f"{_C}.parsing: clean_namespace collect_init_args get_init_args is_picklable lightning_getattr "
        "lightning_hasattr lightning_setattr parse_class_init_keys save_hyperparameters",
    ),
    "pytorch.utilities.rank_zero": _RANK_ZERO_MODULE,
    "pytorch.utilities.seed": (f"{_C}.seed: isolate_rng",),
    "pytorch.utilities.signature_utils": (f"{_C}.parsing: is_param_in_hook_signature",),
    "pytorch.utilities.types": (
        "drivetrain.module.optimizers: LRSchedulerConfig",
        "torch.nn.parallel: DistributedDataParallel",
        f"{_C}.type_names: EVAL_DATALOADERS LRSchedulerConfigType LRSchedulerPLType LRSchedulerType "
        "LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig "
        "STEP_OUTPUT TRAIN_DATALOADERS _EVALUATE_OUTPUT _PREDICT_OUTPUT",
    ),
    "pytorch.utilities.upgrade_checkpoint": (f"{_C}.migration: main",),
    "pytorch.utilities.warnings": (f"{_C}.user_warnings: PossibleUserWarning",),
    # ---- lightning.fabric -------------------------------------------------------------------------------------------
    "fabric": ("drivetrain.engine.engine: Fabric=Engine", _SEED_EVERYTHING, f"{_C}.wrapped: is_wrapped"),
    "fabric.accelerators": (
        "drivetrain.accelerators",
        "drivetrain.accelerators: ACCELERATOR_REGISTRY=AcceleratorRegistry",
        f"{_FORMER}: TPUAccelerator",
    ),
    "fabric.accelerators.tpu": (f"{_FORMER}: TPUAccelerator",),
    **{f"fabric.accelerators.{name}": source for name, source in _ACCELERATORS.items()},
    "fabric.accelerators.cuda": (
        "drivetrain.accelerators.cuda: CUDAAccelerator find_usable_cuda_devices",
        f"{_C}.devices: is_cuda_available num_cuda_devices",
    ),
    "fabric.fabric": ("drivetrain.engine.engine: Fabric=Engine",),
    "fabric.loggers": (_FABRIC_LOGGERS, "drivetrain.loggers: Logger"),
    "fabric.loggers.csv_logs": (f"{_C}.fabric_loggers: CSVLogger=FabricCSVLogger",),
    "fabric.loggers.logger": ("drivetrain.loggers: Logger", f"{_C}.loggers: rank_zero_experiment"),
    "fabric.loggers.tensorboard": (f"{_C}.fabric_loggers: TensorBoardLogger=FabricTensorBoardLogger",),
    "fabric.plugins": ("drivetrain.plugins", "drivetrain.clusters: ClusterEnvironment", _FORMER_PRECISIONS_OF_FABRIC),
    "fabric.plugins.collectives": (f"{_C}.collectives: Collective SingleDeviceCollective TorchCollective",),
    "fabric.plugins.collectives.collective": (f"{_C}.collectives: Collective",),
    "fabric.plugins.collectives.single_device": (f"{_C}.collectives: SingleDeviceCollective",),
    "fabric.plugins.collectives.torch_collective": (f"{_C}.collectives: TorchCollective default_pg_timeout",),
    **{f"fabric.plugins.environments{name}": source for name, source in _ENVIRONMENTS.items()},
    "fabric.plugins.io": (_CHECKPOINT_IO, _TORCH_IO, _XLA_IO),
    "fabric.plugins.io.checkpoint_io": (_CHECKPOINT_IO,),
    "fabric.plugins.io.torch_io": (_TORCH_IO,),
    "fabric.plugins.io.xla": (_XLA_IO,),
    "fabric.plugins.precision": ("drivetrain.precision", _FORMER_PRECISIONS_OF_FABRIC),
    "fabric.plugins.precision.tpu": (f"{_FORMER}: TPUPrecision",),
    "fabric.plugins.precision.tpu_bf16": (f"{_FORMER}: TPUBf16Precision",),
    "fabric.plugins.precision.xlabf16": (f"{_FORMER}: XLABf16Precision",),
    **{f"fabric.plugins.precision.{name}": source for name, source in _PRECISIONS.items()},
    "fabric.strategies": (
        # Their classes have names of their own, so that a bare DDPStrategy on a command line stays unambiguous.
        f"{_OF_FABRIC}: DDPStrategy=FabricDDPStrategy ParallelStrategy=FabricParallelStrategy "
        "SingleDeviceStrategy=FabricSingleDeviceStrategy Strategy",
        _SHARDED_OF_FABRIC,
        _SPLIT_OF_FABRIC,
        _DP_OF_FABRIC,
        _DEEPSPEED_OF_FABRIC,
        _XLA_OF_FABRIC,
        _SINGLE_XLA_OF_FABRIC,
        _XLA_FSDP_OF_FABRIC,
        "drivetrain.strategies: STRATEGY_REGISTRY=StrategyRegistry",
        f"{_FORMER}: SingleTPUStrategy",
    ),
    "fabric.strategies.ddp": (f"{_OF_FABRIC}: DDPStrategy=FabricDDPStrategy",),
    "fabric.strategies.deepspeed": (_DEEPSPEED_OF_FABRIC,),
    "fabric.strategies.dp": (_DP_OF_FABRIC,),
    "fabric.strategies.fsdp": (
        _SHARDED_OF_FABRIC,
        f"{_C}.connectors: _get_full_state_dict_context _setup_activation_checkpointing",
    ),
    "fabric.strategies.model_parallel": (_SPLIT_OF_FABRIC,),
    "fabric.strategies.parallel": (f"{_OF_FABRIC}: ParallelStrategy=FabricParallelStrategy",),
    "fabric.strategies.single_device": (f"{_OF_FABRIC}: SingleDeviceStrategy=FabricSingleDeviceStrategy",),
    "fabric.strategies.single_xla": (_SINGLE_XLA_OF_FABRIC,),
    "fabric.strategies.single_tpu": (f"{_FORMER}: SingleTPUStrategy",),
    "fabric.strategies.strategy": (f"{_OF_FABRIC}: Strategy _BackwardSyncControl", _REDUCED_TYPES),
    "fabric.strategies.xla": (_XLA_OF_FABRIC,),
    "fabric.strategies.xla_fsdp": (_XLA_FSDP_OF_FABRIC,),
    "fabric.utilities": (
        *_SAID_OF_BOTH,
        "drivetrain.engine.throughput: Throughput ThroughputMonitor=EngineThroughput",
    ),
    "fabric.utilities.apply_func": (
        f"{_C}.batches: convert_tensors_to_scalars convert_to_tensors move_data_to_device",
    ),
    "fabric.utilities.cloud_io": (f"{_C}.files: _load get_filesystem",),
    "fabric.utilities.data": (
        _ATTRIBUTE_DICT,
        f"{_C}.batches: has_iterable_dataset has_len sized_len suggested_max_num_workers",
    ),
    "fabric.utilities.distributed": (
        f"{_C}.samplers: DistributedSamplerWrapper",
        f"{_C}.files: is_shared_filesystem",
        f"{_C}.reductions: _all_gather_ddp_if_available _distributed_is_initialized "
        "_get_default_process_group_backend_for_device _sync_ddp_if_available",
        "torch.distributed: ReduceOp group",
    ),
    "fabric.utilities.enums": (f"{_C}.enums: LightningEnum",),
    "fabric.utilities.exceptions": (_MISCONFIGURATION,),
    "fabric.utilities.imports": (
        f"{_C}.versions: _IS_INTERACTIVE _IS_WINDOWS _NUMPY_AVAILABLE _TORCHMETRICS_GREATER_EQUAL_1_0_0 "
        "_TORCH_GREATER_EQUAL_2_2 _TORCH_GREATER_EQUAL_2_3 _TORCH_GREATER_EQUAL_2_4 _TORCH_GREATER_EQUAL_2_4_1 "
        "_TORCH_GREATER_EQUAL_2_5 _TORCH_GREATER_EQUAL_2_6",
    ),
    "fabric.utilities.init": (
        f"{_C}.weights: _EmptyInit _has_meta_device_parameters_or_buffers _materialize _materialize_meta_tensors",
    ),
    "fabric.utilities.load": (
        f"{_C}.weights: _METADATA_FILENAME _NotYetLoadedTensor _lazy_load _materialize_tensors _move_state_into",
    ),
    "fabric.utilities.logger": (
        f"{_C}.loggers: _add_prefix _convert_params _flatten_dict _sanitize_callable_params _sanitize_params",
    ),
    "fabric.utilities.rank_zero": _RANK_ZERO_MODULE,
    "fabric.utilities.seed": (
        f"{_C}.seed: max_seed_value min_seed_value pl_worker_init_function reset_seed seed_everything",
    ),
    "fabric.utilities.spike": (
        "drivetrain.callbacks.spike: TrainingSpikeException",
        f"{_C}.spike: SpikeDetection=FabricSpikeDetection",
    ),
    "fabric.utilities.throughput": (
        f"{_C}.parameters: measure_flops",
        "drivetrain.engine.throughput: Throughput ThroughputMonitor=EngineThroughput",
        "drivetrain.accelerators.peak_flops: get_available_flops",
    ),
    "fabric.utilities.types": (
        "torch: UntypedStorage",
        "torch.distributed: ProcessGroup ReduceOp",
        f"{_C}.type_names: RedOpType",
        f"{_C}.type_names: CollectibleGroup Optimizable Steppable _DEVICE _MAP_LOCATION_TYPE _PARAMETERS _PATH",
    ),
    "fabric.utilities.warnings": (f"{_C}.user_warnings: PossibleUserWarning disable_possible_user_warnings",),
    "fabric.wrappers": (
        f"{_C}.type_names: T_destination",
        f"{_C}.wrapped: is_wrapped _unwrap_objects",
        "drivetrain.engine.wrappers: _FabricDataLoader=EngineLoader _FabricModule=EngineModule",
        "drivetrain.engine.wrappers: _FabricOptimizer=OptimizerHandle",
    ),
}
