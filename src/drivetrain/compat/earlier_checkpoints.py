"""Checkpoints of Lightning 1.x and 2.x, converted to drivetrain's layout.

A Lightning file describes the position in training as follows::

    2.x, and 1.6 to 1.9         loops["fit_loop"]: counters of epochs, batches and optimizer steps, each as the numbers
                                ready, started, processed and completed, in this run (current) and in all (total)
    1.0 to 1.5                  epoch and global_step only, both counted as if the epoch were over

These files contain no random state, and do not tell which batches of an epoch are finished.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.checkpoints.foreign import Placeholder, placeholders
from drivetrain.loops.progress import Progress
from drivetrain.loops.window import Window

State = dict[str, Any]

_STAGES = ("train", "validate", "test", "predict")  # the stages of a Timer
_SCALER_KEYS = ("MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")  # of GradScaler
_INTERVAL = re.compile(r"datetime\.timedelta\(([^()]*)\)")


def migrate(checkpoint: State, resuming: bool = False) -> State:
    """Convert a Lightning checkpoint to the layout of drivetrain's Trainer. Return any other value unchanged.

    Hyperparameters become dictionaries. Objects that the unpickler has replaced by a :class:`Placeholder` are left out.
    Other entries are kept.

    Args:
        checkpoint: the content of the file; not changed.
        resuming: whether training resumes from ``checkpoint``; if True, warn about what the checkpoint lacks.

    Returns:
        A new dictionary, or ``checkpoint`` if no conversion is needed. If the position in training is known, the entry
        ``loops["drivetrain"]`` contains it. For files from before Lightning 1.5, the key of a callback's state is the
        name of the callback's class.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint or "drivetrain_version" in checkpoint:
        return checkpoint
    loops = checkpoint.get("loops") or {}
    if "drivetrain" in loops:
        return checkpoint
    migrated = dict(checkpoint)
    _migrate_hparams(migrated)
    if "global_step" not in migrated:
        return migrated
    _migrate_precision(migrated)
    if "callbacks" in migrated or "checkpoint_callback_best_model_path" in migrated:
        migrated["callbacks"] = _callbacks(migrated)
    if "lr_schedulers" in migrated:
        # A scheduler's state can contain a function. It is left out, because the new scheduler has its own.
        migrated["lr_schedulers"] = [_known(state) for state in migrated["lr_schedulers"]]
    fit_loop = loops.get("fit_loop")
    with contextlib.suppress(KeyError, TypeError):  # a user-defined loop saves other entries
        progress = _progress_of_epochs(migrated) if fit_loop is None else _progress(fit_loop, migrated)
        migrated["loops"] = {**loops, "drivetrain": progress}
    migrated["restart"] = {"callback_metrics": _monitored(migrated.get("callbacks", {}))}
    if resuming:
        _warn_of_the_unknown(migrated, knows_place=fit_loop is not None)
    return migrated


def _warn_of_the_unknown(checkpoint: State, knows_place: bool) -> None:
    version = checkpoint.get("pytorch-lightning_version", "1.x")
    place = "" if knows_place else " It does not say where in an epoch it was saved either; the end is assumed."
    rank_zero_warn(
        f"The checkpoint was written by Lightning {version} and holds no random state, so shuffling, dropout and other "
        f"random numbers will differ from the original run's.{place} To get the same ones each time you resume, call "
        "seed_everything before.",
        stacklevel=5,
    )


def _known(state: Any) -> Any:
    """Return ``state`` without the items that contain a :class:`Placeholder`."""
    if not isinstance(state, Mapping):
        return state
    return {key: value for key, value in state.items() if not any(placeholders(value))}


# ---- hyperparameters -------------------------------------------------------------------------------------------------


def _migrate_hparams(checkpoint: State) -> None:
    for old in ("hparams", "module_arguments"):  # names of "hyper_parameters" before 0.9
        if old in checkpoint:
            hparams = checkpoint.pop(old)
            if "hyper_parameters" not in checkpoint:
                checkpoint["hyper_parameters"] = hparams
                if old == "hparams":  # __init__ takes all hyperparameters as one argument
                    checkpoint.setdefault("hparams_name", "hparams")
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        hparams = checkpoint.get(key)
        if isinstance(hparams, argparse.Namespace):
            hparams = vars(hparams)
        if isinstance(hparams, Mapping):
            checkpoint[key] = dict(_known(hparams))
        else:
            checkpoint.pop(key, None)  # an object of another type, for example from a configuration library


# ---- the position in training ----------------------------------------------------------------------------------------


