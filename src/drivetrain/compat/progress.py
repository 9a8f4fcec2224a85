"""Lightning's ``callbacks.progress``: a tqdm class for users' progress bars, and the values that every bar shows."""

from __future__ import annotations

import math
from typing import Any

from tqdm.auto import tqdm

from drivetrain.callback import Trainer

_WIDTH = 5  # a constant width, so that the bar does not jump


class Tqdm(tqdm):  # type: ignore[type-arg]  # only the stubs have a type argument
    """A tqdm bar that shows fractional numbers with at least five characters, padded with zeros."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Return ``n`` as text; integers and strings get no padding."""
        text = n if isinstance(n, str) else tqdm.format_num(n)
        if isinstance(n, int) or "e" in text or not _is_number(text):
            return text
        if "." not in text and len(text) < _WIDTH:
            text += "."
        return text.ljust(_WIDTH, "0")


def convert_inf(x: float | None) -> float | None:
    """Return ``x``; or if ``x`` is infinite or NaN, ``None``, which tells tqdm that the total is unknown."""
    return x if x is not None and math.isfinite(x) else None


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return the entry ``v_num`` of a progress bar: the versions of the loggers."""
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
