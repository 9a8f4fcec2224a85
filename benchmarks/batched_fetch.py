"""What fetching a batch as a whole saves: a fit on a shuffled TensorDataset beside the hand-written loop over it.

Four contestants take turns in one process and one thread: the hand-written loop, the same loop tuned by hand, a
Trainer, and a Trainer whose loader has a collate function of its own, which calls torch's: it fetches sample by sample,
as the hand-written loop does. The tuned loop indexes the tensors with a slice of the permutation, sets gradients to
``None`` over a list, and calls the autograd engine and the optimizer's step without the layers around them. The model
is that of ``step_overhead.py`` with Adam. A block is the CPU time of this thread over the same number of steps of
each; set-up and the end of the epoch are outside. Each block is compared with the hand-written loop's of its round,
and with the tuned loop's.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import statistics
import time
import warnings
from typing import Any

import torch
from report import print_table, versions, write_json
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import drivetrain as dt

WARM_UP = 20  # steps of a fit that are not measured
BY_HAND, TUNED = "hand-written loop", "hand-written, tuned"
OURS, BY_SAMPLE = "drivetrain", "drivetrain, sample by sample"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


class Module(dt.LightningModule):
    """The same model, with the clock read at two of its steps."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.net = make_model()
        self.last = last

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == WARM_UP:
            self.begin = time.thread_time()
        elif batch_idx == self.last:
            self.end = time.thread_time()
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.001)


def by_hand(loader: Any, last: int) -> tuple[float, nn.Module]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    begin = end = 0.0
    for batch_idx, (x, y) in enumerate(loader):
        if batch_idx == WARM_UP:
            begin = time.thread_time()
        elif batch_idx == last:
            end = time.thread_time()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return end - begin, model


def tuned(loader: Any, last: int) -> tuple[float, nn.Module]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    parameters, step = list(model.parameters()), inspect.unwrap(torch.optim.Adam.step)
    backward, one = torch.autograd.Variable._execution_engine.run_backward, torch.ones(())
    inputs, targets = loader.dataset.tensors
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # a DataLoader draws its workers' seed first
    order = torch.randperm(len(inputs), generator=loader.generator)
    begin = end = 0.0
    for batch_idx, indices in enumerate(order.split(loader.batch_size)):
        if batch_idx == WARM_UP:
            begin = time.thread_time()
        elif batch_idx == last:
            end = time.thread_time()
        loss = F.mse_loss(model(inputs[indices]), targets[indices])
        for parameter in parameters:
            parameter.grad = None
        backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        with torch.no_grad():
            step(optimizer)
    return end - begin, model


def by_trainer(loader: Any, last: int) -> tuple[float, nn.Module]:
    module = Module(last)
    dt.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    return module.end - module.begin, module.net


def own_collate(samples: Any) -> Any:
    return default_collate(samples)


def block(name: str, data: TensorDataset, batch_size: int, steps: int) -> tuple[float, list[Any]]:
    """Microseconds per step, and the trained parameters."""
    collate = own_collate if name == BY_SAMPLE else None
    generator = torch.Generator().manual_seed(1)
    loader: Any = DataLoader(data, batch_size, shuffle=True, generator=generator, collate_fn=collate)
    seconds, model = {BY_HAND: by_hand, TUNED: tuned}.get(name, by_trainer)(loader, WARM_UP + steps)
    return seconds / steps * 1e6, [parameter.detach() for parameter in model.parameters()]


def measure(batch_size: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    count = (WARM_UP + steps + 1) * batch_size
    data = TensorDataset(torch.randn(count, 16), torch.randn(count, 1))
    names = [BY_HAND, TUNED, OURS, BY_SAMPLE]
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        found = {name: block(name, data, batch_size, steps) for name in (names if number % 2 else reversed(names))}
        for name in names:
            if not all(map(torch.equal, found[name][1], found[BY_HAND][1])):
                raise RuntimeError(f"{name} trained other parameters than the hand-written loop")
            if number:  # the first round warms up
                times[name].append(found[name][0])
    rows = []
    for name in names:
        low, middle, high = statistics.quantiles(ratios_to(times[BY_HAND], times[name]), n=4, method="inclusive")
        rows.append({
            "batch_size": batch_size, "name": name, "us": statistics.median(times[name]), "ratio": middle,
            "quartiles": (low, high), "of_tuned": statistics.median(ratios_to(times[TUNED], times[name])),
            "blocks_us": times[name],
        })  # fmt: skip
    return rows


def ratios_to(base: list[float], times: list[float]) -> list[float]:
    """Each block relative to the base's block of its round."""
    return [own / plain for own, plain in zip(times, base, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the results, all blocks included, to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = [
        row
        for batch_size, steps in ((8, 400), (32, 300), (256, 100))
        for row in measure(batch_size, steps, arguments.rounds)
    ]
    print_table(
        ["", "batch", "us per step", "ratio", "quartiles", "of tuned"],
        [
            [row["name"], str(row["batch_size"]), f"{row['us']:.1f}", f"{row['ratio']:.2f}",
             f"{row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f}", f"{row['of_tuned']:.2f}"]
            for row in rows
        ],
    )  # fmt: skip
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
