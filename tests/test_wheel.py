"""The wheel, installed alone into an empty environment, runs what README.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

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


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    return str(blocks[0])


@pytest.mark.timeout(900)
def test_the_readme_example_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-compile", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)  # what is imported is compiled then
    script = tmp_path / "example.py"
    script.write_text(readme_example(), encoding="utf-8")
    shown = run(python, script, cwd=tmp_path)
    error = float(re.findall(r"mean squared error on new pairs: ([\d.]+)", shown)[0])
    assert error < 0.01  # always answering with the mean product gives 0.05
    assert "because" in shown
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt"))
