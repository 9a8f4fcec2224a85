"""TQDMProgressBar: what stands on the terminal."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.callbacks.screens import screen_of
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import TQDMProgressBar
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.loops.stop import note

tqdm = pytest.importorskip("tqdm").tqdm


def frames(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [part.strip() for part in capsys.readouterr().err.replace("\n", "\r").split("\r") if part.strip()]


def test_an_epoch_line(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    bar.draw(Snapshot("train", 2, 10, 5, 20, rate=3.21, metrics={"loss": 0.5, "v": "x"}))
    bar.close()
    last = frames(capsys)[-1]
    assert last.startswith("Epoch 3/10:  25%")
    assert "5/20" in last
    assert "3.21it/s" in last
    assert "loss=0.5, v=x" in last


@pytest.mark.parametrize("metrics", [0, 1, 3, 5, 12])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_metrics_give_way_before_the_bar(capsys: pytest.CaptureFixture[str], width: int, metrics: int) -> None:
    class Wide(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.dynamic_ncols, bar.ncols = False, width
            return bar

    values = {f"metric_{i}": 0.12345 * 10**i for i in range(metrics)}
    bar = Wide()
    bar.draw(Snapshot("train", 2, 10, 213, 400, rate=12.34, metrics=values, fit_left_s=14520.0, left_s=15.0))
    bar.close()
    line = frames(capsys)[-1]
    assert len(line) <= width
    found = re.fullmatch(r"Epoch 3/10:  53%\|.{4,}\| 213/400 \[00:00<00:15, 12\.34it/s(.*)\]", line)
    assert found
    shown = re.findall(r"metric_(\d+)=([^,]+)", found.group(1))
    assert shown == [(str(i), tqdm.format_num(0.12345 * 10**i)) for i in range(len(shown))]
    left_out = re.search(r", \+(\d+)$", found.group(1))
    if width > 60:
        assert ", fit<4h02m" in found.group(1)
        assert len(shown) + int(left_out.group(1) if left_out else 0) == metrics


@pytest.mark.parametrize("knows", [True, False])
def test_after_ctrl_c_no_line_stands_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = TQDMProgressBar()
    bar.draw(Snapshot("train", 2, 10, 213, 400))
    if not knows:
        note.stand_above(0)  # negative control: as if nothing were drawn
    sys.stderr.write(f"{note.before.decode()}Ctrl-C: it ends.\n{note.after.decode()}")
    monkeypatch.setattr(note, "is_written", True)
    bar.draw(Snapshot("train", 2, 10, 214, 400))
    sys.stderr.write("It has ended.\n")
    bar.close()
    shown = screen_of(capsys.readouterr().err)
    assert [line[:9] for line in shown] == ["Epoch 3/1"] * (not knows) + ["Ctrl-C: i", "It has en", "Epoch 3/1"]


def test_a_bar_that_a_subclass_disables_is_drawn_without_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            return tqdm(disable=True)

    bar = Own()
    bar.draw(Snapshot("train", 2, 10, 213, 400, metrics={"loss": 0.5}))
    bar.close()
    assert capsys.readouterr().err == ""


def test_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    bar.draw(Snapshot("train", 0, None, 5, None))
    bar.close()
    assert frames(capsys)[-1].startswith("Epoch 1: 5it [00:00, ?it/s]")


def test_validation_makes_room_and_epochs_share_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
    assert any(frame.startswith("Validation: 100%") for frame in frames(capsys))
    bar.draw(Snapshot("train", 0, 2, 20, 20, final=True))
    bar.draw(Snapshot("train", 1, 2, 3, None, final=True))
    bar.close()
    assert capsys.readouterr().err.count("\n") == 1  # one line stays


def test_a_second_validation_has_a_bar_of_its_own() -> None:
    bar, seen = TQDMProgressBar(), []
    for _ in range(2):
        bar.draw(Snapshot("validate", 0, 2, 1, 4, transient=True))
        seen.append(bar.val_progress_bar)
        assert not bar.val_progress_bar.disable  # it is not closed
        bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
        assert bar.val_progress_bar is seen[-1]
    bar.close()
    assert seen[0] is not seen[1]


def test_leave_keeps_every_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar(leave=True)
    bar.draw(Snapshot("train", 0, 2, 20, 20, final=True))
    bar.draw(Snapshot("train", 1, 2, 20, 20, final=True))
    bar.close()
    assert capsys.readouterr().err.count("\n") == 2


def test_print_stands_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    bar.print("hello", 3, sep="-")
    bar.close()
    assert capsys.readouterr().out == "hello-3\n"


def test_no_thread_and_a_second_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    bar = TQDMProgressBar(process_position=1)
    for _ in range(2):
        bar.draw(Snapshot("train", 0, 2, 5, 20))
        assert set(threading.enumerate()) == before
        assert pickle.loads(pickle.dumps(bar)).process_position == 1
        bar.close()


def test_missing_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install tqdm`, or use RichProgressBar"):
        TQDMProgressBar()


def test_a_subclass_makes_its_own_bars(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    made: list[str] = []

    class Own(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            made.append("train")
            return tqdm(bar_format="mine {n_fmt}", file=sys.stderr)

        def init_validation_tqdm(self) -> Any:
            made.append("validate")
            bar = super().init_validation_tqdm()
            bar.unit = "image"
            return bar

    bar = Own()
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    assert bar.train_progress_bar.total == 20
    bar.draw(Snapshot("validate", 0, 2, 1, 4, rate=2.0, transient=True))
    assert bar.val_progress_bar.n == bar.test_progress_bar.n == 1
    bar.draw(Snapshot("train", 1, 2, 7, 20))
    bar.close()
    assert made == ["train", "validate"]
    shown = frames(capsys)
    assert "mine 7" in shown
    assert any("image/s" in frame for frame in shown)
    with pytest.raises(ConfigurationError, match="has no bar of training now"):
        _ = bar.train_progress_bar


def test_what_others_read_of_a_bar() -> None:
    bar = TQDMProgressBar()
    assert (bar.is_enabled, bar.is_disabled, bar.total_train_batches, bar.total_val_batches) == (True, False, 0, 0)
    bar.disable()
    assert (bar.is_enabled, bar.is_disabled) == (False, True)


def test_an_override_reads_totals_and_prints_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    class Own(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            seen.append((self.total_train_batches, self.total_val_batches))
            self.print("done", batch_idx)

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, int | str | float]:
            return {**super().get_metrics(trainer, pl_module), "mine": 7}

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    bar = Own()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[bar],
    )  # fmt: skip
    trainer.fit(Net(), [torch.ones(1, 1)] * 2)
    assert seen == [(2, 0)] * 2
    captured = capsys.readouterr()
    assert "done 0" in captured.out
    assert "mine=7" in captured.err
    assert bar.total_train_batches == 0


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_with(bar: TQDMProgressBar, **arguments: Any) -> Trainer:
    given = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    return Trainer(**{**given, "enable_model_summary": False, "callbacks": [bar], **arguments})  # type: ignore[arg-type]


def test_a_hook_of_a_subclass_finds_the_bar_at_the_first_batch() -> None:
    class Own(TQDMProgressBar):
        tick_s = 3600.0  # the thread never draws
        totals: list[Any] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.trainer is trainer
            self.totals.append(self.train_progress_bar.total)

    bar = Own()
    run_with(bar).fit(Small(), [torch.ones(1, 1)] * 2)
    assert bar.totals == [2, 2]
    with pytest.raises(ConfigurationError, match="has no Trainer now"):
        _ = bar.trainer


def test_a_subclass_names_the_stages_and_reads_the_loader_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        train_description = "Learning"  # type: ignore[assignment]
        counts: list[Any] = []  # noqa: RUF012

        @property
        def test_description(self) -> str:
            return "Exam"

        def on_test_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            if self.has_dataloader_changed(dataloader_idx):
                self.counts.append((self.total_test_batches, self.total_test_batches_current_dataloader))

        def on_test_end(self, trainer: Any, pl_module: Any) -> None:
            self.reset_dataloader_idx_tracker()
            super().on_test_end(trainer, pl_module)

    bar = Own()
    trainer = run_with(bar)
    trainer.fit(Small(), [torch.ones(1, 1)] * 2)
    trainer.test(Small(), [DataLoader(torch.ones(3, 1)), DataLoader(torch.ones(1, 1))], verbose=False)
    assert bar.counts == [(4, 3), (4, 1)]
    shown = frames(capsys)
    assert any(frame.startswith("Learning 1/1:") for frame in shown)
    assert any(frame.startswith("Exam: 100%") for frame in shown)
    assert TQDMProgressBar().train_description == "Epoch"


def test_an_override_of_get_metrics_gets_the_version_too(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, int | str | float]:
            items = super().get_metrics(trainer, pl_module)
            return {"run": items.pop("v_num"), **items}

    run_with(Own(), logger=CSVLogger(tmp_path)).fit(Small(), [torch.ones(1, 1)])
    assert "run=0" in capsys.readouterr().err
    run_with(TQDMProgressBar(), logger=CSVLogger(tmp_path)).fit(Small(), [torch.ones(1, 1)])
    assert "v_num" not in capsys.readouterr().err  # nobody has asked for it


def test_a_subclass_has_its_own_format(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        BAR_FORMAT = "{desc} at {n_fmt}"

    bar = Own()
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    bar.close()
    assert frames(capsys)[-1].startswith("Epoch 1/2 at 5")


def test_the_bar_of_training_is_there_in_the_sanity_check(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Own(TQDMProgressBar):
        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_sanity_check_start(trainer, pl_module)
            seen.append(self.train_progress_bar)

        def init_sanity_tqdm(self) -> Any:
            seen.append(self.train_progress_bar)
            return super().init_sanity_tqdm()

    Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=tmp_path, callbacks=[Own()]).fit(
        BoringModel()
    )
    assert seen
    assert all(bar is not None and bar.disable for bar in seen)


class Reads(Callback):
    """Reads the bars in each hook, sooner than the thread draws; a callback before the bar."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.hooks = bar, set[str]()

    def _read(self, hook: str, *names: str) -> None:
        assert all(getattr(self.bar, name) is not None for name in names), hook
        self.hooks.add(hook)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._read("epoch start", "train_progress_bar")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self._read("validation", "val_progress_bar", *(() if trainer.sanity_checking else ("train_progress_bar",)))

    def on_train_epoch_end(self, *_: Any) -> None:
        self._read("epoch end", "train_progress_bar", "val_progress_bar")

    def on_train_end(self, *_: Any) -> None:
        self._read("train end", "train_progress_bar", "val_progress_bar")

    def on_fit_end(self, *_: Any) -> None:
        self._read("fit end", "train_progress_bar", "val_progress_bar")


