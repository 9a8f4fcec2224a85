"""Run by test_multiprocessing.py as a program of its own, so that what is copied is fresh: every case of "fork".

It prints one line of JSON: what each case has found.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.clusters import LocalEnvironment
from drivetrain.launchers import LaunchError, MultiProcessingLauncher

FOLDER = Path(tempfile.mkdtemp())
LONG_S = 60


def rank() -> int:
    return int(os.environ["RANK"])


def launched(function: Callable[..., Any], *args: Any, processes: int = 2, **options: Any) -> Any:
    launcher = MultiProcessingLauncher(LocalEnvironment(), processes, start_method="fork", **options)
    return launcher.launch(function, *args)


def failed(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """How the launch fails, and after how long."""
    began = time.monotonic()
    try:
        launched(function, *args)
    except LaunchError as error:
        cause = error.__cause__
        return {
            "message": str(error),
            "rank": error.rank,
            "exit_code": error.exit_code,
            "seconds": time.monotonic() - began,
            "cause": type(cause).__name__,
            "cause_text": str(cause),
            "origin": str(cause and cause.__cause__),
        }
    raise AssertionError("it did not fail")


def join_group() -> None:
    dist.init_process_group("gloo", rank=rank(), world_size=int(os.environ["WORLD_SIZE"]))
    dist.barrier()


# ---- what a process is told ------------------------------------------------------------------------------------------


def variables() -> None:
    names = (
        "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "OMP_NUM_THREADS",
    )  # fmt: skip
    told = {name: os.environ.get(name) for name in names}
    (FOLDER / f"variables-{rank()}").write_text(json.dumps([told, torch.get_num_threads(), os.getpid()]))


def case_variables() -> Any:
    before = dict(os.environ)
    launched(variables, processes=3)
    same = dict(os.environ) == before
    return [json.loads((FOLDER / f"variables-{rank}").read_text()) for rank in range(3)], same, os.getpid()


def case_second_machine() -> Any:
    os.environ.update(MASTER_ADDR="first", MASTER_PORT="4321", NODE_RANK="1")
    try:
        launched(variables, processes=2, num_nodes=2)
    finally:
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            del os.environ[name]
    return [json.loads((FOLDER / f"variables-{rank}").read_text())[0] for rank in (2, 3)]


# ---- what comes back -------------------------------------------------------------------------------------------------


def returned(value: Any) -> Any:
    return rank(), value, torch.arange(4.0)[1:]


def case_result() -> Any:
    first, second = launched(returned, "a"), launched(returned, "b")
    return first[0], first[1], first[2].tolist(), second[1]


def slices() -> list[torch.Tensor]:
    return list(torch.ones(1000, 1000))


def case_slices_travel_once() -> Any:
    rows = launched(slices)
    return len(rows), rows[0].untyped_storage().data_ptr() == rows[999].untyped_storage().data_ptr()


def unpicklable() -> Any:
    return lambda: None


def case_unpicklable_result() -> Any:
    return failed(unpicklable)


def meet() -> float:
    join_group()
    total = torch.tensor(float(rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def case_they_meet() -> Any:
    return launched(meet, processes=3)


# ---- when one fails --------------------------------------------------------------------------------------------------


class Peculiar(Exception):
    """Cannot be made again from what it pickles."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def raises(error: type[Exception], *args: str) -> None:
    if rank() == 1:
        raise error(*args)
    time.sleep(LONG_S)


def case_exception() -> Any:
    return failed(raises, ValueError, "the reason")


def case_peculiar_exception() -> Any:
    return failed(raises, Peculiar, "the reason", "x")


def raises_in_exchange() -> None:
    join_group()
    if rank() == 1:
        time.sleep(0.2)  # rank 0 is waiting for it by then
        dist.destroy_process_group()  # and hears of the end before this process reports why
        time.sleep(0.2)
        raise ValueError("the reason")
    dist.barrier()


def case_exception_in_exchange() -> Any:
    return failed(raises_in_exchange)


