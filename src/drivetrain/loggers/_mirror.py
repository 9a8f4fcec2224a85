"""A local folder whose files are uploaded to an address such as ``s3://bucket/run``. Loggers append to the local
files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from typing import Any

from drivetrain.base import remote

_EVERY_S = 60.0


class Mirror:
    """A logger's local folder, whose changed files are uploaded.

    A changed file is uploaded as a whole, because stores such as S3 cannot append to an object.

    Each process that uses the logger has its own temporary folder, which is removed when the process ends. Changes
    after the last upload are then lost.

    Args:
        address: the folder to which the files are uploaded.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._folder: str | None = None
        self._removal: weakref.finalize[..., Any] | None = None
        self._owner = os.getpid()
        self._uploaded: dict[str, tuple[int, int]] = {}  # the size and modification time of each uploaded file
        self._uploaded_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def folder(self) -> str:
        """The local folder."""
        if self._folder is None or self._owner != os.getpid():
            if self._removal is not None:
                self._removal.detach()  # after a fork, the child must not remove the parent's folder
            self._folder, self._owner, self._uploaded = tempfile.mkdtemp(prefix="drivetrain-"), os.getpid(), {}
            self._removal = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    @property
    def is_due(self) -> bool:
        """Whether the last upload is more than a minute ago."""
        return time.monotonic() - self._uploaded_at > _EVERY_S

    def fetch(self, name: str) -> bool:
        """Download a file from the address, if it is there and has no local copy. Return whether it was downloaded."""
        target, address = os.path.join(self.folder, name), f"{self.address}/{name}"
        if os.path.exists(target) or remote.written_at(address) is None:
            return False
        remote.copy(address, target)
        self._uploaded[name] = _identity(target)
        return True

    def upload(self) -> None:
        """Upload the files that have changed since the last upload.

        Raises:
            OSError: the upload failed. The next call uploads these files again.
        """
        self._uploaded_at = time.monotonic()
        if self._folder is None:
            return
        folder = self.folder
        for path in sorted(os.path.join(base, name) for base, _, names in os.walk(folder) for name in names):
            name, found = os.path.relpath(path, folder).replace(os.sep, "/"), _identity(path)
            if self._uploaded.get(name) != found:
                remote.upload(path, f"{self.address}/{name}")
                self._uploaded[name] = found

    def release(self) -> None:
        """Remove the local folder. Call this after an upload, because a process that was forked may not remove its
        folder when it ends.
        """
        if self._removal is not None and self._owner == os.getpid():
            self._removal()
        self._folder, self._removal, self._uploaded = None, None, {}


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
