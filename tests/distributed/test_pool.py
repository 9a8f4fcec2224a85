"""The processes in which tests of several ranks run: what a job sees, what comes back, what stays behind."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class NotPicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a + b)


def moved(point: Any, path: Path) -> Any:
    total = torch.ones(2)
    dist.all_reduce(total)
    return dist.get_rank(), total, Point(point.x + dist.get_rank()), path


def test_ranks_see_each_other_and_results_come_back_in_their_order(pool: Any, tmp_path: Path) -> None:
    for world_size in (1, 2, 3, 2):
        results = pool.run(moved, Point(5), tmp_path, world_size=world_size)
        assert [rank for rank, *_ in results] == list(range(world_size))
        assert all(total.tolist() == [world_size] * 2 for _, total, *_ in results)
        assert [point.x for *_, point, _ in results] == [5 + rank for rank in range(world_size)]
        assert all(type(point) is Point and path == tmp_path for *_, point, path in results)


def environment() -> Any:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    found = {name: os.environ[name] for name in names}
    shared = os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]
    return found, shared, dist.is_initialized(), torch.get_num_threads(), os.getpid(), os.environ.get("EXTRA")


def test_a_job_has_torchruns_environment_and_a_port_of_its_own(pool: Any) -> None:
    runs = [pool.run(environment, group=False, environ={"EXTRA": "1"}), pool.run(environment, group=False)]
    for run in runs:
        for rank, (found, *_) in enumerate(run):
            assert found == {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
        assert run[0][1] == run[1][1]
        assert [(initialized, threads) for _, _, initialized, threads, *_ in run] == [(False, 1)] * 2
    assert runs[0][0][1] != runs[1][0][1]
    assert [extra for *_, extra in runs[0]] == ["1", "1"]
    assert [extra for *_, extra in runs[1]] == [None, None]
    assert [pid for *_, pid, _ in runs[0]] == [pid for *_, pid, _ in runs[1]]  # the same processes
    assert "RANK" not in os.environ


def own_group() -> int:
    dist.init_process_group("gloo")
    return dist.get_world_size()


def test_a_group_that_the_job_made_is_destroyed_as_well(pool: Any) -> None:
    assert pool.run(own_group, group=False) == [2, 2]
    assert pool.run(own_group, group=False, world_size=3) == [3, 3, 3]


def disturb() -> None:
    os.environ["DISTURBED"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    random.seed(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")


def state() -> Any:
    return {
        "environ": os.environ.get("DISTURBED"), "folder": os.getcwd(), "path": sys.path,
        "tensor": (torch.ones(1).dtype, torch.ones(1).device), "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": (torch.rand(1).item(), random.random()), "handler": signal.getsignal(signal.SIGTERM),
        "filters": [action for action, *_ in warnings.filters],
    }  # fmt: skip


def test_the_next_job_meets_the_process_as_it_was(pool: Any) -> None:
    before = pool.run(state, world_size=1)
    pool.run(disturb, world_size=1)
    assert pool.run(state, world_size=1) == before
    assert before[0]["filters"] == ["error"]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def fail_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ConfigurationError(f"rank {rank} is wrong")
    dist.all_reduce(torch.ones(1))


def test_what_the_first_rank_raised_is_raised_here_with_every_traceback(pool: Any) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match="rank 1 is wrong") as caught:
        pool.run(fail_on_one, 1)
    assert time.monotonic() - started < 20  # the other rank does not wait for its group's timeout
    text = str(caught.value.__cause__)
    assert "rank 1 of 2" in text
    assert "in fail_on_one" in text
    assert "all_reduce" in text  # where rank 0 was
    assert len(pool.run(environment)) == 2  # the processes go on
    assert pool.run(fail_on_one, 2) == [None, None]  # the control: without the failing rank, nothing fails


def warn() -> None:
    warnings.warn("look", UserWarning, stacklevel=1)


def raise_not_picklable() -> None:
    raise NotPicklable(1, 2)


def return_not_picklable() -> Any:
    return lambda: None


class Destroyed:
    def __del__(self) -> None:
        raise ValueError("in a destructor")


def raise_in_destructor() -> None:
    Destroyed()


def raise_in_thread() -> None:
    thread = threading.Thread(target=int, args=("in a thread",))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (warn, UserWarning, "look"),
        (raise_not_picklable, AssertionError, "NotPicklable: 3"),
        (return_not_picklable, Exception, "pickle"),
        (raise_in_destructor, ValueError, "in a destructor"),
        (raise_in_thread, ValueError, "in a thread"),
    ],
)
def test_nothing_that_goes_wrong_in_a_job_gets_lost(pool: Any, function: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        pool.run(function, world_size=1)


def hang_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def test_a_job_over_its_time_fails_with_the_stacks_of_all_ranks(pool: Any) -> None:
    with pytest.raises(AssertionError, match="longer than 2 s") as caught:
        pool.run(hang_on_one, 0, timeout=2)
    text = str(caught.value)
    assert "rank 0 of 2" in text
    assert "in hang_on_one" in text
    assert "in wait" in text  # rank 0
    assert "in barrier" in text  # rank 1
    assert pool.run(hang_on_one, 2) == [None, None]  # new processes


def die_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named(pool: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # rank 0 sees a closed connection, in torch's words
        pool.run(die_on_one, 1)
    text = f"{caught.value} {caught.value.__cause__}"
    assert "the process died" in text
    assert "exit code -9" in text
    assert pool.run(die_on_one, 2) == [None, None]


def test_what_cannot_be_sent_is_refused_at_once(pool: Any) -> None:
    with pytest.raises(ValueError, match="at the file's top"):
        pool.run(lambda: None)
    with pytest.raises(ValueError, match="1 to 4"):
        pool.run(environment, world_size=5)
