"""trainer.history: the logged values as columns."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from drivetrain import Trainer
from drivetrain.callbacks import LearningRateMonitor
from drivetrain.errors import ConfigurationError, UnknownNameError
from drivetrain.logbook import history as history_file
from drivetrain.logbook.history import History
from drivetrain.loggers import CSVLogger


@pytest.fixture
def logging(validated: Any) -> Any:
    class Logging(validated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("number", float(self.trainer.global_step))
            self.log("mean", float(batch_idx), on_step=False, on_epoch=True)
            self.log("for the bar", 1.0, logger=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_number", torch.tensor(float(self.trainer.current_epoch)))

    return Logging


@pytest.mark.parametrize("with_logger", [True, False])
def test_it_holds_what_loggers_get_with_and_without_one(
    make_trainer: Any, logging: Any, loader: Any, tmp_path: Any, with_logger: bool
) -> None:
    logger = CSVLogger(tmp_path) if with_logger else False
    trainer: Trainer = make_trainer(max_epochs=2, log_every_n_steps=2, logger=logger)
    trainer.fit(logging(), loader, loader)
    history = trainer.history
    assert set(history.columns) == {"number", "mean", "val_number"}
    number, mean, val = history["number"], history["mean"], history["val_number"]
    assert number == [1.0, 3.0, 5.0, 7.0]
    assert (number.steps, number.epochs) == ([1, 3, 5, 7], [0, 0, 1, 1])
    assert (mean, mean.steps, mean.epochs) == ([1.5, 1.5], [3, 7], [0, 1])
    assert (val, val.steps, val.epochs) == ([0.0, 1.0], [3, 7], [0, 1])


def test_it_holds_the_values_of_monitors(make_trainer: Any, logging: Any, loader: Any, tmp_path: Any) -> None:
    monitor = LearningRateMonitor()
    trainer = make_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1, callbacks=[monitor])
    trainer.fit(logging(), loader, loader)
    (name,) = (each for each in trainer.history if each.startswith("lr-"))
    assert trainer.history[name] == monitor.lrs[name]


def test_a_second_run_adds_to_it_and_a_resumed_one_has_no_earlier_values(
    make_trainer: Any, logging: Any, loader: Any, tmp_path: Any
) -> None:
    first = make_trainer(log_every_n_steps=1)
    first.fit(logging(), loader, loader)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    first.validate(logging(), loader, verbose=False)
    assert len(first.history["val_number"]) == 2
    second = make_trainer(max_epochs=2, log_every_n_steps=1)
    second.fit(logging(), loader, loader, ckpt_path=tmp_path / "saved.ckpt")
    assert second.history["number"].steps == [4, 5, 6, 7]


def test_per_step_values_of_an_evaluation_are_in_it(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Tested(regression):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("step_value", float(batch_idx), on_step=True, on_epoch=False)

    trainer = make_trainer()
    trainer.test(Tested(), loader, verbose=False)
    assert trainer.history["step_value"] == [0.0, 1.0, 2.0, 3.0]
    assert trainer.history["step_value"].steps == [0, 1, 2, 3]


def test_a_sanity_check_adds_nothing(make_trainer: Any, logging: Any, loader: Any) -> None:
    trainer = make_trainer(num_sanity_val_steps=2, max_epochs=0)
    trainer.fit(logging(), loader, loader)
    assert len(trainer.history) == 0


def test_a_tensor_that_changes_later_keeps_its_value() -> None:
    history, value = History(), torch.zeros(())
    history.add({"x": value}, 0, 0)
    value += 5
    assert history["x"] == [0.0]


def test_a_value_named_step_is_the_step() -> None:
    history = History()
    history.add({"step": 40.0, "x": 1}, 3, 2)
    assert (history.columns, history["x"].steps, history["x"].epochs) == (["x"], [40], [2])


def test_it_is_a_mapping_and_an_unknown_name_names_the_known_ones() -> None:
    history = History()
    history.add({"val_loss": 0.5, "acc": 1}, 3, 0)
    assert "val_loss" in history
    assert "los" not in history
    assert history.get("los") is None
    assert {name: list(column) for name, column in history.items()} == {"val_loss": [0.5], "acc": [1.0]}
    assert repr(history) == "History(val_loss: 1 values, acc: 1 values)"
    with pytest.raises(UnknownNameError, match="'val_los'.*Did you mean 'val_loss'.*acc.*every log_every_n_steps"):
        history["val_los"]


def test_a_name_that_is_logged_and_not_recorded_is_not_said_to_be_misspelt(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", 1.0)
            self.log("train_hidden", 1.0, logger=False)
            self.log("train_loss_mean", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(log_every_n_steps=50)
    trainer.fit(Logs(), loader)
    assert trainer.history.columns == ["train_loss_mean"]
    with pytest.raises(
        UnknownNameError, match="it is logged, and no value is recorded yet.*every log_every_n"
    ) as found:
        trainer.history["train_loss"]
    assert "Did you mean" not in str(found.value)
    with pytest.raises(UnknownNameError, match="it is logged with logger=False"):
        trainer.history["train_hidden"]
    with pytest.raises(UnknownNameError, match="no value is recorded under this name. Did you mean 'train_loss_mean'"):
        trainer.history["train_los_mean"]


def test_numbers_are_exact_with_and_without_64_bit_floats() -> None:
    for has_float64 in (True, False):
        history = History(has_float64)
        history.add({"a": torch.tensor(0.1, dtype=torch.float32), "n": torch.tensor(2**40 + 1), "f": 0.1}, 0, 0)
        assert history["n"] == [2**40 + 1]
        assert history["f"] == [0.1]
        assert history["a"] == [torch.tensor(0.1).item()]


def test_a_long_run_keeps_a_bounded_number_of_values_from_the_first_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_file, "_MOST", 100)
    history = History()
    for step in range(1000):
        history.add({"x": step}, step, 0)
    column = history["x"]
    assert 50 <= len(column) <= 100
    assert (column[0], column[-1]) == (0.0, 999.0)
    assert column == sorted(column) == [float(step) for step in column.steps]


def test_it_can_be_pickled_with_values_that_were_not_read() -> None:
    history = History()
    history.add({"x": torch.tensor(2.0)}, 1, 0)
    assert pickle.loads(pickle.dumps(history))["x"] == [2.0]


def test_a_notebook_shows_a_row_for_each_name() -> None:
    history = History()
    for step, value in enumerate((3.0, 1.0, 2.0)):
        history.add({"<x>": value}, step, 0)
    html = history._repr_html_()
    assert [cell in html for cell in ("&lt;x&gt;", ">3<", ">2<", ">1<")] == [True] * 4


def test_pandas_has_a_row_for_each_step_and_epoch() -> None:
    history = History()
    history.add({"a": 1.0}, 1, 0)
    history.add({"a": 2.0, "b": 5.0}, 3, 0)
    history.add({"c": 7.0}, 3, 1)
    history.add({"c": 8.0}, 3, 1)
    frame = history.to_pandas()
    assert list(frame.columns) == ["step", "epoch", "a", "b", "c"]
    rows = [{name: value for name, value in row.items() if value == value} for row in frame.to_dict("records")]
    assert rows == [
        {"step": 1, "epoch": 0, "a": 1.0}, {"step": 3, "epoch": 0, "a": 2.0, "b": 5.0},
        {"step": 3, "epoch": 1, "c": 7.0}, {"step": 3, "epoch": 1, "c": 8.0},
    ]  # fmt: skip
    assert list(History().to_pandas().columns) == ["step", "epoch"]


def test_without_pandas_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install pandas"):
        History().to_pandas()


@pytest.mark.parametrize("attribute", ["callback_metrics", "logged_metrics"])
def test_metrics_are_plain_dictionaries_that_programs_can_map_and_store(
    make_trainer: Any, logging: Any, loader: Any, tmp_path: Any, attribute: str
) -> None:
    trainer: Trainer = make_trainer(log_every_n_steps=1)
    trainer.fit(logging(), loader, loader)
    metrics = getattr(trainer, attribute)
    assert tree_map(float, metrics)["val_number"] == 0.0
    torch.save(metrics, tmp_path / "metrics.pt")
    assert torch.load(tmp_path / "metrics.pt").keys() == metrics.keys()
