"""Processes that this program starts: what they know, what comes back, and how they fail.

"fork" and "spawn" depend on what a process has done before, so they run in programs of their own, which stand beside
this file and report every case at once. Those programs are copies of a process that has computed nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from drivetrain.clusters import LocalEnvironment
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.launchers import LaunchError, MultiProcessingLauncher

SOON_S = 15  # the others would have slept for a minute


def environ(**variables: str) -> dict[str, str]:
    hidden = ("OMP_NUM_THREADS", "PL_GLOBAL_SEED")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, **variables}


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # torch 2.9's Gloo prints lines before it
    return found


@pytest.fixture(scope="module")
def forked(programs: Any) -> dict[str, Any]:
    path = Path(__file__).with_name("fork_program.py")
    return report(programs.run(path, cwd=path.parent, env=environ()))


@pytest.fixture(scope="module")
def spawned(programs: Any) -> dict[str, Any]:
    path = Path(__file__).with_name("spawn_program.py")
    return report(programs.run("-W", "error", path, cwd=path.parent, env=environ()))


# ---- what a process is told ------------------------------------------------------------------------------------------


def test_t45_each_process_knows_who_it_is(forked: dict[str, Any]) -> None:
    told, parent_is_unchanged, parent = forked["variables"]
    port = told[0][0]["MASTER_PORT"]
    for rank, (variables, threads, pid) in enumerate(told):
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(threads),
        }  # fmt: skip
        assert variables == expected
        assert threads == max(1, len(os.sched_getaffinity(0)) // 3)
        assert pid != parent
    assert int(port) > 1023
    assert len({pid for *_, pid in told}) == 3
    assert parent_is_unchanged


def test_the_second_of_two_machines(forked: dict[str, Any]) -> None:
    ranks = [(told["RANK"], told["LOCAL_RANK"], told["NODE_RANK"]) for told in forked["second_machine"]]
    assert ranks == [("2", "0", "1"), ("3", "1", "1")]
    common = {(told["WORLD_SIZE"], told["MASTER_ADDR"], told["MASTER_PORT"]) for told in forked["second_machine"]}
    assert common == {("4", "first", "4321")}


def test_t30_the_rank_is_known_when_the_programs_file_is_imported(spawned: dict[str, Any]) -> None:
    at_import = spawned["pickled"][0]
    assert (at_import["RANK"], at_import["LOCAL_RANK"]) == ("0", None)
    assert int(at_import["OMP_NUM_THREADS"]) >= 1


def test_t45_random_state_and_switches_travel(spawned: dict[str, Any]) -> None:
    _, switches, draws, *_ = spawned["pickled"]
    newer = ["tf32", "none", "none"]
    assert switches == spawned["here"][0] == ["torch.float64", ["high", False], newer, True, "3", True, 3]
    assert draws == spawned["here"][1]


def test_t45_a_fork_server_that_runs_already_hears_of_later_changes(spawned: dict[str, Any]) -> None:
    rank, is_the_programs_own_class, switches = spawned["failed"]
    assert switches == spawned["here later"]
    assert (switches[1], switches[2][1], switches[4]) == ("said in newer terms", "tf32", "9")
    assert (rank, is_the_programs_own_class) == (1, True)


def test_they_can_meet(forked: dict[str, Any]) -> None:
    assert forked["they_meet"] == 1 + 2 + 3


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_the_first_ones_result_comes_back_and_a_second_launch_works(forked: dict[str, Any]) -> None:
    assert forked["result"] == [0, "a", [1.0, 2.0, 3.0], "b"]


def test_slices_of_one_memory_come_back_as_such(forked: dict[str, Any]) -> None:
    assert forked["slices_travel_once"] == [1000, True]


def test_a_result_that_cannot_be_pickled(forked: dict[str, Any]) -> None:
    failed = forked["unpicklable_result"]
    assert failed["rank"] == 0
    assert failed["cause"] == "ConfigurationError"
    assert "<lambda>'. Return plain data and tensors." in failed["message"]


def test_t45_arguments_are_copies_that_share_nothing(spawned: dict[str, Any]) -> None:
    *_, tensor, view, shared, moved = spawned["pickled"]
    assert (tensor, view) == ([1.0] * 3, [1.0] * 2)  # still one memory in there
    assert shared == [False, False]
    assert moved == pytest.approx(1.0)
    assert spawned["here"][2:] == [[0.0] * 3, [False, False]]  # and nothing has happened to those here


def test_t45_replicas_do_not_share_the_parameters_that_they_inherit(forked: dict[str, Any]) -> None:
    bias, running_mean, still_tied, bias_here, on_purpose = forked["t45_replicas_do_not_share"]
    assert bias == running_mean == [1.0, 1.0]  # what rank 0 added; rank 1 would have made it 3
    assert bias_here == [0.0, 0.0]
    assert still_tied
    assert on_purpose == [1.0, 1.0]  # a tensor that the user shares stays shared


# ---- when one fails --------------------------------------------------------------------------------------------------


def test_t31_an_exception_is_the_cause_with_its_traceback_and_the_others_are_killed(forked: dict[str, Any]) -> None:
    failed = forked["exception"]
    assert (failed["rank"], failed["exit_code"]) == (1, 1)
    assert "\nRank 1 of 2 (process " in failed["message"]
    assert ", exit code 1) raised ValueError: the reason\nat " in failed["message"]
    assert (failed["cause"], failed["cause_text"]) == ("ValueError", "the reason")
    assert "in raises\n    raise error(*args)\nValueError: the reason" in failed["origin"]
    assert failed["seconds"] < SOON_S


def test_t31_an_exception_that_does_not_travel_leaves_its_traceback(forked: dict[str, Any]) -> None:
    failed = forked["peculiar_exception"]
    assert failed["cause"] == "RemoteTraceback"
    assert "Peculiar: the reason" in failed["cause_text"]


def test_t31_the_one_that_failed_is_named_and_not_the_one_that_missed_it(forked: dict[str, Any]) -> None:
    failed = forked["exception_in_exchange"]
    assert (failed["rank"], failed["cause"], failed["cause_text"]) == (1, "ValueError", "the reason")


@pytest.mark.parametrize("case", ["killed", "killed_in_exchange", "killed_with_a_child"])
def test_t31_a_killed_process_is_named(forked: dict[str, Any], case: str) -> None:
    failed = forked[case]
    assert (failed["rank"], failed["exit_code"], failed["cause"]) == (1, -signal.SIGKILL, "NoneType")
    assert "was ended by the signal SIGKILL.\nIf you did not send it, the system ran out of memory" in failed["message"]
    assert failed["seconds"] < SOON_S


@pytest.mark.parametrize(("case", "code"), [("sys_exit", 0), ("exit_code", 3)])
def test_a_process_that_ends_early_is_named(forked: dict[str, Any], case: str, code: int) -> None:
    failed = forked[case]
    assert (failed["rank"], failed["exit_code"]) == (1, code)
    assert "ended before its function returned; what it wrote stands above.\nReturn in place of" in failed["message"]


def test_a_launch_error_pickles() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(LaunchError("message", 1, -9)))
    assert (str(error), error.rank, error.exit_code) == ("message", 1, -9)
    assert isinstance(error, DrivetrainError)


@pytest.mark.parametrize("case", ["interrupted_parent", "interrupted_child"])
def test_ctrl_c_ends_all(forked: dict[str, Any], case: str) -> None:
    seconds, alive = forked[case]
    assert seconds < SOON_S
    assert not any(alive)


@pytest.mark.parametrize("where", ["parent", "child"])
def test_ctrl_c_while_a_process_is_forked_is_not_lost(forked: dict[str, Any], where: str) -> None:
    seconds, left = forked["interrupted_while_forking"][where]
    assert seconds < SOON_S
    assert left == 0


ORPHANS = """
import os, sys, time
from drivetrain.clusters import LocalEnvironment
from drivetrain.launchers import MultiProcessingLauncher

