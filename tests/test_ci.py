"""The files that make others run the checks: pre-commit, and the workflow of the hosting service."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent


def parsed(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_pre_commit_runs_make_check_and_needs_no_network() -> None:
    config = parsed(".pre-commit-config.yaml")
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    [hook] = config["repos"][0]["hooks"]
    assert (hook["entry"], hook["language"]) == ("make check", "system")
    assert hook["always_run"]
    assert not hook["pass_filenames"]


def test_the_workflow_runs_what_ci_runs_with_the_fewest_rights() -> None:
    workflow = parsed(".github/workflows/ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    assert "permissions" not in job
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    for step in job["steps"]:
        assert "uses" not in step or re.fullmatch(r"actions/\w+@v\d+", step["uses"]), step


def test_ci_runs_the_checks_the_tests_and_those_of_optional_packages() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    run = {"make check", "make test", "make docs", "make test-extras", "make test-xla", "make test-legacy"}
    assert run <= set(lines)
    assert any(line.startswith('make test-proof PYTEST_ARGS="-k test_pages"') for line in lines)
