"""The Trainer of the 1.3 generation: its flags, each with one line that names the new spelling, and its calls."""

from __future__ import annotations

import argparse
import inspect
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import drivetrain
from drivetrain.callbacks import (
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
)
from drivetrain.errors import ConfigurationError, UnknownArgumentError
from drivetrain.legacy import v1_1
from drivetrain.legacy import v1_3 as pl
from drivetrain.legacy.v1_3.flags import FLAGS, translated


class Net(pl.LightningModule):
    """Trains one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(list(torch.randn(8, 4, generator=generator)), batch_size=4)


def quiet(**flags: Any) -> pl.Trainer:
    """A Trainer without output, whose deprecations are no errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pl.Trainer(**{
            "max_epochs": 1, "logger": False, "checkpoint_callback": False, "progress_bar_refresh_rate": 0,
            "weights_summary": None, **flags,
        })  # fmt: skip


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_without_flags_it_is_quiet_and_trains_as_today(tmp_path: Path, make_trainer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = pl.Trainer(default_root_dir=str(tmp_path), max_epochs=1, logger=False)
    one, other = Net(), Net()
    trainer.fit(one, loader())
    make_trainer().fit(other, loader())
    assert torch.equal(one.net.weight, other.net.weight)


NEW_SPELLING = {
    "num_processes": (2, 'accelerator="cpu", devices=2'),
    "distributed_backend": ("ddp", "strategy='ddp'"),
    "accelerator": ("dp", "strategy='dp'"),
    "amp_backend": ("apex", 'precision="16-mixed"'),
    "amp_level": ("O1", 'precision="16-mixed"'),
    "checkpoint_callback": (False, "enable_checkpointing=False"),
    "resume_from_checkpoint": ("a.ckpt", "ckpt_path='a.ckpt'"),
    "progress_bar_refresh_rate": (20, "RichProgressBar(refresh_rate=20)"),
    "weights_summary": ("full", "ModelSummary(max_depth=-1)"),
    "weights_save_path": ("there", "ModelCheckpoint(dirpath='there')"),
    "reload_dataloaders_every_epoch": (True, "reload_dataloaders_every_n_epochs=1"),
    "replace_sampler_ddp": (False, "use_distributed_sampler=False"),
    "log_gpu_memory": ("all", "DeviceStatsMonitor()"),
    "track_grad_norm": (2, "on_before_optimizer_step"),
    "terminate_on_nan": (True, "check_finite=True"),
    "truncated_bptt_steps": (3, "self.truncated_bptt_steps = 3"),
    "prepare_data_per_node": (False, "self.prepare_data_per_node = False"),
    "multiple_trainloader_mode": ("min_size", "CombinedLoader(loaders, mode='min_size')"),
    "flush_logs_every_n_steps": (10, "no effect"),
    "move_metrics_to_cpu": (True, "no effect"),
    "auto_select_gpus": (True, 'devices="auto"'),
    "process_position": (1, "TQDMProgressBar"),
    "gpus": (2, 'accelerator="gpu", devices=2'),
    "tpu_cores": (8, 'accelerator="tpu", devices=8'),
}


@pytest.mark.parametrize("flag", NEW_SPELLING)
def test_each_old_flag_names_its_new_spelling_in_one_line(flag: str) -> None:
    value, instead = NEW_SPELLING[flag]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        translated({flag: value})
    [line] = [str(each.message) for each in caught]
    assert f"Trainer({flag}={value!r}) is deprecated" in line
    assert instead in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("flag", "value", "line"),
    [
        (
            "progress_bar_refresh_rate", 0,
            "Trainer(progress_bar_refresh_rate=0) is deprecated. Write enable_progress_bar=False.",
        ),
        ("weights_summary", None, "Trainer(weights_summary=None) is deprecated. Write enable_model_summary=False."),
        ("gpus", 0, 'Trainer(gpus=0) is deprecated. Write accelerator="cpu".'),
        (
            "checkpoint_callback", ModelCheckpoint(),
            "Trainer(checkpoint_callback=ModelCheckpoint(...)) is deprecated. Write callbacks=[ModelCheckpoint(...)].",
        ),
    ],
    ids=["bar", "summary", "gpus", "checkpoint"],
)  # fmt: skip
def test_what_is_written_in_place_of_a_flag_depends_on_its_value(flag: str, value: Any, line: str) -> None:
    with pytest.warns(FutureWarning) as caught:
        translated({flag: value})
    assert [str(each.message) for each in caught] == [line]


