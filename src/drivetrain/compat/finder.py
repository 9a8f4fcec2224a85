"""The import hook. For ``import lightning.pytorch``, it creates a module that has drivetrain's objects under
Lightning's names.

This module is a :class:`ServedModule`, which finds a name in a table when the name is first used. Modules that are not
in the table cannot be imported. An installed Lightning is never used.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from drivetrain.compat import table
from drivetrain.errors import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

_CURE = "Leave it out of the program, or run the program with Lightning itself: without drivetrain.compat."
_TOLD_THE_RANK = "lightning_utilities.core.rank_zero"
_VERSIONED = ("", "pytorch", "fabric")


class ServedModule(ModuleType):
    """drivetrain's replacement for one of Lightning's modules."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, f"{name}, served by drivetrain.compat: see drivetrain/compat/served.txt.")
        self.__file__ = table.__file__
        # Because this path exists and is empty, Python asks the finder for a missing submodule. The finder's error
        # message names a cure.
        self.__path__: list[str] = []
        self._compat_path = path
        if path in _VERSIONED:
            self.__version__ = table.in_use().version

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return sorted(name for name in names(self._compat_path) if not name.startswith("_"))
        if name.startswith("__"):  # importlib, inspect and warnings read special attributes
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if (found := find(self._compat_path, name)) is not None:
            value = getattr(importlib.import_module(found[0]), found[1])
            setattr(self, name, value)
            return value
        if name in submodules(self._compat_path):
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(_refusal(self.__name__, self._compat_path, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If a submodule and a function have one name, keep the function, as Lightning does."""
        if not (isinstance(value, ServedModule) and find(self._compat_path, name)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *names(self._compat_path), *submodules(self._compat_path)})


class CompatFinder:
    """The entry in ``sys.meta_path`` that finds and loads the replacements of Lightning's modules.

    It does not inherit from the classes of ``importlib.abc``, because this import would slow down each child process.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the replacement; ``None`` for a module that is not Lightning's.

        Raises:
            ModuleNotFoundError: drivetrain has no replacement for this module of Lightning.
        """
        if fullname == _TOLD_THE_RANK:
            return _telling_rank(fullname, path)
        root, _, rest = fullname.partition(".")
        if root not in table.in_use().roots:
            return None
        inner = ".".join(part for part in (table.in_use().roots[root], rest) if part)
        if inner in table.in_use().served:
            loader: Any = self
            return ModuleSpec(fullname, loader, origin=table.__file__, loader_state=inner, is_package=True)
        parent, _, name = fullname.rpartition(".")
        if name == "__main__" and (program := program_of(inner.rpartition(".")[0])) is not None:
            loader = _ProgramLoader(*program)
            return ModuleSpec(fullname, loader, origin=table.__file__)
        # The error's ``name`` must not be the full name. Otherwise importlib would drop this error, and raise one
        # without the explanation.
        raise ModuleNotFoundError(_refusal(parent, inner.rpartition(".")[0], name), name=f"{parent}:{name}")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the replacement of the module that ``spec`` names."""
        return ServedModule(spec.name, spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        """For a top-level package such as ``lightning``, let Python show deprecation warnings from all modules.
        Otherwise do nothing, because :meth:`create_module` has returned a complete module.
        """
        if module.__name__ in table.in_use().roots:
            from drivetrain.base.rank_zero import LightningDeprecationWarning

            warnings.simplefilter("default", category=LightningDeprecationWarning)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Return the distributions that ``importlib.metadata`` will report for Lightning."""
        from drivetrain.compat.distribution import distributions

        return distributions(None if context is None else context.name)


def _telling_rank(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of the module ``lightning_utilities.core.rank_zero``. After Python has loaded this module, set
    its variable for the rank, as Lightning does.
    """
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.loader is not None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            from drivetrain.base.rank_zero import tell_rank

            execute(module)
            tell_rank()

        loader.exec_module = exec_module
    return spec


class _ProgramLoader:
    """Loads a module of Lightning for ``python -m``. Its code calls drivetrain's replacement of the program."""

    def __init__(self, home: str, name: str) -> None:
        self.home, self.name = home, name

    def get_code(self, fullname: str) -> CodeType:
        """Return code that calls :meth:`run`, for Python to execute as ``__main__``."""
        return _run_program.__code__

    def run(self) -> None:
        """Run the program."""
        getattr(importlib.import_module(self.home), self.name)()


def _run_program() -> None:
    globals()["__spec__"].loader.run()


def program_of(path: str) -> tuple[str, str] | None:
    """Return drivetrain's module and function for ``python -m`` with Lightning's module ``path``; ``None`` if there is
    none.
    """
    return find(path, "main") if path in table.in_use().served else None


def offers(path: str, of: table.Table | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield the names in Lightning's module ``path``. For each name, also yield the replacement: drivetrain's module,
    and the name in this module. ``of`` is the table of modules, by default the one that this process uses.
    """
    for source in (of or table.in_use()).served[path]:
        home, _, written = source.partition(":")
        listed: Iterable[str] = written.split() or importlib.import_module(home).__all__
        for name in listed:
            offered, _, ours = name.partition("=")
            yield offered, home, ours or offered


def names(path: str, of: table.Table | None = None) -> set[str]:
    """Return the names in Lightning's module ``path``; ``of`` is the table of modules, by default the one that this
    process uses.
    """
    return {offered for offered, _, _ in offers(path, of)}


def find(path: str, name: str) -> tuple[str, str] | None:
    """Return the replacement of ``name`` in Lightning's module ``path``: drivetrain's module, and the name there.
    Return ``None`` if there is no replacement.
    """
    return next(((home, ours) for offered, home, ours in offers(path) if offered == name), None)


def submodules(path: str) -> list[str]:
    """Return the names of the replaced modules directly below Lightning's module ``path``."""
    return [key.rpartition(".")[2] for key in table.in_use().served if key and key.rpartition(".")[0] == path]


def _refusal(module: str, path: str, name: str) -> str:
    known = {*names(path), *submodules(path)} if path in table.in_use().served else set()
    return f"drivetrain.compat has no {module}.{name} (yet). {did_you_mean(name, known)} {_CURE}"
