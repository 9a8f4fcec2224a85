"""The examples run as they stand; the demo reaches the accuracy it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(tmp_path: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / script, "--output", "out", *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(300)
def test_the_demo_trains_a_classifier_and_shows_what_it_did(tmp_path: Path) -> None:
    shown = run(tmp_path, "digits.py")
    assert 'because accelerator="auto"' in shown
    assert re.search(r"Epoch 15/15: .*val_acc=", shown)
    assert float(re.findall(r"Test accuracy: +([\d.]+)", shown)[0]) >= 0.97
    [best] = re.findall(r"Best checkpoint: (.+)", shown)
    assert (tmp_path / best).is_file()
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_the_gpt_learns_and_measures_itself(tmp_path: Path) -> None:
    small = (
        "--steps 40 --batch-size 4 --block-size 32 --n-layer 1 --n-head 2 --n-embd 32 --limit-mb 0.2 --peak-tflops 0.1"
    )
    shown = run(tmp_path, "gpt.py", *small.split())
    loss, unigram = (float(re.findall(rf"{name}: +([\d.]+) nats", shown)[0]) for name in ("loss", "entropy"))
    assert loss < 4.5  # an untrained model is at log(256) = 5.545
    assert 2.5 < unigram < 4
    assert "tokens/s=" in shown
    assert "mfu=" in shown
