"""The command ``drivetrain checkpoint``: inspect, check, compare, convert and remove checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from drivetrain.base.lazy import on_first_use
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.report import run_file

with on_first_use:
    from drivetrain.cli import (
        checkpoint_convert,
        checkpoint_diff,
        checkpoint_inspect,
        checkpoint_prune,
        checkpoint_verify,
    )


def main(arguments: Sequence[str], prog: str = "drivetrain checkpoint") -> int:
    """Run a subcommand.

    Returns:
        The exit code. It is 2 after an error, or if ``prune`` could not remove a file. It is 1 if ``verify`` found
        damage or ``diff`` a difference. Otherwise 0.
    """
    given = parser(prog).parse_args(arguments)
    try:
        result, lines, code = _run(given)
        said = _json(result) if given.json else "\n".join(map(_escaped, lines))
    except Exception as error:  # without this, Python would exit with 1, which means "different" or "damaged"
        text = str(error) if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {error}"
        if given.json:
            print(_json({"error": text}))
        print(f"{prog} {given.action}: {chr(10).join(map(_escaped, text.splitlines()))}", file=sys.stderr)
        return 2
    print(said)
    return code


def _json(value: Any) -> str:
    return json.dumps(run_file.plain(value), indent=2, allow_nan=False)


def _escaped(line: str) -> str:
    """Escape control characters and lone surrogates, which names in a checkpoint may contain."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Look at checkpoints of drivetrain, Lightning, torch.distributed.checkpoint, DeepSpeed, "
        "safetensors and Hugging Face. Files are never unpickled.",
    )  # fmt: skip
    actions = made.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def action(name: str, text: str, **places: str) -> argparse.ArgumentParser:
        its = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        for option, place in places.items():
            its.add_argument(option, metavar=place)
        its.add_argument("--json", action="store_true", help="print the result as JSON")
        return its

    inspect = action("inspect", "what a checkpoint is and contains; its tensors are not read", path="PATH")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    action("verify", "check checksums, sizes and completeness; exit code 1 if something is wrong", path="PATH")
    about = "compare two checkpoints, also of different kinds; exit code 1 if they differ"
    diff = action("diff", about, path="PATH", other="OTHER")
    diff.add_argument("--weights", action="store_true", help="compare only the weights")
    convert = action("convert", "write a checkpoint in another format", path="PATH", out="OUT")
    convert.add_argument("--to", required=True, metavar="FORMAT",
                         help="drivetrain, lightning, dcp, safetensors or huggingface")  # fmt: skip
    convert.add_argument("--strip-prefix", default="", help="remove this from the beginning of the weights' names")
    convert.add_argument("--add-prefix", default="", help="put this before the weights' names")
    convert.add_argument("--max-file-size", dest="largest", type=float, default=5.0, metavar="GB",
                         help="of the files in a Hugging Face folder, in 10^9 bytes (default: 5)")  # fmt: skip
    about = "write a folder of shards as one file; needs the memory of one tensor"
    action("consolidate", about, path="PATH", out="OUT")
    prune = action("prune", "show which checkpoints and leftovers in a folder would be removed", folder="DIR")
    prune.add_argument("--keep", type=int, metavar="N", help="keep the N newest complete ones (default: all)")
    prune.add_argument("--delete", action="store_true", help="remove them; without it, nothing is removed")
    return made


_MODULES: dict[str, Any] = {
    "inspect": checkpoint_inspect, "verify": checkpoint_verify, "diff": checkpoint_diff, "convert": checkpoint_convert,
    "consolidate": checkpoint_convert, "prune": checkpoint_prune,
}  # fmt: skip
"""For each subcommand, the module that runs it. The function has the subcommand's name."""


def _run(given: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str], int]:
    """Run a subcommand. Return the subcommand's result, the lines to print and the exit code."""
    if given.action == "convert":
        given.largest = _bytes(given.largest)
    module, options = _MODULES[given.action], {**vars(given)}
    result = getattr(module, options.pop("action"))(**{name: options[name] for name in options if name != "json"})
    is_fine = result.get("ok", result.get("equal", True))  # "ok" is from verify, and "equal" from diff
    return result, module.text(result), 2 if result.get("failed") else int(not is_fine)  # "failed": of prune


def _bytes(gigabytes: float) -> int:
    if not 0 < gigabytes < math.inf:
        raise ConfigurationError(f"--max-file-size is a number of GB above 0, not {gigabytes}. Use 5.")
    return int(gigabytes * 1e9)
