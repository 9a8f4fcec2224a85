"""Lightning's enumerations of options. A member is equal to the plain string that drivetrain uses."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound="LightningEnum")


class LightningEnum(str, Enum):
    """Strings that compare case-insensitively."""

    @classmethod
    def from_str(cls: type[E], value: str, source: str = "key") -> E:
        """Return the member whose name is ``value``; with ``source="value"``, the member whose value is ``value``; with
        ``source="any"``, the member whose name or value is ``value``.

        Raises:
            ValueError: there is no such member.
        """
        if (found := cls.try_from_str(value, source)) is None:
            raise ValueError(f"{cls.__name__} has no member {value!r}. Known: {', '.join(cls.__members__)}.")
        return found

    @classmethod
    def try_from_str(cls: type[E], value: str, source: str = "key") -> E | None:
        """Return the member that :meth:`from_str` returns; ``None`` if there is no such member."""
        for member in cls:
            candidates = {"key": [member.name], "value": [member.value]}.get(source, [member.name, member.value])
            if value.lower() in map(str.lower, candidates):
                return member
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.lower(self.value) == str.lower(getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(str.lower(self.value))


class GradClipAlgorithmType(LightningEnum):
    """The values of ``Trainer(gradient_clip_algorithm=...)``."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Return whether the algorithm exists."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Return all algorithms."""
        return [member.value for member in GradClipAlgorithmType]


class Interval(LightningEnum):
    """The values of ``Timer(interval=...)``."""

    step = "step"
    epoch = "epoch"


class _FaultTolerantMode(LightningEnum):
    """An option of Lightning 1.5 to 1.9; checkpoints of these versions contain it."""

    DISABLED = "disabled"
    AUTOMATIC = "automatic"
    MANUAL = "manual"
