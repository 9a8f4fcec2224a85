"""Write plain values as YAML in block style, without a YAML library."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Collection, Mapping
from typing import Any

# Matches strings that need no quotes in any version of YAML.
_PLAIN = re.compile(r"[A-Za-z_/](?:[\w./@%+=~-]|:(?=[^\s]))*(?: (?!#)(?:[\w./@%+=~-]|:(?=[^\s]))+)*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
# Characters that YAML must escape, and lone surrogates, which UTF-8 cannot encode.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")

_KEYS = (str, int, float, bool, type(None))
# A longer key is written after "? ", because YAML readers reject other keys above 1024 bytes.
_LONGEST_KEY = 120


def dump(values: Mapping[Any, Any]) -> str:
    """Return ``values`` as a YAML document that every YAML reader can read.

    Mappings keep their order. Numbers, strings, booleans, ``None``, lists, tuples and mappings keep their types. Any
    other value is written as ``str(value)``.
    """
    return "\n".join(_mapping(values, (id(values),))) + "\n" if values else "{}\n"


def is_plain(value: Any) -> bool:
    """Return whether :func:`dump` keeps the type of ``value``."""
    if isinstance(value, Mapping):
        return all(isinstance(key, _KEYS) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def scalar(value: Any) -> str:
    """Return a number, string, boolean or ``None`` as YAML. Return any other value as ``str(value)``."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    # numpy's booleans are not numbers
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return json.dumps(bool(value))
    if isinstance(value, numbers.Integral):
        return _whole(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            return ".nan" if math.isnan(number) else (".inf" if number > 0 else "-.inf")
        text = repr(number)  # in YAML, 1e-05 is a string, because a float needs a decimal point
        return text if "." in text else text.replace("e", ".0e")
    return _text(str(value))


def _whole(number: int) -> str:
    try:
        return str(number)
    except ValueError:  # Python refuses to convert an integer with too many digits
        return hex(number)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS and text.isprintable():
        return text
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _mapping(values: Mapping[Any, Any], inside: tuple[int, ...]) -> list[str]:
    lines = []
    for key, value in values.items():
        name = scalar(key if isinstance(key, _KEYS) else str(key))
        if len(name) > _LONGEST_KEY:
            lines.append(f"? {name}")
            name = ""
        if (below := _collection(value, inside)) is None:
            lines.append(f"{name}: {scalar(value)}")
        elif len(below) == 1 and below[0] in ("{}", "[]", '"..."'):
            lines.append(f"{name}: {below[0]}")
        else:
            lines += [f"{name}:", *(f"  {line}" for line in below)]
    return lines


def _sequence(values: Collection[Any], inside: tuple[int, ...]) -> list[str]:
    lines = []
    for value in values:
        below = _collection(value, inside) or [scalar(value)]
        lines += [f"- {below[0]}", *(f"  {line}" for line in below[1:])]
    return lines


def _collection(value: Any, inside: tuple[int, ...]) -> list[str] | None:
    """Return the lines of a mapping, list or tuple; ``None`` for any other value."""
    if not isinstance(value, (Mapping, list, tuple)):
        return None
    if not value:
        return ["{}" if isinstance(value, Mapping) else "[]"]
    if id(value) in inside or len(inside) > 50:  # the value contains itself, or is nested too deeply
        return ['"..."']
    inside = (*inside, id(value))
    return _mapping(value, inside) if isinstance(value, Mapping) else _sequence(value, inside)
