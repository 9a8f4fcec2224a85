"""Programs on pretend devices: the numbers of the CPU, and the faults and costs of an accelerator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer, WeightedLoss
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.testing import FakeAccelerator, Record, fake_devices

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)


class Net(LightningModule):
    """A net with a buffer and dropout that logs its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("number", 1.0)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Judged(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y: torch.Tensor = self(batch[0])
        return y


class Reading(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class Foreach(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=True)


class Fused(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Weighted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return WeightedLoss(self.loss(batch), (batch[0] > 0).sum())


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Late(Net):
    def configure_model(self) -> None:
        if isinstance(self.net, nn.Sequential):
            self.net = nn.Linear(4, 1)  # made on the device


def batches(count: int = 8, **options: Any) -> DataLoader[Any]:
    x = torch.randn(8 * count, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, **options)


def syncs_of_steps(record: Record, last: int) -> list[str]:
    """What made the host wait after the first optimizer step and before the ``last`` one: no set-up, no teardown."""
    return [sync.what for sync in record.syncs if 0 < sync.step < last]


# ---- what a fit costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fake", None], ids=["by-name", "instance"])
def test_the_host_waits_only_when_the_log_is_flushed(make_trainer: Any, tmp_path: Path, name: str | None) -> None:
    trainer = make_trainer(
        accelerator=name or FakeAccelerator(), devices=1, logger=CSVLogger(tmp_path), log_every_n_steps=50
    )
    with FakeAccelerator.recording() as record:
        trainer.fit(Net(), batches(100))
    assert len(record.steps) == 100
    assert {(step.optimizer, step.devices) for step in record.steps} == {("AdamW", (0,))}
    in_steps = [sync for sync in record.syncs if 0 < sync.step < 100]
    assert [sync.step for sync in in_steps] == [50]
    assert "reading.py" in in_steps[0].through


def test_a_read_in_the_step_is_counted_in_each(make_trainer: Any) -> None:
    """Negative control."""
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator="fake", devices=1).fit(Reading(), batches(100))
    reads = [sync for sync in record.syncs if "in training_step" in sync.line]
    assert [(sync.what, sync.step) for sync in reads] == [("item", step) for step in range(100)]
    assert f"100 syncs by item at {reads[0].line}" in str(record)


def test_each_batch_is_moved_once_and_nobody_waits_for_it(make_trainer: Any) -> None:
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator="fake", devices=1, max_epochs=2, num_sanity_val_steps=0).fit(
            Judged(), batches(10), batches(3)
        )
    of_batches = [move for move in record.moves if not move.blocking]
    assert [(move.source, move.target) for move in of_batches] == [(None, 0)] * 2 * (10 + 3) * 2
    assert sum(move.bytes for move in of_batches) == 2 * (10 + 3) * 8 * (4 + 1) * 4
    assert all("tree.py" in move.through for move in of_batches)


def test_what_a_list_of_batches_holds_is_moved_once_too(make_trainer: Any, ready: Any) -> None:
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator="fake", devices=1).fit(Net(), ready(list(batches(5))))
    assert len([move for move in record.moves if not move.blocking]) == 10


def test_a_scaled_loss_costs_one_read_per_step(make_trainer: Any) -> None:
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator="fake", devices=1, precision="16-mixed", log_every_n_steps=1000).fit(
            Net(), batches(20)
        )
    in_steps = [sync for sync in record.syncs if "mixed.py" in sync.through]
    assert [sync.what for sync in in_steps] == ["item"] * 20
    others = [sync.through for sync in record.syncs if sync not in in_steps]
    assert [through for through in others if not ("strategies" in through or "reading.py" in through)] == []


# ---- faults ----------------------------------------------------------------------------------------------------------


class Forgetful(Net):
    """Makes a tensor in its step where it should not, or where it should."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.where = device

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        noise = torch.zeros(4) if self.where == "nowhere" else torch.zeros(4, device=x.device)
        return F.mse_loss(self(x + noise), y)


class Unregistered(Net):
    """Keeps a tensor that moves with the module only if it is a buffer."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        if registered:
            self.register_buffer("shift", torch.ones(4))
        else:
            self.shift = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift)


