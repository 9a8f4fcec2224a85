"""Names for classes: a folder's files, what users register, and what installed packages offer.

A backend is one file, ``<folder>/<name>.py``, that defines one public concrete subclass of the folder's contract. The
folder's listing *is* the registry: to add a name, add a file. Nothing is imported until a name is asked for.
Third-party packages offer theirs through the entry-point group named like the folder, for example
``drivetrain.loggers``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from importlib import metadata
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from drivetrain.errors import ConfigurationError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes that implement one contract, by name.

    Args:
        package: the folder, for example ``"drivetrain.loggers"``.
        contract: its module inside the folder that holds the abstract class, for example ``"logger"``.
        kind: the word that messages use for one entry, for example ``"logger"``.
    """

    def __init__(self, package: str, contract: str, kind: str) -> None:
        self._package = package
        self._contract = contract
        self._kind = kind
        self._registered: dict[str, type[T]] = {}

    def register(self, name: str, cls: type[T], override: bool = False) -> type[T]:
        """Give ``cls`` a name of its own for this process.

        Raises:
            ConfigurationError: the name belongs to a different class, or to a file of the folder, and ``override`` is
                False. The same class again (a re-run notebook cell) replaces silently.
        """
        if name in self._files() and name not in self._registered and not override:
            raise ConfigurationError(
                f"The {self._kind} name {name!r} belongs to {self._package}.{name}. "
                f"Register {cls.__qualname__} under another name, or pass override=True."
            )
        known = self._registered.get(name)
        if known is not None and not override and _identity(known) != _identity(cls):
            raise ConfigurationError(
                f"The {self._kind} name {name!r} already belongs to {known.__qualname__}. "
                f"Register {cls.__qualname__} under another name, or pass override=True."
            )
        self._registered[name] = cls
        return cls

    def available(self) -> list[str]:
        """Every name that :meth:`get` accepts, sorted; no backend is imported to list it."""
        return sorted({*self._registered, *self._files(), *self._entry_points()})

    def get(self, name: str) -> type[T]:
        """The class called ``name``: registered here, else a file of the folder, else an entry point.

        Raises:
            ConfigurationError: nobody offers this name; the message suggests the likeliest one.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._files():
            return self._class_in(importlib.import_module(f"{self._package}.{name}"))
        if (entry := self._entry_points().get(name)) is not None:
            loaded: type[T] = entry.load()
            return loaded
        raise ConfigurationError(f"There is no {self._kind} called {name!r}. {did_you_mean(name, self.available())}")

    def _files(self) -> set[str]:
        package = importlib.import_module(self._package)
        names = {module.name for module in pkgutil.iter_modules(package.__path__)}
        return {name for name in names if name != self._contract and not name.startswith("_")}

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        return {entry.name: entry for entry in metadata.entry_points(group=self._package)}

    def _class_in(self, module: ModuleType) -> type[T]:
        contract_module = importlib.import_module(f"{self._package}.{self._contract}")
        contract = next(
            value for value in vars(contract_module).values()
            if inspect.isclass(value) and value.__module__ == contract_module.__name__ and self._is_contract(value)
        )  # fmt: skip
        found = [
            value for value in vars(module).values()
            if inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, contract)
            and not value.__name__.startswith("_") and not inspect.isabstract(value)
        ]  # fmt: skip
        if len(found) != 1:
            raise ConfigurationError(
                f"The file {module.__name__} must define exactly one public {contract.__name__}, "
                f"not {[cls.__name__ for cls in found]}. Give the others a leading underscore or a file of their own."
            )
        return cast("type[T]", found[0])

    def _is_contract(self, cls: type[Any]) -> bool:
        return cls.__name__.lower() == self._contract.replace("_", "")


def _identity(cls: type[Any]) -> tuple[str, str]:
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return module, cls.__qualname__


def load(path: str) -> Any:
    """The object at ``"package.module:name"``, imported when asked for.

    This is how the front reaches leaves (default callbacks and loggers) without importing their folders.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
