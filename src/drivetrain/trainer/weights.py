"""Saves and restores the weights in a checkpoint, and restores the callbacks' states."""

from __future__ import annotations

from typing import Any

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import naming, restoring
from drivetrain.errors import CheckpointError, CheckpointMismatchError
from drivetrain.module import frozen
from drivetrain.module.trainable import is_strict

AVERAGED = "averaged_state_dict"
"""The key of averaged weights in a checkpoint. The entry "state_dict" always contains the weights that the optimizer
trains.
"""


def of(trainer: Any) -> dict[str, Any]:
    """Return the weights of the Trainer's run for a checkpoint. Every rank must call this function."""
    checkpoint: dict[str, Any] = {"state_dict": trainer.strategy.lightning_module_state_dict()}
    if trainer.settings.save_trainable_only:
        state, optimizers = checkpoint["state_dict"], trainer.strategy.optimizers
        checkpoint["state_dict"], prints = frozen.without_frozen(trainer.lightning_module, state, optimizers)
        checkpoint |= {frozen.FINGERPRINTS: prints} if prints else {}
    for callback in trainer.callbacks:
        if callback.keeps_weights:
            callback.save_weights(trainer, trainer.lightning_module, checkpoint)
    return checkpoint


def restore(trainer: Any, checkpoint: dict[str, Any], fitting: bool) -> None:
    """Load the weights of ``checkpoint`` into the module and the callbacks.

    Raises:
        CheckpointError: the checkpoint has no weights, or the weights do not fit the module.
    """
    module = trainer.lightning_module
    if "state_dict" not in checkpoint:
        raise CheckpointError(
            f"The checkpoint has no 'state_dict', only {sorted(map(str, checkpoint))}. Use one that a Trainer wrote."
        )
    keepers = [callback for callback in trainer.callbacks if callback.keeps_weights]
    for callback in keepers:
        with restoring(f"the weights of the callback {callback.state_key}"):
            callback.load_weights(trainer, module, checkpoint, fitting)
    if AVERAGED in checkpoint and not keepers:
        rank_zero_info(
            f"The checkpoint also holds averaged weights, {AVERAGED!r}. This Trainer has no callback that averages "
            "weights, so it uses those in 'state_dict', which the optimizer has trained."
        )
    with restoring(f"the weights of {type(module).__name__}"):
        strict = frozen.check_base(module, checkpoint, is_strict(module))
        try:
            trainer.strategy.load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            cure = "Build the module as it was trained"
            cure += "." if "size mismatch" in str(error) else ", or set strict_loading = False on it."
            raise CheckpointMismatchError(
                f"The checkpoint does not fit {type(module).__name__}: {error} {cure} [DT1032]"
            ) from error


# ---- callbacks' states ----------------------------------------------------------------------------------------------


def restore_callbacks(trainer: Any, states: dict[str, Any]) -> None:
    """Call ``load_state_dict`` of the callbacks when a fit resumes."""
    known: set[str] = set()
    for callback in trainer.callbacks:
        by_class = type(callback).__qualname__  # the key in files of Lightning 1.4 and earlier
        key = callback.state_key if callback.state_key in states else by_class
        known |= {callback.state_key, by_class}
        if key in states:
            with restoring(f"the callback {key}"):
                callback.load_state_dict(states[key])
    if missing := sorted(map(str, set(states) - known)):
        rank_zero_warn(
            f"The checkpoint holds the state of callbacks that this Trainer does not have: {', '.join(missing)}. "
            "Add them, or continue without that state. [DT1060]"
        )


def restore_outside_of_fit(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """In an evaluation or prediction, call ``on_load_checkpoint`` and ``load_state_dict`` of the user's callbacks.

    For example, a user's callback with averaged weights needs the saved weights for a test. Drivetrain's own callbacks
    are skipped, because their states describe only a fit, for example its best checkpoint.
    """
    for callback in trainer.callbacks:
        if _is_of_program(callback, "on_load_checkpoint"):
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
    states = checkpoint.get("callbacks") or {}
    for callback in trainer.callbacks:
        key = callback.state_key
        if key in states and _is_of_program(callback, "load_state_dict"):
            with naming(trainer.ckpt_path), restoring(f"the callback {key}"):
                callback.load_state_dict(states[key])


def _is_of_program(callback: Any, name: str) -> bool:
    module = getattr(getattr(callback, name), "__module__", None) or ""
    return module.partition(".")[0] != __name__.partition(".")[0]
