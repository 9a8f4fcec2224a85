"""Values as plain data and back: through a real file that the restricted reader reads, and without running anything."""

from __future__ import annotations

import functools
import io
import os
import random
import subprocess
import sys
import time
import types
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpoints.plain import MARKER, Described, decode, descriptions, encode
from drivetrain.errors import CheckpointError
from drivetrain.module.hparams import AttributeDict


class Colour(Enum):
    RED = 1
    CRIMSON = 1  # an alias
    BLUE = "b"


class Level(IntEnum):
    LOW = 1


class Word(str, Enum):
    YES = "yes"


class Permission(Flag):
    READ = 1
    WRITE = 2


class Bits(IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", "a b")


class Thing:
    """Nothing that a checkpoint can hold."""

    class Mode(Enum):
        DEEP = 3

    def __repr__(self) -> str:
        return "Thing()"

    def method(self) -> None: ...


def function() -> int:
    return 1


def read(encoded: Any) -> Any:
    """What ``encoded`` is after a file: the proof that the restricted reader takes it."""
    buffer = io.BytesIO()
    torch.save(encoded, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def back(value: Any) -> Any:
    return decode(read(encode(value, "here")), "here")


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Namespace, SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b)


# ---- there and back --------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, 1, -1.5, float("nan"), float("-inf"), "text", "\ud800", b"", b"\x00\xff", bytearray(b"x"), 1 + 2j,
    2**1999, 2**5000, -(2**5000), 10**700,
    Colour.RED, Colour.CRIMSON, Colour.BLUE, Level.LOW, Word.YES,
    Permission.READ, Permission.READ | Permission.WRITE, Permission(0), Bits.A | Bits.B, Bits(0), Bits(64),
    Thing.Mode.DEEP, Thing.Mode,
    [], (), {}, set(), frozenset(), deque(),
    [1, [2, (3, {"a": [4]})]], {1: 2, None: 3, False: 4, (1, "a"): 5, 0.5: 6},
    {1, "a", (2, 3)}, {Colour.RED, b"x", Path("x")}, frozenset({1, Level.LOW}),
    deque([1, Path("x")], maxlen=3),
    {Path("x"): Path("y"), b"k": 1, (1, Level.LOW): 2, np.int64(3): 4, 2**3000: 5},
    OrderedDict(b=1, a=Path("x")), OrderedDict([(Path("x"), 1)]), Counter("hello"), Counter([Colour.RED]),
    defaultdict(list, {"a": [1]}), defaultdict(None, {"a": 1}), defaultdict(int, {Path("x"): 1}),
    Point(1, Path("x")), Pair(1, (2, 3)),
    Namespace(lr=0.1, path=Path("x")), SimpleNamespace(a=[Colour.RED]), Namespace(**{MARKER: 1}),
    slice(1, None, 2), slice(Path("a"), "b"), range(3),
    int, str, dict, Colour, Thing, Path, OrderedDict, nn.ReLU, nn.Linear, torch.optim.Adam, Tensor, np.float32,
    function, torch.nn.functional.relu, torch.nn.functional.gelu,
    torch.float16, torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([1, 2]), torch.strided,
    torch.channels_last, torch.per_tensor_affine,
    {MARKER: "path"}, {MARKER: "path", "value": ("Path", "x")}, {"a": {MARKER: {MARKER: 1}}},
]  # fmt: skip
# A value's repr may hold an address or the order of a set, which differ between the workers of a parallel run.
IDS = [f"{type(value).__name__} {number}" for number, value in enumerate(VALUES)]


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_t27_it_comes_back_as_it_was(value: Any) -> None:
    again = back(value)
    assert same(again, value)
    assert same(back([{"deep": (value,)}]), [{"deep": (value,)}])
    if isinstance(value, (Enum, type)) and not isinstance(value, Flag):
        assert again is value


def test_a_default_factory_and_a_length_work_again() -> None:
    histories = back(defaultdict(list))
    histories["new"].append(1)
    assert histories == {"new": [1]}
    window = back(deque([1, 2], maxlen=2))
    window.append(3)
    assert window == deque([2, 3])


def test_subclasses_of_containers_become_the_plain_kind() -> None:
    class Items(list[Any]):
        pass

    mapping = types.MappingProxyType({"a": Path("x")})
    assert same(back(AttributeDict(a=AttributeDict(b=1))), {"a": {"b": 1}})
    assert same(back(Items([1, Path("x")])), [1, Path("x")])
    assert same(back(mapping), {"a": Path("x")})


