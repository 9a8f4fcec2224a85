"""Count the file operations below a folder, and let one of them fail or kill its process.

The file knows no torch: as a program it is the process that writes checkpoints in the background, with faults.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "full": errno.ENOSPC}
KINDS = (*ERRORS, "short", "kill")
"""What happens at an operation: it fails, it and all later ones fail as on a full disk, a write takes half of its bytes
and says so, or the process is killed there."""

_ON_PATHS = ("mkdir", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir")
_FREE = ("unlink", "remove", "rmdir", "read", "open")  # what works on a full disk
_BUFFER = 2048  # bytes: so that a small checkpoint is written in several pieces


@dataclass
class Faults:
    """A layer between a process and its files.

    Args:
        folder: the operations below it are counted.
        log: a file elsewhere, to which each operation is appended: a line with its name and its path.
        armed: a file elsewhere: as long as it exists, operations are counted and can fail.
        kind: one of KINDS; "": only count.
        at: at which operation, from 1 on.
        wrong: whether files are written in place, as a negative control.
    """

    folder: str
    log: str
    armed: str
    kind: str = ""
    at: int = 0
    wrong: bool = False

    def install(self) -> Callable[[], None]:
        """Put the layer between this process and its files; return what takes it away."""
        from drivetrain.base import files

        self._count, self._lock = 0, threading.RLock()
        self._log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write, self._unlink = os.write, os.unlink
        opened = self._opening(builtins.open)
        layers: list[tuple[Any, str, Any]] = [(os, name, self._on_path(name, getattr(os, name))) for name in _ON_PATHS]
        layers += [(os, "open", self._on_path("open", os.open)), (builtins, "open", opened), (io, "open", opened)]
        layers += [(os, "fsync", lambda descriptor: self._happens("fsync", "")), (files, "_BUFFER", _BUFFER)]
        if self.wrong:
            layers.append((files, "replacing", _in_place))
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in layers]
        for each in layers:
            setattr(*each)

        def remove() -> None:
            for each in before:
                setattr(*each)
            os.close(self._log)

        return remove

    def operations(self) -> list[str]:
        """Return the names of the counted operations; those with the fault begin with "!"."""
        text = Path(self.log).read_text() if os.path.exists(self.log) else ""
        return [line.partition("\t")[0] for line in text.splitlines()]

    def command(self) -> list[str]:
        """Return the arguments of Python for a process that writes checkpoints with these faults."""
        return [__file__, json.dumps(asdict(self))]

    def _covers(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(self.folder)

    def _happens(self, name: str, path: Any, half: Callable[[], Any] = lambda: None) -> bool:
        """Count an operation; fail or die if it is the one; return whether a write should be short.

        Args:
            name: the operation.
            path: its file.
            half: does one half of it.
        """
        with self._lock:
            if not os.path.exists(self.armed):
                return False
            self._count += 1
            is_here = self.kind != "" and self._count == self.at
            if self.kind == "full":
                is_here = self._count >= self.at and name not in _FREE
            self._write(self._log, f"{'!' * is_here}{name}\t{path}\n".encode())
            if self.kind == "short" or not is_here:
                return is_here
            half()
            if self.kind == "kill":
                self._unlink(self.armed)  # the next process lives
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]), path and os.fspath(path))

    def _on_path(self, name: str, function: Any) -> Any:
        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            target = args[0] if name in ("rename", "replace", "link", "symlink") else path
            if self._covers(target):
                self._happens(name, target)
            return function(path, *args, **kwargs)

        return counted

    def _opening(self, function: Any) -> Any:
        layer = self

        class Counted(io.FileIO):
            def write(self, content: Any) -> int:
                part = memoryview(content).cast("B")
                part = part[: max(1, len(part) // 2)]
                if layer._happens("write", self.name, lambda: super(Counted, self).write(part)):
                    return super().write(part)
                return super().write(content)

        def counted(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if not self._covers(file):
                return function(file, mode, buffering, *args, **kwargs)
            writes = not set("wxa+").isdisjoint(mode)
            assert not writes or (buffering == 0 and "b" in mode), f"{file} is not written through files.replacing"
            self._happens("create" if writes else "read", file)
            return Counted(file, mode) if writes else function(file, mode, buffering, *args, **kwargs)

        return counted


@contextlib.contextmanager
def _in_place(path: Any, durable: bool = False, new: bool = False) -> Iterator[Any]:
    """What ``files.replacing`` must not do: a reader finds a part of the file, and the earlier one is lost."""
    with open(path, "xb" if new else "wb", buffering=0) as raw, io.BufferedWriter(raw, _BUFFER) as stream:
        yield stream


if __name__ == "__main__":
    Faults(**json.loads(sys.argv[1])).install()
    from drivetrain.checkpoints import writer_process

    writer_process.main(int(sys.argv[2]))
