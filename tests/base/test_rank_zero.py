"""The rank before any cluster is known (trap T30), and what is said once per job."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info, rank_zero_only, rank_zero_warn

VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        *(({name: "3"}, 3) for name in VARIABLES),
        ({"RANK": "5", "LOCAL_RANK": "1", "SLURM_PROCID": "9"}, 5),
        ({"LOCAL_RANK": "1", "JSM_NAMESPACE_RANK": "9"}, 1),
        ({"RANK": "", "LOCAL_RANK": "2"}, 2),
        ({"RANK": "none"}, 0),
        ({"RANK": "-1"}, 0),
    ],
)
def test_t30_rank_from_environ(environ: dict[str, str], rank: int) -> None:
    assert rank_from_environ(environ) == rank


@pytest.mark.parametrize(("rank", "result"), [(None, 3), ("0", 3), ("1", None)])
def test_rank_zero_only(rank: str | None, result: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    @rank_zero_only
    def add(a: int, b: int) -> int:
        """Add."""
        calls.append((a, b))
        return a + b

    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert add(1, b=2) == result
    assert calls == ([] if result is None else [(1, 2)])
    assert (add.__name__, add.__doc__) == ("add", "Add.")


@contextlib.contextmanager
def no_handlers() -> Iterator[logging.Logger]:
    """A program that has not set up logging: without the handlers that pytest adds to each test."""
    log, root = logging.getLogger("drivetrain"), logging.getLogger()
    before = log.handlers, log.level, root.handlers
    log.handlers, root.handlers = [], []
    log.setLevel(logging.NOTSET)
    try:
        yield log
    finally:
        logging.disable(logging.NOTSET)
        log.disabled = False
        log.handlers, level, root.handlers = before
        log.setLevel(level)


def test_without_a_set_up_info_is_a_line_on_stderr(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with no_handlers() as log:
        rank_zero_info("from rank 0")
        monkeypatch.setenv("RANK", "1")
        rank_zero_info("from rank 1")
        assert log.handlers == []
    assert tuple(capsys.readouterr()) == ("", "from rank 0\n")


@pytest.mark.parametrize(
    "silence",
    [
        lambda log: log.setLevel(logging.WARNING),
        lambda log: logging.disable(logging.INFO),
        lambda log: setattr(log, "disabled", True),
        lambda log: log.addHandler(logging.NullHandler()),
        lambda log: logging.getLogger().addHandler(logging.NullHandler()),
    ],
)
def test_the_standard_module_silences_it(capsys: Any, silence: Any) -> None:
    with no_handlers() as log:
        silence(log)
        rank_zero_info("not seen")
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_standard_module_redirects_it(capsys: Any) -> None:
    stream = io.StringIO()
    with no_handlers() as log:
        log.addHandler(logging.StreamHandler(stream))
        log.setLevel(logging.INFO)
        rank_zero_info("to the stream")
    assert stream.getvalue() == "to the stream\n"
    assert tuple(capsys.readouterr()) == ("", "")


def test_info_goes_to_the_logger_on_rank_zero_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")
    rank_zero_info("from rank 0")
    monkeypatch.setenv("RANK", "1")
    rank_zero_info("from rank 1")
    assert [(record.name, record.message) for record in caplog.records] == [("drivetrain", "from rank 0")]


def deprecated() -> None:
    rank_zero_warn("use the other one", DeprecationWarning)


def test_a_warning_points_at_the_callers_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deprecated()  # this very line is the one to blame
        monkeypatch.setenv("RANK", "1")
        deprecated()
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert str(warning.message) == "use the other one"
    assert warning.filename == __file__
    with open(__file__) as source:
        assert "this very line" in source.read().splitlines()[warning.lineno - 1]