def test_what_is_plain_already_reads_without_this_package() -> None:
    plain = {"a": [1, 2.0, "x", None, True], "b": (1, {2: {3}}), "w": torch.ones(2), "o": OrderedDict(c=Counter("x"))}
    assert same(read(encode(plain, "")), plain)


def test_the_caller_keeps_what_was_encoded() -> None:
    state = {"history": [1], "path": Path("x"), "seen": {1}}
    encoded = encode(state, "")
    encoded["history"].append(2)
    encoded["seen"].add(2)
    assert state == {"history": [1], "path": Path("x"), "seen": {1}}


def test_what_is_shared_stays_shared() -> None:
    shared = [Path("x")]
    again = back({"a": shared, "b": (shared,)})
    assert again["a"] is again["b"][0]
    wide: Any = [1]
    for _ in range(60):  # 2**60 lists, if each were visited whenever it is met
        wide = [wide, wide]
    assert sum(1 for _ in descriptions(back(wide))) == 0


def test_a_state_dict_keeps_its_metadata() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = module.state_dict()
    again = back(state)
    assert same(again, state)
    assert again._metadata == state._metadata
    assert again._metadata["1"] == {"version": 2}
    module.load_state_dict(again)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_tensors_are_passed_on() -> None:
    tensors = [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2]
    encoded = encode(tensors, "")
    assert all(ours is theirs for ours, theirs in zip(encoded, tensors, strict=True))
    decoded = decode(encoded, "")
    assert all(ours is theirs for ours, theirs in zip(decoded, tensors, strict=True))


class OwnTensor(Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).as_subclass(OwnTensor), nn.UninitializedParameter()],
    ids=["a subclass", "no weights yet"],
)
def test_a_tensor_that_would_not_load_is_refused(tensor: Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"state_dict\['w'\] is of type .*(OwnTensor|UninitializedParameter)"):
        encode({"w": tensor}, "state_dict")


def test_a_tensor_with_attributes_is_kept_if_they_load() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.group = "a"  # type: ignore[attr-defined]
    assert back([weight])[0].group == "a"
    weight.owner = Thing()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="parameter.Parameter"):
        encode([weight], "here")


def test_the_state_of_a_large_optimizer_takes_little_time() -> None:
    moment = torch.zeros(1)
    state = {i: {"step": moment, "exp_avg": moment, "exp_avg_sq": moment} for i in range(100_000)}
    start = time.process_time()
    decode(encode({"state": state}, ""), "")
    assert time.process_time() - start < 20  # about one; writing such a file takes longer than this


# ---- random structures -----------------------------------------------------------------------------------------------


def a_key(rng: random.Random) -> Any:
    return rng.choice([
        lambda: rng.randint(-5, 5), lambda: rng.choice("abc"), lambda: MARKER, lambda: None, lambda: 0.5,
        lambda: Path(rng.choice("abc")), lambda: Level.LOW, lambda: (rng.randint(0, 3), Path("t")), lambda: b"key",
    ])()  # fmt: skip


def a_value(rng: random.Random, depth: int = 4) -> Any:
    def several(make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(rng.randint(0, 3))]

    def below() -> Any:
        return a_value(rng, depth - 1)

    leaves: list[Callable[[], Any]] = [
        lambda: rng.choice(VALUES[:30]), lambda: rng.choice(VALUES), lambda: torch.rand(rng.randint(0, 3)),
        lambda: np.array([rng.random() for _ in range(rng.randint(0, 3))], rng.choice(["f4", ">f8", "c8"])),
        lambda: np.float32(rng.random()), lambda: Decimal(rng.randint(0, 99)) / 7,
    ]  # fmt: skip
    containers: list[Callable[[], Any]] = [
        lambda: several(below), lambda: tuple(several(below)), lambda: deque(several(below)),
        lambda: dict(zip(several(lambda: a_key(rng)), several(below), strict=False)),
        lambda: OrderedDict((a_key(rng), below()) for _ in range(2)),
        lambda: {MARKER: below(), "value": below()}, lambda: Point(below(), below()),
        lambda: set(several(lambda: a_key(rng))), lambda: frozenset(several(lambda: a_key(rng))),
        lambda: Namespace(a=below(), b=below()), lambda: defaultdict(list, {a_key(rng): below()}),
    ]  # fmt: skip
    return rng.choice(leaves if depth == 0 else leaves + containers * 2)()


