"""Open MPI's mpirun, on one machine and on two that it reaches as if by ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)


@pytest.fixture(scope="module")
def mpirun(nodes: Any, need: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """The command that starts a program twice: on the first node, or once on each."""
    need("mpirun")
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py cannot be installed here")
    agent = tmp_path_factory.mktemp("agent") / "agent"  # what mpirun calls in ssh's place: agent HOST COMMAND...
    cases = [f'{node.name}) exec {shlex.join(node.command("sh", "-c"))} "$*" ;;' for node in nodes]
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", "case $host in", *cases, "esac", ""]))
    agent.chmod(0o755)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2, "--mca", "plm_rsh_agent", agent]

    def start(hosts: str = "n1") -> list[Any]:
        return [*command, "--host", hosts]

    return start


@pytest.mark.parametrize(
    ("hosts", "places"),
    [("n1", [("n1", 0, 0), ("n1", 1, 0)]), ("n1,n2", [("n1", 0, 0), ("n2", 0, 1)])],
    ids=["one machine", "two machines"],
)
def test_mpirun(
    nodes: Any, mpirun: Callable[..., Any], job: Any, alone: Callable[..., list[float]], hosts: str, places: Any
) -> None:
    shape = ["--num-nodes", 2] if hosts == "n1,n2" else ["--devices", 2]
    nodes[0].expect(*mpirun(hosts), *job.command(*shape))
    found = job.facts()
    assert [(facts["host"], facts["local_rank"], facts["node_rank"]) for facts in found] == places
    for rank, facts in enumerate(found):
        assert facts["environment"] == "MPIEnvironment"
        assert "because mpirun has started several processes" in facts["plan"]
        assert (facts["world_size"], facts["global_rank"], facts["step"]) == (2, rank, 12)
        assert facts["weights"] == pytest.approx(alone(), rel=1e-12)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["weights"] != pytest.approx(alone("--batch-size", "6"), rel=1e-3)


def test_horovod(nodes: Any, mpirun: Callable[..., Any], job: Any, alone: Callable[..., list[float]]) -> None:
    nodes[0].expect(*mpirun(), *job.command("--devices", 2, "--strategy", "horovod"))
    found = job.facts()
    assert [(facts["world_size"], facts["global_rank"], facts["step"]) for facts in found] == [(2, 0, 12), (2, 1, 12)]
    for facts in found:
        assert "HorovodStrategy" in facts["plan"]
        assert facts["weights"] == pytest.approx(alone(), rel=1e-12)


def test_a_size_that_is_not_the_jobs_is_said_before_the_processes_wait_for_each_other(
    nodes: Any, mpirun: Callable[..., Any], job: Any
) -> None:
    code, text = nodes[0].run(*mpirun(), *job.command("--devices", 3))
    assert code != 0
    assert "MPIEnvironment says that 2 processes were started, but devices=3" in text
    assert not job.events("n1")


def test_the_demo(nodes: Any, mpirun: Callable[..., Any], digits_demo: Callable[..., None]) -> None:
    digits_demo(nodes[0], *mpirun(), sys.executable)