def test_a_flag_with_its_default_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        translated(FLAGS)


@pytest.mark.parametrize(
    ("flags", "strategy", "devices"),
    [
        ({}, "SingleDevice", 1), ({"num_processes": 2}, "DDP", 2), ({"distributed_backend": "ddp"}, "DDP", 1),
        ({"accelerator": "ddp", "num_processes": 2}, "DDP", 2), ({"accelerator": "dp"}, "DataParallel", 1),
        ({"accelerator": "ddp2"}, "DDP2", 1), ({"accelerator": "ddp_cpu", "num_processes": 2}, "DDP", 2),
        ({"accelerator": "horovod"}, "Horovod", 1), ({"plugins": "ddp_sharded"}, "DDP", 1),
        ({"plugins": [pl.DDPPlugin()]}, "DDP", 1), ({"accelerator": "cpu"}, "SingleDevice", 1),
    ],
)  # fmt: skip
def test_flags_of_hardware_mean_what_they_meant(flags: dict[str, Any], strategy: str, devices: int) -> None:
    trainer = quiet(**flags)
    assert type(trainer.strategy).__name__ == f"Composed{strategy}Strategy"
    assert trainer.num_devices == devices


def test_several_processes_without_a_backend_are_spawned() -> None:
    assert quiet(num_processes=2).strategy.facts.start_method == "spawn"
    assert quiet(num_processes=2, accelerator="ddp").strategy.facts.start_method == "popen"


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ({}, "32-true"), ({"precision": 16}, "16-mixed"), ({"precision": 64}, "64-true"),
        ({"precision": 16, "amp_backend": "apex", "amp_level": "O1"}, "16-mixed"),
        ({"precision": 16, "amp_backend": "apex", "amp_level": "O3"}, "16-true"), ({"amp_level": "O3"}, "32-true"),
        ({"plugins": [pl.NativeMixedPrecisionPlugin("bf16")]}, "bf16-mixed"),
    ],
)  # fmt: skip
def test_flags_of_precision_mean_what_they_meant(flags: dict[str, Any], precision: str) -> None:
    assert quiet(**flags).precision_plugin.name == precision


def test_an_accelerator_object_with_the_flags_of_its_time() -> None:
    accelerator = pl.CPUAccelerator(pl.PrecisionPlugin(), pl.DDPPlugin())
    trainer = quiet(accelerator=accelerator, num_processes=2)
    assert trainer.accelerator is accelerator
    assert trainer.training_type_plugin is accelerator.training_type_plugin
    assert (trainer.distributed_backend, trainer.num_devices) == ("ddp", 2)


def test_flags_become_callbacks(tmp_path: Path) -> None:
    own = ModelCheckpoint(dirpath=tmp_path)
    trainer = quiet(
        checkpoint_callback=own, weights_summary="full", log_gpu_memory="all", accumulate_grad_batches={0: 2},
        progress_bar_refresh_rate=7,
    )  # fmt: skip
    kinds = {type(each): each for each in trainer.callbacks}
    assert kinds[ModelCheckpoint] is own
    assert kinds[ModelSummary].max_depth == -1
    assert {DeviceStatsMonitor, GradientAccumulationScheduler} <= kinds.keys()
    assert [each.refresh_rate for each in trainer.callbacks if isinstance(each, ProgressBar)] == [7]
    assert not any(isinstance(each, (ModelCheckpoint, ProgressBar, ModelSummary)) for each in quiet().callbacks)


def test_weights_save_path_is_where_checkpoints_go(tmp_path: Path) -> None:
    trainer = quiet(weights_save_path=str(tmp_path), checkpoint_callback=True)
    trainer.fit(Net(), loader())
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))


def test_resume_from_checkpoint_resumes_the_fit(tmp_path: Path) -> None:
    first = quiet()
    first.fit(Net(), loader())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet(resume_from_checkpoint=str(tmp_path / "a.ckpt"), max_epochs=3)
    second.fit(Net(), loader())
    assert (second.current_epoch, second.global_step) == (2, 6)


def test_terminate_on_nan_stops_the_run() -> None:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("nan")

    with pytest.raises(ValueError, match="loss of batch 0 is nan"):
        quiet(terminate_on_nan=True).fit(Bad(), loader())
    quiet().fit(Bad(), loader())


