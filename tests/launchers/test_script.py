"""The program's command again: faithfully, watched, and never where another program hosts this one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from drivetrain.clusters import LocalEnvironment
from drivetrain.clusters.local import free_port
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import ScriptLauncher, script
from drivetrain.launchers.board import PHASE, SHOWN, Board, Sheet
from drivetrain.launchers.child import write_failure
from drivetrain.launchers.launcher import LAUNCHER
from drivetrain.launchers.signals import Sent
from drivetrain.loops.progress import Phase

TIMEOUT_S = 60

# What a rank does is put where the comment stands; the launching process imports torch, the ranks need not.
PROGRAM = """
import json, os, sys, time
argv, cwd = list(sys.argv), os.getcwd()
def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")  # in one piece, also where nothing is buffered
    sys.stdout.flush()
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
sys.argv[:] = ["changed"]
if "RANK" not in os.environ:
    from drivetrain.clusters import LocalEnvironment
    from drivetrain.launchers import ScriptLauncher
    os.environ["ADDED"] = "here"
    try:
        ScriptLauncher(LocalEnvironment(), 2).launch()
    finally:
        say("the launching process cleans up")
rank = int(os.environ["RANK"])
# a rank
"""
REPORT = """
names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ADDED"]
say({"argv": argv, "cwd": cwd, **{name: os.environ[name] for name in names}})
"""


def written(folder: Path, rank: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(PROGRAM.replace("# a rank", rank))
    return path


def environ() -> dict[str, str]:
    hidden = ("PYTEST_CURRENT_TEST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in hidden}


@pytest.fixture
def run(programs: Any, tmp_path: Path) -> Callable[..., tuple[list[Any], subprocess.CompletedProcess[str]]]:
    """What the processes of a command print, in no order."""

    def run(*command: str) -> tuple[list[Any], subprocess.CompletedProcess[str]]:
        done: subprocess.CompletedProcess[str]
        if command[0] == "-X":  # an option of an interpreter that starts
            done = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, env=environ(), capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        else:
            done = programs.run(*command, cwd=tmp_path, env=environ(), timeout=TIMEOUT_S)
        return [json.loads(line) for line in done.stdout.splitlines() if not line.startswith("[Gloo]")], done

    return run


@pytest.mark.parametrize(
    ("path", "command", "argv0"),
    [
        ("train.py", ["train.py"], "train.py"),
        ("sub/train.py", ["-X", "utf8", "./sub/train.py"], "./sub/train.py"),
        ("package/train.py", ["-m", "package.train"], "{folder}/package/train.py"),
        ("train.py", ["{folder}/train.py"], "{folder}/train.py"),
    ],
)
def test_t46_each_rank_gets_the_command_and_the_folder_of_the_start(
    run: Any, tmp_path: Path, path: str, command: list[str], argv0: str
) -> None:
    written(tmp_path, REPORT, path)
    said, done = run(*(part.format(folder=tmp_path) for part in command), "--rate", "0.1")
    assert done.returncode == 0, done.stderr
    ranks = sorted((one for one in said if isinstance(one, dict)), key=lambda one: one["RANK"])
    for rank, one in enumerate(ranks):
        assert one.pop("argv") == [argv0.format(folder=tmp_path), "--rate", "0.1"]
        # an absolute path does not say where the program was started, and this one left before it imported us
        assert one.pop("cwd") == str(tmp_path / "elsewhere" if command == ["{folder}/train.py"] else tmp_path)
        assert one == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ranks[0]["MASTER_PORT"], "ADDED": "here",
        }  # fmt: skip
    assert len(ranks) == 2
    assert said.count("the launching process cleans up") == 1


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ("if rank == 1: sys.exit(7)\ntime.sleep(600)", 7),
        ("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)", 128 + signal.SIGKILL),
        ("if rank == 1: raise ValueError('of rank 1')\ntime.sleep(600)", 1),
    ],
)
def test_t31_the_job_ends_as_the_process_that_failed_first(run: Any, tmp_path: Path, rank: str, code: int) -> None:
    written(tmp_path, rank)
    _, done = run("train.py")
    assert done.returncode == code
    assert ("of rank 1" in done.stderr) == (code == 1)


@pytest.mark.skipif(os.name != "posix", reason="a shell that closes the standard output")
def test_a_program_without_a_standard_output_starts_its_ranks(tmp_path: Path) -> None:
    program = written(tmp_path, "open(f'{rank}.came', 'w').close()")
    program.write_text(
        program.read_text().replace("def say(value):", "def say(value):\n    if sys.stdout is None: return")
    )
    command = ["sh", "-c", 'exec "$1" train.py >&-', "sh", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, len(list(tmp_path.rglob("*.came")))) == (0, 2), done.stderr


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_t32_a_signal_to_the_launching_process_reaches_the_ranks(tmp_path: Path, sent: int, code: int) -> None:
    # It may arrive while `say` flushes, which must not be entered again: the handler writes without a buffer.
    note = "def note(number, frame):\n    os.write(1, f'{number:d}\\n'.encode())\n    os._exit(1)\n"
    sets = "import signal\nfor each in (2, 15): signal.signal(each, note)\nsay('ready')\n"
    written(tmp_path, f"{note}{sets}time.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ['"ready"\n'] * 2
        process.send_signal(sent)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == code
    assert rest.splitlines().count(str(int(sent))) == 2


def test_nobody_is_left_when_the_launching_process_is_killed(tmp_path: Path) -> None:
    written(tmp_path, "say(os.getpid())\ntime.sleep(600)")  # before a rank has imported drivetrain
    process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=environ(), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    finally:
        process.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_S)
    assert (len(gone), alive) == (2, [])
    process.wait(TIMEOUT_S)
    process.stdout.close()


def test_breakpoint_works_on_rank_zero(tmp_path: Path) -> None:
    written(tmp_path, "answer = 41 + rank\nif rank == 0: breakpoint()\nsay(answer)")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ(), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while b"(Pdb)" not in said:
            said += os.read(ours, 1000)
        os.write(ours, b"answer = 1234\nc\n")
        assert process.wait(TIMEOUT_S) == 0
        while b"1234\r\n42" not in said and b"\r\n1234\r\n" not in said:
            said += os.read(ours, 1000)
    finally:
        process.kill()
        os.close(ours)


OWN_ENVIRONMENT = """
import json, sys
from drivetrain import Engine
from drivetrain.clusters import ClusterEnvironment

