"""Lightning's ``fabric.loggers``: drivetrain's loggers with Fabric's signatures, such as ``CSVLogger(root_dir=...)``.

The class names begin with "Fabric", because ``CSVLogger`` on a command line must mean
:class:`drivetrain.loggers.CSVLogger`.
"""

from __future__ import annotations

import os
from typing import Any

from drivetrain.base.introspect import reads
from drivetrain.loggers import csv, tensorboard
from drivetrain.loggers._folder import FolderLogger


class _RootDir(FolderLogger):
    root_dir = reads("save_dir", "The root folder that was passed; runs are in its subfolder ``name``.")

    @property
    def _runs_dir(self) -> str:
        return FolderLogger.root_dir.fget(self)  # type: ignore[attr-defined]  # it is a property


class FabricCSVLogger(_RootDir, csv.CSVLogger):
    """:class:`drivetrain.loggers.CSVLogger`, whose first argument is called ``root_dir``."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)


class FabricTensorBoardLogger(_RootDir, tensorboard.TensorBoardLogger):
    """:class:`drivetrain.loggers.TensorBoardLogger`, whose first argument is called ``root_dir``."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        # Fabric's programs call log_graph() themselves, which does nothing if this is False.
        log_graph = kwargs.pop("log_graph", True)
        super().__init__(root_dir, name, version, log_graph, default_hp_metric, prefix, sub_dir, **kwargs)
