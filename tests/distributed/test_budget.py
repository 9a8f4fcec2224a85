"""What several processes cost a step: no wait for a device, and few calls of our own."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Callback, LightningModule, Trainer
from drivetrain.data import batched
from drivetrain.testing import FakeAccelerator

BATCHES = 11


class Logging(LightningModule):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        if self.reads:
            loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def waits(count: int, reads: bool) -> list[str]:
    """Where the host waited for the device between the first step and the last."""
    with FakeAccelerator.recording(2) as record:
        warnings.filterwarnings("ignore", "All ranks have trained on the same")  # as they are to
        trainer = Trainer(
            accelerator="fake", devices=2, max_epochs=1, log_every_n_steps=1000, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        assert trainer.strategy.root_device.index == trainer.global_rank
        trainer.fit(Logging(reads), DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=2))
        assert trainer.global_step == BATCHES
    return [f"{sync.what} {sync.line}" for sync in record.syncs if 0 < sync.step < BATCHES - 1]


@pytest.mark.parametrize("count", [4 * BATCHES, 4 * BATCHES - 3])
def test_a_step_waits_for_no_device_with_even_and_uneven_ends(pool: Any, count: int) -> None:
    assert pool.run(waits, count, False, group=False) == [[], []]


def test_a_read_in_the_step_is_counted(pool: Any) -> None:
    """The negative control."""
    for found in pool.run(waits, 4 * BATCHES, True, group=False):
        assert len(found) == BATCHES - 2


OURS = str(Path(drivetrain.__file__).parent)


class Counted(LightningModule):
    """Counts our own frames above ``training_step``, and our own calls between two of its steps."""

    FIRST, LAST = 20, 120

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.steps = self.frames = self.calls = self.fetching = 0

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        ours = event == "call" and frame.f_code.co_filename.startswith(OURS)
        fetches = ours and frame.f_code.co_filename == batched.__file__  # a budget of its own: torch's calls are gone
        self.calls += ours and not fetches
        self.fetching += fetches

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.steps == self.FIRST:
            frame: Any = sys._getframe()
            while (frame := frame.f_back) is not None:
                self.frames += frame.f_code.co_filename.startswith(OURS)
            sys.setprofile(self._profile)
        elif self.steps == self.LAST:
            sys.setprofile(None)
        self.steps += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Repeated(Counted):
    """Blocks, which FSDP gathers one at a time."""

    FIRST, LAST = 8, 40

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))  # type: ignore[assignment]


def own_cost(accumulate: int, strategy: str = "ddp") -> tuple[int, float, float]:
    warnings.filterwarnings("ignore", "All ranks have trained on the same")  # as they are to
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, log_every_n_steps=1000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulate, limit_train_batches=130 if strategy == "ddp" else 48,
    )  # fmt: skip
    module = Counted() if strategy == "ddp" else Repeated()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(2 * 2 * 130, 4)), batch_size=2))
    steps = module.LAST - module.FIRST
    return module.frames, module.calls / steps, module.fetching / steps


def test_a_step_of_ddp_has_at_most_7_own_frames_and_24_own_calls(pool: Any) -> None:
    for frames, calls, _ in pool.run(own_cost, 1, group=False):
        assert 5 <= frames <= 7  # fewer than the plain loop has would be a bad count
        assert 10 <= calls <= 24  # the looks at what could notice direct calls are own; those of torch become fewer


def test_a_batch_of_tensors_is_fetched_by_at_most_12_own_calls(pool: Any) -> None:
    for _, _, fetching in pool.run(own_cost, 1, group=False):
        assert 3 <= fetching <= 12


def test_an_accumulated_batch_of_ddp_costs_no_more(pool: Any) -> None:
    for frames, calls, _ in pool.run(own_cost, 4, group=False):
        assert 5 <= frames <= 7
        assert 10 <= calls <= 24  # the looks at what could notice direct calls are own; those of torch become fewer


def test_a_step_of_fsdp_costs_no_more(pool: Any) -> None:
    for frames, calls, _ in pool.run(own_cost, 1, "fsdp", group=False):
        assert 5 <= frames <= 7
        assert 10 <= calls <= 20


def test_an_accumulated_batch_of_fsdp_costs_no_more(pool: Any) -> None:
    for frames, calls, _ in pool.run(own_cost, 4, "fsdp", group=False):
        assert 5 <= frames <= 7
        assert 10 <= calls <= 24  # the looks at what could notice direct calls are own; those of torch become fewer


def exchanges_of_trainer(accumulate: int, clip: float | None) -> dict[str, int]:
    """The collectives of two optimizer steps, of which the first ones of a run are left out."""
    module = Repeated()
    counter, skipped = Exchanges(2 * accumulate), 2 * accumulate
    warnings.filterwarnings("ignore", "All ranks have trained on the same")  # as they are to
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="fsdp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate,
        gradient_clip_val=clip, limit_train_batches=skipped + 2 * accumulate, callbacks=[counter],
        use_distributed_sampler=False, log_every_n_steps=1000,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2))
    return dict(counter.mode.found)


class Collectives(TorchDispatchMode):
    """Counts torch's collectives, and the bytes that they are given, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.found[str(func)] += 1
            self.found[f"{func} bytes"] += sum(
                leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


class Exchanges(Callback):
    """Counts torch's collectives from batch ``first`` on."""

    def __init__(self, first: int) -> None:
        self.first, self.mode = first, Collectives()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self.first - 1:
            self.mode.__exit__(None, None, None)


def exchanges_by_hand(accumulate: int) -> dict[str, int]:
    from torch.distributed.fsdp import fully_shard

    module: Any = Repeated().layer
    mesh = init_device_mesh("cpu", (2,))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step() -> None:
        for _ in range(accumulate):
            module(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with Collectives() as mode:
        for _ in range(2):
            step()
    return dict(mode.found)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1)])
