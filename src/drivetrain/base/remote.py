"""Read and write files at addresses such as ``s3://bucket/run`` through fsspec. No other module uses fsspec.

To write an object, drivetrain writes a local file and uploads the file. A reader finds the complete old object or the
complete new object. Object stores show a new object only after the complete upload. Other file systems show unfinished
files. There, drivetrain uploads the file under another name and then renames it.

fsspec is imported when the first address is used. Each function gets the file system from fsspec, which creates one in
each process. A forked process must not use its parent's connections.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import importlib.util
import inspect
import os
import posixpath
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.base import files
from drivetrain.base.packages import fsspec, fsspec_core, fsspec_spec
from drivetrain.errors import ConfigurationError, MissingPackageError, shown

# Protocols of stores that show an object only after the complete upload.
_WHOLE_UPLOADS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
_READ_ONLY = frozenset({"http", "https"})
# The package that fsspec needs for a protocol. For other protocols, fsspec's own message names the package.
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "http": "aiohttp", "https": "aiohttp", "oss": "ossfs", "hf": "huggingface_hub", "sftp": "paramiko",
    "ssh": "paramiko", "hdfs": "pyarrow", "memory": "",
}  # fmt: skip
_TIMES = ("LastModified", "mtime", "last_modified", "created", "updated")


def is_known(address: str | os.PathLike[str]) -> bool:
    """Return whether fsspec supports the protocol of ``address``, even if the package for the protocol is missing."""
    protocol = _protocol(os.fspath(address))
    if importlib.util.find_spec("fsspec") is None:
        return protocol in _PACKAGES

    return "::" in protocol or protocol in fsspec.available_protocols()


def check(address: str | os.PathLike[str]) -> None:
    """Check, without a request, that this process can use the file system of an address.

    Raises:
        ConfigurationError: a package is missing, or fsspec does not support the protocol.
    """
    address = os.fspath(address)
    protocol = _protocol(address)
    if importlib.util.find_spec("fsspec") is None:
        packages = f"fsspec {_PACKAGES.get(protocol, '')}".rstrip()
        raise MissingPackageError(
            f"{address} needs the package fsspec, which is not installed. Run `pip install {packages}`, or use a "
            "local path."
        )

    try:
        fsspec.get_filesystem_class(protocol.rpartition("::")[2])
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        cure = f"Run `pip install {package}`" if package else str(error).rstrip(".")
        needs = f"the package {package}, which is not installed" if package else "a package that is not installed"
        raise ConfigurationError(f"{address} needs {needs}. {cure}, or use a local path.") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{address}: fsspec knows no protocol {protocol!r}. Write an address such as s3://bucket/folder."
        ) from error


def check_writable(address: str | os.PathLike[str]) -> None:
    """Call :func:`check`, and check that the address's protocol allows writing.

    Raises:
        ConfigurationError: as in :func:`check`, or the file system is read-only.
    """
    if _protocol(os.fspath(address)) in _READ_ONLY:
        raise ConfigurationError(
            f"{os.fspath(address)} can only be read. Write to a local path, or to an address such as "
            "s3://bucket/folder."
        )
    check(address)


def check_argument(owner: str, name: str, value: Any) -> None:
    """Call :func:`check_writable` for ``value``, the argument ``name`` of ``owner``.

    Raises:
        ConfigurationError: files cannot be written there.
    """
    try:
        check_writable(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{owner}({name}={shown(value)}): {error}") from error.__cause__


# ---- existing files --------------------------------------------------------------------------------------------------


def written_at(address: str | os.PathLike[str]) -> float | None:
    """Return the time at which the file was written, in seconds. Return 0.0 if the time is unknown, and ``None``
    without a file.

    Raises:
        OSError: the server cannot be reached. The message names the address and the cause.
    """
    with _asked(address, "could not be looked up") as (system, path):
        try:
            found = system.info(path)
        except FileNotFoundError:
            return None
        if found.get("type") == "directory":
            return None
        time: Any = next((found[key] for key in _TIMES if found.get(key) is not None), None)
        if isinstance(time, str) or time is None:
            with contextlib.suppress(NotImplementedError):
                time = system.modified(path)
    return float(time) if isinstance(time, (int, float)) else time.timestamp() if hasattr(time, "timestamp") else 0.0


def size(address: str | os.PathLike[str]) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: the file does not exist, or cannot be looked up.
    """
    with _asked(address, "could not be looked up") as (system, path):
        return int(system.info(path)["size"])


