"""Every wrong use gives one clear error: the cause, the value, and as its last sentence the cure.

A case says what is in the message, in this order, and that nothing but a list of the known names follows the cure.
What can be known early is refused before anything is built: no folder, no data, no ``setup``.

The file is longer than others because it is one list, in the order in which a user can go wrong.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Callback, Engine, LightningDataModule, LightningModule, Trainer, WeightedLoss, seed_everything
from drivetrain.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    PlainProgressBar,
    RichProgressBar,
    Timer,
)
from drivetrain.errors import (
    CheckpointError,
    ConfigurationError,
    LoggingError,
    UnknownArgumentError,
    UnknownNameError,
)
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.loggers.tensorboard import _WRITER_ARGUMENTS
from drivetrain.plugins.precision import MixedPrecision
from drivetrain.strategies import SingleDeviceStrategy
from drivetrain.tuner import Tuner

NAN = float("nan")


class Net(LightningModule):
    """Trains, validates and tests; writes down what is called on it before the first batch."""

    def __init__(self, calls: list[str] | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.__dict__["calls"] = [] if calls is None else calls

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def __init__(self, calls: list[str] | None = None) -> None:
        super().__init__()
        self.calls = [] if calls is None else calls

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def train_dataloader(self) -> Any:
        return LOADER


DATASET = TensorDataset(torch.ones(8, 4))
LOADER = DataLoader(DATASET, batch_size=2)


@dataclass
class Bench:
    """Where a case does its wrong thing."""

    path: Path
    calls: list[str] = field(default_factory=list)

    def trainer(self, **arguments: Any) -> Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": self.path / "runs",
        }  # fmt: skip
        return Trainer(**{**quiet, **arguments})

    def net(self, *, base: type[LightningModule] = Net, **attributes: Any) -> Any:
        """A module with some attributes of its own."""
        made = type("Own", (base,), attributes)
        return made(self.calls) if issubclass(base, Net) else made()

    def fit(self, arguments: dict[str, Any] | None = None, /, **attributes: Any) -> None:
        """Train and validate such a module."""
        self.trainer(**(arguments or {})).fit(self.net(**attributes), LOADER, LOADER)

    def step(self, step: Callable[[Any, Any], Any]) -> None:
        """Train with ``step``, without validation."""
        self.trainer(limit_val_batches=0).fit(self.net(training_step=step), LOADER)

    def log(self, *args: Any, **options: Any) -> None:
        """Log so in a training step."""
        self.step(lambda self, batch: (self.log(*args, **options), self.loss(batch))[1])

    def optimizers(self, returned: Callable[[Any], Any], **arguments: Any) -> None:
        """Train with ``configure_optimizers`` returning that, made from an optimizer."""
        self.fit(arguments, configure_optimizers=lambda self: returned(SGD(self.parameters(), lr=0.1)))

    def scheduler(self, **settings: Any) -> None:
        """Train with a StepLR and these settings beside it."""
        self.optimizers(lambda sgd: {"optimizer": sgd, "lr_scheduler": {"scheduler": StepLR(sgd, 1), **settings}})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def check(error: BaseException, cause: str, value: str, cure: str) -> None:
    """Whether the message says cause, value and cure, and the cure last."""
    message = re.sub(r" \[DT\d{4}\]$", "", str(error))
    assert cause in message
    assert value in message
    assert cure in message
    rest = message[message.rindex(cure) + len(cure) :].strip()
    assert rest == "" or rest.startswith("Known: ")
    assert len(message.splitlines()) == 1
    assert message.rindex(cure) > message.index(cause)


def case(name: str, wrong: Any, cause: str, value: str, cure: str, error: type = ConfigurationError) -> Any:
    return pytest.param(wrong, error, cause, value, cure, id=name)


# ---- the Trainer's arguments: refused when it is made ----------------------------------------------------------------

A_NUMBER_OF_BATCHES = "a number of batches (int) or a fraction from 0.0 to 1.0 (float)"
ON_THE_CPU = "On the CPU, devices is a number of processes of at least 1"


def argument(name: str, value: Any, cause: str, cure: str) -> Any:
    """One argument whose value is refused by its own rule."""
    shown = f"Trainer({name}={value!r})"
    return case(f"{name}={value!r}", {name: value}, f"{name} is {cause}", shown, f"Write {cure}.")


def of_lightning(name: str, base: type = object) -> type:
    """A class that says of itself what those of Lightning say."""
    return type(name, (base,), {"__module__": "lightning.pytorch.anywhere"})


IMPORT = "import it from drivetrain, or run the program unchanged with `drivetrain exec`"

ARGUMENTS = [
    # each by its own rule
    argument("max_epochs", "3", "an int of at least -1 or None", "max_epochs=3"),
    argument("min_epochs", True, "an int of at least 0 or None", "min_epochs=1"),
    argument("max_steps", None, "an int of at least -1", "max_steps=1"),
    argument("limit_train_batches", 1.5, A_NUMBER_OF_BATCHES, "limit_train_batches=10 or 0.5"),
    argument("limit_test_batches", "all", A_NUMBER_OF_BATCHES, "limit_test_batches=10 or 0.5"),
    argument("overfit_batches", NAN, A_NUMBER_OF_BATCHES, "overfit_batches=10 or 0.5"),
    argument("fast_dev_run", -1, "a bool or a number of batches", "fast_dev_run=True"),
    argument("val_check_interval", 0, "a number of batches (int) or a fraction above 0.0", "val_check_interval=0.5"),
    argument("num_sanity_val_steps", [], "an int of at least -1 or None", "num_sanity_val_steps=1"),
    argument("max_time", 30, "a duration", 'max_time="00:01:30:00" for an hour and a half'),
    argument("max_time", {"hour": 1}, "a duration", 'max_time="00:01:30:00" for an hour and a half'),
    argument("accumulate_grad_batches", {0: 2}, "an int of at least 1",
             "callbacks=[GradientAccumulationScheduler(scheduling={0: 2})]"),
    argument("gradient_clip_val", NAN, "a number of at least 0 or None", "gradient_clip_val=1.0"),
    argument("gradient_clip_algorithm", "l2", "one of 'norm', 'value', None", "gradient_clip_algorithm='norm'"),
    argument("deterministic", "yes", "one of True, False, 'warn', None", "deterministic=True"),
    argument("inference_mode", None, "one of True, False", "inference_mode=True"),
    argument("enable_progress_bar", "rich", "one of True, False, None", "enable_progress_bar=True"),
    argument("default_root_dir", 3, "a path or None", 'default_root_dir="runs"'),
    argument("default_root_dir", __file__, "a folder, and there is a file of this name", 'default_root_dir="runs"'),
    # what is not there in this version
    case("an unknown address as root", {"default_root_dir": "s33://b/x"}, "knows no protocol 's33'",
         "default_root_dir='s33://b/x'", "Write an address such as s3://bucket/folder."),
    case("an address to read only", {"default_root_dir": "http://b/x"}, "can only be read",
         "default_root_dir='http://b/x'", "Write to a local path, or to an address such as s3://bucket/folder."),
    case("a profiler", {"profiler": "smple"}, "There is no profiler called", "profiler='smple'",
         "Did you mean 'simple'?"),
    case("no profiler", {"profiler": 3}, "Trainer(profiler=...) got", "an int: 3",
         'Pass a drivetrain.profilers.Profiler, or the name of one: profiler="simple".'),
    case("several machines", {"num_nodes": 2}, "MASTER_ADDR and MASTER_PORT are not set", "num_nodes=2",
         "or start it with torchrun."),
    # names
    case("no such argument", {"max_epoch": 3}, "Trainer has no argument", "max_epoch=3", "Did you mean 'max_epochs'?",
         UnknownArgumentError),
    case("an argument that is gone", {"gpus": 2}, "Trainer has no argument", "gpus=2",
         'Write accelerator="gpu", devices=... instead.', UnknownArgumentError),
    case("a model", {"model": Net()}, "Trainer has no argument", "model=Net(",
         "Pass the model to trainer.fit(model) instead.", UnknownArgumentError),
    case("a misspelt precision", {"precision": "bf16-mix"}, "there is no such precision", "precision='bf16-mix'",
         "Did you mean 'bf16-mixed'?"),
    case("a number as precision", {"precision": 16.0}, "a precision is a name or a number of bits", "precision=16.0",
         'Write precision="bf16-mixed", or pass a Precision in plugins.'),
    case("a dtype as precision", {"precision": torch.float16}, "a precision is a name", "precision=torch.float16",
         'Write precision="16-mixed", or pass a Precision in plugins.'),
    case("a misspelt accelerator", {"accelerator": "cpuu"}, "there is no such accelerator", "accelerator='cpuu'",
         "Did you mean 'cpu'?"),
    case("an accelerator with its number", {"accelerator": "cuda0"}, "there is no such accelerator", "'cuda0'",
         "Did you mean 'cuda'? Write accelerator=\"cuda\", devices=[0]."),
    case("a device as accelerator", {"accelerator": torch.device("cpu:0")}, "there is no such accelerator",
         "device(type='cpu', index=0)", "Did you mean 'cpu'? Write accelerator=\"cpu\"."),
    case("a misspelt strategy", {"strategy": "dddp"}, "There is no strategy called", "'dddp'",
         "Did you mean 'ddp'?", UnknownNameError),
    case("a mistyped strategy", {"strategy": "dpp"}, "There is no strategy called", "'dpp'", "Did you mean 'ddp'?",
         UnknownNameError),
    case("an argument of other trainers", {"gradient_accumulation_steps": 2}, "Trainer has no argument",
         "gradient_accumulation_steps=2", "Write accumulate_grad_batches=... instead.", UnknownArgumentError),
    case("how scikit-learn is made quiet", {"verbose": False}, "Trainer has no argument", "verbose=False",
         'logging.getLogger("drivetrain").setLevel("WARNING") removes the plan and the last lines too.'),
    case("an argument of the last Lightning 1", {"multiple_trainloader_mode": "min_size"}, "Trainer has no argument",
         "multiple_trainloader_mode='min_size'", "Write CombinedLoader(loaders, mode=...) instead.",
         UnknownArgumentError),
    case("a strategy that is nearly known", {"strategy": "single_devise"}, "There is no strategy called",
         "'single_devise'", "Did you mean 'single_device'?", UnknownNameError),
    case("a strategy's class", {"strategy": SingleDeviceStrategy}, "a strategy is a name or a Strategy instance",
         "SingleDeviceStrategy'>", "Write strategy=SingleDeviceStrategy()."),
    case("a misspelt logger", {"logger": "tensorbord"}, "Trainer(logger=...) got", "a str: 'tensorbord'",
         "Did you mean TensorBoardLogger? Write TensorBoardLogger(...), or a name such as \"csv\"."),
    case("a misspelt logger in a list", {"logger": ["cvs"]}, "Trainer(logger=...) got", "a str: 'cvs'",
         'Did you mean CSVLogger? Write CSVLogger(...), or a name such as "csv".'),
    case("a logger's name in a trial run", {"logger": "CSV", "fast_dev_run": True}, "Trainer(logger=...) got",
         "a str: 'CSV'", 'Did you mean CSVLogger? Write CSVLogger(...), or a name such as "csv".'),
    case("a folder as logger", {"logger": "./runs"}, "Trainer(logger=...) got", "a str: './runs'",
         "Pass a drivetrain.loggers.Logger, a list of them, True or False."),
    case("no name as logger", {"logger": ""}, "Trainer(logger=...) got", "a str: ''",
         "Pass a drivetrain.loggers.Logger, a list of them, True or False."),
    case("a number as logger", {"logger": 1}, "Trainer(logger=...) got", "an int: 1",
         "Pass a drivetrain.loggers.Logger, a list of them, True or False."),
    case("a logger's class", {"logger": CSVLogger}, "Trainer(logger=...) got", "the class CSVLogger itself",
         "Write CSVLogger(...)."),
    case("a callback's class", {"callbacks": [EarlyStopping]}, "Trainer(callbacks=...) got",
         "the class EarlyStopping itself", "Write EarlyStopping(...)."),
    case("a callback's name", {"callbacks": "early_stopping"}, "Trainer(callbacks=...) got", "a str: 'early_stopping'",
         "Did you mean EarlyStopping? Write EarlyStopping(...), an object and not its name."),
    case("None among the callbacks", {"callbacks": [None]}, "Trainer(callbacks=...) got", "None",
         "Pass instances of drivetrain.Callback."),
    case("a mapping of callbacks", {"callbacks": {}}, "Trainer(callbacks=...) got", "a dict: {}",
         "Pass instances of drivetrain.Callback."),
    case("a precision's name as plugin", {"plugins": "bf16"}, "plugins got", "a str: 'bf16'",
         "Write precision='bf16' instead."),
    case("a misspelt plugin", {"plugins": ["slrum"]}, "plugins got", "a str: 'slrum'. Did you mean 'slurm'?",
         "Pass a Precision, a CheckpointIO, a ClusterEnvironment or a LayerSync, at most one of each."),
    case("a plugin's class", {"plugins": [MixedPrecision]}, "plugins got",
         "the class MixedPrecision itself", "Write MixedPrecision(...)."),
    # objects of Lightning's classes
    case("its strategy", {"strategy": of_lightning("DDPStrategy")()}, "a strategy is a name or a Strategy instance",
         "Its DDPStrategy is that of the package lightning:", f"{IMPORT}."),
    case("its accelerator", {"accelerator": of_lightning("CPUAccelerator")()}, "there is no such accelerator",
         "Its CPUAccelerator is that of the package lightning:", f"{IMPORT}."),
    case("its callback", {"callbacks": of_lightning("EarlyStopping")()}, "Trainer(callbacks=...) got",
         f"(its EarlyStopping is that of the package lightning: {IMPORT}", "Pass instances of drivetrain.Callback."),
    # devices
    case("no device", {"devices": 0}, "names no device", "devices=0", 'Write devices=1 or devices="auto".'),
    case("a bool of devices", {"devices": True}, "names no device", "devices=True",
         'Write devices=1 or devices="auto".'),
    case("an empty list of devices", {"devices": []}, "names no device", "devices=[]",
         'Write devices=1 or devices="auto".'),
    case("a negative number of devices", {"devices": -2}, ON_THE_CPU, "not -2", "Write devices=1."),
    case("a word as devices", {"devices": "two"}, ON_THE_CPU, "not 'two'", "Write devices=1."),
    # combinations
    case("barebones and a bar", {"barebones": True, "enable_progress_bar": True},
         "barebones switches enable_progress_bar off", "enable_progress_bar=True", "Leave one of them out."),
    case("barebones and a checkpoint", {"barebones": True, "callbacks": ModelCheckpoint()},
         "contradicts the ModelCheckpoint in callbacks", "Trainer(barebones=True)", "Drop one of the two."),
    case("two kinds of few batches", {"overfit_batches": 2, "fast_dev_run": True}, "both say how many batches to take",
         "overfit_batches=2, fast_dev_run=True", "Leave one out."),
    case("two limits of time", {"max_time": "00:00:01:00", "callbacks": Timer(duration={"hours": 1})},
         "the Timer in callbacks both limit the time", "max_time='00:00:01:00'", "Keep one."),
    case("no checkpoints but one", {"callbacks": [ModelCheckpoint()]}, "contradicts the ModelCheckpoint in callbacks",
         "enable_checkpointing=False", "Drop one of the two."),
    case("no bar but one", {"callbacks": [PlainProgressBar()]}, "contradicts the PlainProgressBar in callbacks",
         "enable_progress_bar=False", "Drop one of the two."),
    case("two bars", {"callbacks": [PlainProgressBar(), RichProgressBar()], "enable_progress_bar": True},
         "which would draw over each other", "2 progress bars, PlainProgressBar and RichProgressBar", "Keep one."),
    case("two callbacks of one state", {"callbacks": [EarlyStopping("x"), EarlyStopping("x", patience=9)]},
         "Two EarlyStopping callbacks would save their state under", "'monitor': 'x'",
         "Give them different arguments, or override state_key."),
    case("one callback twice", {"callbacks": [Callback()] * 2}, "listed twice in callbacks", "One Callback object",
         "List it once."),
    case("two precisions", {"precision": 16, "plugins": MixedPrecision("bf16-mixed")}, "both set the precision",
         "precision=16 and a MixedPrecision in plugins", "Leave precision out."),
    case("two precisions, one the strategy's",
         {"precision": 16, "strategy": SingleDeviceStrategy(precision_plugin=MixedPrecision("bf16-mixed"))},
         "The strategy carries a MixedPrecision", "precision=16", "Give the precision once."),
    case("two plugins of a kind", {"plugins": [MixedPrecision("bf16-mixed")] * 2}, "plugins got",
         "two of a kind: MixedPrecision and MixedPrecision", "Keep one."),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "cause", "value", "cure"), ARGUMENTS)
def test_wrong_arguments_of_the_trainer(
    wrong: dict[str, Any], error: type[Exception], cause: str, value: str, cure: str, bench: Bench
) -> None:
    with pytest.raises(error) as caught:
        bench.trainer(**wrong)
    assert isinstance(caught.value, error)
    check(caught.value, cause, value, cure)
    assert list(bench.path.iterdir()) == []


def test_a_refused_trainer_leaves_a_strategy_that_was_passed_as_it_was(bench: Bench) -> None:
    strategy = SingleDeviceStrategy()
    before = dict(vars(strategy))
    for wrong in ({"callbacks": ["early"]}, {"logger": "cvs"}, {"plugins": [3]}, {"max_time": -1}):
        with pytest.raises(ConfigurationError):
            bench.trainer(strategy=strategy, **wrong)
    assert vars(strategy) == before


def test_positions_and_the_environment_are_checked_too(bench: Bench, monkeypatch: Any) -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(3)  # type: ignore[call-arg]
    check(caught.value, "its arguments are keyword-only", "Trainer(3, ...)", "Write their names, max_epochs=3.")
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(Net())  # type: ignore[call-arg]
    check(caught.value, "keyword-only", "Trainer(Net( (net)", "Pass the model to trainer.fit(model) instead.")
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "many")
    with pytest.raises(ConfigurationError) as wrong:
        bench.trainer()
    check(wrong.value, "max_steps is an int of at least -1", "max_steps='many'", "Write max_steps=1.")
    monkeypatch.delenv("PL_TRAINER_MAX_STEPS")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCH", "3")
    with pytest.warns(UserWarning, match="PL_TRAINER_MAX_EPOCH='3' names no argument.* Did you mean 'max_epochs'?"):
        bench.trainer()


# ---- what a run is given: refused before any data is prepared --------------------------------------------------------

LOADS = "trainer.fit(train_dataloaders=...) got"


class Unfinished(Net):
    """Has forgotten to call its base class's constructor."""

    def __init__(self, calls: list[str]) -> None:
        self.__dict__["calls"] = calls


