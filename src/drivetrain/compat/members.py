"""Members of Lightning's classes whose overrides are not called here: refused with a cure, or harmless.

The library calls every other member of a contract; the classes themselves define the contracts. The names are the names
of Lightning 2.6, including private ones that subclasses override; for strategies those of ``Strategy``,
``ParallelStrategy`` and ``DDPStrategy``, for environments also those of the subclasses.
"""

from __future__ import annotations

from drivetrain.base.introspect import is_own_class
from drivetrain.compat.overrides import Members, warn_once

_WRAP = "Override setup_module(module), which returns the module that is called."
_OPTIMIZERS = "Override setup_optimizers(trainer), or wrap the optimizers in setup(trainer)."
_START = 'Say how processes are started in facts: facts = DDPStrategy.facts.but(start_method="spawn").'
_JOIN = "Override setup_environment(), and call super().setup_environment() for the device and the process group."
_RANKS = "Give the strategy a ClusterEnvironment that says the ranks."
_HOOK = "Pass ddp_comm_hook, ddp_comm_state and ddp_comm_wrapper to DDPStrategy."
_CLOSURE = (
    "Override optimizer_step(optimizer, model, closure): after closure() the gradients are unscaled, the hooks have "
    "seen them and they are clipped."
)
_STATE = "Return it from state_dict(module, optimizers), and restore it in load_state_dict(state, module, optimizers)."
_SKIPS = "Override optimizer_step(optimizer, model, closure); where it skips a step, set self.stepped = False."
_ADDRESS, _PORT = "Override the property main_address.", "Override the property main_port."
_OWN_RANKS = "Override world_size(), global_rank(), local_rank() and node_rank()."
_NOTHING = (
    "So it would read what torchrun exports. Override world_size(), global_rank(), local_rank() and what else your "
    "cluster says in another way, or pass TorchElasticEnvironment()."
)

TABLES = {
    "Strategy": Members(
        "strategy",
        refused={
            "lightning_module": "Read self.lightning_module, and take it in connect(model).",
            "launcher": _START, "_configure_launcher": _START,
            "_setup_model_and_optimizers": _WRAP, "_setup_model": _WRAP, "configure_ddp": _WRAP,
            "determine_ddp_device_ids": _WRAP, "_setup_optimizer": _OPTIMIZERS,
            "setup_distributed": _JOIN, "_get_process_group_backend": "Pass process_group_backend to the constructor.",
            "set_world_ranks": _RANKS, "_register_ddp_hooks": _HOOK,
            "_enable_model_averaging": "Pass model_averaging_period to DDPStrategy.",
        },
        harmless=frozenset({"_reset_optimizers_and_schedulers"}),
    ),
    "Precision": Members(
        "precision",
        refused={
            "_after_closure": _CLOSURE, "_wrap_closure": _CLOSURE,
            "_clip_gradients": "Override clip_gradients(optimizer, clip_val, gradient_clip_algorithm).",
            "on_save_checkpoint": _STATE, "on_load_checkpoint": _STATE,
            "step": _SKIPS,
            "autocast_context_manager": "Override forward_context().",
            "init_context": "Override module_init_context() for layers, and tensor_init_context() for tensors.",
        },
    ),
    "Launcher": Members(
        "launcher", refused={"kill": "End the processes inside launch(), which gets the KeyboardInterrupt."}
    ),
    "ClusterEnvironment": Members(
        "cluster environment",
        refused={
            "_get_main_address": _ADDRESS, "_get_main_port": _PORT, "_get_node_rank": "Override node_rank().",
            "_read_hosts": _ADDRESS, "_init_comm_local": _OWN_RANKS, "_set_init_progress_group_env_vars": _ADDRESS,
        },
        harmless=frozenset({"_validate_srun_used", "_validate_srun_variables"}),
        needed=_NOTHING,
    ),
}  # fmt: skip
"""By the name of the contract. What is not in here is called, or is no member."""

