"""A fit whose ranks hold shards is saved after an exception: each rank writes its own, without an exchange."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("save_program.py")
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")

EACH = [("fsdp", "OnExceptionCheckpoint", 1, 5)]
if LONG:
    EACH += [("fsdp", "ModelCheckpoint", 0, 0), ("model_parallel", "ModelCheckpoint", 1, 5)]
    EACH += [("ddp_fork", "ModelCheckpoint", 1, 0)]


@pytest.fixture
def job(programs: Any, tmp_path: Path) -> Any:
    """Runs two ranks, of which one may fail; returns what the program says, and the weights at its end."""

    def run(strategy: str, saver: str, fault: str = "none", rank: int = 0, ckpt_path: str = "", at: int = 5) -> Any:
        environ = {**os.environ, "SAVE_AT_STEP": str(at), "SAVE_NAME": "rescue"}
        done = programs.run(PROGRAM, fault, rank, saver, ckpt_path, "Adam", strategy, cwd=tmp_path, env=environ)
        assert ("the fault was injected" in done.stdout) == (fault != "none"), done.stderr
        assert done.returncode == (fault != "none"), done.stderr
        return done.stderr, [line for line in done.stdout.splitlines() if line.startswith("weights")]

    return run


@pytest.mark.parametrize(("strategy", "saver", "rank", "at"), EACH)
def test_t57_each_rank_saves_its_shards_and_the_next_run_ends_as_an_undisturbed_one(
    job: Any, tmp_path: Path, strategy: str, saver: str, rank: int, at: int
) -> None:
    _, whole = job(strategy, "none")
    said, _ = job(strategy, saver, "exception", rank, at=at)
    name = "on_exception.ckpt" if saver[0] == "O" else "rescue.ckpt"
    how = "each rank by itself" if strategy == "ddp_fork" else "a folder into which each rank has written its shards"
    assert f"{name}, {how}." in said
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [name]
    _, rest = job(strategy, saver, ckpt_path="last")
    assert rest == whole != []


@pytest.mark.skipif(not LONG, reason="four more programs: make test-faults")
def test_t57_shards_of_a_dead_rank_are_lost_and_the_newest_complete_checkpoint_stays(job: Any, tmp_path: Path) -> None:
    job("fsdp", "ModelCheckpoint", "exception", 1, at=2)
    complete = {path.name: path.read_bytes() for path in (tmp_path / "rescue.ckpt").iterdir()}
    said, _ = job("fsdp", "ModelCheckpoint", "kill", 1)
    assert "1.part is missing. The last rank completes it; if one of them is dead, the newest complete" in said
    [lost] = tmp_path.glob("*.incomplete")
    assert lost.name.startswith("rescue-v1.ckpt.")
    assert complete == {path.name: path.read_bytes() for path in (tmp_path / "rescue.ckpt").iterdir()}
    said, _ = job("fsdp", "ModelCheckpoint", ckpt_path="last")
    assert "rescue.ckpt: epoch 0, after batch 1 (counted from 0), global step 2" in said
