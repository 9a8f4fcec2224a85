# The public names, for type checkers and for base/lazy.py.

from drivetrain.accelerators.accelerator import Accelerator as Accelerator
from drivetrain.accelerators.accelerator import AcceleratorRegistry as AcceleratorRegistry
from drivetrain.accelerators.cpu import CPUAccelerator as CPUAccelerator
from drivetrain.accelerators.cuda import CUDAAccelerator as CUDAAccelerator
from drivetrain.accelerators.cuda import find_usable_cuda_devices as find_usable_cuda_devices
from drivetrain.accelerators.mps import MPSAccelerator as MPSAccelerator
from drivetrain.accelerators.torch_device import TorchDeviceAccelerator as TorchDeviceAccelerator
from drivetrain.accelerators.xla import XLAAccelerator as XLAAccelerator
