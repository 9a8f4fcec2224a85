"""Another number of processes resumes, at the end of an epoch and inside it, or is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import SumMetric

from drivetrain import Callback, LightningModule, Trainer, WeightedLoss
from drivetrain.callbacks import OnExceptionCheckpoint
from drivetrain.errors import CheckpointError
from drivetrain.loggers.dummy import DummyLogger


class Net(LightningModule):
    """By hand it steps after every second batch, so that a window of epochs of three reaches over an epoch's end."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.automatic_optimization = nn.Linear(4, 1), not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if (batch_idx + self.current_epoch) % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        if not self.automatic_optimization:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def fitted(by_hand: bool, saves: Path | None = None, resumes: Path | None = None) -> tuple[Tensor, int, float]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(36, 4, generator=generator), torch.randn(36, 1, generator=generator))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", precision="64-true", max_epochs=3,
        split_batches=ranks > 1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Saves(saves)] if saves else [],
    )  # fmt: skip
    trainer.fit(module := Net(by_hand), DataLoader(data, batch_size=12), ckpt_path=resumes)
    [group] = trainer.optimizers[0].param_groups
    return nn.utils.parameters_to_vector(module.parameters()).detach(), trainer.global_step, group["lr"]


def saved(pool: Any, by_hand: bool, path: Path) -> Path:
    pool.run(fitted, by_hand, path, world_size=3, group=False)
    return path


def test_a_scheduler_that_watches_the_epoch_that_ends_goes_on(pool: Any, tmp_path: Path) -> None:
    path, (expected, *counted) = saved(pool, False, tmp_path / "a.ckpt"), fitted(False)
    for found, *counts in [*pool.run(fitted, False, None, path, group=False), fitted(False, None, path)]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert counts == counted


def test_a_window_that_reaches_over_the_end_of_an_epoch_goes_on(pool: Any, tmp_path: Path) -> None:
    path, (expected, *_) = saved(pool, True, tmp_path / "a.ckpt"), fitted(True)
    for found, *_ in [*pool.run(fitted, True, None, path, world_size=3, group=False), fitted(True, None, path)]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---- inside an epoch -------------------------------------------------------------------------------------------------

SAMPLES, GLOBAL_BATCH = 47, 10


