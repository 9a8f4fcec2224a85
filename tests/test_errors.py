"""The tree of errors, and the tail of a message about an unknown name."""

from __future__ import annotations

import pytest

from drivetrain.errors import (
    CheckpointError,
    ConfigurationError,
    DrivetrainError,
    LoggingError,
    NotSupportedError,
    did_you_mean,
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