def without(method: str) -> dict[str, Any]:
    return {method: getattr(LightningModule, method)}


UPFRONT = [
    # the parties
    case("a class as model", lambda b: b.trainer().fit(Net, LOADER), "trainer.fit needs a LightningModule",
         "not the class Net itself", "Write trainer.fit(Net(...))."),
    case("no model", lambda b: b.trainer().fit(None, LOADER), "trainer.fit needs a LightningModule", "not None",
         "Subclass drivetrain.LightningModule."),
    case("a module of Lightning's", lambda b: b.trainer().fit(type("Own", (of_lightning("LightningModule"),), {})()),
         "trainer.fit needs a LightningModule, not an Own", "(its LightningModule is that of the package lightning:",
         "Subclass drivetrain.LightningModule."),
    case("a data module of Lightning's as loader", lambda b: b.trainer().fit(b.net(), of_lightning("Data")()),
         "(its Data is that of the package lightning:", "`drivetrain exec`), which cannot be iterated.",
         "Give a DataLoader or another iterable."),
    case("a loader of Lightning's",
         lambda b: b.trainer().fit(b.net(), of_lightning("CombinedLoader", DataLoader)([1])),
         "train_dataloaders=...) got", "(its CombinedLoader is that of the package lightning:",
         "Write drivetrain.data.CombinedLoader(loaders, mode)."),
    case("a Trainer of Lightning's", lambda b: Tuner(of_lightning("Trainer")()), "Tuner needs a Trainer, not a Trainer",
         "(its Trainer is that of the package lightning:", "Write Tuner(drivetrain.Trainer())."),
    case("a plain module", lambda b: b.trainer().fit(nn.Linear(4, 1), LOADER), "trainer.fit needs a LightningModule",
         "not a Linear: Linear(in_features=4", "Subclass drivetrain.LightningModule."),
    case("only a loader", lambda b: b.trainer().validate(LOADER), "trainer.validate needs a LightningModule",
         "not a DataLoader: ", "The model comes first: write trainer.validate(model, loader)."),
    case("only a list of loaders", lambda b: b.trainer().predict([LOADER]), "trainer.predict needs a LightningModule",
         "not a list: ", "The model comes first: write trainer.predict(model, loader)."),
    case("only a datamodule", lambda b: b.trainer().test(Data()), "trainer.test needs a LightningModule",
         "not a Data: ", "The model comes first: write trainer.test(model, datamodule=...)."),
    case("only a dataset", lambda b: b.trainer().fit(LOADER.dataset), "trainer.fit needs a LightningModule",
         "not a TensorDataset: ", "The model comes first: write trainer.fit(model, loader)."),
    case("only a text", lambda b: b.trainer().fit("model"), "trainer.fit needs a LightningModule",
         "not a str: 'model'", "Subclass drivetrain.LightningModule."),
    case("a loader where the model goes", lambda b: b.trainer().fit(LOADER, b.net()), "needs a LightningModule",
         "not a DataLoader: ", "The model comes first: write trainer.fit(model, loader)."),
    case("a datamodule where the model goes", lambda b: b.trainer().test(Data(b.calls), b.net()),
         "trainer.test needs a LightningModule", "not a Data: ",
         "The model comes first: write trainer.test(model, datamodule=...)."),
    case("no model at all", lambda b: b.trainer().validate(dataloaders=LOADER), "has no model, and none was run before",
         "trainer.validate()", "Write trainer.validate(model)."),
    case("a loader as datamodule", lambda b: b.trainer().fit(b.net(), datamodule=LOADER),
         "needs a LightningDataModule as datamodule", "not a DataLoader: ",
         "Pass loaders as train_dataloaders or dataloaders."),
    case("a class as datamodule", lambda b: b.trainer().fit(b.net(), datamodule=Data), "needs a LightningDataModule",
         "not the class Data itself", "Write datamodule=Data(...)."),
    case("loaders and a datamodule", lambda b: b.trainer().fit(b.net(), LOADER, datamodule=Data(b.calls)),
         "trainer.fit got", "both loaders and a datamodule", "Pass the loaders, or datamodule=, not both."),
    # the loaders
    case("no loader", lambda b: b.trainer().fit(b.net()), "trainer.fit has no loader", "on Own",
         "Pass one, or define train_dataloader on Own or a datamodule."),
    case("a number as loader", lambda b: b.trainer().fit(b.net(), 3), LOADS, "an int: 3, which cannot be iterated",
         "Give a DataLoader or another iterable."),
    case("a tensor as loader", lambda b: b.trainer().predict(b.net(), torch.ones(2)), "trainer.predict(dataloaders=",
         "a Tensor: tensor([1., 1.]), which is no loader",
         "For one batch, write [batch]; for samples, DataLoader(samples, batch_size=32)."),
    case("a table as loader", lambda b: b.trainer().predict(b.net(), pandas.DataFrame({"x": [1.0]})),
         "trainer.predict(dataloaders=", "a DataFrame: ",
         "samples, DataLoader(TensorDataset(torch.tensor(table.to_numpy(), dtype=torch.float32)), batch_size=32)."),
    case("a text as loader", lambda b: b.trainer().fit(b.net(), "train"), LOADS, "a str: 'train', which cannot be",
         "Give a DataLoader or another iterable."),
    case("a number among loaders", lambda b: b.trainer().fit(b.net(), {"a": LOADER, "b": 3}), LOADS,
         "a dict with an int: 3 at 'b'", "put it into a list: [batch]."),
    case("an empty list of loaders", lambda b: b.trainer().fit(b.net(), []), LOADS, "an empty list", "Give a loader."),
    case("a dataset as loader", lambda b: b.trainer().fit(b.net(), DATASET), LOADS, "a TensorDataset: ",
         "Wrap the dataset: DataLoader(dataset, batch_size=32)."),
    case("a class as loader", lambda b: b.trainer().fit(b.net(), DataLoader), LOADS, "the class DataLoader itself",
         "Write DataLoader(...)."),
    case("a function as loader", lambda b: b.trainer().fit(b.net(), lambda: LOADER), LOADS, "a function: <function",
         "Call it, and give what it returns."),
    case("a second model as loader", lambda b: b.trainer().fit(b.net(), LOADER, Net()),
         "trainer.fit(val_dataloaders=...) got", "a Net: Net(", "Give a DataLoader or another iterable."),
    case("a number as test loader", lambda b: b.trainer().validate(b.net(), 3),
         "trainer.validate(dataloaders=...) got", "an int: 3", "Give a DataLoader or another iterable."),
    case("a loader where its method goes", lambda b: b.fit(train_dataloader=LOADER),
         "Own.train_dataloader is no method", "a DataLoader: ", "Define train_dataloader with def, in the class."),
    # the checkpoint
    case("no such checkpoint", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path="nope.ckpt"),
         "There is no checkpoint at", "nope.ckpt", "Check the path.", CheckpointError),
    case("the best checkpoint of a callback that saved none", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path=""),
         "There is no checkpoint at", "''", "that callback has saved nothing yet. Pass the path of a file.",
         CheckpointError),
    case("a misspelt checkpoint", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path="lst"),
         "There is no checkpoint at", "lst. Did you mean 'last'?", "Write that, or check the path.", CheckpointError),
    case("a file with the name of a keyword", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path="runs/last"),
         "There is no checkpoint at", "runs/last.", "runs/last. Check the path.", CheckpointError),
    case("no best checkpoint", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path="best"), "names no checkpoint",
         'ckpt_path="best"', "Pass a path.", CheckpointError),
    case("a number as checkpoint", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path=3), "ckpt_path is a path",
         "not an int: 3", 'Write ckpt_path="last".'),
    case("a folder as checkpoint", lambda b: b.trainer().fit(b.net(), LOADER, ckpt_path=b.path),
         "is a folder, and a checkpoint is a file", "test_what_is_refused_", "Pass the path of a file in it.",
         CheckpointError),
    # the module
    case("no call of super().__init__()", lambda b: b.fit(base=Unfinished), "has not called its base class's",
         "Own.__init__", "Begin it with super().__init__()."),
    case("no training_step", lambda b: b.fit(**without("training_step")), "trainer.fit calls it",
         "Own has no training_step", "Define it."),
    case("no configure_optimizers", lambda b: b.fit(**without("configure_optimizers")), "trainer.fit calls it",
         "Own has no configure_optimizers", "Define it."),
    case("a misspelt training_step", lambda b: b.fit(train_step=print_loss, **without("training_step")),
         "Own has no training_step", "Is it train_step?", "Rename that to training_step."),
    case("a misspelt configure_optimizers",
         lambda b: b.fit(configure_optimizer=print_loss, **without("configure_optimizers")),
         "Own has no configure_optimizers", "Is it configure_optimizer?", "Rename that to configure_optimizers."),
    case("no test_step", lambda b: b.trainer().test(b.net(**without("validation_step")), LOADER),
         "trainer.test calls it", "Own has no test_step", "Define it."),
    case("no test_step beside a validation_step", lambda b: b.trainer().test(b.net(), LOADER), "trainer.test calls it",
         "Own has no test_step", "To test as you validate, write test_step = validation_step in the class."),
    case("nothing to predict with", lambda b: b.trainer().predict(b.net(), LOADER), "so it cannot predict",
         "Own has neither predict_step nor forward", "Define one."),
    case("a hook that is gone", lambda b: b.fit(validation_epoch_end=lambda self, outputs: None),
         "this hook no longer exists", "Own.validation_epoch_end is never called",
         "Do its work in on_validation_epoch_end, and keep the steps' outputs on self if you need them."),
    case("a hook that other strategies call", lambda b: b.fit(training_step_end=lambda self, outputs: outputs),
         "which does not split batches", "Own.training_step_end is never called by SingleDeviceStrategy",
         'Do its work in training_step, or write strategy="dp".'),
    case("a number as step", lambda b: b.fit(training_step=3), "Own.training_step is no method", "an int: 3",
         "Write def training_step(self, batch, batch_idx)."),
    case("a step without a batch", lambda b: b.fit(training_step=lambda self: None),
         "does not take a batch and its index", "Own.training_step()",
         "Write def training_step(self, batch, batch_idx)."),
    case("a step that wants more", lambda b: b.fit(training_step=lambda self, batch, batch_idx, optimizer_idx: None),
         "which the loop does not pass", "Own.training_step needs 'optimizer_idx'",
         "Write def training_step(self, batch, batch_idx)."),
    case("an evaluation step that wants more", lambda b: b.fit(validation_step=lambda self, batch, i, loader: None),
         "which the loop does not pass", "Own.validation_step needs 'loader'",
         "Write def validation_step(self, batch, batch_idx, dataloader_idx=0)."),
    case("a hook that wants too much", lambda b: b.fit(on_train_batch_end=lambda self, outputs, batch, i, j: None),
         "cannot be called with the arguments it is given", "Own.on_train_batch_end(outputs, batch, i, j)",
         "Write def on_train_batch_end(self, outputs, batch, batch_idx)."),
    case("a callback's hook that takes too little",
         lambda b: b.fit({"callbacks": type("Own", (Callback,), {"teardown": lambda self, trainer: None})()}),
         "cannot be called with the arguments it is given", "Own.teardown(trainer)",
         "Write def teardown(self, trainer, pl_module, stage)."),
    case("a word among the module's callbacks", lambda b: b.fit(configure_callbacks=lambda self: ["early"]),
         "Own.configure_callbacks returned", "a str: 'early'", "Pass instances of drivetrain.Callback."),
    case("manual optimization and clipping", lambda b: b.fit({"gradient_clip_val": 1.0}, automatic_optimization=False),
         "Own.automatic_optimization is False", "Trainer(gradient_clip_val=1.0) would do nothing",
         "Leave it out and call self.clip_gradients(optimizer, gradient_clip_val=...) before optimizer.step()."),
    case("manual optimization and accumulation",
         lambda b: b.fit({"accumulate_grad_batches": 2}, automatic_optimization=False),
         "Own.automatic_optimization is False", "Trainer(accumulate_grad_batches=2) would do nothing",
         "Leave it out and call optimizer.step() in every n-th training_step only."),
]  # fmt: skip


