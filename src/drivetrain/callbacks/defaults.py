"""The callbacks that a Trainer has without being passed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from drivetrain.base.lazy import on_first_use
from drivetrain.callback import Callback, Checkpoint
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.model_summary import ModelSummary
from drivetrain.callbacks.progress_bar import ProgressBar, default_progress_bar
from drivetrain.callbacks.requeue import Requeue
from drivetrain.callbacks.rich_model_summary import RichModelSummary
from drivetrain.callbacks.rich_progress import RichProgressBar
from drivetrain.callbacks.timer import Timer
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.clusters.environment import ClusterEnvironment
    from drivetrain.settings import Settings

with on_first_use:
    from drivetrain.callbacks import goodput_monitor, replay_check, replica_check

_DEFAULTS: tuple[tuple[str, type[Callback], Callable[[], Callback]], ...] = (
    ("enable_checkpointing", Checkpoint, ModelCheckpoint),
    ("enable_model_summary", ModelSummary, ModelSummary),
    ("enable_progress_bar", ProgressBar, default_progress_bar),
)
"""Arguments of the Trainer, with the class of which one callback is enough, and what makes the default one."""


def with_defaults(given: Sequence[Callback], settings: Settings, environment: ClusterEnvironment) -> list[Callback]:
    """Return the callbacks that were passed and the default ones.

    Raises:
        ConfigurationError: a callback that was passed contradicts an argument of the Trainer.
    """
    found = [*given]
    if settings.max_time is not None:
        if any(isinstance(callback, Timer) for callback in found):
            raise ConfigurationError(
                f"Trainer(max_time={settings.max_time!r}) and the Timer in callbacks both limit the time. Keep one."
            )
        found.append(Timer(duration=settings.max_time))
    if settings.replica_check_every is not None:
        if any(isinstance(callback, replica_check.ReplicaCheck) for callback in found):
            raise ConfigurationError(
                f"Trainer(replica_check_every={settings.replica_check_every!r}) and the ReplicaCheck in callbacks both "
                "compare the replicas. Keep one."
            )
        found.append(replica_check.ReplicaCheck(settings.replica_check_every))
    if settings.replay_every is not None:
        if any(isinstance(callback, replay_check.ReplayCheck) for callback in found):
            raise ConfigurationError(
                f"Trainer(replay_every={settings.replay_every!r}) and the ReplayCheck in callbacks both replay "
                "optimizer steps. Keep one."
            )
        found.append(replay_check.ReplayCheck(settings.replay_every))
    for argument, kind, make in _DEFAULTS:
        wanted = False if settings.barebones else getattr(settings, argument)
        own = next((callback for callback in found if isinstance(callback, kind)), None)
        if kind is ProgressBar and len(bars := [type(c).__name__ for c in found if isinstance(c, kind)]) > 1:
            raise ConfigurationError(
                f"Trainer(callbacks=...) got {len(bars)} progress bars, {' and '.join(bars)}, which would draw over "
                "each other. Keep one."
            )
        if wanted is False and own is not None:
            said = "barebones=True" if settings.barebones else f"{argument}=False"
            raise ConfigurationError(
                f"Trainer({said}) contradicts the {type(own).__name__} in callbacks. Drop one of the two."
            )
        if wanted is not False and own is None and not (kind is Checkpoint and settings.fast_dev_run):
            found.append(make())
    if any(isinstance(each, RichProgressBar) for each in found):
        found = [RichModelSummary() if type(each) is ModelSummary and each not in given else each for each in found]
    times_saves = any(isinstance(each, ModelCheckpoint) and each.every is not None for each in found)
    if times_saves and not any(isinstance(each, goodput_monitor.GoodputMonitor) for each in found):
        found.append(goodput_monitor.GoodputMonitor())
    if environment.auto_requeue and environment.requeue_signal and not (settings.fast_dev_run or settings.barebones):
        found.append(Requeue(environment))
    return found
