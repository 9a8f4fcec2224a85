"""Tables of texts that are files beside the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import drivetrain
from drivetrain.base.ini import tables

FILES = sorted(Path(drivetrain.__file__).parent.rglob("*.ini"))


def test_keys_keep_their_letters_and_values_their_lines_and_signs(tmp_path: Path) -> None:
    text = '# of a test\n[a: b]\nOne two = says: {x} 100%, "=" [and]\n    more\n# between\nthree =\n\n[c]\n'
    tmp_path.joinpath("names.ini").write_text(text)
    found = tables(str(tmp_path / "module.py"), "names.ini")
    assert found == {"a: b": {"One two": 'says: {x} 100%, "=" [and]\nmore', "three": ""}, "c": {}}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_of_the_package_can_be_read_and_says_what_it_is(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    found = tables(str(path), path.name)
    assert found
    assert all(found.values())
