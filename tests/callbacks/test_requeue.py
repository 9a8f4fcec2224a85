"""T33: a job that is told to end saves, goes back into the queue, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.callbacks.requeue import Requeue
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.clusters import LocalEnvironment, SLURMEnvironment
from drivetrain.errors import SIGTERMException


class Cluster(LocalEnvironment):
    """Sends SIGUSR1 and takes jobs back, as SLURM does."""

    auto_requeue, requeue_signal = True, signal.SIGUSR1
    name = "this"

    def requeue_id(self) -> str:
        return self.name

    def __init__(self, restarts: int = 0, why_not: str | None = None) -> None:
        super().__init__()
        self.restarts, self.why_not, self.asked = restarts, why_not, 0

    def restart_count(self) -> int:
        return self.restarts

    def requeue(self) -> str | None:
        self.asked += 1
        return self.why_not


class Model(LightningModule):
    def __init__(self, signalled: int = -1, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.signalled, self.rank, self.done = signalled, rank, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.done == self.signalled and self.global_rank == self.rank:
            signal.raise_signal(signal.SIGUSR1)
        self.done += 1
        return torch.nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def fit(folder: Any, model: Model, cluster: Cluster, ckpt_path: Any = None, **arguments: Any) -> torch.Tensor:
    """The first fit of a process."""
    Requeue._fits = 0
    return fit_again(folder, model, cluster, ckpt_path, **arguments)


def fit_again(folder: Any, model: Model, cluster: Cluster, ckpt_path: Any = None, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)))
    trainer = Trainer(**{
        "accelerator": "cpu", "max_epochs": 2, "default_root_dir": folder, "plugins": cluster, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, **arguments,
    })  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=2, shuffle=True), ckpt_path=ckpt_path)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(autouse=True)
def handler() -> Iterator[list[int]]:
    """The user's own handler, which must be there afterwards and hear of every signal."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, hear)
    yield heard
    assert signal.getsignal(signal.SIGUSR1) is hear
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("signalled", [0, 7, 13])
def test_t33_a_requeued_job_ends_as_an_undisturbed_one(
    tmp_path: Path, signalled: int, accumulate: int, handler: list[int]
) -> None:
    whole = fit(tmp_path / "whole", Model(), Cluster(), accumulate_grad_batches=accumulate)
    cluster, interrupted = Cluster(), Model(signalled)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, interrupted, cluster, accumulate_grad_batches=accumulate)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert (cluster.asked, handler) == (1, [signal.SIGUSR1])
    assert interrupted.done == signalled + 1  # it ends with the batch in which the signal came
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    rest = Model()
    assert torch.equal(fit(tmp_path, rest, Cluster(restarts=1), accumulate_grad_batches=accumulate), whole)
    assert rest.done == 24 - signalled - 1


def test_t33_the_highest_number_is_taken_and_the_next_one_written(tmp_path: Path) -> None:
    for restarts, expected in enumerate((1, 2, 3)):
        with pytest.raises(SystemExit):
            fit(tmp_path, Model(signalled=2), Cluster(restarts=restarts))
        assert (tmp_path / f"hpc_ckpt_{expected}.ckpt").exists()
    (tmp_path / "hpc_ckpt_x.ckpt").touch()
    rest = Model()
    fit(tmp_path, rest, Cluster(restarts=3))
    assert rest.done == 24 - 9


def test_t33_a_path_that_was_passed_wins_and_a_new_job_begins_anew(tmp_path: Path) -> None:
    def saver() -> dict[str, Any]:
        each_step = ModelCheckpoint(tmp_path / "c", "{step}", every_n_train_steps=1, save_top_k=-1)
        return {"callbacks": each_step, "enable_checkpointing": True}

    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signalled=2), Cluster(), **saver())
    again = Model()
    fit(tmp_path, again, Cluster(restarts=1), ckpt_path=tmp_path / "c" / "step=1.ckpt", **saver())
    assert again.done == 23
    new = Model()
    fit(tmp_path, new, Cluster(restarts=0))  # the file is another job's
    assert new.done == 24


