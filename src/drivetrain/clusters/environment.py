"""The contract of a cluster environment, which tells a process its ranks in the job. The registry of all cluster
environments.
"""

from __future__ import annotations

import functools
import operator
import os
import signal
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import Registry
from drivetrain.errors import ConfigurationError, shown

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 12910

_NAMES_OF_1 = {
    "main_address": "master_address",
    "main_port": "master_port",
    "creates_processes_externally": "creates_children",
}
_NUMBERS = ("world_size", "global_rank", "local_rank", "node_rank", "main_port", "master_port")
_TEXTS = ("main_address", "master_address")
_FACTS = ("creates_processes_externally", "creates_children")


class ClusterEnvironment:
    """Tells this process its ranks, from the environment variables that a launcher or a cluster has set.

    The base class reads the variables of ``torchrun``: ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE``, ``RANK``,
    ``LOCAL_RANK`` and ``GROUP_RANK``. A subclass for a cluster without these variables overrides the members that read
    them. Lightning's old methods ``master_address()``, ``master_port()`` and ``creates_children()`` can be overridden
    and called, too.

    All numbers are ints. If a method of a subclass returns a string, the string is converted. If a method returns
    ``None``, because a variable is not set, the caller gets a ConfigurationError.

    Args:
        environ: the environment variables. By default, the object reads the variables of the process that uses it, even
            if another process has created it.
    """

    detect_priority: ClassVar[int | None] = None
    """:func:`detect` tries the environment with the highest priority first. With ``None``, only the user can choose
    this environment.

    drivetrain's environments have these priorities: Ray Train 600, torchrun 500, SLURM 400, LSF 300, Horovod 250, MPI
    200, HTCondor 100, clusters that start the program once on each machine 90 to 40, local 0.
    """

    evidence: ClassVar[str] = "its detect() returned True"
    """The reason to use this environment, such as "Vertex AI has set CLUSTER_SPEC". If :meth:`detect` returns True, the
    Trainer's plan shows this text.
    """

    variables: ClassVar[tuple[str, ...]] = ()
    """The environment variables that this cluster sets in each process."""

    environ: MutableMapping[str, str] = os.environ

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        if environ is not None and environ is not os.environ:
            self.environ = environ

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in (*_NUMBERS, *_TEXTS, *_FACTS):
            _check_answers(cls, name)
        for new, old in _NAMES_OF_1.items():
            _pair_names(cls, new, old)

    # ---- launch --------------------------------------------------------------------------------------------------

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether this process runs in this kind of cluster. The default is True if all ``variables`` are set."""
        return bool(cls.variables) and all(name in environ for name in cls.variables)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the cluster starts all processes of the job. If False, one process of each machine starts the other
        processes of the machine.
        """
        return True

    # ---- rendezvous ----------------------------------------------------------------------------------------------

    @property
    def main_address(self) -> str:
        """The host name or IP address of global rank 0's machine. By default, this is ``MASTER_ADDR``, or the cluster's
        address if ``MASTER_ADDR`` is not set.
        """
        return self.environ.get("MASTER_ADDR") or self._address_of_cluster()

    @property
    def main_port(self) -> int:
        """The port at which global rank 0 will listen. By default, this is ``MASTER_PORT``, or the cluster's port if
        ``MASTER_PORT`` is not set.
        """
        return self.number("MASTER_PORT") if "MASTER_PORT" in self.environ else self._port_of_cluster()

    def _address_of_cluster(self) -> str:
        return self._assumed("MASTER_ADDR", DEFAULT_ADDRESS)

    def _port_of_cluster(self) -> int:
        return int(self._assumed("MASTER_PORT", str(DEFAULT_PORT)))

    # ---- ranks ---------------------------------------------------------------------------------------------------

    _world_size: int | None = None
    _global_rank: int | None = None
    _is_single_machine = False  # validate_settings() sets it

    def world_size(self) -> int:
        """The number of processes in the job."""
        return self.number("WORLD_SIZE", self._world_size)

    def set_world_size(self, size: int) -> None:
        """Set the number of processes. Has no effect if the cluster has started the processes."""
        if not self.creates_processes_externally:
            self._world_size = size

    def global_rank(self) -> int:
        """The index of this process in the job. On a single machine without RANK, this is :meth:`local_rank`."""
        if self._is_single_machine and self._global_rank is None and "RANK" not in self.environ:
            return self.local_rank()
        return self.number("RANK", self._global_rank)

    def set_global_rank(self, rank: int) -> None:
        """Set the global rank. Has no effect if the cluster has started the processes."""
        if not self.creates_processes_externally:
            self._global_rank = rank

    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self.number("LOCAL_RANK")

    def node_rank(self) -> int:
        """Index of this machine in the job."""
        return self.number("GROUP_RANK", 0)

    def is_one_machine(self, num_nodes: int) -> bool:
        """Whether all processes of the job are on this machine. The processes can then communicate through the loopback
        interface.

        Args:
            num_nodes: the user's number of machines.
        """
        return num_nodes == 1

    def nodes_meant(self, given: int) -> int:
        """Return the number of machines in the job. ``given`` is the Trainer's ``num_nodes``, which a cluster may
        override.
        """
        return given

    def reserved_devices(self) -> int | None:
        """Return the number of devices that the cluster has reserved on each machine, or ``None`` if this is
        unknown.
        """
        return None

    def devices_of_processes(self, count: int) -> list[int]:
        """Return the device index of each process of this machine for ``devices="auto"``, in the order of local ranks.

        Args:
            count: the number of devices that this process sees.
        """
        return list(range(count))

    def local_world_size(self, num_nodes: int) -> int:
        """Return the number of processes that the cluster has started on this machine.

        Args:
            num_nodes: the number of machines. Each machine has the same number of processes.
        """
        return self.world_size() // max(num_nodes, 1)

    # ---- reporting -----------------------------------------------------------------------------------------------

    report_callback: str = ""
    """The callback that the Trainer adds in this cluster, as "module:class". "" if there is no such callback. If the
    user has passed a callback whose class has this name, the Trainer does not add the callback.
    """

    # ---- requeueing ----------------------------------------------------------------------------------------------

    auto_requeue: bool = False
    """Whether a fit saves a checkpoint and requeues the job when the cluster announces the job's end."""

    requeue_signal: signal.Signals | None = None
    """The signal with which the cluster announces the job's end."""

    def requeue_id(self) -> str | None:
        """The cluster's id of the job. The id stays the same when the job is requeued."""
        return None

    def restart_count(self) -> int:
        """The number of times that the job was requeued."""
        return 0

    def requeue(self) -> str | None:
        """Requeue the job. Called on global rank 0. Return ``None`` if the job was requeued, otherwise an error
        message.
        """
        return f"{type(self).__name__} does not define requeue()."

    # ---- life ----------------------------------------------------------------------------------------------------

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the user's settings with the processes that the cluster has started.

        Args:
            num_devices: the number of devices per machine.
            num_nodes: the number of machines.

        Raises:
            ConfigurationError: the settings do not fit the started processes. With these settings, ranks would wait
                forever for missing ranks.
        """
        if not self.creates_processes_externally:
            return
        size = self.world_size()
        if num_devices * num_nodes != size:
            raise ConfigurationError(
                f"{type(self).__name__} says that {size} processes were started, but devices={num_devices} and "
                f"num_nodes={num_nodes} make {num_devices * num_nodes}. Write devices and num_nodes with the product "
                f"{size}, or start as many processes."
            )
        self._is_single_machine = num_nodes == 1
        if not 0 <= (rank := self.global_rank()) < size:
            raise ConfigurationError(
                f"{type(self).__name__} says that this process has the rank {rank}, but ranks of {size} processes are "
                f"0 to {size - 1}. Check the variables that the launcher has set."
            )

    def validate_address(self) -> None:
        """Check that this machine can resolve the main address. Called before the rendezvous, which would hang with a
        wrong address.

        Raises:
            ConfigurationError: this machine cannot resolve the main address.
        """
        address = self.main_address
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise ConfigurationError(
                f"{type(self).__name__} says that the processes meet on {address!r}, but this machine cannot find it: "
                f"{error}. Set MASTER_ADDR to a name or number that every machine of the job reaches."
            ) from error

    def teardown(self) -> None:
        """Called at the end of the job in this process."""

    # ---- reading -------------------------------------------------------------------------------------------------

    def number(self, name: str, default: int | None = None) -> int:
        """Return the variable ``name`` as an int.

        Raises:
            ConfigurationError: the variable is not an integer, or the variable is not set and there is no default.
        """
        text = self.environ.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            found = "is not set" if text is None else f"holds {text!r}, which is no whole number"
            raise ConfigurationError(
                f"{type(self).__name__} reads the environment variable {name}, which {found}. Start the program with "
                "the launcher that sets it, or pass another cluster environment in Trainer(plugins=[...])."
            ) from None

    def _assumed(self, name: str, value: str) -> str:
        """Set a missing variable to ``value``, warn, and return ``value``."""
        rank_zero_warn(f"The environment variable {name} is not set; {value} is used. Set it to silence this.")
        self.environ[name] = value
        return value


def reading(name: str, like: Callable[[Any], int]) -> Callable[[Any], int]:
    """Return a method that reads the variable ``name`` as an int. The method has the name and docstring of ``like``."""

    # updated=() does not copy ``__isabstractmethod__``, which is in the ``__dict__`` of an abstract method
    @functools.wraps(like, updated=())
    def read(self: Any) -> int:
        return self.number(name)

    return read


def _check_answers(cls: type[ClusterEnvironment], name: str) -> None:
    """Wrap the member ``name`` that ``cls`` or a mixin defines. The wrapped member converts its result to the type of
    the contract, or raises an error.
    """
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    if owner is not cls and issubclass(owner, ClusterEnvironment):
        return  # the class that defines the member has already wrapped it
    member: Any = vars(owner).get(name)

    def answer(self: ClusterEnvironment) -> Any:
        given = member.__get__(self, type(self)) if hasattr(member, "__get__") else member
        return _in_type(self, name, given() if callable(given) else given, member)

    function = getattr(member, "fget", member)
    if callable(function):
        functools.update_wrapper(answer, function)
    is_property = name in _NAMES_OF_1
    setattr(cls, name, property(answer, getattr(member, "fset", None)) if is_property else answer)


def _in_type(environment: ClusterEnvironment, name: str, given: Any, member: Any) -> Any:
    """Convert ``given``, the value that the member ``name`` has returned, to the type of the contract.

    Raises:
        ConfigurationError: ``given`` is ``None``, or is no integer although the contract expects an integer.
    """
    shown_name = f"{type(environment).__name__}.{name}{'' if name in _NAMES_OF_1 else '()'}"
    if name in _FACTS:
        return bool(given)
    if given is None:
        code = getattr(getattr(member, "fget", member), "__code__", None)
        unset = [
            text for text in getattr(code, "co_consts", ())
            if isinstance(text, str) and text.isidentifier() and text.isupper() and text not in environment.environ
        ]  # fmt: skip
        why = f"it reads {' and '.join(unset)}, which is not set" if unset else "it reads a variable that is not set"
        raise ConfigurationError(
            f"{shown_name} answered None; probably {why}. Start the program with the launcher that sets it, or return "
            "a value of your own."
        )
    if name in _TEXTS:
        return str(given)
    try:
        return int(given) if isinstance(given, str) else operator.index(given)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{shown_name} answered {shown(given)}, which is no whole number. Return an int."
        ) from None


def _pair_names(cls: type[ClusterEnvironment], new: str, old: str) -> None:
    """Define the property ``new`` or Lightning's older method ``old`` if ``cls`` defines only one of the two."""
    own = vars(cls)
    if new in own and old not in own:
        getter = own[new].fget
        setattr(cls, old, lambda self: getter(self))
    elif old in own and new not in own:
        setattr(cls, new, property(own[old]))


