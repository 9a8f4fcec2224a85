"""ReplicaCheck without replicas, and its arguments; tests/distributed/test_replica_check.py has the comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Regression, regression_data
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.callbacks import ReplicaCheck
from drivetrain.errors import ConfigurationError


def checks(trainer: Trainer) -> list[ReplicaCheck]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ReplicaCheck)]


def test_the_argument_adds_the_callback_and_none_is_added_without_it() -> None:
    (check,) = checks(Trainer(replica_check_every=7, accelerator="cpu", logger=False))
    assert (check.every_n_steps, check.on_mismatch) == (7, "stop")
    assert checks(Trainer(accelerator="cpu", logger=False)) == []


def test_the_argument_and_the_callback_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"replica_check_every=7.* and the ReplicaCheck .* Keep one\."):
        Trainer(replica_check_every=7, callbacks=ReplicaCheck(7), accelerator="cpu", logger=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, r"ReplicaCheck\(every_n_steps=0\)"),
        ({"on_mismatch": "cure"}, r"ReplicaCheck\(on_mismatch='cure'\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplicaCheck(**arguments)


def test_one_device_trains_and_saves_with_a_warning(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=3, replica_check_every=1)
    with pytest.warns(UserWarning, match="replica_check_every=1 has no effect in this run: SingleDeviceStrategy on 1"):
        trainer.fit(Regression(), DataLoader(regression_data(), 8))
    assert trainer.global_step == 3
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert checks(trainer)[0].idle_hooks == {"on_train_batch_end", "on_train_end"}
