"""Write and read a checkpoint as one file, atomically and durably, with checksums."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from drivetrain import parity
from drivetrain.base import files
from drivetrain.base.introspect import overrides
from drivetrain.base.lazy import on_first_use
from drivetrain.base.registry import Registry
from drivetrain.base.tree import map_leaves
from drivetrain.checkpoints.io import CheckpointIO, background_of, is_address, unreachable
from drivetrain.errors import (
    CheckpointError,
    CheckpointNameError,
    ConfigurationError,
    NoCheckpointError,
    RunError,
    described,
)

with on_first_use:
    from drivetrain.base import remote
    from drivetrain.checkpoints import container, foreign, sharded

R = TypeVar("R")

# Exceptions of pickle: an object cannot be written, or an object's class is not found.
_UNPICKLABLE = (pickle.PickleError, AttributeError, TypeError, ImportError)
_CURES = {
    errno.EISDIR: "Move the folder away, or save under another name.",
    errno.EINVAL: "Save under another name.",
    errno.EFBIG: "Raise the limit of the size of files (ulimit -f), or choose a file system that takes larger ones.",
}

EMPTY_PATH = (
    "The path is empty. If it is the best_model_path of a ModelCheckpoint, that callback has saved nothing yet. Pass "
    "the path of a file."
)
"""The advice in an error message about an empty path."""

# In a context of new_files(): the list of paths at which a file already existed and was not replaced. Each thread has
# its own list.
_refused: ContextVar[list[str] | None] = ContextVar("refused", default=None)


class TorchCheckpointIO(CheckpointIO):
    """Stores a checkpoint as a file that ``torch.load(path, weights_only=True)`` reads, at a path or an address.

    The file is written under a temporary name in the same folder, fsynced and renamed, and the folder is fsynced. So a
    reader sees the complete old file or the complete new file. For an address, the file is written on this machine and
    then uploaded as one object (see :mod:`drivetrain.base.remote`). Loading checks the CRC-32 of each record in the zip
    container, because torch silently accepts flipped bits.

    By default, only plain data is read. If another trainer wrote the checkpoint, all objects that are not plain data
    are left out, with a warning. Files from torch before 1.6 are read, too, but have no checksums. With
    ``weights_only=False``, all objects are unpickled. Unpickling can run code from the file, so use
    ``weights_only=False`` only for your own files. If ``parity.current().pickle`` is true, ``weights_only=False`` is
    the default for files with other objects than plain data.
    """

    @classmethod
    def register_checkpoint_ios(cls, checkpoint_registry: Registry[CheckpointIO]) -> None:
        checkpoint_registry.register("file", cls)

    @contextlib.contextmanager
    def new_files(self) -> Iterator[list[str]]:
        refused: list[str] = []
        token = _refused.set(refused)
        try:
            yield refused
        finally:
            _refused.reset(token)

    def is_sharded(self, path: str | Path) -> bool:
        if not is_address(path) and not os.path.isdir(path):
            return False

        if not files.is_remote(path):
            return sharded.is_begun(path)
        with unreachable(path):
            return sharded.is_checkpoint(path)

    def was_refused(self, path: str | Path) -> bool:
        refused = refused_here()
        return refused is not None and str(path) in refused

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                f"TorchCheckpointIO writes local files and takes no storage_options, got {storage_options!r}. "
                "Leave them out, or pass a CheckpointIO of your own in Trainer(plugins=[...])."
            )
        save(checkpoint, path, _write)

    def load_checkpoint(
        self, path: str | Path | IO[bytes], map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``. ``path`` may also be an open binary file.

        Raises:
            CheckpointError: the file does not exist, is damaged, or contains objects that only ``weights_only=False``
                reads.
            ConfigurationError: ``path`` is an open file that cannot be read as bytes.
        """
        if not files.is_remote(path):
            return self._load(opened(path), name_of(path), map_location, weights_only)
        address = name_of(path)
        with self._fetched(address) as local:
            return self._load(local, address, map_location, weights_only)

    def _load(
        self, source: Path | IO[bytes], name: str, map_location: Any, weights_only: bool | None
    ) -> dict[str, Any]:
        if isinstance(source, Path) and self.is_sharded(source):
            return move_to(sharded.read(source), map_location)
        # unlike Path.is_file, os.path.isfile raises no error for an impossible name
        if isinstance(source, Path) and not os.path.isfile(source):
            if not name:
                raise NoCheckpointError(f"There is no checkpoint at ''. {EMPTY_PATH}")
            if os.path.isdir(source):
                raise CheckpointNameError(f"{name} is a folder, and a checkpoint is a file. Pass the path of a file.")
            raise NoCheckpointError(f"There is no checkpoint at {name}. Check the path. [DT1031]")

        if not foreign.is_legacy(source):
            check_records(source, name)
        try:
            loaded: dict[str, Any] = torch.load(
                rewound(source), map_location=map_location, weights_only=weights_only is not False
            )
        except _UNPICKLABLE as error:
            if weights_only is False:
                raise CheckpointError(
                    f"{name} holds an object that cannot be unpickled: {error}. Use the code that it was saved with."
                ) from error
            if weights_only is None and parity.current().pickle:
                return self._load(source, name, map_location, weights_only=False)
            if (objects := foreign.read_foreign(rewound(source), name, map_location)) is not None:
                return objects
            raise CheckpointError(
                f"{name} holds objects that are no plain data, and unpickling them could run code: {_reason(error)}. "
                "If you trust whoever wrote it, pass weights_only=False. [DT1035]"
            ) from error
        except Exception as error:  # torch may raise anything on a malformed file
            _check_location(map_location, name)
            raise CheckpointError(f"{name} is no checkpoint ({error}). Use another one.") from error
        return loaded

    @contextlib.contextmanager
    def _fetched(self, address: str) -> Iterator[Path]:
        """Return a context that yields a local copy of the checkpoint at ``address``.

        Raises:
            CheckpointError: the checkpoint does not exist, or the server cannot be reached.
        """
        with unreachable(address), contextlib.ExitStack() as stack:
            if self.is_sharded(address):
                yield stack.enter_context(sharded.fetched(files.absolute(address)))
                return
            try:
                local = stack.enter_context(remote.fetched(address))
            except FileNotFoundError:
                raise NoCheckpointError(f"There is no checkpoint at {address}. Check the address.") from None
            except IsADirectoryError:
                raise CheckpointError(f"{address} is a folder without a complete checkpoint. Check it.") from None
            yield local

    def remove_checkpoint(self, path: str | Path) -> None:
        is_remote = is_address(path)
        try:
            if self.is_sharded(path) if is_remote else os.path.isdir(path) and not os.path.islink(path):
                sharded.remove(sharded.place(path))
            else:
                files.remove(path)
        except OSError as error:
            why = error if is_remote else files.reason(error, Path(path))
            cure = "Check the address, the credentials and the connection" if is_remote else "Check its folder"
            raise CheckpointError(f"The checkpoint {path} could not be removed: {why}. {cure}.") from error

    def written_at(self, path: str | Path) -> float | None:
        manifest = os.path.join(path, "manifest.json")
        if files.is_remote(path):
            return found if (found := super().written_at(path)) is not None else super().written_at(manifest)
        return super().written_at(manifest if os.path.isfile(manifest) else path)

    def touch(self, path: str | Path) -> None:
        if self.is_sharded(path):
            files.touch(os.path.join(path, "manifest.json"))
        else:
            super().touch(path)

    def _copied(self, source: str | Path, path: str | Path, link: bool, replaces: bool) -> bool:
        if link or not self.is_sharded(source):
            return super()._copied(source, path, link, replaces)
        return sharded.copy(sharded.place(source), sharded.place(path), replaces)

    def is_complete(self, path: str | Path) -> bool:
        try:
            if self.is_sharded(path):
                sharded.verify(sharded.place(path))
            else:
                with self._fetched(str(path)) if files.is_remote(path) else contextlib.nullcontext(Path(path)) as local:
                    check_records(local, str(path))
        except CheckpointError:
            return False
        return True


