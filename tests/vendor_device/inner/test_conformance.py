"""The suite that drivetrain offers to vendors, on this one's device: the class is all there is to write."""

from __future__ import annotations

from vendor_device import LabAccelerator

from drivetrain.testing.conformance import AcceleratorConformance


class TestLab(AcceleratorConformance):
    accelerator = LabAccelerator
