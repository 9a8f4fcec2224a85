"""Plain data as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from drivetrain.base.restoring import WrongForm
from drivetrain.checkpoints import json_tree
from drivetrain.errors import CheckpointError

VALUE: dict[str, Any] = {
    "numbers": [0, -3, 2**200, 0.1, 1e-300, math.inf, -math.inf, True, None], "text": "\x00 \ud800 é",
    "keys": {1: "a", (2, "b"): 1.5, None: [], 0.5: {}}, "dollar": {"$tensor": "x"}, "tuple": (1, (2, [3])),
    "set": {1, 2}, "bytes": b"\x00\xff", "array": bytearray(b"abc"), "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("aab"), "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
    "complex": 1.5 - 2j, "empty": [{}, [], (), ""],
}  # fmt: skip


def there_and_back(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}

    def name_of(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
        tensors[name := ".".join(map(str, path))] = tensor
        return name

    text = json.dumps(json_tree.encode(value, name_of), allow_nan=False)
    return json_tree.decode(json.loads(text), tensors.__getitem__), tensors


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types(key), types(item)) for key, item in value.items()]
    return (type(value), [types(item) for item in value]) if isinstance(value, (list, tuple)) else type(value)


def test_values_keep_their_types_and_every_bit() -> None:
    found, _ = there_and_back(VALUE)
    assert found == VALUE
    assert types(found) == types(VALUE)
    assert list(found["ordered"]) == ["b", "a"]
    assert math.isnan(there_and_back([math.nan])[0][0])
    assert math.copysign(1, there_and_back(-0.0)[0]) == -1


def test_tensors_are_passed_with_their_places() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    found, tensors = there_and_back({"a": [one, {"b": two}], 3: (one,)})
    assert found["a"][0] is found[3][0] is one
    assert list(tensors) == ["a.0", "a.1.b", "3.0"]


def test_an_object_is_an_error_that_names_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"callbacks/mine is .*object.*sharded checkpoint holds plain data"):
        there_and_back({"callbacks": {"mine": object()}})


def test_an_unknown_mark_is_damage() -> None:
    with pytest.raises(WrongForm, match=r"unknown mark '\$pickle'"):
        json_tree.decode({"$pickle": "x"}, dict[str, torch.Tensor]().__getitem__)