def save(
    checkpoint: Mapping[str, Any], path: str | Path, write: Callable[[dict[str, Any], Path | str, bool], R]
) -> R | None:
    """Call ``write`` to write ``checkpoint`` to ``path``, and return the result. The arguments of ``write`` are the
    checkpoint's content, the file or address, and whether an existing file must stay.

    Raises:
        CheckpointError: the file could not be written. The previous file at ``path`` is complete.
        ConfigurationError: ``path`` cannot be a file name.
    """
    target, refused = _target(path), _refused.get()
    if isinstance(target, Path):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritten(target, files.reason(error, target), "Choose another default_root_dir.") from error
    try:
        return write(dict(checkpoint), target, refused is not None)
    except FileExistsError:
        if refused is None:
            raise
        refused.append(str(path))
    except _UNPICKLABLE as error:
        raise CheckpointError(
            f"The checkpoint {target} was not written, because an object in it cannot be pickled: {error}. "
            "Leave that object out of the state."
        ) from error
    except (OSError, RuntimeError) as error:
        number, why = getattr(error, "errno", None) or 0, getattr(error, "strerror", None) or str(error)
        cure = cure_of(number)
        # a file for an address is first written to the temporary folder, which may be full
        if files.is_remote(target):
            cure = "Check the address, the credentials and the connection."
            if number == errno.ENOSPC:
                cure = "Free some space, or set the variable TMPDIR to a folder with more."
        raise _unwritten(target, why, cure) from error
    return None


