"""The command ``drivetrain migrate``."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from drivetrain.base import files
from drivetrain.compat import table
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.migrate.program import migrate
from drivetrain.legacy.migrate.source import Source

_EPILOG = """\
Each line of the report is FILE:LINE: and what was changed; "differs:" and what has another result, though the line may
stay; or "left:" and what a person has to do.
Exit code: 0 if nothing is left, 1 if something is (with --check: if a file would change), 2 if a file cannot be read.
"""


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain migrate") -> int:
    """Rewrite programs that were written for Lightning.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog, description="Rewrite programs that were written for Lightning, and report what differs.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("files", nargs="+", metavar="FILE", help="a Python file, or a folder of such files")
    parser.add_argument("--diff", action="store_true", help="show the changes, and write nothing")
    parser.add_argument("--check", action="store_true", help="only report, and write nothing")
    parser.add_argument(
        "--generation", choices=("2", *table.GENERATIONS), default="", metavar="VERSION",
        help=f"the version of Lightning that the files were written for: {', '.join(('2', *table.GENERATIONS))}; by "
        "default each file's imports and arguments tell",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        done = [
            (path, migrate(str(path), path.read_bytes(), given.generation)) for path in _python_files(given.files)
        ]  # all programs are parsed before anything is written
    except (ConfigurationError, OSError) as error:
        print(f"{prog}: {error} Nothing was written.", file=sys.stderr)
        return 2
    changed = 0
    for path, source in done:
        _report(source)
        if source.result() == source.text:
            continue
        changed += 1
        if given.diff:
            sys.stdout.writelines(_diff(source))
        elif not given.check:
            write(path, source.content())
    left = sum(remark.is_left for _, source in done for remark in source.remarks)
    verb = "would change" if given.diff or given.check else "changed"
    print(f"{_counted(len(done), 'file')}: {changed} {verb}, {_counted(left, 'line')} left for you.")
    return int(left > 0 or (given.check and changed > 0))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically, keeping its permissions; a symbolic link is kept, and its target replaced."""
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode)
    with files.replacing(target) as stream:
        stream.write(content)
        with contextlib.suppress(AttributeError):  # Windows has no such permissions
            os.fchmod(stream.fileno(), mode)


def _python_files(given: Iterable[str]) -> Iterator[Path]:
    """Return the files, and those in the folders, each once.

    Raises:
        ConfigurationError: a file is not a Python file.
    """
    seen: set[str] = set()
    for name in given:
        path = Path(name)
        if path.suffix == ".ipynb":
            raise ConfigurationError(
                f"{name}: notebooks are not rewritten. Convert it with `jupyter nbconvert --to script` first."
            )
        if not path.exists():
            raise ConfigurationError(f"{name}: there is no such file.")
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for each in inside:
            hidden = any(part.startswith(".") for part in each.relative_to(path).parts) if path.is_dir() else False
            if not hidden and (real := os.path.realpath(each)) not in seen:
                seen.add(real)
                yield each


def _report(source: Source) -> None:
    for remark in source.remarks:
        print(f"{source.name}:{remark.line}: {remark.text}")


def _diff(source: Source) -> Iterator[str]:
    before, after = (text.splitlines(keepends=True) for text in (source.text, source.result()))
    for line in difflib.unified_diff(before, after, source.name, source.name):
        yield line if line.endswith(("\n", "\r")) else f"{line}\n"