class Mine(ClusterEnvironment):
    creates_processes_externally = False  # as it looks from each of the processes
    main_address, main_port = "127.0.0.1", PORT

engine = Engine(accelerator="cpu", devices=2, plugins=Mine())
engine.launch()
total = engine.all_reduce(__import__("torch").tensor(1), reduce_op="sum")
sys.stdout.write(json.dumps([engine.global_rank, engine.world_size, int(total)]) + "\\n")
"""


def test_an_environment_that_always_leaves_the_start_to_us_starts_them_once(run: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_ENVIRONMENT.replace("PORT", str(free_port())))
    said, done = run("train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(said) == [[0, 2, 2], [1, 2, 2]]


def test_under_pytest_it_names_another_way() -> None:
    with pytest.raises(ConfigurationError, match='would run pytest again, .* Write strategy="ddp_spawn"'):
        ScriptLauncher(LocalEnvironment({}), 2).launch()


def test_in_a_notebook_it_names_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", pytest)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    with pytest.raises(ConfigurationError, match='would run the notebook again, .* Write strategy="ddp_noteb'):
        ScriptLauncher(LocalEnvironment({}), 2).launch()


@pytest.mark.parametrize(("options", "name"), [(["-i"], "the interactive session"), ([], "from the standard input")])
def test_without_a_file_it_names_another_way(options: list[str], name: str) -> None:
    program = (
        "from drivetrain.clusters import LocalEnvironment\nfrom drivetrain.launchers import ScriptLauncher\n"
        "ScriptLauncher(LocalEnvironment(), 2).launch()\n"
    )
    done = subprocess.run(
        [sys.executable, *options], input=program, env=environ(), capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert name in done.stderr
    assert "ddp_fork" in done.stderr


def first_failure(folder: Path, *processes: Any) -> int:
    return script._first_failure(processes, Sent(), Board(folder, range(len(processes)), len(processes)), 600.0)


@pytest.mark.parametrize("grace_s", [30.0, 0.0])
def test_when_one_process_fails_the_others_may_print_why_they_fail_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grace_s: float
) -> None:
    monkeypatch.setattr(script, "_LAST_WORDS_S", grace_s)
    failed = subprocess.Popen(["sh", "-c", "exit 3"])
    failed.wait()
    other = subprocess.Popen(["sh", "-c", "read line; exit 4"], stdin=subprocess.PIPE)
    prints = threading.Timer(0.3, other.stdin.close)  # type: ignore[union-attr]
    prints.start()
    try:
        assert first_failure(tmp_path, other, failed) == 3  # which ended first, not which comes first
        assert other.poll() == (4 if grace_s else None)  # without a grace it would be cut off
    finally:
        prints.join()
        other.wait()


def test_a_process_that_works_on_after_another_has_failed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "_LAST_WORDS_S", 0.2)
    failed, works = subprocess.Popen(["sh", "-c", "exit 3"]), subprocess.Popen(["sleep", "60"])
    try:
        assert first_failure(tmp_path, works, failed) == 3
        assert works.poll() is None
    finally:
        works.kill()
        works.wait()


INHERITS = """
import os
from drivetrain.launchers.script import started_by_rank
print(started_by_rank() == os.getppid())
os.environ["MASTER_PORT"] = "2"
print(started_by_rank())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_program_that_a_rank_starts_is_no_rank_of_its_job() -> None:
    """The shell is the rank; a program with a meeting point of its own is a job of its own."""
    variables = {**environ(), "RANK": "1", "MASTER_PORT": "1", LAUNCHER: str(os.getpid())}
    command = ["sh", "-c", '"$1" -c "$2"; exit', "sh", sys.executable, INHERITS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout.split() == ["True", "0"], done.stderr


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_ends_well_in_the_middle_of_a_run_is_named_before_those_that_lose_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int | None
) -> None:
    """``None``: it still runs, so the others have lost something else."""
    board = Board(tmp_path, [0, 1], 2)
    for rank in (0, 1):
        words = Sheet(tmp_path, rank).words
        words[SHOWN], words[PHASE] = 1, Phase.FORWARD
    write_failure(tmp_path, 0, RuntimeError("Connection closed by peer"))
    processes: Any = [
        SimpleNamespace(pid=10 + rank, returncode=each, poll=lambda each=each: each)
        for rank, each in enumerate([1, code])
    ]
    assert script._report(processes, board, 1) == 1
    said = capsys.readouterr().err
    first = "Rank 1 of 2 (process 11) ended with exit code 0 in the phase 'forward'"
    assert said.startswith(first if code == 0 else "Rank 0 of 2 (process 10) raised RuntimeError: Connection closed")


def test_processes_that_all_end_well_have_no_failure(tmp_path: Path) -> None:
    assert first_failure(tmp_path, subprocess.Popen(["true"]), subprocess.Popen(["true"])) == 0


def test_a_program_that_was_started_in_the_root_folder_is_started_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="/train.py", __spec__=None))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert script._directory() == "/"
