"""The child process of ``drivetrain plan``: run a program, and plan the program's first fit."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any, cast

import torch

from drivetrain.cli.program import parse_program, run_program
from drivetrain.engine import Engine
from drivetrain.forecast import standins, torch_tools
from drivetrain.forecast.allowance import needed
from drivetrain.forecast.stages import stand_in_for_stages
from drivetrain.forecast.tries import Planner, cause
from drivetrain.forecast.values import Values, read_one_by_one
from drivetrain.forecast.windows import Case, Windows
from drivetrain.trainer import trainer as entrance

PROG = "drivetrain plan"
VARIABLE = "DRIVETRAIN_PLAN"
"""The environment variable with the command's request, as JSON."""


def main() -> int:
    """Run the program on the command line, and compute the plan that :data:`VARIABLE` requests."""
    given = parse_program(PROG)
    asked = json.loads(os.environ.pop(VARIABLE))
    result = Path(asked["result"])
    _prepare(asked, given.program, result)
    # without freeze(), each later garbage collection would visit the objects of torch's modules
    gc.freeze()
    gc.enable()
    try:
        code = run_program(given, PROG)
    except Exception as error:
        write(result, {"failed": cause(error, given.program), "before_fit": True})
        raise
    if not result.exists():
        write(result, {"failed": f"{given.program} ended without a call of trainer.fit."})
    return code


def _prepare(asked: dict[str, Any], program: str, result: Path) -> None:
    """Patch torch and drivetrain in this process for the request."""
    trainers = cast("Any", entrance.Trainer)
    if asked["devices"] is None:
        own = trainers.__init__

        def shown(trainer: Any, *args: Any, **options: Any) -> None:
            own(trainer, *args, **options)
            decisions = [(each.what, each.choice, each.why) for each in trainer.plan.decisions]
            _end(result, {"plan": str(trainer.plan), "decisions": decisions})

        trainers.__init__ = shown
        return

    if asked.get("reads"):
        _record_reads(trainers, program, result, asked["reads"])
        return
    asked["values"] = pickle.loads(Path(asked["values"]).read_bytes()) if "values" in asked else None

    def fits(found: Any) -> bool:
        return asked["memory"] is None or needed(found, asked["devices"]) <= asked["memory"]

    job = standins.Job(asked["devices"], asked["per_node"], asked["rank"] or 0, asked["on_host"])
    mode, make_job = become(job, bool(asked.get("values_until_fit"))), trainers._job
    engines, make_engine = cast("Any", Engine), Engine.__init__

    def engine_of_a_trainer(engine: Engine, *args: Any, **options: Any) -> None:
        if "plan" not in options:
            _end(result, {"refused": _ENGINE})
        make_engine(engine, *args, **options)

    engines.__init__ = engine_of_a_trainer

    def fit_is_planned(trainer: Any, fn: Any, *args: Any) -> Any:
        if fn != "fit":
            _end(result, {"refused": f"The program calls trainer.{fn.value} first, and a plan is of trainer.fit."})
        started = make_job(trainer, fn, *args[:3], None, None)
        standins.drop_values(mode, started.model)
        found = Planner(job, mode, program, asked).run(trainer, started, fits)
        for each in found.get("changes", ()):
            # to unpickle a strategy in the arguments, the command would have to import torch
            each.arguments = {}
        _end(result, found)

    trainers._job = fit_is_planned


def _record_reads(trainers: Any, program: str, result: Path, memory: int) -> None:
    """Run the fit on real tensors in one process, and record the values that the program reads from tensors."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # some systems cannot limit the memory of a process
        resource = importlib.import_module("resource")
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch_tools.hide_devices()
    read_one_by_one()
    job = standins.Job(1, 1, 0, on_host=True)
    cast("Any", entrance).resolve = standins.planned(job, strategy="auto")
    make_job = trainers._job

    def fit_is_recorded(trainer: Any, fn: Any, *args: Any) -> Any:
        started, values = make_job(trainer, fn, *args[:3], None, None), Values({}, records=True)
        Windows(job, Case(foreach=False), contextlib.nullcontext(), program, values).run(trainer, started)
        _end(result, {"values": values.known})

    trainers._job = fit_is_recorded


def become(job: standins.Job, values_until_fit: bool = False) -> Any:
    """Make this process a rank of the planned job, and return the fake mode."""
    os.environ["DRIVETRAIN_DIRECT_STEP"] = "0"  # a plan can only record steps that call torch's public functions
    torch.set_num_threads(1)  # fake tensors need no threads, and a fork has no copies of threads
    torch_tools.hide_devices()
    mode: Any = torch_tools.fake_mode()
    if not job.on_host:
        _KEPT.append(torch_tools.autocast_as_devices_do())
    cast("Any", entrance).resolve = standins.planned(job)
    standins.stand_in_for_ranks(job)
    if not values_until_fit:
        standins.parameters_become_fake(mode)
    stand_in_for_stages(mode)
    return mode


_KEPT: list[Any] = []
_ENGINE = (
    "The program makes an Engine, whose loop is the program's own, and a plan is of trainer.fit. A LightningModule "
    "around the model can be planned."
)


def _end(result: Path, found: dict[str, Any]) -> None:
    write(result, found)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not sys.exit, so that neither the rest of the program nor exit handlers run


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a result for the command."""
    path.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