def fit_with(bar: Any, **arguments: Any) -> Reads:
    bar.tick_s, reads = 60.0, Reads(bar)
    Trainer(
        accelerator="cpu", callbacks=[reads, bar], logger=False, enable_checkpointing=False, max_epochs=2,
        limit_train_batches=2, limit_val_batches=1, **arguments,
    ).fit(BoringModel())  # fmt: skip
    return reads


@pytest.mark.parametrize("sanity", [0, 1])
def test_bars_can_be_read_until_the_run_has_ended(sanity: int) -> None:
    reads = fit_with(bar := TQDMProgressBar(), num_sanity_val_steps=sanity)
    assert reads.hooks == {"epoch start", "validation", "epoch end", "train end", "fit end"}
    with pytest.raises(TypeError, match="has no bar of training now"):
        _ = bar.train_progress_bar


def test_the_bar_of_an_epoch_that_has_just_ended_can_be_read() -> None:
    bar, seen = TQDMProgressBar(), []

    class Late(Callback):
        def on_train_end(self, *_: Any) -> None:
            seen.append(bar.train_progress_bar.n)

    bar.tick_s = 60.0
    Trainer(
        accelerator="cpu", callbacks=[Late(), bar], logger=False, enable_checkpointing=False, max_epochs=1,
        limit_train_batches=2, limit_val_batches=0,
    ).fit(BoringModel())  # fmt: skip
    assert seen == [2]


@pytest.mark.parametrize(
    ("variable", "given", "expected"), [("7", 1, 7), ("7", 9, 9), ("7", 0, 0), (None, 2, 2), ("", 2, 2), ("0.5", 2, 2)]
)
def test_tqdms_variable_for_the_rate_counts_if_it_is_larger(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: int, expected: int
) -> None:
    monkeypatch.delenv("TQDM_MINITERS", raising=False)
    if variable is not None:
        monkeypatch.setenv("TQDM_MINITERS", variable)
    assert TQDMProgressBar(given).refresh_rate == expected


def test_a_module_prints_above_the_bar_with_the_keywords_of_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(BoringModel):
        def on_fit_end(self) -> None:
            self.print("a", "b", sep="-", end=";", file=sys.stdout, nolock=False)

    bar = TQDMProgressBar()
    Trainer(
        accelerator="cpu", callbacks=bar, logger=False, enable_checkpointing=False, enable_model_summary=False,
        max_steps=1,
    ).fit(Prints())  # fmt: skip
    bar.print("c", flush=True)
    bar.print("d", "e", sep=None, end=None)  # as the built-in prints
    assert capsys.readouterr().out == "a-b;c\nd e\n"
