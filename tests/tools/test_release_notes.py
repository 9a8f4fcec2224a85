"""make notes: the section of CHANGELOG.md on one version."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "release_notes.py"))
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- One thing.

## [0.1.0] - 2026-11-01

### Fixed

- Another.
"""


def test_the_notes_of_a_version_are_its_section() -> None:
    assert TOOL["notes_of"]("0.2.0", CHANGELOG) == "### Added\n\n- One thing."
    assert TOOL["notes_of"]("0.1.0", CHANGELOG) == "### Fixed\n\n- Another."


@pytest.mark.parametrize("version", ["0.3.0", "Unreleased"])
def test_a_version_without_a_section_or_with_an_empty_one_is_an_error(version: str) -> None:
    with pytest.raises(ValueError, match=rf"nothing under \[{version}\]; its sections are Unreleased, 0.2.0, 0.1.0"):
        TOOL["notes_of"](version, CHANGELOG)


def test_the_projects_changelog_has_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL["main"]("Unreleased") == 0
    assert "### Added" in capsys.readouterr().out
    assert TOOL["main"]("99.0.0") == 1
    assert "99.0.0" in capsys.readouterr().err
