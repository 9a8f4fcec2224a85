"""Files of real Lightning, read here, and files of ours, read there; run by `make test-interop`."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Callback
from drivetrain.callbacks import Timer
from drivetrain.cli.command import main
from drivetrain.errors import CheckpointError

PYTHON = os.environ.get("DRIVETRAIN_LIGHTNING_PYTHON", "")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="DRIVETRAIN_LIGHTNING_PYTHON names no Python that has Lightning: run make test-interop"
)


def under_lightning(*arguments: str | Path) -> None:
    done = subprocess.run(
        [PYTHON, "-W", "ignore", HERE / "lightning_side.py", *arguments],
        env={**os.environ, "INTEROP_LIBRARY": "lightning.pytorch"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which Lightning has trained."""
    folder = tmp_path_factory.mktemp("lightning")
    under_lightning("write", folder)
    return folder


@pytest.fixture(scope="module")
def ours() -> Any:
    """The module net.py over drivetrain."""
    spec = importlib.util.spec_from_file_location("interop_net", HERE / "net.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["interop_net"] = module
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)  # Lightning's own, made by this test
    return found


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, tensors included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Resumed(Callback):
    """Notes where training goes on from."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = copy.deepcopy(dict(pl_module.state_dict()))
        self.optimizers = copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers])
        self.schedulers = [dict(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self.stopping = trainer.early_stopping_callback.state_dict()
        (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
        self.elapsed_s = timer.time_elapsed()
        self.place = (trainer.progress.current_epoch, trainer.global_step)  # as the file counts epochs


def resume(ours: Any, path: Path, **arguments: Any) -> tuple[Any, Any, Resumed]:
    """Go on from ``path`` with drivetrain, as Lightning would have."""
    trainer, resumed = ours.trainer(path.parent, **arguments), Resumed()
    trainer.callbacks.append(resumed)
    net = ours.Net(**{key: read(path)["hyper_parameters"][key] for key in ("width", "lr", "manual")})
    with pytest.warns(UserWarning, match="written by Lightning 2.* holds no random state"):
        trainer.fit(net, ours.loader(), ours.loader(), ckpt_path=path)
    return trainer, net, resumed


# ---- there to here ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epochs/epoch=1-step=12.ckpt", "steps/epoch=0-step=4.ckpt"])
def test_t24_a_module_of_lightnings_loads(written: Path, ours: Any, name: str) -> None:
    theirs = read(written / name)
    net = ours.Net.load_from_checkpoint(written / name)
    assert same(dict(net.state_dict()), dict(theirs["state_dict"]))
    assert dict(net.hparams) == theirs["hyper_parameters"]
    assert net.hparams == {"width": 6, "lr": 0.03, "betas": (0.9, 0.99), "manual": False}
    assert ours.Net.load_from_checkpoint(written / name, lr=7.0).hparams.lr == 7.0


def test_t27_hyperparameters_that_are_no_plain_data_are_left_out(written: Path, ours: Any) -> None:
    path = written / "exotic" / "epoch=0-step=6.ckpt"
    with pytest.warns(
        UserWarning, match=r"hyper_parameters/path \(pathlib.*hyper_parameters/colour \(__main__.Colour\)"
    ):
        net = ours.Net.load_from_checkpoint(path)
    assert same(dict(net.state_dict()), dict(torch.load(written / "exotic" / "end.pt")["weights"]))
    assert net.hparams == {"width": 8, "lr": 0.05, "betas": (0.9, 0.99), "manual": False, "depth": 3}


@pytest.mark.filterwarnings("ignore:The learning-rate schedulers that .* have never stepped")  # of the manual run
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("epochs/epoch=0-step=6.ckpt", {}),
        ("epochs/epoch=2-step=18.ckpt", {}),
        ("windows/epoch=1-step=4.ckpt", {"accumulate_grad_batches": 3}),
        ("manual/epoch=1-step=12.ckpt", {}),
    ],
)
def test_t26_a_run_of_lightnings_goes_on(written: Path, ours: Any, name: str, arguments: dict[str, Any]) -> None:
    theirs, end = read(written / name), torch.load((written / name).parent / "end.pt")
    trainer, net, resumed = resume(ours, written / name, **arguments)

    assert same(resumed.weights, dict(theirs["state_dict"]))
    assert same(resumed.optimizers, theirs["optimizer_states"])
    assert same(resumed.schedulers, theirs["lr_schedulers"])
    assert resumed.place == (theirs["epoch"], theirs["global_step"])  # this epoch is still to be closed
    assert resumed.elapsed_s >= theirs["callbacks"]["Timer"]["time_elapsed"]["train"]
    (stopping,) = (state for key, state in theirs["callbacks"].items() if key.startswith("EarlyStopping"))
    assert resumed.stopping["wait_count"] == stopping["wait_count"]
    assert float(resumed.stopping["best_score"]) == pytest.approx(float(stopping["best_score"]), abs=1e-6)

    now = ours.state(trainer, net)
    for key, weight in end["weights"].items():
        torch.testing.assert_close(now["weights"][key], weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(now["optimizer"]["state"], end["optimizer"]["state"], rtol=0, atol=1e-6)
    assert (now["global_step"], now["current_epoch"]) == (end["global_step"], end["current_epoch"])
    assert [state["_last_lr"] for state in now["schedulers"]] == [
        pytest.approx(state["_last_lr"]) for state in end["schedulers"]
    ]
    assert now["stopping"][0] == end["stopping"][0]
    assert now["stopping"][1] == pytest.approx(end["stopping"][1], abs=1e-6)
    assert re.sub(r"-v\d+", "", now["best"]) == end["best"]  # Lightning's file of this name is still there
    (ranked,) = (state["best_k_models"] for key, state in theirs["callbacks"].items() if key.startswith("ModelCh"))
    assert len(ranked) >= 1
    assert set(ranked) < set(trainer.checkpoint_callback.best_k_models)


def test_t26_a_checkpoint_after_the_last_batch_goes_on(written: Path, ours: Any) -> None:
    """Saved when validation ended, which follows the epoch's last batch."""
    arguments = {"checkpoints": {"save_on_train_epoch_end": False}}
    trainer, net, _ = resume(ours, written / "validation" / "epoch=1-step=12.ckpt", **arguments)
    end = torch.load(written / "validation" / "end.pt")
    for key, weight in end["weights"].items():
        torch.testing.assert_close(net.state_dict()[key], weight, rtol=0, atol=1e-6)
    assert trainer.global_step == end["global_step"]


