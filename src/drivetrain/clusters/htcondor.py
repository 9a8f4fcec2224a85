"""Ranks in the parallel universe of HTCondor, where each slot runs one process. The processes find each other through a
file.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from drivetrain.base import files
from drivetrain.clusters.environment import ClusterEnvironment, reading
from drivetrain.clusters.local import free_port
from drivetrain.errors import ConfigurationError

_POLL_S = 0.2


class HTCondorEnvironment(ClusterEnvironment):
    """Reads the rank and the number of processes from ``_CONDOR_PROCNO`` and ``_CONDOR_NPROCS``.

    Every slot counts as a machine with one process. HTCondor does not provide rank 0's address. Rank 0 therefore writes
    its address and a free port to a file in a shared folder, and the other ranks wait for this file. The other ranks
    also wait until a process listens at the address, because the file may be from an earlier run of the job. If
    ``MASTER_ADDR`` and ``MASTER_PORT`` are set, there is no file.

    Args:
        contact_file: a path on a file system that all slots share. The default is a file in the job's folder, with the
            job's number in its name.
        timeout_s: the seconds that the other ranks wait for rank 0.
        environ: the environment variables, by default those of this process.
    """

    detect_priority = 100
    evidence = "HTCondor's parallel universe has set _CONDOR_PROCNO and _CONDOR_NPROCS"

    def __init__(
        self,
        contact_file: str | Path | None = None,
        timeout_s: float = 300.0,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        super().__init__(environ)
        self.contact_file = None if contact_file is None else Path(contact_file)
        self.timeout_s = timeout_s
        self._contact: tuple[str, int] | None = None

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether the job has several slots."""
        return "_CONDOR_PROCNO" in environ and environ.get("_CONDOR_NPROCS", "1") != "1"

    # ---- rendezvous ----------------------------------------------------------------------------------------------

    @property
    def main_address(self) -> str:
        return self._meeting()[0]

    @property
    def main_port(self) -> int:
        return self._meeting()[1]

    def _meeting(self) -> tuple[str, int]:
        """Return the main address and port. At the first call, rank 0 writes both to the file, and the other ranks wait
        for this file.

        Raises:
            ConfigurationError: rank 0 did not answer in time, or there is no folder for the file.
        """
        if "MASTER_ADDR" in self.environ and "MASTER_PORT" in self.environ:
            return self.environ["MASTER_ADDR"], self.number("MASTER_PORT")
        if self._contact is None:
            path = self._path()
            self._contact = _publish(path) if self.global_rank() == 0 else _find(path, self.timeout_s)
        return self._contact

    def _path(self) -> Path:
        if self.contact_file is not None:
            return self.contact_file
        advertisement = ""
        with suppress(OSError):
            advertisement = Path(self.environ.get("_CONDOR_JOB_AD", "")).read_text()
        number = re.search(r"^ClusterId\s*=\s*(\d+)", advertisement, re.MULTILINE)
        folder = self.environ.get("_CONDOR_JOB_IWD")
        if number is None or folder is None:
            raise ConfigurationError(
                "HTCondorEnvironment cannot name a file for rank 0's address: _CONDOR_JOB_IWD or the job's number in "
                "_CONDOR_JOB_AD is missing. Pass HTCondorEnvironment(contact_file=...), a path that all slots share."
            )
        return Path(folder) / f".drivetrain-contact-{number[1]}"

    # ---- ranks ---------------------------------------------------------------------------------------------------

    world_size = reading("_CONDOR_NPROCS", ClusterEnvironment.world_size)
    global_rank = reading("_CONDOR_PROCNO", ClusterEnvironment.global_rank)

    def local_rank(self) -> int:
        """Return 0, because every slot counts as a machine."""
        return 0

    def node_rank(self) -> int:
        return self.global_rank()

    def teardown(self) -> None:
        """Remove the file with the address if this process has written it."""
        if self._contact is not None and self.global_rank() == 0:
            self._path().unlink(missing_ok=True)
        self._contact = None


def _publish(path: Path) -> tuple[str, int]:
    """Write this machine's address and a free port atomically to the file ``path``. Return both."""
    contact = socket.gethostname(), free_port()
    try:
        files.write(path, json.dumps(contact).encode())
    except OSError as error:
        raise ConfigurationError(
            f"Rank 0 cannot write its address to {path}: {error}. Pass HTCondorEnvironment(contact_file=...), a path "
            "that all slots share."
        ) from error
    return contact


def _find(path: Path, timeout_s: float) -> tuple[str, int]:
    """Wait for the file ``path``, and for a process that listens at the address in the file. Return the address and the
    port.
    """
    deadline = time.monotonic() + timeout_s
    seen = "the file has not appeared"
    while True:
        try:
            address, port = json.loads(path.read_text())
            with socket.create_connection((address, port), timeout=_POLL_S):
                return str(address), int(port)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            seen = f"the file is there, but no process answers at its address: {error}"
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"Rank 0's address was not found in {path} within {timeout_s:g} s: {seen}. "
                "Pass HTCondorEnvironment(contact_file=...), a path that all slots share, or set MASTER_ADDR and "
                "MASTER_PORT."
            )
        time.sleep(_POLL_S)
