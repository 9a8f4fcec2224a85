"""Programs of tests that run as ``python program.py`` would, in copies of one process that has imported torch already.

To import torch and its compiler costs a fresh interpreter three seconds of one core, and most programs of the suite
last a fraction of one. Each program gets a process of its own, with its own command line, environment, folder and
``__main__``, and imports drivetrain itself. What a copy cannot have is the start of an interpreter: programs that are
about it (``-S``, ``sitecustomize``, what is imported, threads of torch) run with ``sys.executable``, and so does at
least one test of every way in which a user starts drivetrain.

The file is both sides: tests import :class:`Programs`, which runs it as the process that is copied.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

# Optimizers import dynamo; the examples import the last two.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "sklearn.datasets", "matplotlib.pyplot"]


class Programs:
    """Runs programs one after the other; the process that is copied is started by the first."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(
        self,
        *command: str | Path,
        cwd: str | Path,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
        timeout: float = 100.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *command``.

        Args:
            command: the options -W, -c and -m, the program and its arguments.
            cwd: the working directory.
            env: the environment; by default that of this process.
            merged: whether its standard error goes where its output goes.
            timeout: seconds; the program is killed then.

        Returns:
            What :func:`subprocess.run` would return for text that is captured.
        """
        words = list(map(str, command))
        job = {"command": words, "cwd": str(cwd), "environ": dict(os.environ if env is None else env)}
        channel = self._start()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as separate:
            error = out if merged else separate
            socket.send_fds(channel, [json.dumps(job).encode()], [out.fileno(), error.fileno()])
            pid = int(channel.recv(64))
            channel.settimeout(timeout)
            try:
                code = int(channel.recv(64))
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                channel.settimeout(None)
                channel.recv(64)
                out.seek(0)
                raise AssertionError(f"{words} ran longer than {timeout:g} s, and said:\n{out.read()!r}") from None
            channel.settimeout(None)
            texts = []
            for file in (out, separate):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(words, code, texts[0], texts[1])

    def _start(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
        return self._socket

    def close(self) -> None:
        """Let the process that is copied end."""
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait(10)
        self._socket = self._server = None


# ---- the process that is copied --------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Copy this process for each job; return the job in the copies, and ``None`` here when no more will come."""
    while True:
        message, fds, *_ = socket.recv_fds(channel, 1 << 20, 2)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            channel.close()
            return json.loads(message), fds
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become(job: dict[str, Any], fds: list[int]) -> tuple[str, str]:
    """Make this process one that Python has just started; return how its program is given, and the program."""
    os.setsid()  # what it leaves behind can be ended with it
    for target, fd in enumerate(fds, start=1):
        os.dup2(fd, target)
    for fd in set(fds):
        os.close(fd)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = [path for path in sys.path[1:] if path not in paths]
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    tempfile.tempdir = None  # what the environment of this process says counts
    importlib.import_module("multiprocessing.process").ORIGINAL_DIR = job["cwd"]  # type: ignore[attr-defined]
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    importlib.import_module("torch").set_num_threads(threads)

    words = list(job["command"])
    sys.orig_argv = [sys.executable, *words]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        del words[:2]
    kind = words.pop(0) if words[0] in ("-c", "-m") else "file"
    program = words.pop(0)
    sys.argv = [program if kind == "file" else kind, *words]
    first = {"file": str(Path(program).resolve().parent), "-c": "", "-m": job["cwd"]}[kind]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *given, *own]
    return kind, program


def use_warning_filters(plain: list[Any]) -> None:
    """Put -W's filters where Python would: over its ``plain`` ones, and below those of the preloaded packages."""
    of_packages = [each for each in warnings.filters if each not in plain]
    warnings.resetwarnings()
    warnings.filters.extend(plain)  # type: ignore[attr-defined]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    warnings.filters[:0] = of_packages  # type: ignore[index]


def run_main(kind: str, program: str) -> int:
    """Run the program as ``__main__``; return its exit code."""
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    try:
        if kind == "-m":
            runpy._run_module_as_main(program)  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(compile(program, "<string>", "exec", dont_inherit=True), vars(main))
        else:
            path = vars(main)["__file__"] = os.path.join(os.getcwd(), program)  # not normalised, as Python leaves it
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        below = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error.with_traceback(below), below)
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End this process without taking down the interpreter: all that it shares with the others would be copied."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _plain = list(warnings.filters)
    for _name in PRELOADED:
        if importlib.util.find_spec(_name.partition(".")[0]) is not None:
            importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # a collection in a copy looks at the program's own
    if (_job := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _how = become(*_job)
        use_warning_filters(_plain)
        end(run_main(*_how))
