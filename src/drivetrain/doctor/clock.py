"""Checks that the clock's date is plausible, and that the clock runs evenly."""

from __future__ import annotations

import os
import time
import zoneinfo
from datetime import datetime, timezone
from pathlib import Path

import drivetrain
from drivetrain.doctor.checks import NOTE, Finding, Items

_WATCHED_S, _MOST_JUMP_S, _DAY_S = 0.3, 0.05, 86_400.0


def check() -> Items:
    """Compare the wall clock with the monotonic clock for a short time, and today's date with the date of drivetrain's
    files.
    """
    wall, steady = time.time(), time.monotonic()
    time.sleep(_WATCHED_S)
    jump = (time.time() - wall) - (time.monotonic() - steady)
    yield f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    if abs(jump) > _MOST_JUMP_S:
        yield Finding(
            f"The wall clock moved by {jump:+.2f} s against the steady clock within {_WATCHED_S} s.",
            "Times in logs, names of runs and time limits of clusters are wrong.",
            "timedatectl, and repair the clock's synchronization.", NOTE,
        )  # fmt: skip
    installed = os.path.getmtime(Path(drivetrain.__file__))
    if wall < installed - _DAY_S:
        yield Finding(
            f"The wall clock shows {datetime.fromtimestamp(wall, timezone.utc):%Y-%m-%d}, and drivetrain's files are "
            f"from {datetime.fromtimestamp(installed, timezone.utc):%Y-%m-%d}.",
            'The clock is late: certificates of servers are refused, and the newest checkpoint, as ckpt_path="last" '
            "takes it, may be the wrong one.", "timedatectl set-ntp true, or ask who runs the machine.", NOTE,
        )  # fmt: skip
    zone = os.environ.get("TZ", "").removeprefix(":")
    if "/" in zone and not zone.startswith("/") and zone not in zoneinfo.available_timezones():
        yield Finding(
            f"TZ={zone} is no time zone of this machine.", "Local times in logs are UTC.",
            "a name such as TZ=Europe/Berlin, and install the package tzdata.", NOTE,
        )  # fmt: skip
