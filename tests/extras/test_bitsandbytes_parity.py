"""The cells of bitsandbytes in the parity matrix: docs/parity.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import parity_matrix as parity
from tests import parity_packages as packages

from drivetrain.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*shares a parameter:UserWarning")


@pytest.mark.parametrize(("name", "precision"), packages.cells("bitsandbytes"))
def test_a_cell_ends_where_the_reference_does(check_parity: Any, name: str, precision: str) -> None:
    check_parity(name, precision)


def refusal(name: str, precision: str, path: Path) -> None:
    with pytest.raises(ConfigurationError, match=packages.PRECISIONS[precision].refuses[name]):
        packages.train(name, precision, path)


@pytest.mark.parametrize(("name", "precision"), packages.cells("bitsandbytes", "refused"))
def test_a_refused_cell_is_an_error_that_says_why(pool: Any, tmp_path: Path, name: str, precision: str) -> None:
    pool.run(refusal, name, precision, tmp_path / "x", group=False)


def test_the_matrix_would_see_a_packed_weight_that_changes() -> None:
    """The control."""
    reference = parity.by_hand(packages.AdaptedNet)
    found = {**reference, "weights": reference["weights"] | packages.frozen("bitsandbytes-nf4")}
    packages.check_run("trained", "bitsandbytes-nf4", found, 0)
    weight = found["weights"]["blocks.1.first.weight"].clone()
    weight[0] ^= 1
    found["weights"]["blocks.1.first.weight"] = weight
    with pytest.raises(AssertionError, match="trained: blocks.1.first.weight has changed"):
        packages.check_run("trained", "bitsandbytes-nf4", found, 1)
