"""Store lists of the parts of tensors in a sharded checkpoint: see sharded.py.

The manifest, the checkpoint's list of files, usually also lists the parts of all tensors. If there are very many parts,
each process writes its own list into a file. Then the manifest stays short.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_IN_MANIFEST = 10_000  # if all processes together have more parts, the manifest does not list the parts


@dataclass
class Piece:
    """A part of a tensor, stored in one file.

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
    """The files and the parts of tensors that a rank has written.

    Attributes:
        files: the size in bytes and the checksum of each file, by the file's name.
        tensors: the parts of each tensor, by the tensor's name.
        lists: the name of each file that lists parts, with the name of the file that contains the bytes of these parts.
    """

    files: dict[str, dict[str, int]] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    lists: dict[str, str] = field(default_factory=dict)


def tensors_of(plain: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the ``tensors`` of a :class:`Written` from parsed JSON. The JSON comes from ``json.dumps(written,
    default=vars)``.
    """
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
    """Return ``plain`` as a :class:`Written`. Another process may have sent ``plain`` as JSON."""
    if isinstance(plain, Written):
        return plain
    return Written(dict(plain["files"]), tensors_of(plain["tensors"]), dict(plain["lists"]))


def rows_of(written: Written) -> bytes:
    """Return the content of a file that lists the parts in ``written``. All parts must be in one file."""
    rows = {
        name: [each.dtype, each.shape, [[piece.at, piece.crc32, piece.offsets, piece.shape] for piece in each.pieces]]
        for name, each in written.tensors.items()
    }
    return json.dumps(rows, separators=(",", ":")).encode()


def add_rows(tensors: dict[str, Stored], content: bytes, file: str) -> None:
    """Add the parts in ``file`` to ``tensors``. ``content`` lists the parts: a result of :func:`rows_of`."""
    for name, (dtype, shape, rows) in json.loads(content).items():
        pieces = tensors.setdefault(name, Stored(dtype, tuple(shape))).pieces
        pieces += [Piece(file, at, crc32, tuple(offsets), tuple(extent)) for at, crc32, offsets, extent in rows]
