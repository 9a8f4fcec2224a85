"""A third party's file of each kind: put into the kind's folder, defined in a program, or installed as a package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Engine
from drivetrain.base.registry import Registry
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import LauncherRegistry
from drivetrain.precision import PrecisionRegistry

LAUNCHER = '''
from drivetrain.launchers import Launcher


class SkyLauncher(Launcher):
    """Processes in the sky."""

    is_interactive_compatible = True

    @classmethod
    def register_launchers(cls, launcher_registry):
        launcher_registry.register("sky", cls, height=3)

    def __init__(self, environment, num_processes, num_nodes=1, height=0):
        super().__init__(environment, num_processes, num_nodes)
        self.height = height

    def launch(self, function, *args, **kwargs):
        return f"{self.num_processes} at {self.height}"
'''


PRECISION = '''
import torch
from drivetrain.precision import MixedPrecision


class SkyPrecision(MixedPrecision):
    """Numbers in the sky."""

    precision = "sky"

    def __init__(self):
        super().__init__("bf16-mixed")
        self.name = "sky"

    @classmethod
    def register_precisions(cls, precision_registry):
        precision_registry.register("sky", cls)
'''


@dataclass(frozen=True)
class Kind:
    """One kind of thing that a third party may write.

    Attributes:
        registry: of the kind.
        file: what its file holds.
        cls: the name of the class in it.
        folder: the package whose folder holds the files of drivetrain.
        group: of the entry points.
        check: uses the thing by its name.
    """

    registry: Registry[Any]
    file: str
    cls: str
    folder: str
    group: str
    check: Callable[[Path], None]


def check_launcher(folder: Path) -> None:
    for strategy in ("ddp_sky", "ddp_sky_find_unused_parameters_true"):
        engine = Engine(accelerator="cpu", devices=2, strategy=strategy)
        assert engine.plan.start_method == "sky"
        assert engine.launch(lambda engine: None) == "2 at 3"
    with pytest.raises(ConfigurationError, match="Did you mean 'ddp_sky'"):
        Engine(accelerator="cpu", devices=2, strategy="ddp_skj")


def check_precision(folder: Path) -> None:
    engine = Engine(accelerator="cpu", precision="sky")
    assert (type(engine.precision).__name__, engine.precision.name) == ("SkyPrecision", "sky")
    with engine.autocast():
        assert torch.is_autocast_enabled("cpu")
    with pytest.raises(ConfigurationError, match="no such precision. Did you mean 'sky'"):
        Engine(accelerator="cpu", precision="skj")


KINDS = {
    "launcher": Kind(
        LauncherRegistry, LAUNCHER, "SkyLauncher", "drivetrain.launchers", "drivetrain.launchers", check_launcher
    ),
    "precision": Kind(
        PrecisionRegistry, PRECISION, "SkyPrecision", "drivetrain.precision", "drivetrain.precision", check_precision
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """A kind; afterwards its registry is as it was."""
    kind = KINDS[request.param]
    kind.registry.available()  # drivetrain's own have registered themselves, which they do once
    before, imported = dict(kind.registry._registered), kind.registry._imported
    yield kind
    kind.registry._registered.clear()
    kind.registry._registered.update(before)
    kind.registry._imported = imported


def test_without_the_file_there_is_no_such_name(kind: Kind, tmp_path: Path) -> None:
    """Negative control of the tests below."""
    assert "sky" not in kind.registry.available()
    with pytest.raises(ConfigurationError):
        kind.check(tmp_path)


def test_a_file_in_the_folder(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module(kind.folder)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    kind.registry._imported = False
    (tmp_path / "sky.py").write_text(kind.file)
    importlib.invalidate_caches()
    try:
        assert "sky" in kind.registry.available()
        kind.check(tmp_path)
    finally:
        vars(package).pop("sky", None)
        sys.modules.pop(f"{kind.folder}.sky", None)


def test_a_class_in_a_program(kind: Kind, tmp_path: Path) -> None:
    program: dict[str, Any] = {"__name__": "program"}
    exec(kind.file, program)
    if "sky" not in kind.registry.available():  # where files have their names, a program's class is told its own
        kind.registry.register("sky", program[kind.cls])
    kind.check(tmp_path)


def test_an_installed_package(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"vendor_of_{kind.registry.kind.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(kind.file)
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{kind.group}]\nsky = {module}:{kind.cls}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "sky" in kind.registry.available()
    assert module not in sys.modules  # it is imported when it is used
    kind.check(tmp_path)
