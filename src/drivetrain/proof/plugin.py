"""A pytest fixture that proves exact resuming; ``pytest_plugins = ["drivetrain.proof.plugin"]`` registers it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.proof.proving import Verdict, prove
from drivetrain.proof.runs import Program


@pytest.fixture
def prove_resume(tmp_path: Path) -> Callable[..., Verdict]:
    """A function that proves that a program resumes exactly, and returns the verdict. Without exact resuming, the
    function fails the test.

    The first argument is the program with its arguments, as one text or as a list of words. Further arguments are
    options of ``drivetrain prove-resume``: ``kills`` (2), ``ranks``, ``seed``, ``resume_args``, ``link``, ``timeout``
    in seconds (3600). The program starts in copies of the working directory, or in copies of ``folder``.
    """

    def check(
        program: str | list[str], *, kills: int = 2, ranks: int = 0, seed: int = 0, resume_args: str = "",
        link: list[str] | tuple[str, ...] = (), timeout: float = 3600.0, folder: str | Path | None = None,
    ) -> Verdict:  # fmt: skip
        command = shlex.split(program) if isinstance(program, str) else program
        source = Path.cwd() if folder is None else Path(folder).absolute()
        verdict = prove(
            Program(command, shlex.split(resume_args), ranks, source, link), tmp_path / "proof", kills, seed, timeout
        )
        if verdict.code:
            pytest.fail(verdict.message, pytrace=False)
        return verdict

    return check
