from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.compat.loggers import (
    _add_prefix,
    _convert_params,
    _flatten_dict,
    _sanitize_callable_params,
    _sanitize_params,
    _scan_checkpoints,
    merge_dicts,
    rank_zero_experiment,
)


class Logger:
    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Where it writes."""
        return "real"


def test_the_experiment_is_real_on_rank_zero_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert Logger().experiment == "real"
    monkeypatch.setenv("RANK", "1")
    other = Logger().experiment
    assert other.log({"a": 1}).anything() is other


def test_dictionaries_are_merged_key_by_key() -> None:
    merged = merge_dicts(
        [{"a": 1, "v": 1, "d": {"x": 2, "y": 3}}, {"a": 2, "b": 3, "v": 2, "d": {"x": 3}}],
        {"a": min, "v": max, "d": {"x": sum}},
    )
    assert merged == {"a": 1, "v": 2, "b": 3, "d": {"x": 5, "y": 3}}
    assert merge_dicts([{"a": 1}, {"a": 2}]) == {"a": 1.5}
    assert merge_dicts([{"a": 1}, {"a": 2}], default_func=sum) == {"a": 3}


def test_parameters_become_plain() -> None:
    assert _convert_params(None) == {}
    assert _convert_params(Namespace(a=1)) == _convert_params({"a": 1}) == {"a": 1}
    nested = {"a": {"b": 1, "c": {"d": 2}}, "e": [{"x": 1}], "f": Namespace(g=1), 5: 6}
    assert _flatten_dict(nested) == {"a/b": 1, "a/c/d": 2, "e": [{"x": 1}], "f/g": 1, "5": 6}
    assert _flatten_dict({"a": {"b": 1}}, delimiter=".", parent_key="p") == {"p.a.b": 1}


def test_functions_become_what_they_return_or_their_names() -> None:
    def fails() -> None:
        raise RuntimeError

    def makes() -> Any:
        return fails

    callables = {"a": lambda: 3, "b": nn.Linear, "c": fails, "d": makes, "e": 4}
    assert _sanitize_callable_params(callables) == {"a": 3, "b": "Linear", "c": "fails", "d": "makes", "e": 4}


def test_what_no_logger_takes_becomes_text() -> None:
    tensor = torch.ones(1)
    kept = {"a": 1, "b": tensor, "c": True, "d": "text", "e": 1.5}
    assert _sanitize_params({**kept, "f": [1], "g": None}) == {**kept, "f": "[1]", "g": "None"}


def test_a_prefix_where_there_is_one() -> None:
    assert _add_prefix({"a": 1}, "p", "-") == {"p-a": 1}
    assert _add_prefix({"a": 1}, "", "-") == {"a": 1}


def test_new_files_of_a_checkpoint_callback_for_a_logger_that_uploads_them(tmp_path: Path) -> None:
    saver, paths = (
        ModelCheckpoint(tmp_path),
        [str(tmp_path / f"{name}.ckpt") for name in ("last", "best", "third", "gone")],
    )
    last, best, third, gone = paths
    for age, path in enumerate([third, best, last]):
        Path(path).touch()
        os.utime(path, (age, age))
    saver.last_model_path, saver.current_score = last, torch.tensor(2.0)
    saver.best_model_path, saver.best_model_score = best, torch.tensor(1.0)
    saver.best_k_models = {third: torch.tensor(3.0), gone: torch.tensor(4.0)}
    found = [(path, float(score), tag) for _, path, score, tag in _scan_checkpoints(saver, {})]
    assert found == [(third, 3.0, "best_k"), (best, 1.0, "best"), (last, 2.0, "latest")]
    assert [path for _, path, *_ in _scan_checkpoints(saver, {third: 0.0, best: 0.5, last: 2.0})] == [best]
    assert _scan_checkpoints(OnExceptionCheckpoint(tmp_path), {}) == []