def test_track_grad_norm_logs_norms() -> None:
    trainer = quiet(track_grad_norm=2)
    trainer.fit(Net(), loader())
    assert any("grad" in name and "norm" in name for name in trainer.callback_metrics)


class Found(Net):
    """Reads its learning rate and its batch size from attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate, self.rate, self.batch_size = 0.5, 0.5, 1

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader().dataset, batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def test_tune_finds_what_the_flags_ask_for() -> None:
    module = Found()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = quiet(auto_lr_find=True, auto_scale_batch_size="binsearch")
    found = trainer.tune(module, lr_find_kwargs={"num_training": 20}, scale_batch_size_kwargs={"max_val": 3})
    assert module.batch_size == found["scale_batch_size"] == min(3, len(loader().dataset))
    assert module.learning_rate == found["lr_find"].suggestion() != 0.5
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    quiet(auto_lr_find="rate").tune(module, train_dataloader=loader(), lr_find_kwargs={"num_training": 20})
    assert module.rate != 0.5
    with pytest.warns(UserWarning, match="trainer.tune does nothing"):
        assert quiet().tune(module) == {}


def test_the_tuner_takes_the_arguments_of_that_time() -> None:
    module = Found()
    tuner = quiet().tuner
    sweep = tuner.lr_find(module, train_dataloader=loader(), num_training=20)
    assert (len(sweep.results["lr"]), module.learning_rate) == (20, 0.5)
    assert tuner.lr_find(module, loader(), None, None, 1e-4, 1, 20, update_attr=True).results["lr"][0] == 1e-4
    assert module.learning_rate != 0.5
    assert tuner.scale_batch_size(module, max_val=3) == module.batch_size == min(3, len(loader().dataset))


def test_the_flag_for_averages_of_weights() -> None:
    [averaging] = [each for each in quiet(stochastic_weight_avg=True).callbacks if hasattr(each, "swa_lrs")]
    trainer = quiet(callbacks=[averaging], max_epochs=5)
    trainer.fit(Net(), loader())
    assert averaging.swa_lrs == [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert averaging.n_averaged == 1


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'ddp'"):
        quiet(accelerator="dddp")
    with pytest.raises(ConfigurationError, match="2 training-type plugins"):
        quiet(plugins=[pl.DDPPlugin(), "ddp"])
    with pytest.raises(ConfigurationError, match="max_epoch"):
        quiet(max_epoch=3)


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_the_loaders_arguments_of_that_time() -> None:
    class Evaluated(Net):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.net(batch).mean())

        validation_step = test_step

    trainer = quiet()
    with pytest.warns(FutureWarning, match=r"trainer.fit\(model, train_dataloaders=...\)"):
        assert trainer.fit(Evaluated(), train_dataloader=loader(), val_dataloaders=loader()) == 1
    with pytest.warns(FutureWarning, match=r"trainer.test\(model, dataloaders=...\)"):
        [results] = trainer.test(test_dataloaders=loader(), verbose=False, ckpt_path=None)
    with pytest.warns(FutureWarning, match=r"trainer.validate\(model, dataloaders=...\)"):
        trainer.validate(Evaluated(), val_dataloaders=loader(), verbose=False, ckpt_path="best")
    assert list(results) == ["loss"]
    assert list(trainer.accelerator.results[0]) == ["loss"]


@pytest.mark.parametrize(("call", "then"), [("validate", "val_dataloaders"), ("test", "test_dataloaders")])
def test_an_evaluation_can_be_pickled_and_shows_its_arguments(call: str, then: str) -> None:
    method = pickle.loads(pickle.dumps(getattr(quiet(), call)))
    assert (method.__name__, then in inspect.signature(method).parameters) == (call, True)
    assert inspect.getdoc(method)


@pytest.mark.parametrize(("text", "number"), [("17", 17), ("", None), ("of the test", None)])
def test_the_job_of_slurm(monkeypatch: pytest.MonkeyPatch, text: str, number: int | None) -> None:
    trainer = quiet()
    monkeypatch.setenv("SLURM_JOB_ID", text)
    assert trainer.slurm_job_id == number


def test_options_of_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser = pl.Trainer.add_argparse_args(parser)
    arguments = parser.parse_args(
        ["--max_epochs", "3", "--gradient_clip_val", "0.5", "--limit_train_batches=2", "--fast_dev_run", "--gpus", "0"]
    )
    with pytest.warns(FutureWarning, match='accelerator="cpu"'):
        trainer = pl.Trainer.from_argparse_args(arguments, logger=False, limit_train_batches=1)
    assert trainer.settings.gradient_clip_val == 0.5
    assert trainer.settings.limit_train_batches == 1
    assert trainer.settings.fast_dev_run is True
    assert arguments.lr == 0.1


def test_options_of_a_data_module() -> None:
    class Data(pl.LightningDataModule):
        def __init__(self, batch_size: int = 32, root: str = "data", **kwargs: Any) -> None:
            super().__init__()
            self.batch_size, self.root = batch_size, root

    class Plain(pl.LightningDataModule):
        def __init__(self, batch_size: int = 32, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.batch_size = batch_size

    arguments = Plain.add_argparse_args(argparse.ArgumentParser()).parse_args([])
    assert Plain.from_argparse_args(arguments).batch_size == 32
    parser = Data.add_argparse_args(argparse.ArgumentParser())
    data = Data.from_argparse_args(parser.parse_args(["--batch_size", "4"]), root="there")
    assert (data.batch_size, data.root) == (4, "there")


def test_a_modern_trainer_and_a_legacy_one_share_nothing_global() -> None:
    quiet()
    with pytest.raises(UnknownArgumentError, match="gpus"):
        drivetrain.Trainer(gpus=1)  # type: ignore[call-arg]


def test_an_evaluation_without_its_step_does_nothing_and_says_so() -> None:
    class Misspelt(pl.LightningModule):
        def test_stepp(self, batch: Any, batch_idx: int) -> None:
            """Meant as test_step."""

    trainer = quiet()
    with pytest.warns(UserWarning, match="LightningModule has no test_step, so trainer.test does nothing"):
        assert trainer.test(pl.LightningModule(), loader()) == []
    with pytest.warns(UserWarning, match="LightningModule has no validation_step, so trainer.validate does nothing"):
        assert trainer.validate(pl.LightningModule(), loader()) == []
    with pytest.raises(ConfigurationError, match="Is it test_stepp"):
        trainer.test(Misspelt(), loader())


@pytest.mark.parametrize(
    ("gpus", "devices", "name"),
    [
        ("0", [0], "single_device"),
        ("3", [3], "single_device"),
        ("0,1", [0, 1], "ddp_spawn"),
        ("0, 1,", [0, 1], "ddp_spawn"),
        ("-1", -1, "ddp_spawn"),
        (2, 2, "ddp_spawn"),
        ([1], [1], "single_device"),
    ],
)
def test_gpus_in_a_text_are_indices(gpus: Any, devices: Any, name: str) -> None:
    with pytest.warns(FutureWarning, match=re.escape(f'Write accelerator="gpu", devices={devices}')):
        settings = translated({"gpus": gpus})
    assert settings["devices"] == devices
    assert settings["accelerator"].training_type_plugin.strategy_name == name


def test_hooks_of_callbacks_that_are_gone_are_called() -> None:
    called: list[str] = []

    class Hooked(pl.Callback):
        def on_init_start(self, trainer: Any) -> None:
            called.append("init start")

        def on_init_end(self, trainer: Any) -> None:
            called.append(f"init end {type(trainer).__name__}")

        def on_pretrain_routine_start(self, trainer: Any, pl_module: Any) -> None:
            called.append("routine start")

        def on_pretrain_routine_end(self, trainer: Any, pl_module: Any) -> None:
            called.append("routine end")

        def on_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            called.append(f"epoch start {type(pl_module).__name__}")

        def on_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            called.append("epoch end")

        def on_batch_start(self, trainer: Any, pl_module: Any) -> None:
            called.append("batch start")

        def on_batch_end(self, trainer: Any, pl_module: Any) -> None:
            called.append("batch end")

    quiet(callbacks=[Hooked()]).fit(Net(), loader())
    batches = ["batch start", "batch end"] * 2
    assert called == [
        "init start", "init end Trainer", "routine start", "routine end", "epoch start Net", *batches, "epoch end",
    ]  # fmt: skip


def test_ctrl_c_is_told_to_callbacks() -> None:
    called: list[Any] = []

    class Hooked(pl.Callback):
        def on_keyboard_interrupt(self, trainer: Any, pl_module: Any) -> None:
            called.append(pl_module)

    class Interrupted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    model = Interrupted()
    with pytest.raises(SystemExit):
        quiet(callbacks=[Hooked()]).fit(model, loader())
    assert called == [model]


def test_todays_trainer_says_that_such_a_hook_is_not_called() -> None:
    class Hooked(pl.Callback):
        def on_batch_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    trainer = drivetrain.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[Hooked()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="Hooked.on_batch_end is never called.*on_train_batch_end"):
        trainer.fit(Net(), loader())


# ---- data of an earlier fit ------------------------------------------------------------------------------------------


class Evaluated(Net):
    """Remembers what it was evaluated on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sizes = [*getattr(self, "sizes", []), len(batch)]

    test_step = validation_step


