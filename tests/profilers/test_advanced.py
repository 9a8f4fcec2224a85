from __future__ import annotations

import pickle
import pstats
from pathlib import Path

import pytest
from tests.profilers.rows import Model, loader, trainer

from drivetrain.errors import ConfigurationError
from drivetrain.profilers import AdvancedProfiler


def called_by_hand() -> int:
    return sum(range(10))


def test_functions_are_listed_by_action_and_count_for_those_around_it() -> None:
    profiler = AdvancedProfiler()
    with profiler.profile("outer"):
        with profiler.profile("inner"):
            called_by_hand()
        sorted([2, 1])
    outer, inner = (f"Profile of {name}" for name in ("outer", "inner"))
    parts = {part.splitlines()[0]: part for part in profiler.summary().split("\n\nProfile")}
    report = profiler.summary()
    assert set(parts) == {"Profile of outer", " of inner"} or set(parts) == {"Profile of inner", " of outer"}
    assert report.count("called_by_hand") == 2
    assert report.count("built-in method builtins.sorted") == 1
    assert outer in report
    assert inner in report


def test_a_fit_writes_a_report_and_statistics(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="calls", dump_stats=True)
    trainer(profiler=profiler).fit(Model(), loader())
    report = (tmp_path / "fit-calls.txt").read_text()
    assert "Profile of training_step" in report
    stats = pstats.Stats(str(tmp_path / "fit-calls-training_step.prof"))
    assert any(name == "training_step" for _, _, name in stats.stats)  # type: ignore[attr-defined]
    assert sum(count for _, count, *_ in stats.stats.values()) > 4  # type: ignore[attr-defined]


def test_the_printed_report_is_short_and_a_limit_is_kept() -> None:
    profiler = AdvancedProfiler(line_count_restriction=1)
    with profiler.profile("a"):
        called_by_hand()
    assert "due to restriction <1>" in profiler.summary()
    with pytest.raises(ConfigurationError, match="line_count_restriction=0"):
        AdvancedProfiler(line_count_restriction=0)


def test_wrong_order_is_an_error_and_the_copy_is_empty() -> None:
    profiler = AdvancedProfiler()
    profiler.start("a")
    with pytest.raises(ConfigurationError, match="this action has begun and not ended"):
        profiler.start("a")
    with pytest.raises(ConfigurationError, match="this action has not begun"):
        profiler.stop("b")
    profiler.teardown(None)
    assert pickle.loads(pickle.dumps(profiler)).summary() == ""
