"""Our own strategies, and the one of the documentation, through the suite that authors of strategies run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.strategies import (
    DataParallelStrategy,
    DDP2Strategy,
    DDPStrategy,
    FSDPStrategy,
    HorovodStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from drivetrain.testing._regression import BATCHES, GLOBAL_BATCH, data
from drivetrain.testing.strategy_conformance import StrategyConformance


def example(name: str) -> Any:
    """A file that the documentation shows."""
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def fsdp2() -> Any:
    return example("fsdp2_strategy").FSDP2Strategy()


class TestSingleDevice(StrategyConformance):
    strategy = SingleDeviceStrategy


class TestDP(StrategyConformance):
    strategy = DataParallelStrategy
    replicas = 2


class TestDDP(StrategyConformance):
    strategy = DDPStrategy
    devices = 2


class TestDDP2(StrategyConformance):
    strategy = DDP2Strategy
    devices = 2
    replicas = 2


class TestHorovod(StrategyConformance):
    strategy = HorovodStrategy
    devices = 2


class TestFSDP2(StrategyConformance):
    strategy = fsdp2
    devices = 2


class TestFSDP(StrategyConformance):
    strategy = FSDPStrategy
    devices = 2


def exchanges_once() -> FSDPStrategy:
    return FSDPStrategy(gradient_exchange="window")


class TestFSDPOnceAWindow(StrategyConformance):
    strategy = exchanges_once
    devices = 2


def rounds_nothing() -> Any:
    return example("rounded_gradients").RoundedGradients(torch.float64)


class TestErrorFeedback(StrategyConformance):
    """The numbers of one process where nothing is lost."""

    strategy = rounds_nothing
    devices = 2


def rounds() -> Any:
    return example("rounded_gradients").RoundedGradients()


class TestErrorFeedbackThatRounds(StrategyConformance):
    """Near them otherwise, and what it keeps is resumed to the last bit."""

    strategy = rounds
    devices = 2
    tolerance = 0.02


def splits() -> ModelParallelStrategy:
    plan = {"net.0": "colwise", "net.2": "rowwise"}
    return ModelParallelStrategy(tensor_parallel_size=2, save_distributed_checkpoint=False, tp_plan=plan)


class TestTensorParallel(StrategyConformance):
    strategy = splits
    devices = 2

    def loader(self, batches: int = BATCHES) -> Any:
        """Both ranks see the same samples."""
        return DataLoader(data(batches), batch_size=GLOBAL_BATCH)
