"""Command lines and configuration files as programs written for Lightning have them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningDataModule, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.cli import LightningCLI, SaveConfigCallback
from drivetrain.compat import fabric_loggers, fabric_strategies
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.strategies import DDPStrategy


class Core(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(2, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(Core):
    def __init__(self, width: int = 2, rate: float = 0.1) -> None:
        super().__init__(width)
        self.save_hyperparameters()


class Bare(Net):
    """A model that leaves its optimizer to the command line."""

    configure_optimizers = LightningModule.configure_optimizers


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


class Open(Net):
    """A model, and below a callback, that take any keyword."""

    def __init__(self, width: int = 2, **kwargs: Any) -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.others = kwargs


class OpenCallback(Callback):
    def __init__(self, first: int = 0, **kwargs: Any) -> None:
        self.others = kwargs


def test_further_keywords_of_a_class_with_kwargs_are_dict_kwargs(cli: Make) -> None:
    callback = {"class_path": f"{__name__}.OpenCallback", "init_args": {"first": 1}, "dict_kwargs": {"other": 2}}
    described = {"class_path": f"{__name__}.Open", "init_args": {"width": 3}, "dict_kwargs": {"depth": 4}}
    made = cli(
        {"model": described, "trainer": {"callbacks": [callback]}}, "--model.dict_kwargs.height=5", model=Net,
        subclass_mode_model=True,
    )  # fmt: skip
    assert made.model.others == {"depth": 4, "height": 5}
    assert {name: made.model.hparams[name] for name in ("width", "depth", "height")} == dict(width=3, depth=4, height=5)
    [others] = [each.others for each in made.trainer.callbacks if isinstance(each, OpenCallback)]
    assert others == {"other": 2}


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
        },
        model=Bare,
    )  # fmt: skip
    trainer: Trainer = made.trainer
    assert (trainer.max_epochs, trainer.precision, made.model.width, made.datamodule.batch_size) == (
        3, "bf16-mixed", 5, 4,
    )  # fmt: skip
    assert [each.save_top_k for each in trainer.callbacks if isinstance(each, ModelCheckpoint)] == [2]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger"]
    assert type(made.model.configure_optimizers()["optimizer"]) is torch.optim.AdamW


def test_fabrics_loggers_take_no_bare_name_from_the_trainers(cli: Make) -> None:
    assert fabric_loggers.FabricCSVLogger.__name__ != "CSVLogger"
    described = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    assert type(cli({"trainer": {"logger": described}}).trainer.logger) is CSVLogger


def test_fabrics_strategies_take_no_bare_name_from_the_trainers(cli: Make) -> None:
    assert issubclass(fabric_strategies.FabricDDPStrategy, DDPStrategy)
    described = {"class_path": "DDPStrategy", "init_args": {"find_unused_parameters": True}}
    assert type(cli({"trainer": {"strategy": described, "accelerator": "cpu"}}).trainer.strategy) is DDPStrategy


class Untyped(Net):
    def __init__(self, first, second=3) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.got = (first, second)


def test_an_argument_without_type_and_default_may_be_left_out(cli: Make) -> None:
    assert cli(model=Untyped).model.got == (None, 3)
    assert cli({"model": {"first": 5}}, "--model.second=x", model=Untyped).model.got == (5, "x")
    by_path = {"model": {"class_path": f"{__name__}.Untyped"}}
    assert cli(by_path, subclass_mode_model=True).model.got == (None, 3)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size = size


class Wide(Encoder):
    """Another encoder."""


class Nested(Core):
    def __init__(
        self, encoder: Encoder, activation: Callable[[Any], Any] = torch.relu, path: Path = Path("a"), width: int = 2
    ) -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.encoder, self.activation, self.path = encoder, activation, path


def saved_by(cli: Make, tmp_path: Path, config: dict[str, Any], **arguments: Any) -> Path:
    """The checkpoint of a fit."""
    made = cli(config, subcommand="fit", **arguments)
    path = tmp_path / "saved.ckpt"
    made.trainer.save_checkpoint(path)
    return path


NESTED = {"encoder": {"class_path": f"{__name__}.Wide", "init_args": {"size": 7}}, "path": "b/c", "width": 3}


def check_nested(loaded: Any, width: int = 3) -> None:
    assert type(loaded) is Nested
    assert type(loaded.encoder) is Wide
    assert (loaded.encoder.size, loaded.path, loaded.activation, loaded.width) == (7, Path("b/c"), torch.relu, width)


def test_logged_hyperparameters_with_their_instantiator_rebuild_nested_classes(cli: Make, tmp_path: Path) -> None:
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    path = saved_by(cli, tmp_path, {"model": NESTED, "trainer": {"logger": logger}}, model=Nested)
    [hparams] = tmp_path.glob("logs/*/*/hparams.yaml")
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["hyper_parameters"]
    torch.save(checkpoint, path)
    check_nested(Nested.load_from_checkpoint(path, hparams_file=hparams))


def test_hyperparameters_saved_under_the_cli_rebuild_nested_classes(cli: Make, tmp_path: Path) -> None:
    path = saved_by(cli, tmp_path, {"model": NESTED}, model=Nested)
    saved = torch.load(path, weights_only=True)["hyper_parameters"]
    assert saved["encoder"] == NESTED["encoder"]
    assert saved["_instantiator"] == "lightning.pytorch.cli.instantiate_module"
    assert "_class_path" not in saved
    check_nested(Nested.load_from_checkpoint(path))
    again = Nested.load_from_checkpoint(path)
    assert dict(again.hparams) == saved  # which the next checkpoint of it holds
    with pytest.warns(UserWarning, match="'encoder' is an nn.Module"):
        given = Nested.load_from_checkpoint(path, encoder=Encoder(9))
    assert (type(given.encoder), given.encoder.size, given.path) == (Encoder, 9, Path("b/c"))


def test_a_class_that_the_command_line_named_is_rebuilt_by_its_base(cli: Make, tmp_path: Path) -> None:
    config = {"model": {"class_path": f"{__name__}.Nested", "init_args": NESTED}}
    path = saved_by(cli, tmp_path, config, model=None)
    assert torch.load(path, weights_only=True)["hyper_parameters"]["_class_path"] == f"{__name__}.Nested"
    check_nested(LightningModule.load_from_checkpoint(path))


def test_hyperparameters_are_as_ever_without_load_from_checkpoint_support(cli: Make) -> None:
    made = cli({"model": {"width": 4}}, load_from_checkpoint_support=False)
    assert dict(made.model.hparams) == {"width": 4, "rate": 0.1}


def altered(path: Path, **hyperparameters: Any) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"].update(hyperparameters)
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"_instantiator": "os.system"}, "a checkpoint may not choose that"),
        ({"_class_path": "this.Zen"}, "the program has imported no subclass of Nested"),
        ({"_class_path": "subprocess.Popen"}, "the program has imported no subclass of Nested"),
        ({"encoder": {"class_path": "subprocess.Popen", "init_args": {"args": "true"}}}, "no class of this name"),
        ({"encoder": {"class_path": "antigravity.Encoder"}}, "no class of this name"),
        ({"encoder": {"class_path": f"{__name__}.Wide", "init_args": {"size": {"class_path": "os.wait"}}}}, "no class"),
        ({"encoder": "this.Encoder"}, "do not fit Nested"),
        ({"activation": "os.system"}, "a checkpoint may not name"),
        ({"activation": "this.s"}, "do not fit Nested"),
    ],
)
def test_a_file_names_only_classes_that_the_program_has_imported(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = torch_file(tmp_path, {**NESTED, "_instantiator": "lightning.pytorch.cli.instantiate_module", **changed})
    with pytest.raises(CheckpointError, match=message):
        Nested.load_from_checkpoint(path)
    assert not {"this", "antigravity"} & {*sys.modules}


def torch_file(tmp_path: Path, hyperparameters: dict[str, Any]) -> Path:
    path = tmp_path / "made.ckpt"
    torch.save({"state_dict": Core(3).state_dict(), "hyper_parameters": hyperparameters}, path)
    return path


def test_a_file_of_lightning_rebuilds_nested_classes(tmp_path: Path) -> None:
    for name in ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module"):
        check_nested(Nested.load_from_checkpoint(torch_file(tmp_path, {**NESTED, "_instantiator": name})))


def test_ckpt_path_takes_the_models_hyperparameters_out_of_the_checkpoint(
    cli: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = saved_by(cli, tmp_path, {"model": {"width": 5}})
    made = cli({}, f"--ckpt_path={path}", subcommand="validate")
    assert made.model.width == 5
    assert f"configured as in {path}; taken from there: width" in caplog.text
    caplog.clear()
    assert cli({"model": {"width": 5}}, f"--ckpt_path={path}", subcommand="validate").model.width == 5
    assert "taken from there" not in caplog.text


def test_a_ckpt_path_without_hyperparameters_changes_nothing(cli: Make, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.ckpt").write_bytes(b"of a store of the user's")

    class Parsed(LightningCLI):
        def instantiate_classes(self) -> None:
            self.trainer = self.model = self.datamodule = None  # type: ignore[assignment]
            self.subcommand = None

    for path in ("folder", "other.ckpt", "best", "missing.ckpt"):
        made = cli({"model": {"width": 5}}, f"--ckpt_path={path}", subcommand="validate", cls=Parsed)
        assert made.config["validate"]["model"]["width"] == 5


def test_ckpt_path_takes_the_class_out_of_the_checkpoint_where_any_may_be_named(cli: Make, tmp_path: Path) -> None:
    config = {"model": {"class_path": f"{__name__}.Nested", "init_args": NESTED}}
    path = saved_by(cli, tmp_path, config, model=None)
    made = cli({"model": {"class_path": f"{__name__}.Net"}}, f"--ckpt_path={path}", subcommand="validate", model=None)
    check_nested(made.model)
    altered(path, _class_path="subprocess.Popen")
    with pytest.raises(CheckpointError, match="no class of this name"):
        cli({"model": {"class_path": f"{__name__}.Net"}}, f"--ckpt_path={path}", subcommand="validate", model=None)


def test_of_the_command_lines_own_keys_loggers_get_only_instantiator(cli: Make, tmp_path: Path) -> None:
    config = {"trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}}}
    cli(config, subcommand="fit")
    [written] = tmp_path.rglob("hparams.yaml")
    own = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}
    assert yaml.safe_load(written.read_text()) == {"width": 2, "rate": 0.1, **own}


def test_save_to_log_dir_false_without_an_override_is_an_error(cli: Make, tmp_path: Path) -> None:
    kwargs = {"save_to_log_dir": False}
    with pytest.raises(ConfigurationError, match="would save the configuration nowhere"):
        cli(save_config_callback=SaveConfigCallback, save_config_kwargs=kwargs)
    seen: list[str] = []

    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append(stage)

    cli(save_config_callback=Elsewhere, save_config_kwargs=kwargs, subcommand="fit")
    assert seen == ["fit"]
    assert [path.name for path in tmp_path.rglob("*.yaml")] == ["config.yaml"]  # which this test has written


def test_a_subclass_of_the_cli_overrides_how_parsers_are_made(cli: Make) -> None:
    class Own(LightningCLI):
        def add_default_arguments_to_parser(self, parser: Any) -> None:
            super().add_default_arguments_to_parser(parser)
            parser.add_argument("--tag", default="none")

        def add_core_arguments_to_parser(self, parser: Any) -> None:
            super().add_core_arguments_to_parser(parser)
            parser.set_defaults({"model.width": 9})

        def init_parser(self, **kwargs: Any) -> Any:
            parser = super().init_parser(**kwargs)
            calls.append("init_parser")
            return parser

        def setup_parser(self, *args: Any, **kwargs: Any) -> None:
            super().setup_parser(*args, **kwargs)
            calls.append("setup_parser")

        @staticmethod
        def link_optimizers_and_lr_schedulers(parser: Any) -> None:
            calls.append("link")

        def parse_arguments(self, parser: Any, args: Any) -> None:
            super().parse_arguments(parser, [*args, "--tag=mine"])
            calls.append("parse")

    calls: list[str] = []
    made = cli(cls=Own)
    assert calls == ["init_parser", "link", "setup_parser", "parse"]
    assert (made.config["tag"], made.model.width) == ("mine", 9)
    assert (made._get(made.config, "tag"), made._get(made.config_init, "none", 3)) == ("mine", 3)
    assert made._parser(None) is made.parser
