"""The command ``drivetrain plan``: print whether a run fits in memory, what takes the memory, what the ranks exchange,
and what to change.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from drivetrain.cli.program import add_program_arguments, command_of, positive, program_parser, say, words_to_call
from drivetrain.errors import ConfigurationError, number_of
from drivetrain.forecast.allowance import allowance, gib, needed
from drivetrain.forecast.devices import device_of
from drivetrain.forecast.exchange import fastest_first, of_window
from drivetrain.proof.runs import CannotTryError, last_lines, run_to_end, signals_as_interrupts

VARIABLE = "DRIVETRAIN_PLAN"
COPIES, REAL_S = 6, 60.0
"""Before a run with real values, ``COPIES`` times the memory of the parameters must be free, for weights, gradients,
optimizer states and activations. The command ends this run after ``REAL_S`` seconds.
"""
MOST_RUNS = 4
"""A line of the report names at most this many ranges of ranks, such as 0-3."""
SCHEMA = 1
"""The version of the JSON output."""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = program_parser(
        prog,
        "Tell what a training program will need on devices that this machine does not have: run two windows of it as "
        "one rank, on tensors without values. Without --devices, print what the Trainer has decided, and why.",
        epilog="Exit codes: 0: it fits, or no device is named; 1: it does not fit, or the program cannot be planned; "
        "2: wrong usage; 130: interrupted.",
    )
    made.add_argument("--devices", type=positive, metavar="N", help="devices of the whole job")
    made.add_argument(
        "--device", metavar="NAME", help='such as "H100 80GB", or "name=X,memory=80GB,..."; "cpu": processes on hosts'
    )
    made.add_argument("--devices-per-node", type=positive, metavar="N", help="devices of a machine (default: 8)")
    made.add_argument("--rank", type=int, help="plan this rank alone (default: a rank of each class)")
    made.add_argument("--no-changes", action="store_true", help="try no changes if the program does not fit")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds (default: 600)")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    add_program_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain plan") -> int:
    """Plan the program in ``arguments``.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0: the program fits, or no device was named. 1: the program does not fit, or cannot be planned. 130:
        interrupted. Wrong usage raises ``SystemExit(2)``.
    """
    made = parser(prog)
    given = made.parse_args(arguments)
    device, asked = _asked(given, made)
    command = command_of(given, made)
    found: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="plan-", ignore_cleanup_errors=True) as name, signals_as_interrupts():
            folder = Path(name)
            found = _run(command, asked, folder, given.timeout)
            if found.get("before_fit") and given.devices is not None:
                asked["values_until_fit"] = True
                found = _run(command, asked, folder, given.timeout)
            if "reads" in found:
                asked["values"] = _values(command, asked, folder, found["reads"])
                found = _run(command, asked, folder, given.timeout)
    except CannotTryError as error:
        found = {"failed": str(error)}
    except KeyboardInterrupt:
        say(f"{prog}: interrupted; the program was ended")
        return 128 + signal.SIGINT
    if "failed" in found:
        say(f"{prog}: {given.program} cannot be planned: {found['failed']}")
        if given.json:
            print(json.dumps({"schema": SCHEMA, "error": found["failed"]}))
        return 1
    if given.devices is None:
        print(json.dumps({"schema": SCHEMA, "plan": found["decisions"]}) if given.json else found["plan"])
        return 0
    result = report(found, given, device)
    print(json.dumps(result) if given.json else "\n".join(lines(result)))
    return 0 if result["fits"] is not False else 1


def _run(command: Sequence[str], asked: dict[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Run the program in a child process up to its first fit, and return the child's result."""
    result, log = folder / "result", folder / "output.txt"
    result.unlink(missing_ok=True)
    # the imports create no garbage, and a garbage collection would take a fifth of the time
    words = [sys.executable, *words_to_call("drivetrain.forecast.child", "gc.disable()"), *command]
    code = run_to_end(words, Path.cwd(), {VARIABLE: json.dumps({**asked, "result": str(result)})}, log, timeout)
    found: dict[str, Any] = {"failed": f"The program ended with exit code {code}."}
    if result.exists():
        found = pickle.loads(result.read_bytes())
    if "refused" in found:
        return {"failed": found["refused"]}
    if "failed" in found:
        found["failed"] += f" {last_lines(log)}"
    return found


def _values(command: Sequence[str], asked: dict[str, Any], folder: Path, parameters: int) -> str:
    """Run two windows (the batches of two optimizer steps) with real values if this machine has enough memory. Return
    the path of a file with the values that the program has read from tensors. After a minute, give up.
    """
    path, free = folder / "values", psutil.virtual_memory().available
    known: Any = {}
    if COPIES * parameters < free:
        with suppress(CannotTryError):
            known = _run(command, {**asked, "reads": free}, folder, REAL_S).get("values", {})
    path.write_bytes(pickle.dumps(known))
    return str(path)


