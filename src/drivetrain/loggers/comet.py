"""Log to Comet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.base.packages import comet_ml
from drivetrain.base.rank_zero import LightningDeprecationWarning, rank_zero_only, rank_zero_warn
from drivetrain.loggers._run import Tables, array_of, flat, mapping_of

if TYPE_CHECKING:
    from torch import Tensor, nn


_FORMER = {
    "experiment_name": "name=...",
    "project_name": "project=...",
    "offline": "online=not ...",
    "save_dir": "offline_directory=...",
}
"""What to write instead of an argument's earlier name."""


class CometLogger(Tables):
    """Logs to an experiment of Comet.

    A resumed fit continues the checkpoint's experiment.

    Args:
        api_key: the key; ``None``: the environment variable ``COMET_API_KEY`` or Comet's configuration file.
        workspace: the workspace; ``None``: the account's default.
        project: the project; ``None``: Comet's default.
        experiment_key: the key of an experiment to continue.
        mode: "get_or_create" (Comet's default), "get" or "create".
        online: if False, write an archive to a local folder. The command ``comet upload`` sends it later.
        prefix: a text in front of every metric's name, followed by a hyphen.
        kwargs: arguments of ``comet_ml.ExperimentConfig``: ``name``, ``tags``, ``offline_directory``, ...

    Raises:
        ConfigurationError: the package comet_ml is not installed.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        former = {name: kwargs.pop(name) for name in _FORMER if name in kwargs}
        for name in former:
            rank_zero_warn(
                f"CometLogger({name}=...) is deprecated. Write {_FORMER[name]} instead.", LightningDeprecationWarning
            )
        project = project or former.get("project_name")
        online = (not former["offline"] if "offline" in former else None) if online is None else online
        for name, today in (("experiment_name", "name"), ("save_dir", "offline_directory")):
            if name in former:
                kwargs.setdefault(today, former[name])
        super().__init__(prefix or "", experiment_key, "comet_ml")
        self._api_key = api_key
        self._workspace = workspace
        self._project = project or os.environ.get("COMET_PROJECT_NAME")
        self._mode = mode
        self._online = online
        self._config = kwargs

    def _begin(self) -> Any:
        mode = self._mode
        if self._resumed and (self._online is False or mode == "create"):
            # "create" would create another experiment
            mode = "get"
        run = comet_ml.start(
            api_key=self._api_key, workspace=self._workspace, project=self._project, experiment_key=self._run_id,
            mode=mode, online=self._online,
            experiment_config=comet_ml.ExperimentConfig(**self._config),
        )  # fmt: skip
        self._run_id = run.get_key()
        run.log_other("Created from", "drivetrain")
        return run

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project or "comet-default"

    @property
    def save_dir(self) -> str | None:
        """The folder of the archive with ``online=False``; otherwise ``None``."""
        return self._config.get("offline_directory")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at ``step``. A number called "epoch" also sets Comet's epoch."""
        row = self._named(metrics)
        epoch = metrics.get("epoch")
        self.experiment.log_metrics(row, step=step, epoch=None if epoch is None else int(epoch))

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Log ``params``, a mapping or a namespace. A slash joins nested names."""
        self.experiment.log_parameters(flat(mapping_of(params)))

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Log the model's layers as text."""
        self.experiment.set_model_graph(str(model))

    # ---- media ---------------------------------------------------------------------------------------------------

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log images: arrays, PIL images or paths. Each list in ``kwargs`` has an entry for each image."""
        for image, own in self._each("log_image", key, images, kwargs):
            self.experiment.log_image(array_of(image), name=key, step=step, **own)

    @rank_zero_only
    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log sounds: paths, or arrays together with their ``sample_rate``."""
        for audio, own in self._each("log_audio", key, audios, kwargs):
            self.experiment.log_audio(audio, file_name=f"{key}.wav", step=step, **own)

    @rank_zero_only
    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log videos: paths."""
        for video, own in self._each("log_video", key, videos, kwargs):
            self.experiment.log_video(video, name=key, step=step, **own)

    def _write_table(self, key: str, columns: Any, rows: Any, dataframe: Any, step: int | None) -> None:
        if dataframe is not None:
            self.experiment.log_table(f"{key}.csv", dataframe)
        else:
            self.experiment.log_table(f"{key}.csv", rows or [], headers=columns or [])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send the remaining data. The experiment stays open for ``trainer.test``, until the program ends."""
        if self._run is not None:
            self._run.log_other("Status", status)
            if hasattr(self._run, "flush"):
                self._run.flush()
