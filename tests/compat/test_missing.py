"""Names of Lightning that this version lacks: the message says so, and the table is complete and true."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.compat.missing import ARGUMENTS, ENGINE, MISSING, MODULE, OF_OTHERS, TRAINER
from drivetrain.errors import UnknownArgumentError
from drivetrain.settings import Settings

ORIGINAL = json.loads((Path(__file__).parent / "public_names.json").read_text(encoding="utf-8"))
COUNTERPARTS = {
    "drivetrain": "lightning.pytorch",
    **{
        f"drivetrain.{name}": f"lightning.pytorch.{name}"
        for name in ("callbacks", "cli", "loggers", "strategies", "accelerators", "plugins", "plugins.environments")
    },
    **{f"drivetrain.plugins.{name}": f"lightning.pytorch.plugins.{name}" for name in ("io", "layer_sync", "precision")},
    "drivetrain.profilers": "lightning.pytorch.profilers",
    "drivetrain.precision": "lightning.pytorch.plugins.precision",
    "drivetrain.checkpoints": "lightning.pytorch.plugins.io",
    "drivetrain.clusters": "lightning.pytorch.plugins.environments",
}
OF_NO_USE = {"LIGHTNING_LOGO", "cli_lightning_logo"}
LACKING = [(package, name) for package, names in MISSING.items() for name in names]


def attribute(package: str, name: str) -> object:
    return getattr(importlib.import_module(package), name)


@pytest.mark.parametrize("package", COUNTERPARTS)
def test_every_name_of_lightning_is_here_or_in_the_table(package: str) -> None:
    here = {*importlib.import_module(package).__all__, *MISSING.get(package, {})}
    assert set(ORIGINAL[COUNTERPARTS[package]]) - OF_NO_USE <= here


def test_every_package_of_lightning_is_here_or_in_the_table() -> None:
    folders = {path.split(".")[2] for path in ORIGINAL if path.startswith("lightning.pytorch.")}
    ours = Path(drivetrain.__file__).parent
    assert {name for name in folders if not (ours / name).is_dir()} <= set(MISSING["drivetrain"])


@pytest.mark.parametrize(("package", "name"), LACKING)
def test_no_name_of_the_table_is_here(package: str, name: str) -> None:
    """So that a feature that is added takes its name out of the table."""
    module = importlib.import_module(package)
    assert name not in module.__all__
    assert not hasattr(module, name)


@pytest.mark.parametrize(("package", "name"), LACKING)
def test_a_name_that_this_version_lacks_says_so_as_attribute_and_in_an_import(package: str, name: str) -> None:
    with pytest.raises(AttributeError, match="this version of drivetrain does not have it") as asked:
        attribute(package, name)
    with pytest.raises(ImportError, match="this version of drivetrain does not have it") as imported:
        exec(f"from {package} import {name}")
    for error in (asked.value, imported.value):
        assert "Did you mean" not in str(error)
        assert name in str(error)
        assert package in str(error)


@pytest.mark.parametrize("statement", ["import drivetrain.serve"])
def test_a_package_that_this_version_lacks_says_so(statement: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="this version of drivetrain does not have it yet"):
        exec(statement)


def test_what_does_the_same_work_is_named() -> None:
    with pytest.raises(AttributeError, match=r"write drivetrain\.Engine"):
        _ = drivetrain.Fabric
    with pytest.raises(ImportError, match="docs/own_logger.md"):
        exec("from drivetrain.loggers import LitLogger")


def test_a_logger_of_a_cloud_service_names_the_others() -> None:
    with pytest.raises(AttributeError, match=r"LitLogger.*Lightning AI's service.*WandbLogger"):
        attribute("drivetrain.loggers", "LitLogger")


@pytest.mark.parametrize("name", ENGINE)
def test_what_other_libraries_call_it_is_answered_with_the_name_that_the_engine_has(name: str) -> None:
    engine = drivetrain.Engine(accelerator="cpu")
    assert not hasattr(drivetrain.Engine, name)
    with pytest.raises(AttributeError, match=f"An Engine has no attribute '{name}'. ") as caught:
        getattr(engine, name)
    instead = re.findall(r"engine\.(\w+)", str(caught.value))
    assert instead
    assert [each for each in instead if not hasattr(drivetrain.Engine, each)] == []


@pytest.mark.parametrize(("cls", "table"), [(drivetrain.LightningModule, MODULE), (drivetrain.Trainer, TRAINER)])
def test_names_that_newcomers_try_are_answered_with_what_to_write(cls: type, table: dict[str, str]) -> None:
    made = drivetrain.LightningModule() if cls is drivetrain.LightningModule else drivetrain.Trainer(logger=False)
    owners = {"trainer": drivetrain.Trainer, "self": drivetrain.LightningModule}
    for name, cure in table.items():
        assert not hasattr(made, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. {re.escape(cure)}"):
            getattr(made, name)
        for owner, instead in re.findall(r"\b(trainer|self)\.(\w+)", cure.replace("trainer.strategy", "")):
            assert hasattr(owners[owner], instead), cure
    with pytest.raises(AttributeError, match=f"'{cls.__name__}' object has no attribute 'nothing'$"):
        getattr(made, "nothing")  # noqa: B009  # a type checker knows that it has none


@pytest.mark.parametrize("name", OF_OTHERS)
def test_arguments_that_other_libraries_have_are_answered_at_the_class_that_gets_them(name: str) -> None:
    owner, _, argument = name.rpartition(".")
    called: Any = (
        drivetrain.Trainer(logger=False).fit if owner == "trainer.fit" else getattr(drivetrain.callbacks, owner)
    )
    with pytest.raises(UnknownArgumentError, match=f"no argument {argument}=True. {re.escape(OF_OTHERS[name])}"):
        called(**{argument: True, **({"model": None} if owner == "trainer.fit" else {"monitor": "val_loss"})})


def test_any_other_name_and_a_property_that_fails_have_the_words_of_python() -> None:
    class Own(drivetrain.Engine):
        @property
        def failing(self) -> int:
            return int(self.nothing)  # type: ignore[attr-defined]

    for name, said in (("nothing", "'Own' object has no attribute 'nothing'"), ("failing", "no attribute 'nothing'")):
        with pytest.raises(AttributeError, match=said):
            getattr(Own(accelerator="cpu"), name)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_the_table_is_no_argument_and_what_to_write_is_one(name: str) -> None:
    known = {field.name for field in dataclasses.fields(Settings)}
    assert name not in known
    named = re.match(r"Write (\w+)=", ARGUMENTS[name])
    assert named is None or named[1] in known
