"""Ranks whose own loaders have different lengths: those with fewer batches repeat their last one, for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from drivetrain import Callback, LightningModule, Trainer, WeightedLoss
from drivetrain.errors import CheckpointError, ConfigurationError

BATCH = 4
STEPS = "training_steps"


def trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
             "enable_checkpointing": False, "num_sanity_val_steps": 0, "precision": "64-true",
             "use_distributed_sampler": False}  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def data_of(rank: int, batches: int) -> TensorDataset:
    """The samples of one rank; the last batch is smaller than the others."""
    generator = torch.Generator().manual_seed(rank)
    count = batches * BATCH - (1 if batches else 0)
    return TensorDataset(
        torch.randn(count, 4, generator=generator, dtype=torch.float64),
        torch.randn(count, 1, generator=generator, dtype=torch.float64),
    )


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Regression(LightningModule):
    def __init__(self, weighted: bool = False, dropout: float = 0.0, by_hand: bool = False) -> None:
        super().__init__()
        self.net, self.weighted, self.dropout = net(), weighted, nn.Dropout(dropout)
        self.automatic_optimization = not by_hand
        self.steps = 0
        self.counts: list[float] = []
        self.validated_after: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        x, y = batch
        loss = F.mse_loss(self.net(self.dropout(x)), y)
        self.log("seen", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        if self.automatic_optimization:
            return WeightedLoss(loss, len(x)) if self.weighted else loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch[0].mean(), sync_dist=True)

    def on_validation_start(self) -> None:
        self.validated_after.append(self.steps)

    def configure_optimizers(self) -> Any:
        self.counts += [self.trainer.num_training_batches, self.trainer.estimated_stepping_batches]
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def fitted(counts: list[int], weighted: bool, by_hand: bool, val_counts: list[int], options: dict[str, Any]) -> Any:
    ours, module = trainer(max_epochs=2, **options), Regression(weighted, by_hand=by_hand)
    rank = ours.global_rank
    ours.fit(
        module, DataLoader(data_of(rank, counts[rank]), batch_size=BATCH),
        DataLoader(data_of(10 + rank, val_counts[rank]), batch_size=BATCH),
    )  # fmt: skip
    return {
        "weights": weights_of(module), STEPS: module.steps, "counts": module.counts, "after": module.validated_after,
        "seen": float(ours.callback_metrics["seen"]), "val": float(ours.callback_metrics["val"]),
        "global_step": ours.global_step, "batches": ours.num_training_batches,
    }  # fmt: skip


def by_one_process(counts: list[int], accumulate: int, weighted: bool) -> Tensor:
    """The same by a loop on one process: a window's gradient is that of all batches that there really are."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    each = [list(DataLoader(data_of(rank, 5 - 2 * rank), batch_size=BATCH))[:n] for rank, n in enumerate(counts)]
    for _ in range(2):
        for start in range(0, max(counts), accumulate):
            rounds = [
                [batches[number] for batches in each if number < len(batches)]
                for number in range(start, min(start + accumulate, max(counts)))
            ]
            samples = sum(len(x) for batches in rounds for x, _ in batches)
            optimizer.zero_grad()
            for batches in rounds:
                for x, y in batches:
                    share = len(x) / samples if weighted else 1 / (len(batches) * len(rounds))
                    (F.mse_loss(model(x), y) * share).backward()
            optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize(
    ("options", "counts", "weighted"),
    [
        ({}, [5, 3], False),
        ({}, [5, 3], True),
        ({"accumulate_grad_batches": 2}, [5, 3], False),
        ({"accumulate_grad_batches": 2}, [5, 3], True),
        ({"accumulate_grad_batches": 4, "val_check_interval": 2}, [5, 3], False),
        ({"limit_train_batches": 4, "val_check_interval": 0.5}, [4, 3], False),
        ({"limit_train_batches": 0.4, "accumulate_grad_batches": 3}, [2, 1], True),
    ],
)
def test_uneven_loaders_train_as_one_process_does_with_all_their_batches(
    pool: Any, options: dict[str, Any], counts: list[int], weighted: bool
) -> None:
    accumulate = options.get("accumulate_grad_batches", 1)
    expected = by_one_process(counts, accumulate, weighted)
    ranks = pool.run(fitted, [5, 3], weighted, False, [1, 3], options, group=False)
    longest, windows = max(counts), -(-max(counts) // accumulate)
    interval = options.get("val_check_interval", 1.0)
    every = interval if isinstance(interval, int) else int(longest * interval)
    validations = [epoch * longest + done for epoch in range(2) for done in range(every, longest + 1, every)]
    samples = sum(len(x) for rank, n in enumerate(counts)
                  for x, _ in list(DataLoader(data_of(rank, 5 - 2 * rank), batch_size=BATCH))[:n])  # fmt: skip
    mean = torch.cat([data_of(10, 1).tensors[0], data_of(11, 3).tensors[0]])
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], expected, rtol=1e-9, atol=1e-9)
        assert (rank[STEPS], rank["global_step"], rank["batches"]) == (2 * longest, 2 * windows, longest)
        assert rank["counts"] == [longest, 2 * windows]
        assert rank["after"] == validations
        assert rank["seen"] == samples
        # the mean of batches weighted by their size, of which each sample counts as one
        assert rank["val"] == pytest.approx(float(mean.mean()), abs=1e-9)


