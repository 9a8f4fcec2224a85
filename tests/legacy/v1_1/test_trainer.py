"""The Trainer of the 1.1 generation: its flags, its calls, and what a step may return."""

from __future__ import annotations

import argparse
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.errors import ConfigurationError, LoggingError
from drivetrain.legacy import v1_1 as pl
from drivetrain.legacy.v1_1 import flags
from drivetrain.legacy.v1_1._callbacks import EarlyStopping, ModelCheckpoint
from drivetrain.legacy.v1_1.functional import accuracy
from drivetrain.legacy.v1_1.results import EvalResult, Result, TrainResult


class Net(pl.LightningModule):
    """Trains one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(list(torch.randn(8, 4, generator=generator)), batch_size=4)


def quiet(**given: Any) -> pl.Trainer:
    """A Trainer without output, whose deprecations are no errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pl.Trainer(**{
            "max_epochs": 1, "logger": False, "checkpoint_callback": False, "progress_bar_refresh_rate": 0,
            "weights_summary": None, **given,
        })  # fmt: skip


def messages(**given: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(**given)
    return [str(each.message) for each in caught]


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "CPUAccelerator"), ({"distributed_backend": "ddp"}, "DDPAccelerator"),
        ({"accelerator": "ddp", "num_processes": 2}, "DDPAccelerator"),
        ({"accelerator": "dp"}, "DataParallelAccelerator"),
        ({"accelerator": "ddp2"}, "DDP2Accelerator"), ({"accelerator": "ddp_spawn"}, "DDPSpawnAccelerator"),
        ({"accelerator": "ddp_cpu", "num_processes": 2}, "DDPCPUSpawnAccelerator"),
        ({"accelerator": "horovod"}, "HorovodAccelerator"), ({"num_processes": 2}, "DDPCPUSpawnAccelerator"),
        ({"plugins": [pl.DDPPlugin()]}, "DDPCPUSpawnAccelerator"),
        ({"plugins": "ddp_sharded"}, "DDPCPUSpawnAccelerator"),
        ({"plugins": [pl.NativeAMPPlugin()]}, "CPUAccelerator"), ({"accelerator": "cpu"}, "CPUAccelerator"),
        ({"accelerator": "dp", "distributed_backend": "ddp"}, "DataParallelAccelerator"),
    ],
)  # fmt: skip
def test_the_accelerator_for_the_flags(given: dict[str, Any], expected: str) -> None:
    trainer = quiet(**given)
    accelerator = trainer.accelerator_backend
    assert type(accelerator).__name__ == expected
    assert (trainer.num_devices, trainer.distributed_backend) == (given.get("num_processes", 1), accelerator.nickname)
    assert accelerator.trainer is trainer
    assert type(trainer.accelerator).__name__ == "CPUAccelerator"  # today's


def test_hardware_that_is_missing_is_named() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="GPU"):
            quiet(gpus=1)
        with pytest.raises(ConfigurationError, match="GPU"):
            quiet(gpus=2, distributed_backend="ddp")
    with pytest.raises(ConfigurationError, match="torch_xla is not installed"):
        quiet(tpu_cores=8)


def test_flags_that_mean_nothing_name_the_cure() -> None:
    with pytest.raises(ConfigurationError, match="'ddpp'. is unknown. Did you mean 'ddp'"):
        quiet(accelerator="ddpp")
    with pytest.raises(ConfigurationError, match="2 plugins for DDP"):
        quiet(plugins=[pl.DDPPlugin(), pl.DDPShardedPlugin()])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"automatic_optimization": False}, "self.automatic_optimization = False in the constructor"),
        ({"enable_pl_optimizer": False}, "enable_pl_optimizer=False"),
        ({"distributed_backend": "ddp"}, "Write strategy='ddp'"),
        ({"distributed_backend": "ddp_cpu"}, 'Write accelerator="cpu", strategy="ddp_spawn"'),
        ({"precision": 16, "amp_backend": "apex"}, 'Write precision="16-mixed"'),
        ({"weights_summary": None}, "Write enable_model_summary=False"),
    ],
)
def test_a_flag_says_what_to_write(given: dict[str, Any], expected: str) -> None:
    [message] = messages(**given, logger=False)
    assert expected in message


@pytest.mark.parametrize(
    ("gpus", "devices", "name"),
    [
        ("0", [0], "GPUAccelerator"),
        ("3", [3], "GPUAccelerator"),
        ("0,1", [0, 1], "DDPSpawnAccelerator"),
        ("0, 1,", [0, 1], "DDPSpawnAccelerator"),
        ("-1", -1, "DDPSpawnAccelerator"),
        (2, 2, "DDPSpawnAccelerator"),
        ([1], [1], "GPUAccelerator"),
    ],
)
def test_gpus_in_a_text_are_indices(gpus: Any, devices: Any, name: str) -> None:
    with pytest.warns(FutureWarning, match=re.escape(f'Write accelerator="gpu", devices={devices}')):
        settings = flags.translated({"gpus": gpus})
    assert settings["devices"] == devices
    assert type(settings["accelerator"]).__name__ == name


