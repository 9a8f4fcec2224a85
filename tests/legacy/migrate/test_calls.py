"""Calls and classes of earlier generations: rewritten where a name has changed, else reported with the line."""

from __future__ import annotations

import ast
import re

import pytest

import drivetrain
from drivetrain.legacy.migrate import calls
from drivetrain.legacy.migrate.program import migrate
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.hooks import OF_CALLBACKS, OF_MODULES
from drivetrain.legacy.v1_3.stepping import Stepped

IMPORT = "import pytorch_lightning as pl\n"

REWRITTEN = {
    "trainer.fit(m, train_dataloader=a, val_dataloaders=b)": "trainer.fit(m, train_dataloaders=a, val_dataloaders=b)",
    "self.trainer.validate(val_dataloaders=a)": "self.trainer.validate(dataloaders=a)",
    "trainer.test(test_dataloaders=a)": "trainer.test(dataloaders=a)",
    "pl.callbacks.ModelCheckpoint(period=2)": "pl.callbacks.ModelCheckpoint(every_n_epochs=2)",
    "self.log('a', 1, sync_dist_op='sum')": "self.log('a', 1, reduce_fx='sum')",
    "self.hparams = h": "self.save_hyperparameters(h)",
    "self.hparams = (  # given\n        h\n    )": "self.save_hyperparameters((  # given\n        h\n    ))",
}


@pytest.mark.parametrize("before", REWRITTEN, ids=range(len(REWRITTEN)))
def test_a_renamed_call_is_rewritten(before: str) -> None:
    text = f"{IMPORT}class Net(pl.LightningModule):\n    def setup(self, stage):\n        {before}\n"
    source = migrate("train.py", text.encode())
    assert source.result() == text.replace("pytorch_lightning", "drivetrain").replace(before, REWRITTEN[before])
    assert [each.line for each in source.remarks if not each.is_left] == [1, 4]
    assert migrate("train.py", source.content()).result() == source.result()


def left(text: str) -> list[tuple[int, str]]:
    source = migrate("train.py", text.encode())
    ast.parse(source.result())
    return [(each.line, each.text) for each in source.remarks if each.is_left]


EVALUATION = ("on_validation_", "on_test_", "on_predict_")
CALLS = {
    "trainer.tune(m)": "write Tuner(trainer) of drivetrain.tuner",
    "trainer.get_model()": "write trainer.lightning_module",
    "trainer.training_type_plugin": "write trainer.strategy",
    "pl.Trainer.from_argparse_args(args, gpus=1)": "write Trainer(max_epochs=args.max_epochs, ...), or LightningCLI",
    "pl.Trainer.add_argparse_args(parser)": "an argument of the parser for each flag",
    "pl.callbacks.EarlyStopping(patience=3)": '"early_stop_on" by default',
    "pl.callbacks.ModelCheckpoint(filepath='a')": "ModelCheckpoint has no argument filepath",
    "self.manual_backward(loss, opt)": "leave the optimizer out",
}


@pytest.mark.parametrize("before", CALLS, ids=range(len(CALLS)))
def test_a_call_that_needs_a_person_is_reported(before: str) -> None:
    [(line, text)] = left(f"{IMPORT}\n{before}\n")
    assert line == 3
    assert CALLS[before] in text


def test_the_same_words_without_lightning_are_nothing() -> None:
    assert left("trainer.tune(m)\ntrainer.fit(train_dataloader=1)\nself.manual_backward(loss)\n") == []


@pytest.mark.parametrize("base", ["LightningModule", "Callback"])
@pytest.mark.parametrize("hook", sorted(hooks.GONE))
def test_a_hook_that_is_not_called_any_more_is_reported(hook: str, base: str) -> None:
    [(line, text)] = left(f"{IMPORT}class A(pl.{base}):\n    x = 1\n    def {hook}(self, outputs): ...\n")
    assert line == 4
    assert text.startswith(f"left: {hook} is not called any more: write ")


@pytest.mark.parametrize("base", ["LightningModule", "Callback"])
def test_a_hook_with_the_arguments_of_its_time_is_reported_and_one_of_today_is_not(base: str) -> None:
    table = OF_MODULES if base == "LightningModule" else OF_CALLBACKS
    for name, (today, then) in table.items():
        now, was = (", ".join(["self", *arguments.split()]) for arguments in (today, then))
        text = f"{IMPORT}class A(pl.{base}):\n    def {name}({{}}): ...\n"
        assert left(text.format(now)) == []
        assert left(text.format("self, *args, **kwargs")) == []
        if then != today:
            further = ", dataloader_idx=0" if name.startswith(EVALUATION) and "_batch_" in name else ""
            assert left(text.format(was)) == [(3, f"left: {name}({was}): write {name}({now}{further})")]
            assert left(text.format(now + further)) == []


