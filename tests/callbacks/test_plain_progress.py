"""PlainProgressBar: which lines it prints."""

from __future__ import annotations

import pytest

from drivetrain.callbacks import PlainProgressBar
from drivetrain.callbacks.progress_bar import Snapshot
from drivetrain.errors import ConfigurationError

TRAIN = Snapshot("train", 0, 2, 10, 10, rate=12.34, metrics={"loss": 0.123456, "name": "x"}, final=True)


@pytest.fixture(autouse=True)
def date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "2026-01-02 03:04:05")


def test_one_line_at_each_end(capsys: pytest.CaptureFixture[str]) -> None:
    bar = PlainProgressBar()
    bar.draw(Snapshot("sanity_check", 0, 2, 2, 2, final=True))
    bar.draw(Snapshot("train", 0, 2, 5, 10))
    bar.draw(Snapshot("validate", 0, 2, 3, None, rate=0.5, final=True))
    bar.draw(Snapshot("validate", 0, 2, 3, 3, rate=0.5, final=True, transient=True, step=7))
    bar.draw(TRAIN)
    assert capsys.readouterr().out.splitlines() == [
        "2026-01-02 03:04:05 Validation: 3 batches, 0.500 it/s",
        "2026-01-02 03:04:05 Validation in epoch 1/2: 3/3 batches, step 7, 0.500 it/s",
        "2026-01-02 03:04:05 Epoch 1/2: 10/10 batches, step 0, 12.3 it/s, loss=0.1235, name=x",
    ]


def test_a_line_in_between_can_be_read_alone(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"step": 1013, "left_s": 15.0, "fit_left_s": 14520.0, "waiting": 0.4}
    PlainProgressBar(interval_s=0).draw(Snapshot("train", 2, 10, 213, 400, 12.34, {"loss": 0.5}, **more))
    assert capsys.readouterr().out == (
        "2026-01-02 03:04:05 Epoch 3/10: 213/400 batches, step 1013, 12.3 it/s, left: epoch 15s, fit 4h02m, "
        "waits for data 40%, loss=0.5\n"
    )


def test_before_the_first_batch_no_line_is_due(capsys: pytest.CaptureFixture[str]) -> None:
    bar = PlainProgressBar(interval_s=0)
    bar.draw(Snapshot("sanity_check", 0, 2, 0, 2))
    assert capsys.readouterr().out == ""
    bar.draw(Snapshot("sanity_check", 0, 2, 1, 2))
    assert "Sanity check: 1/2 batches" in capsys.readouterr().out


@pytest.mark.parametrize(("runs", "expected"), [(1, [10, 30, 70, 150, 310, 630, 1230, 1830]), (2, [10, 30, 70, 150])])
def test_the_time_between_lines_doubles_up_to_ten_minutes_in_each_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: int, expected: list[int]
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = PlainProgressBar(interval_s=10)
    for _ in range(runs):
        begin = now[0]
        for second in range(1, 2000 // runs**3):
            now[0] = begin + second
            bar.draw(Snapshot("train", 0, None, second, 10000))
        bar.close()
        printed = [int(line.split(": ")[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
        assert printed == expected


def test_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="interval_s=-1"):
        PlainProgressBar(interval_s=-1)
