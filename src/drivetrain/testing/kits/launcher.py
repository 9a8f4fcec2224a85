"""The checks for launchers. A check runs a program that launches two processes on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from drivetrain.accelerators.accelerator import HOST
from drivetrain.clusters.environment import detect
from drivetrain.launchers.launcher import LaunchError
from drivetrain.testing.checks import CannotTryError, Part, Skipped, is_true, same

SETTINGS = ("timeout_s",)

_SIZE = 2
_MISSING = 77  # the exit code of a program that lacks a package
_LIMIT_S = 120.0
_RESULT, _RANK = "result.json", "rank-{}.json"


# ---- in the programs -------------------------------------------------------------------------------------------------


def program(file: str) -> None:
    """Launch the job that ``file`` describes, and write the job's result to a file."""
    part, scenario, folder = pickle.loads(Path(file).read_bytes())
    cls, registered = part.found
    launcher = cls.for_job(detect()[0], _SIZE, 1, [HOST] * _SIZE, **registered, **part.arguments)
    outcome: dict[str, Any] = {"error": None}
    try:
        result = launcher.launch(globals()[scenario], folder, tensor=torch.arange(3.0))
        outcome["result"] = {name: value.tolist() for name, value in result.items()}
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        sys.exit(_MISSING)
    except LaunchError as error:
        outcome |= {"error": "LaunchError", "rank": error.rank, "cause": repr(error.__cause__), "text": str(error)}
    if not launcher.is_external:
        Path(folder, _RESULT).write_text(json.dumps(outcome))
    sys.exit(outcome["error"] is not None)


def _noted(folder: str) -> int:
    """Write what this process knows about its rank to a file, and return the rank."""
    environment = detect()[0]
    rank = environment.global_rank()
    with Path(folder, _RANK.format(rank)).open("a") as file:
        file.write(json.dumps({
            "pid": os.getpid(), "global_rank": rank, "local_rank": environment.local_rank(),
            "world_size": environment.world_size(), "node_rank": environment.node_rank(),
            "meets": [environment.main_address, environment.main_port],
        }) + "\n")  # fmt: skip
    return rank


