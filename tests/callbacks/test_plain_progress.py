"""PlainProgressBar: which lines it prints."""

from __future__ import annotations

import pytest

from drivetrain.callbacks import PlainProgressBar
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.errors import ConfigurationError

TRAIN = Snapshot("train", 0, 2, 10, 10, rate=12.34, metrics={"loss": 0.123456, "name": "x"}, final=True)


def test_one_line_at_each_end(capsys: pytest.CaptureFixture[str]) -> None:
    bar = PlainProgressBar()
    bar.draw(Snapshot("sanity_check", 0, 2, 2, 2, final=True))
    bar.draw(Snapshot("train", 0, 2, 5, 10))
    bar.draw(Snapshot("validate", 0, 2, 3, None, rate=0.5, final=True))
    bar.draw(TRAIN)
    assert capsys.readouterr().out.splitlines() == [
        "Validation: 3 batches, 0.500 it/s",
        "Epoch 1/2: 10/10 batches, 12.3 it/s, loss=0.1235, name=x",
    ]


def test_lines_in_between_keep_their_distance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = PlainProgressBar(interval_s=10)
    for second in range(1, 26):
        now[0] = 100.0 + second
        bar.draw(Snapshot("train", 0, None, second, 100))
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Epoch 1: 10/100 batches",
        "Epoch 1: 20/100 batches",
    ]


def test_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="interval_s=-1"):
        PlainProgressBar(interval_s=-1)
