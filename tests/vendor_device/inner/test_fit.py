"""drivetrain on the device: fits like the host's, exact resume, and no wait between two flushes of the log."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from vendor_device import LabAccelerator

from drivetrain import Callback, LightningModule
from drivetrain.accelerators import Accelerator
from drivetrain.base.tree import move

lab: Any = torch.lab  # type: ignore[attr-defined]
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


class Net(LightningModule):
    """A classifier that keeps its losses, as tensors, and never waits for them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.losses: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).float(), y)  # 32 bits from here, whatever autocast's lists say
        self.losses[self.global_step] = loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))


def loader(samples: int = 40, **options: Any) -> DataLoader[Any]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, **options)


def losses(net: Net) -> Tensor:
    return torch.stack([net.losses[step].float().cpu() for step in sorted(net.losses)])


# ---- fits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, [1]], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_the_hosts(make_trainer: Any, precision: str, devices: Any) -> None:
    host, there = Validated(), Validated()
    make_trainer(precision=precision, max_epochs=3).fit(host, loader(), loader())
    trainer = make_trainer(accelerator=LabAccelerator(), devices=devices, precision=precision, max_epochs=3)
    seen: set[Any] = set()
    there.net[0].register_forward_hook(lambda *_: seen.add((there.net[0].weight.device, lab.current_device())))
    trainer.fit(there, loader(), loader())

    index = 0 if devices == 1 else 1
    assert seen == {(torch.device("lab", index), index)}
    assert len(there.losses) == 15
    assert losses(there)[-5:].mean() < 0.9 * losses(there)[:5].mean()
    torch.testing.assert_close(losses(there), losses(host), rtol=1e-6, atol=1e-6)
    assert {parameter.device.type for parameter in there.parameters()} == {"cpu"}, "it comes back when all is over"


@pytest.mark.parametrize("name", ["lab", "auto", "the class", "an instance"])
def test_every_way_to_say_it(make_trainer: Any, name: str) -> None:
    given: Any = {"the class": LabAccelerator, "an instance": LabAccelerator()}.get(name, name)
    trainer = make_trainer(accelerator=given, devices=1, max_steps=1)
    net = Net()
    trainer.fit(net, loader())
    assert type(trainer.accelerator) is LabAccelerator
    assert trainer.strategy.root_device == torch.device("lab:0")
    assert net.losses[0].device == torch.device("lab:0")


