"""The digits, from files in the place of a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.compat import demo_mnist
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.compat.demo_mnist import MNIST, MNISTDataModule


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 40 digits to train with and 20 to test with."""
    for name, count in (("training", 40), ("test", 20)):
        pixels = torch.arange(count, dtype=torch.uint8)[:, None, None].expand(count, 28, 28).clone()
        torch.save((pixels, torch.arange(count) % 10), tmp_path / f"{name}.pt")
    monkeypatch.setattr(demo_mnist, "_HOST", tmp_path.as_uri())
    monkeypatch.setenv("PL_USE_MOCKED_MNIST", "1")
    return tmp_path


def test_digits_are_fetched_once(host: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MNIST(tmp_path / "data", download=False)
    digits: Any = MNIST(str(tmp_path / "data"), train=False, download=True)
    image, target = digits[13]
    assert (len(digits), image.shape, target) == (20, (1, 28, 28), 3)
    torch.testing.assert_close(image, torch.full((1, 28, 28), (13 - 0.1307) / 0.3081))
    for path in host.glob("*.pt"):
        path.unlink()
    plain: Any = MNIST(tmp_path / "data", normalize=None)
    assert plain[39][0].unique().tolist() == [39.0]


@pytest.mark.usefixtures("host")
def test_a_data_module_splits_them(tmp_path: Path) -> None:
    class Flat(BoringModel):
        def step(self, batch: Any) -> Any:
            return super().step(batch[0].flatten(1)[:, :32])

    data = MNISTDataModule(str(tmp_path / "data"), val_split=8, num_workers=0, batch_size=4)
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = Trainer(accelerator="cpu", max_epochs=1, **quiet)  # type: ignore[arg-type]
    model = Flat()
    trainer.fit(model, datamodule=data)
    assert (trainer.num_training_batches, trainer.num_val_batches) == (8, [2])
    trainer.test(model, datamodule=data, verbose=False)
    assert trainer.num_test_batches == [5]
    assert (data.name, data.num_classes, len(data.dataset_train), len(data.dataset_val)) == ("mnist", 10, 32, 8)


@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("Error downloading train-images")])
@pytest.mark.usefixtures("host")
def test_if_torchvision_cannot_download_another_host_is_used(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Torchvision:
        """A torchvision whose hosts all refuse."""

        datasets: Any

        @staticmethod
        def MNIST(*args: Any, **kwargs: Any) -> Any:
            raise error

    Torchvision.datasets = Torchvision
    monkeypatch.delenv("PL_USE_MOCKED_MNIST")
    monkeypatch.setattr(demo_mnist, "torchvision", Torchvision)
    monkeypatch.setattr(demo_mnist, "check_installed", lambda *args: None)
    with pytest.warns(UserWarning, match=f"torchvision could not download MNIST: {error}"):
        digits: Any = MNIST(str(tmp_path / "data"), train=False, download=True)
    assert len(digits) == 20


def test_without_torchvision_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_USE_MOCKED_MNIST", raising=False)
    monkeypatch.setattr(demo_mnist, "find_spec", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchvision"):
        MNIST("data")
    assert MNISTDataModule().default_transforms is None
