"""Start each process as an actor of a Ray cluster, on this machine or on machines that Ray chooses."""

from __future__ import annotations

import logging
import math
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import ray, ray_scheduling, ray_util
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.clusters.environment import DEFAULT_ADDRESS, ClusterEnvironment
from drivetrain.errors import ConfigurationError, check_installed
from drivetrain.launchers._ending import Ended, Ending
from drivetrain.launchers._process_state import ProcessState
from drivetrain.launchers.board import BOARD, Board
from drivetrain.launchers.failure import Failure
from drivetrain.launchers.folder import job_folder
from drivetrain.launchers.launcher import Launcher, threads_each
from drivetrain.launchers.signals import exception_of, forwarding, handled

with on_first_use:
    from drivetrain.launchers import _ray_actor


_HERE = "local"  # Ray's name for a new cluster of only this machine
# the smallest size of Ray's object store; Ray's default is a third of this machine's memory
_STORE_BYTES = 200 * 2**20
_SOON_S = 10.0
_LAST_WORDS_S = 0.5  # time to print the actors' last output, which Ray fetches ten times a second
_ECHO_S = 10.0  # Ray notices a dead rank seconds after the other ranks have reported their lost connections
_CURE = "Create it where it is used: in setup, in configure_model, or in another hook, which run in each process."
_DIED = "If you did not kill it, its machine is gone or ran out of memory: use smaller batches or fewer loader workers."
_OF_RAY = re.compile("_group_|node:|memory")  # resources of Ray itself, which no job requests
# For these devices, the name of Ray's resource is torch's device type in capitals. For any other device, the name is
# "GPU".
_NOT_CALLED_GPU = ("HPU", "NPU", "TPU")


