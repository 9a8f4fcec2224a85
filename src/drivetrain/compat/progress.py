"""``callbacks.progress``: the bar of tqdm that callbacks build upon, and the metrics that every bar shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from drivetrain import Trainer

_WIDTH = 5  # characters of a number: a bar whose numbers keep their width does not jump


class Tqdm(tqdm):  # type: ignore[type-arg]  # only the stubs have a type argument
    """A bar of tqdm whose fractional numbers are padded with zeros to five characters."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Return ``n`` as text; a whole number and a word are not padded."""
        text = n if isinstance(n, str) else tqdm.format_num(n)
        if isinstance(n, int) or "e" in text or not _is_number(text):
            return text
        if "." not in text and len(text) < _WIDTH:
            text += "."
        return text.ljust(_WIDTH, "0")


def convert_inf(x: float | None) -> float | None:
    """Return ``x``, but ``None`` for one that is infinite or no number: a bar of tqdm has no other open end."""
    return x if x is not None and math.isfinite(x) else None


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return what a bar shows beside logged values: the version of the logger; of several, their versions."""
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
