"""Why signatures and members of the original's public names differ here: for docs/compat_members.md and its test.

Each table maps a reason to what it covers: names of the original below ``lightning``, with ``(argument)`` for an
argument, and ``*`` for any text. tests/compat/test_members.py fails for a difference that no line covers, and for a
line of the first two tables that covers none.
"""

from __future__ import annotations

ON_PURPOSE = {
    # ---- defaults and places of arguments ----------------------------------------------------------------------------
    "`None` means `min`, the original's default, and lets drivetrain warn where the name of the metric says the "
    "opposite.": "pytorch.callbacks.EarlyStopping(mode) pytorch.callbacks.ModelCheckpoint(mode)",
    "`None` means the original's default.": """
        fabric.Fabric.clip_gradients(error_if_nonfinite) fabric.Fabric.launch(function)
        fabric.utilities.types.Steppable.step(closure) pytorch.callbacks.RichProgressBar(theme)""",
    "`None` means the device that the accelerator gives.": "*.SingleDeviceStrategy(device)",
    "False means what `None` means there: the complete checkpoint.": "pytorch.Trainer.save_checkpoint(weights_only)",
    "Checkpoints are read to host memory; the module moves its own tensors.":
        "fabric.plugins.*CheckpointIO.load_checkpoint(map_location)",
    "The bar is drawn by a thread, at most four times a second, so drawing it after every batch costs a step nothing.":
        "pytorch.callbacks.RichProgressBar(refresh_rate)",
    "The default look is rich's own, in the colours of the terminal.":
        "pytorch.callbacks.progress.rich_progress.RichProgressBarTheme(*)",
    "The 37 functions are passed by the names of their hooks. By position they are an error.":
        "pytorch.callbacks.LambdaCallback(*)",
    "46 arguments, which are passed by keyword; by position they are an error. `stage=None` means stage 2.":
        "pytorch.strategies.DeepSpeedStrategy(*)",
    "Modules and data modules have the same method, whose fourth argument is `strict`. Pass `weights_only` by keyword.":
        "pytorch.LightningDataModule.load_from_checkpoint(weights_only)",
    "Means over the same values; only the function has another name.":
        "pytorch.loggers.logger.merge_dicts(default_func)",
    "The original takes further arguments and ignores them.": """
        pytorch.plugins.FSDPPrecision.clip_grad_by_norm(*) fabric.utilities.spike.TrainingSpikeException(*)
        fabric.strategies.SingleDeviceStrategy.all_reduce(*) pytorch.strategies.SingleDeviceStrategy.reduce(*)""",
    "The further arguments have names: `avg_fn` and `multi_avg_fn`. An exponential average needs none of them.":
        "pytorch.callbacks.EMAWeightAveraging(**) pytorch.callbacks.WeightAveraging(**)",
    "The further arguments have names: `available_flops`, `window_size` and `separator`.":
        "pytorch.callbacks.ThroughputMonitor(**) pytorch.callbacks.ThroughputMonitor.kwargs",
    "It is torch's own class.": "pytorch.utilities.types.DistributedDataParallel(*)",
    "It is a view of the run's progress, which a program reads and does not make.":
        "pytorch.trainer.states.TrainerState*",
    "An optimizer belongs to its module.": "pytorch.core.optimizer.LightningOptimizer(module)",
    # ---- members -----------------------------------------------------------------------------------------------------
    "`name` is a property, as on other parts.": "*Accelerator.name",
    "The average is that of `WeightAveraging`, whose methods keep it; those of the original are not called. Its "
    "numbers are the original's with the switch `early_averages`; see [compat.md](compat.md#numbers).":
        "pytorch.callbacks.StochasticWeightAveraging.*",
    "The last losses are kept as numbers, and no metric of torchmetrics is made of them.":
        "*.SpikeDetection.running_mean",
    "Override `filter_parameters_to_prune`; the others are checked when a fit begins.":
        "pytorch.callbacks.ModelPruning.sanitize_parameters_to_prune",
    "A class with `register_accelerators` is registered when it is defined.":
        "fabric.accelerators.registry.call_register_accelerators",
    "A strategy's ranks come from its ClusterEnvironment, its processes from a launcher, and wrapping the model is "
    "`setup_module(module)`. An override of the original's method is an error that says so.": """
        pytorch.strategies.*.set_world_ranks pytorch.strategies.*.configure_ddp
        pytorch.strategies.*.determine_ddp_device_ids pytorch.strategies.*.setup_distributed
        pytorch.strategies.*.launcher fabric.strategies.*.launcher""",
    "DeepSpeed's engine is made when the run is set up, without a method for it.":
        "pytorch.strategies.DeepSpeedStrategy.init_deepspeed",
    "FSDP is FSDP2, which has neither sharding strategies nor mixed-precision objects. Arguments in FSDP1's form are "
    "translated; see [fsdp.md](fsdp.md).": """
        pytorch.strategies.FSDPStrategy.cpu_offload pytorch.strategies.FSDPStrategy.get_registered_strategies
        pytorch.strategies.FSDPStrategy.kwargs pytorch.strategies.FSDPStrategy.mixed_precision*
        pytorch.strategies.FSDPStrategy.sharding_strategy *.FSDPPrecision.mixed_precision_config""",
    "DeepSpeed's settings are in `config`, as DeepSpeed reads them; see [deepspeed.md](deepspeed.md).": """
        pytorch.strategies.DeepSpeedStrategy.DEEPSPEED_ENV_VAR pytorch.strategies.DeepSpeedStrategy.*loss_scale*
        pytorch.strategies.DeepSpeedStrategy.exclude_frozen_parameters
        pytorch.strategies.DeepSpeedStrategy.hysteresis pytorch.strategies.DeepSpeedStrategy.initial_scale_power
        pytorch.strategies.DeepSpeedStrategy.load_full_weights pytorch.strategies.DeepSpeedStrategy.remote_device
        pytorch.strategies.DeepSpeedStrategy.zero_stage_3 pytorch.strategies.deepspeed.remove_module_hooks""",
    "A precision's state is `state_dict()` and `load_state_dict(state_dict)`, and its context `forward_context()`. An "
    "override of the original's method is an error that says so.": """
        pytorch.plugins.*Precision.on_load_checkpoint pytorch.plugins.*Precision.on_save_checkpoint
        pytorch.plugins.MixedPrecision.autocast_context_manager""",
    "The layers are exchanged by the precision, which keeps their types.": """
        fabric.plugins.BitsandbytesPrecision.dtype fabric.plugins.TransformerEnginePrecision.weights_dtype
        pytorch.plugins.precision.double.LightningDoublePrecisionModule""",
    "The Trainer says which action is a step's end, and torch's profiler gives its events itself.": """
        pytorch.profilers.AdvancedProfiler.profiled_actions
        pytorch.profilers.PyTorchProfiler.STEP_FUNCTIONS pytorch.profilers.XLAProfiler.STEP_FUNCTIONS
        pytorch.profilers.PyTorchProfiler.function_events pytorch.profilers.PyTorchProfiler.AVAILABLE_SORT_KEYS
        pytorch.profilers.XLAProfiler.RECORD_FUNCTIONS pytorch.profilers.XLAProfiler.server
        pytorch.profilers.pytorch.RegisterRecordFunction pytorch.profilers.pytorch.ScheduleWrapper""",
    "The logger writes the rows and makes its `experiment`, which is a view of it.":
        "pytorch.loggers.csv_logs.ExperimentWriter(*)",
    "The logger counts its steps itself.": "fabric.utilities.ThroughputMonitor.step",
    "These hooks are on `LightningModule`, and on no class of their own.": """
        pytorch.core.hooks.DataHooks.allow_zero_length_dataloader_with_multiple_devices
        pytorch.core.hooks.ModelHooks.*""",
    "The rows of a summary have no objects of their own.": """
        pytorch.utilities.model_summary.LayerSummary pytorch.utilities.model_summary.ModelSummary.summarize
        pytorch.utilities.model_summary.DeepSpeedSummary pytorch.utilities.model_summary.model_summary_deepspeed.*""",
    # ---- names -------------------------------------------------------------------------------------------------------
    "Starts or describes Lightning's own project; `drivetrain` is the command here.":
        "fabric.cli.main pytorch.cli_lightning_logo",
    "There are no loop objects: the closure of a step and the stages of a restart belong to the loop.": """
        pytorch.loops.*""",
}  # fmt: skip
"""Differences that stay."""

