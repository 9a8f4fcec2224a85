"""RichProgressBar: what stands on the terminal."""

from __future__ import annotations

import io
import pickle
import re
import threading
from typing import Any

import pytest
from rich.progress import TextColumn
from tests.callbacks.screens import screen_of

from drivetrain import Callback, Trainer
from drivetrain.callbacks import ModelSummary, PlainProgressBar, RichModelSummary, RichProgressBar
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.callbacks.rich_progress import RichProgressBarTheme
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.errors import ConfigurationError
from drivetrain.loops.stop import note


def make(**kwargs: Any) -> tuple[RichProgressBar, io.StringIO]:
    out = io.StringIO()
    return RichProgressBar(console_kwargs={"file": out, "force_terminal": True, "width": 120}, **kwargs), out


def screen(out: io.StringIO) -> list[str]:
    """The lines of the last frame."""
    frame = re.split(r"\x1b\[1A\x1b\[2K(?!\x1b\[1A)|\r\x1b\[2K", out.getvalue())[-1]
    return [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).splitlines() if line.strip()]


def test_an_epoch_line() -> None:
    bar, out = make()
    bar.draw(Snapshot("train", 2, 10, 5, 20, rate=3.21, metrics={"loss[0]": 0.5}))
    (line,) = screen(out)
    assert line.startswith("Epoch 3/10 ")
    assert re.search(r"5/20 3\.2 it/s 0:00:00 loss\[0\]=0\.5$", line)
    bar.close()


def test_unknown_length() -> None:
    bar, out = make()
    bar.draw(Snapshot("train", 0, None, 5, None))
    assert re.search(r"Epoch 1 .* 5 0\.000 it/s", screen(out)[0])
    bar.close()


def test_validation_makes_room_and_the_epoch_moves_on() -> None:
    bar, out = make()
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    bar.draw(Snapshot("validate", 0, 2, 1, 4, transient=True))
    assert [line.split()[0] for line in screen(out)] == ["Epoch", "Validation"]
    bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
    bar.draw(Snapshot("train", 1, 2, 20, 20, final=True))
    (line,) = screen(out)
    assert line.startswith("Epoch 2/2 ")
    assert " 20/20 " in line
    bar.close()


def test_a_second_validation_is_shown() -> None:
    bar, out = make()
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    for _ in range(2):
        bar.draw(Snapshot("validate", 0, 2, 1, 4, transient=True))
        assert [line.split()[0] for line in screen(out)] == ["Epoch", "Validation"]
        bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
    bar.close()


def test_leave_keeps_finished_bars() -> None:
    bar, out = make(leave=True)
    bar.draw(Snapshot("train", 0, 2, 20, 20, final=True))
    bar.draw(Snapshot("validate", 0, 2, 4, 4, transient=True, final=True))
    bar.draw(Snapshot("train", 1, 2, 3, 20))
    assert [line[:10] for line in screen(out)] == ["Epoch 1/2 ", "Validation", "Epoch 2/2 "]
    bar.close()


def test_an_evaluation_on_its_own_stays() -> None:
    bar, out = make()
    bar.draw(Snapshot("test", 0, 2, 4, 4, final=True, metrics={"acc": 1.0}))
    bar.close()
    assert "acc=1" in out.getvalue()
    assert screen(out)[-1].startswith("Test ")


def test_no_thread_and_a_second_run() -> None:
    before = set(threading.enumerate())
    bar, out = make()
    for _ in range(2):
        bar.draw(Snapshot("train", 0, 2, 5, 20))
        assert set(threading.enumerate()) == before
        bar.close()
    assert out.getvalue().count("\x1b[?25h") == 2  # the cursor is back
    bar.close()


def test_it_can_be_pickled_while_it_draws() -> None:
    bar = RichProgressBar(leave=True, console_kwargs={"quiet": True})
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    assert pickle.loads(pickle.dumps(bar)).leave
    bar.close()


