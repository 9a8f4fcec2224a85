"""The contract of a checkpoint store."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.registry import Registry, names_itself
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.checkpoints.background import AsyncCheckpointIO

with on_first_use:
    from drivetrain.base import remote


class FileAnswers:
    """The methods of a store that find, copy and wait for checkpoints, in local files or at fsspec addresses.

    A store that keeps checkpoints elsewhere overrides some of these methods.
    """

    if TYPE_CHECKING:  # the store defines these methods
        save_checkpoint: Any
        load_checkpoint: Any

    # ---- existing checkpoints ------------------------------------------------------------------------------------

    def written_at(self, path: str | Path) -> float | None:
        """Return the time at which the checkpoint at ``path`` was written, in seconds; ``None`` without a checkpoint.
        The times are only compared with each other, so a store can use any clock.

        Raises:
            CheckpointError: the server of an address cannot be reached.
        """
        if is_address(path):
            with unreachable(path):
                return remote.written_at(path)
        try:
            return os.path.getmtime(path)
        except (OSError, ValueError):
            return None

    def touch(self, path: str | Path) -> None:
        """Set the time of the checkpoint at ``path`` to now, so that it counts as the newest."""
        wait_for(self, path)
        try:
            files.touch(path)
        except OSError:  # this store keeps the checkpoint elsewhere
            self.save_checkpoint(self.load_checkpoint(path), path)

    def exists(self, path: str | Path) -> bool:
        """Return whether there is a checkpoint at ``path``."""
        return self.written_at(path) is not None

    def find(self, folder: str | Path, pattern: str) -> list[str]:
        """Return the paths in ``folder`` with a name that matches ``pattern``, such as ``"*.ckpt"``, in any order.

        Raises:
            CheckpointError: the server of an address cannot be reached.
        """
        if is_address(folder):
            with unreachable(folder):
                return remote.find(folder, pattern)
        return [str(path) for path in Path(folder).glob(pattern)]

    def is_complete(self, path: str | Path) -> bool:
        """Return whether the checkpoint at ``path`` can be read. The method reads the complete checkpoint."""
        try:
            self.load_checkpoint(path)
        except Exception:
            return False
        return True

    def copy(self, source: str | Path, path: str | Path, link: bool = False, replaces: bool = True) -> bool:
        """Wait until the checkpoint ``source`` is durable, and copy it to ``path``. ``path`` never contains a partial
        copy.

        Args:
            source: a checkpoint. The store may still be writing this checkpoint.
            path: the target.
            link: make a relative symbolic link instead, if the file system supports links. Addresses have no links.
            replaces: whether another checkpoint at ``path`` may be replaced.

        Returns:
            False if ``replaces`` is False and there is a checkpoint at ``path``; otherwise True.

        Raises:
            CheckpointError: the checkpoint could not be copied. The previous checkpoint at ``path`` is unchanged.
        """
        wait_for(self, source)
        is_remote = is_address(source) or is_address(path)
        if not is_remote and not os.path.exists(source):  # this store keeps the checkpoint elsewhere
            if not replaces and self.exists(path):
                return False
            self.save_checkpoint(self.load_checkpoint(source), path)
            return True
        link = link and not is_remote
        try:
            return self._copied(source, path, link, replaces)
        except OSError as error:
            cure = "Check that this process may write there" if is_remote else "Move it away"
            raise CheckpointError(
                f"{path} could not become a {'link to' if link else 'copy of'} {source}: "
                f"{error if is_remote else files.reason(error, Path(path))}. What was there before is untouched. "
                f"{cure}{', or write save_last=True' if link else ''}."
            ) from error

    def _copied(self, source: str | Path, path: str | Path, link: bool, replaces: bool) -> bool:
        return files.link(source, path, replaces) if link else files.copy(source, path, replaces)

    def link_target(self, path: str | Path) -> str | None:
        """Return the target of the symbolic link ``path``; ``None`` if ``path`` is not a link. The target need not
        exist.
        """
        if files.is_remote(path):
            return None
        return os.readlink(path) if os.path.islink(path) else None

    def resolve(self, path: str | Path) -> str:
        """Return the path of a checkpoint or folder with links and ``..`` resolved."""
        return files.resolved(path)

    # ---- durability ----------------------------------------------------------------------------------------------

    def is_durable(self, path: str | Path) -> bool:
        """Return False while ``path`` is being written. After a failure, return False until the error is raised."""
        return True

    def wait(self, path: str | Path | None = None) -> None:
        """Wait until the checkpoint at ``path`` is written; ``None`` waits for all checkpoints.

        Raises:
            CheckpointError: a checkpoint could not be written. The message names the file. Each failure is raised only
                once.
        """


class CheckpointIO(FileAnswers, ABC):
    """Stores checkpoints under paths: writes, reads and removes them.

    A subclass defines :meth:`save_checkpoint`, :meth:`load_checkpoint` and :meth:`remove_checkpoint`. The Trainer and
    its callbacks access checkpoints only through a store, and also call the methods of :class:`FileAnswers`. These
    methods work for local files and for addresses that fsspec supports, such as ``s3://bucket/run``. The methods assume
    that a checkpoint is durable when :meth:`save_checkpoint` returns. A store that keeps checkpoints elsewhere
    overrides ``written_at`` and ``find``. A store that writes in the background overrides ``is_durable`` and ``wait``.
    Only rank 0 saves, copies and removes checkpoints.
    """

    @classmethod
    def register_checkpoint_ios(cls, checkpoint_registry: Registry[CheckpointIO]) -> None:
        """Register the class under its names: ``checkpoint_registry.register("name", cls, description="...")``.

        The ``class`` statement of a subclass calls this method, if the subclass defines it.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_itself(cls, "register_checkpoint_ios", CheckpointRegistry)

    @abstractmethod
    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``, or start to write. When the checkpoint is written, ``is_durable`` returns
        True. Until then, :meth:`load_checkpoint` and ``written_at`` refer to the previous checkpoint at ``path``.
        Training changes the tensors of ``checkpoint`` in place, so this method must copy the tensors if the store
        writes later.

        Raises:
            CheckpointError: the checkpoint could not be written. The previous checkpoint at ``path`` is complete.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``.

        Args:
            path: the checkpoint's name in this store.
            map_location: the device for the tensors, as for ``torch.load``.
            weights_only: ``None`` or True: plain data only. False: all objects. The file can then run code.

        Raises:
            CheckpointError: the checkpoint does not exist, is damaged, or contains objects that only
                ``weights_only=False`` reads.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the checkpoint at ``path``, if it exists."""

    def is_sharded(self, path: str | Path) -> bool:
        """Return whether ``path`` is a folder with a sharded checkpoint (see ``checkpoints/sharded.py``). For a sharded
        checkpoint, the FSDP strategy does not call :meth:`load_checkpoint`, because each rank reads its own shards.
        """
        return False

    @contextlib.contextmanager
    def new_files(self) -> Iterator[list[str]]:
        """Return a context in which this thread replaces no existing checkpoint. The context yields a list. If a file
        already exists at a path, the store writes nothing and adds the path to the list. If the store cannot detect
        existing files, the list stays empty.
        """
        yield []

    def was_refused(self, path: str | Path) -> bool:
        """Return whether ``path`` is in the list of this thread's :meth:`new_files` context."""
        return False

    def teardown(self) -> None:
        """Free threads and connections at the end of a run. Called after :meth:`wait`. A later run may use the store
        again.
        """


