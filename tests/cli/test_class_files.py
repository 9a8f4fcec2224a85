"""A class of a file: on a command line, in a configuration, and for commands that try a part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.cli import class_files
from drivetrain.errors import ConfigurationError

FILE = """
import beside_it
class Net:
    class Inner: ...
if __name__ == "__main__":
    raise SystemExit("the program ran")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program, and a module that it imports."""
    (tmp_path / "a_program.py").write_text(FILE)
    (tmp_path / "beside_it.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_is_imported_once_and_with_its_folder_but_its_program_does_not_run(folder: Path) -> None:
    found = class_files.object_at("a_program.py:Net.Inner")
    assert (found.__module__, found.__qualname__) == ("a_program", "Net.Inner")
    assert class_files.module_of(str(folder / "a_program.py")) is sys.modules["a_program"]
    assert sys.path[0] == str(folder)


def test_a_relative_path_begins_in_the_given_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert class_files.import_path("a_program.py:Net", str(folder)) == "a_program.Net"


def test_a_file_with_the_name_of_another_module_is_imported_beside_it(folder: Path) -> None:
    (folder / "json.py").write_text("class Net: ...")
    (folder / "2-nets.py").write_text("class Net: ...")
    path = class_files.import_path("json.py:Net")
    assert path.startswith("json_")
    assert class_files.import_path("json.py:Net") == path
    assert not hasattr(sys.modules["json"], "Net")
    assert class_files.import_path("2-nets.py:Net") == "_2_nets.Net"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("a_progam.py:Net", "a_progam.py. Did you mean 'a_program.py'?"),
        ("none/a.py:Net", "none/a.py. Known: none."),
        ("a_program.py:Nte", "a_program.py has no Nte. Did you mean 'Net'? Known: Net."),
        ("a_program.py:Net.Inenr", "a_program.py has no Net.Inenr."),
    ],
)
def test_what_is_not_there_is_an_error_that_names_what_is(folder: Path, place: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        class_files.object_at(place)
    assert said in str(raised.value)


def test_a_file_that_cannot_be_imported_raises_its_own_error_each_time(folder: Path) -> None:
    (folder / "broken_one.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            class_files.object_at("broken_one.py:Net")


def test_text_and_data_name_the_class_by_its_import_path_and_yaml_by_its_file_again(folder: Path) -> None:
    assert class_files.import_path("--data=a_program.py:Net") == "--data=a_program.Net"
    assert class_files.import_path("--trainer.callbacks+=a_program.py:Net") == "--trainer.callbacks+=a_program.Net"
    for other in ("a_program.py", "s3://a/b.py", "--x", "torch.optim.SGD", "{class_path: a_program.py:Net}"):
        assert class_files.import_path(other) == other
    data = {"model": {"class_path": "a_program.py:Net", "n": 1}, "callbacks": ["a_program.py:Net.Inner", None]}
    assert class_files.import_paths(data, "") == {
        "model": {"class_path": "a_program.Net", "n": 1}, "callbacks": ["a_program.Net.Inner", None]
    }  # fmt: skip
    written = "- class_path: a_program.Net.Inner\n- class_path: torch.optim.SGD\n- text: a_program.Net\n"
    restored = written.replace("path: a_program.Net", "path: a_program.py:Net")
    assert class_files.places(written, class_files.imported) == restored