def test_a_step_of_fsdp_makes_the_exchanges_of_a_loop_by_hand(pool: Any, accumulate: int, clip: float | None) -> None:
    """In two steps, as many and as large; clipping by norm makes one more in each, of one number."""
    by_hand = pool.run(exchanges_by_hand, accumulate)[0]
    assert by_hand["c10d._reduce_scatter_base_.default bytes"] > 0
    exchanges = sum(count for name, count in by_hand.items() if "bytes" not in name)
    assert exchanges >= 2 * accumulate * 2 * 3  # of each of two blocks: gathered twice, scattered once
    if clip is not None:
        by_hand |= {"c10d.allreduce_.default": 2, "c10d.allreduce_.default bytes": 2 * 4}
    for found in pool.run(exchanges_of_trainer, accumulate, clip, group=False):
        assert found == by_hand


# ---- all calls of a step, and its memory -----------------------------------------------------------------------------


class Wide(torch.nn.Module):
    """Blocks of which FSDP gathers one at a time; ``mark`` is called at the same point of each step."""

    def __init__(self, mark: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mark = mark
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
        self.head = torch.nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mark()
        return self.head(torch.tanh(self.blocks(x))).square().mean()  # type: ignore[no-any-return]


class OfWide(LightningModule):
    def __init__(self, mark: Any) -> None:
        super().__init__()
        self.net = Wide(mark)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def rows(batches: int) -> Any:
    return DataLoader(TensorDataset(torch.randn(2 * batches, 128)), batch_size=2)


def wide_by_trainer(batches: int, mark: Any, after: Any, strategy: str) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            after(batch_idx)

    warnings.filterwarnings("ignore", "All ranks have trained on the same")  # as they are to
    Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[Ends()],
        log_every_n_steps=1000,
    ).fit(OfWide(mark), rows(batches))  # fmt: skip


