"""The Trainer's flags of the 1.3 generation, converted to present arguments, each with a warning that names the
replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.callback import Callback
from drivetrain.callbacks import (
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    ModelSummary,
)
from drivetrain.errors import ConfigurationError, did_you_mean, shown
from drivetrain.legacy.v1_3._callbacks import StochasticWeightAveraging
from drivetrain.legacy.v1_3.accelerators import Accelerator, CPUAccelerator, GPUAccelerator, TPUAccelerator
from drivetrain.legacy.v1_3.checks import GradientNorms, StopsOnNaN
from drivetrain.legacy.v1_3.precision_plugins import ApexMixedPrecisionPlugin, PrecisionPlugin, precision_plugin_of
from drivetrain.legacy.v1_3.training_type_plugin import TrainingTypePlugin
from drivetrain.legacy.v1_3.training_type_plugins import PLUGINS, training_type_plugin_of
from drivetrain.precision.precision import Precision
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
"""The flags of the Trainer of that time, with their defaults."""

_SAME = frozenset({
    "logger", "default_root_dir", "num_nodes", "overfit_batches", "check_val_every_n_epoch", "fast_dev_run",
    "max_epochs", "min_epochs", "min_steps", "max_time", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "val_check_interval", "log_every_n_steps", "sync_batchnorm",
    "num_sanity_val_steps", "profiler", "benchmark", "deterministic",
})  # fmt: skip
"""Flags that mean the same today."""

_NEW_SPELLING: dict[str, str] = {
    "gpus": 'accelerator="gpu", devices={value}',
    "tpu_cores": 'accelerator="tpu", devices={value}',
    "num_processes": 'accelerator="cpu", devices={value}',
    "auto_select_gpus": 'devices="auto"',
    "distributed_backend": "strategy={value}",
    "accelerator": "strategy={value}",
    "amp_backend": 'precision="16-mixed"',
    "amp_level": 'precision="16-mixed"',
    "checkpoint_callback": "enable_checkpointing={value}",
    "resume_from_checkpoint": "trainer.fit(model, ckpt_path={value})",
    "weights_summary": "callbacks=[ModelSummary(max_depth=-1)]",
    "weights_save_path": "callbacks=[ModelCheckpoint(dirpath={value})]",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "use_distributed_sampler={value}",
    "log_gpu_memory": "callbacks=[DeviceStatsMonitor()]",
    "track_grad_norm": "self.log in on_before_optimizer_step",
    "terminate_on_nan": "detect_anomaly=True, or callbacks=[EarlyStopping(..., check_finite=True)]",
    "truncated_bptt_steps": "self.truncated_bptt_steps = {value} in the LightningModule",
    "prepare_data_per_node": "self.prepare_data_per_node = {value} in the LightningModule",
    "auto_lr_find": "Tuner(trainer).lr_find(model), or callbacks=[LearningRateFinder()]",
    "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(model), or callbacks=[BatchSizeFinder()]",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(swa_lrs=...)]",
    "multiple_trainloader_mode": "CombinedLoader(loaders, mode={value})",
}
"""What a message says to write in place of a flag."""

_BAR = "callbacks=[RichProgressBar(refresh_rate={value})]"
_NEW_SPELLING |= {
    "progress_bar_refresh_rate": _BAR,
    "process_position": "callbacks=[TQDMProgressBar(process_position=...)]",
}
_NO_EFFECT = {"flush_logs_every_n_steps": "the loggers flush by themselves", "move_metrics_to_cpu": "they always are"}
_OFF: tuple[Any, ...] = (None, 0, "0", [], "")
_INSTEAD_OF_OFF = {
    "gpus": 'accelerator="cpu"', "progress_bar_refresh_rate": "enable_progress_bar=False",
    "weights_summary": "enable_model_summary=False",
}  # fmt: skip
_TUNER = ("auto_lr_find", "auto_scale_batch_size")


def _differs(value: Any, default: Any) -> bool:
    """Whether a flag was changed; as a number of batches, 1 differs from 1.0, which means all of them."""
    return bool(value != default) or (type(value) is int and type(default) is float)


def translated(
    given: Mapping[str, Any], hardware: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Convert the earlier flags in ``given`` to present arguments; other arguments are already present ones.

    Args:
        given: the arguments by name.
        hardware: returns the accelerator and the devices from all flags; ``None``: the function of the 1.3 generation.

    Raises:
        ConfigurationError: a flag has an invalid value.
    """
    changed = {name: value for name, value in given.items() if name not in FLAGS or _differs(value, FLAGS[name])}
    if "gpus" in changed:
        changed["gpus"] = _gpus(changed["gpus"])
    for name, why in _NO_EFFECT.items():
        if name in changed:
            value = shown(changed.pop(name))
            rank_zero_warn(
                f"Trainer({name}={value}) is deprecated and has no effect: {why}. Leave it out.", FutureWarning
            )
    for name, instead in _NEW_SPELLING.items():
        if name in changed and (name != "accelerator" or _is_backend(changed[name])):
            value = changed[name]
            text = f"{type(value).__name__}(...)" if isinstance(value, Callback) else shown(value)
            new = _INSTEAD_OF_OFF[name] if name in _INSTEAD_OF_OFF and value in _OFF else instead.format(value=text)
            new = f"callbacks=[{text}]" if isinstance(value, Callback) else new
            new = 'accelerator="cpu", strategy="ddp_spawn"' if value == "ddp_cpu" else new
            rank_zero_warn(f"Trainer({name}={text}) is deprecated. Write {new}.", FutureWarning)
    for name in _TUNER:
        changed.pop(name, None)  # trainer.tune reads them
    flags = {**FLAGS, **changed}
    settings = {name: changed[name] for name in changed if name in _SAME or name not in FLAGS}
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


