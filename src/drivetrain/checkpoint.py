"""What a checkpoint holds (trap T24), and how a run takes it back."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import CheckpointError, NotSupportedError
from drivetrain.loading import dump_hparams
from drivetrain.rank_zero import rank_zero_warn
from drivetrain.seed import rng_state, set_rng_state
from drivetrain.tree import map_leaves

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

# Tools of the field look for this key to know the layout of the others.
_LAYOUT_VERSION = "2.6.0"


def resolve_path(trainer: Trainer, ckpt_path: str | Path | None, weights_only: bool | None) -> str | None:
    """The file that ``ckpt_path`` means, before anything is built.

    Args:
        trainer: whose callbacks know "best" and "last".
        ckpt_path: a path, "best", or "last": of all files that the callbacks offer for resuming, the one that was
            written last; ``None``: none.
        weights_only: as the entry points take it.

    Raises:
        CheckpointError: there is no such file.
        NotSupportedError: running code from a checkpoint was asked for.
    """
    if weights_only is False:
        raise NotSupportedError(
            "weights_only=False would run code from the checkpoint, which this version never does. Leave it out."
        )
    if ckpt_path is None:
        return None
    callbacks = trainer.checkpoint_callbacks
    if ckpt_path in ("best", "last"):
        if ckpt_path == "best":
            found = next((path for callback in callbacks if (path := getattr(callback, "best_model_path", ""))), "")
        else:
            candidates = {path for callback in callbacks for path in callback.resume_candidates(trainer)}
            found = max(candidates, key=os.path.getmtime, default="")
        if found:
            return found
        why = "its callbacks have saved none so far" if callbacks else "there is no ModelCheckpoint among the callbacks"
        raise CheckpointError(f'ckpt_path="{ckpt_path}" names no checkpoint: {why}. Pass a path.')
    path = os.fspath(ckpt_path)
    if not os.path.exists(path):
        raise CheckpointError(f"There is no checkpoint at {path}. Check the path.")
    return path


def dump(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """The state of the run as plain data and tensors; every rank must call it.

    Args:
        trainer: the run.
        weights_only: leave out optimizers, schedulers, callbacks, loops and random states.

    Raises:
        CheckpointError: a callback, the datamodule or ``on_save_checkpoint`` put in what is no plain data.
    """
    import drivetrain

    progress, strategy = trainer.progress, trainer.strategy
    checkpoint: dict[str, Any] = {
        "epoch": progress.current_epoch,
        "global_step": progress.global_step,
        "pytorch-lightning_version": _LAYOUT_VERSION,
        "drivetrain_version": drivetrain.__version__,
        "torch_version": str(torch.__version__),
        "state_dict": strategy.lightning_module_state_dict(),
    }
    if not weights_only:
        checkpoint["loops"] = {"drivetrain": progress.state_dict()}
        checkpoint["callbacks"] = {
            callback.state_key: state for callback in trainer.callbacks if (state := callback.state_dict())
        }
        checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in strategy.optimizers]
        checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs]
        checkpoint["rng"] = rng_state()
        if state := strategy.precision_plugin.state_dict():
            checkpoint[type(strategy.precision_plugin).__qualname__] = state
    datamodule = trainer.datamodule
    if datamodule is not None:
        if state := datamodule.state_dict():
            checkpoint[type(datamodule).__qualname__] = state
        checkpoint.update(dump_hparams(datamodule, prefix="datamodule_"))
    checkpoint.update(dump_hparams(trainer.lightning_module))
    if not weights_only:
        trainer.hooks.call_callbacks("on_save_checkpoint", checkpoint)
    trainer.hooks.call_method("on_save_checkpoint", checkpoint)
    return _as_plain_data(checkpoint)


def _as_plain_data(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with numpy's scalars as Python's, and certain to load without running code.

    Raises:
        CheckpointError: something in it is no plain data; the message names where it is.
    """
    plain: dict[str, Any] = map_leaves(_plain_scalar, checkpoint)
    for key, value in plain.items():
        # Without the tensors, which are always plain, it is small: so it can really be tried.
        skeleton = map_leaves(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, value)
        buffer = io.BytesIO()
        try:
            torch.save(skeleton, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # whatever pickling somebody's object raises
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"checkpoint[{key!r}] holds an object that is no plain data and could not be loaded again: {reason} "
                "Store numbers, texts, tensors, lists and dictionaries of those instead."
            ) from error
    return plain


