from __future__ import annotations

import torch

from drivetrain.compat.boring_classes import BoringModel
from drivetrain.compat.model_summary import (
    ModelSummary,
    get_formatted_model_size,
    get_human_readable_count,
    parse_batch_shape,
    summarize,
)


def test_a_summary_under_the_names_that_programs_read() -> None:
    model = BoringModel()
    found = summarize(model, max_depth=1)
    assert isinstance(found, ModelSummary)
    assert (found.layer_names, found.layer_types, found.param_nums) == (["layer"], ["Linear"], [66])
    assert (found.in_sizes, found.out_sizes, found.total_flops) == (["?"], ["?"], 0)
    assert (found.training_modes, found.total_training_modes) == ([True], {"train": 1, "eval": 0})
    assert (found.total_parameters, found.trainable_parameters, found.model_size) == (66, 66, 66 * 4 / 1e6)
    assert found.named_modules == [("layer", model.layer)]
    assert "66" in str(found) == repr(found)
    assert summarize(model, 0).layer_names == []


def test_an_example_input_adds_sizes() -> None:
    model = BoringModel()
    model.example_input_array = torch.ones(3, 32)
    found = ModelSummary(model)
    assert (found.in_sizes, found.out_sizes) == ([[3, 32]], [[3, 2]])
    assert found.total_flops == 2 * 3 * 32 * 2


def test_flops_are_counted_for_each_row_with_its_children() -> None:
    model = BoringModel()
    model.example_input_array = torch.ones(3, 32)
    model.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    found = ModelSummary(model, max_depth=-1)
    counts = {name: sum(by_kind.values()) for name, by_kind in found.flop_counts.items()}
    assert counts == {"layer": 1632, "layer.0": 1536, "layer.1": 0, "layer.2": 96}
    assert found.total_flops == 1632
    header, _, first, *_ = ([cell.strip() for cell in line.split("|")] for line in str(found).splitlines())
    assert dict(zip(header, first, strict=True))["FLOPs"] == "1.6 K"
    assert found.total_layer_params == 2 * 282


def test_numbers_and_shapes_as_text() -> None:
    assert [get_human_readable_count(n) for n in (999, 1234, 12_345_678)] == ["999", "1.2 K", "12.3 M"]
    assert get_formatted_model_size(1234.5) == "1,234.500"
    assert parse_batch_shape([torch.ones(1, 2), "text"]) == [[1, 2], "?"]
