"""Draw what a command prints as a picture of a terminal: ``terminal_picture.py PICTURE.svg COMMAND ...``.

docs/images/prove_resume.svg is of ``drivetrain prove-resume train.py``, with the loop in docs/prove_resume.md;
docs/images/log_file.svg is of a fit that logs two values, with 145 columns. The variable COLUMNS sets the width.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

WIDTH = int(os.environ.get("COLUMNS", "110"))


def main(target: str, command: list[str]) -> int:
    """Run ``command``, show what it prints, and write the picture; return the command's exit code."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="")
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {shlex.join(command)}", "bold"))
    console.print(Text(done.stdout.rstrip()))
    picture = console.export_svg(title="", theme=SVG_EXPORT_THEME, unique_id="terminal")
    # rich's pictures fetch a font from the network; this one takes what the reader's machine has.
    picture = re.sub(r"@font-face {[^}]*}", "", picture).replace("Fira Code, monospace", "monospace")
    picture = picture.replace("font-family: Fira Code", "font-family: monospace")
    picture = picture.replace("<svg ", '<svg xml:space="preserve" ', 1)  # else some viewers drop what indents a line
    Path(target).write_text(re.sub(r"\s*\n\s*", "\n", picture), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
