"""Read the float32 weights of all ranks from a checkpoint folder of DeepSpeed's ZeRO, without the package DeepSpeed.

ZeRO flattens the parameters of each optimizer group into one vector. With stages 1 and 2, each rank holds a consecutive
part of this vector. With stage 3, each rank has a different vector, which consists of a part of every parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.restoring import problem_of, restoring
from drivetrain.checkpoints.file import check_records
from drivetrain.checkpoints.foreign import Placeholder, read_objects
from drivetrain.checkpoints.unread import UnreadTensor
from drivetrain.errors import CheckpointError

_STATES = "*_optim_states.pt"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OF_THE_RUN = (
    "epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "hparams_name",
    "hyper_parameters", "datamodule_hparams_name", "datamodule_hyper_parameters",
)  # fmt: skip


class _Gathered(UnreadTensor):
    """A tensor whose parts are in the files of several ranks."""

    parts: Callable[[], Sequence[Tensor]]

    @staticmethod
    def made(shape: Sequence[int], dtype: torch.dtype, parts: Callable[[], Sequence[Tensor]]) -> _Gathered:
        """Return a tensor of this shape that is read when it is used. Its elements are the first ones of
        ``torch.cat(parts())``.
        """
        tensor = _Gathered(shape, dtype)
        assert isinstance(tensor, _Gathered)
        tensor.parts = parts
        return tensor

    def whole(self) -> Tensor:
        parts = self.parts()
        flat = torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone()
        return (
            flat[: self.numel()].clone().reshape(self.shape) if len(flat) > self.numel() else flat.reshape(self.shape)
        )


def folder_of(path: Path) -> Path | None:
    """Return the folder with the checkpoint's files: ``path``, or the subfolder that the file ``latest`` names;
    ``None`` if neither has them.
    """
    for folder in (path, _latest(path)):
        if folder is not None and any(map(_MODEL.fullmatch, (each.name for each in folder.glob("*.pt")))):
            return folder
    return None


def _latest(path: Path) -> Path | None:
    latest = path / "latest"
    return path / Path(latest.read_text(encoding="utf-8").strip()).name if latest.is_file() else None


def files_of(folder: Path) -> list[Path]:
    """Return the folder's files, in the order of the ranks."""
    return sorted(folder.glob("*.pt"), key=lambda file: [int(each) for each in re.findall(r"\d+", file.name)])


def read(folder: Path) -> tuple[dict[str, Any], list[Path], list[str]]:
    """Return the entries of a Trainer's checkpoint with the complete weights, the files, and notes on omitted contents.

    Raises:
        CheckpointError: a file is damaged or missing, or the weights were split by tensor parallelism.
    """
    found = files_of(folder)
    by_rank = {
        int(match[1] or 0): file for file in found if (match := _MODEL.fullmatch(file.name)) and not int(match[2])
    }
    if any((match := _MODEL.fullmatch(file.name)) and int(match[2]) for file in found):
        raise CheckpointError(
            f"{folder} was written with tensor parallelism, whose weights this command cannot join. Convert it with "
            "python -m deepspeed.checkpoint.ds_to_universal."
        )
    models = [
        read_objects(by_rank[rank], str(by_rank[rank]), map_location="cpu", mmap=True) for rank in sorted(by_rank)
    ]
    optimizers = [
        read_objects(file, str(file), map_location="cpu", mmap=True)["optimizer_state_dict"]
        for file in found
        if file.match(_STATES) and "zero_pp_rank" in file.name
    ]
    with restoring(folder.name):
        weights = _weights(models, optimizers) if optimizers else dict(models[0]["module"])
    kept = {
        key: models[0][key] for key in _OF_THE_RUN if not isinstance(models[0].get(key, Placeholder()), Placeholder)
    }
    kept["state_dict"] = {name.removeprefix("_forward_module."): value for name, value in weights.items()}
    notes = ["DeepSpeed's optimizer states are left out: only its engine, on as many ranks, loads them"]
    return kept, found, notes if optimizers or models[0].get("optimizer") else []


def _weights(models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the complete weights: float32 master weights, frozen parameters, and buffers."""
    first, ranks = models[0], len(optimizers)
    counts = optimizers[0].get("partition_count", ranks)
    expected = max(counts) if isinstance(counts, list) else counts
    if expected != ranks:
        raise CheckpointError(f"{expected} ranks have written it, and the files of {ranks} are there. Add the others.")
    state: dict[str, Any] = {
        name: first["module"][name] for name in first.get("buffer_names", ()) if name in first["module"]
    }
    stage_3 = "fp32_flat_groups" in optimizers[0]
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        pieces = [each["frozen_param_fragments"][name] for each in (models if stage_3 else models[:1])]
        state[name] = _Gathered.made(shape, pieces[0].dtype, partial(_flattened, pieces))
    state |= (_of_stage_3 if stage_3 else _of_stages_1_and_2)(first, optimizers)
    for alias, name in (first.get("shared_params") or {}).items():
        if name in state:
            state[alias] = state[name]
    return state


def _flattened(pieces: Sequence[Tensor]) -> list[Tensor]:
    return [each.flatten() for each in pieces]


def _of_stages_1_and_2(first: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(first["param_shapes"]):
        flat = [each["single_partition_of_fp32_groups"][group] for each in optimizers]
        at = 0
        for index, (name, shape) in enumerate(shapes.items()):
            count = math.prod(shape)
            state[name] = _Gathered.made(shape, flat[0].dtype, partial(_parts, flat, at, count))
            at += count + (paddings[group][index] if paddings else 0)
        _check_size(at, sum(map(len, flat)), 4 * len(flat))  # DeepSpeed's padding
    return state


def _of_stage_3(first: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    flat = [each["fp32_flat_groups"] for each in optimizers]
    at = 0
    for shapes in first["param_shapes"]:
        for name, shape in shapes.items():
            share = math.ceil(math.prod(shape) / len(optimizers))

            def parts(at: int = at, share: int = share) -> list[Tensor]:
                return [part for own in flat for part in _parts(own, at, share)]

            state[name] = _Gathered.made(shape, flat[0][0].dtype, parts)
            at += share
    _check_size(at, sum(map(len, flat[0])), 0)
    return state


def _parts(vectors: Sequence[Tensor], at: int, count: int) -> list[Tensor]:
    """Return ``torch.cat(vectors)[at : at + count]`` as a list of slices, without copying."""
    found = []
    for vector in vectors:
        if at < len(vector) and count > 0:
            found.append(vector[at : at + count])
            count -= len(found[-1])
        at = max(at - len(vector), 0)
    return found or [vectors[0][:0]]


def _check_size(needed: int, there: int, padding: int) -> None:
    if not needed <= there <= needed + padding:
        raise CheckpointError(
            f"Its parameters have {needed} elements, and the files hold {there}. Write it again, or convert it with "
            "DeepSpeed's zero_to_fp32.py."
        )


def problems(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each damaged file and its problem."""
    for file in files_of(folder):
        if problem := problem_of(check_records, file, str(file)):
            yield file, problem
