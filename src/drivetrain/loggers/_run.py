"""Base class of loggers that write to a service. It handles the run's id, the ranks, and uploads of checkpoints and
tables.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from drivetrain.base import files
from drivetrain.base.introspect import reads
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info, rank_zero_only, rank_zero_warn
from drivetrain.errors import ConfigurationError, WrongTypeError, check_installed, wrong_value
from drivetrain.loggers.dummy import Nothing
from drivetrain.loggers.logger import Logger


class RunLogger(Logger):
    """A logger that writes to one run of a service such as MLflow.

    The run begins when a fit starts, when the first value is logged, or when :attr:`experiment` is read. A resumed fit
    continues the run of the checkpoint, unless the program passes another id.

    Args:
        prefix: a text in front of every metric's name, followed by a hyphen.
        run_id: the id of a run to continue; ``None``: a new run.
        package: the name of the service's package, for import and installation.
        log_model: whether to upload checkpoints. "all": each one right after it was saved. True: at the end of the run,
            those that still exist.

    Raises:
        ConfigurationError: the package is not installed.
    """

    def __init__(self, prefix: str, run_id: str | None, package: str, log_model: Literal["all"] | bool = False) -> None:
        super().__init__()
        check_installed(type(self).__name__, package, "CSVLogger")
        self._prefix = f"{prefix}{self.LOGGER_JOIN_CHAR}" if prefix else ""
        self._run_id = run_id
        self._given = run_id is not None
        self._run: Any = None
        # Whether the run of a checkpoint is continued. Values after the checkpoint are then logged a second time.
        self._resumed = False
        self._owner = os.getpid()
        self._log_model = log_model
        self._callback: Any = None  # the callback whose checkpoints are uploaded when the run ends
        self._sent: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_callback": None}  # a copy opens the run again

    # ---- the run -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> Any:
        """Continue the run ``_run_id``, or if it is ``None`` begin a run and set ``_run_id``. Return the service's
        object for the run.
        """

    version: str | None = reads("_run_id", "The run's id; ``None`` until it has begun.")

    @property
    def is_undecided(self) -> bool:
        """Whether the run has not begun yet."""
        return self._run_id is None

    @property
    def numbers_runs(self) -> bool:
        """Whether the service chooses the run's id. True if the program has passed no id."""
        return not self._given

    @property
    def experiment(self) -> Any:
        """The service's object for the run. Reading it begins the run.

        On ranks other than 0, this object ignores every call.

        Raises:
            ConfigurationError: the run cannot begin.
        """
        if rank_from_environ() != 0:
            return Nothing()
        if self._owner != os.getpid():  # the service's object has threads, which a fork does not copy
            self._run, self._owner = None, os.getpid()
        if self._run is None:
            try:
                self._run = self._begin()
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{type(self).__name__} cannot begin a run: {type(error).__name__}: {error} "
                    "Check its arguments and the service's key and address, or leave the logger out."
                ) from error
        return self._run

    def begin_run(self) -> None:
        """Begin the run, on rank 0."""
        _ = self.experiment

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        self._run_id = broadcast(self._run_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id, with which a resumed fit continues the run."""
        return {} if self._run_id is None else {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the checkpoint's run, unless the program has passed an id or a run has begun."""
        run_id = str(state["run_id"])
        if self._run_id is None:
            self._run_id = run_id
        self._resumed = self._run_id == run_id
        if self._resumed:
            rank_zero_info(f"{type(self).__name__} continues run {run_id}.")
        elif not self._given:
            rank_zero_warn(
                f"{type(self).__name__} writes to run {self._run_id}, which had begun before the checkpoint was read, "
                f"and the checkpoint continues run {run_id}. Read logger.experiment after trainer.fit, or pass the id."
            )

    # ---- values --------------------------------------------------------------------------------------------------

    def _named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._prefix}{name}": value for name, value in metrics.items()}

    def _each(self, method: str, key: str, values: Any, kwargs: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
        """Yield each of ``values`` with a dictionary that has one item of each list in ``kwargs``.

        Raises:
            ConfigurationError: ``values`` is not a list, or another list has a different length.
        """
        start = f"{type(self).__name__}.{method}({key!r})"
        if not isinstance(values, (list, tuple)):
            raise WrongTypeError(f"{start} got a {type(values).__name__}. Pass a list, even for one value.")
        for name, given in kwargs.items():
            if len(given) != len(values):
                raise ConfigurationError(
                    f"{start} got {len(values)} values and {len(given)} of {name}. Pass one for each value."
                )
        for index, value in enumerate(values):
            yield value, {name: given[index] for name, given in kwargs.items()}

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload the checkpoints now, or keep the callback to upload them at the end of the run."""
        if self._log_model == "all" or (self._log_model and getattr(checkpoint_callback, "save_top_k", 0) == -1):
            self._upload(checkpoint_callback)
        elif self._log_model:
            self._callback = checkpoint_callback

    @rank_zero_only
    def _upload(self, callback: Any) -> None:
        for path, score, tag in scored(callback, self._sent):
            self._send(path, None if score is None else float(score), tag, callback)
            self._sent[path] = os.stat(path).st_mtime_ns

    def _send(self, path: str, score: float | None, tag: str, callback: Any) -> None:
        """Upload one checkpoint that ``callback`` has saved; ``tag`` is "best" or "latest"."""
        raise NotImplementedError

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """After a successful run with ``log_model=True``, upload the checkpoints that still exist. The service's run
        stays open, so that ``trainer.test`` can log to it.
        """
        if status == "success" and self._callback is not None:
            self._upload(self._callback)


class Tables(RunLogger):
    """A logger for a service that can show tables and texts."""

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table: columns and rows, or a pandas DataFrame. MLflow and Comet store it as a file."""
        rows = None if data is None else [list(row) for row in data]
        self._write_table(key, None if columns is None else list(columns), rows, dataframe, step)

    @rank_zero_only
    def log_text(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log texts as a table, with the arguments of :meth:`log_table`."""
        self.log_table(key, columns, data, dataframe, step)

    @abstractmethod
    def _write_table(self, key: str, columns: Any, rows: Any, dataframe: Any, step: int | None) -> None:
        """Log a table from lists or from a pandas DataFrame."""


def array_of(image: Any) -> Any:
    """Return a tensor image as an array in host memory; return any other image unchanged."""
    return image.detach().cpu().numpy() if hasattr(image, "detach") else image


def mapping_of(params: Any) -> dict[str, Any]:
    """Return a mapping, a namespace or ``None`` as a dictionary."""
    return {} if params is None else dict(params) if isinstance(params, Mapping) else dict(vars(params))


def flat(params: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Flatten nested hyperparameters into one dictionary. A slash joins nested names. Values other than numbers and
    booleans become text.
    """
    found: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent}/{key}" if parent else str(key)
        if isinstance(value, Mapping) and value:
            found.update(flat(value, name))
        else:
            found[name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found


def local_folder(owner: str, value: str | os.PathLike[str]) -> str:
    """Return ``save_dir`` as a local path.

    Raises:
        ConfigurationError: ``save_dir`` is an address.
    """
    folder = files.spelled(value)
    if files.is_remote(folder):
        raise wrong_value(owner, "save_dir", folder, "a local folder, for the files of its package", 'save_dir="runs"')
    return folder


def scored(checkpoint_callback: Any, sent: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Return path, score and tag ("best" or "latest") of each checkpoint that is not uploaded, or has changed since.

    Args:
        checkpoint_callback: the callback that has written the checkpoints.
        sent: for each uploaded path, the file's modification time at the upload.
    """
    best = getattr(checkpoint_callback, "best_model_path", "")
    last = getattr(checkpoint_callback, "last_model_path", "")
    scores = {**getattr(checkpoint_callback, "best_k_models", {})}
    if best:
        scores.setdefault(best, getattr(checkpoint_callback, "best_model_score", None))
    if last:
        scores.setdefault(last, getattr(checkpoint_callback, "current_score", None))
    if any(map(files.is_remote, scores)):
        rank_zero_warn(
            "Checkpoints are not uploaded to the service of the logger, because they are at an address already: "
            f"{os.path.dirname(best or last)}. Write log_model=False, or a local dirpath."
        )
    written = {path: os.stat(path).st_mtime_ns for path in scores if os.path.exists(path)}
    new = [path for path in sorted(written, key=written.__getitem__) if sent.get(path) != written[path]]
    return [(path, scores[path], "best" if path == best else "latest") for path in new]
