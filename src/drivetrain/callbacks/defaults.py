"""The callbacks that a Trainer adds to the user's callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.base.lazy import on_first_use
from drivetrain.base.registry import load
from drivetrain.callback import Callback, Checkpoint
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.model_summary import ModelSummary
from drivetrain.callbacks.progress_bar import ProgressBar, default_progress_bar
from drivetrain.callbacks.requeue import Requeue
from drivetrain.callbacks.rich_model_summary import RichModelSummary
from drivetrain.callbacks.rich_progress import RichProgressBar
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.settings import Settings

with on_first_use:
    from drivetrain.callbacks import goodput_monitor, trainjob

_DEFAULTS: tuple[tuple[str, type[Callback], Callable[[], Callback]], ...] = (
    ("enable_checkpointing", Checkpoint, ModelCheckpoint),
    ("enable_model_summary", ModelSummary, ModelSummary),
    ("enable_progress_bar", ProgressBar, default_progress_bar),
)
"""The default callbacks. Each entry has the argument of the Trainer that turns the callback on, the callback's class,
and a function that creates the callback. If the user passed a callback of this class, the Trainer adds none.
"""

_OF_ARGUMENTS = (
    ("max_time", "drivetrain.callbacks.timer:Timer", "limit the time"),
    ("replica_check_every", "drivetrain.callbacks.replica_check:ReplicaCheck", "compare the replicas"),
    ("replay_every", "drivetrain.callbacks.replay_check:ReplayCheck", "replay optimizer steps"),
    ("plan_check", "drivetrain.forecast.check:PlanCheck", "compare the memory with a plan"),
)
"""Arguments of the Trainer that add a callback. Each entry has the argument, the callback's class, and the callback's
task as a text for messages.
"""


def with_defaults(given: Sequence[Callback], settings: Settings, environment: ClusterEnvironment) -> list[Callback]:
    """Return the user's callbacks, the callbacks that arguments of the Trainer add, and the default callbacks.

    Raises:
        ConfigurationError: a callback of the user contradicts an argument of the Trainer.
    """
    found = [*given]
    for argument, path, act in _OF_ARGUMENTS:
        if (value := getattr(settings, argument)) is not None:
            kind: type[Any] = load(path)
            if any(isinstance(callback, kind) for callback in found):
                raise ConfigurationError(
                    f"Trainer({argument}={value!r}) and the {kind.__name__} in callbacks both {act}. Keep one."
                )
            found.append(kind(value))
    for argument, known, make in _DEFAULTS:
        wanted = False if settings.barebones else getattr(settings, argument)
        own = next((callback for callback in found if isinstance(callback, known)), None)
        if known is ProgressBar and len(bars := [type(c).__name__ for c in found if isinstance(c, known)]) > 1:
            raise ConfigurationError(
                f"Trainer(callbacks=...) got {len(bars)} progress bars, {' and '.join(bars)}, which would draw over "
                "each other. Keep one."
            )
        if wanted is False and own is not None:
            said = "barebones=True" if settings.barebones else f"{argument}=False"
            raise ConfigurationError(
                f"Trainer({said}) contradicts the {type(own).__name__} in callbacks. Drop one of the two."
            )
        if wanted is not False and own is None and not (known is Checkpoint and settings.fast_dev_run):
            found.append(make())
    if any(isinstance(each, RichProgressBar) for each in found):
        found = [RichModelSummary() if type(each) is ModelSummary and each not in given else each for each in found]
    times_saves = any(isinstance(each, ModelCheckpoint) and each.every is not None for each in found)
    if times_saves and not any(isinstance(each, goodput_monitor.GoodputMonitor) for each in found):
        found.append(goodput_monitor.GoodputMonitor())
    if environment.auto_requeue and environment.requeue_signal and not (settings.fast_dev_run or settings.barebones):
        found.append(Requeue(environment))
    if "KUBEFLOW_TRAINER_SERVER_URL" in os.environ and not (settings.fast_dev_run or settings.barebones):
        found.append(trainjob.TrainJobStatus())
    if (path := environment.report_callback) and not (settings.fast_dev_run or settings.barebones):
        name = path.rpartition(":")[2]
        if not any(base.__name__ == name for each in found for base in type(each).__mro__):
            found.append(load(path)())
    return found
