"""The command ``drivetrain new``: write a small project that trains, with a configuration and tests."""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

_FILES = {
    "README.md": "readme", "config.yaml": "config", "pyproject.toml": "pyproject", "tests/test_training.py": "tests",
    "$name/model.py": "model", "$name/data.py": "data",
}  # fmt: skip
"""The files of a new project, each with the name of its template in ``project/``."""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Write a project that trains: a model, its data, a configuration, tests and a README.",
    )  # fmt: skip
    made.add_argument("folder", metavar="FOLDER", help="a new folder; the package gets its name, such as my_project")
    return made


def main(arguments: Sequence[str], prog: str = "drivetrain new") -> int:
    """Write the project. Wrong usage raises ``SystemExit(2)``."""
    made = parser(prog)
    folder = Path(made.parse_args(arguments).folder)
    name = folder.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name in _taken():
        made.error(
            f"{name!r} cannot be the name of the project's package. Write small letters, digits and underscores, and "
            "no name of another package, as in my_project."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        made.error(f"{folder} exists and is not empty. Name a new folder.")
    for path, template in _FILES.items():
        target = folder / Template(path).substitute(name=name)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (Path(__file__).parent / "project" / f"{template}.txt").read_text(encoding="utf-8")
        target.write_text(Template(text).substitute(name=name), encoding="utf-8")
    (folder / name / "__init__.py").write_text(f'"""{name}: a model, and the data that it learns from."""\n', "utf-8")
    print(f"{folder} is written. Train with:\n\n  cd {folder}\n  drivetrain fit config.yaml")
    return 0


def _taken() -> set[str]:
    """Return the names that a project must not have, because its package would hide another package."""
    return {*sys.stdlib_module_names, "drivetrain", "torch", "numpy", "tests"}