def test_the_constructor_of_a_data_module_has_no_arguments() -> None:
    text = f"{IMPORT}class A(pl.LightningDataModule):\n    def __init__(self):\n        super().__init__({{}})\n"
    assert left(text.format("")) == []
    assert left(text.format("*args")) == [(4, "left: LightningDataModule takes no arguments: keep them as attributes")]


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("def training_step(self, batch, batch_idx, optimizer_idx): ...", "self.automatic_optimization = False"),
        ("def training_step(self, batch, batch_idx, hiddens): ...", "loop over the parts of the batch"),
        ("def validation_step(self, batch, batch_idx, dataset_idx): ...", "dataloader_idx=0"),
        ("def test_step(self, b, i): return pl.EvalResult()", "EvalResult(...) is not logged any more"),
        ("def training_step(self, b, i): return pl.TrainResult(1)", "TrainResult(...) is not logged any more"),
        ("def validation_step_end(self, outputs): ...", "do its work in validation_step"),
        ("def training_step(self, b, i): return {'loss': 1, 'log': {'a': 1}}", "'log' in a dictionary is not logged"),
    ],
)
def test_a_step_of_its_time_is_reported(method: str, text: str) -> None:
    program = f"{IMPORT}class Base(pl.LightningModule): ...\n\nclass Net(Base):\n    {method}\n"
    [(line, found)] = left(program)
    assert line == 5
    assert text in found
    assert left(program.replace("pl.LightningModule", "object")) == []


def test_every_member_that_is_gone_has_a_line() -> None:
    assert Stepped.earlier.hooks == hooks.GONE.keys()
    for owner in (drivetrain.LightningModule, drivetrain.Callback):
        assert not [hook for hook in hooks.GONE if hasattr(owner, hook)]
        assert all(hasattr(owner, word) for word in ("on_train_epoch_start", "on_train_batch_end", "setup"))
    assert not [name for name in calls.GONE if hasattr(drivetrain.Trainer, name)]
    instead = {name for text in calls.GONE.values() for name in re.findall(r"^trainer\.(\w+)", text)}
    assert [name for name in instead if not hasattr(drivetrain.Trainer, name)] == []


def test_a_class_that_only_extends_the_trainer_takes_its_arguments() -> None:
    text = "import drivetrain as dt\nclass Mine(dt.Trainer): ...\nMine(gpus=0)\n"
    assert 'Mine(accelerator="cpu")' in migrate("train.py", text.encode()).result()
    own = text.replace("...", "\n  def __init__(self, gpus): ...")
    assert migrate("train.py", own.encode()).result() == own


def test_defaults_of_a_command_line_are_looked_at() -> None:
    text = "import drivetrain.cli as c\nc.LightningCLI(N, trainer_defaults={\n  'gpus': 1, 'max_epochs': 2})\n"
    assert left(text) == [(3, 'left: trainer_defaults={"gpus": ...}: see docs/legacy.md')]


def test_the_command_line_of_its_time_differs() -> None:
    text = "from pytorch_lightning.utilities.cli import LightningCLI\nLightningCLI(Net)\n"
    source = migrate("train.py", text.encode())
    assert source.result().startswith("from drivetrain.cli import LightningCLI\n")
    assert [each.text for each in source.remarks if each.line == 2] == [
        "differs: LightningCLI has subcommands: write fit before the options of the command line"
    ]


def test_an_evaluation_step_that_names_the_loaders_index_as_today_is_not_reported() -> None:
    for further in ("", ", dataloader_idx", ", dataloader_idx=0", ", prefix='val'"):
        assert left(f"{IMPORT}class A(pl.LightningModule):\n    def test_step(self, b, i{further}): ...\n") == []


def of_init(arguments: str, call: str, more: str = "") -> list[tuple[int, str]]:
    text = f"{IMPORT}class Net(pl.LightningModule):\n    def __init__(self, {arguments}):\n        self.{call}\n{more}"
    return left(text)


MODULES = ["net: nn.Module", "lr, net: torch.nn.Module = None", "*, net: Optional[nn.Module]", "net=nn.ReLU()",
           "lr=0.1, net: nn.Linear | None = None", "net: 'MyModule'"]  # fmt: skip


@pytest.mark.parametrize("arguments", MODULES)
@pytest.mark.parametrize("call", ["save_hyperparameters()", "save_hyperparameters('net')"])
def test_a_hyperparameter_that_is_a_module_is_reported(arguments: str, call: str) -> None:
    [(line, text)] = of_init(arguments, call)
    assert line == 4
    assert "keeps net, an nn.Module" in text
    assert 'write save_hyperparameters(ignore=["net"]), and load_from_checkpoint(path, net=...)' in text


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("net: nn.Module", "save_hyperparameters(ignore=['net'])"),
        ("net: nn.Module", "save_hyperparameters(ignore='net')"),
        ("net: nn.Module, lr", "save_hyperparameters('lr')"),
        ("net: nn.Module", "save_hyperparameters({'a': 1})"),
        ("net: type[nn.Module]", "save_hyperparameters()"),
        ("net: Callable[[], nn.Module]", "save_hyperparameters()"),
        ("net: pl.LightningDataModule", "save_hyperparameters()"),
        ("net: dict", "save_hyperparameters()"),
        ("net: nn.Module", "others()"),
    ],
)
def test_others_are_not(arguments: str, call: str) -> None:
    assert of_init(arguments, call) == []


@pytest.mark.parametrize("made", ["Net(0.1, nn.Linear(2, 1))", "Net(lr=0.1, net=torch.nn.Linear(2, 1))"])
def test_a_module_is_known_by_what_the_file_passes(made: str) -> None:
    assert len(of_init("lr, net", "save_hyperparameters()", f"{made}\n")) == 1
    assert of_init("lr, net", "save_hyperparameters()", "Net(0.1, nn.functional.relu(x))\n") == []
