"""The command ``drivetrain devices``: list the accelerators of this machine, and say why others cannot be used."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from drivetrain.base.lazy import on_first_use
from drivetrain.errors import number_of

if TYPE_CHECKING:
    from drivetrain.accelerators import Accelerator
    from drivetrain.base.registry import Entry

with on_first_use:
    from drivetrain.accelerators import accelerator as kinds
    from drivetrain.accelerators import torch_device

_GIB = 1 << 30


@dataclass
class Row:
    """One accelerator on this machine.

    Attributes:
        name: the value for ``accelerator``.
        description: the accelerator's registered description.
        available: whether the accelerator can be used on this machine.
        reason: why the accelerator cannot be used, for example the error that it raised; "" if it can be used.
        devices: the number of devices.
        total_memory: the memory of each device in bytes; ``None`` if it is unknown.
        auto_priority: the accelerator's priority for ``accelerator="auto"``. ``None``: "auto" never chooses the
            accelerator.
        also: the accelerator's other names.
    """

    name: str
    description: str = ""
    available: bool = False
    reason: str = ""
    devices: int = 0
    total_memory: list[int | None] = field(default_factory=list)
    auto_priority: int | None = None
    also: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The devices in a few words, or why there are none."""
        if not self.available:
            return f"no: {self.reason}"
        count = number_of(self.devices, "device")
        sizes = ["?" if size is None else f"{size / _GIB:.1f}" for size in self.total_memory]
        if set(sizes) <= {"?"}:
            return count
        each = " each" if len(sizes) > 1 else ""
        return f"{count}, {sizes[0]} GiB{each}" if len(set(sizes)) == 1 else f"{count}, {', '.join(sizes)} GiB"


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="List the hardware that drivetrain can use on this machine.", allow_abbrev=False
    )
    made.add_argument("--json", action="store_true", help="print the list as JSON, with memory in bytes")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain devices") -> int:
    """Print the accelerators.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        The exit code, 0.
    """
    given = parser(prog).parse_args(arguments)
    rows = list(_registered())
    for row in rows:
        row.also = kinds.AcceleratorRegistry.other_names(row.name)
    other = sorted(set(torch_device.known_types()) - set(kinds.AcceleratorRegistry.available()))
    for name in other:
        entry = kinds.AcceleratorRegistry.fallback(name)
        if entry is not None and entry.cls.is_available():
            rows.append(_row(entry))
    absent = [name for name in other if all(name != row.name for row in rows)]
    if given.json:
        print(json.dumps({"accelerators": [asdict(row) for row in rows], "other": absent}, indent=2))
    else:
        _print(rows, absent)
    return 0


def _registered() -> Iterator[Row]:
    for name in kinds.AcceleratorRegistry.available():
        try:
            entry = kinds.AcceleratorRegistry.entry(name)
        except Exception as error:  # an import failed; list the other accelerators
            yield Row(name, reason=f"it cannot be imported: {_shown(error)}")
        else:
            yield _row(entry)


def _row(entry: Entry[Accelerator]) -> Row:
    row = Row(entry.name, entry.description)
    try:
        row.auto_priority = entry.cls.auto_priority
        if not entry.cls.is_available():
            row.reason = entry.cls.why_unavailable()
            return row
        accelerator = entry.build()
        count = accelerator.auto_device_count()
        devices = accelerator.get_parallel_devices(list(range(count)))
        row.total_memory = [accelerator.total_memory(device) for device in devices]
        row.available, row.devices = True, count
    except Exception as error:  # this accelerator is broken; list the others
        row.reason = f"asking it raised {_shown(error)}"
    return row


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _print(rows: Sequence[Row], absent: Sequence[str]) -> None:
    # print one line for an accelerator with several names
    firsts = [row for row in rows if all(row.name < other for other in row.also)]
    table = [
        ("accelerator", "here", "what it is"),
        *((", ".join([row.name, *row.also]), row.state, row.description) for row in firsts),
    ]
    wide_name, wide_state = (max(len(line[column]) for line in table) for column in (0, 1))
    for name, state, description in table:
        print(f"{name:<{wide_name}}  {state:<{wide_state}}  {description}".rstrip())
    print(f"\nOther device types of torch's, none of them here: {', '.join(absent)}")
