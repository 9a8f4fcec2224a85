"""Run a program once undisturbed, and once with kills and restarts, each in its own copy of the working directory."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from drivetrain.base.lazy import Later
from drivetrain.cli.program import words_to_call
from drivetrain.proof.records import VARIABLE, Start, ranks_of, start_of

RUN = "{run}"
"""Placeholder in the program's arguments. The absolute path of the run's folder replaces the placeholder."""
NEWEST = re.compile(r"(\{newest:([^}]+)\})")
"""Placeholder in the arguments of a restart. The newest file or folder that matches the pattern replaces the
placeholder. The pattern and the resulting path are relative to the run's folder.
"""
_NOT_COPIED = {".git", ".hg", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox"}
_MOST_BYTES = 2 << 30
GRACE_S = 60.0  # a restart can take this time, plus three times the duration of the undisturbed run


class CannotTryError(Exception):
    """No proof is possible, because the program could not be run as needed.

    The message contains the reason and a cure.
    """


def installed_torch() -> str:
    """Return the version of the installed torch, without importing torch."""
    # imported here, because a command that only prints its help does not need this slow import
    return str(Later("importlib.metadata").version("torch"))


@dataclass
class Program:
    """The program, and the options of its start.

    Attributes:
        command: the words after ``python``.
        resume: further arguments for every restart.
        ranks: the number of processes that torchrun starts; 0: the program is started without torchrun.
        source: the working directory that is copied.
        links: names of files and folders in ``source`` that are linked instead of copied.
        python: the interpreter.
        torch: the version of torch that this interpreter imports.
    """

    command: Sequence[str]
    resume: Sequence[str] = ()
    ranks: int = 0
    source: Path = field(default_factory=Path.cwd)
    links: Sequence[str] = ()
    python: str = sys.executable
    torch: str = field(default_factory=installed_torch)

    def __post_init__(self) -> None:
        """Make paths that begin with ``..`` absolute. In a copy of the working directory, the relative paths would be
        wrong.
        """
        self.command, self.resume = ([self._absolute(word) for word in words] for words in (self.command, self.resume))

    @property
    def launcher(self) -> list[str]:
        """The words that call torchrun, between ``python`` and the program's words. Empty if torchrun does not start
        the ranks.
        """
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"] if self.ranks else []

    def _absolute(self, word: str) -> str:
        option, equals, path = word.rpartition("=")
        is_outside = path.split(os.sep)[0] == os.pardir and (self.source / path).exists()
        return f"{option}{equals}{os.path.normpath(self.source / path)}" if is_outside else word


class Run:
    """A run of a program in its own copy of the working directory.

    Args:
        program: the program to run.
        folder: the folder for the copy and the records. The folder must not exist.
        keeps: whether to back up the copy before each start. The result of :meth:`before` can then repeat the last
            start.
    """

    def __init__(self, program: Program, folder: Path, keeps: bool = False) -> None:
        self.program, self.work, self.records = program, folder / "work", folder / "records"
        self.records.mkdir(parents=True)
        copy_of(program.source, self.work, program.links, leave_out=folder.parent)
        self.files = sorted(path.relative_to(self.work).as_posix() for path in files_in(self.work))
        self.seconds = 0.0
        self.count = 0  # the number of starts of the program
        self._before = folder / "before" if keeps else None

    def before(self) -> Run:
        """Return a copy of this run, with the state before the last start."""
        found = copy.copy(self)
        assert self._before is not None
        found.work, found.records = self._before, self._before.with_name("records-before")
        found.records.mkdir()
        found.count, found._before = self.count - 1, None
        return found

    def start(
        self, limit_s: float, kill: tuple[int, float] | None = None, like: Run | None = None, latest: int = 0,
        operations: tuple[int, int] | None = None,
    ) -> int:  # fmt: skip
        """Start the program, wait for the end, and return the exit code.

        Args:
            limit_s: the number of seconds after which the program is killed.
            kill: the step of the kill, as numbered in the run ``like``, and the seconds to wait in this step before the
                kill.
            like: the undisturbed run.
            latest: the latest step at which the program can have continued. The last kill was in the step before.
            operations: a rank, and a step of this rank since the program's start, counted from 0. The operations of
                this step are recorded. Then all ranks are killed.

        Raises:
            CannotTryError: the program ran longer than ``limit_s``.
        """
        number, self.count = self.count, self.count + 1
        if self._before is not None:
            shutil.rmtree(self._before, ignore_errors=True)
            shutil.copytree(self.work, self._before, symlinks=True)
        asked = {
            "folder": str(self.records), "start": number, "parent": os.getpid(), "kill": kill, "latest": latest,
            "undisturbed": str(like.records) if like else "", "operations": operations,
        }  # fmt: skip
        patterns = [pattern for word in self.program.resume for _, pattern in NEWEST.findall(word)]
        resumes = number and all(any(self.work.glob(pattern)) for pattern in patterns)
        words = [*self.program.command, *(self.program.resume if resumes else ())]
        child, launcher = words_to_call("drivetrain.proof.child"), []
        if self.program.ranks:
            launcher = [*words_to_call("torch.distributed.run"), *self.program.launcher[2:], "--no-python"]
            launcher += [f"--log-dir={self.records / 'torchrun'}", self.program.python, "-u"]
        words = [self._here(word) for word in words]
        command = [self.program.python, *launcher, *child, *words]
        began = time.monotonic()
        try:
            return run_to_end(command, self.work, {VARIABLE: json.dumps(asked)}, self.log, limit_s)
        finally:
            self.seconds += time.monotonic() - began

    @property
    def log(self) -> Path:
        """The file with the output of the program."""
        return self.records / "output.txt"

    def output(self) -> str:
        """Return a text with the last lines that the program has printed."""
        return last_lines(self.log)

    def starts(self, rank: int) -> list[Start]:
        """Return a rank's records of each start. The records of a start without a step are empty."""
        return [start_of(self.records, number, rank) for number in range(self.count)]

    def ranks(self) -> list[int]:
        """Return the ranks that made a step."""
        return ranks_of(self.records)

    def _here(self, word: str) -> str:
        """Replace the placeholders in an argument. Also replace paths in the working directory by paths in the copy."""
        for text, pattern in NEWEST.findall(word):
            paths = sorted(self.work.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
            word = word.replace(text, str(paths[-1].relative_to(self.work)))
        return word.replace(RUN, str(self.work)).replace(str(self.program.source) + os.sep, str(self.work) + os.sep)


def run_to_end(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], log: Path, limit_s: float
) -> int:  # fmt: skip
    """Start ``command``, wait for the end, and return the exit code. At the end, kill all processes that ``command``
    has started.

    Args:
        command: the program and its arguments.
        folder: the working directory.
        variables: environment variables that are added to those of this process.
        log: the file to which the output of ``command`` is appended.
        limit_s: the number of seconds after which the program is killed.

    Raises:
        CannotTryError: the program ran longer than ``limit_s``.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise CannotTryError(f"The program did not end within {limit_s:g} s. {last_lines(log)}") from None
        finally:
            # each rank must be killed by its process number, because torchrun starts each rank in its own session
            with suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_lines(log: Path) -> str:
    """Return a text with the last lines of a program's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "Its last output:\n" + "\n".join(f"  {line}" for line in lines) if lines else "It printed nothing."


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. A signal that already has a handler
    is not changed.
    """
    stops = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    try:
        for each in stops:
            signal.signal(each, signal.default_int_handler)
        yield
    finally:
        for each in stops:
            signal.signal(each, signal.SIG_DFL)


def undisturbed(program: Program, folder: Path, limit_s: float) -> Run:
    """Run the program once.

    Raises:
        CannotTryError: the program failed, made no optimizer step, or ran longer than ``limit_s``.
    """
    run = Run(program, folder)
    code = run.start(limit_s)
    if code:
        raise CannotTryError(
            f"The program fails by itself, with exit code {code}, before anything was killed. {run.output()}"
        )
    if not run.ranks():
        raise CannotTryError(
            "The program made no step of a torch.optim optimizer, so there is nothing to compare. If it found the "
            "checkpoints of an earlier training in the working directory, move them away first. If it starts other "
            "processes that train, run it with --ranks, or pass the program that trains."
        )
    return run


def kills_for(run: Run, count: int, seed: int) -> list[tuple[int, float]]:
    """Draw ``count`` kills. Divide the run into ``count`` parts. For each part, return a random step of the part, and a
    random number of seconds to wait in this step before the kill.
    """
    steps = run.starts(run.ranks()[0])[0].steps
    count = min(count, len(steps) - 1)
    draw = random.Random(seed)
    kills = []
    for number in range(count):  # the first step is left out, because a kill there would lose no training
        first, last = (1 + (len(steps) - 1) * place // count for place in (number, number + 1))
        at = draw.randrange(first, last)
        until = steps[at + 1]["time"] if at + 1 < len(steps) else steps[at]["time"]
        kills.append((at, draw.random() * (until - steps[at]["time"])))
    return kills


def copy_of(source: Path, target: Path, links: Sequence[str] = (), leave_out: Path | None = None) -> None:
    """Copy a working directory, without caches, virtual environments and earlier records. ``links`` are linked instead
    of copied.

    Raises:
        CannotTryError: the directory is larger than two gigabytes, or cannot be read.
    """
    total = 0

    def ignored(folder: str, names: list[str]) -> set[str]:
        nonlocal total
        out = {
            name for name in names if name in _NOT_COPIED or _is_no_file(Path(folder, name))
            or any(Path(folder, name, each).exists() for each in ("pyvenv.cfg", "undisturbed/records"))
        }  # fmt: skip
        out |= {name for name in names if Path(folder, name) in {leave_out, *(source / each for each in links)}}
        for name in set(names) - out:
            path = os.path.join(folder, name)
            total += 0 if os.path.islink(path) or os.path.isdir(path) else os.path.getsize(path)
        if total > _MOST_BYTES:
            raise CannotTryError(
                f"The working directory {source} holds more than {_MOST_BYTES >> 30} GB, and each run gets a copy of "
                "it. Name what the program only reads: --link data. Or start in a smaller folder."
            )
        return out

    try:
        shutil.copytree(source, target, symlinks=True, ignore=ignored, ignore_dangling_symlinks=True)
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise CannotTryError(
            f"The working directory {source} cannot be copied: {why}. Start in a folder whose files you can read and "
            "no other program changes."
        ) from None
    for name in links:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(source / name)


def files_in(folder: Path) -> list[Path]:
    """Return all files and links below ``folder``."""
    return [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def _is_no_file(path: Path) -> bool:
    """Whether the path is a pipe, a socket or a device. These cannot be copied."""
    return not path.is_symlink() and path.exists() and not path.is_dir() and not path.is_file()