@pytest.mark.parametrize("model", [lambda: Forgetful("nowhere"), lambda: Unregistered(False)], ids=["tensor", "buffer"])
def test_what_was_not_moved_fails_as_on_hardware(make_trainer: Any, model: Any) -> None:
    with (
        FakeAccelerator.recording(),
        pytest.raises(RuntimeError, match=r"all tensors .* fake:0 and cpu! .*test_fake.py"),
    ):
        make_trainer(accelerator="fake", devices=1).fit(model(), batches())
    make_trainer().fit(model(), batches())  # the CPU does not mind


@pytest.mark.parametrize("model", [lambda: Forgetful("device"), lambda: Unregistered(True)], ids=["tensor", "buffer"])
def test_what_was_moved_does_not(make_trainer: Any, model: Any) -> None:
    """Negative control."""
    with FakeAccelerator.recording() as record:
        make_trainer(accelerator="fake", devices=1).fit(model(), batches())
    assert len(record.steps) == 8


# ---- the same numbers ------------------------------------------------------------------------------------------------


def fit(trainer: Any, model: LightningModule) -> Any:
    trainer.fit(model, batches())


def fit_and_validate(trainer: Any, model: LightningModule) -> Any:
    trainer.fit(model, batches(), batches(3))


def fit_from_workers(trainer: Any, model: LightningModule) -> Any:
    trainer.fit(model, batches(shuffle=True, num_workers=1))


def judge(trainer: Any, model: LightningModule) -> Any:
    metrics = [*trainer.validate(model, batches(), verbose=False), *trainer.test(model, batches(), verbose=False)]
    predictions = trainer.predict(model, batches())
    assert {prediction.device for prediction in predictions} == {HOST}
    return metrics, torch.cat(predictions).tolist()


CASES = {
    "32-true": (Judged, {}, fit_and_validate),
    "bf16-mixed": (Net, {"precision": "bf16-mixed"}, fit),
    "16-mixed": (Net, {"precision": "16-mixed", "accumulate_grad_batches": 3}, fit),
    "bf16-true": (Net, {"precision": "bf16-true"}, fit),
    "64-true": (Net, {"precision": "64-true"}, fit),
    "foreach": (Foreach, {"gradient_clip_val": 0.1}, fit),
    "fused": (Fused, {}, fit),
    "clip-value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, fit),
    "accumulate": (Net, {"accumulate_grad_batches": 3}, fit),
    "weighted": (Weighted, {"accumulate_grad_batches": 3}, fit),
    "scheduled": (Scheduled, {}, fit),
    "manual": (Manual, {}, fit),
    "configure-model": (Late, {}, fit),
    "workers": (Net, {}, fit_from_workers),
    "judge": (Judged, {}, judge),
    "judge-no-grad": (Judged, {"inference_mode": False}, judge),
}


@pytest.mark.parametrize(
    ("case", "recorded"), [*((case, True) for case in CASES), ("32-true", False), ("judge", False), ("foreach", False)]
)
def test_numbers_are_those_of_the_cpu(make_trainer: Any, case: str, recorded: bool) -> None:
    kind, arguments, work = CASES[case]

    def outcome(**accelerator: Any) -> tuple[dict[str, Any], Any, dict[str, float]]:
        torch.manual_seed(0)
        model, trainer = kind(), make_trainer(max_epochs=2, **accelerator, **arguments)
        result = work(trainer, model)
        return model.state_dict(), result, {name: float(value) for name, value in trainer.callback_metrics.items()}

    expected = outcome()
    if recorded:
        with FakeAccelerator.recording() as record:
            weights, result, metrics = outcome(accelerator="fake", devices=1)
        assert {move.target for move in record.moves} >= {0}
    else:
        weights, result, metrics = outcome(accelerator="fake", devices=1)
    assert (result, metrics) == expected[1:]
    assert weights.keys() == expected[0].keys()
    assert all(torch.equal(weights[name], expected[0][name]) for name in weights)


