"""Find a learning rate: train with increasing learning rates, and choose the rate at which the loss falls fastest."""

from __future__ import annotations

import math
from typing import Any

import torch

from drivetrain import parity
from drivetrain.base.packages import pyplot
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, check_choice, check_count, check_installed, is_number
from drivetrain.loops.fit import fit
from drivetrain.loops.run import ENDLESS
from drivetrain.tuner.trial import trial
from drivetrain.tuner.tuned_attribute import set_tuned, tuned_name

_SMOOTHING = 0.98


class LRSweep:
    """The result of a search: the tried learning rates, from small to large, and the loss at each rate.

    Attributes:
        results: "lr" and "loss", lists with an entry for each optimizer step. The losses are smoothed.
        mode, lr_min, lr_max, num_training: the finder's arguments.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step``, counted from 0. The last step has ``lr_max``."""
        part = step / max(1, self.num_training - 1)
        if parity.current().uneven_sweeps and step > 0:
            part = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** part)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss fell fastest. If there are too few losses, warn and return
        ``None``.

        Args:
            skip_begin, skip_end: how many losses to leave out at the beginning and at the end; losses that are not
                finite are always left out.
        """
        end = len(self.results["loss"]) - skip_end
        kept = [
            (index, rate, loss)
            for index, (rate, loss) in enumerate(zip(self.results["lr"], self.results["loss"], strict=True))
            if skip_begin <= index < end and math.isfinite(loss)
        ]
        self._optimal_idx = None
        if len(kept) < 2:
            rank_zero_warn(
                f"There are {len(kept)} finite losses after the first {skip_begin}, too few to suggest a learning "
                "rate. Try more steps, a smaller min_lr, or suggestion(skip_begin=...)."
            )
            return None
        indices, rates, losses = zip(*kept, strict=True)
        uneven = parity.current().uneven_sweeps
        dtype = torch.float32 if uneven else torch.float64
        places = torch.tensor(rates, dtype=dtype)
        places = places if uneven or self.mode == "linear" else places.log10()
        [slopes] = torch.gradient(torch.tensor(losses, dtype=dtype), spacing=(places,))
        self._optimal_idx = indices[int(slopes.argmin())]
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the losses over the learning rates, and return matplotlib's figure.

        Args:
            suggest: mark the :meth:`suggestion`.
            show: open the figure in a window.
            ax: the axes to draw on; ``None``: the axes of a new figure.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        if ax is None or show:
            check_installed("LRSweep.plot()", "matplotlib", "LRSweep.results")
        if ax is None:
            _, ax = pyplot.subplots()
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            ax.plot(rates[self._optimal_idx], losses[self._optimal_idx], markersize=10, marker="o", color="red")
        if show:
            pyplot.show()
        return ax.get_figure()


class LearningRateFinder(Callback):
    """Finds a learning rate before training. The steps of the search do not change the model.

    The finder trains with learning rates from ``min_lr`` to ``max_lr``, and suggests the rate at which the loss fell
    fastest. Then the finder restores the weights, the optimizer, the random states, the loaders and the counters. The
    finder sets the attribute to the suggestion and creates the optimizers again. The fit then computes the same numbers
    as a fit in which the attribute has the suggested value from the start. If a fit resumes from a checkpoint, the
    finder does nothing, and the checkpoint's learning rates stay. All processes get the same learning rate.

    Args:
        min_lr, max_lr: the smallest and the largest learning rate.
        num_training_steps: the number of learning rates to try, each for one optimizer step.
        mode: "exponential": multiply the learning rate by a constant in each step; "linear": add a constant in each
            step.
        early_stop_threshold: stop when the loss exceeds the smallest loss by more than (``early_stop_threshold`` - 1)
            times the absolute value of the smallest loss; ``None``: never stop early.
        update_attr: whether to set the attribute with the learning rate to the suggestion.
        attr_name: the name of the attribute in the module, its hparams or the datamodule; "": "lr" or "learning_rate".

    Attributes:
        optimal_lr: after the search, the result.

    With manual optimization, ``training_step`` must return the loss. During the search, schedulers do nothing when the
    module steps them.

    Raises:
        ConfigurationError: an argument is invalid; or, when a fit begins, the attribute does not exist, or there is not
            exactly one optimizer.
    """

    SUPPORTED_MODES = ("linear", "exponential")

    position = "first"
    needs_every_rank = True

    def __init__(
        self,
        min_lr: float = 1e-08,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        super().__init__()
        check_choice("LearningRateFinder", "mode", mode, self.SUPPORTED_MODES)
        if not (is_number(min_lr) and is_number(max_lr) and 0 < min_lr < max_lr):
            raise ConfigurationError(
                f"LearningRateFinder(min_lr={min_lr!r}, max_lr={max_lr!r}): the first must be positive, and smaller "
                "than the second. Write min_lr=1e-8, max_lr=1."
            )
        check_count("LearningRateFinder", "num_training_steps", num_training_steps, lowest=2, otherwise=100)
        self.min_lr, self.max_lr, self.num_training_steps, self.mode = min_lr, max_lr, num_training_steps, mode
        self.early_stop_threshold, self.update_attr, self.attr_name = early_stop_threshold, update_attr, attr_name
        self.optimal_lr: LRSweep | None = None
        self.found: tuple[str, float] | None = None  # the name of the attribute that was set, and the value

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            rank_zero_info(
                "LearningRateFinder does nothing: the checkpoint says which learning rates to continue with."
            )
        else:
            self.lr_find(trainer, pl_module)

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the learning rate now. Call this method in a hook outside of a step."""
        if trainer.fast_dev_run:
            rank_zero_warn("LearningRateFinder does nothing with fast_dev_run.")
            return
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"LearningRateFinder needs one optimizer, and {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}. Choose its learning rates by hand."
            )
        names = (self.attr_name,) if self.attr_name else ("lr", "learning_rate")
        name = tuned_name(trainer, pl_module, names, "LearningRateFinder", "attr_name") if self.update_attr else ""
        sweep = LRSweep(self.mode, self.min_lr, self.max_lr, self.num_training_steps)
        limits: dict[str, Any] = {"max_steps": self.num_training_steps, "min_epochs": 0, "min_steps": 0}
        limits |= {"sanity_batches": 0, "log_every_n_steps": 1}
        if parity.current().uneven_sweeps:
            limits["val_batches"] = self.num_training_steps
        else:
            limits |= {"val_batches": 0, "max_epochs": ENDLESS}
        with trial(trainer, [_Sweep(sweep, self.early_stop_threshold)], **limits) as run:
            fit(run)
        self.optimal_lr = sweep
        if self.update_attr and (rate := sweep.suggestion()) is not None:
            self.found = name, rate
            set_tuned(trainer, pl_module, name, rate)
            rank_zero_info(f"LearningRateFinder: {name} is {rate:.3g} now, after {len(sweep.results['lr'])} steps.")
            self._apply(trainer, rate)

    def _apply(self, trainer: Trainer, rate: float) -> None:
        run: Any = trainer.current_run
        # before the first step, create the optimizers again with the new value
        if trainer.progress.global_step == 0:
            trainer.strategy.setup_optimizers(trainer)
            trainer.strategy.setup_precision_plugin()
            trainer.engine.bind_optimizers(trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs)
            run.wrap_optimizers()
            return
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate


class _Sweep(Callback):
    """A callback that sets the learning rate and records the smoothed loss of each step."""

    def __init__(self, sweep: LRSweep, threshold: float | None) -> None:
        self._sweep, self._threshold = sweep, threshold
        self._window: list[float] = []
        self._average = self._rate = 0.0
        self._step = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._rate = self._sweep.rate(trainer.progress.global_step)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self._rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if "loss" in outputs:  # no loss: training_step has skipped the batch
            reduced = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
            self._window.append(float(reduced))
        step, losses = trainer.progress.global_step, self._sweep.results["loss"]
        if step == self._step or not self._window:
            return  # the optimizer has not stepped yet
        self._step = step
        uneven = parity.current().uneven_sweeps
        loss = (self._window[-1] if uneven else sum(self._window)) / len(self._window)
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        self._window.clear()
        losses.append(self._average / (1 - _SMOOTHING ** (len(losses) + 1 + uneven)))
        self._sweep.results["lr"].append(self._rate)
        smallest = min(losses)
        # abs(), because the smallest loss may be negative
        if self._threshold is not None and not losses[-1] <= smallest + (self._threshold - 1) * abs(smallest):
            trainer.should_stop = True
