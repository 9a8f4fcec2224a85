from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentError

Make = Callable[..., Any]


def said(cli: Make, *words: str, **arguments: Any) -> str:
    with pytest.raises(ArgumentError) as refused:
        cli(*words, **arguments)
    return str(refused.value).splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("fti", "Did you mean 'fit'?"),
        ("train", "Did you mean 'fit'?"),
        ("train --trainer.max_epochs=3", "Did you mean 'fit'?"),
        ("evaluate", "Did you mean 'validate'?"),
        ("fit --max_epochs=1", "Did you mean --trainer.max_epochs?"),
        ("fit --width=1", "Did you mean --model.width?"),
        ("fit --trainer.max_epoch=3", "Did you mean --trainer.max_epochs?"),
        ("fit --trainer.max_epoch 3", "Did you mean --trainer.max_epochs?"),
        ("fit --modle.width=3", "Did you mean --model.width?"),
        ("fit --model.widht=3", "Did you mean --model.width?"),
        ("fit --seed_everthing=3", "Did you mean --seed_everything?"),
        ("fit --ckpt_paht=x", "Did you mean --ckpt_path?"),
        ("fit --trainer.callbacks+=EarlyStoping", "Did you mean 'EarlyStopping'?"),
        ("fit --optimizer=SDG", "Did you mean 'SGD'?"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_likeliest_one(cli: Make, words: str, hint: str) -> None:
    assert said(cli, *words.split()) == hint


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--trainer.max_epochs=1", "Write `fit` first: fit --trainer.max_epochs=1"),
        ("--trainer.max_epochs=1 fit", "Write `fit` first: fit --trainer.max_epochs=1"),
        ("--return_predictions=false", "Write `predict` first: predict --return_predictions=false"),
        ("--trainer.max_epochs 1", "Write `fit` first: fit --trainer.max_epochs=3"),  # the 1 is taken for a subcommand
    ],
)
def test_an_option_without_a_subcommand_before_it_is_answered_with_the_subcommand(
    cli: Make, words: str, hint: str
) -> None:
    assert said(cli, *words.split()) == f"Options come after the subcommand. {hint}"


@pytest.mark.parametrize(
    ("option", "path"),
    [("logger", "lightning.pytorch.loggers.CSVLogger"), ("callbacks+", "pytorch_lightning.callbacks.Timer")],
)
def test_a_path_of_lightning_is_answered_with_the_name_of_the_class(cli: Make, option: str, path: str) -> None:
    answer = f"{path!r} is a path of Lightning's. Write the name of the class alone, {path.rpartition('.')[2]!r}"
    assert said(cli, "fit", f"--trainer.{option}={{class_path: {path}}}").startswith(answer)
    assert answer not in said(cli, "fit", "--trainer.logger={class_path: no_such_package.CSVLogger}")


def test_an_option_of_no_subcommand_is_not_answered_with_one(cli: Make) -> None:
    assert "first" not in said(cli, "--zzz=1")
    assert said(cli, "--modle.width=3") == "Did you mean --model.width?"


def test_an_argument_of_older_trainers_is_answered_with_its_successor(cli: Make) -> None:
    assert said(cli, "fit", "--trainer.gpus=2").endswith('Write accelerator="gpu", devices=... instead. [DT1049]')


def test_a_word_that_is_like_no_other_is_answered_with_no_guess(cli: Make) -> None:
    assert "Did you mean" not in said(cli, "fit", "--model.zzz=3")


def test_a_misspelt_model_and_its_misspelt_argument_are_answered(cli: Make) -> None:
    assert said(cli, "fit", "--model=CliDep", model_class=None) == "Did you mean 'CliDeep'?"
    with pytest.raises(ArgumentError, match="Did you mean depth?"):
        cli("fit", "--model=CliDeep", "--model.dept=3", model_class=None)


@pytest.mark.parametrize("run", [True, False])
def test_a_misspelt_key_of_a_file_is_answered(cli: Make, tmp_path: Path, run: bool) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {max_epoch: 3}\n", encoding="utf-8")
    words = ["fit", "-c", "run.yaml"] if run else ["-c", "run.yaml"]
    assert said(cli, *words, run=run) == "Did you mean trainer.max_epochs?"


def test_an_option_is_not_abbreviated(cli: Make) -> None:
    assert said(cli, "fit", "--trainer.max_ep=3") == "Did you mean --trainer.max_epochs?"


def test_the_shell_sees_the_hint_and_the_code_two(cli: Make, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli("fit", "--model.widht=3", parser_kwargs={})
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith("Did you mean --model.width?")
