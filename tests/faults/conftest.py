"""How long the random sweeps are, and where they begin: ``make test-faults`` runs their long form."""
"""How long the random sweeps are, and with which seed they draw."""

from __future__ import annotations

import os
import random
import secrets

import pytest


@pytest.fixture(scope="session")
def long_form() -> bool:
    """Whether the sweeps run thousands of cases (``DRIVETRAIN_FAULTS=long``) or a few."""
    return os.environ.get("DRIVETRAIN_FAULTS") == "long"
    """Whether the sweeps run in their long form: ``DRIVETRAIN_FAULTS=long``, or ``make test-faults``."""
    return os.environ.get("DRIVETRAIN_FAULTS", "") == "long"


@pytest.fixture
def seed(long_form: bool) -> int:
    """The sweep's seed: ``DRIVETRAIN_SEED``, else a fixed one, or in the long form a random one; printed."""
    given = os.environ.get("DRIVETRAIN_SEED")
    chosen = int(given) if given else random.SystemRandom().randrange(10**9) if long_form else 0
    print(f"DRIVETRAIN_SEED={chosen}")
    return chosen
    """What a sweep draws with: ``DRIVETRAIN_SEED``, or a fixed number, or a random one in the long form.

    It is printed, so that pytest shows it with a failure.
    """
    given = os.environ.get("DRIVETRAIN_SEED", "")
    drawn = int(given) if given else secrets.randbelow(2**31) if long_form else 20
    print(f"DRIVETRAIN_SEED={drawn}")
    return drawn
