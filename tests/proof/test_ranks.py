"""Two ranks under torchrun: each is recorded, a kill hits both, and a flipped bit is found with its rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drivetrain.proof.command import main
from drivetrain.proof.diff_command import main as diff

pytestmark = [
    pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS") != "long", reason="starts many interpreters"),
    pytest.mark.timeout(600),
]

PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
torch.manual_seed(rank)
optimizer = torch.optim.Adam(model.parameters())
done = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
while done < 12:
    if done == 7 and rank == 1 and "--flips" in sys.argv:
        model.module[1].weight.data.view(torch.int32)[0, 2].bitwise_xor_(1 << 12)
    optimizer.zero_grad()
    model(torch.linspace(done, done + rank + 1, 3)).square().sum().backward()
    optimizer.step()
    done += 1
    if done % 2 == 0 and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}, "new.pt")
        os.replace("new.pt", "last.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_two_ranks_resume_exactly(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "2", "--ranks", "2", "--folder", "proof", program]) == 0
    assert capsys.readouterr().out.startswith("resumes exactly: 12 steps with 2 kills")
    names = sorted(path.name for path in Path("proof/killed/records").glob("*.jsonl"))
    assert names == [f"start-{start:02d}.rank-{rank}.jsonl" for start in range(3) for rank in range(2)]


def test_a_flipped_bit_is_named_with_rank_step_tensor_operation_and_line(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, words in (("one", []), ("other", ["--flips"])):
        assert main(["--kills", "0", "--ranks", "2", "--folder", folder, program, *words]) == 0
    capsys.readouterr()
    assert diff(["one", "other", "--why"]) == 1
    head, first, *_, operation = capsys.readouterr().out.splitlines()
    assert head == "optimizer step 8 is the first that differs, in the second run:"
    assert first == "  parameters on rank 1: 'module.1.weight'"
    [flip] = (number for number, line in enumerate(PROGRAM.splitlines(), 1) if "bitwise_xor_" in line)
    assert operation.startswith("  first operation that the other run has not: aten.")
    assert f" in train.py:{flip}: model.module[1].weight.data" in operation


def test_a_bit_flipped_in_one_rank_is_named_from_one_run(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, words in (("one", []), ("other", ["--flips"])):
        assert main(["--kills", "0", "--ranks", "2", "--folder", folder, program, *words]) == 0
    capsys.readouterr()
    assert diff(["one"]) == 0
    assert capsys.readouterr().out == "equal: 12 steps on ranks 0, 1; not compared: batch, loss, random state\n"
    assert diff(["other", "--ranks", "0", "1", "--why"]) == 1
    head, first, equal, operation = capsys.readouterr().out.splitlines()
    assert head == "optimizer step 8 is the first in which rank 0 and rank 1 differ:"
    assert first == "  parameters: 'module.1.weight'"
    assert equal == "  equal there: optimizer state, gradients"
    [flip] = (number for number, line in enumerate(PROGRAM.splitlines(), 1) if "bitwise_xor_" in line)
    assert operation.startswith(
        f"  first operation that only rank 1 has: aten.bitwise_xor_.Scalar in train.py:{flip}: model.module[1].weight"
    )
