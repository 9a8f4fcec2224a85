"""The program of the process that writes checkpoints in the background. It does not import torch, so that it starts
fast.

It reads orders from its standard input and writes the answers to its standard output. Each order is a file to write.
The file's content is in memory that the parent process shares, or in the order. The process ends when its parent ends;
it then removes a file that is not complete.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import signal
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from drivetrain.base import files

LENGTHS = struct.Struct("<QQ")
"""The start of every message: the size of the JSON in bytes, and the size of the content that follows the JSON."""

ALIGNMENT = 64  # bytes; the alignment that torch uses, and also checkpoints/sharded.py
# bytes at the start of the shared memory that hold no tensors: the first is not 0 while the parent waits for this
# process
CONTROL = 64
_CHUNK = 2**22  # bytes that are written between two pauses
_SHARE = 0.1  # the least share of the time in which this process works; small, because its work slows training down
_LARGE = 2**20  # bytes; smaller files are ignored when the time between two checkpoints is measured
_LONGEST_REST_S = 0.02  # seconds after which this process looks again whether the parent waits
_LOWEST_PRIORITY = 19


class ParentEnded(BaseException):
    """The parent process, which gave the order, has ended."""


def main(memory: int, orders: int = 0, answers: int = 1) -> None:
    """Carry out orders until the parent process ends.

    Args:
        memory: the descriptor of the shared memory.
        orders, answers: the descriptors of the pipes.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)  # these signals are meant for the training, which may still save
    os.nice(_LOWEST_PRIORITY)  # training has priority; while training waits for this process, the processors are free
    served = _Served(memory, orders)
    with open(orders, "rb", 0, closefd=False) as incoming, open(answers, "wb", 0, closefd=False) as outgoing:
        send(outgoing, {"ready": True})
        with contextlib.suppress(ParentEnded, BrokenPipeError):
            while (message := receive(incoming)) is not None:
                send(outgoing, served.answer(*message))


def send(stream: Any, header: Any, content: bytes = b"") -> None:
    """Write a message to an unbuffered ``stream``."""
    text = json.dumps(header).encode()
    for part in (LENGTHS.pack(len(text), len(content)), text, content):
        rest = memoryview(part)
        while rest:
            rest = rest[stream.write(rest) :]


def receive(stream: Any) -> tuple[Any, bytes] | None:
    """Return the next message of an unbuffered ``stream``: its JSON and its content; ``None`` at the stream's end."""
    lengths = _exactly(stream, LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    text, content = (_exactly(stream, length) for length in LENGTHS.unpack(lengths))
    return json.loads(text), content


def _exactly(stream: Any, length: int) -> bytes:
    found = bytearray()
    while len(found) < length and (part := stream.read(min(length - len(found), _CHUNK))):
        found += part
    return bytes(found)


class _Summed:
    """A stream that counts the bytes written to it, and computes their CRC-32."""

    def __init__(self, stream: BinaryIO) -> None:
        self.size = self.checksum = 0
        self._stream = stream

    def write(self, content: Any) -> int:
        self._stream.write(content)
        self.size += len(content)
        self.checksum = zlib.crc32(content, self.checksum)
        return len(content)

    def flush(self) -> None:
        self._stream.flush()


class _Served:
    """What this process shares with its parent: the memory, and the pipe of orders, which ends when the parent ends."""

    def __init__(self, memory: int, orders: int) -> None:
        self._memory, self._orders = memory, orders
        self._map: Any = b""
        self._share, self._began, self._worked = _SHARE, -math.inf, 0.0

    def answer(self, order: Mapping[str, Any], content: bytes) -> dict[str, Any]:
        """Write the file of ``order``; return its size and checksum and those of its records, or why the write
        failed.
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
                whole = _Summed(stream)
                write = self._write_zip if order["zip"] else self._write_plain
                return {"records": write(whole, records), "size": whole.size, "crc32": whole.checksum}
        except FileExistsError:
            return {"exists": True}
        except OSError as error:
            return {"errno": error.errno, "text": error.strerror or str(error), "file": str(path)}

    def _write_zip(self, stream: _Summed, records: list[tuple[str, memoryview]]) -> dict[str, Any]:
        """Write a container as torch does: uncompressed records, each with its checksum, and aligned so that it can be
        mapped into memory.
        """
        with zipfile.ZipFile(cast(Any, stream), "w", zipfile.ZIP_STORED, allowZip64=True) as container:
            for name, content in records:
                info = zipfile.ZipInfo(name)
                # the header of a record has 30 bytes, the name, 20 bytes for 64-bit sizes, and 4 bytes before the
                # padding
                padding = -(stream.size + 30 + len(name.encode()) + 20 + 4) % ALIGNMENT
                info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
                with container.open(info, "w", force_zip64=True) as record:
                    for chunk in self._chunks(content):
                        record.write(chunk)
        return {}

    def _write_plain(self, stream: _Summed, records: list[tuple[str, memoryview]]) -> dict[str, Any]:
        """Write the records one after the other, each aligned; return the place and the checksum of each."""
        sums: dict[str, Any] = {}
        for name, content in records:
            stream.write(bytes(-stream.size % ALIGNMENT))
            at, checksum = stream.size, 0
            for chunk in self._chunks(content):
                stream.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
            sums[name] = [at, checksum]
        return sums

    def _pace(self) -> None:
        """Choose the share of the time in which this process works, so that it completes a file well before the next
        checkpoint.
        """
        now = time.monotonic()
        self._share = min(1.0, max(_SHARE, 2 * self._worked / (now - self._began)))
        self._began, self._worked = now, 0.0

    def _chunks(self, content: memoryview) -> Iterator[memoryview]:
        """Yield the parts of ``content``, with a pause after each, so that training is not slowed down."""
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
        """Raise ParentEnded if the pipe of orders is readable. While the parent waits for an answer, this means that it
        has ended.
        """
        if select.select([self._orders], [], [], 0)[0]:
            raise ParentEnded


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]))
