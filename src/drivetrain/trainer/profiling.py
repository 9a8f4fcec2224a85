"""Creates a Trainer's profiler from the argument, and calls the profiler during a run. Imported only if the Trainer
gets a profiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError, UnknownNameError, described
from drivetrain.loops.spans import Spans

if TYPE_CHECKING:
    from drivetrain.profilers.profiler import Profiler


def profiler_of(given: Any) -> Profiler:
    """Return the profiler for ``Trainer(profiler=given)``.

    Raises:
        ConfigurationError: ``given`` is neither a profiler nor the name of a profiler.
    """
    if isinstance(given, str):
        try:
            given = load("drivetrain.profilers:ProfilerRegistry").get(given)
        except UnknownNameError as error:
            raise ConfigurationError(f"Trainer(profiler={given!r}): {error}") from error
    contract: type[Profiler] = load("drivetrain.profilers:Profiler")
    if not isinstance(given, contract):
        raise ConfigurationError(
            f"Trainer(profiler=...) got {described(given)}. Pass a drivetrain.profilers.Profiler, or the name of one: "
            'profiler="simple".'
        )
    return given


def begin(trainer: Any, stage: str) -> None:
    """Set up the profiler for a run, before the run looks up the hooks and steps."""
    profiler = trainer.profiler
    profiler.setup(
        stage=stage, local_rank=trainer.local_rank if trainer.world_size > 1 else None, log_dir=trainer.log_dir
    )
    profiler.watch(trainer.lightning_module)
    if not isinstance(profiler, load("drivetrain.profilers:PassThroughProfiler")):
        trainer.hooks.spans = Spans(profiler)


def end(trainer: Any, stage: str) -> None:
    """Let the profiler report on the run and free the profiler's resources. Do nothing if the run ended before
    :func:`begin`.
    """
    hooks = trainer._hooks
    if hooks is None or hooks.spans is None:
        return
    hooks.spans.end_all()
    hooks.spans = None
    trainer.profiler.describe()
    trainer.profiler.teardown(stage)
