"""CHANGELOG.md: its layout, and its versions against the package's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(__file__).parent.parent
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def wrong_in(text: str, version: str) -> list[str]:
    """What does not fit the layout, or the package's ``version``."""
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    wrong = [] if versions[:1] == ["[Unreleased]"] else ["the first section is not [Unreleased]"]
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in versions[1:]]
    wrong += [f"## {heading}" for heading, match in zip(versions[1:], released, strict=True) if match is None]
    numbers = [tuple(map(int, match[1].split("."))) for match in released if match is not None]
    if numbers != sorted(set(numbers), reverse=True):
        wrong.append("versions are not in order")
    if numbers and numbers[0] > tuple(map(int, version.split("."))):
        wrong.append(f"{numbers[0]} is newer than {version}")
    if not numbers and version not in text.split("\n## ")[1]:
        wrong.append(f"the unreleased section does not say {version}")
    wrong += [f"### {kind}" for kind in re.findall(r"^### (.*)$", text, re.MULTILINE) if kind not in KINDS]
    return wrong


def test_the_changelog_has_its_layout_and_the_packages_version() -> None:
    assert wrong_in((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), drivetrain.__version__) == []


def test_the_package_and_pyproject_toml_name_one_version() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [drivetrain.__version__]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("# C\n## [0.1.0] - 2026-01-01\n", "the first section is not [Unreleased]"),
        ("# C\n## [Unreleased]\n## 0.1.0\n", "## 0.1.0"),
        ("# C\n## [Unreleased]\n### News\n", "### News"),
        ("# C\n## [Unreleased]\n## [0.3.0] - 2026-01-01\n", "(0, 3, 0) is newer than 0.2.0"),
        ("# C\n## [Unreleased]\n## [0.1.0] - 2026-01-01\n## [0.2.0] - 2026-01-01\n", "versions are not in order"),
    ],
)
def test_what_does_not_fit_is_found(text: str, wrong: str) -> None:
    """The control."""
    assert wrong in wrong_in(text, "0.2.0")
