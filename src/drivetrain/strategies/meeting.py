"""Connect the processes of a job, and create their process group. The processes meet within a timeout, at torch's
key-value store at the main address.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.launchers import flight
from drivetrain.launchers.script import started_by_rank
from drivetrain.strategies.peers import some

_STORES: Any = dist  # torch's stores have no types
# The environment variable with the network interface on which Gloo listens. torch reads this variable whenever a group
# is created.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACES = {"linux": "lo", "darwin": "lo0"}
_TORCHRUNS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun sets this variable to "True" if its agent runs the store
_WITHOUT_STORE = ("mpi", "fake")  # backends without a store
_PROBE_S = 0.5
_SHORTEST_S = 0.01
# Prefixes of keys in the store. A rank sets the first key when it has connected to the store, and the second key when
# its process group is connected.
_HERE, _CONNECTED = "drivetrain/meeting", "drivetrain/connected"


def meet(
    backend: str,
    environment: ClusterEnvironment,
    rank: int,
    world_size: int,
    num_nodes: int,
    timeout: timedelta | None,
) -> None:
    """Create the process group of all ranks.

    If the job runs on one machine and the main address is a loopback address, rank 0's store and Gloo listen only on
    the loopback interface. Under torchrun, torchrun's agent runs the store and chooses its address.

    Args:
        backend: the backend of ``torch.distributed``.
        environment: provides the main address and port.
        rank, world_size: the rank of this process, and the number of processes of the job.
        num_nodes: the number of machines.
        timeout: the timeout of the connection and of the created group; ``None``: torch's default.

    Raises:
        ConfigurationError: rank 0 cannot listen at the main address, or this machine cannot resolve the address. Also
            raised in a process that a rank has started, if the process has inherited the rank's environment variables.
        DrivetrainError: not all ranks have connected within the timeout.
    """
    environment.validate_address()
    if parent := started_by_rank():
        raise ConfigurationError(
            f"This program was started by process {parent}, which is rank {rank} of a job of {world_size} processes, "
            "and has inherited its environment variables, so it would join that job as the same rank. Start it without "
            "them: "
            "env={name: value for name, value in os.environ.items() if name not in ("
            '"RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}.'
        )
    flight.record_collectives()
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout}
    if backend in _WITHOUT_STORE:
        address = f"tcp://{environment.main_address}:{environment.main_port}"
        dist.init_process_group(backend, init_method=address, **options)
        return
    loopback = loopback_address(environment, num_nodes)
    place = Meeting(loopback or environment.main_address, environment.main_port, rank, world_size, timeout)
    store = place.store(own_socket=loopback is not None)
    if loopback is not None:
        _keep_gloo_on_loopback()
    dist.init_process_group(backend, store=store, **options)
    # Wait for all ranks: if one rank continued now and failed, the other ranks could not finish their connections.
    place.wait_for_all(store, _CONNECTED)


def loopback_address(environment: ClusterEnvironment, num_nodes: int) -> str | None:
    """Return the IP of the main address if it is a loopback address, such as 127.0.0.1. Return ``None`` for any other
    address, and for a job on several machines.

    With several machines, each machine may resolve the name differently. Debian, for example, resolves a machine's own
    name to 127.0.1.1.
    """
    if not environment.is_one_machine(num_nodes):
        return None
    found = {str(each[4][0]) for each in socket.getaddrinfo(environment.main_address, None, type=socket.SOCK_STREAM)}
    if not all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found):
        return None
    return min(found, key=lambda each: (":" in each, each))  # IPv4 first: "localhost" may also have an IPv6 address


class Meeting:
    """One attempt of a rank to connect to the other ranks.

    Args:
        address, port: the address and port at which rank 0 listens.
        rank, world_size: the rank of this process, and the number of processes of the job.
        timeout: the longest time to wait until all ranks have connected; ``None``: torch's default.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout: timedelta | None) -> None:
        self.address, self.port, self.rank, self.world_size = address, port, rank, world_size
        self.timeout = timeout or dist.default_pg_timeout
        self._deadline = time.monotonic() + self.timeout.total_seconds()
        host = f"[{address}]" if ":" in address else address
        self.name = f"{host}:{port}"

    def store(self, own_socket: bool) -> Any:
        """Wait until all ranks have connected to the store, and return the store.

        Args:
            own_socket: let rank 0 listen only at this address. A socket that torch creates listens on every interface.
        """
        serves = self.rank == 0 and os.environ.get(_TORCHRUNS_STORE) != "True"
        options: dict[str, Any] = {} if not (serves and own_socket) else self._listening()
        options.update(
            world_size=self.world_size, is_master=serves, timeout=self.timeout, wait_for_workers=False,
            multi_tenant=serves, use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )  # fmt: skip
        try:
            store = self._in_time(lambda: _STORES.TCPStore(self.address, self.port, **options))
        except RuntimeError as error:
            if serves and ("EADDRINUSE" in str(error) or "EACCES" in str(error)):
                raise self._cannot_listen(str(error)) from error
            found, cure = self._probed()
            text = f"{self._waited} (MASTER_ADDR:MASTER_PORT) for rank 0, and {found}. {cure} [DT1056]"
            raise DrivetrainError(text) from error
        if os.environ.get(_TORCHRUNS_STORE) == "True":
            # torchrun's store outlives the processes, and still contains the addresses of earlier attempts.
            store = _STORES.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.wait_for_all(store, _HERE)
        return store

    def wait_for_all(self, store: Any, key: str) -> None:
        """Wait until all ranks have called this method with the same key.

        Raises:
            DrivetrainError: a rank has not called this method before the deadline, or rank 0 has ended.
        """

        def wait() -> None:
            left = self._deadline - time.monotonic()
            # stop waiting before the deadline, so that time is left to find out which ranks are missing
            patience = timedelta(seconds=max(_SHORTEST_S, left - min(_PROBE_S, left / 4)))
            store.set(f"{key}/{self.rank}", "")  # _not_all() reads this key to name the missing ranks
            if store.add(f"{key}/count", 1) >= self.world_size:
                store.set(key, "")
            store.wait([key], patience)

        try:
            self._in_time(wait)
        except RuntimeError as error:  # the deadline has passed, or rank 0 has ended
            raise self._not_all(store, key) from error

    def _listening(self) -> dict[str, Any]:
        """Create a socket that is bound only to this address. Return arguments for torch's store that contain the
        socket. The store then owns the socket.

        Raises:
            ConfigurationError: another program holds the port.
        """
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as own:
            if os.name == "posix":  # on Windows, the option would let two programs listen at one port
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                own.bind((self.address, self.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and (self.address, self.port) in _served:
                    return {}  # torch reuses this process's earlier store at this address
                raise self._cannot_listen(str(error)) from error
            _served.add((self.address, self.port))
            return {"master_listen_fd": own.detach()}

    def _in_time(self, function: Callable[[], Any]) -> Any:
        """Return the result of ``function``.

        The function runs in a thread. Without the thread, torch would wait forever and ignore Ctrl-C if the program at
        the address never answers.

        Raises:
            RuntimeError: the deadline has passed before the end of ``function``.
        """
        result: futures.Future[Any] = futures.Future()

        def call() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=call, name="drivetrain meeting", daemon=True).start()
        try:
            return result.result(max(0.0, self._deadline - time.monotonic()))
        except futures.TimeoutError as error:
            raise RuntimeError(f"no answer at {self.name} in time") from error

    # ---- errors --------------------------------------------------------------------------------------------------

    @property
    def _waited(self) -> str:
        return f"Rank {self.rank} has waited {self.timeout.total_seconds():g} s (the strategy's timeout) at {self.name}"

    def _cannot_listen(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"Rank 0 cannot listen at {self.name} (MASTER_ADDR:MASTER_PORT), where the {self.world_size} processes of "
            f"this job meet: {why}. Another program, perhaps an earlier job, holds the port. End it, or set "
            "MASTER_PORT to a free port for all processes. [DT1054]"
        )

    def _probed(self) -> tuple[str, str]:
        """Return two texts: which program, if any, answers at the address, and what the user can do."""
        try:
            socket.create_connection((self.address, self.port), _PROBE_S).close()
        except ConnectionRefusedError:
            return "no program listens there", (
                "Rank 0 has failed or was not started, or it meets elsewhere: see its output, and set MASTER_ADDR and "
                "MASTER_PORT alike for all processes."
            )
        except OSError as error:
            return f"this machine does not reach the address: {error}", (
                "Set MASTER_ADDR to an address of rank 0's machine that every machine of the job reaches, and open "
                "MASTER_PORT in its firewall."
            )
        return "the program that listens there does not answer as torch's store", (
            "If it is another program, set MASTER_PORT to a free port for all processes."
        )

    def _not_all(self, store: Any, key: str) -> DrivetrainError:
        missing, absent = "not all of them have come", list[int]()
        self._deadline = time.monotonic() + _PROBE_S
        with suppress(RuntimeError):  # rank 0 and the store have ended
            absent = self._in_time(lambda: [n for n in range(self.world_size) if not store.check([f"{key}/{n}"])])
        if absent:
            which = f"ranks {some(absent)} have" if len(absent) > 1 else f"rank {absent[0]} has"
            missing = f"of {self.world_size} processes, {which} not come"
        return DrivetrainError(
            f"{self._waited} (MASTER_ADDR:MASTER_PORT) for the other processes, and {missing}. See in their output "
            "why, start as many processes as num_nodes and devices say, or raise the strategy's timeout. [DT1055]"
        )


_served: set[tuple[str, int]] = set()  # the addresses at which this process has listened


# ---- Gloo ------------------------------------------------------------------------------------------------------------

_set_here: list[str] = []  # empty, or the value to which this module has set Gloo's variable


def _keep_gloo_on_loopback() -> None:
    """Restrict Gloo's connections to the loopback interface, unless the user has set Gloo's environment variable."""
    name = _LOOPBACK_INTERFACES.get(sys.platform)
    if GLOO_INTERFACE not in os.environ and name in {each for _, each in socket.if_nameindex()}:
        os.environ[GLOO_INTERFACE] = str(name)
        _set_here[:] = [str(name)]


def forget_interface() -> None:
    """If this module has set Gloo's environment variable, remove the variable. Called after the group is destroyed."""
    if _set_here and os.environ.get(GLOO_INTERFACE) == _set_here[0]:
        del os.environ[GLOO_INTERFACE]
    _set_here.clear()
