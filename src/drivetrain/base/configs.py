"""Functions for OmegaConf's configurations, which programs get from Hydra. The package omegaconf is imported only if
the program uses omegaconf.
"""

from __future__ import annotations

import sys
from typing import Any

from drivetrain.base.packages import omegaconf, omegaconf_errors


def is_config(value: Any) -> bool:
    """Return whether ``value`` is a DictConfig or a ListConfig."""
    omegaconf = sys.modules.get("omegaconf")  # if omegaconf is not imported, no value is a config
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def as_plain(config: Any, resolve: bool = True) -> Any:
    """Return ``config`` as dictionaries and lists. A missing value stays "???".

    Args:
        config: a DictConfig or a ListConfig.
        resolve: whether to replace interpolations by their values. If any interpolation has no value, none is replaced.
    """
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=resolve)
    except omegaconf_errors.OmegaConfBaseException:  # an interpolation refers to a missing value
        return omegaconf.OmegaConf.to_container(config, resolve=False)


def without_configs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with each configuration as dictionaries and lists."""
    return {name: as_plain(value) if is_config(value) else value for name, value in arguments.items()}


def state_of(config: Any) -> tuple[Any, bool | None, bool | None]:
    """Return the content of ``config`` and its flags "struct" and "readonly". :func:`restored` rebuilds the config from
    these values. If ``config`` is a part of a larger config, interpolations are replaced by their values. They may
    refer to values outside the part.
    """
    is_part = config._get_parent() is not None
    return as_plain(config, resolve=is_part), config._get_flag("struct"), config._get_flag("readonly")


def restored(state: Any) -> Any:
    """Rebuild a config from a result of :func:`state_of`. Without OmegaConf, return dictionaries and lists."""
    data, struct, readonly = state
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return data
    config = OmegaConf.create(data)
    OmegaConf.set_struct(config, struct)
    OmegaConf.set_readonly(config, readonly)
    return config


def merged(config: Any, changes: dict[str, Any]) -> Any:
    """Return a copy of ``config`` with ``changes``."""
    with omegaconf.open_dict(config):
        return omegaconf.OmegaConf.merge(config, changes)
