"""Tests of examples/vendor_device, on the device that it compiles.

Once the package is imported, ``torch.accelerator`` is lab for the rest of the process. So nothing here imports it: the
tests in ``inner/`` run in processes of their own, each file in one, and so do scripts. To run a file of ``inner/``
by hand, name it: ``python -m pytest tests/vendor_device/inner/test_device.py``, with ``PYTHONPATH=examples``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.packages import below

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 200  # for one interpreter

collect_ignore = ["inner"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if below(HERE, item):
            item.add_marker(
                pytest.mark.timeout(400)
            )  # the first of them compiles, which takes its time on a busy machine


class Vendor:
    """How to run something with the device.

    Args:
        programs: runs Python's programs.
    """

    def __init__(self, programs: Any) -> None:
        self._programs = programs

    def start(self, arguments: Sequence[Any], **environ: str) -> subprocess.Popen[str]:
        """A Python interpreter with the vendor's package on its path, whose output is one pipe."""
        return subprocess.Popen(
            [sys.executable, "-W", "error", *map(str, arguments)], env=self._environ(**environ), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _environ(self, **environ: str) -> dict[str, str]:
        paths = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        # Autograd's and Gloo's threads on few cores: more threads for each operator only stand in each other's way.
        changed = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **environ}
        return {**os.environ, **changed}

    def end_of(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Its exit code, negative for a signal, and what it wrote."""
        try:
            text, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
        return process.returncode, text

    def expect_to_pass(self, path: Path) -> None:
        """Run pytest on ``path`` in a process of its own; fail with what it says, if the tests do not all pass."""
        options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
        done = self._programs.run(
            "-W", "error", "-m", "pytest", *options, path, cwd=ROOT, env=self._environ(), merged=True, timeout=TIMEOUT_S
        )
        if done.returncode != 0:
            pytest.fail(f"{path.name} ended with {done.returncode} in its own process:\n{done.stdout}", pytrace=False)

    def load_build(self) -> ModuleType:
        """vendor_device/build.py, without the package around it, which would register the device here."""
        spec = importlib.util.spec_from_file_location("vendor_build", ROOT / "examples" / "vendor_device" / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.fixture(scope="session")
def vendor(programs: Any) -> Vendor:
    """Compiles the device, unless these sources were compiled before; where that cannot be, the tests are skipped."""
    vendor = Vendor(programs)
    build = vendor.load_build()
    if os.name != "posix":
        pytest.skip("the example device is written for Linux")
    try:
        build.library()
    except build.BuildError:
        if build.compiler() is not None:
            raise
        pytest.skip("the example device is C++, and there is no C++ compiler here: install g++, or set CXX")
    return vendor