class RayLauncher(Launcher):
    """Starts Ray actors, each of which becomes a rank. This process only waits for the actors, and is not a rank.

    If the program is not connected to Ray, the launcher connects to the cluster at ``address`` for the duration of the
    call. By default, the launcher starts a cluster of only this machine, which takes seconds. To keep a connection
    between calls, call ``ray.init`` before ``fit``. To send modules to other machines, pass
    ``runtime_env={"working_dir": "."}`` to ``ray.init``. Classes and functions of the program's file or of a notebook
    are sent automatically.

    Every machine runs ``num_processes`` actors. The ranks on a machine are consecutive. If this machine runs actors, it
    has the first ranks. Each actor gets a copy of every tensor. It also gets this process's random state, torch
    settings, working directory and command line. This process's ``sys.path`` is appended to the actor's. Each actor
    gets the environment variables with its rank. An actor on this machine also gets this process's other environment
    variables. An actor on another machine only gets the variables that are not set on the actor's machine. Each actor
    has ``OMP_NUM_THREADS`` threads. If ``OMP_NUM_THREADS`` is not set, an actor has one thread for each processor that
    Ray has reserved for the actor. In a cluster that this launcher has started, the number of threads is instead the
    number of processors divided by ``num_processes``.

    By default, Ray hides from an actor the devices that Ray has reserved for other actors. With this launcher, each
    actor sees the devices of all actors on its machine, in the order of ``LOCAL_RANK``. Libraries use ``LOCAL_RANK`` as
    the index of a device. The Trainer counts the devices of this machine, so this machine needs as many devices as
    every other machine.

    Rank 0 writes the files on its machine, so the machines should share the folder ``default_root_dir``. SIGTERM and
    Ctrl-C can be sent to this process or to any actor. This process forwards the signal to all actors, so that a fit
    saves.

    Args:
        environment: provides this machine's node rank, and the main port.
        num_processes: the number of processes on each machine.
        num_nodes: the number of machines.
        resources: the resources that Ray reserves for each process, by Ray's names, with at most one device: ``{"CPU":
            4, "GPU": 1}``. The default is ``{"CPU": 1}``.
        address: the cluster's address, as for ``ray.init``. The default is the environment variable ``RAY_ADDRESS``. If
            ``RAY_ADDRESS`` is not set, the default is "local", a cluster of only this machine.
        start_timeout_s: seconds to wait until the cluster has free resources.
    """

    _names = ("ray",)
    is_interactive_compatible = True
    scheduler = "Ray"

    @classmethod
    def for_job(cls, *job: Any, **options: Any) -> Launcher:
        *_, devices = job
        return super().for_job(*job, **{"resources": resources_for(devices[0]), **options})

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int = 1,
        resources: Mapping[str, float] | None = None,
        address: str | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self.resources = {"CPU": 1.0} if resources is None else dict(resources)
        self.address = address
        self.start_timeout_s = start_timeout_s

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` in all actors. Return a copy of rank 0's result, with tensors in host memory.

        Raises:
            ConfigurationError: Ray is not installed, does not answer, or has no free resources, or the arguments cannot
                be pickled.
            LaunchError: a process failed, and the other processes were killed. If the process died, the exit code is 1,
                because Ray does not report the real exit code.
            KeyboardInterrupt: this process or a rank got SIGINT, and all ranks have ended.
            SIGTERMException: this process or a rank got SIGTERM, and all ranks have ended.
        """
        check_installed(type(self).__name__, "ray", instead='strategy="ddp"')
        call = _ray_actor.packed((function, args, kwargs), "Something that the new processes need", _CURE)
        try:
            with self._cluster(len(call)) as ours, self._actors(ours) as actors:
                seats = self._seats(actors)
                here = ray.get_runtime_context().get_node_id()
                # None keeps the value that Ray has set
                threads = os.environ.get("OMP_NUM_THREADS", str(threads_each(self.num_processes)) if ours else None)
                origin, sent = _origin(here), ray.put(call)
                with job_folder() as folder:
                    own = sum(seat.node == here for seat in seats)  # the first ``own`` ranks are on this machine
                    board = Board(folder, range(own), len(seats)) if own else None
                    variables = variables_for(seats, here, folder)
                    running = {
                        actor.run.remote(told, threads, origin, sent): _Rank(int(told["RANK"]), seat, actor)
                        for actor, told, seat in zip(actors, variables, seats, strict=True)
                    }
                    return pickle.loads(self._wait(running, here, board))
        finally:
            self.environment.teardown()

    # ---- resources -----------------------------------------------------------------------------------------------

    @contextmanager
    def _cluster(self, payload: int) -> Iterator[bool]:
        """Context in which this process is connected to a Ray cluster. Yields whether this launcher has started the
        cluster.
        """
        if ray.is_initialized():
            yield False
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or _HERE
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if address == _HERE:
            needed = math.ceil(self.resources.get("CPU", 0) * self.num_processes)
            options["num_cpus"] = max(needed, os.cpu_count() or 1)  # there may be more actors than processors
            options["object_store_memory"] = max(_STORE_BYTES, 2 * payload)
            options["include_dashboard"] = False
        with _handler_kept(signal.SIGTERM), ExitStack() as stack:
            stack.callback(ray.shutdown)
            try:
                _check_answers(address)
                ray.init(address=address, **options)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise ConfigurationError(
                    f"Ray cannot be reached at the address {address!r}: {error}\nWrite the address of a running "
                    "cluster into RAY_ADDRESS, or unset it: then a cluster of only this machine is started."
                ) from error
            stack.callback(time.sleep, _LAST_WORDS_S)
            yield address == _HERE

    @contextmanager
    def _actors(self, ours: bool) -> Iterator[list[Any]]:
        """Context that yields the actors, and kills them at its end. Each machine has the same number of actors."""
        together = {name: amount * self.num_processes for name, amount in self.resources.items()}
        group = ray_util.placement_group([together] * self.num_nodes, strategy="STRICT_SPREAD")
        actors: list[Any] = []
        try:
            self._wait_for_room(group, together, ours)
            kind = ray.remote(_ray_actor.RayActor)
            for index in range(self.num_processes * self.num_nodes):
                place = ray_scheduling.PlacementGroupSchedulingStrategy(group, index // self.num_processes)
                actors.append(kind.options(scheduling_strategy=place, **_options(self.resources)).remote())
            yield actors
        finally:
            with suppress(ray.exceptions.RayError):  # RayError: the cluster itself has ended
                for actor in actors:
                    ray.kill(actor)
                ray_util.remove_placement_group(group)

    def _wait_for_room(self, group: Any, together: Mapping[str, float], ours: bool) -> None:
        large = count_of(together, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        if large >= self.num_nodes or not ours:  # a cluster that this launcher did not start may grow
            soon = min(_SOON_S, self.start_timeout_s)
            if group.wait(soon):
                return
            rank_zero_info(f"Waiting for the Ray cluster: {together} on each of {self.num_nodes} machines.")
            if group.wait(self.start_timeout_s - soon):
                return
        busy = "" if large < self.num_nodes else f", but they were busy for {self.start_timeout_s:g} seconds"
        whole = {name: amount for name, amount in ray.cluster_resources().items() if not _OF_RAY.search(name)}
        raise ConfigurationError(
            f"The Ray cluster has no room for num_nodes={self.num_nodes} with {together} on each: {large} of its "
            f"machines are that large{busy}. The whole cluster has {whole}. Write fewer devices, fewer num_nodes, or "
            "the address of a larger cluster into RAY_ADDRESS."
        )

    def _seats(self, actors: Sequence[Any]) -> list[Seat]:
        try:
            seats: list[Seat] = ray.get([actor.seat.remote() for actor in actors])
        except ray.exceptions.RayError as error:
            raise ConfigurationError(
                f"An actor of Ray could not start: {error}\nInstall the same versions of drivetrain and torch on every "
                "machine of the cluster."
            ) from error
        return seats

    # ---- while they run ------------------------------------------------------------------------------------------

    def _wait(self, running: dict[Any, _Rank], here: str, board: Board | None) -> bytes:
        """Wait for all ranks, and return rank 0's result. If a signal has asked the ranks to end, the ranks save before
        they end.

        Args:
            running: the ranks. The keys are Ray's references to the ranks' pending results.
            here: Ray's id of this machine.
            board: shows the progress of this machine's ranks.
        """
        first, signals = b"", list[int]()
        failed, errors = dict[int, Ended](), dict[int, BaseException]()
        ending, ranks = Ending(board, self.stop_timeout_s, _ECHO_S), {rank.number: rank for rank in running.values()}
        with _handler_kept(signal.SIGTERM, without_rays=True), forwarding(signals.append, self.stop_timeout_s) as sent:
            for seconds in ending.turns(ranks, failed, sent, signals.append):
                while signals:
                    _pass_on(signals.pop(0), list(running.values()), here)
                for each in ray.wait(list(running), timeout=seconds)[0]:
                    rank = ranks.pop(running.pop(each).number)
                    try:
                        end = ray.get(each)
                    except ray.exceptions.RayError as error:
                        end = error
                    if not isinstance(end, bytes):
                        failed[rank.number], errors[rank.number] = self._failure(rank, end, board)
                        # close the failed rank's connections, so that no other rank waits for it
                        ray.kill(rank.actor)
                    elif rank.number == 0:
                        first = end
        if sent.number is not None:
            raise exception_of(sent.number)
        if failed:
            raise errors[min(failed, key=lambda number: failed[number].failure.follows)]
        return first

    def _failure(self, rank: _Rank, end: Any, board: Board | None) -> tuple[Ended, BaseException]:
        """Return how a rank has failed, and an exception for this failure. The exception's message tells the phase and
        the step of each rank of this machine.
        """
        job = self.num_processes * self.num_nodes
        who = f"Rank {rank.number} of {job} (an actor of Ray on {rank.seat.address}, process {rank.seat.pid})"
        reported = isinstance(end, Ended)
        ended = end if reported else Ended(Failure(time.monotonic(), "died before it could report.", _DIED))
        error = ended.error(rank.number, who, () if board is None else board.places())
        if not reported:
            error.__cause__ = end
        return ended, error


@dataclass(frozen=True)
class Seat:
    """The machine, the process and the devices of an actor.

    Attributes:
        node: Ray's id of the machine.
        address: the address at which other machines reach the machine.
        port: a free port of the machine.
        pid: the actor's process id.
        devices: the environment variables with which Ray hides other actors' devices from this actor.
    """

    node: str
    address: str
    port: int
    pid: int = 0
    devices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rank:
    number: int
    seat: Seat
    actor: Any


def variables_for(seats: Sequence[Seat], here: str, board: Path | None = None) -> list[dict[str, str]]:
    """Return the environment variables of each actor, in the order of ``seats``.

    The ranks on a machine are consecutive, and the machine ``here`` has the first ranks. Each actor sees the devices of
    all actors on its machine. If all actors are on one machine, ``MASTER_ADDR`` is a loopback address. Actors on
    ``here`` get the path ``board`` of the folder in which the actors show their progress.
    """
    nodes = sorted(dict.fromkeys(seat.node for seat in seats), key=lambda node: node != here)
    members = [[index for index, seat in enumerate(seats) if seat.node == node] for node in nodes]
    main = seats[members[0][0]]
    told: dict[int, dict[str, Any]] = {}
    for node_rank, indices in enumerate(members):
        hiding = dict.fromkeys(name for index in indices for name in seats[index].devices)
        visible = {name: ",".join(seats[index].devices[name] for index in indices) for name in hiding}
        for local_rank, index in enumerate(indices):
            told[index] = {
                "RANK": len(told),
                "LOCAL_RANK": local_rank,
                "NODE_RANK": node_rank,
                "WORLD_SIZE": len(seats),
                "LOCAL_WORLD_SIZE": len(indices),
                "MASTER_ADDR": main.address if len(nodes) > 1 else DEFAULT_ADDRESS,
                "MASTER_PORT": main.port,
                **visible,
                **({BOARD: board} if board is not None and nodes[node_rank] == here else {}),
            }
    return [{name: str(value) for name, value in told[index].items()} for index in range(len(seats))]


def count_of(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the number of ``nodes`` that have all the resources in ``wanted``."""
    return sum(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes)


def resources_for(device: torch.device) -> dict[str, float]:
    """Return the resources that Ray must reserve for a process with this device. The keys are Ray's names."""
    if device == HOST:
        return {"CPU": 1.0}
    name = device.type.upper()
    return {"CPU": 1.0, name if name in _NOT_CALLED_GPU else "GPU": 1.0}


def hides_devices(name: str) -> bool:
    """Whether an environment variable of this name hides devices from a process."""
    return "_VISIBLE_" in name or name == "ZE_AFFINITY_MASK"


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return ``resources`` as options of an actor. For some resources Ray has separate options."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    others = {name: amount for name, amount in resources.items() if name not in own}
    return {
        "num_cpus": 0,
        **{own[name]: amount for name, amount in resources.items() if name in own},
        "resources": others,
    }


def _origin(node: str) -> bytes:
    """Return the state of this process for the actors, without environment variables that are only valid on this
    machine.
    """
    state = ProcessState.current()
    of_machine = [name for name in state.environ if hides_devices(name) or name.startswith("RAY_")]
    environ = {name: value for name, value in state.environ.items() if name not in of_machine}
    origin = _ray_actor.Origin(node, os.getcwd(), tuple(sys.path), tuple(sys.argv), replace(state, environ=environ))
    return _ray_actor.packed(origin, "The state of this process", "")


def _check_answers(address: str) -> None:
    """Check that a process listens at the address. Without this check, Ray would retry for a quarter of an hour.

    Raises:
        OSError: no process listens at the address.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _SOON_S).close()


def _pass_on(number: int, ranks: Sequence[_Rank], here: str) -> None:
    """Send a signal to the processes of these ranks. On another machine, a Ray task sends the signal."""
    for node in {rank.seat.node for rank in ranks}:
        pids = [rank.seat.pid for rank in ranks if rank.seat.node == node]
        if node == here:
            _ray_actor.send_signal(pids, number)
            continue
        there = ray_scheduling.NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(num_cpus=0)(_ray_actor.send_signal).options(scheduling_strategy=there).remote(pids, number)


@contextmanager
def _handler_kept(number: signal.Signals, without_rays: bool = False) -> Iterator[None]:
    """Context that restores the signal's handler at its end, because Ray replaces the handler.

    Args:
        number: the signal.
        without_rays: whether to remove Ray's handler inside the context. Ray's handler would end the program at once.
    """
    before = signal.getsignal(number)
    is_rays = str(getattr(before, "__module__", "")).partition(".")[0] == "ray"
    inside = signal.SIG_DFL if without_rays and is_rays else before
    with handled({} if before is None else {number: inside}):  # None if Python cannot restore the handler
        yield
