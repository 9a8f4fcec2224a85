"""Save a checkpoint as a folder into which each rank writes its shards: see checkpoints/sharded.py.

If training waits for the save, each rank itself writes its tensors, and sends the other ranks a description of these
tensors. If the save is in the background, a thread writes copies of the tensors, and exchanges messages through the
job's store.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.restoring import shown_error
from drivetrain.checkpoints import json_tree, part_lists, sharded
from drivetrain.checkpoints.file import cure_of, refused_here, writes_files
from drivetrain.checkpoints.io import background_of
from drivetrain.errors import CheckpointError, ConfigurationError, WrongTypeError
from drivetrain.strategies import rank_files
from drivetrain.strategies.sharded_state import boxes_in, is_dtensor
from drivetrain.strategies.strategy import Strategy

with on_first_use:
    from drivetrain.checkpoints import background
    from drivetrain.strategies import joint_save


def save(strategy: Strategy, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
    """Write ``checkpoint`` to the folder ``path``. The tensors may be DTensors. Every rank must call this function.

    Raises:
        CheckpointError: a rank could not write its files. Every rank raises this error, and the previous checkpoint is
            unchanged.
        ConfigurationError: the strategy's checkpoint store does not write local files.
    """
    if not writes_files(strategy.checkpoint_io) or storage_options is not None:
        store = type(strategy.checkpoint_io).__name__
        raise (ConfigurationError if storage_options is None else WrongTypeError)(
            f'state_dict_type="sharded" writes a folder of local files, but the checkpoint store is {store}'
            f"{'' if storage_options is None else f', with storage_options={storage_options!r}'}. Leave it out, or "
            'write state_dict_type="full".'
        )
    save_id, problem = strategy.broadcast(_prepared(path) if strategy.is_global_zero else None)
    if problem is not None:
        raise CheckpointError(problem)
    if save_id is None:  # another process has written a checkpoint with this name
        return
    world, async_io = strategy.world, background_of(strategy.checkpoint_io)
    if async_io is None or (world.size > 1 and world.store is None):
        own = _planned(strategy, checkpoint, sharded.place(path), save_id)
        own.save(joint_save.JointSave(world, own.folder, save_id, None))
        return
    later = {key: each for key, each in checkpoint.items() if isinstance(each, background.Later)}
    known = {key: each for key, each in checkpoint.items() if key not in later}
    own = _planned(strategy, known, sharded.place(path), save_id)
    joint = joint_save.JointSave(world, path, save_id, world.store.clone() if world.size > 1 else None)
    with async_io.one_save():
        own.parts = async_io.hold([(name, each.detach().contiguous(), *at) for name, each, *at in own.parts], path)
        own.write = functools.partial(_write_by, async_io)
        async_io.begin(path, own.save, joint, later)


@dataclass
class _Own:
    """The data that one rank writes in a save.

    Attributes:
        strategy, folder, save_id: the strategy that saves, the folder of the checkpoint, and the eight digits that
            identify this save.
        tree: the plain data of the checkpoint.
        listed: on rank 0, the entries of all tensors.
        parts: the tensors that this rank writes.
        write: the function that writes a file.
    """

    strategy: Strategy
    folder: sharded.Folder
    save_id: str
    tree: dict[str, Any]
    listed: dict[str, part_lists.Stored]
    parts: list[sharded.Part]
    write: sharded.Write = sharded.write_records

    def save(self, joint: joint_save.JointSave, later: Mapping[str, background.Later] = MappingProxyType({})) -> None:
        """Write this rank's part. When all ranks have written their parts, rank 0 also writes the rest of the
        checkpoint.

        Args:
            joint: exchanges the messages of this save.
            later: further entries of ``tree``, whose values are known only after the other ranks have written their
                parts.
        """
        written, failure = part_lists.Written(), None
        try:
            written = self.write_part()
        except Exception as error:
            failure = unwritten(self.folder, error) if isinstance(error, OSError) else error
        try:
            everyones = joint.exchange(written, failure)
            if self.strategy.is_global_zero:
                tree = {**self.tree, **{key: each.value() for key, each in later.items()}}
                everyones = [written, *map(part_lists.written_of, everyones)]
                sharded.commit(self.folder, self.save_id, tree, everyones, self.write)
        except Exception as error:
            failure = failure or error
        try:
            joint.conclude(unwritten(self.folder, failure) if isinstance(failure, OSError) else failure)
        except Exception:
            sharded.discard(self.folder, self.save_id)
            raise

    def write_part(self) -> part_lists.Written:
        """Write this rank's tensors. Return their descriptions. On rank 0, the result also lists the tensors of the
        other ranks.
        """
        written, name = part_lists.Written(), f"{self.save_id}.rank{self.strategy.global_rank}"
        if self.parts:
            written = sharded.write_tensors(self.folder, f"{name}.bin", self.parts, self.write)
            ranks = self.strategy.world_size
            written = sharded.list_apart(self.folder, f"{name}.parts.json", written, ranks, self.write)
        written.tensors |= {key: each for key, each in self.listed.items() if key not in written.tensors}
        return written


def _planned(strategy: Strategy, checkpoint: Mapping[str, Any], folder: sharded.Folder, save_id: str) -> _Own:
    names, is_first = TensorNames(checkpoint), strategy.is_global_zero
    tree = json_tree.encode(dict(checkpoint), names.of)
    listed = sharded.entries_of(names.tensors) if is_first else {}
    return _Own(strategy, folder, save_id, tree, listed, parts_of_rank(names, is_first))


def _write_by(
    store: background.AsyncCheckpointIO, file: Path | str, records: Sequence[tuple[str, Any]]
) -> Mapping[str, Any]:
    """Let the background process of ``store`` write ``file``. If it cannot, write ``file`` in this process."""
    if isinstance(file, Path):
        held = [(name, each.untyped_storage() if isinstance(each, Tensor) else each) for name, each in records]
        if (receipt := store.write_records(file, held, zipped=False)) is not None:
            return receipt
    return sharded.write_records(file, records)


def unwritten(folder: sharded.Folder, error: OSError) -> CheckpointError:
    """Return the error to raise after ``error`` has ended a save to ``folder``."""
    failure = CheckpointError(
        f"The checkpoint {folder} could not be written: {shown_error(error)}. What was there before is untouched. "
        f"{cure_of(error.errno)}"
    )
    failure.__cause__ = error
    return failure


def save_alone(strategy: Strategy, checkpoint: Mapping[str, Any], path: str | Path, save_id: str) -> str:
    """Write this rank's part of ``checkpoint``. The ranks do not communicate, because another rank may be dead.

    Each rank writes into a temporary folder beside ``path``. The rank that finds the parts of all other ranks in this
    folder renames the folder to ``path``. If a rank cannot write its part, the folder keeps its temporary name, and an
    earlier checkpoint at ``path`` is not replaced.

    Args:
        strategy: the strategy of the fit. The ``state_dict_type`` of the strategy is ignored.
        checkpoint: this rank's checkpoint, with DTensors or plain tensors. Only rank 0's plain data is used.
        path: the path of the checkpoint, equal on all ranks.
        save_id: eight digits. All ranks in the same step of the fit must pass the same digits.

    Returns:
        A description of the missing part, or "" if the checkpoint is complete.

    Raises:
        OSError: this rank could not write its part.
    """
    final = Path(os.path.expanduser(path))
    folder = Path(rank_files.unfinished(str(final), save_id))
    sharded.prepare(folder, new=False)
    planned = _planned(strategy, checkpoint, folder, save_id)
    own = {"written": planned.write_part(), "tree": planned.tree if strategy.is_global_zero else None}
    with files.replacing(folder / f"{strategy.global_rank}.part", durable=True) as stream:
        stream.write(json.dumps(own, default=vars).encode())
    try:
        everyones = [json.loads((folder / f"{each}.part").read_bytes()) for each in range(strategy.world_size)]
        all_written = [part_lists.written_of(each["written"]) for each in everyones]
        sharded.commit(folder, save_id, everyones[0]["tree"], all_written)
        for each in range(strategy.world_size):
            (folder / f"{each}.part").unlink()
        _replace(folder, final)
    except (FileNotFoundError, IsADirectoryError, CheckpointError) as error:
        # A part is missing, or another rank has found all parts at the same time and has renamed the folder.
        if folder.exists() or not sharded.is_checkpoint(final):
            return str(getattr(error, "filename", None) or error)
    return ""


def _replace(folder: Path, path: Path) -> None:
    """Rename ``folder`` to ``path``. An existing checkpoint is replaced."""
    kept = path.with_name(f"{path.stem}-earlier{path.suffix}")  # after a kill, ckpt_path="last" finds this folder
    if os.path.lexists(path):
        _remove(kept)
        files.move(path, kept)
    files.move(folder, path)
    _remove(kept)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _prepared(path: str | Path) -> tuple[str | None, str | None]:
    """Return the id of the save and ``None``, or ``None`` and an error message. If ``path`` exists and must not be
    replaced, return two ``None``.
    """
    refused = refused_here()
    try:
        sharded.prepare(sharded.place(path), new=refused is not None)
    except FileExistsError:
        assert refused is not None  # if ``refused`` is None, an existing folder is replaced
        refused.append(str(path))
        return None, None
    except OSError as error:
        return None, (
            f"The checkpoint {path} could not be written: {shown_error(error)}. Move what is there away, or save under "
            "another name."
        )
    return uuid.uuid4().hex[:8], None


class TensorNames:
    """The names of the tensors in a checkpoint.

    As in torch.distributed.checkpoint, the names are made from parameter names.
    """

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._optimizers = [
            [name for group in each.get("parameters", ()) for name in group]
            for each in checkpoint.get("optimizers", ())
        ]

    def of(self, path: tuple[Any, ...], tensor: Tensor) -> str:
        """Return the name of the tensor at ``path``, and record the name."""
        name = ".".join(map(str, self._called(path)))
        while name in self.tensors and self.tensors[name] is not tensor:
            name += "'"
        self.tensors[name] = tensor
        return name

    def _called(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        if path[:1] == ("state_dict",):
            return ("model", *path[1:])
        if path[:1] == ("optimizer_states",) and len(path) > 3 and path[2] == "state":
            names = self._optimizers[path[1]] if path[1] < len(self._optimizers) else []
            parameter = names[path[3]] if isinstance(path[3], int) and path[3] < len(names) else path[3]
            return ("optimizers", path[1], "state", parameter, *path[4:])
        return path


def parts_of_rank(names: TensorNames, is_first: bool) -> list[sharded.Part]:
    """Return the tensors that this rank writes: the shards of this rank, except copies that another rank writes. Rank 0
    also writes the plain tensors.
    """
    parts: list[sharded.Part] = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor in names.tensors.items():
        whole = tuple(tensor.shape)
        if not is_dtensor(tensor):
            if is_first:
                parts.append((name, tensor, whole, ((0,) * len(whole), whole)))
            continue
        spread: Any = tensor
        if boxes := _boxes(rank, spread.device_mesh, spread.placements, whole):
            with torch.no_grad():  # with gradients enabled, ``to_local`` would return a new tensor
                shard = spread.to_local()
            for offsets, inside in boxes:
                part = shard[inside]
                parts.append((name, part, whole, (offsets, tuple(part.shape))))
    return parts


@functools.lru_cache(maxsize=20_000)
def _boxes(rank: int, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Sequence[Any]:
    """Return the boxes (parts of a tensor) that ``rank`` writes. The result is cached, because each checkpoint has the
    same tensors.

    The result is empty if the rank has no part of the tensor, or if an earlier rank has the same shard.
    """
    coordinate = mesh.get_coordinate()
    # If the tensor's mesh contains only some of the ranks, the ranks of other meshes may have copies of the tensor.
    # Only the ranks of the mesh with rank 0 write the tensor.
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return ()
    first = all(index == 0 for index, each in zip(coordinate, placements, strict=True) if each.is_replicate())
    return boxes_in(mesh, placements, shape) if first else ()
