"""``drivetrain.compat.install`` and ``uninstall``: replace Lightning's modules in this process, or undo the
replacement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from drivetrain import parity
from drivetrain.compat import children, table
from drivetrain.compat.finder import CompatFinder, ServedModule
from drivetrain.errors import ConfigurationError, did_you_mean, shown

_finder = CompatFinder()
_before: parity.Parity | None = None


def install(numbers: str | Iterable[str] = (), generation: str = "") -> None:
    """Make imports of Lightning import drivetrain's replacements, in this process and in its child processes.

    After a second call, only its own switches are set.

    Args:
        numbers: switches of :mod:`drivetrain.parity`: a list, or one string with commas. Each switch, such as
            "undersized_windows", removes one intended difference between the results of drivetrain and Lightning.
            "original" means all switches of ``generation``.
        generation: the Lightning version whose names are provided: "1.1" or "1.3", from ``drivetrain.legacy``; "" for
            2.6.

    Raises:
        ConfigurationError: the switch or generation does not exist, or Lightning has already been imported.
    """
    global _before
    switches = _switches(numbers, generation)
    if generation and generation not in table.GENERATIONS:
        raise ConfigurationError(
            f"drivetrain.compat: there is no generation {shown(generation)}. "
            f"{did_you_mean(generation, table.GENERATIONS)}"
        )
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in table.LATEST.roots and not isinstance(module, ServedModule):
            raise ConfigurationError(
                f"drivetrain.compat cannot replace {name}, which was imported from "
                f"{getattr(module, '__file__', None) or 'elsewhere'} before. Call drivetrain.compat.install() before "
                "the first import of it, or start the program with: drivetrain exec program.py"
            )
    table.use(generation)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    sys.meta_path.insert(0, _finder)
    replaced = parity.use(parity.Parity(pickle=True, **dict.fromkeys(switches, True)))
    if _before is None:
        _before = replaced
    children.inherit(switches, generation)


def uninstall() -> None:
    """Undo :func:`install`. Names that the program has already imported continue to work."""
    global _before
    if _before is None:
        return
    sys.meta_path.remove(_finder)
    for name in [name for name, module in sys.modules.items() if isinstance(module, ServedModule)]:
        del sys.modules[name]
    parity.use(_before)
    table.use("")
    _before = None
    children.forget()


_LATEST_ONLY = frozenset({"early_iterators"})
"""Switches that imitate later Lightning versions only. For 1.1 and 1.3, "original" does not include them."""


def _switches(numbers: str | Iterable[str], generation: str) -> list[str]:
    names = numbers.split(",") if isinstance(numbers, str) else list(numbers)
    names = [name for name in names if name]
    if "original" in names:
        return [name for name in parity.NUMBERS if not (generation and name in _LATEST_ONLY)]
    for name in names:
        if name not in parity.NUMBERS:
            raise ConfigurationError(
                f"drivetrain.compat: there is no switch {shown(name)} for numbers as in Lightning. "
                f"{did_you_mean(name, [*parity.NUMBERS, 'original'])}"
            )
    return names
