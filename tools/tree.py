"""Print every file of the package with the first line of its docstring, folder by folder, the lowest layer first."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "drivetrain"
LAYERS = (
    ("vocabulary", "errors.py parity.py base"),
    ("the machine", "accelerators precision checkpoints clusters logbook"),
    ("many devices", "launchers data strategies"),
    ("the decision and its motion", "settings.py plan.py engine"),
    ("what the user writes", "callback.py module"),
    ("the loops", "loops advice"),
    ("the front", "__init__.py trainer"),
    (
        "leaves",
        "callbacks integrations loggers plugins profilers tuner cli compat testing proof doctor trials forecast report "
        "__main__.py",
    ),
    ("earlier generations", "legacy"),
)
"""What each layer is called, and its folders and files, the lowest layer first."""


def first_paragraph(path: Path) -> str:
    """Return what a file says about itself first, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def main() -> None:
    """Print the layers."""
    for layer, names in LAYERS:
        print(f"-- {layer} --")
        for name in names.split():
            path = PACKAGE / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                print(f"{file.relative_to(PACKAGE).as_posix():<40} {first_paragraph(file)}")


if __name__ == "__main__":
    main()