TRAINER_ONLY = {
    "Strategy": frozenset({
        "connect", "setup", "setup_optimizers", "bind_step", "run", "training_step", "post_training_step",
        "validation_step", "test_step", "predict_step", "on_train_start", "on_train_end", "on_validation_start",
        "on_validation_end", "on_test_start", "on_test_end", "on_predict_start", "on_predict_end",
        "on_train_batch_start", "on_exception",
    }),
    "Precision": frozenset(
        {"connect", "train_step_context", "val_step_context", "test_step_context", "predict_step_context"}
    ),
}  # fmt: skip
"""By the name of the contract, members that belong to the run of a Trainer: a loop on an Engine calls none of them."""

_FOR_BOTH = {
    "Strategy": "Override setup_module(module) and the verbs of a step for both.",
    "Precision": "Override forward_context() for both.",
}

ENGINE_ONLY = frozenset({"convert_output"})
"""Members of a precision that belong to a module that an Engine has set up: a Trainer does not call them."""


def warn_of_trainer_members(cls: type, contract: str) -> None:
    """Warn once per class about overrides for a Trainer in a user's strategy or precision that an Engine uses.

    Args:
        cls: the class.
        contract: the name of its contract.
    """
    warn_once(cls, TRAINER_ONLY[contract], f"which a Trainer calls and an Engine does not. {_FOR_BOTH[contract]}")


def warn_of_engine_members(cls: type) -> None:
    """Warn once per class about overrides for an Engine in a user's precision that a Trainer uses."""
    warn_once(cls, ENGINE_ONLY, "which an Engine calls and a Trainer does not. Convert in training_step for both.")


# ---- private methods of callbacks ------------------------------------------------------------------------------------

UNCALLED = {
    "ModelCheckpoint": frozenset({
        "_save_last_checkpoint", "_get_metric_interpolated_filepath_name", "_link_checkpoint",
        "_should_remove_checkpoint", "_format_checkpoint_name", "_find_last_checkpoints",
    }),
    "EarlyStopping": frozenset({"_validate_condition_metric", "_log_info"}),
    "LearningRateMonitor": frozenset({
        "_extract_stats", "_get_lr_momentum_stat", "_get_optimizer_stats", "_extract_lr", "_extract_momentum",
        "_add_prefix", "_add_suffix", "_find_names_from_schedulers", "_find_names_from_optimizers",
    }),
    "TQDMProgressBar": frozenset({"_should_update", "_update_progress_bar"}),
    "RichProgressBar": frozenset({
        "_init_progress", "_add_task", "_get_train_description", "_update_metrics", "_should_update", "_stop_progress",
    }),
    "ModelSummary": frozenset({"_summary"}),
    "Timer": frozenset({"_check_time_remaining"}),
    "ModelPruning": frozenset({
        "_run_pruning", "_apply_global_pruning", "_apply_local_pruning", "_log_sparsity_stats", "_get_pruned_stats",
    }),
    "WeightAveraging": frozenset({"_swap_models", "_copy_average_to_current"}),
    "DeviceStatsMonitor": frozenset({"_get_and_log_device_stats"}),
}  # fmt: skip
"""By class, what drivetrain's never calls."""

INSTEAD = {
    "ModelCheckpoint": (
        "_monitor_candidates", "_should_skip_saving_checkpoint", "_save_topk_checkpoint", "_update_best_and_save",
        "_save_none_monitor_checkpoint", "_save_checkpoint", "_remove_checkpoint", "_should_save_on_train_epoch_end",
    ),
    "EarlyStopping": (
        "_should_skip_check", "_run_early_stopping_check", "_evaluate_stopping_criteria", "_improvement_message",
    ),
    "ModelPruning": ("apply_pruning", "apply_lottery_ticket_hypothesis"),
    "WeightAveraging": ("should_update",),
}  # fmt: skip
"""By class, what is called beside its hooks where a program overrides it."""


def warn_of_uncalled(cls: type) -> None:
    """Warn once per user's class about overrides of drivetrain's callbacks that are never called."""
    for base in filter(is_own_class, cls.__mro__):
        if names := UNCALLED.get(base.__name__):
            called = ", ".join((*INSTEAD.get(base.__name__, ()), "its hooks"))
            warn_once(
                cls, names, f"which drivetrain's {base.__name__} never calls. Override what it calls: {called}. If "
                "other code calls the method, nothing is wrong.",
            )  # fmt: skip
