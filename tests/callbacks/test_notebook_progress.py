"""NotebookProgressBar: what an output holds, and what a notebook keeps that a real kernel has executed."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from drivetrain.base import notebook
from drivetrain.callbacks import NotebookProgressBar, notebook_progress
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.compat.boring_classes import BoringModel


class Outputs:
    """A cell's outputs; each list holds the states of one output."""

    def __init__(self) -> None:
        self.html: list[list[str]] = []
        self.texts: list[str] = []

    def display(self, html: str, text: str, shown: list[str] | None = None) -> list[str]:
        if shown is None:
            self.html.append(shown := [])
        shown.append(html)
        self.texts.append(text)
        return shown


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    found = Outputs()
    monkeypatch.setattr(notebook, "can_display", lambda: True)
    monkeypatch.setattr(notebook, "display", found.display)
    monkeypatch.setattr(notebook_progress, "_PAUSE_S", 0.0)
    return found


def titles(html: str) -> list[str]:
    return re.findall("<b[^>]*>(.*?)</b>", html)


def test_an_epoch_in_one_output_that_is_updated(outputs: Outputs) -> None:
    bar = NotebookProgressBar()
    bar.draw(Snapshot("train", 1, 3, 5, 20, rate=3.21, metrics={"loss": 0.5}, left_s=5, fit_left_s=40))
    bar.draw(Snapshot("train", 1, 3, 6, 20, rate=3.21, metrics={"loss": 0.25}, left_s=5, fit_left_s=40))
    bar.close()
    (states,) = outputs.html
    assert titles(states[-1]) == ["Epoch 2/3"]
    assert '<progress value="6" max="20"' in states[-1]
    for text in ("6/20 batches", "3.2 it/s", "left: epoch 5s, fit 40s", "loss=0.25"):
        assert f"<span>{text}</span>" in states[-1]
    assert outputs.texts[-1] == "Epoch 2/3: 6/20 batches, 3.2 it/s, left: epoch 5s, fit 40s, loss=0.25"


def test_names_are_escaped_and_each_metric_may_wrap(outputs: Outputs) -> None:
    bar = NotebookProgressBar()
    bar.draw(Snapshot("train", 0, 1, 1, 2, metrics={"<img src=x>": 1.0, "b": 2.0}))
    assert "<img" not in outputs.html[0][-1]
    assert "&lt;img src=x&gt;=1</span> <span>b=2" in outputs.html[0][-1]
    assert "flex-wrap:wrap" in outputs.html[0][-1]


def test_an_unknown_length_has_no_bar(outputs: Outputs) -> None:
    bar = NotebookProgressBar()
    bar.draw(Snapshot("train", 0, None, 5, None))
    assert "<progress" not in outputs.html[0][-1]
    assert "5 batches" in outputs.html[0][-1]


def test_a_validation_stands_below_the_epoch_until_it_has_ended(outputs: Outputs) -> None:
    bar = NotebookProgressBar()
    bar.draw(Snapshot("train", 0, 2, 20, 20, metrics={"loss": 2.0}))
    bar.draw(Snapshot("validate", 0, 2, 1, 4, transient=True, metrics={"loss": 1.0}))
    assert titles(outputs.html[0][-1]) == ["Epoch 1/2", "Validation"]
    assert re.findall(r"loss=\d", outputs.html[0][-1]) == ["loss=1"]  # once: they are the same
    bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
    bar.draw(Snapshot("train", 1, 2, 3, 20))
    assert titles(outputs.html[0][-1]) == ["Epoch 2/2"]


def test_leave_keeps_what_has_ended_and_the_next_run_begins_a_new_output(outputs: Outputs) -> None:
    bar = NotebookProgressBar(leave=True)
    bar.draw(Snapshot("train", 0, 2, 20, 20, final=True))
    bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
    bar.draw(Snapshot("train", 1, 2, 3, 20))
    bar.close()
    bar.draw(Snapshot("test", 0, 2, 4, 4, final=True))
    bar.close()
    assert [titles(states[-1]) for states in outputs.html] == [["Epoch 1/2", "Validation", "Epoch 2/2"], ["Test"]]


def test_short_epochs_are_not_all_sent_and_the_last_state_is(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_progress, "_PAUSE_S", 1e9)  # longer than any machine runs
    bar = NotebookProgressBar()
    for epoch in range(1000):
        bar.draw(Snapshot("train", epoch, 1000, 1, 1, final=True))
    bar.close()
    (states,) = outputs.html
    assert [titles(state) for state in states] == [["Epoch 1/1000"], ["Epoch 1000/1000"]]


def test_nothing_is_shown_if_nothing_was_drawn(outputs: Outputs) -> None:
    NotebookProgressBar().close()
    assert outputs.html == []


def test_outside_of_a_notebook_it_prints_lines(capsys: Any) -> None:
    bar = NotebookProgressBar()
    bar.draw(Snapshot("test", 0, 2, 4, 4, rate=2.0, final=True, metrics={"acc": 1.0}))
    bar.close()
    assert re.search(r"Test: 4/4 batches, 2\.0 it/s, acc=1\n$", capsys.readouterr().out)


def test_it_can_be_pickled_while_it_draws(outputs: Outputs) -> None:
    bar = NotebookProgressBar(leave=True)
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    assert pickle.loads(pickle.dumps(bar)).leave


