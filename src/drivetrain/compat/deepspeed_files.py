"""Lightning's ``utilities.deepspeed``: convert DeepSpeed's checkpoint folders to one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from drivetrain.base.packages import zero_to_fp32
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.compat.files import NoPathError
from drivetrain.errors import ConfigurationError, check_installed

CPU_DEVICE = torch.device("cpu")

_OF_THE_ENGINE = frozenset(
    {
        "module", "optimizer", "lr_scheduler", "csr_tensor_module_names", "skipped_steps", "global_steps",
        "dp_world_size", "mp_world_size",
    }
)  # fmt: skip
# ZeRO-1 and ZeRO-2 write the first file, ZeRO-3 writes the second file.
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def ds_checkpoint_dir(checkpoint_dir: str | Path, tag: str | None = None) -> str:
    """Return the folder of one checkpoint.

    Args:
        checkpoint_dir: the folder in which DeepSpeed saves.
        tag: the checkpoint's name; ``None``: the name in the file ``latest``.

    Raises:
        ConfigurationError: the file ``latest`` is missing.
        NoPathError: the checkpoint does not exist.
    """
    if tag is None:
        latest = Path(checkpoint_dir) / "latest"
        if not latest.is_file():
            raise ConfigurationError(
                f"There is no file {latest}, which names the latest checkpoint. Pass the folder that DeepSpeed saved "
                "to, or tag=..."
            )
        tag = latest.read_text(encoding="utf-8").strip()
    folder = os.path.join(checkpoint_dir, tag)
    if not os.path.isdir(folder):
        raise NoPathError(f"There is no folder {folder}. Pass the tag of a checkpoint that is there.")
    return folder


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None
) -> dict[str, Any]:
    """Convert a folder of DeepSpeed to one file with float32 weights and the Trainer's other entries.

    ``load_from_checkpoint`` can read this file. Pass only folders that you trust, because their files are unpickled and
    can run code.

    Args:
        checkpoint_dir: the folder in which DeepSpeed has saved.
        output_file: the file to write.
        tag: the checkpoint's name; ``None``: the latest.

    Returns:
        The written data.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        ConfigurationError, NoPathError: see :func:`ds_checkpoint_dir`.
    """
    check_installed("convert_zero_checkpoint_to_fp32_state_dict", "deepspeed")

    folder = Path(ds_checkpoint_dir(checkpoint_dir, tag))
    file = next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)
    if file is None:
        raise NoPathError(f"{folder} holds none of {', '.join(_MODEL_FILES)}. Pass a checkpoint of DeepSpeed's ZeRO.")
    weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(checkpoint_dir), folder.name)
    store = TorchCheckpointIO()
    kept = store.load_checkpoint(file, CPU_DEVICE, weights_only=False)
    checkpoint = {key: value for key, value in kept.items() if key not in _OF_THE_ENGINE}
    checkpoint["state_dict"] = {name.removeprefix("_forward_module."): value for name, value in weights.items()}
    store.save_checkpoint(checkpoint, output_file)
    return checkpoint
