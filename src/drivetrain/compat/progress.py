"""Lightning's ``callbacks.progress``: a tqdm class on which users' progress bars build, and the values that every bar
shows.
"""

from __future__ import annotations

import math
from typing import Any

from tqdm.auto import tqdm

from drivetrain.callback import Trainer

_WIDTH = 5  # characters of a number; the constant width keeps the bar from moving


class Tqdm(tqdm):  # type: ignore[type-arg]  # only the stubs have a type argument
    """A tqdm bar whose fractional numbers are padded with zeros to five characters."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Return ``n`` as text; integers and strings are not padded."""
        text = n if isinstance(n, str) else tqdm.format_num(n)
        if isinstance(n, int) or "e" in text or not _is_number(text):
            return text
        if "." not in text and len(text) < _WIDTH:
            text += "."
        return text.ljust(_WIDTH, "0")


def convert_inf(x: float | None) -> float | None:
    """Return ``x``; if it is infinite or NaN, return ``None``, which means an unknown total to tqdm."""
    return x if x is not None and math.isfinite(x) else None


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return the values that a bar shows beside logged ones: the versions of the loggers."""
    versions: list[Any] = [logger.version for logger in trainer.loggers]
    version = versions[0] if len(versions) == 1 else "_".join(dict.fromkeys(map(str, versions)))
    if version in (None, ""):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
