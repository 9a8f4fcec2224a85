"""What becomes of an override of each member that strategies have in the field; see :mod:`drivetrain.base.members`.

The names are those of the Trainer's kind of strategy, Lightning 2.6's: of ``Strategy``, ``ParallelStrategy`` and
``DDPStrategy``.
"""

from __future__ import annotations

from drivetrain.base.members import Members, warn_once

_WRAP = "Override setup_module(module), which returns the module that is called."
_OPTIMIZERS = "Override setup_optimizers(trainer), or wrap the optimizers in setup(trainer)."
_START = 'Say how processes are started in facts: facts = DDPStrategy.facts.but(start_method="spawn").'
_JOIN = "Override setup_environment(), and call super().setup_environment() for the device and the process group."
_RANKS = "Give the strategy a ClusterEnvironment that says the ranks."
_HOOK = "Pass ddp_comm_hook, ddp_comm_state and ddp_comm_wrapper to DDPStrategy."

CALLED = frozenset(
    {
        "accelerator", "checkpoint_io", "precision_plugin", "optimizers", "model", "parallel_devices", "connect",
        "register_strategies", "root_device", "is_global_zero", "is_distributed", "global_rank", "local_rank",
        "node_rank", "world_size", "num_nodes", "num_processes", "process_group_backend",
        "setup_environment", "setup", "setup_optimizers", "model_to_device", "tensor_init_context",
        "model_sharded_context", "process_dataloader", "distributed_sampler_kwargs", "teardown",
        "training_step", "post_training_step", "validation_step", "test_step", "predict_step", "batch_to_device",
        "pre_backward", "backward", "post_backward", "block_backward_sync", "optimizer_step",
        "handles_gradient_accumulation",
        "reduce", "barrier", "broadcast", "all_gather", "reduce_boolean_decision",
        "lightning_module_state_dict", "load_model_state_dict", "optimizer_state", "load_optimizer_state_dict",
        "save_checkpoint", "load_checkpoint", "remove_checkpoint", "restore_checkpoint_after_setup",
        "lightning_restore_optimizer",
        "on_train_start", "on_train_end", "on_validation_start", "on_validation_end", "on_test_start", "on_test_end",
        "on_predict_start", "on_predict_end", "on_train_batch_start", "on_exception",
        "__init__", "__getstate__", "__setstate__",
    }
)  # fmt: skip
"""Members whose override is called, or read."""

REFUSED = {
    "lightning_module": "Read self.lightning_module, and take it in connect(model).",
    "launcher": _START, "_configure_launcher": _START,
    "setup_precision_plugin": "Override setup(trainer), or pass a Precision of your own.",
    "_setup_model_and_optimizers": _WRAP, "_setup_model": _WRAP, "configure_ddp": _WRAP,
    "determine_ddp_device_ids": _WRAP, "_setup_optimizer": _OPTIMIZERS,
    "setup_distributed": _JOIN, "_get_process_group_backend": "Pass process_group_backend to the constructor.",
    "set_world_ranks": _RANKS, "_register_ddp_hooks": _HOOK,
    "_enable_model_averaging": "Pass model_averaging_period to DDPStrategy.",
}  # fmt: skip
"""Members whose override is an error, and what to write instead."""

HARMLESS = frozenset({"_reset_optimizers_and_schedulers"})
"""Members whose override is not called, and changes no number, state or rank."""

NEEDS_TRAINER = frozenset(
    {
        "connect", "setup", "setup_optimizers", "bind_step", "run", "training_step", "post_training_step",
        "validation_step", "test_step", "predict_step", "on_train_start", "on_train_end", "on_validation_start",
        "on_validation_end", "on_test_start", "on_test_end", "on_predict_start", "on_predict_end",
        "on_train_batch_start", "on_exception",
    }
)  # fmt: skip
"""Members that belong to the run of a Trainer: a loop of the user's on an Engine does not call them."""

MEMBERS = Members("strategy", CALLED, REFUSED, HARMLESS)

LAYER_SYNC = Members("layer sync", called=frozenset({"__init__", "apply", "revert"}))
"""The same for what the field calls ``LayerSync``."""


def warn_of_trainer_members(cls: type) -> None:
    """Warn, once for a class, of what a user's strategy overrides for a Trainer, where an Engine uses it."""
    warn_once(
        cls,
        NEEDS_TRAINER,
        "which a Trainer calls and an Engine does not. Override setup_module(module) and the verbs of a step for both.",
    )
