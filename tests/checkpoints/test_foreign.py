"""Files with objects in them: the data is read, and nothing in them is imported, called or changed."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import pathlib
import pickle
import sys
import tarfile
import types
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.checkpoints.foreign import Placeholder, is_legacy, placeholders, read_foreign
from drivetrain.errors import CheckpointError

WEIGHTS = {"state_dict": {"w": torch.arange(6.0).reshape(2, 3)}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "theirs.ckpt"


def read(path: Path) -> dict[str, Any]:
    loaded = read_foreign(path, str(path))
    assert loaded is not None
    return loaded


def read_with_warning(path: Path, match: str = "are left out") -> dict[str, Any]:
    with pytest.warns(UserWarning, match=match) as caught:
        loaded = read(path)
    assert len(caught) == 1
    return loaded


@contextlib.contextmanager
def module_of(name: str, **members: Any) -> Iterator[None]:
    """A module that is there while a file is written, and gone when it is read."""
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    assert not set(names) & set(sys.modules)
    for each in names:
        sys.modules[each] = types.ModuleType(each)
    for key, member in members.items():
        member.__module__, member.__qualname__ = name, key
        setattr(sys.modules[name], key, member)
    try:
        yield
    finally:
        for each in names:
            del sys.modules[each]


class Calls:
    """Pickled, it calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """Pickle wants a function to be callable before it writes it down."""


# ---- nothing runs ----------------------------------------------------------------------------------------------------


def system(command: str) -> Calls:
    import os

    return Calls(os.system, command)


