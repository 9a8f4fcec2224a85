"""Find misspelt names of logged values, and guess from a name whether higher values are better."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import closest

_HIGHER_IS_BETTER = {"acc", "accuracy", "auc", "auroc", "bleu", "f1", "iou", "miou", "precision", "recall"}
_LOWER_IS_BETTER = {"loss", "error", "err"}


def is_higher_better(name: Any) -> bool:
    """Return whether higher values of the metric ``name`` are usually better."""
    words = set(re.split(r"[^a-z0-9]+", name.lower())) if isinstance(name, str) else set()
    return bool(words & _HIGHER_IS_BETTER) and not words & _LOWER_IS_BETTER


def warn_if_misspelt(who: str, name: str | None, logged: Iterable[str]) -> None:
    """Warn if the sanity check did not log ``name``, but a similar name. ``who`` says in the message what uses
    ``name``.
    """
    if name is not None and (meant := misspelt(name, logged)) is not None:
        rank_zero_warn(
            f"{who} names {name!r}, which the sanity check did not log; it logged {meant!r}. Write {meant!r}, unless "
            f"training or a later validation logs {name!r}."
        )


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """Return a known name that differs from ``name`` in one or two letters. Return ``None`` if there is no such name,
    or if ``name`` itself is known.

    Unlike :func:`closest`, this function does not take "train_loss" for "val_loss", or "top1" for "top5".
    """
    names = set(known)
    close = None if name in names else closest(name, names)
    if close is None:
        return None
    written, right = name.lower(), close.lower()
    common = sum(block.size for block in difflib.SequenceMatcher(None, written, right).get_matching_blocks())
    different = len(written) + len(right) - 2 * common
    digits = [[letter for letter in word if letter.isdigit()] for word in (written, right)]
    alike = different <= 2 and common >= 3 * different and written[0] == right[0] and digits[0] == digits[1]
    return close if alike else None
