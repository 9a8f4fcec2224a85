"""The same programs on real Lightning and on drivetrain.compat, where the original is installed."""

from __future__ import annotations

import json
import os
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("DRIVETRAIN_LIGHTNING_PYTHON", "")
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="DRIVETRAIN_LIGHTNING_PYTHON names no Python that has Lightning: run make test-interop"
    ),
    pytest.mark.timeout(600),  # each test starts several programs, one after another
]


def run(folder: Path, *arguments: str | Path, served: bool = False) -> str:
    """What the program prints, in a ``folder`` of its own; ``served``: by drivetrain."""
    folder.mkdir(exist_ok=True)
    command = [PYTHON, "-W", "ignore", *(["-m", "drivetrain.compat"] if served else []), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers(folder: Path, *arguments: str | Path, served: bool = False) -> list[Any]:
    """The JSON values that a program prints."""
    text, decoder, found = run(folder, *arguments, served=served).lstrip(), json.JSONDecoder(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def test_the_original_is_there_and_loses(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import json, lightning, pytorch_lightning\n"
        "print(json.dumps([lightning.Trainer.__module__, pytorch_lightning.Trainer is lightning.Trainer]))\n",
        encoding="utf-8",
    )
    assert answers(tmp_path, "program.py") == [["lightning.pytorch.trainer.trainer", False]]
    assert answers(tmp_path, "program.py", served=True) == [["drivetrain.trainer.trainer", True]]


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_gives_the_same_numbers_to_the_last_bit(tmp_path: Path, root: str) -> None:
    [original] = answers(tmp_path / "original", HERE / "trainer_program.py", root)
    [ours] = answers(tmp_path / "ours", HERE / "trainer_program.py", root, served=True)
    means, means_there = taken_means(ours), taken_means(original)
    assert ours == original  # the losses of the batches too
    validations = {"metrics": -1, "validated": -1, "best": int(ours["best"][0][len("epoch=")])}
    for name, index in validations.items():
        losses = ours["val_losses"][index]
        exact = sum(map(Fraction, losses)) / len(losses)
        assert means[name] == float(exact)
        assert abs(Fraction(means_there[name]) - exact) <= exact / 2**24  # the original rounds to 32 bits
    assert len(set(original["weights"].values())) == 4  # the control: it has learnt something to compare


def taken_means(answer: dict[str, Any]) -> dict[str, float]:
    """Remove the means of several batches from what trainer_program.py has printed, and return them."""
    found = {
        "metrics": answer["metrics"].pop("val_loss"),
        "validated": answer["validated"][0].pop("val_loss"),
        "best": answer["best"].pop(),
    }
    return {name: float.fromhex(value) for name, value in found.items()}


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_a_loop_of_ones_own_gives_the_same_numbers_to_the_last_bit(tmp_path: Path, precision: str) -> None:
    original = answers(tmp_path / "original", HERE / "fabric_program.py", precision)
    assert answers(tmp_path / "ours", HERE / "fabric_program.py", precision, served=True) == original
    assert len(set(original[0]["losses"])) > 15


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1)])
def test_sharded_models_give_the_same_numbers_and_read_each_others_files(
    tmp_path: Path, data: int, tensor: int
) -> None:
    """To six digits, when one has written a checkpoint and the other goes on from it, too."""
    arguments = (HERE / "sharded_program.py", str(data), str(tensor))
    original = answers(tmp_path / "original", *arguments, tmp_path / "original.ckpt")
    assert answers(tmp_path / "ours", *arguments, tmp_path / "ours.ckpt", served=True) == original
    assert answers(tmp_path / "ours", *arguments, tmp_path / "original.ckpt", served=True) == original
    assert answers(tmp_path / "original", *arguments, tmp_path / "ours.ckpt") == original
    assert len(set(original[0]["losses"])) == 8 // data  # the control: it has learnt something


def near(one: Any, other: Any) -> bool:
    """Whether two traces are the same, numbers in five digits: epoch means are summed in 64 bits here."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-5 * max(1e-2, abs(one))
    return bool(one == other)


def test_random_programs_show_hooks_loggers_and_callers_the_same(tmp_path: Path) -> None:
    program, seeds = HERE / "random_program.py", ("0", "80")
    [original] = answers(tmp_path / "original", program, *seeds)
    [ours] = answers(tmp_path / "ours", "--numbers=original", program, *seeds, served=True)
    assert [one["seed"] for one, other in zip(original, ours, strict=True) if not near(one, other)] == []
    [own] = answers(tmp_path / "own", program, *seeds, served=True)
    assert any(not near(one, other) for one, other in zip(original, own, strict=True))  # the control: other numbers
    assert sum(one["results"] == ["refused"] for one in original) < 20


def test_helper_functions_answer_the_same(tmp_path: Path) -> None:
    [original] = answers(tmp_path, HERE / "helpers_program.py")
    [ours] = answers(tmp_path, HERE / "helpers_program.py", served=True)
    assert ours == original


def test_pickled_objects_of_the_original_are_read(tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(
        "import pickle, torch\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from lightning.pytorch.trainer.states import TrainerFn\n"
        "from lightning.pytorch.utilities.parsing import AttributeDict\n"
        "torch.manual_seed(1)\n"
        "objects = [AttributeDict(a=1), TrainerFn.FITTING, BoringModel(), [BoringModel]]\n"
        "pickle.dump(objects, open('objects.pkl', 'wb'))\n"
        "print(float(objects[2].layer.weight.sum()))\n",
        encoding="utf-8",
    )
    (tmp_path / "read.py").write_text(
        "import pickle\n"
        "attributes, state, model, [cls] = pickle.load(open('objects.pkl', 'rb'))\n"
        "assert type(model) is cls and cls.__module__.startswith('drivetrain.'), cls\n"
        "assert (attributes.a, state.value) == (1, 'fit')\n"
        "print(float(model.layer.weight.sum()))\n"
        "from lightning.pytorch import Trainer\n"
        "quiet = {f'enable_{part}': False for part in ('checkpointing', 'progress_bar', 'model_summary')}\n"
        "Trainer(accelerator='cpu', max_steps=2, limit_val_batches=1, logger=False, **quiet).fit(model)\n"
        "assert model.global_step == 2\n",
        encoding="utf-8",
    )
    written = run(tmp_path, "write.py")
    assert run(tmp_path, "read.py", served=True) == written


def test_the_list_of_public_names_is_that_of_the_original(tmp_path: Path) -> None:
    committed = json.loads((HERE / "public_names.json").read_text(encoding="utf-8"))
    assert answers(tmp_path, HERE / "enumerate_names.py") == [committed]
