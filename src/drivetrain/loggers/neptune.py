"""Log to Neptune."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drivetrain.base.introspect import reads
from drivetrain.base.packages import neptune, neptune_types
from drivetrain.base.rank_zero import rank_zero_only, rank_zero_warn
from drivetrain.loggers._run import RunLogger, array_of, flat, mapping_of


class NeptuneLogger(RunLogger):
    """Logs to a run of Neptune, through the package neptune 1.x. The service closed in March 2026, and the constructor
    warns about this.

    Use for example a TrackioLogger, which keeps runs on this machine.

    A resumed fit continues the checkpoint's run, if that was online: offline runs have no id.

    Args:
        api_key: the key; ``None``: the environment variable ``NEPTUNE_API_TOKEN``.
        project: ``workspace/project``; ``None``: the environment variable ``NEPTUNE_PROJECT``.
        name: the run's name.
        run: an existing run from ``neptune.init_run``.
        log_model_checkpoints: upload checkpoints.
        prefix: a text in front of every name, followed by a slash.
        neptune_run_kwargs: arguments of ``neptune.init_run``: ``mode="offline"``, ``tags``, ``with_id``, ...

    Raises:
        ConfigurationError: the package neptune is not installed.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        project: str | None = None,
        name: str | None = None,
        run: Any = None,
        log_model_checkpoints: bool | None = True,
        prefix: str = "training",
        **neptune_run_kwargs: Any,
    ) -> None:
        log_model: Literal["all"] | bool = "all" if log_model_checkpoints else False
        super().__init__("", neptune_run_kwargs.pop("with_id", None), "neptune", log_model)
        rank_zero_warn(
            "NeptuneLogger: the service Neptune closed in March 2026, so nothing can be sent to it. Use a "
            "TrackioLogger, CSVLogger or TensorBoardLogger, which keep runs on this machine, or a WandbLogger, "
            "MLFlowLogger or CometLogger."
        )
        self._folder = f"{prefix}/" if prefix else ""
        self._api_key = api_key
        self._project = project
        self._name = name
        self._kwargs = neptune_run_kwargs
        self._run = run
        if run is not None:
            self._run_id = _id_of(run)

    def _begin(self) -> Any:
        run = neptune.init_run(
            project=self._project, api_token=self._api_key, name=None if self._run_id else self._name,
            with_id=self._run_id, **self._kwargs,
        )  # fmt: skip
        self._run_id = self._run_id or _id_of(run)
        return run

    run: Any = reads("experiment", "The run, an alias of :attr:`experiment`.")

    name: str | None = reads("_name", "The run's name.")

    @property
    def save_dir(self) -> str:
        """The folder in which Neptune stores unsent data."""
        return os.path.join(os.getcwd(), ".neptune")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append each number to the series of its name, at ``step``."""
        for name, value in metrics.items():
            self.experiment[f"{self._folder}{name}"].append(value, step=step)

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Write ``params``, a mapping or a namespace, to the run's field ``hyperparams``."""
        for name, value in flat(mapping_of(params)).items():
            self.experiment[f"{self._folder}hyperparams/{name}"] = value

    @rank_zero_only
    def log_model_summary(self, model: Any, max_depth: int = -1) -> None:
        """Write the model's layers as text."""
        self.experiment[f"{self._folder}model/summary"].upload(
            neptune_types.File.from_content(str(model), extension="txt")
        )

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None) -> None:
        """Append images: arrays with values from 0 to 1, or PIL images."""
        for image, _ in self._each("log_image", key, images, {}):
            self.experiment[f"{self._folder}{key}"].append(neptune_types.File.as_image(array_of(image)), step=step)

    def _send(self, path: str, score: float | None, tag: str, callback: Any) -> None:
        folder = f"{self._folder}model"
        self.experiment[f"{folder}/checkpoints/{os.path.splitext(os.path.basename(path))[0]}"].upload(path)
        if tag == "best":
            self.experiment[f"{folder}/best_model_path"] = path
            if score is not None:
                self.experiment[f"{folder}/best_model_score"] = score

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send the remaining data. The run stays open for ``trainer.test``, until the program ends."""
        if self._run is not None:
            self._run[f"{self._folder}status"] = status
            self._run.sync(wait=False)


def _id_of(run: Any) -> str | None:
    """Return the run's id; ``None`` if the run is offline."""
    try:
        found = run["sys/id"].fetch()
    except Exception:  # an offline run may raise any exception
        return None
    return None if found is None else str(found)
