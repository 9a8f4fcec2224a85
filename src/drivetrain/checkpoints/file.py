"""One checkpoint, one local file, written so that a crash at any moment leaves a whole one behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain import parity
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.errors import CheckpointError

# What zipfile and torch raise on a container whose own fields are damaged.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, KeyError)
# What pickle raises on an object that it cannot write, or whose class it does not find.
_UNPICKLABLE = (pickle.PickleError, AttributeError, TypeError, ImportError)


class TorchCheckpointIO(CheckpointIO):
    """A file that ``torch.load(path, weights_only=True)`` reads.

    Written to a temporary name beside the target, fsynced, renamed over it, and the directory fsynced: a reader sees
    the old file or the new one, never a part. On load the CRC-32 that the zip container keeps for each record is
    checked, because torch accepts flipped bits in silence.

    Only plain data is read. What a checkpoint of another trainer holds besides is left out with a warning (trap T27).
    torch's older format, which has no checksums, is read too. With ``weights_only=False`` anything is: that unpickles
    objects, and a file can bring code that runs then. Do it with your own files only. ``parity.current().pickle`` makes
    that the default for what is no plain data.
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                f"TorchCheckpointIO writes local files and takes no storage_options, got {storage_options!r}. "
                "Leave them out, or pass a CheckpointIO of your own in Trainer(plugins=[...])."
            )
        target = Path(path)
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.part"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as stream:  # "x": never through a file or link that somebody put there
                torch.save(dict(checkpoint), stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        except _UNPICKLABLE as error:
            raise CheckpointError(
                f"The checkpoint {target} was not written, because an object in it cannot be pickled: {error}. "
                "Leave that object out of the state."
            ) from error
        except (OSError, RuntimeError) as error:  # torch's writer hides the first behind the second
            raise CheckpointError(
                f"The checkpoint {target} could not be written: {error}. What was there before is untouched. "
                "Free some space or choose another default_root_dir."
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                temporary.unlink()
        _fsync_directory(target.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        source = Path(path)
        if not source.is_file():
            raise CheckpointError(f"There is no checkpoint at {source}. Check the path.")
        from drivetrain.checkpoints.foreign import is_legacy, read_foreign  # only where something is read

        if not is_legacy(source):
            _verify(source)
        try:
            loaded: dict[str, Any] = torch.load(
                source, map_location=map_location, weights_only=weights_only is not False
            )
        except _UNPICKLABLE as error:
            if weights_only is False:
                raise CheckpointError(
                    f"{source} holds an object that cannot be unpickled: {error}. Use the code that it was saved with."
                ) from error
            if weights_only is None and parity.current().pickle:
                return self.load_checkpoint(path, map_location, weights_only=False)
            if (foreign := read_foreign(source, map_location)) is not None:
                return foreign
            raise CheckpointError(
                f"{source} holds objects that are no plain data, and unpickling them could run code: {_reason(error)}. "
                "If you trust whoever wrote it, pass weights_only=False."
            ) from error
        except _UNREADABLE as error:
            raise CheckpointError(f"{source} is no checkpoint ({error}). Use another one.") from error
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def _reason(error: BaseException) -> str:
    """The one sentence in torch's page of advice that names the object."""
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    named = next((line for line in lines if line.startswith("WeightsUnpickler error:") or "GLOBAL" in line), lines[0])
    return named.removeprefix("WeightsUnpickler error:").strip().split(". ")[0].removesuffix(".")


def _verify(source: Path) -> None:
    """Check the CRC-32 of each record.

    Raises:
        CheckpointError: one is wrong, or the file is no container.
    """
    try:
        with zipfile.ZipFile(source) as container:
            damaged = container.testzip()
    except _UNREADABLE as error:
        raise CheckpointError(f"{source} is no checkpoint, or was cut short ({error}). Use another one.") from error
    if damaged is not None:
        raise CheckpointError(f"{source} is damaged: the checksum of {damaged!r} is wrong. Use another one.")


def _fsync_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable; Windows cannot open a directory and needs no such call."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
