"""Write local files atomically, and explain why a write failed. For addresses such as ``s3://...``, the functions call
base/remote.py.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import re
import shutil
import stat
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import fcntl
from drivetrain.errors import ConfigurationError, wrong_value

with on_first_use:
    from drivetrain.base import remote

_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})
_BUFFER = 1 << 20  # in bytes; a large buffer, because torch writes many small pieces
_EARLY = 1 << 25  # in bytes; after each piece of this size, the system begins to write a durable file to the disk
_LOCK_PAUSE_S = 0.01
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EACCES, errno.ENOTSUP, errno.EBADF})

# Matches an address from which pathlib has removed the second slash.
_COLLAPSED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|oss|hdfs|https?|memory|file):/(?=[^/])")


def is_remote(path: Any) -> bool:
    """Return whether ``path`` is an address such as ``s3://bucket/run``. A ``file://`` path counts as local."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = os.fspath(path)
    return isinstance(text, str) and "://" in text and not text.startswith("file://")


def spelled(path: str | os.PathLike[str]) -> str:
    """Return an address unchanged. For a local path, remove ``file://`` and replace ``~`` by the home folder.

    Raises:
        ConfigurationError: ``path`` is a ``pathlib.Path`` that was made from an address. pathlib turns ``s3://`` into
            ``s3:/``.
    """
    text = os.fspath(path)
    if is_remote(text):
        return text
    if text.startswith("file://"):
        text = text.removeprefix("file://")
        return text.lstrip("/") if os.name == "nt" else text  # file:///C:/runs
    if _COLLAPSED.match(text):
        raise ConfigurationError(
            f"{text!r} was an address before pathlib.Path removed one of its slashes. Pass it as a string: "
            f"{text.replace(':/', '://', 1)!r}."
        )
    return os.path.expanduser(text)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return an address without a trailing slash, or a local path as an absolute path."""
    text = spelled(path)
    if not is_remote(text):
        return os.path.abspath(text)
    return text if text.endswith("://") else text.rstrip("/")


def resolved(path: str | os.PathLike[str]) -> str:
    """Return the canonical form of a path or an address. In a local path, symbolic links are resolved."""
    text = spelled(path)
    if not is_remote(text):
        return os.path.realpath(text)
    scheme, _, rest = text.replace("\\", "/").partition("://")
    return f"{scheme}://{posixpath.normpath(rest) if rest else ''}"


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file at this path or address.

    Raises:
        OSError: the server of an address cannot be reached.
    """
    return remote.written_at(path) is not None if is_remote(path) else os.path.isfile(path)


def size(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of the file at this path or address.

    Raises:
        OSError: the file does not exist, or its size cannot be read.
    """
    return int(remote.size(path)) if is_remote(path) else os.path.getsize(path)


def measured(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the size in bytes and the CRC-32 of a local file."""
    size = checksum = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_BUFFER):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def read(path: str | os.PathLike[str], at: int = 0, length: int | None = None) -> bytes:
    """Read the file at this path or address from the byte ``at`` on. Read at most ``length`` bytes, or the rest for
    ``None``.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    if is_remote(path):
        return bytes(remote.read(path, at, length))
    with open(path, "rb") as stream:
        stream.seek(at)
        return stream.read(-1 if length is None else length)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete the file at this path or address, if the file exists.

    Raises:
        OSError: the file could not be deleted.
    """
    if is_remote(path):
        remote.remove(path)
    else:
        Path(path).unlink(missing_ok=True)


