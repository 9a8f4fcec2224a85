from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _reports_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")
