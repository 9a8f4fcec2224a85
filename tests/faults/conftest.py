"""How long the random sweeps are, and with which seed they draw."""

from __future__ import annotations

import os
import secrets

import pytest


@pytest.fixture(scope="session")
def long_form() -> bool:
    """Whether the sweeps run in their long form: ``DRIVETRAIN_FAULTS=long``, or ``make test-faults``."""
    return os.environ.get("DRIVETRAIN_FAULTS", "") == "long"


@pytest.fixture
def seed(long_form: bool) -> int:
    """What a sweep draws with: ``DRIVETRAIN_SEED``, or a fixed number, or a random one in the long form.

    It is printed, so that pytest shows it with a failure.
    """
    given = os.environ.get("DRIVETRAIN_SEED", "")
    drawn = int(given) if given else secrets.randbelow(2**31) if long_form else 20
    print(f"DRIVETRAIN_SEED={drawn}")
    return drawn