CheckpointRegistry: Registry[CheckpointIO] = Registry("drivetrain.checkpoints", "io", "checkpoint store", by_file=False)
"""The checkpoint stores by name: the stores of drivetrain, of users, and of installed packages."""


def wait_for(store: FileAnswers, path: str | Path) -> None:
    """Call ``store.wait(path)``. Turn any exception into a CheckpointError that names the file.

    Raises:
        CheckpointError: the checkpoint could not be written.
    """
    try:
        store.wait(path)
    except Exception as error:
        if isinstance(error, CheckpointError) and str(path) in str(error):
            raise
        raise CheckpointError(
            f"The checkpoint {path} was not written: {error}. Checkpoints that were written before it are unchanged."
        ) from error


def reading(weights_only: bool | None) -> dict[str, Any]:
    """Return ``weights_only`` as keyword arguments of ``load_checkpoint``. For ``None``, return no arguments, because a
    user's method may lack this parameter.
    """
    return {} if weights_only is None else {"weights_only": weights_only}


def background_of(store: FileAnswers) -> AsyncCheckpointIO | None:
    """Return ``store`` if it is an AsyncCheckpointIO; otherwise ``None``."""
    # a program that uses the class has imported its module
    module = sys.modules.get("drivetrain.checkpoints.background")
    return store if module is not None and isinstance(store, module.AsyncCheckpointIO) else None


def is_address(path: str | Path) -> bool:
    """Return whether ``path`` is an address with a protocol that fsspec supports, such as ``s3://bucket/run``."""
    return files.is_remote(path) and remote.is_known(path)


@contextlib.contextmanager
def unreachable(path: str | Path) -> Iterator[None]:
    """Return a context that turns an OSError of the server of an address into a CheckpointError.

    Raises:
        CheckpointError: the request fails. If an unreachable server counted as "no checkpoint", the training would
            start from the beginning.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{error}. Check the address, the credentials and the connection, or use a local path."
        ) from error


def newest_first(store: CheckpointIO, paths: Iterable[str]) -> list[str]:
    """Sort ``paths`` so that the newest checkpoint comes first, and paths without a checkpoint last. Object stores
    record times in whole seconds, so times can be equal. Then the function compares the names, with numbers as numbers.
    For example, "last-v1" comes before "last", and "epoch=10" before "epoch=9".
    """
    times = {path: store.written_at(path) for path in paths}

    def order(path: str) -> tuple[float, list[tuple[int, str]]]:
        time, parts = times[path], re.findall(r"(\d+)|(\D+)", os.path.splitext(path)[0])
        return -math.inf if time is None else time, [(int(number or -1), text) for number, text in parts]

    return sorted(times, key=order, reverse=True)
