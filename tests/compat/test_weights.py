"""Helpers of Fabric that programs such as litgpt import from its private modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.compat import weights
from drivetrain.errors import CheckpointError


@pytest.mark.usefixtures("served")
def test_they_are_where_programs_import_them() -> None:
    for root in ("lightning.fabric", "lightning_fabric"):
        load = importlib.import_module(f"{root}.utilities.load")
        init = importlib.import_module(f"{root}.utilities.init")
        assert load._lazy_load is weights._lazy_load
        assert init._materialize_meta_tensors is weights._materialize_meta_tensors


def test_a_file_is_read_as_tensors(tmp_path: Path) -> None:
    saved = {"weight": torch.arange(6.0).reshape(2, 3), "more": {"step": 3}}
    torch.save(saved, tmp_path / "model.pth")
    found = weights._materialize_tensors(weights._lazy_load(tmp_path / "model.pth"))
    assert torch.equal(found["weight"], saved["weight"])
    assert found["more"] == {"step": 3}
    assert not isinstance(found["weight"], weights._NotYetLoadedTensor)
    with pytest.raises(CheckpointError, match="There is no file .*missing.pth"):
        weights._lazy_load(tmp_path / "missing.pth")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_file_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(Exception, match="Weights only load failed"):
        weights._lazy_load(tmp_path / "evil.pth")
    assert capsys.readouterr().out == ""


def test_states_are_moved_into_objects_and_places() -> None:
    layer, source = nn.Linear(2, 1), {"layer": nn.Linear(2, 1).state_dict(), "step": 3, "other": 4}
    weight = source["layer"]["weight"]  # type: ignore[index]
    destination: dict[str, Any] = {"layer": layer, "step": 0}
    weights._move_state_into(source, destination, {"layer", "step", "absent"})
    assert torch.equal(layer.weight, weight)
    assert (destination["step"], source) == (3, {"other": 4})
    weights._move_state_into(source, destination)
    assert (destination["other"], source) == (4, {})


def test_layers_on_the_meta_device_get_memory_and_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert weights._has_meta_device_parameters_or_buffers(model)
    assert weights._has_meta_device_parameters_or_buffers(optimizer)
    assert not weights._has_meta_device_parameters_or_buffers(model, recurse=False)
    weights._materialize_meta_tensors(model, "cpu")
    assert not weights._has_meta_device_parameters_or_buffers(model)
    assert model[1].weight.tolist() == [1.0, 1.0]
    with torch.device("meta"):
        without = nn.Module()
        without.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match="Module has parameters on the meta device, and no reset_parameters"):
        weights._materialize_meta_tensors(without, "cpu")


def test_values_are_left_out_where_that_is_asked_for() -> None:
    for enabled in (True, False):
        layer = nn.Linear(2, 1)
        before = layer.weight.clone()
        with weights._EmptyInit(enabled):
            nn.init.kaiming_uniform_(layer.weight)
        assert torch.equal(layer.weight, before) is enabled
