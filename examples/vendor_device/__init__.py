"""A device from outside torch, as its vendor would ship it. ``import vendor_device`` brings ``lab:0`` and ``lab:1``.

README.md walks through the files.
"""

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from vendor_device.build import BuildError, library

__all__ = ["BuildError", "LabAccelerator", "LabCCL"]

# The order matters: the device's kernels, its name, its module, and then what uses them.
torch.ops.load_library(library())  # type: ignore[no-untyped-call]
rename_privateuse1_backend("lab")

from vendor_device import lab  # noqa: E402  # asks the kernels above

torch._register_device_module("lab", lab)  # type: ignore[no-untyped-call]  # torch.lab
generate_methods_for_privateuse1_backend()  # tensor.lab(), tensor.is_lab, module.lab()

from vendor_device.accelerator import LabAccelerator  # noqa: E402  # the name "lab" must exist
from vendor_device.process_group import LabCCL  # noqa: E402
