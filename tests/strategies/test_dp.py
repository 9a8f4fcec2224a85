"""``dp`` gives the numbers of one device on the complete batch, whatever the batch and the number of devices are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer, WeightedLoss
from drivetrain.callbacks import LambdaCallback
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.loggers import Logger
from drivetrain.strategies import DataParallelStrategy
from drivetrain.testing import FakeAccelerator, fake_devices

SAMPLES = 11  # two batches of four, and one of three


def loader(batch_size: int = 4, samples: int = SAMPLES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(x, y, torch.randint(1, 9, (samples,), generator=generator)), batch_size=batch_size)


class Net(LightningModule):
    """Logs in every way from its steps."""

    def __init__(self, weighted: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        each = F.mse_loss(self(x), y, reduction="none").squeeze(1)
        loss = (each * tokens).sum() / tokens.sum() if self.weighted else each.mean()
        self.log("loss", each.mean(), on_step=True, on_epoch=True)
        self.log("tokens", tokens.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("most", each.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("least", float(each.detach().min()), reduce_fx="min", on_step=False, on_epoch=True)
        self.log("by token", (each * tokens).sum() / tokens.sum(), on_step=True, batch_size=int(tokens.sum()))
        self.log("mean of numbers", float(each.detach().mean()), on_step=False, on_epoch=True)
        return WeightedLoss(loss, int(tokens.sum())) if self.weighted else {"loss": loss, "each": each.detach()}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Rows(Logger):
    """Keeps what it is given."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, {name: value for name, value in metrics.items()}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def trainer(devices: int | str = 2, **arguments: Any) -> Trainer:
    """One with ``dp`` over so many devices; with 0, the plain one."""
    quiet: dict[str, Any] = {
        "strategy": "dp" if devices else "auto", "devices": devices or 1, "accelerator": "cpu",
        "precision": "64-true", "max_epochs": 2, "logger": False, "log_every_n_steps": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def fitted(module: LightningModule, devices: int, batch_size: int = 4, **arguments: Any) -> tuple[Any, Any, Trainer]:
    rows = Rows()
    run = trainer(devices, logger=rows, **arguments)
    run.fit(module, loader(batch_size), loader(3))
    return module.state_dict(), rows.rows, run


def near(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "batch_size", "arguments"),
    [
        (1, 4, {}),
        (2, 4, {}),
        (3, 4, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        (4, 5, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),  # a last batch of one sample
    ],
)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_numbers_are_those_of_one_device(devices: int, batch_size: int, arguments: Any, weighted: bool) -> None:
    weights, rows, run = fitted(Net(weighted), devices, batch_size, **arguments)
    expected, expected_rows, plain = fitted(Net(weighted), 0, batch_size, **arguments)
    near(weights, expected)
    assert len(rows) == len(expected_rows) > 2
    near(rows, expected_rows, 1e-7)
    near(dict(run.callback_metrics), dict(plain.callback_metrics), 1e-7)
    assert {"loss_step", "loss_epoch", "tokens_epoch", "most", "least", "val"} <= set(run.callback_metrics)


def test_the_check_sees_a_mean_that_ignores_the_sizes_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control."""
    from drivetrain.strategies.batch_parts import Joiner

    monkeypatch.setattr(Joiner, "_mean", lambda self, values: sum(values) / len(values))
    with pytest.raises(AssertionError):
        test_numbers_are_those_of_one_device(2, 4, {}, weighted=False)


def test_bf16_mixed_runs_under_autocast_on_every_replica() -> None:
    class Notes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.types: set[torch.dtype] = set()

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            self.types.add(output.dtype)
            return output

    arguments: dict[str, Any] = {"precision": "bf16-mixed"}
    weights, _, run = fitted(module := Notes(), 2, **arguments)
    expected, _, plain = fitted(Notes(), 0, **arguments)
    assert module.types == {torch.bfloat16}
    near(weights, expected, 0.05)
    near(run.callback_metrics["loss_epoch"], plain.callback_metrics["loss_epoch"], 0.05)


def test_dropout_draws_in_a_fixed_order() -> None:
    first, again = (fitted(Net(dropout=0.5), 2)[0] for _ in range(2))
    near(first, again, 0.0)


def test_different_devices_work_in_threads() -> None:
    with fake_devices(2):
        run = trainer(2, accelerator="fake")
        assert [device.index for device in run.plan.devices] == [0, 1]
        run.fit(module := Net(), loader(), loader(3))
    near(module.state_dict(), fitted(Net(), 0)[0])


@pytest.mark.parametrize("reads", [False, True], ids=["quiet", "control"])
def test_splitting_and_joining_wait_for_no_device(reads: bool) -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss.item() if reads else loss, on_step=True, on_epoch=True)
            return WeightedLoss(loss, batch[2].sum())

    with FakeAccelerator.recording() as record:
        device = FakeAccelerator.get_parallel_devices([0])[0]
        strategy = DataParallelStrategy(parallel_devices=[device, device])
        own: dict[str, Any] = {"strategy": strategy, "accelerator": "fake", "precision": "32-true"}
        run = trainer("auto", **own, log_every_n_steps=100, max_epochs=1)
        run.fit(Reads(), loader(), loader(3))
    waits = [sync.line for sync in record.syncs if 0 < sync.step < len(record.steps)]
    assert bool(waits) is reads, waits


def test_batch_norm_keeps_the_statistics_of_the_first_device() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(0, nn.BatchNorm1d(4))

    run = trainer(2, max_epochs=1, limit_train_batches=1)
    run.fit(module := Normed(), loader(), loader(3))
    alone = nn.BatchNorm1d(4).double()
    alone(next(iter(loader()))[0][:2].double())
    near(dict(module.net[0].named_buffers()), dict(alone.named_buffers()))


# ---- hooks over the batch --------------------------------------------------------------------------------------------


def contrast(embedded: Tensor) -> Tensor:
    """A loss in which every sample depends on all others."""
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


class Coupled(Net):
    """Its steps return what its hooks over the batch need."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"embedded": self.net[0](batch[0]), "n": torch.tensor(len(batch[0]))}

    def training_step_end(self, outputs: Any) -> Tensor:
        self.seen.append(outputs["n"].tolist())
        loss = contrast(outputs["embedded"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return self.net[0](batch[0])

    def validation_step_end(self, outputs: Tensor) -> None:
        self.log("val", contrast(outputs))

    test_step, test_step_end = validation_step, validation_step_end


class CoupledAlone(Net):
    """The same for one device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = contrast(self.net[0](batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("val", contrast(self.net[0](batch[0])))

    test_step = validation_step


def test_step_end_hooks_get_the_outputs_over_the_whole_batch() -> None:
    weights, rows, run = fitted(module := Coupled(), 2)
    expected, expected_rows, plain = fitted(alone := CoupledAlone(), 0)
    assert module.seen[:3] == [[2, 2], [2, 2], [2, 1]]
    near(weights, expected)
    near(rows, expected_rows, 1e-7)
    for method in ("validate", "test"):
        found = getattr(run, method)(module, loader(3), verbose=False)
        near(found, getattr(plain, method)(alone, loader(3), verbose=False), 1e-7)


def test_with_one_device_the_hooks_are_called_too() -> None:
    weights, _, _ = fitted(module := Coupled(), 1)
    assert module.seen[:3] == [[4], [4], [3]]
    near(weights, fitted(CoupledAlone(), 0)[0])


def test_methods_of_the_users_own_are_not_taken_for_hooks() -> None:
    class Own(Net):
        def training_step_end(self, outputs: Any, batch: Any) -> None: ...

        def predict_step_end(self, outputs: Any) -> None: ...

    weights, _, run = fitted(module := Own(), 2)
    near(weights, fitted(Net(), 0)[0])
    predictions: Any = run.predict(module, loader())
    assert [len(batch) for batch in predictions] == [4, 4, 3]


def test_other_strategies_refuse_a_module_with_such_a_hook() -> None:
    with pytest.raises(ConfigurationError, match='training_step_end is never called by Single.*Write|strategy="dp"'):
        trainer(0).fit(Coupled(), loader(), loader(3))


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_predictions_come_in_the_order_of_the_data() -> None:
    module = Net().double()
    expected = module(loader(SAMPLES).dataset.tensors[0].double())  # type: ignore[attr-defined]
    predictions: Any = trainer(3).predict(module, loader())
    assert [len(batch) for batch in predictions] == [4, 4, 3]
    near(torch.cat(predictions), expected.detach())


def test_several_loaders_and_hooks_that_see_the_outputs() -> None:
    seen: list[Any] = []
    callback = LambdaCallback(on_train_batch_end=lambda t, m, outputs, batch, i: seen.append((outputs, batch)))
    run = trainer(2, callbacks=[callback], max_epochs=1)
    run.fit(module := Net(), loader(), [loader(3), loader(2)])
    assert [(len(batch[0]), len(outputs["each"])) for outputs, batch in seen] == [(4, 4), (4, 4), (3, 3)]
    found = run.validate(module, [loader(3), loader(2)], verbose=False)
    near(found[0]["val/dataloader_idx_0"], found[1]["val/dataloader_idx_1"], 1e-7)


class Measured(Net):
    """Logs metric objects from its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.several = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        self.error(output, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return F.mse_loss(output, batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.several.update(self(batch[0]), batch[1])
        self.log_dict(self.several, on_step=False, on_epoch=True)


def test_metric_objects_count_every_sample() -> None:
    found = []
    for devices in (0, 2):
        _, _, run = fitted(Measured(), devices)
        found.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert {"error", "MeanAbsoluteError", "R2Score"} <= set(found[0])
    near(found[1], found[0], 1e-6)


class Quiet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_a_compiled_module_trains(strategy: str) -> None:
    run = trainer(2, strategy=strategy)
    run.fit(torch.compile(module := Quiet(), backend="eager"), loader(), loader(3))
    near(module.state_dict(), fitted(Net(), 0)[0])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_those_of_one_device_and_resume_both_ways(tmp_path: Path) -> None:
    files = {}
    for devices in (0, 2):
        run = trainer(devices, max_epochs=1)
        run.fit(Net(), loader(), loader(3))
        run.save_checkpoint(tmp_path / f"{devices}.ckpt")
        files[devices] = torch.load(tmp_path / f"{devices}.ckpt", weights_only=True)
    assert files[0].keys() == files[2].keys()
    near(files[2]["state_dict"], files[0]["state_dict"])
    near(files[2]["optimizer_states"], files[0]["optimizer_states"])
    expected = fitted(Net(), 0)[0]
    for saved, resumed in ((0, 2), (2, 0), (2, 3)):
        run = trainer(resumed)
        run.fit(module := Net(), loader(), loader(3), ckpt_path=tmp_path / f"{saved}.ckpt")
        near(module.state_dict(), expected)


# ---- what it refuses -------------------------------------------------------------------------------------------------


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimization_is_refused_on_several_devices_and_works_on_one() -> None:
    with pytest.raises(NotSupportedError, match="ByHand.automatic_optimization is False.*each would step"):
        trainer(2).fit(ByHand(), loader(), loader(3))
    near(fitted(ByHand(), 1)[0], fitted(ByHand(), 0)[0])


def test_batch_norm_over_all_devices_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sync_batchnorm=True.*each device computes its own"):
        trainer(2, sync_batchnorm=True).fit(Net(), loader(), loader(3))


def test_a_step_that_fetches_its_batches_is_refused() -> None:
    class Fetches(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(NotSupportedError, match="Fetches.training_step takes dataloader_iter"):
        trainer(2).fit(Fetches(), loader(), loader(3))


def test_a_batch_that_cannot_be_split_is_refused_unless_the_strategy_splits_it() -> None:
    def ragged(samples: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs behind each other, how many belong to each sample, and no sample dimension."""
        x, y, tokens = (torch.stack(each) for each in zip(*samples, strict=True))
        return x.flatten(), y, tokens

    class Ragged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self(batch[0].reshape(-1, 4)), batch[1])

    class Splits(DataParallelStrategy):
        def split_batch(self, batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
            x, y, tokens = batch
            parts, sizes = super().split_batch((x.reshape(-1, 4), y, tokens), devices)
            return [(x.flatten(), y, tokens) for x, y, tokens in parts], sizes

    batches = DataLoader(loader().dataset, batch_size=4, collate_fn=ragged)
    with pytest.raises(ConfigurationError, match="A batch of 16 samples .* override split_batch"):
        trainer(2, limit_val_batches=0).fit(Ragged(), batches)
    trainer(2, strategy=Splits(), limit_val_batches=0).fit(module := Ragged(), batches)
    near(module.state_dict(), fitted(Net(), 0)[0])


def test_the_plan_says_one_process_with_several_devices() -> None:
    plan = trainer(3).plan
    assert (plan.num_processes, len(plan.devices)) == (1, 3)
    assert "DataParallelStrategy" in str(plan)
    assert "cpu, cpu, cpu" in str(plan)


# ---- Engine ----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Returns what models in the field return: a loss and per-sample outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.layer(x)
        return {"loss": F.mse_loss(output, y), "output": output}

    def score(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("accelerator", ["cpu", "fake"])
def test_an_engine_trains_with_it(accelerator: str) -> None:
    found = []
    for own in ({"devices": 1}, {"strategy": "dp", "devices": 2}):
        with fake_devices(2):
            engine = Engine(accelerator=accelerator, precision="64-true", **own)  # type: ignore[arg-type]
        engine.launch()
        module = Plain()
        model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        model.mark_forward_method("score")
        losses = []
        for x, y, _ in engine.setup_dataloaders(loader()):
            outputs = model(x.double(), y=y.double())
            assert len(outputs["output"]) == len(x) == len(model.score(x.double()))
            optimizer.zero_grad()
            engine.backward(outputs["loss"])
            optimizer.step()
            losses.append(outputs["loss"].detach())
        engine.teardown()
        found.append((model.state_dict(), losses, list(model.state_dict())))
    near(found[1][:2], found[0][:2])
    assert found[1][2] == found[0][2] == ["layer.weight", "layer.bias"]


def test_an_engine_runs_the_steps_of_a_lightning_module_with_it() -> None:
    engine = Engine(accelerator="cpu", strategy="dp", devices=2)
    engine.launch()
    module = CoupledInEngine()
    model, _ = engine.setup(module, module.configure_optimizers())
    batch = next(iter(loader()))
    near(model.training_step(batch, 0), contrast(module.net[0](batch[0])), 1e-6)


class CoupledInEngine(Coupled):
    def training_step_end(self, outputs: Any) -> Tensor:
        return contrast(outputs["embedded"])
