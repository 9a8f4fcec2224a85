"""The checks for checkpoint stores."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.errors import CheckpointError
from drivetrain.testing._regression import Small, data
from drivetrain.testing.checks import Part, Skipped, is_true, raises, same
from drivetrain.trainer.trainer import Trainer

SETTINGS: tuple[str, ...] = ()


def _checkpoint(value: float = 1.0) -> dict[Any, Any]:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    tensors = {str(dtype): torch.full((2, 3), value).to(dtype) for dtype in dtypes}
    return {
        "state_dict": {**tensors, "scalar": torch.tensor(value), "empty": torch.zeros(0, 3)},
        "epoch": 3, "global_step": 10, "rate": value, "name": "ü", "none": None, "yes": True,
        "list": [1, (2.5, "x"), {"a": torch.arange(3)}], 7: {"key": "an int"},
    }  # fmt: skip


def _equal(found: Any, expected: Any, where: str = "checkpoint") -> None:
    same(type(found), type(expected), f"type of {where}")
    if isinstance(expected, Tensor):
        same(found.dtype, expected.dtype, f"dtype of {where}")
        is_true(torch.equal(found, expected), f"{where}: {found!r}, and {expected!r} was saved")
    elif isinstance(expected, dict):
        same(sorted(map(str, found)), sorted(map(str, expected)), f"keys of {where}")
        for key, value in expected.items():
            _equal(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        same(len(found), len(expected), f"length of {where}")
        for index, value in enumerate(expected):
            _equal(found[index], value, f"{where}[{index}]")
    else:
        same(found, expected, where)


def _save(store: Any, path: str | Path, value: float = 1.0) -> None:
    store.save_checkpoint(_checkpoint(value), path)
    store.wait(path)


def _value(store: Any, path: str | Path) -> Any:
    return store.load_checkpoint(path)["rate"]


def try_it(part: Part) -> None:
    """Check that a checkpoint store can be created."""
    part.make()


def what_is_saved_is_loaded(part: Part) -> None:
    """load_checkpoint returns the saved values: nested plain data, and tensors with the same dtypes, values and
    shapes.
    """
    store = part.make()
    _save(store, "a.ckpt")
    _equal(store.load_checkpoint("a.ckpt"), _checkpoint())


def tensors_may_change_after_a_save(part: Part) -> None:
    """If a tensor changes after save_checkpoint has returned, the checkpoint still has the earlier values of the
    tensor.
    """
    store, checkpoint = part.make(), _checkpoint()
    store.save_checkpoint(checkpoint, "a.ckpt")
    for each in checkpoint["state_dict"].values():
        each.zero_()
    store.wait("a.ckpt")
    _equal(store.load_checkpoint("a.ckpt"), _checkpoint())


def a_saved_checkpoint_is_there(part: Part) -> None:
    """Before a save, exists is False and written_at is None. After wait, exists and is_durable are True, and written_at
    is a number.
    """
    store = part.make()
    same((store.exists("a.ckpt"), store.written_at("a.ckpt")), (False, None), "exists and written_at before the save")
    _save(store, "a.ckpt")
    for path in ("a.ckpt", Path("a.ckpt")):
        same((store.exists(path), store.is_durable(path)), (True, True), f"exists and is_durable of {path!r}")
        is_true(isinstance(store.written_at(path), (int, float)), f"written_at is {store.written_at(path)!r}")


def a_missing_checkpoint_is_an_error(part: Part) -> None:
    """If there is no checkpoint at a path, load_checkpoint raises a CheckpointError, and remove_checkpoint does
    nothing.
    """
    store = part.make()
    with raises(CheckpointError, "load_checkpoint of a path without a checkpoint"):
        store.load_checkpoint("none.ckpt")
    store.remove_checkpoint("none.ckpt")
    same(store.is_complete("none.ckpt"), False, "is_complete")


def a_save_replaces_the_previous_one(part: Part) -> None:
    """A second save to a path replaces the checkpoint there, and does not change other checkpoints."""
    store = part.make()
    for path, value in (("a.ckpt", 1.0), ("b.ckpt", 2.0), ("a.ckpt", 3.0)):
        _save(store, path, value)
    same((_value(store, "a.ckpt"), _value(store, "b.ckpt")), (3.0, 2.0), "values in both checkpoints")


def a_removed_checkpoint_is_gone(part: Part) -> None:
    """After remove_checkpoint, exists is False for the removed checkpoint, and find does not return it. Other
    checkpoints stay.
    """
    store = part.make()
    _save(store, "a.ckpt")
    _save(store, "b.ckpt", 2.0)
    store.remove_checkpoint("a.ckpt")
    same((store.exists("a.ckpt"), store.exists("b.ckpt")), (False, True), "exists of the removed one and the other")
    same([os.path.basename(each) for each in store.find(".", "*.ckpt")], ["b.ckpt"], "find")


def checkpoints_are_found_by_pattern(part: Part) -> None:
    """find returns exactly the paths in a folder that match the pattern, and load_checkpoint accepts these paths."""
    store = part.make()
    for path in ("runs/a-1.ckpt", "runs/b-2.ckpt", "other/a-3.ckpt"):
        _save(store, path)
    found = store.find("runs", "a-*.ckpt")
    same([Path(each).as_posix() for each in found], ["runs/a-1.ckpt"], "find('runs', 'a-*.ckpt')")
    same(_value(store, found[0]), 1.0, "value of what find returned")


def the_newest_checkpoint_is_known(part: Part) -> None:
    """written_at of a later save is never smaller than written_at of an earlier save. touch makes a checkpoint the
    newest.
    """
    store = part.make()
    _save(store, "a.ckpt")
    _save(store, "b.ckpt")
    is_true(store.written_at("b.ckpt") >= store.written_at("a.ckpt"), "the later checkpoint counts as the older one")
    store.touch("a.ckpt")
    is_true(store.written_at("a.ckpt") >= store.written_at("b.ckpt"), "a touched checkpoint counts as the older one")


def a_copy_is_a_checkpoint_of_its_own(part: Part) -> None:
    """copy creates a checkpoint that stays if its source is removed. With replaces=False, copy does not replace an
    existing checkpoint.
    """
    store = part.make()
    _save(store, "a.ckpt")
    store.copy("a.ckpt", "copy.ckpt")
    store.wait("copy.ckpt")
    _save(store, "b.ckpt", 2.0)
    same(store.copy("b.ckpt", "copy.ckpt", replaces=False), False, "copy with replaces=False over a checkpoint")
    store.remove_checkpoint("a.ckpt")
    same(_value(store, "copy.ckpt"), 1.0, "value in the copy")
    store.copy("b.ckpt", "copy.ckpt")
    store.wait("copy.ckpt")
    same(_value(store, "copy.ckpt"), 2.0, "value in the copy that was replaced")


def a_failed_save_leaves_the_previous_one(part: Part) -> None:
    """If a checkpoint cannot be written, save_checkpoint or wait raises an exception, and the previous checkpoint
    stays.
    """
    store = part.make()
    _save(store, "a.ckpt")
    try:
        store.save_checkpoint({**_checkpoint(2.0), "object": threading.Lock()}, "a.ckpt")
        store.wait("a.ckpt")
    except Exception:
        same(_value(store, "a.ckpt"), 1.0, "value in the previous checkpoint")
    else:
        raise Skipped("it writes objects that cannot be pickled")


def loading_runs_no_code(part: Part) -> None:
    """load_checkpoint(path) runs no code of pickled objects in the file. An exception is allowed."""
    store = part.make()
    with contextlib.suppress(Exception):
        store.save_checkpoint({"object": _Runs()}, "a.ckpt")
        store.wait("a.ckpt")
        if os.path.isdir("ran"):  # saving may copy the object, which creates the folder, too
            os.rmdir("ran")
        store.load_checkpoint("a.ckpt")
    is_true(not Path("ran").exists(), "load_checkpoint called a function that the checkpoint names")


def it_works_again_after_teardown(part: Part) -> None:
    """After teardown the store can save and load again, and still has its checkpoints."""
    store = part.make()
    _save(store, "a.ckpt")
    store.teardown()
    _save(store, "b.ckpt", 2.0)
    same((_value(store, "a.ckpt"), _value(store, "b.ckpt")), (1.0, 2.0), "values in both checkpoints")
    store.teardown()


def a_fit_resumes_exactly(part: Part) -> None:
    """A fit that saves with the store, and a second fit with ckpt_path="last", give the weights of an uninterrupted
    fit.
    """

    def fit(store: Any, epochs: int, folder: str, ckpt_path: str | None = None) -> list[Tensor]:
        module = Small()
        saver = ModelCheckpoint(folder, save_last=True, save_top_k=2, monitor="loss")
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, logger=False, plugins=[store], callbacks=[saver],
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        train, val = (DataLoader(data(count), batch_size=8) for count in (3, 1))
        trainer.fit(module, train, val, ckpt_path=ckpt_path)
        return [each.detach().clone() for each in module.parameters()]

    store = part.make()
    parts = str(part.folder / "parts")
    whole = fit(store, 3, str(part.folder / "whole"))
    fit(store, 2, parts)
    rest = fit(store, 3, parts, "last")
    is_true(all(map(torch.equal, rest, whole)), "the resumed fit has other weights")
    same(len(store.find(parts, "last.ckpt")), 1, "number of files last.ckpt")


class _Runs:
    """An object that creates a folder when it is unpickled or copied."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)
