"""Start the process that writes files in the background, and send orders to the process: see writer_process.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from drivetrain.base.memory import content_of
from drivetrain.checkpoints import writer_process
from drivetrain.checkpoints.arena import Arena

_PROGRAM = ["-S", writer_process.__file__]  # -S skips the site module, so the start is faster
_START_S = 60.0  # the maximum number of seconds for the start of the process


class WriterEndedError(Exception):
    """The writing process has ended or could not start. The message says why. All complete files are unchanged."""


class Writer:
    """A child process that writes checkpoints from memory that it shares with this process.

    Args:
        arena: the memory.

    Raises:
        WriterEndedError: the process could not be started.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena, self._lock = arena, threading.Lock()
        if not sys.executable:
            raise WriterEndedError("it could not be started: this program does not know its Python (sys.executable)")
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        try:
            self._connection, theirs = multiprocessing.Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *_PROGRAM, str(arena.descriptor)], env=environment, stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL, pass_fds=[arena.descriptor],
                    start_new_session=True,  # Ctrl-C must not end this process
                )  # fmt: skip
        except OSError as error:
            raise WriterEndedError(f"it could not be started: {error}") from error
        # end the process even without a call of close()
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        late = threading.Timer(_START_S, self._process.kill)
        late.start()
        try:
            self._answer()
        finally:
            late.cancel()

    def write(
        self, path: Path, records: Iterable[tuple[str, Any]], *, zipped: bool, new: bool = False
    ) -> dict[str, Any]:
        """Write a file, durably and atomically. Return the file's ``size`` in bytes and ``crc32``, and in ``records``
        each record's offset and CRC-32, by name.

        Args:
            path: the file, in an existing folder.
            records: names and contents. A content is bytes or a tensor's storage. A storage in the arena is not copied.
            zipped: whether to write a zip container for torch. If False, the contents are written without names. The
                ``records`` in the result are empty for a zip container.
            new: whether to raise an error instead of replacing a file.

        Raises:
            FileExistsError: ``new`` is true, and the file exists.
            OSError: the file could not be written. An existing file is unchanged.
            WriterEndedError: the writing process has ended.
        """
        inline, listed = bytearray(), []
        for name, content in records:
            if isinstance(content, torch.UntypedStorage):
                at = self._arena.place_of(content)
                if at is not None:
                    listed.append((name, True, at, content.nbytes()))
                    continue
                content = _bytes_of(content)
            listed.append((name, False, len(inline), len(content)))
            inline += content
        order = {"path": str(path), "zip": zipped, "new": new, "memory": self._arena.size, "records": listed}
        with self._lock:
            try:
                self._connection.send(order)
                self._connection.send_bytes(inline)
            except OSError:  # a broken pipe
                raise self._ended() from None
            answer = self._answer()
        if "exists" in answer:
            raise FileExistsError(f"there is something at {path}")
        if "text" in answer:
            raise OSError(answer["errno"] or 0, answer["text"], answer["file"])
        return answer

    def close(self) -> None:
        """End the process. The process first removes an incomplete file."""
        self._end()

    def _answer(self) -> dict[str, Any]:
        while not self._connection.poll(1):
            if not threading.main_thread().is_alive():  # the main thread has ended, and Python waits for this thread
                self._arena.hurry(True)
        try:
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        return answer

    def _ended(self) -> WriterEndedError:
        self._process.kill()
        self._end()
        code = self._process.returncode
        if code >= 0:
            return WriterEndedError(f"it has ended with the exit code {code}; its error is above")
        name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
        hint = ", which the system also sends when memory runs out" if name == "SIGKILL" else ""
        return WriterEndedError(f"it was ended by {name}{hint}")


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.wait()


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()
    return bytes(content_of(tensor))
