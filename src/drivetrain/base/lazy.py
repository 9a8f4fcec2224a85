"""Import each public name of a package when it is first used, so that a program imports only what it uses."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from threading import get_ident
from types import MappingProxyType, ModuleType
from typing import Any

from drivetrain.base.supplied import instead_of

IMPORTED_IN = os.getpid()
"""The process that has imported drivetrain; a process that is forked from it has another id."""

_offered: dict[str, tuple[str, ...]] = {}  # by package: its public names
_files: dict[str, Mapping[str, str]] = {}  # by package: the file that defines each public name
_in_block: set[int] = set()  # ids of the threads that are in a ``with on_first_use`` block


class Later:
    """Stands for a module, which is imported when an attribute of it is read or set.

    The object does not keep the module: each use looks the module up in ``sys.modules``, as an import statement in a
    function does.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["__name__"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self.__dict__.get("__name__") not in sys.modules:
            # a tool, such as jsonargparse, that looks at all names of a module must not import this one
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name__), name, value)


class OnFirstUse:
    """A ``with`` block at the top of a file, which delays each import in the block until the module is first used.

    The block has only lines of the form ``from drivetrain.folder import file``. A type checker and import-linter see
    plain imports. When such a line runs and the file is not imported yet, the folder's ``__getattr__`` returns a
    :class:`Later`.
    """

    def __enter__(self) -> None:
        _in_block.add(get_ident())

    def __exit__(self, *_: object) -> None:
        _in_block.discard(get_ident())


on_first_use = OnFirstUse()


def public(package: str) -> list[str]:
    """Set the ``__getattr__`` and ``__dir__`` of a package with public names, and return the names.

    The names are written only once, for programs and for type checkers: in the package's stub, ``__init__.pyi``. The
    stub's statements have the form ``from module import Name as Name``; a statement that imports from the package
    itself names public modules.
    """
    module: Any = sys.modules[package]
    stub = module.__loader__.get_data(f"{os.path.splitext(module.__file__)[0]}.pyi").decode()
    statements = (each.replace("(", "").split() for each in stub.split("\nfrom ")[1:])
    found = {words[2]: words[0] for words in statements}
    names = sorted(name for name, source in found.items() if source != package)
    lazy(package, {name: found[name] for name in names}, [name for name in found if found[name] == package])
    return names


def lazy(package: str, files: Mapping[str, str] = MappingProxyType({}), modules: Sequence[str] = ()) -> None:
    """Set the ``__getattr__`` and ``__dir__`` of a package.

    Both are set at run time, because a type checker that sees a module's ``__getattr__`` accepts every name.

    Args:
        package: its ``__name__``.
        files: the defining module of each public name.
        modules: public modules in the package, which become its attributes.
    """
    _offered[package], _files[package] = (*files, *modules), files
    if not any(isinstance(finder, UnknownNames) for finder in sys.meta_path):
        sys.meta_path.append(UnknownNames())

    def get(name: str) -> Any:
        if get_ident() in _in_block:
            return Later(f"{package}.{name}")
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in files:
            start = f"module {package!r} has no attribute {name!r}"
            # no similar name for attributes that imports and tools ask for, not users
            if not (name.startswith("__") or _is_private_module(package, name)):
                start = _message(start, package, name)
            # Without obj=, Python does not add a suggestion of its own.
            raise AttributeError(start, name=name)
        value = getattr(_imported(files[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    members = vars(sys.modules[package])
    # ``__path__``: ``from module import name`` asks the import hooks about a missing name only if the module is a
    # package.
    members.setdefault("__path__", [])
    members.update(__getattr__=get, __dir__=lambda: public_names(package, _offered[package]))


def _imported(name: str) -> ModuleType:
    """Import a module with garbage collection turned off.

    After ``import torch`` there are so many objects that a few thousand more make Python's garbage collector examine
    all of them. This examination takes twice as long as the import, and frees nothing, because the objects of modules
    stay alive.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def _is_private_module(package: str, name: str) -> bool:
    """Return whether ``name`` is a module in the package: ``from package import name`` reads the attribute before it
    imports the module.
    """
    return any(os.path.exists(os.path.join(folder, f"{name}.py")) for folder in vars(sys.modules[package])["__path__"])


def names_of_file(package: str, file: str) -> list[str]:
    """Return the public names of an imported package that one of its files defines."""
    return [name for name, defined_in in _files[package].items() if defined_in == f"{package}.{file}"]


def public_modules(package: str) -> list[str]:
    """Return the public modules of an imported package."""
    return [name for name in _offered[package] if name not in _files[package]]


def public_names(module: str, names: Sequence[str]) -> list[str]:
    """Return the names for ``dir()`` of ``module``: its public ``names``, and the names that every module has."""
    return sorted({*names, *(name for name in vars(sys.modules[module]) if name.startswith("__"))})


class UnknownNames:  # without a base class, because importlib.abc is slow to import
    """The last import hook, which explains why a name cannot be imported from one of drivetrain's packages.

    If ``from package import name`` finds no attribute ``name``, Python asks the import hooks for a module
    ``package.name``. Python's own message has no similar name, and does not say what this version lacks. The hook never
    finds a module; for a name that the hook cannot explain, Python raises its own error.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Return ``None``.

        Raises:
            ModuleNotFoundError: the name is similar to a name of the package, or drivetrain lacks a feature of this
                name.
        """
        package, _, name = fullname.rpartition(".")
        if package not in _offered or name.startswith("_"):
            return
        from drivetrain.errors import closest

        if instead_of(package, name) is not None or closest(name, _offered[package]) is not None:
            # No name=: importlib drops an error that has the module's full name.
            raise ModuleNotFoundError(_message(f"cannot import name {name!r} from {package!r}", package, name))


def _message(start: str, package: str, name: str) -> str:
    from drivetrain.errors import did_you_mean

    why = instead_of(package, name)
    return f"{start}. {did_you_mean(name, _offered[package])}" if why is None else f"{start}: {why}"
