"""docs/stability.md against the package, and the versions of the contracts that it speaks of."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.accelerators import Accelerator, CPUAccelerator
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import SingleDeviceStrategy, Strategy

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
PRIVATE = {"drivetrain.advice", "drivetrain.base", "drivetrain.logbook", "drivetrain.loops", "drivetrain.trainer"}


def test_the_page_puts_every_package_in_one_place() -> None:
    package = Path(drivetrain.__file__).parent
    folders = {f"drivetrain.{file.parent.name}" for file in package.glob("*/__init__.py")}
    rows = Counter(re.findall(r"^\| `(drivetrain[.\w]*)` \|", PAGE, re.MULTILINE))
    assert rows.keys() - {"drivetrain"} == folders - PRIVATE
    assert set(rows.values()) == {1}
    private = PAGE.partition("## Not public")[2]
    assert {name for name in PRIVATE if f"`{name}`" in private} == PRIVATE


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", "docs/own_accelerator.md", "docs/own_strategy.md"])
def test_readers_who_need_the_page_are_led_to_it(page: str) -> None:
    assert re.search(r"\]\((docs/)?stability\.md\)", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("contract", [Accelerator, Strategy])
def test_a_contract_for_experts_says_so_and_its_version_is_that_of_the_page(contract: Any) -> None:
    assert "for experts" in contract.__doc__
    row = re.findall(rf"^\|.*the contract `{contract.__name__}`.*$", PAGE, re.MULTILINE)
    assert len(row) == 1
    assert f"version {contract.contract_version};" in row[0]


@pytest.mark.parametrize(("base", "kind"), [(CPUAccelerator, "accelerator"), (SingleDeviceStrategy, "strategy")])
def test_a_class_for_another_version_of_its_contract_is_refused(base: type[Any], kind: str) -> None:
    same = type("Same", (base,), {"contract_version": base.contract_version})
    type("Inherits", (same,), {})
    with pytest.raises(ConfigurationError, match=rf"Newer was written for version 2 of the {kind} contract.*version 1"):
        type("Newer", (base,), {"contract_version": 2})
    with pytest.raises(ConfigurationError, match="contract_version = 1"):
        type("Unnumbered", (base,), {"contract_version": None})