def wide_by_hand(batches: int, mark: Any, after: Any, strategy: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module: Any = Wide(mark)
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for index, (x,) in enumerate(rows(batches)):
        loss = module(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(index)


LOOPS = {"Trainer": wide_by_trainer, "loop by hand": wide_by_hand}
SKIPPED, COUNTED = 8, 20  # steps


def calls_of(loop: str, strategy: str, extra: int = 0) -> dict[str, float]:
    """All calls of a step, of Python functions and of builtins; ``extra`` more are made in each."""
    found: Counter[str] = Counter()
    steps = 0

    def mark() -> None:
        nonlocal steps
        if steps == SKIPPED:
            sys.setprofile(lambda frame, event, argument: found.update([event]))
        elif steps == SKIPPED + COUNTED:
            sys.setprofile(None)
        steps += 1

    def after(index: int) -> None:
        for _ in range(extra):
            abs(index)

    LOOPS[loop](SKIPPED + COUNTED + 4, mark, after, strategy)
    return {"python": found["call"] / COUNTED, "builtin": found["c_call"] / COUNTED}


MORE = {"ddp": {"python": 20, "builtin": 10}, "fsdp": {"python": 32, "builtin": 24}}
"""By how many calls a step of the Trainer may exceed the loop by hand; docs/numbers.md states them."""


def calls_by_hand(strategies: list[str]) -> list[dict[str, float]]:
    return [calls_of("loop by hand", strategy) for strategy in strategies]


def calls_by_trainer(strategies: list[str]) -> list[dict[str, float]]:
    return [calls_of("Trainer", strategy) for strategy in strategies]


def test_a_step_makes_few_calls_more_than_a_loop_by_hand(pool: Any) -> None:
    by_hand = dict(zip(MORE, pool.run(calls_by_hand, list(MORE))[0], strict=True))
    for rank in pool.run(calls_by_trainer, list(MORE), group=False):
        for strategy, found in zip(MORE, rank, strict=True):
            for kind, limit in MORE[strategy].items():
                assert found[kind] - by_hand[strategy][kind] <= limit, strategy


def with_more_calls() -> list[dict[str, float]]:
    return [calls_of("loop by hand", "ddp", extra) for extra in (0, 3)]


def test_a_call_more_in_each_step_is_counted(pool: Any) -> None:
    """The control."""
    plain, more = pool.run(with_more_calls)[0]
    assert more["builtin"] - plain["builtin"] == pytest.approx(3, abs=0.5)


def exchanges_of(loop: str, strategy: str, extra: int = 0) -> dict[str, int]:
    """The collectives of the third and the fourth step, and their bytes; ``extra`` more are made in each step."""
    mode = Collectives()

    def after(index: int) -> None:
        for _ in range(extra):
            torch.distributed.all_reduce(torch.ones(1))
        if index == 1:
            mode.__enter__()
        elif index == 3:
            mode.__exit__(None, None, None)

    LOOPS[loop](6, lambda: None, after, strategy)
    return dict(mode.found)


def exchange_by_hand() -> list[Any]:
    return [(exchanges_of("loop by hand", each), exchanges_of("loop by hand", each, extra=1)) for each in MORE]


def exchange_by_trainer() -> list[Any]:
    return [exchanges_of("Trainer", each) for each in MORE]


def test_a_step_exchanges_as_much_as_a_loop_by_hand(pool: Any) -> None:
    """Also parameters that are in no block, which FSDP gathers once."""
    for by_hand, found in zip(pool.run(exchange_by_hand), pool.run(exchange_by_trainer, group=False), strict=True):
        for (expected, more), ours in zip(by_hand, found, strict=True):
            assert sum(expected.values()) > 0
            assert ours == expected
            assert more != expected  # the control


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Those of all tensors, of a DTensor that of its local tensor."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf):
            yield from storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()


class Storages(TorchDispatchMode):
    """Knows the storages of all tensors that went through an operator, and which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*args, **(kwargs or {}))
        self.seen.update({each._cdata: StorageWeakRef(each) for each in storages((args, kwargs, result))})
        return result

    def live_bytes(self) -> int:
        gc.collect()
        found = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self.seen.values())
        return sum(storage.nbytes() for storage in found if storage is not None)


KEPT: list[torch.Tensor] = []


def live_after_three_steps(loop: str, strategy: str, keeps: bool = False) -> int:
    """Bytes of this rank's live storages after the third step; ``keeps``: as if something kept a batch of each."""
    mode, live = Storages(), 0

    def after(index: int) -> None:
        nonlocal live
        if keeps:
            KEPT.append(torch.ones(128, 64) * index)
        if index == 2:
            live = mode.live_bytes()

    with mode:
        LOOPS[loop](4, lambda: None, after, strategy)
    KEPT.clear()
    return live


def live_by_hand() -> list[tuple[int, int]]:
    return [
        (live_after_three_steps("loop by hand", each), live_after_three_steps("loop by hand", each, keeps=True))
        for each in MORE
    ]


def live_by_trainer() -> list[int]:
    return [live_after_three_steps("Trainer", each) for each in MORE]


def test_live_storages_after_three_steps_are_those_of_a_loop_by_hand(pool: Any) -> None:
    whole = 4 * sum(each.numel() for each in Wide(None).parameters())  # bytes of the weights; gradients, two moments
    for by_hand, found in zip(pool.run(live_by_hand), pool.run(live_by_trainer, group=False), strict=True):
        for strategy, (expected, kept), live in zip(MORE, by_hand, found, strict=True):
            assert expected > (2 if strategy == "fsdp" else 4) * whole  # no fewer than there must be
            assert live == pytest.approx(expected, rel=0.03), strategy
            assert kept > 1.03 * expected  # the control
