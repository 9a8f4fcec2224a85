"""``subprocess.Popen`` for prove-resume and advise, with copies of a process that has imported torch in place of new
interpreters.

A zoo of programs, each started seven times, would spend most of its time in imports: see tests/programs.py.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import IO, Any

from drivetrain.proof.records import VARIABLE


class CopiedProcess:
    """What ``drivetrain.proof.runs`` uses of a ``Popen``; the process is a copy of ``programs``' server."""

    def __init__(
        self, programs: Any, command: list[str], *, cwd: Any, env: dict[str, str], stdout: IO[bytes], **options: Any
    ) -> None:
        assert command[0] == sys.executable
        self._channel: socket.socket = programs._start()
        if VARIABLE in env:  # the prover's own descendants would be the server, and all that the tests started
            env = {**env, VARIABLE: json.dumps({**json.loads(env[VARIABLE]), "parent": programs._server.pid})}
        job = {"command": command[1:], "cwd": str(cwd), "environ": env}
        socket.send_fds(self._channel, [json.dumps(job).encode()], [stdout.fileno(), stdout.fileno()])
        self.pid, self._code = int(self._channel.recv(64)), None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._channel.settimeout(timeout)
            try:
                self._code = int(self._channel.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired("the program", timeout or 0) from None
            finally:
                self._channel.settimeout(None)
        return self._code