class Indexed(LightningModule):
    """Learns from numbered samples, and remembers which ones it was given; it can weigh its losses."""

    def __init__(self, weighs: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.weighs = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), weighs
        self.seen: Any = []  # for each batch its epoch, and the numbers of its samples
        self.sum = SumMetric()
        self.means: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        if isinstance(self.seen, list) and self.trainer.current_run.window.factor_here:  # a repeated batch is left out
            self.seen.append((self.current_epoch, number.tolist()))
        errors = (self.net(x) - y).square().flatten()
        self.log("mean", errors.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("now", errors.mean(), on_step=True, on_epoch=False, sync_dist=True)
        self.sum.update(number)
        self.log("numbers", self.sum, on_step=False, on_epoch=True)
        if not self.weighs:
            return errors.mean()
        weights = 1 + number % 3
        return WeightedLoss((errors * weights).sum() / weights.sum(), weights.sum())

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.means.append((float(metrics["mean"]), float(metrics["numbers"])))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class SavesInside(Callback):
    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == self.after - 1:
            trainer.save_checkpoint(self.path)
            module.seen = tuple(module.seen)  # what follows is not counted


class FailsInside(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == self.after - 1:
            module.seen = module.seen[: -(batch_idx % 2) or None]  # the window begins again
            raise RuntimeError("on purpose")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        first = 30 * int(os.environ.get("RANK", 0))
        return iter([(torch.ones(4), torch.ones(1), torch.tensor(first + number)) for number in range(30)])


class OfAllRanks:
    """Shares out the samples itself; its state counts those of all ranks. If asked too early, it loses its place."""

    def __init__(self, data: Any) -> None:
        self.data, self.epoch, self.done, self.begins = data, 0, 0, 0
        self.batch_size = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", 1))

    def __len__(self) -> int:
        return -(-SAMPLES // GLOBAL_BATCH)

    def __iter__(self) -> Any:
        begins, self.begins = self.begins, 0
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for start in range(begins, SAMPLES, GLOBAL_BATCH):
            batch = order[start : start + GLOBAL_BATCH]
            self.done = start + len(batch)
            yield default_collate([self.data[number] for number in batch[rank::ranks]])
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        self.begins = 0
        return {"sample_in_epoch": self.done, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins, self.epoch = state["sample_in_epoch"], state["epoch"]


class Remembers(DataLoader[Any]):
    """A loader whose state is that of one rank."""

    given = begins = 0

    def __iter__(self) -> Any:
        begins, self.begins = self.begins, 0
        for self.given, batch in enumerate(super().__iter__(), 1):
            if self.given > begins:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = state["given"]


class Rows(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows += [(step or 0, float(metrics["now"]))] if "now" in metrics else []


class Outcome(NamedTuple):
    weights: Tensor
    steps: int
    means: list[tuple[float, float]]
    seen: Sequence[tuple[int, list[int]]]
    rows: list[tuple[int, float]]


def trained(options: dict[str, Any]) -> Outcome:
    """A fit of three epochs over shuffled samples; of two if it saves inside the second."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    data: Any = TensorDataset(x, y, torch.arange(SAMPLES))
    by_batches, saves = options.get("by_batches", False), options.get("saves")
    torch.manual_seed(3)
    make = Remembers if options.get("remembers") else DataLoader
    loader: Any = make(data, batch_size=options.get("batch_size", GLOBAL_BATCH), shuffle=True,
                        num_workers=options.get("workers", 0), drop_last=options.get("drop_last", False))  # fmt: skip
    if by_batches:
        order = [list(range(start, min(start + 4, SAMPLES))) for start in range(0, SAMPLES, 4)]
        loader = DataLoader(data, batch_sampler=order)
    if options.get("kind") == "its own sampler":
        loader = DataLoader(data, 5, sampler=DistributedSampler(data, ranks, int(os.environ.get("RANK", 0))))
    elif options.get("kind") == "an iterable":
        loader = DataLoader(Stream(), 5)
    elif options.get("kind") == "of all ranks":
        loader = OfAllRanks(data)
    callbacks: list[Callback] = [SavesInside(saves, options["after"])] if saves else []
    if fails := options.get("fails"):
        callbacks = [FailsInside(options["after"]), OnExceptionCheckpoint(fails)]
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=options.get("strategy", "ddp") if ranks > 1 else "auto",
        precision="64-true", max_epochs=2 if saves else 3, accumulate_grad_batches=options.get("accumulate", 2),
        log_every_n_steps=1, logger=(logger := Rows()), enable_checkpointing=bool(fails),
        split_batches=ranks > 1 and options.get("splits", True),
        use_distributed_sampler="kind" not in options, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks,
    )  # fmt: skip
    module = Indexed(options.get("weighs", False)).double()
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        trainer.fit(module, loader, ckpt_path=options.get("resumes"))
    parameters = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in module.parameters()]
    return Outcome(
        nn.utils.parameters_to_vector(parameters).detach(), trainer.global_step, module.means, module.seen, logger.rows
    )


def on(pool: Any, ranks: int, **options: Any) -> list[Outcome]:
    if ranks == 1:
        return [trained(options)]
    return list(pool.run(trained, options, world_size=ranks, group=False))


def samples_of(outcomes: list[Outcome]) -> list[tuple[int, int]]:
    """The epoch and the number of each sample that the ranks were given."""
    return [(epoch, number) for each in outcomes for epoch, numbers in each.seen for number in numbers]


def check_samples(first: list[Outcome], rest: list[Outcome]) -> None:
    """Each sample of each epoch was given once, to one of the ranks."""
    assert sorted(samples_of(first) + samples_of(rest)) == [
        (epoch, number) for epoch in range(3) for number in range(SAMPLES)
    ]


ALL = [(before, now) for before in range(1, 5) for now in range(1, 5) if before != now]
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"


@pytest.mark.parametrize(
    ("after", "weighs"),
    [(2, False), (3, True), *([(2, True), (3, False)] if LONG else [])],
)
@pytest.mark.parametrize(("before", "now"), ALL if LONG else [(1, 3), (3, 2), (2, 4)])
def test_an_epoch_goes_on_with_another_number_of_ranks(
    pool: Any, tmp_path: Path, before: int, now: int, after: int, weighs: bool
) -> None:
    """At the same global batch, which not all numbers of ranks divide, the run equals one that was not stopped."""
    check_equals_whole(pool, before, now, tmp_path / "a.ckpt", after, weighs=weighs)


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1), (1, 2)])
def test_a_loader_with_a_state_of_each_rank_goes_on_where_the_trainer_shares_it_out(
    pool: Any, tmp_path: Path, before: int, now: int
) -> None:
    check_equals_whole(pool, before, now, tmp_path / "a.ckpt", 3, remembers=True)


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1), (2, 2)])
def test_a_loader_whose_state_counts_the_samples_of_all_ranks_goes_on(
    pool: Any, tmp_path: Path, before: int, now: int
) -> None:
    kind, path = {"kind": "of all ranks", "accumulate": 1}, tmp_path / "a.ckpt"
    first, rest = on(pool, before, saves=path, after=3, **kind), on(pool, now, resumes=path, **kind)
    check_samples(first, rest)
    [whole] = on(pool, 1, **kind)
    batches = zip(*([batch for _, batch in each.seen] for each in rest), strict=True)
    assert [sorted(chain(*parts)) for parts in batches] == [sorted(batch) for _, batch in whole.seen[8:]]


@pytest.mark.parametrize("after", [2, 3], ids=["between windows", "inside a window"])
@pytest.mark.parametrize(("first", "then"), [("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_sharded_model_goes_on_with_another_number_of_ranks(
    pool: Any, tmp_path: Path, first: str, then: str, after: int
) -> None:
    check_equals_whole(pool, 2, 3, tmp_path / "a.ckpt", after, strategies=(first, then))


@pytest.mark.parametrize("weighs", [False, True])
def test_gradients_that_each_rank_has_saved_for_itself_are_averaged_for_shards(
    pool: Any, tmp_path: Path, weighs: bool
) -> None:
    """DDP exchanges the gradients of a window at its end, and FSDP in each batch."""
    check_equals_whole(pool, 2, 2, tmp_path / "a.ckpt", 3, strategies=("ddp", "fsdp"), weighs=weighs)


def check_equals_whole(
    pool: Any, before: int, now: int, path: Path, after: int, strategies: Any = ("ddp", "ddp"), **options: Any
) -> None:
    [whole] = on(pool, 1, **options)
    first = on(pool, before, saves=path, after=after, strategy=strategies[0], **options)
    rest = on(pool, now, resumes=path, strategy=strategies[1], **options)
    check_samples(first, rest)
    begin, rows = rest[0].rows[0][0], [row for row in whole.rows if row[0] >= rest[0].rows[0][0]]
    assert begin <= 6
    torch.testing.assert_close(torch.tensor(rest[0].rows), torch.tensor(rows), rtol=1e-6, atol=1e-6)
    for each in rest:
        torch.testing.assert_close(each.weights, whole.weights, rtol=1e-9, atol=1e-9)
        assert each.steps == whole.steps
        torch.testing.assert_close(torch.tensor(each.means), torch.tensor(whole.means[1:]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "before", "now", "saves_after"),
    [
        ({"batch_size": 4}, 2, 3, (2, 3)),  # 16 samples, and no batch of 12 ends there
        ({"batch_size": 5}, 3, 1, (1, 5)),
        ({"by_batches": True, "accumulate": 1}, 1, 2, (5, 4)),
        *(
            [
                ({"batch_size": 5}, 2, 3, (3, 3)),  # 30 samples: a whole number of batches
                ({"batch_size": 2, "workers": 2}, 3, 2, (2, 5)),
                ({"batch_size": 3, "drop_last": True, "accumulate": 1}, 2, 4, (2, 2)),
                ({"by_batches": True, "accumulate": 1}, 2, 3, (2, 3)),
            ]
            if LONG
            else []
        ),
    ],
)
def test_no_sample_is_lost_where_batches_have_another_size(
    pool: Any, tmp_path: Path, options: dict[str, Any], before: int, now: int, saves_after: tuple[int, int]
) -> None:
    options, paths = {**options, "splits": False}, (tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    first = on(pool, before, saves=paths[0], after=saves_after[0], **options)
    second = on(pool, now, resumes=paths[0], saves=paths[1], after=saves_after[1], **options)
    third = on(pool, before, resumes=paths[1], **options)
    [whole] = on(pool, 1, **options)
    order = [number for epoch, numbers in whole.seen if epoch == 1 for number in numbers]
    done: list[int] = []
    for part in (first, second, third):  # in the order of one process
        done += [number for epoch, number in samples_of(part) if epoch == 1]
        assert sorted(done) == sorted(order[: len(done)])
    last = {number for epoch, number in samples_of(third) if epoch == 2}
    if not options.get("drop_last"):
        assert (sorted(done), last) == (list(range(SAMPLES)), set(range(SAMPLES)))
    assert {each.steps for each in third} == {third[0].steps}


def test_an_epoch_goes_on_with_others_after_an_exception(pool: Any, tmp_path: Path) -> None:
    """Each rank has saved by itself."""
    [whole] = on(pool, 1)
    first = on(pool, 3, fails=tmp_path, after=3)
    rest = on(pool, 2, resumes=tmp_path / "on_exception.ckpt")
    check_samples(first, rest)
    torch.testing.assert_close(rest[0].weights, whole.weights, rtol=1e-9, atol=1e-9)


def test_a_file_that_is_gone_costs_what_its_rank_had_logged(pool: Any, tmp_path: Path, capfd: Any) -> None:
    for after in (2, 3):
        on(pool, 3, saves=tmp_path / f"{after}.ckpt", after=after)
        next(iter(tmp_path.glob(f"{after}.ckpt.*.rank1"))).unlink()
    with pytest.warns(UserWarning, match="rank1 is missing. Training continues without what that process had logged"):
        trained({"resumes": tmp_path / "2.ckpt"})
    with pytest.raises(
        CheckpointError, match="inside an epoch, and one of the files .* cannot be used: .*rank1 is miss"
    ):
        trained({"resumes": tmp_path / "3.ckpt"})  # its gradients are needed


@pytest.mark.parametrize("kind", ["its own sampler", "an iterable"])
def test_what_other_ranks_cannot_continue_is_an_error_before_training(pool: Any, tmp_path: Path, kind: str) -> None:
    on(pool, 2, saves=tmp_path / "a.ckpt", after=2, kind=kind)
    why = "did not share out" if kind == "its own sampler" else "counts no samples"
    with pytest.raises(CheckpointError, match=f"by 2 processes, and there are 1: .*{why}.*Resume with as many"):
        trained({"resumes": tmp_path / "a.ckpt", "kind": kind})


@pytest.mark.parametrize("now", [1, 2, 3])
def test_a_metric_object_does_not_count_a_batch_that_a_rank_repeated(pool: Any, tmp_path: Path, now: int) -> None:
    """Of the last two samples of an epoch, the third rank has none."""
    options = {"batch_size": 15, "accumulate": 1}
    on(pool, 3, saves=tmp_path / "a.ckpt", after=4, **options)
    rest = on(pool, now, resumes=tmp_path / "a.ckpt", **options)
    assert {each.means[0][1] for each in rest} == {sum(range(SAMPLES))}
