"""torchrun on machines of their own, which stay: test_elastic.py has those that come and go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
PORT = 29400


def torchrun(nodes: str, *options: str) -> list[str]:
    """One agent's command; they all meet on the first node, by its name: that is how it knows to be the host."""
    return [*TORCHRUN, "--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-endpoint", f"n1:{PORT}", *options]


def test_two_machines_train_what_one_process_trains(nodes: Any, job: Any, alone: Callable[..., list[float]]) -> None:
    program = job.command("--num-nodes", 2)[1:]
    agents = [node.start(*torchrun("2"), *program, output=job.log(number)) for number, node in enumerate(nodes)]
    assert [agent.wait(timeout=90) for agent in agents] == [0, 0]
    first, second = job.facts()
    assert (first["host"], first["node_rank"]) != (second["host"], second["node_rank"])
    for facts in (first, second):
        assert facts["host"] in ("n1", "n2")
        assert facts["environment"] == "TorchElasticEnvironment"
        assert "torchrun has set TORCHELASTIC_RUN_ID" in facts["plan"]
        assert (facts["world_size"], facts["local_rank"], facts["step"]) == (2, 0, 12)
        assert facts["node_rank"] == facts["global_rank"]
    assert first["weights"] == second["weights"] == pytest.approx(alone(), rel=1e-12)
    assert first["weights"] != pytest.approx(alone("--batch-size", "6"), rel=1e-3)


def test_the_demo(nodes: Any, digits_demo: Callable[..., None]) -> None:
    digits_demo(nodes[0], *TORCHRUN, "--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0")