def cure_of(number: int | None) -> str:
    """Return the advice for an error message about this errno of a local file system."""
    return _CURES.get(number or 0, "Free some space or choose another default_root_dir.")


def _write(checkpoint: dict[str, Any], target: Path | str, new: bool) -> None:
    with files.replacing(target, durable=True, new=new) as stream:
        container.write(checkpoint, stream)


def entries(path: str | Path) -> dict[str, Any]:
    """Return the entries of the local checkpoint at ``path``. Each tensor is read from disk when it is first used.

    The function checks the sizes of files, but no checksums. If the checkpoint contains other objects than plain data,
    torch's error is raised.
    """
    if os.path.isdir(path):
        return sharded.read(sharded.place(path), lazy=("",))
    return torch.load(files.spelled(path), map_location="cpu", mmap=True, weights_only=True)


def writes_files(store: CheckpointIO) -> bool:
    """Return whether ``store`` writes the files and folders of :class:`TorchCheckpointIO`."""
    return _keeps_method(store, "save_checkpoint")


def reads_files(store: CheckpointIO) -> bool:
    """Return whether ``store`` loads checkpoints in the format of :class:`TorchCheckpointIO`. :func:`entries` can read
    only these checkpoints.
    """
    return _keeps_method(store, "load_checkpoint")


def _keeps_method(store: CheckpointIO, name: str) -> bool:
    """Return whether ``store`` is a :class:`TorchCheckpointIO` that does not override the method ``name``. For a store
    that writes in the background, check the inner store.
    """
    if (background := background_of(store)) is not None:
        store = background.checkpoint_io
    return isinstance(store, TorchCheckpointIO) and not overrides(store, name, TorchCheckpointIO)


def refused_here() -> list[str] | None:
    """Return the list of this thread's :meth:`TorchCheckpointIO.new_files` context; ``None`` outside a context."""
    return _refused.get()


