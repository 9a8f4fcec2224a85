"""torchrun on machines of their own: network namespaces, where a node can come late and can die."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
PORT = 29400
# Without it, workers that are started again read the addresses of dead ones from their agents' store (torch 2.13).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Late and lost machines are noticed in seconds.
SOON = [
    "--monitor-interval", "0.2", "--max-restarts", "5",
    "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
]  # fmt: skip
EPOCHS = 100  # at a fifth of a second per step, until the test is in a hurry


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


@pytest.mark.daemon
def test_a_machine_joins_and_one_dies(
    network: Any, job: Any, alone: Callable[..., list[float]], wait_for: Callable[..., Any]
) -> None:
    """Each time all go on from the last checkpoint, and come to what one process comes to that nobody disturbs."""
    program = job.command("--num-nodes", 0, "--epochs", EPOCHS, "--resume", "--pause", 0.2)[1:]

    def trained(world_size: int) -> bool:
        """Whether so many have trained together, and saved: the second epoch of four steps has begun."""
        began = max((start["step"] for start in job.starts("n1") if start["world_size"] == world_size), default=None)
        return began is not None and job.events("n1")[-1]["step"] > began + 4

    with network(3) as nodes:

        def join(number: int) -> Any:
            return nodes[number - 1].start(*torchrun("1:3", *SOON), *program, output=job.log(number), **OWN_STORE)

        agents = [join(1), join(2)]
        wait_for("two machines", lambda: trained(2))
        agents.append(join(3))
        wait_for("a third one", lambda: trained(3))
        nodes[2].kill()
        wait_for("two again", lambda: job.starts("n1")[-1]["world_size"] == 2)
        job.hurry()
        assert [agent.wait(timeout=90) for agent in agents] == [0, 0, -9]

    starts = job.starts("n1")
    sizes = [size for size, _ in groupby(start["world_size"] for start in starts) if size > 1]  # one may have to wait
    assert sizes == [2, 3, 2]
    steps = [start["step"] for start in starts]
    assert steps == sorted(steps)
    assert all(step % 4 == 0 for step in steps)  # saved at the end of an epoch
    assert 0 < job.starts("n3")[0]["step"] < steps[-1]
    first, second = job.facts()
    assert first["step"] == second["step"] == 4 * EPOCHS
    assert first["weights"] == second["weights"] == pytest.approx(alone("--epochs", str(EPOCHS)), rel=1e-9)


def test_the_demo(nodes: Any, digits_demo: Callable[..., None]) -> None:
    digits_demo(nodes[0], *TORCHRUN, "--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0")
