"""The cells of the parity matrix that one CUDA device can run, beside the 64-bit loop; skipped where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.parity_matrix import ROWS, TOLERANCES, Row, check_cell, run_row, write_file

from drivetrain.accelerators import CUDAAccelerator
from drivetrain.strategies import ModelParallelStrategy

pytestmark = pytest.mark.skipif(
    not CUDAAccelerator.is_available(), reason=f"no CUDA device: {CUDAAccelerator.why_unavailable()}"
)

NAMES = ("single_device", "ddp", "ddp_find_unused_parameters_true", "fsdp", "fsdp, parameters kept", "fsdp_cpu_offload")
ONE: dict[str, Any] = {"accelerator": "cuda", "devices": 1}


def _mesh() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)


CELLS = {
    **{name: dataclasses.replace(ROWS[name], processes=1, arguments=ONE) for name in NAMES},
    "model_parallel": Row(_mesh, arguments=ONE),
}


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", CELLS)
def test_a_run_on_the_device_ends_like_the_loop_in_64_bits(name: str, precision: str, tmp_path: Path) -> None:
    """From the start, and from the middle: the file was written on the CPU, by two devices."""
    source = write_file("single_device", precision, tmp_path / "written")
    check_cell(precision, tmp_path, [run_row(CELLS[name], precision, tmp_path, {"source": source})])
