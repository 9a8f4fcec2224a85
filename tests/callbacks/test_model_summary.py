"""ModelSummary: counts, depths and modes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule, seed_everything
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


# ---- the example input -----------------------------------------------------------------------------------------------


class Example(LightningModule):
    """Normalisation, dropout, a part that stays in evaluation mode, one that never runs, and ``self.log``."""

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)
        self.unused = nn.Linear(3, 3)
        self.head.eval()
        self.example_input_array = example
        self.seen: list[tuple[bool, bool, torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log("mean", x.mean())
        self.log_dict({"a": 1.0, "b": torch.tensor(2.0)})
        y: torch.Tensor = self.head(self.body(x))
        self.seen.append((self.training, torch.is_grad_enabled(), x.dtype, y.dtype))
        return y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wrapped(nn.Module):
    """Any module with an example."""

    def __init__(self, inner: nn.Module, example: Any) -> None:
        super().__init__()
        self.inner = inner
        self.example_input_array = example

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def sizes(module: nn.Module, depth: int = 1) -> dict[str, tuple[Any, Any]]:
    return {row.name: (row.in_sizes, row.out_sizes) for row in summarize(module, depth).rows}


def test_sizes_and_operations_are_shown(capsys: pytest.CaptureFixture[str], make_trainer: Any, loader: Any) -> None:
    make_trainer(enable_model_summary=True, max_steps=0).fit(Example(torch.zeros(3, 4)), loader)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("| Name | Type | Params | Mode | FLOPs | In sizes | Out sizes")
    assert lines[start + 2 : start + 5] == [
        "0 | body | Sequential | 56 | train | 192 | [3, 4] | [3, 8]",
        "1 | head | Linear | 18 | eval | 96 | [3, 8] | [3, 2]",
        "2 | unused | Linear | 12 | train | 0 | ? | ?",
    ]
    assert "288 Total estimated FLOPs" in lines  # 3 samples, two operations for each of 32 + 16 weights


def test_without_an_example_nothing_is_run_and_nothing_shown(capsys: pytest.CaptureFixture[str]) -> None:
    model = Example()
    ModelSummary().on_fit_start(SimpleNamespace(is_global_zero=True), model)
    out = capsys.readouterr().out
    assert model.seen == []
    assert "sizes" not in out
    assert "FLOPs" not in out
    assert sizes(model)["head"] == (None, None)


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: Any = None, *, scale: Any = None) -> Any:
        return {"all": [x, None], "pair": (x.sum(), y)}


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (torch.ones(2, 3), [2, 3]),
        ((torch.ones(2, 3), torch.ones(1)), [[2, 3], [1]]),
        ({"x": torch.ones(2, 3), "scale": 0.5}, [[2, 3], "?"]),
        ((torch.ones(2, 3), [torch.ones(1), torch.ones(())]), [[2, 3], [[1], []]]),
        ((torch.ones(2, 3), {}), [[2, 3], "?"]),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "?"),
    ],
    ids=["tensor", "tuple", "mapping", "nested", "empty", "ragged"],
)
def test_an_example_may_be_one_argument_a_tuple_or_a_mapping(example: Any, expected: Any) -> None:
    found, _ = sizes(Wrapped(Sum(), example))["inner"]
    assert found == expected


def test_several_outputs() -> None:
    summary = summarize(Wrapped(Sum(), (torch.ones(2, 3), torch.ones(1))))
    assert summary.rows[0].out_sizes == [[[2, 3], "?"], [[], [1]]]
    assert "[[2, 3], [1]] | [[[2, 3], ?], [[], [1]]]" in str(summary)


def test_a_part_in_two_places_has_one_row_with_its_first_sizes() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.ReLU()
            self.example_input_array = torch.ones(2, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(self.first(x).sum())

    assert sizes(Twice()) == {"first": ([2, 3], [2, 3])}


def weights_after_fit(make_trainer: Any, data: Any, **arguments: Any) -> tuple[Example, dict[str, Any]]:
    seed_everything(5)
    model = Example()
    if arguments:
        model.example_input_array = torch.full((3, 4), 100.0)
    make_trainer(max_epochs=2, **arguments).fit(model, DataLoader(data, batch_size=8, shuffle=True))
    return model, model.state_dict()


@pytest.mark.filterwarnings("ignore:Modules in eval mode")
def test_t18_a_run_does_not_notice(make_trainer: Any, data: Any) -> None:
    model, plain = weights_after_fit(make_trainer, data)
    tried, shown = weights_after_fit(make_trainer, data, enable_model_summary=True)
    assert (len(model.seen), len(tried.seen)) == (8, 9)
    assert tried.seen[0][:2] == (False, False)
    assert tried.seen[1][:2] == (True, True)
    for name, value in plain.items():  # running statistics of the normalisation too
        assert torch.equal(value, shown[name]), name
    assert [part.training for part in tried.modules()] == [part.training for part in model.modules()]
    assert not any(part._forward_hooks for part in tried.modules())


@pytest.mark.filterwarnings("ignore:Modules in eval mode")
def test_what_forward_logs_in_the_pass_goes_nowhere(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer(enable_model_summary=True)
    trainer.fit(Example(torch.full((3, 4), 100.0)), loader)
    assert set(trainer.callback_metrics) == {"mean", "a", "b"}
    assert trainer.callback_metrics["mean"] < 10
    summarize(Example(torch.zeros(3, 4)))  # no warning without a Trainer either


class Broken(Example):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ValueError("no such thing")


def test_a_failure_is_a_warning_and_the_table_comes_without_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    model = Broken(torch.zeros(3, 4))
    modes, state = [part.training for part in model.modules()], torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"Broken failed .*\(ValueError: no such thing\)\. Set it to inputs") as caught:
        ModelSummary().on_fit_start(SimpleNamespace(is_global_zero=True), model)
    assert len(caught) == 1
    out = capsys.readouterr().out
    assert "Total params" in out
    assert "sizes" not in out
    assert [part.training for part in model.modules()] == modes
    assert not any(part._forward_hooks for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_without_forward_there_are_no_sizes(regression: Any) -> None:
    model = regression()
    model.example_input_array = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="NotImplementedError"):
        assert summarize(model).rows[0].in_sizes is None


def test_where_operations_cannot_be_counted_the_sizes_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("shapes do not match")

    monkeypatch.setattr("torch.utils.flop_counter.FlopCounterMode._count_flops", fail)
    summary = summarize(Example(torch.zeros(3, 4)))
    assert summary.flops is None
    assert summary.rows[0].out_sizes == [3, 8]
    assert "FLOPs" not in str(summary)


def test_no_operation_counted_is_not_zero_operations() -> None:
    assert summarize(Wrapped(nn.ReLU(), torch.ones(2))).flops is None


@pytest.mark.filterwarnings("ignore:Modules in eval mode")
@pytest.mark.parametrize(
    ("precision", "seen", "returned"),
    [("bf16-mixed", torch.float32, torch.bfloat16), ("64-true", torch.float64, torch.float64)],
)
def test_the_pass_has_the_runs_precision(
    make_trainer: Any, loader: Any, precision: str, seen: torch.dtype, returned: torch.dtype
) -> None:
    model = Example(torch.zeros(3, 4))
    make_trainer(precision=precision, enable_model_summary=True).fit(model, loader)
    assert model.seen[0] == (False, False, seen, returned)
    assert model.example_input_array.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_parameters_are_left_to_the_first_batch() -> None:
    model = Wrapped(nn.LazyLinear(3), torch.ones(1, 2))
    with pytest.warns(UserWarning, match="the first batch must initialize its lazy parameters"):
        summary = summarize(model)
    assert summary.has_lazy
    assert isinstance(model.inner.weight, nn.UninitializedParameter)


def test_attention_runs_as_it_is_written() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    example = {"src": torch.ones(2, 3, 8), "src_key_padding_mask": torch.tensor([[False, False, True]] * 2)}
    model = Wrapped(nn.TransformerEncoder(layer, 1), example)
    summary = summarize(model, max_depth=-1)
    rows = {row.name: row for row in summary.rows}
    assert rows["inner.layers.0.linear1"].in_sizes == [2, 3, 8]
    assert (summary.flops or 0) >= 2 * 6 * (4 * 8 * 8 + 2 * 8 * 16)  # six tokens through the matrices
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own advice
def test_a_scripted_part_cannot_be_watched() -> None:
    model = Wrapped(nn.Sequential(torch.jit.script(nn.Linear(2, 3)), nn.ReLU()), torch.ones(1, 2))
    assert sizes(model, 2) == {
        "inner": ([1, 2], [1, 3]), "inner.0": ("?", "?"), "inner.1": ([1, 3], [1, 3])
    }  # fmt: skip


def test_a_compiled_part_is_not_compiled_for_it() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = Wrapped(torch.compile(nn.Linear(2, 3), backend=backend), torch.ones(1, 2))
    summary = summarize(model)
    assert summary.rows[0].out_sizes == [1, 3]
    assert summary.flops == 12
    assert compiled == []
    model(torch.ones(1, 2))
    assert len(compiled) == 1


def test_a_subclass_gets_the_summary_column_by_column(capsys: pytest.CaptureFixture[str]) -> None:
    given: list[Any] = []

    class Own(ModelSummary):
        @staticmethod
        def summarize(*args: Any, **kwargs: Any) -> None:
            given.append(kwargs)

    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    Own(1, mine=3).show(summarize(net))
    assert given == [
        {
            "summary_data": [
                ("", ["0", "1"]), ("Name", ["0", "1"]), ("Type", ["Linear", "Linear"]), ("Params", ["9", "4"]),
                ("Mode", ["train", "train"]),
            ],
            "total_parameters": 13, "trainable_parameters": 4, "model_size": 13 * 4 / 1e6,
            "total_training_modes": {"train": 2, "eval": 0}, "total_flops": 0, "mine": 3,
        }
    ]  # fmt: skip
    arguments = given[0]
    ModelSummary.summarize(**arguments)
    assert capsys.readouterr().out == f"{summarize(net)}\n"
