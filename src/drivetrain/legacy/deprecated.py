"""Deprecation warnings for names of earlier Lightning generations. Each warning states the current name."""

from __future__ import annotations

from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn


def warn_deprecated(what: str, instead: str, once_for: Any = None) -> None:
    """Warn that ``what`` is deprecated, and name the replacement ``instead``.

    Args:
        what: the subject of the sentence, such as "Trainer(gpus=2)".
        instead: what to write today.
        once_for: an object that remembers its warnings. A second warning with the same ``instead`` is left out.
            ``None``: always warn.
    """
    seen = set() if once_for is None else vars(once_for).setdefault("_deprecated", set())
    if instead not in seen:
        seen.add(instead)
        rank_zero_warn(f"{what} is deprecated. Write {instead}.", FutureWarning)
