from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentError

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import EarlyStopping, Timer
from drivetrain.cli import LightningArgumentParser, LightningCLI
from drivetrain.errors import ConfigurationError, UnknownArgumentError
from drivetrain.loggers import CSVLogger

Make = Callable[..., Any]
PROGRAM = Path(__file__).parent / "cli_program.py"
HEAVY = ("rich", "tensorboard", "torchmetrics", "sklearn", "matplotlib", "psutil")


@pytest.fixture
def run(programs: Any, tmp_path: Path) -> Callable[..., str]:
    """What a program prints for which a warning is an error; with ``fresh``, in an interpreter of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}

    def run(*command: str | Path, code: int = 0, fresh: bool = False) -> str:
        done: subprocess.CompletedProcess[str]
        if fresh:
            done = subprocess.run(
                [sys.executable, "-W", "error", *map(str, command)], cwd=tmp_path, env=environ,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        else:
            done = programs.run("-W", "error", *command, cwd=tmp_path, env=environ, merged=True)
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


# ---- programs --------------------------------------------------------------------------------------------------------


def test_a_program_trains_and_its_configuration_repeats_the_run_exactly(run: Any, tmp_path: Path) -> None:
    quiet = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false")
    stopping = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss")  # nobody imports it
    run(PROGRAM, "fit", *quiet, *stopping, "--trainer.max_epochs=2", "--model.width=5", "--seed_everything=7")
    versions = tmp_path / "lightning_logs"
    config = yaml.safe_load((versions / "version_0" / "config.yaml").read_text(encoding="utf-8"))
    assert config["trainer"]["max_epochs"] == 2
    assert config["trainer"]["callbacks"][0]["class_path"] == "drivetrain.callbacks.EarlyStopping"
    assert config["model"] == {"width": 5, "lr": 0.05}
    assert config["seed_everything"] == 7

    run(PROGRAM, "fit", "--config", versions / "version_0" / "config.yaml")
    run(PROGRAM, "fit", "-c", versions / "version_0" / "config.yaml", "--seed_everything=8")
    first, again, other = (
        torch.load(next((versions / f"version_{n}" / "checkpoints").glob("*.ckpt")), weights_only=True)["state_dict"]
        for n in range(3)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)  # the seed is what makes them equal

    [best] = (versions / "version_0" / "checkpoints").glob("*.ckpt")
    shown = run(PROGRAM, "test", *quiet, "--model.width=5", "--ckpt_path", best)
    assert "test_loss" in shown


def test_help_of_a_program_is_made_without_optional_packages(run: Any, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\nfrom cli_program import Data, LightningCLI, Net\n"
        "try:\n    LightningCLI(Net, Data)\nfinally:\n"
        f"    print('imported:', *sorted(set({HEAVY!r}) & set(sys.modules)), '.')\n",
        encoding="utf-8",
    )
    (tmp_path / "cli_program.py").write_text(PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
    whole = run(program, "--help", fresh=True)
    for name in ("fit", "validate", "test", "predict"):
        assert f"    {name} " in whole
    shown = run(program, "fit", "--help", fresh=True)
    assert "units of the hidden layer. (type: int, default: 8)" in " ".join(shown.split())
    assert "imported: ." in whole
    assert "imported: ." in shown


XPU = """
import torch
from cli_program import Data, LightningCLI, Net
from drivetrain.accelerators import Accelerator


class xpulib:  # the vendor's library: its device is the host
    available_devices = staticmethod(lambda: 2)
    is_available = staticmethod(lambda: True)
    device = staticmethod(lambda index: torch.device("cpu"))


class XPUAccelerator(Accelerator):
    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [xpulib.device(index) for index in devices]

    @staticmethod
    def auto_device_count():
        return xpulib.available_devices()

    @staticmethod
    def is_available():
        return xpulib.is_available()

    def get_device_stats(self, device):
        return {}

    @classmethod
    def register_accelerators(cls, accelerator_registry):
        accelerator_registry.register("xpu", cls, description="XPU Accelerator")