def test_uneven_loaders_and_optimization_by_hand(pool: Any) -> None:
    expected = by_one_process([5, 3], 1, False)
    for rank in pool.run(fitted, [5, 3], False, True, [1, 1], {}, group=False):
        torch.testing.assert_close(rank["weights"], expected, rtol=1e-9, atol=1e-9)


def test_a_repeated_batch_that_counted_would_be_seen() -> None:
    """The control: the reference with one batch more of the short rank gives other weights."""
    assert not torch.allclose(by_one_process([5, 3], 1, False), by_one_process([5, 2], 1, False), rtol=1e-3)


# ---- a rank without any ----------------------------------------------------------------------------------------------


def refused(counts: list[int], val_counts: list[int], sanity: int) -> tuple[str, int]:
    ours, module = trainer(max_epochs=1, num_sanity_val_steps=sanity), Regression()
    rank = ours.global_rank
    loaders = [DataLoader(data_of(0, each[rank]), batch_size=BATCH) for each in (counts, val_counts)]
    with pytest.raises(ConfigurationError) as refusal:
        ours.fit(module, *loaders)
    return str(refusal.value), module.steps


@pytest.mark.parametrize(
    ("counts", "val_counts", "sanity", "message"),
    [
        ([5, 0], [1, 1], 0, "The training loaders of the ranks have 5, 0 batches. Give every rank"),
        ([0, 5], [1, 1], 2, "The training loaders of the ranks have 0, 5 batches. Give every rank"),
        ([2, 2], [2, 0], 0, "The validation loaders of the ranks have 2, 0 batches. Give every rank"),
        ([2, 2], [0, 2], 2, "The validation loaders of the ranks have 0, 2 batches. Give every rank"),
    ],
)
def test_t36_a_rank_without_batches_is_an_error_on_all_before_anything_is_trained(
    pool: Any, counts: list[int], val_counts: list[int], sanity: int, message: str
) -> None:
    for text, steps in pool.run(refused, counts, val_counts, sanity, group=False):
        assert text.startswith(message)
        assert steps == 0


def shared_differently(what: str, validates: bool) -> str:
    ours = trainer(use_distributed_sampler=True, max_epochs=1)
    rank = ours.global_rank
    loader: Any = DataLoader(data_of(0, 4), batch_size=2)
    other: Any = loader
    if rank == 1 and what == "samples":
        other = DataLoader(data_of(0, 6), batch_size=2)
    elif rank == 1 and what == "batch_size":
        other = DataLoader(data_of(0, 4), batch_size=4)
    elif rank == 1 and what == "shuffle":
        other = DataLoader(data_of(0, 4), batch_size=2, shuffle=True)
    elif rank == 1 and what == "splits itself":
        other = DataLoader(data_of(0, 4), batch_size=2, sampler=DistributedSampler(range(15), 2, 1))
    try:
        ours.fit(Regression(), loader if validates else other, other if validates else loader)
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("samples", "rank 0: {n} samples of a SequentialSampler in batches of 2; rank 1: {m} samples of a Seq"),
        ("batch_size", "rank 0: {n} samples of a SequentialSampler in batches of 2; rank 1: {n} samples of a Sequential"
                       "Sampler in batches of 4"),
        ("shuffle", "rank 1: {n} samples of a RandomSampler, replacement=False in batches of 2"),
        ("splits itself", "rank 1: a loader that is not split"),
        ("nothing", ""),
    ],
    ids=["samples", "batch_size", "shuffle", "own sampler", "nothing"],
)  # fmt: skip
def test_ranks_that_share_one_order_need_the_same_data_set_and_batch_size(
    pool: Any, what: str, text: str, validates: bool
) -> None:
    texts = pool.run(shared_differently, what, validates, group=False)
    if what == "nothing":  # the control
        assert texts == ["trained", "trained"]
        return
    n, m = len(data_of(0, 4)), len(data_of(0, 6))
    for found in texts:
        if what == "splits itself" and not validates:  # the ranks of such loaders tell each other their lengths before
            assert found.startswith("The ranks of the group cannot do this together")
            continue
        assert found.startswith(f"The {'validation' if validates else 'training'} loaders of the ranks differ")
        assert text.format(n=n, m=m) in found


