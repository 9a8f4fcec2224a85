from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain import Trainer
from drivetrain.base.rank_zero import tell_rank
from drivetrain.compat import rank_zero
from drivetrain.compat.rank_zero import (
    RANK_VARIABLES,
    LightningDeprecationWarning,
    WarningCache,
    _get_rank,
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
)


@rank_zero_only
def answer(value: int) -> int:
    """It says its value."""
    return value


def test_t30_the_rank_is_what_the_launcher_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (rank_zero_only.rank, _get_rank(), answer(3)) == (0, None, 3)
    monkeypatch.setenv("RANK", "2")
    assert (rank_zero_only.rank, _get_rank(), answer(3)) == (2, 2, None)
    assert rank_zero_only(answer.__wrapped__, default=5)(3) == 5  # type: ignore[attr-defined]
    monkeypatch.setenv("RANK", "0")
    assert (_get_rank(), answer(3)) == (0, 3)


def test_a_program_may_set_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "_rank", None)
    rank_zero_only.rank = 1
    assert answer(3) is None
    assert answer.__doc__ == "It says its value."


def test_methods_and_properties_may_be_decorated() -> None:
    class Owner:
        @rank_zero_only
        def method(self, more: int) -> int:
            return 1 + more

        @property
        @rank_zero_only
        def prop(self) -> int:
            return 2

    assert (Owner().method(1), Owner().prop) == (2, 2)


def test_lines_of_the_log_take_arguments(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="drivetrain"):
        rank_zero_info("a %s", 1)
        rank_zero_debug("b %s", 2, stacklevel=6)
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "a 1"), ("DEBUG", "b 2")]


@pytest.mark.parametrize("has_handler", [False, True])
def test_lines_are_seen_in_a_program_that_has_set_up_no_logging(
    has_handler: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if has_handler else [])
    rank_zero_info("trained for %s epochs, 100 %%", 3)
    assert capsys.readouterr().err == ("" if has_handler else "trained for 3 epochs, 100 %\n")


def test_deprecations_have_a_category_of_their_own() -> None:
    with pytest.warns(LightningDeprecationWarning, match="old"):
        rank_zero_deprecation("old", stacklevel=3)


def test_a_cache_says_each_thing_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = WarningCache()
    with pytest.warns(UserWarning, match="once"):
        cache.warn("once")
    with pytest.warns(LightningDeprecationWarning, match="old"):
        cache.deprecation("old")
    cache.warn("once")  # would be an error, as every warning here is
    cache.deprecation("old")
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        for _ in range(2):
            cache.info("said")
    assert caplog.messages == ["said"]
    assert cache == {"once", "old", "said"}


def test_a_rank_before_a_message() -> None:
    assert rank_prefixed_message("m", 1) == "[rank: 1] m"
    assert rank_prefixed_message("m", None) == "m"


def test_the_warning_is_drivetrains_own() -> None:
    from drivetrain.base.rank_zero import rank_zero_warn

    assert rank_zero.rank_zero_warn is rank_zero_warn


PROGRAM = """
import lightning
from lightning_utilities.core.rank_zero import rank_prefixed_message, rank_zero_info, rank_zero_only

@rank_zero_only
def answer():
    return "said"

rank_zero_info("needs the rank")
print(rank_zero_only.rank, answer(), rank_prefixed_message("text", rank_zero_only.rank))
"""


def test_the_shared_package_is_told_the_rank_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "drivetrain.compat", "program.py"]
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    for environ, said in ({}, "0 said [rank: 0] text"), ({"RANK": "2", "WORLD_SIZE": "3"}, "2 None [rank: 2] text"):
        done = subprocess.run(command, cwd=tmp_path, env={**kept, **environ}, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_a_trainer_tells_a_package_that_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = pytest.importorskip("lightning_utilities.core.rank_zero").rank_zero_only
    monkeypatch.setattr(shared, "rank", None, raising=False)
    Trainer(accelerator="cpu", logger=False)
    assert shared.rank == 0
    tell_rank(3)
    assert shared.rank == 3
    monkeypatch.setitem(sys.modules, "lightning_utilities.core.rank_zero", None)
    tell_rank(4)  # it is not installed
    assert shared.rank == 3