@pytest.mark.parametrize("seed", range(20))
def test_random_structures_come_back_as_they_were(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        value = a_value(rng)
        assert same(back(value), value), value


# ---- what cannot be stored -------------------------------------------------------------------------------------------


def local() -> Any:
    class Inside(Enum):
        ONE = 1

    return Inside


LOCAL = local()
LocalPair = type("Hidden", (Point,), {"__module__": "nowhere"})


class OwnText(str):
    pass


class OwnNumber(int):
    pass


REFUSED: list[tuple[str, Any, str]] = [
    ("an object", Thing(), "test_plain.Thing: Thing()"),
    ("a lambda", lambda: 1, "function: <function"),
    ("a local class", LOCAL, "enum.EnumMeta|enum.EnumType"),
    ("a member of one", LOCAL.ONE, "Inside"),
    ("a method", Thing().method, "method: <bound method"),
    ("a partial", functools.partial(int, "1"), "functools.partial"),
    ("a generator", (i for i in [1]), "generator"),
    ("a random generator", torch.Generator(), "torch._C.Generator"),
    ("a lazy named tuple", LocalPair(1, 2), "nowhere.Hidden"),
    ("a result of torch", torch.ones(2).max(0), "torch.return_types.max"),
    ("a text of its own class", OwnText("x"), "OwnText: 'x'"),
    ("a number of its own class", OwnNumber(1), "OwnNumber: 1"),
    ("a module", nn.Linear(1, 1), "Linear"),
    ("an array of objects", np.array([Thing()]), "numpy.ndarray of dtype object"),
    ("a structured array", np.zeros(1, "i4,f4"), "numpy.ndarray of dtype"),
    ("a masked array", np.ma.masked_array([1], [True]), "MaskedArray"),
    ("a long double", np.longdouble(1), "numpy.longdouble|numpy.float128|numpy.float64"),
    ("a time zone with rules", datetime(2020, 1, 1, tzinfo=type("Zone", (timezone.__base__,), {})()), "datetime"),
    ("a program", subprocess.Popen, "subprocess.Popen"),
    ("a command", os.system, "builtin_function_or_method"),
    ("a loader", torch.load, "function: <function load"),
    ("a python module", os, "module"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_stored_is_refused_by_its_place(value: Any, message: str) -> None:
    state = {"MyCallback": {"history": [0, 1, 2, value]}}
    with pytest.raises(CheckpointError) as caught:
        encode(state, "callbacks")
    assert str(caught.value).startswith("callbacks['MyCallback']['history'][3] is of type ")
    assert any(part in str(caught.value) for part in message.split("|"))
    assert str(caught.value).endswith(
        "Store numbers, texts, tensors, and lists and dictionaries of those instead, "
        "or pass allow_pickle=True to trainer.save_checkpoint."
    )


@pytest.mark.parametrize("value", [case[1] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_or_is_described(value: Any) -> None:
    with pytest.warns(UserWarning, match=r"keeps only a description of \['deep'\]\[0\]|of deep\[0\] \("):
        encoded = encode({"deep": [value], "lr": 0.1}, "", describe=True)
    with pytest.warns(UserWarning, match=r"restored as descriptions only: deep\[0\] \("):
        again = decode(read(encoded), "")
    assert again["lr"] == 0.1
    (described,) = again["deep"]
    assert type(described) is Described
    assert list(descriptions(again)) == [described]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {Thing(): 1}}, "x['a'][Thing()]"),
        ([(1, {2, Thing})], None),
        ([(1, {"s": frozenset({Thing()})})], "x[0][1]['s'][0]"),
        (Namespace(a=[Thing()]), "x.a[0]"),
        (Point(1, Thing()), "x[1]"),
        (deque([Thing()]), "x[0]"),
        (defaultdict(lambda: 1), "x.default_factory"),
    ],
)
def test_places_lead_through_every_container(value: Any, place: str | None) -> None:
    if place is None:
        assert same(back(value), value)
    else:
        with pytest.raises(CheckpointError) as caught:
            encode(value, "x")
        assert str(caught.value).startswith(f"{place} is of type ")


def test_one_warning_names_all_descriptions() -> None:
    value = {"a": Thing(), "b": {"c": [lambda: 1]}, "lr": 1}
    with pytest.warns(UserWarning, match="keeps only a description") as caught:
        encoded = encode(value, "", describe=True)
    assert len(caught) == 1
    assert f"a ({__name__}.Thing), b['c'][0] (function)" in str(caught[0].message)
    noted: list[str] = []
    encode(value, "hp", describe=True, noted=noted)
    assert noted == [f"hp['a'] ({__name__}.Thing)", "hp['b']['c'][0] (function)"]
    assert same(decode(encoded, "", noted=[])["a"], Described(f"{__name__}.Thing", "Thing()"))
    assert repr(decode(encoded, "", noted=[])["a"]) == f"<only described: {__name__}.Thing: Thing()>"


def test_descriptions_are_short_and_never_fail() -> None:
    class Loud:
        def __repr__(self) -> str:
            return "very\nlong " * 1000

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("broken")

    noted: list[str] = []
    loud, broken = decode(encode([Loud(), Broken()], "", describe=True, noted=noted), "", noted=noted)
    assert len(loud.text) == 200
    assert loud.text.startswith("very long very long")
    assert broken.text == "(its repr raised RuntimeError)"
    with pytest.raises(CheckpointError, match="its repr raised RuntimeError"):
        encode(Broken(), "x")


def test_a_description_is_stored_again_without_a_warning() -> None:
    described = Described("a.B", "B()")
    assert read(encode([described], "")) == [{MARKER: "described", "value": ("a.B", "B()")}]


def test_descriptions_are_found_wherever_they_are() -> None:
    described = Described("a.B", "B()")
    for value in (
        [described], (1, described), {"a": described}, {described: 1}, {described}, frozenset({described}),
        deque([described]), Namespace(a=described), SimpleNamespace(a=[described]), slice(1, described),
        defaultdict(list, a=[described]), described,
    ):  # fmt: skip
        assert list(descriptions(value)) == [described]
    assert list(descriptions([1, "a", {"b": (2,)}])) == []


def test_what_contains_itself_is_an_error() -> None:
    circle: dict[str, Any] = {"a": [1]}
    circle["a"].append(circle)
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] contains itself\. Store a value without"):
        encode(circle, "state")
    with pytest.raises(CheckpointError, match="contains itself"):
        decode(circle, "state")


