"""LightningDataModule: where the data of a run comes from, apart from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.hooks import DataHooks

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class LightningDataModule(DataHooks):
    """Downloads, splits and loads data; one object that any module can be trained on.

    Override what you need: ``prepare_data`` (one process), ``setup`` (every process), the loaders, the transfer
    hooks, ``teardown``. A loader or transfer hook defined here wins over the module's.
    """

    name: str | None = None

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of the data module."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """The run ends by ``exception``."""
