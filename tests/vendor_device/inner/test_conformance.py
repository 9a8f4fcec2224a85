"""The suite that drivetrain offers to vendors, on this one's device: the class is all there is to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from vendor_device import LabAccelerator

from drivetrain.strategies.model_parallel import torch_version
from drivetrain.testing.conformance import AcceleratorConformance


class TestLab(AcceleratorConformance):
    accelerator = LabAccelerator

    @pytest.mark.skipif(
        torch_version() < (2, 13), reason="torch 2.9 cannot run fsdp::all_gather_copy_in on this device"
    )
    def test_a_sharded_model_trains(self, tmp_path: Path) -> None:
        super().test_a_sharded_model_trains(tmp_path)
