"""Read checkpoints with pickled objects, without importing or calling the classes and functions in them.

A pickle is a small program. This module contains Python's interpreter of pickles, restricted to harmless instructions.
The interpreter resolves the names that ``torch.load(weights_only=True)`` resolves, and a few more names of plain data.
Every other name becomes a :class:`Placeholder`, which accepts all operations and does nothing. Simpler solutions fail:

- ``torch.load(weights_only=True)`` with placeholders in ``torch.serialization.safe_globals`` refuses operations on the
  placeholders. But hyperparameters from other trainers can be in subclasses of ``dict`` and ``list``, and need such
  operations. ``torch.load`` also refuses every name in the modules ``os`` and ``sys``.
- ``pickle.Unpickler`` with another ``find_class`` would let a file set attributes of torch's classes and functions.

``torch.load`` opens the container, creates the tensors, and gets the interpreter as the argument ``pickle_module``.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from drivetrain.base import torch_private
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import CheckpointError, first_of

# the first bytes of a file from torch before 1.6
_LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
_ZIP_START = b"PK\x03\x04"
_MOST_NAMES = 12  # the maximum number of names in the warning


class Placeholder:
    """Replaces an object, a class or a function in a file, unless the name is on the list of harmless names.

    Attributes:
        path: the module and the name in the file.
    """

    path: ClassVar[str] = ""

    def __repr__(self) -> str:
        return f"<not loaded: {self.path}>"


def is_legacy(source: Path | IO[bytes]) -> bool:
    """Return whether ``source`` is in the format of torch before 1.6, which is not a zip file and has no checksums."""
    return _starts_with(source, _LEGACY_START)


def is_container(source: Path | IO[bytes]) -> bool:
    """Return whether ``source`` begins like a zip file, the format of torch since 1.6."""
    return _starts_with(source, _ZIP_START)


def _starts_with(source: Path | IO[bytes], start: bytes) -> bool:
    try:
        with _stream(source) as stream:
            stream.seek(0)
            found = stream.read(len(start))
            stream.seek(0)
    except OSError:  # reading the rest of the file will report the error
        return False
    return found == start


def _stream(source: Path | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    return open(source, "rb") if isinstance(source, Path) else nullcontext(source)


def placeholders(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of each placeholder in dictionaries, lists and namespaces, such as ``("a/0",
    "pathlib.PosixPath")``.
    """
    todo, seen = [("", tree)], set()
    while todo:
        path, value = todo.pop()
        if (kind := _placeholder_class(value)) is not None:
            yield path, kind.path
            continue
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if not isinstance(value, (Mapping, list, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))  # a list in a file may contain itself
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        below = [(f"{path}/{key}" if path else str(key), item) for key, item in items]
        todo.extend(reversed(below))


def read_foreign(source: Path | IO[bytes], name: str, map_location: Any = "cpu") -> dict[str, Any] | None:
    """Read another trainer's checkpoint, with a :class:`Placeholder` for every value that is not plain data. One
    warning names these values.

    Args:
        source: the path of a file in torch's present or older format, or an open file.
        name: the file's name in messages.
        map_location: the device for tensors, as for ``torch.load``.

    Returns:
        The checkpoint; ``None`` if drivetrain wrote the file, or if the file has neither a ``state_dict`` nor
        Lightning's version.

    Raises:
        CheckpointError: the file cannot be read.
    """
    loaded = read_objects(source, name, map_location=map_location)
    if not isinstance(loaded, dict) or not loaded.keys() & {"state_dict", "pytorch-lightning_version"}:
        return None
    if "drivetrain_version" in loaded:  # do not replace objects in drivetrain's own files by placeholders
        return None
    _warn_of_placeholders(name, loaded)
    return loaded


