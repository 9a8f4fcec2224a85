"""Checkpoints of earlier versions, upgraded as a dictionary and as files."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import LightningModule
from drivetrain.compat import migration
from drivetrain.compat.migration import _pl_migrate_checkpoint, migrate_checkpoint, pl_legacy_patch
from drivetrain.compat.table import LATEST
from drivetrain.compat.user_warnings import PossibleUserWarning

# What Lightning of before 1.2.8 pickled among the hyperparameters of a program with --gpus; and an option of 1.5.
GPUS = b"cpytorch_lightning.utilities.argparse\n_gpus_arg_default\np0\n."
GPUS_EARLIER = b"cpytorch_lightning.utilities.argparse_utils\n_gpus_arg_default\np0\n."
MODE = b"cpytorch_lightning.utilities.enums\n_FaultTolerantMode\np0\n(Vmanual\np1\ntp2\nRp3\n."


class Net(LightningModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


def old(version: str = "0.9.0", **more: Any) -> dict[str, Any]:
    """A checkpoint of that version."""
    return {
        "epoch": 2, "global_step": 20, "pytorch-lightning_version": version, "state_dict": Net(3).state_dict(),
        "hyper_parameters": {"width": 3}, "optimizer_states": [], "lr_schedulers": [], **more,
    }  # fmt: skip


def test_a_checkpoint_of_an_earlier_version_gets_the_layout_of_this_one() -> None:
    given = old(checkpoint_callback_best_model_path="best.ckpt", checkpoint_callback_best_model_score=0.5)
    weights = given["state_dict"]
    checkpoint, applied = migrate_checkpoint(given)
    assert checkpoint is given
    assert [*applied] == ["2.0.0"]
    assert (checkpoint["pytorch-lightning_version"], checkpoint["legacy_pytorch-lightning_version"]) == (
        LATEST.version,
        "0.9.0",
    )
    assert checkpoint["callbacks"]["ModelCheckpoint"]["best_model_path"] == "best.ckpt"
    assert not [key for key in checkpoint if key.startswith("checkpoint_callback")]
    assert checkpoint["state_dict"] is weights
    assert migrate_checkpoint(checkpoint) == (checkpoint, {})
    assert checkpoint["legacy_pytorch-lightning_version"] == "0.9.0"


def test_a_layout_that_has_not_changed_stays() -> None:
    given = old("2.1.3", loops={"fit_loop": {}})
    checkpoint, applied = migrate_checkpoint(dict(given))
    assert applied == {}
    versions = {"pytorch-lightning_version": LATEST.version, "legacy_pytorch-lightning_version": "2.1.3"}
    assert checkpoint == {**given, **versions}
    assert migrate_checkpoint(old("1.9.5"), target_version="1.9.0")[1] == {}
    migrate_checkpoint(old(f"{LATEST.version}rc1"))  # a candidate is not newer: no warning
    with pytest.warns(PossibleUserWarning, match="newer than"):
        assert migrate_checkpoint(old("99.0.0"))[0]["pytorch-lightning_version"] == "99.0.0"


@pytest.mark.usefixtures("served")
def test_names_of_earlier_versions_are_found_inside_the_context_only() -> None:
    with pl_legacy_patch():
        for content in (GPUS, GPUS_EARLIER):
            function = pickle.loads(content)
            assert pickle.loads(pickle.dumps(function))(3) == 3  # an upgraded checkpoint contains it
        assert pickle.loads(MODE).value == "manual"
    for content in (GPUS, GPUS_EARLIER):
        with pytest.raises((ImportError, AttributeError)):
            pickle.loads(content)


def upgrade(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr("sys.argv", ["program", *map(str, words)])
    migration.main()


def test_files_are_upgraded_and_the_originals_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "below").mkdir()
    for name in ("a.ckpt", "below/b.ckpt", "other.pt"):
        torch.save(old(hparams={"width": 3}), tmp_path / name)
    before = (tmp_path / "a.ckpt").read_bytes()
    upgrade(monkeypatch, tmp_path, "--map-to-cpu")
    assert "Upgraded 2 checkpoints" in capsys.readouterr().out
    for name in ("a", "below/b"):
        assert (tmp_path / f"{name}.bak").exists()
        assert torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["pytorch-lightning_version"] == LATEST.version
    assert (tmp_path / "a.bak").read_bytes() == before
    assert not (tmp_path / "other.bak").exists()
    upgrade(monkeypatch, tmp_path / "a.ckpt")
    assert (tmp_path / "a.bak").read_bytes() == before  # not the upgraded one
    upgrade(monkeypatch, tmp_path, "--extension", "pt")
    assert (tmp_path / "other.bak").exists()
    assert Net.load_from_checkpoint(tmp_path / "a.ckpt").hparams.width == 3


@pytest.mark.usefixtures("served")
def test_a_function_among_the_hyperparameters_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Default:
        def __reduce__(self) -> str:
            return "_gpus_arg_default"

    Default.__module__ = "pytorch_lightning.utilities.argparse"
    with pl_legacy_patch():
        default = Default()
        sys.modules[Default.__module__]._gpus_arg_default = default  # type: ignore[attr-defined]
        torch.save(old(hyper_parameters={"gpus": default}), tmp_path / "a.ckpt")
    upgrade(monkeypatch, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"]["gpus"](3) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [(["absent"], "nothing at"), (["."], "no file that ends with .ckpt"), (["plain.pt"], "no version")],
)
def test_the_program_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1)}, "plain.pt")
    with pytest.raises(SystemExit, match=said):
        upgrade(monkeypatch, *words)


@pytest.mark.usefixtures("served")
def test_the_module_runs_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python -m lightning.pytorch.utilities.upgrade_checkpoint`` finds it."""
    import runpy

    torch.save(old(), tmp_path / "a.ckpt")
    monkeypatch.setattr("sys.argv", ["program", str(tmp_path / "a.ckpt")])
    runpy.run_module("lightning.pytorch.utilities.upgrade_checkpoint", run_name="__main__", alter_sys=True)
    assert (tmp_path / "a.bak").exists()
    assert importlib.util.find_spec("lightning.pytorch.utilities.upgrade_checkpoint.__main__") is not None
    with pytest.raises(ImportError, match="has no lightning.pytorch.callbacks.__main__"):
        runpy.run_module("lightning.pytorch.callbacks", run_name="__main__")


def test_our_own_checkpoints_need_no_migration() -> None:
    checkpoint: dict[str, Any] = {"state_dict": {}, "drivetrain_version": "1"}
    assert _pl_migrate_checkpoint(checkpoint, "a.ckpt") is checkpoint
