"""MPI: its world is asked through mpi4py, which these tests replace by threads that really exchange."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from drivetrain.clusters import MPIEnvironment, mpi

HOSTS = ["zeta", "alpha", "zeta", "alpha"]  # of ranks 0 to 3


class World:
    """``COMM_WORLD`` of one rank, which is a thread with that number as its name."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.told: list[Any] = [None] * size
        self.exchanges = 0
        self.barrier = threading.Barrier(size)

    def Get_size(self) -> int:
        return self.size

    def Get_rank(self) -> int:
        return int(threading.current_thread().name)

    def allgather(self, value: Any) -> list[Any]:
        self.told[self.Get_rank()] = value
        self.exchanges += 1
        self.barrier.wait(timeout=10)
        return list(self.told)


def in_ranks(function: Callable[[], Any], size: int) -> list[Any]:
    def named(rank: int) -> Any:
        threading.current_thread().name = str(rank)
        return function()

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(named, range(size)))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    package, module = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    world = World(len(HOSTS))
    module.COMM_WORLD = world  # type: ignore[attr-defined]
    package.MPI = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    monkeypatch.setattr(mpi, "find_spec", lambda name: package if name == "mpi4py" else None)
    monkeypatch.setattr(socket, "gethostname", lambda: HOSTS[world.Get_rank()])
    return world


def test_ranks_machines_and_a_meeting_place(world: World) -> None:
    def facts() -> tuple[Any, ...]:
        environment = MPIEnvironment({})
        environment.validate_settings(2, 2)
        return (
            environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank(),
            environment.main_address, environment.main_port,
        )  # fmt: skip

    found = in_ranks(facts, 4)
    assert [fact[:4] for fact in found] == [(4, 0, 0, 1), (4, 1, 0, 0), (4, 2, 1, 1), (4, 3, 1, 0)]
    assert {fact[4] for fact in found} == {"zeta"}
    assert len({fact[5] for fact in found}) == 1  # rank 0's, though every rank has offered one
    assert len({port for _, port in world.told}) > 1
    assert world.exchanges == 4  # one for each rank


def test_given_address_and_port_win() -> None:
    environment = MPIEnvironment({"MASTER_ADDR": "chosen", "MASTER_PORT": "4321"})
    assert (environment.main_address, environment.main_port) == ("chosen", 4321)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_detected_by_what_a_launcher_sets(name: str) -> None:
    assert MPIEnvironment.detect({name: "4"})
    assert not MPIEnvironment.detect({name: "1"})


def test_mpi_is_not_touched_where_no_launcher_has_been(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # an import would fail
    assert not MPIEnvironment.detect({})


def test_without_mpi4py_each_would_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="started 2 processes, but mpi4py is not installed.*pip install mpi4py"):
        assert not MPIEnvironment.detect({"OMPI_COMM_WORLD_SIZE": "2"})
