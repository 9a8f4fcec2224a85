"""Metric objects of torchmetrics that are logged: of several processes, the value is that of one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score, BinaryPrecision

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.rand(count, 4, generator=generator), torch.randint(0, 2, (count,), generator=generator))


class Median(Metric):
    """Keeps everything it has seen in a list."""

    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(list(self.values) if isinstance(self.values, list) else [self.values]).median()


OF_SCORES: dict[str, Any] = {"median": Median, "most": MaxMetric, "sum": SumMetric, "mean": MeanMetric}
OF_PAIRS: dict[str, Any] = {"accuracy": BinaryAccuracy}


class Classifier(LightningModule):
    """Logs metric objects, of training and of validation; its weights stay what they are.

    Args:
        forward: call the metrics, which gives the batch's value too, instead of their ``update``.
    """

    def __init__(self, forward: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 1)
        self.calls = forward
        self.of_scores = nn.ModuleDict({f"{s}_{n}": make() for s in ("train", "val") for n, make in OF_SCORES.items()})
        self.of_pairs = nn.ModuleDict({f"{s}_{n}": make() for s in ("train", "val") for n, make in OF_PAIRS.items()})
        self.several = MetricCollection({"f1": BinaryF1Score(), "precision": BinaryPrecision()}, prefix="val_")
        self.by_hand = BinaryAccuracy()  # computed and reset by user code
        self.range = MinMaxMetric(BinaryAccuracy())  # the same, of one metric in another

    def step(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        logits = self.layer(x).squeeze(1)
        scores = torch.sigmoid(2 * logits).detach()
        for metrics, arguments in ((self.of_scores, (scores,)), (self.of_pairs, (scores, y))):
            for name, metric in metrics.items():
                if name.startswith(stage):
                    (metric if self.calls else metric.update)(*arguments)
                    self.log(name, metric, on_step=self.calls and stage == "train", on_epoch=True)
        if stage == "val":
            self.several.update(scores, y)
            self.log_dict(self.several, on_step=False, on_epoch=True)
            self.by_hand.update(scores, y)
            self.range.update(scores, y)
        return F.binary_cross_entropy_with_logits(logits, y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.log("val_by_hand", self.by_hand.compute())
        self.log_dict({f"val_range_{end}": value for end, value in self.range.compute().items()})
        self.by_hand.reset()
        self.range.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(epochs: int) -> Trainer:
    return Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip


def fitted(count: int, batch_size: int, forward: bool) -> dict[str, float]:
    ours, loader = trainer(2), DataLoader(data(count), batch_size=batch_size)
    ours.fit(Classifier(forward), loader, loader)
    return {name: float(value) for name, value in ours.callback_metrics.items() if not name.endswith("_step")}


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize(("count", "batch_size"), [(5, 1), (5, 2), (7, 4), (8, 2), (2, 2), (1, 1)])
def test_t52_the_value_is_that_of_one_process(pool: Any, count: int, batch_size: int, forward: bool) -> None:
    [alone] = pool.run(fitted, count, batch_size, forward, world_size=1, group=False)
    for world_size in (2, 3):
        for rank in pool.run(fitted, count, batch_size, forward, world_size=world_size, group=False):
            assert rank == pytest.approx(alone, abs=1e-6)
    assert {"train_accuracy", "val_median", "val_f1", "val_range_min", "val_by_hand"} <= set(alone)


class Kept(Classifier):
    """Looks at a metric again and again that was computed before: torchmetrics has kept its value."""

    def __init__(self, forward: bool) -> None:
        super().__init__(forward)
        self.early = MeanMetric()

    def on_train_start(self) -> None:
        self.early.update(torch.tensor(float(self.global_rank)))
        self.early.compute()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("early", self.early.compute())


def looked_at() -> float:
    ours, loader = trainer(1), DataLoader(data(5), batch_size=1)
    ours.fit(Kept(False), loader, loader)
    return float(ours.callback_metrics["early"])


def test_t52_a_repeated_batch_leaves_other_metrics_alone(pool: Any) -> None:
    """Had it made one rank forget a computed value, that rank would wait for the others to compute it with it."""
    assert pool.run(looked_at, group=False, timeout=30.0) == [0.5, 0.5]


# ---- metrics that are no submodules ----------------------------------------------------------------------------------

nobodys = SumMetric()
"""No attribute of anything: it is found because it is logged."""


class Holding(Callback):
    def __init__(self) -> None:
        self.total = SumMetric()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total.update(torch.ones(()))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("of a callback", self.total.compute())
        self.total.reset()


class Elsewhere(LightningModule):
    """Keeps its metrics where torch does not see them; each is the number of batches of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.layer.kept = [SumMetric()]  # type: ignore[assignment]
        self.by_name = {"a": {"b": SumMetric()}, "collection": MetricCollection([SumMetric()])}
        self.pair = (SumMetric(), self)
        self.__dict__["hidden"] = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metrics = [self.layer.kept[0], self.by_name["a"]["b"], self.pair[0], self.hidden, nobodys]  # type: ignore[index]
        for number, metric in enumerate(metrics):
            metric.update(torch.ones(()))
            self.log(f"metric {number}", metric, on_step=False, on_epoch=True)
        self.by_name["collection"].update(torch.ones(()))
        return self.layer(batch[0]).sum()

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.by_name["collection"].compute())
        self.by_name["collection"].reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def held_elsewhere(count: int) -> dict[str, float]:
    ours = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, limit_val_batches=0, callbacks=Holding(),
    )  # fmt: skip
    ours.fit(Elsewhere(), DataLoader(data(count), batch_size=1))
    return {name: float(value) for name, value in ours.callback_metrics.items()}


