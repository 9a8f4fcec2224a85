"""Check the arguments of ModelCheckpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.spelling import is_higher_better
from drivetrain.callback import Trainer
from drivetrain.errors import ConfigurationError, check_choice, check_count, wrong_value


def mode_or_default(owner: str, mode: str | None, monitor: Any) -> str:
    """Return ``mode``. If ``mode`` is ``None``, return "min", and warn if higher values of ``monitor`` are usually
    better.
    """
    if mode is not None:
        check_choice(owner, "mode", mode, ("min", "max"))
        return mode
    if is_higher_better(monitor):
        rank_zero_warn(
            f"{owner}(monitor={monitor!r}) treats the lowest value as the best, because no mode was given. Write "
            'mode="max" if a higher value is better, else mode="min". [DT1028]'
        )
    return "min"


def acts_at_epoch_end(chosen: bool | None, trainer: Trainer) -> bool:
    """Return whether a callback acts at the end of a training epoch instead of after validation. ``chosen`` is the
    user's choice; ``None`` leaves the choice to the Trainer.
    """
    return trainer.judges_at_epoch_end if chosen is None else chosen


def not_logged(owner: str, monitor: str, metrics: Iterable[str], trainer: Trainer) -> str:
    """Return an error message: ``monitor`` is not among the logged ``metrics``."""
    return (
        f"{owner} watches {monitor!r}, which was not logged. {trainer.why_not_validated}"
        f"Logged so far: {', '.join(sorted(metrics)) or 'nothing'}. Log it, or watch one of those. [DT1030]"
    )


def check_triggers(
    every_n_train_steps: int | None,
    train_time_interval: timedelta | None,
    every_n_epochs: int | None,
    every: str | None = None,
) -> None:
    """Check the arguments that choose when to save. The user may pass at most one of them."""
    counts = {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}
    for name, count in counts.items():
        check_count("ModelCheckpoint", name, count, optional=True)
    interval = train_time_interval
    if interval is not None and not (isinstance(interval, timedelta) and interval > timedelta(0)):
        raise wrong_value(
            "ModelCheckpoint", "train_time_interval", interval, "a timedelta above zero",
            "train_time_interval=timedelta(minutes=30)",
        )  # fmt: skip
    check_choice("ModelCheckpoint", "every", every, (None, "auto"))
    triggers = {**counts, "train_time_interval": interval, "every": every}
    chosen = [f"{name}={value!r}" for name, value in triggers.items() if value]
    if len(chosen) > 1:
        raise ConfigurationError(
            f"ModelCheckpoint({', '.join(chosen)}): only one of these can decide when to save. Keep one."
        )


def check_target(dirpath: Any, filename: Any, monitor: Any, save_top_k: int, save_last: Any) -> None:
    """Check the arguments that say where to save and how many checkpoints to keep."""
    for name, value, kinds, kind, example in (
        ("dirpath", dirpath, (str, os.PathLike), "a path", '"checkpoints"'),
        ("filename", filename, str, "a text", '"{epoch}-{step}"'),
        ("monitor", monitor, str, "the name of a logged value", '"val_loss"'),
    ):
        if value is not None and not isinstance(value, kinds):
            raise wrong_value("ModelCheckpoint", name, value, f"{kind} or None", f"{name}={example}", (str,))
    check_place("ModelCheckpoint", dirpath, filename)
    for name, value in (("dirpath", dirpath), ("filename", filename)):
        if (text := str(value)).endswith(".ckpt"):
            stem = os.path.basename(text).removesuffix(".ckpt")
            rank_zero_warn(
                f"ModelCheckpoint({name}={text!r}): dirpath is a folder, and filename gets .ckpt added. For one file, "
                f"write dirpath={os.path.dirname(text) or '.'!r}, filename={stem!r}."
            )
    check_count("ModelCheckpoint", "save_top_k", save_top_k, lowest=-1)
    if monitor is None and save_top_k not in (-1, 0, 1):
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}) cannot rank checkpoints without monitor. "
            'Name a metric, monitor="val_loss", or write save_top_k=-1 to keep all. [DT1029]'
        )
    check_choice("ModelCheckpoint", "save_last", save_last, (None, True, False, "link"))


def check_place(owner: str, dirpath: Any, filename: str | None) -> None:
    """Check the folder and the file name of a checkpoint. A constructor calls this function, so that the error does not
    come in a save.

    Raises:
        ConfigurationError: the folder or the file name is invalid, or the package that opens the address is not
            installed.
    """
    if dirpath is not None:
        folder = files.spelled(dirpath)
        files.check_folder(owner, "dirpath", folder, folder, "checkpoints")
    if filename is not None and (why := files.wrong_characters(filename)) is not None:
        raise wrong_value(owner, "filename", filename, f"the name of a file, and {why}", 'filename="{epoch}-{step}"')
