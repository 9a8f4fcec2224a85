"""Encode values as data that ``torch.load(weights_only=True)`` reads, and decode the data.

``torch.load`` refuses many values, for example paths, enums and numpy arrays. Such a value becomes a dictionary with
two entries: ``{"__drivetrain__": kind, "value": data}``. Decoding imports no module and calls no function from the
file.

``torch.load`` can read all encoded values. For tensor subclasses and tensors with attributes, the encoder checks this:
it saves and loads the first tensor of each kind.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, time, timezone
from enum import Enum, Flag
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base import configs
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.tree import dtensor
from drivetrain.checkpoints import values
from drivetrain.checkpoints.foreign import Placeholder
from drivetrain.checkpoints.references import find, find_open, name_of
from drivetrain.checkpoints.values import Described as Described
from drivetrain.errors import CheckpointError, shown

MARKER = "__drivetrain__"

_LONGEST_TEXT = 200  # the maximum number of characters in a description
_MOST_BITS = 2000  # torch's weights-only reader supports integers of up to 255 bytes
_AS_IS = frozenset({type(None), bool, float, str, complex, bytearray, torch.device, torch.Size})
_KEYS = frozenset({type(None), bool, float, str})
_NAMED_BY_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_IN_PROGRESS = object()


def encode(
    value: Any, where: str, describe: bool = False, noted: list[str] | None = None, references: bool = True
) -> Any:
    """Return ``value`` as data that loads without running code. :func:`decode` restores the value.

    Lists, tuples, sets, deques and dictionaries keep their structure and type. An object of a subclass of ``dict`` or
    ``list`` becomes a plain dictionary or list. Tensors and the memory of numpy arrays are never copied.

    Args:
        value: any value.
        where: the path of ``value`` in the checkpoint, for messages; "" if paths begin with the keys of ``value``.
        describe: whether to store a description of a value that cannot be stored, instead of raising an error. One
            warning names these values.
        noted: a list to which the paths of the described values are added, instead of the warning.
        references: whether classes and functions may be stored by name.

    Raises:
        CheckpointError: a value cannot be stored, or contains itself. The message names the path of the value.
    """
    encoder = _Encoder(where, references, describe)
    encoded = encoder.run(value)
    if noted is not None:
        noted += encoder.noted
    elif encoder.noted:
        rank_zero_warn(
            f"The checkpoint keeps only a description of {', '.join(encoder.noted)}. "
            "Store numbers, texts, tensors, and lists and dictionaries of those instead."
        )
    return encoded


def decode(value: Any, where: str, noted: list[str] | None = None, references: bool = True) -> Any:
    """Reverse :func:`encode`. Containers are rebuilt, and tensors are returned unchanged.

    Classes, functions and enums are looked up in imported modules. If a name is not found, or if only a description was
    stored, the result has a :class:`Described` instead. One warning names these values.

    Args:
        value: the value that was read.
        where: the path of ``value`` in the checkpoint, for messages.
        noted: a list to which the paths of descriptions are added, instead of the warning.
        references: whether to look up classes and functions. If False, a :class:`Described` replaces them.

    Raises:
        CheckpointError: ``value`` does not come from :func:`encode`, or was encoded by a newer version of drivetrain.
    """
    decoder = _Decoder(where, references)
    decoded = decoder.run(value)
    if noted is not None:
        noted += decoder.noted
    else:
        warn_of_descriptions(decoder.noted)
    return decoded


def warn_of_descriptions(noted: Iterable[str]) -> None:
    """Issue one warning about all values that were restored only as descriptions."""
    if places := ", ".join(noted):
        rank_zero_warn(
            f"Some values in the checkpoint are restored as descriptions only: {places}. Import the modules that "
            "define the classes and functions before you load it; set values that were stored as descriptions yourself."
        )


def descriptions(value: Any) -> Iterator[Described | Placeholder | type[Placeholder]]:
    """Yield each :class:`Described` and each :class:`Placeholder` in a result of :func:`decode`."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (Described, Placeholder)) or (isinstance(item, type) and issubclass(item, Placeholder)):
            yield item
        elif id(item) not in seen and not configs.is_config(item):  # a config contains only plain values
            seen.add(id(item))
            if isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset, deque)):
                waiting += item
            elif isinstance(item, (Namespace, SimpleNamespace)):
                waiting += vars(item).values()
            elif isinstance(item, slice):
                waiting += [item.start, item.stop, item.step]


