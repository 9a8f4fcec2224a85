"""The pretend devices through the suite, as they come and while they are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drivetrain.testing import FakeAccelerator, fake_devices
from drivetrain.testing.conformance import AcceleratorConformance


@pytest.fixture(autouse=True)
def _two() -> Iterator[None]:
    with fake_devices(2):
        yield


class TestFake(AcceleratorConformance):
    accelerator = FakeAccelerator


class TestFakeRecorded(AcceleratorConformance):
    accelerator = FakeAccelerator

    @pytest.fixture(autouse=True)
    def _recording(self) -> Iterator[None]:
        with FakeAccelerator.recording():
            yield
