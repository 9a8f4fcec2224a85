"""The command ``drivetrain migrate``."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.cli.failed import failed
from drivetrain.compat import table
from drivetrain.errors import ConfigurationError, number_of

if TYPE_CHECKING:
    from drivetrain.legacy.migrate.source import Source

with on_first_use:
    from drivetrain.legacy.migrate import configuration, program

_CONFIGURATIONS = (".yaml", ".yml")
_EPILOG = """\
Each line of the report is FILE:LINE: and what was changed; "differs:" and what has another result, though the line may
stay; or "left:" and what a person has to do.
Exit code: 0 if nothing is left, 1 if something is (with --check: if a file would change), 2 if a file cannot be read.
"""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Rewrite programs that were written for Lightning, and report what differs.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    made.add_argument(
        "files", nargs="+", metavar="FILE", help="a Python file, a configuration in YAML, or a folder of such files"
    )
    made.add_argument("--diff", action="store_true", help="show the changes, and write nothing")
    made.add_argument("--check", action="store_true", help="only report, and write nothing")
    made.add_argument(
        "--generation", choices=("2", *table.GENERATIONS), default="", metavar="VERSION",
        help=f"the version of Lightning that the files were written for: {', '.join(('2', *table.GENERATIONS))}; by "
        "default each file's imports and arguments tell",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="print the report for programs; with --diff, the changes too")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain migrate") -> int:
    """Rewrite programs that were written for Lightning.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        The exit code.
    """
    given = parser(prog).parse_args(arguments)
    try:
        done = [
            (path, _migrated(path, given.generation)) for path in _files(given.files)
        ]  # parse all programs before the first write
    except (ConfigurationError, OSError) as error:
        return failed(f"{prog}: {error} Nothing was written.", given.json)
    changes = [(path, source) for path, source in done if source.result() != source.text]
    changed, left = len(changes), sum(remark.is_left for _, source in done for remark in source.remarks)
    code = int(left > 0 or (given.check and changed > 0))
    for path, source in changes:
        if not (given.diff or given.check):
            write(path, source.content())
    if given.json:
        files_of = [_as_data(source, given.diff) for _, source in done]
        print(json.dumps({"files": files_of, "changed": changed, "left": left}, indent=2))
        return code
    for _, source in done:
        sys.stdout.writelines(f"{source.name}:{remark.line}: {remark.text}\n" for remark in source.remarks)
        sys.stdout.writelines(_diff(source) if given.diff else ())
    verb = "would change" if given.diff or given.check else "changed"
    print(f"{number_of(len(done), 'file')}: {changed} {verb}, {number_of(left, 'line')} left for you.")
    return code


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically, with unchanged permissions. For a symbolic link, replace the target of the link."""
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode)
    with files.replacing(target) as stream:
        stream.write(content)
        with contextlib.suppress(AttributeError):  # Windows has no fchmod
            os.fchmod(stream.fileno(), mode)


def _migrated(path: Path, generation: str) -> Source | configuration.Configuration:
    kind = configuration.Configuration if path.suffix in _CONFIGURATIONS else program.migrate
    return kind(str(path), path.read_bytes(), generation)


def _files(given: Iterable[str]) -> Iterator[Path]:
    """Return the files among ``paths`` and the files in folders among ``paths``, without duplicates.

    Raises:
        ConfigurationError: a path is a notebook, or does not exist.
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
        endings = (".py", *_CONFIGURATIONS)
        inside = sorted(each for each in path.rglob("*") if each.suffix in endings) if path.is_dir() else [path]
        for each in inside:
            hidden = any(part.startswith(".") for part in each.relative_to(path).parts) if path.is_dir() else False
            if not hidden and (real := os.path.realpath(each)) not in seen:
                seen.add(real)
                yield each


def _as_data(source: Source | configuration.Configuration, with_diff: bool) -> dict[str, Any]:
    remarks = [{"line": each.line, "text": each.text, "is_left": each.is_left} for each in source.remarks]
    diff = {"diff": "".join(_diff(source))} if with_diff else {}
    return {"file": source.name, "changes": source.result() != source.text, "remarks": remarks, **diff}


def _diff(source: Source | configuration.Configuration) -> Iterator[str]:
    before, after = (text.splitlines(keepends=True) for text in (source.text, source.result()))
    for line in difflib.unified_diff(before, after, source.name, source.name):
        yield line if line.endswith(("\n", "\r")) else f"{line}\n"
