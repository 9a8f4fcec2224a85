"""Replicas that drift apart are found at the next comparison, named, and never saved; ranks that agree are left alone.

DRIVETRAIN_FAULTS=long plants 200 faults, and compares in each of 5,000 steps, or of DRIVETRAIN_STEPS=100000.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import test_model_parallel, test_pipeline
from tests.distributed.sharded import token_data
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint, ReplicaCheck
from drivetrain.callbacks.replica_check import ReplicaMismatchError, _Difference
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy, FSDPStrategy, HorovodStrategy, ModelParallelStrategy, PipelineStrategy
from drivetrain.strategies.copies import named_state, ranks_with_copies
from drivetrain.strategies.sharded_state import local_shard
from drivetrain.testing import FakeAccelerator

LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
OWN_BUFFERS: Any = {"forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False}
STEPS, MANY = 9, int(os.environ.get("DRIVETRAIN_STEPS", "5000"))


class Small(LightningModule):
    """Has a constant buffer, one that each step changes alike on all ranks, and the statistics of batch norm."""

    table: Tensor
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("table", torch.randn(6))
        self.register_buffer("passes", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.passes += torch.tensor([1.0, 2.0, 4.0])
        x = torch.tanh(self.norm(self.first(batch[0])) + self.table)
        return self.last(x).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(world_size: int, *callbacks: Callback, strategy: Any = None, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_steps": STEPS,
    }  # fmt: skip
    # rank 0's buffers would else replace those of the others in each forward pass
    strategy = strategy or DDPStrategy(**OWN_BUFFERS)
    return Trainer(**quiet | arguments, devices=world_size, strategy=strategy, callbacks=list(callbacks))


def data(ranks: int, steps: int = STEPS) -> DataLoader[Any]:
    x = torch.randn(2 * ranks * steps, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=2)


class Fault(Callback):
    """Damages one tensor of one rank after one optimizer step."""

    def __init__(self, kind: str, name: str, rank: int, step: int, seed: int = 0) -> None:
        self.kind, self.name, self.rank, self.step, self.seed = kind, name, rank, step, seed
        self.before: Tensor | None = None

    def tensor(self, trainer: Any, module: Any) -> Tensor:
        found = {name: tensor for name, _, tensor in named_state(module, trainer.strategy.optimizers)}
        return local_shard(found[self.name].detach())

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank != self.rank:
            return
        if trainer.global_step == self.step - 1:
            self.before = self.tensor(trainer, module).clone()
        if trainer.global_step == self.step:
            tensor, choice = self.tensor(trainer, module), random.Random(self.seed)
            flat, old = tensor.view(-1), tensor.clone()
            if self.kind == "bit":
                bits = flat.view(torch.int32)
                bits[choice.randrange(len(bits))] ^= 1 << choice.randrange(31)
            elif self.kind == "swap":
                one, other = choice.sample(range(len(flat)), 2)
                flat[[one, other]] = flat[[other, one]]
            else:
                assert self.before is not None
                tensor.copy_(self.before)
            assert not old.equal(tensor)


WEIGHTS, STATES = ("first.weight", "last.weight", "norm.bias"), ("exp_avg of first.weight", "exp_avg_sq of last.weight")


def fault_of(seed: int, ranks: int) -> Fault:
    choice = random.Random(seed)
    kind = choice.choice(["bit", "swap", "stale"])
    buffers = ("table", "passes") if kind != "stale" else ("passes",)
    name = choice.choice(choice.choice([WEIGHTS, STATES, buffers]))
    # A bit of a running mean fades in the steps until the comparison, and may round to the right value.
    steps = [3, 6] if name in STATES else range(2, 8)
    return Fault(kind, name, choice.randrange(ranks), choice.choice(steps), seed)


def found(seeds: list[int], ranks: int, folder: Path) -> list[tuple[str, list[str]]]:
    """For each fault, the error of this rank's fit, and the checkpoints that it leaves."""
    outcomes = []
    for seed in seeds:
        fault, where = fault_of(seed, ranks), folder / str(seed)
        saves = [
            ModelCheckpoint(where, "{step}", save_top_k=-1, every_n_train_steps=1 if seed % 2 else 2),
            OnExceptionCheckpoint(where),
        ]
        where.mkdir(exist_ok=True)
        loop = trainer(ranks, fault, *saves, replica_check_every=3, enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*failed: ReplicaMismatchError")
            with pytest.raises(ReplicaMismatchError) as caught:
                loop.fit(Small(), data(ranks))
        outcomes.append((str(caught.value), sorted(path.name for path in where.iterdir())))
    return outcomes


def check_found(pool: Any, folder: Path, ranks: int, seeds: list[int]) -> None:
    everyones = pool.run(found, seeds, ranks, folder, world_size=ranks, group=False, timeout=20.0 + 10 * len(seeds))
    for seed, *outcomes in zip(seeds, *everyones, strict=True):
        fault = fault_of(seed, ranks)
        saved = range(fault.step, STEPS + 1) if seed % 2 else range(fault.step + fault.step % 2, STEPS + 1, 2)
        compared = min(*saved[:1], fault.step + -fault.step % 3)
        others = [rank for rank in range(ranks) if rank != fault.rank]
        text = f"rank {fault.rank} (" if ranks > 2 else "ranks 0 and 1 ("
        for message, files in outcomes:
            assert f"After optimizer step {compared}, the replicas of the model differ: {text}" in message
            assert ranks == 2 or f"differs from ranks {', '.join(map(str, others[:-1]))} and {others[-1]} in" in message
            assert repr(fault.name) in message
            steps = [int(number) for name in files for number in re.findall(r"step=(\d+)\.ckpt$", name)]
            assert all(step < fault.step for step in steps)
            assert not [name for name in files if "on_exception" in name]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_fault_is_found_at_the_next_comparison_and_nothing_is_saved_after_it(
    pool: Any, tmp_path: Path, ranks: int
) -> None:
    check_found(pool, tmp_path, ranks, list(range(3)))


@pytest.mark.skipif(not LONG, reason="make test-faults")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.timeout(600)
def test_200_faults_are_found(pool: Any, tmp_path: Path, ranks: int) -> None:
    seeds = list(range(100, 300))[ranks - 2 :: 3]
    for start in range(0, len(seeds), 10):
        check_found(pool, tmp_path, ranks, seeds[start : start + 10])


# ---- what is no fault ------------------------------------------------------------------------------------------------


def undisturbed(ranks: int, steps: int, strategy: Any) -> tuple[int, list[str]]:
    module, said = Small(), Said()
    check = ReplicaCheck(every_n_steps=1)
    with said:
        loop = trainer(ranks, check, strategy=strategy, max_steps=steps)
        loop.fit(module, data(ranks, min(steps, 50)))
    return loop.global_step, [line for line in said.lines if "compared without" in line]


class Said(logging.Handler):
    """Keeps the lines that this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger("drivetrain").addHandler(self)
        logging.getLogger("drivetrain").setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("drivetrain").removeHandler(self)


@pytest.mark.parametrize("synced", [True, False])
def test_equal_replicas_train_on_and_buffers_that_each_rank_fills_are_named_once(pool: Any, synced: bool) -> None:
    strategy = "ddp" if synced else None
    first, *_ = pool.run(undisturbed, 2, 30, strategy, group=False)
    assert first[0] == 30
    (line,) = first[1]
    assert "'norm.running_mean', 'norm.running_var'" in line
    assert "table" not in line
    assert "passes" not in line


@pytest.mark.skipif(not LONG, reason="make test-faults")
@pytest.mark.timeout(7200)
def test_no_false_alarm_in_many_steps(pool: Any) -> None:
    first, *_ = pool.run(undisturbed, 2, MANY, None, group=False, timeout=7200)
    assert first[0] == MANY


def late_batchnorm(strategy: Any) -> list[str]:
    """Batch norm that is frozen at first: then its statistics change on all ranks, each by its own batches."""
    said = Said()
    with said:
        trainer(2, Thaw(), ReplicaCheck(1), strategy=strategy).fit(Small(), data(2))
    return [line for line in said.lines if "compared without" in line]


class Thaw(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.norm.train(batch_idx >= 5)


def test_statistics_that_begin_to_differ_later_are_no_fault(pool: Any) -> None:
    first, *_ = pool.run(late_batchnorm, "ddp", group=False)
    assert len(first) == 1


class Once(Fault):
    """A fault that comes once in a process, however often the fit passes its step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, module)
        self.step = -1 if trainer.global_step == self.step else self.step


