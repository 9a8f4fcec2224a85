"""How processes meet: within the timeout, with the address in every error, and on one machine by loopback only."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.clusters import ClusterEnvironment, KubeflowEnvironment, LocalEnvironment
from drivetrain.clusters.local import free_port
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.launchers.launcher import variables_of
from drivetrain.strategies import DDPStrategy, meeting
from drivetrain.strategies.meeting import Meeting, loopback_address

HERE = "127.0.0.1"
SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_served", set())


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """Call what each rank does, in threads; return results and errors."""
    outcomes: list[Any] = [None] * len(ranks)

    def call(index: int) -> None:
        try:
            outcomes[index] = ranks[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def rank(number: int, port: int, world_size: int = 2, timeout: timedelta = SHORT) -> Callable[[], Any]:
    return lambda: Meeting(HERE, port, number, world_size, timeout).store(own_socket=True)


@contextmanager
def listener(answer: bytes | None = None) -> Iterator[int]:
    """Another program that holds a port: it accepts nothing, or sends ``answer``; yields the port."""
    with socket.create_server((HERE, 0)) as server:
        if answer is not None:
            threading.Thread(target=_answering, args=(server, answer), daemon=True).start()
        yield server.getsockname()[1]


def _answering(server: socket.socket, answer: bytes) -> None:
    while True:
        try:
            other, _ = server.accept()
        except OSError:
            return
        with other:
            other.sendall(answer)


def listening(process: int | None = None) -> set[tuple[str, int]]:
    found = psutil.Process(process).net_connections("inet")
    return {(each.laddr[0], each.laddr[1]) for each in found if each.status == psutil.CONN_LISTEN}


# ---- within the timeout ----------------------------------------------------------------------------------------------


def test_ranks_that_all_come_get_one_store() -> None:
    """The control of the tests below."""
    port = free_port()
    stores = together(*(rank(number, port, 3, LONG) for number in range(3)))
    stores[0].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3


def test_a_listener_that_never_answers_ends_every_rank_within_its_timeout_and_shows_the_address() -> None:
    with listener() as port:
        first, second, third = together(*(rank(number, port, 3) for number in range(3)))
    assert isinstance(first, ConfigurationError)
    for error in (first, second, third):
        assert f"at {HERE}:{port}" in str(error)
        assert "set MASTER_PORT to a free port for all processes" in str(error)
    for number, error in ((1, second), (2, third)):
        assert type(error) is DrivetrainError
        assert str(error).startswith(f"Rank {number} has waited 1 s (the strategy's timeout)")
        assert "the program that listens there does not answer as torch's store" in str(error)


def test_a_listener_that_answers_something_else_is_named_too() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        [error] = together(rank(1, port))
    assert f"at {HERE}:{port}" in str(error)
    assert "does not answer as torch's store" in str(error)


def test_a_rank_without_rank_zero_says_that_no_program_listens() -> None:
    port = free_port()
    [error] = together(rank(1, port))
    assert f"Rank 1 has waited 1 s (the strategy's timeout) at {HERE}:{port}" in str(error)
    assert "no program listens there" in str(error)


def test_ranks_that_have_come_name_those_that_have_not() -> None:
    port = free_port()
    errors = together(*(rank(number, port, 5) for number in (0, 1, 3)))
    for error in errors:
        assert f"at {HERE}:{port}" in str(error)
    assert "of 5 processes, ranks 2, 4 have not come" in str(errors[0])


def test_a_rank_goes_on_only_when_the_others_are_connected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail at once, and with it the connections that the others are still making."""
    port, order, connecting = free_port(), list[str](), threading.Event()
    stores: list[object] = []  # as a process group does, keeps rank 0's server until the last rank has its answer
    monkeypatch.setattr(meeting, "loopback_address", lambda *_: HERE)
    monkeypatch.setattr(meeting, "_keep_gloo_on_loopback", lambda: None)
    monkeypatch.setattr(LocalEnvironment, "main_port", port)
    first = threading.Event()

    def connect(backend: str, *, store: object, rank: int, **options: Any) -> None:
        stores.append(store)
        if rank == 1:
            first.wait(LONG.total_seconds())  # rank 0 is connected
            connecting.wait(0.3)  # long enough for rank 0 to go on, if it did
        order.append(f"{rank} is connected")
        first.set()

    def meets(number: int) -> None:
        meeting.meet("gloo", LocalEnvironment(), number, 2, 1, LONG)
        order.append("a rank goes on")
        connecting.set()

    monkeypatch.setattr(dist, "init_process_group", connect)
    assert together(lambda: meets(0), lambda: meets(1)) == [None, None]
    assert order == ["0 is connected", "1 is connected", "a rank goes on", "a rank goes on"]


def test_ranks_that_are_not_connected_in_time_are_named() -> None:
    port = free_port()

    def stays_away(number: int) -> None:
        place = Meeting(HERE, port, number, 2, SHORT)
        store = place.store(own_socket=True)
        if number == 0:
            place.wait_for_all(store, "connected")

    error, _ = together(lambda: stays_away(0), lambda: stays_away(1))
    assert "of 2 processes, rank 1 has not come" in str(error)


def test_a_port_that_another_program_holds_is_an_error_on_rank_zero() -> None:
    with listener() as port:
        for own_socket in (True, False):
            with pytest.raises(ConfigurationError, match=f"Rank 0 cannot listen at {HERE}:{port}.*End it, or set MAST"):
                Meeting(HERE, port, 0, 2, SHORT).store(own_socket)


