"""Checkpoints of trainable weights only, and the fingerprint of the frozen base."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.errors import CheckpointError
from drivetrain.module.frozen import FINGERPRINTS, fingerprint


class Adapted(LightningModule):
    """A frozen base, which configure_model loads, and an adapter that is trained."""

    def __init__(self, seed: int = 1, width: int = 64) -> None:
        super().__init__()
        self.seed, self.width = seed, width
        torch.manual_seed(2)
        self.adapter = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.base: Any = None

    def configure_model(self) -> None:
        if self.base is None:
            torch.manual_seed(self.seed)
            self.base = nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 4)).requires_grad_(
                False
            )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.norm(self.base(batch[0]) + self.adapter(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=0.01)


@pytest.fixture
def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), torch.randn(4, generator=generator)) for _ in range(24)]
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


@pytest.fixture
def saved(loader: DataLoader[Any], make_trainer: Any, tmp_path: Any) -> Any:
    trainer = make_trainer(max_epochs=2, limit_val_batches=0, save_trainable_only=True)
    trainer.fit(Adapted(), loader)
    trainer.save_checkpoint(tmp_path / "adapter.ckpt")
    return tmp_path / "adapter.ckpt", trainer


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict())


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    assert list(state_of(one)) == list(state_of(other))
    for name, value in state_of(one).items():
        assert torch.equal(value, state_of(other)[name]), name


def test_frozen_parameters_of_an_optimizer_are_saved_and_said_to_be(
    loader: DataLoader[Any], make_trainer: Any, tmp_path: Any, caplog: Any
) -> None:
    class Everything(Adapted):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    caplog.set_level("INFO", logger="drivetrain")
    for kind, said in ((Adapted, False), (Everything, True)):
        caplog.clear()
        trainer = make_trainer(max_epochs=1, limit_val_batches=0, save_trainable_only=True)
        trainer.fit(kind(), loader)
        for _ in range(2):
            trainer.save_checkpoint(tmp_path / "one.ckpt")
        assert ("base.0.weight" in torch.load(tmp_path / "one.ckpt")["state_dict"]) is said
        assert caplog.text.count("hold 4 parameters that require no gradient, such as base.0.weight") == said


def test_the_file_holds_trainable_weights_buffers_and_fingerprints(saved: Any) -> None:
    path, trainer = saved
    checkpoint = torch.load(path)
    assert set(checkpoint["state_dict"]) == {
        "adapter.weight", "adapter.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked",
    }  # fmt: skip
    assert set(checkpoint[FINGERPRINTS]) == {"base.0.weight", "base.0.bias", "base.2.weight", "base.2.bias"}
    base = trainer.lightning_module.base
    assert checkpoint[FINGERPRINTS]["base.0.weight"] == fingerprint(base[0].weight)


def test_resume_is_exact(saved: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    path, _ = saved
    expected, resumed = Adapted(), Adapted()
    make_trainer(max_epochs=4, limit_val_batches=0).fit(expected, loader)
    make_trainer(max_epochs=4, limit_val_batches=0, save_trainable_only=True).fit(resumed, loader, ckpt_path=path)
    assert_equal(resumed, expected)


def test_the_module_loads_and_evaluates_from_it(saved: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    path, trainer = saved
    assert_equal(Adapted.load_from_checkpoint(path), trainer.lightning_module)
    tested = make_trainer(limit_val_batches=1.0)
    found = tested.validate(Adapted(), loader, ckpt_path=path, verbose=False)
    assert found == make_trainer(limit_val_batches=1.0).validate(trainer.lightning_module, loader, verbose=False)


@pytest.mark.parametrize("through", ["fit", "validate", "load_from_checkpoint"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 5}, r"base\.0\.weight has other values \(sha256 .*\(4 of its 4 frozen parameters differ\)"),
        ({"width": 32}, r"base\.0\.weight has the shape \(32, 4\), and had \(64, 4\)"),
    ],
)
def test_another_base_is_an_error_with_cause_value_and_cure(
    through: str, given: Any, message: str, saved: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    path, _ = saved
    if through == "load_from_checkpoint":
        load: Any = lambda: Adapted.load_from_checkpoint(path, **given)  # noqa: E731
    else:
        passed = {"verbose": False} if through == "validate" else {}
        trainer = make_trainer(max_epochs=4, limit_val_batches=1.0 if passed else 0)
        load = lambda: getattr(trainer, through)(Adapted(**given), loader, ckpt_path=path, **passed)  # noqa: E731
    with pytest.raises(CheckpointError, match=f"has another base.*{message}.*Load the same base in __init__") as error:
        load()
    assert "adapter.ckpt" in str(error.value)


def test_another_type_of_numbers_is_another_base(saved: Any) -> None:
    class Double(Adapted):
        def configure_model(self) -> None:
            super().configure_model()
            self.base.double()

    with pytest.raises(CheckpointError, match="base.0.weight is of type float64, and was of float32"):
        Double.load_from_checkpoint(saved[0])


def test_one_changed_bit_is_found(saved: Any) -> None:
    class Changed(Adapted):
        def configure_model(self) -> None:
            super().configure_model()
            self.base[2].bias.data[3] = self.base[2].bias[3].nextafter(torch.tensor(9.0))

    with pytest.raises(CheckpointError, match=r"base.2.bias has other values .*\(1 of its 4"):
        Changed.load_from_checkpoint(saved[0])


def test_a_missing_trainable_weight_is_an_error(saved: Any) -> None:
    class More(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

    with pytest.raises(CheckpointError, match=r"it lacks head\.bias, head\.weight"):
        More.load_from_checkpoint(saved[0])


def test_another_base_can_be_used_on_purpose(saved: Any) -> None:
    class Forgets(Adapted):
        strict_loading = False

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            del checkpoint[FINGERPRINTS]

    loaded = Forgets.load_from_checkpoint(saved[0], seed=5)
    assert torch.equal(loaded.adapter.weight, saved[1].lightning_module.adapter.weight)


def test_what_an_optimizer_has_is_saved_while_it_is_switched_off(
    loader: DataLoader[Any], make_trainer: Any, tmp_path: Any
) -> None:
    class Toggled(Adapted):
        def on_train_end(self) -> None:
            self.adapter.requires_grad_(False)

    trainer = make_trainer(limit_val_batches=0, save_trainable_only=True)
    trainer.fit(Toggled(), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert "adapter.weight" in torch.load(tmp_path / "a.ckpt")["state_dict"]


def test_model_checkpoint_writes_such_files(loader: DataLoader[Any], make_trainer: Any, tmp_path: Any) -> None:
    sizes = {}
    for only in (True, False):
        callback = ModelCheckpoint(tmp_path / str(only), save_last=True)
        trainer = make_trainer(
            limit_val_batches=0, save_trainable_only=only, callbacks=callback, enable_checkpointing=True
        )
        trainer.fit(Adapted(width=5000), loader)
        sizes[only] = os.path.getsize(callback.last_model_path)
        assert_equal(Adapted.load_from_checkpoint(callback.last_model_path, width=5000), trainer.lightning_module)
    assert sizes[True] < sizes[False] / 4


def test_without_the_argument_the_file_is_complete(loader: DataLoader[Any], make_trainer: Any, tmp_path: Any) -> None:
    """Negative control."""
    trainer = make_trainer(limit_val_batches=0)
    trainer.fit(Adapted(), loader)
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    checkpoint = torch.load(tmp_path / "all.ckpt")
    assert FINGERPRINTS not in checkpoint
    assert list(checkpoint["state_dict"]) == list(trainer.lightning_module.state_dict())


def test_a_frozen_weight_is_read_once_and_not_at_every_save(
    loader: DataLoader[Any], make_trainer: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    from drivetrain.module import frozen

    read: list[Any] = []
    monkeypatch.setattr(frozen, "fingerprint", lambda tensor: read.append(tensor) or fingerprint(tensor))
    trainer = make_trainer(limit_val_batches=0, save_trainable_only=True)
    trainer.fit(Adapted(), loader)
    for _ in range(3):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert len(read) == 4
