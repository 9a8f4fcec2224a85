"""Collects the contents of a checkpoint, and restores a checkpoint into a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import parity
from drivetrain.base import VERSION, files
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import expect, load_schedulers, naming, restoring, scheduler_state
from drivetrain.base.seed import rng_state
from drivetrain.base.supplied import in_our_layout
from drivetrain.checkpoints import plain
from drivetrain.checkpoints.file import EMPTY_PATH, reads_files
from drivetrain.checkpoints.io import CheckpointIO, background_of
from drivetrain.errors import (
    CheckpointError,
    CheckpointNameError,
    ConfigurationError,
    IncompleteCheckpointError,
    NoCheckpointError,
    closest,
    described,
)
from drivetrain.loops.progress import TrainerStatus
from drivetrain.loops.restart import capture
from drivetrain.loops.restart_checks import check_progress, check_restart
from drivetrain.loops.window import Window
from drivetrain.module import loading
from drivetrain.strategies import optimizer_states
from drivetrain.trainer import last, other_ranks, rank_parts, resume_line, telling, weights

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

# The value of the entry "pytorch-lightning_version". Other tools determine a checkpoint's layout from this version.
LAYOUT_VERSION = "2.6.0"


RESUME = "DRIVETRAIN_RESUME"
"""The name of an environment variable. If the value is "auto", every fit without ``ckpt_path`` resumes."""


def _resumes_always() -> bool:
    value = os.environ.get(RESUME, "")
    if value not in ("", "auto"):
        raise ConfigurationError(
            f"The environment variable {RESUME} is {value!r}. Set it to auto, and a fit without ckpt_path resumes from "
            'the newest checkpoint of this program, as with ckpt_path="last"; or remove it.'
        )
    return value == "auto"


def resolve_path(trainer: Trainer, ckpt_path: str | Path | None, fitting: bool) -> str | None:
    """Return the file for the argument ``ckpt_path``. The Trainer calls this function before it creates anything.

    Args:
        trainer: the Trainer; its callbacks know the files for "best" and "last".
        ckpt_path: a path; "best"; "last": the newest complete checkpoint of this program, see last.py; "hpc": the
            ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir`` with the highest number; ``None``: no checkpoint. There are
            two exceptions for a fit with ``None``. In a requeued job, the fit resumes from the "hpc" file of this job.
            With the environment variable ``DRIVETRAIN_RESUME=auto``, ``None`` means "last".
        fitting: whether ``trainer.fit`` was called. If there is no file for "last", a fit starts from the beginning.
            The other methods raise.

    Raises:
        CheckpointError: the file does not exist.
        ConfigurationError: ``ckpt_path`` is not a path.
    """
    requeued = None
    if fitting and ckpt_path in (None, "last"):
        own = (getattr(callback, "own_checkpoint", None) for callback in trainer.callbacks)
        requeued = next((path for ask in own if ask is not None and (path := ask(trainer))), None)
    callbacks, store = trainer.checkpoint_callbacks, trainer.strategy.checkpoint_io
    if ckpt_path is None and fitting and callbacks and _resumes_always():
        ckpt_path = "last"
    if ckpt_path is None:
        return requeued
    if ckpt_path == "last":
        return last.resolve_last(trainer, fitting, requeued)
    if ckpt_path == "best":
        found = next((path for callback in callbacks if (path := getattr(callback, "best_model_path", ""))), "")
        if found and store.exists(found):
            return found
        if found:
            raise CheckpointError(
                f'ckpt_path="best" means {found}, which ModelCheckpoint has saved, and that file is gone. '
                "Pass the path of another checkpoint."
            )
        why = "its callbacks have saved none so far" if callbacks else "there is no ModelCheckpoint among the callbacks"
        raise CheckpointNameError(f'ckpt_path="best" names no checkpoint: {why}. Pass a path. [DT1033]')
    if ckpt_path == "hpc":
        by_number = numbered(trainer.default_root_dir, store)
        if not by_number:
            raise CheckpointNameError(
                f'ckpt_path="hpc" names no checkpoint: there is no hpc_ckpt_<n>.ckpt in {trainer.default_root_dir}. '
                "Pass a path."
            )
        return by_number[max(by_number)]
    if not isinstance(ckpt_path, (str, os.PathLike)):
        raise ConfigurationError(
            f'ckpt_path is a path, "best" or "last", not {described(ckpt_path)}. Write ckpt_path="last".'
        )
    path = files.spelled(ckpt_path)
    if not store.exists(path):
        if (target := store.link_target(path)) is not None:
            raise CheckpointError(
                f"{path} is a link to {target}, which does not exist. Pass the path of another checkpoint."
            )
        likely = closest(path, ["best", "last"]) if path.isalpha() else None  # other texts are probably paths
        missing = "Check the path." if path else EMPTY_PATH
        hint = missing if likely is None else f"Did you mean {likely!r}? Write that, or check the path."
        raise NoCheckpointError(f"There is no checkpoint at {path or repr(path)}. {hint} [DT1031]")
    if (reads_files(store) and os.path.isdir(path)
            and not (store.is_sharded(path) or trainer.strategy.reads_folder(path))):  # fmt: skip
        raise CheckpointNameError(f"{path} is a folder, and a checkpoint is a file. Pass the path of a file in it.")
    return path


def numbered(folder: str | Path, store: CheckpointIO) -> dict[int, str]:
    """Return the checkpoints in ``folder`` that requeued jobs have saved, by number."""
    named = {PurePath(path).stem.removeprefix("hpc_ckpt_"): path for path in store.find(folder, "hpc_ckpt_*.ckpt")}
    return {int(number): path for number, path in named.items() if number.isdecimal()}


def dump(trainer: Trainer, weights_only: bool = False, allow_pickle: bool = False) -> dict[str, Any]:
    """Return the state of the run as plain data and tensors; every rank must call this function.

    Args:
        trainer: the run.
        weights_only: leave out optimizers, schedulers, callbacks, loops and random states.
        allow_pickle: keep every object unchanged. If a kept object is not plain data, the checkpoint can be loaded only
            with ``weights_only=False``. The setting ``parity.current().pickle`` also keeps every object unchanged.

    Raises:
        CheckpointError: a callback, the datamodule or ``on_save_checkpoint`` has added a value that cannot be stored.
            Also raised if the fit is not completely set up.
    """
    if not weights_only:
        _check_set_up(trainer)
    trainer.hooks.notify("before_save")
    progress, strategy = trainer.progress, trainer.strategy
    checkpoint: dict[str, Any] = {
        "epoch": progress.current_epoch,
        "global_step": progress.global_step,
        "pytorch-lightning_version": LAYOUT_VERSION,
        "drivetrain_version": VERSION,
        "torch_version": str(torch.__version__),
        **weights.of(trainer),
    }
    if trainer._program:
        checkpoint["program"] = trainer._program
    if not weights_only:
        checkpoint[resume_line.ENTRY] = resume_line.circumstances(trainer)
        own = _loop_state(trainer, checkpoint)
        kept = own.pop("callbacks", {})  # the callbacks' states at the position to resume from
        options = own.pop("options", None)
        precision = own.pop("precision", None) or partial(
            strategy.precision_plugin.state_dict, trainer.lightning_module, strategy.optimizers
        )
        rank_state = own.pop("rank_state", None)
        checkpoint.update(own)
        if state := strategy.rank_state(trainer.lightning_module) if rank_state is None else rank_state:
            checkpoint["rank_state"] = state
        checkpoint["callbacks"] = {
            callback.state_key: state
            for callback in trainer.callbacks
            if (state := kept[callback.state_key] if callback.state_key in kept else callback.state_dict())
        }

        with nullcontext() if options is None else options.restored():
            checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
            checkpoint["optimizers"] = [
                optimizer_states.describe(trainer.lightning_module, each) for each in strategy.optimizers
            ]
        schedulers = [scheduler_state(config.scheduler) for config in strategy.lr_scheduler_configs]
        checkpoint["lr_schedulers"] = schedulers if options is None else options.schedulers
        if state := precision():
            checkpoint[type(strategy.precision_plugin).__qualname__] = state
        if trainer.loggers:
            checkpoint |= {"loggers": states} if (states := telling.states_of(trainer)) else {}
    datamodule = trainer.datamodule
    if datamodule is not None:
        if state := datamodule.state_dict():
            checkpoint[type(datamodule).__qualname__] = state
        checkpoint.update(loading.raw_hparams(datamodule, prefix="datamodule_"))
    checkpoint.update(loading.raw_hparams(trainer.lightning_module))
    if not weights_only:
        trainer.hooks.call_callbacks("on_save_checkpoint", checkpoint)
    trainer.hooks.call_method("on_save_checkpoint", checkpoint)
    return checkpoint if allow_pickle or parity.current().pickle else _as_plain_data(trainer, checkpoint)


def _check_set_up(trainer: Trainer) -> None:
    """Check that the set-up of the running fit is complete enough to save a checkpoint.

    Raises:
        CheckpointError: the optimizers are not created, or the checkpoint from which the fit resumes is not restored. A
            run could not resume from a checkpoint of this state.
    """
    progress, run = trainer.progress, trainer.current_run
    if progress.fn != "fit" or progress.status not in (TrainerStatus.RUNNING, TrainerStatus.INTERRUPTED):
        return
    if run is None or not run.optimizers.made:
        why = "its optimizers do not exist yet"
    elif trainer.ckpt_path is not None and run.resumed_from is None:
        why = f"its progress in {trainer.ckpt_path} is not restored yet"
    else:
        return
    raise CheckpointError(
        f"A checkpoint to resume from cannot be saved before the fit is set up: {why}. Save in on_train_start or "
        "later, or save the weights alone: weights_only=True."
    )


def _loop_state(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the loop. After an exception, return the state before the first batch of the interrupted
    optimizer step. Also reset the counters and buffers in ``checkpoint`` to this state.
    """
    run = trainer.current_run
    if run is None and (ranks := trainer.ranks_of_job):  # the last job's processes have returned their states
        return {"loops": {"drivetrain": ranks[0]["loops"]}, "ranks": ranks, "rng": ranks[0]["rng"]}
    if run is None or trainer.progress.fn != "fit":
        loops = {"drivetrain": {**trainer.progress.state_dict(), **Window().place()}}
        return {"loops": loops, "rng": rng_state()}
    state = dict(capture(run))
    progress = state.pop("progress")
    checkpoint["epoch"], checkpoint["global_step"] = progress["current_epoch"], progress["global_step"]
    whole = checkpoint["state_dict"]
    whole.update({name: buffer for name, buffer in state.pop("buffers", {}).items() if name in whole})
    names = ("rng", "callbacks", "options", "precision", "rank_state")
    apart: dict[str, Any] = {name: state.pop(name) for name in names if name in state}
    return {"loops": {"drivetrain": progress}, "restart": state, **apart}


