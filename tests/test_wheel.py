"""The wheel, installed alone into an empty environment, runs what README.md shows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import trove_classifiers

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
    files = ("__init__.py", "__init__.pyi", "py.typed", "loops/fit.py")
    assert {f"drivetrain/{each}" for each in files} <= names
    assert not any(name.startswith(("tests", "examples", "benchmarks")) for name in names)


def test_the_metadata_names_the_license_the_file_and_what_was_tried(wheel: Path, dist: Any) -> None:
    metadata = dist.runpy.run_path(str(ROOT / "tools" / "sbom.py"))["metadata_of"](wheel)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert metadata.get_payload().startswith("# drivetrain")  # README.md, as the description
    classifiers = metadata.get_all("Classifier")
    versions = {each.rpartition(" :: ")[2] for each in classifiers if "Python :: 3." in each}
    assert versions == set(dist.SUPPORTED) - dist.NEVER_RUN
    assert set(classifiers) <= trove_classifiers.classifiers


@pytest.mark.timeout(300)
def test_the_same_sources_give_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """Once from here; once from the unpacked sdist, where the files have other times, owners' rights and a folder."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    first, second = tmp_path / "first", tmp_path / "second"
    run(*build, first, "--sdist", ROOT, cwd=tmp_path)
    [sdist] = first.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.glob("drivetrain-*")
    for path in unpacked.rglob("*"):
        os.utime(path, (0, 10**9))
        path.chmod(path.stat().st_mode & 0o700)
    run(*build, second, "--sdist", "--wheel", unpacked, cwd=tmp_path)
    assert (second / sdist.name).read_bytes() == sdist.read_bytes()
    assert (second / wheel.name).read_bytes() == wheel.read_bytes()
    run("env", "SOURCE_DATE_EPOCH=1700000000", *build, second, "--wheel", unpacked, cwd=tmp_path)  # the control
    assert (second / wheel.name).read_bytes() != wheel.read_bytes()


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