def test_what_is_nested_without_end_is_an_error() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for work in (encode, decode):
        with pytest.raises(CheckpointError, match="state is nested too deeply"):
            work(deep, "state")


def test_functions_can_be_forbidden() -> None:
    with pytest.raises(CheckpointError, match=r"lr_schedulers\['f'\] is of type function"):
        encode({"f": function}, "lr_schedulers", references=False)
    with pytest.warns(UserWarning, match="restored as descriptions only"):
        again = decode(encode({"get_lr": function}, ""), "", references=False)
    assert again == {"get_lr": Described("reference", f"{__name__}:function")}


# ---- a file that means harm ------------------------------------------------------------------------------------------


def marked(kind: str, value: Any) -> dict[str, Any]:
    return {MARKER: kind, "value": value}


@pytest.mark.parametrize("kind", ["reference", "enum", "namedtuple"])
def test_t27_nothing_is_imported_because_a_file_names_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "harmful_on_import.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    before = set(sys.modules)
    try:
        for name in ("harmful_on_import:Thing", "antigravity:geohash", "turtledemo:x", "torch.utils.cpp_extension.x:y"):
            payload = name if kind == "reference" else (name, [1])
            with pytest.warns(UserWarning, match=f"restored as descriptions only.*{name}"):
                (again,) = decode([marked(kind, payload)], "")
            assert type(again) is Described
    finally:
        sys.path.remove(str(tmp_path))
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "posix:system", "subprocess:Popen", "subprocess:run", "builtins:eval", "builtins:exec",
        "builtins:open", "builtins:__import__", "importlib:import_module", "runpy:run_path", "pickle:loads",
        "_pickle:loads", "ctypes:CDLL", "shutil:rmtree", "code:InteractiveInterpreter", "operator:methodcaller",
        "functools:partial", "torch.serialization:load", "torch.hub:load", "torch.storage:_load_from_bytes",
        "torch:PyTorchFileReader", "numpy:load", "numpy:memmap", "drivetrain.base.registry:load", "pathlib:os.system",
        "drivetrain.checkpoints.file:TorchCheckpointIO", "drivetrain.checkpoints.file:os.replace",
        "collections:_sys.exit", "pathlib:Path.unlink", "datetime:sys.exit", "torch.nn.functional:torch.load",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["reference", "enum", "namedtuple"])
def test_t27_what_could_do_harm_is_no_more_than_a_description(kind: str, name: str) -> None:
    payload: Any = name if kind == "reference" else (name, ["touch", "x"])
    noted: list[str] = []
    (again,) = decode(read([marked(kind, payload)]), "", noted=noted)
    assert type(again) is Described
    assert len(noted) == 1
    with pytest.warns(UserWarning, match="descriptions only"):
        factory = decode([marked("mapping", ["defaultdict", [], marked("reference", name)])], "")
    assert factory == [{}]
    assert type(factory[0]) is dict


