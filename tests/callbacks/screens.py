"""What a terminal shows of the text that was written to it."""

from __future__ import annotations

import re


def screen_of(written: str) -> list[str]:
    """Return the lines of an endless terminal: understands a carriage return, moving up and down, and erasing."""
    rows: list[str] = [""]
    x = y = 0
    for sequence, number, command, character in re.findall(r"(\x1b\[([0-9;?]*)([a-zA-Z]))|([\s\S])", written):
        rows += [""] * (y + 1 - len(rows))
        if command == "A":
            y = max(y - int(number or 1), 0)
        elif command == "K":
            rows[y] = "" if number == "2" else rows[y][:x]
        elif sequence:
            continue
        elif character == "\r":
            x = 0
        elif character == "\n":
            x, y = 0, y + 1
        else:
            rows[y] = rows[y][:x].ljust(x) + character + rows[y][x + 1 :]
            x += 1
    return [row.rstrip() for row in rows if row.strip()]
