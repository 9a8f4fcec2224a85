"""The examples run as they stand; the demo reaches the accuracy it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# That the program can be imported and pickled, which spawn and forkserver need, distributed/test_started_here.py and
# launchers/test_multiprocessing.py show with smaller programs.
LONG = pytest.mark.skipif(
    os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="like ddp_fork: make test-faults runs all four"
)


@pytest.fixture
def run(programs: Any, tmp_path: Path) -> Callable[..., str]:
    """What an example prints; with ``fresh``, in an interpreter of its own."""

    def run(
        script: str, *arguments: str, codes: tuple[int, ...] = (0,), fresh: bool = False, warnings: str = "error"
    ) -> str:
        command = ["-W", warnings, str(ROOT / "examples" / script), "--output", "out", *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done: subprocess.CompletedProcess[str]
        if fresh:
            done = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, env=environ, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        else:
            done = programs.run(*command, cwd=tmp_path, env=environ, merged=True, timeout=280)
        assert done.returncode in codes, done.stdout
        return done.stdout

    return run


@pytest.mark.timeout(300)
def test_the_demo_trains_a_classifier_and_shows_what_it_did(run: Any, tmp_path: Path) -> None:
    shown = run("digits.py", fresh=True)
    assert 'because accelerator="auto"' in shown
    assert re.search(r"Epoch 15/15: .*val_acc=", shown)
    assert float(re.findall(r"Test accuracy: +([\d.]+)", shown)[0]) >= 0.97
    [best] = re.findall(r"Best checkpoint: (.+)", shown)
    assert (tmp_path / best).is_file()
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp_fork",
        pytest.param("ddp", marks=LONG),
        pytest.param("ddp_spawn", marks=LONG),
        pytest.param("ddp_forkserver", marks=LONG),
    ],
)
def test_the_demo_on_two_processes(run: Any, strategy: str) -> None:
    shown = run("digits.py", "--devices", "2", "--strategy", strategy, "--epochs", "4", codes=(0, 1))
    assert "cpu, cpu" in shown
    assert len(re.findall("Test accuracy:", shown)) == 1  # rank 0, or the process that has started them
    assert float(re.findall(r"Test accuracy: +([\d.]+)", shown)[0]) >= 0.9


@pytest.mark.timeout(300)
def test_the_gpt_learns_and_measures_itself(run: Any) -> None:
    small = (
        "--steps 40 --batch-size 4 --block-size 32 --n-layer 1 --n-head 2 --n-embd 32 --limit-mb 0.2 --peak-tflops 0.1"
    )
    shown = run("gpt.py", *small.split())
    loss, unigram = (float(re.findall(rf"{name}: +([\d.]+) nats", shown)[0]) for name in ("loss", "entropy"))
    assert loss < 4.5  # an untrained model is at log(256) = 5.545
    assert 2.5 < unigram < 4
    assert "tokens/s=" in shown
    assert "mfu=" in shown


def test_the_recipe_of_a_classifier_tests_the_best_checkpoint(run: Any) -> None:
    shown = run("recipes/classifier.py", "--epochs", "4")
    assert float(re.findall(r"^Accuracy of .*\.ckpt: ([\d.]+)", shown, re.MULTILINE)[0]) > 0.85


@pytest.mark.timeout(300)
@LONG
def test_the_recipe_of_a_gpt_trains_in_shards(run: Any, tmp_path: Path) -> None:
    shown = run("recipes/gpt.py", "--steps", "40", "--backend", "eager", warnings="default")
    assert float(re.findall(r"^Loss ([\d.]+)", shown, re.MULTILINE)[0]) < 3.5
    assert "train/device/mfu" in (tmp_path / "out" / "gpt" / "version_0" / "metrics.csv").read_text()


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples" / "recipes").glob("*.py")), ids=lambda path: path.name)
def test_a_recipe_is_short(recipe: Path) -> None:
    assert len(recipe.read_text(encoding="utf-8").splitlines()) <= 80


def test_the_plain_loop_learns_and_goes_on_exactly(run: Any) -> None:
    whole = run("plain_loop.py", "--epochs", "6", "--precision", "bf16-mixed")
    assert float(re.findall(r"Test accuracy: ([\d.]+)", whole)[0]) > 0.85
    epochs = re.findall(r"Epoch (\d)/6: loss=(\S+)", whole)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4", "5", "6"]
    stopped = run("plain_loop.py", "--epochs", "6", "--precision", "bf16-mixed", "--stop-after", "4")
    assert "Epoch 5" not in stopped
    rest = run("plain_loop.py", "--epochs", "6", "--precision", "bf16-mixed", "--resume")
    assert re.findall(r"Epoch (\d)/6: loss=(\S+)", rest) == epochs[4:]
    assert re.findall("Test.*", rest) == re.findall("Test.*", whole)


@pytest.mark.parametrize(
    ("precision", "steps", "modes", "near"), [("32-true", 1000, 6, 0.5), ("16-mixed", 200, 2, 0.1)]
)
def test_the_gan_learns_its_ring(run: Any, tmp_path: Path, precision: str, steps: int, modes: int, near: float) -> None:
    shown = run("recipes/gan.py", "--precision", precision, "--steps", str(steps))
    covered, on_them = re.findall(r"Modes covered: (\d) of 8; points on them: ([\d.]+)", shown)[0]
    assert int(covered) >= modes
    assert float(on_them) > near  # none of an untrained generator's are
    assert (tmp_path / "out" / "gan" / "version_0" / "metrics.csv").is_file()
