"""Encode paths, times, numbers and numpy arrays as data that ``torch.load(weights_only=True)`` accepts.

``ENCODERS`` has an entry for each type: the type's stored name, and a function that returns a value's data.
``DECODERS`` has functions that rebuild the values. On wrong data, a decoder may raise any exception of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from math import prod
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID

import torch


@dataclass(frozen=True, repr=False)
class Described:
    """A description of a value that is not in the checkpoint, or of a class or function that this process cannot find.

    Attributes:
        type: the name of the value's class; or the name of the class or function that was not found.
        text: the value's ``repr``, which may be shortened.
    """

    type: str
    text: str

    def __repr__(self) -> str:
        return f"<only described: {self.type}: {self.text}>"


_PATHS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Path, PurePosixPath, PureWindowsPath)}


def _elapsed(value: timedelta) -> tuple[int, int, int]:
    return value.days, value.seconds, value.microseconds


ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    # A Path is restored as a Path of the machine that reads it, which may be Posix or Windows.
    **{kind: ("path", lambda value: ("Path", str(value))) for kind in (PosixPath, WindowsPath)},
    **{kind: ("path", lambda value: (type(value).__name__, str(value))) for kind in (PurePosixPath, PureWindowsPath)},
    bytes: ("bytes", list),
    date: ("date", date.isoformat),
    Decimal: ("decimal", str),
    Fraction: ("fraction", lambda value: f"{value.numerator:x}/{value.denominator:x}"),
    int: ("int", hex),
    range: ("range", lambda value: tuple(hex(part) for part in (value.start, value.stop, value.step))),
    timedelta: ("timedelta", _elapsed),
    timezone: ("timezone", lambda value: _elapsed(value.utcoffset(None))),
    UUID: ("uuid", lambda value: value.hex),
}


def _typed(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__} is expected, not a {type(value).__name__}")
    return value


def _fraction(text: str) -> Fraction:
    numerator, denominator = (int(part, 16) for part in text.split("/"))
    return Fraction(numerator, denominator)


# ---- numpy: only if it is already imported ---------------------------------------------------------------------------

_NUMBERS = "biufc"
_TEXTS = "SU"
_TIMES = "mM"


def encode_numpy(value: Any) -> tuple[str, list[Any]] | None:
    """Return the stored name of the type and the data of a numpy array or number. Return ``None`` for an array of
    objects, and for any other value.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.generic, numpy.ndarray)) or not _is_storable(value.dtype):
        return None
    if isinstance(value, numpy.generic):
        return "numpy number", [value.dtype.str, int(value.view("i8")) if value.dtype.kind in _TIMES else value.item()]
    if type(value) is not numpy.ndarray:  # a masked array, for example, contains more than numbers
        return None
    flat = numpy.ascontiguousarray(value).reshape(-1)
    if not flat.flags.writeable:
        flat = flat.copy()  # torch shares memory only with writable arrays
    data = torch.from_numpy(flat.view(numpy.uint8)) if flat.nbytes else torch.empty(0, dtype=torch.uint8)
    return "numpy array", [value.dtype.str, list(value.shape), data]


def _is_storable(dtype: Any) -> bool:
    # "g" and "G" are long doubles, which differ between machines
    return dtype.kind in _NUMBERS + _TEXTS + _TIMES and dtype.char not in "gG"


def _numpy_type(text: str) -> Any:
    dtype = sys.modules["numpy"].dtype(_typed(str, text))
    if not _is_storable(dtype):  # for an array of objects, the file would contain addresses of objects
        raise TypeError(f"dtype {text} is not stored in checkpoints")
    return dtype


def _numpy_number(payload: Any) -> Any:
    text, value = payload
    if "numpy" not in sys.modules:
        return Described(f"numpy number {text}", "numpy is not imported")
    dtype = _numpy_type(text)
    if dtype.kind in _TIMES:
        return sys.modules["numpy"].array(value, "i8").view(dtype)[()]
    return dtype.type(value)


def _numpy_array(payload: Any) -> Any:
    text, shape, data = payload
    if "numpy" not in sys.modules:
        return Described(f"numpy array {text}", "numpy is not imported")
    if _typed(torch.Tensor, data).is_meta:
        return Described(f"numpy array {text}", "it was read to the meta device, which holds no numbers")
    dtype, dimensions = _numpy_type(text), tuple(_typed(int, size) for size in shape)
    if data.numel() != prod(dimensions) * dtype.itemsize or min(dimensions, default=0) < 0:
        raise ValueError(f"{data.numel()} bytes are no {dimensions} of {text}")
    if not data.numel():
        return sys.modules["numpy"].zeros(dimensions, dtype)
    return data.cpu().numpy().view(dtype).reshape(dimensions)


DECODERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda payload: bytes(_typed(list, payload)),
    "date": date.fromisoformat,
    "datetime": lambda payload: datetime.fromisoformat(payload[0]).replace(fold=payload[1]),
    "decimal": lambda text: Decimal(_typed(str, text)),
    "fraction": _fraction,
    "int": lambda text: int(_typed(str, text), 16),
    "numpy array": _numpy_array,
    "numpy number": _numpy_number,
    "path": lambda payload: _PATHS[payload[0]](_typed(str, payload[1])),
    "range": lambda payload: range(*(int(part, 16) for part in payload)),
    "time": lambda payload: time.fromisoformat(payload[0]).replace(fold=payload[1]),
    "timedelta": lambda payload: timedelta(*payload),
    "timezone": lambda payload: timezone(timedelta(*payload)),
    "uuid": lambda text: UUID(hex=_typed(str, text)),
}
