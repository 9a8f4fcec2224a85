"""Base class for clusters that start the program once on each machine."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.clusters.environment import DEFAULT_PORT, ClusterEnvironment
from drivetrain.clusters.local import LocalEnvironment
from drivetrain.errors import ConfigurationError

_POLL_S = 0.2


def json_of(environ: Mapping[str, str], name: str) -> Any:
    """Return the JSON value of the variable ``name``, or ``None`` if the variable is not valid JSON."""
    try:
        return json.loads(environ.get(name, ""))
    except ValueError:
        return None


class MachinesEnvironment(LocalEnvironment, ABC):
    """A cluster that starts the program once on each machine. The started process starts the other processes of its
    machine.

    The Trainer reads the number of machines from the cluster, and the number of devices if the cluster reserves
    devices. ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence over the cluster's address and port.

    Args:
        environ: the environment variables, by default those of this process.
    """

    common_variables: ClassVar[tuple[str, ...]] = ()
    """The members of ``variables`` that other systems set, too. If only one of these is set, :meth:`detect` does not
    warn.
    """

    address_timeout_s: float = 300.0
    """Seconds to wait until this machine can resolve the main address. The machine with this address may start
    later.
    """

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether the cluster has started the program on several machines. Warns if only some of ``variables`` are
        set.
        """
        there = [name for name in cls.variables if environ.get(name)]
        if len(there) == len(cls.variables):
            return cls(dict(environ)).num_nodes() > 1
        if there and not (len(there) == 1 and there[0] in cls.common_variables) and "LOCAL_RANK" not in environ:
            cls._warn_of_a_part(dict(environ), there)
        return False

    @classmethod
    def _warn_of_a_part(cls, environ: dict[str, str], there: list[str]) -> None:
        with suppress(ConfigurationError, KeyError):
            if cls(environ).num_nodes() == 1:
                return
        missing = " and ".join(name for name in cls.variables if name not in there)
        rank_zero_warn(
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} set, but not {missing}: {cls.__name__} is not "
            f"used, and this machine does not meet the others. Set {missing} as the cluster does, or unset the rest."
        )

    @abstractmethod
    def num_nodes(self) -> int:
        """Return the number of machines."""

    def nodes_meant(self, given: int) -> int:
        """Return the number of machines of the job.

        Args:
            given: ``num_nodes`` of the Trainer. The default 1 means all machines.

        Raises:
            ConfigurationError: ``given`` is neither 1 nor the number of machines.
        """
        nodes = self.num_nodes()
        if given not in (1, nodes):
            raise ConfigurationError(
                f"num_nodes={given}, but {type(self).__name__} says that the job has {nodes} machines. Leave num_nodes "
                f"out, or start the job on {given} machines."
            )
        return nodes

    def _reserved(self, name: str) -> int | None:
        return max(self.number(name, 0), 0) or None  # without GPUs, the job computes on CPUs

    def _port_of_cluster(self) -> int:
        return DEFAULT_PORT  # a fixed port, because the machines cannot agree on a free port

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check this machine's node rank. If another launcher has started the processes, compare the settings with
        these processes.

        Raises:
            ConfigurationError: the node rank is too large, or the settings do not fit the started processes.
        """
        if not 0 <= self.node_rank() < num_nodes:
            raise ConfigurationError(
                f"{type(self).__name__} says that this machine is number {self.node_rank()} of {num_nodes}. Machines "
                "are numbered from 0: check the variables that the cluster has set."
            )
        if self.creates_processes_externally:
            ClusterEnvironment.validate_settings(self, num_devices, num_nodes)

    def validate_address(self) -> None:
        """Wait until this machine can resolve the main address.

        Raises:
            ConfigurationError: the machine cannot resolve the main address within ``address_timeout_s``.
        """
        _ = self.main_address  # raises an error at once if a variable is missing
        deadline = time.monotonic() + self.address_timeout_s
        while True:
            try:
                return super().validate_address()
            except ConfigurationError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
