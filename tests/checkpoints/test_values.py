"""Single values as data: each comes back equal and of its own type; data that does not fit is an error."""

from __future__ import annotations

import io
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

from drivetrain.checkpoints.plain import MARKER, Described, decode, encode
from drivetrain.errors import CheckpointError

EAST = timezone(timedelta(hours=5, minutes=30, seconds=1))


def back(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(encode(value, "here"), buffer)
    buffer.seek(0)
    return decode(torch.load(buffer, weights_only=True), "here")


@pytest.mark.parametrize(
    "value",
    [
        Path("a/b"), Path("."), Path("/"), PurePosixPath("a\\b"), PureWindowsPath("C:/x"),
        date(1, 1, 1), datetime(2024, 2, 29, 12, 30, 1, 5), datetime(2024, 1, 1, tzinfo=timezone.utc),
        datetime(999, 1, 1, tzinfo=EAST), time(1, 2, 3, 4), time(1, tzinfo=EAST),
        timedelta(days=-1, seconds=5, microseconds=7), timedelta.max, timezone.utc, EAST,
        Decimal("1.10"), Decimal("-Infinity"), Fraction(-1, 3), Fraction(2**3000, 7),
        UUID("12345678123456781234567812345678"), range(0), range(5, -5, -2), range(2**80), 2**4000, -(2**4000), b"",
    ],
    ids=lambda value: f"{type(value).__name__} {value}"[:50],
)  # fmt: skip
def test_t27_values_come_back(value: Any) -> None:
    again = back(value)
    assert type(again) is type(value)
    assert again == value
    assert str(again) == str(value)


def test_the_second_of_two_equal_hours_is_kept() -> None:
    assert back(datetime(2024, 10, 27, 2, fold=1)).fold == 1
    assert back(time(2, fold=1)).fold == 1


@pytest.mark.parametrize(
    "text", ["b1", "i1", "u2", "<i4", ">i4", "u8", "f2", ">f4", "f8", "c8", "c16", "S5", "U3", "M8[ns]", "m8[2h]", "m8"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4), (1, 1, 6)])
def test_t27_arrays_come_back(text: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    array = np.arange(1, 1 + count).astype(text).reshape(shape)
    again = back(array)
    assert type(again) is np.ndarray
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()
    again[...] = array  # it can be written


def test_arrays_of_any_layout_come_back() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    for view in (array.T, array[:, ::-1, ::2], np.asfortranarray(array), np.broadcast_to(array, (2, 2, 3, 4)), frozen):
        assert np.array_equal(back(view), view)


def test_an_array_is_not_copied() -> None:
    array = np.zeros(4, "f4")
    data = encode(array, "")["value"][2]
    array[:] = 1
    assert torch.equal(data.view(torch.float32), torch.ones(4))


@pytest.mark.parametrize(
    "value",
    [
        np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.float16(0.1), np.float32(0.1), np.float64(0.1),
        np.complex64(1 + 2j), np.str_("x"), np.str_(""), np.bytes_(b"x"), np.bytes_(b""),
        np.datetime64("2024-01-01"), np.datetime64("NaT"), np.datetime64(5, "25s"), np.timedelta64(5, "ns"),
        np.timedelta64(5),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)  # fmt: skip
def test_t27_numbers_of_numpy_come_back(value: Any) -> None:
    again = back(value)
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert again.tobytes() == value.tobytes()


def marked(kind: str, value: Any) -> dict[str, Any]:
    return {MARKER: kind, "value": value}


BYTES = torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bytes", 10**12), ("bytes", [300]), ("date", 5), ("date", "yesterday"), ("datetime", "2024"),
        ("datetime", ("x", 0)), ("datetime", ("2024-01-01", 7)), ("decimal", (0, (1,), 2)), ("decimal", "one"),
        ("fraction", "1/0"), ("fraction", "1"), ("fraction", 1), ("int", 5), ("int", "0xg"), ("range", ()),
        ("range", (1,)), ("range", ("0x1", "0x2", "0x0")), ("time", ("25:00", 0)), ("timedelta", (10**12, 0, 0)),
        ("timezone", (5, 0, 0)), ("uuid", "12"), ("uuid", 12),
        ("numpy number", "f"), ("numpy number", ("O", 3)), ("numpy number", ("f4", "x")), ("numpy number", (4, 1)),
        ("numpy number", ("M8[ns]", "now")), ("numpy array", ("O", [1], BYTES)), ("numpy array", ("O8", [1], BYTES)),
        ("numpy array", ("i4,O", [1], BYTES)), ("numpy array", ("V8", [1], BYTES)),
        ("numpy array", ("f8", [2], BYTES)), ("numpy array", ("f8", [-1], BYTES)),
        ("numpy array", ("f8", [-1, -1], BYTES)), ("numpy array", ("f8", 1, BYTES)), ("numpy array", ("x", [1], BYTES)),
        ("numpy array", ("f8", [1], b"12345678")), ("numpy array", ("f8", ["1"], BYTES)),
        ("numpy array", ("f4", [8], torch.zeros(8, 4))), ("numpy array", ("f8", [0, -3], BYTES[:0])),
    ],
    ids=lambda part: str(part)[:30],
)  # fmt: skip
def test_data_that_does_not_fit_is_an_error(kind: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"state\['a'\] in the checkpoint is damaged: its {kind} cannot be made"):
        decode({"a": marked(kind, value)}, "state")


def test_without_numpy_its_values_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = encode({"array": np.ones(2), "number": np.float32(1)}, "")
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.warns(UserWarning, match="array .*numpy is not imported.*number .*numpy is not imported"):
        again = decode(stored, "")
    assert "numpy" not in sys.modules
    assert again["number"] == Described("numpy number <f4", "numpy is not imported")
    assert encode([1.0], "") == [1.0]


def test_an_array_that_was_not_read_is_described() -> None:
    stored = encode(np.ones(2), "here")
    stored["value"][2] = stored["value"][2].to("meta")
    with pytest.warns(UserWarning, match="here .numpy array <f8: it was read to the meta device"):
        assert isinstance(decode(stored, "here"), Described)