TRAPS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda made: system(f"echo > {made}"),
    "eval": lambda made: Calls(eval, f"open({str(made)!r}, 'w')"),
    "exec": lambda made: Calls(exec, f"open({str(made)!r}, 'w')"),
    "open": lambda made: Calls(open, str(made), "w"),
    "a path": lambda made: Calls(pathlib.Path.touch, made),
    "a method by getattr": lambda made: Calls(Calls(getattr, made, "touch")),
    "inside of a rebuilt tensor": lambda made: Calls(
        torch._tensor._rebuild_from_type_v2, open, torch.Tensor, (str(made), "w"), None
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("zipped", [True, False])
def test_t27_a_function_is_not_called(path: Path, trap: str, zipped: bool) -> None:
    made = path.parent / "made"
    torch.save({**WEIGHTS, "payload": TRAPS[trap](made)}, path, _use_new_zipfile_serialization=zipped)
    loaded = read_with_warning(path, "payload")
    assert isinstance(loaded["payload"], Placeholder)
    assert torch.equal(loaded["state_dict"]["w"], WEIGHTS["state_dict"]["w"])
    assert not made.exists()


def test_the_same_trap_works_elsewhere(path: Path) -> None:  # the control of the test above
    made = path.parent / "made"
    torch.save({**WEIGHTS, "payload": TRAPS["open"](made)}, path)
    torch.load(path, weights_only=False)["payload"].close()
    assert made.exists()


def test_t27_no_module_is_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = path.parent / "imported"
    with module_of("theirs", Thing=type("Thing", (), {"__setstate__": lambda self, state: None})):
        thing = sys.modules["theirs"].Thing()
        thing.size = 3
        torch.save({**WEIGHTS, "thing": thing, "class": type(thing)}, path)
    (path.parent / "theirs.py").write_text(f"open({str(made)!r}, 'w').close()\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(path.parent)
    before = set(sys.modules)
    loaded = read_with_warning(path, r"thing \(theirs.Thing\), class \(theirs.Thing\)")
    assert set(sys.modules) == before
    assert not made.exists()
    assert repr(loaded["thing"]) == "<not loaded: theirs.Thing>"
    assert vars(loaded["thing"]) == {}
    assert loaded["class"] is type(loaded["thing"])
    assert loaded["class"].path == "theirs.Thing"


def with_pickle(path: Path, content: bytes) -> None:
    """A file of torch's, with ``content`` for its pickle."""
    torch.save(WEIGHTS, path)
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, record in records.items():
            new.writestr(name, content if name.endswith("/data.pkl") else record)


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


@pytest.mark.parametrize(
    ("module", "name"), [("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "TypedStorage")]
)
def test_t27_torch_itself_is_not_changed(path: Path, module: str, name: str) -> None:
    attributes = pickle.dumps((None, {"planted": 1}), protocol=2)[2:-1]
    content = b"\x80\x02" + named(module, name) + attributes + b"b."
    target = getattr(sys.modules[module], name)
    with_pickle(path, content)
    with pytest.raises(CheckpointError, match="has no state to be given"):
        read_foreign(path, str(path))
    assert not hasattr(target, "planted")
    pickle.loads(content)  # the control
    assert target.planted == 1
    del target.planted


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"(i" + b"os\ngetcwd\n.", "INST is not needed"),
        (b"(" + named("os", "getcwd") + b"o.", "OBJ is not needed"),
        (b"\x80\x02\x82\x01.", "EXT1 is not needed"),
        (b"Pstorage\n.", "PERSID is not needed"),
        (b"\x80\x02X\x03\x00\x00\x00abcQ.", "only the storage of a tensor"),
        (b"\x80\x02" + named("collections", "OrderedDict") + b"]R.", "arguments are a tuple"),
        (b"\x80\x02K\x01)R.", "int is nothing to be called"),
        (b"\x80\x02K\x01K\x02a.", "int is no container"),
        (b"\x80\x02" + named("_codecs", "encode") + b"U\x01aU\x03hex\x86R.", "encoded as latin1, not as 'hex'"),
        (b"\x80\x02" + named("torch.sparse", "FloatTensor") + b")R.", "nothing to be called"),
        (b"\x80\x02", "cut short"),
        (b"\xff", "cut short"),
    ],
)
def test_t27_what_plain_data_does_not_need_is_refused(path: Path, content: bytes, why: str) -> None:
    with_pickle(path, content)
    with pytest.raises(CheckpointError, match=why):
        read_foreign(path, str(path))


def test_t27_torchscript_is_not_run(path: Path) -> None:
    torch.save(WEIGHTS, path)
    with zipfile.ZipFile(path, "a") as archive:  # by this record torch knows an archive that it would run
        archive.writestr(archive.namelist()[0].replace("data.pkl", "constants.pkl"), b"")
    with pytest.raises(CheckpointError, match="TorchScript archive"):
        read_foreign(path, str(path))


def test_t27_a_tar_file_is_not_unpacked(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    with pytest.raises(CheckpointError, match="no format of torch"):
        read_foreign(path, str(path))


def test_t27_no_flipped_bit_does_more_than_spoil_the_file(path: Path) -> None:
    torch.save({**WEIGHTS, "payload": Calls(eval, "1"), "more": {"a": [1, (2.5, None)]}}, path)
    with zipfile.ZipFile(path) as archive:
        content = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    seen: Counter[str] = Counter()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        with_pickle(path, bytes(changed))
        with contextlib.suppress(UserWarning):
            try:
                read_foreign(path, str(path))
                seen["read"] += 1
            except CheckpointError:
                seen["CheckpointError"] += 1
    assert seen["CheckpointError"] > 100
    assert set(seen) <= {"read", "CheckpointError"}


# ---- the data comes back ---------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Table(dict[str, Any]):
    pass


class Row(list[Any]):
    pass


def test_what_torch_allows_comes_back_as_it_was(path: Path) -> None:
    shared = torch.arange(4)
    weights = OrderedDict(w=torch.ones(2, dtype=torch.bfloat16), p=torch.nn.Parameter(torch.ones(3)))
    weights._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    plain = {
        "state_dict": weights,
        "shared": [shared, shared[1:]],
        "numbers": [1, -1, 300, 70_000, 2**40, 2**70, 1.5, True, None, 1 + 2j],
        "texts": ["", "é", "x" * 300, b"\x00\xff", bytearray(b"ab")],
        "nested": {"a": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], 3: {"b"}},
        "counted": Counter("aab"),
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided],
        "left out": Colour.RED,
    }
    plain["twice"] = plain["nested"]
    torch.save(plain, path)
    loaded = read_with_warning(path, r"left out \(.*Colour\)")
    for key in ("numbers", "texts", "nested", "counted", "torch"):
        assert loaded[key] == plain[key]
        assert type(loaded[key]) is type(plain[key])
    assert loaded["twice"] is loaded["nested"]
    assert type(loaded["state_dict"]) is OrderedDict
    assert loaded["state_dict"]._metadata == {"": {"version": 2}}
    assert type(loaded["state_dict"]["p"]) is torch.nn.Parameter
    assert torch.equal(loaded["state_dict"]["w"], weights["w"])
    loaded["shared"][0][1] = 9
    assert loaded["shared"][1].tolist() == [9, 2, 3]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(path: Path, protocol: int) -> None:
    plain = {"a": frozenset({1}), "b": {2, 3}, "c": b"xyz", "d": bytearray(b"q"), "e": 2**3000, "f": "é" * 400}
    torch.save({**WEIGHTS, "plain": plain, "colour": Colour.RED}, path, pickle_protocol=protocol)
    loaded = read_with_warning(path)
    if protocol < 4:
        del plain["a"], loaded["plain"]["a"]  # of a frozenset there is only a name
    assert loaded["plain"] == plain
    assert torch.equal(loaded["state_dict"]["w"], WEIGHTS["state_dict"]["w"])


