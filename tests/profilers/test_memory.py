from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.profilers.rows import Model, loader, trainer

from drivetrain.base import torch_private
from drivetrain.profilers import MemoryProfiler, memory


def test_the_table_has_the_highest_memory_and_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler, used = MemoryProfiler(), [100]
    monkeypatch.setattr(profiler, "_used", lambda: (used[0], used[0]))
    with profiler.profile("outer"):
        with profiler.profile("inner"):
            used[0] = 300
        used[0] = 150
    assert profiler.growth == {"inner": memory.Growth(1, 200, 300), "outer": memory.Growth(1, 50, 300)}
    profiler.stop("never begun")


def test_a_fit_prints_the_memory_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    trainer(profiler="memory").fit(Model(), loader())
    printed = caplog.text
    assert "Profile of fit: memory of the process" in printed
    assert "training_step" in printed


@pytest.mark.parametrize("fails", [False, True])
def test_with_cuda_a_snapshot_is_written_also_after_an_exception(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's functions are replaced: there is no device here."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch_private, "record_memory", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr(torch_private, "write_memory", lambda path: Path(path).write_text("snapshot"))

    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("no memory is left")

    run = trainer(profiler=MemoryProfiler(tmp_path, max_entries=7))
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            run.fit(Fails(), loader())
    else:
        run.fit(Model(), loader())
    assert (tmp_path / "fit-memory.pickle").read_text() == "snapshot"
    assert calls == [{"max_entries": 7}, {"enabled": None}]
    assert "pytorch.org/memory_viz" in caplog.text
