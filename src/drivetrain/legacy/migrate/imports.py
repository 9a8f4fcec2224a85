"""Rewrites imports of Lightning as imports of drivetrain, and the expressions that use the imported modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import NamedTuple

import drivetrain
from drivetrain.base.lazy import public_modules
from drivetrain.legacy.migrate.bindings import Bindings, Bound, Chain
from drivetrain.legacy.migrate.names import Today

_OF_LIGHTNING = re.compile(r"(pytorch_lightning|lightning_fabric|lightning\.(pytorch|fabric))(\.\w+)*")


class _Item(NamedTuple):
    """One imported name of the rewritten program: the module, the name in the module, and the local name."""

    module: str
    name: str
    local: str

    @property
    def text(self) -> str:
        return self.name if self.name == self.local else f"{self.name} as {self.local}"

    @property
    def statement(self) -> str:
        if not self.name:
            return f"import {self.module}" if self.module == self.local else f"import {self.module} as {self.local}"
        return f"from {self.module} import {self.text}"


class Imports:
    """The imports of Lightning in a program."""

    def __init__(self, bindings: Bindings) -> None:
        self.bindings, self.source, self.names = bindings, bindings.source, bindings.names
        self.bound_by = {id(each.alias): each for each in bindings.bound}
        self.needed: dict[int, list[_Item]] = {}  # alias of an imported module -> names to import instead

    def run(self) -> None:
        """Rewrite the imports, and the expressions that begin with an imported module."""
        for name in sorted({each.local for each in self.bindings.bound} & self.bindings.taken):
            first = next(each for each in self.bindings.bound if each.local == name)
            self.source.left(
                first.statement, f"{name} is also bound to something else in this file: look at each use of it"
            )
        for chain in self.bindings.chains():
            self._rewrite_chain(chain)
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                self._rewrite_import(node)
            elif isinstance(node, ast.ImportFrom) and node in {each.statement for each in self.bindings.bound}:
                self._rewrite_from(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _OF_LIGHTNING.fullmatch(node.value):
                self.source.left(node, f'the string "{node.value}" names a module or a logger of Lightning')
        for star in self.bindings.star_imports:
            self._rewrite_star(star)
        self._import_callbacks()

    def _import_callbacks(self) -> None:
        ours = [Today("drivetrain.callbacks", name) for name in sorted(set(self.bindings.callbacks))]
        first = self.bindings.first_import
        needed = [today for today in ours if self.bindings.meaning(ast.Name(today.name, ast.Load())) != today]
        if needed and first is not None:
            for today in needed:
                if today.name in self.bindings.taken:
                    self.source.left(first, f"{today.name} is not drivetrain's in this file: import it as another name")
            self.source.insert_before(first, _statements([_Item(*today, today.name) for today in needed]))

    # ---- expressions -------------------------------------------------------------------------------------------------

    def _rewrite_chain(self, chain: Chain) -> None:
        was = re.sub(r"\s", "", ast.unparse(chain.node))
        now = self._chain_today(chain, was)
        if now == was:
            return
        if self.source.is_in_f_string(chain.node):
            self.source.left(chain.node, f"{was} in an f-string: write {now}")
            return
        self.source.replace(*self.source.span(chain.node), now)
        self.source.changed(chain.node, was, now)

    def _chain_today(self, chain: Chain, was: str) -> str:
        """Return drivetrain's expression for ``chain``; without a counterpart in drivetrain, the original
        expression.
        """
        local, module = self._binding_today(chain.bound)
        if chain.name and chain.today is None:
            if chain.name == "__version__":
                self.source.left(chain.node, f"{was} is drivetrain's version now, {drivetrain.__version__}")
            elif not chain.name.startswith("__"):
                self.source.left(chain.node, self.names.why_missing(chain.module, chain.name))
            return was if local is None else f"{local}{was[len(chain.bound.local) :]}"
        today = chain.today or Today(self.names.module(chain.module) or "", "")
        full = ".".join(part for part in today if part)
        if not full:
            self.source.left(chain.node, f"drivetrain has no module in the place of {chain.module}")
            return was
        if today.is_legacy:
            self._say_legacy(chain.node, today)
        if not _reaches(module, today):
            return self._import_for(chain.bound, today)
        return f"{local}{full[len(module or '') :]}"

    def _binding_today(self, bound: Bound) -> tuple[str | None, str | None]:
        """Return two values for an import after its rewrite: the local name, and the module of drivetrain that the name
        stands for. Both are ``None`` if drivetrain has no such module.
        """
        module = self.names.module(bound.module)
        if module is None:
            return None, None
        is_bare = isinstance(bound.statement, ast.Import) and bound.alias.asname is None
        return ("drivetrain" if is_bare else bound.local), module

    def _import_for(self, bound: Bound, today: Today) -> str:
        """Add an import of ``today`` next to the import of ``bound``, if needed; return the local name of ``today``."""
        name = today.name or today.home.rpartition(".")[2]
        taken = name in self.bindings.taken or name in {each.local for each in self.bindings.bound if each.name}
        existing = self.bindings.by_local.get(name)
        if existing is not None and existing.name and self.names.find(existing.module, existing.name) == today:
            return name
        local = f"drivetrain_{name}" if taken else name
        item = _Item(today.home, today.name, local) if today.name else _Item(*_split(today.home), local)
        items = self.needed.setdefault(id(bound.alias), [])
        if item not in items:
            items.append(item)
        return local

    # ---- statements --------------------------------------------------------------------------------------------------

    def _rewrite_import(self, node: ast.Import) -> None:
        doomed, before = set(), []
        for index, alias in enumerate(node.names):
            bound = self.bound_by.get(id(alias))
            if bound is None:
                continue
            before += self.needed.get(id(alias), [])
            start = self.source.span(alias)[0]
            module = self.names.module(alias.name)
            if alias.asname is None:
                module = "drivetrain" if self.names.is_module(alias.name) else None
            if module is not None and bound.local not in self.bindings.taken:
                self.source.replace(start, start + len(alias.name), module)
                rest = self.source.text_of(alias)[len(alias.name) :]
                self.source.changed(node, f"import {alias.name}{rest}", f"import {module}{rest}")
            elif self.needed.get(id(alias)):
                doomed.add(index)
            elif not self.names.is_module(alias.name):
                self.source.left(node, f"drivetrain has no module in the place of {alias.name}")
        self._put(node, doomed, before)

    def _rewrite_from(self, node: ast.ImportFrom) -> None:
        old = node.module or ""
        items = [self._item(self.bound_by[id(alias)], alias) for alias in node.names]
        more = [item for alias in node.names for item in self.needed.get(id(alias), [])]
        modules = [item.module for item in items if item.name and item not in more]
        kept = old if old in modules else max(modules, key=modules.count, default="")
        doomed = {index for index, item in enumerate(items) if item.module != kept or not item.name}
        before = [*(items[index] for index in sorted(doomed) if items[index].module != old), *more]
        for index, (item, alias) in enumerate(zip(items, node.names, strict=True)):
            if index not in doomed and item.name != alias.name:
                text = item.text if alias.asname is None else item.name
                start = self.source.span(alias)[0]
                self.source.replace(start, start + len(alias.name), text)
            if item.module != old and item.module:
                self.source.changed(node, f"from {old} import {self.source.text_of(alias)}", item.statement)
        if kept and kept != old:
            self._replace_module(node, kept)
        self._put(node, doomed, before)

    def _item(self, bound: Bound, alias: ast.alias) -> _Item:
        """Return the import of drivetrain's counterpart of an imported name; without a counterpart, the original
        import.
        """
        if not bound.name:  # the name is a module
            module = self.names.module(bound.module)
            if module is not None:
                return _Item(*_split(module), bound.local)
            if self.needed.get(id(alias)):
                return _Item("", "", bound.local)
            self.source.left(bound.statement, f"drivetrain has no module in the place of {bound.module}")
            return _Item(bound.module.rpartition(".")[0], alias.name, bound.local)
        today = self.names.find(bound.module, bound.name)
        if today is None:
            self.source.left(bound.statement, self.names.why_missing(bound.module, bound.name))
            return _Item(bound.module, bound.name, bound.local)
        if today.is_legacy:
            self._say_legacy(bound.statement, today)
        return _Item(today.home, today.name, bound.local)

    def _rewrite_star(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        found = self.names.all_of(module)
        if not found:
            self.source.left(node, f"drivetrain has no module in the place of {module}")
            return
        lines = _statements([_Item(today.home, today.name, name) for name, today in found.items()])
        self.source.insert_before(node, lines[:-1])
        self.source.replace(*self.source.span(node), lines[-1])
        self.source.changed(node, self.source.text_of(node), "; ".join(lines))

    def _put(self, node: ast.Import | ast.ImportFrom, doomed: set[int], more: list[_Item]) -> None:
        """Remove the names at the indices ``doomed`` from an import, and insert statements for ``more`` before the
        import.
        """
        lines = _statements([item for item in more if item.module])
        if len(doomed) == len(node.names):
            self.source.insert_before(node, lines[:-1])
            self.source.replace(*self.source.span(node), lines[-1])
            return
        self.source.insert_before(node, lines)
        self.source.remove([self.source.span(alias) for alias in node.names], doomed)

    def _replace_module(self, node: ast.ImportFrom, module: str) -> None:
        start, end = self.source.span(node)
        found = re.match(r"from[\s\\]+([\w.\s\\]+?)[\s\\]+import\b", self.source.text[start:end])
        assert found is not None
        self.source.replace(start + found.start(1), start + found.end(1), module)

    def _say_legacy(self, node: ast.AST, today: Today) -> None:
        self.source.differs(node, f"{today.home} keeps {today.name} for programs of its time: see docs/legacy.md")


def _reaches(module: str | None, today: Today) -> bool:
    """Whether an import of ``module`` is enough to use ``today``."""
    if module is None:
        return False
    if today.home == module:
        return True
    is_package = today.home.rpartition(".")[2] in public_modules("drivetrain") and today.home.count(".") == 1
    return module == "drivetrain" and is_package


def _split(module: str) -> tuple[str, str]:
    """Return the package and the name in the statement ``from package import name`` that imports ``module``. For
    drivetrain itself, the name is "".
    """
    parent, _, name = module.rpartition(".")
    return (parent, name) if parent else (module, "")


def _statements(items: Sequence[_Item]) -> list[str]:
    lines: dict[str, list[str]] = {}
    whole = []
    for item in items:
        if item.name:
            names = lines.setdefault(item.module, [])
            names += [item.text] if item.text not in names else []
        elif item.statement not in whole:
            whole.append(item.statement)
    return [*whole, *(f"from {module} import {', '.join(names)}" for module, names in sorted(lines.items()))]
