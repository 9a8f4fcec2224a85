"""horovodrun, and mpirun without mpi4py, with the variables that they set."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.clusters import HorovodEnvironment, detect
from drivetrain.clusters import horovod as module
from drivetrain.errors import ConfigurationError

BY_HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "24601",
}  # fmt: skip
BY_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1234",
}  # fmt: skip


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)


def ranks(environ: dict[str, str]) -> tuple[int, ...]:
    found, _ = detect(dict(environ))
    assert type(found) is HorovodEnvironment
    return found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()


def test_horovodrun_tells_the_ranks() -> None:
    assert ranks(BY_HOROVODRUN) == (4, 3, 1, 1)


@pytest.mark.usefixtures("no_mpi4py")
def test_so_does_mpirun_without_mpi4py() -> None:
    assert ranks(BY_MPIRUN) == (2, 1, 1, 0)


@pytest.mark.usefixtures("no_mpi4py")
@pytest.mark.parametrize("environ", [BY_MPIRUN, {**BY_HOROVODRUN, "HOROVOD_LOCAL_SIZE": "4"}])
def test_on_one_machine_all_ranks_meet_at_a_port_of_the_job(environ: dict[str, str]) -> None:
    rank = next(name for name in environ if name.endswith("_RANK"))
    meetings = {
        (found.main_address, found.main_port)
        for found in (HorovodEnvironment({**environ, rank: str(index)}) for index in range(2))
    }
    assert len(meetings) == 1
    ((address, port),) = meetings
    assert address == "127.0.0.1"
    assert port in module._PORTS
    given = HorovodEnvironment({**environ, "MASTER_ADDR": "first", "MASTER_PORT": "77"})
    assert (given.main_address, given.main_port) == ("first", 77)


def test_several_machines_must_be_told_where_they_meet() -> None:
    with pytest.raises(ConfigurationError, match="several machines .* MASTER_ADDR is not set. Set MASTER_ADDR"):
        _ = HorovodEnvironment(BY_HOROVODRUN).main_address


@pytest.mark.parametrize(
    ("environ", "mpi4py"),
    [
        ({}, False),
        ({**BY_HOROVODRUN, "HOROVOD_SIZE": "1"}, False),
        (BY_MPIRUN, True),  # which can tell more
        ({**BY_MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"}, False),  # several machines that could not meet
    ],
)
def test_where_it_does_not_detect_itself(environ: Any, mpi4py: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object() if mpi4py else None)
    assert not HorovodEnvironment.detect(environ)