def print_loss(self: Any) -> None: ...


@pytest.mark.parametrize(("wrong", "error", "cause", "value", "cure"), UPFRONT)
def test_what_is_refused_before_a_run_begins(
    wrong: Callable[[Bench], Any], error: type[Exception], cause: str, value: str, cure: str, bench: Bench
) -> None:
    with pytest.raises(error) as caught:
        wrong(bench)
    assert isinstance(caught.value, error)
    check(caught.value, cause, value, cure)
    assert bench.calls == []  # neither prepare_data nor setup
    assert list(bench.path.iterdir()) == []


# ---- what shows only in a run ----------------------------------------------------------------------------------------

A_LOSS = "Return the loss (a tensor), a WeightedLoss, a dictionary with one of them under 'loss', or None to skip"
A_LOSS += " the batch."
AN_OPTIMIZER = "Return an optimizer, ([optimizers], [schedulers]), or a dictionary such as "
AN_OPTIMIZER += '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}.'
A_NUMBER = "Log a number, a tensor with one element, or a metric object."
NO_GRAPH = "Compute it from the module's output, without detach(), item(), numpy() or torch.no_grad() on the way."


def with_plateau(sgd: SGD, **settings: Any) -> dict[str, Any]:
    return {"optimizer": sgd, "lr_scheduler": {"scheduler": ReduceLROnPlateau(sgd), **settings}}


