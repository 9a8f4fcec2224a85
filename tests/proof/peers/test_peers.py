"""What prove-resume says of programs of other trainers, in an environment that has these: ``make test-proof``.

The verdicts that are expected were found without the command: zoo.py's judge killed the programs and compared what they
printed and the weights that they ended with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(not os.environ.get("DRIVETRAIN_PEERS"), reason="run by make test-proof"),
    pytest.mark.timeout(600),
]
NEWEST = ("--resume-args", "--resume_from_checkpoint {newest:step_*}")


def prove(tmp_path: Path, program: str, *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the command as a user would, in an empty folder; return its verdict."""
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-m", "drivetrain.cli.command", "prove-resume", "--kills", "2", *options]
    command += ["--folder", str(tmp_path / "runs"), "--json"]
    ended = subprocess.run(
        [*command, str(HERE / f"{program}.py"), *words], cwd=tmp_path / "here", capture_output=True, text=True
    )
    assert ended.stdout, ended.stderr
    verdict: dict[str, Any] = json.loads(ended.stdout)
    assert verdict["code"] == ended.returncode
    return verdict


@pytest.mark.parametrize(
    ("program", "words", "options"),
    [
        ("accelerate_checkpointing", ("--checkpointing_steps", "12"), NEWEST),
        ("lightning_fit", ("--plain", "--every", "epoch"), ()),
    ],
    ids=["accelerate-ends-of-epochs", "lightning-ends-of-epochs-nothing-random"],
)
def test_what_resumes_exactly_is_acquitted(
    program: str, words: tuple[str, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    verdict = prove(tmp_path, program, *words, options=options)
    assert (verdict["code"], len(verdict["kills"])) == (0, 2), verdict["message"]


@pytest.mark.parametrize(
    ("program", "words", "options"),
    [
        ("accelerate_checkpointing", (), NEWEST),
        ("lightning_fit", (), ()),
        ("lightning_fit", ("--plain",), ()),
        ("lightning_fit", ("--every", "epoch"), ()),
        ("hf_trainer", ("--noisy",), ()),
    ],
    ids=["accelerate-mid-epoch", "lightning-mid-epoch", "lightning-mid-epoch-nothing-random",
         "lightning-ends-of-epochs", "transformers-mid-epoch-noisy-samples"],
)  # fmt: skip
def test_what_trains_on_other_batches_after_a_resume_is_found(
    program: str, words: tuple[str, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    verdict = prove(tmp_path, program, *words, options=options)
    assert verdict["code"] == 1
    step, part, *_ = verdict["differences"][0]
    assert part == "batch", verdict["message"]
    assert step in [after for _, after in verdict["kills"]], verdict["message"]


@pytest.mark.parametrize(
    "words", [(), ("--save_strategy", "epoch"), ("--save_strategy", "epoch", "--noisy")],
    ids=["mid-epoch", "ends-of-epochs", "ends-of-epochs-noisy-samples"],
)  # fmt: skip
def test_transformers_makes_equal_steps_and_logs_another_mean_loss(words: tuple[str, ...], tmp_path: Path) -> None:
    """A resumed Trainer divides the losses of its own steps by the number of all steps."""
    verdict = prove(tmp_path, "hf_trainer", *words)
    assert verdict["code"] == 1
    [[_, part, detail, *_]] = verdict["differences"]
    assert (part, "'train_loss'" in detail) == ("logged row", True), verdict["message"]
