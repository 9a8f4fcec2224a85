"""What self.log keeps: exact reductions, no aliasing, and one read for many values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from drivetrain import parity
from drivetrain.errors import LoggingError
from drivetrain.logbook.entry import LogRule, Options
from drivetrain.logbook.logbook import Logbook

STEP, EPOCH = LogRule(True, False), LogRule(False, True)


def options(**changes: Any) -> Options:
    defaults: dict[str, Any] = {
        "prog_bar": False, "logger": None, "on_step": None, "on_epoch": None, "reduce_fx": "mean",
        "enable_graph": False, "add_dataloader_idx": True,
    }  # fmt: skip
    return Options(**{**defaults, **changes})


def book_in(rule: LogRule, hook: str = "hook", sum_dtype: torch.dtype = torch.float64) -> Logbook:
    book = Logbook(sum_dtype)
    book.start_run()
    book.scope = book.scope_for("train", hook, rule)
    return book


def epoch_value(values: list[tuple[Any, float]], **changes: Any) -> float:
    book = book_in(EPOCH)
    entry = book.open_entry("x", 0, options(**changes))
    for value, weight in values:
        entry.push(value, weight)
    [row] = book.read(book.epoch_values("train"))
    return float(row.value)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", (1 * 4 + 2 * 4 + 6 * 2) / 10), ("sum", 9), ("min", 1), ("max", 6), (torch.mean, 2.4), (max, 6)],
)
def test_t9_reductions(reduce_fx: Any, expected: float, as_tensor: bool) -> None:
    values = [(torch.tensor(float(v)) if as_tensor else v, w) for v, w in ((1, 4), (2, 4), (6, 2))]
    assert epoch_value(values, reduce_fx=reduce_fx) == expected


def test_numbers_and_tensors_mix() -> None:
    assert epoch_value([(1, 1), (torch.tensor(2.0), 1), (6.0, 2)]) == 15 / 4
    assert epoch_value([(1, 1), (torch.tensor(2.0), 1)], reduce_fx="max") == 2


def test_t6_integers_are_not_truncated() -> None:
    assert epoch_value([(torch.tensor(1), 1), (torch.tensor(2), 1)]) == 1.5
    large = 2**40
    assert epoch_value([(torch.tensor(large), 1), (torch.tensor(large + 1), 1)]) == large + 0.5


def test_long_sums_are_exact() -> None:
    """In 32 bits, a million and 10,000 times a hundredth add up to something else."""
    values = [(torch.tensor(1e6), 1.0), *[(torch.tensor(0.01), 1.0)] * 10_000]
    assert epoch_value(values, reduce_fx="sum") == pytest.approx(1e6 + 100, abs=1e-5)


def test_a_constant_logs_as_itself_whatever_the_batch_sizes() -> None:
    assert epoch_value([(torch.tensor(1.0), w) for w in (1, 2, 7, 3, 3, 1)]) == 1.0


def test_a_mean_over_no_weight_is_not_a_number() -> None:
    assert math.isnan(epoch_value([(torch.tensor(1.0), 0), (2.0, 0)]))


def test_a_value_that_the_caller_changes_later_was_logged_as_it_was() -> None:
    book = book_in(LogRule(True, True))
    entry = book.open_entry("x", 0, options())
    running = torch.zeros(())
    for _ in range(3):
        running += 1
        entry.push(running, 1)
    running += 100
    rows = {row.name: row.value for row in book.read(book.step_values("train") + book.epoch_values("train"))}
    assert rows == {"x_step": 3.0, "x_epoch": 2.0}


def test_the_graph_is_kept_only_on_request() -> None:
    for enable_graph in (False, True):
        book = book_in(STEP)
        entry = book.open_entry("x", 0, options(enable_graph=enable_graph))
        entry.push(torch.ones((), requires_grad=True) * 2, None)
        assert book.refresh()["x"].requires_grad == enable_graph


@pytest.mark.parametrize(("sum_dtype", "transfers"), [(torch.float64, 1), (torch.float32, 2)])
def test_all_values_are_read_in_one_transfer(sum_dtype: torch.dtype, transfers: int) -> None:
    """On a device without 64-bit floats, each dtype needs one; a plain number needs none."""
    book = book_in(STEP, sum_dtype=sum_dtype)
    for name in "abc":
        book.open_entry(name, 0, options()).push(torch.ones(()), None)
    book.open_entry("n", 0, options()).push(torch.tensor(3), None)
    book.open_entry("f", 0, options()).push(0.5, None)
    values = {row.name: row.value for row in book.read(book.step_values("train"))}
    assert values == {"a": 1, "b": 1, "c": 1, "n": 3, "f": 0.5}
    assert book.flushes == transfers


def test_a_step_value_is_published_once() -> None:
    book = book_in(STEP)
    book.open_entry("x", 0, options()).push(1.0, None)
    assert len(book.step_values("train")) == 1
    assert book.step_values("train") == []


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1), (True, 1), (0.5, 0.5), (torch.tensor([[2.0]]), 2), (torch.tensor(True), 1)],
)
def test_t10_what_may_be_logged(value: Any, number: float) -> None:
    assert epoch_value([(value, 1)]) == number


def test_t10_numpy_scalars_may_be_logged() -> None:
    numpy = pytest.importorskip("numpy")
    assert epoch_value([(numpy.float64(1.5), 1), (numpy.array([2.5]), 1)]) == 2.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"shape \(2,\).*\.mean\(\)"),
        ("three", "got a str: 'three'"),
        (None, "got None"),
        (torch.nn.Linear(1, 1), r"got a Linear.*compute\(\) and reset\(\)"),
    ],
)
def test_t10_other_values_are_errors(value: Any, message: str) -> None:
    book = book_in(STEP)
    with pytest.raises(LoggingError, match=message):
        book.open_entry("x", value, options()).push(value, None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("x/dataloader_idx_0", {}, "without '/dataloader_idx_'"),
        ("x", {"reduce_fx": "median"}, "no known reduction"),
        ("x", {"on_step": False, "on_epoch": False}, "would log nothing"),
        ("x", {"on_step": True}, "runs once per epoch"),
    ],
)
def test_wrong_options_are_errors(name: str, changes: Any, message: str) -> None:
    book = book_in(LogRule(False, True, step_allowed=False))
    with pytest.raises(LoggingError, match=message):
        book.open_entry(name, 1.0, options(**changes))


def test_t10_the_same_name_with_other_options_is_an_error_that_names_them() -> None:
    book = book_in(STEP)
    book.open_entry("x", 1.0, options())
    with pytest.raises(LoggingError, match=r"twice in hook with different options: prog_bar=True \(was False\)"):
        book.open_entry("x", 1.0, options(prog_bar=True))


def test_logging_outside_of_a_hook_is_an_error() -> None:
    book = Logbook()
    with pytest.raises(LoggingError, match="outside of any hook"):
        book.open_entry("x", 1.0, options())
    book.scope = book.scope_for("train", "on_fit_start", None)
    with pytest.raises(LoggingError, match="called in on_fit_start"):
        book.open_entry("x", 1.0, options())


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(5), torch.ones(5)], 5),
        ({"name": "text", "x": {"y": torch.ones(4, 1)}}, 4),
        (torch.tensor(2.0), 1),
    ],
)
def test_t9_the_batch_size_is_the_first_dimension_of_the_first_tensor(batch: Any, size: int) -> None:
    book = Logbook()
    for _ in range(2):  # the second batch takes the short way
        book.batch, book.size = batch, None
        assert book.find_batch_size() == size
    assert book.size == size


@dataclass
class Images:
    pixels: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.pixels)


@pytest.mark.parametrize(
    ("batch", "size", "iterated"), [(Images(torch.ones(4, 3, 8)), 4, 3), ({"x": torch.ones(5)}, 5, 5)]
)
def test_t9_the_size_of_a_batch_that_gives_its_samples_is_that_of_the_batch(
    batch: Any, size: int, iterated: int
) -> None:
    """With the switch, that of its first sample."""
    for switch, expected in ((False, size), (True, iterated)):
        before = parity.use(parity.Parity(iterated_batches=switch))
        try:
            book = Logbook()
            book.batch = batch
            assert book.find_batch_size() == expected
        finally:
            parity.use(before)


def test_t9_conflicting_sizes_warn_once_and_no_tensor_is_an_error() -> None:
    book = Logbook()
    book.batch = (torch.ones(3), torch.ones(4))
    with pytest.warns(UserWarning, match="differ in their first dimension; 3"):
        assert book.find_batch_size() == 3
    assert book.find_batch_size() == 3  # a second warning would be an error here
    book.batch = "text"
    with pytest.raises(LoggingError, match="holds no tensor"):
        book.find_batch_size()


def test_the_bar_gets_a_new_dictionary_so_that_a_thread_may_hold_the_old_one() -> None:
    book = book_in(STEP)
    before = book.bar_metrics
    book.open_entry("x", 0, options(prog_bar=True)).push(torch.ones(()), None)
    book.read(book.step_values("train"))
    assert before == {}
    assert book.bar_metrics == {"x": 1.0}
    assert type(book.bar_metrics["x"]) is float


def test_folding_bounds_what_is_held() -> None:
    import gc

    book = book_in(EPOCH)
    entry = book.open_entry("x", 0, options())
    gc.collect()
    before = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    for _ in range(1000):
        entry.push(torch.ones(()), 1)
    after = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    assert after - before <= 65


def test_a_borrowed_value_is_still_one_number() -> None:
    book = book_in(STEP)
    entry = book.open_entry("x", 0, options())
    weight = torch.ones((), requires_grad=True)
    book.copies = False
    entry.push(weight * 2, None)  # a fresh result: later ones are borrowed
    entry.push((weight * 3).reshape(1), None)
    assert book.refresh()["x"].shape == ()
    assert not book.refresh()["x"].requires_grad
    entry.push(torch.ones(2) * weight, None)
    with pytest.raises(LoggingError, match=r"shape \(2,\)"):
        book.refresh()


def test_a_parameter_is_copied_also_in_a_step_that_is_not_flushed() -> None:
    book = book_in(STEP)
    parameter = torch.ones((), requires_grad=True)
    entry = book.open_entry("x", 0, options())
    book.copies = False
    for _ in range(2):
        entry.push(parameter, None)
        with torch.no_grad():
            parameter += 1
    assert float(book.refresh()["x"]) == 2.0


class Group:
    """Ranks of which each has its own number."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.size, self.rank, self.ranks = numbers, len(numbers), 0, range(len(numbers))

    def reduce_keyed(self, names: Any, sums: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(sums, self.numbers[0]), most  # the others add nothing to the value of rank 0


def test_t5_all_ranks_of_a_model_decide_by_rank_zeros_value() -> None:
    book, device = Logbook(), torch.device("cpu")
    book.join(device, Group(4.0), Group(3.0, 4.0))
    assert book.of_rank_zero("x", 4.0) == 3.0
    assert book.reduce is None  # nothing is shared by ranks that see the same samples
    book.join(device, Group(4.0), Group(4.0))
    assert book.of_rank_zero("x", 5.0) == 5.0
