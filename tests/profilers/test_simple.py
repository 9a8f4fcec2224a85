from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.profilers.rows import Model, loader, trainer

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import SimpleProfiler, simple


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds that the test sets."""
    now = [0.0]
    monkeypatch.setattr("drivetrain.profilers.simple.time.perf_counter", lambda: now[0])
    return now


def rows(report: str) -> dict[str, list[str]]:
    """The cells of each action."""
    lines = report.splitlines()[4:-1]
    return {line[:24].strip(): line[24:].split() for line in lines}


def test_the_table_has_calls_means_totals_and_own_times(clock: Any) -> None:
    profiler = SimpleProfiler()
    profiler.setup("fit")
    for _ in range(2):
        with profiler.profile("a step"):
            clock[0] += 1
            with profiler.profile("inside"):
                clock[0] += 3
    clock[0] += 2
    assert profiler.durations["a step"] == simple.Durations(2, 8.0, 2.0, 4.0)
    assert profiler.durations["inside"] == simple.Durations(2, 6.0, 6.0, 3.0)
    report = profiler.summary()
    assert report.startswith("Profile of fit: 10.000 s\n---")
    assert rows(report) == {
        "a step": ["2", "4000.000", "4000.000", "8.000", "2.000", "20.0"],
        "inside": ["2", "3000.000", "3000.000", "6.000", "6.000", "60.0"],
        "outside of all actions": ["2.000", "20.0"],
    }


def test_the_short_table(clock: Any) -> None:
    profiler = SimpleProfiler(extended=False)
    with profiler.profile("a step"):
        clock[0] += 1
    assert profiler.summary().splitlines()[2].split("  ")[0] == "Action"
    assert "Calls" not in profiler.summary()
    assert profiler.summary().splitlines()[4].split() == ["a", "step", "1000.000", "1.000"]


def test_wrong_order_is_an_error() -> None:
    profiler = SimpleProfiler()
    profiler.start("a")
    with pytest.raises(ConfigurationError, match="'a'\\): this action has begun and not ended"):
        profiler.start("a")
    with pytest.raises(ConfigurationError, match="'b'\\): this action has not begun"):
        profiler.stop("b")


def test_the_table_is_printed_once_at_the_end_of_a_fit(caplog: pytest.LogCaptureFixture) -> None:
    trainer(profiler="simple").fit(Model(), loader())
    assert caplog.text.count("Profile of fit") == 1


def test_with_a_filename_the_table_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(profiler=SimpleProfiler(dirpath=tmp_path / "new", filename="perf"))
    run.fit(Model(), loader())
    run.test(Model(), loader(), verbose=False)
    assert "my forward" in (tmp_path / "new" / "fit-perf.txt").read_text()
    assert "test_step" in (tmp_path / "new" / "test-perf.txt").read_text()
    assert "training_step" not in (tmp_path / "new" / "test-perf.txt").read_text()
    assert "Profile of" not in caplog.text


def test_without_a_folder_the_file_lies_in_the_loggers(tmp_path: Path) -> None:
    run = trainer(profiler=SimpleProfiler(filename="perf"), logger="csv", default_root_dir=tmp_path)
    run.fit(Model(), loader())
    assert (Path(run.log_dir or "") / "fit-perf.txt").exists()


def test_the_last_calls_are_kept_one_by_one(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple, "_RECENT", 3)
    clock[0] = 5.0
    profiler = SimpleProfiler()
    assert profiler.start_time == 5.0
    for duration in (1.0, 2.0, 4.0, 8.0):
        profiler.start("step")
        assert profiler.current_actions == {"step": clock[0]}
        clock[0] += duration
        profiler.stop("step")
    assert profiler.current_actions == {}
    assert profiler.recorded_durations == {"step": [2.0, 4.0, 8.0]}
    assert profiler.recorded_durations["nothing"] == []
    assert profiler.durations["step"].total == 15.0


def test_memory_does_not_grow_with_calls() -> None:
    profiler = SimpleProfiler()
    for _ in range(3):
        with profiler.profile("a"):
            pass
    assert len(pickle.dumps(profiler)) == len(pickle.dumps(pickle.loads(pickle.dumps(profiler))))
    assert list(profiler.durations) == ["a"]