class Fetching(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def fetching() -> str:
    ours = trainer(max_epochs=1, limit_val_batches=0)
    with pytest.raises(ConfigurationError) as refusal:
        ours.fit(Fetching(), DataLoader(data_of(0, 3 - ours.global_rank), batch_size=BATCH))
    return str(refusal.value)


def test_a_step_that_fetches_its_batches_needs_as_many_needs_every_rank(pool: Any) -> None:
    for text in pool.run(fetching, group=False):
        assert "takes dataloader_iter, and the loaders of the ranks have different lengths, [3, 2] batches" in text


def fetching_as_many() -> int:
    ours = trainer(max_epochs=1, limit_val_batches=0)
    ours.fit(Fetching(), DataLoader(data_of(3 * ours.global_rank, 3), batch_size=BATCH))
    return int(ours.global_step)


def test_a_step_that_fetches_its_batches_may_fetch_as_many_on_each_rank(pool: Any) -> None:
    assert pool.run(fetching_as_many, group=False) == [3, 3]


# ---- going on in the middle of an epoch ------------------------------------------------------------------------------


class SavesAfter(Callback):
    def __init__(self, batch: int, path: str) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx + 1) == (0, self.batch):
            trainer.save_checkpoint(self.path)


class KnowsItsPlace:
    """Batches of a loader with a state of its own."""

    def __init__(self, batches: int) -> None:
        self.batches = list(DataLoader(data_of(0, batches), batch_size=BATCH))
        self.place = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.place = self.place % len(self.batches), 0
        for batch in self.batches[start:]:
            self.place = start = start + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def gone_on(path: str, after: int, accumulate: int, kind: str) -> list[Tensor]:
    """Weights of a fit that went through, and of one that went on after ``after`` batches."""

    def run(resumes: bool) -> Tensor:
        torch.manual_seed(5)
        ours = trainer(
            max_epochs=2, limit_val_batches=0, accumulate_grad_batches=accumulate,
            callbacks=[] if resumes else SavesAfter(after, path),
        )  # fmt: skip
        own = 5 - 2 * ours.global_rank
        loader: Any = KnowsItsPlace(own) if kind == "stateful" else DataLoader(
            data_of(ours.global_rank, own), batch_size=BATCH, shuffle=True,
            generator=torch.Generator().manual_seed(3) if kind == "generator" else None,
        )  # fmt: skip
        module = Regression(dropout=0.5)
        torch.manual_seed(99 if resumes else 6)
        ours.fit(module, loader, ckpt_path=path if resumes else None)
        return weights_of(module)

    return [run(False), run(True)]


@pytest.mark.parametrize(
    ("after", "accumulate", "kind"),
    [(2, 1, "plain"), (3, 1, "plain"), (4, 1, "plain"), (5, 1, "plain"), (3, 2, "plain"), (3, 1, "generator"),
     (4, 1, "generator"), (5, 1, "generator"), (2, 1, "stateful"), (5, 1, "stateful")],
)  # fmt: skip
def test_a_fit_goes_on_in_the_middle_of_an_epoch_of_uneven_loaders(
    pool: Any, tmp_path: Path, after: int, accumulate: int, kind: str
) -> None:
    ranks = pool.run(gone_on, str(tmp_path / "middle.ckpt"), after, accumulate, kind, group=False)
    for through, resumed in ranks:
        assert torch.equal(through, resumed)
        assert torch.equal(through, ranks[0][0])


def not_gone_on(path: str) -> str:
    with pytest.raises(CheckpointError) as refusal:
        gone_on(path, 4, 1, "stateful")
    return str(refusal.value)


def test_a_loader_that_cannot_give_its_last_batch_again_is_an_error_on_all_ranks(pool: Any, tmp_path: Path) -> None:
    for text in pool.run(not_gone_on, str(tmp_path / "middle.ckpt"), group=False):
        assert "after 4 batches of an epoch, when some ranks repeated their last batch" in text
        assert "the ranks' loaders have 5, 3 batches" in text
