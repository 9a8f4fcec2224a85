"""Write down the signatures and members of the original's public names, which are facts about it.

Run it with the Python of an environment that holds the original, and without ``drivetrain exec``::

    python tests/compat/enumerate_surface.py > tests/compat/public_surface.json

It describes each class and function of the original that :mod:`enumerate_names` lists, once, under the shortest path at
which it is public. Of a class it lists what the original itself defines, public names only, and leaves out what a base
has that is listed too. :func:`describe` does the same for drivetrain's objects, so that a test can compare the two.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import inspect
import json
import pathlib
import sys
import types
import warnings
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

ROOT = "lightning"


def describe(value: Any, root: str, listed: dict[Any, str] | None = None) -> dict[str, Any]:
    """Describe a class or a function.

    Args:
        value: it.
        root: the package whose members count, not those that other packages' base classes have.
        listed: what is described elsewhere, with its name there.

    Returns:
        ``kind``, and of a function ``call``; of a class ``call`` (its constructor), ``bases``, ``members`` (a method's
        arguments, or "property", "value" for what the class has, "attribute" for what its constructor sets).
    """
    if not inspect.isclass(value):
        return {"kind": "function", "call": arguments(value)}
    ours = [owner for owner in value.__mro__ if (owner.__module__ or "").split(".")[0] == root]
    bases = {listed[base]: base for base in value.__mro__[1:] if listed and base in listed}
    inherited = {name for base in bases.values() for name in vars_of(base, root)}
    members: dict[str, Any] = {}
    for owner in reversed(ours):
        for name, member in vars_of_one(owner):
            if owner is value or name not in inherited:
                members[name] = member
    members = dict(sorted(members.items()))
    return {"kind": "class", "call": constructor(value), "bases": sorted(bases), "members": members}


def vars_of(cls: type, root: str) -> set[str]:
    """The public members that ``cls`` has from classes of the package ``root``."""
    owners = [owner for owner in cls.__mro__ if (owner.__module__ or "").split(".")[0] == root]
    return {name for owner in owners for name, _ in vars_of_one(owner)}


@cache
def vars_of_one(cls: type) -> tuple[tuple[str, Any], ...]:
    """The public members that the class itself defines."""
    return tuple(members_of_one(cls))


def members_of_one(cls: type) -> Iterator[tuple[str, Any]]:
    """The same, one by one."""
    yield from ((name, "attribute") for name in sorted(assigned(cls)))
    yield from ((name, "attribute") for name in vars(cls).get("__annotations__", {}) if not name.startswith("_"))
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, (property, cached_property)):
            yield name, "property"
        elif isinstance(member, (staticmethod, classmethod, types.FunctionType)) or callable(member):
            yield name, "class" if inspect.isclass(member) else bound_arguments(cls, name, member)
        else:
            yield name, "value"


@cache
def assigned(cls: type) -> set[str]:
    """Public attributes that methods of the class set on ``self``."""
    node = classes_of(cls.__module__).get(cls.__qualname__)
    methods = [] if node is None else [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return {name for method in methods for name in set_on_self(method) if not name.startswith("_")}


@cache
def classes_of(module: str) -> dict[str, ast.ClassDef]:
    """The classes that a module's source defines, by qualified name; none where there is no source."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if not file.endswith(".py"):
        return {}
    found: dict[str, ast.ClassDef] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[prefix + child.name] = child
                look(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.FunctionDef):  # a class in a branch of "if" or "try"
                look(child, prefix)

    look(ast.parse(pathlib.Path(file).read_text(encoding="utf-8")), "")
    return found


def set_on_self(node: ast.AST) -> Iterator[str]:
    """The attributes that a method sets on ``self``, apart from those of classes inside it."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield from set_on_self(child)


def bound_arguments(cls: type, name: str, member: Any) -> list[str] | str:
    """A method's arguments as its caller passes them: without ``self``."""
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    found = arguments(function)
    if isinstance(found, str) or isinstance(member, staticmethod):
        return found
    return found[1:]


def constructor(cls: type) -> list[str] | str:
    """The arguments of a class's constructor; "" where it has none to speak of."""
    if issubclass(cls, enum.Enum):
        return ""
    return arguments(cls)


def arguments(value: Any) -> list[str] | str:
    """The arguments of a callable, each as it is written; "" where they cannot be known."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    found = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            keyword_only = True
            found.append(f"*{parameter.name}")
        elif parameter.kind is parameter.VAR_KEYWORD:
            found.append(f"**{parameter.name}")
        else:
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                keyword_only = True
                found.append("*")
            default = "" if parameter.default is parameter.empty else f"={literal(parameter.default)}"
            found.append(f"{parameter.name}{default}")
    return found


def literal(value: Any) -> str:
    """A default as it would be written."""
    if isinstance(value, enum.Enum):
        return repr(value.value) if isinstance(value, str) else f"<{type(value).__name__}.{value.name}>"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(literal(part) for part in value)})"
    if isinstance(value, (bool, int, float, str, bytes, type(None), dict, set, frozenset)):
        return repr(value)
    return f"<{getattr(value, '__name__', type(value).__name__).lstrip('_')}>"


def main() -> None:
    """Print the facts of the installed original."""
    from enumerate_names import names, paths

    warnings.simplefilter("ignore")
    public: dict[Any, str] = {}
    for path in sorted(paths(), key=lambda path: (path.count("."), path)):
        with contextlib.suppress(ImportError):  # it needs a package that is not installed
            module = importlib.import_module(path)
            for name in names(module) if path != ROOT else ():
                value = getattr(module, name)
                if callable(value) and (getattr(value, "__module__", None) or "").split(".")[0] == ROOT:
                    public.setdefault(value, f"{path}.{name}".removeprefix(f"{ROOT}."))
    facts = {key: describe(value, ROOT, public) for value, key in public.items()}
    rows = [f" {json.dumps(key)}: {json.dumps(fact, sort_keys=True)}" for key, fact in sorted(facts.items())]
    sys.stdout.write("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
