"""``drivetrain checkpoint diff``: names, shapes, types, values and counters, one tensor at a time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import Harmful, answer, loaded, run, shards_of, trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


def weights(path: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, path)
    return path


def test_equal_checkpoints_are_equal_whatever_their_kind(model: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shards_of(loaded(model), tmp_path / "shards")
    for one, other in ((model, model), (model, folder), (folder, model)):
        code, out, _ = run(capsys, "diff", one, other)
        assert code == 0
        assert out.startswith("equal to the last bit: ")


def test_every_difference_is_named(tmp_path: Path, capsys: Any) -> None:
    nan = float("nan")
    one = weights(tmp_path / "one", same=torch.tensor([1.0, nan]), value=torch.tensor([1.0, 2.0, 3.0]),
                  shape=torch.zeros(2), kind=torch.ones(2), gone=torch.ones(1), sign=torch.tensor(0.0),
                  far=torch.tensor([nan, 1.0]), number=torch.tensor(7), wave=torch.tensor([1 + 2j]))  # fmt: skip
    two = weights(tmp_path / "two", same=torch.tensor([1.0, nan]), value=torch.tensor([1.0, 2.5, 3.25]),
                  shape=torch.zeros(3), kind=torch.ones(2).half(), new=torch.ones(1), sign=torch.tensor(-0.0),
                  far=torch.tensor([1.0, 1.0]), number=torch.tensor(9), wave=torch.tensor([1 + 5j]))  # fmt: skip
    assert run(capsys, "diff", one, two)[0] == 1
    found = answer(capsys, "diff", one, two)
    assert not found["equal"]
    assert (found["only_in_a"], found["only_in_b"]) == (["state_dict/gone"], ["state_dict/new"])
    by_name = {each.pop("name").removeprefix("state_dict/"): each for each in found["tensors"]}
    assert by_name == {
        "value": {"elements": 3, "differing": 2, "max_abs_difference": 0.5, "not_finite": 0},
        "shape": {"shapes": [[2], [3]]},
        "kind": {
            "dtypes": ["float32", "float16"], "elements": 2, "differing": 0, "max_abs_difference": 0.0, "not_finite": 0
        },
        "sign": {"elements": 1, "differing": 1, "max_abs_difference": 0.0, "not_finite": 0},
        "far": {"elements": 2, "differing": 1, "max_abs_difference": 0.0, "not_finite": 1},
        "number": {"elements": 1, "differing": 1, "max_abs_difference": 2.0, "not_finite": 0},
        "wave": {"elements": 1, "differing": 1, "max_abs_difference": 3.0, "not_finite": 0},
    }  # fmt: skip
    _, out, _ = run(capsys, "diff", one, two)
    for line in (
        f"only in {one}: state_dict/gone", "state_dict/value: 2 of 3 elements differ, by at most 0.5",
        "state_dict/shape: [2] and [3]", "state_dict/kind: float32 and float16; 0 of 2 elements differ",
        "state_dict/far: 1 of 2 elements differ, by at most 0; 1 differences are not finite",
    ):  # fmt: skip
        assert f"{line}\n" in out


def test_counters_and_states_of_a_run_are_compared(model: Path, capsys: Any) -> None:
    (at_end,) = (model.parent / "runs").glob("*.ckpt")
    found = answer(capsys, "diff", at_end, model)
    assert {"name": "epoch", "a": "1", "b": "2"} in found["values"]
    assert found["tensors"] == []
    assert answer(capsys, "diff", at_end, model, "--weights")["equal"]


def test_what_one_kind_cannot_hold_is_not_compared(model: Path, tmp_path: Path, capsys: Any) -> None:
    run(capsys, "convert", model, tmp_path / "light.ckpt", "--to", "lightning")
    found = answer(capsys, "diff", model, tmp_path / "light.ckpt")
    assert found["not_compared"] == ["optimizers", "restart", "rng"]
    assert found["only_in_a"] == ["hyper_parameters/folder"]  # a path, which Lightning's plain data cannot hold
    assert (found["values"], found["tensors"]) == ([], [])
    assert found["tensors_compared"] > 20


def test_large_tensors_are_compared_in_parts(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.cli import checkpoint_diff

    monkeypatch.setattr(checkpoint_diff, "_CHUNK", 10)
    value = torch.arange(105.0)
    other = value.clone()
    other[[3, 57, 104]] += torch.tensor([1.0, 4.0, 2.0])
    files = weights(tmp_path / "one", w=value.reshape(5, 21)), weights(tmp_path / "two", w=other.reshape(5, 21))
    (found,) = answer(capsys, "diff", *files)["tensors"]
    assert (found["differing"], found["max_abs_difference"]) == (3, 4.0)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (torch.tensor([2**62 + 1]), torch.tensor([2**62]), 1),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2**64 - 1),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**63], dtype=torch.uint64), 2**63 - 1),
        (torch.tensor([True]), torch.tensor([False]), 1),
        (torch.tensor([1], dtype=torch.uint8), torch.tensor([513], dtype=torch.uint16), 512),
        (torch.tensor([1.0]), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1.0),
    ],
)
def test_distances_are_exact_for_every_type(
    tmp_path: Path, capsys: Any, one: torch.Tensor, other: torch.Tensor, distance: float
) -> None:
    torch.save({"w": one}, tmp_path / "one.pt")
    torch.save({"w": other}, tmp_path / "other.pt")
    found = answer(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")
    assert found["tensors"][0]["max_abs_difference"] == distance
    code, out, _ = run(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")
    assert (code, f"by at most {int(distance)}" in out) == (1, True)


def test_types_without_a_common_one_are_only_named(tmp_path: Path, capsys: Any) -> None:
    torch.save({"w": torch.ones(1, dtype=torch.uint64)}, tmp_path / "one.pt")
    torch.save({"w": torch.ones(1, dtype=torch.int64)}, tmp_path / "other.pt")
    code, out, _ = run(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")
    assert (code, out.splitlines()[0]) == (1, "state_dict/w: uint64 and int64")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_and_sparse_tensors_are_refused_where_they_are_not_supported(tmp_path: Path, capsys: Any) -> None:
    torch.save({"w": torch.ones(2, 2).to_sparse()}, tmp_path / "sparse.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch advise against such tensors
        torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}, tmp_path / "quantized.pt")
    for command in (["diff", tmp_path / "sparse.pt"], ["convert", tmp_path / "x", "--to", "dcp"]):
        code, _, said = run(capsys, command[0], tmp_path / "quantized.pt", *command[1:])
        assert (code, "w is a quantized tensor" in said) == (2, True)
    code, _, said = run(capsys, "convert", tmp_path / "sparse.pt", tmp_path / "x", "--to", "dcp")
    assert (code, "w is a sparse tensor" in said, (tmp_path / "x").exists()) == (2, True, False)
    assert run(capsys, "convert", tmp_path / "sparse.pt", tmp_path / "x.ckpt", "--to", "drivetrain")[0] == 0
    assert run(capsys, "diff", "--weights", tmp_path / "sparse.pt", tmp_path / "x.ckpt")[0] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_objects_that_are_not_loaded_are_not_compared(tmp_path: Path, capsys: Any) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save(
        {"model": {"w": torch.ones(2)}, "own": Harmful(tmp_path / "harm")}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    code, out, _ = run(capsys, "diff", tmp_path / "dcp", tmp_path / "dcp")
    assert (code, "not compared: own" in out) == (0, True)
