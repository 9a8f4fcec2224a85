"""Finds drivetrain's counterpart of a name of Lightning. The search uses the tables of ``drivetrain exec``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from drivetrain.base.lazy import public_modules
from drivetrain.compat import finder, table
from drivetrain.compat.missing import MISSING, why_missing
from drivetrain.compat.table import LATEST, Table

_LEGACY = "drivetrain.legacy."
_ABSENT = "drivetrain.legacy.absent"


class Today(NamedTuple):
    """A name of drivetrain.

    Attributes:
        home: the module from which to import the name.
        name: the name in this module.
    """

    home: str
    name: str

    @property
    def is_legacy(self) -> bool:
        """Whether the name exists only in drivetrain.legacy, for programs of an earlier generation."""
        return self.home.startswith(_LEGACY)


class Names:
    """The modules and names of all Lightning generations.

    Args:
        generation: the Lightning generation that takes precedence if several generations have a name; "": the latest.
    """

    def __init__(self, generation: str = "") -> None:
        earlier = {name: table.GENERATIONS[name] for name in sorted(table.GENERATIONS, reverse=True)}
        first = [earlier.pop(generation)] if generation else []
        self.tables: list[Table] = [*first, LATEST, *earlier.values()]
        self._found: dict[tuple[str, str], Today | None] = {}

    def belongs(self, module: str) -> bool:
        """Whether a dotted name is a package of Lightning, or begins with a package of Lightning."""
        return any(module.partition(".")[0] in each.roots for each in self.tables)

    def is_module(self, module: str) -> bool:
        """Whether any generation has this module."""
        return any(True for _ in self._places(module))

    def is_only_earlier(self, module: str, name: str = "") -> bool:
        """Whether only earlier generations have the module. With ``name``, whether only earlier generations have the
        name in the module.
        """
        places = list(self._places(module))
        in_latest = [path for each, path in places if each is LATEST]
        if not name or self.is_module(f"{module}.{name}"):
            module = f"{module}.{name}" if name else module
            return not any(each is LATEST for each, _ in self._places(module)) and self.is_module(module)
        known = any(name in finder.names(path, LATEST) for path in in_latest)
        return not known and any(name in finder.names(path, each) for each, path in places)

    def find(self, module: str, name: str) -> Today | None:
        """Return drivetrain's counterpart of a name in one of Lightning's modules; ``None`` if there is no
        counterpart.
        """
        if (module, name) not in self._found:
            found = [
                _public(home, ours)
                for each, path in self._places(module)
                for offered, home, ours in finder.offers(path, each)
                if offered == name and home != _ABSENT
            ]
            first = next(iter(found), self._elsewhere(module, name))
            if first is not None and first.is_legacy and not isinstance(_value(first), type):
                # for a function, prefer a counterpart outside of drivetrain.legacy
                first = next((each for each in found if not each.is_legacy), first)
            self._found[module, name] = first
        return self._found[module, name]

    def _elsewhere(self, module: str, name: str) -> Today | None:
        """If no generation has ``module``, search for the class ``name`` in all modules of the latest generation.
        Lightning may have moved the class.
        """
        if self.is_module(module) or not name[:1].isupper() or not self.belongs(module):
            return None
        found = (offer for path in LATEST.served if path.startswith("pytorch") for offer in finder.offers(path, LATEST))
        return next((_public(home, ours) for offered, home, ours in found if offered == name), None)

    def all_of(self, module: str) -> dict[str, Today]:
        """Return drivetrain's counterparts of the names that ``from module import *`` binds."""
        names = {name for each, path in self._places(module) for name in finder.names(path, each)}
        found = {name: self.find(module, name) for name in sorted(names) if not name.startswith("_")}
        return {name: today for name, today in found.items() if today is not None}

    def module(self, module: str) -> str | None:
        """Return the module of drivetrain that replaces a module of Lightning; ``None`` if there is no replacement."""
        for _, path in self._places(module):
            rest = path.removeprefix("pytorch").removeprefix("fabric").strip(".")
            if not rest:
                return "drivetrain"
            if rest in public_modules("drivetrain"):
                return f"drivetrain.{rest}"
            homes = {today.home for today in self.all_of(module).values()}
            return homes.pop() if len(homes) == 1 and not next(iter(homes)).startswith(_LEGACY) else None
        return None

    def why_missing(self, module: str, name: str) -> str:
        """Return the message for a name without a counterpart in drivetrain."""
        path = module.partition(".")[2].removeprefix("pytorch.").partition(".")[0]
        candidates = [(self.module(module) or "", name), ("drivetrain", path), *((each, name) for each in MISSING)]
        found = next((each for each in candidates if each[1] in MISSING.get(each[0], {})), None)
        if found is not None:
            return f"{module}.{name}: {why_missing(*found)}"
        return f"{module}.{name}: drivetrain has no such name. Look for it in docs/compat_names.md."

    def _places(self, module: str) -> Iterator[tuple[Table, str]]:
        root, _, rest = module.partition(".")
        for each in self.tables:
            path = ".".join(part for part in (each.roots.get(root, ""), rest) if part)
            if root in each.roots and path in each.served:
                yield each, path


def _value(today: Today) -> Any:
    return getattr(importlib.import_module(today.home), today.name)


def _public(home: str, name: str) -> Today:
    """Return the name's public location in drivetrain: the package that has the name in ``__all__``."""
    if home.startswith(_LEGACY):
        value = _value(Today(home, name))
        for base in getattr(value, "__mro__", ())[:-1]:
            if base.__module__.startswith("drivetrain.") and not base.__module__.startswith(_LEGACY):
                return _public(base.__module__, base.__name__)  # the public base class is equivalent
        root = getattr(value, "__module__", home).partition(".")[0]
        is_foreign = root != "drivetrain" and getattr(sys.modules.get(root), name, None) is value
        return Today(root if is_foreign else home, name)
    if home.count(".") == 1 and name in getattr(importlib.import_module(home), "__all__", ()):
        return Today(home, name)
    parts = home.split(".")
    packages = [".".join(parts[: length + 1]) for length in range(len(parts))]
    public = (each for each in packages if name in getattr(importlib.import_module(each), "__all__", ()))
    return Today(next(public, home), name)