def _progress(fit_loop: State, checkpoint: State) -> State:
    """Convert the counters in the entry "fit_loop" of Lightning 1.6 or later to drivetrain's counters."""
    epochs, batches = fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"]
    now, ever = batches["current"], batches["total"]
    over = epochs["processed"] >= epochs["ready"]  # the epoch's batches are finished; its last hooks may still run
    ending = over and epochs["completed"] < epochs["processed"]
    begun = epochs["started"] >= epochs["ready"]
    done = now["processed"] if begun and (ending or not over) else 0
    steps, manual = _optimizer_steps(fit_loop, checkpoint)
    stepped = fit_loop.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", steps)  # since 1.6.5
    if not over:  # a checkpoint saved in a hook or during validation may not count the last batch yet
        stepped += now["processed"] - now["completed"] if manual else 1
    return {
        **_fresh_progress(),
        "current_epoch": epochs["processed"] - ending,
        "batches_done": done,
        "earlier_batches": ever["processed"] - done,
        "global_step": steps,
        "stepped_batches": stepped if manual else min(stepped, steps),
        "is_last_batch": done > 0 and (ending or batches["is_last_batch"]),
        "stepped": done > 0,
        "validation": "" if over or not done else _validation(fit_loop, now),
        "epoch_ending": ending,
    }


def fit_loop_of(position: State) -> State:
    """Convert drivetrain's counters in ``position`` to the entry "fit_loop" of a Lightning 2.x checkpoint.

    The number of steps is written for automatic and for manual optimization, because ``position`` does not tell which
    one the module uses.
    """
    ending, done = bool(position.get("epoch_ending")), int(position.get("batches_done", 0))
    inside = done > 0 and not ending
    epochs, steps = int(position["current_epoch"]), int(position.get("global_step", 0))
    begun = epochs + (ending or inside)
    epoch = {"ready": begun, "started": begun, "processed": epochs + ending, "completed": epochs}
    batches = _counters(int(position.get("earlier_batches", 0)) + done), _counters(done)
    step = {"ready": steps, "completed": steps}
    no_batches = {"total": _counters(0), "current": _counters(0), "is_last_batch": False}
    return {
        "state_dict": {},
        "epoch_progress": {"total": epoch, "current": dict(epoch)},
        "epoch_loop.state_dict": {"_batches_that_stepped": int(position.get("stepped_batches", steps))},
        "epoch_loop.batch_progress": {
            "total": batches[0], "current": batches[1],
            "is_last_batch": bool(position.get("is_last_batch")) and done > 0,
        },
        "epoch_loop.scheduler_progress": {"total": dict(step), "current": dict(step)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": {"total": dict(step), "current": dict(step)},
                "zero_grad": {"total": {**step, "started": steps}, "current": {**step, "started": steps}},
            },
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {"total": dict(step), "current": dict(step)},
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": no_batches,
    }  # fmt: skip


def _counters(count: int) -> State:
    return {"ready": count, "started": count, "processed": count, "completed": count}


def _validation(fit_loop: State, batches: State) -> str:
    """Return the state of the validation after the last batch: "" (not begun), "running" or "done"."""
    if batches["completed"] < batches["processed"]:
        return ""  # hooks such as on_train_batch_end have not finished
    names = ("epoch_loop.val_loop.batch_progress", "epoch_loop.val_loop.epoch_loop.batch_progress")
    progress = next((fit_loop[name] for name in names if name in fit_loop), None)
    if progress is None or progress["total"]["ready"] == 0:  # there was no validation in this epoch
        return ""
    now = progress["current"]
    return "done" if progress["is_last_batch"] and now["completed"] >= now["ready"] else "running"


def _optimizer_steps(fit_loop: State, checkpoint: State) -> tuple[int, bool]:
    """Return the number of optimizer steps so far, and whether the module used manual optimization."""
    automatic = manual = None
    for name, state in fit_loop.items():  # Lightning's versions agree only on the ends of these names
        if name.endswith("optimizer_loop.optim_progress") or name.endswith("automatic_optimization.optim_progress"):
            automatic = state["optimizer"]["step"]["total"]["completed"]
        elif name.endswith(".optim_step_progress"):
            manual = state["total"]["completed"]
    if automatic is None and manual is None:
        return int(checkpoint["global_step"]), False
    # `fit_loop_of` sets both counters to one number. A later run of Lightning advances only one of the counters.
    return max(automatic or 0, manual or 0), (manual or 0) > (automatic or 0)


def _progress_of_epochs(checkpoint: State) -> State:
    """Return drivetrain's counters for a file of Lightning 1.0 to 1.5. The fit will resume at the start of an epoch."""
    steps = int(checkpoint["global_step"])
    return {
        **_fresh_progress(),
        "current_epoch": int(checkpoint.get("epoch", 0)),
        "earlier_batches": steps,  # an estimate: with gradient accumulation, a step has several batches
        "global_step": steps,
        "stepped_batches": steps,
    }


def _fresh_progress() -> State:
    """Return the counters of a fit that has not begun.

    An epoch that ``max_steps`` or ``trainer.should_stop`` has ended early counts as complete, because Lightning's
    counters do not show this. A resumed fit skips the remaining batches of this epoch.
    """
    return {**Progress().state_dict(), **Window().place()}


