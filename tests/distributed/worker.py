"""One process of the pool: takes jobs from its pipe until the pipe closes. pool.py runs this file as a program."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import math
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=30)
TOGETHER = 5.0  # seconds that a rank waits with its group for the others to come to their end
LEAVE = b"leave"  # from the pool: all have


class TestModules(importlib.abc.MetaPathFinder):
    """Finds the suite's modules under the names that pytest gives them, so that what is pickled there loads here.

    Args:
        names: module name -> file, of those that jobs have named.
    """

    __test__ = False

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.names:
            return importlib.util.spec_from_file_location(fullname, self.names[fullname])
        if any(name.startswith(f"{fullname}.") for name in self.names):  # a folder above one of them
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        return None


def resolve(module: str, qualified_name: str) -> Callable[..., Any]:
    """The function of this name; its module is imported once per process."""
    found: Any = importlib.import_module(module)
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def deterministic_algorithms() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@contextmanager
def as_it_was() -> Iterator[None]:
    """A block after which the process is as before it: what a job may change and the next one would meet."""
    environ, folder, path, hook = dict(os.environ), os.getcwd(), list(sys.path), sys.excepthook
    dtype, threads, matmul = torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    grad, (deterministic, warn_only) = torch.is_grad_enabled(), deterministic_algorithms()
    numpy = sys.modules.get("numpy")
    drawn = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.simplefilter("error")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        sys.path[:], sys.excepthook = path, hook
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()  # without which torch 2.9's get_default_device() raises after None
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.set_grad_enabled(grad)
        if (deterministic, warn_only) != deterministic_algorithms():  # to set them imports the compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
        if numpy:
            numpy.random.set_state(drawn[2])
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def nothing_lost() -> Iterator[None]:
    """A block that fails if an exception got lost in it, in a destructor or in a thread; Python only prints those."""
    lost: list[BaseException] = []
    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda found: lost.append(found.exc_value or RuntimeError(str(found)))
    threading.excepthook = lambda found: lost.append(found.exc_value or RuntimeError(str(found)))
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook, threading.excepthook = before
    if lost:
        raise lost[0]


def leave_group() -> None:
    """Destroy the job's process group; ranks that wait for this one then fail at once instead of after a timeout."""
    if dist.is_initialized():
        gc.collect()  # what of a job refers to the group, a DDP's reducer above all, must go before it
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # a group that could not be made counts: the next would wait in vain


def work(job: dict[str, Any], wait_for_others: Callable[[], None]) -> dict[str, Any]:
    """Run one job; the outcome is a pickled value, or a pickled exception with its traceback as text.

    A rank that succeeds keeps its group until the others have come to their end too: one that is still connecting, or
    that needs the store of rank 0, would fail because this one was faster.
    """
    with as_it_was():
        failed_at = math.inf
        try:
            os.environ.update(job["environ"])
            with nothing_lost():
                function = resolve(job["module"], job["function"])
                args = torch.load(io.BytesIO(job["args"]), weights_only=False)
                try:
                    if job["group"]:
                        dist.init_process_group("gloo", init_method="env://", timeout=GROUP_TIMEOUT)
                    value = packed(function(*args))
                    if job["group"]:
                        wait_for_others()
                except BaseException:
                    failed_at = time.monotonic()  # before the ranks that wait for this one
                    raise
                finally:
                    leave_group()
                del args
            return {"value": value}
        except BaseException as error:
            return {"error": pickled(error), "text": traceback.format_exc(), "when": min(failed_at, time.monotonic())}


def packed(value: Any) -> bytes:
    """Pickled by torch, which plain pickle cannot do for every type of tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled(error: BaseException) -> bytes | None:
    """``error`` as bytes that give an exception of the same kind; ``None`` for one that does not survive that."""
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def serve(connection: Connection, dump: Path) -> None:
    """Work until the pool closes the pipe.

    Args:
        connection: jobs in, outcomes out.
        dump: file that gets every thread's stack when the process dies by a signal such as SIGABRT, which is how the
            pool asks a process that hangs where it is.
    """
    os.setsid()  # the pool can end this process with all that it has started
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(dump.open("w"), all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: a collection after each job looks at the job's own
    names: dict[str, str] = {}
    sys.meta_path.insert(0, TestModules(names))

    def wait_for_others() -> None:
        connection.send_bytes(pickle.dumps({"done": True}))
        if connection.poll(TOGETHER):
            connection.recv_bytes()

    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if message == LEAVE:  # it came after this rank had waited for long enough
            continue
        job = pickle.loads(message)
        names.update(job["names"])
        connection.send_bytes(pickle.dumps(work(job, wait_for_others)))
        gc.freeze()  # what a job has imported stays, too


if "connection" in globals():
    serve(globals()["connection"], Path(globals()["dump"]))
