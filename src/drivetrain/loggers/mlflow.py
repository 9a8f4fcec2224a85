"""Log to MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drivetrain.base.packages import mlflow_context, mlflow_entities, mlflow_tracking
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from drivetrain.loggers._run import Tables, array_of, flat, local_folder, mapping_of

_REFUSED = re.compile(r"[^\w/. :-]+")
_BATCH = 100  # the number of parameters that MLflow accepts in one call
_LONGEST = 6000  # the maximum length of a parameter's value
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}


class MLFlowLogger(Tables):
    """Logs to a run of MLflow.

    A resumed fit continues the checkpoint's run. Values for steps that the run already contains are not logged again,
    so that the steps of a curve never decrease.

    Args:
        experiment_name: the experiment's name; a missing experiment is created.
        run_name: the run's name.
        tracking_uri: the address of the server or store; by default the environment variable ``MLFLOW_TRACKING_URI``,
            or else ``save_dir``.
        tags: the run's tags.
        save_dir: a local folder in which MLflow stores everything, if there is no ``tracking_uri``.
        log_model: whether to upload checkpoints as artifacts. "all": each one right after it was saved. True: at the
            end of the run, those that still exist.
        prefix: a text in front of every metric's name, followed by a hyphen.
        artifact_location: the location of a new experiment's artifacts; ``None``: the store's default.
        run_id: the id of a run to continue.
        synchronous: wait until MLflow has stored the values; ``None``: MLflow's default.

    Raises:
        ConfigurationError: MLflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        super().__init__(prefix, run_id, "mlflow", log_model)
        self._experiment_name = experiment_name
        self._experiment_id: str | None = None
        self._run_name = run_name
        tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        folder = save_dir or "./mlruns"
        self._tracking_uri = tracking_uri or f"file:{os.path.abspath(local_folder('MLFlowLogger', folder))}"
        self.tags = dict(tags or {})
        self._artifact_location = artifact_location
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._params: dict[str, str] = {}  # the logged parameters, whose values MLflow does not allow to change
        self._reached: dict[str, int] = {}  # in a resumed run, the last logged step of each name
        self._told = False

    # ---- the run -------------------------------------------------------------------------------------------------

    def _begin(self) -> Any:
        if self._tracking_uri.startswith("file:"):
            # MLflow 3 would otherwise refuse a folder, and ask for a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow_tracking.MlflowClient(self._tracking_uri)
        if self._run_id is None:
            experiment = client.get_experiment_by_name(self._experiment_name)
            if experiment is None:
                self._experiment_id = client.create_experiment(self._experiment_name, self._artifact_location)
            else:
                self._experiment_id = experiment.experiment_id
            tags = mlflow_context.resolve_tags({str(key): str(value) for key, value in self.tags.items()})
            run = client.create_run(experiment_id=self._experiment_id, tags=tags, run_name=self._run_name)
            self._run_id = run.info.run_id
        else:
            run = client.get_run(self._run_id)
            self._experiment_id = run.info.experiment_id
            self._params = dict(run.data.params)
            client.update_run(self._run_id, status="RUNNING")
            if self._resumed:
                self._reached = {
                    name: max(metric.step for metric in client.get_metric_history(self._run_id, name))
                    for name in run.data.metrics
                }
        return client

    @property
    def run_id(self) -> str | None:
        """The run's id. Reading it begins the run."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """The experiment's id. Reading it begins the run."""
        _ = self.experiment
        return self._experiment_id

    @property
    def name(self) -> str | None:
        """The experiment's name, or its id after the run has begun."""
        return self._experiment_id or self._experiment_name

    @property
    def save_dir(self) -> str | None:
        """The local folder, or ``None`` if a server stores the run."""
        return self._tracking_uri.removeprefix("file:") if self._tracking_uri.startswith("file:") else None

    # ---- values --------------------------------------------------------------------------------------------------

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at ``step``. Strings are left out. Characters that MLflow does not allow in names are dropped."""
        client, now, rows = self.experiment, int(time.time() * 1000), []
        for name, value in self._named(metrics).items():
            if isinstance(value, str):
                rank_zero_warn(f"MLFlowLogger leaves out {name}={value!r}, since a metric is a number.")
                continue
            if step is not None and step <= self._reached.get(_name(name), -1):
                continue
            rows.append(mlflow_entities.Metric(key=_name(name), value=float(value), timestamp=now, step=step or 0))
        if rows:
            client.log_batch(run_id=self._run_id, metrics=rows, **self._options)
        elif metrics and self._reached and not self._told:
            self._told = True
            rank_zero_info(
                f"MLFlowLogger: run {self._run_id} has continued since the checkpoint. Steps that it has already are "
                "not logged again."
            )

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Log ``params``, a mapping or a namespace, as the run's parameters. A slash joins nested names."""
        client = self.experiment
        texts = {_name(name): str(value)[:_LONGEST] for name, value in flat(mapping_of(params)).items()}
        new = [mlflow_entities.Param(name, text) for name, text in texts.items() if self._params.get(name) != text]
        for start in range(0, len(new), _BATCH):
            client.log_batch(run_id=self._run_id, params=new[start : start + _BATCH], **self._options)
        self._params.update(texts)

    # ---- media ---------------------------------------------------------------------------------------------------

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None) -> None:
        """Log images: arrays of shape (height, width[, channel]), or PIL images."""
        for index, (image, _) in enumerate(self._each("log_image", key, images, {})):
            name = key if len(images) == 1 else f"{key}_{index}"
            self.experiment.log_image(self._run_id, array_of(image), key=name, step=step or 0, synchronous=True)

    def _write_table(self, key: str, columns: Any, rows: Any, dataframe: Any, step: int | None) -> None:
        if dataframe is not None:
            columns, rows = list(map(str, dataframe.columns)), dataframe.values.tolist()
        table = {"columns": columns or [], "data": rows or []}
        self.experiment.log_dict(self._run_id, table, f"{_file(key, step)}.json")

    # ---- checkpoints, and the end --------------------------------------------------------------------------------

    def _send(self, path: str, score: float | None, tag: str, callback: Any) -> None:
        folder = f"model/checkpoints/{os.path.splitext(os.path.basename(path))[0]}"
        self.experiment.log_artifact(self._run_id, path, folder)
        about = {"path": path, "score": score, "aliases": [tag]}
        self.experiment.log_dict(self._run_id, about, f"{folder}/metadata.json")

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Upload the recorded checkpoints, and mark the run as ended. Logging another value opens it again."""
        if self._run is None:
            return
        super().finalize(status)
        self.experiment.set_terminated(self._run_id, _STATUS.get(status, status))


def _name(name: str) -> str:
    return _REFUSED.sub("", name)


def _file(key: str, step: int | None) -> str:
    return _name(key) if step is None else f"{_name(key)}-step{step}"