def test_the_printed_class_is_enough(make_trainer: Any) -> None:
    class Five(Accelerator):
        """Exactly the five members that a vendor must write."""

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> Any:
            return [torch.device("lab", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 2

        @staticmethod
        def is_available() -> bool:
            return True

        def get_device_stats(self, device: torch.device) -> dict[str, float]:
            return {}

    net = Net()
    trainer = make_trainer(accelerator=Five(), devices="1", precision="bf16-mixed", max_steps=2)
    trainer.fit(net, loader())
    assert net.losses[1].device == torch.device("lab:0")
    assert trainer.accelerator.autocast_device_type == "lab"


def test_figures_of_the_device() -> None:
    held = torch.empty(100, device="lab:1")
    stats = LabAccelerator().get_device_stats(held.device)
    assert stats["allocated_bytes.all.current"] == lab.memory_allocated(1) >= 400
    assert all(type(value) is float for value in stats.values())


# ---- what a fit leaves and reads -----------------------------------------------------------------------------------


def test_a_fit_gives_its_memory_back(make_trainer: Any) -> None:
    gc.collect()
    before = lab.memory_allocated(0)
    net, trainer = Validated(), make_trainer(accelerator=LabAccelerator(), devices=1)
    trainer.fit(net, loader(), loader())
    assert lab.max_memory_allocated(0) > before
    del net, trainer
    gc.collect()
    assert lab.memory_allocated(0) == before


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_nothing_waits_between_two_flushes(make_trainer: Any, precision: str) -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.waits: list[int] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.waits.append(lab.waits())

    def waits(every: int) -> list[int]:
        count = Count()
        make_trainer(
            accelerator=LabAccelerator(), devices=1, precision=precision, callbacks=count, log_every_n_steps=every,
            gradient_clip_val=1.0, accumulate_grad_batches=2, logger=True, max_epochs=1,
        ).fit(Net(), loader(20 * 8))  # fmt: skip
        return [after - before for before, after in zip(count.waits, count.waits[1:], strict=False)]

    # A window has two batches, and its flush comes after the last callback of its last batch.
    assert [(index, count) for index, count in enumerate(waits(5)) if count] == [(9, 1)]
    assert [(index, count) for index, count in enumerate(waits(1)) if count] == [
        (index, 1) for index in range(1, 19, 2)
    ]


class Own(Dataset[Any]):
    """A data set of the user's: its samples are fetched one by one."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@pytest.mark.parametrize(
    ("own", "options", "pinned"),
    [(False, {}, True), (False, {"shuffle": True}, True), (True, {}, False), (True, {"pin_memory": True}, True),
     (True, {"pin_memory": True, "num_workers": 1}, True), (False, {"num_workers": 1}, False)],
)  # fmt: skip
# torch 2.9's own loader does what it advises against
@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.(is_pinned|pin_memory):DeprecationWarning")
def test_batches_in_pinned_memory(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, own: bool, options: Any, pinned: bool
) -> None:
    found: list[bool] = []

    def watched(batch: Any, device: Any) -> Any:
        found.append(all(each.is_pinned() for each in batch))
        return move(batch, device)

    def trained(accelerator: Any) -> Tensor:
        batches = loader()
        data = Own(batches.dataset) if own else batches.dataset
        here = {} if accelerator == "cpu" else options  # torch pins for lab, even if the Trainer is on the host
        torch.manual_seed(4)
        net = Net()
        make_trainer(accelerator=accelerator, devices=1).fit(
            net, DataLoader(data, batch_size=8, **{"shuffle": options.get("shuffle", False), **here})
        )
        return losses(net)

    expected = trained("cpu")
    monkeypatch.setattr("drivetrain.module.hooks.move", watched)
    lab.reset_counters()
    values = trained(LabAccelerator())
    assert found == [pinned] * 5
    assert lab.counters()["to_device_async"] >= 10
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


# ---- stop and resume -----------------------------------------------------------------------------------------------


class SaveEachBatch(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step:02d}.ckpt")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_t26_resumed_at_the_end_of_any_batch_is_bit_equal(make_trainer: Any, tmp_path: Path, precision: str) -> None:
    def fit(net: Net, accelerator: Any = "lab", **options: Any) -> Any:
        trainer = make_trainer(
            accelerator=LabAccelerator() if accelerator == "lab" else accelerator, devices=1, precision=precision,
            max_epochs=2, **options.pop("trainer", {}),
        )  # fmt: skip
        trainer.fit(net, loader(shuffle=True), **options)
        return trainer

    torch.manual_seed(5)
    whole = Net(dropout=0.4)
    fit(whole, trainer={"callbacks": SaveEachBatch(tmp_path)})
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 10
    for file in files[:-1]:
        torch.manual_seed(torch.seed() % 1000)  # what a new process would bring
        resumed = Net(dropout=0.4)
        trainer = fit(resumed, ckpt_path=file)
        assert min(resumed.losses) == int(file.stem)
        assert all(torch.equal(whole.losses[step], loss) for step, loss in resumed.losses.items()), file
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        assert trainer.global_step == 10


def test_without_the_devices_random_state_it_would_not_be_exact(make_trainer: Any, tmp_path: Path) -> None:
    """The negative control: dropout draws on the device."""
    torch.manual_seed(5)
    whole, resumed = Net(dropout=0.4), Net(dropout=0.4)
    options: dict[str, Any] = {"accelerator": LabAccelerator(), "devices": 1, "max_epochs": 2}
    make_trainer(**options, callbacks=SaveEachBatch(tmp_path)).fit(whole, loader())

    class Other(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            lab.manual_seed(99)

    make_trainer(**options, callbacks=Other()).fit(resumed, loader(), ckpt_path=tmp_path / "04.ckpt")
    assert not torch.equal(whole.losses[5], resumed.losses[5])


@pytest.mark.parametrize(("first", "second"), [("cpu", "lab"), ("lab", "cpu")])
def test_begun_on_one_device_and_finished_on_another(
    make_trainer: Any, tmp_path: Path, first: str, second: str
) -> None:
    def fit(kind: str, name: str, epochs: int, **options: Any) -> Net:
        net, saver = Net(), SaveEachBatch(tmp_path / name)
        accelerator = LabAccelerator() if kind == "lab" else kind
        trainer = make_trainer(accelerator=accelerator, devices=1, max_epochs=epochs, callbacks=saver)
        trainer.fit(net, loader(), **options)
        return net

    whole = fit("cpu", "whole", 2)
    fit(first, "begun", 1)
    finished = fit(second, "finished", 2, ckpt_path=tmp_path / "begun" / "05.ckpt")
    assert sorted(finished.losses) == [5, 6, 7, 8, 9]
    torch.testing.assert_close(losses(finished), losses(whole)[5:], rtol=1e-6, atol=1e-6)


# ---- where torch treats devices from outside differently -----------------------------------------------------------


def test_tied_weights_stay_tied(make_trainer: Any) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            self.net[1].weight = self.net[0].weight
            self.tied: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.tied.append(self.net[0].weight is self.net[1].weight)
            return super().training_step(batch, batch_idx)

    net = Tied()
    make_trainer(accelerator=LabAccelerator(), devices=1, max_steps=2).fit(net, loader())
    assert net.tied == [True, True]
