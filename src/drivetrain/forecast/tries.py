"""Measure the unchanged program and the changes that may make it fit, each in a copy of the process."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from drivetrain.forecast import blocks
from drivetrain.forecast.child import cause
from drivetrain.forecast.memory import Measured, multiplied
from drivetrain.forecast.standins import Job
from drivetrain.forecast.windows import Case, Windows


class TryError(Exception):
    """A case could not be measured; the message is the cause."""


class Planner:
    """Measures the cases of one program, whose Trainer and arguments of ``fit`` exist.

    Args:
        job: the planned job.
        mode: the fake mode.
        program: the path of the program.
        asked: what the command asks for.
    """

    def __init__(self, job: Job, mode: Any, program: str, asked: dict[str, Any]) -> None:
        self.job, self.mode, self.program, self.asked = job, mode, program, asked
        self.values = [tuple(each) for each in asked.get("values", ())]

    def run(self, trainer: Any, started: Any) -> dict[str, Any]:
        """Return the result for the command."""
        self._trainer, self._started = trainer, started
        try:
            base = self.measured(Case(foreach=not self.job.on_host))
        except TryError as error:
            return {"failed": str(error)}
        return {"base": base, "plan": str(trainer.plan)}

    def measured(self, case: Case, changes: dict[str, Any] | None = None) -> Measured:
        """Return what a case needs: of long lists of blocks, two and three are measured, and multiplied."""
        first = self._alone(case, changes, (blocks.FEW,) * 64)
        if not first.lists:
            return first
        rest = blocks.cases(first.lists)[1:]
        try:
            more = [self._alone(case, changes, each) for each in rest]
        except TryError:  # the model counts its blocks
            return self._alone(case, changes, None)
        return multiplied(first, more, blocks.FEW)

    def _alone(self, case: Case, changes: dict[str, Any] | None, lengths: tuple[int, ...] | None) -> Measured:
        """Measure a case in a copy of this process, because a run changes the model."""
        from dataclasses import replace

        def run() -> Measured:
            trainer = self._trainer
            return Windows(self.job, replace(case, lengths=lengths), self.mode, self.program, self.values).run(
                trainer, self._started
            )

        return in_copy(run)


def in_copy(function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns in a copy of this process.

    Raises:
        TryError: it raised, or the copy was killed.
    """
    if not hasattr(os, "fork"):
        return function()
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            try:
                pickle.dump((True, function()), pipe)
            except BaseException as error:
                traceback.print_exc()
                pickle.dump((False, cause(error)), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    if not data:
        raise TryError("the process that measured it was killed, probably for want of memory on this machine")
    done, found = pickle.loads(data)
    if not done:
        raise TryError(found)
    return found
