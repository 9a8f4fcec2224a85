"""No cluster: one program, or one per machine, that starts the others."""

from __future__ import annotations

import socket

import pytest

from drivetrain.clusters import LocalEnvironment
from drivetrain.clusters.local import free_port
from drivetrain.errors import ConfigurationError

MEETING = {"MASTER_ADDR": "host", "MASTER_PORT": "2000"}


def test_alone() -> None:
    environment = LocalEnvironment({})
    assert not environment.creates_processes_externally
    assert environment.main_address == "127.0.0.1"
    ranks = environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank()
    assert ranks == (1, 0, 0, 0)
    environment.validate_settings(8, 1)


def test_s3_12_a_free_port_is_chosen_once() -> None:
    environment = LocalEnvironment({})
    port = environment.main_port
    assert environment.main_port == port
    with socket.socket() as taken:  # it is free
        taken.bind(("127.0.0.1", port))


def test_s3_12_two_jobs_do_not_meet_at_one_port() -> None:
    ports = {LocalEnvironment({}).main_port for _ in range(8)}
    assert len(ports) > 1  # the system hands them out at random; 8 equal ones would be no chance


def test_free_port_does_not_return_one_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert taken.getsockname()[1] not in {free_port() for _ in range(20)}


def test_variables_are_followed() -> None:
    environment = LocalEnvironment({**MEETING, "NODE_RANK": "2"})
    assert (environment.main_address, environment.main_port, environment.node_rank()) == ("host", 2000, 2)
    assert LocalEnvironment({"GROUP_RANK": "3"}).node_rank() == 3
    assert LocalEnvironment({"GROUP_RANK": "3", "NODE_RANK": "1"}).node_rank() == 1


def test_who_starts_the_others_tells_it_what_they_are() -> None:
    environment = LocalEnvironment({})
    environment.set_world_size(4)
    environment.set_global_rank(2)
    assert (environment.world_size(), environment.global_rank()) == (4, 2)


def test_local_rank_says_that_somebody_has_started_this_process() -> None:
    environment = LocalEnvironment({"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "4", **MEETING})
    assert environment.creates_processes_externally
    environment.set_world_size(99)
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    environment.validate_settings(2, 2)
    with pytest.raises(ConfigurationError, match="4 processes were started, but devices=3"):
        environment.validate_settings(3, 1)


def test_t54_a_stale_world_size_means_nothing() -> None:
    assert LocalEnvironment({"WORLD_SIZE": "4"}).world_size() == 1


def test_t54_teardown_forgets_the_job() -> None:
    variables = {"WORLD_SIZE": "4"}
    environment = LocalEnvironment(variables)
    environment.set_world_size(4)
    environment.set_global_rank(1)
    environment._main_port = 1
    environment.teardown()
    assert variables == {}
    assert (environment.world_size(), environment.global_rank()) == (1, 0)
    assert environment.main_port != 1


@pytest.mark.parametrize(("name", "rest"), [("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT", "MASTER_ADDR")])
def test_machines_must_know_where_to_meet(name: str, rest: str) -> None:
    with pytest.raises(ConfigurationError, match=f"num_nodes=2, but {name} is not set, and .* NODE_RANK=0, 1"):
        LocalEnvironment({rest: MEETING[rest]}).validate_settings(1, 2)
    LocalEnvironment(dict(MEETING)).validate_settings(1, 2)


def test_a_machine_beyond_the_last_one() -> None:
    with pytest.raises(ConfigurationError, match="number 2 by NODE_RANK or GROUP_RANK, but num_nodes=2"):
        LocalEnvironment({**MEETING, "NODE_RANK": "2"}).validate_settings(1, 2)


def test_started_by_hand_without_a_port() -> None:
    with pytest.raises(ConfigurationError, match="LOCAL_RANK=1 .* MASTER_PORT is not set, and each would choose its"):
        LocalEnvironment({"LOCAL_RANK": "1"}).validate_settings(2, 1)
    LocalEnvironment({"LOCAL_RANK": "0"}).validate_settings(1, 1)