def test_a_profiler_that_is_switched_on_is_the_simple_one() -> None:
    with pytest.warns(FutureWarning, match='Write profiler="simple"'):
        assert flags.translated({"profiler": True})["profiler"] == "simple"
    assert "profiler" not in flags.translated({"profiler": False})
    assert flags.translated({"profiler": "simple"})["profiler"] == "simple"


def test_precision_flags() -> None:
    assert quiet(precision=16, amp_backend="apex", amp_level="O0").precision_plugin.name == "32-true"
    assert quiet(precision=16).precision_plugin.name == "16-mixed"
    assert quiet(precision=16, plugins=[pl.NativeAMPPlugin()]).precision_plugin.name == "16-mixed"


def test_a_plugin_wraps_as_it_says() -> None:
    trainer = quiet(accelerator="ddp", plugins=[pl.DDPPlugin(find_unused_parameters=False)])
    assert trainer.strategy.ddp_arguments == {"find_unused_parameters": False}  # type: ignore[attr-defined]
    assert quiet(accelerator="ddp").strategy.ddp_arguments == {"find_unused_parameters": True}  # type: ignore[attr-defined]


def test_options_of_a_command_line_are_the_flags_of_that_time() -> None:
    parser = pl.Trainer.add_argparse_args(argparse.ArgumentParser())
    options = parser.parse_args(["--max_epochs", "3", "--num_processes=2", "--accelerator", "ddp"])
    assert {name for name in vars(options)} == set(flags.FLAGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = pl.Trainer.from_argparse_args(options, logger=False)
    assert (trainer.max_epochs, trainer.num_devices) == (3, 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_positional_flags_and_todays_arguments_work() -> None:
    trainer = quiet()
    assert pl.Trainer(False, False, None, None, 0.5).gradient_clip_val == 0.5  # type: ignore[attr-defined]
    assert quiet(devices=1, enable_progress_bar=False).num_devices == trainer.num_devices == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_automatic_optimization_is_switched_off_by_the_flag() -> None:
    class Manual(Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch), optimizer)
            optimizer.step()

    model, expected = Manual(), Net()
    assert quiet(automatic_optimization=False).fit(model, loader()) == 1
    quiet().fit(expected, loader())
    assert torch.equal(model.net.weight, expected.net.weight)


def test_automatic_optimization_as_a_property() -> None:
    class Manual(Net):
        @property
        def automatic_optimization(self) -> bool:
            return False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch), optimizer)
            optimizer.step()

    model, expected = Manual(), Net()
    quiet().fit(model, loader())
    quiet().fit(expected, loader())
    assert torch.equal(model.net.weight, expected.net.weight)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_calls_of_that_time() -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.loss(batch), sync_dist_op="mean", tbptt_pad_token=0)

    model, trainer = Tested(), quiet()
    assert trainer.fit(model, train_dataloader=loader()) == 1
    assert trainer.test(model, test_dataloaders=loader(), verbose=False)[0]["loss"] > 0
    assert trainer.test(test_dataloaders=loader(), verbose=False)[0]["loss"] > 0
    assert (trainer.get_model(), trainer.on_gpu, trainer.data_parallel) == (model, False, False)


def test_what_a_trainer_of_that_time_could_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Asks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trainer: Any = self.trainer
            seen.append((trainer.batch_idx, trainer.total_batch_idx, trainer.running_sanity_check))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer = quiet(max_epochs=2, num_processes=2, accelerator="dp", weights_save_path="here")
    names = ("on_cpu", "on_gpu", "on_tpu", "use_tpu", "use_dp", "use_ddp", "use_ddp2", "use_horovod", "use_single_gpu")
    assert [name for name in names if getattr(trainer, name)] == ["on_cpu", "use_dp"]
    assert [name for name in names if getattr(quiet(accelerator="ddp2"), name)] == ["on_cpu", "use_ddp2"]
    assert [name for name in names if getattr(quiet(accelerator="ddp_spawn"), name)] == ["on_cpu", "use_ddp"]
    assert (trainer.num_gpus, trainer.root_gpu, trainer.data_parallel_device_ids, trainer.gpus) == (0, None, None, None)
    assert (trainer.use_amp, trainer.amp_backend, quiet(precision=16).amp_backend) == (False, None, "native")
    assert (trainer.weights_save_path, trainer.prepare_data_per_node) == ("here", True)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert trainer.slurm_job_id == 17
    alone = quiet(max_epochs=2)
    alone.fit(Asks(), loader())
    assert seen == [(0, 0, False), (1, 1, False), (0, 2, False), (1, 3, False)]
    assert isinstance(alone.lr_schedulers[0]["scheduler"], torch.optim.lr_scheduler.StepLR)
    assert alone.lr_schedulers[0]["interval"] == "epoch"
    assert (alone.disable_validation, alone.early_stop_callback, alone.num_processes) == (True, None, 1)
    with pytest.raises(AttributeError, match="no attribute 'misspelt'"):
        _ = alone.misspelt