def names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the files and folders in a folder. If the folder does not exist, the list is empty.

    Raises:
        OSError: the folder cannot be listed.
    """
    with _asked(folder, "could not be listed") as (system, path):
        try:
            found = system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
    own = path.strip("/")
    return [each.rstrip("/").rpartition("/")[2] for each in found if each.strip("/") != own]


def find(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    """Return the address of each file in ``folder`` with a name that matches ``pattern``, such as ``"*.ckpt"``."""
    base = _trimmed(os.fspath(folder))
    return [f"{base}/{name}" for name in names(folder) if fnmatch.fnmatchcase(name, pattern)]


# ---- reading ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Return a context that yields a local copy of the file at ``path``. The end of the context removes the copy.

    Raises:
        OSError: the file does not exist, or could not be read.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        with _asked(path, "could not be read") as (system, name):
            target = os.path.join(folder, posixpath.basename(name.rstrip("/")) or "file")
            if system.info(name).get("type") == "directory":
                raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
            system.get_file(name, target)
        yield Path(target)


def read(path: str | os.PathLike[str], at: int = 0, length: int | None = None) -> bytes:
    """Read a file from the byte ``at`` on. Read at most ``length`` bytes, or the rest for ``None``.

    Raises:
        OSError: the file does not exist, or could not be read.
    """
    if length == 0:
        return b""
    with _asked(path, "could not be read") as (system, name):
        content: bytes = system.cat_file(name, start=at, end=None if length is None else at + length)
    return content


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(address: str | os.PathLike[str], new: bool = False) -> Iterator[BinaryIO]:
    """Open a stream whose content is uploaded to ``address`` when the block ends without an exception.

    Args:
        address: the address of the object.
        new: whether to raise an error instead of replacing an object. If the store cannot refuse an upload, the
            function only checks before the upload whether the object exists.

    Raises:
        FileExistsError: ``new`` is true, and the object exists.
        OSError: the object could not be written. The message names the cause. An existing object is unchanged.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        local = os.path.join(folder, "upload")
        with files.replacing(local) as stream:
            yield stream
        upload(local, address, new)


def upload(local: str | os.PathLike[str], address: str | os.PathLike[str], new: bool = False) -> None:
    """Upload a local file to ``address``, and check its size afterwards.

    Raises:
        FileExistsError, OSError: as in :func:`replacing`.
    """
    expected = os.path.getsize(local)
    with _asked(address, "could not be written") as (system, path):
        if new and system.exists(path):
            raise FileExistsError(errno.EEXIST, "there is a file of this name", os.fspath(address))
        if _protocol(os.fspath(address)) in _WHOLE_UPLOADS:
            _put_new(system, os.fspath(local), path, address) if new else system.put_file(os.fspath(local), path)
        else:
            _put_and_rename(system, os.fspath(local), path)
        system.invalidate_cache()
        arrived = system.info(path)["size"]
        if arrived != expected:
            raise OSError(errno.EIO, f"{arrived} bytes of {expected} arrived", os.fspath(address))


