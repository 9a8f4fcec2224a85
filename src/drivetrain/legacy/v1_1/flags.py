"""Converts the flags of Lightning 1.1's Trainer to arguments of drivetrain's Trainer, including the accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError, unknown_value
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.v1_1 import named
from drivetrain.legacy.v1_1.accelerators import Accelerator
from drivetrain.legacy.v1_1.plugins import DDPPlugin, DDPShardedPlugin, NativeAMPPlugin
from drivetrain.legacy.v1_3 import flags as later
from drivetrain.legacy.v1_3.precision_plugins import precision_plugin_of

_LATER_ONLY = frozenset({
    "gradient_clip_algorithm", "limit_predict_batches", "max_time", "multiple_trainloader_mode",
    "stochastic_weight_avg",
})  # fmt: skip
_OWN: dict[str, Any] = {"automatic_optimization": None, "enable_pl_optimizer": True}
_EPOCHS: dict[str, Any] = {"max_epochs": 1000, "min_epochs": 1}
FLAGS: dict[str, Any] = {name: value for name, value in later.FLAGS.items() if name not in _LATER_ONLY} | _OWN | _EPOCHS
"""The flags of Lightning 1.1's Trainer with their defaults, in the order of the constructor."""

BACKENDS: dict[str, type[Accelerator]] = {
    "dp": named.DataParallelAccelerator, "ddp": named.DDPAccelerator, "ddp2": named.DDP2Accelerator,
    "ddp_cpu": named.DDPCPUSpawnAccelerator, "ddp_spawn": named.DDPSpawnAccelerator,
    "horovod": named.HorovodAccelerator,
}  # fmt: skip
"""The accelerator for each value of ``distributed_backend`` and ``accelerator``."""


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the flags of Lightning 1.1 in ``given`` to arguments of drivetrain's Trainer; other arguments are kept.

    Raises:
        ConfigurationError: a flag has an invalid value.
        NotSupportedError: drivetrain does not support a flag.
    """
    if (automatic := given.get("automatic_optimization")) is not None:
        warn_deprecated(
            f"Trainer(automatic_optimization={automatic})",
            f"self.automatic_optimization = {automatic} in the constructor of the LightningModule",
        )
    if not given.get("enable_pl_optimizer", True):
        rank_zero_warn(
            "Trainer(enable_pl_optimizer=False) is deprecated and has no effect: self.optimizers(use_pl_optimizer="
            "False) returns torch's own. Leave it out.",
            FutureWarning,
        )
    kept = {"max_epochs": _EPOCHS["max_epochs"], **{name: value for name, value in given.items() if name not in _OWN}}
    if isinstance(kept.get("profiler"), bool):
        if kept["profiler"]:
            warn_deprecated("Trainer(profiler=True)", 'profiler="simple"')
        kept["profiler"] = "simple" if kept["profiler"] else None
    return later.translated(kept, _hardware)


def _hardware(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return drivetrain's arguments for accelerator, devices and precision, and the remaining ``plugins``."""
    given = flags["accelerator"] or flags["distributed_backend"]
    plugins = [DDPShardedPlugin() if each == "ddp_sharded" else each for each in later.as_list(flags["plugins"])]
    wraps = [each for each in plugins if isinstance(each, DDPPlugin)]
    if len(wraps) > 1:
        raise ConfigurationError(f"Trainer(plugins=...) got {len(wraps)} plugins for DDP. Keep one.")
    # num_processes=1 is the default and sets no devices, because a cluster may set the number of processes
    hardware, devices = later.devices_of(flags, ("gpus", "tpu_cores", "devices"), ("cpu", {}))
    if given in ("cpu", "gpu", "tpu", "auto"):  # drivetrain accepts this value of the flag
        hardware, given = str(given), None
    if not isinstance(given, Accelerator):
        several = flags["num_nodes"] > 1 or not later.is_one(devices.get("devices", 1))
        given = _class_of(given, hardware, several or bool(wraps))()
        given.hardware = hardware
    elif given.hardware == "auto":
        given.hardware = hardware
    if wraps:
        given.ddp_plugin = wraps[0]
    if getattr(given, "nprocs", None) is not None and flags["num_processes"] == 1:
        devices = {}  # the accelerator itself sets the number of devices
    rest = [each for each in plugins if not isinstance(each, (DDPPlugin, NativeAMPPlugin))]
    precision = precision_plugin_of(later.precision_of(flags)).today.name
    return {"accelerator": given, "precision": precision, **devices, **({"plugins": rest} if rest else {})}


def _class_of(given: Any, hardware: str, several: bool) -> type[Accelerator]:
    """Return the class of the requested accelerator; without a request, the default for this hardware."""
    if given is None:
        if hardware == "tpu":
            return named.TPUAccelerator
        if not several:
            return named.GPUAccelerator if hardware == "gpu" else named.CPUAccelerator
        return named.DDPCPUSpawnAccelerator if hardware == "cpu" else named.DDPSpawnAccelerator
    if given not in BACKENDS:
        raise unknown_value("Trainer", "accelerator", given, BACKENDS)
    return BACKENDS[given]