def _plain_scalar(leaf: Any) -> Any:
    is_numpy_scalar = type(leaf).__module__ == "numpy" and hasattr(leaf, "item") and getattr(leaf, "shape", None) == ()
    return leaf.item() if is_numpy_scalar else leaf


def restore_parts(trainer: Trainer, checkpoint: dict[str, Any], fitting: bool) -> None:
    """Give module, datamodule and, to go on training, callbacks their state; the optimizers do not exist yet.

    Raises:
        CheckpointError: the checkpoint lacks the weights, or they do not fit the module.
    """
    module = trainer.lightning_module
    trainer.hooks.call_method("on_load_checkpoint", checkpoint)
    if "state_dict" not in checkpoint:
        raise CheckpointError(
            f"The checkpoint has no 'state_dict', only {sorted(checkpoint)}. Use one that a Trainer wrote."
        )
    try:
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    except RuntimeError as error:
        raise CheckpointError(
            f"The checkpoint does not fit {type(module).__name__}: {error} "
            "Build the module as it was trained, or set strict_loading = False on it."
        ) from error
    datamodule = trainer.datamodule
    if datamodule is not None and (state := checkpoint.get(type(datamodule).__qualname__)) is not None:
        datamodule.load_state_dict(state)
    if not fitting:
        return
    trainer.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    states: dict[str, Any] = checkpoint.get("callbacks", {})
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    known = {callback.state_key for callback in trainer.callbacks}
    if missing := sorted(set(states) - known):
        rank_zero_warn(
            f"The checkpoint holds the state of callbacks that this Trainer does not have: {', '.join(missing)}. "
            "Add them, or go on without that state."
        )


def restore_training(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Give optimizers, schedulers, precision, progress and random generators their state.

    Raises:
        CheckpointError: it was saved with ``weights_only``, or for another number of optimizers.
        NotSupportedError: it was saved in the middle of an epoch, or before a scheduler stepped at its end.
    """
    strategy, progress = trainer.strategy, trainer.progress
    if "optimizer_states" not in checkpoint or "loops" not in checkpoint:
        raise CheckpointError(
            "The checkpoint holds no optimizer states and no progress: it was saved with save_weights_only=True. "
            "Resume from one that was saved without it, or load only its weights."
        )
    for kind, parts, states in (
        ("optimizer", strategy.optimizers, checkpoint["optimizer_states"]),
        ("scheduler", [config.scheduler for config in strategy.lr_scheduler_configs], checkpoint["lr_schedulers"]),
    ):
        if len(parts) != len(states):
            raise CheckpointError(
                f"The checkpoint holds {len(states)} {kind} states, and configure_optimizers made {len(parts)}. "
                "Make as many as when it was saved."
            )
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    if (state := checkpoint.get(type(strategy.precision_plugin).__qualname__)) is not None:
        strategy.precision_plugin.load_state_dict(state)
    saved = checkpoint["loops"].get("drivetrain")
    if saved is None or saved["epoch_cut"] or (saved["batches_done"] and not saved["epoch_ending"]):
        raise NotSupportedError(
            f"The checkpoint was saved in the middle of epoch {checkpoint['epoch']}, and this version resumes only "
            "from one that was saved at the end of an epoch. Write ModelCheckpoint(save_on_train_epoch_end=True)."
        )
    if any(c.reduce_on_plateau and c.interval == "epoch" for c in strategy.lr_scheduler_configs):
        raise NotSupportedError(
            "A scheduler that watches a value steps after the checkpoint of an epoch was written, and this version "
            'cannot resume that. Use a scheduler without monitor, or interval="step" with a frequency.'
        )
    progress.load_state_dict(saved)
    if saved["epoch_ending"]:
        progress.current_epoch += 1  # it was saved before the epoch was counted
        progress.earlier_batches += progress.batches_done
        progress.batches_done, progress.epoch_ending = 0, False
    progress.resumed_batches = progress.total_batches
    if progress.current_epoch > trainer.limits.max_epochs:
        raise CheckpointError(
            f"The checkpoint was saved after {progress.current_epoch} epochs, and "
            f"Trainer(max_epochs={trainer.limits.max_epochs:.0f}) is less. Raise max_epochs."
        )
    set_rng_state(checkpoint["rng"])
