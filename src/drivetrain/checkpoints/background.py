"""A checkpoint store that writes in a thread, through any other store."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError, shown


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints one after the other in a thread, while training continues.

    :meth:`save_checkpoint` returns when the checkpoint's tensors are copied to host memory, which must have room for
    two copies. A ModelCheckpoint removes and ranks files when they are written, and the end of a run waits for them. If
    a write fails, the next save or the end of the run raises its error.

    Args:
        checkpoint_io: the store that writes and reads; ``None``: files, as by default.

    Raises:
        ConfigurationError: ``checkpoint_io`` is not a CheckpointIO.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        if not isinstance(checkpoint_io, (CheckpointIO, type(None))):
            raise ConfigurationError(
                f"AsyncCheckpointIO(checkpoint_io={shown(checkpoint_io)}) is not a CheckpointIO. Pass an object "
                "of one, such as TorchCheckpointIO()."
            )
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        self._thread: ThreadPoolExecutor | None = None
        # path -> a write that is running, or whose error was not raised yet
        self._writes: dict[str, Future[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None, "_writes": {}}  # a thread cannot be pickled

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy ``checkpoint``, and start writing the copy to ``path``."""
        kept = _copied(dict(checkpoint), {})
        self._begin(path, self.checkpoint_io.save_checkpoint, kept, path, storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.wait(path)
        self.checkpoint_io.remove_checkpoint(path)

    def is_sharded(self, path: str | Path) -> bool:
        return self.checkpoint_io.is_sharded(path)

    def written_at(self, path: str | Path) -> float | None:
        return self.checkpoint_io.written_at(path)

    def exists(self, path: str | Path) -> bool:
        return self.checkpoint_io.exists(path)

    def find(self, folder: str | Path, pattern: str) -> list[str]:
        return self.checkpoint_io.find(folder, pattern)

    def is_complete(self, path: str | Path) -> bool:
        return self.checkpoint_io.is_complete(path)

    def copy(self, source: str | Path, path: str | Path, link: bool = False, replaces: bool = True) -> bool:
        """Copy or link ``source``; if ``source`` is still being written, the thread does it afterwards, and this call
        does not wait.
        """
        if self.is_durable(source):
            return self.checkpoint_io.copy(source, path, link, replaces)
        if not replaces and self.exists(path):
            return False
        written = self._writes[str(source)]

        def copy_when_written() -> None:
            written.result()  # raises the exception of a failed write; the thread has already run it
            self.checkpoint_io.copy(source, path, link)

        self._begin(path, copy_when_written)
        return True

    def link_target(self, path: str | Path) -> str | None:
        return self.checkpoint_io.link_target(path)

    def resolve(self, path: str | Path) -> str:
        return self.checkpoint_io.resolve(path)

    def is_durable(self, path: str | Path) -> bool:
        write = self._writes.get(str(path))
        if write is not None and not (write.done() and write.exception() is None):
            return False
        return self.checkpoint_io.is_durable(path)

    def wait(self, path: str | Path | None = None) -> None:
        for name in list(self._writes) if path is None else [str(path)]:
            if (write := self._writes.pop(name, None)) is None:
                continue
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
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self.checkpoint_io.teardown()

    def _begin(self, path: str | Path, function: Callable[..., Any], *args: Any) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drivetrain-checkpoints")
        self._writes[str(path)] = self._thread.submit(function, *args)


def _copied(value: Any, seen: dict[Any, Tensor]) -> Any:
    """Return a copy in host memory; tensors that share memory, such as tied weights, share it in the copy."""
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: _copied(each, seen) for key, each in value.items()}
        return type(value)(_copied(each, seen) for each in value)
    if type(value) is not Tensor:
        return copy.deepcopy(value)
    key = value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
    if value.data_ptr() == 0 or key not in seen:
        seen[key] = value.detach().to("cpu", copy=True)
    return seen[key]
