"""Callbacks whose arguments had other names, another order or other defaults in Lightning 1.1."""

from __future__ import annotations

import os
from typing import Any

import drivetrain.callbacks
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.v1_3 import _callbacks as later


class ModelCheckpoint(later.ModelCheckpoint):
    """drivetrain's ModelCheckpoint, which also accepts ``filepath``, ``prefix``, ``period`` and ``mode="auto"``.

    Args:
        filepath: folder and name of the files, now ``dirpath`` and ``filename``.
        monitor, verbose, save_last, save_top_k, save_weights_only, dirpath, filename: as for drivetrain's class.
        mode: "auto": "max" if ``monitor`` contains "acc" or begins with "fmeasure"; otherwise "min".
        period: now ``every_n_epochs``.
        prefix: the beginning of the files' names.
        kwargs: further arguments of drivetrain's ModelCheckpoint.
    """

    watched_by_default = ("val_loss", "checkpoint_on")

    def __init__(
        self,
        filepath: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int | None = None,
        save_weights_only: bool = False,
        mode: str = "auto",
        period: int = 1,
        prefix: str = "",
        dirpath: Any = None,
        filename: str | None = None,
        **kwargs: Any,
    ) -> None:
        if filepath is not None:
            folder, name = (filepath, None) if os.path.isdir(filepath) else os.path.split(filepath)
            dirpath, filename = folder or dirpath, name or filename
            today = f"dirpath={str(dirpath)!r}, filename={filename!r}"
            warn_deprecated(f"ModelCheckpoint(filepath={str(filepath)!r})", today)
        if prefix:
            filename = f"{prefix}-{filename or '{epoch}-{step}'}"
        super().__init__(
            dirpath, filename, monitor, verbose, save_last, save_top_k, save_weights_only, mode_for(mode, monitor),
            period=None if period == 1 else period, **kwargs,
        )  # fmt: skip


class EarlyStopping(drivetrain.callbacks.EarlyStopping):
    """drivetrain's EarlyStopping, which monitors "early_stop_on" by default and supports ``mode="auto"``.

    Args: as for drivetrain's class.
    """

    def __init__(
        self, monitor: str = "early_stop_on", min_delta: float = 0.0, patience: int = 3, verbose: bool = False,
        mode: str = "auto", strict: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(monitor, min_delta, patience, verbose, mode_for(mode, monitor), strict, **kwargs)


def mode_for(mode: str, monitor: str | None) -> str:
    """Return "min" or "max". For "auto", the name of the monitored value decides."""
    if mode != "auto":
        return mode
    return "max" if monitor and ("acc" in monitor or monitor.startswith("fmeasure")) else "min"
