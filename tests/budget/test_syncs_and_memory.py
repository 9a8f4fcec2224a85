"""No hidden synchronisation between flushes, and nothing that grows."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountsReads(TorchDispatchMode):
    """Counts what would make a device wait: every transfer of a tensor's values to the host goes through these."""

    OPS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in self.OPS
        return func(*args, **(kwargs or {}))


class Sees(torch.overrides.TorchFunctionMode):
    """Counts ``item``, ``tolist``, ``float`` and their like where Python calls them."""

    NAMES = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


def reads_during(budget: Any, log: Any, **arguments: Any) -> tuple[int, int]:
    """How often values were read by 100 steps of a fit, and how many flushes there were."""
    trainer = budget.bare_trainer(**arguments)
    module = budget.Smallest(None, log)
    with CountsReads() as dispatched, Sees() as called:
        trainer.fit(module, budget.Batches(100))
    return max(dispatched.reads, called.reads), trainer.logbook.flushes


def test_values_are_read_only_when_the_log_is_flushed(budget: Any) -> None:
    reads, flushes = reads_during(budget, lambda m, loss: m.log("loss", loss, prog_bar=True), log_every_n_steps=25)
    assert (reads, flushes) == (4, 4)


def test_ten_values_are_read_together(budget: Any) -> None:
    names = [f"value{i}" for i in range(10)]
    reads, flushes = reads_during(
        budget, lambda m, loss: m.log_dict(dict.fromkeys(names, loss), prog_bar=True), log_every_n_steps=50
    )
    assert (reads, flushes) == (2, 2)


def test_nothing_is_read_without_logging(budget: Any) -> None:
    assert reads_during(budget, None) == (0, 0)


def test_a_read_in_the_step_is_counted(budget: Any) -> None:
    """Negative control."""
    reads, _ = reads_during(budget, lambda m, loss: m.log("loss", loss.item()))
    assert reads >= 100


class Grown:
    """Live tensors and bytes held by Python's allocator at two steps of one fit."""

    def __init__(self, at: tuple[int, int]) -> None:
        self.at = at
        self.step = 0
        self.tensors: list[int] = []
        self.blocks: list[int] = []

    def __call__(self, module: Any, loss: Any) -> None:
        module.log("loss", loss, on_epoch=True, prog_bar=True)
        module.log_dict({"a": loss, "b": 1.0})
        self.step += 1
        if self.step in self.at:
            gc.collect()
            self.tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
            self.blocks.append(sys.getallocatedblocks())


@pytest.mark.timeout(180)
def test_nothing_grows_over_10_000_steps(budget: Any) -> None:
    grown = Grown((2_000, 10_000))  # both just before a flush
    budget.bare_trainer().fit(budget.Smallest(None, grown), budget.Batches(10_001))
    assert abs(grown.tensors[1] - grown.tensors[0]) <= 64  # at most the values that wait to be added up
    assert grown.blocks[1] - grown.blocks[0] < 1_000  # a leak of one object a step would be 8,000


def test_a_leak_is_seen(budget: Any) -> None:
    """Negative control."""
    grown, kept = Grown((200, 600)), []

    def leaky(module: Any, loss: Any) -> None:
        grown(module, loss)
        kept.append(loss.detach())

    budget.bare_trainer().fit(budget.Smallest(None, leaky), budget.Batches(601))
    assert grown.tensors[1] - grown.tensors[0] > 64
    assert grown.blocks[1] - grown.blocks[0] >= 400


def test_what_nobody_wants_is_not_read(budget: Any) -> None:
    """Without a logger, a value that the bar does not show stays on its device."""
    assert reads_during(budget, lambda m, loss: m.log("loss", loss), log_every_n_steps=25) == (0, 0)
