"""RichModelSummary: the same facts as a table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain.callbacks import RichModelSummary
from drivetrain.errors import ConfigurationError


def test_table_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.ModuleDict({"[red]": nn.Linear(40, 50)})
    RichModelSummary(title="mine").on_fit_start(SimpleNamespace(is_global_zero=True), net)
    out = capsys.readouterr().out
    for text in ("mine", "[red]", "Linear", "2.0 K", "train", "Total params", "Modules in eval mode"):
        assert text in out


def test_sizes_and_operations(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    net.example_input_array = torch.ones(3, 4)
    RichModelSummary().on_fit_start(SimpleNamespace(is_global_zero=True), net)
    out = capsys.readouterr().out
    for text in ("In sizes", "Out sizes", "[3, 4]", "[3, 2]", "48", "Total estimated FLOPs"):
        assert text in out


def test_depth_zero_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    RichModelSummary(max_depth=0).on_fit_start(SimpleNamespace(is_global_zero=True), nn.Sequential(nn.ReLU()))
    out = capsys.readouterr().out
    assert "ReLU" not in out
    assert "Total params" in out


def test_missing_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install rich`, or use ModelSummary"):
        RichModelSummary()
