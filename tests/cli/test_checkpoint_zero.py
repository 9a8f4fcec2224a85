"""Folders of DeepSpeed's engine, made here in its format; tests/extras/test_deepspeed.py has real ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import Harmful, answer, loaded, run
from torch import Tensor

GROUPS = [
    {"first.weight": torch.randn(7, 4), "first.bias": torch.randn(7)},
    {"last.weight": torch.randn(3, 7), "scale": torch.randn(())},
]
FROZEN = {"frozen": torch.randn(5)}
BUFFERS = {"count": torch.arange(3)}
WEIGHTS = {**BUFFERS, **FROZEN, **GROUPS[0], **GROUPS[1]}


def zero_folder(folder: Path, stage: int, ranks: int = 2, **besides: Any) -> Path:
    """What the engine writes with this stage of ZeRO; ``besides``: entries of the program."""
    tag = folder / "step8"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step8")
    shapes = [{f"_forward_module.{name}": each.shape for name, each in group.items()} for group in GROUPS]
    for rank in range(ranks):
        over = (rank, ranks) if stage == 3 else (0, 1)
        frozen = {f"_forward_module.{name}": part(each, *over) for name, each in FROZEN.items()}
        model = {
            "module": {f"_forward_module.{name}": each for name, each in BUFFERS.items()},
            "buffer_names": [f"_forward_module.{name}" for name in BUFFERS], "param_shapes": shapes,
            "frozen_param_shapes": {f"_forward_module.{name}": each.shape for name, each in FROZEN.items()},
            "frozen_param_fragments": frozen, "shared_params": {"_forward_module.tied": "_forward_module.first.weight"},
            "ds_version": "0.19.8", **besides,
        }  # fmt: skip
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, tag / f"{name}_model_states.pt")
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks, "loss_scaler": Harmful(folder / "harm")}
        if stage == 3:
            flat = [torch.cat([part(each, rank, ranks) for group in GROUPS for each in group.values()])]
            state["fp32_flat_groups"] = [flat[0][:9], flat[0][9:]]  # the engine may split it anywhere
        else:
            state["single_partition_of_fp32_groups"] = [
                part(torch.cat([each.flatten() for each in group.values()]), rank, ranks, 2 * ranks) for group in GROUPS
            ]
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def part(tensor: Tensor, rank: int, ranks: int, multiple: int = 1) -> Tensor:
    """A rank's part of a tensor, which is filled up to be divisible."""
    size = math.ceil(tensor.numel() / ranks / multiple) * multiple
    flat = torch.zeros(size * ranks)
    flat[: tensor.numel()] = tensor.flatten()
    return flat[rank * size : (rank + 1) * size].clone()


@pytest.mark.parametrize("stage", [2, 3])
def test_the_weights_of_all_ranks_become_one_file_and_nothing_is_unpickled(
    tmp_path: Path, capsys: Any, stage: int
) -> None:
    folder = zero_folder(tmp_path / "zero", stage)
    assert run(capsys, "verify", folder)[0] == 0
    assert answer(capsys, "inspect", folder)["kind"] == "deepspeed"
    said = answer(capsys, "consolidate", folder, tmp_path / "one.ckpt")
    assert said["notes"] == ["DeepSpeed's optimizer states are left out: only its engine, on as many ranks, loads them"]
    found = loaded(tmp_path / "one.ckpt")["state_dict"]
    torch.testing.assert_close({name: found[name] for name in WEIGHTS}, WEIGHTS, rtol=0, atol=0)
    assert found["tied"].data_ptr() == found["first.weight"].data_ptr()
    assert run(capsys, "diff", folder / "step8", tmp_path / "one.ckpt")[0] == 0
    assert not (tmp_path / "zero" / "harm").exists()


def test_what_a_trainer_has_stored_with_them_is_kept(tmp_path: Path, capsys: Any) -> None:
    besides = {"epoch": 3, "global_step": 9, "pytorch-lightning_version": "2.6.0", "hyper_parameters": {"width": 4}}
    folder = zero_folder(tmp_path / "zero", 2, **besides)
    assert run(capsys, "convert", folder, tmp_path / "light.ckpt", "--to", "lightning")[0] == 0
    found = loaded(tmp_path / "light.ckpt")
    assert (found["epoch"], found["hyper_parameters"]) == (3, {"width": 4})


def test_damaged_and_missing_files_are_errors(tmp_path: Path, capsys: Any) -> None:
    folder = zero_folder(tmp_path / "zero", 3)
    second = folder / "step8" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = second.read_bytes()
    at = content.find(part(GROUPS[0]["first.weight"], 1, 2)[:4].numpy().tobytes())
    second.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    code, out, _ = run(capsys, "verify", folder)
    assert (code, f"{second} is damaged" in out) == (1, True)
    code, _, said = run(capsys, "consolidate", folder, tmp_path / "one.ckpt")
    assert (code, f"{second} is damaged" in said) == (2, True)
    second.unlink()
    code, _, said = run(capsys, "consolidate", folder, tmp_path / "one.ckpt")
    assert (code, "2 ranks have written it, and the files of 1 are there" in said) == (2, True)
