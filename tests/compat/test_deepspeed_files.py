"""One file of DeepSpeed's folders; the package is replaced, tests/extras/test_deepspeed.py uses it."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from drivetrain.compat.deepspeed_files import convert_zero_checkpoint_to_fp32_state_dict, ds_checkpoint_dir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What DeepSpeed leaves: two checkpoints, of which the second is the latest."""
    for tag in ("step1", "step2"):
        (tmp_path / tag).mkdir()
        kept = {"module": {}, "global_steps": 3, "hyper_parameters": {"tag": tag}, "ds_version": "0.1"}
        torch.save(kept, tmp_path / tag / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("step2\n")
    return tmp_path


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's function for the weights."""
    for name in ("deepspeed", "deepspeed.utils", "deepspeed.utils.zero_to_fp32"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)

    def weights(folder: str, tag: str) -> dict[str, Any]:
        assert (Path(folder) / tag).is_dir()
        return {"_forward_module.layer": torch.ones(2), "plain": torch.zeros(1)}

    sys.modules["deepspeed.utils.zero_to_fp32"].get_fp32_state_dict_from_zero_checkpoint = weights  # type: ignore[attr-defined]


def test_the_folder_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    assert ds_checkpoint_dir(folder) == str(folder / "step2")
    assert ds_checkpoint_dir(str(folder), "step1") == str(folder / "step1")
    with pytest.raises(FileNotFoundError, match="no folder .*step3"):
        ds_checkpoint_dir(folder, "step3")
    with pytest.raises(ValueError, match="no file .*latest"):
        ds_checkpoint_dir(folder / "step1")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("tag", "found"), [(None, "step2"), ("step1", "step1")])
def test_a_folder_becomes_one_file(folder: Path, tag: str | None, found: str) -> None:
    returned = convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "one.pt", tag)
    written = torch.load(folder / "one.pt", weights_only=True)
    assert written.keys() == returned.keys() == {"hyper_parameters", "ds_version", "state_dict"}
    assert written["hyper_parameters"] == {"tag": found}
    assert [*written["state_dict"]] == ["layer", "plain"]


def test_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install deepspeed"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "one.pt")
