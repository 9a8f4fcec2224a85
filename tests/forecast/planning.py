"""What ``drivetrain plan`` has printed in a test."""

from typing import NamedTuple


class Said(NamedTuple):
    code: int
    out: str
    err: str
