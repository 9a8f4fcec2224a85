"""Merge the user's configuration of DeepSpeed with the strategy's arguments and the precision. Raise an error if they
contradict each other.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.base.packages import deepspeed_accelerator, deepspeed_zero_config
from drivetrain.errors import ConfigurationError, closest, shown

_PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {}, "bf16-mixed": {}, "16-mixed": {}, "float8": {}, "bf16-true": {"bf16": {"enabled": True}},
    "16-true": {"fp16": {"enabled": True}},
}  # fmt: skip
"""The entries of DeepSpeed's configuration for each precision. A precision with float32 parameters needs no entries."""

_INSTEAD = {
    "gradient_accumulation_steps": "Write Trainer(accumulate_grad_batches=...).",
    "train_batch_size": "Set the batch size of the DataLoader.",
    "fp16": 'Write Trainer(precision="16-true"); config={"fp16": {...}} may set its other options.',
    "bf16": 'Write Trainer(precision="bf16-true"); config={"bf16": {...}} may set its other options.',
}


def given(
    config: str | Path | Mapping[str, Any] | None,
    stage: int | None,
    zero_optimization: Mapping[str, Any] | None,
    offloaded: Mapping[str, tuple[bool | Mapping[str, Any], str]],
    nvme_path: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return ``config`` with the strategy's other arguments merged into it. This function only checks ``options``;
    :func:`complete` adds them later.

    Raises:
        ConfigurationError: the file cannot be read, an entry sets a value that the Trainer decides, or two entries
            contradict each other.
    """
    found = read(config)
    section = {"stage": 2, **found.get("zero_optimization", {}), **(zero_optimization or {})}
    if stage is not None:
        section["stage"] = stage
    if section["stage"] not in (1, 2, 3):
        raise ConfigurationError(f"DeepSpeedStrategy(stage={shown(section['stage'])}): write one of stage=1, 2 and 3.")
    for name, (wanted, device) in offloaded.items():
        if wanted:
            place = {"device": device, **({"nvme_path": nvme_path} if device == "nvme" else {})}
            section[name] = {**place, **(wanted if isinstance(wanted, Mapping) else {})}
    if "offload_param" in section and section["stage"] != 3:
        raise ConfigurationError(
            f"DeepSpeedStrategy(offload_parameters=..., stage={section['stage']}): only stage 3 can offload "
            "parameters. Write stage=3, or offload_optimizer alone."
        )
    _check_given({**found, **options})
    return {**found, "zero_optimization": section}


def complete(config: Mapping[str, Any], options: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the configuration for DeepSpeed's engine: ``config``, ``options``, the entries for ``precision``, and
    drivetrain's defaults.

    Raises:
        ConfigurationError: DeepSpeed or the device does not support this precision, or an option is unknown.
    """
    if precision not in _PRECISIONS:
        raise ConfigurationError(
            f"DeepSpeedStrategy cannot train with precision={precision!r}: its engine trains float32 parameters, or "
            f"float32 copies of 16-bit parameters. Write one of {', '.join(map(repr, _PRECISIONS))}."
        )
    for section in _PRECISIONS[precision]:
        _check_type(section, precision)
    merged: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # no clipping; DeepSpeed's default is 1.0
        **copy.deepcopy(dict(config)),
        "gradient_accumulation_steps": 1,
    }
    fields = _zero_fields(options)
    for name, value in options.items():
        (merged["zero_optimization"] if name in fields else merged)[name] = value
    for name, own in _PRECISIONS[precision].items():
        merged[name] = {**merged.get(name, {}), **own}
    return merged


def _check_type(section: str, precision: str) -> None:
    """Check that DeepSpeed supports the dtype ``section`` ("fp16" or "bf16") on this device.

    Raises:
        ConfigurationError: DeepSpeed does not support the dtype.
    """
    device = deepspeed_accelerator.get_accelerator()
    if not getattr(device, f"is_{section}_supported")():
        raise ConfigurationError(
            f"DeepSpeedStrategy cannot train with precision={precision!r} here: DeepSpeed has no {section} for the "
            f'device {device.device_name()!r}. Write precision="{section.replace("fp", "")}-mixed".'
        )


def _zero_fields(options: Mapping[str, Any]) -> set[str]:
    """Check that DeepSpeed knows all ``options``. Return the field names of DeepSpeed's ``zero_optimization``."""
    from deepspeed.runtime import constants

    fields = set(deepspeed_zero_config.DeepSpeedZeroConfig.model_fields)
    known = {value for value in vars(constants).values() if isinstance(value, str) and value.isidentifier()}
    for name in options.keys() - fields - known:
        close = closest(name, fields | known)
        raise ConfigurationError(
            f"DeepSpeedStrategy({name}=...) is neither an argument nor an option of DeepSpeed"
            f"{'' if close is None else f'; did you mean {close!r}?'}. Pass other entries of its configuration as "
            f'config={{"{name}": ...}}.'
        )
    return fields


def read(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration as a dictionary. If ``config`` is a path, read the JSON file there."""
    if config is None or isinstance(config, Mapping):
        return dict(copy.deepcopy(config or {}))
    path = Path(config)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"DeepSpeedStrategy(config={str(path)!r}): the file cannot be read as JSON: {error}. Check the path."
        ) from error
    if not isinstance(given, dict):
        raise ConfigurationError(f"DeepSpeedStrategy(config={str(path)!r}): the file holds no JSON object.")
    return given


def _check_given(given: Mapping[str, Any]) -> None:
    """Check that no entry of DeepSpeed's configuration sets a value that the Trainer decides."""
    for name, instead in _INSTEAD.items():
        section = given.get(name)
        enabled = section.get("enabled") if isinstance(section, Mapping) else section
        if enabled not in (None, False, "auto") and not (name == "gradient_accumulation_steps" and enabled == 1):
            raise ConfigurationError(
                f"DeepSpeed's configuration sets {name}={shown(section)}, which the Trainer decides. {instead}"
            )
