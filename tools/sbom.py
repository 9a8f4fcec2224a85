"""Write a software bill of materials for a wheel: CycloneDX JSON, made from the wheel's own metadata.

A wheel contains drivetrain's files and no other project's. So the bill lists what the environment must provide: each
declared dependency as an external component with the range of versions that the wheel accepts. Those of the extra
``dev``, which serve to develop drivetrain, are left out. No time and no random number is in it: equal wheels have equal
bills.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections import defaultdict
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version


def metadata_of(wheel: Path) -> Message:
    """Return the metadata in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def range_of(accepted: SpecifierSet) -> str:
    """Return a range of versions in the syntax of package URLs: ``>=4.53,<5`` as ``vers:pypi/>=4.53|<5``."""
    parts = sorted(accepted, key=lambda part: Version(part.version))
    if unknown := [str(part) for part in parts if part.operator not in (">=", "<", ">", "<=", "!=")]:
        raise ValueError(f"{unknown[0]!r}: this program writes ranges of >=, <=, >, < and != only")
    return "vers:pypi/" + ("|".join(map(str, parts)) or "*")


def components(metadata: Message) -> list[dict[str, Any]]:
    """Return a component for each declared dependency, in the order of names."""
    extras: dict[str, set[str]] = defaultdict(set)
    accepted: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        asking = [extra for extra in metadata.get_all("Provides-Extra", []) if extra != "dev"]
        needed_always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        asked_by = {extra for extra in asking if requirement.marker and requirement.marker.evaluate({"extra": extra})}
        if needed_always or asked_by:
            extras[name] |= {""} if needed_always else asked_by
            accepted[name] &= requirement.specifier
    return [
        {
            "type": "library", "bom-ref": f"pkg:pypi/{name}", "name": name, "purl": f"pkg:pypi/{name}",
            "isExternal": True, "versionRange": range_of(accepted[name]),
            "scope": "required" if "" in extras[name] else "optional",
            "properties": [{"name": "drivetrain:extra", "value": extra} for extra in sorted(extras[name] - {""})],
        }
        for name in sorted(accepted)
    ]  # fmt: skip


def bill_of(wheel: Path) -> dict[str, Any]:
    """Return the bill of a wheel."""
    metadata = metadata_of(wheel)
    purl = f"pkg:pypi/{metadata['Name']}@{metadata['Version']}"
    parts = components(metadata)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX", "specVersion": "1.7", "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": purl, "name": metadata["Name"], "version": metadata["Version"],
                "description": metadata["Summary"], "purl": purl,
                "licenses": [{"license": {"id": metadata["License-Expression"]}}],
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}],
            },
        },
        "components": parts,
        "dependencies": [{"ref": purl, "dependsOn": [part["bom-ref"] for part in parts]}],
    }  # fmt: skip


def write_bill(wheel: Path) -> Path:
    """Write the bill of a wheel beside it; return the file."""
    file = wheel.parent / ("-".join(wheel.name.split("-")[:2]) + ".cdx.json")
    file.write_text(json.dumps(bill_of(wheel), indent=2) + "\n", encoding="utf-8")
    return file


if __name__ == "__main__":
    print(write_bill(Path(sys.argv[1])))