def copy(source: str | os.PathLike[str], path: str | os.PathLike[str], replaces: bool = True) -> bool:
    """Copy a file from or to an address. A copy inside one store is made by the store.

    Returns:
        False if ``replaces`` is False and there is a file at ``path``; otherwise True.

    Raises:
        OSError: the file could not be copied. An existing file at ``path`` is unchanged.
    """
    if not files.is_remote(path):
        with fetched(source) as local:
            return files.copy(local, path, replaces)
    try:
        if not files.is_remote(source) or not replaces or _opened(source)[0] is not _opened(path)[0]:
            with fetched(source) if files.is_remote(source) else contextlib.nullcontext(source) as local:
                upload(local, path, new=not replaces)
        else:
            with _asked(path, "could not be written") as (system, name):
                system.cp_file(_opened(source)[1], name)
                system.invalidate_cache()
    except FileExistsError:
        return False
    return True


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a file, if the file exists.

    Raises:
        OSError: the file could not be deleted.
    """
    with _asked(path, "could not be removed") as (system, name):
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(name)
        system.invalidate_cache()


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """Delete an empty folder, if the folder exists and the store has folders.

    Raises:
        OSError: the folder could not be deleted.
    """
    if _protocol(os.fspath(folder)) in _WHOLE_UPLOADS:  # in these stores, a folder is only a prefix of names
        return
    with _asked(folder, "could not be removed") as (system, path), contextlib.suppress(FileNotFoundError):
        system.rmdir(path)


def _put_new(system: Any, local: str, path: str, address: str | os.PathLike[str]) -> None:
    """Upload a file. If another process creates the object meanwhile, a store with conditional uploads refuses the
    upload. Other stores replace the object.
    """
    put = getattr(system, "_put_file", system.put_file)
    if "mode" not in inspect.signature(put).parameters:
        system.put_file(local, path)
        return
    try:
        system.put_file(local, path, mode="create")
    except Exception:
        system.invalidate_cache()
        if system.exists(path):
            raise FileExistsError(errno.EEXIST, "there is a file of this name", os.fspath(address)) from None
        # try without the mode "create", which the store may not support
        system.put_file(local, path)


def _put_and_rename(system: Any, local: str, path: str) -> None:
    folder = posixpath.dirname(path)
    temporary = posixpath.join(folder, f".{uuid.uuid4().hex}.part")
    try:
        if folder.strip("/"):
            system.makedirs(folder, exist_ok=True)
        system.put_file(local, temporary)
        if type(system).mv is fsspec_spec.AbstractFileSystem.mv:
            # fsspec's generic mv() would treat brackets in the name as a pattern
            system.cp_file(temporary, path)
        else:
            system.mv(temporary, path)
    finally:
        # the temporary object exists only after a failure, and an error here must not hide the first error
        with contextlib.suppress(Exception):
            system.rm_file(temporary)


def _opened(address: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system of an address, and the path in this file system. Drop the file system's cached listings.

    Raises:
        ConfigurationError: as in :func:`check`.
        OSError: the file system cannot be created.
    """
    text = os.fspath(address).replace("\\", "/")  # os.path.join writes backslashes on Windows
    check(text)

    with _explained(address, "could not be opened"):
        system, path = fsspec_core.url_to_fs(text)
        system.invalidate_cache()  # another process may have written files since the last listing
    return system, path


@contextlib.contextmanager
def _asked(address: str | os.PathLike[str], what: str) -> Iterator[tuple[Any, str]]:
    """Return a context that yields the result of :func:`_opened`, and turns errors into OSErrors."""
    opened = _opened(address)
    with _explained(address, what):
        yield opened


@contextlib.contextmanager
def _explained(address: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Return a context that turns errors into OSErrors with the address and the cause. A ConfigurationError is
    unchanged.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError, IsADirectoryError, ConfigurationError):
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = " ".join(f"{type(error).__name__}: {why or 'no message'}".split()).rstrip(".")
        raise OSError(number, f"{os.fspath(address)} {what} ({text})") from error


def _protocol(address: str) -> str:
    return address.partition("://")[0].lower()


def _trimmed(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rstrip('/')}" if rest.strip("/") else address