def test_what_is_done_to_a_placeholder_is_swallowed(path: Path) -> None:
    table, row = Table(a=1), Row([1, 2])
    table.note = "x"  # type: ignore[attr-defined]
    torch.save({**WEIGHTS, "table": table, "rows": [row, row], "after": 7}, path)
    loaded = read_with_warning(path, r"table \(.*Table\), rows/0 \(.*Row\), rows/1")
    assert isinstance(loaded["table"], Placeholder)
    assert loaded["rows"][0] is loaded["rows"][1]
    assert loaded["after"] == 7


@pytest.mark.parametrize(
    "module",
    [
        "pytorch_lightning.utilities.parsing", "lightning.pytorch.utilities.parsing",
        "lightning.fabric.utilities.data", "lightning_fabric.utilities.data",
    ],
)  # fmt: skip
def test_t27_an_attribute_dict_is_a_dictionary(path: Path, module: str) -> None:
    kind = type("AttributeDict", (dict,), {})
    with module_of(module, AttributeDict=kind):
        torch.save({**WEIGHTS, "hyper_parameters": kind(lr=0.1, inner=kind(depth=2))}, path)
    loaded = read(path)
    assert loaded["hyper_parameters"] == {"lr": 0.1, "inner": {"depth": 2}}
    assert type(loaded["hyper_parameters"]) is type(loaded["hyper_parameters"]["inner"]) is dict


def test_t27_a_namespace_is_one(path: Path) -> None:
    torch.save({**WEIGHTS, "hyper_parameters": argparse.Namespace(lr=0.1, colour=Colour.RED)}, path)
    loaded = read_with_warning(path, r"hyper_parameters/colour .*load_from_checkpoint\(path, colour=...\)")
    assert type(loaded["hyper_parameters"]) is argparse.Namespace
    assert loaded["hyper_parameters"].lr == 0.1


def test_a_class_as_a_key_needs_no_warning(path: Path) -> None:
    kind = type("EarlyStopping", (), {})
    with module_of("pytorch_lightning.callbacks.early_stopping", EarlyStopping=kind):
        torch.save({**WEIGHTS, "callbacks": {kind: {"wait_count": 2}}, "hparams_type": kind}, path)
    ((key, state),) = read(path)["callbacks"].items()
    assert issubclass(key, Placeholder)
    assert key.path == "pytorch_lightning.callbacks.early_stopping.EarlyStopping"
    assert state == {"wait_count": 2}


