"""Log to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from drivetrain.base.introspect import reads
from drivetrain.base.packages import wandb
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_only
from drivetrain.errors import ConfigurationError, check_choice
from drivetrain.loggers._run import Tables, local_folder, mapping_of

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack


_STEP = "trainer/global_step"
_SETTINGS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")
"""Attributes of ModelCheckpoint that are stored with each uploaded checkpoint."""


class InitArguments(TypedDict, total=False):
    """The arguments of ``wandb.init`` that WandbLogger accepts, for type checkers and the command line."""

    entity: str | None
    notes: str | None
    tags: Sequence[str] | None
    config: Any
    config_exclude_keys: list[str] | None
    config_include_keys: list[str] | None
    allow_val_change: bool | None
    group: str | None
    job_type: str | None
    mode: str | None
    force: bool | None
    reinit: bool | str | None
    resume: bool | str | None
    resume_from: str | None
    fork_from: str | None
    save_code: bool | None
    tensorboard: bool | None
    sync_tensorboard: bool | None
    monitor_gym: bool | None
    settings: Any


class WandbLogger(Tables):
    """Logs to a run of Weights & Biases.

    The x axis of the curves is ``trainer/global_step``. It is not wandb's own step, because wandb drops values of
    earlier steps, which a resumed fit logs. A resumed fit continues the checkpoint's run.

    Args:
        name: the run's name.
        save_dir: the folder for wandb's files.
        version: an alias of ``id``.
        offline: keep the run on this machine. The command ``wandb sync`` uploads it later.
        dir: an alias of ``save_dir``.
        id: the run's id. A run that has this id is continued.
        anonymous: log without an account.
        project: the project; by default the environment variable ``WANDB_PROJECT``, or else "lightning_logs".
        log_model: whether to upload checkpoints. "all": each one right after it was saved. True: at the end of the run,
            those that still exist.
        experiment: an existing run from ``wandb.init``.
        prefix: a text in front of every metric's name, followed by a hyphen.
        checkpoint_name: the name of the artifact with checkpoints; ``None``: ``model-<run id>``.
        add_file_policy: "mutable" copies each checkpoint before the upload; "immutable" uploads without a copy.
        kwargs: arguments of ``wandb.init``: ``entity``, ``tags``, ``group``, ``config``, ...

    Raises:
        ConfigurationError: the package wandb is not installed, or both ``log_model`` and ``offline`` are set.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Unpack[InitArguments],
    ) -> None:
        if offline and log_model:
            raise ConfigurationError(
                f"WandbLogger(offline=True, log_model={log_model!r}): checkpoints are uploaded, which needs a "
                "connection. Leave one of the two out."
            )
        check_choice("WandbLogger", "add_file_policy", add_file_policy, ("mutable", "immutable"))
        given = getattr(experiment, "id", None) or version or id
        super().__init__(prefix, given, "wandb", log_model)
        self._name = name
        self._project = project or os.environ.get("WANDB_PROJECT", "lightning_logs")
        self._save_dir = local_folder("WandbLogger", dir if dir is not None else save_dir)
        self.add_file_policy = add_file_policy
        self._checkpoint_name = checkpoint_name
        self._run = experiment
        self._init: dict[str, Any] = {"resume": "allow", **kwargs}
        if offline:
            self._init["mode"] = "offline"
        if anonymous:
            self._init["anonymous"] = "allow"
        self._has_tensorboard = bool(kwargs.get("sync_tensorboard"))
        if experiment is not None:
            self._define_axis(experiment)

    def _begin(self) -> Any:
        running = wandb.run
        if running is not None and self._run_id in (None, running.id):
            rank_zero_info(f"WandbLogger writes to run {running.id}, which this process has begun already.")
            run = running
        else:
            if running is not None:
                self._init.setdefault("reinit", "create_new")
            os.makedirs(self._save_dir, exist_ok=True)
            run = wandb.init(
                project=self._project, name=self._name, id=self._run_id, dir=self._save_dir, **self._init
            )  # fmt: skip
        self._run_id = run.id
        self._define_axis(run)
        return run

    def _define_axis(self, run: Any) -> None:
        # wandb has another x axis for values that it takes over from TensorBoard
        if getattr(run, "define_metric", None) and self._has_tensorboard:
            run.define_metric("*", step_metric="global_step")
        elif getattr(run, "define_metric", None):
            run.define_metric(_STEP)
            run.define_metric("*", step_metric=_STEP, step_sync=True)

    save_dir: str = reads("_save_dir", "The folder for wandb's files.")

    name: str | None = reads("_project", "The project.")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, or other values that ``wandb.log`` accepts."""
        row = self._named(metrics)
        self.experiment.log(row if step is None or self._has_tensorboard else {**row, _STEP: step})

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Add ``params``, a mapping or a namespace, to the run's configuration."""
        self.experiment.config.update(_plain(mapping_of(params)), allow_val_change=True)

    @rank_zero_only
    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Let wandb log histograms of the gradients or the parameters of ``model`` after every ``log_freq`` batches."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    # ---- media ---------------------------------------------------------------------------------------------------

    def _write_table(self, key: str, columns: Any, rows: Any, dataframe: Any, step: int | None) -> None:
        self.log_metrics({key: wandb.Table(columns=columns, data=rows, dataframe=dataframe)}, step)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log images: tensors, arrays, PIL images or paths. Each list in ``kwargs``, such as ``caption``, has an entry
        for each image.
        """
        self._log_media("log_image", "Image", key, images, step, kwargs)

    @rank_zero_only
    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log sounds: paths, or arrays together with their ``sample_rate``."""
        self._log_media("log_audio", "Audio", key, audios, step, kwargs)

    @rank_zero_only
    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log videos: arrays of shape (time, channel, height, width), or paths."""
        self._log_media("log_video", "Video", key, videos, step, kwargs)

    def _log_media(
        self, method: str, kind: str, key: str, values: Any, step: int | None, kwargs: Mapping[str, Any]
    ) -> None:
        media = getattr(wandb, kind)
        self.log_metrics({key: [media(value, **own) for value, own in self._each(method, key, values, kwargs)]}, step)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _send(self, path: str, score: float | None, tag: str, callback: Any) -> None:
        names = {name: name.lstrip("_") for name in _SETTINGS}
        settings = {name: getattr(callback, own) for name, own in names.items() if hasattr(callback, own)}
        metadata = {"score": score, "original_filename": os.path.basename(path), type(callback).__name__: settings}
        name = self._checkpoint_name or f"model-{self.experiment.id}"
        artifact = wandb.Artifact(name=name, type="model", metadata=metadata)
        artifact.add_file(path, name="model.ckpt", policy=self.add_file_policy)
        self.experiment.log_artifact(artifact, aliases=["latest", "best"] if tag == "best" else ["latest"])

    @staticmethod
    @rank_zero_only
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str:
        """Download an artifact, such as a checkpoint, and return the folder with its files.

        Args:
            artifact: the artifact's name in wandb, ``entity/project/name:version``.
            save_dir: the target folder; ``None``: wandb's folder.
            artifact_type: the artifact's type.
            use_artifact: whether to record in the run, if there is one, that it uses the artifact.
        """
        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return str(found.download(root=None if save_dir is None else os.fspath(save_dir)))

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Record that the run uses an artifact, and return the artifact."""
        return self.experiment.use_artifact(artifact, type=artifact_type)


def _plain(value: Any) -> Any:
    """Return hyperparameters as wandb accepts them: plain data unchanged, and other values as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