def test_an_accelerator_may_call_the_trainers_loops() -> None:
    class Own(pl.CPUAccelerator):
        def train(self) -> Any:
            return self.trainer.run_test() if self.trainer.testing else self.trainer.train()

    model, expected = Net(), Net()
    quiet(accelerator=Own()).fit(model, loader())
    quiet().fit(expected, loader())
    assert torch.equal(model.net.weight, expected.net.weight)


def test_the_hooks_of_epochs_are_called_in_training_only() -> None:
    called: list[str] = []

    class Hooked(Net):
        def on_epoch_start(self) -> None:
            called.append("start")

        def on_epoch_end(self) -> None:
            called.append("end")

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            called.append("validation")

    quiet(num_sanity_val_steps=0).fit(Hooked(), loader(), loader())
    assert called == ["start", "end", "validation", "validation"]


# ---- what a step returns ---------------------------------------------------------------------------------------------


class WithResults(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = TrainResult(minimize=self.loss(batch))
        result.log("train_loss", result.minimize, prog_bar=True)
        result.log_dict({"number": float(batch_idx)}, on_epoch=True, on_step=False)
        result.own = torch.tensor([batch_idx])
        return result

    def training_epoch_end(self, outputs: Any) -> Any:
        self.seen["training"] = outputs
        result = TrainResult()
        result.log("of_epoch", outputs.own.sum(), on_step=False, on_epoch=True)
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        result = EvalResult(early_stop_on=loss, checkpoint_on=loss)
        result.log("val_loss", loss)
        return result

    def validation_epoch_end(self, outputs: Any) -> None:
        self.seen["validation"] = outputs


def test_results_are_logged_and_their_loss_is_minimized() -> None:
    model, expected, trainer = WithResults(), Net(), quiet(num_sanity_val_steps=0)
    with pytest.warns(FutureWarning, match="WithResults returns TrainResult objects.*self.log") as caught:
        trainer.fit(model, loader(), loader())
    assert len([each for each in caught if "objects" in str(each.message)]) == 1
    quiet().fit(expected, loader())
    assert torch.equal(model.net.weight, expected.net.weight)
    metrics = trainer.callback_metrics
    assert (metrics["number"], metrics["of_epoch"]) == (0.5, 1.0)
    assert metrics["val_loss"] == metrics["early_stop_on"] == metrics["checkpoint_on"]
    assert model.seen["training"].own.tolist() == [0, 1]
    assert model.seen["validation"].val_loss.shape == (2,)


def test_only_the_steps_that_return_results_have_them_at_the_epochs_end() -> None:
    class Mixed(WithResults):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"val_loss": self.loss(batch)}

    model = Mixed()
    with pytest.warns(FutureWarning, match="Mixed returns TrainResult"):
        quiet(num_sanity_val_steps=0).fit(model, loader(), loader())
    assert isinstance(model.seen["training"], Result)
    assert [list(each) for each in model.seen["validation"]] == [["val_loss"]] * 2


def test_a_result_is_a_dictionary_with_attributes() -> None:
    result = Result(hiddens=torch.ones(2))
    result.own = 3
    assert (result["own"], result.own, list(result)) == (3, 3, ["hiddens", "own"])
    with pytest.raises(AttributeError, match="Result has no 'owm'. It has hiddens, own"):
        _ = result.owm
    assert Result.of_epoch([{"a": torch.ones(2), "b": 1}, {"a": torch.zeros(1)}]) == {
        "a": pytest.approx(torch.tensor([1.0, 1.0, 0.0])), "b": [1],
    }  # fmt: skip
    assert Result.of_epoch([]) == {}


# ---- callbacks and metrics -------------------------------------------------------------------------------------------


def test_modes_that_the_name_decides() -> None:
    for monitor, mode in (("val_acc", "max"), ("fmeasure_1", "max"), ("val_loss", "min")):
        assert EarlyStopping(monitor).mode == mode
        assert ModelCheckpoint(monitor=monitor).mode == mode
    assert EarlyStopping().monitor == "early_stop_on"
    assert EarlyStopping("val_acc", mode="min").mode == "min"


def test_the_path_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match=r"Write dirpath='.*', filename='\{epoch\}'"):
        found = ModelCheckpoint(f"{tmp_path}/{{epoch}}", "val_loss")
    assert (str(found.dirpath), found.filename) == (str(tmp_path), "{epoch}")
    with pytest.warns(FutureWarning, match="Write every_n_epochs=2"):
        ModelCheckpoint(period=2)
    with pytest.warns(FutureWarning, match="filepath"):
        found = ModelCheckpoint(str(tmp_path))
    assert (str(found.dirpath), found.filename) == (str(tmp_path), None)
    assert ModelCheckpoint(prefix="own", filename="{epoch}").filename == "own-{epoch}"


def test_accuracy_need_not_be_told_the_task() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(scores, torch.tensor([1, 0, 0])) == pytest.approx(2 / 3)
    assert accuracy(torch.tensor([1, 0]), torch.tensor([1, 0])) == 1


def test_a_value_that_cannot_be_logged_is_refused() -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            result = TrainResult(minimize=self.loss(batch))
            result.log("several", torch.ones(2))
            return result

    with pytest.raises(LoggingError, match="several"), pytest.warns(FutureWarning, match="TrainResult"):
        quiet().fit(Wrong(), loader())
