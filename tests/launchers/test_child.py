"""What comes back from a started process: written by one, read by another."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import re
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.errors import ConfigurationError
from drivetrain.launchers.child import Sealed, read_result, write_result


class Own:
    """What no restricted reader takes."""

    def __init__(self, value: Any) -> None:
        self.value = value


def back(folder: Path, value: Any) -> Any:
    write_result(folder, value)
    return read_result(folder)


def test_objects_come_back_with_what_they_share(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2)).backward()
    optimizer.step()
    found = back(tmp_path, {"layer": layer, "optimizer": optimizer, "own": Own(layer.weight[:, :1]), "none": None})
    assert found["optimizer"].param_groups[0]["params"][0] is found["layer"].weight
    assert torch.equal(
        found["optimizer"].state[found["layer"].weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"]
    )
    assert isinstance(found["own"], Own)
    with torch.no_grad():
        found["layer"].weight.zero_()
    assert found["own"].value.item() == 0
    assert os.listdir(tmp_path) == ["0.result"]


def test_what_is_in_shared_memory_comes_back_in_memory_of_its_own(tmp_path: Path) -> None:
    shared = torch.ones(2).share_memory_()
    found = back(tmp_path, shared)
    assert not found.is_shared()
    assert torch.equal(found, shared)


def test_views_of_other_types_come_back(tmp_path: Path) -> None:
    numbers = torch.arange(4.0)
    floats, ints = back(tmp_path, (numbers, numbers.view(torch.int32)))
    assert torch.equal(floats.view(torch.int32), ints)


def test_a_setting_for_files_of_others_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    monkeypatch.setenv(name, "1")
    assert back(tmp_path, Own(1)).value == 1
    assert os.environ[name] == "1"


def test_it_is_written_as_checkpoints_are(tmp_path: Path) -> None:
    write_result(tmp_path, {"a": torch.ones(3)})
    with zipfile.ZipFile(tmp_path / "0.result") as container:
        assert container.testzip() is None
        assert any(name.endswith("data.pkl") for name in container.namelist())


def test_what_cannot_be_pickled_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"result of rank 0 cannot be pickled.*lambda.*Return plain data"):
        write_result(tmp_path, lambda: None)
    assert os.listdir(tmp_path) == []


class Words:
    """A dataset whose lock is deep in an object that also leads back to itself."""

    def __init__(self) -> None:
        self.itself, self.locks = self, {"file": [None, threading.Lock()]}

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 2

    def collate(self, items: Any) -> Any:
        return items


class Slotted:
    __slots__ = ("transform",)


def test_the_object_that_holds_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    slotted, layer = Slotted(), nn.Linear(1, 1)
    slotted.transform = functools.partial(print, end=threading.Lock())
    layer.activation = lambda x: x
    of_words = "object, in the attribute `locks['file'][1]` of Words. Define"
    for value, said in [
        (DataLoader(Words()), of_words),
        ((print, ({"model": nn.Sequential(layer)},)), ", in the attribute `activation` of Linear. Define"),
        ([{"collate_fn": functools.partial(Words().collate, 1)}], of_words),
        (slotted, "object, in the attribute `transform` of Slotted. Define"),
        ([threading.Lock()], "object. Define"),
    ]:
        with pytest.raises(ConfigurationError) as failed:
            pickle.dumps(Sealed(value))
        assert said in str(failed.value)
    with pytest.raises(ConfigurationError, match=r"object, in the attribute `value` of Own\. Return plain data"):
        write_result(tmp_path, Own(threading.Lock()))


def test_a_full_disk_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as something that cannot be pickled."""
    from drivetrain.base import files

    def full(self: Any, content: Any) -> int:
        self.failure = OSError(errno.ENOSPC, "No space left on device")
        raise self.failure

    monkeypatch.setattr(files._Stream, "write", full)
    with pytest.raises(OSError, match="no space left on device"):
        write_result(tmp_path, torch.ones(3))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("notebook", "file", "said"),
    [
        (True, None, 'is defined in this notebook. Write strategy="ddp_notebook"'),
        (False, None, 'is defined in this interactive session. Write strategy="ddp_fork"'),
        (False, "train.py", None),
    ],
    ids=["notebook", "interactive", "file"],
)
def test_what_a_new_process_cannot_import_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, notebook: bool, file: str | None, said: str | None
) -> None:
    cell = types.ModuleType("__main__")
    if file is not None:
        cell.__file__ = file
    exec("class Model: ...\ndef loss(): ...", vars(cell))
    monkeypatch.setitem(sys.modules, "__main__", cell)
    monkeypatch.setattr("drivetrain.launchers.child.in_notebook", lambda: notebook)
    for value, name in ((cell.Model(), "Model"), ([cell.loss], "loss")):
        if said is None:
            assert pickle.dumps(Sealed(value))
            continue
        with pytest.raises(ConfigurationError, match=re.escape(f"cannot import {name}, which {said}")):
            pickle.dumps(Sealed(value))
    assert pickle.dumps(Sealed(nn.Linear(1, 1)))  # classes of a file are found wherever the model is made
