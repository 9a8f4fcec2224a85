"""The program of the process that writes checkpoints in the background.

The program does not import torch, so it starts fast. The standard input is a connection to the parent process. The
parent process sends an order for each file, and gets an answer. The file's bytes are in shared memory, or follow the
order. When the parent process ends, this process removes an incomplete file and ends, too.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, cast

from drivetrain.base import files

ALIGNMENT = 64  # in bytes, as in torch's files; a process can map aligned records
CONTROL = 64  # bytes before the data in shared memory; the first byte is not 0 while the parent waits
_CHUNK = 2**22  # the number of bytes to write between two pauses
_SHARE = 0.1  # the minimum fraction of time in which this process works; it pauses so that training stays fast
_LARGE = 2**20  # the minimum size of a file that counts as a checkpoint, in bytes
_LONGEST_REST_S = 0.02  # the longest time between two checks whether the parent waits
_LOWEST_PRIORITY = 19


class ParentEnded(BaseException):
    """The parent process has ended."""


def main(memory: int, orders: int = 0) -> None:
    """Carry out orders until the parent process ends.

    Args:
        memory: the descriptor of the shared memory.
        orders: the descriptor of the connection.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)  # the parent process handles these signals, and may still save
    os.nice(_LOWEST_PRIORITY)  # training has precedence
    parent = Connection(orders)
    served = _Served(memory, parent)
    parent.send({"ready": True})
    with contextlib.suppress(ParentEnded, EOFError, ConnectionError):
        while True:
            parent.send(served.answer(parent.recv(), parent.recv_bytes()))


class Summed:
    """A stream that counts the bytes that are written, and computes their CRC-32."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.size = self.checksum = 0
        self._stream = stream

    def write(self, content: Any) -> int:
        self._stream.write(content)
        self.size += len(content)
        self.checksum = zlib.crc32(content, self.checksum)
        return len(content)

    def flush(self) -> None:
        self._stream.flush()


def write_plain(
    stream: Summed, records: Iterable[tuple[str, Any]], chunks: Callable[[Any], Iterable[Any]] | None = None
) -> dict[str, Any]:
    """Write aligned records, one after the other. ``chunks`` splits a record into pieces. Return the offset and the
    checksum of each record.
    """
    sums: dict[str, Any] = {}
    for name, content in records:
        if padding := -stream.size % ALIGNMENT:
            stream.write(bytes(padding))
        at, checksum = stream.size, 0
        for chunk in (content,) if chunks is None else chunks(content):
            stream.write(chunk)
            checksum = zlib.crc32(chunk, checksum)
        sums[name] = [at, checksum]
    return sums


def write_zip(
    stream: Summed, records: Iterable[tuple[str, Any]], chunks: Callable[[Any], Iterable[Any]] | None = None
) -> dict[str, Any]:
    """Write a zip container as torch does, with uncompressed and aligned records, which a process can map. Each record
    has a checksum.
    """
    with zipfile.ZipFile(cast(Any, stream), "w", zipfile.ZIP_STORED, allowZip64=True) as container:
        for name, content in records:
            info = zipfile.ZipInfo(name)
            # before the padding, the header has 30 bytes, the name, 20 bytes for 64-bit sizes, and 4 bytes
            padding = -(stream.size + 30 + len(name.encode()) + 20 + 4) % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            with container.open(info, "w", force_zip64=True) as record:
                for chunk in (content,) if chunks is None else chunks(content):
                    record.write(chunk)
    return {}


class _Served:
    """The memory and the connection that this process shares with the parent process."""

    def __init__(self, memory: int, parent: Connection) -> None:
        self._memory, self._parent = memory, parent
        self._map: Any = b""
        self._share, self._began, self._worked = _SHARE, -math.inf, 0.0

    def answer(self, order: Mapping[str, Any], content: bytes) -> dict[str, Any]:
        """Write the file of ``order``. Return the size and the checksum of the file, and the offsets and checksums of
        the file's records. After a failure, return the reason.
        """
        if order["memory"] != len(self._map):
            self._map = mmap.mmap(self._memory, order["memory"], prot=mmap.PROT_READ)
        views = {True: memoryview(self._map), False: memoryview(content)}
        records = [(name, views[shared][at : at + size]) for name, shared, at, size in order["records"]]
        path = Path(order["path"])
        if sum(record.nbytes for _, record in records) >= _LARGE:
            self._pace()
        try:
            with files.replacing(path, durable=True, new=order["new"]) as stream:
                whole = Summed(stream)
                found = (write_zip if order["zip"] else write_plain)(whole, records, self._chunks)
                return {"records": found, "size": whole.size, "crc32": whole.checksum}
        except FileExistsError:
            return {"exists": True}
        except OSError as error:
            return {"errno": error.errno, "text": error.strerror or str(error), "file": str(path)}

    def _pace(self) -> None:
        """Choose the fraction of time in which this process works. A file must be complete well before the next
        checkpoint.
        """
        now = time.monotonic()
        self._share = min(1.0, max(_SHARE, 2 * self._worked / (now - self._began)))
        self._began, self._worked = now, 0.0

    def _chunks(self, content: memoryview) -> Iterator[memoryview]:
        """Yield the pieces of ``content``. Pause after each piece, because this process slows training down."""
        for begin in range(0, content.nbytes, _CHUNK):
            began = time.monotonic()
            yield content[begin : begin + _CHUNK]
            worked = time.monotonic() - began
            self._worked += worked
            self._check_parent()
            ends = time.monotonic() + worked * (1 / self._share - 1)
            while not self._map[0] and (left := ends - time.monotonic()) > 0:
                time.sleep(min(left, _LONGEST_REST_S))
                self._check_parent()

    def _check_parent(self) -> None:
        """Raise ParentEnded if there is input. The parent sends nothing before it has the answer, so input means that
        the connection has ended.
        """
        if self._parent.poll():
            raise ParentEnded


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]))
