from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy
from drivetrain.trainer.checkpoint import resolve_path


@pytest.fixture
def breaking(regression: Any) -> Any:
    class Breaking(regression):  # type: ignore[misc]
        error: BaseException | None = RuntimeError("broken")
        at = 6

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.error is not None and self.global_step == self.at:
                raise self.error
            return self.loss(batch)

    return Breaking


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_its_state(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, caplog: Any, error: BaseException
) -> None:
    module, callback = breaking(), OnExceptionCheckpoint(tmp_path / "saved")
    module.error = error
    with caplog.at_level(logging.INFO, logger="drivetrain"), pytest.raises((RuntimeError, SystemExit)):
        make_trainer(max_epochs=2, callbacks=callback, enable_checkpointing=True).fit(module, loader)

    assert callback.ckpt_path == str(tmp_path / "saved" / "on_exception.ckpt")
    saved = torch.load(callback.ckpt_path, weights_only=True)
    assert saved["global_step"] == 6
    assert torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight)
    assert f"Saved {callback.ckpt_path}" in caplog.text


def test_step_0_is_saved_too_and_the_next_run_ends_as_an_undisturbed_one(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    def run(at: int | None, ckpt_path: str | None = None) -> Any:
        torch.manual_seed(3)
        module, callback = breaking(), OnExceptionCheckpoint(tmp_path)
        module.error = None if at is None else RuntimeError("broken")
        module.at = at
        with nullcontext() if at is None else pytest.raises(RuntimeError, match="broken"):
            make_trainer(callbacks=callback, enable_checkpointing=True).fit(module, loader, ckpt_path=ckpt_path)
        return module.net[0].weight

    whole = run(None)
    run(0)
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 0
    assert torch.equal(run(None, "last"), whole)


def test_nothing_is_saved_without_an_exception(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    module, callback = breaking(), OnExceptionCheckpoint(tmp_path)
    module.error = None
    make_trainer(callbacks=callback, enable_checkpointing=True).fit(module, loader)

    assert list(tmp_path.glob("*.ckpt")) == []
    assert callback.resume_candidates(make_trainer()) == []


@pytest.mark.parametrize("saver", ["OnExceptionCheckpoint", "ModelCheckpoint(save_on_exception=True)"])
@pytest.mark.parametrize("where", ["in set-up", "in a trial run", "without an exception"])
def test_an_exception_before_training_is_one_line(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, caplog: Any, saver: str, where: str
) -> None:
    class Failing(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if where == "in set-up":
                raise RuntimeError("broken")

    own: Any = OnExceptionCheckpoint(tmp_path)
    callback = own if saver == "OnExceptionCheckpoint" else ModelCheckpoint(tmp_path, save_on_exception=True)
    module = breaking()
    module.at = 0 if where != "without an exception" else 99
    trainer = make_trainer(
        callbacks=[Failing(), callback], enable_checkpointing=True, accumulate_grad_batches=2,
        fast_dev_run=where == "in a trial run",
    )  # fmt: skip
    fails = where != "without an exception"
    with caplog.at_level(logging.INFO, logger="drivetrain"), pytest.raises(RuntimeError) if fails else nullcontext():
        trainer.fit(module, loader)
    told = [record.message for record in caplog.records if "saved nothing" in record.message]
    expected = f"{saver} saved nothing: the exception came before this fit began to train"
    assert len(told) == (where == "in set-up")
    assert all(message.startswith(expected) for message in told)
    assert bool(list(tmp_path.glob("*.ckpt"))) == (not fails and saver != "OnExceptionCheckpoint")


def test_t58_nothing_is_saved_when_a_second_fit_fails_before_it_trains(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    """The steps that the Trainer counts by then are the first fit's, and the model may be half set up."""

    class Breaks(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step:
                raise RuntimeError("in set-up")

    module, callback = breaking(), OnExceptionCheckpoint(tmp_path)
    module.error = None
    trainer = make_trainer(callbacks=[Breaks(), callback], enable_checkpointing=True)
    trainer.fit(module, loader)
    with pytest.raises(RuntimeError, match="in set-up"):
        trainer.fit(module, loader)
    assert not os.path.exists(callback.ckpt_path)


def test_nothing_is_saved_in_fast_dev_run_and_outside_of_a_fit(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    class Broken(validated):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("broken")

        def on_train_end(self) -> None:
            if self.trainer.fast_dev_run:
                raise RuntimeError("broken")

    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(fast_dev_run=2, callbacks=callback, enable_checkpointing=True).fit(Broken(), loader, loader)
    trainer = make_trainer(callbacks=callback, enable_checkpointing=True)
    trainer.fit(Broken(), loader, loader)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.test(dataloaders=loader)
    assert not os.path.exists(callback.ckpt_path)


def test_an_exception_in_validation_is_one_too(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    class Broken(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("broken")

    callback = OnExceptionCheckpoint(tmp_path, filename="rescue")
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(callbacks=callback, enable_checkpointing=True, num_sanity_val_steps=0).fit(
            Broken(), loader, loader
        )
    assert torch.load(tmp_path / "rescue.ckpt", weights_only=True)["global_step"] == 4


def test_a_save_that_fails_leaves_the_file_before_and_the_first_exception(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = OnExceptionCheckpoint(tmp_path)
    arguments: dict[str, Any] = {"max_epochs": 2, "callbacks": callback, "enable_checkpointing": True}
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(**arguments).fit(breaking(), loader)
    before = Path(callback.ckpt_path).read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("drivetrain.checkpoints.file.os.replace", full)
    with (
        pytest.raises(RuntimeError, match="broken"),
        pytest.warns(UserWarning, match="OnExceptionCheckpoint.on_exception failed: CheckpointError.*disk full"),
    ):
        make_trainer(**arguments).fit(breaking(), loader)
    assert Path(callback.ckpt_path).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["on_exception.ckpt"]


def test_t28_last_means_whatever_was_written_last(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    checkpoint, rescue = ModelCheckpoint(tmp_path, save_last=True), OnExceptionCheckpoint(tmp_path)
    module = breaking()
    trainer = make_trainer(max_epochs=2, callbacks=[checkpoint, rescue], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, loader)
    for path in {*tmp_path.glob("*.ckpt")} - {Path(rescue.ckpt_path)}:
        os.utime(path, ns=(1, 1))

    module.error = None
    assert resolve_path(trainer, "last", None) == rescue.ckpt_path
    os.utime(rescue.ckpt_path, ns=(0, 0))
    os.utime(checkpoint.last_model_path, ns=(2, 2))
    assert resolve_path(trainer, "last", None) == checkpoint.last_model_path


@pytest.mark.parametrize("wrong", ["", None, 3])
def test_a_file_needs_a_name(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match='Write filename="on_exception"'):
        OnExceptionCheckpoint(tmp_path, wrong)


_whole: list[str] = []  # what an undisturbed run prints

PROGRAM = Path(__file__).parents[1] / "faults" / "save_program.py"


@pytest.mark.parametrize("verb", ["", "module_state", "lightning_module_state_dict", "optimizer_state"])
def test_t57_only_ranks_that_have_the_whole_state_save_alone(verb: str) -> None:
    own = {verb: lambda *_: {}} if verb else {}
    with type("Own", (DDPStrategy,), own)().alone() as what:
        assert what == ("" if verb else "whole")


@pytest.fixture
def job(programs: Any, tmp_path: Path) -> Any:
    """Runs two ranks, of which one may fail; returns the result, and the weights of a run that came to its end."""

    def run(fault: str, rank: int, *options: str) -> tuple[Any, str]:
        done = programs.run(PROGRAM, fault, rank, *options, cwd=tmp_path, timeout=60)
        assert ("the fault was injected" in done.stdout) == (fault != "none"), done.stderr
        return done, "".join(line for line in done.stdout.splitlines() if line.startswith("weights"))

    return run


def undisturbed(job: Any) -> str:
    """Return what a run prints at its end that no fault has ended."""
    if not _whole:
        _whole.append(job("none", 0, "OnExceptionCheckpoint")[1])
    assert _whole != [""]
    return _whole[0]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
@pytest.mark.parametrize(("saver", "rank"), [("OnExceptionCheckpoint", 1), ("ModelCheckpoint", 0)])
def test_t57_each_rank_saves_alone_and_the_next_run_ends_as_an_undisturbed_one(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saver: str, rank: int
) -> None:
    monkeypatch.setenv("SAVE_NAME", "{loss:.9f}")  # all ranks need the same name
    failed, _ = job("exception", rank, saver)
    assert failed.returncode == 1
    assert f"Rank {rank} of 2 (process " in failed.stderr
    name = "on_exception.ckpt" if saver[0] == "O" else "epoch=0-step=5.ckpt"
    files = sorted(path.name for path in tmp_path.glob("*.ckpt*"))
    assert files[0] == name
    assert re.fullmatch(re.escape(name) + r"\.[0-9a-f]{8}\.rank1", files[1])
    assert len(files) == 2
    assert f"{name}, each rank by itself." in failed.stderr
    assert torch.load(tmp_path / name, weights_only=True)["global_step"] == 5
    _, rest = job("none", 0, saver, "last")
    assert rest == undisturbed(job)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
def test_t57_a_file_without_the_part_of_a_dead_rank_is_not_called_a_checkpoint(job: Any, tmp_path: Path) -> None:
    for _ in range(2):  # the second file replaces the first
        failed, _ = job("kill", 1, "OnExceptionCheckpoint")
        [file] = tmp_path.glob("*.ckpt*")
        assert re.fullmatch(r"on_exception\.ckpt\.[0-9a-f]{8}\.incomplete", file.name)
        lost = re.escape(str(file).replace("incomplete", "rank1"))
        assert re.search(f"on_exception.ckpt is not complete yet: .* {lost} is missing", failed.stderr)
    resumed, rest = job("none", 0, "OnExceptionCheckpoint", "last")
    assert re.search(f"the save of .* was not finished .{lost} is missing., so training starts", resumed.stderr)
    assert rest == undisturbed(job)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
@pytest.mark.parametrize(("fault", "saver"), [("kill", "OnExceptionCheckpoint"), ("exception", "ModelCheckpoint")])
def test_t57_last_falls_back_past_a_file_that_lacks_the_part_of_a_rank(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, saver: str
) -> None:
    monkeypatch.setenv("SAVE_AT_STEP", "2")
    job("exception", 1, saver)
    [path] = tmp_path.glob("*.ckpt")
    complete = path.read_bytes()
    monkeypatch.setenv("SAVE_AT_STEP", "5")
    job(fault, 1, saver)
    for part in tmp_path.glob("*step=5*.rank1"):  # of a file that was complete
        part.unlink()
    assert path.read_bytes() == complete
    resumed, rest = job("none", 0, saver, "last")
    found = re.escape(f"The newest complete checkpoint is taken: {path}.")
    assert re.search(rf"passes over .*\.rank1.* {found}", resumed.stderr)
    assert rest == undisturbed(job)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")
def test_t57_where_each_rank_holds_a_part_nothing_is_saved_and_a_line_says_so(job: Any, tmp_path: Path) -> None:
    failed, _ = job("exception", 0, "OnExceptionCheckpoint", "", "sharded")
    assert failed.returncode == 1
    assert list(tmp_path.glob("*.ckpt*")) == []
    assert (
        "on_exception.ckpt was not saved: DDPStrategy would need the state of the rank that has failed" in failed.stderr
    )