class Recorder:
    """Called, built or looked into, it says so."""

    calls: list[str] = []  # noqa: RUF012

    def __new__(cls, *args: Any) -> Any:
        cls.calls.append("new")
        return super().__new__(cls)


class Watched(NamedTuple):
    x: int


class WatchedPoint(Watched):
    def __new__(cls, *args: Any) -> Any:
        Recorder.calls.append("new tuple")
        return super().__new__(cls, *args)


def test_t27_nothing_that_a_file_names_is_called() -> None:
    assert back(Recorder) is Recorder
    assert same(decode(marked("namedtuple", (f"{__name__}:WatchedPoint", [1])), ""), tuple.__new__(WatchedPoint, [1]))
    assert decode(marked("enum", (f"{__name__}:Recorder", 1)), "", noted=[]) == Described(
        f"enum {__name__}:Recorder", "1"
    )
    assert Recorder.calls == []


def test_an_enum_that_lost_a_member_is_described() -> None:
    for label in ("GONE", "__class__", "name"):
        noted: list[str] = []
        decode({"mode": marked("enum", (f"{__name__}:Colour", label))}, "", noted=noted)
        assert noted == [f"mode (enum {__name__}:Colour: {label})"]
    assert decode(marked("enum", (f"{__name__}:Permission", 64)), "", noted=[]) == Described(
        f"enum {__name__}:Permission", "64"
    )


def test_a_named_tuple_that_grew_is_described() -> None:
    again = decode(marked("namedtuple", (f"{__name__}:Point", [1, 2, 3])), "", noted=[])
    assert again == Described(f"namedtuple {__name__}:Point", "(1, 2, 3)")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({MARKER: "path"}, "stored in a way that this version does not know: 'path'"),
        ({MARKER: "teleporter", "value": 1}, "does not know: 'teleporter'. Use the version of drivetrain that wrote"),
        ({MARKER: ["path"], "value": 1}, "does not know"),
        ({MARKER: "path", "value": 1, "more": 2}, "does not know"),
        (marked("path", 1), "damaged: its path cannot be made from 1"),
        (marked("path", ("Path", 3)), "damaged: its path"),
        (marked("path", ("PosixPath2", "x")), "damaged: its path"),
        (marked("mapping", ["UserDict", [], None]), "damaged: its mapping"),
        (marked("mapping", ["dict", [[[1], 2]], None]), "damaged: its mapping"),
        (marked("mapping", ["defaultdict", [], 3]), "damaged: its mapping"),
        (marked("set", [[1]]), "damaged: its set"),
        (marked("slice", []), "damaged: its slice"),
        (marked("enum", ("a",)), "damaged: its enum"),
        (marked("enum", (1, "a")), "damaged: its enum"),
        (marked("reference", 3), "damaged: its reference"),
        (marked("reference", ["a"]), "damaged: its reference"),
        (marked("torch", "load"), "damaged: its torch"),
        (marked("torch", "nothing"), "damaged: its torch"),
        (marked("namespace", [True, 3]), "damaged: its namespace"),
        (marked("deque", [[1], "a"]), "damaged: its deque"),
    ],
)
def test_what_is_damaged_is_a_checkpoint_error(stored: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decode({"a": [stored]}, "callbacks")
    assert "callbacks['a'][0] in the checkpoint" in str(caught.value)
    assert message in str(caught.value)


def test_any_payload_ends_in_a_value_or_in_a_checkpoint_error() -> None:
    rng, kinds = random.Random(1), list(decode.__globals__["_DECODERS"])
    outcomes = Counter[str]()
    for _ in range(4000):
        payload = read(encode(a_value(rng, 2), ""))
        try:
            decode({"x": marked(rng.choice(kinds), payload)}, "", noted=[])
            outcomes["value"] += 1
        except CheckpointError:
            outcomes["error"] += 1
    assert outcomes["value"] > 100
    assert outcomes["error"] > 100


def test_a_timedelta_is_no_offset() -> None:
    assert back(timezone(timedelta(hours=5))) == timezone(timedelta(hours=5))
    assert same(back(PureWindowsPath("a/b")), PureWindowsPath("a/b"))
    assert same(back(PurePosixPath("a/b")), PurePosixPath("a/b"))
