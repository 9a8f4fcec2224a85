"""Compares the ranks' settings, versions, seeds, models and optimizers, because all ranks of a job must do equal
work.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from drivetrain.base.introspect import defined_by_user
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import TrainerFn
from drivetrain.settings import Settings
from drivetrain.strategies import agreement
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer.limits import LimitsView

MAY_DIFFER = {
    "strategy": "the strategy compares its own options",
    "accelerator": "its class is compared",
    "precision": "the class that it selects is compared",
    "plugins": "their classes are compared, where ranks exchange anything through them",
    "devices": "machines may have different devices",
    "callbacks": "those that need every rank are compared: Callback.needs_every_rank",
    "logger": "only rank 0 writes",
    "enable_progress_bar": "only rank 0 shows one",
    "enable_model_summary": "only rank 0 prints it",
    "enable_autolog_hparams": "only rank 0 writes",
    "default_root_dir": "rank 0's is used where files are shared",
    "profiler": "it changes no number",
    "benchmark": "it changes the speed of one rank",
    "detect_anomaly": "it changes the speed of one rank",
    "model_registry": "only rank 0 writes",
}
"""The arguments that can differ between the ranks of a job, with a reason for each argument. All other arguments are
compared.
"""


def compare_start(trainer: Any, fn: TrainerFn, loaders: Loaders, resumes: bool) -> agreement.Agreement:
    """Compare the ranks' arguments for this run. This comparison is the first collective of the run.

    Args:
        trainer: the Trainer, with its model and its datamodule.
        fn: the Trainer's method that was called.
        loaders: the loaders of the run.
        resumes: whether the run begins from a checkpoint.

    Raises:
        ConfigurationError: the arguments differ; raised on all ranks.
    """
    strategy = trainer.strategy
    stages = ("fit", "validate") if fn is TrainerFn.FITTING else (fn.value,)
    changes = _may_change(trainer)
    facts = agreement.Facts(
        job={
            agreement.METHOD: f"trainer.{fn.value}",
            **agreement.of_program(strategy),
            **_settings(trainer),
            **_callbacks(trainer),
            "ckpt_path": "a checkpoint" if resumes else "None",
            **{f"loaders of the stage {stage!r}": _loaders(loaders, stage) for stage in stages},
        },
        model={} if changes else agreement.of_module(trainer.lightning_module),
        seed=agreement.seed(),
        loggers=str([type(logger).__qualname__ for logger in trainer.loggers]),
        changes=changes,
    )  # fmt: skip
    return agreement.compare(strategy.world, strategy.data, facts)


def compare_made(strategy: Strategy, made: dict[str, str]) -> None:
    """Compare the ranks' descriptions of a model that hooks can change, or of optimizers and schedulers.

    Raises:
        ConfigurationError: the descriptions differ; raised on all ranks.
    """
    agreement.compare(strategy.world, strategy.data, agreement.Facts(model=made))


def _settings(trainer: Any) -> dict[str, str]:
    """Return the settings that must be equal on all ranks. For limits that a program can change, return the current
    value.
    """
    names = [each.name for each in dataclasses.fields(Settings) if each.name not in MAY_DIFFER]
    owners = {name: trainer if hasattr(LimitsView, name) else trainer.settings for name in names}
    return {name: agreement.text_of(getattr(owner, name)) for name, owner in owners.items()}


def _callbacks(trainer: Any) -> dict[str, str]:
    """Count the callbacks that every rank must have, by ``state_key``. The keys are in the order of the callbacks."""
    counts = Counter(f"callback {callback.state_key}" for callback in trainer.callbacks if callback.needs_every_rank)
    return {name: str(count) for name, count in counts.items()}


def _may_change(trainer: Any) -> bool:
    """Return whether a hook can change the model's parameters before the model is set up."""
    module, datamodule = trainer.lightning_module, trainer.datamodule
    parties = (module, *([] if datamodule is None else [datamodule]), *trainer.callbacks)
    return defined_by_user(module, "configure_model") or any(defined_by_user(each, "setup") for each in parties)


def _loaders(loaders: Loaders, stage: str) -> str:
    """Describe the source of the loaders of ``stage``, and the number of passed loaders."""
    if (passed := loaders.passed.get(stage)) is None:
        return "from a hook" if loaders.available(stage) else "none"
    return f"{len(passed)} passed" if isinstance(passed, (list, tuple)) else "1 passed"
