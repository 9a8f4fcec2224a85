"""Restore callbacks' states from a checkpoint."""

from __future__ import annotations

from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import naming, restoring


def restore(trainer: Any, states: dict[str, Any]) -> None:
    """Call ``load_state_dict`` of the callbacks when a fit resumes."""
    known: set[str] = set()
    for callback in trainer.callbacks:
        by_class = type(callback).__qualname__  # the key in checkpoints of Lightning 1.4 and earlier
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
    """Call ``on_load_checkpoint`` and ``load_state_dict`` of the user's callbacks in a run that is not a fit.

    For example, a callback that keeps averaged weights needs them for a test. Drivetrain's own callbacks are skipped,
    because they only restore the state of a fit: counters, and the files that it has written.
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
