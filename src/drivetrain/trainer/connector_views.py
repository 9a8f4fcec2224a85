"""``trainer._accelerator_connector``: what was decided about devices, under the names that third parties read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.plan import Plan


class AcceleratorView:
    """A plan under other names. Private in name only: PINA and scvi-tools read it.

    Attributes:
        accelerator: the accelerator.
        _accelerator_flag: its name.
        _devices_flag: how many processes on a CPU; the indices of other devices.
        _parallel_devices: the devices of this machine.
    """

    def __init__(self, plan: Plan) -> None:
        self.accelerator = plan.accelerator
        self._accelerator_flag = plan.accelerator.name
        self._parallel_devices = list(plan.devices)
        on_cpu = plan.devices[0].type == "cpu"
        self._devices_flag: Any = len(plan.devices) if on_cpu else [device.index or 0 for device in plan.devices]