class Data(pl.LightningDataModule):
    """Batches of 8 rows, and of 2 for tests."""

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return DataLoader(list(torch.ones(8, 4)), batch_size=8)

    def test_dataloader(self) -> Any:
        return DataLoader(list(torch.ones(2, 4)), batch_size=2)


@pytest.mark.parametrize(("call", "sizes"), [("test", [2]), ("validate", [8])])
@pytest.mark.parametrize("passes_model", [False, True])
@pytest.mark.parametrize("name", ["datamodule", "train_dataloaders"])
def test_an_evaluation_without_data_takes_the_datamodule_of_the_fit(
    call: str, sizes: list[int], passes_model: bool, name: str
) -> None:
    model, trainer = Evaluated(), quiet(num_sanity_val_steps=0, limit_val_batches=1)
    trainer.fit(model, **{name: Data()})
    model.sizes = []
    with pytest.warns(FutureWarning, match=rf"trainer\.{call} without data .*datamodule=datamodule"):
        getattr(trainer, call)(*([model] if passes_model else []))
    assert model.sizes == sizes


def test_a_validation_without_data_takes_the_loaders_of_the_fit() -> None:
    model, trainer = Evaluated(), quiet(num_sanity_val_steps=0)
    trainer.fit(model, loader(), DataLoader(list(torch.ones(3, 4)), batch_size=3))
    model.sizes = []
    with pytest.warns(FutureWarning, match=r"trainer\.validate without data"):
        trainer.validate()
    assert model.sizes == [3]


