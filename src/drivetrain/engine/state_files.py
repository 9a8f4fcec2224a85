"""The part of an Engine that saves a program's state to a file, and loads it from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.checkpoints.io import wait_for
from drivetrain.engine.ranks import Ranks

if TYPE_CHECKING:
    from drivetrain.engine.verbs import Verbs


class StateFiles(Ranks):
    """The methods of an Engine that write and read checkpoints."""

    _verbs: Verbs

    def save(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write ``state`` to ``path``, atomically and durably. Every process must call this method.

        A CheckpointIO may write in the background. If so, :meth:`load` and :meth:`teardown` wait until the file is
        complete.

        Args:
            path: the file.
            state: a dictionary with modules, optimizers, other objects with ``state_dict``, and plain data.
            filter: a dictionary from names in ``state`` to functions ``(key, value) -> bool``. The function is called
                for each entry of the named state dict, and returns whether to save the entry.

        Raises:
            CheckpointError: the file could not be written, or an entry is not plain data. No file on disk has changed.
            ConfigurationError: ``filter`` has a name that is not in ``state``, or a name whose state is not a
                dictionary.
        """
        self._verbs.save(path, state, filter or {})
        self.barrier("Engine.save")

    def load(
        self,
        path: str | Path,
        state: Mapping[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file that :meth:`save` has written, and restore the objects in ``state``.

        Args:
            path: the file.
            state: a dictionary with modules, optimizers and other objects with ``load_state_dict``, which are restored
                in place. Any other value is replaced by the value in the file. ``None``: no object is restored.
            strict: whether the file must contain every name of ``state``, and every parameter of its modules.
            weights_only: ``None`` or True: only plain data is read. False: the complete file is unpickled, which can
                run code. Write False only for files that you trust.

        Returns:
            The entries of the file that are not in ``state``.

        Raises:
            CheckpointError: the file does not exist, is damaged, or does not fit. No object was restored.
        """
        self._wait_for(path)
        return self._verbs.load(path, state, strict, weights_only)

    def load_raw(
        self,
        path: str | Path,
        obj: nn.Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load a plain state dict into ``obj``, such as a file that ``torch.save(model.state_dict(), path)`` has
        written.

        Args:
            path: the file.
            obj: a module or an optimizer.
            strict: whether the file must contain every parameter of the module.
            weights_only: as in :meth:`load`.
        """
        self._wait_for(path)
        self._verbs.load_raw(path, obj, strict, weights_only)

    def _wait_for(self, path: str | Path) -> None:
        """Wait until rank 0 has finished writing ``path``."""
        wait_for(self.strategy.checkpoint_io, path)
        self.barrier("Engine.load")
