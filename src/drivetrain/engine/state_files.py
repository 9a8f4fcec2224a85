"""The part of an Engine that saves the state of a program to files, and loads it."""

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
        """Write ``state`` to ``path``, atomically and durably; every process must call it.

        With a CheckpointIO that writes in the background, :meth:`load` and :meth:`teardown` wait until it is durable.

        Args:
            path: the file.
            state: modules, optimizers, anything with ``state_dict``, and plain data, each under a name.
            filter: per name, ``(key, value) -> keep`` over that entry's state dict.

        Raises:
            CheckpointError: it could not be written, or an entry is no plain data; nothing was changed on disk.
            ConfigurationError: ``filter`` names what is not in ``state``, or filters what is no dictionary.
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
        """Read a file that :meth:`save` wrote, into the objects of ``state``.

        Args:
            path: the file.
            state: modules, optimizers and other stateful objects, which take their state back in place; any other
                entry is replaced in the dictionary by what the file holds. ``None``: nothing is restored.
            strict: the file must hold every name of ``state``, and modules every one of their parameters.
            weights_only: ``None`` or True: only plain data is read. False: everything is unpickled, which can run
                code; use it only for files that you trust.

        Returns:
            What the file holds besides.

        Raises:
            CheckpointError: there is no such file, it is damaged, or it does not fit; nothing was restored then.
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
        """Read a bare state dict, as ``torch.save(model.state_dict(), path)`` writes it, into ``obj``.

        Args:
            path: the file.
            obj: a module or an optimizer.
            strict: the file must hold every parameter of a module.
            weights_only: as for :meth:`load`.
        """
        self._wait_for(path)
        self._verbs.load_raw(path, obj, strict, weights_only)

    def _wait_for(self, path: str | Path) -> None:
        """Wait until rank 0 has written what it has saved at ``path``."""
        wait_for(self.strategy.checkpoint_io, path)
        self.barrier("Engine.load")
