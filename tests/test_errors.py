"""The tree of errors, and the tail of a message about an unknown name."""

from __future__ import annotations

import inspect
import pickle
from fractions import Fraction
from typing import Any

import pytest
from torch import nn

from drivetrain.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNameError,
    ConfigurationError,
    DrivetrainError,
    HookError,
    IncompleteCheckpointError,
    LoggingError,
    LogNameError,
    MissingAttributeError,
    MissingPackageError,
    NotLoggedError,
    NotSupportedError,
    RunError,
    SignatureError,
    UnknownArgumentError,
    UnloggableError,
    WrongTypeError,
    arguments_checked,
    check_choice,
    check_count,
    check_installed,
    check_known,
    closest,
    described,
    did_you_mean,
    first_of,
    is_count,
    is_number,
    number_of,
    shown,
    wrong_value,
)


@pytest.mark.parametrize("error", [ConfigurationError, NotSupportedError, LoggingError, CheckpointError])
def test_one_root_catches_everything(error: type[Exception]) -> None:
    with pytest.raises(DrivetrainError, match="what happened"):
        raise error("what happened")


def test_a_wrong_argument_is_a_value_error_too() -> None:
    assert issubclass(NotSupportedError, ConfigurationError)
    assert issubclass(ConfigurationError, ValueError)
    assert not issubclass(LoggingError, ValueError)
    assert not issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize(
    ("word", "known", "text"),
    [
        ("cpuu", ["gpu", "cpu"], "Did you mean 'cpu'? Known: cpu, gpu."),
        ("CPU", ["gpu", "cpu"], "Did you mean 'cpu'? Known: cpu, gpu."),
        ("quantum", ["gpu", "cpu"], "Known: cpu, gpu."),
        ("quantum", [], "Known: none."),
    ],
)
def test_did_you_mean(word: str, known: list[str], text: str) -> None:
    assert did_you_mean(word, iter(known)) == text


def test_the_closest_name_is_found_whatever_the_case() -> None:
    assert closest("tensorbordlogger", ["CSVLogger", "TensorBoardLogger"]) == "TensorBoardLogger"
    assert closest("quantum", ["CSVLogger"]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "an int: 3"),
        ("x", "a str: 'x'"),
        (None, "None"),
        (nn.Linear, "the class Linear itself"),
        (nn.Linear(1, 1, bias=False), "a Linear: Linear(in_features=1, out_features=1, bias=False)"),
    ],
)
def test_a_value_of_the_wrong_kind_is_described(value: Any, text: str) -> None:
    assert described(value) == text


def test_a_value_is_shown_without_its_address_and_module() -> None:
    class Local:
        pass

    assert shown(object()) == "<object object>"
    assert shown([Fraction(1), Local(), Fraction]) == "[Fraction(1, 1), <Local object>, <class 'fractions.Fraction'>]"
    assert described(test_one_root_catches_everything) == "a function: <function test_one_root_catches_everything>"
    assert shown("at 0 x, and 0x12") == "'at 0 x, and 0x12'"


@pytest.mark.parametrize(("most", "text"), [(0, " and 3 more"), (2, "a, b and 1 more"), (3, "a, b, c"), (4, "a, b, c")])
def test_the_first_of_many_names_are_listed(most: int, text: str) -> None:
    assert first_of(iter("abc"), most) == text


def test_a_long_value_is_shown_in_one_line_and_cut() -> None:
    text = shown(nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))))
    assert "\n" not in text
    assert len(text) == 100
    assert text.startswith("Sequential( (0): Linear(")
    assert text.endswith("...")
    assert shown("x" * 98) == repr("x" * 98)


def test_a_wrong_value_is_named_with_what_it_should_be_and_the_cure() -> None:
    error = wrong_value("Timer", "interval", "batch", "a stage", 'interval="step"')
    assert str(error) == "Timer(interval='batch'): interval is a stage. Write interval=\"step\"."


@pytest.mark.parametrize(("value", "kind", "meant"), [
    (0, ConfigurationError, 7), ("0", WrongTypeError, 7), (3.0, WrongTypeError, 3), (True, ConfigurationError, 7),
    (None, WrongTypeError, 7),
])  # fmt: skip
def test_a_count_that_is_refused(value: Any, kind: type[Exception], meant: int) -> None:
    check_count("Thing", "size", 1, lowest=1)
    with pytest.raises(ConfigurationError) as caught:
        check_count("Thing", "size", value, lowest=1, otherwise=7)
    assert type(caught.value) is kind
    assert str(caught.value) == f"Thing(size={value!r}): size is an int of at least 1. Write size={meant}."