# ---- precision and callbacks -----------------------------------------------------------------------------------------


def _migrate_precision(checkpoint: State) -> None:
    for old in _SCALER_KEYS:
        if old in checkpoint:
            state = checkpoint.pop(old)
            checkpoint.setdefault("MixedPrecision", state)
    checkpoint.pop("amp_scaling_state", None)  # NVIDIA's apex is no longer supported


def _callbacks(checkpoint: State) -> dict[str, State]:
    found: dict[Any, Any] = dict(checkpoint.get("callbacks") or {})
    best = checkpoint.pop("checkpoint_callback_best_model_path", None)  # an entry before 0.10
    score = checkpoint.pop("checkpoint_callback_best_model_score", checkpoint.pop("checkpoint_callback_best", None))
    if best is not None:
        found.setdefault("ModelCheckpoint", {"best_model_path": best, "best_model_score": score})
    states: dict[str, State] = {}
    for key, state in found.items():
        name = _state_key(key)
        if name in states:
            rank_zero_warn(
                f"The checkpoint holds two states under the name {name}, and only the first is used. "
                "Give the callbacks different arguments."
            )
        elif (converted := _callback_state(state, checkpoint)) is not None:
            states[name] = converted
    return states


def _state_key(key: Any) -> str:
    """Convert Lightning's key of a callback's state to drivetrain's key."""
    if isinstance(key, type) and issubclass(key, Placeholder):  # before 1.5, the key was the callback's class
        return key.path.rpartition(".")[2]
    if isinstance(key, type):
        return key.__qualname__
    name, brace, arguments = str(key).partition("{")
    try:
        given = ast.literal_eval(_INTERVAL.sub(_in_seconds, brace + arguments))
    except (ValueError, SyntaxError, TypeError, OverflowError):
        return str(key)  # a user's callback may define any key
    if not isinstance(given, dict):
        return str(key)
    if "every_n_train_steps" in given:
        given.pop("save_on_train_epoch_end", None)  # only 1.5 to 1.8 have this entry
    return f"{name}{given!r}"


def _in_seconds(match: re.Match[str]) -> str:
    """Convert the text ``datetime.timedelta(...)`` to seconds."""
    parts = dict(part.strip().split("=") for part in match.group(1).split(",") if "=" in part)
    return repr(timedelta(**{name: int(number) for name, number in parts.items()}).total_seconds())


def _callback_state(state: Any, checkpoint: State) -> Any:
    """Return a callback's state in drivetrain's layout; ``None`` if the state lacks a necessary entry. The keys of
    ``state`` tell which kind of callback saved it.
    """
    if not isinstance(state, Mapping):
        return state
    if "best_model_path" in state:
        return _model_checkpoint_state(dict(state), checkpoint)
    if "wait_count" in state and "patience" in state:
        if "best_score" not in state:
            return None
        reasons = ("stopping_reason", "stopping_reason_message")  # Lightning's values have other meanings
        return {
            **{name: value for name, value in state.items() if name not in reasons},
            "stopped_epoch": state.get("stopped_epoch", 0),
            "best_score": torch.as_tensor(state["best_score"]),
        }
    if isinstance(elapsed := state.get("time_elapsed"), Mapping):
        return {**state, "time_elapsed": {stage: float(elapsed.get(stage, 0.0)) for stage in _STAGES}}
    return dict(state)


def _model_checkpoint_state(state: State, checkpoint: State) -> State:
    best, score, monitor = state["best_model_path"] or "", state.get("best_model_score"), state.get("monitor")
    models = {path: torch.as_tensor(value) for path, value in (state.get("best_k_models") or {}).items()}
    if best and not models:
        # Without a monitor, and before 1.5, the state names only the best file. If its score is missing, the step
        # replaces it.
        models = {best: torch.as_tensor(float(checkpoint["global_step"]) if score is None else score)}
    kth = state.get("kth_best_model_path") or (best if len(models) == 1 else "")
    return {
        **state,
        "monitor": monitor,
        "dirpath": state.get("dirpath") or (os.path.dirname(best) or None),
        "best_model_path": best,
        "best_model_score": None if score is None else torch.as_tensor(score),
        "current_score": None if (now := state.get("current_score")) is None else torch.as_tensor(now),
        "best_k_models": models,
        "kth_best_model_path": kth,
        "kth_value": models.get(kth) if monitor is not None else None,
        "last_model_path": state.get("last_model_path") or "",
    }


def _monitored(callbacks: dict[str, State]) -> dict[str, Any]:
    """Return the monitored metrics in the states of callbacks, for example for a ``ReduceLROnPlateau``."""
    return {
        state["monitor"]: state["current_score"]
        for state in callbacks.values()
        if isinstance(state, dict) and state.get("monitor") and isinstance(state.get("current_score"), torch.Tensor)
    }