def logged_twice(self: Any, batch: Any) -> None:
    self.log("x", 1.0)
    self.log("x", 1.0, prog_bar=True)


IN_A_RUN = [
    # what training_step returns
    case("a word as loss", lambda b: b.step(lambda self, batch: "x"), "training_step returned", "a str: 'x'", A_LOSS),
    case("a number as loss", lambda b: b.step(lambda self, batch: 0.5), "training_step returned", "a float: 0.5",
         A_LOSS),
    case("a tuple as loss", lambda b: b.step(lambda self, batch: (self.loss(batch), 1)), "training_step returned",
         "a tuple: (tensor(", A_LOSS),
    case("a dictionary without a loss", lambda b: b.step(lambda self, batch: {"los": self.loss(batch)}),
         "no tensor under 'loss'", "a dictionary with ['los']",
         "Put the loss there, as the tensor it was computed as."),
    case("a number under loss", lambda b: b.step(lambda self, batch: {"loss": 0.5}), "no tensor under 'loss'",
         "but a float: 0.5", "Put the loss there, as the tensor it was computed as."),
    case("a loss for each sample", lambda b: b.step(lambda self, batch: self.net(batch[0])),
         "only one number can be differentiated", "a loss of shape (2, 1)",
         "Reduce it first, for example with loss.mean()."),
    case("a detached loss", lambda b: b.step(lambda self, batch: self.loss(batch).detach()),
         "depends on no parameter that requires a gradient", "tensor(", NO_GRAPH),
    case("a loss of an int", lambda b: b.step(lambda self, batch: torch.tensor(7)), "depends on no parameter",
         "tensor(7)", NO_GRAPH),
    case("a negative weight", lambda b: b.step(lambda self, batch: WeightedLoss(self.loss(batch), -1)),
         "training_step returned a WeightedLoss", "the weight -1",
         "A weight counts samples or tokens: give a finite number of at least 0."),
    case("a word as weight", lambda b: b.step(lambda self, batch: WeightedLoss(self.loss(batch), "8")),
         "training_step returned a WeightedLoss", "the weight '8'",
         "A weight counts samples or tokens: give a finite number of at least 0."),
    case("a weighted number", lambda b: b.step(lambda self, batch: WeightedLoss(0.5, 2)),
         "a WeightedLoss whose loss is", "a float: 0.5",
         "Write WeightedLoss(loss, weight) with the loss as the tensor it was computed as."),
    case("manual_backward, but not manual",
         lambda b: b.step(lambda self, batch: self.manual_backward(self.loss(batch))),
         "the loop calls backward itself", "Own called manual_backward",
         "Set self.automatic_optimization = False in __init__, or return the loss instead."),
    # what configure_optimizers returns
    case("a name as optimizer", lambda b: b.optimizers(lambda sgd: "adam"), "configure_optimizers returned",
         "a str: 'adam'", AN_OPTIMIZER),
    case("an optimizer's class", lambda b: b.optimizers(lambda sgd: SGD), "configure_optimizers returned",
         "the class SGD itself", AN_OPTIMIZER),
    case("a class among optimizers", lambda b: b.optimizers(lambda sgd: [SGD]), "where an optimizer belongs",
         "the class SGD itself", AN_OPTIMIZER),
    case("a scheduler without lists", lambda b: b.optimizers(lambda sgd: (sgd, StepLR(sgd, 1))),
         "where an optimizer belongs", "a StepLR: ", AN_OPTIMIZER),
    case("a misspelt key", lambda b: b.optimizers(lambda sgd: {"optimiser": sgd}), "a dictionary with the unknown key",
         "'optimiser'", "Did you mean 'optimizer'?"),
    case("no optimizer in it", lambda b: b.optimizers(lambda sgd: {"monitor": "x"}), "no key 'optimizer'",
         "only ['monitor']", AN_OPTIMIZER),
    case("several optimizers", lambda b: b.optimizers(lambda sgd: [sgd, sgd]), "automatic optimization steps one",
         "returned 2 optimizers",
         "Put all parameters into one optimizer, or set self.automatic_optimization = False and step them yourself."),
    case("LBFGS and accumulation", lambda b: b.fit({"accumulate_grad_batches": 2}, configure_optimizers=lbfgs),
         "LBFGS evaluates the loss several times per step", "accumulate_grad_batches=2",
         "Write accumulate_grad_batches=1."),
    case("LBFGS and a scaled loss", lambda b: b.fit({"precision": 16}, configure_optimizers=lbfgs),
         "LBFGS evaluates the loss several times per step", "precision='16-mixed'",
         'Write precision="bf16-mixed" or "32-true".'),
    # a scheduler's dictionary
    case("a misspelt setting", lambda b: b.scheduler(intervall="step"), "unknown key", "'intervall'",
         "Did you mean 'interval'?"),
    case("an unknown interval", lambda b: b.scheduler(interval="batch"), 'interval is "epoch" or "step"', "not 'batch'",
         "Write one of the two."),
    case("frequency 0", lambda b: b.scheduler(frequency=0), "frequency is an int of at least 1", "not 0", "Write 1."),
    case("frequency True", lambda b: b.scheduler(frequency=True), "frequency is an int", "not True", "Write 1."),
    case("strict as a word", lambda b: b.scheduler(strict="no"), "strict is a bool", "not 'no'",
         "Write a bool or leave it out."),
    case("a monitor by number", lambda b: b.scheduler(monitor=3), "monitor is a text", "not 3",
         "Write a text or leave it out."),
    case("a scheduler's class", lambda b: b.scheduler(scheduler=StepLR), "A scheduler is an object with step()",
         "the class StepLR itself", AN_OPTIMIZER),
    case("a number as scheduler", lambda b: b.scheduler(scheduler=0.1), "A scheduler is an object with step()",
         "a float: 0.1", AN_OPTIMIZER),
    case("no monitor", lambda b: b.optimizers(with_plateau), "needs the name of the value it watches",
         "ReduceLROnPlateau",
         'Return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}.'),
    case("another optimizer's scheduler", lambda b: b.fit(configure_optimizers=lambda self: {
         "optimizer": SGD(self.parameters()), "lr_scheduler": StepLR(SGD(self.parameters()), 1)}),
         "built for an optimizer that configure_optimizers did not return", "StepLR", "Return that optimizer too."),
    # a monitor that was never logged
    case("ModelCheckpoint's monitor", lambda b: b.fit({
         "enable_checkpointing": True, "num_sanity_val_steps": 0,
         "callbacks": ModelCheckpoint(b.path, monitor="val_los")}),
         "which was not logged", "ModelCheckpoint watches 'val_los'",
         "Logged so far: val_loss. Log it, or watch one of those."),
    case("EarlyStopping's monitor", lambda b: b.fit(
         {"callbacks": EarlyStopping("val_los"), "num_sanity_val_steps": 0}), "which was not logged",
         "EarlyStopping watches 'val_los'", "Logged so far: val_loss. Log it, or watch one of those."),
    case("EarlyStopping's monitor where nothing was logged", lambda b: b.fit(
         {"callbacks": EarlyStopping("val_los")}, validation_step=lambda self, batch: None), "which was not logged",
         "EarlyStopping watches 'val_los'", "Logged so far: nothing. Log it, or watch one of those."),
    case("ReduceLROnPlateau's monitor", lambda b: b.optimizers(
         lambda sgd: with_plateau(sgd, monitor="val_los"), num_sanity_val_steps=0),
         "which was not logged. Logged so far: val_loss", "ReduceLROnPlateau watches 'val_los'",
         'Log it, or set "strict": False to skip the scheduler while it is missing.'),
    # self.log
    case("a word", lambda b: b.log("x", "high"), "self.log('x', ...) got", "a str: 'high'", A_NUMBER, LoggingError),
    case("None", lambda b: b.log("x", None), "self.log('x', ...) got", "None", A_NUMBER, LoggingError),
    case("a list", lambda b: b.log("x", [1.0]), "self.log('x', ...) got", "a list: [1.0]", A_NUMBER, LoggingError),
    case("two numbers", lambda b: b.log("x", torch.ones(2)), "self.log('x', ...) got", "a tensor of shape (2,)",
         "Log one number per name: reduce it first, for example with .mean().", LoggingError),
    case("a complex number", lambda b: b.log("x", torch.tensor(1j)), "a curve is made of real numbers",
         "dtype torch.complex64", "Log its .real, .imag or .abs().", LoggingError),
    case("a plain module", lambda b: b.log("x", nn.Linear(1, 1)), "self.log('x', ...) got", "a Linear",
         "Log a number, a tensor with one element, or a metric object with compute() and reset().", LoggingError),
    case("a number as name", lambda b: b.log(3, 1.0), "self.log got the name", "3", "A name is a text without"
         " '/dataloader_idx_', which is added when there are several loaders.", LoggingError),
    case("an unknown reduction", lambda b: b.log("x", 1.0, reduce_fx="avrg"), "is no known reduction",
         "reduce_fx='avrg'", "Write 'mean', 'sum', 'min' or 'max', or log a metric object for anything else.",
         LoggingError),
    case("a list as reduction", lambda b: b.log("x", 1.0, reduce_fx=[]), "is no known reduction", "reduce_fx=[]",
         "Write 'mean', 'sum', 'min' or 'max', or log a metric object for anything else.", LoggingError),
    case("a word as bool", lambda b: b.log("x", 1.0, "train"), "prog_bar is a bool", "prog_bar='train'",
         "Write prog_bar=True.", LoggingError),
    case("a word as batch size", lambda b: b.log("x", 1.0, on_epoch=True, batch_size="8"),
         "batch_size is a number of samples", "batch_size='8'", "Write batch_size=len(x).", LoggingError),
    case("a negative batch size", lambda b: b.log("x", 1.0, on_epoch=True, batch_size=-1),
         "batch_size is a number of samples", "batch_size=-1", "Write batch_size=len(x).", LoggingError),
    case("neither step nor epoch", lambda b: b.log("x", 1.0, on_step=False, on_epoch=False), "would log nothing",
         "on_step=False, on_epoch=False", "Set one of them to True.", LoggingError),
    case("with other options", lambda b: b.step(logged_twice), "twice in training_step with different options",
         "prog_bar=True (was False)", "Use the same options, or two names.", LoggingError),
    case("a dictionary in a dictionary", lambda b: b.log("x", {"a": {"b": 1.0}}), "a dictionary inside a dictionary",
         "under 'a'", "Flatten it: one number per name.", LoggingError),
    case("a list of values", lambda b: b.step(lambda self, batch: self.log_dict([1.0])), "self.log_dict got",
         "a list: [1.0]", "Pass a dictionary of names and numbers, or use self.log.", LoggingError),
    case("where nothing runs", lambda b: b.fit(on_fit_start=lambda self: self.log("x", 1.0)),
         "where no step or epoch is running", "self.log('x', ...) was called in on_fit_start",
         "Call it in a step, in a batch hook or in an epoch hook.", LoggingError),
    case("a step's value of an epoch", lambda b: b.fit(on_train_epoch_end=lambda self: self.log("x", 1, on_step=True)),
         "on_train_epoch_end, which runs once per epoch", "self.log('x', on_step=True)", "Leave out on_step.",
         LoggingError),
    # loaders and limits
    case("no dataloader_idx", lambda b: b.trainer().validate(b.net(), [LOADER, LOADER]),
         "must take dataloader_idx, because there are several loaders", "Own.validation_step",
         "Write def validation_step(self, batch, batch_idx, dataloader_idx=0)."),
    case("dataloader_idx of one loader", lambda b: b.fit(validation_step=lambda self, batch, i, dataloader_idx: None),
         "takes dataloader_idx, but there is one loader", "Own.validation_step",
         "Write def validation_step(self, batch, batch_idx, dataloader_idx=0)."),
    case("None from a hook",
         lambda b: b.trainer(limit_val_batches=0).fit(b.net(train_dataloader=lambda self: None)),
         "train_dataloader gave", "None, which cannot be iterated", "Give a DataLoader or another iterable."),
    case("a generator for two epochs",
         lambda b: b.trainer(max_epochs=2, limit_val_batches=0).fit(b.net(), (batch for batch in LOADER)),
         "yielded no batch in epoch 1", "The training loader generator",
         "Pass an object that can be iterated again in each epoch, not a generator."),
    case("less than one batch", lambda b: b.fit({"limit_train_batches": 0.01}), "less than one batch",
         "limit_train_batches=0.01 of 4 batches",
         "Write at least limit_train_batches=0.25, or a number of batches such as limit_train_batches=1."),
    case("validation that never comes", lambda b: b.fit({"val_check_interval": 100}),
         "exceeds the 4 training batches of an epoch", "Trainer(val_check_interval=100)",
         "Write a smaller number, or check_val_every_n_epoch=None to count batches across epochs."),
    case("no logger for the learning rate", lambda b: b.fit({"callbacks": LearningRateMonitor()}),
         "LearningRateMonitor has nowhere to log to", "Trainer(logger=False) has no logger",
         "Pass logger=True to the Trainer, or remove this callback."),
    case("no checkpoint in the file", lambda b: b.trainer().validate(b.net(), LOADER, ckpt_path=__file__),
         "is no checkpoint, or was cut short", "test_bad_input.py", "Use another one.", CheckpointError),
    case("a wrong limit in the middle", lambda b: b.fit(on_train_start=lambda self: setattr(
         self.trainer, "accumulate_grad_batches", 0)), "accumulate_grad_batches is an int of at least 1",
         "accumulate_grad_batches=0", "Write accumulate_grad_batches=1."),
]  # fmt: skip


