"""How cost grows with steps, callbacks, logged keys, parameter tensors and ranks.

Calls are counted under ``sys.setprofile``, so they are exact. ``tests/budget/test_growth.py`` checks those that should
be flat. Times are CPU times of one thread and move with the machine. Ranks are real processes up to 4; above that, this
process is one rank of a job in torch's fake process group, whose other ranks answer with what this one sends.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log10
from pathlib import Path
from typing import Any

import torch
from report import print_table, versions, write_json
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.loggers import CSVLogger

OURS = str(Path(dt.__file__).parent)
SIZES = {
    "steps": [1_000, 10_000, 100_000], "callbacks": [1, 10, 100], "keys": [1, 10, 100, 1_000],
    "tensors": [10, 100, 1_000, 10_000], "ranks": [1, 2, 4], "fake ranks": [4, 32, 256, 1_024],
}  # fmt: skip
WINDOW = 100  # steps that are counted: two flushes


@contextmanager
def counting(into: dict[str, float], name: str, per: float = 1) -> Iterator[None]:
    """Add our own calls, divided by ``per``, to ``into`` under ``name``."""
    calls: Counter[bool] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        calls[event == "call" and frame.f_code.co_filename.startswith(OURS)] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        into[name] = calls[True] / per


class Model(dt.LightningModule):
    """So many parameter tensors of one number each; ``at`` maps steps to what is done before them."""

    def __init__(self, tensors: int = 4, keys: int = 0, at: dict[int, Callable[[], Any]] | None = None) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(tensors))
        self.__dict__["at"] = at or {}
        self.__dict__["step"] = 0
        self.__dict__["names"] = [f"key{index}" for index in range(keys)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.__dict__["step"] in self.__dict__["at"]:
            self.__dict__["at"][self.__dict__["step"]]()
        self.__dict__["step"] += 1
        loss = torch.cat(list(self.weights)).square().mean() * batch.mean()
        if names := self.__dict__["names"]:
            self.log_dict(dict.fromkeys(names, loss), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Batches:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(8)] * self.count)


def trainer(**arguments: Any) -> dt.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tempfile.gettempdir(),
    }  # fmt: skip
    return dt.Trainer(**{**quiet, **arguments})


class Windows:
    """Counts our own calls of a step in a window that ends at each of some steps; before it, takes the time of one."""

    def __init__(self, ends: list[int], timed: bool = True) -> None:
        self.found: dict[int, dict[str, float]] = {end: {} for end in ends}
        self.at: dict[int, Callable[[], Any]] = {}
        for end in ends:
            self.at[end - WINDOW] = lambda end=end: self._open(end)
            self.at[end] = lambda end=end: self._close(end)
            if timed:
                self.at[end - 5 * WINDOW] = lambda end=end: self.found[end].update(begin=time.thread_time())

    def _open(self, end: int) -> None:
        found = self.found[end]
        if "begin" in found:
            found["us per step"] = (time.thread_time() - found.pop("begin")) / (4 * WINDOW) * 1e6
        self.counting = counting(found, "calls per step", WINDOW)
        self.counting.__enter__()

    def _close(self, end: int) -> None:
        self.counting.__exit__(None, None, None)
        import psutil

        self.found[end]["MiB"] = psutil.Process().memory_info().rss / 2**20


# ---- what grows ------------------------------------------------------------------------------------------------------


def steps(ends: list[int]) -> list[dict[str, float]]:
    """One fit, with a logged value, an epoch mean and a CSV file."""
    windows = Windows(ends)
    with tempfile.TemporaryDirectory() as folder:
        trainer(logger=CSVLogger(folder)).fit(Model(keys=1, at=windows.at), Batches(ends[-1] + 2))
    return [windows.found[end] for end in ends]


def one_fit(model: dict[str, Any], timed: bool, **arguments: Any) -> dict[str, float]:
    """A short fit: calls of a step, of the set-up, of a checkpoint, and the checkpoint's bytes."""
    end = 600 if timed else 200
    windows, found = Windows([end], timed), dict[str, float]()
    one = trainer(**arguments)
    set_up = counting(found, "calls in set-up")
    at = {**windows.at, 0: lambda: set_up.__exit__(None, None, None)}
    network, batches = Model(**model, at=at), Batches(end + 2)
    set_up.__enter__()
    one.fit(network, batches)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.ckpt"
        with counting(found, "calls in a checkpoint"):
            one.save_checkpoint(path)
        found["bytes of a checkpoint"] = path.stat().st_size
    return {**windows.found[end], **found}


def callbacks(count: int, timed: bool = True) -> dict[str, float]:
    idle = [type(f"Idle{index}", (dt.Callback,), {})() for index in range(count)]
    return one_fit({}, timed, callbacks=idle)