@pytest.mark.parametrize(
    "value",
    [
        np.float64(3.5), np.int32(-7), np.bool_(True), np.complex64(1 + 2j), np.str_("abc"), np.float16(0.5),
        np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(["a", "bcd"]),
        np.arange(3, dtype=">i4"),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_of_numpy_come_back(path: Path, value: Any) -> None:
    torch.save({**WEIGHTS, "value": value, "twice": [value, value]}, path)
    loaded = read(path)
    assert type(loaded["value"]) is type(value)
    assert loaded["value"].dtype == value.dtype
    assert np.array_equal(loaded["value"], value)
    assert loaded["twice"][0] is loaded["twice"][1]
    if isinstance(value, np.ndarray):
        loaded["value"][...] = loaded["value"]  # it can be written to


@pytest.mark.parametrize(
    "value", [np.array([Colour.RED], dtype=object), np.datetime64("2024-01-01"), np.dtype("f4"), np.float32], ids=repr
)
def test_other_objects_of_numpy_do_not(path: Path, value: Any) -> None:
    torch.save({**WEIGHTS, "value": value}, path)
    assert [where for where, _ in placeholders(read_with_warning(path, r"value \(numpy"))] == ["value"]


def test_numpy_is_not_imported_for_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({**WEIGHTS, "value": np.float64(1), "values": np.ones(2)}, path)
    monkeypatch.delitem(sys.modules, "numpy")
    loaded = read_with_warning(path, r"value \(numpy.generic\), values \(numpy.ndarray\)")
    assert isinstance(loaded["value"], Placeholder)
    assert "numpy" not in sys.modules


def test_a_tensor_of_an_unknown_class_is_left_out(path: Path) -> None:
    class Boxes(torch.Tensor):
        pass

    with module_of("theirs", Boxes=Boxes):
        torch.save({**WEIGHTS, "boxes": torch.ones(2).as_subclass(Boxes)}, path)
    loaded = read_with_warning(path, r"boxes \(theirs.Boxes\)")
    assert isinstance(loaded["boxes"], Placeholder)


def test_a_class_that_somebody_has_allowed_is_made(path: Path) -> None:
    torch.save({**WEIGHTS, "colour": Colour.RED, "row": argparse.Namespace(a=1)}, path)
    with torch.serialization.safe_globals([Colour]):
        assert read(path)["colour"] is Colour.RED


def test_it_can_be_read_to_another_device(path: Path) -> None:
    torch.save({**WEIGHTS, "colour": Colour.RED}, path)
    with pytest.warns(UserWarning, match="colour"):
        loaded = read_foreign(path, str(path), "meta")
    assert loaded is not None
    assert loaded["state_dict"]["w"].device.type == "meta"


def test_the_warning_is_short(path: Path) -> None:
    torch.save({**WEIGHTS, "many": [Colour.RED for _ in range(30)]}, path)
    read_with_warning(
        path, r"many/11 \([^)]*\) and 18 more\. Pass hyperparameters .*path, name=\.\.\.\); or, if you trust"
    )


def test_placeholders_are_found_in_what_holds_itself() -> None:
    held: list[Any] = [Placeholder()]
    held.append({"again": held, "space": argparse.Namespace(x=Placeholder)})
    assert [where for where, _ in placeholders(held)] == ["0", "1/space/x"]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_torchs_older_format(path: Path) -> None:
    shared = torch.arange(6.0)
    content = {"state_dict": {"w": shared, "v": shared[2:4]}, "hyper_parameters": {"colour": Colour.RED, "lr": 0.1}}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert is_legacy(path)
    loaded = read_with_warning(path, "hyper_parameters/colour")
    assert loaded["state_dict"]["v"].tolist() == [2, 3]
    assert loaded["state_dict"]["w"].untyped_storage()._cdata == loaded["state_dict"]["v"].untyped_storage()._cdata
    assert loaded["hyper_parameters"]["lr"] == 0.1


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7, 0.99])
def test_a_file_that_was_cut_short(path: Path, share: float, zipped: bool) -> None:
    torch.save({**WEIGHTS, "colour": Colour.RED}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=f"{path.name} is no checkpoint, or was cut short"):
        read_foreign(path, str(path))


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        read_foreign(path, str(path))


@pytest.mark.parametrize(
    "content",
    [{"model": Colour.RED}, [Colour.RED], Colour.RED, 3, {**WEIGHTS, "drivetrain_version": "1", "colour": Colour.RED}],
)
def test_what_is_no_checkpoint_of_another_trainer(path: Path, content: Any) -> None:
    torch.save(content, path)
    assert read_foreign(path, str(path)) is None


def test_a_version_of_lightnings_is_enough(path: Path) -> None:
    torch.save({"pytorch-lightning_version": "1.9.0", "weights": 1}, path)
    assert read(path)["weights"] == 1
