"""The API of the 1.3 generation: accelerators composed of two plugins, on the present Trainer."""

from __future__ import annotations

from drivetrain.base.lazy import lazy

_ACCELERATORS = ("Accelerator", "CPUAccelerator", "GPUAccelerator", "TPUAccelerator")
_PRECISION = (
    "ApexMixedPrecisionPlugin", "DoublePrecisionPlugin", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin",
    "PrecisionPlugin",
)  # fmt: skip
_TRAINING_TYPE = (
    "DDP2Plugin", "DDPPlugin", "DDPShardedPlugin", "DDPSpawnPlugin", "DDPSpawnShardedPlugin", "DataParallelPlugin",
    "HorovodPlugin", "ParallelPlugin", "SingleDevicePlugin", "SingleTPUPlugin", "TPUSpawnPlugin", "TrainingTypePlugin",
)  # fmt: skip

_FILES = {
    **dict.fromkeys(_ACCELERATORS, "accelerators"),
    **dict.fromkeys(_PRECISION, "precision_plugins"),
    **dict.fromkeys(_TRAINING_TYPE, "training_type_plugins"),
    "TrainingTypePlugin": "training_type_plugin",
    "TrainingTypePluginsRegistry": "training_type_plugins",
    "Callback": "module",
    "LightningModule": "module",
    "LightningDataModule": "datamodule",
    "Trainer": "trainer",
}
__all__ = sorted(_FILES)
lazy(__name__, {name: f"{__name__}.{file}" for name, file in _FILES.items()})
