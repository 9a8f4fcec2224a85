"""Write checkpoints in the background, while training continues."""

from __future__ import annotations

import contextlib
import os
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drivetrain.base import files
from drivetrain.base.introspect import calls
from drivetrain.base.rank_zero import any_rank_info
from drivetrain.base.restoring import shown_error
from drivetrain.checkpoints import container, file
from drivetrain.checkpoints.arena import Arena, NoRoomError, copied, fresh
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.checkpoints.writer import Writer, WriterEndedError
from drivetrain.errors import CheckpointError, ConfigurationError, shown

_LOCK_PATIENCE_S = 600.0
_LONG_S = 60.0  # the number of seconds to wait before a line is logged


class Later:
    """An entry of a checkpoint that is computed only when the checkpoint is written. An example is the checksum of a
    file.

    Args:
        value: a function that returns the entry. The thread of :class:`AsyncCheckpointIO` calls the function once.
    """

    def __init__(self, value: Callable[[], Any]) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Later:
        return self


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints in the background, one after the other, while training continues.

    :meth:`save_checkpoint` copies the checkpoint's tensors to host memory, or queues the copies on a GPU, and returns.
    If the host has too little memory, the method waits until the checkpoint is written, and logs a line. A separate
    process writes local files. The process starts when a fit starts or an Engine sets up a model. It uses only
    processor time that training does not need. A thread writes files at addresses. If ``checkpoint_io`` is of another
    class than :class:`TorchCheckpointIO`, the thread writes all files. A ModelCheckpoint updates its best checkpoints
    and removes old files only when the new files are written. The end of a run waits for all writes. If a write fails,
    the next save or the end of the run raises the error.

    Args:
        checkpoint_io: the store that reads and writes; ``None``: :class:`TorchCheckpointIO`.

    Raises:
        ConfigurationError: ``checkpoint_io`` is not a CheckpointIO.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        if not isinstance(checkpoint_io, (CheckpointIO, type(None))):
            raise ConfigurationError(
                f"AsyncCheckpointIO(checkpoint_io={shown(checkpoint_io)}) is not a CheckpointIO. Pass an object "
                "of one, such as TorchCheckpointIO()."
            )
        self.checkpoint_io = file.TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        self._forget()

    def _forget(self) -> None:
        _stores.add(self)
        self._thread: ThreadPoolExecutor | None = None
        self._arena: Arena | None = None
        self._writer: Writer | None = None
        self._has_process = True  # False if the process could not be started
        # the running and failed writes by path, until the error of a failed write is raised
        self._writes: dict[str, Future[Any]] = {}
        self._running: list[Future[Any]] = []  # the writes of the last save
        self._copies: Future[None] = Future()  # completed when all copies are made, or queued on devices
        self._copies.set_result(None)
        self._saving = 0  # the number of open contexts of one_save()
        self._in_place = False  # whether tensors are written without a copy (see hold())
        self._is_new = False  # whether an existing file must not be replaced

    def __getstate__(self) -> dict[str, Any]:
        return {"checkpoint_io": self.checkpoint_io}  # a thread and a process cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    # ---- saving --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the writing process. If the start fails, log the reason and let a thread write files."""
        if self._writer is not None or os.name != "posix" or not file.writes_files(self.checkpoint_io):
            return
        self._arena = self._arena or Arena()
        if not self._has_process:
            return
        try:
            self._writer = Writer(self._arena)
        except WriterEndedError as error:
            self._has_process = False
            any_rank_info(
                f"The process that writes checkpoints in the background does not work: {error}. A thread of this "
                "process writes them instead, which slows training down while it writes."
            )

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy ``checkpoint``, and begin to write the copy to ``path``."""
        with self.one_save():
            self.begin(path, self._write, self.hold(dict(checkpoint), path), path, storage_options, self._is_new)

    @contextlib.contextmanager
    def alone_in(self, folder: str | Path) -> Iterator[None]:
        """Return a context in which only this run chooses file names in ``folder``. Other runs wait in this method
        until the files are written, so no run replaces another run's file.
        """
        self._settle()
        with contextlib.suppress(OSError):  # the save will raise the error
            os.makedirs(folder, exist_ok=True)
        line = f"Training waits while another run writes a checkpoint to {folder}. Give each run a folder of its own."
        unlock = files.locked(folder, _LOCK_PATIENCE_S, lambda: any_rank_info(line))
        try:
            yield
        finally:
            if self._thread is None:
                unlock()
            else:
                self._running.append(self._thread.submit(unlock))

    @contextlib.contextmanager
    def new_files(self) -> Iterator[list[str]]:
        """Return a context in which no file is replaced. If another run's file exists at the path, the write fails."""
        self._is_new = True
        try:
            yield []
        finally:
            self._is_new = False

    @contextlib.contextmanager
    def one_save(self) -> Iterator[None]:
        """Return a context in which the caller saves one checkpoint. For each file of the checkpoint, the caller calls
        :meth:`hold` and :meth:`begin`. The context first waits until the previous checkpoint is written, because the
        new copies overwrite the previous copies.

        Raises:
            CheckpointError: a file of the previous checkpoint could not be written.
        """
        if not self._saving:
            self._settle()
            self._running.clear()
            self._writes = {name: write for name, write in self._writes.items() if write.exception() is not None}
            for failed in self._writes:
                self.wait(failed)  # raises the error of this write
            self._in_place = False
            if self._arena is not None:
                self._arena.clear()
                self._arena.hurry(False)
            self._copies = Future()
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1
            if not self._saving:
                self._fill()
                if self._in_place:
                    self._settle()

    def _fill(self) -> None:
        """Copy the values of the tensors. The writing thread pickles the structure during the copy, and not during
        later steps.
        """
        try:
            if self._arena is not None:
                self._arena.fill()
        except BaseException as error:
            self._copies.set_exception(CheckpointError(f"The state could not be copied: {shown_error(error)}"))
            raise
        self._copies.set_result(None)

    def _wait_for_copies(self) -> None:
        self._copies.result()
        if self._arena is not None:
            self._arena.wait()

    def _settle(self) -> None:
        """Wait until the last checkpoint is written or has failed."""
        if self._arena is not None:
            self._arena.hurry(True)
        _finish(self._running)

    def hold(self, tree: Any, path: str | Path) -> Any:
        """Return a copy of ``tree`` for :meth:`begin`. Call this method in a context of :meth:`one_save`. Changes to
        ``tree`` after the context do not change the copy. The copy fails if the host has too little memory, or if an
        object in ``tree`` does not support copying. Then the method logs the reason and returns ``tree`` itself. The
        context then waits until the files are written.
        """
        hold = fresh  # other stores may keep the tensors, so each copy needs new memory
        if self._is_for_process(path):
            self.start()
            assert self._arena is not None  # made by start()
            hold = self._arena.hold
        try:
            return copied(tree, hold)
        except Exception as error:
            why = error if isinstance(error, NoRoomError) else f"an object in it cannot be copied: {shown_error(error)}"
            any_rank_info(f"Training waits until {path} is written: {why}.")
            self._in_place = True
            return tree

    def _is_for_process(self, path: str | Path) -> bool:
        return os.name == "posix" and file.writes_files(self.checkpoint_io) and not files.is_remote(path)

    def begin(self, path: str | Path, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Let the writing thread call ``function``, which makes the file at ``path`` durable."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drivetrain-checkpoints")
        self._writes[str(path)] = future = self._thread.submit(function, *args)
        self._running.append(future)
        return future

    def written(self, path: str | Path) -> Future[Any]:
        """Return the future of the write of ``path``, and stop tracking the write. If the write fails, the caller must
        raise the error.
        """
        if (write := self._writes.pop(str(path), None)) is None:  # a strategy wrote the file without this store
            write = Future()
            write.set_result(None)
        return write

    def copy_later(
        self, copy: Callable[..., bool], source: str | Path, path: str | Path, link: bool, replaces: bool
    ) -> bool:
        """Let the writing thread call ``copy`` after it has written ``source``. If the write fails, ``copy`` is not
        called. If ``path`` exists and ``replaces`` is False, return False and copy nothing.
        """
        if not replaces and self.exists(path):
            return False
        written = self._writes[str(source)]

        def when_written() -> None:
            # raises the error of a failed write; the thread has already finished this write
            written.result()
            if copy(source, path, link, replaces) is False:
                raise _taken(path)

        self.begin(path, when_written)
        return True

    def _write(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any, is_new: bool
    ) -> dict[str, Any] | None:
        """Write a file. If the writing process wrote the file, return the file's ``size`` and ``crc32``."""
        with self.checkpoint_io.new_files() if is_new else contextlib.nullcontext() as refused:
            receipt = self._write_file(checkpoint, path, storage_options)
        if refused:
            raise _taken(path)
        return receipt

    def _write_file(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> dict[str, Any] | None:
        checkpoint = {key: each.value() if isinstance(each, Later) else each for key, each in checkpoint.items()}
        if storage_options is None and self._is_for_process(path):

            def write(content: dict[str, Any], target: Path | str, new: bool) -> dict[str, Any] | None:
                return self.write_records(Path(target), container.records_of(content), zipped=True, new=new)

            if (receipt := file.save(checkpoint, path, write)) is not None or self.checkpoint_io.was_refused(path):
                return receipt
        self._wait_for_copies()
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        return None

    def write_records(self, path: Path, records: list[tuple[str, Any]], **options: Any) -> dict[str, Any] | None:
        """Let the writing process write a file (see :meth:`Writer.write`). Call this method only through :meth:`begin`.

        Returns:
            The answer of the process. If the process is not running or has failed, ``None``: the caller must write the
            file.
        """
        self._wait_for_copies()
        if self._writer is None or self._in_place:
            return None
        try:
            return self._writer.write(path, records, **options)
        except WriterEndedError as error:
            self._writer = None
            any_rank_info(
                f"The process that writes checkpoints in the background has failed: {error}. This process writes "
                f"{path}, and starts another one for the next checkpoint."
            )
            if options.get("new") and _has_written(path, records):
                files.sync_directory(path.parent)
                return {}  # the caller can compute the size and the checksum from the file
            return None

    # ---- methods of the inner store ----------------------------------------------------------------------------

    exists = calls("checkpoint_io.exists")
    find = calls("checkpoint_io.find")
    is_complete = calls("checkpoint_io.is_complete")
    is_sharded = calls("checkpoint_io.is_sharded")
    link_target = calls("checkpoint_io.link_target")
    resolve = calls("checkpoint_io.resolve")
    written_at = calls("checkpoint_io.written_at")

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.wait(path)
        self.checkpoint_io.remove_checkpoint(path)

    def copy(self, source: str | Path, path: str | Path, link: bool = False, replaces: bool = True) -> bool:
        """Copy or link ``source``. If ``source`` is still being written, the thread makes the copy or link later."""
        if self.is_durable(source):
            return self.checkpoint_io.copy(source, path, link, replaces)
        return self.copy_later(self.checkpoint_io.copy, source, path, link, replaces)

    def is_durable(self, path: str | Path) -> bool:
        write = self._writes.get(str(path))
        if write is not None and not (write.done() and write.exception() is None):
            return False
        return self.checkpoint_io.is_durable(path)

    def wait(self, path: str | Path | None = None) -> None:
        for name in list(self._writes) if path is None else [str(path)]:
            if (write := self._writes.pop(name, None)) is None:
                continue
            if self._arena is not None:
                self._arena.hurry(True)
            _finish([write])
            try:
                write.result()
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{name} could not be written: {type(error).__name__}: {error}. What was there before is "
                    f"untouched. Check {type(self.checkpoint_io).__name__}, which writes it."
                ) from error
        self.checkpoint_io.wait(path)

    def teardown(self) -> None:
        self._settle()
        if self._thread is not None:
            self._thread.shutdown()
        if self._writer is not None:
            self._writer.close()
        if self._arena is not None:
            self._arena.close()
        self._thread = self._writer = self._arena = None
        self.checkpoint_io.teardown()


def _finish(writes: Iterable[Future[Any]]) -> None:
    """Wait for the end of ``writes``. After a long wait, log how to end this process at once."""
    if futures.wait(writes, _LONG_S).not_done:
        any_rank_info(
            f"This process has waited {_LONG_S:g} s for the disk to write checkpoints, and continues to wait. To end "
            "without them, kill it (SIGKILL): the newest complete checkpoint stays."
        )
        futures.wait(writes)


def _has_written(path: Path, records: Iterable[tuple[str, Any]]) -> bool:
    """Return whether the file was complete when the writing process failed. Random states make the pickled structure
    unique, so a file with the structure in ``records`` is not another run's file.
    """
    with contextlib.suppress(OSError, KeyError, zipfile.BadZipFile), zipfile.ZipFile(path) as found:
        return all(found.read(name) == content for name, content in records if isinstance(content, bytes))
    return False


def _taken(path: str | Path) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} was not written, because another run has meanwhile put a file there, which stays. Give "
        "each run a folder of its own."
    )


_stores: weakref.WeakSet[AsyncCheckpointIO] = weakref.WeakSet()


def _forget_all() -> None:
    """Reset each store in a forked process, which does not inherit the writing thread."""
    for store in list(_stores):
        store._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
