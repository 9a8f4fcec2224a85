"""Configurations of OmegaConf, as Hydra hands them to a program. Only a program that has them imports the package."""

from __future__ import annotations

import sys
from typing import Any


def is_config(value: Any) -> bool:
    """Return whether ``value`` is a DictConfig or a ListConfig."""
    omegaconf = sys.modules.get("omegaconf")  # nothing is of its types where it was not imported
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def as_plain(config: Any, resolve: bool = True) -> Any:
    """Return ``config`` as dictionaries and lists; missing values stay "???".

    Args:
        config: a DictConfig or a ListConfig.
        resolve: put values in the place of interpolations, where they have any.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=resolve)
    except OmegaConfBaseException:  # an interpolation of what is not there
        return OmegaConf.to_container(config, resolve=False)


def without_configs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with plain data in the place of configurations."""
    return {name: as_plain(value) if is_config(value) else value for name, value in arguments.items()}


def state_of(config: Any) -> tuple[Any, bool | None, bool | None]:
    """Return what :func:`restored` makes ``config`` from: plain data, and whether it is closed and read-only.

    Interpolations stay, but for those of a part, which may mean what lies outside of it.
    """
    is_part = config._get_parent() is not None
    return as_plain(config, resolve=is_part), config._get_flag("struct"), config._get_flag("readonly")


def restored(state: Any) -> Any:
    """Return what :func:`state_of` was given; where OmegaConf is not installed, its plain data."""
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
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        return OmegaConf.merge(config, changes)