# ---- traversing a value ----------------------------------------------------------------------------------------------


class _Walk:
    """Traverses a value. Tracks the current path, detects cycles, and visits a shared object only once."""

    def __init__(self, where: str, references: bool) -> None:
        self.references = references
        self.noted: list[str] = []
        self._where = where
        self._steps: list[str] = []
        # The object and its result, by the object's id. While the object is stored, no other object gets its id.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def run(self, value: Any) -> Any:
        try:
            return self.walk(value)
        except RecursionError:
            raise CheckpointError(
                f"{self._where or 'A value'} is nested too deeply for a checkpoint. Store a flat list instead."
            ) from None

    def walk(self, value: Any) -> Any:
        if self.passes(value):
            return value
        _, result = self._seen.get(id(value), (None, None))
        if result is _IN_PROGRESS:
            raise CheckpointError(f"{self.place()} contains itself. Store a value without circular references.")
        if result is None:
            self._seen[id(value)] = value, _IN_PROGRESS
            result = self.visit(value)
            self._seen[id(value)] = value, result
        return result

    def below(self, step: str, value: Any) -> Any:
        self._steps.append(step)
        result = self.walk(value)
        self._steps.pop()
        return result

    def place(self) -> str:
        """Return the current path: ``callbacks['Mine']['history'][3]``."""
        steps = self._steps
        if not self._where and steps:  # show the first key, such as "['lr']", as lr
            return "".join([steps[0].removeprefix("['").removesuffix("']"), *steps[1:]])
        return self._where + "".join(steps) or "The value"

    def passes(self, value: Any) -> bool:
        """Return whether ``value`` needs no encoding. This method must be fast, because it is called for every leaf."""
        raise NotImplementedError

    def visit(self, value: Any) -> Any:
        raise NotImplementedError

    def entries(self, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        passes, below = self.passes, self.below
        return {
            # call the slow below() only if needed
            key: item if passes(item) else below(f"[{_text_of(key)}]", item)
            for key, item in mapping.items()
        }

    def items(self, sequence: Iterable[Any]) -> list[Any]:
        if _is_row_of_numbers(sequence):
            return list(sequence)
        passes, below = self.passes, self.below
        return [item if passes(item) else below(f"[{i}]", item) for i, item in enumerate(sequence)]


def _is_row_of_numbers(sequence: Iterable[Any]) -> bool:
    """Return whether ``sequence`` consists of 64-bit integers, such as a random state."""
    return {*map(type, sequence)} == {int} and min(sequence) >= -(2**63) and max(sequence) < 2**63


# ---- encoding --------------------------------------------------------------------------------------------------------


def _marked(kind: str, value: Any) -> dict[str, Any]:
    return {MARKER: kind, "value": value}


def _plain_keys(keys: Iterable[Any]) -> bool:
    return {*map(type, keys)} <= _KEYS or all(map(_plain_key, keys))


def _plain_key(key: Any) -> bool:
    kind = type(key)
    if kind in _KEYS:
        return True
    if kind is int:
        return bool(key.bit_length() < _MOST_BITS)
    return kind is tuple and _plain_keys(key)


def _text_of(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a user's __repr__ may raise anything
        return f"(its repr raised {type(error).__name__})"
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def _type_of(value: Any) -> str:
    kind = type(value)
    name: str = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} of dtype {value.dtype}" if name == "numpy.ndarray" else name


def _loads_again(value: Any) -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads ``value``."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # pickling a user's object may raise anything
        return False
    return True


class _Encoder(_Walk):
    def __init__(self, where: str, references: bool, describe: bool) -> None:
        super().__init__(where, references)
        self._describe = describe
        self._tried: dict[Any, bool] = {}
        self._sharded = dtensor()  # sharded tensors pass here, because the strategy checks them

    def passes(self, value: Any) -> bool:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            return not value.__dict__
        if kind is self._sharded:
            return True
        if kind is int:
            return bool(value.bit_length() < _MOST_BITS)
        # torch's weights-only reader does not support empty bytes
        return kind in _AS_IS or (kind is bytes and len(value) > 0)

    def visit(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict or kind is OrderedDict:  # the most frequent types
            return self._mapping(value)
        if (found := values.ENCODERS.get(kind)) is not None:
            return _marked(found[0], found[1](value))
        if isinstance(value, Enum):
            return self._enum(value)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            name = name_of(value) if self.references else None
            return self._refused(value) if name is None or find_open(name) is None else _marked("reference", name)
        if configs.is_config(value):  # before the next checks, because a config is also a mapping or a sequence
            return _marked("omegaconf", self.walk(configs.state_of(value)))
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return self._collection(value)
        if kind is Namespace or kind is SimpleNamespace:
            attributes = {key: self.below(f".{key}", item) for key, item in vars(value).items()}
            return _marked("namespace", [kind is Namespace, list(attributes.items())])
        if kind is slice:
            return _marked("slice", self.items((value.start, value.stop, value.step)))
        if kind is Described:
            return _marked("described", (value.type, value.text))
        if isinstance(value, Tensor):
            kinds = sorted((key, repr(type(item))) for key, item in vars(value).items())
            if self._loads(value, (kind, *kinds)):
                return value
        return self._rest(value)

    def _rest(self, value: Any) -> Any:
        if isinstance(value, (datetime, time)) and type(value) in (datetime, time):
            if type(value.tzinfo) in (type(None), timezone):  # other classes of time zones have their own rules
                return _marked(type(value).__name__, (value.isoformat(), value.fold))
        elif isinstance(value, _NAMED_BY_TORCH):
            return value if self._loads(value, value) else _marked("torch", str(value).removeprefix("torch."))
        elif (encoded := values.encode_numpy(value)) is not None:
            return _marked(encoded[0], self.items(encoded[1]))
        return self._refused(value)

    def _refused(self, value: Any) -> Any:
        if self._describe:
            self.noted.append(f"{self.place()} ({_type_of(value)})")
            return _marked("described", (_type_of(value), _text_of(value)))
        raise CheckpointError(
            f"{self.place()} is of type {_type_of(value)}: {_text_of(value)}. A checkpoint holds plain data only, "
            "because loading anything else could run code. Store numbers, texts, tensors, and lists and dictionaries "
            "of those instead, or pass allow_pickle=True to trainer.save_checkpoint."
        )

    def _enum(self, member: Enum) -> Any:
        kind = type(member)
        name, label = name_of(kind), member._name_  # an enum class may override ``name``
        if name is not None and label is not None and kind.__members__.get(label) is member:
            return _marked("enum", (name, label))
        if name is not None and isinstance(member, Flag):  # combined flags have no unique name
            return _marked("enum", (name, int(member.value)))
        return self._refused(member)

    def _mapping(self, mapping: Mapping[Any, Any]) -> Any:
        kind: Any = type(mapping) if type(mapping) in (OrderedDict, Counter, defaultdict) else dict
        entries = self.entries(mapping)
        if kind is not defaultdict and MARKER not in entries and _plain_keys(entries):
            rebuilt = entries if kind is dict else kind(entries)
            if kind is OrderedDict and vars(mapping):  # the attributes of a state_dict contain the versions of modules
                vars(rebuilt).update(self.below(".__dict__", vars(mapping)))
            return rebuilt
        pairs = [[self.below(f"[{_text_of(key)}]", key), item] for key, item in entries.items()]
        factory = None
        if kind is defaultdict:
            factory = self.below(".default_factory", mapping.default_factory)  # type: ignore[attr-defined]
        return _marked("mapping", [kind.__name__, pairs, factory])

    def _collection(self, collection: Any) -> Any:
        kind = type(collection)
        items = self.items(collection)
        if kind is tuple:
            return tuple(items)
        if isinstance(collection, list):
            return items
        if kind is set and _plain_keys(items):
            return set(items)
        if kind is set or kind is frozenset:
            return _marked(kind.__name__, items)
        if kind is deque:
            return _marked("deque", [items, collection.maxlen])
        if isinstance(collection, tuple) and hasattr(kind, "_fields") and (name := name_of(kind)) is not None:
            return _marked("namedtuple", [name, items])
        return self._refused(collection)

    def _loads(self, value: Any, sort: Any) -> bool:
        """Return whether torch can read ``value``. The method tries only the first value of each ``sort``, by writing
        and reading it in memory.
        """
        if sort not in self._tried:
            self._tried[sort] = _loads_again(value)
        return self._tried[sort]


# ---- decoding --------------------------------------------------------------------------------------------------------


def _enum(payload: Any) -> Any:
    name, label = payload
    kind = find(name)
    if issubclass(type(kind), type) and issubclass(kind, Enum):
        if isinstance(label, str) and label in kind.__members__:
            return kind.__members__[label]
        if isinstance(label, int) and issubclass(kind, Flag):
            with contextlib.suppress(ValueError):  # the enum's members may have changed since the save
                return kind(label)
    return Described(f"enum {name}", str(label))


def _namedtuple(payload: Any) -> Any:
    name, items = payload
    kind = find(name)
    if issubclass(type(kind), type) and issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(items):
        return tuple.__new__(kind, items)  # never call the class's own __new__
    return Described(f"namedtuple {name}", _text_of(tuple(items)))


def _mapping(payload: Any) -> Any:
    name, pairs, factory = payload
    entries = dict(pairs)
    if name == "defaultdict":
        return entries if isinstance(factory, Described) else defaultdict(factory, entries)
    return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[name](entries)


def _reference(name: str) -> Any:
    found = find_open(name)
    return Described("reference", name) if found is None else found


def _namespace(payload: Any) -> Any:
    is_argparse, pairs = payload
    rebuilt = Namespace() if is_argparse else SimpleNamespace()
    vars(rebuilt).update({str(key): item for key, item in pairs})
    return rebuilt


def _of_torch(name: str) -> Any:
    found = vars(torch)[name]
    if not isinstance(found, _NAMED_BY_TORCH):
        raise TypeError(f"torch.{name} is a {type(found).__name__}")
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    **values.DECODERS,
    "deque": lambda payload: deque(payload[0], payload[1]),
    "described": lambda payload: Described(str(payload[0]), str(payload[1])),
    "enum": _enum,
    "frozenset": frozenset,
    "mapping": _mapping,
    "namedtuple": _namedtuple,
    "namespace": _namespace,
    "omegaconf": configs.restored,
    "reference": _reference,
    "set": set,
    "slice": lambda payload: slice(*payload),
    "torch": _of_torch,
}
_WALKED = frozenset({dict, OrderedDict, Counter, list, tuple})


class _Decoder(_Walk):
    _inside = 0  # the number of encoded values around the current value; paths have no steps inside encoded values

    def passes(self, value: Any) -> bool:
        return type(value) not in _WALKED

    def below(self, step: str, value: Any) -> Any:
        return super().below("" if self._inside else step, value)

    def visit(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            return self.items(value)
        if kind is tuple:
            return tuple(self.items(value))
        if MARKER in value:
            return self._unmarked(value)
        rebuilt = self.entries(value)
        if kind is dict:
            return rebuilt
        rebuilt = kind(rebuilt)
        if vars(value):
            attributes = self.below(".__dict__", dict(vars(value)))
            if not isinstance(attributes, dict) or any(hasattr(kind, str(name)) for name in attributes):
                raise CheckpointError(f"{self.place()} in the checkpoint is damaged. Use another checkpoint.")
            vars(rebuilt).update(attributes)
        return rebuilt

    def _unmarked(self, value: dict[Any, Any]) -> Any:
        kind = value[MARKER]
        if not isinstance(kind, str) or kind not in _DECODERS or set(value) != {MARKER, "value"}:
            raise CheckpointError(
                f"{self.place()} in the checkpoint is stored in a way that this version does not know: {shown(kind)}. "
                "Use the version of drivetrain that wrote it, or a newer one."
            )
        self._inside += 1
        payload = self.walk(value["value"])
        self._inside -= 1
        try:
            if kind == "reference" and not self.references:
                decoded: Any = Described("reference", str(payload))
            else:
                decoded = _DECODERS[kind](payload)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.place()} in the checkpoint is damaged: its {kind} cannot be made from {shown(payload)}: "
                f"{error}. Use another checkpoint."
            ) from error
        if isinstance(decoded, Described):
            self.noted.append(f"{self.place()} ({decoded.type}: {decoded.text})")
        return decoded
