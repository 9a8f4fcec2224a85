"""Save checkpoints at intervals, and keep the best."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.base import files, yaml_text
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.callback import LightningModule, Trainer
from drivetrain.callbacks._checkpoint_arguments import check_target, check_triggers, mode_or_default, not_logged
from drivetrain.callbacks._checkpoint_durability import StoredCheckpoint, check_state
from drivetrain.callbacks.on_exception_checkpoint import BEFORE_TRAINING
from drivetrain.errors import ConfigurationError, NotLoggedError, arguments_checked
from drivetrain.strategies import rank_files
from drivetrain.trainer.after_exception import save_after_exception

with on_first_use:
    from drivetrain.callbacks import goodput_monitor

_STATE = (
    "monitor", "dirpath", "best_model_path", "best_model_score", "current_score", "best_k_models",
    "kth_best_model_path", "kth_value", "last_model_path",
)  # fmt: skip
_OWN_STATE = ("newest_path", "saved_at_step", "awaited_at_step", "last_at_batch")  # private attributes


class ModelCheckpoint(StoredCheckpoint):
    """Saves checkpoints at intervals or after validation, and keeps the best ``save_top_k`` of them.

    Args:
        dirpath: the folder, or an address such as ``s3://bucket/run``. ``None`` means the folder ``checkpoints`` in the
            logger's folder, or in ``default_root_dir`` if there is no logger.
        filename: a template without extension, with names of metrics in braces: ``"{epoch}-{val_loss:.2f}"`` gives
            ``epoch=3-val_loss=0.12.ckpt``. ``None`` means ``"{epoch}-{step}"``.
        monitor: the name of the logged value by which checkpoints are ranked. With ``None``, the newest checkpoint is
            the best.
        verbose: log each save.
        save_last: also keep the newest state in ``last.ckpt``. True writes this file at each save and at the end of
            every fit. "link" makes a symbolic link to the newest checkpoint, or a copy where links are not allowed.
            With "link", a fit that has saved no checkpoint writes the file ``last.ckpt`` when it ends.
        save_top_k: the number of checkpoints to keep; -1 keeps all, 0 none. A number above 1 needs ``monitor``.
        save_weights_only: leave out everything that only a resumed run needs.
        mode: "min" if lower values are better, "max" if higher values are better; ``None`` means "min".
        auto_insert_metric_name: write ``name=value`` into file names instead of the value alone.
        every_n_train_steps: save after every n optimizer steps. If a validation directly follows such a step, a
            callback with ``monitor`` saves after the validation, and ranks the checkpoint by the value that the
            validation logs. Otherwise, it ranks the checkpoint by the newest value of ``monitor``.
        train_time_interval: save after a batch if this time has passed since the last save.
        every_n_epochs: save in every n-th epoch; 0: never. At most one of ``every_n_train_steps``,
            ``train_time_interval`` and ``every_n_epochs`` can be given. Without them, the callback saves in every
            epoch.
        save_on_train_epoch_end: True saves at the end of each training epoch, False after each validation. ``None``
            means True if the run does not validate, or validates at the end of each epoch; otherwise False.
        save_on_exception: also save when an exception ends the run. This save removes no other checkpoint. ``filename``
            gives the name; with several processes, a ``filename`` with metrics is replaced by the epoch and the step.
        enable_version_counter: append ``-v1``, ``-v2``, ... rather than overwrite a file of another run.
        every: "auto" chooses the interval that costs least time. The costs are the time of the saves, and the work that
            is repeated after a failure. A :class:`GoodputMonitor`, which the Trainer adds, measures both. No other
            interval can be given with ``every``.

    Attributes:
        best_model_path, best_model_score: the path and the score of the best checkpoint; "" and ``None`` before the
            first save.
        best_k_models: the score of each kept checkpoint, by its path.
        kth_best_model_path, kth_value: the path and the score of the worst of the kept checkpoints.
        last_model_path: the last file or link that ``save_last`` wrote.

    A score of NaN ranks last; if scores are equal, the older checkpoint ranks first. In ``fast_dev_run`` and the sanity
    check, the callback saves nothing and only checks the names of metrics. The callback never deletes the file from
    which a run was resumed.

    You may change the class attributes ``CHECKPOINT_JOIN_CHAR``, ``CHECKPOINT_EQUALS_CHAR``, ``FILE_EXTENSION``,
    ``STARTING_VERSION`` and ``CHECKPOINT_NAME_LAST``, which is a template like ``filename``.

    Raises:
        ConfigurationError: an argument is wrong or contradicts another. A save raises this error if ``monitor`` was not
            logged, or if a format in ``filename`` does not fit a metric's value.
    """

    @arguments_checked
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        every: Literal["auto"] | None = None,
    ) -> None:
        super().__init__()
        check_triggers(every_n_train_steps, train_time_interval, every_n_epochs, every)
        check_target(dirpath, filename, monitor, save_top_k, save_last)
        mode = mode_or_default("ModelCheckpoint", mode, monitor)
        self.dirpath = None if dirpath is None else files.absolute(dirpath)
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        self.every = every
        self._interval_s = math.inf  # for every="auto"
        unsaid = (every_n_train_steps, train_time_interval, every_n_epochs, every) == (None, None, None, None)
        self.every_n_epochs = 1 if unsaid else every_n_epochs or 0
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.save_on_exception = self.saves_on_exception = save_on_exception
        self.enable_version_counter = enable_version_counter
        self.current_score: Tensor | None = None
        self._seen_step = self._last_at_batch = -1
        self._saved_at_time = time.monotonic()
        self._awaited_at_step = -1  # the step of a checkpoint that is saved only after the next validation
        # after the last validation of the fit: the value of ``monitor``, and the step
        self._last_validation: tuple[Any, int] | None = None
        self._told_age = False
        if not (self.every_n_train_steps or self.train_time_interval or every) and type(self) is ModelCheckpoint:
            self.idle_hooks = frozenset({"on_train_batch_end"})

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=None if self.train_time_interval is None else self.train_time_interval.total_seconds(),
            **({} if self.every is None else {"every": self.every}),
        )

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, f"_{name}") for name in _OWN_STATE}
        return {**{name: getattr(self, name) for name in _STATE}, **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(state_dict)
        self._awaited_at_step = state_dict.get("awaited_at_step", -1)
        self.dirpath = self.dirpath or state_dict["dirpath"]  # self.dirpath is None if setup() ran in another process
        if (before := state_dict["dirpath"]) == self.dirpath or (before or "").rstrip("/") == self.dirpath:
            models, last = state_dict["best_k_models"], state_dict["last_model_path"]
            if foreign := [path for path in (*models, last) if path and not self._is_own(path)]:
                rank_zero_warn(
                    f"The checkpoint says that ModelCheckpoint wrote {', '.join(map(repr, foreign))}, which is not a "
                    f"{self.FILE_EXTENSION} file in its folder {self.dirpath}. This entry is ignored, and what it "
                    "names is never removed or replaced."
                )
            self.best_k_models = {path: torch.as_tensor(models[path]) for path in models if path not in foreign}
            self.kth_best_model_path = state_dict["kth_best_model_path"]
            self.kth_value = state_dict["kth_value"]
            self.best_model_score = state_dict["best_model_score"]
            self.current_score = state_dict.get("current_score")
            self.last_model_path = "" if last in foreign else last
            newest = state_dict.get("newest_path", "")
            self._newest_path = newest if self._is_own(newest) else ""  # the file to which last.ckpt links
            self._saved_at_step = state_dict.get("saved_at_step", -1)
            self._last_at_batch = state_dict.get("last_at_batch", -1)
        # each run of a logger has its own folder, so a different folder is expected
        elif not self.follows_logger:
            rank_zero_warn(
                f"The checkpoint's ModelCheckpoint wrote to {state_dict['dirpath']}, and this one writes to "
                f"{self.dirpath}. This one restores only best_model_path, and ranks only its own files."
            )
        self.best_model_path = state_dict["best_model_path"]

    def resume_candidates(self, trainer: Trainer) -> list[str]:
        """Return the last checkpoint that this process saved, and, if the user chose the folder, all checkpoints in
        this folder.
        """
        last = {self.last_model_path} if self.last_model_path else set()
        if not self._folder_is_chosen(trainer):
            return sorted(last)
        folder = self.dirpath or self._default_dirpath(trainer)
        return sorted(last.union(trainer.strategy.checkpoint_io.find(folder, f"*{self.FILE_EXTENSION}")))

    # ---- when to save --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.follows_logger = self.dirpath is None
        self.decide_dirpath(trainer)
        if stage == "fit":
            self._saved_at_step = self._written_at_step = self._last_at_batch = self._awaited_at_step = -1
        self._told_age = False
        self._last_validation = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at_time = time.monotonic()
        self._choose_interval(trainer)
        # not in setup(), because a resumed run restores global_step after setup()
        self._seen_step = trainer.progress.global_step

    def _choose_interval(self, trainer: Trainer) -> None:
        """With ``every="auto"``, set the interval between two saves from rank 0's measurements so far."""
        if self.every is not None:
            monitors = [each for each in trainer.callbacks if isinstance(each, goodput_monitor.GoodputMonitor)]
            if not monitors:
                raise ConfigurationError(
                    'ModelCheckpoint(every="auto") needs a GoodputMonitor, which measures saves and failures. Add one '
                    "to callbacks, or pass this callback to the Trainer, which then adds one."
                )
            self._interval_s = monitors[0].save_interval_s

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._seen_step = self._seen_step, trainer.progress.global_step
        stepped = self._seen_step != before  # False if the batch was accumulated without an optimizer step
        steps_due = stepped and self.every_n_train_steps and self._seen_step % self.every_n_train_steps == 0
        time_due = False
        if self.train_time_interval is not None or self.every is not None:
            interval = self.train_time_interval
            interval_s = self._interval_s if interval is None else interval.total_seconds()
            # all ranks use rank 0's clock
            time_due = trainer.strategy.broadcast(time.monotonic() - self._saved_at_time >= interval_s)
        if not (steps_due or time_due):
            return
        if self.monitor is not None and trainer.validation_follows:
            self._awaited_at_step = trainer.progress.global_step
            return
        self._tell_age_of_score(trainer)
        self._save_once(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._should_save_on_train_epoch_end(trainer):
            self._save_in_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        self._last_validation = value, trainer.progress.global_step
        if self._awaited_at_step == trainer.progress.global_step:
            self._save_once(trainer)
        elif not self._should_save_on_train_epoch_end(trainer):
            self._save_in_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer)
        if trainer.fast_dev_run:  # raise the errors that a first save would raise
            metrics = self._monitor_candidates(trainer)
            self._check_names(trainer, metrics, self.filename, validated=self._last_validation is not None)
            if self.save_top_k != 0:
                self._score(trainer, metrics)
        # With "link", a fit without a checkpoint writes last.ckpt. A fit that resumed from a checkpoint of this step
        # also writes it: the earlier run may have been killed before it made the link.
        has_link = self._newest_path and self._saved_at_step != trainer.progress.global_step
        due = self.save_last is True or (self.save_last == "link" and not has_link)
        if due and self._may_save(trainer) and self._last_at_batch != trainer.progress.total_batches:
            metrics = self._monitor_candidates(trainer)
            with self._alone(trainer), self._naming_last(trainer, metrics) as before:
                self._save_last(trainer, metrics, before)
            self._settle(trainer)
        self._warn_if_nothing_was_saved(trainer, self._may_save(trainer) and self._written_at_step == -1)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._settle(trainer)
        finally:
            self._save_at_exception(trainer)

    def _save_at_exception(self, trainer: Trainer) -> None:
        if not self.save_on_exception or not self._may_save(trainer):
            return
        if not trainer.progress.has_trained:  # until training begins, the step count may come from an earlier fit
            rank_zero_info(f"ModelCheckpoint(save_on_exception=True) saved nothing: {BEFORE_TRAINING}")
        elif self._written_at_step != trainer.progress.global_step:
            rank_zero_info(save_after_exception(trainer, self._exception_path(trainer), self.save_weights_only))

    def _tell_age_of_score(self, trainer: Trainer) -> None:
        """Log, once per fit, if the score of a checkpoint comes from a validation at an earlier step."""
        if self.monitor is None or self._last_validation is None or self._told_age:
            return
        (value, step), now = self._last_validation, trainer.progress.global_step
        if step != now and value is not None and trainer.callback_metrics.get(self.monitor) is value:
            self._told_age = True
            rank_zero_info(
                f"ModelCheckpoint ranks the checkpoint of step {now} by {self.monitor} of step {step}, "
                "because no validation follows this step. To rank each checkpoint by its own value, choose "
                "every_n_train_steps and val_check_interval so that a validation follows each save."
            )

    def _save_in_epoch(self, trainer: Trainer) -> None:
        if self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save_once(trainer)

    def _save_once(self, trainer: Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            with trainer.progress.storing():
                self._save(trainer)
            self._choose_interval(trainer)

    # ---- saving and removing -------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer) -> None:
        self._settle(trainer)
        metrics = self._monitor_candidates(trainer)
        last = self.CHECKPOINT_NAME_LAST if self.save_last else None
        self._check_names(trainer, metrics, self.filename, last, validated=self._last_validation is not None)
        saved_before, ranked_before = self._saved_at_step, self._ranked()
        # set before the save: the file contains the number, so a resumed run does not save this step again
        self._saved_at_step = trainer.progress.global_step
        try:
            self._save_ranked_and_last(trainer, metrics)
        except BaseException:
            self._saved_at_step = saved_before
            raise
        finally:
            if self._under_way is not None:
                self._under_way.ranking = self._ranked()
                vars(self).update(ranked_before)
        self._saved_at_time = time.monotonic()

    def _save_ranked_and_last(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        with self._alone(trainer), self._naming_last(trainer, metrics) as before:
            self._dropped = []
            self._save_topk_checkpoint(trainer, metrics)
            dropped = self._dropped
            try:
                if self.save_last:
                    self._save_last(trainer, metrics, before)
            except BaseException:
                if self.save_last == "link":
                    dropped = []  # the old link may point to one of these files
                raise
            finally:  # removed last, so that a crash never leaves a link to a missing file
                for name in dropped:
                    self._remove(trainer, name)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint if its score is among the best. Libraries override this method despite its private name."""
        if self.save_top_k == 0 or (score := self._score(trainer, monitor_candidates)) is None:
            return
        self.current_score = None if self.monitor is None else score
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
        elif self._is_among_best(score):
            self._update_best_and_save(score, trainer, monitor_candidates)

    @contextmanager
    def _naming_last(self, trainer: Trainer, metrics: dict[str, Any]) -> Iterator[str]:
        """Context manager for a save that sets ``last_model_path``. It yields the previous path. At its end, it removes
        the previous file if the path has changed.

        The new path is set before the save, because each saved file contains this path.
        """
        before, batch_before = self.last_model_path, self._last_at_batch
        if self.save_last:
            self.last_model_path = self._path_for(trainer, metrics, [before], self.CHECKPOINT_NAME_LAST)
        try:
            yield before
        except BaseException:
            self._last_at_batch = batch_before
            if not trainer.strategy.checkpoint_io.exists(self.last_model_path):
                self.last_model_path = before
            raise
        if self._under_way is not None:
            self._under_way.last_before = before
        if before not in ("", self.last_model_path):
            self._remove(trainer, before)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Any]:
        """Return the logged values, the epoch and the step. Libraries override this method despite its private name."""
        found = {
            **trainer.callback_metrics,
            "epoch": torch.tensor(trainer.current_epoch),
            "step": torch.tensor(trainer.global_step),
        }
        # Metrics may differ between ranks, but all ranks must make the same decisions.
        return trainer.strategy.broadcast(found)

    def _score(self, trainer: Trainer, metrics: dict[str, Any]) -> Tensor | None:
        """Return the score of this checkpoint; ``None`` before the first validation, which may log ``monitor``.

        Raises:
            NotLoggedError: ``monitor`` was not logged, and either a validation has ended or the run does not validate.
        """
        if self.monitor is None:
            return torch.tensor(float(trainer.progress.global_step))
        if self.monitor not in metrics:
            message = not_logged("ModelCheckpoint", self.monitor, metrics.keys() - {"epoch", "step"}, trainer)
            if trainer.enable_validation and self._last_validation is None:
                rank_zero_warn(message)  # the first validation may log the metric
                return None
            raise NotLoggedError(message)
        score = torch.as_tensor(metrics[self.monitor]).detach().to("cpu")
        if torch.isnan(score):
            score = torch.tensor(math.inf if self.mode == "min" else -math.inf)
        return score

    def _save_ranked(self, trainer: Trainer, score: Tensor, metrics: dict[str, Any]) -> list[str]:
        """Save a checkpoint with this score. Return the files that the caller must remove."""
        newest_wins, dropped = self.monitor is None, self._worst()
        replaceable = [name for name in dropped if not self._resumed_from(trainer, name)]
        before = dict(vars(self))  # the file contains the new ranking, so the ranking changes before the save
        taken: list[str] = []
        while True:
            path = self._path_for(trainer, metrics, replaceable, self.filename, taken)
            others = {name: value for name, value in self.best_k_models.items() if name not in (*dropped, path)}
            self.best_k_models = {**others, path: score}
            order = self._ranking(self.best_k_models)
            self.best_model_path, self.kth_best_model_path = order[0], order[-1]
            self.best_model_score = None if newest_wins else self.best_k_models[order[0]]
            self.kth_value = None if newest_wins else self.best_k_models[order[-1]]
            self._newest_path = path
            try:
                written = self._write(trainer, path, path in replaceable)
            except BaseException:
                vars(self).update(before)
                raise
            if written:
                return [name for name in dropped if name != path]
            vars(self).update(before)
            taken.append(path)

    def _write(self, trainer: Trainer, path: str, replaces: bool) -> bool:
        """Save to ``path``. If another run has just written a file there, keep that file and return False."""
        self._replaces, self._refused = replaces or not self.enable_version_counter, False
        self._save_checkpoint(trainer, path)
        if self._refused:
            return False
        self._written_at_step = trainer.progress.global_step
        message = f"Epoch {trainer.current_epoch}, step {trainer.progress.global_step}: saved {path}."
        if self._track(trainer, path, message):
            self._announce(trainer, path, message)
        return True

    def _save_last(self, trainer: Trainer, metrics: dict[str, Any], before: str) -> None:
        newest, taken = self._newest_path, list[str]()
        # not set earlier: if a run is killed before this line, the resumed run must write the last checkpoint
        self._last_at_batch = trainer.progress.total_batches
        while not self._write_last(trainer, newest, self.last_model_path == before):
            taken.append(self.last_model_path)
            self.last_model_path = self._path_for(trainer, metrics, [before], self.CHECKPOINT_NAME_LAST, taken)
            if newest in self.best_k_models and self._written_at_step == trainer.progress.global_step:
                # another run has taken the old path of last.ckpt, so write the new path into the newest checkpoint
                self._write(trainer, newest, replaces=True)

    def _write_last(self, trainer: Trainer, newest: str, replaces: bool) -> bool:
        """Write the last checkpoint. With "link", make a link to ``newest``, if that file exists or is being written.
        Without "link", copy ``newest`` if that file is still being written. Otherwise, save a new file.
        """
        store, last = trainer.strategy.checkpoint_io, self.last_model_path
        writing = self._under_way is not None and newest in self._under_way.files
        links = self.save_last == "link" and bool(newest) and (writing or store.exists(newest))
        if not links and not writing:
            return self._write(trainer, last, replaces)
        replaces = replaces or not self.enable_version_counter
        made: bool = trainer.strategy.broadcast(
            not trainer.is_global_zero or rank_files.copy(store, newest, last, links, replaces)
        )
        if made:
            self._track(trainer, last)
        return made

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths and scores of ``best_k_models`` as YAML.

        Args:
            filepath: the target; ``None`` means ``best_k_models.yaml`` in ``dirpath``.

        Raises:
            ConfigurationError: neither ``filepath`` nor ``dirpath`` is known yet.
        """
        if filepath is None:
            if self.dirpath is None:
                raise ConfigurationError(
                    "ModelCheckpoint.to_yaml() does not know its folder before the first run. Pass a path."
                )
            filepath = os.path.join(self.dirpath, "best_k_models.yaml")
        scores = {path: float(score) for path, score in self.best_k_models.items()}
        files.write(filepath, yaml_text.dump(scores).encode())
