"""HTCondor: slots find each other through a file."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drivetrain.clusters import HTCondorEnvironment
from drivetrain.errors import ConfigurationError


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    advertisement = tmp_path / ".job.ad"
    advertisement.write_text('ProcId = 0\nClusterId = 4711\nOwner = "me"\n')
    return {"_CONDOR_NPROCS": "2", "_CONDOR_JOB_AD": str(advertisement), "_CONDOR_JOB_IWD": str(tmp_path)}


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


@pytest.fixture
def listening() -> Iterator[int]:
    """A port where somebody answers."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        yield server.getsockname()[1]


def slot(job: dict[str, str], rank: int, **arguments: float) -> HTCondorEnvironment:
    return HTCondorEnvironment(environ={**job, "_CONDOR_PROCNO": str(rank)}, **arguments)  # type: ignore[arg-type]


def test_a_slot_is_a_machine_with_one_process(job: dict[str, str]) -> None:
    environment = slot(job, 1)
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank()) == (2, 1)
    assert (environment.local_rank(), environment.node_rank()) == (0, 1)
    environment.validate_settings(1, 2)


def test_detected_where_there_are_several_slots(job: dict[str, str]) -> None:
    assert HTCondorEnvironment.detect({**job, "_CONDOR_PROCNO": "0"})
    assert not HTCondorEnvironment.detect({**job, "_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "1"})
    assert not HTCondorEnvironment.detect(job)


def test_slots_meet_where_rank_0_listens(job: dict[str, str], tmp_path: Path) -> None:
    def first() -> tuple[str, int]:
        environment = slot(job, 0)
        meeting = environment.main_address, environment.main_port
        with socket.create_server(("localhost", meeting[1])) as server:
            server.settimeout(30)
            server.accept()[0].close()
        environment.teardown()
        return meeting

    def second() -> tuple[str, int]:
        environment = slot(job, 1, timeout_s=30)
        return environment.main_address, environment.main_port

    with ThreadPoolExecutor(2) as slots:
        later, sooner = slots.submit(second), slots.submit(first)
        assert later.result() == sooner.result()
    assert [path.name for path in tmp_path.iterdir()] == [".job.ad"]  # and nothing is left behind


def test_the_file_is_named_after_the_job(job: dict[str, str], tmp_path: Path) -> None:
    environment = slot(job, 0)
    written = tmp_path / ".drivetrain-contact-4711"
    meeting = [environment.main_address, environment.main_port]
    assert json.loads(written.read_text()) == meeting
    slot(job, 1, timeout_s=0).teardown()  # who has written nothing removes nothing
    assert written.exists()


def test_a_file_of_an_earlier_run_is_not_believed(job: dict[str, str], tmp_path: Path, listening: int) -> None:
    contact = tmp_path / ".drivetrain-contact-4711"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        contact.write_text(json.dumps(["localhost", free.getsockname()[1]]))
    with pytest.raises(ConfigurationError, match="within 0 s: the file is there, but no process answers at"):
        _ = slot(job, 1, timeout_s=0).main_address
    contact.write_text(json.dumps(["localhost", listening]))
    assert slot(job, 1, timeout_s=0).main_port == listening


def test_half_a_file_is_not_believed(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".drivetrain-contact-4711").write_text('["localho')
    with pytest.raises(ConfigurationError, match="no process answers at its address"):
        _ = slot(job, 1, timeout_s=0).main_address


def test_a_time_that_is_over_is_an_error(job: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"within 0 s: the file has not appeared. Pass .*contact_file=...\)"):
        _ = slot(job, 1, timeout_s=0).main_address


def test_a_place_of_ones_own(job: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "shared" / "contact"
    path.parent.mkdir()
    environment = HTCondorEnvironment(path, environ={"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "0"})
    assert environment.main_address == "localhost"
    assert path.exists()
    with pytest.raises(ConfigurationError, match="Rank 0 cannot write its address"):
        _ = HTCondorEnvironment(path / "no" / "folder", environ={**job, "_CONDOR_PROCNO": "0"}).main_address


@pytest.mark.parametrize("name", ["_CONDOR_JOB_AD", "_CONDOR_JOB_IWD"])
def test_no_place_without_the_jobs_number_and_folder(job: dict[str, str], name: str) -> None:
    del job[name]
    with pytest.raises(ConfigurationError, match=r"Pass HTCondorEnvironment\(contact_file=...\)"):
        _ = slot(job, 0).main_address


def test_given_address_and_port_win(job: dict[str, str]) -> None:
    environment = slot({**job, "MASTER_ADDR": "chosen", "MASTER_PORT": "4321"}, 1, timeout_s=0)
    assert (environment.main_address, environment.main_port) == ("chosen", 4321)
