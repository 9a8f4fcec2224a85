"""More of what users of other trainers report about sharded models: averages, compiled steps, several optimizers."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import near
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.strategies import FSDPStrategy
from drivetrain.strategies.sharded_state import is_dtensor

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"


def loader(count: int = 24) -> Any:
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))
    return DataLoader(samples, batch_size=8)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.blocks(self.before(x))))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def whole(value: Any) -> Any:
    return (value.full_tensor() if is_dtensor(value) else value).detach().clone()


def trainer(kind: str, ranks: int = 2, **arguments: Any) -> Trainer:
    strategy: Any = kind if kind == "single_device" else FSDPStrategy(state_dict_type=kind)  # type: ignore[arg-type]
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "strategy": strategy,
        "devices": 1 if kind == "single_device" else ranks, "split_batches": kind != "single_device",
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def result(module: Any, ours: Trainer) -> dict[str, Any]:
    return {
        "weights": {name: whole(value) for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in ours.callback_metrics.items()},
    }


# ---- averages of parameters that are validated -----------------------------------------------------------------------


class Averaged(Callback):
    """Validates an average of the shards that this rank holds, and puts the trained ones back."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.means.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.3)

    @torch.no_grad()
    def _swap(self, module: Any) -> None:
        for name, parameter in module.named_parameters():
            if name in self.means:
                trained = parameter.detach().clone()
                parameter.copy_(self.means[name])
                self.means[name] = trained

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._swap(pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._swap(pl_module)


def validates_average(kind: str, folder: Path) -> dict[str, Any]:
    module, saves = Net(), ModelCheckpoint(folder, filename=f"{kind}-{{epoch}}", save_top_k=-1)
    ours = trainer(kind, callbacks=[Averaged(), saves], enable_checkpointing=True)
    ours.fit(module, loader(), loader(16))
    return result(module, ours)


@pytest.mark.parametrize("kind", ["full", "sharded"] if LONG else ["sharded"])
def test_an_average_is_swapped_in_on_shards_to_validate_and_never_saved(pool: Any, tmp_path: Path, kind: str) -> None:
    """Also in the sanity check, before there is an average. The last file has the trained weights."""
    expected = validates_average("single_device", tmp_path)
    for found in pool.run(validates_average, kind, tmp_path, group=False):
        near(found, expected)
    saved = TorchCheckpointIO().load_checkpoint(tmp_path / f"{kind}-epoch=1.ckpt")
    near(dict(saved["state_dict"]), expected["weights"])
    plain = Net().double()
    plain.load_state_dict(saved["state_dict"])
    with torch.no_grad():  # the control: what was validated are other weights
        trained = torch.cat([plain(x.double()) - y for x, y in loader(16)]).square().mean()
    assert abs(float(trained) - expected["metrics"]["loss"]) > 1e-3


# ---- compiled models -------------------------------------------------------------------------------------------------


def compiled(kind: str, path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it does not compile
        ours = trainer(kind, max_epochs=1)
        ours.fit(torch.compile(Net(), backend="eager"), loader(), loader(16))  # type: ignore[arg-type]
        ours.save_checkpoint(path)
        again, module = trainer(kind), Net()
        again.fit(module, loader(), loader(16), ckpt_path=path)
    return result(module, again)


def test_a_compiled_model_logs_inside_its_step_and_its_folder_loads_into_a_plain_one(pool: Any, tmp_path: Path) -> None:
    module, ours = Net(), trainer("single_device")
    ours.fit(module, loader(), loader(16))
    for found in pool.run(compiled, "sharded", tmp_path / "one.ckpt", group=False):
        near(found, result(module, ours))


# ---- several optimizers ----------------------------------------------------------------------------------------------


class Two(Net):
    """Two optimizers by turns; the parameters of the other one are toggled off."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.others = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
        self.wrong: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.others(torch.tanh(self.blocks(F.pad(x, (0, 2)))))
        return x.mean(1, keepdim=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, own, frozen in zip(
            optimizers, (self.blocks, self.others), (self.others, self.blocks), strict=True
        ):
            self.toggle_optimizer(optimizer)
            loss = F.mse_loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.wrong += [
                name for name, each in frozen.named_parameters() if each.requires_grad or each.grad is not None
            ]
            self.wrong += [name for name, each in own.named_parameters() if each.grad is None]
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.blocks, self.others)]


def toggled(kind: str) -> dict[str, Any]:
    module = Two()
    for name in ("before", "head"):
        delattr(module, name)
    ours = trainer(kind)
    ours.fit(module, loader(), loader(16))
    assert module.wrong == []
    return result(module, ours)


def test_two_optimizers_toggle_their_sharded_parameters(pool: Any) -> None:
    for found in pool.run(toggled, "full", group=False):
        near(found, toggled("single_device"))


# ---- small checkpoints, other numbers of processes -------------------------------------------------------------------


class Adapted(Net):
    """Only ``head`` trains and is saved."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for part in (self.before, self.blocks, self.base):
            part.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if name.startswith("head.")}


def saves_adapter(kind: str, path: Path, module: type[Net]) -> None:
    ours = trainer(kind, max_epochs=1, limit_val_batches=0)
    ours.fit(module(), loader())
    ours.save_checkpoint(path)


class Everything(Adapted):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


def saves_adapters(kind: str, folder: Path) -> None:
    for name, module in (("small", Adapted), ("large", Everything)):
        saves_adapter(kind, folder / name, module)


def size(path: Path) -> int:
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")))


@pytest.mark.parametrize("kind", ["full", "sharded"] if LONG else ["sharded"])
def test_a_checkpoint_of_an_adapter_is_small_and_loads_over_other_weights(pool: Any, tmp_path: Path, kind: str) -> None:
    pool.run(saves_adapters, kind, tmp_path, group=False)
    frozen = sum(each.numel() for each in Adapted().base.parameters()) * 8  # bytes
    assert size(tmp_path / "small") < frozen / 2 < frozen < size(tmp_path / "large")
    loaded = Adapted.load_from_checkpoint(tmp_path / "small", strict=False)
    saved = TorchCheckpointIO().load_checkpoint(tmp_path / "small")["state_dict"]
    assert set(saved) == {"head.weight", "head.bias"}
    torch.testing.assert_close(loaded.head.weight.double(), saved["head.weight"].double(), rtol=1e-6, atol=1e-6)


class SavesInside(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def inside_an_epoch(ranks: int, path: Path, resumes: bool) -> Any:
    callbacks = [] if resumes else [SavesInside(path)]
    ours, module = trainer("sharded", ranks, max_epochs=1, callbacks=callbacks, limit_val_batches=0), Net()
    try:
        ours.fit(module, loader(), ckpt_path=path if resumes else None)
    except CheckpointError as error:
        return str(error)
    return {name: whole(value) for name, value in module.state_dict().items()}


def test_a_folder_from_inside_an_epoch_resumes_exactly_on_as_many_processes_and_goes_on_with_others(
    pool: Any, tmp_path: Path
) -> None:
    path = tmp_path / "one.ckpt"
    expected = pool.run(inside_an_epoch, 2, path, False, group=False)[0]
    for found in pool.run(inside_an_epoch, 2, path, True, group=False):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    others = pool.run(inside_an_epoch, 3, path, True, world_size=3, group=False)
    assert expected.keys() == others[0].keys()
    assert all(torch.equal(others[0][name], each[name]) for each in others for name in expected)
