"""The contract of a checkpoint store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CheckpointIO(ABC):
    """Writes, reads and removes one checkpoint. It decides where the bytes go, never what they mean."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; when this returns, the checkpoint is durable.

        Raises:
            CheckpointError: it could not be written; what lay at ``path`` before is still there, whole.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at ``path``.

        Args:
            path: where it lies.
            map_location: where its tensors are read to, as for ``torch.load``.
            weights_only: ``None`` or True: plain data only. False: everything, which runs what code the file brings.

        Raises:
            CheckpointError: there is none, it is damaged, or it holds what may not be read.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the checkpoint at ``path``; one that is not there is no error."""
