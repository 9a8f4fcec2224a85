"""Lightning's enumerations of options. Each member is equal to a plain string. drivetrain itself uses these strings."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound="LightningEnum")


class LightningEnum(str, Enum):
    """Strings that compare case-insensitively."""

    @classmethod
    def from_str(cls: type[E], value: str, source: str = "key") -> E:
        """Return the member whose name is ``value``. ``source="value"`` compares the member's value instead, and
        ``source="any"`` compares both.

        Raises:
            ValueError: no member is found.
        """
        if (found := cls.try_from_str(value, source)) is None:
            raise ValueError(f"{cls.__name__} has no member {value!r}. Known: {', '.join(cls.__members__)}.")
        return found

    @classmethod
    def try_from_str(cls: type[E], value: str, source: str = "key") -> E | None:
        """Return the member that :meth:`from_str` returns; ``None`` if no member is found."""
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
        """Return whether ``val`` names an algorithm."""
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
    """The values of an option that checkpoints of Lightning 1.5 to 1.9 contain."""

    DISABLED = "disabled"
    AUTOMATIC = "automatic"
    MANUAL = "manual"
