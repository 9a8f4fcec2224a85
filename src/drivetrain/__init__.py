"""drivetrain: one PyTorch training program, whatever drives it.

``import drivetrain as dt``. The public names below are imported when they are first used, so importing the package
costs next to nothing; everything else lives where users of the field look for it: ``drivetrain.callbacks``,
``drivetrain.loggers``, ``drivetrain.accelerators``, ``drivetrain.strategies``, ``drivetrain.plugins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.callback import Callback as Callback
    from drivetrain.datamodule import LightningDataModule as LightningDataModule
    from drivetrain.engine import Engine as Engine
    from drivetrain.losses import WeightedLoss as WeightedLoss
    from drivetrain.module import LightningModule as LightningModule
    from drivetrain.seed import seed_everything as seed_everything
    from drivetrain.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PUBLIC = {
    "Callback": "callback",
    "Engine": "engine",
    "LightningDataModule": "datamodule",
    "LightningModule": "module",
    "Trainer": "trainer",
    "WeightedLoss": "losses",
    "seed_everything": "seed",
}
__all__ = [
    "Callback", "Engine", "LightningDataModule", "LightningModule", "Trainer", "WeightedLoss", "seed_everything",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
