"""Save a checkpoint as a folder of shards in a background thread, called by sharded_files.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.checkpoints import json_tree, part_lists, sharded
from drivetrain.checkpoints.background import AsyncCheckpointIO, Later
from drivetrain.strategies.joint_save import JointSave
from drivetrain.strategies.sharded_files import TensorNames, parts_of_rank, unwritten
from drivetrain.strategies.strategy import Strategy


def begin(
    strategy: Strategy, background: AsyncCheckpointIO, checkpoint: Mapping[str, Any], path: str | Path, save_id: str
) -> None:
    """Copy this rank's shards of ``checkpoint``, and begin to write them to the folder ``path``; every rank must call
    it.
    """
    later = {key: each for key, each in checkpoint.items() if isinstance(each, Later)}
    names = TensorNames(known := {key: each for key, each in checkpoint.items() if key not in later})
    tree = json_tree.encode(known, names.of)
    shards = _Shards(strategy, background, path, save_id)
    with background.one_save():
        mine = parts_of_rank(names, strategy.is_global_zero)
        parts = background.hold([(name, part.detach().contiguous(), *place) for name, part, *place in mine], path)
        if strategy.is_global_zero:
            all_tensors = part_lists.Written()
            sharded.list_all(all_tensors, names.tensors)
            background.begin(path, shards.complete, parts, all_tensors, tree, later)
        else:
            background.begin(path, shards.contribute, parts)


class _Shards:
    """Writes the shards of one rank, and agrees with the other ranks on the result; its methods run in the background
    thread.
    """

    def __init__(self, strategy: Strategy, background: AsyncCheckpointIO, path: str | Path, save_id: str) -> None:
        self._background, self._save_id, self._folder = background, save_id, sharded.place(path)
        self._file = f"{save_id}.rank{strategy.global_rank}.bin"
        self._list, self._processes = f"{save_id}.rank{strategy.global_rank}.parts.json", strategy.world_size
        world = strategy.world
        self._joint = JointSave(world, path, save_id, world.store.clone() if world.size > 1 else None)

    def complete(
        self, parts: list[sharded.Part], all_tensors: part_lists.Written, tree: Any, later: Mapping[str, Later]
    ) -> None:
        """On rank 0: write this rank's shards, and after all other ranks have written their shards, the manifest."""
        failure: Exception | None = None
        try:
            written = [all_tensors, self._write(parts)]
            written += [part_lists.written_of(each) for each in self._joint.collect()]
            tree |= {key: each.value() for key, each in later.items()}
            sharded.commit(self._folder, self._save_id, tree, written, self._write_small)
        except Exception as error:
            failure = unwritten(self._folder, error) if isinstance(error, OSError) else error
            sharded.discard(self._folder, self._save_id)
        self._joint.decide(failure)
        if failure is not None:
            raise failure

    def contribute(self, parts: list[sharded.Part]) -> None:
        """On any rank but 0: write this rank's shards."""
        failure, written = None, part_lists.Written()
        try:
            written = self._write(parts)
        except Exception as error:
            failure = unwritten(self._folder, error) if isinstance(error, OSError) else error
        self._joint.post({**vars(written), "tensors": part_lists.plain_of(written.tensors)}, failure)
        try:
            self._joint.follow()
        except Exception as error:
            sharded.discard(self._folder, self._save_id)
            raise failure or error from None

    def _write(self, parts: list[sharded.Part]) -> part_lists.Written:
        if not parts:
            return part_lists.Written()
        if isinstance(self._folder, Path):
            records = [(str(number), part.untyped_storage()) for number, (_, part, *_) in enumerate(parts)]
            receipt = self._background.write_records(self._folder / self._file, records, zipped=False)
            if receipt is not None:
                return self._listed(_of_receipt(self._file, parts, receipt))
        return self._listed(sharded.write_tensors(self._folder, self._file, parts))

    def _listed(self, written: part_lists.Written) -> part_lists.Written:
        return sharded.list_apart(self._folder, self._list, written, self._processes, self._write_small)

    def _write_small(self, place: Path | str, content: bytes) -> None:
        is_local = isinstance(place, Path)
        if not is_local or self._background.write_records(Path(place), [("", content)], zipped=False) is None:
            sharded.write_content(place, content)


def _of_receipt(name: str, parts: list[sharded.Part], receipt: Mapping[str, Any]) -> part_lists.Written:
    """Return the description of ``parts`` in the file ``name``, from the receipt of the process that has written the
    file.
    """
    written = part_lists.Written({name: {"size": receipt["size"], "crc32": receipt["crc32"]}})
    for number, (tensor_name, part, whole, (offsets, shape)) in enumerate(parts):
        at, checksum = receipt["records"][str(number)]
        stored = part_lists.Stored(str(part.dtype).removeprefix("torch."), whole)
        piece = part_lists.Piece(name, at, checksum, offsets, shape)
        written.tensors.setdefault(tensor_name, stored).pieces.append(piece)
    return written