def _callbacks(flags: Mapping[str, Any]) -> list[Any]:
    callbacks = flags["callbacks"] or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
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


def _is_backend(given: Any) -> bool:
    """Whether a value of ``accelerator=`` names a backend, now called a strategy."""
    return isinstance(given, str) and (given == "ddp_cpu" or given in PLUGINS or given in StrategyRegistry)


def _hardware(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accelerator, the devices and the remaining ``plugins``."""
    given = flags["distributed_backend"] or flags["accelerator"]
    plugins = flags["plugins"] or []
    plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    named = [each for each in plugins if isinstance(each, str) and _is_backend(each)]
    kinds = [each for each in plugins if isinstance(each, TrainingTypePlugin)] + named
    precisions = [each for each in plugins if isinstance(each, (PrecisionPlugin, Precision))]
    for kind, found in (("training-type", kinds), ("precision", precisions)):
        if len(found) > 1:
            raise ConfigurationError(f"Trainer(plugins=...) got {len(found)} {kind} plugins. Keep one.")
    rest = {"plugins": left} if (left := [each for each in plugins if each not in (*kinds, *precisions)]) else {}
    hardware, devices = _devices(flags, given)
    if isinstance(given, Accelerator):
        return {"accelerator": given, **devices, **rest}
    if given is not None and not _is_backend(given):
        known = ["cpu", "gpu", "tpu", "ddp_cpu", *PLUGINS]
        if given not in ("cpu", "gpu", "tpu", "auto"):
            raise ConfigurationError(
                f"Trainer(accelerator={shown(given)}) is unknown. {did_you_mean(str(given), known)}"
            )
        hardware = {"cpu": CPUAccelerator, "gpu": GPUAccelerator, "tpu": TPUAccelerator, "auto": Accelerator}[given]
    precision = precisions[0] if precisions else precision_of(flags)
    plugin = kinds[0] if kinds else _backend(given if _is_backend(given) else None, hardware, devices, flags)
    return {"accelerator": hardware(precision_plugin_of(precision), training_type_plugin_of(plugin)), **devices, **rest}


def _devices(flags: Mapping[str, Any], given: Any) -> tuple[type[Accelerator], dict[str, Any]]:
    if "devices" in flags:
        return Accelerator, {"devices": flags["devices"]}
    gpus, cores = flags["gpus"], flags["tpu_cores"]
    if gpus not in _OFF:
        return GPUAccelerator, {"devices": gpus}
    if cores:
        return TPUAccelerator, {"devices": cores}
    if isinstance(given, Accelerator) and flags["num_processes"] == 1:
        return Accelerator, {}
    return CPUAccelerator, {"devices": flags["num_processes"]}


def precision_of(flags: Mapping[str, Any]) -> Any:
    """Return the precision of the flags: a present one, or a plugin."""
    bits = flags["precision"]
    if str(bits) == "16" and flags["amp_backend"] == "apex":
        return ApexMixedPrecisionPlugin(flags["amp_level"])
    return {"16": "16-mixed", "32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}.get(str(bits), bits)


def _backend(given: Any, hardware: type[Accelerator], devices: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    """Return the name of the training-type plugin: the requested one, or the default for several devices."""
    if given == "ddp_cpu":
        return "ddp_spawn"
    if given is not None:
        return str(given)
    several = not is_one(devices.get("devices", 1))
    if hardware is TPUAccelerator:
        return "tpu_spawn" if several else "single_tpu"
    return "ddp_spawn" if several or flags["num_nodes"] > 1 else "single_device"


def is_one(devices: Any) -> bool:
    """Whether the present ``devices`` mean a single device, as far as this is known."""
    return (isinstance(devices, (list, tuple)) and len(devices) == 1) or devices in (1, "1", "auto")


def _gpus(given: Any) -> Any:
    """Return the present ``devices`` for ``gpus``, whose string form contained indices, even for a single number."""
    if not isinstance(given, str) or given.strip() in ("", "-1"):
        return -1 if given == "-1" else given
    return [int(index) for index in given.split(",") if index.strip()]


# ---- replacements for a program's text -------------------------------------------------------------------------------

SUPERSEDED = frozenset(_NEW_SPELLING)
"""Flags that have a new spelling."""

WITHOUT_EFFECT, OF_THE_TUNER = frozenset(_NO_EFFECT), frozenset(_TUNER)
"""Flags that do nothing, and those that this version does not support."""


def spelling_of(name: str, value: str, is_off: bool = False) -> str:
    """Return the replacement of a flag with this value, as text; "off" has its own replacement."""
    if is_off and name in _INSTEAD_OF_OFF:
        return _INSTEAD_OF_OFF[name]
    return _NEW_SPELLING[name].format(value=value)


def is_off(value: Any) -> bool:
    """Whether a flag's value turns it off."""
    return value in _OFF


def is_default(name: str, value: Any) -> bool:
    """Whether a flag has its default value and can be left out."""
    return name in FLAGS and not _differs(value, FLAGS[name])


def is_backend(value: Any) -> bool:
    """Whether a value of ``accelerator=`` names a present strategy."""
    return _is_backend(value)
