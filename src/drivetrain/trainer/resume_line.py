"""Logs a line when a fit resumes: the fit's position, and differences from the run that saved the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.settings import Settings
from drivetrain.strategies.agreement import text_of

ENTRY = "saved_under"
"""The name of the checkpoint's entry with the result of :func:`circumstances`."""

_SETTINGS = (
    "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "split_batches",
    "use_distributed_sampler", "sync_batchnorm", "limit_train_batches", "overfit_batches",
    "reload_dataloaders_every_n_epochs", "deterministic", "compile", "cuda_graphs", "optimizer_kernels",
    "sample_seeds",
)  # fmt: skip
"""The Trainer's arguments that can change the results of training. Arguments that limit the length of the fit are left
out.
"""


def circumstances(trainer: Any) -> dict[str, str]:
    """Return the conditions on which the results of this run depend, by name. The conditions are stored in checkpoints,
    and a resumed run compares the stored conditions with its own conditions.

    Arguments with their default values are left out.
    """
    strategy = trainer.strategy
    given, defaults = _texts(trainer.settings), _texts(Settings)
    return {
        "torch": str(torch.__version__),
        "device": strategy.root_device.type,
        "processes": str(strategy.world_size),
        "strategy": type(strategy).__name__,
        "precision": str(strategy.precision_plugin.precision),
        **{name: text for name, text in given.items() if text != defaults[name]},
    }


def _texts(settings: Any) -> dict[str, str]:
    return {name: text_of(getattr(settings, name)) for name in _SETTINGS}


def tell(trainer: Any, checkpoint: Mapping[str, Any], path: str, done: str) -> None:
    """Log, on rank 0, where the fit continues, and the conditions that differ from the checkpoint's conditions.

    Args:
        trainer: the Trainer, with its progress restored.
        checkpoint: the checkpoint from which the fit resumes.
        path: the checkpoint's path.
        done: the finished part of the epoch over all ranks, such as "30 samples"; "" if unknown.
    """
    progress, then = trainer.progress, checkpoint.get(ENTRY, {})
    inside = " (counted from 0)"  # progress bars count epochs from 1
    if progress.batches_done and not progress.epoch_ending:
        inside = f", after batch {progress.batches_done - 1} (counted from 0{done and f'; {done}'})"
    if not isinstance(then, Mapping):
        then = {}
    now = circumstances(trainer) if then else {}
    then, now = ({**each, **_texts(Settings), **each} for each in (then, now))
    others = ", ".join(
        f"{name} {now[name]} (was {then[name]})" for name in now if then.get(name, now[name]) != now[name]
    )
    rank_zero_info(
        f"Resuming from {path}: epoch {progress.epochs_done}{inside}, global step {progress.global_step}."
        + (f" Other than in the run that saved it: {others}." if others else "")
    )
