"""Find classes by name. A class is in a file of a folder, or a user registers it, or it is an entry point of an
installed package.

Each folder has a contract, which is an abstract class. The file ``<folder>/<name>.py`` defines one public concrete
subclass, which users select as ``"<name>"``. A class can register more names, with arguments, in a classmethod. The
contract calls this classmethod when a subclass is defined. Users' classes register their names in the same way. Other
packages register their classes in an entry-point group such as ``drivetrain.loggers``. A class is imported only when
its name is used.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from drivetrain.base.introspect import is_own_class, missing_methods, near_misses, reads
from drivetrain.base.lazy import Later
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError, UnknownNameError, WrongTypeError, described, did_you_mean, shown

if TYPE_CHECKING:
    from importlib import metadata
else:
    # this module is slow to import, and ``--help`` does not need it
    metadata = Later("importlib.metadata")

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """The class that is registered under a name, and arguments for the constructor.

    Attributes:
        name: the name.
        cls: the class.
        description: a line that describes the class.
        init_params: the constructor's arguments.
    """

    name: str
    cls: type[T]
    description: str = ""
    init_params: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> T:
        """Return a new instance."""
        return self.cls(**self.init_params)


class Registry(Generic[T]):
    """The classes that implement a contract (an abstract class), by name.

    Args:
        package: the folder, for example ``"drivetrain.loggers"``.
        contract: the module in the folder that defines the abstract class, for example ``"logger"``.
        kind: the word for a class of this registry in messages, for example ``"logger"``.
        by_file: whether the name of a file is the name of its class. If False, classes register their names themselves,
            so the first use imports all files of the folder.
        group: the entry-point group of installed packages; ``None``: the name of ``package``.
    """

    def __init__(self, package: str, contract: str, kind: str, by_file: bool = True, group: str | None = None) -> None:
        self._by_file = by_file
        self._group = group or package
        self._imported = False
        self._package = package
        self._contract = contract
        self._kind = kind
        self._registered: dict[str, Entry[T]] = {}
        self._sources: list[Callable[[bool], Mapping[str, Entry[T]]]] = []
        self._read: dict[str, metadata.EntryPoint] = {}
        self._read_from: tuple[Any, ...] = ()

    kind: str = reads("_kind", "The word for a class of this registry in messages.")

    # ---- names ---------------------------------------------------------------------------------------------------

    @overload
    def register(
        self, name: str, cls: type[T], description: str = "", override: bool = False, **init_params: Any
    ) -> type[T]: ...

    @overload
    def register(
        self, name: str, cls: None = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Callable[[type[T]], type[T]]: ...

    def register(
        self, name: str, cls: type[T] | None = None, description: str = "", override: bool = False, **init_params: Any
    ) -> type[T] | Callable[[type[T]], type[T]]:
        """Register ``cls`` under a name in this process. Without ``cls``, return a decorator that registers a class.

        Args:
            name: the name that users write.
            cls: the class.
            description: a line that describes the class; by default, the first line of the class's docstring.
            override: whether to replace an existing registration of the name.
            init_params: the constructor's arguments for this name.

        Raises:
            ConfigurationError: ``override`` is False, and another class or a file of the folder has this name. Or the
                name is not a string, ``cls`` is not a subclass of the contract, ``cls`` lacks one of the contract's
                abstract methods, or its constructor does not accept ``init_params``. Registering the same class again
                is allowed, as when a notebook cell runs twice.
        """
        self._check_text(name)
        if cls is None:
            return lambda decorated: self.register(name, decorated, description, override, **init_params)
        self.check_name(name)
        if not isinstance(cls, type) or not self._is_own(cls):
            self._check_class(name, cls, init_params)
            files = self._files()  # the call may import files, and their classes register themselves
            known = self._registered.get(name) or self._derived(installed=False).get(name)
            owner = None if known is None else known.cls
            if owner is None and name in files and not override:
                owner = self.entry(name).cls
            if owner is not None and not override and _identity(owner) != _identity(cls):
                raise ConfigurationError(
                    f"The {self._kind} name {name!r} already belongs to {owner.__qualname__} ({owner.__module__}). "
                    f"Register {cls.__qualname__} under another name, or pass override=True."
                )
        self._registered[name] = Entry(name, cls, description or first_line(cls), init_params)
        return cls

    def _check_text(self, name: Any) -> None:
        if not isinstance(name, str) or not name.strip():
            instead = f'register("name", {name.__name__})' if isinstance(name, type) else 'register("name", cls)'
            raise WrongTypeError(
                f"The name of this {self._kind} must be a text that is not empty, not {described(name)}. "
                f"Write {instead}."
            )

    def _check_class(self, name: str, cls: Any, init_params: Mapping[str, Any]) -> None:
        """Check that ``cls`` is a class of this kind whose constructor accepts ``init_params``.

        Raises:
            ConfigurationError: the class or its constructor does not fit.
        """
        start = f"The {self._kind} {name!r} got"
        contract = self._contract_class()
        if not isinstance(cls, type):
            kind = type(cls).__name__
            cure = (
                f"Write {kind}, the class." if isinstance(cls, contract) else f"Give a subclass of {contract.__name__}."
            )
            raise ConfigurationError(f"{start} {described(cls)}, which is no class. {cure}")
        if not issubclass(cls, contract):
            raise ConfigurationError(
                f"{start} the class {cls.__qualname__}, which is no {self._kind}. Write class "
                f"{cls.__name__}({contract.__name__})."
            )
        for missing in missing_methods(cls):
            near = next(near_misses(cls, contract, [missing], alike=0.8), None)
            cure = "Define it." if near is None else f"Is it {near[0]}? Rename that to {missing}."
            raise ConfigurationError(
                f"{start} the class {cls.__qualname__}, which has no {missing}, as every {self._kind} must. {cure}"
            )
        self.check_arguments(start, cls, init_params)

    def check_arguments(self, start: str, cls: type[T], init_params: Mapping[str, Any]) -> None:
        """Check that the constructor of ``cls`` has all parameters in ``init_params``. The message begins with
        ``start``.

        Raises:
            ConfigurationError: a parameter is missing.
        """
        try:
            parameters = inspect.signature(cls).parameters
        except (ValueError, TypeError):  # a constructor written in C, without a signature
            return
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for key, value in init_params.items():
            if key not in parameters:
                raise ConfigurationError(
                    f"{start} {key}={shown(value)}, and {cls.__qualname__}.__init__ has no such argument. "
                    f"{did_you_mean(key, parameters)}"
                )

    def _contract_class(self) -> type[Any]:
        module = importlib.import_module(f"{self._package}.{self._contract}")
        return next(
            value for value in vars(module).values()
            if inspect.isclass(value) and value.__module__ == module.__name__ and self._is_contract(value)
        )  # fmt: skip

    def derive(self, source: Callable[[bool], Mapping[str, Entry[T]]]) -> None:
        """Add a function that returns more entries, for example entries that depend on another registry.

        The registry calls ``source(installed)`` for each lookup. With ``installed=True``, ``source`` may search
        installed packages, which takes milliseconds. Registered names and names of earlier sources take precedence.
        """
        self._sources.append(source)

    def remove(self, name: str) -> None:
        """Remove a registered name. Afterwards, the name means the class of the file with this name, if there is one.

        Raises:
            UnknownNameError: the name was not registered.
        """
        if name not in self._registered:
            raise UnknownNameError(
                f"No {self._kind} was registered as {name!r}. {did_you_mean(name, self._registered)}"
            )
        del self._registered[name]

    def available(self) -> list[str]:
        """Return every name that :meth:`get` accepts, sorted. Do not import the classes."""
        return sorted({*self._files(), *self._registered, *self._derived(installed=True), *self._entry_points()})

    # ---- entries -------------------------------------------------------------------------------------------------

    def get(self, name: str) -> T:
        """Return a new instance for ``name``, created with its registered arguments.

        Raises:
            UnknownNameError: the name is unknown; the message suggests the most similar one.
        """
        return self.entry(name).build()

    def entry(self, name: str) -> Entry[T]:
        """Return the entry for ``name``. Registered classes come first, then the folder's files, then entry points. If
        the name is unknown, look up the name in lower case.

        Raises:
            UnknownNameError: the name is unknown; the message suggests the most similar one.
        """
        if name in self._files() and name not in self._registered:
            module = importlib.import_module(f"{self._package}.{name}")
            if name not in self._registered:
                cls = self._class_in(module)
                return Entry(name, cls, first_line(cls))
        if name in self._registered:
            return self._registered[name]
        if (derived := self._derived(installed=False).get(name)) is not None:
            return derived
        if (point := self._entry_points().get(name)) is not None:
            loaded: type[T] = point.load()
            self._check_class(name, loaded, {})
            # load() may have imported a class that registers this name with arguments.
            return self._registered.get(name) or Entry(name, loaded, first_line(loaded))
        if (derived := self._derived(installed=True).get(name)) is not None:
            return derived
        if (fallback := self.fallback(name)) is not None:
            return fallback
        if (lower := name.lower()) != name and lower in self.available():
            return self.entry(lower)
        hint = did_you_mean(name, self.available())
        raise UnknownNameError(f"There is no {self._kind} called {name!r}. {hint} [DT1050]")

    def check_name(self, name: str) -> None:
        """Do nothing. A subclass may raise a ConfigurationError for a reserved name."""

    def fallback(self, name: str) -> Entry[T] | None:
        """Return an entry for an unknown name, or ``None``. A subclass may override this method to create entries."""
        return None

    def entries(self) -> Iterator[Entry[T]]:
        """Yield every entry, in the order of names. If a class of an installed package cannot be imported, warn and
        skip the class.
        """
        for name in self.available():
            try:
                entry = self.entry(name)
            except Exception as error:
                if name not in self._entry_points():
                    raise
                rank_zero_warn(
                    f"The {self._kind} {name!r} of an installed package cannot be imported: {error!r}. "
                    "Repair or uninstall that package."
                )
                continue
            yield entry

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return the entry as a dictionary with the class, the name, "description" and "init_params"."""
        entry = self.entry(name)
        return {
            self._kind: entry.cls,
            f"{self._kind}_name": name,
            "description": entry.description,
            "init_params": dict(entry.init_params),
        }

    def __contains__(self, name: object) -> bool:
        return name in self.available()

    def __iter__(self) -> Iterator[str]:
        return iter(self.available())

    # ---- sources -------------------------------------------------------------------------------------------------

    def _is_own(self, cls: type[Any]) -> bool:
        return cls.__module__.startswith(f"{self._package}.")

    def _files(self) -> set[str]:
        """Return the names of the files that define a class. With ``by_file=False``, import all files at the first
        call, and return no names.
        """
        if self._imported:
            return set()
        modules = _modules(*importlib.import_module(self._package).__path__)
        if self._by_file:
            return {*modules} - {self._contract}
        self._imported = True  # set first, because classes register themselves during the import
        for module in modules:
            importlib.import_module(f"{self._package}.{module}")
        return set()

    def _derived(self, installed: bool) -> dict[str, Entry[T]]:
        return {name: entry for source in reversed(self._sources) for name, entry in source(installed).items()}

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        """Return the entry points of installed packages. Read them again if a package may have been installed."""
        if (places := _installation()) != self._read_from:
            self._read = {entry.name: entry for entry in metadata.entry_points(group=self._group)}
            self._read_from = places
        return self._read

    def _class_in(self, module: ModuleType) -> type[T]:
        contract = self._contract_class()
        found = list(dict.fromkeys(
            value for value in vars(module).values()  # a class may have two names in its module
            if inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, contract)
            and not value.__name__.startswith("_") and not inspect.isabstract(value)
        ))  # fmt: skip
        if len(found) != 1:
            raise ConfigurationError(
                f"The file {module.__name__} must define exactly one public {contract.__name__}, "
                f"not {[cls.__name__ for cls in found]}. Give the others a leading underscore or a file of their own."
            )
        return cast("type[T]", found[0])

    def _is_contract(self, cls: type[Any]) -> bool:
        return cls.__name__.lower().endswith(self._contract.replace("_", ""))


