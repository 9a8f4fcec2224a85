"""Spikes of the loss in a loop that a program writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Engine
from drivetrain.callbacks.spike import TrainingSpikeException
from drivetrain.compat.spike import FabricSpikeDetection


def run(losses: list[float], detection: FabricSpikeDetection) -> int | None:
    """Report the losses of a loop to the callback; return the batch of the spike."""
    engine = Engine(accelerator="cpu", callbacks=[detection])
    try:
        for batch_idx, loss in enumerate(losses):
            engine.call(
                "on_train_batch_end", fabric=engine, loss=torch.tensor(loss), batch=torch.ones(1), batch_idx=batch_idx
            )
    except TrainingSpikeException as error:
        return error.batch_idx if "Training spike" in str(error) else -1
    return None


@pytest.mark.parametrize(
    ("losses", "arguments", "batch"),
    [
        ([1.0, 1.1, 5.0, 1.0], {}, 2),
        ([1.0, 1.1, 2.5, 1.0], {}, None),
        ([1.0, 1.1, 2.5, 1.0], {"rtol": 0.5}, 2),
        ([1.0, 9.0, 9.0, 9.0], {"warmup": 2}, None),
        ([1.0, 1.0, float("nan"), 1.0], {}, 2),
        ([5.0, 5.0, 5.0, 0.1], {"mode": "max", "rtol": 0.5}, 3),
        ([1.0, 9.0, 1.0, 1.0], {"rtol": None, "atol": 10.0}, None),
        ([9.0, 1.0, 1.0, 4.5], {"window": 2}, 3),
        ([9.0, 1.0, 1.0, 4.5], {"window": 3}, None),
    ],
)
def test_the_loop_ends_at_a_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], arguments: Any, batch: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    detection = FabricSpikeDetection(**arguments)
    assert run(losses, detection) == batch
    if batch is None:
        assert not (tmp_path / "skip_batches.json").exists()
    else:
        written = json.loads((tmp_path / "skip_batches.json").read_text())
        assert written == detection.bad_batches == [batch - 1, batch]


def test_another_rank_has_the_spike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detection = FabricSpikeDetection(exclude_batches_path=tmp_path / "bad" / "list.json")
    engine = Engine(accelerator="cpu")
    monkeypatch.setattr(engine.strategy, "reduce_boolean_decision", lambda decision, all: True)
    with pytest.raises(TrainingSpikeException):
        detection.on_train_batch_end(engine, torch.tensor(1.0), None, batch_idx=4)
    assert json.loads((tmp_path / "bad" / "list.json").read_text()) == [3, 4]


def test_its_state_continues_in_another_run(tmp_path: Path) -> None:
    detection = FabricSpikeDetection(rtol=0.5, exclude_batches_path=tmp_path)
    assert run([1.0, 1.0], detection) is None
    later = FabricSpikeDetection(warmup=0)
    later.load_state_dict(detection.state_dict())
    assert (later.rtol, later.warmup, Path(str(later.exclude_batches_path))) == (0.5, 1, tmp_path)
    assert run([1.0, 4.0], later) == 1
