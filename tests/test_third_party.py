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

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.base.registry import Registry
from drivetrain.checkpoints import CheckpointRegistry
from drivetrain.clusters import ClusterRegistry
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import LauncherRegistry
from drivetrain.loggers import LoggerRegistry
from drivetrain.precision import PrecisionRegistry
from drivetrain.strategies import LayerSyncRegistry

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


ENVIRONMENT = '''
from drivetrain.clusters import ClusterEnvironment


class SkyEnvironment(ClusterEnvironment):
    """Ranks in the sky."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 1234

    def world_size(self):
        return 1

    def global_rank(self):
        return 0

    def local_rank(self):
        return 0
'''

STORE = '''
from drivetrain.checkpoints import TorchCheckpointIO


class SkyIO(TorchCheckpointIO):
    """Checkpoints in the sky."""

    saved = []

    @classmethod
    def register_checkpoint_ios(cls, checkpoint_registry):
        checkpoint_registry.register("sky", cls)

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved.append(str(path))
        super().save_checkpoint(checkpoint, path, storage_options)
'''

LAYER_SYNC = '''
from drivetrain.strategies import LayerSync


class SkySync(LayerSync):
    """Statistics in the sky."""

    @classmethod
    def register_layer_syncs(cls, layer_sync_registry):
        layer_sync_registry.register("sky", cls)

    def apply(self, model):
        self.calls = ["apply"]
        return model

    def revert(self, model):
        self.calls.append("revert")
        return model
'''

LOGGER = '''
from drivetrain.loggers import Logger


class SkyLogger(Logger):
    """Numbers into the sky."""

    name, version = "sky", 0

    def __init__(self, save_dir):
        self.folder = save_dir
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(dict(metrics))

    def log_hyperparams(self, params):
        pass
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


class Model(LightningModule):
    """Two steps on two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 2))


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


def check_environment(folder: Path) -> None:
    for plugins in ("sky", ["sky"]):
        plan = Engine(accelerator="cpu", plugins=plugins).plan
        assert type(plan.environment).__name__ == "SkyEnvironment"
        assert "1, started by Sky" in str(plan)


def small_trainer(folder: Path, **arguments: Any) -> Trainer:
    return Trainer(**{
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder, **arguments,
    })  # fmt: skip


def check_store(folder: Path) -> None:
    trainer = small_trainer(folder, plugins="sky", enable_checkpointing=True)
    trainer.fit(Model())
    store: Any = trainer.strategy.checkpoint_io
    assert type(store).__name__ == "SkyIO"
    assert trainer.checkpoint_callback is not None
    assert store.saved[-1] == trainer.checkpoint_callback.best_model_path


def check_layer_sync(folder: Path) -> None:
    trainer = small_trainer(folder, plugins="sky", strategy="ddp", devices=1)
    trainer.fit(Model())
    sync: Any = trainer.strategy.layer_sync
    assert (type(sync).__name__, sync.calls) == ("SkySync", ["apply", "revert"])
    with pytest.raises(ConfigurationError, match="sync_batchnorm=True.* and the SkySync in plugins both"):
        small_trainer(folder, plugins="sky", sync_batchnorm=True)


def check_logger(folder: Path) -> None:
    for logger in ("sky", ["sky", "csv"]):
        trainer = small_trainer(folder, logger=logger, log_every_n_steps=1)
        trainer.fit(Model())
        found: Any = trainer.logger
        assert (type(found).__name__, found.folder) == ("SkyLogger", str(folder))
        assert found.rows
        assert "sky" in str(trainer.plan)
    engine: Any = Engine(accelerator="cpu", loggers="sky")
    engine.log("loss", 1.0)
    assert engine.logger.rows == [{"loss": 1.0}]


KINDS = {
    "launcher": Kind(
        LauncherRegistry, LAUNCHER, "SkyLauncher", "drivetrain.launchers", "drivetrain.launchers", check_launcher
    ),
    "precision": Kind(
        PrecisionRegistry, PRECISION, "SkyPrecision", "drivetrain.precision", "drivetrain.precision", check_precision
    ),
    "environment": Kind(
        ClusterRegistry, ENVIRONMENT, "SkyEnvironment", "drivetrain.clusters", "drivetrain.clusters", check_environment
    ),
    "store": Kind(CheckpointRegistry, STORE, "SkyIO", "drivetrain.checkpoints", "drivetrain.checkpoints", check_store),
    "layer sync": Kind(
        LayerSyncRegistry, LAYER_SYNC, "SkySync", "drivetrain.strategies", "drivetrain.layer_syncs", check_layer_sync
    ),
    "logger": Kind(LoggerRegistry, LOGGER, "SkyLogger", "drivetrain.loggers", "drivetrain.loggers", check_logger),
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
