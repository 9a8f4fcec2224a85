"""Writes docs/compat_members.md: signatures and members of the original's public names beside drivetrain's.

Run it after changing a public signature, or after adding a reason to docs/compat_differences.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.compat import finder, table

VERSION = table.LATEST.version

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compat_members.md"
FACTS = ROOT / "tests" / "compat" / "public_surface.json"


def load(path: Path) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HEAD = f"""\
# Signatures and members beside Lightning's

Every public class and function of Lightning {VERSION}: the arguments of its constructor and of its methods, with
places and defaults, its properties, and the attributes that it sets. A call that fits Lightning's signature fits
drivetrain's and means the same, except for what this page lists. [compat_names.md](compat_names.md) lists the names of
each module; [compat.md](compat.md) describes how programs written for Lightning run, and which numbers differ.

This page is written by `docs/make_compat_members.py` from `tests/compat/public_surface.json`, which
`tests/compat/enumerate_surface.py` wrote in an environment with Lightning, and from the reasons in
`docs/compat_differences.py`. `tests/compat/test_members.py` compares it with drivetrain.
"""

reasons = load(ROOT / "docs" / "compat_differences.py")
surface = load(ROOT / "tests" / "compat" / "enumerate_surface.py")


@cache
def facts() -> dict[str, dict[str, Any]]:
    """What the original has, by name below ``lightning``."""
    found: dict[str, dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))
    return found


@cache
def ours(key: str) -> Any:
    """The drivetrain object that a program gets for a name of the original; ``None`` if it gets none."""
    path, _, name = key.rpartition(".")
    family = path.partition(".")[0]
    places = [path, *(served for served in table.LATEST.served if served.partition(".")[0] == family)]
    for place in places:
        if place in table.LATEST.served and (found := finder.find(place, name)) is not None:
            return getattr(importlib.import_module(found[0]), found[1], None)
    return None


@cache
def differences() -> dict[str, str]:
    """Every difference: what it is about, such as ``pytorch.Trainer.fit(ckpt_path)``, and what is different."""
    return {about: what for found in differences_by_key().values() for about, what in found.items()}


@cache
def differences_by_key() -> dict[str, dict[str, str]]:
    """The same, by the class or function to which they belong."""
    return {key: dict(differences_of(key)) for key in facts()}


def differences_of(key: str) -> Iterator[tuple[str, str]]:
    """The differences of one class or function."""
    fact, mine = facts()[key], ours(key)
    if mine is None:
        yield key, "missing"
        return
    described = surface.describe(mine, "drivetrain")
    yield from call_differences(key, fact["call"], described["call"])
    if fact["kind"] != "class":
        return
    if described["kind"] != "class":
        yield key, "a function here"
        return
    for name, expected in members(key).items():
        yield from member_differences(f"{key}.{name}", expected, mine, name)


def members(key: str) -> dict[str, Any]:
    """The members to compare: what is new in the class, and what it has from bases that ours does not derive from."""
    mine = ours(key)
    found: dict[str, Any] = {}
    for base in reversed(facts()[key]["bases"]):
        counterpart = ours(base)
        if not isinstance(counterpart, type) or not issubclass(mine, counterpart):
            found.update(facts()[base]["members"])
    found.update(facts()[key]["members"])
    if isinstance(mine, type) and issubclass(mine, ours("pytorch.Callback")):  # a hook is called as the contract says
        found.update(
            {name: contract for name, contract in facts()["pytorch.Callback"]["members"].items() if name in found}
        )
    return found


def member_differences(about: str, expected: Any, cls: type, name: str) -> Iterator[tuple[str, str]]:
    """What is different of one member of a class."""
    if isinstance(expected, str) and (name in attributes(cls) or hasattr(cls, name)):
        if callable(getattr(cls, name, None)) and expected in ("property", "value"):
            yield about, f"a method here; there a {expected}"
        return
    if not hasattr(cls, name):
        yield about, "missing"
        return
    if isinstance(expected, str):
        return
    owner = next(owner for owner in cls.__mro__ if name in vars(owner))
    member = vars(owner)[name]
    if not callable(member) and not isinstance(member, (staticmethod, classmethod)):
        yield about, "a value here; there a method"
        return
    yield from call_differences(about, expected, surface.bound_arguments(owner, name, member))


@cache
def attributes(cls: type) -> set[str]:
    """What instances have: what methods of the class and of its bases set, and what it declares."""
    return {name for owner in cls.__mro__ for name, _ in surface.vars_of_one(owner)}


def call_differences(about: str, expected: list[str] | str, mine: list[str] | str) -> Iterator[tuple[str, str]]:
    """The ways in which a call that fits ``expected`` would fail or mean something else here."""
    if not isinstance(expected, list) or not isinstance(mine, list) or expected == ["*args", "**kwargs"]:
        return
    there, here = parse(expected), parse(mine)
    count = sum(position is not None for position, _ in here.values())
    for name, (position, default) in there.items():
        if name in ("*", "**"):
            if name not in here:
                yield f"{about}({name})", "takes no further arguments"
        elif name not in here:
            if "**" not in here and not ("*" in here and position is not None and position >= count):
                yield f"{about}({name})", "missing"
        else:
            yield from argument_differences(f"{about}({name})", (position, default), here[name])
    for name, (_, default) in here.items():
        if name not in there and name not in ("*", "**") and not default and "**" not in there:
            yield f"{about}({name})", "required here"


def argument_differences(
    about: str, there: tuple[int | None, str], here: tuple[int | None, str]
) -> Iterator[tuple[str, str]]:
    """What is different of one argument: the place at which it may be passed, and its default."""
    if there[0] is not None and here[0] != there[0]:
        place = "by keyword only" if here[0] is None else f"number {here[0] + 1}"
        yield about, f"{place}; there number {there[0] + 1}"
    elif there[1] and here[1] != there[1]:
        yield about, f"default {here[1] or 'none'}; there {there[1]}"


def parse(found: list[str]) -> dict[str, tuple[int | None, str]]:
    """Arguments by name: position, ``None`` if by keyword only; and default, "" if it has none.

    "*" stands for further positional arguments, "**" for further keywords.
    """
    parsed: dict[str, tuple[int | None, str]] = {}
    position: int | None = 0
    for written in found:
        if written.startswith("**"):
            parsed["**"] = None, ""
        elif written.startswith("*"):
            position = None
            if written != "*":
                parsed["*"] = None, ""
        else:
            name, _, default = written.partition("=")
            parsed[name] = position, default
            position = None if position is None else position + 1
    return parsed


# ---- what becomes of them --------------------------------------------------------------------------------------------


def covered(about: str, patterns: str) -> list[str]:
    """Return those of the patterns, separated by spaces, that cover a difference."""
    return [
        pattern
        for pattern in patterns.split()
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), about) is not None
    ]


def unexplained() -> list[str]:
    """Return the differences that no table covers."""
    tables = (*reasons.ON_PURPOSE.values(), *reasons.NOT_HERE.values(), reasons.OPEN)
    return [about for about in differences() if not covered(about, " ".join(tables))]


def stale() -> list[str]:
    """Return the patterns with a reason that cover no difference."""
    patterns = " ".join((*reasons.ON_PURPOSE.values(), *reasons.NOT_HERE.values())).split()
    used = {pattern for about in differences() for pattern in covered(about, " ".join(patterns))}
    return [pattern for pattern in patterns if pattern not in used]


def page() -> str:
    """The page's text."""
    found = differences()
    named = [about for texts in (reasons.ON_PURPOSE, reasons.NOT_HERE) for text in texts.values() for about in found
             if covered(about, text)]  # fmt: skip
    still_open = [about for about in found if about not in named]
    parts = [HEAD, "\n## Different on purpose\n\n| what | here | why |\n|---|---|---|\n"]
    parts += rows(reasons.ON_PURPOSE, found)
    parts += ["\n## Not here\n\n| what | here | why |\n|---|---|---|\n", *rows(reasons.NOT_HERE, found)]
    if still_open:
        parts += ["\n## Not here yet\n\n| what | here |\n|---|---|\n"]
        parts += [f"| `{about}` | {found[about]} |\n" for about in sorted(still_open)]
    parts += ["\n## Compared\n\n| name | compared | same |\n|---|---|---|\n"]
    total = same = 0
    for key in facts():
        names = compared(key)
        different = differences_by_key()[key]
        count = 0 if key in different else len(names) - sum(name in different for name in names)
        total, same = total + len(names), same + count
        parts.append(f"| `{key}` | {len(names)} | {count} |\n")
    return "".join(parts) + f"\nIn all, {same} of {total}: classes, functions, members and arguments.\n"


def rows(texts: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    """The lines of a table of reasons; a pattern that covers several differences is one line."""
    for reason, text in texts.items():
        for pattern in text.split():
            about = [each for each in found if covered(each, pattern)]
            what = found[about[0]] if len(about) == 1 else f"{len(about)} differences"
            yield f"| `{pattern}` | {what} | {reason} |\n"


def compared(key: str) -> list[str]:
    """What is compared of a class or function: itself, its arguments, its members and theirs."""
    names = [key, *of_call(key, facts()[key]["call"])]
    if facts()[key]["kind"] == "class" and ours(key) is not None:
        for name, expected in members(key).items():
            names += [f"{key}.{name}", *of_call(f"{key}.{name}", expected)]
    return names


def of_call(about: str, call: list[str] | str) -> list[str]:
    """The names of a call's arguments."""
    return [f"{about}({name})" for name in parse(call)] if isinstance(call, list) else []


if __name__ == "__main__":
    for each in unexplained():
        print(f"no reason in docs/compat_differences.py: {each}", file=sys.stderr)
    PAGE.write_text(page(), encoding="utf-8")
