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
"""The id of the process that has imported drivetrain. A forked process has another id."""

_offered: dict[str, tuple[str, ...]] = {}  # the public names of each package
_files: dict[str, Mapping[str, str]] = {}  # the file that defines each public name, by package
_in_block: set[int] = set()  # ids of the threads that are in a ``with on_first_use`` block


class Later:
    """Stands for a module. Reading or setting an attribute imports the module.

    Each use looks the module up in ``sys.modules``, like an import statement in a function.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["__name__"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self.__dict__.get("__name__") not in sys.modules:
            # tools such as jsonargparse read special attributes of every name, which must not import a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name__), name, value)


class OnFirstUse:
    """A ``with`` block at the top of a file, which delays each import in the block until the module is first used.

    Each line in the block has the form ``from drivetrain.folder import file``. Type checkers and import-linter read the
    line as a normal import. If the file is not imported yet, the folder's ``__getattr__`` returns a :class:`Later`.
    """

    def __enter__(self) -> None:
        _in_block.add(get_ident())

    def __exit__(self, *_: object) -> None:
        _in_block.discard(get_ident())


on_first_use = OnFirstUse()


def text_beside(module: str, ending: str) -> str:
    """Return the text of a file beside an imported module. The file has the name of the module and this ``ending``,
    such as ".pyi". The files can be in a zip archive.
    """
    found: Any = sys.modules[module]
    return found.__loader__.get_data(os.path.splitext(found.__file__)[0] + ending).decode()


def public(package: str) -> list[str]:
    """Return the public names in the stub ``__init__.pyi`` of a package, and let :func:`lazy` import them at their
    first use. Type checkers read the stub, too. The stub's statements have the form ``from module import Name as
    Name``. If ``module`` is the package itself, ``Name`` is a public module.
    """
    statements = (each.replace("(", "").split() for each in text_beside(package, ".pyi").split("\nfrom ")[1:])
    found = {words[2]: words[0] for words in statements}
    names = sorted(name for name, source in found.items() if source != package)
    lazy(package, {name: found[name] for name in names}, [name for name in found if found[name] == package])
    return names


def lazy(package: str, files: Mapping[str, str] = MappingProxyType({}), modules: Sequence[str] = ()) -> None:
    """Set the ``__getattr__`` and ``__dir__`` of a package.

    Packages do not define ``__getattr__`` in their source, because type checkers would then accept every name.

    Args:
        package: the ``__name__`` of the package.
        files: the module that defines each public name.
        modules: the names of the package's public modules.
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
            # import statements and tools read such names, and need no suggestion of a similar name
            if not (name.startswith("__") or _is_private_module(package, name)):
                start = _message(start, package, name)
            # without obj=, Python adds no suggestion of its own
            raise AttributeError(start, name=name)
        value = getattr(_imported(files[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    members = vars(sys.modules[package])
    # A module with ``__path__`` counts as a package. Only then does ``from module import name`` call UnknownNames for a
    # missing name.
    members.setdefault("__path__", [])
    members.update(__getattr__=get, __dir__=lambda: public_names(package, _offered[package]))


def _imported(name: str) -> ModuleType:
    """Import a module with garbage collection turned off.

    The new objects of an import can trigger a full garbage collection. After ``import torch``, a collection takes twice
    as long as the import, and frees nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def _is_private_module(package: str, name: str) -> bool:
    """Return whether the package has a file ``name.py``. ``from package import name`` reads an attribute first, and
    imports the file afterwards.
    """
    return any(os.path.exists(os.path.join(folder, f"{name}.py")) for folder in vars(sys.modules[package])["__path__"])


def names_of_file(package: str, file: str) -> list[str]:
    """Return the public names that one file of an imported package defines."""
    return [name for name, defined_in in _files[package].items() if defined_in == f"{package}.{file}"]


def public_modules(package: str) -> list[str]:
    """Return the public modules of an imported package."""
    return [name for name in _offered[package] if name not in _files[package]]


def public_names(module: str, names: Sequence[str]) -> list[str]:
    """Return the names for ``dir()`` of ``module``: ``names``, and names such as ``__file__``."""
    return sorted({*names, *(name for name in vars(sys.modules[module]) if name.startswith("__"))})


class UnknownNames:  # without a base class, because importlib.abc is slow to import
    """An import hook that explains why a name cannot be imported from a package of drivetrain.

    If ``from package import name`` finds no attribute ``name``, Python asks the import hooks for a module
    ``package.name``. This hook never finds a module. The hook's error suggests a similar name, or says which feature
    this version lacks. For other names, Python raises its own error.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Return ``None``.

        Raises:
            ModuleNotFoundError: the package has a similar name, or ``name`` is a known feature that drivetrain lacks.
        """
        package, _, name = fullname.rpartition(".")
        if package not in _offered or name.startswith("_"):
            return
        from drivetrain.errors import closest

        if instead_of(package, name) is not None or closest(name, _offered[package]) is not None:
            # without name=, because importlib suppresses an error that has the module's full name
            raise ModuleNotFoundError(_message(f"cannot import name {name!r} from {package!r}", package, name))


def _message(start: str, package: str, name: str) -> str:
    from drivetrain.errors import did_you_mean

    why = instead_of(package, name)
    return f"{start}. {did_you_mean(name, _offered[package])}" if why is None else f"{start}: {why}"
