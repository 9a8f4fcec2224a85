"""drivetrain's Trainer with the flags, methods and properties of Lightning 1.3's Trainer."""

from __future__ import annotations

import inspect
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import drivetrain.callbacks
from drivetrain.base.introspect import near_misses, overrides, reads
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.data.combined import CombinedLoader
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.v1_3 import flags
from drivetrain.legacy.v1_3._callbacks import ModelCheckpoint
from drivetrain.legacy.v1_3.arguments import FromCommandLine
from drivetrain.legacy.v1_3.last_steps import LastSteps, with_last_steps
from drivetrain.legacy.v1_3.loggers import LoggerCollection, as_one
from drivetrain.legacy.v1_3.properties import Asked
from drivetrain.legacy.v1_3.tuner import Tuner
from drivetrain.loops.progress import TrainerStatus
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.module import LightningModule
from drivetrain.module.optimizers import LRSchedulerConfig, normalise
from drivetrain.trainer.job import Job


class FlaggedTrainer(FromCommandLine, Asked):
    """Base class of the Trainers of Lightning 1.1 and 1.3."""

    flags_of_that_time: ClassVar[Mapping[str, Any]] = flags.FLAGS
    default_checkpoint: ClassVar[Any] = ModelCheckpoint
    takes_dictionaries: ClassVar[bool] = False
    # converts the flags to arguments of drivetrain's Trainer
    translated: ClassVar[Any] = staticmethod(flags.translated)
    resume_from_checkpoint: Any = None

    def __init__(self, *args: Any, **given: Any) -> None:
        given = {**dict(zip(self.flags_of_that_time, args, strict=False)), **given}
        if isinstance(given.get("logger"), LoggerCollection):
            given["logger"] = list(given["logger"])
        settings = self.translated(given)
        self._flags = {**flags.FLAGS, **self.flags_of_that_time, **given}
        self.resume_from_checkpoint = given.get("resume_from_checkpoint")
        super().__init__(**settings)
        self.logbook = LastSteps(self.logbook.sum_dtype, self.takes_dictionaries)
        self._callbacks = [self._of_that_time(each, settings["callbacks"]) for each in self._callbacks]
        rate = given.get("progress_bar_refresh_rate")
        for bar in (each for each in self._callbacks if rate and hasattr(each, "refresh_rate")):
            bar.refresh_rate = rate
        for hook in ("on_init_start", "on_init_end"):
            for callback in (each for each in self._callbacks if callable(getattr(each, hook, None))):
                getattr(callback, hook)(self)

    def _of_that_time(self, callback: Any, given: Sequence[Any]) -> Any:
        """Replace drivetrain's default ModelCheckpoint by the default of Lightning 1.x; return other callbacks
        unchanged.
        """
        if type(callback) is not drivetrain.callbacks.ModelCheckpoint or any(each is callback for each in given):
            return callback
        folder = self._flags["weights_save_path"]
        return self.default_checkpoint(dirpath=None if not folder else os.path.join(folder, "checkpoints"))

    @property
    def logger(self) -> Any:
        """The logger; for several loggers, a :class:`LoggerCollection`."""
        return as_one(self.loggers)

    @logger.setter
    def logger(self, value: Any) -> None:
        self.loggers = list(value) if isinstance(value, LoggerCollection) else [] if value is None else [value]

    # ---- the flags ``auto_lr_find`` and ``auto_scale_batch_size``, on drivetrain's Tuner -----------------------------

    @property
    def tuner(self) -> Any:
        """The Tuner, which finds learning rates and batch sizes."""
        return Tuner(self)

    def tune(
        self,
        model: Any,
        train_dataloader: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        scale_batch_size_kwargs: Mapping[str, Any] | None = None,
        lr_find_kwargs: Mapping[str, Any] | None = None,
        train_dataloaders: Any = None,
    ) -> dict[str, Any]:
        """Find the batch size if the flag ``auto_scale_batch_size`` is set, and the learning rate if the flag
        ``auto_lr_find`` is set. Set the found values in the model.

        Returns:
            A dictionary with the results, under the keys "scale_batch_size" and "lr_find".
        """
        data = {"train_dataloaders": train_dataloader if train_dataloaders is None else train_dataloaders}
        data |= {"val_dataloaders": val_dataloaders, "datamodule": datamodule}
        found = {}
        if mode := self._flags["auto_scale_batch_size"]:
            options = {"mode": mode if isinstance(mode, str) else "power", **(scale_batch_size_kwargs or {})}
            found["scale_batch_size"] = self.tuner.scale_batch_size(model, **data, **options)
        if name := self._flags["auto_lr_find"]:
            attribute = name if isinstance(name, str) else ""
            options = {"attr_name": attribute, "update_attr": True, **(lr_find_kwargs or {})}
            found["lr_find"] = self.tuner.lr_find(model, **data, **options)
        if not found:
            rank_zero_warn("trainer.tune does nothing: write Trainer(auto_lr_find=True, auto_scale_batch_size=True).")
        return found

    # ---- an evaluation without data uses the data of the last fit ----------------------------------------------------

    _fitted: tuple[Any, Any, Any] = (None, None, None)  # the last fit's model, datamodule and validation loaders

    def _data_of_fit(
        self, call: str, model: Any, loaders: Any, args: tuple[Any, ...], more: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the loaders and the arguments of an evaluation. The default data is the data of the model's last
        fit.
        """
        fitted, datamodule, val_loaders = self._fitted
        passed = loaders is not None or more.get("datamodule") is not None or any(args)
        if passed or fitted is None or model not in (None, fitted):
            return loaders, more
        if datamodule is not None:
            source, instead = "datamodule", "datamodule=datamodule"
            loaders, more = None, {**more, "datamodule": datamodule}
        elif call == "validate" and val_loaders is not None:
            source, instead, loaders = "validation loaders", "dataloaders=...", val_loaders
        else:
            return loaders, more
        what = f"trainer.{call} without data takes the {source} of trainer.fit, which"
        warn_deprecated(what, f"trainer.{call}(model, {instead})")
        return loaders, more

    _ended_fit = False

    @contextmanager
    def _from_last_epoch(self, ckpt_path: Any) -> Iterator[None]:
        """Context of a fit. A second fit begins with the index of the first fit's last epoch. With the same
        ``max_epochs``, the second fit therefore trains one epoch.
        """
        progress, epochs = self.progress, self.progress.current_epoch
        if self._ended_fit and ckpt_path is None and epochs > 0:
            progress.count_epochs_as(epochs - 1)
        self._ended_fit = False
        try:
            yield
        finally:
            self._ended_fit = progress.status is TrainerStatus.FINISHED
            if progress.current_epoch < epochs and self._ended_fit:  # the fit trained no epoch
                progress.count_epochs_as(epochs)

    # ---- the entry points with earlier arguments ---------------------------------------------------------------------

    def fit(  # type: ignore[override]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        train_dataloader: Any = None,
        **more: Any,
    ) -> Any:
        """Train ``model``; return 1, as in 1.3."""
        loaders = _renamed("fit", "train_dataloader", train_dataloader, "train_dataloaders", train_dataloaders)
        for name in ("truncated_bptt_steps", "prepare_data_per_node"):
            if self._flags[name] != flags.FLAGS[name]:
                setattr(model, name, self._flags[name])
        if (mode := self._flags["multiple_trainloader_mode"]) != flags.FLAGS["multiple_trainloader_mode"]:
            loaders = CombinedLoader(loaders, mode)
        more.setdefault("ckpt_path", self.resume_from_checkpoint)
        given = loaders if isinstance(loaders, LightningDataModule) else datamodule
        self._fitted = (model, given, val_dataloaders)
        with self._from_last_epoch(more["ckpt_path"]):
            super().fit(model, loaders, val_dataloaders, datamodule, **more)
        return 1

    def validate(
        self, model: Any = None, dataloaders: Any = None, *args: Any, val_dataloaders: Any = None, **more: Any
    ) -> Any:
        """Evaluate on the validation loaders."""
        dataloaders = _renamed("validate", "val_dataloaders", val_dataloaders, "dataloaders", dataloaders)
        return self._evaluated(super().validate, "validation_step", model, dataloaders, args, more)

    def test(
        self, model: Any = None, dataloaders: Any = None, *args: Any, test_dataloaders: Any = None, **more: Any
    ) -> Any:
        """Evaluate on the test loaders."""
        dataloaders = _renamed("test", "test_dataloaders", test_dataloaders, "dataloaders", dataloaders)
        return self._evaluated(super().test, "test_step", model, dataloaders, args, more)

    def _evaluated(
        self, run: Callable[..., Any], step: str, model: Any, loaders: Any, args: tuple[Any, ...], more: dict[str, Any]
    ) -> list[Any]:
        """Call ``run``, which is drivetrain's method ``validate`` or ``test``, and return the results. ``step`` is the
        module's method for this evaluation.
        """
        if _has_nothing_to_do(model or self.lightning_module, run.__name__, step):
            return []
        loaders, more = self._data_of_fit(run.__name__, model, loaders, args, more)
        # In Lightning 1.3, ckpt_path="best" was the default, but had no effect if a model was passed.
        if model is not None and more.get("ckpt_path") == "best":
            del more["ckpt_path"]
        return with_last_steps(run(model, loaders, *args, **more), self.callback_metrics)

    def predict(self, model: Any = None, dataloaders: Any = None, *args: Any, **more: Any) -> Any:
        """Predict on the loaders."""
        dataloaders, more = self._data_of_fit("predict", model, dataloaders, args, more)
        return super().predict(model, dataloaders, *args, **more)

    def make_optimizers(self) -> tuple[list[Any], list[LRSchedulerConfig]]:
        """Return the result of ``configure_optimizers``, and set the optimizers' frequencies in the accelerator."""
        self._optimizers_made = True
        returned = self.hooks.call_method("configure_optimizers")
        if isinstance(returned, (list, tuple)) and all(isinstance(each, Mapping) for each in returned):
            found = [each["frequency"] for each in returned if "frequency" in each]
            accelerator: Any = self.strategy.source  # type: ignore[attr-defined]
            accelerator.optimizer_frequencies = found if len(found) == len(returned) else ()
        return normalise(returned, by_hand=not self.lightning_module.automatic_optimization)

    # ---- command lines -------------------------------------------------------------------------------------------

    @classmethod
    def parse_argparser(cls, arg_parser: ArgumentParser | Namespace) -> Namespace:
        """Return the options of a command line."""
        return arg_parser if isinstance(arg_parser, Namespace) else arg_parser.parse_args()


class Trainer(FlaggedTrainer):
    """drivetrain's Trainer with the flags of Lightning 1.3; a deprecated flag causes a warning with the replacement.

    Omitted flags have the defaults of Lightning 1.3. drivetrain's own arguments are also accepted.
    """

    @property
    def accelerator(self) -> Any:
        """The accelerator, which consists of two plugins. While the constructor runs, the result is drivetrain's
        accelerator.
        """
        return getattr(self.strategy, "source", None) or super().accelerator

    training_type_plugin: Any = reads("accelerator.training_type_plugin", "The accelerator's training-type plugin.")

    @property
    def distributed_backend(self) -> str:
        """The name of the strategy."""
        return str(self.training_type_plugin.strategy_name)

    def run_job(self, job: Job) -> list[Any]:
        results = super().run_job(job)
        self.training_type_plugin._results = results  # needed if this process has only started other processes
        return results


def _renamed(call: str, then: str, given: Any, today: str, loaders: Any) -> Any:
    """Return the argument ``today``. If the program used the earlier name ``then``, warn, and return the value of
    ``then``.
    """
    if given is None:
        return loaders
    warn_deprecated(f"trainer.{call}({then}=...)", f"trainer.{call}(model, {today}=...)")
    return given


def _has_nothing_to_do(model: Any, call: str, step: str) -> bool:
    """If ``model`` has no step for an evaluation, warn as Lightning 1.3 does, and return True. For a misspelt step,
    return False, because drivetrain's Trainer then raises an error.
    """
    if not isinstance(model, LightningModule) or overrides(model, step, LightningModule):
        return False
    if next(near_misses(type(model), LightningModule, [step], alike=0.8), None) is not None:
        return False
    rank_zero_warn(f"{type(model).__name__} has no {step}, so trainer.{call} does nothing. Define it.")
    return True


def signature_of(of_that_time: Mapping[str, Any]) -> inspect.Signature:
    """Return a constructor's signature, with the flags and their defaults, for editors and command lines."""
    kind, empty = inspect.Parameter.KEYWORD_ONLY, [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    own = (inspect.Parameter(name, kind, default=value, annotation=Any) for name, value in of_that_time.items())
    return inspect.Signature([*empty, *own])


FlaggedTrainer.__init__.__signature__ = signature_of(flags.FLAGS)  # type: ignore[attr-defined]