def lbfgs(self: LightningModule) -> LBFGS:
    return LBFGS(self.parameters())


@pytest.mark.parametrize(("wrong", "error", "cause", "value", "cure"), IN_A_RUN)
def test_what_shows_only_in_a_run(
    wrong: Callable[[Bench], Any], error: type[Exception], cause: str, value: str, cure: str, bench: Bench
) -> None:
    with pytest.raises(error) as caught:
        wrong(bench)
    assert isinstance(caught.value, error)
    check(caught.value, cause, value, cure)


def test_a_runtime_error_in_backward_that_is_no_fault_of_the_loss_stays_what_it_is(bench: Bench) -> None:
    def fails(self: Any, loss: Any) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError) as error:
        bench.fit(backward=fails)
    assert str(error.value) == "out of luck"


# ---- callbacks, loggers and the rest: refused when they are made -----------------------------------------------------

CONSTRUCTORS = [
    case("an unknown mode", lambda: ModelCheckpoint(monitor="x", mode="mn"), 'mode is "min" or "max"', "mode='mn'",
         "Write one of these."),
    case("too many without a monitor", lambda: ModelCheckpoint(save_top_k=3), "cannot rank checkpoints without monitor",
         "save_top_k=3", 'Name a metric, monitor="val_loss", or write save_top_k=-1 to keep all.'),
    case("a word as number", lambda: ModelCheckpoint(save_top_k="all"), "save_top_k is an int", "save_top_k='all'",
         "Write save_top_k=1."),
    case("two moments", lambda: ModelCheckpoint(every_n_epochs=1, every_n_train_steps=2),
         "only one of these can decide when to save", "every_n_train_steps=2, every_n_epochs=1", "Keep one."),
    case("a negative period", lambda: ModelCheckpoint(every_n_epochs=-1), "ModelCheckpoint(", "every_n_epochs=-1",
         "Write every_n_epochs=1."),
    case("seconds as timedelta", lambda: ModelCheckpoint(train_time_interval=30), "is a timedelta above zero",
         "train_time_interval=30", "Write train_time_interval=timedelta(minutes=30)."),
    case("a word as save_last", lambda: ModelCheckpoint(save_last="yes"), "save_last is None, True, False or", "'yes'",
         "Write one of these."),
    case("a number as monitor", lambda: ModelCheckpoint(monitor=3), "monitor is the name of a logged value",
         "monitor=3", 'Write monitor="val_loss".'),
    case("a number as folder", lambda: ModelCheckpoint(dirpath=3), "dirpath is a path or None", "dirpath=3",
         'Write dirpath="checkpoints".'),
    case("an unknown address as folder", lambda: ModelCheckpoint("s33://b/x"), "knows no protocol 's33'",
         "dirpath='s33://b/x'", "Write an address such as s3://bucket/folder."),
    case("a misspelt argument", lambda: ModelCheckpoint(montor="x"), "ModelCheckpoint has no argument", "montor='x'",
         "Did you mean 'monitor'?", UnknownArgumentError),
    case("EarlyStopping, an unknown mode", lambda: EarlyStopping("x", mode="mx"), 'mode is "min" or "max"', "mode='mx'",
         "Write one of these."),
    case("EarlyStopping, no monitor", lambda: EarlyStopping(None), "monitor is the name of a logged value",
         "monitor=None", 'Write monitor="val_loss".'),
    case("EarlyStopping, negative patience", lambda: EarlyStopping("x", patience=-1), "EarlyStopping(patience=-1)",
         "patience=-1", "Write patience=3."),
    case("EarlyStopping, a word as patience", lambda: EarlyStopping("x", patience="3"), "EarlyStopping(", "'3'",
         "Write patience=3."),
    case("EarlyStopping, no number", lambda: EarlyStopping("x", min_delta=NAN), "min_delta is a number",
         "min_delta=nan", "Write min_delta=0.01."),
    case("EarlyStopping, misspelt", lambda: EarlyStopping("x", patiance=3), "EarlyStopping has no argument",
         "patiance=3", "Did you mean 'patience'?", UnknownArgumentError),
    case("LearningRateMonitor", lambda: LearningRateMonitor("batch"), 'is "step", "epoch" or None',
         "logging_interval='batch'", "Write one of these."),
    case("Timer", lambda: Timer(interval="batch"), 'interval is "step" or "epoch"', "interval='batch'",
         "Write one of these."),
    case("CSVLogger, a number as folder", lambda: CSVLogger(3), "save_dir is a path", "CSVLogger(save_dir=3)",
         'Write save_dir="runs".'),
    case("CSVLogger, a period", lambda: CSVLogger(".", flush_logs_every_n_steps=0),
         "flush_logs_every_n_steps is an int of at least 1", "flush_logs_every_n_steps=0",
         "Write flush_logs_every_n_steps=100."),
    case("CSVLogger, a version", lambda: CSVLogger(".", version=1.5), "version is a number, a folder name, or None",
         "version=1.5", "Write version=None."),
    case("CSVLogger, misspelt", lambda: CSVLogger(".", verson=1), "CSVLogger has no argument", "verson=1",
         "Did you mean 'version'?", UnknownArgumentError),
    case("TensorBoardLogger, misspelt", lambda: TensorBoardLogger(".", verson=1), "TensorBoardLogger has no argument",
         "verson=1", "Did you mean 'version'?", UnknownArgumentError),
    case("a precision of one's own", lambda: MixedPrecision("bf17"), "there is no such mixed precision", "'bf17'",
         "Known: 16-mixed, bf16-mixed."),
    case("Engine", lambda: Engine(precision="bf61"), "there is no such precision", "'bf61'", "Did you mean 'bf16'?"),
    case("a seed", lambda: seed_everything(-1), "A seed must lie in 0..4294967295", "not -1",
         "Choose one in that range."),
    case("a misspelt public name", lambda: drivetrain.Trianer, "has no attribute", "'Trianer'",
         "Did you mean 'Trainer'?", AttributeError),
    case("a misspelt callback", lambda: drivetrain.callbacks.EarlyStoping, "has no attribute", "'EarlyStoping'",
         "Did you mean 'EarlyStopping'?", AttributeError),
    case("a misspelt logger", lambda: drivetrain.loggers.CSVLoger, "has no attribute", "'CSVLoger'",
         "Did you mean 'CSVLogger'?", AttributeError),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "cause", "value", "cure"), CONSTRUCTORS)
