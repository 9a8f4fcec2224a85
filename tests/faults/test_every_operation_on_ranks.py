"""Two ranks save, and the process that writes for one of them has a fault at any of its file operations: the new
checkpoint is complete on both ranks, or the one before is.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from tests.distributed.test_background_saves import SavedNet, data, trainer
from tests.faults.file_faults import Faults
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.checkpoints import TorchCheckpointIO, background, writer
from drivetrain.errors import CheckpointError
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.strategies import rank_files
from drivetrain.strategies.fsdp import FSDPStrategy

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the names of its errors"),
    pytest.mark.timeout(1200),  # the long form takes minutes
]


class Fault(NamedTuple):
    rank: int  # whose writing process has it
    kind: str
    at: int


class Sweep(Callback):
    """Saves while the ranks of a fit are connected, once for each fault.

    Args:
        folder: an empty one. background: whether another process writes. kinds: of the faults.
        most: how many operations have each of them; 0: all.
    """

    def __init__(self, folder: Path, background: bool, kinds: list[str], most: int) -> None:
        self.folder, self.background, self.kinds, self.most = folder, background, kinds, most
        self.problems, self.faults, self.operations = list[str](), 0, list[int]()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.operations:
            return
        kept = trainer.strategy.checkpoint_io
        for rank in (0, 1):
            self.operations.append(self.one(trainer.strategy, Fault(rank, "", 0)))
        for rank, count in enumerate(self.operations):
            for number, kind in enumerate(self.kinds):
                steps = self.most or count
                for at in sorted({(index * count + number) // steps % count + 1 for index in range(steps)}):
                    self.faults += self.one(trainer.strategy, Fault(rank, kind, at)) >= at
        trainer.strategy.checkpoint_io = kept

    def one(self, strategy: Any, fault: Fault) -> int:
        """Save with one fault; return how many operations the process made that may have it."""
        rank, root = strategy.global_rank, self.folder / "-".join(map(str, fault))
        path, armed = root / "runs" / "a.ckpt", root / f"armed-{rank}"
        if rank == 0:
            path.parent.mkdir(parents=True)
        strategy.barrier()
        armed.touch()
        kind = fault.kind if rank == fault.rank else ""
        faults = Faults(str(path.parent), str(root / f"log-{rank}"), str(armed), kind, fault.at)
        strategy.checkpoint_io = store = AsyncCheckpointIO() if self.background else TorchCheckpointIO()
        durable = 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(writer, "_PROGRAM", faults.command()))
            told = stack.enter_context(mock.patch.object(background, "any_rank_info"))
            if not self.background:
                stack.callback(faults.install())
            for step in (1, 2, 3):
                if step == 3:  # the fault is over
                    armed.unlink(missing_ok=True)
                error = saved(strategy, path, step)
                errors = strategy.world.gather_objects(error)
                if fault.kind in ("", "kill") or step == 3:
                    self.check(errors == ["", ""], fault, f"step {step} was not saved: {errors}")
                # only of removing an earlier file, after the save, the other rank knows nothing
                agree = all(errors) or all("could not be removed" in each for each in errors if each)
                self.check(agree, fault, f"the ranks disagree: {errors}")
                self.check(named(errors, path, fault.kind), fault, f"the errors are {errors}")
                durable = durable if any(errors) else step
                is_armed = armed.exists()  # not after a kill
                armed.unlink(missing_ok=True)  # what follows may read
                problems = strategy.world.gather_objects(wrong(strategy, path, durable))
                if is_armed:
                    armed.touch()
                self.check(problems == ["", ""], fault, f"after step {step}: {problems}")
        store.teardown()
        operations = faults.operations()
        died = kind == "kill" and any(name.startswith("!") for name in operations)
        lines = [str(call) for call in told.call_args_list]
        self.check(len(lines) == died and all("SIGKILL" in line for line in lines), fault, f"the lines are {lines}")
        count: int = strategy.world.gather_objects(len(operations))[fault.rank]
        if rank == 0:
            shutil.rmtree(root)
        return count

    def check(self, is_true: bool, fault: Fault, otherwise: str) -> None:
        if not is_true:
            self.problems.append(f"{fault}: {otherwise}")


def saved(strategy: Any, path: Path, step: int) -> str:
    """Save; return the error."""
    tensor = torch.full((4, 64), float(step))
    if isinstance(strategy, FSDPStrategy):
        mesh = next(strategy.lightning_module.parameters()).device_mesh
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    try:
        rank_files.save(strategy, {"global_step": step, "state_dict": {"w": tensor}}, {"step": step}, path)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return repr(error)
    return ""


def named(errors: list[str], path: Path, kind: str) -> bool:
    """Return whether the errors, if any, name the folder and the cause."""
    cause = "input/output error" if kind == "EIO" else "no space left on device"
    return all(str(path.parent) in error and cause in error.lower() for error in errors if error)


def wrong(strategy: Any, path: Path, durable: int) -> str:
    """Return what is wrong with the checkpoint as this rank reads it: it should be of step ``durable`` or later."""
    store = TorchCheckpointIO()
    if not durable and not store.exists(path):
        return ""
    if not store.is_complete(path):
        return "it is not complete"
    found = store.load_checkpoint(path)
    step = found["global_step"]
    if step < durable or not bool((found["state_dict"]["w"] == step).all()):
        return f"it is of step {step}, {found['state_dict']}"
    if strategy.global_rank == 0:
        return ""
    try:
        part = rank_files.read(strategy, found[rank_files.LISTED], strategy.global_rank, path, None)
    except CheckpointError as error:
        return str(error)
    return "" if part["step"] == step else f"the rank file is of step {part['step']}, the checkpoint of {step}"


def sweep(kind: str, folder: Path, in_background: bool, kinds: list[str], most: int, wrong: bool) -> dict[str, Any]:
    every = Sweep(folder, in_background, kinds, most)
    # as if a save that fails after the rename of its main file had written none
    planted = mock.patch.object(rank_files, "is_listed", return_value=False)
    with planted if wrong else contextlib.nullcontext():
        trainer(kind, False, every, max_epochs=1, enable_checkpointing=False).fit(SavedNet(), DataLoader(data(), 2))
    return {"operations": every.operations, "faults": every.faults, "problems": every.problems}


@pytest.mark.parametrize("in_background", [False, True], ids=["plain", "background"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp sharded"])
def test_a_fault_in_a_process_that_writes_for_a_rank_leaves_a_complete_checkpoint(
    pool: Any, tmp_path: Path, kind: str, in_background: bool, long_form: bool
) -> None:
    if not long_form and (kind == "ddp") == in_background:
        pytest.skip("make test-faults runs it")
    kinds = ["ENOSPC", "EIO", "full", "short"] if long_form else ["EIO"]
    kinds += ["kill"] if in_background else []  # here the process itself is a rank
    most = 0 if long_form else 2
    for rank in pool.run(sweep, kind, tmp_path, in_background, kinds, most, False, group=False, timeout=1200):
        print({**rank, "problems": len(rank["problems"])})
        assert rank["problems"] == []
        assert rank["faults"] >= (2 * most or sum(rank["operations"]))


def test_this_sweep_finds_a_rank_file_that_is_removed_too_early(pool: Any, tmp_path: Path, long_form: bool) -> None:
    """The negative control."""
    if not long_form:
        pytest.skip("make test-faults runs it")
    for rank in pool.run(sweep, "ddp", tmp_path, False, ["EIO"], 0, True, group=False, timeout=600):
        assert any("rank1 is missing" in problem for problem in rank["problems"]), rank
