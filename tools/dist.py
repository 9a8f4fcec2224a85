"""Build wheel and sdist, install each into a fresh environment of every Python found, and run README.md's example.

It runs in one process, and in two under ddp, ddp_spawn and fsdp, with nothing installed but the declared dependencies.
The folder ``dist`` then also has a bill of materials (``tools/sbom.py``) and the checksums of all files. Equal sources
give the same bytes: the build takes its time from SOURCE_DATE_EPOCH, or else hatchling's fixed one.

``make dist`` runs it. What it reads from the environment:

- ``DIST_PYTHONS``: the interpreters, "3.11 /opt/python3.13/bin/python3"; by default ``python3.N`` of all versions that
  the package supports. One that is named and cannot be used is a failure; by default it is only reported.
- ``DIST_TORCH``: pip's options for finding torch's wheel; by default ``--no-index``, which takes it from pip's
  find-links alone. torch's wheels on PyPI bring gigabytes of CUDA: they are used where this says so. "stubs" takes
  PyPI's wheel, half a gigabyte for each Python, and stubs for CUDA's libraries (``tools/torch_without_cuda.py``).
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
NEVER_RUN = {"3.14"}  # which pip accepts, and which no classifier names until a run of this program has been seen on it
STUBS = ["stubs"]
CPU_WHEELS = "--index-url https://download.pytorch.org/whl/cpu"

# Only what the new environment holds is found: no PYTHONPATH, no user site. pip's own variables stay.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"PYTHONNOUSERSITE": "1"}


class Failed(Exception):
    """A command ended with an error; the text is what it printed."""


class Outcome(NamedTuple):
    """What became of one interpreter, or of one artefact on it.

    Attributes:
        python: the interpreter, as it was asked for.
        artefact: the file, or "" where none was tried.
        state: "ran", "failed" or "not run".
        remark: the reason, or what the example printed.
        seconds: how long it took.
    """

    python: str
    artefact: str
    state: str
    remark: str
    seconds: float = 0.0


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The output of a command.

    Raises:
        Failed: it ended with another code than 0, or could not be started.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env=CLEAN,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except OSError as error:
        raise Failed(str(error)) from error
    if done.returncode != 0:
        raise Failed(done.stdout.strip() or f"exit code {done.returncode}")
    return done.stdout


def cause(text: str) -> str:
    """The line of an output that says what went wrong: pip's first error, or Python's last line."""
    lines = text.splitlines() or [""]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1])


def executable_of(name: str) -> str:
    """The interpreter called ``name``: a version such as "3.11", or a path.

    Raises:
        Failed: there is none, it does not start, or it has another version.
    """
    found = shutil.which(f"python{name}" if name in SUPPORTED else name)
    if found is None:
        raise Failed("not found on the PATH")
    version = run(found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    if version not in SUPPORTED or (name in SUPPORTED and version != name):
        raise Failed(f"{found} is Python {version}")
    return found


def build(folder: Path) -> list[Path]:
    """Build the sdist, and from it the wheel; return both files.

    Raises:
        Failed: they could not be built, or one lacks what it should hold.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob("drivetrain-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    if unexpected := {name for name in names if name != "drivetrain" and not name.endswith(".dist-info")}:
        raise Failed(f"{wheel.name} holds {', '.join(sorted(unexpected))}")
    with tarfile.open(sdist) as archive_of_sources:
        inside = {member.name.partition("/")[2] for member in archive_of_sources.getmembers() if member.isfile()}
    needed = {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/conftest.py"}
    if missing := needed - inside:
        raise Failed(f"{sdist.name} lacks {', '.join(sorted(missing))}")
    if (ROOT / ".git").exists() and (unknown := inside - {"PKG-INFO", *run("git", "ls-files").splitlines()}):
        raise Failed(f"{sdist.name} holds {', '.join(sorted(unknown))}, which git does not know")
    return [wheel, sdist]


def describe(artefacts: Sequence[Path]) -> list[Path]:
    """Write the wheel's bill of materials and the checksums of all files beside them; return both files."""
    bill = runpy.run_path(str(ROOT / "tools" / "sbom.py"))["write_bill"](artefacts[0])
    sums = bill.with_name("SHA256SUMS")
    lines = (f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in [*artefacts, bill])
    sums.write_text("".join(lines), encoding="utf-8")
    return [bill, sums]


def torch_wheel(python: Path, folder: Path, options: Sequence[str]) -> Path:
    """Torch's wheel for this interpreter, of the pinned version, found with pip's ``options``.

    Raises:
        Failed: there is none.
    """
    [pin] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    options = [] if options == STUBS else options
    run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *options, pin)
    [found] = folder.glob("torch-*.whl")
    return found


def example() -> str:
    """README.md's first program."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]


def example_on_two(strategy: str) -> str:
    """The same program on two processes of the CPU, which may be started in any way."""
    head, start, rest = example().partition("seed_everything(0)")
    arguments = f'accelerator="cpu", devices=2, strategy="{strategy}"'
    main = (start + rest).replace("Trainer(max_epochs=3)", f"Trainer(max_epochs=3, {arguments})")
    if arguments not in main:
        raise Failed("README.md's example has no seed_everything(0) or Trainer(max_epochs=3)")
    return f'{head}if __name__ == "__main__":\n{textwrap.indent(main, "    ")}'


def programs() -> dict[str, str]:
    """What each environment runs, by name: README.md's program on what there is, and on two processes."""
    return {"alone": example()} | {strategy: example_on_two(strategy) for strategy in ("ddp", "ddp_spawn", "fsdp")}


def learned(shown: str) -> str:
    """The line of a program's output that says how well it has learned.

    Raises:
        Failed: it has not.
    """
    error = re.search(r"mean squared error on new pairs: ([\d.]+)", shown)
    if error is None or float(error[1]) > 0.01:  # always answering with the mean product gives 0.05
        raise Failed(f"the example printed\n{shown}")
    return error[0]


def new_environment(interpreter: str, folder: Path) -> Path:
    """Make a virtual environment; return its interpreter.

    Raises:
        Failed: it could not be made.
    """
    run(interpreter, "-m", "venv", folder)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def try_artefact(python: Path, artefact: Path, wheel_of_torch: Path, folder: Path, with_stubs: bool) -> str:
    """Install ``artefact`` into the environment of ``python`` and run the programs; return the first one's last line.

    Raises:
        Failed: something went wrong, or a program did not learn.
    """
    torch: list[Path] = [wheel_of_torch]
    if with_stubs:
        run(python, ROOT / "tools" / "torch_without_cuda.py", "--only", wheel_of_torch, cwd=folder)
        torch = []
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *torch, artefact, cwd=folder)
    remarks = []
    for name, program in programs().items():
        script = folder / f"{name}.py"
        script.write_text(program, encoding="utf-8")
        remarks.append(learned(run(python, script, cwd=folder)))
    return remarks[0]


