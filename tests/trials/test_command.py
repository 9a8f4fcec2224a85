"""``drivetrain advise`` on programs with something to gain, with nothing, and with faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.trials.conftest import Advice

from drivetrain.trials import measuring
from drivetrain.trials.command import main

# The seeded cause is slow on any machine: a sample, or a step, sleeps.
PROGRAM = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger

SAMPLE_S = STEP_S = 0.0
REFUSED_WORKERS = 0

class Data(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if (worker := get_worker_info()) is not None and worker.num_workers == REFUSED_WORKERS:
            raise RuntimeError("the file is open already")
        time.sleep(SAMPLE_S)
        return torch.randn(4)

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(STEP_S)
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_callbacks(self):
        return ModelCheckpoint(dirpath="own", every_n_train_steps=1)

    def on_train_start(self):
        open(f"{self.logger.log_dir}/notes.txt", "w")

def trainer(**arguments):
    return Trainer(
        accelerator="cpu", max_steps=100, log_every_n_steps=1, profiler="simple", logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint(every_n_train_steps=1)], **arguments,
    )
"""
FIT = """
trainer(limit_test_batches=1).test(Net(), DataLoader(Data()), verbose=False)
trainer().fit(Net(), DataLoader(Data(), batch_size=4))
open("after.txt", "w").close()
"""
SHORT = ("--steps", "4", "--rounds", "2")
Advise = Callable[..., Advice]


def test_a_slow_data_set_gets_workers_and_a_change_that_fails_is_a_line_with_the_cause(advise: Advise) -> None:
    seeded = "SAMPLE_S, REFUSED_WORKERS = 0.03, 2"
    found = advise(PROGRAM + seeded + FIT, *SHORT, "--only", "num_workers=2", "--only", "num_workers=4")
    assert found.code == 0
    report = found.out.splitlines()
    [helps] = [line for line in report if line.endswith("helps")]
    assert helps.split()[0] == "num_workers=4"
    assert report[-1] == "  DataLoader(..., num_workers=4)"
    [failed] = [line.split(maxsplit=1) for line in report if "failed" in line]
    assert failed == ["num_workers=2", "failed: RuntimeError: the file is open already (in a worker)"]


def test_a_program_with_nothing_to_gain_gets_no_advice(advise: Advise) -> None:
    only = ("--only", "num_workers=1", "--only", "pin_memory")
    found = advise(PROGRAM + "STEP_S = 0.2" + FIT, *SHORT, *only, "--json")
    assert found.code == 0
    result = json.loads(found.out)
    assert result["write"] == []
    workers, pinned = result["cures"]
    assert len(workers["samples_per_s"]) == len(result["samples_per_s"]) == result["rounds"]
    assert (pinned["samples_per_s"], bool(pinned["why_not"])) == ([], True)
    assert (result["schema"], result["steps"]) == (1, 4)


def test_short_steps_are_measured_for_a_second(advise: Advise) -> None:
    found = advise(PROGRAM + FIT, "--rounds", "1", "--only", "num_workers=1", "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["steps"] > 100
    assert "1 change to try: num_workers=1. At most 2 trials: " in found.err


def test_a_program_that_fails_is_named_with_the_end_of_its_output(advise: Advise) -> None:
    found = advise(PROGRAM + "print('reading'); raise KeyError('no such column')", *SHORT)
    assert (found.code, found.out) == (1, "")
    assert "train.py cannot be measured: KeyError: 'no such column'" in found.err
    assert "Traceback" in found.err
    assert "drivetrain/trials" not in found.err


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("", "without a call of trainer.fit"),
        ("raise SystemExit(3)", "exit code 3"),
        ("trainer(devices=2, strategy='ddp').fit(Net(), DataLoader(Data()))", "trains with 2 processes"),
        ("trainer(limit_train_batches=3, max_epochs=1).fit(Net(), DataLoader(Data()))", "ends after 3 optimizer steps"),
    ],
)
def test_why_a_program_cannot_be_measured(end: str, reason: str, advise: Advise) -> None:
    found = advise(PROGRAM + end, *SHORT, "--json")
    assert found.code == 1
    assert reason in json.loads(found.out)["error"]
    assert reason in found.err


def test_what_was_measured_before_an_interrupt_is_printed(advise: Advise, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, run_to_end = [], measuring.run_to_end

    def interrupted(*args: Any) -> int:
        starts.append(args)
        if len(starts) == 4:
            raise KeyboardInterrupt
        return run_to_end(*args)

    monkeypatch.setattr(measuring, "run_to_end", interrupted)
    found = advise(PROGRAM + FIT, "--steps", "1", "--only", "num_workers")
    assert found.code == 130
    assert "interrupted" in found.err
    assert [line.split()[0] for line in found.out.splitlines() if line.startswith("  ")] == ["num_workers=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: PROGRAM\n"),
        (["gone.py"], "there is no file 'gone.py'"),
        (["--rounds", "0", __file__], "'0' is not a whole number of at least 1"),
        (["--only", "workers", __file__], "there is no 'workers'. Did you mean"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