def test_an_exception_leaves_the_batch_where_the_run_has_ended(outputs: Outputs, make_trainer: Any) -> None:
    class Breaks(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    bar = NotebookProgressBar()
    bar.tick_s = 3600.0  # the thread draws nothing
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(callbacks=[bar], enable_progress_bar=True, limit_val_batches=0).fit(Breaks())
    (states,) = outputs.html
    assert "<span>3/64 batches</span>" in states[-1]


@pytest.mark.parametrize("fails", ["on_validation_start", "on_validation_epoch_start", "validation_step"])
def test_a_failed_sanity_check_leaves_the_number_of_its_batches(
    outputs: Outputs, make_trainer: Any, fails: str
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    bar = NotebookProgressBar()
    bar.tick_s = 3600.0  # the thread draws nothing
    model = type("Breaks", (BoringModel,), {fails: broken})()
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=2).fit(model)
    (states,) = outputs.html
    assert titles(states[-1]) == ["Sanity check"]
    assert "<span>0/2 batches</span>" in states[-1]


# ---- a kernel --------------------------------------------------------------------------------------------------------

MODEL = """
import os, signal, torch
import torch._dynamo  # optimizers import it: without this, each process that is copied from the kernel would
from drivetrain import Callback, Trainer
from drivetrain.callbacks import LivePlot
from drivetrain.compat.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == self.stops_at:
            os.kill(os.getpid(), signal.SIGINT)
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train_loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().validation_step(batch, batch_idx)["x"], prog_bar=True)
    stops_at = None

class RankZero(Callback):
    def on_fit_end(self, trainer, pl_module):
        assert bool(trainer.history) == trainer.is_global_zero

few = dict(accelerator="cpu", logger=False, enable_checkpointing=False, limit_train_batches=20, limit_val_batches=4,
           log_every_n_steps=5)
model = Model()
"""

CELLS = [
    "trainer = Trainer(**few, max_epochs=2)\ntrainer.fit(model)",
    "trainer.validate(model)",
    "trainer",
    'trainer.plot("loss")',
    "trainer.history",
    """model.stops_at = 7
try:
    Trainer(**few, max_epochs=1, enable_model_summary=False).fit(model)
except KeyboardInterrupt:
    model.stops_at = None""",
    'plot = LivePlot("loss", every_s=0)\nTrainer(**few, max_epochs=1, callbacks=[plot]).fit(model)',
    "two = Trainer(**few, max_epochs=1, devices=2, enable_model_summary=False, callbacks=[RankZero()])\ntwo.fit(model)",
    "print(two.history)",
]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of a notebook that a kernel has executed, as a file keeps them."""
    folder = tmp_path_factory.mktemp("notebook")
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (MODEL, *CELLS)])
    options = {"kernel_name": "python3", "resources": {"metadata": {"path": str(folder)}}}
    NotebookClient(document, timeout=100, **options).execute()
    nbformat.write(document, folder / "run.ipynb")
    return nbformat.read(Path(folder / "run.ipynb"), as_version=4).cells[1:]


def shown(cell: Any, kind: str) -> list[str]:
    """The cell's displayed outputs of a MIME type."""
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


def printed(cell: Any, name: str = "stdout") -> str:
    return "".join(output["text"] for output in cell.outputs if output.get("name") == name)


@pytest.mark.timeout(200)
def test_a_saved_fit_has_the_plan_the_model_the_last_state_and_the_end_once(cells: list[Any]) -> None:
    fit = cells[0]
    plan, model, bar = shown(fit, "text/html")
    assert "SingleDeviceStrategy" in plan
    assert "Trainable params: 66" in model
    assert titles(bar) == ["Epoch 2/2"]
    assert "20/20 batches" in bar
    assert "train_loss=" in bar
    assert "val_loss=" in bar
    assert printed(fit).count("The fit took") == 1
    assert printed(fit, "stderr") == ""


@pytest.mark.timeout(200)
def test_a_validation_shows_its_bar_and_a_table(cells: list[Any]) -> None:
    bar, table = shown(cells[1], "text/html")
    assert titles(bar) == ["Validation"]
    assert "val_loss" in table
    assert shown(cells[1], "text/plain")[1].startswith("validate:\n  val_loss")


@pytest.mark.timeout(200)
def test_the_trainer_its_curves_and_its_history_are_shown(cells: list[Any]) -> None:
    (trainer,) = shown(cells[2], "text/html")
    assert "max_epochs=2" in trainer
    assert "SingleDeviceStrategy" in trainer
    assert len(shown(cells[3], "image/png")) == 1
    assert "train_loss" in shown(cells[4], "text/html")[0]


@pytest.mark.timeout(200)
def test_ctrl_c_leaves_one_bar_where_the_fit_has_ended(cells: list[Any]) -> None:
    (bar,) = (each for each in shown(cells[5], "text/html") if "<progress" in each)
    assert re.search(r"[78]/20 batches", bar)
    assert (printed(cells[5]) + printed(cells[5], "stderr")).count("The fit ends by Ctrl-C") == 1


@pytest.mark.timeout(200)
def test_a_live_plot_is_one_picture(cells: list[Any]) -> None:
    assert sum("data:image/png" in each for each in shown(cells[6], "text/html")) == 1


@pytest.mark.timeout(200)
def test_processes_of_a_notebook_print_lines_and_return_their_history(cells: list[Any]) -> None:
    assert "Epoch 1/1: 20/20 batches" in printed(cells[7])
    assert not any("<progress" in each for each in shown(cells[7], "text/html"))
    assert re.search(r"train_loss: 4 values, .*val_loss: 1 values", printed(cells[8]))