def test_what_is_refused_where_it_is_made(
    wrong: Callable[[], Any], error: type[Exception], cause: str, value: str, cure: str
) -> None:
    with pytest.raises(error) as caught:
        wrong()
    assert isinstance(caught.value, error)
    check(caught.value, cause, value, cure)


def test_what_the_tensorboard_logger_passes_on_is_what_the_writer_takes() -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    taken = list(inspect.signature(writer).parameters)
    assert sorted(_WRITER_ARGUMENTS) == sorted(set(taken) - {"log_dir"})


# ---- what is only nearly right: a warning that names the hook --------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("validaton_step", "validation_step"),
        ("val_dataloaders", "val_dataloader"),
        ("on_train_batch_strat", "on_train_batch_start"),
        ("configure_optimizer", "configure_optimizers"),
    ],
)
def test_a_method_of_the_module_that_is_nearly_a_hook(method: str, hook: str, bench: Bench) -> None:
    with pytest.warns(UserWarning, match=rf"Own\.{method} is never called by the Trainer\. Did you mean {hook}\?"):
        bench.fit(**{method: lambda self, *args: None})


@pytest.mark.parametrize(("method", "hook"), [("set_up", "setup"), ("train_dataloaders", "train_dataloader")])
def test_a_method_of_the_datamodule_that_is_nearly_a_hook(method: str, hook: str, bench: Bench) -> None:
    own = type("Own", (Data,), {method: lambda self, *args: None})
    with pytest.warns(UserWarning, match=rf"Own\.{method} is never called by the Trainer\. Did you mean {hook}\?"):
        bench.trainer(limit_val_batches=0).fit(Net(), datamodule=own())


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("on_train_bach_end", r"Did you mean on_train_batch_end\?"),
        ("on_exeption", r"Did you mean on_exception\?"),
        ("on_epoch_end", "this hook no longer exists. Do its work in on_train_epoch_end."),
        ("on_keyboard_interrupt", "this hook no longer exists. Do its work in on_exception."),
    ],
)
def test_a_method_of_a_callback_that_is_nearly_or_no_longer_a_hook(method: str, told: str, bench: Bench) -> None:
    own = type("Own", (Callback,), {method: lambda self, *args: None})
    with pytest.warns(UserWarning, match=rf"Own\.{method} is never called by the Trainer.*{told}"):
        bench.fit({"callbacks": own()})


