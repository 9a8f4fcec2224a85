"""Command lines and configuration files as programs written for Lightning have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningDataModule, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.cli import LightningCLI
from drivetrain.strategies import DDPStrategy


class Net(LightningModule):
    def __init__(self, width: int = 2, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.layer = nn.Linear(2, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 2), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


Make = Callable[..., Any]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a quiet LightningCLI from a configuration, which it writes to a file, and words behind it."""
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything exports them
        monkeypatch.setenv(name, "0")

    def make(
        config: dict[str, Any] | None = None,
        *words: str,
        model: Any = Net,
        data: Any = Data,
        cls: type[LightningCLI] = LightningCLI,
        subcommand: str | None = None,
        **arguments: Any,
    ) -> Any:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config or {}))
        defaults = {
            "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        }  # fmt: skip
        args = [*([subcommand] if subcommand else []), "--config", "config.yaml", *words]
        return cls(
            model, data, args=args, run=subcommand is not None, trainer_defaults=defaults,
            parser_kwargs={"exit_on_error": False},
            **{"save_config_callback": None, **arguments},
        )  # fmt: skip

    return make


# ---- configuration files ---------------------------------------------------------------------------------------------


class OwnDDP(DDPStrategy):
    def __init__(self, extra: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = extra


@pytest.mark.parametrize(
    "described",
    [
        {"class_path": "DDPStrategy", "init_args": {"find_unused_parameters": True}},
        {"class_path": "drivetrain.strategies.DDPStrategy", "init_args": {"find_unused_parameters": True}},
        {"class_path": "DDPStrategy", "dict_kwargs": {"find_unused_parameters": True}},
        {"class_path": f"{__name__}.OwnDDP", "init_args": {"find_unused_parameters": True, "extra": 3}},
    ],
)
def test_a_configuration_file_names_arguments_that_travel_through_kwargs(cli: Make, described: Any) -> None:
    strategy = cli({"trainer": {"strategy": described}}).trainer.strategy
    assert strategy.ddp_arguments == {"find_unused_parameters": True}
    assert getattr(strategy, "extra", 3) == 3


def test_a_misspelt_argument_that_would_travel_through_kwargs_is_answered(cli: Make) -> None:
    with pytest.raises(Exception, match="Did you mean find_unused_parameters"):
        cli({"trainer": {"strategy": {"class_path": "DDPStrategy", "init_args": {"find_unused_parameter": True}}}})


@pytest.mark.parametrize(
    ("option", "class_path", "init_args"),
    [
        ("strategy", "FSDPStrategy", {"use_orig_params": True, "sharding_strategy": "SHARD_GRAD_OP"}),
        ("logger", "WandbLogger", {"project": "p", "entity": "e", "tags": ["a"], "group": "g"}),
        ("logger", "TensorBoardLogger", {"save_dir": "logs", "flush_secs": 3}),
        ("profiler", "PyTorchProfiler", {"filename": "p", "profile_memory": True, "with_stack": True}),
    ],
)
def test_further_classes_have_names_for_what_travels_through_kwargs(
    cli: Make, option: str, class_path: str, init_args: dict[str, Any]
) -> None:
    folder = {"strategy": "strategies", "logger": "loggers", "profiler": "profilers"}[option]
    described = {"class_path": f"drivetrain.{folder}.{class_path}", "init_args": init_args}
    seen: list[Any] = []

    class Parsed(LightningCLI):
        def instantiate_classes(self) -> None:  # not every package is there to make one
            seen.append(self.config["trainer"][option])

    cli({"trainer": {option: described}}, cls=Parsed)
    assert {**seen[0]["init_args"].as_dict(), **init_args} == seen[0]["init_args"].as_dict()


def test_a_typical_file_describes_a_whole_run(cli: Make) -> None:
    made = cli(
        {
            "seed_everything": 42,
            "trainer": {
                "max_epochs": 3, "precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1,
                "check_val_every_n_epoch": None, "val_check_interval": 5, "max_time": {"hours": 1}, "max_steps": -1,
                "callbacks": [
                    {
                        "class_path": "drivetrain.callbacks.ModelCheckpoint",
                        "init_args": {"monitor": "x", "save_top_k": 2, "every_n_train_steps": 5},
                    },
                    {"class_path": "EarlyStopping", "init_args": {"monitor": "x", "patience": 3}},
                    {"class_path": "drivetrain.callbacks.LearningRateMonitor"},
                ],
                "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}],
                "enable_checkpointing": True,
            },
            "model": {"width": 5},
            "data": {"batch_size": 4},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01, "betas": [0.9, 0.95]}},
            "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 10}},
        }
    )  # fmt: skip
    trainer: Trainer = made.trainer
    assert (trainer.max_epochs, trainer.precision, made.model.width, made.datamodule.batch_size) == (
        3, "bf16-mixed", 5, 4,
    )  # fmt: skip
    assert [each.save_top_k for each in trainer.callbacks if isinstance(each, ModelCheckpoint)] == [2]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger"]
    assert type(made.model.configure_optimizers()["optimizer"]) is torch.optim.AdamW


class Untyped(Net):
    def __init__(self, first, second=3) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.got = (first, second)


def test_an_argument_without_type_and_default_may_be_left_out(cli: Make) -> None:
    assert cli(model=Untyped).model.got == (None, 3)
    assert cli({"model": {"first": 5}}, "--model.second=x", model=Untyped).model.got == (5, "x")
    by_path = {"model": {"class_path": f"{__name__}.Untyped"}}
    assert cli(by_path, subclass_mode_model=True).model.got == (None, 3)