def check_storable(trainer: Trainer, weights_only: bool = False) -> None:
    """Check, before any save, that a checkpoint can store the states of callbacks and datamodule, and the
    hyperparameters.

    Nothing is written. This function warns about hyperparameters; later saves do not repeat these warnings.

    Args:
        trainer: a Trainer that has a module.
        weights_only: whether the checkpoints will be saved without callbacks.

    Raises:
        CheckpointError: a state cannot be stored. The message contains the path of the value in the checkpoint.
    """
    module, datamodule = trainer.lightning_module, trainer.datamodule
    for callback in () if weights_only else trainer.callbacks:
        plain.encode(_state_now(callback), f"callbacks[{callback.state_key!r}]")
    if datamodule is not None:
        plain.encode(_state_now(datamodule), type(datamodule).__qualname__)
        loading.encode_hparams(datamodule, loading.raw_hparams(datamodule).get("hyper_parameters"))
    loading.encode_hparams(module, loading.raw_hparams(module).get("hyper_parameters"))


def check_at_start(trainer: Trainer) -> None:
    """Check, at the start of a fit, that checkpoints can store the fit's state. In a fit without a checkpoint callback,
    only warn.

    Raises:
        CheckpointError: a state cannot be stored, and there is a checkpoint callback.
    """
    savers = trainer.checkpoint_callbacks
    refused = trainer.strategy.facts.refuses.get("save_trainable_only")
    if refused and trainer.settings.save_trainable_only:
        raise ConfigurationError(f"Trainer(save_trainable_only=True) {refused} Or leave save_trainable_only out.")
    if (background := background_of(trainer.strategy.checkpoint_io)) is not None:
        background.start()
    if parity.current().pickle:
        return  # pickle can store any value
    try:
        check_storable(trainer, bool(savers) and all(getattr(saver, "save_weights_only", False) for saver in savers))
    except CheckpointError as error:
        if savers:
            raise
        rank_zero_warn(f"No callback saves in this fit, but trainer.save_checkpoint would fail: {error}")


