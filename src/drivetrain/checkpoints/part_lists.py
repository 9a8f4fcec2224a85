"""Lists of the parts of tensors that each process has written into a checkpoint's folder: see sharded.py.

Usually the manifest, the checkpoint's list of its files, contains all lists. If all processes together have very many
parts, each process writes its list into a file of its own, so the process that writes the manifest has little to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_IN_MANIFEST = 10_000  # the number of parts, of all processes together, up to which the manifest lists them


@dataclass
class Piece:
    """A part of a tensor, which is in one file.

    Attributes:
        file: the file's name.
        at: the offset of the part's bytes in the file.
        crc32: the checksum of these bytes.
        offsets, shape: the position and shape of the part in the tensor.
    """

    file: str
    at: int
    crc32: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Stored:
    """The manifest's entry for a tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Written:
    """What a rank has written: its files with sizes in bytes and checksums, and its parts of tensors.

    Attributes:
        files, tensors: for each file name, the file's size and checksum; for each tensor name, the tensor's parts.
        lists: by the name of each file that lists parts, the name of the file with these parts.
    """

    files: dict[str, dict[str, int]] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    lists: dict[str, str] = field(default_factory=dict)


def tensors_of(plain: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the ``tensors`` of a :class:`Written` from its JSON, ``json.dumps(written, default=vars)``."""
    return {
        name: Stored(
            each["dtype"], tuple(each["shape"]),
            [
                Piece(piece["file"], piece["at"], piece["crc32"], tuple(piece["offsets"]), tuple(piece["shape"]))
                for piece in each["pieces"]
            ],
        )
        for name, each in plain.items()
    }  # fmt: skip


def written_of(plain: Written | Mapping[str, Any]) -> Written:
    """Return a :class:`Written` of another process of this job, which may have been sent as JSON."""
    if isinstance(plain, Written):
        return plain
    return Written(dict(plain["files"]), tensors_of(plain["tensors"]), dict(plain["lists"]))


def rows_of(written: Written) -> bytes:
    """Return the content of the file that lists the parts of tensors in ``written``. All these parts must be in one
    file.
    """
    rows = {
        name: [each.dtype, each.shape, [[piece.at, piece.crc32, piece.offsets, piece.shape] for piece in each.pieces]]
        for name, each in written.tensors.items()
    }
    return json.dumps(rows, separators=(",", ":")).encode()


def add_rows(tensors: dict[str, Stored], content: bytes, file: str) -> None:
    """Add to ``tensors`` the parts in ``file`` that ``content``, a result of :func:`rows_of`, lists."""
    for name, (dtype, shape, rows) in json.loads(content).items():
        pieces = tensors.setdefault(name, Stored(dtype, tuple(shape))).pieces
        pieces += [Piece(file, at, crc32, tuple(offsets), tuple(extent)) for at, crc32, offsets, extent in rows]