def read_objects(source: Path | IO[bytes], name: str, **options: Any) -> Any:
    """Return the content of the file ``source``, with a :class:`Placeholder` for every value that is not plain data.

    Args:
        source: a path or an open file.
        name: the file's name in messages.
        options: ``map_location`` and ``mmap`` of ``torch.load``.

    Raises:
        CheckpointError: the file cannot be read.
    """
    unpickler = type("Unpickler", (_Unpickler,), {"known": {}})
    module = types.SimpleNamespace(
        __name__="drivetrain.checkpoints.foreign",
        Unpickler=unpickler,
        load=lambda file, **options: unpickler(file, **options).load(),
    )
    try:
        return torch.load(_container(source), pickle_module=module, weights_only=False, **options)
    except Exception as error:  # torch may raise anything on a malformed file
        raise CheckpointError(f"{name} is no checkpoint, or was cut short ({error}). Use another one.") from error


def read_pickle(file: IO[bytes], classes: Sequence[type], name: str) -> Any:
    """Return the object in a pickle file. Instances of ``classes`` are built without ``__init__``. A
    :class:`Placeholder` replaces every other class.

    Raises:
        CheckpointError: the file cannot be read. ``name`` is the file's name for the message.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return type("Unpickler", (_Unpickler,), {"known": {}})(file).load()
    except Exception as error:  # a malformed pickle may raise anything
        raise CheckpointError(f"{name} is damaged, or another program wrote it ({error}). Use another one.") from error


def _container(source: Path | IO[bytes]) -> Any:
    """Check that ``source`` is in one of torch's two formats and not a TorchScript archive. Return ``source`` for
    ``torch.load``.
    """
    if is_legacy(source):
        with _stream(source) as stream:
            # read from memory, because torch.load would first try to open a file on disk as a tar file
            return io.BytesIO(stream.read())
    if not is_container(source):
        raise ValueError("it is in no format of torch")
    # Open the file here, because torch's reader accepts only paths in UTF-8.
    with _stream(source) as stream:
        records = torch_private.Reader(stream).get_all_records()
        stream.seek(0)
    if "constants.pkl" in records:
        raise ValueError("it is a TorchScript archive, which torch.load would run")
    return source


def _warn_of_placeholders(source: str, checkpoint: dict[Any, Any]) -> None:
    # Ignore hparams_type, the class of the hyperparameters, because they are read as a dictionary.
    found = list(placeholders({key: value for key, value in checkpoint.items() if key != "hparams_type"}))
    if not found:
        return
    named = first_of((f"{where} ({name})" for where, name in found), _MOST_NAMES)
    keys = [where.split("/")[1] for where, _ in found if where.startswith("hyper_parameters/")]
    rank_zero_warn(
        f"{source} holds objects that are no plain data, and loading them could run code, so they are left out: "
        f"{named}. Pass hyperparameters when you load it, as in "
        f"load_from_checkpoint(path, {keys[0] if keys else 'name'}=...); or, if you trust whoever wrote it, "
        "weights_only=False. [DT1035]",
        stacklevel=5,
    )


# ---- the interpreter -------------------------------------------------------------------------------------------------


# derived from pickle's class in Python, because the class in C has no table of instructions
class _Unpickler(pickle._Unpickler):
    """The interpreter of pickles. ``torch.load`` derives a class that defines ``persistent_load``."""

    known: ClassVar[dict[str, Any]]
    """The object for each name in the file. All pickles of one file share this dictionary."""

    stack: list[Any]
    memo: dict[int, Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, encoding="latin1")
        allowed, users = torch_private.allowed_in_pickles()
        self._objects = allowed | _STAND_INS
        self._callable = {id(value) for value in allowed.values()}
        self._buildable = [value for value in users.values() if isinstance(value, type)]

    def find_class(self, module: str, name: str) -> Any:
        """Return the object for ``name`` in ``module``. Never import ``module``."""
        path = f"{_RENAMED.get(module, module)}.{name}"
        if path not in self.known:
            is_known = path in self._objects
            self.known[path] = self._objects[path] if is_known else type("Placeholder", (Placeholder,), {"path": path})
        return self.known[path]

    # ---- containers: only of exactly these types, because a subclass could run code ----------------------------------

    def load_append(self) -> None:
        item = self.stack.pop()
        if self._accepts(list):
            self.stack[-1].append(item)

    def load_appends(self) -> None:
        items = self.pop_mark()
        if self._accepts(list):
            self.stack[-1].extend(items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        if self._accepts(set):
            self.stack[-1].update(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        if self._accepts(dict, OrderedDict, Counter):
            self.stack[-1][key] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        if self._accepts(dict, OrderedDict, Counter):
            for key, value in zip(items[::2], items[1::2], strict=True):
                self.stack[-1][key] = value

    def _accepts(self, *kinds: type) -> bool:
        """Return whether the object on top of the stack is a container of one of the types ``kinds``. Return False for
        a placeholder, which ignores the items.
        """
        target = self.stack[-1]
        if _placeholder_class(target) is None and type(target) not in kinds:
            raise pickle.UnpicklingError(f"a {type(target).__name__} is no container to put items into")
        return type(target) in kinds

    # ---- objects -----------------------------------------------------------------------------------------------------

    def load_reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._called(function, args))

    def _called(self, function: Any, args: Any) -> Any:
        if (kind := _placeholder_class(function)) is not None:
            return kind()
        if not isinstance(args, tuple):
            raise pickle.UnpicklingError("arguments are a tuple")
        if any(function is own for own in _STAND_INS.values()):
            return function(*args)
        if id(function) not in self._callable or _is_old_sparse(function):
            raise pickle.UnpicklingError(f"{type(function).__name__} is nothing to be called")
        for arg in args:
            if (kind := _placeholder_class(arg)) is not None:
                return kind()  # an argument is a placeholder, such as a tensor of an unknown class
        return function(*args)

    def load_newobj(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        # As in pickle, __init__ is not called. But a Parameter without __init__ would not share memory with its tensor.
        is_new = isinstance(kind, type) and id(kind) in self._callable - {id(torch.nn.Parameter)}
        if is_new and not _is_old_sparse(kind):
            self.stack.append(kind.__new__(kind, *args))
        else:
            self.stack.append(self._called(kind, args))

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        if _placeholder_class(self.stack[-2]) is None and keywords:
            raise pickle.UnpicklingError("plain data is made without keyword arguments")
        self.load_newobj()

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        kind = type(target)
        if isinstance(target, _NumpyPart):
            if (built := target.built(state)) is not target:
                self.stack[-1] = built
                for key, value in self.memo.items():
                    if value is target:
                        self.memo[key] = built
        elif _placeholder_class(target) is not None or kind is dict:
            # drop the state of a placeholder, or of a dictionary that replaces an object of a subclass
            pass
        elif kind is OrderedDict or kind is argparse.Namespace:
            vars(target).update(state)
        elif kind is torch.Tensor:
            target.set_(*state)
        elif kind is torch.nn.Parameter or (kind in self._buildable and hasattr(target, "__setstate__")):
            target.__setstate__(state)
        elif kind in self._buildable:
            vars(target).update(state)
        else:
            raise pickle.UnpicklingError(f"a {kind.__name__} has no state to be given")

    def load_binpersid(self) -> None:
        pid = self.stack.pop()
        if not (isinstance(pid, tuple) and pid and pid[0] in ("storage", b"storage")):
            raise pickle.UnpicklingError("only the storage of a tensor may lie outside of the pickle")
        self.stack.append(self.persistent_load(pid))


_AS_IN_PYTHON = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "GLOBAL", "STACK_GLOBAL", "NONE", "NEWTRUE", "NEWFALSE",
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "EMPTY_SET", "LIST", "DICT", "FROZENSET",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
})  # fmt: skip
"""Instructions that only move plain data. :class:`_Unpickler` has methods for some more instructions, and refuses all
others.
"""


def _instruction(name: str, code: int) -> Callable[[Any], None]:
    """Return the function that interprets an instruction."""
    if name in _AS_IN_PYTHON:
        return pickle._Unpickler.dispatch[code]
    own: Callable[[Any], None] | None = vars(_Unpickler).get(f"load_{name.lower()}")

    def refuse(unpickler: Any) -> None:
        raise pickle.UnpicklingError(f"the instruction {name} is not needed for plain data")

    return own or refuse


_Unpickler.dispatch = {ord(each.code): _instruction(each.name, ord(each.code)) for each in pickletools.opcodes}
# names of modules in Python 2, which old pickle protocols use
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def _placeholder_class(value: Any) -> type[Placeholder] | None:
    """If ``value`` is a placeholder, return its class. If ``value`` is a placeholder's class, return ``value``.
    Otherwise, return ``None``.
    """
    kind = value if isinstance(value, type) else type(value)
    return kind if issubclass(kind, Placeholder) else None


def _is_old_sparse(kind: Any) -> bool:
    """Return whether ``kind`` is one of torch's oldest classes of sparse tensors. Only torch's own unpickler checks
    that the indices of these tensors are in range.
    """
    return isinstance(kind, type) and kind.__module__.startswith("torch.") and "sparse" in kind.__module__


# ---- plain data that is pickled by name ------------------------------------------------------------------------------


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that an old pickle protocol has stored as text. Other encodings than latin1 are refused, because
    Python would import a module.
    """
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are encoded as latin1, not as {encoding!r}")
    return text.encode("latin1")