NOT_HERE = {
    "Needs Lightning AI's service.": "pytorch.loggers.LitLogger pytorch.utilities.model_registry.*",
}  # fmt: skip
"""What needs hardware or a cloud service."""

NAMES = {
    "A type variable or a constant of that module's own code.": """
        fabric.strategies.model_parallel.TModel fabric.utilities.throughput.T
        fabric.utilities.apply_func.CONVERSION_DTYPES
        pytorch.loggers.comet.FRAMEWORK_NAME pytorch.loggers.comet.comet_experiment
        pytorch.loggers.mlflow.LOCAL_FILE_URI_PREFIX pytorch.utilities.model_summary.model_summary.LEFTOVER_PARAMS_NAME
        pytorch.utilities.model_summary.model_summary.NOT_APPLICABLE
        pytorch.utilities.model_summary.model_summary.PARAMETER_NUM_UNITS""",
    "The drawing and the log format of Lightning's own project.": "formatter pytorch.LIGHTNING_LOGO",
    "The columns are rich's own; a subclass of `RichProgressBar` overrides `configure_columns`.":
        "pytorch.callbacks.progress.rich_progress.*",
    "Imported there, not defined; it is in `plugins.environments`.":
        "fabric.strategies.launchers.subprocess_script.ClusterEnvironment",
    "A class with `register_accelerators` is registered when it is defined.":
        "fabric.accelerators.registry.call_register_accelerators",
    "The rows of a summary have no objects of their own.":
        "pytorch.utilities.model_summary.model_summary.LayerSummary",
    "Needs Lightning AI's service.": "pytorch.loggers.litlogger.LitLogger",
}  # fmt: skip
"""Why names of modules are not available, beside those that the first two tables cover."""

OPEN = """
"""
"""What is not here yet. Each name in full, so that a new difference beside one of these fails the test."""
