"""float8's cells of the parity matrix: docs/parity.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import parity_matrix as parity
from tests import parity_packages as packages
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*shares a parameter:UserWarning")


@pytest.mark.parametrize(("name", "precision"), packages.cells("torchao"))
def test_a_cell_ends_where_the_reference_does(check_parity: Any, name: str, precision: str) -> None:
    check_parity(name, precision)


def test_a_run_that_converts_nothing_is_no_cell(tmp_path: Path) -> None:
    """The control: bf16-mixed ends closer to the reference than 8 bits do, and is seen for what it is."""
    row = packages._row(parity.ROWS["single_device"], "float8")
    with pytest.raises(AssertionError, match="bf16-mixed has not exchanged .*0.first"):
        parity.train(row, "bf16-mixed", tmp_path / "x.ckpt")
    assert any(type(each) is nn.Linear for each in packages.WideNet().blocks.modules())
