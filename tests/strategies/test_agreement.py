"""Ranks compare what they were given: digests in the good case, both sides where they differ, on all ranks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.strategies import Group, LoneGroup, TorchGroup
from drivetrain.strategies.agreement import METHOD, Agreement, Facts, compare, of_module, of_optimizers, text_of

SAME = Facts(job={"max_epochs": "3", "gradient_clip_val": "1.0"}, model={"parameter a": "float32 of shape (2,)"})


class Threads(Group):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, ranks: Sequence[int], places: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.ranks, self.places, self.barrier_ = rank, ranks, places, barrier
        self.exchanges = 0

    def gather_objects(self, obj: Any) -> list[Any]:
        self.exchanges += 1
        self.places[self.rank] = obj
        self.barrier_.wait(10)
        found = [self.places[rank] for rank in self.ranks]
        self.barrier_.wait(10)
        return found

    def new(self, ranks: Sequence[int]) -> Group:
        return Threads(self.rank, ranks, self.places, self.barrier_)


def compared(*each: Facts, parts: Sequence[Sequence[int]] = ()) -> tuple[list[Any], list[int]]:
    """What comes of a comparison on each rank, and how often each has exchanged anything."""
    places: dict[int, Any] = {}
    barrier = threading.Barrier(len(each))
    worlds = [Threads(rank, range(len(each)), places, barrier) for rank in range(len(each))]
    outcomes: list[Any] = [None] * len(each)

    def call(rank: int) -> None:
        part = next((part for part in parts if rank in part), range(len(each)))
        try:
            outcomes[rank] = compare(worlds[rank], worlds[rank].new(part), each[rank])
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, [world.exchanges for world in worlds]


def message(*each: Facts, parts: Sequence[Sequence[int]] = ()) -> str:
    """The error of every rank, which is the same."""
    outcomes, _ = compared(*each, parts=parts)
    assert {type(outcome) for outcome in outcomes} == {ConfigurationError}
    [text] = {str(outcome) for outcome in outcomes}
    return text


def test_ranks_that_were_given_the_same_exchange_once() -> None:
    outcomes, exchanges = compared(SAME, SAME, SAME)
    assert outcomes == [Agreement()] * 3
    assert exchanges == [1, 1, 1]


def test_one_process_exchanges_nothing() -> None:
    assert compare(LoneGroup(), LoneGroup(), SAME) == Agreement()


def test_every_rank_raises_the_same_and_shows_both_sides() -> None:
    other = replace(SAME, job={**SAME.job, "gradient_clip_val": "None"})
    assert message(SAME, other, other) == (
        "The ranks of this job differ. gradient_clip_val: rank 0 has 1.0, ranks 1, 2 have None. Give every rank the "
        "same, outside of conditions that differ between ranks."
    )


def test_what_one_rank_lacks_is_shown_and_not_what_belongs_to_it() -> None:
    optimizer = {"optimizer 1": "SGD", "lr of optimizer 1, group 0": "0.1"}
    text = message(SAME, replace(SAME, model={**SAME.model, **optimizer}))
    assert "optimizer 1: rank 0 has none, rank 1 has SGD" in text
    assert "lr of" not in text


def test_another_order_of_parameters_is_shown() -> None:
    one, other = (replace(SAME, model=dict.fromkeys(names, "x")) for names in (("a", "b", "c"), ("a", "c", "b")))
    assert "rank 0 has b, rank 1 has c" in message(one, other)


def test_a_long_list_is_cut() -> None:
    one, other = (replace(SAME, model={f"parameter {n}": kind for n in range(20)}) for kind in ("float32", "float64"))
    assert "; and 12 more." in message(one, other)
    assert "parameter 8" not in message(one, other)


def test_ranks_with_other_parts_of_one_model_may_have_other_parameters() -> None:
    first, second = (replace(SAME, model={f"parameter {name}": "x"}) for name in "ab")
    assert compared(first, second, first, second, parts=[(0, 2), (1, 3)])[0] == [Agreement()] * 4
    text = message(first, second, first, first, parts=[(0, 2), (1, 3)])  # the ranks of the other part raise it too
    assert "parameter b: rank 1 has x, rank 3 has none" in text
    assert "parameter b" in message(first, second)  # the control


@pytest.mark.filterwarnings("error")
def test_ranks_with_the_same_seed_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    assert compared(replace(SAME, seed="1"), replace(SAME, seed="1"))[0] == [Agreement()] * 2
    assert not recwarn.list


def test_different_seeds_are_a_warning_that_shows_both_sides() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes, _ = compared(replace(SAME, seed="1"), replace(SAME, seed="none"), replace(SAME, seed="1"))
    assert outcomes == [Agreement()] * 3
    assert "The ranks have different seeds: ranks 0, 2 have 1, rank 1 has none." in str(caught[0].message)


def test_ranks_learn_whether_any_model_may_change_and_whether_loggers_are_alike() -> None:
    outcomes, _ = compared(SAME, replace(SAME, changes=True, loggers="['CSVLogger']"))
    assert outcomes == [Agreement(changes=True, loggers=False)] * 2


# ---- torch's groups --------------------------------------------------------------------------------------------------


def in_torchs_group() -> tuple[list[str], int]:
    world, texts = TorchGroup(), []
    rank = world.rank
    assert compare(world, world, SAME) == Agreement()
    for job in ({"a": str(rank)}, {"a": "same", "b" * (rank + 1): "c"}):
        with pytest.raises(ConfigurationError) as caught:
            compare(world, world, Facts(job=job))
        texts.append(str(caught.value))
    with pytest.raises(ConfigurationError) as caught:
        world.barrier("elsewhere") if rank else compare(world, world, Facts(job={METHOD: "trainer.validate"}))
    texts.append(str(caught.value))
    return texts, int(world.all_reduce(torch.ones(1), "sum"))  # the group goes on


def test_ranks_of_a_process_group_raise_the_same_and_go_on(pool: Any) -> None:
    first, second = pool.run(in_torchs_group)
    assert first == second
    assert first[1] == 2
    assert "a: rank 0 has 0, rank 1 has 1" in first[0][0]
    assert "b: rank 0 has c, rank 1 has none; bb: rank 0 has none, rank 1 has c" in first[0][1]
    assert "rank 0: trainer.validate(); rank 1: barrier('elsewhere')." in first[0][2]


def in_a_run_of_its_own(comes: bool) -> str | None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1 if not comes else 30))
    store, world = dist.distributed_c10d._get_default_store(), TorchGroup()
    store.set_timeout(timedelta(seconds=30))
    if world.rank == 1 and not comes:
        store.get("rank 0 has given up")
        return None
    try:
        compare(world, world, Facts(job={METHOD: "trainer.validate"}))
    except DrivetrainError as error:
        return str(error)
    finally:
        store.set("rank 0 has given up", "1")
    return None


def test_a_rank_that_runs_alone_waits_in_the_method_that_it_has_called(pool: Any) -> None:
    text, nothing = pool.run(in_a_run_of_its_own, False, group=False)
    assert text.startswith("Rank 0 waited in trainer.validate() for ranks 0, 1, and not all came")
    assert nothing is None
    assert pool.run(in_a_run_of_its_own, True, group=False) == [None, None]  # the control


# ---- what is compared ------------------------------------------------------------------------------------------------


def net(change: Callable[[nn.Sequential], Any] = lambda net: None) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    change(made)
    return made


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: net[0].requires_grad_(False), "parameter 0.weight"),
        (lambda net: net[0].double(), "parameter 0.weight"),
        (lambda net: net.insert(0, nn.Linear(2, 2)), "parameter 0.weight"),
        (lambda net: net[1].register_buffer("running_mean", torch.zeros(4)), "buffer 1.running_mean"),
    ],
    ids=["frozen", "type", "shape", "buffer"],
)
def test_a_change_of_the_model_is_seen(change: Callable[[nn.Sequential], Any], name: str) -> None:
    assert of_module(net()) == of_module(net())
    assert of_module(net(change))[name] != of_module(net())[name]


def test_what_ddp_is_told_to_ignore_is_not_compared() -> None:
    ignoring = net()
    ignoring._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    assert "parameter 0.weight" not in of_module(ignoring)
    assert "parameter 0.bias" in of_module(ignoring)


def test_a_layer_without_a_shape_is_compared_by_name() -> None:
    assert of_module(nn.LazyLinear(2))["parameter weight"] == "without a shape so far"


def test_classes_and_options_of_optimizers_are_seen() -> None:
    def made(kind: Any = torch.optim.SGD, **options: Any) -> dict[str, str]:
        return of_optimizers([kind(net().parameters(), **options)])

    assert made(lr=0.1) == made(lr=0.1)
    assert made(lr=0.1) != made(lr=0.2)
    assert made(lr=0.1) != made(torch.optim.Adagrad, lr=0.1)


def test_texts_are_the_same_in_every_process() -> None:
    options = {
        "hook": in_torchs_group,
        "size": torch.float32,
        "limit": timedelta(1),
        "many": [1, 2.0, None],
        "o": net(),
    }
    assert " at 0x" not in text_of(options)
    assert text_of(options) == text_of({**options, "o": net()})
    assert text_of(1) != text_of(1.0)  # as limit_val_batches takes them
