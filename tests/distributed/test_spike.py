"""Losses that go wrong on one rank stop all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.sharded import token_data
from tests.distributed.test_fsdp import Net, trainer
from torch.utils.data import DataLoader

from drivetrain.callbacks import SpikeDetection, TerminateOnNaN
from drivetrain.callbacks.non_finite import NonFiniteLossError
from drivetrain.callbacks.spike import TrainingSpikeException


class Bad(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 2:
            loss = loss * float("inf")
        return loss


def stopped(kind: str, folder: Path) -> list[str]:
    messages = []
    for callback, error in ((TerminateOnNaN(), NonFiniteLossError), (SpikeDetection(), TrainingSpikeException)):
        with pytest.raises(error) as caught:
            trainer(2, kind, callbacks=[callback], default_root_dir=folder).fit(
                Bad(), DataLoader(token_data(40), batch_size=4)
            )
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_stop_and_name_the_rank(pool: Any, tmp_path: Path, kind: str) -> None:
    for rank, (non_finite, spike) in enumerate(pool.run(stopped, kind, tmp_path, group=False)):
        assert "The loss of batch 2 in epoch 0 is not finite. On rank 1 the loss is inf: all layers" in non_finite
        assert f"On rank {rank} it is" in spike
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [1, 2]