def rolled_back(folder: Path, strategy: Any, ranks: int, faults: list[Callback]) -> tuple[list[str], list[Tensor]]:
    torch.manual_seed(0)
    saves = ModelCheckpoint(folder / str(len(faults)), "{step}", save_top_k=-1, every_n_train_steps=2)
    check, module = ReplicaCheck(1, on_mismatch="heal"), Small()
    loop = trainer(ranks, *faults, check, saves, strategy=strategy, enable_checkpointing=True, stall_timeout_s=None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.fit(module, data(ranks))
    states = [tensor for _, _, tensor in named_state(module, loop.strategy.optimizers)]
    said = [str(each.message) for each in warned if "replicas" in str(each.message)]
    return said, [local_shard(each.detach()).clone() for each in states]


def test_without_a_majority_the_fit_resumes_from_its_newest_checkpoint_with_the_bits_of_an_undisturbed_one(
    pool: Any, tmp_path: Path
) -> None:
    alone = pool.run(rolled_back, tmp_path, "ddp", 2, [], group=False)
    faults = [Once("bit", "first.weight", 1, 4), Once("bit", "exp_avg of last.weight", 0, 7)]
    disturbed = pool.run(rolled_back, tmp_path, "ddp", 2, faults, group=False)
    assert [said for said, _ in alone] == [[], []]
    assert "After optimizer step 4" in disturbed[0][0][0]
    assert disturbed[0][0][0].endswith(f"Training resumes from {tmp_path / '2' / 'step=2.ckpt'}.")
    assert disturbed[0][0][1].endswith(f"Training resumes from {tmp_path / '2' / 'step=6.ckpt'}.")
    for (_, right), (_, found) in zip(alone, disturbed, strict=True):
        assert all(map(torch.equal, right, found))


def test_replicas_that_differ_again_at_the_same_step_end_the_fit(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ReplicaMismatchError, match=r"After optimizer step 5.*More than half.*ckpt_path=\"\S+step=4.ckpt\""
    ):
        pool.run(rolled_back, tmp_path, "ddp", 2, [Fault("bit", "first.weight", 1, 5)], group=False)


class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 5


def test_a_fit_that_is_asked_to_stop_does_not_resume(pool: Any, tmp_path: Path) -> None:
    faults = [Once("bit", "first.weight", 1, 5), Stops()]
    with pytest.raises(ReplicaMismatchError, match=r"After optimizer step 5.*ckpt_path=\"\S+step=4.ckpt\""):
        pool.run(rolled_back, tmp_path, "ddp", 2, faults, group=False)


def with_synced_statistics() -> str:
    loop = trainer(3, Fault("bit", "norm.running_var", 1, 6), replica_check_every=2, sync_batchnorm=True)
    with pytest.raises(ReplicaMismatchError) as caught:
        loop.fit(Small(), data(3))
    return str(caught.value)


def test_statistics_over_all_ranks_are_compared(pool: Any) -> None:
    for message in pool.run(with_synced_statistics, group=False, world_size=3):
        assert "rank 1 (" in message
        assert "'norm.running_var'" in message


def ignoring(ignore: list[str]) -> int:
    loop = trainer(2, Fault("bit", "table", 1, 4), ReplicaCheck(2, ignore=ignore))
    loop.fit(Small(), data(2))
    return loop.global_step


def test_what_is_to_differ_can_be_left_out(pool: Any) -> None:
    assert pool.run(ignoring, ["tab*"], group=False) == [STEPS, STEPS]
    with pytest.raises(ReplicaMismatchError, match=r"write ReplicaCheck\(ignore=\['table'\]\)"):
        pool.run(ignoring, ["other"], group=False)


# ---- heal ------------------------------------------------------------------------------------------------------------


def healed(ranks: int, name: str, kind: str) -> tuple[list[str], dict[str, Tensor]]:
    module = Small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = trainer(ranks, Fault(kind, name, 1, 4), ReplicaCheck(2, on_mismatch="heal"))
        loop.fit(module, data(ranks))
    state = {name: tensor.clone() for name, _, tensor in named_state(module, loop.strategy.optimizers)}
    return [str(each.message) for each in caught if "replicas" in str(each.message)], state


@pytest.mark.parametrize(
    ("name", "kind"), [("first.weight", "swap"), ("table", "bit"), ("exp_avg_sq of last.weight", "stale")]
)
def test_the_majority_heals_a_rank_and_the_run_ends_with_the_numbers_of_one_without_a_fault(
    pool: Any, name: str, kind: str
) -> None:
    everyones = pool.run(healed, 3, name, kind, group=False, world_size=3)
    (message,), _ = everyones[0]
    assert f"rank 1 ({platform.node()}, cpu) differs from ranks 0 and 2 in {name!r}." in message
    assert "Training continues." in message
    expected = pool.run(never_damaged, group=False, world_size=3)[0]
    own = {"norm.running_mean", "norm.running_var"}
    for _, state in everyones:
        assert state.keys() == expected.keys()
        assert [key for key in state.keys() - own if not state[key].equal(expected[key])] == []


def never_damaged() -> dict[str, Tensor]:
    module = Small()
    loop = trainer(3)
    loop.fit(module, data(3))
    return {name: tensor.clone() for name, _, tensor in named_state(module, loop.strategy.optimizers)}


def test_two_ranks_cannot_heal_each_other(pool: Any) -> None:
    with pytest.raises(ReplicaMismatchError, match=r"More than half .* This fit has no checkpoint .* from its start"):
        pool.run(healed, 2, "first.weight", "bit", group=False)


class Loses(Callback):
    """Rank 1 loses a tensor of the optimizer's state."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 4:
            del trainer.strategy.optimizers[0].state[module.last.weight]["exp_avg_sq"]


def not_healed(loses: bool) -> str:
    """The error where the values of the majority could not be copied, or were and did not stay."""
    fault = Loses() if loses else Fault("bit", "first.weight", 1, 4)
    loop = trainer(3, fault, ReplicaCheck(2, on_mismatch="heal"))
    with pytest.MonkeyPatch.context() as patch:
        if not loses:
            patch.setattr(_Difference, "heal", lambda *_: None)
        with pytest.raises(ReplicaMismatchError) as caught:
            loop.fit(Small(), data(3))
    return str(caught.value)


def test_the_error_says_why_a_majority_has_not_healed_the_others(pool: Any) -> None:
    lacking, undone = (pool.run(not_healed, loses, group=False, world_size=3)[0] for loses in (True, False))
    assert "Rank 1 cannot be healed without a tensor to copy to: 'exp_avg_sq of last.weight'. This fit has" in lacking
    assert "The values of most replicas were copied to the others, which then differed again. This fit has" in undone
    assert "More than half" not in lacking + undone


def resumed(folder: Path, faulty: bool) -> tuple[str, dict[str, Tensor]]:
    module, saves = Small(), ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1)
    callbacks = [Fault("bit", "last.weight", 0, 5)] if faulty else []
    loop = trainer(2, *callbacks, saves, ReplicaCheck(3), enable_checkpointing=True)
    try:
        loop.fit(module, data(2), ckpt_path="last")
    except ReplicaMismatchError as error:
        return str(error), {}
    return "", {name: tensor.clone() for name, _, tensor in named_state(module, loop.strategy.optimizers)}


def test_the_program_resumes_from_before_the_fault_with_the_numbers_of_a_run_without_one(
    pool: Any, tmp_path: Path
) -> None:
    everyones = pool.run(resumed, tmp_path / "a", True, group=False)
    assert all("After optimizer step 5, the replicas" in text for text, _ in everyones)
    assert all(
        f'again with ckpt_path="{tmp_path / "a" / "epoch=0-step=4.ckpt"}": this' in text for text, _ in everyones
    )
    again, once = (
        pool.run(resumed, tmp_path / "a", False, group=False),
        pool.run(resumed, tmp_path / "b", False, group=False),
    )
    for (_, state), (_, expected) in zip(again, once, strict=True):
        assert [key for key in expected if not state[key].equal(expected[key])] == []


def failing(folder: Path, faults: list[Fault]) -> None:
    saves = OnExceptionCheckpoint(folder)
    loop = trainer(2, *faults, Fails(), saves, strategy="ddp", replica_check_every=1000, enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        loop.fit(Small(), data(2))


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise ZeroDivisionError


@pytest.mark.parametrize("faults", [[], [Fault("bit", "first.weight", 1, 4)]])
def test_a_fit_that_fails_saves_no_replicas_that_differ(pool: Any, tmp_path: Path, faults: list[Fault]) -> None:
    pool.run(failing, tmp_path, faults, group=False)
    assert (tmp_path / "on_exception.ckpt").exists() is not bool(faults)


# ---- saves -----------------------------------------------------------------------------------------------------------


class SavesAfterwards(Callback):
    def __init__(self, path: Path, weights_only: bool) -> None:
        self.path, self.weights_only = path, weights_only

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path, weights_only=self.weights_only)


def saving(path: Path, weights_only: bool, damaged: bool) -> str:
    fault = [Fault("bit", "first.bias", 1, 5)] if damaged else []
    try:
        saves = SavesAfterwards(path, weights_only)
        trainer(2, *fault, saves, replica_check_every=1000).fit(Small(), data(2))
    except ReplicaMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_save_compares_first(pool: Any, tmp_path: Path, weights_only: bool) -> None:
    path = tmp_path / "a.ckpt"
    assert all("'first.bias'" in text for text in pool.run(saving, path, weights_only, True, group=False))
    assert list(tmp_path.iterdir()) == []
    assert pool.run(saving, path, weights_only, False, group=False) == ["", ""]
    assert path.exists()


# ---- shards ----------------------------------------------------------------------------------------------------------


def of_shards(options: Any, name: str) -> str:
    strategy = FSDPStrategy(**options)
    loop = trainer(4, Fault("bit", name, 1, 4), strategy=strategy, replica_check_every=2)
    with pytest.raises(ReplicaMismatchError) as caught:
        loop.fit(Small(), data(4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "name", "ranks"),
    [
        ({"device_mesh": (2, 2)}, "first.weight", "ranks 1 and 3 ("),
        ({"device_mesh": (2, 2)}, "exp_avg of first.weight", "ranks 1 and 3 ("),
        ({"device_mesh": (2, 2)}, "table", "rank 1 ("),
        ({"sharding_strategy": "NO_SHARD"}, "first.weight", "rank 1 ("),
    ],
)
def test_replicated_shards_are_compared_with_their_copies(pool: Any, options: Any, name: str, ranks: str) -> None:
    for message in pool.run(of_shards, options, name, group=False, world_size=4):
        assert ranks in message
        assert repr(name) in message


def without_replicas(strategy: Any, ranks: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(ranks, strategy=strategy, replica_check_every=2, max_steps=3).fit(Small(), data(ranks))
    return [str(each.message) for each in caught if "replica" in str(each.message)]


def test_shards_without_copies_are_not_compared_and_a_warning_is_visible(pool: Any) -> None:
    first, second = pool.run(without_replicas, "fsdp", 2, group=False)
    assert first == [
        "replica_check_every=2 has no effect in this run: FSDPStrategy on 2 device(s) holds each parameter once, so "
        "there is no replica to compare."
    ]
    assert second == []


# ---- the host waits once a comparison --------------------------------------------------------------------------------


def waits(every: int | None) -> list[int]:
    """After which steps the host waited for the device."""
    with FakeAccelerator.recording(2) as record:
        arguments = {} if every is None else {"replica_check_every": every}
        loop = trainer(2, strategy="ddp", accelerator="fake", log_every_n_steps=1000, **arguments)
        loop.fit(Plain(), data(2))
    return [sync.step for sync in record.syncs if 1 < sync.step < STEPS - 1]


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("table", torch.randn(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_a_comparison_waits_for_the_device_once_and_other_steps_do_not(pool: Any) -> None:
    assert pool.run(waits, None, group=False) == [[], []]
    assert pool.run(waits, 3, group=False) == [[3, 6], [3, 6]]


# ---- other strategies ------------------------------------------------------------------------------------------------


class Zero(Small):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


STRATEGIES: dict[str, tuple[Callable[[], Any], Callable[[], LightningModule], str]] = {
    "pipeline": (lambda: PipelineStrategy(pipeline_parallel_size=2), test_pipeline.Net, ""),
    "tensor and data": (lambda: ModelParallelStrategy(2, 2), test_model_parallel.Planned, ""),
    "horovod": (HorovodStrategy, Small, "first.bias"),
    "a sharded optimizer": (lambda: "ddp", Zero, "first.bias"),
}


def on_strategy(kind: str, damaged: bool) -> str:
    """The text of the error; with no ``name``, the damaged parameter is the first that has a copy on another rank."""
    strategy, make, name = STRATEGIES[kind]
    fault = [FirstCopy(name)] if damaged else []
    loop = trainer(4, *fault, strategy=strategy(), replica_check_every=1, max_steps=6)
    loader = data(4) if name else DataLoader(token_data(), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loop.fit(make(), loader)
        except ReplicaMismatchError as error:
            return str(error)
    return ""


class FirstCopy(Fault):
    """Damages, on rank 1 after step 3, the first parameter that another rank holds too."""

    def __init__(self, name: str) -> None:
        super().__init__("bit", name, 1, 3)

    def tensor(self, trainer: Any, module: Any) -> Tensor:
        for _, name, tensor in named_state(module, []):
            if len(ranks_with_copies(trainer.strategy, tensor)) > 1 and name.startswith(self.name):
                return local_shard(tensor.detach())
        raise AssertionError("nothing is replicated")


@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_each_strategy_says_which_ranks_hold_the_same(pool: Any, kind: str) -> None:
    assert pool.run(on_strategy, kind, False, group=False, world_size=4) == [""] * 4
    for message in pool.run(on_strategy, kind, True, group=False, world_size=4):
        assert "After optimizer step 3, the replicas of the model differ: rank" in message


def refused() -> str:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    strategy = DDPStrategy(ddp_comm_hook=post_localSGD_hook, ddp_comm_state=state, model_averaging_period=2)
    with pytest.raises(ConfigurationError) as caught:
        trainer(2, strategy=strategy, replica_check_every=5).fit(Small(), data(2))
    return str(caught.value)


def test_ranks_whose_parameters_are_to_differ_are_refused(pool: Any) -> None:
    assert pool.run(refused, group=False)[0].startswith(
        "Trainer(replica_check_every=5) compares the tensors of all ranks, and DDPStrategy lets their parameters "
        "differ between two averages. Leave replica_check_every out."
    )