def wait():
    print(os.getpid(), flush=True)
    time.sleep(60)

MultiProcessingLauncher(LocalEnvironment(), 2, start_method="fork").launch(wait)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for it")
def test_nobody_is_left_when_the_launching_process_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        parent.kill()
        _, alive = psutil.wait_procs(children, timeout=SOON_S)
    assert alive == []


# ---- whether a process can be copied or made anew --------------------------------------------------------------------

THREADS = """
import torch
from drivetrain.clusters import LocalEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import MultiProcessingLauncher, _fork

def compute():
    return (torch.ones(512, 512) + 1).sum().item()

launcher = MultiProcessingLauncher(LocalEnvironment(), 2, start_method="fork")
print(launcher.launch(compute))
compute()
_fork._PROBE_S = 2.0
try:
    launcher.launch(compute)
except ConfigurationError as error:
    print(error)
"""


def test_a_copy_of_a_process_with_torchs_threads_would_hang(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(THREADS)
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ(OMP_NUM_THREADS="2"), check=False)
    assert done.returncode == 0, done.stderr
    fresh, refused = done.stdout.splitlines()
    assert float(fresh) == 2 * 512 * 512
    assert "a parallel torch operation in a copy did not end within 2 s" in refused
    assert refused.endswith(
        'Use start_method="spawn" or "forkserver", or launch before anything is computed in this process.'
    )


def test_nothing_of_ours_runs_in_a_thread_while_a_process_is_copied(forked: dict[str, Any]) -> None:
    assert forked["nothing_of_ours_runs_beside"] == [1, 1, 1]  # the probe and two ranks


def test_a_copy_of_a_process_that_has_used_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(is_initialized=lambda: True))
    launcher = MultiProcessingLauncher(LocalEnvironment({}), 2, start_method="fork")
    with pytest.raises(ConfigurationError, match=r"already used its cuda device here, .*Use start_method=\"spawn\""):
        launcher.launch(print)


def test_t45_what_cannot_be_pickled_is_said_before_anything_starts() -> None:
    launcher = MultiProcessingLauncher(LocalEnvironment({}), 2)
    with pytest.raises(
        ConfigurationError, match=r"cannot be pickled: .*<lambda>.*top level of a file, or use a start_"
    ):
        launcher.launch(lambda: None)
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


UNGUARDED = """
from drivetrain.clusters import LocalEnvironment
from drivetrain.launchers import MultiProcessingLauncher

MultiProcessingLauncher(LocalEnvironment(), 1).launch(print, "the function ran")
"""


def test_a_program_without_a_guard_is_told_so(programs: Any, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(UNGUARDED)
    done = programs.run(path, cwd=tmp_path, env=environ())
    assert done.returncode == 1
    assert "the function ran" not in done.stdout
    assert 'keep what the program\'s file does below an if __name__ == "__main__":.' in done.stderr


def test_a_start_method_that_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match="start_method='spwan': .* Did you mean 'spawn'"):
        MultiProcessingLauncher(LocalEnvironment({}), 2, start_method="spwan")  # type: ignore[arg-type]


def test_only_copies_work_in_notebooks() -> None:
    usable = {
        method: MultiProcessingLauncher(LocalEnvironment({}), 2, start_method=method).is_interactive_compatible  # type: ignore[arg-type]
        for method in ("spawn", "fork", "forkserver")
    }
    assert usable == {"spawn": False, "fork": True, "forkserver": False}
    assert not MultiProcessingLauncher.is_external
