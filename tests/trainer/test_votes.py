"""The ranks vote after each phase of the set-up: one that fails frees the others, and the job may try again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer
from drivetrain.errors import CheckpointError, PeerError, SIGTERMException
from drivetrain.loops.progress import Progress
from drivetrain.strategies import waiting
from drivetrain.strategies.group import LoneGroup
from drivetrain.trainer import votes

PHASES = {
    "prepare_data": "prepare_data",
    "setup": "setup",
    "configure_model": "configure_model",
    "on_load_checkpoint": "restoring the model",
    "configure_optimizers": "configure_optimizers",
    "on_fit_start": "on_fit_start",
}


class Model(LightningModule):
    """Fails in one hook of one rank.

    Args:
        hook: its name; "": none.
        rank: of the job.
    """

    def __init__(self, hook: str = "", rank: int = 1) -> None:
        super().__init__()
        self.hook, self.rank = hook, rank
        self.layer = torch.nn.Linear(4, 1)

    def at(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_rank == self.rank:
            raise ValueError(f"in {hook} of this rank alone")

    def prepare_data(self) -> None:
        self.at("prepare_data")

    def setup(self, stage: str) -> None:
        self.at("setup")

    def configure_model(self) -> None:
        self.at("configure_model")

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.at("on_load_checkpoint")

    def on_fit_start(self) -> None:
        self.at("on_fit_start")

    def train_dataloader(self) -> Any:
        self.at("train_dataloader")
        return DataLoader(torch.ones(8, 4), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.at("training_step")
            self.trainer.strategy.barrier("own")
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        self.at("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def failed(hook: str, rank: int, ckpt_path: str | None = None) -> str:
    with pytest.raises((ValueError, PeerError)) as caught:
        trainer().fit(Model(hook, rank), ckpt_path=ckpt_path)
    return f"{caught.type.__name__}: {caught.value}"


def fails_in_each_phase(path: str) -> list[str]:
    saves = trainer()
    saves.fit(Model())
    saves.save_checkpoint(path)
    found = []
    for hook in PHASES:
        found.append(failed(hook, rank=0 if hook == "prepare_data" else 1, ckpt_path=path))
        trainer().fit(Model())  # the group of processes can still be used
    return found


def test_a_rank_that_fails_in_a_phase_of_the_set_up_frees_its_peers_which_name_it(pool: Any, tmp_path: Path) -> None:
    ranks = pool.run(fails_in_each_phase, str(tmp_path / "last.ckpt"))
    for number, (hook, phase) in enumerate(PHASES.items()):
        rank = 0 if hook == "prepare_data" else 1
        assert ranks[rank][number] == f"ValueError: in {hook} of this rank alone"
        peer = ranks[1 - rank][number]
        assert peer.startswith(f"PeerError: Rank {1 - rank} waited for the other ranks to come through {phase}. ")
        assert f"Rank {rank} had failed, in the phase 'set up' ({phase}): ValueError: in {hook} of" in peer
        assert "test_votes.py:" in peer


def damaged(folder: str) -> str:
    """Begin from a file of each rank's own, of which that of rank 1 is damaged."""
    path = Path(folder) / f"{torch.distributed.get_rank()}.ckpt"
    one = trainer()
    one.fit(Model())
    for rank in range(2):
        one.save_checkpoint(Path(folder) / f"{rank}.ckpt")
    if path.name == "1.ckpt":
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises((PeerError, CheckpointError)) as caught:
        trainer().fit(Model(), ckpt_path=path)
    return f"{caught.type.__name__}: {caught.value}"


def test_a_rank_that_cannot_read_its_checkpoint_frees_its_peers(pool: Any, tmp_path: Path) -> None:
    peer, own = pool.run(damaged, str(tmp_path))
    assert own.startswith("CheckpointError")
    assert peer.startswith("PeerError")
    assert "Rank 1 had failed, in the phase 'set up' (reading the checkpoint): CheckpointError: " in peer


def in_an_exchange(hook: str) -> str:
    text = failed(hook, rank=1)
    store = waiting.store_of_job()
    store.set(f"done {torch.distributed.get_rank()}", "")  # a rank that left would break the other's connection
    store.wait(["done 0", "done 1"])
    return text


@pytest.mark.parametrize("hook", ["training_step", "train_dataloader"])
def test_a_rank_that_waits_in_an_exchange_is_freed_though_the_failed_process_lives_on(pool: Any, hook: str) -> None:
    peer, own = pool.run(in_an_exchange, hook)
    assert own.startswith(f"ValueError: in {hook} of this rank alone")
    assert peer.startswith("PeerError: Rank 0 waited in ")
    assert f"Rank 1 had failed, in the phase '{'forward' if hook == 'training_step' else 'train start'}'" in peer


def slow() -> float:
    """The failures of an earlier run do not count, and a rank that is slow is waited for."""
    failed("setup", rank=1)
    if torch.distributed.get_rank() == 1:
        time.sleep(2.5 * waiting._FIRST_LOOK_S)  # so long that the others look where this rank is
    trainer().fit(Model())
    return 1.0


def test_a_rank_that_is_slow_is_waited_for(pool: Any) -> None:
    """The negative control."""
    assert pool.run(slow) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("error", "is_told"), [(SIGTERMException(), False), (KeyboardInterrupt(), False), (SystemExit(7), True)]
)
def test_a_rank_that_is_asked_to_end_has_not_failed(
    error: BaseException, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are asked too, and end with the same code instead of an error."""
    monkeypatch.setattr(votes, "summary", lambda *_: "why")
    store = dist.HashStore()
    with pytest.raises(type(error)), votes._voting(store, LoneGroup(), "key", "setup", Progress()):
        raise error
    assert store.check(["key/setup/result"]) is is_told