def test_a_process_may_meet_again_where_it_has_met_before() -> None:
    port = free_port()
    [first] = together(rank(0, port, 1))
    [second] = together(rank(0, port, 1))  # torch's server of the first is still there
    first.set("key", "value")
    assert second.get("key") == b"value"


# ---- on one machine: loopback only -----------------------------------------------------------------------------------


def local(address: str) -> ClusterEnvironment:
    return LocalEnvironment({"MASTER_ADDR": address, "MASTER_PORT": "1", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(("address", "number"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("0.0.0.0", None)])
def test_the_loopback_address_of_a_job_on_one_machine(address: str, number: str | None) -> None:
    assert loopback_address(local(address), 1) == number
    assert loopback_address(local(address), 2) is None  # the other machine must reach it


def test_localhost_is_one_address_on_all_ranks() -> None:
    assert loopback_address(local("localhost"), 1) in (HERE, "::1")


def test_a_pod_is_not_the_only_machine() -> None:
    """Kubeflow tells the master that its address is "localhost"; the others come from other machines."""
    pod = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0"}
    assert loopback_address(KubeflowEnvironment({**pod, "WORLD_SIZE": "2"}), 1) is None
    assert loopback_address(KubeflowEnvironment({**pod, "WORLD_SIZE": "1"}), 1) is not None


@pytest.mark.parametrize("address", [HERE, "::1"])
def test_the_store_listens_at_the_address_alone(address: str) -> None:
    if address == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    before, port = listening(), free_port()
    store = Meeting(address, port, 0, 1, LONG).store(own_socket=True)
    assert listening() - before == {(address, port)}
    del store
    other = free_port()
    store = Meeting(address, other, 0, 1, LONG).store(own_socket=False)  # the control: torch's own socket
    assert {ip for ip, number in listening() - before if number == other} <= {"::", "0.0.0.0"}
    del store


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class Sockets(Callback):
    """Writes down where this process listens while it trains."""

    def __init__(self) -> None:
        self.before = listening()
        self.new: set[tuple[str, int]] = set()
        self.interface: str | None = None

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.new = listening() - self.before
        self.interface = os.environ.get(meeting.GLOO_INTERFACE)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder: Path, interface: str | None) -> tuple[set[str], str | None, str | None]:
    """Addresses at which a rank listens, and Gloo's interface in the fit and afterwards."""
    os.environ.pop(meeting.GLOO_INTERFACE, None)  # which the pool sets
    if interface is not None:
        os.environ[meeting.GLOO_INTERFACE] = interface
    seen = Sockets()
    loader: Any = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, callbacks=[seen], logger=False,
                      enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                      default_root_dir=folder)  # fmt: skip
    trainer.fit(Net(), loader)
    trainer.strategy.leave_process_group()
    return {ip for ip, _ in seen.new}, seen.interface, os.environ.get(meeting.GLOO_INTERFACE)


def test_a_job_on_one_machine_listens_on_loopback_only(pool: Any, tmp_path: Path) -> None:
    for addresses, interface, afterwards in pool.run(fitted, tmp_path, None, group=False):
        assert addresses == {HERE}
        assert interface == ("lo" if sys.platform == "linux" else interface)
        assert afterwards is None


def test_an_interface_that_the_user_has_chosen_for_gloo_is_kept(pool: Any, tmp_path: Path) -> None:
    """And the control: an address that is not loopback is seen."""
    others = {
        name: each.address
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family is socket.AF_INET and not each.address.startswith("127.")
    }
    if not others:
        pytest.skip("this machine has no other interface")
    name = min(others)
    for addresses, interface, afterwards in pool.run(fitted, tmp_path, name, group=False):
        assert others[name] in addresses
        assert interface == afterwards == name


def test_processes_that_are_started_here_meet_by_loopback_wherever_several_machines_would() -> None:
    environment = LocalEnvironment({"MASTER_ADDR": "host", "MASTER_PORT": "2000"})
    assert {each["MASTER_ADDR"] for each in variables_of(environment, 2, 1)} == {HERE}
    assert {each["MASTER_ADDR"] for each in variables_of(environment, 2, 2)} == {"host"}
    environment = LocalEnvironment({"MASTER_ADDR": "::1", "MASTER_PORT": "2000"})
    assert {each["MASTER_ADDR"] for each in variables_of(environment, 2, 1)} == {"::1"}


def test_a_run_ends_within_the_timeout_of_its_strategy(pool: Any) -> None:
    with listener() as port:
        texts = pool.run(held_up, port, group=False)
    for number, text in enumerate(texts):
        assert f"Rank {number} " in text
        assert f"at {HERE}:{port} (MASTER_ADDR:MASTER_PORT)" in text


def held_up(port: int) -> str:
    os.environ["MASTER_PORT"] = str(port)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=SHORT), logger=False, max_epochs=1,
                      enable_checkpointing=False)  # fmt: skip
    loader: Any = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    with pytest.raises(DrivetrainError) as caught:
        trainer.fit(Net(), loader)
    return str(caught.value)


def test_a_program_that_a_rank_has_started_does_not_join_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "started_by_rank", lambda: 4711)
    with pytest.raises(ConfigurationError, match=r"started by process 4711, which is rank 1 of a job of 2 processes"):
        meeting.meet("gloo", LocalEnvironment(), 1, 2, 1, SHORT)


def test_a_restart_by_torchrun_does_not_find_the_addresses_of_the_processes_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's agent keeps one store for all restarts of a job."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def store(restart: int) -> Any:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        return Meeting("127.0.0.1", agent.port, 0, 1, timedelta(seconds=10)).store(own_socket=False)

    store(0).set("gloo", "an address")
    assert store(0).check(["gloo"])  # as another rank of the same start does
    assert not store(1).check(["gloo"])
