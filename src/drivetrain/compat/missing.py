"""Advice in messages about unknown names: names of Lightning that drivetrain lacks, and arguments of other trainers.

A test checks that every public name of Lightning is in :data:`MISSING` or in drivetrain.
"""

from __future__ import annotations

from drivetrain.base.ini import tables

TODAY = tables(__file__, "today.ini")
"""What to write instead of flags, hooks and members of Lightning 1.x, by kind and name."""

_NOT_YET = ""
_OWN_LOGGER = (
    "It writes to Lightning AI's service. Use WandbLogger, MLFlowLogger, TensorBoardLogger or CSVLogger, or write a "
    "Logger: see docs/own_logger.md."
)

MISSING: dict[str, dict[str, str]] = {
    "drivetrain": {
        "serve": _NOT_YET,
        "Fabric": "It is called Engine here: write drivetrain.Engine.",
        "fabric": "Its Fabric is called Engine here: write drivetrain.Engine.",
        "pytorch": "Write drivetrain where a program says lightning.pytorch.",
        "core": "Write drivetrain.module.",
        "utilities": "What users need of it is elsewhere: `drivetrain migrate --check FILE` prints where, such as "
        "drivetrain.compat.rank_zero.rank_zero_only. `drivetrain exec FILE` runs a program for Lightning unchanged.",
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
"""For each package, the missing names, with what to write instead; "" if there is no replacement yet."""

_WRITE = {
    "max_epochs=...": ("epochs", "num_epochs", "n_epochs", "max_nb_epochs", "num_train_epochs"),
    "accelerator=...": ("device",),
    'accelerator="gpu", devices=...': ("num_gpus", "n_gpu"),
    'accelerator="tpu", devices=...': ("num_tpu_cores",),
    "enable_checkpointing=... or pass a ModelCheckpoint in callbacks": ("checkpoint_callback",),
    "enable_progress_bar=False or pass a progress bar in callbacks": ("progress_bar_refresh_rate",),
    "enable_model_summary=... or pass a ModelSummary in callbacks": ("weights_summary",),
    "default_root_dir=...": ("default_save_path", "output_dir"),
    'precision="16-mixed"': ("use_amp", "fp16"),
    "enable_progress_bar=...": ("show_progress_bar",),
    "log_every_n_steps=...": ("row_log_interval", "logging_steps"),
    "limit_train_batches=...": ("train_percent_check",),
    "limit_val_batches=...": ("val_percent_check",),
    "limit_test_batches=...": ("test_percent_check",),
    "overfit_batches=...": ("overfit_pct",),
    "gradient_clip_val=...": ("gradient_clip", "max_grad_norm", "clip_grad_norm", "grad_clip", "clip_grad"),
    "detect_anomaly=True": ("print_nan_grads",),
    "min_epochs=...": ("min_nb_epochs",),
    "num_nodes=...": ("nb_gpu_nodes", "num_machines"),
    "num_sanity_val_steps=...": ("nb_sanity_val_steps",),
    "accumulate_grad_batches=...": ("gradient_accumulation_steps",),
    'precision="bf16-mixed"': ("bf16",),
    'precision="16-mixed" or "bf16-mixed"': ("mixed_precision",),
    "val_check_interval=...": ("eval_steps",),
    "ModelCheckpoint(every_n_train_steps=...) in callbacks": ("save_steps",),
    "ModelCheckpoint(save_top_k=...) in callbacks": ("save_total_limit",),
}
"""For each argument of the Trainer, its names in the first Lightning versions and in other trainers."""

ARGUMENTS = {
    **{
        name: f"Write {new.format(value='...')} instead."
        for name, new in TODAY["flags"].items()
        if name != "accelerator"
    },
    **{name: f"Write {new} instead." for new, names in _WRITE.items() for name in names},
    "automatic_optimization": "Write self.automatic_optimization = ... in the module's __init__ instead.",
    **dict.fromkeys(
        ("verbose", "quiet", "silent"),
        "Write enable_progress_bar=False and enable_model_summary=False for less output; "
        'logging.getLogger("drivetrain").setLevel("WARNING") removes the plan and the last lines too.',
    ),
    **dict.fromkeys(
        ("patience", "early_stopping", "early_stopping_patience"),
        'Pass drivetrain.callbacks.EarlyStopping("val_loss", patience=...) in callbacks instead.',
    ),
    **dict.fromkeys(
        ("loss", "loss_fn", "criterion", "compute_loss"), "Compute it in the module's training_step and return it."
    ),
    **dict.fromkeys(("metrics", "compute_metrics"), "Call self.log(name, value) in the module's validation_step."),
    **dict.fromkeys(
        ("train_dataset", "eval_dataset", "train_dataloader", "train_dataloaders", "val_dataloaders", "datamodule"),
        "Pass loaders to trainer.fit instead: trainer.fit(model, train_loader, val_loader).",
    ),
    "flush_logs_every_n_steps": "Pass it to the logger instead.",
    "move_metrics_to_cpu": "Leave it out: logged values are read once per flush.",
    "truncated_bptt_steps": "Split the sequence in training_step with manual optimization instead.",
    "ipus": "There is no accelerator for IPUs. Write one as docs/own_accelerator.md shows, and pass it.",
    "hpus": "There is no accelerator for HPUs. Write one as docs/own_accelerator.md shows, and pass it.",
    "early_stop_callback": "Pass an EarlyStopping in callbacks instead.",
    "log_save_interval": "Pass it to the logger instead.",
    "logging_dir": "Pass a logger, such as TensorBoardLogger(...), instead.",
    "report_to": "Pass loggers in logger instead.",
    "seed": "Call drivetrain.seed_everything(...) before the Trainer is made instead.",
    **dict.fromkeys(
        ("warmup_steps", "warmup_ratio", "lr_scheduler_type"),
        "Return a scheduler from configure_optimizers instead, for a warm-up torch.optim.lr_scheduler.LinearLR with "
        '"interval": "step".',
    ),
    **dict.fromkeys(
        ("learning_rate", "lr", "weight_decay", "optimizer", "optimizers"),
        "Return the optimizer from the module's configure_optimizers instead.",
    ),
    **dict.fromkeys(
        ("batch_size", "per_device_train_batch_size", "dataloader_num_workers", "num_workers"),
        "Pass it to the DataLoader of trainer.fit instead.",
    ),
}
"""For each argument that the Trainer does not have, what to write instead."""


def _cures(section: str) -> dict[str, str]:
    found = tables(__file__, "missing.ini")[section]
    return {name: " ".join(cure.split()) for names, cure in found.items() for name in names.split()}


MODULE, TRAINER, OF_OTHERS = map(_cures, ("LightningModule", "Trainer", "arguments of others"))
"""What to write instead of attributes and arguments that newcomers try, and that do not exist."""

ENGINE = {
    **dict.fromkeys(
        ("prepare", "prepare_model"),
        "Write model, optimizer = engine.setup(model, optimizer), and loader = engine.setup_dataloaders(loader).",
    ),
    "prepare_data_loader": "Write engine.setup_dataloaders(loader).",
    "prepare_optimizer": "Write engine.setup_optimizers(optimizer).",
    "accumulate": "Write `with engine.no_backward_sync(model, enabled=accumulates):` around forward and backward pass, "
    "and step the optimizer where accumulates is False.",
    "no_sync": "Write `with engine.no_backward_sync(model):`.",
    **dict.fromkeys(("gather_for_metrics", "gather", "gather_object"), "Write engine.all_gather(value)."),
    "reduce": "Write engine.all_reduce(value).",
    "unwrap_model": "The model that engine.setup returns has the original in its attribute module: write model.module.",
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_norm"), "Write engine.clip_gradients(model, optimizer, max_norm=...)."
    ),
    "clip_grad_value_": "Write engine.clip_gradients(model, optimizer, clip_val=...).",
    "wait_for_everyone": "Write engine.barrier().",
    "is_main_process": "Write engine.is_global_zero.",
    "is_local_main_process": "Write engine.local_rank == 0.",
    "main_process_first": "Write `with engine.rank_zero_first():`.",
    "process_index": "Write engine.global_rank.",
    "local_process_index": "Write engine.local_rank.",
    "num_processes": "Write engine.world_size.",
    "save_state": "Write engine.save(path, {...}).",
    "load_state": "Write engine.load(path, {...}).",
    "set_seed": "Write engine.seed_everything(seed).",
}
"""What to write instead of attributes that exist in other libraries, but not in the Engine."""


def instead_of(owner: str, name: str) -> str | None:
    """Return what to write instead of ``name``; see :func:`drivetrain.base.supplied.instead_of`."""
    tables_of = {"Trainer": ARGUMENTS, "Engine": ENGINE}
    tables_of |= {"trainer": TRAINER, "LightningModule": MODULE, "a call": OF_OTHERS}
    of_class = tables_of.get(owner)
    return why_missing(owner, name) if of_class is None else of_class.get(name)


def why_missing(package: str, name: str) -> str | None:
    """Return the message for a name that Lightning's ``package`` has, but drivetrain's does not. For any other name,
    return ``None``.
    """
    if (instead := MISSING.get(package, {}).get(name)) is None:
        return None
    return f"this version of drivetrain does not have it{f'. {instead}' if instead else ' yet.'}"