def reports(folder: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum a tensor over the ranks, and return the result."""
    rank = _noted(folder)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(_SIZE))
    total = torch.tensor([float(rank + 1)])
    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return {"rank": torch.tensor(rank), "twice": 2 * tensor, "total": total}


def raises(folder: str, tensor: torch.Tensor) -> None:
    """Raise an exception in rank 1, while rank 0 waits."""
    if _noted(folder) == 1:
        _wait_for_rank_0(folder)
        raise ZeroDivisionError("planted")
    time.sleep(_LIMIT_S)


def is_killed(folder: str, tensor: torch.Tensor) -> None:
    """Kill rank 1, while rank 0 waits."""
    if _noted(folder) == 1:
        _wait_for_rank_0(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_LIMIT_S)


def _wait_for_rank_0(folder: str) -> None:
    while not Path(folder, _RANK.format(0)).exists():
        time.sleep(0.05)


# ---- the checks ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Ended:
    """How a program has ended: its exit code, its output, and the files that the program and its ranks have written."""

    code: int
    printed: str
    result: dict[str, Any]
    ranks: dict[int, list[dict[str, Any]]]


def _ended(part: Part, scenario: str) -> _Ended:
    """Run the program. All checks of one scenario share one run."""
    if scenario in part.memory:
        return part.memory[scenario]
    spec = part.folder / "spec"
    spec.write_bytes(pickle.dumps((part.for_other_process(), scenario, str(part.folder))))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "drivetrain.testing.kits._launch", str(spec)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, text=True)
    try:
        printed, _ = process.communicate(timeout=part.settings.get("timeout_s", _LIMIT_S))
    except subprocess.TimeoutExpired:
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()
        process.kill()
        process.wait()
        raise AssertionError("the program has not ended in time; its processes were killed") from None
    if process.returncode == _MISSING:
        raise CannotTryError(printed.strip())
    ranks = {
        rank: [json.loads(line) for line in file.read_text().splitlines()]
        for rank in range(_SIZE) if (file := part.folder / _RANK.format(rank)).exists()
    }  # fmt: skip
    written = part.folder / _RESULT
    result = json.loads(written.read_text()) if written.exists() else {}
    part.memory[scenario] = found = _Ended(process.returncode, printed, result, ranks)
    return found


def _well(part: Part) -> _Ended:
    ended = _ended(part, "reports")
    said = (ended.printed.strip().splitlines() or [""])[-1]
    same(ended.code, 0, f"exit code of the program that launches, whose last line is {said!r}")
    return ended


def try_it(part: Part) -> None:
    """Check that the launcher starts processes, and that the packages that the launcher needs are installed."""
    if getattr(part.found[0], "is_external", False):
        raise CannotTryError("Its processes are started by another program, which this kit does not know.")
    _ended(part, "reports")


def it_declares_itself(part: Part) -> None:
    """is_external, is_interactive_compatible, reruns_program and leaves_one_here are bools."""
    found: Any = part.found
    launcher = found[0].for_job(detect()[0], _SIZE, 1, [HOST] * _SIZE, **found[1], **part.arguments)
    for name in ("is_external", "is_interactive_compatible", "reruns_program", "leaves_one_here"):
        same(type(getattr(launcher, name)), bool, f"type of {name}")


def each_process_runs_the_function_once(part: Part) -> None:
    """If two processes are launched, the function runs once in each of them, and in no other process."""
    ended = _well(part)
    same({rank: len(lines) for rank, lines in ended.ranks.items()}, {0: 1, 1: 1}, "calls of the function by rank")
    same(len({line["pid"] for lines in ended.ranks.values() for line in lines}), 2, "processes that ran the function")


def each_process_knows_its_rank(part: Part) -> None:
    """In each process, the cluster environment returns the global rank, local rank and world size of the process."""
    names = ("global_rank", "local_rank", "world_size", "node_rank")
    for rank, lines in _well(part).ranks.items():
        same([lines[0][name] for name in names], [rank, rank, _SIZE, 0], ", ".join(names))


def the_processes_can_meet(part: Part) -> None:
    """All processes have the same main address and port, and can create a process group that sums a tensor."""
    ended = _well(part)
    same(len({tuple(lines[0]["meets"]) for lines in ended.ranks.values()}), 1, "number of meeting places")
    if "result" in ended.result:
        same(ended.result["result"]["total"], [3.0], "sum over the processes")


def the_first_process_s_result_comes_back(part: Part) -> None:
    """launch passes arguments with tensors to the function, and returns the result of rank 0."""
    ended = _well(part)
    if not ended.result:
        raise Skipped("it runs the complete program in each process, so launch does not return")
    same(ended.result["result"], {"rank": 0, "twice": [0.0, 2.0, 4.0], "total": [3.0]}, "result of launch")


def an_exception_in_a_rank_ends_the_job(part: Part) -> None:
    """If a rank raises an exception, the launcher ends the other rank. launch raises a LaunchError whose rank is the
    failed rank, and whose cause is the exception.
    """
    ended = _ended(part, "raises")
    is_true(ended.code != 0, "the program ended with exit code 0")
    is_true("planted" in ended.printed + str(ended.result), "the exception of the rank is not shown")
    _failed(ended)
    if ended.result:
        is_true("ZeroDivisionError" in ended.result["cause"], f"the error's cause is {ended.result['cause']}")


def a_killed_rank_ends_the_job(part: Part) -> None:
    """If a rank is killed, the launcher ends the other rank. launch raises a LaunchError whose rank is the killed
    rank.
    """
    ended = _ended(part, "is_killed")
    is_true(ended.code != 0, "the program ended with exit code 0")
    _failed(ended)


def _failed(ended: _Ended) -> None:
    if ended.result:
        same((ended.result["error"], ended.result.get("rank")), ("LaunchError", 1), "error of launch, and its rank")
    pids = [line["pid"] for lines in ended.ranks.values() for line in lines]
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=5)
    alive = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    for each in alive:
        each.kill()
    same(len(alive), 0, "processes that are left")
