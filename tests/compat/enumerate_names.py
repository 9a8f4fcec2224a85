"""Write down what the original offers: its public modules and their public names, which are facts about it.

Run it with the Python of an environment that holds the original, and without ``drivetrain exec``::

    python tests/compat/enumerate_names.py > tests/compat/public_names.json

A name without a leading underscore counts as public in a module that lists it in ``__all__``, that defines or assigns
it, or that imports it from its own distribution without using it, which is how a name is passed on. Every path is read
under ``lightning.``; ``pytorch_lightning`` and ``lightning_fabric`` are the same trees under their older names.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import pathlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Iterator

TOP = "lightning"
PACKAGES = ("lightning.pytorch", "lightning.fabric")
SIBLINGS = (TOP, "lightning_utilities")
PRIVATE_TO_THE_PROJECT = {"log", "warning_cache", "rank_zero_module"}


def paths() -> list[str]:
    """Every public module path."""
    found = [TOP]
    for package in PACKAGES:
        folder = importlib.import_module(package).__path__
        found += [package, *(info.name for info in pkgutil.walk_packages(folder, f"{package}.", lambda _: None))]
    return sorted(name for name in found if not any(part.startswith("_") for part in name.split(".")))


def names(module: types.ModuleType) -> list[str]:
    """The public names of one module that are there in this environment."""
    tree = ast.parse(pathlib.Path(str(module.__file__)).read_text(encoding="utf-8"))
    found = set(getattr(module, "__all__", ()))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name, imported in bound(tree.body):
        if not imported or name not in used:
            found.add(name)
    found -= PRIVATE_TO_THE_PROJECT
    return sorted(name for name in found if not name.startswith("_") and in_surface(module, name))


def in_surface(module: types.ModuleType, name: str) -> bool:
    """Whether ``module`` really has ``name``, and it is no module."""
    with contextlib.suppress(Exception):
        return not isinstance(getattr(module, name), types.ModuleType)
    return False


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """The names that statements bind at a module's top level, and whether by importing from the distribution."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, False
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((part.id, False) for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in SIBLINGS:
            yield from ((alias.asname or alias.name, True) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from bound(getattr(node, part, []))


def main() -> None:
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}
    for path in paths():
        try:
            found[path] = names(importlib.import_module(path))
        except ImportError as error:
            print(f"left out: {path}: {error}", file=sys.stderr)
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
