"""A SummaryWriter of TensorBoard that can append to an existing event file."""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import Any, cast

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter, _AsyncWriter  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard import FileWriter, SummaryWriter

_NUMBERS = itertools.count()


class EventFile(SummaryWriter):
    """Writes one event file of TensorBoard. It creates a new file, or appends to an existing one.

    Args:
        log_dir: the folder of a new file.
        event_file: the file to append to; ``None``: a new file.
        mark: a text in a new file's name, before the suffix.
        purges_charts: whether to hide values of earlier processes in charts with several curves, from the step of this
            process's first value on. Each curve of such a chart has a separate folder, with files of its own.
        kwargs: arguments for ``SummaryWriter``.

    Attributes:
        event_file: the path of the event file.
    """

    def __init__(
        self, log_dir: str, event_file: str | None = None, mark: str = "", purges_charts: bool = False, **kwargs: Any
    ) -> None:
        suffix = kwargs.get("filename_suffix", "")
        # TensorBoard reads files in the order of their names. The last number is for files of the same second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS):05d}"
        self.event_file = event_file or os.path.join(log_dir, name + mark + suffix)
        self._begun, self._purges_charts = event_file is not None, purges_charts
        if self._begun:
            kwargs.pop("purge_step", None)  # the existing file has done this
        super().__init__(log_dir, **kwargs)

    def _get_file_writer(self) -> Any:
        if self.all_writers is None or self.file_writer is None:
            writer: Any = FileWriter.__new__(FileWriter)
            writer.event_writer = _Appending(self.event_file, self.max_queue, self.flush_secs)
            state: dict[str, Any] = vars(self)
            state["file_writer"], state["all_writers"] = writer, {writer.get_logdir(): writer}
            if not self._begun:
                self._begun = True
                self._begin(writer)
        return self.file_writer

    def _begin(self, writer: Any) -> None:
        source = SourceMetadata(writer="drivetrain")
        event = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
        writer.event_writer.add_event(event)
        if self.purge_step is not None:
            _purge(writer, self.purge_step)
        writer.flush()

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: Any, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        folder, writers = self._get_file_writer().get_logdir(), cast(dict[str, Any], self.all_writers)
        for tag in tag_scalar_dict if self._purges_charts and global_step is not None else ():
            name = f"{folder}/{main_tag.replace('/', '_')}_{tag}"  # as in the base class
            if name not in writers:
                writers[name] = FileWriter(name, self.max_queue, self.flush_secs, self.filename_suffix)
                _purge(writers[name], global_step)
        super().add_scalars(main_tag, tag_scalar_dict, global_step, walltime)


def _purge(writer: Any, step: int | None) -> None:
    """Let TensorBoard hide events for ``step`` and later steps in the earlier files of the writer's folder."""
    writer.add_event(Event(step=step, file_version="brain.Event:2"))
    writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))


class _Appending(EventFileWriter):  # type: ignore[misc]
    """tensorboard's writer of event files, but it appends to the file, and accepts paths that are not UTF-8."""

    def __init__(self, path: str, max_queue: int, flush_secs: float) -> None:
        self._logdir = os.path.dirname(path)
        os.makedirs(self._logdir, exist_ok=True)
        self._general_file_writer = open(path, "ab")  # noqa: SIM115  # closed by the writer
        self._async_writer = _AsyncWriter(RecordWriter(self._general_file_writer), max_queue, flush_secs)
