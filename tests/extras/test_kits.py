"""The checks for loggers, on those that need packages of their own and work without a server."""

from __future__ import annotations

import os
from typing import Any

import pytest

from drivetrain.testing.checks import Part, run_checks

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "arguments", "settings", "failing"),
    [
        # wandb's current run stays open after a fit, for trainer.test, and another WandbLogger continues it
        ("wandb", {"offline": True}, {"keeps_files": False}, ["runs_do_not_mix"]),
        ("mlflow", {}, {}, []),
    ],
)
def test_a_logger_of_a_service_passes(
    name: str, arguments: dict[str, Any], settings: dict[str, Any], failing: list[str]
) -> None:
    pytest.importorskip(name)
    outcomes = run_checks(Part("logger", name, arguments, settings))
    assert [each.name for each in outcomes if each.result == "fails"] == failing