def move_to(tree: Any, location: Any) -> Any:
    """Move the tensors of ``tree`` to ``location``, a value of ``map_location``. If ``location`` is not a device, do
    nothing.
    """
    if not isinstance(location, (str, torch.device)) or torch.device(location).type == "cpu":
        return tree
    return map_leaves(lambda leaf: leaf.to(location) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _check_location(location: Any, name: str) -> None:
    """Check that this process can use the device ``location``. Called if a file could not be read.

    Raises:
        ConfigurationError: this process cannot create tensors on the device, so the file may be undamaged.
    """
    if not isinstance(location, (str, torch.device)):
        return
    try:
        torch.empty(0, device=location)
    except (RuntimeError, AssertionError, ValueError) as error:  # AssertionError: this torch was built without CUDA
        raise RunError(
            f"{name} cannot be read to map_location={str(location)!r}, a device that this process cannot use "
            f'({str(error).partition(chr(10))[0].rstrip(".")}). Write map_location="cpu".'
        ) from error


def _reason(error: BaseException) -> str:
    """Return the sentence in torch's long error message that names the unreadable object."""
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    named = next((line for line in lines if line.startswith("WeightsUnpickler error:") or "GLOBAL" in line), lines[0])
    return named.removeprefix("WeightsUnpickler error:").strip().split(". ")[0].removesuffix(".")


def _target(path: str | Path) -> Path | str:
    """Return the file for ``path``, with ``~`` as the home folder. Return an address as text.

    Raises:
        ConfigurationError: ``path`` cannot be a file name.
    """
    if isinstance(path, (str, os.PathLike)) and isinstance(name := os.fspath(path), str):
        if files.is_remote(name):
            remote.check_writable(name)
            return name
        name = files.spelled(name)
        with contextlib.suppress(UnicodeEncodeError):
            if "\0" not in name and os.fsencode(name) and Path(name).name:
                return Path(name)
    raise ConfigurationError(
        f"A checkpoint is saved under a path, not under {path!a}. Pass the name of a file, such as "
        '"checkpoints/model.ckpt".'
    )


def _unwritten(target: Path | str, why: str, cure: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {target} could not be written: {why}. What was there before is untouched. {cure} [DT1041]"
    )


def name_of(path: str | Path | IO[bytes]) -> str:
    """Return the path, or the name or class of an open file, for messages."""
    if isinstance(path, (str, os.PathLike)):
        return os.fspath(path)
    name = getattr(path, "name", None)
    return name if isinstance(name, str) and name else f"the open file ({type(path).__name__})"


def opened(path: str | Path | IO[bytes]) -> Path | IO[bytes]:
    """Return ``path`` as a ``Path``, or as an open file that begins with the checkpoint.

    Raises:
        ConfigurationError: ``path`` is neither a path nor a readable file.
    """
    if isinstance(path, (str, os.PathLike)):
        return Path(files.spelled(path))
    if not (callable(getattr(path, "read", None)) and callable(getattr(path, "seek", None))):
        raise ConfigurationError(
            f"A checkpoint is read from a path or an open binary file, not from {described(path)}. Pass its path."
        )
    try:
        start, nothing = path.tell(), path.read(0)
    except (OSError, ValueError) as error:  # a pipe, a closed file, or a file that is open only for writing
        raise ConfigurationError(
            f"The open file {name_of(path)} cannot be read from any place in it ({error}). Pass its path, or open it "
            'with open(path, "rb").'
        ) from error
    if not isinstance(nothing, bytes):
        raise ConfigurationError(f'{name_of(path)} is open as text. Open it with open(path, "rb").')
    return io.BytesIO(path.read()) if start else path


def rewound(source: Path | IO[bytes]) -> Path | IO[bytes]:
    """Rewind ``source`` to its beginning, and return ``source``."""
    if not isinstance(source, Path):
        source.seek(0)
    return source


def check_records(source: Path | IO[bytes], name: str) -> None:
    """Check the CRC-32 of each record in a file from ``torch.save``. ``name`` is the file's name for messages.

    Raises:
        CheckpointError: a checksum is wrong, or the file is not a zip container.
    """
    try:
        with zipfile.ZipFile(rewound(source)) as container:
            damaged = container.testzip()
    except Exception as error:  # for a damaged container, zipfile may raise anything
        raise CheckpointError(
            f"{name} is no checkpoint, or was cut short ({error}). Use another one. [DT1034]"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{name} is damaged: the checksum of {damaged!r} is wrong. Use another one. [DT1034]")
