"""Log metrics, hyperparameters and graphs to files of TensorBoard."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_only, rank_zero_warn
from drivetrain.errors import check_installed, unknown_argument
from drivetrain.loggers._folder import FolderLogger
from drivetrain.loggers.dummy import Nothing
from drivetrain.module.export import detached, example_pass

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter

    from drivetrain.loggers._event_file import EventFile

with on_first_use:
    from drivetrain.loggers import _event_file


_WRITER_ARGUMENTS = ("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")
"""The arguments of SummaryWriter except ``log_dir``. They are listed here because importing SummaryWriter is slow."""

_RESUMED = ".resumed"  # event files written after a resume have this in their names


class TensorBoardLogger(FolderLogger):
    """Writes event files and ``hparams.yaml`` into the folder ``<save_dir>/<name>/version_<n>[/<sub_dir>]``.

    Between the first value and :meth:`finalize`, the logger has an open file and a thread. Later values, for example of
    ``trainer.test``, are appended to this file. Another process that continues the run writes a new file. A resumed fit
    with the same ``version`` continues the curves at the checkpoint's step. Events after this step move to files
    ``events_replaced.*``, because the fit logs these steps again. This does not apply to charts with several curves:
    there, TensorBoard hides the old events.

    Args:
        save_dir: the root folder; ``~`` and environment variables are expanded.
        name: the experiment's folder below ``save_dir``; "" or ``None``: no such folder.
        version: a number, a folder name, or ``None`` for the next free number.
        log_graph: whether to record the model's graph when a fit starts, if the model has an ``example_input_array``.
        default_hp_metric: whether to log ``hp_metric = -1`` with hyperparameters that have no metric. TensorBoard's
            table of hyperparameters shows only runs with a metric.
        prefix: a text in front of every metric's name, followed by a hyphen.
        sub_dir: a subfolder of the run's folder, for all files.
        kwargs: arguments of ``torch.utils.tensorboard.SummaryWriter``: ``max_queue``, ``flush_secs``, ...

    Raises:
        ConfigurationError: the package tensorboard is not installed, or ``version`` has a wrong type.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_installed("TensorBoardLogger", "tensorboard", "CSVLogger")
        if unknown := {key: value for key, value in kwargs.items() if key not in _WRITER_ARGUMENTS}:
            own = inspect.signature(TensorBoardLogger).parameters.keys() - {"kwargs"}
            raise unknown_argument("TensorBoardLogger", unknown, {*own, *_WRITER_ARGUMENTS})
        super().__init__(save_dir, name, version, prefix)
        self._sub_dir = None if sub_dir is None else os.path.expanduser(os.path.expandvars(os.fspath(sub_dir)))
        if self._sub_dir is not None:
            folder = os.path.join(self._runs_dir, self._sub_dir)
            files.check_folder("TensorBoardLogger", "sub_dir", sub_dir, folder, "scalars")
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._kwargs = kwargs
        self._writer: EventFile | None = None
        self._event_file: str | None = None  # the event file that this process writes
        self._owner = os.getpid()
        self._sizes: dict[str, int] = {}  # for each event file of the run, its size
        self._last: dict[str, int] = {}  # the last step of each curve
        # for each curve that a resumed fit has not continued yet, its last step in the checkpoint
        self._found: dict[str, int] = {}
        self._resumes_at: dict[str, Any] = {}  # the checkpoint's state; {} from the next logged value on

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_event_file": None}  # a copy writes a file of its own

    @property
    def sub_dir(self) -> str | None:  # type: ignore[override]  # read-only here
        """The argument ``sub_dir``: the name of a folder inside the run's folder."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        """This run's folder, including ``sub_dir``. It is created when the first value is written."""
        return os.path.join(super().log_dir, self._sub_dir) if self._sub_dir else super().log_dir

    @property
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter``, for images, histograms and so on. Reading it opens the writer.

        On ranks other than 0, this object ignores every call.
        """
        if rank_from_environ() != 0:
            return Nothing()  # type: ignore[return-value]
        self._forget_copy()
        self._forget_deleted()
        is_resumed = bool(self._resumes_at)
        if is_resumed:
            self._take_events_back()
        if self._writer is None:
            mark = _RESUMED if self._sizes else ""
            with self._explained(self.log_dir):
                self._writer = _event_file.EventFile(
                    self._here, self._event_file, mark, purges_charts=is_resumed and bool(mark), **self._kwargs
                )
            self._event_file = self._writer.event_file
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record each number as a scalar. A dictionary of numbers becomes a chart with several curves."""
        writer, values = self.experiment, self._named(metrics)
        if step is not None:
            curves = values.keys() - self._named({"epoch": 0}).keys()  # the Trainer adds "epoch" to every call
            # A resumed fit logs the checkpoint's step again, but the file already has these values.
            known = {name for name in curves if step <= self._found.get(name, step - 1)}
            if known and known == curves:
                return
            for name in curves - known:
                self._found.pop(name, None)
                self._last[name] = step
            values = {name: value for name, value in values.items() if name not in known}
        for name, value in values.items():
            if isinstance(value, Mapping):
                writer.add_scalars(name, value, step)
            else:
                writer.add_scalar(name, value, step)
        if self._mirror is not None and self._mirror.is_due:
            self._flush()

    @rank_zero_only
    def log_hyperparams(
        self, params: Any = None, metrics: Mapping[str, float] | float | None = None, step: int | None = None
    ) -> None:
        """Record ``params``, a mapping or a namespace, for TensorBoard's table of runs. A slash joins nested names.

        Args:
            params: the hyperparameters, which are added to those of earlier calls; ``None``: no new ones.
            metrics: numbers by name, with which to compare runs. A single number is called ``hp_metric``.
            step: the position of ``metrics`` on the x axis; 0 by default.
        """
        from torch.utils.tensorboard.summary import hparams

        self._keep_hparams(params)
        if not (is_result := metrics is not None):
            metrics = {"hp_metric": -1.0} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        file_writer = self.experiment._get_file_writer()  # type: ignore[no-untyped-call]
        if is_result:
            self._found = {name: at for name, at in self._found.items() if name not in self._named(metrics)}
        self.log_metrics(metrics, step or 0)
        # SummaryWriter.add_hparams would create another run in a subfolder.
        summaries = hparams(dict(_flat(self.hparams)), self._named(metrics))  # type: ignore[no-untyped-call]
        for summary in summaries:
            file_writer.add_summary(summary)

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Record the graph of ``model``, traced with ``input_array``. By default, this is the model's
        ``example_input_array``.

        Do nothing without ``log_graph=True``. The model is traced in evaluation mode and in the Trainer's precision,
        without an effect on the run (see :func:`~drivetrain.module.export.example_pass`). If the trace fails, warn and
        record no graph.
        """
        if not self._log_graph:
            return
        with example_pass(model, input_array) as inputs:
            if inputs is None:
                rank_zero_warn(
                    f"log_graph=True, but {type(model).__name__} has no example input to trace. "
                    "Set self.example_input_array in the module, or pass input_array."
                )
                return
            args, kwargs = inputs
            # torch's tracer reads every attribute. Without a Trainer, the attribute ``trainer`` would raise an error,
            # so trace a copy in which it is None.
            traced = model if getattr(model, "_trainer", None) is not None else detached(model)
            if kwargs:
                traced, args = _ByName(traced, list(kwargs)), tuple(kwargs.values())
            try:
                with warnings.catch_warnings():
                    # torch's own add_graph uses the tracer, which torch has deprecated.
                    warnings.filterwarnings("ignore", ".torch.jit.* is deprecated")
                    # Strict tracing does not support a dictionary as output.
                    self.experiment.add_graph(traced, args, use_strict_trace=False)
            except Exception as error:
                rank_zero_warn(
                    f"There is no graph, because tracing {type(model).__name__} failed "
                    f"({type(error).__name__}: {error}). Set example_input_array to inputs that forward takes, "
                    "or write log_graph=False."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the run's folder, the sizes of the event files, and the last step of each curve."""
        if not self._resumes_at:
            self._note_size()
        return {**self._place(), **(self._resumes_at or {"files": dict(self._sizes), "last": dict(self._last)})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the event files in ``state``, if the folder contains them. Later events in them move to other files
        when the next value is logged.
        """
        if (state["files"] and not self.numbers_runs) or self._continues:
            self._resumes_at = {name: {**state[name]} for name in ("files", "last")}

    def _note_size(self) -> None:
        """Record the size of this process's event file."""
        if self._writer is not None:
            self._writer.flush()
        if self._event_file is not None:
            with contextlib.suppress(OSError):  # the file was deleted
                self._sizes[os.path.basename(self._event_file)] = os.path.getsize(self._event_file)

    def _take_events_back(self) -> None:
        """Cut each event file to its size when the checkpoint was saved, and move later events to another file."""
        state, self._resumes_at = self._resumes_at, {}
        if self._writer is not None:
            self._writer.close()
        self._writer = self._event_file = None
        names = []
        with contextlib.suppress(FileNotFoundError):
            names = files.names(self.log_dir)
        if not (state["files"].keys() & set(names) or self._continues):
            return  # the state is for another folder
        self._sizes, self._last, self._found = state["files"], state["last"], dict(state["last"])
        for name in names:
            # Files with this name are from fits that resumed from this or a later checkpoint. If the checkpoint lists
            # no event file, all of them are later.
            is_later = name.startswith("events.out.") and (_RESUMED in name or not self._sizes)
            size = self._sizes.get(name, 0 if is_later else None)
            if size is not None:
                self._fetch(name)
                self._cut(name, size)

    def _cut(self, name: str, size: int) -> None:
        path = os.path.join(self._here, name)
        with open(path, "r+b") as file:
            file.seek(size)
            if behind := file.read():
                # TensorBoard does not read files with this name.
                replaced = f"events_replaced.{name.removeprefix('events.out.tfevents.')}"
                with open(os.path.join(self._here, replaced), "ab") as other:
                    other.write(behind)
                file.truncate(size)

    @rank_zero_only
    def save(self) -> None:
        """Write buffered values, and ``hparams.yaml``."""
        self._flush(also_empty=not self.is_undecided)
        if self._writer is None and not self.is_undecided:
            # save() is also called when a fit starts: an unusable folder then raises an error before training.
            self._look_into_folder()

    def _flush(self, also_empty: bool = False) -> None:
        self._forget_copy()
        self._forget_deleted()
        self._write_hparams(also_empty)
        if self._writer is not None:
            self._writer.flush()
        self._upload()

    def _forget_copy(self) -> None:
        """In a forked process, drop the writer. Its thread does not exist here, and waiting for it would hang."""
        if self._owner != os.getpid():
            self._writer, self._event_file, self._owner = None, None, os.getpid()

    def _forget_deleted(self) -> None:
        """Close the writer if its file was deleted. Otherwise later values would be lost without an error."""
        if self._event_file is None or os.path.exists(self._event_file):
            return
        rank_zero_warn(
            f"{self._event_file} was deleted, and the curves in it are lost. TensorBoardLogger begins a new file. "
            "Do not delete the folder of a run that is under way."
        )
        if self._writer is not None:
            self._writer.close()
        self._writer = self._event_file = None
        self._hparams_written = not self.hparams

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write buffered values, and close the writer with its file and its thread."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._mirror is not None:
            self._note_size()
            self._event_file = None  # the upload removes the local file
        self._upload(releases=True)


class _ByName(nn.Module):
    """Passes positional inputs to a model as keywords, because torch's tracer has no keywords."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self._names = model, names

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self._names, inputs, strict=True)))


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for key, value in params.items():
        name = files.encodable(f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        else:
            yield name, value if isinstance(value, (bool, int, float)) else files.encodable(str(value))
