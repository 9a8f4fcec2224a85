"""The checks for loggers, on those that need packages of their own and work without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    tmp_path: Path, name: str, arguments: dict[str, Any], settings: dict[str, Any], failing: list[str]
) -> None:
    pytest.importorskip(name)
    # in a process of its own, because a run of wandb keeps its configuration for the next one in a process
    command = [sys.executable, "-m", "drivetrain.cli.command", "conformance", "logger", name, "--json"]
    command += ["--args", json.dumps(arguments), "--settings", json.dumps(settings)]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    checks = json.loads(done.stdout)["checks"]
    assert checks
    assert [each["name"] for each in checks if each["result"] == "fails"] == failing