def _state_now(owner: Any) -> Any:
    """Return ``owner.state_dict()``; ``None`` if it raises, because it need not work before training."""
    try:
        return owner.state_dict()
    except Exception:
        return None


def _as_plain_data(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``checkpoint`` as data that loads without running code. A hyperparameter that is not plain data is
    replaced by a description.

    Raises:
        CheckpointError: an entry other than a hyperparameter cannot be stored. The message contains the path of the
            value.
    """
    encoded: dict[str, Any] = {}
    for key, part in checkpoint.items():
        if key in loading.HYPERPARAMETERS:
            owner = trainer.datamodule if "datamodule" in key else trainer.lightning_module
            encoded[key] = loading.encode_hparams(owner, part)
        else:
            encoded[key] = plain.encode(part, str(key), references=key not in loading.PARTS_WITHOUT_REFERENCES)
    return encoded


def load(trainer: Trainer, path: str, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint at ``path``, converted to this version's layout and decoded."""
    resuming = trainer.progress.fn == "fit"
    with naming(path):
        read: Any = trainer.strategy.load_checkpoint(path, weights_only)
        if not isinstance(read, Mapping):
            raise CheckpointError(
                f"The checkpoint is a {type(read).__name__} and no dictionary. Use one that a Trainer wrote."
            )
        with restoring("'loops'"):  # in earlier layouts, the entry can be ``None``
            expect({} if read.get("loops") is None else read["loops"], Mapping)
        with restoring("the layout"):
            read = in_our_layout(read, resuming)
        checkpoint = loading.decode_parts(read)
        check_layout(checkpoint)
    return checkpoint


def load_own_part(trainer: Trainer, checkpoint: dict[str, Any], path: str, weights_only: bool | None) -> None:
    """In a fit, read this rank's own file beside ``path``, and add the file's contents to ``checkpoint``."""
    if trainer.progress.fn != "fit" or "rank_files" not in checkpoint:
        return

    with naming(path):
        checkpoint["ranks"] = parts = rank_parts.read(trainer, checkpoint, path, weights_only)
        checkpoint.update(parts[trainer.global_rank] if len(parts) == trainer.world_size else {})


_KINDS: dict[str, type | tuple[type, ...]] = {
    "state_dict": Mapping, "loops": Mapping, "callbacks": Mapping, "optimizer_states": (list, tuple),
    "lr_schedulers": (list, tuple), "ranks": (list, tuple), "rng": Mapping, "restart": Mapping,
    "rank_files": (list, tuple), "rank_state": Mapping, "optimizers": (list, tuple),
}  # fmt: skip


def check_layout(checkpoint: Mapping[str, Any]) -> None:
    """Check the types of a checkpoint's entries.

    Raises:
        CheckpointError: an entry has a wrong type; the message names the entry.
    """
    for key, kinds in _KINDS.items():
        if key in checkpoint:
            with restoring(repr(key)):
                expect(checkpoint[key], kinds)


def expect_states(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the callbacks.

    Raises:
        CheckpointError: drivetrain wrote the checkpoint, but the callbacks' states are missing.
    """
    if "callbacks" not in checkpoint and "drivetrain_version" in checkpoint and "loops" in checkpoint:
        raise CheckpointError("The checkpoint has no 'callbacks'. Use another one, or load only its weights.")
    return checkpoint.get("callbacks", {})


def restore_parts(trainer: Trainer, checkpoint: dict[str, Any], fitting: bool) -> None:
    """Restore module, datamodule and callbacks, before the optimizers exist.

    Evaluations do not restore the states of drivetrain's own callbacks, because these states describe a fit.

    Raises:
        CheckpointError: the checkpoint has no weights, or the weights do not fit the module.
    """
    path = trainer.ckpt_path
    trainer.hooks.call_method("on_load_checkpoint", checkpoint)
    with naming(path):
        weights.restore(trainer, checkpoint, fitting)
        datamodule = trainer.datamodule
        if datamodule is not None and (state := checkpoint.get(type(datamodule).__qualname__)) is not None:
            with restoring(f"the datamodule {type(datamodule).__name__}"):
                datamodule.load_state_dict(state)
    if not fitting:
        weights.restore_outside_of_fit(trainer, checkpoint)
        return
    trainer.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    with naming(path):
        weights.restore_callbacks(trainer, expect_states(checkpoint))


def restore_training(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore optimizers, schedulers, precision and progress. Error messages contain the checkpoint's path."""
    with naming(trainer.ckpt_path):
        _restore_training(trainer, checkpoint)


def _restore_training(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore optimizers, schedulers, precision and progress. The training loop later restores the other entries.

    Raises:
        CheckpointError: the checkpoint was saved with ``weights_only``, has another number of optimizers, or was saved
            after more than ``max_epochs`` epochs.
    """
    strategy, progress = trainer.strategy, trainer.progress
    if "optimizer_states" not in checkpoint or "loops" not in checkpoint:
        raise IncompleteCheckpointError(
            "The checkpoint holds no optimizer states and no progress: it was saved with save_weights_only=True. "
            "Resume from one that was saved without it, or load only its weights. [DT1038]"
        )
    if "lr_schedulers" not in checkpoint:
        raise CheckpointError("The checkpoint has no 'lr_schedulers'. Use another one.")
    if strategy.facts.trainer_restores_optimizers:
        optimizer_states.restore(strategy, trainer.lightning_module, checkpoint)
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    load_schedulers(schedulers, checkpoint["lr_schedulers"])
    if (state := checkpoint.get(type(strategy.precision_plugin).__qualname__)) is not None:
        with restoring(f"the precision ({type(strategy.precision_plugin).__name__})"):
            strategy.precision_plugin.load_state_dict(state, trainer.lightning_module, strategy.optimizers)
    saved = checkpoint["loops"].get("drivetrain")
    if saved is None:
        raise CheckpointError(
            f"The checkpoint's loops are those of {', '.join(map(repr, checkpoint['loops'])) or 'none'}, and do not "
            "say where training was. Resume from one that a Trainer wrote, or load only its weights."
        )
    check_progress(saved)
    progress.load_state_dict(saved, goes_on=saved.get("global_step", 0) < trainer.limits.max_steps)
    epochs = progress.epochs_done
    if epochs > trainer.limits.max_epochs:
        raise CheckpointError(
            f"The checkpoint was saved after {epochs} epochs, and "
            f"Trainer(max_epochs={trainer.limits.max_epochs:.0f}) is less. Raise max_epochs. [DT1037]"
        )
    run = trainer.current_run
    assert run is not None  # the run is being set up
    run.window.restore_place(saved)

    own = other_ranks.of_this_rank(trainer, checkpoint, bool(progress.batches_done and not progress.epoch_ending))
    if own.get("rng") is None and "drivetrain_version" in checkpoint:
        raise CheckpointError("The checkpoint has no random state, 'rng'. Use another one.")
    loop = own.get("restart", {})
    restart = {"rng": own.get("rng"), **loop}
    as_many = len(checkpoint.get("ranks", [checkpoint])) == trainer.world_size
    complete = as_many and bool(loop) and "drivetrain_version" in checkpoint
    check_restart(restart, trainer.lightning_module, complete)
    if state := own.get("rank_state"):
        with restoring(f"the strategy ({type(strategy).__name__})"):
            strategy.load_rank_state(trainer.lightning_module, expect(state, Mapping))
    run.restart, run.resumed_from = restart, trainer.ckpt_path
