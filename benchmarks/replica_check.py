"""What a comparison of the replicas costs, beside a training step of the same model.

``python benchmarks/replica_check.py`` starts two processes on this machine, which meet over Gloo and train a small
transformer by DDP and Adam. Stretches of steps and single comparisons take turns; a time is the median over them. The
last column is what a comparison every 100 steps adds to the steps. ``--one`` measures fingerprints and steps in one
process, on ``--device``, without an exchange.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from report import print_table, versions, write_json
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.base.fingerprint import fingerprints
from drivetrain.callbacks import ReplicaCheck
from drivetrain.strategies.copies import named_state

RANKS, VOCABULARY = 2, 512


class Transformer(LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.head(self.blocks(self.embed(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Times(Callback):
    """After every ``steps`` steps: the mean time of one, and the time of a comparison, in ms."""

    def __init__(self, steps: int) -> None:
        self.check, self.steps = ReplicaCheck(10**9), steps
        self.of_steps: list[float] = []
        self.of_checks: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.check.on_train_start(trainer, module)
        self.begin = time.perf_counter()

    def compare(self, trainer: Any) -> None:
        self.check._check(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self.steps:
            return
        wait(trainer)
        now = time.perf_counter()
        self.of_steps.append(1000 * (now - self.begin) / self.steps)
        self.compare(trainer)
        wait(trainer)
        self.begin = time.perf_counter()
        self.of_checks.append(1000 * (self.begin - now))


class Alone(Times):
    """The same for one process: the fingerprints of all tensors, read by the host."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.begin = time.perf_counter()

    def compare(self, trainer: Any) -> None:
        tensors = [tensor for _, _, tensor in named_state(trainer.lightning_module, trainer.strategy.optimizers)]
        fingerprints([fingerprints(tensors)]).tolist()


def wait(trainer: Any) -> None:
    trainer.strategy.accelerator.synchronize(trainer.strategy.root_device)


def measure(arguments: argparse.Namespace, ranks: int) -> tuple[list[float], list[float], int]:
    torch.manual_seed(1)
    module = Transformer(arguments.width, arguments.layers)
    steps = arguments.steps * arguments.stretches
    tokens = torch.randint(VOCABULARY, (ranks * arguments.batch * 8, arguments.length + 1))
    times = (Times if ranks > 1 else Alone)(arguments.steps)
    trainer = Trainer(
        accelerator="cpu" if ranks > 1 else arguments.device, devices=ranks, strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps, callbacks=[times], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, check_collectives=False, precision=arguments.precision,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=arguments.batch))
    return times.of_steps[1:], times.of_checks[1:], sum(each.numel() for each in module.parameters())


def run_rank(rank: int, arguments: argparse.Namespace, port: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark",
    )  # fmt: skip
    torch.set_num_threads(1)
    results[rank] = measure(arguments, RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each process")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="in a stretch")
    parser.add_argument("--stretches", type=int, default=12)
    parser.add_argument("--one", action="store_true", help="one process, without an exchange")
    parser.add_argument("--device", default="cpu", help="of the one process")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    if arguments.one:
        steps, checks, parameters = measure(arguments, 1)
    else:
        with torch.multiprocessing.Manager() as manager:
            results = manager.dict()
            spawn(run_rank, (arguments, 20_000 + os.getpid() % 10_000, results), RANKS)
            steps, checks, parameters = results[0]
    step, check = statistics.median(steps), statistics.median(checks)
    row = [f"{parameters:,}", f"{step:.1f}", f"{min(steps):.1f}", f"{check:.1f}", f"{min(checks):.1f}"]
    print_table(
        ["parameters", "step ms", "fastest", "comparison ms", "fastest", "at N=100"], [[*row, f"{check / step:.2f} %"]]
    )
    if arguments.json:
        found = {"step_ms": steps, "comparison_ms": checks, "parameters": parameters}
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), **found})


if __name__ == "__main__":
    main()