def test_t26_the_middle_of_an_epoch_is_refused(written: Path, ours: Any) -> None:
    """It does not say which batches are done."""
    arguments = {"checkpoints": {"every_n_train_steps": 4, "monitor": None}}
    with pytest.raises(CheckpointError, match="after 2 batches of epoch 1"):
        resume(ours, written / "steps" / "epoch=1-step=8.ckpt", **arguments)


def test_every_file_can_be_judged(written: Path, ours: Any) -> None:
    for path in sorted((written / "steps").glob("*.ckpt")):
        net, trainer = ours.Net(width=6), ours.trainer(written / "judged")
        (result,) = trainer.validate(net, ours.loader(), ckpt_path=path, verbose=False)
        assert same(dict(net.state_dict()), dict(read(path)["state_dict"]))
        assert result["val_loss"] > 0


# ---- here to there ---------------------------------------------------------------------------------------------------


def test_a_module_of_ours_loads_under_lightning(ours: Any, tmp_path: Path) -> None:
    net = ours.Net(width=5, lr=0.01, betas=(0.8, 0.95), depth=[1, 2])
    trainer = ours.trainer(tmp_path, epochs=2)
    trainer.fit(net, ours.loader(), ours.loader())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    under_lightning("load", tmp_path / "ours.ckpt", tmp_path / "answer.pt")
    answer = torch.load(tmp_path / "answer.pt")
    assert same(answer["weights"], dict(net.state_dict()))
    assert answer["hparams"] == dict(net.hparams)
    assert answer["hparams"] == {"width": 5, "lr": 0.01, "betas": (0.8, 0.95), "manual": False, "depth": [1, 2]}


@pytest.mark.filterwarnings("ignore:The learning-rate schedulers that .* have never stepped")  # of the manual run
@pytest.mark.parametrize("manual", [False, True])
def test_lightning_goes_on_from_a_converted_checkpoint(ours: Any, tmp_path: Path, manual: bool) -> None:
    """It ends as the run ends here that was not interrupted."""
    net, trainer = ours.Net(width=6, lr=0.03, manual=manual), ours.trainer(tmp_path / "runs", epochs=2)
    trainer.fit(net, ours.loader(), ours.loader())
    (first,) = (tmp_path / "runs").glob("epoch=0*.ckpt")
    assert main(["checkpoint", "convert", str(first), str(tmp_path / "light.ckpt"), "--to", "lightning"]) == 0
    under_lightning("resume", tmp_path / "light.ckpt", tmp_path / "answer.pt")
    answer, end = torch.load(tmp_path / "answer.pt"), ours.state(trainer, net)
    for key, weight in end["weights"].items():
        torch.testing.assert_close(answer["weights"][key], weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(answer["optimizer"]["state"], end["optimizer"]["state"], rtol=0, atol=1e-6)
    assert [answer[key] for key in ("global_step", "current_epoch")] == [12, 2]
    assert answer["stopping"][0] == end["stopping"][0]


def test_its_objects_are_refused_with_the_name_of_their_package(tmp_path: Path) -> None:
    command = [PYTHON, "-W", "ignore", HERE / "lightning_objects.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "taken or not named" not in done.stdout
