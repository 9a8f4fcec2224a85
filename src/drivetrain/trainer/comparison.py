"""What the ranks compare when a run begins: settings, versions, seeds, the model, and in a fit the optimizers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from drivetrain.base.introspect import defined_by_user
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import TrainerFn
from drivetrain.settings import Settings
from drivetrain.strategies.agreement import (
    METHOD,
    Agreement,
    Facts,
    compare,
    of_module,
    of_optimizers,
    of_program,
    seed,
    text_of,
)
from drivetrain.trainer.limits import LimitsView

MAY_DIFFER = {
    "strategy": "the strategy compares its own options",
    "accelerator": "its class is compared",
    "precision": "what it stands for is compared",
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
"""Arguments that the ranks of a job may be given differently, with the reason; all others are compared in each run."""

_STAGES = {
    TrainerFn.FITTING: ("fit", "validate"),
    TrainerFn.VALIDATING: ("validate",),
    TrainerFn.TESTING: ("test",),
    TrainerFn.PREDICTING: ("predict",),
}


def compare_start(
    trainer: Any,
    fn: TrainerFn,
    passed: Mapping[str, Any],
    loaders: Loaders,
    datamodule: Any,
    resumes: bool,
) -> Agreement:
    """Compare what the ranks were given for this run, before they exchange anything else.

    Args:
        trainer: the Trainer, which has the model.
        fn: the method that was called.
        passed: loaders by stage, as they were passed.
        loaders: of the run.
        datamodule: the user's, or ``None``.
        resumes: the run begins from a checkpoint.

    Raises:
        ConfigurationError: on all ranks, where it is not the same.
    """
    strategy = trainer.strategy
    changes = _may_change(trainer, datamodule)
    facts = Facts(
        job={
            METHOD: f"trainer.{fn.value}",
            **of_program(strategy),
            **_settings(trainer),
            **_callbacks(trainer),
            "ckpt_path": "a checkpoint" if resumes else "None",
            **{f"loaders of the stage {stage!r}": _loaders(passed.get(stage), loaders, stage) for stage in _STAGES[fn]},
        },
        model={} if changes else of_module(trainer.lightning_module),
        seed=seed(),
        loggers=str([type(logger).__qualname__ for logger in trainer.loggers]),
        changes=changes,
    )  # fmt: skip
    return compare(strategy.world, strategy.data, facts)


def compare_model(trainer: Any) -> None:
    """Compare the models, if those of some ranks may have changed since the run began.

    Raises:
        ConfigurationError: on all ranks, where they are not the same.
    """
    compare(trainer.strategy.world, trainer.strategy.data, Facts(model=of_module(trainer.lightning_module)))


def compare_optimizers(trainer: Any) -> None:
    """Compare the optimizers and schedulers of a fit, which a strategy makes in its set-up at the earliest.

    Raises:
        ConfigurationError: on all ranks, where they are not the same.
    """
    strategy = trainer.strategy
    made = of_optimizers(strategy.optimizers, strategy.lr_scheduler_configs)
    compare(strategy.world, strategy.data, Facts(model=made))


def _settings(trainer: Any) -> dict[str, str]:
    """Return the settings that must be the same, as they are now: a limit may have been changed since."""
    names = [each.name for each in dataclasses.fields(Settings) if each.name not in MAY_DIFFER]
    return {name: text_of(getattr(trainer if hasattr(LimitsView, name) else trainer.settings, name)) for name in names}


def _callbacks(trainer: Any) -> dict[str, str]:
    """Return how many callbacks of each key every rank needs, in their order."""
    counts = Counter(f"callback {callback.state_key}" for callback in trainer.callbacks if callback.needs_every_rank)
    return {name: str(count) for name, count in counts.items()}


def _may_change(trainer: Any, datamodule: Any) -> bool:
    """Return whether a hook that runs before the model is set up may change its parameters."""
    module = trainer.lightning_module
    return defined_by_user(module, "configure_model") or any(
        defined_by_user(party, "setup") for party in (module, datamodule, *trainer.callbacks) if party is not None
    )


def _loaders(passed: Any, loaders: Loaders, stage: str) -> str:
    """Return where the loaders of ``stage`` come from, and how many were passed."""
    if passed is None:
        return "from a hook" if loaders.available(stage) else "none"
    return f"{len(passed)} passed" if isinstance(passed, (list, tuple)) else "1 passed"