def try_without_torch(python: Path, wheel: Path) -> str:
    """What can be seen of the wheel where there is no torch: whether it compiles, imports and has its command.

    Raises:
        Failed: it does not.
    """
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", wheel)
    check = "import compileall, sys, drivetrain; sys.exit(not compileall.compile_dir(drivetrain.__path__[0], quiet=1))"
    run(python, "-c", check)
    run(python, "-m", "drivetrain.cli.command", "--help")
    return "all files compile, and the package and its command import"


def try_python(name: str, artefacts: Sequence[Path], options: Sequence[str], named: bool) -> list[Outcome]:
    """Every artefact on one interpreter."""
    unusable = "failed" if named else "not run"
    try:
        interpreter = executable_of(name)
    except Failed as error:
        return [Outcome(name, "", unusable, cause(str(error)))]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="drivetrain-dist-") as temporary:
        folder = Path(temporary)
        python = new_environment(interpreter, folder / "environment")
        try:
            found = torch_wheel(python, folder, options)
        except Failed as error:
            missing = f"no wheel of torch with pip's {' '.join(options)}: {cause(str(error))}"
            try:
                return [Outcome(name, "", unusable, f"{missing}; {try_without_torch(python, artefacts[0])}")]
            except Failed as broken:
                return [Outcome(name, artefacts[0].name, "failed", f"{cause(str(broken))}; {missing}")]
        for artefact in artefacts:
            shutil.rmtree(folder / "environment")
            began_s = time.monotonic()
            try:
                python = new_environment(interpreter, folder / "environment")
                state, remark = "ran", try_artefact(python, artefact, found, folder, options == STUBS)
            except Failed as error:
                print(error, file=sys.stderr)
                state, remark = "failed", cause(str(error))
            outcomes.append(Outcome(name, artefact.name, state, remark, time.monotonic() - began_s))
    return outcomes


def main(
    environ: Mapping[str, str] = os.environ,
    build: Callable[[Path], list[Path]] = build,
    describe: Callable[[Sequence[Path]], list[Path]] = describe,
    try_python: Callable[[str, Sequence[Path], Sequence[str], bool], list[Outcome]] = try_python,
) -> int:
    """Build, try, and print one line for each outcome; return the exit code."""
    named = environ.get("DIST_PYTHONS", "").split()
    options = environ.get("DIST_TORCH", "--no-index").split()
    try:
        artefacts = build(ROOT / "dist")
        described = describe(artefacts)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    print(f"built {', '.join(each.name for each in [*artefacts, *described])} in dist/")
    outcomes: list[Outcome] = []
    for name in named or SUPPORTED:
        for outcome in try_python(name, artefacts, options, bool(named)):
            print(
                f"Python {outcome.python:<6} {outcome.state:<8} {outcome.artefact:<32} "
                f"{outcome.seconds:5.0f} s  {outcome.remark}", flush=True,
            )  # fmt: skip
            outcomes.append(outcome)
    states = [outcome.state for outcome in outcomes]
    if set(states) == {"not run"}:
        print(
            "Nothing was run. Where torch is not in pip's find-links, write make dist DIST_TORCH=stubs, or "
            f'DIST_TORCH="{CPU_WHEELS}".'
        )
    return 1 if "failed" in states or "ran" not in states else 0


if __name__ == "__main__":
    sys.exit(main())
