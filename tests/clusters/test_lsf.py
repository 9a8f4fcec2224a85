"""LSF: tasks of jsrun, and the file that lists the hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from drivetrain.clusters import LSFEnvironment
from drivetrain.errors import ConfigurationError


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The fourth of four tasks, on the second of two hosts."""
    file = tmp_path / "ranks"
    file.write_text("launcher\nhost-b\nhost-b\nhost-a.site\nhost-a.site\n")
    return {
        "LSB_JOBID": "71234", "LSB_DJOB_RANKFILE": str(file), "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4",
    }  # fmt: skip


def test_detected_by_four_variables(variables: dict[str, str]) -> None:
    assert LSFEnvironment.detect(variables)
    for name in ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"):
        assert not LSFEnvironment.detect({key: value for key, value in variables.items() if key != name})


def test_a_task(variables: dict[str, str]) -> None:
    environment = LSFEnvironment(variables)
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    assert (environment.main_address, environment.main_port) == ("host-b", 10234)
    environment.validate_settings(2, 2)


@pytest.mark.parametrize(("name", "rank"), [("host-b", 0), ("host-b.site", 0), ("host-a", 1), ("host-a.site", 1)])
def test_machines_are_numbered_as_they_are_listed(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, rank: int
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert LSFEnvironment(variables).node_rank() == rank


def test_the_host_that_launches_is_none_of_them(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "launcher")
    with pytest.raises(ConfigurationError, match="calls itself 'launcher', but the hosts .* are host-b, host-a.site"):
        LSFEnvironment(variables).node_rank()


def test_given_address_and_port_win(variables: dict[str, str]) -> None:
    environment = LSFEnvironment({**variables, "MASTER_ADDR": "chosen", "MASTER_PORT": "4321"})
    assert (environment.main_address, environment.main_port) == ("chosen", 4321)


def test_a_list_that_is_not_there(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="LSB_DJOB_RANKFILE names cannot be read: .* or set MASTER_ADDR"):
        _ = LSFEnvironment({**variables, "LSB_DJOB_RANKFILE": "/nowhere"}).main_address


def test_a_list_with_nobody_to_compute(variables: dict[str, str]) -> None:
    Path(variables["LSB_DJOB_RANKFILE"]).write_text("launcher\n\n")
    with pytest.raises(ConfigurationError, match="lists 1 hosts: the one that launches and none that computes"):
        _ = LSFEnvironment(variables).main_address
