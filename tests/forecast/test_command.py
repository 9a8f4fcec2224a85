"""``drivetrain plan`` on programs that fit, that do not, and that cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forecast.planning import Said

from drivetrain.forecast import command
from drivetrain.forecast.command import lines, main

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan.py"
PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from drivetrain import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1000, 1000)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        {line}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(max_steps=10)
trainer.fit(Net(), DataLoader(torch.ones(80, 1000), batch_size=8))
open("after.txt", "w").close()
"""


H100 = ("--device", "H100 80GB")


def test_a_program_that_fits(plan: Callable[..., Said]) -> None:
    said = plan(PROGRAM.format(line=""), "--devices", "1", *H100, "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["fits"] is True
    assert found["kinds"]["parameters"] == found["kinds"]["gradients"] == 4 * 1001 * 1000
    assert found["kinds"]["batch"] == 4 * 8 * 1000
    assert found["peak"] == sum(found["kinds"].values())
    assert found["needed"] == found["peak"] + sum(found["allowance"].values())
    assert (found["changes"], found["unreadable"]) == ([], {})
    assert found["time"].startswith("at best")


def test_without_devices_the_decisions_are_printed_and_nothing_runs(plan: Callable[..., Said]) -> None:
    said = plan(PROGRAM.format(line="raise SystemExit(3)"))
    assert said.code == 0, said.err
    assert said.out.startswith("drivetrain plan\n  accelerator")
    assert "because" in said.out


def test_a_line_that_reads_a_value_is_named(plan: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "COPIES", 10**9)  # more than any machine's memory
    said = plan(PROGRAM.format(line="print(loss.item() > 1)"), "--devices", "1", *H100)
    assert said.code == 0, said.err
    assert "train.py:14 reads 2 values, which a plan does not know: it took 0" in said.out


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("loss = loss + batch.nonzero().sum()", "train.py:14 needs the values of a tensor, for aten.nonzero"),
        ("raise KeyError('no such column')", "KeyError: 'no such column' (at train.py:14)"),
    ],
)
def test_a_program_that_cannot_be_planned(
    line: str, cause: str, plan: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COPIES", 10**9)
    said = plan(PROGRAM.format(line=line), "--devices", "1", *H100, "--json")
    assert said.code == 1
    assert cause in json.loads(said.out)["error"]
    assert cause in said.err


def test_a_program_with_callbacks_that_need_a_logger_and_with_settings_that_find_errors(
    plan: Callable[..., Said],
) -> None:
    settings = "log_every_n_steps=1, detect_anomaly=True, callbacks=[LearningRateMonitor()], max_steps"
    program = PROGRAM.format(line="self.log('loss', loss, prog_bar=True)").replace("max_steps", settings)
    program = "from drivetrain.callbacks import LearningRateMonitor\n" + program
    said = plan(program, "--devices", "2", *H100, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["fits"] is True


def test_a_program_that_reads_its_weights_before_the_fit_is_run_again_with_their_values(
    plan: Callable[..., Said],
) -> None:
    """A manual step, too: its backward pass is called by a line of the program."""
    program = PROGRAM.format(line="self.manual_backward(loss), self.optimizers().step()")
    program = program.replace("nn.Linear(1000, 1000)", "nn.Linear(1000, 1000); self.automatic_optimization = False")
    program = program.replace("Net()", "net").replace("trainer =", LOADED)
    program = program.replace(".square()", ".tile(2000, 1).square()")  # so that the backward pass takes the most memory
    said = plan(program, "--devices", "2", *H100, "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["kinds"]["parameters"] == 4 * 1001 * 1000
    assert (found["at"]["phase"], found["at"]["line"]) == ("backward", "train.py:13")


LOADED = """net = Net()
net.layer.load_state_dict({"weight": torch.ones(1000, 1000), "bias": torch.ones(1000)})
assert net.layer.weight.sum().item() == 1e6
trainer ="""


def test_an_engine_is_refused_by_name(plan: Callable[..., Said]) -> None:
    said = plan("from drivetrain import Engine\nengine = Engine()", "--devices", "1", *H100)
    assert said.code == 1
    assert said.err.count("\n") == 1
    assert "The program makes an Engine" in said.err


def test_what_does_not_fit_is_told_with_what_to_change(plan: Callable[..., Said]) -> None:
    """The example of docs/plan.md: 6.7 billion parameters with AdamW in 32 bits on eight devices of 80 GB."""
    said = plan(EXAMPLE, "--devices", "8", *H100, "--json")
    assert said.code == 1, said.err
    found = json.loads(said.out)
    assert found["fits"] is False
    parameters = found["kinds"]["parameters"]
    assert abs(parameters / 4 - 6.7e9) < 0.05e9
    assert found["kinds"]["optimizer"] == pytest.approx(2 * parameters, rel=1e-4)
    changes = {each["change"]: each for each in found["changes"]}
    assert "declares no tp_plan" in changes.pop("tp")["failed"]
    assert all(not each.get("failed") for each in changes.values()), changes
    assert "the fastest first, with multiples of its time: FULL_SHARD (1.00), offload (" in "\n".join(lines(found))
    assert changes["FULL_SHARD"]["fits"]
    assert changes["FULL_SHARD"]["write"] == 'Trainer(strategy="fsdp")'
    assert changes["FULL_SHARD"]["kinds"]["parameters"] == pytest.approx(parameters / 8, rel=1e-3)
    assert not changes["bf16-mixed"]["fits"]
    assert sum(each["bytes"] for each in found["exchanges"]) == pytest.approx(parameters, rel=1e-3)
    assert found["largest_micro_batch"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "8"), "--devices needs --device"),
        (H100, "need --devices"),
        (("--devices", "9", "--devices-per-node", "8", *H100), "no multiple"),
        (("--devices", "8", "--device", "Z9"), "'Z9'"),
        (("--devices", "8", "--rank", "8", *H100), "the ranks are 0 to 7"),
        (("--devices", "none", *H100), "not a whole number"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, __file__])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
