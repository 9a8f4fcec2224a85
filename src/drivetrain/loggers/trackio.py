"""Log to Trackio, which keeps runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.base.introspect import reads
from drivetrain.base.packages import trackio
from drivetrain.base.rank_zero import rank_zero_only
from drivetrain.loggers._run import RunLogger, array_of, flat, mapping_of


class TrackioLogger(RunLogger):
    """Logs to a run of Trackio, in a database on this machine.

    The command ``trackio show`` shows the runs in a browser.

    The environment variable ``TRACKIO_DIR`` names the database's folder. Set it before trackio is imported. A resumed
    fit continues the checkpoint's run.

    Args:
        project: the project; by default the environment variable ``TRACKIO_PROJECT``, or else "lightning_logs".
        name: the run's name. A run that has this name is continued. ``None``: a new run, whose name Trackio chooses.
        prefix: a text in front of every metric's name, followed by a hyphen.
        kwargs: arguments of ``trackio.init``: ``group``, ``space_id``, ``server_url``, ``auto_log_gpu``, ...

    Raises:
        ConfigurationError: the package trackio is not installed.
    """

    def __init__(self, project: str | None = None, name: str | None = None, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(prefix, name, "trackio")
        self._project = project or os.environ.get("TRACKIO_PROJECT", "lightning_logs")
        self._init: dict[str, Any] = {"embed": False, **kwargs}
        # each trackio.init replaces the run's configuration
        self._init["config"] = dict(kwargs.get("config") or {})

    def _begin(self) -> Any:
        run = trackio.init(project=self._project, name=self._run_id, resume="allow", **self._init)
        self._run_id = run.name
        return run

    name: str | None = reads("_project", "The project.")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, or other values that ``trackio.log`` accepts, at ``step``."""
        self.experiment.log(self._named(metrics), step=step)

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Add ``params``, a mapping or a namespace, to the run's configuration. Trackio sends the configuration with
        the first values.
        """
        self._init["config"].update(flat(mapping_of(params)))
        self.experiment.config.update(self._init["config"])

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log images: tensors, arrays of 8-bit numbers, PIL images or paths. ``caption`` has an entry for each
        image.
        """
        for image, own in self._each("log_image", key, images, kwargs):
            self.log_metrics({key: trackio.Image(array_of(image), **own)}, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the remaining values. The run stays open, so that ``trainer.test`` can log to the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
