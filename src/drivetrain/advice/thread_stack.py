"""The stack of another thread, as faulthandler writes it: in one call, which no other Python code can interrupt.

Reading the frame objects of a thread that runs can crash Python 3.11: the thread may return from a frame meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+).*\n")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # letters that are not ASCII

_PIPE_HOLDS = 65_536  # bytes that wait in a pipe; of more, the rest is lost


class ThreadStack:
    """Reads the frames of one thread, from any other.

    faulthandler makes a call of the system for each word that it writes. Into a pipe they cost half as much as into a
    file. Where the threads have more frames than a pipe holds, and on Windows, it is a file without a name.

    Args:
        thread: the thread's :func:`threading.get_ident`.
    """

    def __init__(self, thread: int) -> None:
        self._thread, self._open, self._file = thread, ExitStack(), -1
        self._reads, self._writes = -1, -1
        if os.name == "posix":
            self._reads, self._writes = os.pipe()
            for each in (self._reads, self._writes):
                os.set_blocking(each, False)
                self._open.callback(os.close, each)

    def frames(self) -> Iterator[tuple[str, int, str]]:
        """Yield file, line and function of each frame, the innermost first."""
        threads = _THREAD.split(self._text().decode("ascii", "replace"))
        for number, text in zip(threads[1::2], threads[2::2], strict=True):
            if int(number, 16) == self._thread:
                for found in _FRAME.finditer(text):
                    yield _unescaped(found[1]), int(found[2]), _unescaped(found[3])

    def _text(self) -> bytes:
        """Return what faulthandler writes of all threads."""
        if self._file < 0 and self._writes >= 0:
            faulthandler.dump_traceback(self._writes)
            text = os.read(self._reads, _PIPE_HOLDS)
            if len(text) < _PIPE_HOLDS - 4096:  # a pipe counts in pages, so it may be full before
                return text
        if self._file < 0:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # close() closes it
            self._file = self._open.enter_context(file).fileno()
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file)
        size = os.lseek(self._file, 0, os.SEEK_CUR)
        os.lseek(self._file, 0, os.SEEK_SET)
        return os.read(self._file, size)

    def close(self) -> None:
        self._open.close()


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda each: chr(int(each[1] or each[2] or each[3], 16)), text)
