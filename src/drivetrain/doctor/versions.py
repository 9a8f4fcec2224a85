"""Checks that drivetrain supports the installed versions of Python, torch and optional packages."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import drivetrain
from drivetrain.doctor.checks import NOTE, WRONG, Finding, Items

_DEVELOPMENT = ("dev", "examples")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)\)?(?:;.*?\bextra\s*==\s*['\"]([\w-]+))?")
_PINNED_TO_TORCH = ("torchvision", "torchaudio")


class Requirement(NamedTuple):
    """A requirement of an installed distribution.

    Attributes:
        name: the package.
        wanted: the versions, such as ">=4.53,<5"; "": any.
        extra: the extra of drivetrain that requires the package; "": none.
    """

    name: str
    wanted: str
    extra: str


def check() -> Items:
    """Compare the installed packages with drivetrain's requirements."""
    yield f"drivetrain {drivetrain.__version__}"
    try:
        python = metadata.metadata("drivetrain")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        yield Finding(
            "drivetrain is imported from a folder, and is not an installed package.",
            "Which versions of other packages it needs is unknown.", _install(), NOTE,
        )  # fmt: skip
        return
    yield f"Python {platform.python_version()}"
    if not fits(platform.python_version(), python):
        yield Finding(
            f"Python is {platform.python_version()}, and drivetrain was tested with {python}.",
            "Parts of it may fail.", "an environment with one of these versions.",
        )  # fmt: skip
    missing = []
    for each in requirements("drivetrain"):
        if each.name == "drivetrain" or each.extra in _DEVELOPMENT:
            continue
        if (version := _version(each.name)) is not None:
            yield f"{each.name} {version}"
        elif each.extra:
            missing.append(each.name)
        if (not each.extra and version is None) or (version is not None and not fits(version, each.wanted)):
            yield Finding(
                f"{each.name} is {version or 'not installed'}, and drivetrain needs {each.name}{each.wanted}.",
                f"The parts of drivetrain that use {each.name} may fail.",
                f"pip install '{each.name}{each.wanted}'", NOTE if each.extra else WRONG,
            )  # fmt: skip
    if missing:
        yield f"not installed: {', '.join(sorted(set(missing)))}"
    yield from _made_for_another_torch()


def _install() -> str:
    """Return the command that installs drivetrain from a checkout or a wheel. No package index has drivetrain."""
    checkout = Path(drivetrain.__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {checkout}"
    return "pip install WHEEL, with the wheel from which this folder was made, or with a checkout."


def _made_for_another_torch() -> Items:
    torch = _version("torch")
    for name in _PINNED_TO_TORCH:
        for each in requirements(name):
            if torch is not None and each.name == "torch" and not each.extra and not fits(torch, each.wanted):
                yield Finding(
                    f"{name} {_version(name)} was made for torch{each.wanted}, and torch is {torch}.",
                    "Importing it fails, or its operations do.", f"pip install --upgrade torch {name}",
                )  # fmt: skip


def requirements(distribution: str) -> Iterator[Requirement]:
    """Yield the requirements of a distribution; nothing if the distribution is not installed."""
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        if (match := _REQUIREMENT.match(text)) is not None:
            yield Requirement(match[1], match[2].strip(), match[3] or "")


def fits(version: str, wanted: str) -> bool:
    """Return whether ``version`` satisfies ``wanted``. Suffixes such as "rc1" and "+cu130" are ignored."""
    own = _release(version)
    holds = {
        ">=": own.__ge__, "<=": own.__le__, "==": own.__eq__, "!=": own.__ne__, ">": own.__gt__, "<": own.__lt__,
    }  # fmt: skip
    return all(holds[sign](_release(number)) for sign, number in re.findall(r"([<>=!]=|[<>])\s*(\d[\w.]*)", wanted))


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"[\d.]*", version.partition("+")[0])
    numbers = [int(part) for part in (found[0] if found else "").split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
