"""TQDMProgressBar: what stands on the terminal."""

from __future__ import annotations

import pickle
import threading

import pytest

from drivetrain.callbacks import TQDMProgressBar
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.errors import ConfigurationError

pytest.importorskip("tqdm")


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