def dies(how: str) -> None:
    if how == "in exchange":
        join_group()
    if rank() == 1:
        if how == "exit":
            sys.exit(0)
        if how == "exit code":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "in exchange":
        dist.barrier()
    time.sleep(LONG_S)


def case_killed() -> Any:
    return failed(dies, "killed")


def case_killed_in_exchange() -> Any:
    return failed(dies, "in exchange")


def leaves_a_child() -> None:
    if rank() == 1:
        if (child := os.fork()) == 0:
            os.closerange(0, 3)  # whoever reads what this program prints does not wait for it
            time.sleep(LONG_S)
            os._exit(0)
        (FOLDER / "left").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def case_killed_with_a_child() -> Any:
    found = failed(leaves_a_child)
    os.kill(int((FOLDER / "left").read_text()), signal.SIGKILL)
    return found


def case_sys_exit() -> Any:
    return failed(dies, "exit")


def case_exit_code() -> Any:
    return failed(dies, "exit code")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupted(whom: str) -> None:
    if rank() == 1:
        os.kill(os.getppid() if whom == "parent" else os.getpid(), signal.SIGINT)
    (FOLDER / f"{whom}-{os.getpid()}").touch()  # in its name: a file may be empty when its writer is killed
    time.sleep(LONG_S)


def interrupt(whom: str) -> Any:
    began = time.monotonic()
    try:
        launched(interrupted, whom, interrupt_grace_s=0.5)
    except KeyboardInterrupt:
        pids = [int(path.name.rpartition("-")[2]) for path in FOLDER.glob(f"{whom}-*")]
        return time.monotonic() - began, [Path(f"/proc/{pid}").exists() for pid in pids]
    raise AssertionError("it was not interrupted")


def case_interrupted_parent() -> Any:
    return interrupt("parent")


def case_interrupted_child() -> Any:
    return interrupt("child")


ARMED: list[str] = []


def interrupt_forking(where: str) -> None:
    """Interrupt this process, and wait until Python has seen the signal, which may be given to a native thread."""
    if [where] == ARMED:
        seen, tell = os.pipe()
        os.set_blocking(tell, False)
        before = signal.set_wakeup_fd(tell)
        os.kill(os.getpid(), signal.SIGINT)
        select.select([seen], [], [], 0.5)  # a signal that is blocked is not seen
        signal.set_wakeup_fd(before)


os.register_at_fork(
    after_in_parent=lambda: interrupt_forking("parent"), after_in_child=lambda: interrupt_forking("child")
)


def case_interrupted_while_forking() -> Any:
    """Seconds until the interrupt ends the launch, and how many processes are left."""
    found = {}
    for where in ("parent", "child"):
        ARMED[:], began = [where], time.monotonic()
        try:
            launched(time.sleep, LONG_S, interrupt_grace_s=0.5)
        except KeyboardInterrupt:
            found[where] = time.monotonic() - began, len(multiprocessing.active_children())
    ARMED.clear()
    return found


# ---- memory ----------------------------------------------------------------------------------------------------------


def add_rank(model: nn.Module, on_purpose: torch.Tensor) -> list[Any]:
    tied = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(rank() + 1)
    on_purpose[rank()] = 1
    same = tied["0.weight"].data_ptr() == model[2].weight.data_ptr()  # type: ignore[index]
    return [tied["0.bias"].tolist(), model[1].running_mean.tolist(), same]  # type: ignore[index]


def case_t45_replicas_do_not_share() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    nn.init.zeros_(model[0].bias)
    model.share_memory()
    on_purpose = torch.zeros(2).share_memory_()
    bias, mean, same = launched(add_rank, model, on_purpose)
    return bias, mean, same, model[0].bias.tolist(), on_purpose.tolist()


def case_nothing_of_ours_runs_beside() -> Any:
    beside: list[int] = []
    os.register_at_fork(before=lambda: beside.append(threading.active_count()))
    launched(returned, "a")
    return beside


def main() -> None:
    cases = {name: case for name, case in globals().items() if name.startswith("case_")}
    print(json.dumps({name.removeprefix("case_"): case() for name, case in cases.items()}))


if __name__ == "__main__":
    main()