def keys(count: int, timed: bool = True) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = one_fit({"keys": count}, timed, logger=CSVLogger(folder))
    found["calls per key and step"] = found["calls per step"] / count
    return found


def tensors(count: int, timed: bool = True) -> dict[str, float]:
    found = one_fit({"tensors": count}, timed)
    found["calls in set-up per tensor"] = found["calls in set-up"] / count
    found["calls in a checkpoint per tensor"] = found["calls in a checkpoint"] / count
    return found


# ---- ranks -----------------------------------------------------------------------------------------------------------


def as_rank(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(min(world_size, 8)),
        NODE_RANK="0", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="growth",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def real_rank(rank: int, world_size: int, port: int, results: Any) -> None:
    as_rank(rank, world_size, port)

    found, windows = dict[str, float](), Windows([600])
    begin = time.thread_time()
    network = Model(keys=10, at={**windows.at, 0: lambda: found.update({"set-up s": time.thread_time() - begin})})
    trainer(devices=world_size, strategy="ddp").fit(network, Batches(602))
    if rank == 0:
        results.update({**windows.found[600], **found})


def real_ranks(world_size: int) -> dict[str, float]:
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        port = 20_000 + (os.getpid() + world_size) % 10_000
        torch.multiprocessing.spawn(real_rank, (world_size, port, results), world_size)
        return dict(results)


def fake_ranks(world_size: int) -> dict[str, float]:
    """Rank 0 of a job in torch's fake process group: see ``many_ranks.py``."""
    from many_ranks import in_own_process  # it imports this file

    return in_own_process(0, world_size)


# ---- the table and the plot ------------------------------------------------------------------------------------------

PLOTTED = {"steps": "us per step", "callbacks": "us per step", "keys": "us per step", "tensors": "us per step",
           "ranks": "us per step", "fake ranks": "together s"}  # fmt: skip


def plot(found: dict[str, list[dict[str, float]]], sizes: dict[str, list[int]]) -> str:
    """One panel for each thing that grows: its cost over its size, both on logarithmic scales, as an SVG."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="780" height="460" font-family="sans-serif"',
             ' font-size="11">', '<rect width="780" height="460" fill="white"/>']  # fmt: skip
    for index, (what, rows) in enumerate(found.items()):
        left, top = 50 + 260 * (index % 3), 40 + 225 * (index // 3)
        xs, ys = [log10(size) for size in sizes[what]], [log10(max(row[PLOTTED[what]], 1e-6)) for row in rows]
        low, high = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
        bottom = int(min(ys) // 1)
        above = max(bottom + 2, int(-(-max(ys) // 1)))
        points = [(left + 180 * (x - low) / (high - low), top + 150 * (1 - (y - bottom) / (above - bottom)))
                  for x, y in zip(xs, ys, strict=True)]  # fmt: skip
        parts.append(f'<text x="{left}" y="{top - 12}" font-weight="bold">{PLOTTED[what]} by {what}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="180" height="150" fill="none" stroke="#999"/>')
        parts += [f'<text x="{left - 4}" y="{top + 154 - 150 * (power - bottom) / (above - bottom):.0f}" '
                  f'text-anchor="end">{10.0**power:g}</text>' for power in range(bottom, above + 1)]  # fmt: skip
        parts.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="#06c"/>'
        )
        for (x, y), size in zip(points, sizes[what], strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#06c"/>')
            parts.append(f'<text x="{x:.1f}" y="{top + 166}" text-anchor="middle">{size:,}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the largest size of each")
    parser.add_argument("--svg", help="write the plot to this file")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sizes = {what: each[:-1] if arguments.quick else each for what, each in SIZES.items()}
    measures: dict[str, Callable[[int], dict[str, float]]] = {
        "callbacks": callbacks, "keys": keys, "tensors": tensors, "ranks": real_ranks, "fake ranks": fake_ranks,
    }  # fmt: skip
    callbacks(1)  # imports what is imported late
    found: dict[str, list[dict[str, float]]] = {"steps": steps(sizes["steps"])}
    for what, measure in measures.items():
        found[what] = [measure(size) for size in sizes[what]]
    for what, rows in found.items():
        print(f"\nBy {what}:\n")
        names = list(rows[0])
        header = [what, *(f"{size:,}" for size in sizes[what])]
        print_table(header, [[name, *(f"{row[name]:,.3g}" if row[name] < 100 else f"{row[name]:,.0f}" for row in rows)]
                             for name in names])  # fmt: skip
    if arguments.svg:
        Path(arguments.svg).write_text(plot(found, sizes))
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "sizes": sizes, "found": found})


if __name__ == "__main__":
    main()
