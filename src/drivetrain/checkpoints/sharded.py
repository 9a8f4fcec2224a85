"""Write and read a sharded checkpoint: a folder into which each process writes its shards of the tensors.

::

    model.ckpt/
      manifest.json             the files with their sizes and checksums, and where each part of each tensor is
      3f9a1c20.state.json       everything except the tensors
      3f9a1c20.rank0.bin        tensors, as raw bytes
      3f9a1c20.rank0.parts.json where each part of these tensors is, if the manifest would be too long

The manifest is written last. If the folder is at an address such as ``s3://bucket/model.ckpt``, each process uploads
its own files. No file of the checkpoint is pickled. The eight digits are new in every save. The old files stay until
the new manifest has replaced the old one. So after a crash, either the old or the new checkpoint is complete. A folder
without a manifest is not a checkpoint. Tensors have the names that ``torch.distributed.checkpoint`` derives from the
module's parameters.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.base import files
from drivetrain.base.memory import contents_of
from drivetrain.base.restoring import COUNT, Form, count, entry, expect, restoring
from drivetrain.checkpoints import json_tree, part_lists
from drivetrain.checkpoints.part_lists import Piece, Stored, Written
from drivetrain.checkpoints.unread import UnreadTensor
from drivetrain.checkpoints.writer_process import Summed, write_plain
from drivetrain.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = "drivetrain sharded checkpoint"
_OWN_FILE = re.compile(r"[0-9a-f]{8}\..*(\.bin|state\.json|parts\.json)")
_VERSION = 2  # in version 1, the manifest itself lists all parts

Folder = Path | str
"""A local folder, or the address of a folder."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The position of a part in a tensor: the part's offset in each dimension, and the part's shape."""

Part = tuple[str, Tensor, tuple[int, ...], Box]
"""A part of a tensor that a process writes. The items are the tensor's name, the part's values, the complete shape of
the tensor, and the part's position. The values can be on the host or on a device.
"""

Write = Callable[[Path | str, Sequence[tuple[str, Any]]], Mapping[str, Any]]
"""A function that writes a file durably, from named records (bytes or tensors). The function returns the file's
``size`` and ``crc32``, and in ``records`` the offset and the checksum of each record.
"""


# ---- writing ---------------------------------------------------------------------------------------------------------


def place(path: str | os.PathLike[str]) -> Folder:
    """Return an address as text, and a local folder as a ``Path``."""
    return files.absolute(path) if files.is_remote(path) else Path(files.spelled(path))