def names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the files and folders in ``folder``.

    Raises:
        OSError: a local folder does not exist, or the folder cannot be listed.
    """
    return list(remote.names(folder)) if is_remote(folder) else os.listdir(folder)


def temporary_beside(target: str | os.PathLike[str]) -> Path:
    """Return an unused file name in the folder of ``target``.

    The name does not contain the target's name, which may already have the maximum length.
    """
    return Path(target).with_name(f".{uuid.uuid4().hex}.part")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], durable: bool = False, new: bool = False) -> Iterator[BinaryIO]:
    """Open a stream whose content becomes the file at ``path`` when the block ends without an exception.

    Args:
        path: a file in an existing folder, or an address. If the path is a symbolic link, the link is replaced.
        durable: whether the file and its directory entry are on the disk when the block ends. Uploads are always
            durable.
        new: whether to raise an error instead of replacing a file. On a file system without hard links, an existing
            file may be replaced nevertheless.

    Raises:
        FileExistsError: ``new`` is true, and the file exists.
        OSError: the file could not be written. The message names the cause. An existing file is unchanged.
    """
    if is_remote(path):
        with remote.replacing(path, new) as content:
            yield content
        return
    target = Path(path)
    temporary = temporary_beside(target)
    stream: _Stream | None = None
    try:
        check_replaceable(target)
        # mode "x" fails if another process has created a file or a link with this name
        with open(temporary, "xb", buffering=0) as raw:
            stream = _Stream(raw, durable)
            with io.BufferedWriter(stream, _BUFFER) as file:
                yield cast(BinaryIO, file)
            if durable:
                os.fsync(raw.fileno())
        move(temporary, target, new)
    except FileExistsError:
        raise
    except Exception as error:
        failure = error if isinstance(error, OSError) else None if stream is None else stream.failure
        if failure is None:
            raise
        raise OSError(failure.errno, reason(failure, target), os.fspath(target)) from error
    finally:
        # the temporary file exists only after a failure, and an error here must not hide the first error
        with contextlib.suppress(OSError):
            temporary.unlink()
    if durable:
        sync_directory(target.parent)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file at ``path``. A reader always finds the complete old content or the complete new content.

    Raises:
        OSError: as in :func:`replacing`.
    """
    with replacing(path) as stream:
        stream.write(content)


def touch(path: str | os.PathLike[str]) -> None:
    """Set the file's time to the exact present time. A write can set a time that is some milliseconds too early."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def link(source: str | os.PathLike[str], path: str | os.PathLike[str], replaces: bool = True) -> bool:
    """Make ``path`` a relative symbolic link to ``source``, atomically. If links are not possible, make a durable copy.

    Returns:
        False if ``replaces`` is False and ``path`` exists. The existing file is then kept.

    Raises:
        OSError: the link could not be created. An existing file is unchanged.
    """
    temporary, target = temporary_beside(path), Path(path)
    check_replaceable(target)
    try:
        os.symlink(os.path.relpath(source, target.parent), temporary if replaces else target)
        if replaces:
            move(temporary, target)
    except FileExistsError:
        return False
    except OSError:  # Windows needs a privilege for links, and some file systems do not support them
        return copy(source, path, replaces)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def copy(source: str | os.PathLike[str], path: str | os.PathLike[str], replaces: bool = True) -> bool:
    """Copy a file, atomically and durably. ``source`` and ``path`` may be addresses.

    Returns:
        False if ``replaces`` is False and ``path`` exists. The existing file is then kept.

    Raises:
        OSError: as in :func:`replacing`.
    """
    if is_remote(source) or is_remote(path):
        return bool(remote.copy(source, path, replaces))
    try:
        with replacing(path, durable=True, new=not replaces) as target, open(source, "rb") as stream:
            shutil.copyfileobj(stream, target)
    except FileExistsError:
        return False
    return True


def move(source: Path, target: Path, new: bool = False) -> None:
    """Rename ``source`` to ``target``, atomically. drivetrain replaces files only with this function.

    Args:
        source: a complete file on the file system of ``target``, or a folder. A folder never replaces another folder.
        target: the new name. If it is a symbolic link, the link is replaced.
        new: whether to raise an error instead of replacing a file. If True, ``source`` may remain as a second name of
            the file.

    Raises:
        FileExistsError: ``new`` is true, and the file exists.
        OSError: ``target`` is not a file, see :func:`check_replaceable`, or the rename failed.
    """
    check_replaceable(target)
    if new:
        try:
            os.link(source, target)  # unlike a rename, link() fails if the file exists
        except (OSError, NotImplementedError) as error:
            if not isinstance(error, NotImplementedError) and error.errno not in _NO_LINKS:
                raise
        else:
            return
    os.replace(source, target)


def check_replaceable(target: Path) -> None:
    """Check that a later rename to ``target`` is possible.

    Raises:
        IsADirectoryError: ``target`` is a folder.
        OSError: ``target`` is a device, a pipe or a socket, its name is too long, or this process has no permission for
            its folder.
    """
    try:
        found = os.lstat(target)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder has this name", os.fspath(target))
    # a rename would replace a device such as /dev/null
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, and no file", os.fspath(target))


def locked(
    folder: str | os.PathLike[str], patience_s: float, waits: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Lock a local folder, and return a function that unlocks the folder. If the file system has no locks, do nothing.

    The lock ends with the process, so a killed run leaves no lock.

    Args:
        folder: an existing folder. If this process cannot open the folder, nothing is locked.
        patience_s: the maximum number of seconds to wait for another process. After the wait, this process continues
            without the lock.
        waits: a function to call if another process has the lock.
    """
    try:
        flock, handle = fcntl.flock, os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # there is no fcntl on Windows
        return lambda: None

    def unlock() -> None:
        with contextlib.suppress(OSError):  # the file system has no locks
            flock(handle, fcntl.LOCK_UN)  # closing alone does not unlock while a forked process has the folder open
        os.close(handle)

    gives_up, told = time.monotonic() + patience_s, False
    with contextlib.ExitStack() as after_error:
        after_error.callback(os.close, handle)  # after an error such as Ctrl-C in the pause
        while time.monotonic() < gives_up:
            try:
                flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waits()
                told = True
                time.sleep(_LOCK_PAUSE_S)
            except OSError:  # this file system has no locks
                break
        after_error.pop_all()
    return unlock