def test_data_of_a_fit_are_not_taken_for_another_model() -> None:
    trainer = quiet(num_sanity_val_steps=0)
    trainer.fit(Evaluated(), datamodule=Data())
    with pytest.raises(ConfigurationError, match=r"trainer\.test has no loader"):
        trainer.test(Evaluated())


@pytest.mark.parametrize(
    ("given", "answer"), [({}, 32), ({"precision": 16}, 16), ({"precision": 64}, 64), ({"precision": "bf16"}, "bf16")]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_precision_is_answered_as_it_was_written(given: dict[str, Any], answer: Any) -> None:
    trainer = quiet(**given)
    assert trainer.precision == answer
    trainer.fit(Net(), loader())
    assert trainer.precision == answer


@pytest.mark.parametrize("generation", [pl, v1_1])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_steps": None, "max_epochs": 1000, "min_epochs": 1, "min_steps": None}),
        ({"max_steps": 5}, {"max_steps": 5}),
        ({"max_epochs": 2, "min_epochs": 0}, {"max_steps": None, "max_epochs": 2, "min_epochs": 0}),
    ],
)
def test_limits_are_answered_as_a_trainer_of_that_time_did(
    generation: Any, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    trainer = generation.Trainer(logger=False, enable_checkpointing=False, **given)
    assert {name: getattr(trainer, name) for name in expected} == expected
    for name in ("max_steps", "max_epochs"):
        setattr(trainer, name, None)
        assert getattr(trainer, name) is None
        setattr(trainer, name, 3)
        assert getattr(trainer, name) == 3
    trainer.min_epochs = 2
    assert trainer.min_epochs == 2


def test_only_steps_were_limited_if_only_steps_were_given() -> None:
    assert quiet(max_epochs=None, max_steps=5).max_epochs is None
    assert v1_1.Trainer(max_steps=5, logger=False, enable_checkpointing=False).max_epochs == 1000
