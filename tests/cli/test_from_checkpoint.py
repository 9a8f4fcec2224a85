"""LightningCLI with --ckpt_path, where the checkpoint's hyperparameters are those of this model or of another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import LightningModule
from drivetrain.cli import LightningCLI
from drivetrain.errors import CheckpointError

PLAIN = ("--trainer.logger=false", "--trainer.accelerator=cpu")


@dataclasses.dataclass
class Shape:
    depth: int = 1
    name: str = "x"


class WithoutArguments(LightningModule): ...


class Numbers(LightningModule):
    def __init__(self, width: int = 3, rate: float = 0.1) -> None:
        super().__init__()
        self.width, self.rate = width, rate


class Words(LightningModule):
    def __init__(self, width: str = "wide", other: int = 3) -> None:
        super().__init__()
        self.width = width


class Required(LightningModule):
    def __init__(self, needed: int = 0, width: int = 3) -> None:
        super().__init__()
        self.width = width


class Grouped(LightningModule):
    def __init__(self, width: Shape = Shape(), rate: float = 0.1) -> None:  # noqa: B008
        super().__init__()
        self.width = width


class Holding(LightningModule):
    def __init__(self, width: nn.Module | None = None) -> None:
        super().__init__()
        self.width = width


class Open(LightningModule):
    def __init__(self, width: int = 3, **kwargs: Any) -> None:
        super().__init__()
        self.width, self.kwargs = width, kwargs


class Parsed(LightningCLI):
    """A command line that builds its objects and runs nothing."""

    def _run_subcommand(self, name: str) -> None: ...


def checkpoint(tmp_path: Path, **hyperparameters: Any) -> str:
    path = tmp_path / "saved.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": hyperparameters}, path)
    return str(path)


def parsed(cls: type[LightningModule], path: str, is_named: bool, *options: str, **arguments: Any) -> Any:
    words = ["validate", *PLAIN, "--ckpt_path", path]
    if is_named:
        words.append(f"--model={__name__}.{cls.__name__}")
    return Parsed(None if is_named else cls, args=[*words, *options], save_config_callback=None, **arguments).model


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(
    ("cls", "hyperparameters", "width"),
    [
        (Numbers, {"width": 5}, 5),
        (Numbers, {"width": 5, "unknown": 1, "with space": 2, "a.dot": 3}, 5),
        (Numbers, {"needed": 4}, 3),
        (Required, {"width": 5, "rate": 0.3}, 5),
        (Open, {"width": 5, "rate": 0.3}, 5),
        (Holding, {"width": None}, None),
    ],
)
def test_what_another_model_has_beside_this_ones_arguments_is_left_out(
    tmp_path: Path, cls: type[LightningModule], hyperparameters: dict[str, Any], width: Any, is_named: bool
) -> None:
    assert parsed(cls, checkpoint(tmp_path, **hyperparameters), is_named).width == width


@pytest.mark.parametrize("is_named", [False, True])
def test_a_model_without_arguments_takes_none(tmp_path: Path, is_named: bool) -> None:
    assert isinstance(parsed(WithoutArguments, checkpoint(tmp_path, width=5), is_named), WithoutArguments)


@pytest.mark.parametrize("exits", [True, False])
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(
    ("cls", "value"),
    [
        (Numbers, "wide"),
        (Numbers, {"depth": 1, "name": "x"}),
        (Words, 3),
        (Grouped, 3),
        (Grouped, {"depth": "deep", "name": "x"}),
        (Holding, 3),
        (Holding, {"class_path": "torch.nn.Linear", "init_args": {"unknown": 3}}),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_names_the_file(
    tmp_path: Path, cls: type[LightningModule], value: Any, is_named: bool, exits: bool
) -> None:
    path = checkpoint(tmp_path, width=value)
    with pytest.raises(CheckpointError) as raised:
        parsed(cls, path, is_named, parser_kwargs={"exit_on_error": exits})
    assert f"The hyperparameters in {path} do not fit the model of this command line: width." in str(raised.value)
    assert "Pass a checkpoint of this model" in str(raised.value)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_nested_value_may_lack_what_the_model_needs_when_it_is_built(tmp_path: Path, is_named: bool) -> None:
    described = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}}
    built = parsed(Holding, checkpoint(tmp_path, width=described), is_named).width
    assert (type(built), built.in_features) == (nn.Linear, 2)


def test_a_class_that_has_lost_an_argument_is_an_error(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, _class_path=f"{__name__}.Numbers", width=3, gone=1)
    with pytest.raises(CheckpointError, match="do not fit the model"):
        parsed(WithoutArguments, path, True)
    assert parsed(Numbers, path, False).width == 3


def test_a_command_line_is_as_strict_after_a_refused_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        parsed(Numbers, checkpoint(tmp_path, width="wide"), False)
    with pytest.raises(SystemExit):
        parsed(Numbers, checkpoint(tmp_path, width=3), False, "--model.unknown=3")


def test_what_only_kwargs_take_comes_back_to_them(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, _class_path=f"{__name__}.Open", width=5, depth=2)
    model = parsed(WithoutArguments, path, True)
    assert (model.width, model.kwargs) == (5, {"depth": 2})


def test_the_configuration_may_name_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"ckpt_path: {checkpoint(tmp_path, width='wide')}\n", encoding="utf-8")
    words = ["validate", *PLAIN, "--config", str(tmp_path / "run.yaml")]
    with pytest.raises(CheckpointError, match="do not fit the model"):
        Parsed(Numbers, args=words, save_config_callback=None)


def test_a_linked_argument_is_that_of_the_link(tmp_path: Path) -> None:
    class Linked(Parsed):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--width", type=int, default=7)
            parser.link_arguments("width", "model.width")

    words = ["validate", *PLAIN, "--ckpt_path", checkpoint(tmp_path, width=5)]
    assert Linked(Numbers, args=words, save_config_callback=None).model.width == 7  # type: ignore[attr-defined]