def reason(error: OSError, target: Path) -> str:
    """Return why ``target`` could not be written, such as "no space left on device: 512 bytes free in runs (ENOSPC,
    ...)".
    """
    number = error.errno or 0
    text = error.strerror or str(error) or type(error).__name__
    text = text[:1].lower() + text[1:]
    if number in _FULL:
        with contextlib.suppress(OSError):
            text += f": {shutil.disk_usage(target.parent).free} bytes free in {target.parent}"
    return f"{text} ({errno.errorcode.get(number, 'unknown')}, errno {number})"


def wrong_characters(name: str) -> str | None:
    """Return why no file can have this name; ``None`` if a file can."""
    if "\0" in name:
        return "it contains a NUL character"
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        return f"it contains {name[error.start]!r}, which no file name can"
    return None


def check_folder(owner: str, name: str, value: Any, folder: str, example: str) -> None:
    """Check that there can be a folder at the path that a user has passed. The function creates nothing.

    Args:
        owner, name, value: the class, the name and the value of the argument, for the message.
        folder: the folder or address that results from ``value``.
        example: another valid value, for the message.

    Raises:
        ConfigurationError: there can be no such folder, or a package for the address is missing.
    """
    if is_remote(folder):
        if is_remote(value):  # otherwise value is a name below an address, which was checked as another argument
            remote.check_argument(owner, name, value)
    elif (why := impossible_folder(folder)) is not None:
        raise wrong_value(owner, name, value, f"a folder, and {why}", f'{name}="{example}"')


def impossible_folder(path: str) -> str | None:
    """Return why there can be no folder at ``path``; ``None`` if no reason is found. The function creates nothing."""
    if (why := wrong_characters(path)) is not None:
        return why
    folder = wanted = os.path.abspath(path)
    while True:
        try:
            found = os.stat(folder)
        except (FileNotFoundError, NotADirectoryError):
            if (parent := os.path.dirname(folder)) == folder:
                return None
            folder = parent
        except OSError as error:
            return "its name is too long" if error.errno == errno.ENAMETOOLONG else None
        else:
            break
    if not stat.S_ISDIR(found.st_mode):
        return "there is a file of this name" if folder == wanted else f"{folder} is a file"
    with contextlib.suppress(AttributeError, OSError, ValueError):  # os.pathconf exists only on POSIX
        longest = os.pathconf(folder, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest for part in wanted[len(folder) :].split(os.sep)):
            return f"a name in it is longer than {longest} bytes"
    return None


class _Stream(io.RawIOBase):
    """A file that stores the error of the first failed write, because torch's writer replaces it by another exception.

    With ``durable``, the stream asks the system after every 32 MiB to write the data and to free the page cache.
    Otherwise, the page cache would contain the complete file until the end.
    """

    failure: OSError | None = None

    def __init__(self, file: io.RawIOBase, durable: bool) -> None:
        self._file, self._size, self._sent = file, 0, 0
        self._is_early = durable and hasattr(os, "posix_fadvise")  # Linux
        self.fileno = file.fileno  # type: ignore[method-assign]

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int | None:
        try:
            written = self._file.write(content)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._size += written or 0
        if self._is_early and self._size - self._sent >= _EARLY:
            self._sent = self._size
            with contextlib.suppress(OSError):  # the system may refuse this advice
                os.posix_fadvise(self.fileno(), 0, self._size, os.POSIX_FADV_DONTNEED)
        return written


def sync_directory(directory: Path) -> None:
    """Write the entries of ``directory`` to the disk, so that new file names are durable. Do nothing on Windows, which
    cannot open directories.
    """
    if os.name != "posix":
        return
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:  # some file systems do not support syncing a directory
            raise


def encodable(text: str) -> str:
    """Return ``text`` with lone surrogates escaped. Python uses lone surrogates in file names that are not UTF-8."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
