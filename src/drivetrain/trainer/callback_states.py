"""States of callbacks that an evaluation restores from its checkpoint."""

from __future__ import annotations

from typing import Any

from drivetrain.base.restoring import naming, restoring


def restore_outside_of_fit(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Call ``on_load_checkpoint`` and ``load_state_dict`` of the program's callbacks, as before a fit that resumes.

    A callback that keeps averaged weights, for example, needs them for a test. What the methods of drivetrain's own
    callbacks would restore is about a fit: counters, and the files that it has written.
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
