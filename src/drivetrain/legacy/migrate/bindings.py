"""Finds which names in a program refer to Lightning's modules, classes and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from drivetrain.legacy.migrate.names import Names, Today
from drivetrain.legacy.migrate.source import Source


class Bound(NamedTuple):
    """A local name that an import binds to a module or another object of Lightning.

    Attributes:
        local: the name in the program.
        module: the imported module, or the module from which the name is imported.
        name: the object's name in the module; "" if the local name is the module itself.
        statement, alias: the import statement, and the part of the statement that binds the name.
    """

    local: str
    module: str
    name: str
    statement: ast.Import | ast.ImportFrom
    alias: ast.alias


class Chain(NamedTuple):
    """An expression such as ``pl.callbacks.Timer``, which ends with the name of a Lightning object.

    Attributes:
        bound: the local name with which the expression begins.
        node: the expression, without attributes after the name.
        module: the module of Lightning that contains the name.
        name: the name; "" if the expression is the module itself.
        today: the name's counterpart in drivetrain; ``None`` if there is none.
    """

    bound: Bound
    node: ast.expr
    module: str
    name: str
    today: Today | None


class Bindings:
    """Finds what the names in one program refer to.

    Args:
        source: the program.
        names: finds the counterparts of Lightning's names in drivetrain.

    Attributes:
        is_of_version_1: whether the program was written for version 1 of Lightning.
        callbacks: drivetrain's callbacks that the rewritten program must import.
        star_imports: the imports of all names, such as ``from lightning.pytorch import *``.
        first_import: the first statement that imports Lightning or drivetrain.
    """

    def __init__(self, source: Source, names: Names) -> None:
        self.source, self.names = source, names
        self.is_of_version_1 = False
        self.callbacks: list[str] = []
        imports = list(_imported(source.tree))
        of_lightning = [each for each in imports if names.belongs(each[1])]
        ours = [each for each in imports if each[1].partition(".")[0] == "drivetrain"]
        self.first_import = next((each[0] for each in imports if each in of_lightning or each in ours), None)
        self.star_imports = [
            node for node, _, alias in of_lightning if isinstance(node, ast.ImportFrom) and alias.name == "*"
        ]
        self.bound = [self._bound(*each) for each in of_lightning if each[2].name != "*"]
        self.taken = _stored(source.tree, {id(each.alias) for each in self.bound})
        self.by_local = {each.local: each for each in self.bound if each.local not in self.taken}
        self._classes = {node.name: node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}
        self._ours: dict[str, Today] = {}
        for node, module, alias in ours:
            name = alias.name if isinstance(node, ast.ImportFrom) else ""
            self._ours[alias.asname or name or "drivetrain"] = Today(module, name)

    def _bound(self, node: ast.Import | ast.ImportFrom, module: str, alias: ast.alias) -> Bound:
        if isinstance(node, ast.ImportFrom):
            inner, local = f"{module}.{alias.name}", alias.asname or alias.name
            if self.names.find(module, alias.name) is None and self.names.is_module(inner):
                return Bound(local, inner, "", node, alias)
            return Bound(local, module, alias.name, node, alias)
        root = module.partition(".")[0]
        return Bound(alias.asname or root, module if alias.asname else root, "", node, alias)

    def chains(self) -> list[Chain]:
        """Return the expressions that begin with one of Lightning's modules."""
        found = []
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.by_local:
                bound = self.by_local[node.id]
                if not bound.name:
                    found.append(self._chain(node, bound))
        return found

    def _chain(self, node: ast.Name, bound: Bound) -> Chain:
        module, parent = bound.module, self.source.parents.get(node)
        reached: ast.expr = node
        while isinstance(parent, ast.Attribute):
            today = self.names.find(module, parent.attr)
            if today is not None or not self.names.is_module(f"{module}.{parent.attr}"):
                return Chain(bound, parent, module, parent.attr, today)
            module, reached = f"{module}.{parent.attr}", parent
            parent = self.source.parents.get(parent)
        return Chain(bound, reached, module, "", None)

    def meaning(self, node: ast.expr) -> Today | None:
        """Return the object of drivetrain that an expression refers to; ``None`` if the expression does not refer to
        Lightning or drivetrain.
        """
        if isinstance(node, ast.Subscript):
            return self.meaning(node.value)
        if isinstance(node, ast.Name):
            bound = self.by_local.get(node.id)
            if bound is not None and bound.name:
                return self.names.find(bound.module, bound.name)
            return self._ours.get(node.id)
        start: ast.expr = node
        while isinstance(start, ast.Attribute):
            start = start.value
        if not isinstance(start, ast.Name) or not isinstance(node, ast.Attribute):
            return None
        if (bound := self.by_local.get(start.id)) is not None:
            chain = self._chain(start, bound)
            return chain.today if chain.node is node else None
        ours = self._ours.get(start.id)
        is_package = ours is not None and not ours.name and node.value is start
        return Today(ours.home, node.attr) if is_package and ours is not None else None

    def makes(self, node: ast.expr) -> Today | None:
        """Return the function or class of drivetrain that runs when the program calls ``node``. For a class of the
        program without ``__init__``, return the base class.
        """
        own = self._classes.get(node.id) if isinstance(node, ast.Name) else None
        if own is None or len(own.bases) != 1 or any(getattr(each, "name", "") == "__init__" for each in own.body):
            return self.meaning(node)
        return self.meaning(own.bases[0])

    def is_a(self, node: ast.ClassDef, name: str, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a class extends drivetrain's class ``name``, directly or through other classes of the program."""
        for base in node.bases:
            if (today := self.meaning(base)) is not None and today.name == name:
                return True
            local = self._classes.get(base.id) if isinstance(base, ast.Name) else None
            if local is not None and local.name not in seen and self.is_a(local, name, seen | {local.name}):
                return True
        return False


def _stored(tree: ast.Module, imports: set[int]) -> set[str]:
    """Return the names that the program binds. Names that only imports of Lightning bind are left out."""
    found: set[str | None] = set()
    absent = {  # names set to None, for example after a failed import
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None
        for target in node.targets
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in absent:
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias) and id(node) not in imports:
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, _NAMED):
            found.add(node.name)
    return {name for name in found if name}


_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def _imported(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, ast.alias]]:
    """Yield the statement, the module and the name of each import that is not relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, alias) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node, node.module or "", alias) for alias in node.names)
