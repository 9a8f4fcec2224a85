"""The command ``drivetrain checkpoint``: look at checkpoints, check, compare, convert and remove them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from drivetrain.base.lazy import on_first_use
from drivetrain.errors import ConfigurationError, DrivetrainError

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
        0; 1 if ``verify`` has found damage or ``diff`` a difference; 2 after an error, which is printed, or if
        ``prune`` could not remove something.
    """
    given = _parser(prog).parse_args(arguments)

    try:
        result, lines, code = _ACTIONS[given.action](given)
        said = _json(result) if given.json else "\n".join(map(_escaped, lines))
    except Exception as error:  # any: Python's exit code 1 would say "different" or "damaged"
        text = str(error) if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {error}"
        if given.json:
            print(_json({"error": text}))
        print(f"{prog} {given.action}: {chr(10).join(map(_escaped, text.splitlines()))}", file=sys.stderr)
        return 2
    print(said)
    return code


def _json(value: Any) -> str:
    def finite(value: Any) -> Any:  # JSON has no NaN and no infinity
        if isinstance(value, dict):
            return {str(key): finite(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(each) for each in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=2, default=str, allow_nan=False)


def _escaped(line: str) -> str:
    """Return ``line`` with its control characters and lone surrogates escaped: names in a file may contain any."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Look at checkpoints of drivetrain, Lightning, torch.distributed.checkpoint, DeepSpeed, "
        "safetensors and Hugging Face. Files are never unpickled.",
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def action(name: str, text: str, *places: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        for place in places:
            made.add_argument(place.lower(), metavar=place)
        made.add_argument("--json", action="store_true", help="print the result for programs")
        return made

    inspect = action("inspect", "what a checkpoint is and contains; its tensors are not read", "PATH")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    action("verify", "check checksums, sizes and completeness; exit code 1 if something is wrong", "PATH")
    diff = action(
        "diff", "compare two checkpoints, also of different kinds; exit code 1 if they differ", "PATH", "OTHER"
    )
    diff.add_argument("--weights", action="store_true", help="compare only the weights")
    convert = action("convert", "write a checkpoint in another format", "PATH", "OUT")
    convert.add_argument("--to", required=True, metavar="FORMAT",
                         help="drivetrain, lightning, dcp, safetensors or huggingface")  # fmt: skip
    convert.add_argument("--strip-prefix", default="", help="remove this from the beginning of the weights' names")
    convert.add_argument("--add-prefix", default="", help="put this before the weights' names")
    convert.add_argument("--max-file-size", type=float, default=5.0, metavar="GB",
                         help="of the files in a Hugging Face folder, in 10^9 bytes (default: 5)")  # fmt: skip
    action("consolidate", "write a folder of shards as one file; needs the memory of one tensor", "PATH", "OUT")
    prune = action("prune", "show which checkpoints and leftovers in a folder would be removed", "DIR")
    prune.add_argument("--keep", type=int, metavar="N", help="keep the N newest complete ones (default: all)")
    prune.add_argument("--delete", action="store_true", help="remove them; without it, nothing is removed")
    return parser


_Result = tuple[dict[str, Any], Iterable[str], int]


def _inspect(given: argparse.Namespace) -> _Result:
    result = checkpoint_inspect.inspect(given.path, given.tensors)
    return result, checkpoint_inspect.text(result), 0


def _verify(given: argparse.Namespace) -> _Result:
    result = checkpoint_verify.verify(given.path)
    return result, checkpoint_verify.text(result), 0 if result["ok"] else 1


def _diff(given: argparse.Namespace) -> _Result:
    result = checkpoint_diff.diff(given.path, given.other, given.weights)
    return result, checkpoint_diff.text(result), 0 if result["equal"] else 1


def _convert(given: argparse.Namespace) -> _Result:
    if not 0 < given.max_file_size < math.inf:
        raise ConfigurationError(f"--max-file-size is a number of GB above 0, not {given.max_file_size}. Use 5.")
    size = int(given.max_file_size * 1e9)
    result = checkpoint_convert.convert(given.path, given.out, given.to, given.strip_prefix, given.add_prefix, size)
    return result, checkpoint_convert.text(result), 0


def _consolidate(given: argparse.Namespace) -> _Result:
    result = checkpoint_convert.consolidate(given.path, given.out)
    return result, checkpoint_convert.text(result), 0


def _prune(given: argparse.Namespace) -> _Result:
    result = checkpoint_prune.prune(given.dir, given.keep, given.delete)
    return result, checkpoint_prune.text(result), 2 if result["failed"] else 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], _Result]] = {
    "inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert, "consolidate": _consolidate,
    "prune": _prune,
}  # fmt: skip
