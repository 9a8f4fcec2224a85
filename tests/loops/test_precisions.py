"""Every precision of one device, through the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.errors import ConfigurationError
from drivetrain.precision import MixedPrecision

DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.seen: list[torch.dtype] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.seen.append(self.net[0](x).dtype)
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("precision", DTYPES)
def test_true_precisions_are_bit_equal_to_the_plain_loop(
    make_trainer: Any, loader: DataLoader[Any], precision: str
) -> None:
    ours, plain, dtype = Net(), Net().to(DTYPES[precision]), DTYPES[precision]
    trainer = make_trainer(precision=precision, max_epochs=2)
    trainer.fit(ours, loader, loader)

    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for x, y in loader:
            loss = plain.loss((x.to(dtype), y.to(dtype)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert same(ours, plain)
    assert set(ours.seen) == {dtype}
    assert torch.get_default_dtype() is torch.float32
    assert trainer.precision == precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_mixed_precisions_are_bit_equal_to_the_plain_loop(
    make_trainer: Any, loader: DataLoader[Any], precision: str, accumulate: int
) -> None:
    ours, plain = Net(), Net()
    make_trainer(precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=0.5).fit(
        ours, loader, loader
    )

    optimizer = plain.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    for index, batch in enumerate(loader):
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = plain.loss(batch)
        if index % accumulate == 0:
            optimizer.zero_grad()
        scaler.scale(loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    assert same(ours, plain)
    assert set(ours.seen) == {dtype}


class Overflowing(Net):
    """The gradients of every second batch are infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx % 2 else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=16.0))


@pytest.mark.parametrize("own_step", [False, True])
def test_t16_a_step_that_the_scaler_skips_steps_no_scheduler(
    make_trainer: Any, loader: DataLoader[Any], own_step: bool
) -> None:
    class Own(Overflowing):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)

    trainer = make_trainer(plugins=scaled())
    trainer.fit(Own() if own_step else Overflowing(), loader, loader)

    assert trainer.global_step == 2
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert trainer.scaler.get_scale() == 4.0


@pytest.mark.parametrize("manual", [False, True])
def test_t16_a_fused_optimizer_trains_as_an_ordinary_one_when_its_first_step_overflows(
    make_trainer: Any, loader: DataLoader[Any], manual: bool
) -> None:
    class Fused(Net):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.fused = fused
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx) * (1.0 if batch_idx else float("inf"))
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=self.fused)

    found = []
    for fused in (True, False):
        torch.manual_seed(1)
        module, trainer = Fused(fused), make_trainer(plugins=scaled())
        trainer.fit(module, loader, loader)
        assert trainer.global_step == 3
        found.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    torch.testing.assert_close(found[0], found[1])


def test_t21_hooks_and_clipping_see_unscaled_gradients(make_trainer: Any, loader: DataLoader[Any]) -> None:
    norms: dict[str, float] = {}

    class Watching(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            norms["after_backward"] = norm(pl_module)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norms["before_step"] = norm(pl_module)

    def norm(module: nn.Module) -> float:
        return float(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm())

    make_trainer(plugins=scaled(), limit_train_batches=1, callbacks=Watching()).fit(Net(), loader, loader)

    assert norms["after_backward"] == pytest.approx(16 * norms["before_step"], rel=1e-5)


def test_t21_a_batch_without_loss_is_neither_unscaled_nor_stepped(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    trainer = make_trainer(plugins=scaled())
    trainer.fit(Skipping(), loader, loader)

    assert trainer.global_step == 3


def test_t21_lbfgs_is_refused_with_a_scaled_loss(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Closures(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match=r"scaled loss of precision='16-mixed' does not allow\. Write"):
        make_trainer(precision="16-mixed").fit(Closures(), loader, loader)


def test_the_scaler_survives_a_checkpoint(make_trainer: Any, loader: DataLoader[Any], tmp_path: Path) -> None:
    first = make_trainer(plugins=scaled(), max_epochs=1)
    first.fit(Overflowing(), loader, loader)
    first.save_checkpoint(tmp_path / "a.ckpt")
    scale = first.scaler.get_scale()

    second = make_trainer(precision="16-mixed", max_epochs=1)
    second.fit(Overflowing(), loader, loader, ckpt_path=tmp_path / "a.ckpt")

    assert second.scaler.get_scale() == scale != torch.amp.GradScaler("cpu").get_scale()


@pytest.mark.parametrize("precision", DTYPES)
def test_layers_of_configure_model_are_made_in_the_precision_of_the_run(
    make_trainer: Any, loader: DataLoader[Any], precision: str
) -> None:
    class Late(Net):
        def configure_model(self) -> None:
            self.made_as = torch.empty(0).dtype

    module = Late()
    make_trainer(precision=precision).fit(module, loader, loader)

    assert module.made_as is DTYPES[precision]


@pytest.mark.parametrize(("precision", "most"), [("16-mixed", 1), ("bf16-mixed", 0), ("bf16-true", 0), ("64-true", 0)])
def test_reads_of_the_device_per_step(
    make_trainer: Any, loader: Any, ready: Any, monkeypatch: pytest.MonkeyPatch, precision: str, most: int
) -> None:
    batches = ready(list(loader))  # a DataLoader reads its seed
    reads = 0
    original = torch.Tensor.item

    def item(self: torch.Tensor) -> Any:
        nonlocal reads
        reads += 1
        return original(self)

    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    monkeypatch.setattr(torch.Tensor, "item", item)
    trainer = make_trainer(precision=precision, max_epochs=5)
    trainer.fit(Plain(), batches)

    assert reads <= most * 20
    if most:
        assert reads > 0


def test_inputs_are_converted_before_a_transfer_hook_sees_them(make_trainer: Any, loader: DataLoader[Any]) -> None:
    seen: list[torch.dtype] = []

    class Hooked(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(batch[0].dtype)
            return batch

    make_trainer(precision="bf16-true", limit_train_batches=1).fit(Hooked(), loader, loader)

    assert set(seen) == {torch.bfloat16}


def test_prediction_runs_in_the_precision_too(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Predicting(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    predictions = make_trainer(precision="bf16-true").predict(Predicting(), loader)
    assert {p.dtype for p in predictions} == {torch.bfloat16}


def test_a_batch_without_a_loss_moves_nothing_under_a_scaled_step_of_the_modules_own(
    make_trainer: Any, ready: Any
) -> None:
    """Zeroed gradients would still let Adam's momentum move the parameters."""
    seen: list[torch.Tensor] = []

    class Sometimes(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.layer.weight.detach().clone())
            loss = F.mse_loss(self.layer(batch), torch.zeros(3, 1)) * 1e-3  # small enough for the first scale
            return None if batch_idx else loss

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    module = Sometimes()
    trainer = make_trainer(max_epochs=1, precision="16-mixed")
    trainer.fit(module, ready([torch.ones(3, 2)] * 3))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(module.layer.weight, seen[2])
    assert trainer.global_step == 1