if __name__ == "__main__":
    cli = LightningCLI(Net, Data, trainer_defaults={"max_epochs": 1, "enable_progress_bar": False})
    print(f"trained on {type(cli.trainer.accelerator).__name__}, {cli.trainer.global_step} steps")
"""


@pytest.mark.parametrize(("devices", "steps"), [(1, 4), (2, 2)])
def test_e0_2_an_accelerator_that_the_program_defines_is_named_from_the_shell(
    run: Any, tmp_path: Path, devices: int, steps: int
) -> None:
    (tmp_path / "train.py").write_text(XPU, encoding="utf-8")
    (tmp_path / "cli_program.py").write_text(PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
    shown = run("train.py", "fit", "--trainer.accelerator=xpu", f"--trainer.devices={devices}")
    assert shown.count(f"trained on XPUAccelerator, {steps} steps") == devices
    if devices == 1:
        assert "there is no such accelerator" in run("train.py", "fit", "--trainer.accelerator=ypu", code=1)


def test_without_jsonargparse_the_import_says_what_to_install(run: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nimport drivetrain.cli\nassert 'torch' not in sys.modules\n"
        "sys.modules['jsonargparse'] = None\nfrom drivetrain.cli import LightningCLI\n",
        encoding="utf-8",
    )
    shown = run("train.py", code=1, fresh=True)
    assert "ModuleNotFoundError: The command line of a program needs the package jsonargparse" in shown
    assert shown.rstrip().endswith('Run `pip install "jsonargparse[signatures]"`.')


# ---- subcommands -----------------------------------------------------------------------------------------------------


class Told(LightningCLI):
    """Writes down what happens around a subcommand."""

    def before_instantiate_classes(self) -> None:
        self.calls = ["parsed"]
        assert not hasattr(self, "model")

    def after_instantiate_classes(self) -> None:
        self.calls.append(f"made {type(self.trainer).__name__}")


def _teller(name: str) -> Callable[[Any], None]:
    def tell(self: Any) -> None:
        self.calls.append(f"{name} {self.trainer.progress.status}")

    return tell


for _moment in ("before", "after"):
    for _name in ("fit", "validate", "test", "predict"):
        setattr(Told, f"{_moment}_{_name}", _teller(f"{_moment}_{_name}"))


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_each_subcommand_runs_the_trainers_method_between_its_two_hooks(cli: Make, name: str) -> None:
    made = cli(name, "--model.width=3", "--data.batch_size=16", cls=Told)
    assert [call.split()[0] for call in made.calls] == ["parsed", "made", f"before_{name}", f"after_{name}"]
    assert "finished" in made.calls[-1].lower()
    assert "finished" not in made.calls[-2].lower()
    assert made.subcommand == name
    assert made.trainer.progress.fn.value == name
    assert made.model.width == 3
    assert made.trainer.datamodule is made.datamodule
    assert made.datamodule.batch_size == 16


def test_without_run_the_objects_are_made_and_nothing_runs(cli: Make) -> None:
    made = cli("--trainer.max_epochs=3", run=False)
    assert made.subcommand is None
    assert made.trainer.max_epochs == 3
    assert made.trainer.lightning_module is None
    made.trainer.fit(made.model, datamodule=made.datamodule)
    assert made.trainer.current_epoch == 3


def test_a_subcommand_may_be_replaced_and_added(cli: Make) -> None:
    class Tuned(Trainer):
        def __init__(self, patience: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.patience = patience

        def tune(self, model: LightningModule, datamodule: Any = None, rounds: int = 3) -> None:
            """Search."""
            self.tuned = (model, datamodule, rounds)

    class Own(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {**LightningCLI.subcommands(), "tune": {"model", "datamodule"}}

        def fit(self, model: LightningModule, **kwargs: Any) -> None:
            self.instead = (model, sorted(kwargs))

    made = cli("tune", "--rounds=9", "--trainer.patience=4", "--trainer.devices=1", cls=Own, trainer_class=Tuned)
    assert made.trainer.tuned == (made.model, made.datamodule, 9)
    assert made.trainer.patience == 4
    made = cli("fit", cls=Own, trainer_class=Tuned)
    assert made.instead == (made.model, ["ckpt_path", "datamodule", "weights_only"])
    assert made.trainer.lightning_module is None
    with pytest.raises(ConfigurationError, match="names 'tune', and Trainer has no such method"):
        cli("fit", cls=Own)


def test_a_run_is_taken_up_from_ckpt_path(cli: Make, tmp_path: Path) -> None:
    cli("fit").trainer.save_checkpoint(tmp_path / "one.ckpt")
    made = cli("fit", "--ckpt_path=one.ckpt", "--trainer.max_epochs=3")
    assert made.trainer.global_step == 12
    assert cli("fit", "--trainer.max_epochs=2").trainer.global_step == 8  # the four are not of this process


@pytest.mark.parametrize("stopped", [True, False])
def test_a_command_is_continued_by_an_option_and_a_program_by_a_call(
    cli: Make, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    class Interrupts(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    caplog.set_level("INFO", "drivetrain")
    shown = ["fit", "--trainer.enable_progress_bar=true", "--trainer.enable_checkpointing=true"]
    if stopped:
        with pytest.raises(SystemExit):
            cli(*shown, trainer_defaults={"callbacks": Interrupts()})
    else:
        cli(*shown)
    how = "To continue: " if stopped else "To train on, raise max_epochs: "
    assert f"{how}the same command with --ckpt_path=last" in caplog.text
    assert "trainer.fit(" not in caplog.text


# ---- what is given to the Trainer ------------------------------------------------------------------------------------


class Seen(Callback):
    """A callback of the program."""


def test_callbacks_of_the_program_stand_beside_those_of_the_command_line(cli: Make) -> None:
    class Stopping(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_lightning_class_args(EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "val_loss"})

    own = Seen()
    words = ("--trainer.callbacks+=Timer", "--trainer.callbacks.interval=epoch", "--stopping.patience=5")
    made = cli(*words, cls=Stopping, run=False, trainer_defaults={"callbacks": own})
    assert own in made.trainer.callbacks
    [timer] = [callback for callback in made.trainer.callbacks if isinstance(callback, Timer)]
    [stopping] = made.trainer.early_stopping_callbacks
    assert (stopping.monitor, stopping.patience) == ("val_loss", 5)
    assert timer.interval == "epoch"


def test_trainer_defaults_are_replaced_by_the_command_line(cli: Make, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    defaults = {"max_epochs": 5, "limit_train_batches": 2, "logger": logger}
    made = cli("--trainer.limit_train_batches=3", run=False, trainer_defaults=defaults)
    assert (made.trainer.max_epochs, made.trainer.limit_train_batches) == (5, 3)
    assert made.trainer.logger is logger
    assert cli("--trainer.logger=false", run=False, trainer_defaults=defaults).trainer.logger is None
    described = {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}}
    assert isinstance(cli(run=False, trainer_defaults=described).trainer.logger, CSVLogger)


def test_an_unknown_trainer_default_is_refused(cli: Make) -> None:
    for value in (3, Seen()):
        with pytest.raises(ConfigurationError, match="the Trainer has no such argument. Did you mean 'max_epochs'?"):
            cli(run=False, trainer_defaults={"max_epoch": value})


def test_t55_the_environment_gives_defaults_that_the_configuration_records(
    cli: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "9")
    made = cli(run=False)
    assert made.trainer.limit_train_batches == 2
    assert made.config.trainer.limit_train_batches == 2
    assert made.trainer.max_epochs == 1  # what the program says wins
    assert cli("--trainer.limit_train_batches=3", run=False).trainer.limit_train_batches == 3


def test_default_env_reads_every_option_from_the_environment(cli: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_EPOCHS", "2")
    monkeypatch.setenv("PL_FIT__MODEL__WIDTH", "3")
    assert cli("fit").trainer.max_epochs == 1  # it must be asked for
    made = cli("fit", parser_kwargs={"default_env": True})
    assert (made.trainer.max_epochs, made.model.width) == (2, 3)


def test_a_trainer_made_by_a_function_has_the_functions_arguments(cli: Make, program: Any) -> None:
    def make(epochs: int = 2) -> Trainer:
        return Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)

    def net(units: int = 3) -> LightningModule:
        return program.Net(units)  # type: ignore[no-any-return]

    made = LightningCLI(
        net, program.Data, None, trainer_class=make, run=False, args=["--trainer.epochs=4", "--model.units=6"]
    )
    assert made.trainer.max_epochs == 4
    assert made.model.width == 6  # type: ignore[comparison-overlap]


def test_callbacks_that_the_trainer_cannot_take_are_said(program: Any) -> None:
    def make_without(epochs: int = 2) -> Trainer:
        return Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)

    with pytest.warns(UserWarning, match="make_without takes no callbacks, so these are left out: SaveConfigCallback"):
        LightningCLI(program.Net, program.Data, trainer_class=make_without, run=False, args=[])


# ---- model and data --------------------------------------------------------------------------------------------------


def test_any_model_and_data_are_named_where_the_program_fixes_none(cli: Make, program: Any) -> None:
    words = ("--model=CliDeep", "--model.depth=2", "--model.width=3", "--data=cli_program.Data", "--data.batch_size=4")
    made = cli("fit", *words, model_class=None, datamodule_class=None)
    assert type(made.model) is program.CliDeep
    assert (made.model.depth, made.model.width, made.datamodule.batch_size) == (2, 3, 4)


def test_subclass_mode_takes_subclasses_of_the_given_class_only(cli: Make, program: Any) -> None:
    made = cli("--model=CliDeep", "--model.depth=2", run=False, model_class=program.Net, subclass_mode_model=True)
    assert type(made.model) is program.CliDeep
    with pytest.raises(ArgumentError, match="does not correspond to a subclass of Bare"):
        cli("--model=cli_program.Net", run=False, model_class=program.Bare, subclass_mode_model=True)


def test_a_model_is_required_and_data_are_not(cli: Make, program: Any) -> None:
    name = f"{program.Net.__module__}.{program.Net.__qualname__}"  # other tests have classes called Net
    made = cli(f"--model={name}", run=False, model_class=None, datamodule_class=None)
    assert made.datamodule is None
    with pytest.raises(ArgumentError, match="model"):
        cli(run=False, model_class=None, datamodule_class=None)


def test_options_are_linked_when_parsed_and_when_made(cli: Make) -> None:
    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.width")
            parser.link_arguments(
                "data", "model.lr", compute_fn=lambda data: 1 / data.batch_size, apply_on="instantiate"
            )

    made = cli("fit", "--data.batch_size=4", cls=Linked)
    assert (made.model.width, made.model.lr) == (4, 0.25)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_an_optimizer_and_a_scheduler_of_the_command_line_train_the_model(cli: Make, program: Any) -> None:
    words = ("--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")
    made = cli("fit", *words, model_class=program.Bare)
    [optimizer], [scheduler] = made.trainer.optimizers, made.trainer.lr_scheduler_configs
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)  # the scheduler has stepped once
    assert type(scheduler.scheduler) is torch.optim.lr_scheduler.StepLR
    assert {*optimizer.param_groups[0]["params"]} == {*made.model.parameters()}


def test_reduce_lr_on_plateau_is_told_what_to_watch(cli: Make, program: Any) -> None:
    words = ("--optimizer=SGD", "--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss")
    made = cli("fit", *words, "--lr_scheduler.factor=0.5", model_class=program.Bare)
    [config] = made.trainer.lr_scheduler_configs
    assert (config.monitor, config.reduce_on_plateau, config.scheduler.factor) == ("val_loss", True, 0.5)


def test_the_models_own_optimizer_is_kept_unless_another_is_named(cli: Make) -> None:
    assert cli("fit", "--model.lr=0.25").trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    with pytest.warns(UserWarning, match="Net defines configure_optimizers, which is not called then"):
        made = cli("fit", "--optimizer=Adam")
    assert type(made.trainer.optimizers[0]) is torch.optim.Adam


def test_a_scheduler_without_an_optimizer_is_refused(cli: Make, program: Any) -> None:
    with pytest.raises(ConfigurationError, match="Write --optimizer=SGD, or leave --lr_scheduler out"):
        cli("fit", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", model_class=program.Bare)


def test_configure_optimizers_of_the_cli_decides_how_they_are_used(cli: Make, program: Any) -> None:
    class PerStep(LightningCLI):
        @staticmethod
        def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}

    words = ("--optimizer=SGD", "--optimizer.lr=1", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")
    made = cli("fit", *words, cls=PerStep, model_class=program.Bare)
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_a_fixed_optimizer_has_its_arguments_as_options(cli: Make, program: Any) -> None:
    class Fixed(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)

    made = cli("fit", "--optimizer.lr=0.5", "--lr_scheduler.gamma=0.5", cls=Fixed, model_class=program.Bare)
    assert type(made.trainer.optimizers[0]) is torch.optim.Adam
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_several_optimizers_must_be_linked_to_arguments_of_the_model(cli: Make, program: Any) -> None:
    class Several(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam, "first")
            parser.add_optimizer_args(nested_key="second")

    with pytest.raises(ConfigurationError, match="several of kind optimizer for one model: first, second"):
        cli("fit", "--second=SGD", cls=Several, model_class=program.Bare)


def test_auto_configure_optimizers_can_be_left_out(cli: Make) -> None:
    with pytest.raises(ArgumentError, match="--optimizer=SGD"):
        cli("fit", "--optimizer=SGD", auto_configure_optimizers=False)


# ---- seeds and wrong use ---------------------------------------------------------------------------------------------


def test_the_seed_is_set_before_the_model_is_made_and_recorded(cli: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(*words: str) -> torch.Tensor:
        return cli(*words, run=False).model.net[0].weight  # type: ignore[no-any-return]

    assert torch.equal(weights("--seed_everything=3"), weights("--seed_everything=3"))
    assert not torch.equal(weights("--seed_everything=3"), weights("--seed_everything=4"))
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    assert cli(run=False).config.seed_everything == 11
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert cli("--seed_everything=false", run=False, model_class=LightningModule).config.seed_everything is False
    assert torch.equal(torch.get_rng_state(), before)
    assert cli(run=False, seed_everything_default=5).config.seed_everything == 5


def test_options_may_come_as_a_dictionary(cli: Make) -> None:
    options = {"subcommand": "fit", "fit": {"model": {"width": 3}, "trainer": {"max_epochs": 2}}}
    made = cli(args=options)
    assert (made.subcommand, made.model.width, made.trainer.current_epoch) == ("fit", 3, 2)


def test_objects_where_classes_belong_are_answered_with_their_classes(cli: Make, program: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"got an object of Net, .* Pass the class: model_class=Net\."):
        cli("fit", model_class=program.Net())
    with pytest.raises(ConfigurationError, match=r"Pass the class: datamodule_class=Data\."):
        cli("fit", datamodule_class=program.Data())


def test_a_misspelt_argument_of_the_cli_is_answered(program: Any) -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean 'model_class'"):
        LightningCLI(model_clas=program.Net)  # type: ignore[call-arg]


def test_what_was_parsed_is_there_as_plain_data(cli: Make) -> None:
    made = cli("fit", "--trainer.max_epochs=2", "--seed_everything=3", parser_kwargs={"fit": {"description": "x"}})
    assert made.parser_kwargs == {"fit": {"description": "x"}}
    assert made.config_dump["trainer"]["max_epochs"] == 2
    assert made.config_dump["seed_everything"] == 3
    assert type(made.config_dump["model"]) is dict
    without = cli(run=False)
    assert "subcommand" not in without.config_dump
    assert without.parser_kwargs == {"exit_on_error": False}


def test_a_parser_takes_arguments_by_position() -> None:
    assert LightningArgumentParser("program").prog == "program"
