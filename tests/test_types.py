"""What a type checker knows of programs that use drivetrain: one run of mypy over one small program."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from drivetrain.callbacks import ModelCheckpoint
from drivetrain.precision import PrecisionRegistry
from drivetrain.settings import KnownPrecision, KnownStrategy
from drivetrain.strategies import StrategyRegistry

api = pytest.importorskip("mypy.api")

# A line with "# error" must be flagged, with the text behind it; every other line must be accepted.
PROGRAM = """
from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

import drivetrain as pl
from drivetrain import Engine, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint

Trainer(precision="bf16-mixed")
Trainer(precision=16)
Trainer(precision="bf16-mixd")  # error: incompatible type "Literal['bf16-mixd']"
Trainer(precision=17)  # error: incompatible type "Literal[17]"
Trainer(precision=cast(Any, "of another package"))
Trainer(strategy="ddp")
Trainer(strategy="of another package")
Trainer(strategy=3)  # error: incompatible type "Literal[3]"
Engine(precision="16-true", strategy="ddp_spawn")
Engine(precision="16-tru")  # error: incompatible type "Literal['16-tru']"
Trainer(max_epoch=3)  # error: did you mean "max_epochs"

net = nn.Linear(1, 1)
optimizer = SGD(net.parameters(), lr=0.1)
scheduler = StepLR(optimizer, 1)
loader = DataLoader(cast("Dataset[int]", [1]))
engine = Engine()
assert_type(engine.setup(net), nn.Linear)
assert_type(engine.setup(net, optimizer), tuple[nn.Linear, SGD])
assert_type(engine.setup(net, optimizer, scheduler=scheduler), tuple[nn.Linear, SGD, StepLR])
assert_type(engine.setup(net, optimizer, optimizer), Any)
assert_type(engine.setup_dataloaders(loader), DataLoader[int])
net, optimizer = engine.setup(net, optimizer)
loader = engine.setup_dataloaders(loader)
engine.setup_module(net).mark_forward_method("extra_repr")
engine.setup(optimizer)  # error: No overload variant

assert_type(ModelCheckpoint().best_model_path, str)
assert_type(pl.callbacks.ModelCheckpoint().best_model_path, str)

model, trainer = LightningModule(), pl.Trainer()
trainer.fit(model, loader)
trainer.fit(model, train_dataloader=loader)  # error: did you mean "train_dataloaders"
trainer.validate(model, dataloader=loader)  # error: did you mean "dataloaders"
assert_type(trainer.gradient_clip_val, float | None)
assert_type(trainer.barebones, bool)
pl.callbaks  # error: Module has no attribute "callbaks"
pl.callbacks.ModelChekpoint  # error: Module has no attribute "ModelChekpoint"
"""


pytestmark = pytest.mark.timeout(300)  # without a cache mypy reads all of torch, once


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says of the program, by line."""
    folder = tmp_path_factory.mktemp("types")
    file = folder / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    source = Path(__file__).parents[1] / "src"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(source))
        text, trouble, _ = api.run(
            # as `make check` runs it, which has filled the cache
            [
                f"--config-file={source.parent / 'pyproject.toml'}",
                f"--cache-dir={source.parent / '.mypy_cache'}",
                str(file),
            ]
        )
    assert trouble == ""
    messages: dict[int, str] = {}
    for line in text.splitlines():
        place, is_error, message = line.partition(": error: ")
        if is_error:
            assert Path(place.rpartition(":")[0]).name == "program.py", line
            number = int(place.rpartition(":")[2])
            messages[number] = f"{messages.get(number, '')} {message}"
    return messages


def test_a_checker_accepts_what_is_right_and_flags_what_is_not(found: dict[int, str]) -> None:
    expected = {
        number: line.partition("# error: ")[2]
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "# error: " in line
    }
    assert set(found) == set(expected), found
    for number, text in expected.items():
        assert text in found[number]


def test_the_names_that_a_checker_knows_are_those_of_this_version() -> None:
    names = typing.get_args(KnownPrecision)
    assert {name for name in names if isinstance(name, str)} == set(PrecisionRegistry.available())
    assert {str(bits) for bits in names if isinstance(bits, int)} <= set(PrecisionRegistry.available())
    assert set(typing.get_args(KnownStrategy)) <= {"auto", *StrategyRegistry.available()}


def test_the_best_path_is_a_text_before_anything_is_saved() -> None:
    assert ModelCheckpoint().best_model_path == ""