def _asked(given: argparse.Namespace, made: argparse.ArgumentParser) -> tuple[Any, dict[str, Any]]:
    """Return the device (``None`` for the CPU) and the request to the child process."""
    if given.devices is None:
        if given.device or given.devices_per_node:
            made.error("--device and --devices-per-node need --devices, the number of devices of the job.")
        return None, {"devices": None}
    if given.device is None:
        made.error('--devices needs --device, the kind of device: --device "H100 80GB".')
    device: Any = None
    if given.device.lower() != "cpu":
        try:
            device = device_of(given.device)
        except ConfigurationError as error:
            made.error(str(error))
    per_node = given.devices_per_node or min(given.devices, 8)
    if given.devices % per_node:
        made.error(f"--devices {given.devices} is no multiple of --devices-per-node {per_node}.")
    if given.rank is not None and not 0 <= given.rank < given.devices:
        made.error(f"--rank {given.rank}: the ranks are 0 to {given.devices - 1}.")
    return device, {
        "devices": given.devices, "per_node": per_node, "rank": given.rank, "on_host": device is None,
        "memory": None if device is None else device.memory, "tries": False if given.no_changes else None,
    }  # fmt: skip


# ---- the report ------------------------------------------------------------------------------------------------------


def report(found: dict[str, Any], given: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Return the report as plain data."""
    base = found["base"]
    per_node = given.devices_per_node or min(given.devices, 8)
    memory = None if device is None else int(device.memory)
    result: dict[str, Any] = {
        "schema": SCHEMA, "program": given.program, "devices": given.devices, "per_node": per_node,
        "device": "cpu" if device is None else device.name, "rank": found["rank"], "memory": memory,
        **_needs(base, given.devices, device, per_node),
        "exchanges": _exchanges(base), "unreadable": base.unreadable, "read": base.read,
        "largest_micro_batch": found["largest"], "micro_batch": base.batch_size, "changes": [],
    }  # fmt: skip
    result["classes"] = [
        {
            "ranks": numbers_of_ranks(ranks),
            "rank": each.rank,
            "failed": each.failed,
            **({} if each.found is None else _size(each.found, given.devices, device)),
        }
        for ranks, each in found["classes"]
    ]
    for change in found["changes"]:
        needs = {"failed": change.failed}
        if change.found is not None:
            needs = _needs(change.found, given.devices, device, per_node)
        result["changes"].append({"change": change.name, "write": change.write, **needs})
    return result


def numbers_of_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text, such as "0-3, 8-11"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:MOST_RUNS])
    return text + (f", ... ({len(ranks)} ranks)" if len(runs) > MOST_RUNS else "")


def _size(found: Any, devices: int, device: Any) -> dict[str, Any]:
    """Return the bytes that a rank needs, and whether the device has this memory (``None`` without a device)."""
    total = needed(found, devices)
    return {"peak": found.peak.total, "needed": total, "fits": None if device is None else total <= int(device.memory)}


def _needs(base: Any, devices: int, device: Any, per_node: int) -> dict[str, Any]:
    peak = base.peak
    where = {"phase": peak.phase, "block": peak.block, "line": _short(peak.line)}
    return {
        **_size(base, devices, device), "at": where,
        "kinds": {name: size for name, size in peak.kinds.items() if size},
        "activations": dict(peak.blocks), "on_host": {name: peak.kinds.get(name, 0) for name in base.on_host},
        "allowance": {} if device is None else allowance(base, devices), **_time(base, device, per_node),
    }  # fmt: skip


def _time(base: Any, device: Any, per_node: int) -> dict[str, Any]:
    """Return the forecast time of an optimizer step, or why there is no forecast. Without a device, return nothing."""
    if device is None:
        return {}

    try:
        told = of_window(base.recorded, base.batches, device, per_node)
    except ConfigurationError as error:
        return {"no_time": str(error)}
    return {"seconds": told.step, "time": str(told)}


def _exchanges(base: Any) -> list[dict[str, Any]]:
    """Return the number and the total bytes of the exchanges in a window, for each kind of exchange and process
    group.
    """
    found, sizes = Counter[Any](), Counter[Any]()
    for each in base.recorded.steps:
        if hasattr(each, "group_ranks"):
            key = each.name, each.group_ranks.count, each.group_ranks.stride, each.dtype
            found[key] += 1
            sizes[key] += each.bytes
    return [
        {"name": name, "ranks": count, "stride": stride, "dtype": dtype, "count": found[key], "bytes": sizes[key]}
        for key in found
        for name, count, stride, dtype in [key]
    ]


def lines(result: dict[str, Any]) -> list[str]:
    """Return the report as text."""
    fits = {True: "fits", False: "does not fit", None: "the memory is not limited"}[result["fits"]]
    nodes = result["devices"] // result["per_node"]
    where = f", {result['per_node']} in each of {nodes} machines" if nodes > 1 else ""
    found = [
        f"{result['program']} on {result['devices']} x {result['device']}{where}, as rank {result['rank']}: {fits}"
    ]
    extra = sum(result["allowance"].values())
    of = "" if result["memory"] is None else f" of {gib(result['memory'])}"
    found += [f"  tensors {gib(result['peak'])} + allowance {gib(extra)} = {gib(result['needed'])}{of}"]
    found += [f"  the peak comes {_place(result['at'])}", ""]
    host = result["on_host"]
    for name, size in sorted(result["kinds"].items(), key=lambda each: -each[1]):
        found.append(f"  {name:<22}{gib(size):>11}{'  in the memory of the host' if name in host else ''}")
        if name == "activations" and len(result["activations"]) > 1:
            for block, own in sorted(result["activations"].items(), key=lambda each: -each[1])[:4]:
                found.append(f"    {block or 'outside of blocks':<22}{gib(own):>11}")
    parts = ", ".join(f"{name} {gib(size)}" for name, size in result["allowance"].items())
    found += [f"  allowance: {parts}"] if parts else []
    found += _classes(result["classes"])
    if result["exchanges"]:
        found += ["", "  exchanged in a step:"]
        for each in result["exchanges"]:
            ranks = f"{each['ranks']} ranks" + (f", {each['stride']} apart" if each["stride"] > 1 else "")
            found.append(
                f"    {each['count']:>5} x {each['name']:<15}{gib(each['bytes']):>11} {each['dtype']}, {ranks}"
            )
    if line := result.get("time", result.get("no_time")):
        found += ["", f"  {line}"]
    for place, count in result["unreadable"].items():
        found.append(f"  {_short(place)} reads {number_of(count, 'value')}, which a plan does not know: it took 0")
    for place, count in result["read"].items():
        found.append(f"  {_short(place)} reads {number_of(count, 'value')}, computed here from the first batch")
    return [*found, *_changes(result)]


def _classes(classes: list[dict[str, Any]]) -> list[str]:
    found = ["", "  by class of ranks:"] if classes else []
    for each in classes:
        needs = f"failed: {each['failed']}" if each["failed"] else "not run: smaller shards than the others"
        if "peak" in each:
            fits = {True: ", fits", False: ", does not fit", None: ""}[each["fits"]]
            needs = f"tensors {gib(each['peak'])}, with the allowance {gib(each['needed'])}{fits}"
        found.append(f"    rank{'' if each['ranks'].isdecimal() else 's'} {each['ranks']}: {needs}")
    return found


def _changes(result: dict[str, Any]) -> list[str]:
    if not result["changes"]:
        return []
    found = ["", "What to change, the cheapest first:"]
    width = max(len(each["change"]) for each in result["changes"])
    for each in result["changes"]:
        if each.get("failed"):
            found.append(f"  {each['change']:<{width}}  failed: {each['failed']}")
            continue
        seconds = f"at best {each['seconds']:.3g} s" if "seconds" in each else ""
        fits = {True: "fits", False: "", None: ""}[each["fits"]]
        found.append(f"  {each['change']:<{width}} {gib(each['needed']):>11}  {fits:<5} {seconds:<16} {each['write']}")
    fit = [each for each in result["changes"] if each.get("fits") and "seconds" in each]
    fitting = {each["change"]: each["seconds"] for each in fit}
    if len(fitting) > 1:
        order = ", ".join(f"{name} ({times:.2f})" for name, times in fastest_first(fitting))
        found.append(f"  those that fit, the fastest first, with multiples of its time: {order}")
    largest = result["largest_micro_batch"]
    if largest is not None and largest < result["micro_batch"]:
        text = f"{number_of(largest, 'sample')}" if largest else "none, not even of 1 sample"
        found.append(f"  largest micro-batch that fits without another change: {text}")
    return found


def _place(at: dict[str, str]) -> str:
    phase = {
        "forward": "in the forward pass", "backward": "in the backward pass",
        "recompute": "where activations are recomputed",
        "clip": "between the backward pass and the optimizer's step", "optimizer": "in the optimizer's step",
    }[at["phase"]]  # fmt: skip
    line = f" at {at['line']}" if at["line"] else ""
    return phase + line + (f" ({at['block']})" if at["block"] else "")


def _short(line: str) -> str:
    return os.path.relpath(line) if line.startswith(os.getcwd()) else line
