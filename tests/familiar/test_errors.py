"""The classes of errors, which programs written for Lightning and for Python catch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.callbacks import ModelSummary, RichModelSummary
from drivetrain.compat.fabric_sharded import FabricFSDPStrategy
from drivetrain.errors import CheckpointError, ConfigurationError, LoggingError
from drivetrain.loggers._run import RunLogger
from drivetrain.precision import DeepSpeedPrecision, FSDPPrecision
from drivetrain.strategies import FSDPStrategy, ModelParallelStrategy


@pytest.mark.parametrize("fn", ["fit", "validate", "test", "predict"])
def test_no_loader_at_all(make_trainer: Any, fn: str) -> None:
    class Steps(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...
        def test_step(self, batch: Any, batch_idx: int) -> None: ...
        def predict_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

    with pytest.raises(ConfigurationError, match=f"trainer.{fn} has no loader"):  # the base of which compat serves
        getattr(make_trainer(), fn)(Steps())


@pytest.mark.parametrize("devices", [["0"], [0, "1"], [False], [[0]], [[0], [1]]])
@pytest.mark.parametrize("make", [Trainer, Engine])
def test_devices_that_are_no_numbers(make: Any, devices: Any) -> None:
    with pytest.raises(TypeError, match="devices is a number of processes") as caught:
        make(accelerator="cpu", devices=devices)
    assert isinstance(caught.value, ConfigurationError)


def test_a_checkpoint_that_lacks_an_argument(make_trainer: Any, regression: Any, loader: Any, tmp_path: Path) -> None:
    class Needs(regression):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()

    trainer = make_trainer()
    trainer.fit(Needs(3), loader)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match="Needs.__init__ needs 'width'"):
        Needs.load_from_checkpoint(tmp_path / "x.ckpt")


def test_a_metric_that_computes_a_tuple(make_trainer: Any, regression: Any, loader: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Two(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        def update(self) -> None: ...

        def compute(self) -> Any:
            return torch.tensor(1.0), torch.tensor(2.0)

    class Logs(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.two.update()
            self.log("two", self.two, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="computes a tuple") as caught:
        make_trainer().fit(Logs(), loader)
    assert isinstance(caught.value, LoggingError)


def test_a_metric_may_compute_a_number_of_python(make_trainer: Any, regression: Any, loader: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Batches(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", torch.tensor(0.0))

        def update(self) -> None:
            self.seen += 1

        def compute(self) -> float:
            return float(self.seen) / 2

    class Logs(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batches = Batches()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches()
            self.log("batches", self.batches, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Logs(), loader)
    logged = {name: float(trainer.callback_metrics[name]) for name in ("batches_step", "batches_epoch")}
    assert logged == {"batches_step": 0.5, "batches_epoch": trainer.global_step / 2}


@pytest.mark.parametrize("make", [ModelSummary, RichModelSummary])
@pytest.mark.parametrize("depth", ["x", 1.5, None, True, -2])
def test_a_depth_of_a_summary(make: Any, depth: Any) -> None:
    with pytest.raises(ValueError, match="max_depth="):
        make(max_depth=depth)


def test_images_as_text() -> None:
    with pytest.raises(TypeError, match="Pass a list, even for one value"):
        next(RunLogger._each(None, "log_image", "key", "image.png", {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", ["m", [1], {"m": 1}])
def test_a_filter_of_what_is_saved(tmp_path: Path, wanted: Any) -> None:
    engine = Engine(accelerator="cpu")
    with pytest.raises(TypeError, match="filter"):
        engine.save(tmp_path / "x.ckpt", {"m": engine.setup(nn.Linear(1, 1))}, filter=wanted)


@pytest.mark.parametrize("make", [FSDPPrecision, DeepSpeedPrecision])
def test_an_unknown_precision(make: Any) -> None:
    with pytest.raises(ValueError, match="There is no precision called '64-foo'"):
        make("64-foo")


@pytest.mark.parametrize("make", [ModelParallelStrategy, FSDPStrategy])
def test_the_mesh_before_set_up(make: Any) -> None:
    with pytest.raises(RuntimeError, match="has no devices yet"):
        make().device_mesh  # noqa: B018


@pytest.mark.parametrize("make", [FabricFSDPStrategy, FSDPStrategy])
def test_a_folder_that_a_strategy_built_alone_cannot_load(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder") as caught:
        make().load_checkpoint(tmp_path)
    assert isinstance(caught.value, CheckpointError)


def test_a_state_that_a_strategy_built_alone_cannot_load(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="has no 'model'") as caught:
        FabricFSDPStrategy().load_checkpoint(tmp_path / "x.ckpt", {"model": nn.Linear(1, 1)})
    assert isinstance(caught.value, KeyError)