@pytest.mark.parametrize("count", [5, 6])
def test_a_repeated_batch_reaches_no_metric_wherever_it_is_kept(pool: Any, count: int) -> None:
    """Five batches on two ranks: one of them repeats its second."""
    [alone] = pool.run(held_elsewhere, count, world_size=1, group=False)
    assert set(alone.values()) == {count}
    for rank in pool.run(held_elsewhere, count, group=False):
        assert rank == alone


# ---- ranks that differ -----------------------------------------------------------------------------------------------


class Shares(IterableDataset[Any]):
    """As many samples as are this rank's, each a number of its own."""

    def __init__(self, shares: list[int]) -> None:
        self.shares = shares

    def __iter__(self) -> Any:
        rank = int(os.environ["RANK"])
        return iter([torch.tensor(float(10 * rank + number)) for number in range(self.shares[rank])])


class Summed(LightningModule):
    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.total, self.median, self.own = SumMetric(), Median(), SumMetric(sync_on_compute=False)
        self.alone = alone

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total(batch)
        self.median(batch)
        self.log("total", self.total)
        self.log("median", self.median)
        if self.global_rank == 0:
            self.own(batch)
            self.log("own", self.total if self.alone else self.own)


def summed(shares: list[int], alone: bool = False) -> Any:
    try:
        [metrics] = trainer(1).validate(Summed(alone), DataLoader(Shares(shares), batch_size=1), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return metrics


def test_t52_loaders_of_other_lengths(pool: Any) -> None:
    for metrics in pool.run(summed, [3, 2], group=False):
        assert (metrics["total"], metrics["median"]) == (0 + 1 + 2 + 10 + 11, 2.0)


def test_t8_a_metric_that_one_rank_alone_logs_is_an_error_on_all(pool: Any) -> None:
    """Unless it is one that exchanges nothing."""
    first, second = pool.run(summed, [2, 2], group=False, timeout=30.0)
    assert first["own"] == 1.0
    assert "own" not in second
    for message in pool.run(summed, [2, 2], True, group=False, timeout=30.0):
        assert "rank 0 has 'own'" in message
