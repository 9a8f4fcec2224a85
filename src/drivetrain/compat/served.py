"""The table of the modules of the latest Lightning that are available, with their drivetrain names.

Paths are below ``lightning``; ``pytorch_lightning`` is an alias of "pytorch" and ``lightning_fabric`` of "fabric". See
:mod:`drivetrain.compat.rows` for the format of a row. Nothing is imported before a name is requested. Other modules and
names do not exist for the program: see docs/compat.md.
"""

from __future__ import annotations

from drivetrain.compat.rows import table_of

SERVED = table_of("""
*rank_zero .base.rank_zero: rank_zero_warn | .compat.rank_zero: rank_zero_debug rank_zero_deprecation rank_zero_info
    rank_zero_only
*both .module.hparams: AttributeDict | =*rank_zero | .compat.batches: move_data_to_device suggested_max_num_workers |
    .compat.enums: LightningEnum | .compat.files: is_shared_filesystem | .compat.parameters: measure_flops |
    .compat.user_warnings: disable_possible_user_warnings
*former_precisions .compat.deprecated: BitsandbytesPrecisionPlugin DeepSpeedPrecisionPlugin DoublePrecisionPlugin
    FSDPMixedPrecisionPlugin FSDPPrecisionPlugin HPUPrecisionPlugin HalfPrecisionPlugin MixedPrecisionPlugin
    PrecisionPlugin TPUBf16PrecisionPlugin TPUPrecisionPlugin TransformerEnginePrecisionPlugin XLABf16PrecisionPlugin
    XLAPrecisionPlugin
- drivetrain: Callback LightningDataModule LightningModule Trainer | .compat.seed: seed_everything | .engine.engine:
    Fabric=Engine
pytorch drivetrain: Callback LightningDataModule LightningModule Trainer | .compat.seed: seed_everything
pytorch.accelerators .accelerators | .compat.deprecated: HPUAccelerator TPUAccelerator
pytorch.accelerators.tpu .compat.deprecated: TPUAccelerator
pytorch.accelerators.accelerator .accelerators.accelerator: Accelerator
pytorch.accelerators.cpu .accelerators.cpu: CPUAccelerator | .compat.devices: get_cpu_stats
pytorch.accelerators.cuda .accelerators.cuda: CUDAAccelerator | .compat.devices: get_nvidia_gpu_stats
pytorch.accelerators.mps .accelerators.mps: MPSAccelerator | .compat.devices: get_device_stats
pytorch.accelerators.{xla} .accelerators
pytorch.callbacks .callbacks
pytorch.callbacks.batch_size_finder .tuner.batch_size_finder: BatchSizeFinder
pytorch.callbacks.lr_finder .tuner.lr_finder: LearningRateFinder
pytorch.callbacks.{device_stats_monitor lambda_function lr_monitor model_checkpoint
    model_summary on_exception_checkpoint rich_model_summary stochastic_weight_avg throughput_monitor spike pruning
    weight_averaging} .callbacks
pytorch.callbacks.{callback:Callback checkpoint:Checkpoint} .callback
pytorch.callbacks.early_stopping .callbacks.early_stopping: EarlyStopping EarlyStoppingReason
pytorch.callbacks.finetuning .callbacks.finetuning: BackboneFinetuning BaseFinetuning multiplicative
pytorch.callbacks.gradient_accumulation_scheduler .callbacks.gradient_accumulation: GradientAccumulationScheduler
pytorch.callbacks.prediction_writer .callbacks.prediction_writer: BasePredictionWriter WriteInterval
pytorch.callbacks.progress .callbacks: ProgressBar RichProgressBar TQDMProgressBar
pytorch.callbacks.progress.progress_bar .callbacks.progress_bar: ProgressBar | .compat.progress: get_standard_metrics
pytorch.callbacks.progress.rich_progress .callbacks.rich_progress: RichProgressBar RichProgressBarTheme
pytorch.callbacks.progress.tqdm_progress .callbacks.tqdm_progress: TQDMProgressBar | .compat.progress: Tqdm convert_inf
pytorch.callbacks.timer .callbacks.timer: Timer | .compat.enums: Interval
pytorch.tuner .tuner: Tuner
pytorch.tuner.lr_finder .tuner.lr_finder: _LRFinder=LRSweep
pytorch.tuner.tuning .tuner: Tuner
pytorch.cli .cli | .compat.type_names: ArgsType LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion |
    .compat.instantiating: ModuleType instantiate_module
pytorch.core drivetrain: LightningDataModule LightningModule
pytorch.core.datamodule .module.datamodule: LightningDataModule
pytorch.core.hooks .module.hooks: CheckpointHooks=ModelHooks DataHooks ModelHooks
pytorch.core.mixins .module.hparams: HyperparametersMixin
pytorch.core.mixins.hparams_mixin .module.hparams: HyperparametersMixin
pytorch.core.module .module.module: LightningModule | .compat.type_names: MODULE_OPTIMIZERS
pytorch.core.optimizer .module.optimizers: LightningOptimizer | .compat.connectors: _MockOptimizer do_nothing_closure
pytorch.core.saving .compat.files: CHECKPOINT_PAST_HPARAMS_KEYS convert get_filesystem load_hparams_from_tags_csv
    load_hparams_from_yaml save_hparams_to_tags_csv save_hparams_to_yaml update_hparams _load_from_checkpoint
    _load_state
pytorch.demos .compat.boring_classes: BoringDataModule BoringModel DemoModel | .compat.demo_language: LightningLSTM
    LightningTransformer SequenceSampler SimpleLSTM Transformer WikiText2
pytorch.demos.boring_classes .compat.boring_classes: BoringDataModule BoringDataModuleNoLen BoringModel DemoModel
    IterableBoringDataModule ManualOptimBoringModel Net RandomDataset RandomDictDataset RandomIterableDataset
    RandomIterableDatasetWithLen
pytorch.demos.lstm .compat.demo_language: LightningLSTM SequenceSampler SimpleLSTM
pytorch.demos.mnist_datamodule .compat.demo_mnist: MNIST MNISTDataModule
pytorch.demos.transformer .compat.demo_language: Dictionary LightningTransformer PositionalEncoding Transformer
    WikiText2 tokenize | torch.nn: MultiheadAttention
pytorch.loggers .loggers: CSVLogger TensorBoardLogger CometLogger Logger MLFlowLogger NeptuneLogger WandbLogger
pytorch.loggers.{comet mlflow neptune tensorboard wandb} .loggers
pytorch.loggers.csv_logs .loggers.csv: CSVLogger ExperimentWriter=CSVExperiment
pytorch.loggers.logger .loggers: DummyLogger Logger | .compat.loggers: merge_dicts rank_zero_experiment
pytorch.loggers.utilities .compat.loggers: _scan_checkpoints
pytorch.loops .compat.loop_views: _EvaluationLoop=EvaluationView _FitLoop=FitView _PredictionLoop=PredictionView
pytorch.loops.{evaluation_loop:_EvaluationLoop=EvaluationView fit_loop:_FitLoop=FitView
    prediction_loop:_PredictionLoop=PredictionView training_epoch_loop:_TrainingEpochLoop=TrainingEpochView}
    .compat.loop_views
pytorch.overrides
pytorch.overrides.distributed .compat.samplers: UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper
    prepare_for_backward
pytorch.plugins .plugins | =*former_precisions | .compat.deprecated: HPUCheckpointIO
pytorch.plugins.environments .clusters: ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment
    MPIEnvironment SLURMEnvironment TorchElasticEnvironment XLAEnvironment
pytorch.plugins.io * | .compat.deprecated: HPUCheckpointIO
pytorch.plugins.io.{async_plugin:AsyncCheckpointIO xla_plugin:XLACheckpointIO} .checkpoints
pytorch.plugins.io.checkpoint_plugin .checkpoints.io: CheckpointIO
pytorch.plugins.io.torch_plugin .checkpoints.file: TorchCheckpointIO
pytorch.plugins.layer_sync .plugins.layer_sync
pytorch.plugins.precision .precision | =*former_precisions
pytorch.plugins.precision.amp .precision.mixed: MixedPrecision | .compat.deprecated: MixedPrecisionPlugin
pytorch.plugins.precision.bitsandbytes .precision.bitsandbytes: BitsandbytesPrecision | .compat.deprecated:
    BitsandbytesPrecisionPlugin
pytorch.plugins.precision.deepspeed .precision.by_strategy: DeepSpeedPrecision | .compat.deprecated:
    DeepSpeedPrecisionPlugin
pytorch.plugins.precision.double .precision.double: DoublePrecision | .compat.deprecated: DoublePrecisionPlugin
pytorch.plugins.precision.fsdp .precision.by_strategy: FSDPPrecision | .compat.deprecated: FSDPMixedPrecisionPlugin
    FSDPPrecisionPlugin
pytorch.plugins.precision.half .precision.half: HalfPrecision | .compat.deprecated: HalfPrecisionPlugin
pytorch.plugins.precision.precision .precision.precision: Precision | .compat.type_names: _PRECISION_INPUT
    _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS | .compat.deprecated: PrecisionPlugin
pytorch.plugins.precision.transformer_engine .precision.transformer_engine: TransformerEnginePrecision |
    .compat.deprecated: TransformerEnginePrecisionPlugin
pytorch.plugins.precision.xla .precision.xla: XLAPrecision | .compat.deprecated: XLAPrecisionPlugin
pytorch.plugins.precision.precision_plugin =pytorch.plugins.precision.precision
pytorch.plugins.precision.{tpu:TPUPrecisionPlugin tpu_bf16:TPUBf16PrecisionPlugin xlabf16:XLABf16PrecisionPlugin}
    .compat.deprecated
pytorch.profilers .profilers
pytorch.profilers.{advanced pytorch simple xla} .profilers
pytorch.profilers.base .profilers.passthrough: PassThroughProfiler
pytorch.profilers.profiler .profilers.profiler: Profiler
pytorch.serve .compat.serving: ServableModule ServableModuleValidator
pytorch.serve.{servable_module servable_module_validator} =pytorch.serve
pytorch.strategies .strategies | .compat.deprecated: HPUParallelStrategy SingleHPUStrategy SingleTPUStrategy
pytorch.strategies.single_tpu .compat.deprecated: SingleTPUStrategy
pytorch.strategies.{ddp deepspeed fsdp model_parallel parallel single_device single_xla xla} .strategies
pytorch.strategies.strategy .strategies.strategy: Strategy | .compat.type_names: TBroadcast TReduce
pytorch.trainer drivetrain: Trainer | .compat.seed: seed_everything
pytorch.trainer.connectors
pytorch.trainer.call .compat.calls: _call_callback_hooks _call_lightning_datamodule_hook _call_lightning_module_hook
    _call_strategy_hook
pytorch.trainer.connectors.accelerator_connector .compat.connectors: _AcceleratorConnector | .compat.type_names:
    _PRECISION_INPUT | .compat.versions: _IS_INTERACTIVE
pytorch.trainer.connectors.callback_connector .compat.connector_views: _CallbackConnector=CallbackView
pytorch.trainer.connectors.checkpoint_connector .compat.connector_views: _CheckpointConnector=CheckpointView
pytorch.trainer.connectors.data_connector .compat.connector_views: _DataConnector=DataView
    _DataLoaderSource=LoaderSource
pytorch.trainer.connectors.logger_connector .compat.connector_views: _LoggerConnector=LoggerView
pytorch.trainer.connectors.logger_connector.logger_connector =pytorch.trainer.connectors.logger_connector
pytorch.trainer.connectors.logger_connector.result .compat.connector_views: _ResultCollection=ResultsView
    _ResultMetric=ResultView | .compat.type_names: _METRICS _OUT_DICT _PBAR_DICT
pytorch.trainer.setup
pytorch.trainer.states .loops.progress: RunningStage TrainerFn TrainerState=Progress TrainerStatus
pytorch.trainer.trainer .trainer.trainer: Trainer
pytorch.utilities =*both | .data.combined: CombinedLoader | .compat.enums: GradClipAlgorithmType | .compat.parameters:
    find_shared_parameters grad_norm set_shared_parameters | .compat.parsing: is_picklable | .compat.type_names:
    FLOAT16_EPSILON FLOAT32_EPSILON FLOAT64_EPSILON
pytorch.utilities.combined_loader .data.combined: CombinedLoader
pytorch.utilities.compile .compat.compiled: _maybe_unwrap_optimized from_compiled to_uncompiled
pytorch.utilities.data .compat.batches: extract_batch_size has_iterable_dataset has_len has_len_all_ranks sized_len |
    .compat.type_names: BType
pytorch.utilities.deepspeed .compat.deepspeed_files: CPU_DEVICE convert_zero_checkpoint_to_fp32_state_dict
    ds_checkpoint_dir
pytorch.utilities.enums .compat.enums: GradClipAlgorithmType LightningEnum _FaultTolerantMode
pytorch.utilities.exceptions .errors: MisconfigurationException=DrivetrainError SIGTERMException
pytorch.utilities.grads .compat.parameters: grad_norm
pytorch.utilities.imports .compat.versions: _OMEGACONF_AVAILABLE _PYTHON_GREATER_EQUAL_3_11_0 _RICH_AVAILABLE
    _TORCHMETRICS_GREATER_EQUAL_0_11 _TORCHMETRICS_GREATER_EQUAL_0_9_1 _TORCHMETRICS_GREATER_EQUAL_1_0_0
    _TORCHVISION_AVAILABLE _TORCH_GREATER_EQUAL_2_6
pytorch.utilities.memory .compat.memory: garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error
    is_out_of_cpu_memory recursive_detach
pytorch.utilities.migration .compat.migration: migrate_checkpoint pl_legacy_patch
pytorch.utilities.migration.utils .compat.migration: _pl_migrate_checkpoint migrate_checkpoint pl_legacy_patch
pytorch.utilities.model_helpers .compat.parsing: get_torchvision_model is_overridden
pytorch.utilities.model_summary .compat.model_summary: ModelSummary get_formatted_model_size get_human_readable_count
    parse_batch_shape summarize
pytorch.utilities.model_summary.model_summary =pytorch.utilities.model_summary | .compat.model_summary: UNKNOWN_SIZE
pytorch.utilities.parameter_tying .compat.parameters: find_shared_parameters set_shared_parameters
pytorch.utilities.parsing .module.hparams: AttributeDict | .compat.parsing: clean_namespace collect_init_args
    get_init_args is_picklable lightning_getattr lightning_hasattr lightning_setattr parse_class_init_keys
    save_hyperparameters
pytorch.utilities.rank_zero =*rank_zero | .compat.rank_zero: LightningDeprecationWarning WarningCache
    rank_prefixed_message _get_rank
pytorch.utilities.seed .compat.seed: isolate_rng
pytorch.utilities.signature_utils .compat.parsing: is_param_in_hook_signature
pytorch.utilities.types .module.optimizers: LRSchedulerConfig | torch.nn.parallel: DistributedDataParallel |
    .compat.type_names: EVAL_DATALOADERS LRSchedulerConfigType LRSchedulerPLType LRSchedulerType LRSchedulerTypeTuple
    LRSchedulerTypeUnion OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS
    _EVALUATE_OUTPUT _PREDICT_OUTPUT
pytorch.utilities.upgrade_checkpoint .compat.migration: main
pytorch.utilities.warnings .compat.user_warnings: PossibleUserWarning
fabric .engine.engine: Fabric=Engine | .compat.seed: seed_everything | .compat.wrapped: is_wrapped
fabric.accelerators .accelerators | .accelerators: ACCELERATOR_REGISTRY=AcceleratorRegistry | .compat.deprecated:
    TPUAccelerator
fabric.accelerators.tpu .compat.deprecated: TPUAccelerator
fabric.accelerators.accelerator .accelerators.accelerator: Accelerator
fabric.accelerators.{cpu mps xla} .accelerators
fabric.accelerators.cuda .accelerators.cuda: CUDAAccelerator find_usable_cuda_devices | .compat.devices:
    is_cuda_available num_cuda_devices
fabric.fabric .engine.engine: Fabric=Engine
fabric.loggers .compat.fabric_loggers: CSVLogger=FabricCSVLogger TensorBoardLogger=FabricTensorBoardLogger | .loggers:
    Logger
fabric.loggers.csv_logs .compat.fabric_loggers: CSVLogger=FabricCSVLogger
fabric.loggers.logger .loggers: Logger | .compat.loggers: rank_zero_experiment
fabric.loggers.tensorboard .compat.fabric_loggers: TensorBoardLogger=FabricTensorBoardLogger
fabric.plugins .plugins | .clusters: ClusterEnvironment | .compat.deprecated: TPUBf16Precision TPUPrecision
    XLABf16Precision
fabric.plugins.collectives .compat.collectives: Collective SingleDeviceCollective TorchCollective
fabric.plugins.collectives.{collective:Collective single_device:SingleDeviceCollective} .compat.collectives
fabric.plugins.collectives.torch_collective .compat.collectives: TorchCollective default_pg_timeout
fabric.plugins.environments =pytorch.plugins.environments
fabric.plugins.environments.cluster_environment .clusters: ClusterEnvironment
fabric.plugins.environments.{kubeflow lsf mpi slurm torchelastic xla} .clusters
fabric.plugins.environments.lightning .clusters: LightningEnvironment | .compat.devices: find_free_network_port
fabric.plugins.io *
fabric.plugins.io.checkpoint_io .checkpoints.io: CheckpointIO
fabric.plugins.io.torch_io .checkpoints.file: TorchCheckpointIO
fabric.plugins.io.xla .checkpoints: XLACheckpointIO
fabric.plugins.precision .precision | .compat.deprecated: TPUBf16Precision TPUPrecision XLABf16Precision
fabric.plugins.precision.{tpu:TPUPrecision tpu_bf16:TPUBf16Precision xlabf16:XLABf16Precision} .compat.deprecated
fabric.plugins.precision.amp .precision.mixed: MixedPrecision
fabric.plugins.precision.{bitsandbytes double half transformer_engine xla} .precision
fabric.plugins.precision.{deepspeed:DeepSpeedPrecision fsdp:FSDPPrecision} .precision.by_strategy
fabric.plugins.precision.precision .precision.precision: Precision | .compat.type_names: _PRECISION_INPUT
    _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS
fabric.strategies .compat.fabric_strategies: DDPStrategy=FabricDDPStrategy ParallelStrategy=FabricParallelStrategy
    SingleDeviceStrategy=FabricSingleDeviceStrategy Strategy | .compat.fabric_sharded: FSDPStrategy=FabricFSDPStrategy
    ModelParallelStrategy=FabricModelParallelStrategy | .compat.fabric_dp:
    DataParallelStrategy=FabricDataParallelStrategy | .compat.fabric_deepspeed:
    DeepSpeedStrategy=FabricDeepSpeedStrategy | .compat.fabric_xla: XLAStrategy=FabricXLAStrategy
    SingleDeviceXLAStrategy=FabricSingleDeviceXLAStrategy XLAFSDPStrategy=FabricXLAFSDPStrategy | .strategies:
    STRATEGY_REGISTRY=StrategyRegistry | .compat.deprecated: SingleTPUStrategy
fabric.strategies.{ddp:DDPStrategy=FabricDDPStrategy parallel:ParallelStrategy=FabricParallelStrategy
    single_device:SingleDeviceStrategy=FabricSingleDeviceStrategy} .compat.fabric_strategies
fabric.strategies.deepspeed .compat.fabric_deepspeed: DeepSpeedStrategy=FabricDeepSpeedStrategy
fabric.strategies.dp .compat.fabric_dp: DataParallelStrategy=FabricDataParallelStrategy
fabric.strategies.fsdp .compat.fabric_sharded: FSDPStrategy=FabricFSDPStrategy | .compat.connectors:
    _get_full_state_dict_context _setup_activation_checkpointing
fabric.strategies.model_parallel .compat.fabric_sharded: ModelParallelStrategy=FabricModelParallelStrategy
fabric.strategies.{single_xla:SingleDeviceXLAStrategy=FabricSingleDeviceXLAStrategy xla:XLAStrategy=FabricXLAStrategy
    xla_fsdp:XLAFSDPStrategy=FabricXLAFSDPStrategy} .compat.fabric_xla
fabric.strategies.single_tpu .compat.deprecated: SingleTPUStrategy
fabric.strategies.strategy .compat.fabric_strategies: Strategy _BackwardSyncControl | .compat.type_names: TBroadcast
    TReduce
fabric.utilities =*both | .engine.throughput: Throughput ThroughputMonitor=EngineThroughput
fabric.utilities.apply_func .compat.batches: convert_tensors_to_scalars convert_to_tensors move_data_to_device
fabric.utilities.cloud_io .compat.files: _load get_filesystem
fabric.utilities.data .module.hparams: AttributeDict | .compat.batches: has_iterable_dataset has_len sized_len
    suggested_max_num_workers
fabric.utilities.distributed .compat.samplers: DistributedSamplerWrapper | .compat.files: is_shared_filesystem |
    .compat.reductions: _all_gather_ddp_if_available _distributed_is_initialized
    _get_default_process_group_backend_for_device _sync_ddp_if_available | torch.distributed: ReduceOp group
fabric.utilities.enums .compat.enums: LightningEnum
fabric.utilities.exceptions .errors: MisconfigurationException=DrivetrainError
fabric.utilities.imports .compat.versions: _IS_INTERACTIVE _IS_WINDOWS _NUMPY_AVAILABLE
    _TORCHMETRICS_GREATER_EQUAL_1_0_0 _TORCH_GREATER_EQUAL_2_2 _TORCH_GREATER_EQUAL_2_3 _TORCH_GREATER_EQUAL_2_4
    _TORCH_GREATER_EQUAL_2_4_1 _TORCH_GREATER_EQUAL_2_5 _TORCH_GREATER_EQUAL_2_6
fabric.utilities.init .compat.weights: _EmptyInit _has_meta_device_parameters_or_buffers _materialize
    _materialize_meta_tensors
fabric.utilities.load .compat.weights: _METADATA_FILENAME _NotYetLoadedTensor _lazy_load _materialize_tensors
    _move_state_into
fabric.utilities.logger .compat.loggers: _add_prefix _convert_params _flatten_dict _sanitize_callable_params
    _sanitize_params
fabric.utilities.rank_zero =pytorch.utilities.rank_zero
fabric.utilities.registry .compat.connectors: _register_classes
fabric.utilities.seed .compat.seed: max_seed_value min_seed_value pl_worker_init_function reset_seed seed_everything
fabric.utilities.spike .callbacks.spike: TrainingSpikeException | .compat.spike: SpikeDetection=FabricSpikeDetection
fabric.utilities.throughput .compat.parameters: measure_flops | .engine.throughput: Throughput
    ThroughputMonitor=EngineThroughput | .accelerators.peak_flops: get_available_flops
fabric.utilities.types torch: UntypedStorage | torch.distributed: ProcessGroup ReduceOp | .compat.type_names: RedOpType
    CollectibleGroup Optimizable Steppable _DEVICE _MAP_LOCATION_TYPE _PARAMETERS _PATH
fabric.utilities.warnings .compat.user_warnings: PossibleUserWarning disable_possible_user_warnings
fabric.wrappers .compat.type_names: T_destination | .compat.wrapped: is_wrapped _unwrap_objects | .engine.wrappers:
    _FabricDataLoader=EngineLoader _FabricModule=EngineModule _FabricOptimizer=OptimizerHandle
""")
