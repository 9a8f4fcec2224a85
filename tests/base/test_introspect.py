"""Questions about a user's class: what it overrides, what its methods take, what it nearly overrides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drivetrain import Callback
from drivetrain.base.introspect import (
    defined_by_user,
    is_own_class,
    missing_arguments,
    near_misses,
    overrides,
    positional_arity,
    taken,
    takes,
    takes_iterator,
    temporarily,
)
from drivetrain.callbacks import EarlyStopping


class Base:
    setting = 1

    def on_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_batch(self, batch: Any, batch_idx: int) -> None: ...

    def on_eval_batch(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def transfer(self, batch: Any, dataloader_idx: int) -> None: ...

    def clip(self, optimizer: Any, value: float | None = None) -> None: ...

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None: ...


class Mixin:
    def on_start(self) -> None: ...


class Child(Base):
    def on_start(self) -> None: ...


class Grandchild(Child): ...


class Mixed(Mixin, Base): ...


class Borrowed(Base):
    on_start = Base.on_start


# ---- whose class it is -----------------------------------------------------------------------------------------------


def test_a_class_of_drivetrains_and_one_of_the_users() -> None:
    assert is_own_class(Callback)
    assert not is_own_class(Base)
    assert not is_own_class(type("Own", (Callback,), {}))


def test_what_the_user_defines() -> None:
    own = type("Own", (EarlyStopping,), {"teardown": lambda self: None})("loss")
    further = type("Further", (type(own),), {})("loss")
    for callback in (own, further):
        assert defined_by_user(callback, "teardown")
        assert not defined_by_user(callback, "state_dict")  # which EarlyStopping overrides
        assert not defined_by_user(callback, "no_such_name")
    own.state_dict = dict
    assert defined_by_user(own, "state_dict")


# ---- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Child, Grandchild, Mixed])
def test_a_method_of_a_class_between_counts_as_overridden(cls: type[Base]) -> None:
    assert overrides(cls(), "on_start", Base)
    assert not overrides(cls(), "on_batch", Base)


@pytest.mark.parametrize("cls", [Base, Borrowed])
def test_the_bases_own_method_is_no_override_under_whatever_class(cls: type[Base]) -> None:
    assert not overrides(cls(), "on_start", Base)


def test_a_method_that_the_base_has_not_is_one_of_its_own() -> None:
    class Adds(Base):
        def on_end(self) -> None: ...

    assert overrides(Adds(), "on_end", Base)
    assert not overrides(Base(), "on_end", Base)


def test_a_method_that_was_replaced_on_the_instance_counts() -> None:
    obj = Base()
    obj.on_start = lambda: None  # type: ignore[method-assign]
    assert overrides(obj, "on_start", Base)
    assert not overrides(Base(), "on_start", Base)


def test_a_method_that_was_taken_away_does_not_count() -> None:
    class Without(Base):
        on_start = None  # type: ignore[assignment]

    assert not overrides(Without(), "on_start", Base)


def test_a_method_of_another_object_counts() -> None:
    obj = Base()
    obj.on_start = Child().on_start  # type: ignore[method-assign]
    assert overrides(obj, "on_start", Base)


# ---- arguments -------------------------------------------------------------------------------------------------------


def one(batch: Any) -> None: ...


def two(batch: Any, batch_idx: int) -> None: ...


def of_any_number(*args: Any) -> None: ...


def by_name_only(batch: Any, *, weight: float = 1.0, **rest: Any) -> None: ...


def of_position_only(batch: Any, batch_idx: int, /) -> None: ...


@pytest.mark.parametrize(
    ("fn", "arity"),
    [
        (lambda: None, 0),
        (one, 1),
        (two, 2),
        (of_position_only, 2),
        (by_name_only, 1),
        (functools.partial(two, 3), 1),
        (Base().on_batch, 2),
        (Base().on_eval_batch, 3),
    ],
)
def test_t51_how_many_arguments_a_step_takes(fn: Callable[..., Any], arity: int) -> None:
    assert positional_arity(fn) == arity


@pytest.mark.parametrize("fn", [of_any_number, Base().backward])
def test_t51_any_number_of_arguments_is_enough(fn: Callable[..., Any]) -> None:
    assert positional_arity(fn) > 100


def test_a_decorated_step_is_seen_through() -> None:
    @functools.wraps(two)
    def decorated(*args: Any, **kwargs: Any) -> None:
        two(*args, **kwargs)

    assert positional_arity(decorated) == 2
    assert positional_arity(torch.no_grad()(two)) == 2


def test_t37_a_step_that_takes_the_iterator_is_known_by_its_name() -> None:
    assert takes_iterator(lambda dataloader_iter: None)
    assert not takes_iterator(two)
    assert not takes_iterator(of_any_number)


@pytest.mark.parametrize(
    ("method", "contract"),
    [
        (lambda: None, Base.on_start),
        (lambda *args: None, Base.on_batch),
        (lambda x, i: None, Base.on_batch),
        (lambda x, i, more=None: None, Base.on_batch),
        (lambda x, i: None, Base.on_eval_batch),
        (lambda x, i, loader: None, Base.on_eval_batch),
        (lambda x, i, dataloader_idx=0: None, Base.on_eval_batch),
        (lambda optimizer, value: None, Base.clip),
        (lambda loss: None, Base.backward),
        (lambda loss, *args, **kwargs: None, Base.backward),
        (print, Base.on_batch),
        (dict.fromkeys, Base.on_batch),
    ],
)
def test_t51_a_hook_may_name_its_arguments_as_it_likes(method: Callable[..., Any], contract: Any) -> None:
    assert missing_arguments(method, contract) is None


@pytest.mark.parametrize(
    ("method", "contract", "wanted"),
    [
        (lambda stage: None, Base.on_start, "self"),
        (lambda: None, Base.on_batch, "self, batch, batch_idx"),
        (lambda x: None, Base.on_batch, "self, batch, batch_idx"),
        (lambda x, i, more: None, Base.on_batch, "self, batch, batch_idx"),
        (lambda x, i, *, more: None, Base.on_batch, "self, batch, batch_idx"),
        (lambda x: None, Base.on_eval_batch, "self, batch, batch_idx, dataloader_idx"),
        (lambda x: None, Base.transfer, "self, batch, dataloader_idx"),
        (lambda optimizer: None, Base.clip, "self, optimizer, value"),
        (lambda: None, Base.backward, "self, loss"),
    ],
)
def test_a_hook_that_cannot_be_called_is_told_how_to_be_written(
    method: Callable[..., Any], contract: Any, wanted: str
) -> None:
    assert missing_arguments(method, contract) == wanted


def test_what_does_not_say_its_arguments_is_not_accused() -> None:
    class Silent:
        __signature__ = "none that Python could read"

        def __call__(self) -> None: ...

    assert missing_arguments(Silent(), Base.on_batch) is None


# ---- near misses -----------------------------------------------------------------------------------------------------

HOOKS = ("on_start", "on_train_epoch_end", "on_batch", "training_step", "test_step")


def missed(cls: type, **options: Any) -> list[tuple[str, str]]:
    return list(near_misses(cls, Base, HOOKS, **options))


def named(*names: str, base: type = Base) -> type:
    return type("Named", (base,), {name: lambda self: None for name in names})


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_train_epoch_en", "on_train_epoch_end"),
        ("on_training_epoch_end", "on_train_epoch_end"),
        ("on_train_epochend", "on_train_epoch_end"),
        ("traning_step", "training_step"),
        ("on_starts", "on_start"),
    ],
)
def test_t53_a_misspelt_hook_is_found(method: str, hook: str) -> None:
    assert missed(named(method)) == [(method, hook)]


@pytest.mark.parametrize(
    "method",
    ["on_train_epoch_end", "_on_train_epoch_ends", "training_step_end", "best_step", "restart", "epoch_end", "forward"],
)
def test_t53_a_hook_itself_and_other_names_are_left_alone(method: str) -> None:
    assert missed(named(method)) == []


def test_near_misses_come_in_order_and_from_bases_and_mixins_too() -> None:
    class Helper:
        def on_batchs(self) -> None: ...

    class Named(named("on_starts"), Helper):  # type: ignore[misc]
        def training_steps(self) -> None: ...

    assert missed(Named) == [("on_batchs", "on_batch"), ("on_starts", "on_start"), ("training_steps", "training_step")]


def test_only_methods_are_looked_at() -> None:
    class Named(Base):
        on_starts = 3
        on_batchs = Base

        @property
        def training_steps(self) -> int:
            return 3

    assert missed(Named) == []


def test_how_near_is_near_may_be_said() -> None:
    assert missed(named("train_step")) == []
    assert missed(named("train_step"), alike=0.8) == [("train_step", "training_step")]


def test_a_wrapper_of_a_bound_method_that_is_bound_again_keeps_its_arguments() -> None:
    """As torch's register_fsdp_forward_method wraps a step."""

    class Steps:
        def training_step(self, batch: Any, batch_idx: int, *, extra: Any = None) -> Any:
            return batch, batch_idx

    steps = Steps()
    for _ in range(2):  # registered twice
        original = steps.training_step

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        steps.training_step = wrapped.__get__(steps)  # type: ignore[method-assign]
        assert positional_arity(steps.training_step) == 2
        assert takes(steps.training_step, 2)
        assert not takes(steps.training_step, 1)
        assert taken(steps.training_step, {"extra": 1, "other": 2}) == {"extra": 1}
        assert steps.training_step(1, 2) == (1, 2)
    assert missing_arguments(steps.training_step, Steps.training_step) is None


def test_entries_that_are_changed_temporarily() -> None:
    entries = {"old": 1, "kept": 2}
    with temporarily(entries, old=3, new=4):
        assert entries == {"old": 3, "kept": 2, "new": 4}
    assert entries == {"old": 1, "kept": 2}
    with pytest.raises(KeyError), temporarily(entries, old=3, new=4):
        del entries["new"], entries["missing"]
    assert entries == {"old": 1, "kept": 2}
