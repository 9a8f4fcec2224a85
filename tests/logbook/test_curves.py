"""trainer.plot(): which panels and curves a figure has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot

from drivetrain.errors import ConfigurationError, UnknownNameError
from drivetrain.logbook.history import History, figure_of


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    pyplot.close("all")
    matplotlib.use(before)


def history_of(*names: str, points: int = 3) -> History:
    history = History()
    for step in range(points):
        history.add({name: float(step * 2) for name in names}, step * 50, 0)
    return history


def panels(figure: Any) -> dict[str, list[str]]:
    return {ax.get_title(): [line.get_label() for line in ax.get_lines()] for ax in figure.axes}


def test_training_and_validation_share_a_panel() -> None:
    names = ("train_loss", "val_loss", "train/acc", "val/acc", "lr-SGD", "loss_step", "test_loss")
    figure = figure_of(history_of(*names))
    assert panels(figure) == {
        "loss": ["train_loss", "val_loss", "loss_step", "test_loss"], "acc": ["train/acc", "val/acc"],
        "lr-SGD": ["lr-SGD"],
    }  # fmt: skip


def test_a_curve_is_drawn_by_step() -> None:
    (line,) = figure_of(history_of("x")).axes[0].get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 50, 100], [0.0, 2.0, 4.0])


def test_names_select_curves_or_panels() -> None:
    history = history_of("train_loss", "val_loss", "train_acc", "val_acc")
    assert panels(figure_of(history, ["val_loss", "acc"])) == {"loss": ["val_loss"], "acc": ["train_acc", "val_acc"]}


def test_many_panels_have_several_rows_and_no_empty_one() -> None:
    assert len(figure_of(history_of(*"abcdefg")).axes) == 7


@pytest.mark.parametrize("name", ["$x_$", "loss\udcff"])
def test_a_name_that_is_no_formula_and_no_text_is_drawn(name: str, tmp_path: Path) -> None:
    figure_of(history_of(name, f"train_{name}")).savefig(tmp_path / "curves.png")


def test_a_single_point_is_marked() -> None:
    (line,) = figure_of(history_of("x", points=1)).axes[0].get_lines()
    assert line.get_marker() == "."


def test_an_unknown_name_and_an_empty_history_are_errors_that_name_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'val_los'.*Did you mean 'val_loss'"):
        figure_of(history_of("val_loss"), ["val_los"])
    with pytest.raises(UnknownNameError, match=r"trainer\.plot\(\): no value is recorded\. .*every log_every_n_steps"):
        figure_of(History())


def test_other_ranks_than_0_learn_that_rank_0_has_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for read in (lambda: figure_of(History()), lambda: History()["val_loss"]):
        with pytest.raises(UnknownNameError, match=r"This is rank 1, and only rank 0 has .*is_global_zero is true\.$"):
            read()


def test_without_matplotlib_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        figure_of(history_of("x"))


def test_the_trainer_plots_its_history(make_trainer: Any, validated: Any, loader: Any) -> None:
    class Logging(validated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("own", 1.0)
            return loss

    trainer = make_trainer(log_every_n_steps=1)
    trainer.fit(Logging(), loader, loader)
    assert "own" in panels(trainer.plot("own"))
