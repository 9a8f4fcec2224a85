"""Saves in processes of which one has a fault at one of its file operations; prints what is not as it must be then.

``python every_operation_program.py SWEEPS FOLDER``, with SWEEPS as JSON: [scenario, where, wrong, most, kinds] of each.
"where" is "plain", or with saves in the background the process that has the fault, "training" or "writing"; "most" is
how many operations get a fault of each kind, 0: all; "wrong" is a planted error, or "". The program prints a line of
JSON for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import file_faults
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO, sharded, writer
from drivetrain.checkpoints.io import CheckpointIO, wait_for
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.strategies import SingleDeviceStrategy, sharded_files

_BECOME_PARENT_OF_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER
_STEP = re.compile(r"step=(\d+)")
_UNTIDY = ("!unlink", "!rmdir", "!remove")  # operations without which a save cannot tidy up

Say = Callable[..., Any]
log = logging.getLogger("drivetrain")


class Scenario:
    """What a process saves.

    Args:
        store: where it saves.
        folder: where its checkpoints are.
        say: reports ``acknowledged=step`` and ``error=(type, text)``.
    """

    def __init__(self, store: CheckpointIO, folder: Path, say: Say) -> None:
        self.store, self.folder, self.say = store, folder, say

    def saves(self) -> None:
        """Save for the first time, while there may be a fault."""
        for step in (1, 2):
            self.attempt(step)

    def last_save(self) -> None:
        """Save once more, without a fault."""
        self.attempt(9)

    def attempt(self, step: int) -> None:
        try:
            self.save(step)
        except Exception as error:
            self.say(error=(type(error).__name__, str(error)))
        else:
            self.say(acknowledged=step)

    def save(self, step: int) -> None:
        raise NotImplementedError


def content(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"a": torch.full((1000,), step), "b": torch.full((3, 5), step)}}


class OneFile(Scenario):
    """One file, which each save replaces."""

    def save(self, step: int) -> None:
        path = self.folder / "a.ckpt"
        self.store.save_checkpoint(content(step), path)
        wait_for(self.store, path)


class Shards(Scenario):
    """A folder of shards, which each save replaces, and a copy of it."""

    def save(self, step: int) -> None:
        strategy, path = SingleDeviceStrategy(checkpoint_io=self.store), self.folder / "a.ckpt"
        sharded_files.save(strategy, content(step), path)
        wait_for(self.store, path)
        self.say(acknowledged=step)
        self.store.copy(path, self.folder / "last.ckpt")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Says(Callback):
    """Reports the checkpoint that ModelCheckpoint names, which must be durable then."""

    def __init__(self, saver: ModelCheckpoint, say: Say) -> None:
        self.saver, self.say = saver, say

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if step := _STEP.search(self.saver.best_model_path):
            self.say(acknowledged=int(step[1]))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.say(starts=trainer.global_step)


class Fit(Scenario):
    """A fit whose ModelCheckpoint saves after each step, writes last.ckpt, and removes what it replaces."""

    last: Any = True

    def saves(self) -> None:
        self.attempt(2)

    def save(self, step: int) -> None:
        saver = ModelCheckpoint(self.folder, every_n_train_steps=1, save_last=self.last)
        trainer = Trainer(
            max_steps=step, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Says(saver, self.say), saver], plugins=[self.store], default_root_dir=self.folder,
        )  # fmt: skip
        trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=1), ckpt_path="last")

    def last_save(self) -> None:
        self.attempt(4)


class FitWithLink(Fit):
    """The same, and last.ckpt is a link."""

    last = "link"


SCENARIOS: dict[str, type[Scenario]] = {
    "file": OneFile, "shards": Shards, "cycle": Fit, "cycle with a link": FitWithLink,
}  # fmt: skip


# ---- planted errors --------------------------------------------------------------------------------------------------


IN_PLACE = "files are written in place"  # by file_faults.Faults, which each process installs
UNLISTED = "the files of the save before are removed before the manifest is written"
TOO_EARLY = "the checkpoint before is removed before the new one is written"


def plant(wrong: str) -> Any:
    """Return a context in which this process makes an error."""
    commit, save = sharded.commit, ModelCheckpoint._save_topk_checkpoint

    def wrong_commit(folder: Path, save_id: str, *rest: Any) -> None:
        for name in sharded._own_files(folder):
            if not name.startswith(save_id):
                (folder / name).unlink()
        commit(folder, save_id, *rest)

    def wrong_save(saver: ModelCheckpoint, trainer: Trainer, metrics: Any) -> None:
        for path in saver._worst():
            trainer.strategy.remove_checkpoint(path)
        save(saver, trainer, metrics)

    return {
        "": contextlib.nullcontext(),
        IN_PLACE: contextlib.nullcontext(),
        UNLISTED: mock.patch.object(sharded, "commit", wrong_commit),
        TOO_EARLY: mock.patch.object(ModelCheckpoint, "_save_topk_checkpoint", wrong_save),
    }[wrong]


# ---- one run ---------------------------------------------------------------------------------------------------------


class Run:
    """A process with a fault, and what it leaves behind.

    Args:
        scenario: a key of SCENARIOS. where, wrong: as in the program's arguments.
        root: a folder that does not exist. kind, at: the fault.
    """

    def __init__(self, scenario: str, where: str, root: Path, kind: str = "", at: int = 0, wrong: str = "") -> None:
        self.scenario, self.where, self.kind, self.wrong = scenario, where, kind, wrong
        self.folder, self.armed = root / "runs", root / "armed"
        self.folder.mkdir(parents=True)
        self.armed.touch()
        given: dict[str, Any] = {"folder": str(self.folder), "armed": str(self.armed), "wrong": wrong == IN_PLACE}
        self.faults = file_faults.Faults(log=str(root / "faulty"), kind=kind, at=at, **given)
        other = file_faults.Faults(log=str(root / "other"), **given)
        self.training, self.writing = (other, self.faults) if where == "writing" else (self.faults, other)

        self.said: list[dict[str, Any]] = []
        self.status = 0
        if kind == "kill" and where != "writing":
            self._act_in_a_copy()
        else:
            self._act(lambda **what: self.said.append(what))
        self.operations = self.faults.operations()
        self.had_fault = any(name.startswith("!") for name in self.operations)

    def _act_in_a_copy(self) -> None:
        said, says = os.pipe()
        if (pid := os.fork()) == 0:
            code, write = 1, os.write
            try:
                self._act(lambda **what: write(says, (json.dumps(what) + "\n").encode()))
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(says)
        self.status = os.waitpid(pid, 0)[1]
        while _has_children():  # the process that writes ends after it
            pass
        with open(said, "rb") as stream:
            self.said = [json.loads(line) for line in stream]

    def _act(self, say: Say) -> None:
        acknowledged = [0]

        def noted(**what: Any) -> None:
            acknowledged.append(what.get("acknowledged", 0))
            say(**what)

        class Lines(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                say(line=record.getMessage())

        store: CheckpointIO = TorchCheckpointIO() if self.where == "plain" else AsyncCheckpointIO()
        scenario, lines = SCENARIOS[self.scenario](store, self.folder, noted), Lines()
        with contextlib.ExitStack() as stack:
            log.addHandler(lines)
            stack.callback(log.removeHandler, lines)
            stack.enter_context(mock.patch.object(writer, "_PROGRAM", self.writing.command()))
            stack.enter_context(plant(self.wrong))
            stack.callback(self.training.install())
            scenario.saves()
            self.armed.unlink(missing_ok=True)
            operations = self.training.operations() + self.writing.operations()
            for problem in self._wrong_files(max(acknowledged), operations):
                say(problem=problem)
            scenario.last_save()
            store.teardown()

    def problems(self) -> Iterator[str]:
        """Return what is not as it must be."""
        killed = self.kind == "kill" and self.where != "writing" and self.had_fault
        if self.status != (signal.SIGKILL if killed else 0):
            yield f"the process ended with {self.status}"
        last_step = 4 if "cycle" in self.scenario else 9
        yield from (each["problem"] for each in self.said if "problem" in each)
        acknowledged = [each["acknowledged"] for each in self.said if "acknowledged" in each]
        if not killed and acknowledged[-1:] != [last_step]:
            yield "the save after the fault does not work"
        yield from self._wrong_files(max(acknowledged, default=0), self.operations)
        yield from self._wrong_messages()
        if killed:
            yield from self._continued(last_step)

    def _continued(self, last_step: int) -> Iterator[str]:
        """Return what is wrong when another process continues."""
        said: list[tuple[str, Any]] = []
        before = self._newest()
        store, say = TorchCheckpointIO(), lambda **what: said.extend(what.items())
        SCENARIOS[self.scenario](store, self.folder, say).last_save()
        if ("acknowledged", last_step) not in said:
            yield f"the next process cannot save: {said}"
        for step in (step for name, step in said if name == "starts" and step < before):
            yield f"the next process starts at step {step}, and step {before} is saved"
        yield from self._wrong_files(last_step, self.operations)

    def _newest(self) -> int:
        return max((step for step, _ in map(self._step_of, self.folder.glob("*.ckpt"))), default=0)

    def _step_of(self, path: Path) -> tuple[int, str]:
        """Return the step of a checkpoint, and what is wrong with it."""
        if path.is_dir() and not sharded.is_checkpoint(path):
            return 0, ""  # a folder without a manifest is no checkpoint
        if not TorchCheckpointIO().is_complete(path):
            return 0, f"{path.name} is not complete"
        found = TorchCheckpointIO().load_checkpoint(path)
        step: int = found["global_step"]
        if "cycle" not in self.scenario and any((each != step).any() for each in found["state_dict"].values()):
            return step, f"{path.name} holds parts of several saves"
        return step, ""

    def _wrong_files(self, acknowledged: int, operations: list[str]) -> Iterator[str]:
        for path in sorted(self.folder.glob("*.ckpt")):
            if problem := self._step_of(path)[1]:
                yield problem
        if (newest := self._newest()) < acknowledged:
            yield f"step {acknowledged} was acknowledged, and the newest complete checkpoint is of step {newest}"
        left = list(self.folder.rglob("*.part"))
        if left and self.kind != "kill" and not any(name in operations for name in _UNTIDY):
            yield f"{len(left)} temporary files are left"

    def _wrong_messages(self) -> Iterator[str]:
        for kind, text in (each["error"] for each in self.said if "error" in each):
            number = "EIO" if self.kind == "EIO" else "ENOSPC"
            named = str(self.folder) in text and (number in text or os.strerror(file_faults.ERRORS[number]) in text)
            if kind != "CheckpointError" or not named:
                yield f"the error is {kind}: {text}"
        lines = [each["line"] for each in self.said if "has failed" in each.get("line", "")]
        died = self.kind == "kill" and self.where == "writing" and self.had_fault
        if len(lines) != died or any("SIGKILL" not in line for line in lines):
            yield f"of the death of the process that writes, these lines are logged: {lines}"


def _has_children() -> bool:
    try:
        os.wait()
    except ChildProcessError:
        return False
    return True


def points(operations: list[str], kind: str, most: int, number: int) -> list[int]:
    """Return at which operations there is a fault: of all at which this kind is possible, ``most``; 0: all.

    Args:
        operations: their names. kind, most: as above. number: of the kind: others have their faults elsewhere.
    """
    every = [at for at, name in enumerate(operations, 1) if kind != "short" or name == "write"]
    if not most or not every:
        return every
    return sorted({every[(index * len(every) + number) // most % len(every)] for index in range(most)})


def run_all(scenario: str, where: str, wrong: str, most: int, kinds: list[str], folder: Path) -> dict[str, Any]:
    """Run a scenario without a fault and with each; return the numbers of operations and faults, and all problems."""
    # what the first use imports and compiles is there in all copies
    SCENARIOS[scenario](TorchCheckpointIO(), folder / "first", lambda **what: None).last_save()
    counted = Run(scenario, where, folder / "counted", wrong=wrong)
    found, faults = [] if wrong else list(counted.problems()), 0
    for number, kind in enumerate(kinds):
        for at in points(counted.operations, kind, most, number):
            run = Run(scenario, where, folder / "run", kind, at, wrong)
            faults += run.had_fault
            named = f"{kind} at operation {at}, {counted.operations[at - 1]}"
            found += [f"{named}: {problem}" for problem in run.problems()]
            shutil.rmtree(folder / "run")
    return {"operations": len(counted.operations), "faults": faults, "problems": found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_BECOME_PARENT_OF_ORPHANS, 1, 0, 0, 0)
    for _number, (_scenario, _where, _wrong, _most, _kinds) in enumerate(json.loads(sys.argv[1])):
        print(json.dumps(run_all(_scenario, _where, _wrong, _most, _kinds, Path(sys.argv[2], str(_number)))))