def test_a_run_is_saved_and_taken_up(make_trainer: Any, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 11

    def outcome(folder: Path, interrupted: bool, **accelerator: Any) -> Any:
        def trainer(*callbacks: Any) -> Any:
            saving = ModelCheckpoint(folder, every_n_train_steps=11, save_last=True)
            return make_trainer(
                max_epochs=3, enable_checkpointing=True, callbacks=[saving, *callbacks], min_epochs=0, **accelerator
            )

        torch.manual_seed(0)
        model = Judged()
        if interrupted:
            trainer(Stop()).fit(model, batches(shuffle=True), batches(2))
            torch.manual_seed(5)
            model = Judged()
            trainer().fit(model, batches(shuffle=True), batches(2), ckpt_path=folder / "last.ckpt")
        else:
            trainer().fit(model, batches(shuffle=True), batches(2))
        assert next(model.parameters()).device == HOST
        return model.state_dict()

    expected = outcome(tmp_path / "cpu", interrupted=False)
    with FakeAccelerator.recording() as record:
        weights = outcome(tmp_path / "fake", interrupted=True, accelerator="fake", devices=1)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert len(record.steps) == 24
    assert any(sync.what == "save" for sync in record.syncs)
    model = Judged.load_from_checkpoint(tmp_path / "fake" / "last.ckpt", map_location=DEVICE)
    saved = torch.load(tmp_path / "fake" / "last.ckpt")["state_dict"]["net.0.weight"]
    assert torch.equal(model.net[0].weight, saved)


def test_callbacks_and_summaries_work(make_trainer: Any, tmp_path: Path) -> None:
    with FakeAccelerator.recording() as record:
        trainer = make_trainer(
            accelerator="fake", devices=1, max_epochs=2, enable_model_summary=True, enable_checkpointing=True,
            callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(tmp_path, monitor="val_loss")],
        )  # fmt: skip
        trainer.fit(Judged(), batches(), batches())
    assert trainer.checkpoint_callback.best_model_score.device == HOST
    assert syncs_of_steps(record, 8) == []


@pytest.mark.parametrize("checks", [False, True])
def test_a_loop_of_ones_own(checks: bool) -> None:
    def trained(**accelerator: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        engine, net = Engine(**accelerator), Net().net
        model, optimizer = engine.setup(net, torch.optim.AdamW(net.parameters()))
        for x, y in engine.setup_dataloaders(batches()):
            engine.backward(F.mse_loss(model(x), y))
            engine.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=checks)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = trained(accelerator="cpu")
    with FakeAccelerator.recording() as record:
        values = trained(accelerator="fake", devices=1)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert syncs_of_steps(record, 8) == ["__bool__"] * (7 if checks else 0)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_goes_up_and_down() -> None:
    accelerator = FakeAccelerator()
    with FakeAccelerator.recording(devices=2) as record:
        assert record.bytes_alive(0) == 0
        x = torch.zeros(1000, device=DEVICE)
        view = x[:10]
        y = x + 1
        assert (record.bytes_alive(0), record.bytes_alive(1), record.peak_bytes(0)) == (8000, 0, 8000)
        del x
        assert record.bytes_alive(DEVICE) == 8000  # the view holds it
        del view
        assert (record.bytes_alive(0), record.peak_bytes(0)) == (4000, 8000)
        record.reset_peak(0)
        assert record.peak_bytes(0) == 4000
        moved = y.to("cpu:1")
        assert (record.bytes_alive(0), record.bytes_alive(1)) == (4000, 4000)
        assert accelerator.memory_allocated(DEVICE) == accelerator.max_memory_allocated(DEVICE) == 4000
        stats = accelerator.get_device_stats(moved.device)
        assert stats == {"allocated_bytes.all.current": 4000.0, "allocated_bytes.all.peak": 4000.0}
        y.resize_(2000)
        del moved
        assert (record.bytes_alive(0), record.bytes_alive(1)) == (8000, 0)
        accelerator.reset_peak_memory(DEVICE)
    assert accelerator.memory_allocated(DEVICE) is None
    assert accelerator.get_device_stats(DEVICE) == {}