for _new, _old in _NAMES_OF_1.items():  # Python calls __init_subclass__ only for subclasses
    _pair_names(ClusterEnvironment, _new, _old)


class _Clusters(Registry[ClusterEnvironment]):
    def _is_contract(self, cls: type[Any]) -> bool:
        return cls is ClusterEnvironment


ClusterRegistry = _Clusters("drivetrain.clusters", "environment", "cluster environment")
"""All cluster environments by name: drivetrain's, and those of installed packages."""


def detect(
    environ: Mapping[str, str] | None = None, given: ClusterEnvironment | None = None
) -> tuple[ClusterEnvironment, str]:
    """Return the cluster environment for this process, and the reason for the choice as text.

    Args:
        environ: the environment variables, by default those of this process.
        given: the environment that the user has passed. The default is the detected environment with the highest
            ``detect_priority``.
    """
    if given is not None:
        return given, f"plugins holds a {type(given).__name__}"
    entries = [entry for entry in ClusterRegistry.entries() if entry.cls.detect_priority is not None]
    for entry in sorted(entries, key=lambda entry: -(entry.cls.detect_priority or 0)):
        if entry.cls.detect(os.environ if environ is None else environ):
            found = entry.build()
            if environ is not None and environ is not os.environ:
                found.environ = environ if isinstance(environ, MutableMapping) else dict(environ)
            return found, entry.cls.evidence
    raise ConfigurationError("No cluster environment detects itself. Pass one in Trainer(plugins=[...]).")
