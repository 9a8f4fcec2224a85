"""What replicas log about their parts of a batch becomes what one module would have logged."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import LoggingError
from drivetrain.logbook.entry import LogRule, Options
from drivetrain.logbook.logbook import Logbook
from drivetrain.logbook.parts import PartBook, logging_into, merge
from drivetrain.module.module import LightningModule

CPU = torch.device("cpu")


def options(**changes: Any) -> Options:
    defaults: dict[str, Any] = {
        "prog_bar": False, "logger": None, "on_step": True, "on_epoch": True, "reduce_fx": "mean",
        "enable_graph": False, "add_dataloader_idx": True,
    }  # fmt: skip
    return Options(**{**defaults, **changes})


def logged(*values: list[tuple[Any, Any]], batch: int = 4, **changes: Any) -> dict[str, float]:
    """What the book has, where each replica has logged such values with such batch sizes; the first one has 3 of 4."""
    book = Logbook()
    book.start_run()
    scope = book.scope_for("train", "hook", LogRule(True, False))
    book.begin_batch(torch.zeros(batch), scope, copies=True)
    parts = [PartBook(book, samples) for samples in (3, 1)]
    for part, own in zip(parts, values, strict=True):
        for value, batch_size in own:
            part.open_entry("x", value, options(**changes), batch_size).push(value, batch_size)
    merge(parts, CPU)
    book.end_epoch()
    return {row.name: row.value for row in book.read([*book.step_values("train"), *book.epoch_values("train")])}


@pytest.mark.parametrize(("kind", "reads"), [(torch.tensor, "tensors"), (float, "numbers")])
@pytest.mark.parametrize(("reduction", "expected"), [("mean", 3.0), ("sum", 8.0), ("min", 2.0), ("max", 6.0)])
def test_each_reduction(kind: Any, reads: str, reduction: str, expected: float) -> None:
    found = logged([(kind(2.0), None)], [(kind(6.0), None)], reduce_fx=reduction)
    assert found == {"x_step": expected, "x_epoch": expected}


def test_integers_are_not_truncated() -> None:
    assert logged([(torch.tensor(1), None)], [(torch.tensor(2), None)])["x_epoch"] == 1.25


def test_batch_sizes_that_were_passed_are_the_weights() -> None:
    assert logged([(torch.tensor(1.0), 10)], [(torch.tensor(4.0), 20)])["x_epoch"] == 3.0


def test_what_only_one_replica_logs_counts_for_its_samples() -> None:
    twice = logged([(1.0, None), (2.0, None)], [(5.0, None)])
    assert twice["x_epoch"] == pytest.approx((2.0 * 4 + 2.0 * 3) / 7)  # the first values of both, then 2.0 alone
    assert logged([], [(7.0, None)]) == {"x_step": 7.0, "x_epoch": 7.0}


def test_a_value_with_a_graph_keeps_it() -> None:
    value = torch.tensor(1.0, requires_grad=True)
    assert logged([(value, None)], [(value, None)], on_step=False, enable_graph=True)["x"] == 1.0


def test_no_samples_are_no_division_by_zero() -> None:
    for kind in (float, torch.tensor):
        assert logged([(kind(2.0), 0)], [(kind(2.0), 0)], on_epoch=False) == {"x": 2.0}


def test_a_value_that_is_not_one_number_is_refused_where_it_is_logged() -> None:
    book = Logbook()
    book.start_run()
    book.begin_batch(torch.zeros(4), book.scope_for("train", "hook", LogRule(True, False)), copies=True)
    entry = PartBook(book, 4).open_entry("x", 0.0, options())
    with pytest.raises(LoggingError, match=r"got a tensor of shape \(2,\)"):
        entry.push(torch.zeros(2), None)


class Metric(nn.Module):
    def compute(self) -> torch.Tensor:
        return torch.tensor(5.0)

    def reset(self) -> None: ...


def test_one_metric_object_is_logged_and_several_are_refused() -> None:
    metric = Metric()
    assert logged([(metric, None)], [(metric, None)], on_step=False) == {"x": 5.0}
    with pytest.raises(LoggingError, match="a different Metric on each device.* in training_step_end"):
        logged([(Metric(), None)], [(Metric(), None)], on_step=False)
    with pytest.raises(LoggingError, match="metric object with compute"):
        logged([(nn.Linear(1, 1), None)], [])


class TestLoggingInto:
    def books(self, module: nn.Module) -> list[Any]:
        return [each.__dict__["_book"] for each in module.modules() if "_book" in each.__dict__]

    def nested(self, *books: Any) -> nn.Module:
        module = nn.Sequential(nn.Linear(1, 1), *(LightningModule() for _ in books))
        for each, book in zip(list(module)[1:], books, strict=True):
            each.__dict__["_book"] = book
        return module

    def test_modules_of_a_run_log_into_it_until_the_end(self) -> None:
        own, other = object(), PartBook(Logbook(), 1)
        module = self.nested(own, None)
        found: list[Any] = []
        with contextlib.suppress(ZeroDivisionError), logging_into(module, other):
            found += self.books(module)
            raise ZeroDivisionError
        assert found == [other, None]
        assert self.books(module) == [own, None]
