"""How a rank waits for an exchange: it looks now and then whether another rank has failed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from drivetrain.strategies import waiting


class EndsAfterALook:
    """An exchange that ends right after a look at it timed out, so that it is complete when it is asked.

    Args:
        failure: what it failed with; ``None`` if it succeeded.
    """

    def __init__(self, failure: str | None) -> None:
        self.failure, self.waits = failure, 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.waits > 0


def test_an_exchange_that_succeeds_right_after_a_look_has_succeeded() -> None:
    work = EndsAfterALook(None)
    waiting.finish(work, None, [0, 1], "barrier()")
    assert work.waits == 2


def test_an_exchange_that_fails_right_after_a_look_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waiting.finish(EndsAfterALook("Connection closed by peer"), None, [0, 1], "barrier()")
