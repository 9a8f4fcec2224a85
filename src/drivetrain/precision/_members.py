"""What becomes of an override of each member that precisions have in the field; see :mod:`drivetrain.base.members`.

The names are those of the Trainer's kind of precision, Lightning 2.6's, with what it has from Fabric's, and of
``MixedPrecision``.
"""

from __future__ import annotations

from drivetrain.base.members import Members, warn_once

_CLOSURE = (
    "Override optimizer_step(optimizer, model, closure): after closure() the gradients are unscaled, the hooks have "
    "seen them and they are clipped."
)
_STATE = "Return it from state_dict(module, optimizers), and restore it in load_state_dict(state, module, optimizers)."

CALLED = frozenset(
    {
        "__init__", "precision", "connect", "teardown", "state_dict", "load_state_dict",
        "convert_module", "convert_input", "convert_output", "tensor_init_context", "module_init_context",
        "forward_context", "train_step_context", "val_step_context", "test_step_context", "predict_step_context",
        "pre_backward", "backward", "post_backward", "optimizer_step", "main_params", "unscale_gradients",
        "clip_gradients", "clip_grad_by_value", "clip_grad_by_norm",
    }
)  # fmt: skip
"""Members whose override is called, or read."""

REFUSED = {
    "_after_closure": _CLOSURE, "_wrap_closure": _CLOSURE,
    "_clip_gradients": "Override clip_gradients(optimizer, clip_val, gradient_clip_algorithm).",
    "on_save_checkpoint": _STATE, "on_load_checkpoint": _STATE,
    "step": "Override optimizer_step(optimizer, model, closure); where it skips a step, set self.stepped = False.",
    "autocast_context_manager": "Override forward_context().",
    "init_context": "Override module_init_context() for layers, and tensor_init_context() for tensors.",
}  # fmt: skip
"""Members whose override is an error, and what to write instead."""

NEEDS_TRAINER = frozenset(
    {"connect", "train_step_context", "val_step_context", "test_step_context", "predict_step_context"}
)
"""Members that belong to the run of a Trainer: a loop of the user's on an Engine does not call them."""

NEEDS_ENGINE = frozenset({"convert_output"})
"""Members that belong to a module that an Engine has set up: a Trainer does not call them."""

MEMBERS = Members("precision", CALLED, REFUSED)


def warn_of_trainer_members(cls: type) -> None:
    """Warn, once for a class, of what a user's precision overrides for a Trainer, where an Engine uses it."""
    warn_once(cls, NEEDS_TRAINER, "which a Trainer calls and an Engine does not. Override forward_context() for both.")


def warn_of_engine_members(cls: type) -> None:
    """Warn, once for a class, of what a user's precision overrides for an Engine, where a Trainer uses it."""
    warn_once(cls, NEEDS_ENGINE, "which an Engine calls and a Trainer does not. Convert in training_step for both.")
