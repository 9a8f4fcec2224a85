"""Each file of ``inner/`` passes in a process where lab is torch's accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

FILES = sorted((Path(__file__).parent / "inner").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_in_a_process_of_its_own(vendor: Any, path: Path) -> None:
    vendor.expect_to_pass(path)


def test_a_failure_inside_is_a_failure_outside_with_its_reason(vendor: Any, tmp_path: Path) -> None:
    """The negative control, also for files without tests."""
    failing, empty = tmp_path / "test_failing.py", tmp_path / "test_empty.py"
    failing.write_text("import vendor_device, torch\ndef test_one():\n    assert torch.lab.device_count() == 3\n")
    empty.write_text("")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)test_failing.py ended with 1 .*assert 2 == 3"):
        vendor.expect_to_pass(failing)
    with pytest.raises(pytest.fail.Exception, match="test_empty.py ended with 5"):
        vendor.expect_to_pass(empty)


def test_this_process_stays_without_the_device(vendor: Any) -> None:
    assert not hasattr(torch, "lab")
    assert torch._C._get_privateuse1_backend_name() != "lab"