def test_missing_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install rich`, or use PlainProgressBar"):
        RichProgressBar()


def test_a_theme_and_columns_of_a_subclass() -> None:
    class Own(RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            return [*super().configure_columns(trainer), TextColumn("of mine")]

    out = io.StringIO()
    theme = RichProgressBarTheme(description="red", metrics_format=".1f", metrics_text_delimiter=" & ")
    bar = Own(1, False, theme, {"file": out, "force_terminal": True, "width": 120, "color_system": "standard"})
    bar.draw(Snapshot("train", 2, 10, 5, 20, rate=3.21, metrics={"loss": 0.54, "n": 2}))
    (line,) = screen(out)
    assert re.search(r"loss=0\.5 & n=2 *of mine$", line)
    assert "\x1b[31mEpoch 3/10" in out.getvalue()
    bar.close()


def test_what_others_read_of_a_rich_bar() -> None:
    bar, _ = make()
    assert (bar.train_progress_bar, bar.val_progress_bar_id, bar.progress) == (None, None, None)
    bar.draw(Snapshot("train", 0, 2, 5, 20))
    bar.draw(Snapshot("test", 0, 2, 1, 4))
    assert bar.train_progress_bar is not None
    assert bar.test_progress_bar is not None
    assert (bar.train_progress_bar.completed, bar.test_progress_bar.total) == (5, 4)
    assert bar.train_progress_bar_id != bar.predict_progress_bar_id
    bar.refresh()
    bar.close()


def test_rich_and_its_bars_can_be_read_until_the_run_has_ended() -> None:
    bar, _ = make()
    bar.tick_s, seen = 60.0, []

    class Reads(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            seen.append(("validation", bar.progress, bar.train_progress_bar, bar.val_progress_bar))

        def on_fit_end(self, *_: Any) -> None:
            seen.append(("fit end", bar.progress, bar.train_progress_bar, bar.val_progress_bar))

    trainer(callbacks=[Reads(), bar], num_sanity_val_steps=0).fit(BoringModel())
    assert [hook for hook, *_ in seen] == ["validation", "fit end"]
    assert all(part is not None for each in seen for part in each)
    assert bar.progress is None


def test_a_subclass_may_read_rich_while_it_draws() -> None:
    class Own(RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            assert self.progress is None
            return [*super().configure_columns(trainer), TextColumn("of mine")]

    out = io.StringIO()
    bar = Own(console_kwargs={"file": out, "force_terminal": True, "width": 120})
    trainer(callbacks=bar, num_sanity_val_steps=0).fit(BoringModel())  # the first draw is in training
    assert "of mine" in out.getvalue()
    assert bar.is_enabled  # drawing did not fail


def test_the_bar_brings_the_summary_of_rich() -> None:
    for given, expected in (([], RichModelSummary), ([ModelSummary()], ModelSummary)):
        bar, _ = make()
        kinds = [type(each) for each in trainer(callbacks=[*given, bar]).callbacks]
        assert [kind for kind in kinds if issubclass(kind, ModelSummary)] == [expected]
    plain = trainer(callbacks=PlainProgressBar()).callbacks
    assert [type(each) for each in plain if isinstance(each, ModelSummary)] == [ModelSummary]


def trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 1}
    return Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=2, **quiet, **arguments)


# ---- the width of the terminal ---------------------------------------------------------------------------------------


def lines(width: int, metrics: int, *, digits: str = "", **more: Any) -> list[str]:
    """What a terminal of this width shows of an epoch."""
    values = {f"train_metric_{i}{digits}": 0.12345 * 10**i for i in range(metrics)}
    out = io.StringIO()
    bar = RichProgressBar(console_kwargs={"file": out, "width": width, "force_terminal": True})
    given = {"rate": 12.34, "left_s": 15.0, "fit_left_s": 14520.0, "waiting": 0.43, **more}
    bar.draw(Snapshot("train", 2, 10, 213, 400, metrics=values, **given))
    shown = screen(out)
    bar.close()
    assert all(len(line) <= width for line in shown)
    return shown


@pytest.mark.parametrize("metrics", [0, 1, 3, 5, 12, 40])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_metrics_give_way_before_the_bar(width: int, metrics: int) -> None:
    first, *below = lines(width, metrics)
    pattern = r"^Epoch 3/10 [━╸╺]{4,40} *213/400 12\.3 it/s( 0:00:00)? left: epoch 15s, fit 4h02m"
    assert re.match(pattern, first)
    text = ", ".join([first, *below])
    shown = re.findall(r"train_metric_(\d+)=(\S+?)(?:,|$)", text)
    assert shown == [(str(i), format(0.12345 * 10**i, ".4g")) for i in range(len(shown))]  # no number is cut
    left_out = re.search(r", \+(\d+)$", text)
    assert len(shown) + int(left_out.group(1) if left_out else 0) == metrics
    assert "waits for data 43%" in text
    assert len(below) <= 3


def test_metrics_stand_beside_the_bar_if_there_is_room() -> None:
    (line,) = lines(200, 3)
    assert line.endswith("waits for data 43%, train_metric_0=0.1235, train_metric_1=1.235, train_metric_2=12.35")


def test_a_long_name_is_shortened_at_60_columns() -> None:
    _, *below = lines(60, 1, digits="x" * 80, waiting=0.0)
    assert below == ["train_metric_0" + "x" * 37 + "..=0.1235"]


def test_no_color_draws_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        out = io.StringIO()
        bar = RichProgressBar(console_kwargs={"file": out, "width": 80, "force_terminal": True, "color_system": "256"})
        bar.draw(Snapshot("train", 2, 10, 5, 20))
        bar.close()
        found.append(re.findall(r"\x1b\[[0-9;]*m", out.getvalue()))
    assert found[0]
    assert not [each for each in found[1] if re.search(r"\[(?:\d+;)*(?:3\d|4\d|9\d)", each)]


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [0, 9])
@pytest.mark.parametrize("knows", [True, False])
def test_after_ctrl_c_no_line_stands_twice(metrics: int, knows: bool) -> None:
    bar, out = make()
    values = {f"train_metric_{i}": 0.5 for i in range(metrics)}
    bar.draw(Snapshot("train", 2, 10, 213, 400, metrics=values))
    bar.draw(Snapshot("validate", 2, 10, 1, 4, metrics=values, transient=True))
    if not knows:
        note.stand_above(0)  # negative control: as if nothing were drawn
    out.write(f"{note.before.decode()}Ctrl-C: it ends.\n{note.after.decode()}")
    bar.draw(Snapshot("train", 2, 10, 214, 400, metrics=values))
    bar.close()
    shown = screen_of(out.getvalue())
    assert (len(set(line[:15] for line in shown)) == len(shown) and shown[0] == "Ctrl-C: it ends.") is knows
    assert note.before == b"\n"
