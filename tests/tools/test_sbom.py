"""The bill of materials: what it says of each dependency, and that it depends on the wheel alone."""

from __future__ import annotations

import hashlib
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent
METADATA = """\
Metadata-Version: 2.4
Name: thing
Version: 1.2
Summary: A thing.
License-Expression: Apache-2.0
Requires-Dist: torch>=2.9
Requires-Dist: Some_Parser<5,>=4.53; extra == 'cli'
Requires-Dist: some-parser>=4; extra == 'all'
Requires-Dist: pytest; extra == 'dev'
Requires-Dist: torch; extra == 'all'
Provides-Extra: all
Provides-Extra: cli
Provides-Extra: dev
"""


@pytest.fixture(scope="module")
def sbom() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "sbom.py"))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "thing-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing-1.2.dist-info/METADATA", METADATA)
    return path


def test_each_dependency_is_external_with_its_range_and_its_extras(sbom: dict[str, Any], wheel: Path) -> None:
    bill = sbom["bill_of"](wheel)
    parts = {part["name"]: part for part in bill["components"]}
    assert list(parts) == ["some-parser", "torch"]  # and not pytest, which the extra dev asks for
    assert parts["some-parser"]["versionRange"] == "vers:pypi/>=4|>=4.53|<5"
    assert parts["some-parser"]["scope"] == "optional"
    assert [each["value"] for each in parts["some-parser"]["properties"]] == ["all", "cli"]
    assert (parts["torch"]["versionRange"], parts["torch"]["scope"]) == ("vers:pypi/>=2.9", "required")
    assert all(part["isExternal"] and "version" not in part for part in parts.values())
    component = bill["metadata"]["component"]
    assert component["purl"] == "pkg:pypi/thing@1.2"
    assert component["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert component["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert bill["dependencies"] == [
        {"ref": component["bom-ref"], "dependsOn": [part["bom-ref"] for part in bill["components"]]}
    ]


def test_equal_wheels_have_equal_bills(sbom: dict[str, Any], wheel: Path) -> None:
    first = sbom["write_bill"](wheel)
    assert first.name == "thing-1.2.cdx.json"
    before = first.read_bytes()
    assert sbom["write_bill"](wheel).read_bytes() == before
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("thing/other.py", "")
    assert sbom["write_bill"](wheel).read_bytes() != before


def test_a_range_is_in_the_syntax_of_package_urls(sbom: dict[str, Any]) -> None:
    assert sbom["range_of"](SpecifierSet("!=2.5,<10,>=2.0")) == "vers:pypi/>=2.0|!=2.5|<10"
    assert sbom["range_of"](SpecifierSet("")) == "vers:pypi/*"
    with pytest.raises(ValueError, match="'~=2.0': this program writes"):
        sbom["range_of"](SpecifierSet("~=2.0"))
