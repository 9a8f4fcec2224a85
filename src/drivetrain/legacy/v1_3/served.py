"""The table of the modules of Lightning 1.3 for ``drivetrain exec --generation 1.3``.

See :mod:`drivetrain.compat.rows` for the format of a row.
"""

from __future__ import annotations

from drivetrain.compat.rows import table_of

SERVED = table_of("""
- .legacy.v1_3: Callback LightningDataModule LightningModule Trainer | .compat.seed: seed_everything | .base.rank_zero:
    _logger=log
accelerators .legacy.v1_3: Accelerator CPUAccelerator GPUAccelerator TPUAccelerator
accelerators.{accelerator:Accelerator cpu:CPUAccelerator gpu:GPUAccelerator tpu:TPUAccelerator} .legacy.v1_3
callbacks *
callbacks.base .legacy.v1_3: Callback
callbacks.{early_stopping:EarlyStopping gpu_stats_monitor:GPUStatsMonitor lambda_function:LambdaCallback
    model_checkpoint:ModelCheckpoint stochastic_weight_avg:StochasticWeightAveraging} .legacy.v1_3._callbacks
callbacks.gradient_accumulation_scheduler .callbacks.gradient_accumulation: GradientAccumulationScheduler
callbacks.{lr_monitor pruning timer} .callbacks
callbacks.prediction_writer .callbacks.prediction_writer: BasePredictionWriter WriteInterval
callbacks.progress .legacy.v1_3.progress: ProgressBar ProgressBarBase
callbacks.finetuning .callbacks.finetuning: BackboneFinetuning BaseFinetuning multiplicative
core .legacy.v1_3: LightningDataModule LightningModule
core.{datamodule:LightningDataModule lightning:LightningModule} .legacy.v1_3
core.decorators .legacy.v1_3.module: auto_move_data
core.hooks .module.hooks: CheckpointHooks=ModelHooks DataHooks ModelHooks
core.memory .legacy.v1_3.helpers: ModelSummary | .compat.model_summary: UNKNOWN_SIZE get_formatted_model_size
    get_human_readable_count parse_batch_shape
core.optimizer .module.optimizers: LightningOptimizer
core.saving .compat.files: load_hparams_from_yaml save_hparams_to_yaml update_hparams
loggers *
loggers.base .loggers: DummyLogger LightningLoggerBase=Logger | .compat.loggers: merge_dicts rank_zero_experiment |
    .legacy.v1_3.loggers: LoggerCollection
loggers.{comet mlflow neptune tensorboard wandb} .loggers
loggers.csv_logs .loggers.csv: CSVLogger
loggers.test_tube .legacy.absent: TestTubeLogger
tuner .legacy.v1_3.tuner: Tuner
tuner.tuning .legacy.v1_3.tuner: Tuner
*torchmetrics torchmetrics: AveragePrecision ExplainedVariance MeanAbsoluteError MeanSquaredError MeanSquaredLogError
    Metric MetricCollection PSNR=PeakSignalNoiseRatio PrecisionRecallCurve ROC SSIM=StructuralSimilarityIndexMeasure
metrics .legacy.v1_3.metrics | =*torchmetrics
metrics.classification =*torchmetrics | .legacy.v1_3.metrics: Accuracy ConfusionMatrix F1 FBeta Precision Recall
metrics.functional * | torchmetrics.functional: image_gradients
metrics.functional.{average_precision:average_precision confusion_matrix:confusion_matrix
    precision_recall_curve:precision_recall_curve roc:roc} .legacy.v1_1.functional
metrics.functional.{explained_variance:explained_variance mean_absolute_error:mean_absolute_error
    mean_squared_error:mean_squared_error mean_squared_log_error:mean_squared_log_error nlp:bleu_score
    psnr:psnr=peak_signal_noise_ratio ssim:ssim=structural_similarity_index_measure} torchmetrics.functional
metrics.functional.classification .legacy.v1_1.functional
metrics.functional.f_beta .legacy.v1_1.functional: f1 fbeta
metrics.metric torchmetrics: Metric MetricCollection
metrics.regression =metrics.classification
plugins.environments .plugins.environments: ClusterEnvironment LightningEnvironment SLURMEnvironment
    TorchElasticEnvironment
plugins.precision .legacy.v1_3: ApexMixedPrecisionPlugin DoublePrecisionPlugin MixedPrecisionPlugin
    NativeMixedPrecisionPlugin PrecisionPlugin
plugins.precision.{apex_amp:ApexMixedPrecisionPlugin double:DoublePrecisionPlugin mixed:MixedPrecisionPlugin
    native_amp:NativeMixedPrecisionPlugin precision_plugin:PrecisionPlugin} .legacy.v1_3
plugins.training_type .legacy.v1_3: DDP2Plugin DDPPlugin DDPShardedPlugin DDPSpawnPlugin DDPSpawnShardedPlugin
    DataParallelPlugin HorovodPlugin ParallelPlugin SingleDevicePlugin SingleTPUPlugin TPUSpawnPlugin TrainingTypePlugin
    TrainingTypePluginsRegistry
plugins =plugins.precision | =plugins.training_type | =plugins.environments | .legacy.absent: RPCSequentialPlugin
plugins.training_type.{ddp:DDPPlugin ddp2:DDP2Plugin ddp_spawn:DDPSpawnPlugin dp:DataParallelPlugin
    horovod:HorovodPlugin parallel:ParallelPlugin sharded:DDPShardedPlugin single_device:SingleDevicePlugin
    single_tpu:SingleTPUPlugin tpu_spawn:TPUSpawnPlugin training_type_plugin:TrainingTypePlugin} .legacy.v1_3
plugins.training_type.rpc_sequential .legacy.absent: RPCSequentialPlugin
profiler .profilers: AdvancedProfiler BaseProfiler=Profiler PassThroughProfiler PyTorchProfiler SimpleProfiler
profiler.{advanced pytorch simple} .profilers
profiler.base .profilers: BaseProfiler=Profiler PassThroughProfiler
profiler.profilers .profilers: AdvancedProfiler BaseProfiler=Profiler PassThroughProfiler SimpleProfiler
trainer .legacy.v1_3: Trainer | .compat.seed: seed_everything
trainer.states .loops.progress: RunningStage TrainerFn TrainerState=Progress TrainerStatus
trainer.supporters .data.combined: CombinedLoader
trainer.trainer .legacy.v1_3: Trainer
utilities *
utilities.apply_func .compat.batches: move_data_to_device | .legacy.v1_3.helpers: apply_to_collection
utilities.argparse .legacy.v1_3.arguments: add_argparse_args from_argparse_args
utilities.cli .legacy.v1_3.cli: LightningCLI | .cli: LightningArgumentParser SaveConfigCallback
utilities.cloud_io .compat.files: get_filesystem load=_load
utilities.data .compat.batches: has_iterable_dataset has_len
utilities.distributed .base.rank_zero: rank_zero_warn | .compat.rank_zero: rank_zero_debug rank_zero_deprecation
    rank_zero_info rank_zero_only | .compat.reductions: all_gather_ddp_if_available=_all_gather_ddp_if_available
    distributed_available=_distributed_is_initialized sync_ddp_if_available=_sync_ddp_if_available |
    torchmetrics.utilities.distributed: gather_all_tensors
utilities.enums .compat.enums: GradClipAlgorithmType LightningEnum | .legacy.v1_3.helpers: AMPType DeviceType
    DistributedType
utilities.exceptions .errors: MisconfigurationException=DrivetrainError
utilities.grads .legacy.v1_3.helpers: grad_norm
utilities.imports .legacy.v1_3.availability: _BOLTS_AVAILABLE _FAIRSCALE_PIPE_AVAILABLE _OMEGACONF_AVAILABLE
    _TORCHTEXT_AVAILABLE _TORCHVISION_AVAILABLE _module_available
utilities.memory .compat.memory: garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error
    is_out_of_cpu_memory recursive_detach
utilities.{model_helpers:is_overridden signature_utils:is_param_in_hook_signature} .compat.parsing
utilities.parsing .module.hparams: AttributeDict | .compat.parsing: clean_namespace collect_init_args get_init_args
    is_picklable lightning_getattr lightning_hasattr lightning_setattr parse_class_init_keys save_hyperparameters
utilities.seed .compat.seed: seed_everything
utilities.types .compat.type_names: STEP_OUTPUT
utilities.warnings .compat.user_warnings: PossibleUserWarning | .base.rank_zero: rank_zero_warn | .compat.rank_zero:
    LightningDeprecationWarning WarningCache rank_zero_deprecation
""")
