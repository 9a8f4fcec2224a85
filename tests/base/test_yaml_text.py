"""YAML text: as people write it, and every reader gets back what was written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.base.yaml_text import dump, is_plain

yaml = pytest.importorskip("yaml")


def test_it_reads_as_people_write_it() -> None:
    values = {
        "lr": 1e-5, "hidden": 64, "name": "resnet-50", "dropout": None, "amp": True, "data": Path("runs/a b"),
        "model": {"layers": [1, 2], "act": {}, "head": {"kind": "mlp"}}, "stages": [{"count": 1, "k": 2}, []],
    }  # fmt: skip
    assert dump(values) == (
        "lr: 1.0e-05\n"
        "hidden: 64\n"
        "name: resnet-50\n"
        "dropout: null\n"
        "amp: true\n"
        "data: runs/a b\n"
        "model:\n"
        "  layers:\n"
        "    - 1\n"
        "    - 2\n"
        "  act: {}\n"
        "  head:\n"
        "    kind: mlp\n"
        "stages:\n"
        "  - count: 1\n"
        "    k: 2\n"
        "  - []\n"
    )
    assert dump({}) == "{}\n"


@pytest.mark.parametrize(
    "text",
    ["", " x", "x ", "yes", "No", "null", "~", "1", "1e3", "0x1f", "1:30", "2020-01-01", ".5", ".inf", "-1", "- a",
     "a: b", "a:", "a #b", "#a", "a#b", "[1]", "{a: 1}", "*a", "&a", "!a", "%a", "@a", "`a", "'a'", '"a"', "a\nb",
     "a\tb", "\x00", "\x07", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffe", "caf\udce9", "caf\xe9",
     "\U0001f600", "=", "<<", "cuda:0", "a=b, c", "/tmp/x y", "?", "? a", "|", ">", "on", "off", "y", "n", "...",
     "---", "a" * 2000],
)  # fmt: skip
def test_every_text_comes_back_as_key_and_as_value(text: str) -> None:
    values = {text: text, "list": [text, [text]], "below": {text: {text: text}}}
    written = dump(values)
    written.encode()
    assert yaml.safe_load(written) == values


def test_random_values_come_back() -> None:
    draw = random.Random(3)
    leaves: list[Any] = [None, True, 0, -3, 10**25, 1.5, 1e-9, 1e300, float("inf"), "a", "a b", "1", "", "x: y"]

    def value(depth: int) -> Any:
        kind = draw.randrange(4) if depth < 4 else 0
        if kind == 1:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 2:
            return {f"k{i}": value(depth + 1) for i in range(draw.randrange(4))}
        return draw.choice(leaves)

    for _ in range(300):
        values = {f"k{i}": value(0) for i in range(draw.randrange(6))}
        assert yaml.safe_load(dump(values)) == values


def test_what_contains_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert yaml.safe_load(dump({"loop": loop})) == {"loop": [1, "..."]}


def test_what_is_plain() -> None:
    assert is_plain({"a": [1, None, ("x", 2.5)]})
    assert not is_plain({"a": [Path("x")]})
    assert yaml.safe_load(dump({1: {None: 2, 1.5: 3, True: 4}})) == {1: {None: 2, 1.5: 3, True: 4}}
    assert not is_plain({(1, 2): 2})


def test_numbers_and_booleans_of_numpy_come_back_as_what_they_are() -> None:
    values = {"yes": np.bool_(True), "no": np.bool_(False), "whole": np.int64(3), "real": np.float32(0.5)}
    assert yaml.safe_load(dump(values)) == {"yes": True, "no": False, "whole": 3, "real": 0.5}