def test_t33_each_fit_of_a_program_goes_on_from_its_own_file(tmp_path: Path) -> None:
    """Cross-validation: the second of three folds was interrupted."""
    fit(tmp_path, Model(), Cluster())
    with pytest.raises(SystemExit):
        fit_again(tmp_path, Model(signalled=5), Cluster())
    done = []
    for run in (fit, fit_again, fit_again):
        model = Model()
        run(tmp_path, model, Cluster(restarts=1))
        done.append(model.done)
    assert done == [24, 24 - 6, 24]


def test_t33_the_file_of_another_job_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signalled=2), Cluster())
    other, model = Cluster(restarts=1), Model()
    other.name = "another"
    fit(tmp_path, model, other)
    assert model.done == 24


def test_t33_a_newer_file_of_another_job_does_not_hide_its_own(tmp_path: Path) -> None:
    other = Cluster()
    other.name = "other"
    for cluster in (Cluster(), other):
        with pytest.raises(SystemExit):
            fit(tmp_path, Model(signalled=1), cluster)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"}
    model = Model()
    fit(tmp_path, model, Cluster(restarts=1))
    assert model.done == 22  # two of 24 batches were done before


def test_t33_jobs_that_save_together_get_numbers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import drivetrain.callbacks.requeue as module

    real, asked = module.numbered, []

    def numbered(folder: Any, store: Any) -> dict[int, str]:
        found = real(folder, store)
        asked.append(found)
        if len(asked) == 1:  # the other job saves now
            Path(folder, "hpc_ckpt_1.ckpt").write_bytes(b"theirs")
        return found

    monkeypatch.setattr(module, "numbered", numbered)
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signalled=1), Cluster())
    assert (tmp_path / "hpc_ckpt_1.ckpt").read_bytes() == b"theirs"
    assert (tmp_path / "hpc_ckpt_2.ckpt").exists()


def test_t33_the_job_goes_back_when_its_checkpoint_is_durable(tmp_path: Path) -> None:
    class Late(TorchCheckpointIO):
        """Writes when somebody waits."""

        later: tuple[Any, Any] | None = None

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.later = (checkpoint, path)

        def wait(self, path: Any = None) -> None:
            later, self.later = self.later, None
            if later is not None:
                super().save_checkpoint(*later)

    there = []

    class Looks(Cluster):
        def requeue(self) -> str | None:
            there.append(os.listdir(tmp_path))
            return super().requeue()

    cluster = Looks()
    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signalled=1), cluster, plugins=[cluster, Late()])
    assert there == [["hpc_ckpt_1.ckpt"]]


def test_t33_last_is_the_requeued_jobs_file_where_that_is_newer(tmp_path: Path) -> None:
    def saver() -> dict[str, Any]:
        return {
            "callbacks": ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=2),
            "enable_checkpointing": True,
        }

    with pytest.raises(SystemExit):
        fit(tmp_path, Model(signalled=4), Cluster(), **saver())
    model = Model()
    fit(tmp_path, model, Cluster(restarts=1), ckpt_path="last", **saver())
    assert model.done == 24 - 5


def test_a_job_that_cannot_go_back_goes_on(tmp_path: Path) -> None:
    cluster, model = Cluster(why_not="the queue is closed."), Model(signalled=3)
    with pytest.warns(UserWarning, match=r"hpc_ckpt_1.ckpt, but .* into the queue: the queue is closed. Training"):
        weights = fit(tmp_path, model, cluster)
    assert (model.done, cluster.asked) == (24, 1)
    assert torch.equal(weights, fit(tmp_path / "whole", Model(), Cluster()))


def test_without_auto_requeue_the_signal_is_the_users(tmp_path: Path, handler: list[int]) -> None:
    cluster = Cluster()
    cluster.auto_requeue = False
    model = Model(signalled=3)
    fit(tmp_path, model, cluster)
    assert (model.done, cluster.asked, handler) == (24, 0, [signal.SIGUSR1])


