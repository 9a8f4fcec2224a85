"""Folders of runs, as fits leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ATTEMPT: dict[str, Any] = {
    "id": "a", "began": 1_700_000_000.0, "ended": 1_700_000_100.0, "seconds": 100.0, "status": "finished",
    "why": "max_epochs=2 is reached", "resumed_from": None, "first_step": 0, "last_step": 1000, "epochs": 2,
    "model": "Net", "plan": [{"what": "device", "choice": "cpu", "why": "there is no other"}],
    "settings": {"max_epochs": "2"}, "environment": {"torch": "2.13"},
    "code": {"folder": "/home/me", "commit": "abcdef", "branch": "main", "dirty": True, "diff": "d"},
    "time": {"seconds": {"fetch": 75.0, "forward": 25.0}, "wall_s": 100.0,
             "verdict": {"cause": "dataset", "text": "75 % was waiting for data.", "advice": "Write num_workers=2."}},
    "checkpoints": [{"monitor": "val_loss", "best": "checkpoints/b.ckpt", "score": 0.25, "last": "checkpoints/l.ckpt",
                     "kept": {"checkpoints/b.ckpt": 0.25}}],
    "ledger": None,
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the folder of a run.

    ``attempts`` are changes of one attempt each; ``rows`` are the columns of ``metrics.csv`` after the step.
    """

    def make(name: str = "run", *attempts: dict[str, Any], rows: dict[str, list[Any]] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        found = [{**ATTEMPT, "id": str(index), **each} for index, each in enumerate(attempts or ({},))]
        record = {"schema": 1, "diffs": {"d": "-lr = 1\n+lr = 2\n"}, "attempts": found}
        (folder / "run.json").write_text(json.dumps(record))
        columns = {"train_loss": [4.0, 3.0, 2.0, 1.0], "val_loss": [5.0, "", "", 3.0]} if rows is None else rows
        if columns:
            lines = [",".join(["step", *columns])]
            lines += [",".join(map(str, [at * 10, *row])) for at, row in enumerate(zip(*columns.values(), strict=True))]
            (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
        return folder

    return make
