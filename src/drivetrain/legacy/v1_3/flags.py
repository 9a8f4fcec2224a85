"""Converts the flags of Lightning 1.3's Trainer to arguments of drivetrain's Trainer, and names each flag's replacement
in a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback
from drivetrain.callbacks import DeviceStatsMonitor, GradientAccumulationScheduler, ModelSummary
from drivetrain.compat.missing import TODAY
from drivetrain.errors import ConfigurationError, shown, unknown_value
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.v1_3._callbacks import StochasticWeightAveraging
from drivetrain.legacy.v1_3.accelerators import Accelerator, CPUAccelerator, GPUAccelerator, TPUAccelerator
from drivetrain.legacy.v1_3.checks import GradientNorms, StopsOnNaN
from drivetrain.legacy.v1_3.precision_plugins import ApexMixedPrecisionPlugin, PrecisionPlugin, precision_plugin_of
from drivetrain.legacy.v1_3.training_type_plugin import TrainingTypePlugin
from drivetrain.legacy.v1_3.training_type_plugins import PLUGINS, training_type_plugin_of
from drivetrain.precision.precision import Precision
from drivetrain.settings import Settings
from drivetrain.strategies.strategy import StrategyRegistry

FLAGS: dict[str, Any] = {
    "logger": True, "checkpoint_callback": True, "callbacks": None, "default_root_dir": None,
    "gradient_clip_val": 0.0, "gradient_clip_algorithm": "norm", "process_position": 0, "num_nodes": 1,
    "num_processes": 1, "gpus": None, "auto_select_gpus": False, "tpu_cores": None, "log_gpu_memory": None,
    "progress_bar_refresh_rate": None, "overfit_batches": 0.0, "track_grad_norm": -1, "check_val_every_n_epoch": 1,
    "fast_dev_run": False, "accumulate_grad_batches": 1, "max_epochs": None, "min_epochs": None, "max_steps": None,
    "min_steps": None, "max_time": None, "limit_train_batches": 1.0, "limit_val_batches": 1.0,
    "limit_test_batches": 1.0, "limit_predict_batches": 1.0, "val_check_interval": 1.0,
    "flush_logs_every_n_steps": 100, "log_every_n_steps": 50, "accelerator": None, "sync_batchnorm": False,
    "precision": 32, "weights_summary": "top", "weights_save_path": None, "num_sanity_val_steps": 2,
    "truncated_bptt_steps": None, "resume_from_checkpoint": None, "profiler": None, "benchmark": False,
    "deterministic": False, "reload_dataloaders_every_epoch": False, "auto_lr_find": False, "replace_sampler_ddp": True,
    "terminate_on_nan": False, "auto_scale_batch_size": False, "prepare_data_per_node": True, "plugins": None,
    "amp_backend": "native", "amp_level": "O2", "distributed_backend": None, "move_metrics_to_cpu": False,
    "multiple_trainloader_mode": "max_size_cycle", "stochastic_weight_avg": False,
}  # fmt: skip
"""The flags of Lightning 1.3's Trainer, with their defaults."""

PRESENT = frozenset(field.name for field in dataclasses.fields(Settings))
"""The arguments of drivetrain's Trainer."""

_CONVERTED = frozenset({
    "accelerator", "accumulate_grad_batches", "callbacks", "gradient_clip_algorithm", "gradient_clip_val", "max_steps",
    "plugins", "precision",
})  # fmt: skip
"""Flags that share a name with an argument of drivetrain's Trainer, but differ in meaning, default or type."""

NEW_SPELLING = TODAY["flags"]
"""For each flag, what to write instead."""

NO_EFFECT = {"flush_logs_every_n_steps": "the loggers flush by themselves", "move_metrics_to_cpu": "they always are"}
_OFF: tuple[Any, ...] = (None, 0, "0", [], "")
_INSTEAD_OF_OFF = {
    "gpus": 'accelerator="cpu"', "progress_bar_refresh_rate": "enable_progress_bar=False",
    "weights_summary": "enable_model_summary=False",
}  # fmt: skip
TUNER = ("auto_lr_find", "auto_scale_batch_size")
"""Flags that ``trainer.tune`` reads."""


