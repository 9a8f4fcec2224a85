"""The checks for strategies: the tests of :class:`~drivetrain.testing.strategy_conformance.StrategyConformance`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from drivetrain.base.lazy import on_first_use
from drivetrain.testing.checks import CannotTryError, Part
from drivetrain.testing.kits.accelerator import tests_of

with on_first_use:
    from drivetrain.strategies import pipeline
    from drivetrain.testing import strategy_conformance

SETTINGS = ("devices", "replicas", "accelerator", "precision", "tolerance", "resumes_bit_by_bit")


def try_it(part: Part) -> None:
    """Check that a strategy can be created, and that it can train any module."""
    if isinstance(part.make(), pipeline.PipelineStrategy):
        raise CannotTryError(
            "A pipeline trains only modules with stages. Write a subclass of StrategyConformance whose loader and "
            "module fit it."
        )


def checks(part: Part, stack: ExitStack) -> list[Callable[[Part], None]]:
    """Return the suite's tests as checks. Closing ``stack`` ends the processes of the tests."""
    suite = suite_of(part.for_other_process())
    suite.setup_class()
    stack.callback(suite.teardown_class)
    return tests_of(suite)


def suite_of(part: Part) -> Any:
    """Return the class with the suite's tests for a strategy. Called in this process and in each rank."""
    facts = part.make().facts
    settings = {
        "devices": 2 if facts.is_distributed else 1, "replicas": 2 if facts.drives_all_devices else 1, **part.settings,
    }  # fmt: skip
    settings |= {"strategy": staticmethod(part.make), "rebuild": staticmethod(functools.partial(_in_a_rank, part))}
    return type("Suite", (strategy_conformance.StrategyConformance,), settings)


def _in_a_rank(part: Part) -> Any:
    logging.disable(logging.WARNING)
    return suite_of(part)
