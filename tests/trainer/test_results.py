"""The table that validate and test print."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.trainer.telling import number_text, results_html, results_table

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8500000238418579, "0.85"), (1.0, "1"), (3, "3"), (-0.25, "-0.25"), (0.0, "0"), (1 / 3, "0.333333"),
        (10_000_000, "10000000"), (1234567.8, "1234568"), (-2_000_000.0, "-2000000"), (123456.7, "123457"),
        (1e-5, "1e-5"), (0.00012, "0.00012"), (1.5e20, "1.5e20"), (NAN, "nan"), (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_a_number_is_shown_as_people_write_it(value: float, text: str) -> None:
    assert number_text(value) == text


def test_the_results_of_several_loaders_are_a_table_with_headings_and_without_nan(
    make_trainer: Any, regression: Any, loader: Any, capsys: Any
) -> None:
    class Logging(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_acc", 0.85 + 0.05 * dataloader_idx)
            if dataloader_idx == 0:
                self.log("val_loss", 12.5)

        def on_validation_epoch_end(self) -> None:
            self.log("total", 2.0)

    make_trainer().validate(Logging(), [loader, loader])
    assert capsys.readouterr().out == (
        "validate:   loader 0  loader 1\n"
        "  total            2         2\n"
        "  val_acc       0.85       0.9\n"
        "  val_loss      12.5\n"
    )


@pytest.mark.parametrize(
    ("results", "width", "table"),
    [
        ([], 80, ["test: nothing was logged"]),
        ([{}], 80, ["test: nothing was logged"]),
        ([{}, {}], 80, ["test: nothing was logged"]),
        ([{"acc": 0.5, "long_name": 2}], 80, ["test:", "  acc        0.5", "  long_name  2"]),
        (  # a value that is no number is shown, where a missing one is not
            [{"acc/dataloader_idx_0": NAN}, {"b/dataloader_idx_1": 1}], 80,
            ["test:  loader 0  loader 1", "  acc       nan", "  b                     1"],
        ),
        (  # too wide for the terminal
            [{"acc/dataloader_idx_0": 1, "b": 3}, {"acc/dataloader_idx_1": 2}, {"acc/dataloader_idx_2": 4}], 30,
            ["test:  loader 0  loader 1", "  acc         1         2", "  b           3", "test:  loader 2",
             "  acc         4"],
        ),
    ],
)  # fmt: skip
def test_the_table_of_results(results: list[dict[str, float]], width: int, table: list[str]) -> None:
    assert results_table("test", results, width).split("\n") == table


def test_a_notebook_shows_the_same_numbers_with_headings_and_escaped() -> None:
    html = results_html("test", [{"<acc>": 0.85}, {"<acc>/dataloader_idx_1": 0.9, "loss": NAN}])
    assert [cell in html for cell in ("&lt;acc&gt;", ">0.85<", ">0.9<", ">nan<", ">loader 1<")] == [True] * 5
    assert "nothing was logged" in results_html("test", [{}])
