"""Names of Lightning 2.6 that this version lacks, or that are elsewhere, and earlier arguments: for messages.

A test compares the table with Lightning's public names and with drivetrain's: what is neither here nor there fails it.
"""

from __future__ import annotations

_NOT_YET = ""
_OWN_LOGGER = (
    "It writes to Lightning AI's service. Use WandbLogger, MLFlowLogger, TensorBoardLogger or CSVLogger, or write a "
    "Logger: see docs/own_parts.md."
)

MISSING: dict[str, dict[str, str]] = {
    "drivetrain": {
        "serve": _NOT_YET,
        "Fabric": "It is called Engine here: write drivetrain.Engine.",
        "fabric": "Its Fabric is called Engine here: write drivetrain.Engine.",
        "pytorch": "Write drivetrain where a program says lightning.pytorch.",
        "core": "Write drivetrain.module.",
        "utilities": "What users need of it is elsewhere, such as drivetrain.data.CombinedLoader; `drivetrain exec` "
        "runs programs that import from lightning.pytorch.utilities.",
        "demos": "`drivetrain exec` runs programs that import from lightning.pytorch.demos.",
        "overrides": "Write a strategy: see docs/own_strategy.md.",
    },
    "drivetrain.callbacks": {
        "progress": "Import the bar from drivetrain.callbacks.",
    },
    "drivetrain.loggers": {"LitLogger": _OWN_LOGGER},
    "drivetrain.cli": {
        "ArgsType": "Write list[str] | dict[str, Any] | None.",
        "LRSchedulerType": "Write type[torch.optim.lr_scheduler.LRScheduler].",
        "LRSchedulerTypeTuple": _NOT_YET,
        "LRSchedulerTypeUnion": _NOT_YET,
        "ModuleType": _NOT_YET,
        "instantiate_module": "Write instantiate_class.",
    },
}
"""By package and name, what to write instead; "" if nothing does its work yet."""

ARGUMENTS = {
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "Write max_epochs=... instead."),
    "automatic_optimization": "Write self.automatic_optimization = ... in the module's __init__ instead.",
    "gpus": 'Write accelerator="gpu", devices=... instead.',
    "tpu_cores": 'Write accelerator="tpu", devices=... instead.',
    "num_processes": 'Write accelerator="cpu", devices=... instead.',
    "distributed_backend": "Write strategy=... instead.",
    "auto_select_gpus": 'Write devices="auto" instead.',
    "auto_lr_find": "Use the LearningRateFinder callback instead.",
    "auto_scale_batch_size": "Use the BatchSizeFinder callback instead.",
    "resume_from_checkpoint": "Pass ckpt_path=... to trainer.fit instead.",
    "checkpoint_callback": "Write enable_checkpointing=... or pass a ModelCheckpoint in callbacks instead.",
    "progress_bar_refresh_rate": "Write enable_progress_bar=False or pass a progress bar in callbacks instead.",
    "weights_summary": "Write enable_model_summary=... or pass a ModelSummary in callbacks instead.",
    "stochastic_weight_avg": "Use the StochasticWeightAveraging callback instead.",
    "terminate_on_nan": "Write detect_anomaly=True, or EarlyStopping(check_finite=True), instead.",
    "track_grad_norm": "Log the norms in on_before_optimizer_step instead.",
    "flush_logs_every_n_steps": "Pass it to the logger instead.",
    "replace_sampler_ddp": "Write use_distributed_sampler=... instead.",
    "amp_backend": "Write precision=... instead.",
    "move_metrics_to_cpu": "Leave it out: logged values are read once per flush.",
    "reload_dataloaders_every_epoch": "Write reload_dataloaders_every_n_epochs=1 instead.",
    "truncated_bptt_steps": "Split the sequence in training_step with manual optimization instead.",
}
"""By name of an argument that the Trainer does not have, what to write instead."""


def is_known_to_be_missing(package: str, name: str) -> bool:
    """Return whether Lightning has ``name`` where drivetrain has ``package``, and this version lacks it."""
    return name in MISSING.get(package, {})


def why_missing(package: str, name: str) -> str | None:
    """Return what to say of such a name; ``None`` of any other."""
    if not is_known_to_be_missing(package, name):
        return None
    instead = MISSING[package][name]
    return f"this version of drivetrain does not have it{f'. {instead}' if instead else ' yet.'}"
