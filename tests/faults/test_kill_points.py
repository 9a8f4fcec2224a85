"""A run that is interrupted at any point and resumed ends as the run that was never interrupted, bit for bit.

Random programs, random points, three ways to be interrupted: an exception, Ctrl-C, SIGKILL. DRIVETRAIN_FAULTS=long
tries hundreds of points; a failure names the seed of its program and the number of its point.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

if "tests.faults.kill_points" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "tests.faults.kill_points", Path(__file__).with_name("kill_points.py")
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["tests.faults.kill_points"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["tests.faults.kill_points"])
kill_points: Any = sys.modules["tests.faults.kill_points"]

# Imports torch once; each line of its input is a run in a process of its own.
SERVER = """
import json, os, sys, warnings
sys.path.insert(0, sys.argv[1])
import torch, torch._dynamo
torch.set_num_threads(1)
from pathlib import Path
import kill_points
for line in sys.stdin:
    arguments, folder, at, resumes = json.loads(line)
    if (pid := os.fork()) == 0:
        kill_points.run(kill_points.Program(**arguments), Path(folder), at, "kill", resumes)
        os._exit(0)
    print(json.dumps(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Server:
    """Processes that may be killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(Path(__file__).parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, arguments: dict[str, Any], folder: Path, at: int, resumes: bool) -> int:
        """The exit status of a run that is killed at point ``at``; 0 if it has not that many points."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([arguments, str(folder), at, resumes]) + "\n")
        self.process.stdin.flush()
        status: int = json.loads(self.process.stdout.readline())
        return status


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.kill()
    server.process.communicate()


@dataclass
class Tried:
    """What was tried so far."""

    points: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def check(self) -> None:
        print(f"{sum(self.points.values())} kill points {dict(self.points)}, explained {dict(self.explained)}")
        assert not self.failures, "\n".join(self.failures)


def choose(draw: random.Random, points: Any) -> int:
    """A point: first which kind, so that rare ones have their chance, then which of them."""
    names = points.names[: points.stops_at]
    kind = draw.choice(sorted(set(names)))
    return draw.choice([number for number, name in enumerate(names) if name == kind])


def interrupt(tried: Tried, draw: random.Random, arguments: dict[str, Any], modes: list[str], folder: Path, count: int,
              server: Server | None = None) -> None:  # fmt: skip
    """Try ``count`` points of one program; a quarter of the resumed runs is interrupted once more."""
    program = kill_points.Program(**arguments)
    whole = kill_points.run(program, folder / "whole")
    for number in range(count):
        here, at, mode = folder / str(number), choose(draw, whole.points), draw.choice(modes)
        story = f"Program({arguments}) {mode} at {at}, {whole.points.names[at]}"
        fired, _ = stop(program, arguments, here, at, mode, server, resumes=False)
        warned: list[str] = []
        once_more = whole.points.stops_at is None and draw.random() < 0.25  # a run that was stopped can be resumed
        if once_more and (later := draw.randrange(len(whole.points.names))):
            again, warned = stop(program, arguments, here, later, mode, server, resumes=True)
            story += f", then at {later}, {again}"
            # What the first interruption has cost, a save or the end of a batch, is not made up for by the second.
            first = kill_points.Ended(None, fired, warned, kill_points.Points())
            if not kill_points.explained(program, fired, mode, first):
                fired = again or fired
        resumed = kill_points.run(program, here, resumes=True)
        resumed.warned += warned
        found = kill_points.unexplained(program, fired, mode, resumed, whole.result)
        tried.points[mode] += 1
        if why := kill_points.explained(program, fired, mode, resumed):
            tried.explained[f"{why}: {fired}"] += 1
        if found:
            tried.failures.append(f"{story}:\n    " + "\n    ".join(found[:5]))
        shutil.rmtree(here)


def stop(program: Any, arguments: dict[str, Any], folder: Path, at: int, mode: str, server: Server | None,
         resumes: bool) -> tuple[str, list[str]]:  # fmt: skip
    """Interrupt a run; return the point, "" if it came to its end before, and its warnings."""
    if mode != "kill":
        ended = kill_points.run(program, folder, at, mode, resumes)
        return ended.fired, ended.warned
    assert server is not None
    return ("killed" if server.run(arguments, folder, at, resumes) == signal.SIGKILL else ""), []


@pytest.mark.timeout(3600)
def test_exceptions_and_ctrl_c_at_random_points(tmp_path: Path, long_form: bool, seed: int) -> None:
    tried, draw = Tried(), random.Random(seed)
    for number in range(60 if long_form else 5):
        arguments = {"seed": draw.randrange(2**31), "workers_allowed": long_form}
        interrupt(tried, draw, arguments, ["exception", "interrupt"], tmp_path / str(number), 4 if long_form else 2)
    tried.check()


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL, which are POSIX")
def test_sigkill_at_random_points(tmp_path: Path, long_form: bool, seed: int, server: Server) -> None:
    tried, draw = Tried(), random.Random(seed + 1)
    for number in range(40 if long_form else 2):
        arguments = {"seed": draw.randrange(2**31), "workers_allowed": long_form}
        interrupt(tried, draw, arguments, ["kill"], tmp_path / str(number), 4 if long_form else 2, server)
    tried.check()


def of_rank(arguments: dict[str, Any], folder: str, at: int, mode: str, resumes: bool) -> Any:
    """One rank's run; every rank is interrupted at its own point ``at``."""
    torch.set_num_threads(1)
    return kill_points.run(kill_points.Program(**arguments), Path(folder), at, mode, resumes)


@pytest.mark.timeout(3600)
def test_two_processes(tmp_path: Path, long_form: bool, seed: int, pool: Any) -> None:
    """Both are interrupted. Saving on exceptions is refused there, so what ModelCheckpoint saved is resumed."""
    tried, draw = Tried(), random.Random(seed + 2)
    for number in range(15 if long_form else 1):
        arguments = {
            "seed": draw.randrange(2**31), "workers_allowed": False, "exception_savers": False, "world_size": 2,
        }  # fmt: skip
        program = kill_points.Program(**arguments)
        whole = pool.run(of_rank, arguments, str(tmp_path / f"{number} whole"), -1, "exception", False, group=False)
        for trial in range(3 if long_form else 1):
            at, mode = choose(draw, whole[1].points), draw.choice(["exception", "kill"] if long_form else ["exception"])
            folder = str(tmp_path / f"{number} {trial}")
            try:
                pool.run(of_rank, arguments, folder, at, mode, False, group=False)
            except AssertionError:  # a rank died
                assert mode == "kill"
            resumed = pool.run(of_rank, arguments, folder, -1, mode, True, group=False)
            tried.points[mode] += 1
            for rank in (0, 1):
                fired = whole[rank].points.names[at]
                # A save that the interruption has cost is not made up for: "exception" lets it be explained.
                found = kill_points.unexplained(program, fired, "exception", resumed[rank], whole[rank].result)
                if rank == 1:  # buffers are rank 0's, which all get before each batch, and only rank 0 writes rows
                    found = [line for line in found if not line.startswith((".weights.net.1.running", ".rows"))]
                if found:
                    story = f"Program({arguments}) {mode} at {at}, {fired}, rank {rank}"
                    tried.failures.append(f"{story}:\n    " + "\n    ".join(found[:5]))
    tried.check()


@pytest.mark.parametrize("lost", ["rng", "callbacks", "data"])
def test_a_broken_restore_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The negative control: leave out one part when a run resumes, and the results differ."""
    from drivetrain.trainer import checkpoint

    program = kill_points.Program(seed=6, workers_allowed=False)
    whole = kill_points.run(program, tmp_path / "whole")
    at = [n for n, name in enumerate(whole.points.names) if name == "module.on_after_backward"][8]
    kill_points.run(program, tmp_path / "a", at)
    load = checkpoint.load

    def loses(*args: Any) -> dict[str, Any]:
        loaded = load(*args)
        if lost == "callbacks":
            loaded["callbacks"] = {key: state for key, state in loaded["callbacks"].items() if "Average" not in key}
        elif lost == "rng":
            loaded["rng"] = {**loaded["rng"], "torch": torch.Generator().manual_seed(1).get_state()}
        else:
            for moment in ("before", "drawing"):
                loaded["restart"]["data"][moment] = loaded["rng"] | {"generators": []}
        return loaded

    monkeypatch.setattr(checkpoint, "load", loses)
    resumed = kill_points.run(program, tmp_path / "a", resumes=True)
    assert kill_points.unexplained(program, "", "exception", resumed, whole.result)