def test_a_method_that_cannot_be_called_as_a_hook_that_is_gone_is_ones_own(bench: Bench) -> None:
    """As pytorch-forecasting has one, which it calls itself."""
    bench.fit(on_epoch_end=lambda self, outputs: None)
    with pytest.raises(ConfigurationError, match="Own.on_epoch_end is never called: this hook no longer exists"):
        bench.fit(on_epoch_end=lambda self: None)


def test_names_of_ones_own_are_no_near_misses(bench: Bench) -> None:
    bench.fit(encode=lambda self: None, best_step=lambda self: None, _on_train_epoch_ends=lambda self: None)


# ---- what looks wrong and is not -------------------------------------------------------------------------------------


def test_a_datamodule_need_not_call_its_base_class(bench: Bench) -> None:
    class Plain(Data):
        def __init__(self) -> None:
            self.calls = bench.calls

    datamodule, trainer = Plain(), bench.trainer(limit_val_batches=0)
    trainer.fit(Net(), datamodule=datamodule)
    assert trainer.global_step == 4
    assert datamodule.trainer is trainer
    assert bench.calls == ["prepare_data", "setup"]


def test_an_empty_list_of_validation_loaders_means_no_validation(bench: Bench) -> None:
    trainer, net = bench.trainer(), bench.net(validation_step=lambda self, batch: 1 / 0)
    trainer.fit(net, LOADER, [])
    assert trainer.global_step == 4