@cache
def _modules(*folders: str) -> tuple[str, ...]:
    return tuple(each.name for each in pkgutil.iter_modules(folders) if not each.name.startswith("_"))


def _installation() -> tuple[Any, ...]:
    """Return values that change when packages are installed or removed."""
    return metadata.entry_points, *map(id, sys.meta_path), *((path, _changed(path)) for path in sys.path)


def _changed(folder: str) -> int | None:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


def names_itself(cls: type[Any], hook: str, registry: Registry[Any]) -> None:
    """Register ``cls`` under the names that its body defines.

    A class of drivetrain lists its names in ``_names``, which may be a dictionary from each name to the constructor's
    arguments. A user's class defines the classmethod ``hook``, which this function calls with the registry.

    Raises:
        ConfigurationError: the hook is not a classmethod.
    """
    if is_own_class(cls):
        names = vars(cls).get("_names", ())
        for name in names:
            registry.register(name, cls, **(names[name] if isinstance(names, Mapping) else {}))
    own = vars(cls).get(hook)
    if own is None:
        return
    if not isinstance(own, (classmethod, staticmethod)):
        raise ConfigurationError(
            f"{cls.__qualname__}.{hook} is {described(own)}, and it is called on the class. Write @classmethod in the "
            f"line above def {hook}(cls, registry)."
        )
    getattr(cls, hook)(registry)


def first_line(cls: type[Any]) -> str:
    """Return the first line of the docstring of ``cls`` itself."""
    return next(iter((cls.__dict__.get("__doc__") or "").strip().splitlines()), "")


def _identity(cls: type[Any]) -> tuple[str, str]:
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return module, cls.__qualname__


def check_contract_version(cls: type[Any], current: int, kind: str) -> None:
    """Check the version of the contract, if ``cls`` declares a version.

    Args:
        cls: a subclass of a versioned contract.
        current: the contract's version.
        kind: the kind of class, for the message, such as "strategy".

    Raises:
        ConfigurationError: the class was written for another version.
    """
    written = cls.__dict__.get("contract_version", current)
    if written != current:
        raise ConfigurationError(
            f"{cls.__qualname__} was written for version {written!r} of the {kind} contract, and this drivetrain has "
            f"version {current}. CHANGELOG.md lists what has changed. Adapt the class and write contract_version = "
            f"{current}, or install a drivetrain that has version {written!r}."
        )


def load(path: str) -> Any:
    """Import a module, and return an object in it; ``path`` is ``"package.module:name"``.

    The core loads the default callbacks and loggers with this function, because the core must not import their folders.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