def test_a_value_that_is_none_of_the_choices() -> None:
    check_choice("Thing", "colour", None, ("red", "blue", None))
    with pytest.raises(ConfigurationError) as caught:
        check_choice("Thing", "colour", "rde", ("red", "blue", None))
    assert str(caught.value) == 'Thing(colour=\'rde\'): colour is "red", "blue" or None. Write one of these.'


@pytest.mark.parametrize(("value", "count", "number"), [
    (0, True, True), (3, True, True), (-1, False, True), (True, False, False), (1.0, False, True), ("1", False, False),
    (float("nan"), False, False), (float("inf"), False, True), (None, False, False),
])  # fmt: skip
def test_counts_and_numbers(value: Any, count: bool, number: bool) -> None:
    assert is_count(value) is count
    assert is_number(value) is number


def test_counts_may_begin_elsewhere() -> None:
    assert is_count(-1, lowest=-1)
    assert not is_count(0, lowest=1)


def test_a_missing_package_is_an_error_that_names_it() -> None:
    check_installed("This", "torch")
    with pytest.raises(MissingPackageError, match="This needs the package no_such_package, .* Run `pip install it`."):
        check_installed("This", "no_such_package", install="it")
    with pytest.raises(MissingPackageError, match="Run `pip install no_such_package`, or use that."):
        check_installed("This", "no_such_package", "that")


def test_a_name_that_is_not_known_is_an_error_with_a_similar_one() -> None:
    check_known("This", "one", "number", ("one", "two"))
    with pytest.raises(ConfigurationError, match="This\\('onn'\\): there is no such number. Did you mean 'one'?"):
        check_known("This", "onn", "number", ("one", "two"))


def test_an_argument_that_does_not_exist_gets_a_did_you_mean() -> None:
    class Thing:
        @arguments_checked
        def __init__(self, size: int, colour: str = "red") -> None:
            self.seen = size, colour

    assert Thing(1, colour="blue").seen == (1, "blue")
    assert list(inspect.signature(Thing).parameters) == ["size", "colour"]
    with pytest.raises(UnknownArgumentError, match=r"Thing has no argument color=.*Did you mean 'colour'\?"):
        Thing(1, color="blue")  # type: ignore[call-arg]
    with pytest.raises(WrongTypeError, match=r"Thing needs size=\. Write .*Thing\(size=\.\.\.\)"):
        Thing(colour="blue")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (HookError, (ConfigurationError, NotImplementedError)),
        (MissingAttributeError, (ConfigurationError, AttributeError)),
        (MissingPackageError, (ConfigurationError, ModuleNotFoundError)),
        (RunError, (ConfigurationError, RuntimeError)),
        (NotLoggedError, (RunError,)),
        (SignatureError, (ConfigurationError, TypeError, RuntimeError)),
        (WrongTypeError, (ConfigurationError, TypeError)),
        (LogNameError, (LoggingError, TypeError)),
        (UnloggableError, (LoggingError, ValueError)),
        (CheckpointNameError, (CheckpointError, ValueError)),
        (IncompleteCheckpointError, (CheckpointError, KeyError)),
        (CheckpointMismatchError, (CheckpointError, RuntimeError)),
    ],
)
def test_an_error_is_also_the_one_that_python_raises(
    error: type[Exception], kinds: tuple[type[Exception], ...]
) -> None:
    for kind in kinds:
        assert issubclass(error, kind)
    assert str(error("what happened")) == "what happened"
    assert str(pickle.loads(pickle.dumps(error("what happened")))) == "what happened"  # from another process


def test_a_value_of_another_type_is_a_type_error() -> None:
    for value, kind in (("3", WrongTypeError), (-1, ConfigurationError)):
        assert type(wrong_value("Trainer", "max_steps", value, "an int", "max_steps=3", (int,))) is kind


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [(1, "batch", "1 batch"), (0, "batch", "0 batches"), (2, "epoch", "2 epochs"), (2, "process", "2 processes")],
)
def test_a_number_of_things_has_a_plural(number: int, what: str, text: str) -> None:
    assert number_of(number, what) == text
