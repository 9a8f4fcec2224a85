"""Libraries that train with Lightning, through drivetrain.compat: the same numbers as on Lightning itself.

Run by ``make test-compat``, whose environment has Lightning, the libraries and drivetrain.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("DRIVETRAIN_COMPAT_PYTHON", "")
PROGRAMS = Path(__file__).parent / "programs"
STARTUP = Path(__file__).parent / "startup"
GLUONTS, FORECASTING = "gluonts_forecasts.py", "pytorch_forecasting_models.py"

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="DRIVETRAIN_COMPAT_PYTHON names no Python: run make test-compat"),
    pytest.mark.timeout(600),
]

COUNTERPARTS = {
    "has a validation_step but there is no validation loader": "You defined a `validation_step` but have no",
    "The checkpoint holds the state of callbacks that this Trainer does not have": "callbacks used to create the",
    "They are trained like that": "module(s) in eval mode at the start of training",
    "configure_optimizers returned no optimizer": "configure_optimizers` returned `None`",
    "The tensors of this batch differ in their first dimension": "the `batch_size` from an ambiguous collection",
    "no logger has seen it, because log_every_n_steps=": "is smaller than the logging interval",
}
"""What we warn of in our own words, and how the original warns of the same."""

OURS = (
    "What belongs to the last batch of an epoch was left out",  # gluonts: in the original too, which says nothing
    "was asked for its end",  # scvi-tools: its loader fails there, where the original does not ask
    "This fit never validates: check_val_every_n_epoch=",  # scvi-tools asks for no validation so
    "batch norm layers are frozen",  # finetuning-scheduler lets their statistics follow the data, unless it is told
    "loggers get one curve of both",  # mlcolvar and PINA log some names in training and in validation
    "Trainer has no attribute 'data_module'",  # PINA sets its own
    "configure_models is never called by the Trainer",  # torchgeo calls it itself
)
"""What we warn of and the original does not, with the reason."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a program on Lightning or, by ``python -m drivetrain.compat``, on drivetrain; each run once."""

    @cache
    def run(program: str, *arguments: str, compat: tuple[str, ...] | None = None) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        launcher = [] if compat is None else ["-m", "drivetrain.compat", *compat]
        done = subprocess.run(
            [PYTHON, *launcher, PROGRAMS / program, folder, *arguments],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",  # these models are too small for more
                "PYTHONPATH": os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH")))),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert found["trainer"].startswith("lightning." if compat is None else "drivetrain.")
        return found

    return run


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where the two differ: numbers in the first six digits, everything else at all."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}/{index}")
    elif isinstance(one, float) and isinstance(other, float):
        if other != pytest.approx(one, rel=5e-7, abs=1e-9):
            yield f"{where}: {one} there, {other} here"
    elif one != other:
        yield f"{where}: {one} there, {other} here"


def not_there(ours: list[str], theirs: list[str]) -> list[str]:
    """Our warnings that the original has not, in whichever words."""
    known = [here for here, there in COUNTERPARTS.items() if any(there in message for message in theirs)]
    known += OURS
    return [
        message
        for message in ours
        if without_folders(message) not in map(without_folders, theirs) and not any(part in message for part in known)
    ]


def without_folders(message: str) -> str:
    """Without the folders of the run, which the two have of their own."""
    return re.sub(r"/\S+/", "", message)


PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
LIBRARIES = {
    "gluonts": (GLUONTS, "feed_forward/weights"),
    "pytorch-forecasting": (FORECASTING, "transformer/forecast"),
    "darts": ("darts_forecasts.py", "convolutions/forecast"),
    "neuralforecast": ("neuralforecast_sales.py", "recurrent/weights/0"),
    "scvi-tools": ("scvi_cells.py", "autoencoder/elbo"),
    "chemprop": ("chemprop_solubility.py", "bonds/predictions"),
    "pytorch-tabular": ("tabular_incomes.py", "embeddings/predicted"),
    "deeptab": ("deeptab_prices.py", "residual/predicted"),
    "finetuning-scheduler": ("finetuning_digits.py", "explicit/resumed/weights"),
    "mlcolvar": ("mlcolvar_states.py", "variational/metrics/valid_loss"),
    "pina-mathlab": ("pina_equation.py", "adaptive/weights"),
    "torchgeo": ("torchgeo_fields.py", "segmentation/weights/0"),
    "anomalib": ("anomalib_plates.py", "flow/weights"),
    "nequip": ("nequip_forces.py", "averaged/weights/best"),
    "torch-geometric": ("geometric_graphs.py", "nodes/weights"),
    "litgpt": ("litgpt_words.py", "adapters/merged"),
    "neuralprophet": ("prophet_visitors.py", "lags/weights"),
}
"""For each library its program, and the number of it that the page shows."""


def rows() -> dict[str, list[str]]:
    """The cells of the page's table, by library."""
    section = PAGE.read_text(encoding="utf-8").split("## Libraries that were tried")[1]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return {cells[0]: cells for cells in table[2:]}


def at(numbers: Any, path: str) -> float:
    for name in path.split("/"):
        numbers = numbers[int(name)] if isinstance(numbers, list) else numbers[name]
    return float(numbers)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_comes_to_the_same_numbers(outcome: Any, library: str) -> None:
    program, path = LIBRARIES[library]
    here = outcome(program, "7", compat=("--numbers", "original"))
    there = outcome(program, "7")
    assert list(differences(there["numbers"], here["numbers"])) == []
    assert not_there(here["warnings"], there["warnings"]) == []
    *_, shown_there, shown_here = rows()[library]
    # Another processor may round otherwise; that the two agree is what the test above is for.
    assert float(shown_there) == pytest.approx(at(there["numbers"], path), rel=1e-3)
    assert float(shown_here) == pytest.approx(at(here["numbers"], path), rel=1e-3)


def test_the_page_lists_the_libraries_and_their_versions() -> None:
    pins = (Path(__file__).parent / "compat-constraints.txt").read_text(encoding="utf-8").lower()
    assert set(rows()) == set(LIBRARIES)
    for library, cells in rows().items():
        assert f"\n{library}=={cells[1]}\n" in pins


def test_another_seed_comes_to_other_numbers(outcome: Any) -> None:
    """So that the test above could fail."""
    there = outcome(GLUONTS, "7")["numbers"]["feed_forward"]
    here = outcome(GLUONTS, "8", "feed_forward", compat=())["numbers"]["feed_forward"]
    different = {line.split(":")[0] for line in differences(there, here)}
    assert different >= {"/weights", "/forecast", "/metrics/val_loss", "/errors/MASE"}


@pytest.mark.parametrize("name", ["feed_forward_in_uneven_windows", "deepar_with_summary"])
def test_t12_t18_where_we_compute_otherwise_a_switch_goes_back(outcome: Any, name: str) -> None:
    names = ("feed_forward_in_uneven_windows", "deepar_with_summary")
    there = outcome(GLUONTS, "7", *names)["numbers"][name]
    ours = outcome(GLUONTS, "7", *names, compat=())["numbers"][name]
    switched = outcome(GLUONTS, "7", *names, compat=("--numbers", "original"))["numbers"][name]
    assert any(line.startswith("/weights:") for line in differences(there, ours))
    assert list(differences(there, switched)) == []
