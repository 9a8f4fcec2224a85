"""ModelSummary: counts, depths and modes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain.callbacks import ModelSummary
from drivetrain.callbacks.model_summary import human_count, summarize
from drivetrain.errors import ConfigurationError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout()))
        self.head = nn.Linear(8, 2)


def test_depths() -> None:
    names = {depth: [row.name for row in summarize(Net(), depth).rows] for depth in (-1, 0, 1, 2)}
    assert names == {
        0: [],
        1: ["body", "head"],
        2: ["body", "body.0", "body.1", "head"],
        -1: ["body", "body.0", "body.1", "body.1.0", "body.1.1", "head"],
    }


def test_counts_and_modes() -> None:
    net = Net()
    net.head.requires_grad_(False)
    net.body.eval()
    summary = summarize(net)
    assert [(row.index, row.type, row.num_parameters, row.training) for row in summary.rows] == [
        (0, "Sequential", 104, False),
        (1, "Linear", 18, True),
    ]
    assert (summary.trainable, summary.frozen, summary.total) == (104, 18, 122)
    assert summary.size_bytes == 122 * 4
    assert (summary.modules_in_train, summary.modules_in_eval) == (1, 5)


def test_shared_parameters_count_once_in_the_totals() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    net["b"].weight = net["a"].weight
    summary = summarize(net)
    assert [row.num_parameters for row in summary.rows] == [9, 9]
    assert summary.total == 9


def test_size_follows_each_parameters_own_element() -> None:
    net = nn.ModuleList([nn.Linear(2, 1, bias=False, dtype=torch.float64), nn.Linear(2, 1, bias=False).bfloat16()])
    assert summarize(net).size_bytes == 2 * 8 + 2 * 2


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_parameters_are_marked() -> None:
    net = nn.ModuleList([nn.LazyLinear(3), nn.Linear(1, 1)])
    summary = summarize(net)
    assert [row.is_lazy for row in summary.rows] == [True, False]
    assert summary.total == 2
    assert summary.has_lazy
    assert "0 *" in str(summary)


def test_it_is_printed_when_fit_starts(capsys: pytest.CaptureFixture[str]) -> None:
    ModelSummary().on_fit_start(SimpleNamespace(is_global_zero=True), Net())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4] if "-" not in line] == [
        ["|", "Name", "|", "Type", "|", "Params", "|", "Mode"],
        ["0", "|", "body", "|", "Sequential", "|", "104", "|", "train"],
        ["1", "|", "head", "|", "Linear", "|", "18", "|", "train"],
    ]
    assert lines[-6:] == [
        "122       Trainable params",
        "0         Non-trainable params",
        "122       Total params",
        "0.000     Total params size (MB)",
        "6         Modules in train mode",
        "0         Modules in eval mode",
    ]


def test_depth_zero_prints_totals_only(capsys: pytest.CaptureFixture[str]) -> None:
    ModelSummary(max_depth=0).on_fit_start(SimpleNamespace(is_global_zero=True), Net())
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    ModelSummary().on_fit_start(SimpleNamespace(is_global_zero=False), Net())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 K"), (1234, "1.2 K"), (999_960, "1.0 M"), (3_400_000, "3.4 M"),
     (7_000_000_000, "7.0 B"), (1.1e12, "1.1 T"), (2.5e15, "2,500.0 T")],
)  # fmt: skip
def test_human_count(number: float, text: str) -> None:
    assert human_count(int(number)) == text


def test_wrong_depth_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_depth=-2"):
        ModelSummary(max_depth=-2)