def prepare(path: Folder, new: bool) -> None:
    """Create the folder of a checkpoint. At an address, only check that ``path`` is free.

    Raises:
        FileExistsError: ``new`` is true, and the path exists.
        OSError: the folder cannot be created, or a file has this name.
    """
    if isinstance(path, str):
        if new and (files.is_file(path) or files.names(path)):
            raise FileExistsError(f"there is something at {path}")
        if files.is_file(path):
            raise OSError(f"a file has this name: {path}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not new and path.is_symlink():
        path.unlink()  # remove only the link, and keep the linked checkpoint
    try:
        path.mkdir(exist_ok=not new)
    except FileExistsError:
        if new:
            raise
        raise OSError(f"a file has this name: {path}") from None


def write_records(file: Path | str, records: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Write ``file`` in this process (see :data:`Write`)."""
    with files.replacing(file, durable=True) as stream:
        whole = Summed(stream)
        return {"records": write_plain(whole, contents_of(records)), "size": whole.size, "crc32": whole.checksum}


def write_tensors(folder: Folder, name: str, parts: Sequence[Part], write: Write = write_records) -> Written:
    """Write one process's ``parts`` of tensors into the file ``name`` in the checkpoint's ``folder``.

    Raises:
        OSError: the file could not be written.
    """
    receipt = write(_in(folder, name), [(str(number), part) for number, (_, part, *_) in enumerate(parts)])
    written = Written({name: _measures(receipt)})
    for number, (tensor_name, part, whole, (offsets, shape)) in enumerate(parts):
        at, checksum = receipt["records"][str(number)]
        stored = Stored(str(part.dtype).removeprefix("torch."), whole)
        written.tensors.setdefault(tensor_name, stored).pieces.append(Piece(name, at, checksum, offsets, shape))
    return written


def _measures(receipt: Mapping[str, Any]) -> dict[str, int]:
    return {name: receipt[name] for name in ("size", "crc32")}


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Return the manifest's entries for ``tensors``, without a list of parts."""
    return {name: Stored(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()}


def list_apart(folder: Folder, name: str, written: Written, processes: int, write: Write = write_records) -> Written:
    """If all ``processes`` together have very many parts, write the list of this process's parts into the file
    ``name``.

    Returns:
        ``written`` itself, or a new :class:`Written` that has the file instead of the parts.
    """
    if sum(len(each.pieces) for each in written.tensors.values()) * processes <= part_lists.MOST_IN_MANIFEST:
        return written
    [file] = written.files
    listed = _measures(write(_in(folder, name), [("", part_lists.rows_of(written))]))
    return Written({**written.files, name: listed}, {}, {name: file})


def commit(folder: Folder, save: str, tree: Any, everyones: Iterable[Written], write: Write = write_records) -> None:
    """Write the plain data, then the manifest. Then remove the files of earlier saves.

    Args:
        folder: the checkpoint's folder.
        save: the eight digits at the beginning of this save's file names.
        tree: plain data with names in place of tensors (see :mod:`json_tree`).
        everyones: the files and parts of each process.
        write: a function that writes a file.

    Raises:
        CheckpointError: this process does not see another process's file in the folder.
        OSError: a file could not be written.
    """
    content = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    state = f"{save}.state.json"
    own = Written({state: _measures(write(_in(folder, state), [("", content)]))})
    all_files: dict[str, dict[str, int]] = {}
    tensors: dict[str, Stored] = {}
    lists: dict[str, str] = {}
    for written in [own, *everyones]:
        all_files |= written.files
        lists |= written.lists
        for name, stored in written.tensors.items():
            tensors.setdefault(name, Stored(stored.dtype, stored.shape)).pieces.extend(stored.pieces)
    for name, record in all_files.items():
        if _size(_in(folder, name)) != record["size"]:
            raise CheckpointError(
                f"The checkpoint {folder} was not written, because rank 0 does not see {name}, which another process "
                'wrote. Write to a folder that all machines share, or use state_dict_type="full".'
            )
    manifest = {
        "format": _FORMAT, "version": _VERSION if lists else 1, "state": state, "files": all_files,
        "tensors": tensors, **({"lists": lists} if lists else {}),
    }  # fmt: skip
    write(_in(folder, MANIFEST), [("", json.dumps(manifest, default=vars).encode())])
    if isinstance(folder, Path):
        files.sync_directory(folder.parent)  # the checkpoint's folder may be new
    _remove_others(folder, all_files)


def discard(folder: Folder, save: str) -> None:
    """Remove the files of a failed save, and then the folder, if it is empty. If the manifest names the files, keep
    them.
    """
    with contextlib.suppress(OSError, CheckpointError):
        if is_checkpoint(folder) and str(_manifest(folder).get("state")).startswith(f"{save}."):
            return  # the checkpoint is complete, and only a later operation has failed, such as a sync
        for name in files.names(folder):
            if name.startswith(f"{save}."):
                files.remove(_in(folder, name))
        _remove_folder(folder)


def _in(folder: Folder, name: str) -> Path | str:
    return f"{folder}/{name}" if isinstance(folder, str) else folder / name


def _size(file: Path | str) -> int | None:
    try:
        return files.size(file)
    except FileNotFoundError:
        return None


def _remove_folder(folder: Folder) -> None:
    """Remove an empty local folder. Most servers remove a folder with the last file, so do nothing at an address."""
    if isinstance(folder, Path):
        folder.rmdir()


def _remove_others(folder: Folder, kept: Iterable[str]) -> None:
    known = {*kept, MANIFEST}
    for name in _own_files(folder):
        if name not in known:
            with contextlib.suppress(OSError):
                files.remove(_in(folder, name))


def _own_files(folder: Folder) -> Iterator[str]:
    """Return the file names in ``folder`` that have the form of a checkpoint's file names."""
    return filter(_OWN_FILE.fullmatch, files.names(folder))


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is the folder of a complete save."""
    return files.is_file(os.path.join(path, MANIFEST))


def is_begun(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is the folder of a save, complete or not."""
    return is_checkpoint(path) or any(_own_files(place(path)))


def files_of(path: Folder) -> list[str]:
    """Return the names of the files of a complete checkpoint.

    Raises:
        CheckpointError: the manifest is missing, because no save was finished, or the manifest is damaged.
    """
    return [MANIFEST, *_manifest(path)["files"]]


def read(path: Folder, lazy: tuple[str, ...] = (), single: bool = False) -> Any:
    """Return the checkpoint in the folder ``path``.

    Args:
        path: the folder.
        lazy: prefixes of names. A tensor with one of these prefixes is returned unread, as a :class:`StoredTensor`.
        single: whether such a tensor is returned unread even if it has a single part. If False, the tensor is read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    manifest = _manifest(path)
    tensors = _tensors(path, manifest)
    for name, record in manifest["files"].items() if "" in lazy else ():
        if _size(_in(path, name)) != record["size"]:
            raise CheckpointError(f"{_in(path, name)} is missing or was cut short. Use another checkpoint.")
    state = _in(path, entry(manifest, "state", str))
    with _reading(state):
        content = files.read(state)
    _check(state, manifest["files"].get(manifest["state"], {}), len(content), zlib.crc32(content))
    with restoring(f"{os.path.basename(path)}/{manifest['state']}"):
        tree = json.loads(content)

        def tensor(name: str) -> Tensor:
            stored = entry(tensors, name, Stored)
            unread = StoredTensor(path, name, stored)
            return unread if name.startswith(lazy) and (single or len(stored.pieces) > 1) else unread.whole()

        return json_tree.decode(tree, tensor)


_TENSORS: Form = (dict, {str: {
    "dtype": str, "shape": list,
    "pieces": (list, [{"file": str, "at": count, "crc32": int, "offsets": list, "shape": list}]),
}})  # fmt: skip


def _manifest(path: Folder) -> dict[str, Any]:
    with _reading(_in(path, MANIFEST), f"{path} is a folder without {MANIFEST}, so no save to it was finished"):
        content = files.read(_in(path, MANIFEST))
    with restoring(f"{os.path.basename(path)}/{MANIFEST}"):
        manifest: dict[str, Any] = expect(json.loads(content), dict)
        if entry(manifest, "format", str) != _FORMAT:
            raise CheckpointError(f"{path} has a manifest of another program. Use a checkpoint that a Trainer wrote.")
        if entry(manifest, "version", int) > _VERSION:
            raise CheckpointError(
                f"{path} was written by a newer version of drivetrain (format {manifest['version']}). Install that."
            )
        for name in entry(manifest, "files", (dict, {str: {"size": COUNT, "crc32": COUNT}})):
            if os.path.basename(name) != name:
                raise CheckpointError(f"{path}: the manifest names the file {name!r}. Use another checkpoint.")
    return manifest


def _tensors(path: Folder, manifest: Mapping[str, Any]) -> dict[str, Stored]:
    with restoring(f"{os.path.basename(path)}/{MANIFEST}"):
        tensors = part_lists.tensors_of(entry(manifest, "tensors", _TENSORS))
        lists: dict[str, str] = expect(manifest.get("lists", {}), (dict, {str: str}))
    for name, file in lists.items():
        with _reading(_in(path, name)):
            content = files.read(_in(path, name))
        _check(_in(path, name), manifest["files"].get(name, {}), len(content), zlib.crc32(content))
        with restoring(f"{os.path.basename(path)}/{name}"):
            part_lists.add_rows(tensors, content, entry(manifest["files"], file, dict) and file)
    return tensors


@contextlib.contextmanager
def _reading(file: Path | str, missing: str = "") -> Iterator[None]:
    """Return a context that turns errors in reading ``file`` into CheckpointErrors. ``missing`` is the message if the
    file does not exist.

    Raises:
        CheckpointError: the file does not exist, or the server of an address cannot be reached.
    """
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{missing or f'{file} is missing'}. Use another checkpoint.") from None
    except OSError as error:
        if not files.is_remote(file):
            raise
        raise CheckpointError(f"{error}. Check the credentials and the connection.") from error


def _check(file: Path | str, record: Mapping[str, int], size: int, checksum: int) -> None:
    """Raise an error if a file's size or checksum differs from the file's entry in the manifest."""
    if (record.get("size"), record.get("crc32")) != (size, checksum):
        raise CheckpointError(f"{file} is damaged: its size or checksum is wrong. Use another checkpoint.")


def verify(path: Folder) -> None:
    """Read all files of the checkpoint, and compare them with the manifest.

    Raises:
        CheckpointError: a file is missing, or its size or checksum is wrong.
    """
    if isinstance(path, str):
        with fetched(path) as local:
            verify(local)
        return
    manifest = _manifest(path)
    for name, record in manifest["files"].items():
        with _reading(path / name):
            size, checksum = files.measured(path / name)
        _check(path / name, record, size, checksum)


@contextlib.contextmanager
def fetched(address: str) -> Iterator[Path]:
    """Return a context that yields a local copy of the checkpoint at ``address``. The copy has the checkpoint's name.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    manifest = _manifest(address)
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        local = Path(folder) / os.path.basename(address)
        local.mkdir()
        for name in [*manifest["files"], MANIFEST]:
            with _reading(_in(address, name)):
                files.copy(_in(address, name), local / name)
        yield local


class StoredTensor(UnreadTensor):
    """A tensor in the files of a checkpoint; :meth:`part` reads only the bytes of the part."""

    folder: Folder
    called: str
    stored: Stored

    @staticmethod
    def __new__(cls, path: Folder, name: str, stored: Stored) -> StoredTensor:
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{path}: {name} has the unknown type {stored.dtype!r}. Use another checkpoint.")
        made = UnreadTensor.__new__(cls, stored.shape, dtype)
        assert isinstance(made, StoredTensor)
        made.folder, made.called, made.stored = path, name, stored
        return made

    def whole(self) -> Tensor:
        """Read the complete tensor."""
        return self.part((0,) * self.ndim, tuple(self.shape))

    def part(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the part that begins at ``offsets`` and has the shape ``shape``.

        Raises:
            CheckpointError: a file is missing or damaged, or no process has written some of the elements.
        """
        boxes = [(piece.offsets, piece.shape) for piece in self.stored.pieces]
        if boxes == [(tuple(offsets), tuple(shape))] and all(shape):
            return self._read(self.stored.pieces[0])
        found, filled = torch.empty(tuple(shape), dtype=self.dtype), 0
        for piece in self.stored.pieces:
            begin = [max(mine, its) for mine, its in zip(offsets, piece.offsets, strict=True)]
            ends = [
                min(mine + length, its + extent)
                for mine, length, its, extent in zip(offsets, shape, piece.offsets, piece.shape, strict=True)
            ]
            if any(low >= high for low, high in zip(begin, ends, strict=True)):
                continue
            mine = tuple(slice(low - at, high - at) for low, high, at in zip(begin, ends, offsets, strict=True))
            its = tuple(slice(low - at, high - at) for low, high, at in zip(begin, ends, piece.offsets, strict=True))
            found[mine] = self._read(piece)[its]
            filled += found[mine].numel()
        if filled != found.numel():
            raise CheckpointError(f"{self.folder}: a part of {self.called} was not saved. Use another checkpoint.")
        return found

    def _read(self, piece: Piece) -> Tensor:
        size = math.prod(piece.shape) * self.dtype.itemsize
        file = _in(self.folder, piece.file)
        with _reading(file):
            if isinstance(file, str):
                content = bytearray(files.read(file, piece.at, size))
            else:
                content = bytearray(size)
                with open(file, "rb") as stream:
                    stream.seek(piece.at)
                    del content[stream.readinto(content) :]
        if len(content) != size or zlib.crc32(content) != piece.crc32:
            raise CheckpointError(f"{file} is damaged: the checksum of {self.called} is wrong. Use another checkpoint.")
        return torch.frombuffer(content, dtype=torch.uint8).view(self.dtype).reshape(piece.shape)


# ---- operations on the whole checkpoint ------------------------------------------------------------------------------


def remove(path: Folder) -> None:
    """Delete the checkpoint's files. Other files in the folder stay."""
    files.remove(_in(path, MANIFEST))  # removed first, because a folder without a manifest is not a checkpoint
    _remove_others(path, ())
    with contextlib.suppress(OSError):
        _remove_folder(path)


def copy(source: Folder, path: Folder, replaces: bool) -> bool:
    """Copy the checkpoint, and return True. If ``path`` exists and ``replaces`` is False, only return False."""
    link = os.readlink(path) if isinstance(path, Path) and path.is_symlink() else ""
    try:
        prepare(path, new=not replaces)
    except FileExistsError:
        return False
    try:
        manifest = _manifest(source)
        for name in [*manifest["files"], MANIFEST]:
            files.copy(_in(source, name), _in(path, name))
    except BaseException:
        if link:  # prepare() has replaced the link by a folder, which is incomplete
            shutil.rmtree(path, ignore_errors=True)
            os.symlink(link, path)
        raise
    _remove_others(path, manifest["files"])
    return True
