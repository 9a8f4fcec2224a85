"""The parity matrix of docs/parity.md: each strategy in each precision ends where one process in 64 bits does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import parity_matrix as parity
from tests import parity_packages as packages

from drivetrain.errors import ConfigurationError
from drivetrain.precision import PrecisionRegistry
from drivetrain.strategies import StrategyRegistry

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"

pytestmark = pytest.mark.filterwarnings("ignore:.*shares a parameter:UserWarning")


@pytest.fixture(scope="module")
def sources(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Path]]:
    """The checkpoints that a cell resumes from, written by other strategies on other numbers of processes."""
    folder = tmp_path_factory.mktemp("written")

    def written(name: str, precision: str) -> dict[str, Path]:
        single = folder / f"{precision}-{name == 'single_device'}.ckpt"
        if not single.exists():
            parity.write_file(name, precision, single)
        sharded = folder / precision
        if not sharded.exists():
            pool.run(parity.write_sharded, precision, sharded, world_size=parity.SHARDED.processes, group=False)
        assert single.is_file()
        assert sharded.is_dir()
        return {"from a file": single, "from a folder": sharded}

    return written


@pytest.mark.parametrize(("name", "precision"), parity.cells("test") + (parity.cells("test-faults") if LONG else []))
def test_a_cell_ends_where_the_reference_does(
    pool: Any, tmp_path: Path, sources: Any, name: str, precision: str
) -> None:
    """Weights, momenta and metrics: trained from the start, and resumed from a file and from a folder."""
    arguments, processes = (name, precision, tmp_path, sources(name, precision)), parity.ROWS[name].processes
    if processes == 1:
        ranks = [parity.run_cell(*arguments)]
    else:
        ranks = pool.run(parity.run_cell, *arguments, world_size=processes, group=False)
    parity.check_cell(precision, tmp_path, ranks)


def refusal(name: str, precision: str, path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parity.train(parity.ROWS[name], precision, path)
    return str(caught.value)


REFUSED = [cell for cell in parity.cells("refused") if parity.ROWS[cell[0]].target != "test-extras"]


@pytest.mark.parametrize(("name", "precision"), REFUSED)
def test_a_refused_cell_is_an_error_that_says_what_to_write(
    pool: Any, tmp_path: Path, name: str, precision: str
) -> None:
    for message in pool.run(refusal, name, precision, tmp_path / "x", group=False):
        assert 'Write precision="bf16-mixed"' in message


@pytest.mark.parametrize(("name", "precision"), packages.cells("transformer_engine", "refused"))
def test_a_cell_of_transformer_engine_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, precision: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigurationError, match=packages.PRECISIONS[precision].refuses[name]):
        packages.train(name, precision, tmp_path / "x")


FAULTS: dict[str, dict[str, Any]] = {
    "gradients are not clipped": {"clip": 1e9},
    "losses are not weighted": {"weighted": False},
    "tied weights come apart": {"tied": False},
    "a frozen parameter trains": {"frozen": False},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_matrix_would_see_a_fault(fault: str) -> None:
    """The control: a loop with this fault ends further from the reference than any precision may."""
    found = {**parity.by_hand(), "weights": parity.by_hand(**FAULTS[fault])["weights"]}
    assert parity.distances(found)["weights"] > max(parity.TOLERANCES.values())


@pytest.mark.parametrize("kind", [packages.WideNet, packages.AdaptedNet])
def test_the_matrix_of_packages_would_see_a_fault(kind: type[parity.ParityNet]) -> None:
    """The control: these faults, and half a run, are far from the reference. What is frozen is compared by itself."""
    limit = max(packaged.tolerance for packaged in packages.PRECISIONS.values())
    faults = [dict(FAULTS[name]) for name in FAULTS if name != "a frozen parameter trains"]
    for fault in (*faults, {"epochs": 1}):
        found = {**parity.by_hand(kind), "weights": parity.by_hand(kind, **fault)["weights"]}
        assert parity.distances(found, kind)["weights"] > 2 * limit


def test_the_matrix_of_packages_would_see_a_frozen_parameter_that_trains() -> None:
    frozen, reference = "blocks.0.first.bias", parity.by_hand(packages.WideNet)
    start = {**reference["weights"], frozen: packages.frozen("float8")[frozen]}
    packages.check_run("trained", "float8", {**reference, "weights": start}, 1e-9)
    trained = parity.by_hand(packages.WideNet, frozen=False)["weights"][frozen].float()
    with pytest.raises(AssertionError, match=f"{frozen} has changed"):
        packages.check_run("trained", "float8", {**reference, "weights": {**start, frozen: trained}}, 1)


def test_the_reference_clips_and_ends_within_no_tolerance_of_its_start() -> None:
    reference = parity.by_hand()
    assert max(parity.distances(reference).values()) == 0
    assert all(norm > parity.CLIP for norm in reference["norms"])
    assert parity.distances({**reference, "weights": reference["start"]})["weights"] == 1
    assert torch.equal(reference["weights"]["front.again.weight"], reference["weights"]["front.before.weight"])


def test_the_page_shows_the_matrix_and_its_tolerances() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert parity.table() in text, f"docs/parity.md should contain:\n{parity.table()}"
    for precision, tolerance in parity.TOLERANCES.items():
        assert f"| `{precision}` | {tolerance:.0e} |" in text
    assert packages.table() in text, f"docs/parity.md should contain:\n{packages.table()}"


ELSEWHERE = {
    "ddp_find_unused_parameters_false": "ddp, whose default it is",
    "deepspeed": "deepspeed_stage_2, under its short name",
    "deepspeed_stage_3_offload_nvme": "needs a folder on NVMe and torch's asynchronous I/O",
}
STARTED = ("ddp_spawn", "ddp_fork", "ddp_forkserver", "ddp_notebook", "ddp_ray")  # ddp, whose processes start otherwise


def test_every_name_is_in_the_matrix_or_stands_for_one_that_is() -> None:
    rows = {name.partition(", ")[0] for name in parity.ROWS}
    names = {name for name in StrategyRegistry.available() if not name.startswith((*STARTED, "xla", "single_xla"))}
    assert names - rows == ELSEWHERE.keys()
    assert rows <= names
    precisions = {name for name in PrecisionRegistry.available() if name not in ("16", "32", "64", "bf16")}
    assert precisions == parity.TOLERANCES.keys() | {
        name for name in packages.PRECISIONS if not name.startswith("bitsandbytes")
    }
