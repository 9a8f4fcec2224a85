"""Run by test_multiprocessing.py as a program: "spawn" of what its file defines, then "forkserver".

It prints one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from typing import Any

import numpy
import torch

from drivetrain import parity
from drivetrain.clusters import LocalEnvironment
from drivetrain.launchers import LaunchError, MultiProcessingLauncher

AT_IMPORT = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "OMP_NUM_THREADS")}


class Mine(Exception):
    """Defined where the program is."""


def draws() -> list[Any]:
    return [random.random(), float(numpy.random.rand()), torch.rand(2, dtype=torch.float32).tolist()]


def switches() -> list[Any]:
    cudnn = torch.backends.cudnn
    try:
        tf32: Any = [torch.get_float32_matmul_precision(), cudnn.allow_tf32]
    except RuntimeError:
        tf32 = "said in newer terms"
    newer = [torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    return [
        str(torch.get_default_dtype()), tf32, newer, cudnn.benchmark, os.environ["PL_GLOBAL_SEED"],
        parity.current().pickle, torch.initial_seed(),
    ]  # fmt: skip


def seen(tensor: torch.Tensor, view: torch.Tensor, model: torch.nn.Module) -> list[Any]:
    with torch.no_grad():
        tensor.add_(1)
        model.weight.add_(1)  # type: ignore[operator]
    shared = [tensor.is_shared(), model.weight.is_shared()]  # type: ignore[operator]
    return [AT_IMPORT, switches(), draws(), tensor.tolist(), view.tolist(), shared, model.weight.data]


def fails() -> None:
    if os.environ["RANK"] == "1":
        raise Mine(json.dumps(switches()))


def main() -> None:
    torch.manual_seed(3)
    random.seed(4)
    numpy.random.seed(5)
    torch.rand(7), random.random(), numpy.random.rand()  # the states are somewhere in their sequences
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    os.environ["PL_GLOBAL_SEED"] = "3"
    parity.use(parity.Parity(pickle=True))

    tensor, model = torch.zeros(3), torch.nn.Linear(1, 1, bias=False)
    weight = model.weight.item()
    launcher = MultiProcessingLauncher(LocalEnvironment(), 2)
    found: dict[str, Any] = {"pickled": launcher.launch(seen, tensor, tensor[1:], model=model)}
    found["pickled"][-1] = found["pickled"][-1].item() - weight
    found["here"] = [switches(), draws(), tensor.tolist(), [tensor.is_shared(), model.weight.is_shared()]]

    multiprocessing.set_forkserver_preload(["drivetrain.launchers"])  # the server imports torch, once
    server = MultiProcessingLauncher(LocalEnvironment(), 2, start_method="forkserver")
    server.launch(draws)  # the server runs from now on
    os.environ["PL_GLOBAL_SEED"] = "9"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    found["here later"] = switches()
    try:
        server.launch(fails)
    except LaunchError as error:
        found["failed"] = [error.rank, type(error.__cause__) is Mine, json.loads(str(error.__cause__))]
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
