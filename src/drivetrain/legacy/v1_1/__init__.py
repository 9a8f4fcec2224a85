"""The API of the 1.1 generation: accelerators that run the complete job, on the present Trainer."""

from __future__ import annotations

from drivetrain.base.lazy import lazy

_NAMED = (
    "CPUAccelerator", "DDP2Accelerator", "DDPAccelerator", "DDPCPUHPCAccelerator", "DDPCPUSpawnAccelerator",
    "DDPHPCAccelerator", "DDPSpawnAccelerator", "DataParallelAccelerator", "GPUAccelerator", "HorovodAccelerator",
    "TPUAccelerator",
)  # fmt: skip
_PLUGINS = ("ApexPlugin", "DDPPlugin", "DDPShardedPlugin", "NativeAMPPlugin")

_FILES = {
    "Accelerator": "accelerators",
    **dict.fromkeys(_NAMED, "named"),
    **dict.fromkeys(_PLUGINS, "plugins"),
    "Callback": "module",
    "LightningDataModule": "module",
    "LightningModule": "module",
    "Trainer": "trainer",
}
__all__ = sorted(_FILES)
lazy(__name__, {name: f"{__name__}.{file}" for name, file in _FILES.items()})
