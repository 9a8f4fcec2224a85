"""How long the random sweeps are, and where they begin: ``make test-faults`` runs their long form."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture(scope="session")
def long_form() -> bool:
    """Whether the sweeps run thousands of cases (``DRIVETRAIN_FAULTS=long``) or a few."""
    return os.environ.get("DRIVETRAIN_FAULTS") == "long"


@pytest.fixture
def seed(long_form: bool) -> int:
    """The sweep's seed: ``DRIVETRAIN_SEED``, else a fixed one, or in the long form a random one; printed."""
    given = os.environ.get("DRIVETRAIN_SEED")
    chosen = int(given) if given else random.SystemRandom().randrange(10**9) if long_form else 0
    print(f"DRIVETRAIN_SEED={chosen}")
    return chosen
