"""The checks for accelerators: the tests of :class:`~drivetrain.testing.conformance.AcceleratorConformance`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from drivetrain.base.lazy import on_first_use
from drivetrain.testing.checks import CannotTryError, Part, Skipped

with on_first_use:
    from drivetrain.testing import conformance

SETTINGS = ("tolerance",)


def try_it(part: Part) -> None:
    """Check that this machine has the accelerator's hardware."""
    accelerator: Any = part.found[0]
    if not accelerator.is_available():
        raise CannotTryError(f"{accelerator.__name__} is not available here: {accelerator.why_unavailable()}.")


def checks(part: Part, stack: ExitStack) -> list[Callable[[Part], None]]:
    """Return the suite's tests as checks."""
    accelerator: Any = part.found[0]
    return tests_of(type("Suite", (conformance.AcceleratorConformance,), {"accelerator": accelerator, **part.settings}))


def tests_of(suite: type) -> list[Callable[[Part], None]]:
    """Return the tests of a pytest suite as checks, in the order of the suite."""
    import pytest

    def check_of(test: Callable[..., None]) -> Callable[[Part], None]:
        @functools.wraps(test)
        def check(part: Part) -> None:
            folder = {"tmp_path": part.folder} if "tmp_path" in inspect.signature(test).parameters else {}
            try:
                test(suite(), **folder)
            except pytest.skip.Exception as why:
                raise Skipped(str(why)) from why

        return check

    names = dict.fromkeys(name for base in suite.__mro__[::-1] for name in vars(base) if name.startswith("test_"))
    return [check_of(getattr(suite, name)) for name in names]
