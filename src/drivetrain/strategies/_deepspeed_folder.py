"""Checkpoint folders in DeepSpeed's own format, for its tools; other strategies cannot read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.errors import CheckpointError


def is_folder(path: str) -> bool:
    """Return whether ``path`` is a folder in DeepSpeed's format."""
    latest = Path(path) / "latest"
    if not latest.is_file():
        return False
    own = latest.parent / latest.read_text(encoding="utf-8").strip()
    return any(own.glob("*zero_pp_rank_*_optim_states.pt"))


def weights_in(folder: Path, resumes: bool, weights_only: bool | None) -> dict[str, Any]:
    """Return the complete weights in a folder of DeepSpeed's format.

    Args:
        folder: a folder that DeepSpeed has written.
        resumes: whether training resumes from it.
        weights_only: False allows its files to be unpickled.

    Raises:
        CheckpointError: unpickling is not allowed, or training is to resume from the folder.
    """
    if resumes:
        raise CheckpointError(
            f"{folder} is a folder of DeepSpeed's own format, which holds no progress of a Trainer. Call "
            "trainer.strategy.load_deepspeed_checkpoint(folder) in on_train_start, which restores weights and "
            "optimizer states, or resume from a file that trainer.save_checkpoint wrote."
        )
    if weights_only is not False:
        raise CheckpointError(
            f"{folder} is a folder of DeepSpeed's own format, whose files are unpickled, which can run code. If "
            "you trust them, pass weights_only=False."
        )
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return found
