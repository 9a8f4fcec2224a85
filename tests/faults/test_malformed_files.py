"""Whatever is wrong with a file, whoever reads it says which file it is and what is wrong there, or reads it."""

from __future__ import annotations

import importlib.util
import io
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import CheckpointError

_SPEC = importlib.util.spec_from_file_location("tests.faults.malformed", Path(__file__).with_name("malformed.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
malformed = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = malformed
_SPEC.loader.exec_module(malformed)

SHORT, LONG = 150, 2000


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    found: dict[str, bytes] = malformed.originals(tmp_path_factory.mktemp("valid"))
    return found


def sweep(folder: Path, cases: Iterator[Any], every: bool) -> tuple[list[str], Counter[str]]:
    """What nobody has explained, and how often each outcome came."""
    found, outcomes = [], Counter[str]()
    for index, case in enumerate(cases):
        for reader, error in malformed.read(case, folder, every):
            outcomes["succeeded" if error is None else type(error).__name__] += 1
            if malformed.unexplained(reader, error):
                where = traceback.extract_tb(error.__traceback__)[-1]
                found.append(
                    f"file {index} ({case.original}: {case.damage}) read by {reader}: {error!r:.300} "
                    f"[{where.filename}:{where.lineno}]"
                )
    return found, outcomes


@pytest.mark.timeout(3600)
def test_a_malformed_file_is_named_with_what_is_wrong_in_it(
    tmp_path: Path, valid: dict[str, bytes], long_form: bool, seed: int
) -> None:
    number = LONG if long_form else SHORT
    found, outcomes = sweep(tmp_path, malformed.cases(seed, number, valid), every=long_form)
    print(f"{number} files, {sum(outcomes.values())} readings: {dict(outcomes)}")
    assert found == []
    assert outcomes["CheckpointError"] > number / 2  # most files are wrong indeed


def test_every_reader_reads_what_is_valid(tmp_path: Path, valid: dict[str, bytes]) -> None:
    for name, content in valid.items():
        case = malformed.Case(name, "nothing", content)
        outcomes = dict(malformed.read(case, tmp_path, every=True))
        refused = {reader: error for reader, error in outcomes.items() if error is not None}
        expected = {"engine": {"Engine.load_raw", "module"}, "raw": {"Engine.load", "module"}}.get(name, set())
        assert set(refused) == expected, refused
        assert all(isinstance(error, CheckpointError) for error in refused.values())


@pytest.mark.parametrize(
    ("check", "place"),
    [
        ("drivetrain.strategies.state.check_optimizer_state", ("optimizer_states", 0, "state", 0, "exp_avg")),
        ("drivetrain.trainer.checkpoint.check_progress", ("loops", "drivetrain", "current_epoch")),
    ],
)
def test_the_sweep_finds_a_check_that_is_missing(
    tmp_path: Path, valid: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, check: str, place: tuple[Any, ...]
) -> None:  # the control of the sweep
    holder = tree = torch.load(io.BytesIO(valid["end"]), weights_only=True)
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = "x"
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    case = malformed.Case("end", f"replace by 'x' at {place}", buffer.getvalue())
    assert sweep(tmp_path, iter([case]), every=False)[0] == []
    monkeypatch.setattr(check, lambda *args: None)
    assert sweep(tmp_path, iter([case]), every=False)[0] != []
