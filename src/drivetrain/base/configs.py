"""Functions for OmegaConf's configurations, which programs get from Hydra. The package omegaconf is never imported
unless the program uses it.
"""

from __future__ import annotations

import sys
from typing import Any

from drivetrain.base.packages import omegaconf, omegaconf_errors


def is_config(value: Any) -> bool:
    """Return whether ``value`` is a DictConfig or a ListConfig."""
    omegaconf = sys.modules.get("omegaconf")  # if omegaconf is not imported, no value is one of its configs
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def as_plain(config: Any, resolve: bool = True) -> Any:
    """Return ``config`` as dictionaries and lists; missing values stay "???".

    Args:
        config: a DictConfig or a ListConfig.
        resolve: whether to replace interpolations with their values; if an interpolation has no value, all
            interpolations are kept.
    """
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=resolve)
    except omegaconf_errors.OmegaConfBaseException:  # an interpolation refers to a missing value
        return omegaconf.OmegaConf.to_container(config, resolve=False)


def without_configs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with plain data in the place of configurations."""
    return {name: as_plain(value) if is_config(value) else value for name, value in arguments.items()}


def state_of(config: Any) -> tuple[Any, bool | None, bool | None]:
    """Return the state from which :func:`restored` rebuilds ``config``: plain data, whether keys cannot be added (the
    flag "struct"), and whether ``config`` is read-only.

    Interpolations are kept if ``config`` is a whole config. In a part of a larger config, interpolations are replaced
    by their values, because they may refer to values outside the part.
    """
    is_part = config._get_parent() is not None
    return as_plain(config, resolve=is_part), config._get_flag("struct"), config._get_flag("readonly")


def restored(state: Any) -> Any:
    """Rebuild a config from a result of :func:`state_of`; if OmegaConf is not installed, return the plain data."""
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
