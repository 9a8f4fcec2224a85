"""The wheel, installed alone into an empty environment, runs what README.md shows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    # no PYTHONPATH and no user site: only what the new environment holds is found
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**environ, "PYTHONNOUSERSITE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_its_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"drivetrain/__init__.py", "drivetrain/py.typed", "drivetrain/loops/fit.py"} <= names
    assert not any(name.startswith(("tests", "examples", "benchmarks")) for name in names)


@pytest.fixture(scope="module")
def dist() -> Any:
    spec = importlib.util.spec_from_file_location("dist", ROOT / "tools" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_the_readme_example_runs_from_the_wheel_in_an_empty_environment(wheel: Path, dist: Any, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-compile", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)  # what is imported is compiled then
    assert not list(environment.glob("**/numpy/__init__.py"))  # which torch does not require
    programs = dist.programs()
    assert [*programs] == ["alone", "ddp", "ddp_spawn", "fsdp"]
    for name in [*programs] if os.environ.get("DRIVETRAIN_FAULTS") == "long" else ["alone", "ddp"]:
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "example.py"
        script.write_text(programs[name], encoding="utf-8")
        shown = run(python, script, cwd=folder)
        dist.learned(shown)
        assert "because" in shown
        assert list(folder.glob("lightning_logs/version_0/checkpoints/*"))
