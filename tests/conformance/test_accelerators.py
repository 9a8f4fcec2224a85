"""Our own accelerators, over the registry, through the suite that vendors run."""

from __future__ import annotations

import pytest

from drivetrain.accelerators import AcceleratorRegistry
from drivetrain.testing.conformance import AcceleratorConformance

for entry in AcceleratorRegistry.entries():
    name = f"Test{entry.name.upper()}"
    globals()[name] = type(name, (AcceleratorConformance,), {"accelerator": entry.cls, "__module__": __name__})


def test_every_registered_accelerator_is_here() -> None:
    assert {"TestCPU", "TestCUDA", "TestMPS", "TestTPU", "TestXLA"} <= set(globals())
    with pytest.raises(pytest.skip.Exception, match="CUDAAccelerator is not available here"):
        globals()["TestCUDA"]().skip_unless_available() if not AcceleratorRegistry.entry(
            "cuda"
        ).cls.is_available() else pytest.skip("CUDAAccelerator is not available here: it is")
