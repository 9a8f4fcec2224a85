"""Find the largest batch size that fits into memory."""

from __future__ import annotations

from typing import Any

from drivetrain.base.memory import free_memory, is_out_of_memory
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.data.loader_passes import sized_length
from drivetrain.errors import ConfigurationError, check_choice, check_count, is_number, wrong_value
from drivetrain.loops.evaluate import Predictions, evaluate
from drivetrain.loops.fit import fit
from drivetrain.loops.run import ENDLESS
from drivetrain.tuner.trial import trial
from drivetrain.tuner.tuned_attribute import set_tuned, tuned_name

_STAGES = {"fit": "fit", "validate": "val", "test": "test", "predict": "predict"}


class BatchSizeFinder(Callback):
    """Finds the largest batch size that fits into memory, and lets the run use this size.

    The loader hooks, such as ``train_dataloader``, must read the batch size from an attribute. For each size, the
    finder sets the attribute, runs ``steps_per_trial`` steps, and restores the weights, the optimizer, the random
    states and the counters. The finder tries larger sizes until memory runs out, the whole data set is one batch, or
    ``max_val`` is reached. At the end, the finder sets the attribute to the best size.

    Args:
        mode: "power": double the size until a size does not fit; "binsearch": then also search between the last size
            that fits and the first size that does not fit.
        steps_per_trial: the number of optimizer steps to try with each size; in an evaluation, the number of batches to
            try.
        init_val: the first size.
        max_trials: the maximum number of sizes to try.
        batch_arg_name: the name of the attribute with the batch size, in the module, its hparams or the datamodule.
        margin: with "binsearch", the fraction by which the finder reduces the best size, as a reserve of memory.
        max_val: the largest size to try.

    Attributes:
        optimal_batch_size: the best size; ``None`` before.

    Raises:
        ConfigurationError: an argument is invalid; or, when a run begins, the attribute does not exist, loaders were
            passed to the Trainer (no attribute can change their batch size), or the strategy has several processes.
        torch.OutOfMemoryError: not even the smallest size fits.
    """

    SUPPORTED_MODES = ("power", "binsearch")

    position = "first"

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        super().__init__()
        check_choice("BatchSizeFinder", "mode", mode, self.SUPPORTED_MODES)
        check_count("BatchSizeFinder", "steps_per_trial", steps_per_trial, lowest=1, otherwise=3)
        check_count("BatchSizeFinder", "init_val", init_val, lowest=1, otherwise=2)
        check_count("BatchSizeFinder", "max_trials", max_trials, lowest=1, otherwise=25)
        check_count("BatchSizeFinder", "max_val", max_val, lowest=1, otherwise=8192)
        if not is_number(margin) or not 0 <= margin < 1:
            raise wrong_value("BatchSizeFinder", "margin", margin, "a fraction from 0 to 1", "margin=0.05")
        self.mode, self.steps_per_trial, self.init_val, self.max_trials = mode, steps_per_trial, init_val, max_trials
        self.batch_arg_name, self.margin, self.max_val = batch_arg_name, margin, max_val
        self.optimal_batch_size: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.progress.fn != "fit":  # a validation inside a fit does not change its batch size
            self.scale_batch_size(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the batch size now. Call this method in a hook outside of a step."""
        if trainer.fast_dev_run:
            rank_zero_warn("BatchSizeFinder does nothing with fast_dev_run.")
            return
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"BatchSizeFinder works with one process, and there are {trainer.world_size}: a rank without memory "
                "would leave the others waiting. Find the size with devices=1."
            )
        run: Any = trainer.current_run
        stage = str(getattr(trainer.progress.fn, "value", trainer.progress.fn))
        name = tuned_name(trainer, pl_module, (self.batch_arg_name,), "BatchSizeFinder", "batch_arg_name")
        if run.loaders.is_passed(stage):
            hook = f"{'train' if stage == 'fit' else _STAGES[stage]}_dataloader"
            raise ConfigurationError(
                f"BatchSizeFinder changes {name}, and the loader that was passed to trainer.{stage} does not read it. "
                f"Make the loader in {hook} of the module or of a datamodule, with batch_size=self.{name}."
            )
        trials = _Trials(self, trainer, pl_module, name, stage)
        found = trials.search()
        self.optimal_batch_size = found
        set_tuned(trainer, pl_module, name, found)
        less = "" if found == trials.fits else f", {self.margin:.0%} less than the {trials.fits} that fit"
        rank_zero_info(f"BatchSizeFinder: {name} is {found} now{less}, after {trials.count} trials.")
        if stage == "fit":
            if run.loaders.made_training is not None:
                rank_zero_info("The loader of this epoch was made before; the new size is that of the next loader.")
        elif (made := run.loaders.made_evaluation.get(stage)) is not None:
            fresh = run.loaders.again(trainer.limits.batches, run.hooks.call_on, lambda: trainer.current_epoch)
            made[:] = fresh.evaluation(stage)


class _Trials:
    """Tries sizes. ``count`` is the number of trials so far, and ``fits`` is the largest size that fits."""

    def __init__(self, finder: BatchSizeFinder, trainer: Any, module: Any, name: str, stage: str) -> None:
        self._finder, self._trainer, self._module, self._name, self._stage = finder, trainer, module, name, stage
        self._samples = finder.max_val  # later, the size of the data set
        self._error: BaseException | None = None
        self.count = self.fits = 0

    def search(self) -> int:
        """Try sizes, and return the size to use."""
        finder = self._finder
        size, fits, too_large = min(finder.init_val, finder.max_val), 0, 0
        while size > fits and self.count < finder.max_trials:
            if self._fits(size):
                fits = size
            else:
                too_large = size
            if not too_large:
                size = min(2 * size, finder.max_val, self._samples)
            elif not fits:  # the first size was too large
                size = size // 2
            elif finder.mode == "power":
                break
            else:
                size = (fits + too_large) // 2
        if not fits:
            raise self._error or ConfigurationError("BatchSizeFinder has tried no size.")
        self.fits = fits
        reserve = finder.margin if finder.mode == "binsearch" else 0
        return max(1, int(fits * (1 - reserve)))

    def _fits(self, size: int) -> bool:
        finder, trainer, module, stage = self._finder, self._trainer, self._module, self._stage
        self.count += 1
        steps = finder.steps_per_trial
        limits: dict[str, Any] = {"min_epochs": 0, "min_steps": 0, "sanity_batches": 0, "val_batches": 0}
        if stage == "fit":
            limits |= {"max_steps": steps, "max_epochs": ENDLESS}
        else:
            limits[f"{_STAGES[stage]}_batches"] = steps
        failed = False
        with trial(trainer, [], **limits) as run:
            set_tuned(trainer, module, self._name, size)
            try:
                _try_steps(run, stage)
            except RuntimeError as error:  # includes torch.OutOfMemoryError
                if not is_out_of_memory(error):
                    raise
                # without the traceback, which would keep the tensors of the step in memory
                self._error = error.with_traceback(None)
                failed = True
            loader = run.loaders.made_training if stage == "fit" else run.loaders.evaluation(stage)[0].loader
            dataset = sized_length(getattr(loader, "dataset", None))
            self._samples = self._samples if dataset is None else dataset
        if failed:
            free_memory()
        rank_zero_info(f"BatchSizeFinder: {self._name}={size} {'does not fit' if failed else 'fits'}.")
        return not failed


def _try_steps(run: Any, stage: Any) -> None:
    if stage == "fit":
        fit(run)
    else:
        predictions = Predictions(keeps=False) if stage == "predict" else None
        evaluate(run, stage, run.loaders.evaluation(stage), predictions)