def test_what_a_graph_keeps_is_alive_until_it_goes() -> None:
    with FakeAccelerator.recording() as record:
        weight = torch.ones(100, device=DEVICE, requires_grad=True)
        loss = weight.exp().exp().sum()
        held = record.bytes_alive()
        loss.backward()
        del loss
        assert held >= 3 * 400
        assert record.bytes_alive() == 2 * 400  # the weight and its gradient


def test_after_a_run_the_device_is_free(make_trainer: Any) -> None:
    with FakeAccelerator.recording() as record:
        trainer, model = make_trainer(accelerator="fake", devices=1), Net()
        trainer.fit(model, batches())
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        assert record.peak_bytes() > 4 * size  # with gradients and two moments of Adam's
        trainer.callback_metrics.clear()
        del trainer
        assert record.bytes_alive() < size / 10


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_devices_are_counted_as_somebody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    assert (accelerator.auto_device_count(), accelerator.parse_devices(-1)) == (1, [0])
    with fake_devices(4):
        assert accelerator.auto_device_count() == 4
        assert accelerator.get_parallel_devices(accelerator.parse_devices("1,3")) == [
            torch.device("cpu", 1), torch.device("cpu", 3),
        ]  # fmt: skip
        with fake_devices(0):
            assert not accelerator.is_available()
        assert accelerator.parse_devices(3) == [0, 1, 2]
    monkeypatch.setenv("DRIVETRAIN_FAKE_DEVICES", "3")
    assert accelerator.auto_device_count() == 3
    with fake_devices(2):
        script = "import os; print(os.environ['DRIVETRAIN_FAKE_DEVICES'])"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "2"
    assert accelerator.auto_device_count() == 3


def test_devices_that_nobody_pretends_are_refused(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"devices=2 means .* has 1, .* simulate more: with fake_devices\(4\)"):
        make_trainer(accelerator=FakeAccelerator(), devices=2)
    with fake_devices(0), pytest.raises(ConfigurationError, match="not available"):
        make_trainer(accelerator=FakeAccelerator())
    with pytest.raises(ConfigurationError, match=r"fake_devices\(-1\).*Write fake_devices\(2\)"), fake_devices(-1):
        pass
    monkeypatch.setenv("DRIVETRAIN_FAKE_DEVICES", "many")
    with pytest.raises(ConfigurationError, match="_FAKE_DEVICES is a number of simulated devices, not 'many'"):
        FakeAccelerator.auto_device_count()


def test_waiting_for_a_device_is_noted() -> None:
    FakeAccelerator().synchronize(DEVICE)
    with FakeAccelerator.recording() as record:
        FakeAccelerator().synchronize(DEVICE)
    assert [(sync.what, sync.device) for sync in record.syncs] == [("synchronize", 0)]


class Squares(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Any:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_on_a_device_each() -> tuple[str, Any]:
    torch.manual_seed(0)
    with FakeAccelerator.recording() as record:
        trainer = Trainer(
            accelerator="fake", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model := Squares(), DataLoader(torch.randn(32, 4), batch_size=4))
    rank = trainer.global_rank
    assert [step.devices for step in record.steps] == [(rank,)] * 4, record
    assert {(move.source, move.target) for move in record.moves if not move.blocking} == {(None, rank)}, record
    assert not [sync for sync in record.syncs if 0 < sync.step < 4], record
    return str(trainer.strategy.root_device), model.layer.weight.tolist()


def test_two_processes_train_on_a_device_each(pool: Any) -> None:
    with pool.fresh() as fresh:
        first, second = fresh.run(train_on_a_device_each, group=False, environ={"DRIVETRAIN_FAKE_DEVICES": "2"})
    assert (first[0], second[0]) == ("cpu:0", "cpu:1")
    assert first[1] == second[1]


def test_importing_costs_nothing_until_it_is_used() -> None:
    script = "import sys, drivetrain.testing; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"
    import drivetrain.testing

    assert all(getattr(drivetrain.testing, name) is not None for name in drivetrain.testing.__all__)
    assert set(drivetrain.testing.__all__) <= set(dir(drivetrain.testing))
    with pytest.raises(AttributeError, match="Did you mean 'FakeAccelerator'"):
        _ = drivetrain.testing.FakeAcelerator  # type: ignore[attr-defined]