def test_no_callbacks_from_the_module_may_be_said_by_none(bench: Bench) -> None:
    bench.fit(configure_callbacks=lambda self: None)


def test_an_evaluation_step_may_take_no_index_but_that_of_the_loader_by_name(bench: Bench) -> None:
    seen: list[int] = []
    net = bench.net(validation_step=lambda self, batch, *, dataloader_idx=0: seen.append(dataloader_idx))
    bench.trainer().validate(net, [LOADER, LOADER], verbose=False)
    assert seen == [0] * 4 + [1] * 4


# ---- folders ---------------------------------------------------------------------------------------------------------

OWNERS: list[tuple[str, Callable[..., Any], str]] = [
    ("Trainer", Trainer, "default_root_dir"),
    ("CSVLogger", CSVLogger, "save_dir"),
    ("TensorBoardLogger", TensorBoardLogger, "save_dir"),
    ("ModelCheckpoint", ModelCheckpoint, "dirpath"),
    ("OnExceptionCheckpoint", OnExceptionCheckpoint, "dirpath"),
]


@pytest.mark.parametrize(("owner", "make", "argument"), OWNERS, ids=[f"{owner[0]}.{owner[2]}" for owner in OWNERS])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "there is a file of this name"),
        ("file/x", "file is a file"),
        ("a\0b", "a NUL character"),
        ("a\ud800b", "which no file name can"),
        ("n" * 300, "its name is too long"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_at_once(
    tmp_path: Path, owner: str, make: Callable[..., Any], argument: str, name: str, why: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=rf"^{owner}\({argument}='.*: {argument} is a folder, and .*{why}. Wr"):
        make(**{argument: f"{tmp_path}/{name}"})
    make(**{argument: f"{tmp_path}/runs"})  # the control
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: CSVLogger(folder, name="a\0b"), r"CSVLogger\(name='a\\x00b'\): name is a folder, and .*NUL"),
        (lambda folder: CSVLogger(folder, name="file"), r"CSVLogger\(name='file'\): .*there is a file of this name"),
        (lambda folder: CSVLogger(folder, version="a\0b"), r"CSVLogger\(version=.*NUL"),
        (lambda folder: TensorBoardLogger(folder, sub_dir="a\0b"), r"TensorBoardLogger\(sub_dir=.*NUL"),
        (lambda folder: ModelCheckpoint(folder, filename="a\0b"), r"ModelCheckpoint\(filename=.*NUL.*{epoch}-{step}"),
        (lambda folder: OnExceptionCheckpoint(folder, "a\ud800b"), r"OnExceptionCheckpoint\(filename=.*ud800"),
    ],
)
def test_a_name_that_cannot_be_is_refused_at_once(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=message):
        make(tmp_path)


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("version", [None, 0])
def test_a_folder_that_became_impossible_is_explained_when_it_is_made(
    tmp_path: Path, bench: Bench, logger: Any, version: Any
) -> None:
    made = logger(tmp_path / "runs", version=version)
    (tmp_path / "runs").write_text("")
    step: dict[str, Any] = {"training_step": lambda self, batch: (self.log("a", 1.0), self.loss(batch))[1]}
    with pytest.raises(ConfigurationError, match="Logger cannot use the folder .*: not a directory .*Pass a save_dir"):
        bench.fit({"logger": made, "default_root_dir": tmp_path}, **step)
