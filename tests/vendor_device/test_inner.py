"""Each file of ``inner/`` passes in an interpreter where lab is torch's accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FILES = sorted((Path(__file__).parent / "inner").glob("test_*.py"))


@pytest.fixture(scope="module")
def running(vendor: Any) -> Iterator[dict[Path, Any]]:
    """All of them at once: most of each one's time goes into importing torch."""
    processes = {path: vendor.start_tests(path) for path in FILES}
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_in_an_interpreter_of_its_own(vendor: Any, running: dict[Path, Any], path: Path) -> None:
    vendor.expect_to_pass(path, running[path])


def test_a_failure_inside_is_a_failure_outside_with_its_reason(vendor: Any, tmp_path: Path) -> None:
    """The negative control, also for files without tests."""
    failing, empty = tmp_path / "test_failing.py", tmp_path / "test_empty.py"
    failing.write_text("import vendor_device, torch\ndef test_one():\n    assert torch.lab.device_count() == 3\n")
    empty.write_text("")
    processes = [vendor.start_tests(path) for path in (failing, empty)]

    with pytest.raises(pytest.fail.Exception, match=r"(?s)test_failing.py ended with 1 .*assert 2 == 3"):
        vendor.expect_to_pass(failing, processes[0])
    with pytest.raises(pytest.fail.Exception, match="test_empty.py ended with 5"):
        vendor.expect_to_pass(empty, processes[1])


def test_this_process_stays_without_the_device(vendor: Any) -> None:
    assert not hasattr(torch, "lab")
    assert torch._C._get_privateuse1_backend_name() != "lab"