@pytest.mark.parametrize("when", ["sanity check", "validation"])
def test_t33_a_signal_in_a_validation_does_not_wait_for_the_next_training_batch(tmp_path: Path, when: str) -> None:
    class Validates(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)  # which counts, and may send the signal
            self.log("val_loss", self.layer(batch[0]).square().mean())

        def val_dataloader(self) -> Any:
            return DataLoader(torch.ones(6, 1, 4), batch_size=2)

    sanity = 2 if when == "sanity check" else 0
    whole = fit(tmp_path / "whole", Validates(), Cluster(), num_sanity_val_steps=sanity)
    model = Validates(1 if sanity else 13)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model, Cluster(), num_sanity_val_steps=sanity)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert model.done == (3 if sanity else 14)  # what comes before training waits for its first batch
    again = fit(tmp_path, Validates(), Cluster(restarts=1), num_sanity_val_steps=sanity)
    assert torch.equal(again, whole)


def test_a_sigterm_that_comes_with_the_signal_ends_a_fit_whose_job_cannot_go_back(tmp_path: Path) -> None:
    class Both(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.done == 4:
                signal.raise_signal(signal.SIGTERM)
            return loss

    cluster, model = Cluster(why_not="the queue is closed."), Both(signalled=3)
    with pytest.warns(UserWarning, match="queue is closed"), pytest.raises(SIGTERMException):
        fit(tmp_path, model, cluster)
    assert (model.done, cluster.asked) == (5, 1)


def test_a_job_without_a_store_is_told_that_nothing_requeues_it(tmp_path: Path, monkeypatch: Any) -> None:
    def without(stop: Any) -> Any:
        return nullcontext()

    monkeypatch.setattr("drivetrain.loops.stop.Stop.listening", without)
    model, cluster = Model(signalled=3), Cluster()
    with pytest.warns(UserWarning, match="auto_requeue has no effect"):
        fit(tmp_path, model, cluster)
    assert (model.done, cluster.asked) == (24, 0)


def requeued(folder: str, signalled: int, restarts: int, accumulate: int, epochs: int) -> tuple[Any, int]:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    model = Model(signalled, rank=1)
    arguments = {"accumulate_grad_batches": accumulate, "devices": 2, "max_epochs": epochs}
    try:
        return fit(folder, model, Cluster(restarts), **arguments), model.done
    except SystemExit as ended:
        return ended.code, model.done


@pytest.mark.parametrize("accumulate", [1, 2])
def test_t33_a_signal_to_one_rank_ends_all_at_the_same_batch(pool: Any, tmp_path: Path, accumulate: int) -> None:
    first, second = pool.run(requeued, str(tmp_path), 3, 0, accumulate, 10_000, world_size=2)
    assert first == second
    code, done = first
    assert code == 128 + signal.SIGUSR1
    assert done > 4
    assert os.listdir(tmp_path).count("hpc_ckpt_1.ckpt") == 1
    epochs = done // 6 + 2
    (whole, _), _ = pool.run(requeued, str(tmp_path / "whole"), -1, 0, accumulate, epochs, world_size=2)
    for weights, rest in pool.run(requeued, str(tmp_path), -1, 1, accumulate, epochs, world_size=2):
        assert rest == 6 * epochs - done
        assert torch.equal(weights, whole)


def test_slurm_is_asked_for_the_job_or_the_element_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$2" != 13 ] || {{ echo no such job >&2; exit 1; }}\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert SLURMEnvironment(environ={"SLURM_JOB_ID": "12"}).requeue() is None
    assert SLURMEnvironment(environ={"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}).requeue() is None
    assert (tmp_path / "asked").read_text() == "requeue 12\nrequeue 7_3\n"
    assert SLURMEnvironment(environ={"SLURM_JOB_ID": "13"}).requeue() == (
        "scontrol requeue 13 ended with 1: no such job"
    )
    assert "no number" in (SLURMEnvironment(environ={}).requeue() or "")
    monkeypatch.setenv("PATH", "")
    assert "scontrol" in (SLURMEnvironment(environ={"SLURM_JOB_ID": "12"}).requeue() or "")
