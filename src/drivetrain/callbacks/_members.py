"""Methods of callbacks that programs override although they begin with an underscore, and that nothing calls here.

The others have their name and their arguments here too, and are called: :data:`INSTEAD` names them.
"""

from __future__ import annotations

from drivetrain.base.introspect import is_own_class
from drivetrain.base.members import warn_once

UNCALLED = {
    "ModelCheckpoint": frozenset(
        {
            "_save_last_checkpoint", "_get_metric_interpolated_filepath_name", "_link_checkpoint",
            "_should_save_on_train_epoch_end", "_should_remove_checkpoint", "_format_checkpoint_name",
            "_find_last_checkpoints",
        }
    ),
    "EarlyStopping": frozenset({"_improvement_message", "_validate_condition_metric", "_log_info"}),
    "LearningRateMonitor": frozenset(
        {
            "_extract_stats", "_get_lr_momentum_stat", "_get_optimizer_stats", "_extract_lr", "_extract_momentum",
            "_add_prefix", "_add_suffix", "_find_names_from_schedulers", "_find_names_from_optimizers",
        }
    ),
    "TQDMProgressBar": frozenset({"_should_update", "_update_progress_bar"}),
    "RichProgressBar": frozenset(
        {"_init_progress", "_add_task", "_get_train_description", "_update_metrics", "_should_update", "_stop_progress"}
    ),
    "ModelSummary": frozenset({"_summary"}),
    "Timer": frozenset({"_check_time_remaining"}),
    "ModelPruning": frozenset(
        {"_run_pruning", "_apply_global_pruning", "_apply_local_pruning", "_log_sparsity_stats", "_get_pruned_stats"}
    ),
    "WeightAveraging": frozenset({"_swap_models", "_copy_average_to_current"}),
    "DeviceStatsMonitor": frozenset({"_get_and_log_device_stats"}),
}  # fmt: skip
"""By class, what drivetrain's never calls."""

INSTEAD = {
    "ModelCheckpoint": (
        "_monitor_candidates", "_should_skip_saving_checkpoint", "_save_topk_checkpoint", "_update_best_and_save",
        "_save_none_monitor_checkpoint", "_save_checkpoint", "_remove_checkpoint",
    ),
    "EarlyStopping": ("_should_skip_check", "_run_early_stopping_check", "_evaluate_stopping_criteria"),
    "ModelPruning": ("apply_pruning", "apply_lottery_ticket_hypothesis"),
    "WeightAveraging": ("should_update",),
}  # fmt: skip
"""By class, what is called beside its hooks where a program overrides it."""


def warn_of_uncalled(cls: type) -> None:
    """Warn, once for a class of the user's, of what it overrides of drivetrain's callbacks that is never called."""
    for base in filter(is_own_class, cls.__mro__):
        if names := UNCALLED.get(base.__name__):
            called = ", ".join((*INSTEAD.get(base.__name__, ()), "its hooks"))
            warn_once(
                cls, names, f"which drivetrain's {base.__name__} never calls. Override what it calls: {called}. If "
                "other code calls the method, nothing is wrong.",
            )  # fmt: skip
