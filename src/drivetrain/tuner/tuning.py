"""The Tuner, which finds a learning rate or a batch size without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

from drivetrain.base.seed import isolate_rng
from drivetrain.callback import Callback, LightningModule
from drivetrain.errors import ConfigurationError, WrongTypeError, check_choice, described
from drivetrain.logbook.logbook import Logbook
from drivetrain.loops.progress import Progress
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.trainer.trainer import Trainer
from drivetrain.tuner.batch_size_finder import BatchSizeFinder
from drivetrain.tuner.lr_finder import LearningRateFinder, LRSweep
from drivetrain.tuner.trial import OF_RUN
from drivetrain.tuner.tuned_attribute import set_tuned, tuned_name

Method = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Finds a learning rate or a batch size for a model.

    The Tuner only sets the model's attribute. As in a fit, the model's loaders are created, and ``setup``,
    ``configure_model`` and ``configure_optimizers`` are called. The Tuner calls neither callbacks nor loggers of the
    Trainer, and writes no file.

    Args:
        trainer: the Trainer with the accelerator, the strategy and the precision for the steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise WrongTypeError(f"Tuner needs a Trainer, not {described(trainer)}. Write Tuner(drivetrain.Trainer()).")
        self._trainer = trainer

    def lr_find(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        min_lr: float = 1e-08,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRSweep | None:
        """Train with increasing learning rates, and return the losses. The arguments are the arguments of
        LearningRateFinder.

        The result's ``suggestion()`` returns a learning rate, and its ``plot()`` draws the losses. With
        ``update_attr``, the Tuner sets the model's attribute to the suggestion.

        Raises:
            ConfigurationError: ``method`` is not "fit", or an argument is invalid.
        """
        if method != "fit":
            raise ConfigurationError(f"Tuner.lr_find(method={method!r}): only a fit has a learning rate. Leave it out.")
        finder = _TunersRate(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        self._run(finder, model, method, (train_dataloaders, val_dataloaders), dataloaders, datamodule)
        if (sweep := finder.optimal_lr) is not None and finder.found is not None:
            self._set(model, datamodule, *finder.found)
        return sweep

    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits, and set the model's attribute. The arguments are the arguments of
        BatchSizeFinder.

        Args:
            method: the stage to try: "fit", "validate", "test" or "predict".

        Raises:
            ConfigurationError: an argument is invalid, or loaders were passed (no attribute can change their batch
                size).
        """
        check_choice("Tuner.scale_batch_size", "method", method, ("fit", "validate", "test", "predict"))
        finder = _TunersSize(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self._run(finder, model, method, (train_dataloaders, val_dataloaders), dataloaders, datamodule)
        if (size := finder.optimal_batch_size) is not None:
            self._set(model, datamodule, batch_arg_name, size)
            finder.show_loaders(self._trainer)
        return size

    def _run(
        self, finder: Callback, model: LightningModule, method: Method, of_fit: tuple[Any, Any], dataloaders: Any,
        datamodule: LightningDataModule | None,
    ) -> None:  # fmt: skip
        others = dict(zip(("train_dataloaders", "val_dataloaders"), of_fit, strict=True))
        given, right = {"dataloaders": dataloaders}, "dataloaders"
        if method == "fit":
            given, others, right = others, given, "train_dataloaders"
        if wrong := next((name for name, value in others.items() if value), ""):
            raise ConfigurationError(f"With method={method!r}, {wrong} has no meaning. Pass {right}, or a datamodule.")
        trainer: Any = self._trainer
        kind = LearningRateFinder if isinstance(finder, LearningRateFinder) else BatchSizeFinder
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise ConfigurationError(
                f"The Trainer has a {kind.__name__} among its callbacks, which would search again when it fits. "
                "Remove the callback, or do not call the Tuner."
            )
        options: dict[str, Any] = {} if method in ("fit", "predict") else {"verbose": False}
        with _apart(trainer, finder, method):
            getattr(trainer, method)(model, **given, datamodule=datamodule, **options)

    def _set(self, model: Any, datamodule: Any, name: str, value: Any) -> None:
        """Set the attribute in this process, because the steps may have run in other processes."""
        owner = SimpleNamespace(datamodule=datamodule)
        set_tuned(owner, model, tuned_name(owner, model, (name,), "Tuner", "attr_name"), value)


@contextmanager
def _apart(trainer: Any, finder: Callback, method: str) -> Iterator[None]:
    """Return a context in which the Trainer has only ``finder`` and a callback that ends the fit. The end of the
    context restores the Trainer's callbacks and counters.
    """
    own, strategy = trainer.__dict__, trainer.strategy
    before = {name: own[name] for name in OF_RUN if name in own}
    kept = list(strategy.optimizers), list(strategy.lr_scheduler_configs), strategy.lightning_module
    old: Any = trainer.logbook
    ends = {"sanity_batches": 0} if method == "fit" else {}
    own.update(
        limits=dataclasses.replace(trainer.limits, **ends), progress=Progress(), logbook=Logbook(old.sum_dtype),
        _loggers=[], _callbacks=[finder, _NoEpochs()],
    )  # fmt: skip
    try:
        yield
    finally:
        own.update(before)
        strategy.optimizers, strategy.lr_scheduler_configs, module = kept
        if module is not None:
            strategy.connect(module)
            module.trainer = trainer


class _NoEpochs(Callback):
    """Ends the Tuner's fit after the search. During the search, the module's hooks see the user's ``max_epochs``."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run: Any = trainer.current_run
        run.limits = dataclasses.replace(run.limits, max_epochs=0)
        run.hooks.observers.clear()  # a Tuner trains nothing, so a warning would be wrong


class _TunersRate(LearningRateFinder):
    """The Tuner's finder of learning rates.

    The callback's state contains the losses. If other processes search, this process gets the losses with the state.
    """

    def _apply(self, trainer: Trainer, rate: float) -> None:
        """Do nothing: the Tuner does not train with the new learning rate."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self.optimal_lr is None else {"results": self.optimal_lr.results, "found": self.found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_lr = LRSweep(self.mode, self.min_lr, self.max_lr, self.num_training_steps)
        self.optimal_lr.results = state_dict["results"]
        self.found = state_dict["found"]


class _TunersSize(BatchSizeFinder):
    """The Tuner's finder of batch sizes.

    After a search for an evaluation, the finder sets the evaluation's number of batches to 0.
    """

    _run: Any = None  # the run, if the search was in this process

    def show_loaders(self, trainer: Any) -> None:
        """Let the Trainer's properties show the loaders with the new batch size, until the Trainer's next run."""
        if (run := self._run) is None:
            return
        stage = run.progress.fn
        call, limits = run.hooks.call_on, trainer.limits
        run.loaders = run.loaders.again(limits.batches, call, lambda: trainer.current_epoch)
        with isolate_rng():
            if stage == "fit":
                trainer.progress.expect_batches(run.loaders.count_training())
            for each in ("validate",) if stage == "fit" else (stage,):
                if limits.batches(each) and run.loaders.available(each):
                    run.loaders.evaluation(each)
        trainer._run_parts = run

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().scale_batch_size(trainer, pl_module)
        run: Any = trainer.current_run
        self._run = run
        run.hooks.observers.clear()  # a Tuner trains nothing, so a warning would be wrong
        for sources in run.loaders.made_evaluation.values():
            for source in sources:
                source.num_batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self.optimal_batch_size is None else {"size": self.optimal_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_batch_size = state_dict["size"]