class _NumpyPart(Placeholder):
    """A numpy object, or a part of a numpy object, before the pickle has set its state."""

    def built(self, state: Any) -> Any:
        """Return the complete numpy object; ``self`` if the object cannot be built."""
        return self


class _Dtype(_NumpyPart):
    path = "numpy.dtype"

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "="

    def built(self, state: Any) -> Any:
        # Ignore the rest of the state, because numpy would not check its sizes and flags.
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]
        return self

    def real(self) -> Any:
        """Return numpy's dtype; ``None`` if numpy is not imported. Reading a file must not import numpy."""
        numpy = sys.modules.get("numpy")
        return None if numpy is None else numpy.dtype(self.order + self.code)


class _NdArray(_NumpyPart):
    path = "numpy.ndarray"

    def built(self, state: Any) -> Any:
        _, shape, dtype, is_fortran, content = state
        real = dtype.real() if isinstance(dtype, _Dtype) else None
        if real is None or not isinstance(content, bytes):
            return self
        flat = sys.modules["numpy"].frombuffer(content, real)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()


class _Scalar(_NumpyPart):
    path = "numpy.generic"


def _dtype(code: Any, *_: Any) -> _NumpyPart:
    """Return a dtype of numbers or fixed-length strings. Return a placeholder for any other dtype."""
    if isinstance(code, str) and re.fullmatch(r"[biufc]\d{1,2}|[SU]\d{1,6}", code):
        return _Dtype(code)
    return _Scalar()


def _scalar(dtype: Any, content: Any = None) -> Any:
    real = dtype.real() if isinstance(dtype, _Dtype) else None
    if real is None or not isinstance(content, bytes) or len(content) != real.itemsize:
        return _Scalar()
    return sys.modules["numpy"].frombuffer(content, real)[0]


_STAND_INS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "_codecs.encode": _encode,
    "numpy.dtype": _dtype,
    "numpy.ndarray": _NdArray,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _NdArray,
    "numpy._core.multiarray._reconstruct": _NdArray,
    "pytorch_lightning.utilities.parsing.AttributeDict": dict,
    "lightning.pytorch.utilities.parsing.AttributeDict": dict,
    "lightning.fabric.utilities.data.AttributeDict": dict,
    "lightning_fabric.utilities.data.AttributeDict": dict,
}
"""The objects that replace certain names in files."""