def translated(
    given: Mapping[str, Any], hardware: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Convert the flags of Lightning 1.3 in ``given`` to arguments of drivetrain's Trainer; other arguments are kept.

    Args:
        given: the arguments by name.
        hardware: a function that converts all flags to the arguments for accelerator and devices; ``None``: the
            function for Lightning 1.3.

    Raises:
        ConfigurationError: a flag has an invalid value.
    """
    changed = {name: value for name, value in given.items() if not is_default(name, value)}
    if "gpus" in changed:
        changed["gpus"] = _gpus(changed["gpus"])
    for name, why in NO_EFFECT.items():
        if name in changed:
            value = shown(changed.pop(name))
            rank_zero_warn(
                f"Trainer({name}={value}) is deprecated and has no effect: {why}. Leave it out.", FutureWarning
            )
    for name in NEW_SPELLING:
        if name in changed and (name != "accelerator" or is_backend(changed[name])):
            value = changed[name]
            text = f"{type(value).__name__}(...)" if isinstance(value, Callback) else shown(value)
            new = spelling_of(name, text, is_off(value))
            new = f"callbacks=[{text}]" if isinstance(value, Callback) else new
            new = 'accelerator="cpu", strategy="ddp_spawn"' if value == "ddp_cpu" else new
            warn_deprecated(f"Trainer({name}={text})", new)
    for name in TUNER:
        changed.pop(name, None)
    flags = {**FLAGS, **changed}
    settings = {name: changed[name] for name in changed if name in PRESENT - _CONVERTED or name not in FLAGS}
    settings |= {"callbacks": _callbacks(flags), **(hardware or _hardware)(flags)}
    if flags["gradient_clip_val"]:
        settings |= {name: flags[name] for name in ("gradient_clip_val", "gradient_clip_algorithm")}
    if not isinstance(flags["accumulate_grad_batches"], dict):
        settings["accumulate_grad_batches"] = flags["accumulate_grad_batches"]
    settings["max_steps"] = -1 if flags["max_steps"] is None else flags["max_steps"]
    settings["enable_checkpointing"] = flags["checkpoint_callback"] is not False
    settings["enable_progress_bar"] = flags["progress_bar_refresh_rate"] != 0
    settings["enable_model_summary"] = flags["weights_summary"] is not None
    settings["reload_dataloaders_every_n_epochs"] = int(flags["reload_dataloaders_every_epoch"])
    settings["use_distributed_sampler"] = flags["replace_sampler_ddp"]
    return {**settings, **{name: given[name] for name in given if name not in FLAGS}}


def as_list(given: Any) -> list[Any]:
    """Return a flag's value as a list; the value is one item, several items, or ``None``."""
    return list(given) if isinstance(given, (list, tuple)) else [given] if given else []


def _callbacks(flags: Mapping[str, Any]) -> list[Any]:
    callbacks = as_list(flags["callbacks"])
    if isinstance(flags["checkpoint_callback"], Callback):
        callbacks.append(flags["checkpoint_callback"])
    if isinstance(flags["accumulate_grad_batches"], dict):
        callbacks.append(GradientAccumulationScheduler(flags["accumulate_grad_batches"]))
    more: list[tuple[Any, Callable[[], Any]]] = [
        (flags["weights_summary"] == "full", lambda: ModelSummary(max_depth=-1)),
        (flags["log_gpu_memory"], DeviceStatsMonitor),
        (flags["track_grad_norm"] != -1, lambda: GradientNorms(flags["track_grad_norm"])),
        (flags["terminate_on_nan"], StopsOnNaN),
        (flags["stochastic_weight_avg"], StochasticWeightAveraging),
    ]
    return [*callbacks, *(make() for asked, make in more if asked)]


def is_backend(given: Any) -> bool:
    """Whether a value of ``accelerator=`` is the name of a strategy, as in Lightning 1.x."""
    return isinstance(given, str) and (given == "ddp_cpu" or given in PLUGINS or given in StrategyRegistry)


def _hardware(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return drivetrain's arguments for the accelerator and the devices, and the remaining ``plugins``."""
    given = flags["distributed_backend"] or flags["accelerator"]
    plugins = as_list(flags["plugins"])
    named = [each for each in plugins if is_backend(each)]
    kinds = [each for each in plugins if isinstance(each, TrainingTypePlugin)] + named
    precisions = [each for each in plugins if isinstance(each, (PrecisionPlugin, Precision))]
    for kind, found in (("training-type", kinds), ("precision", precisions)):
        if len(found) > 1:
            raise ConfigurationError(f"Trainer(plugins=...) got {len(found)} {kind} plugins. Keep one.")
    rest = {"plugins": left} if (left := [each for each in plugins if each not in (*kinds, *precisions)]) else {}
    one = ("auto", {}) if isinstance(given, Accelerator) else ("cpu", {"devices": 1})
    hardware, devices = devices_of(flags, ("devices", "gpus", "tpu_cores"), one)
    if isinstance(given, Accelerator):
        return {"accelerator": given, **devices, **rest}
    if given is not None and not is_backend(given):
        if given not in list(_ACCELERATORS):  # a list, because the value may be unhashable
            raise unknown_value("Trainer", "accelerator", given, ["cpu", "gpu", "tpu", "ddp_cpu", *PLUGINS])
        hardware = given
    precision = precisions[0] if precisions else precision_of(flags)
    plugin = kinds[0] if kinds else _backend(given if is_backend(given) else None, hardware, devices, flags)
    accelerator = _ACCELERATORS[hardware](precision_plugin_of(precision), training_type_plugin_of(plugin))
    return {"accelerator": accelerator, **devices, **rest}


_ACCELERATORS = {"cpu": CPUAccelerator, "gpu": GPUAccelerator, "tpu": TPUAccelerator, "auto": Accelerator}
_HARDWARE = {"devices": "auto", "gpus": "gpu", "tpu_cores": "tpu"}


def devices_of(
    flags: Mapping[str, Any], order: Sequence[str], one: tuple[str, dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Return the name of drivetrain's accelerator, and the argument ``devices`` if the flags choose devices.

    Args:
        flags: all flags.
        order: the names of the flags for devices. The first flag that is set decides. If no flag is set,
            ``num_processes`` decides.
        one: the result for ``num_processes=1``, the default.
    """
    for name in order:
        if not is_off(flags.get(name)):
            return _HARDWARE[name], {"devices": flags[name]}
    processes = flags["num_processes"]
    return one if processes == 1 else ("cpu", {"devices": processes})


def precision_of(flags: Mapping[str, Any]) -> Any:
    """Return the precision that the flags choose: the name of a precision of drivetrain, or a plugin."""
    bits = flags["precision"]
    if str(bits) == "16" and flags["amp_backend"] == "apex":
        return ApexMixedPrecisionPlugin(flags["amp_level"])
    return {"16": "16-mixed", "32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}.get(str(bits), bits)


def _backend(given: Any, hardware: str, devices: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    """Return the name of the requested training-type plugin. Without a request, return the default for the number of
    devices.
    """
    if given == "ddp_cpu":
        return "ddp_spawn"
    if given is not None:
        return str(given)
    several = not is_one(devices.get("devices", 1))
    if hardware == "tpu":
        return "tpu_spawn" if several else "single_tpu"
    return "ddp_spawn" if several or flags["num_nodes"] > 1 else "single_device"


def is_one(devices: Any) -> bool:
    """Whether the argument ``devices`` means a single device; "auto" counts as a single device."""
    return (isinstance(devices, (list, tuple)) and len(devices) == 1) or devices in (1, "1", "auto")


def _gpus(given: Any) -> Any:
    """Return drivetrain's argument ``devices`` for the flag ``gpus``. A string such as "3" or "0,3" lists indices of
    GPUs.
    """
    if not isinstance(given, str) or given.strip() in ("", "-1"):
        return -1 if given == "-1" else given
    return [int(index) for index in given.split(",") if index.strip()]


# ---- replacements for a program's text -------------------------------------------------------------------------------


def spelling_of(name: str, value: str, is_off: bool = False) -> str:
    """Return the text that replaces the flag ``name`` with this value. ``is_off``: the value turns the flag off, which
    changes the replacement of some flags.
    """
    if is_off and name in _INSTEAD_OF_OFF:
        return _INSTEAD_OF_OFF[name]
    return NEW_SPELLING[name].format(value=value)


def is_off(value: Any) -> bool:
    """Whether ``value`` turns a flag off."""
    return value in _OFF


def is_default(name: str, value: Any) -> bool:
    """Whether a flag has its default value, and can therefore be left out.

    For a flag with the default 1.0 (all batches), the integer 1 (one batch) is not the default.
    """
    if name not in FLAGS or (type(value) is int and type(FLAGS[name]) is float):
        return False
    return bool(value == FLAGS[name])
