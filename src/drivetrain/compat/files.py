"""``utilities.cloud_io`` and ``core.saving``: files wherever they are, and hyperparameters in them."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

import torch

from drivetrain import parity
from drivetrain.base import files, yaml_text
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError


def get_filesystem(path: str | Path, **kwargs: Any) -> Any:
    """Return the fsspec file system that ``path`` lies on; ``kwargs`` are its options."""
    import fsspec  # type: ignore[import-untyped]  # a dependency of torch

    filesystem, _ = fsspec.core.url_to_fs(str(path), **kwargs)
    return filesystem


def _load(path_or_url: IO[bytes] | str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Call ``torch.load`` on a path, an open file, or any address that fsspec knows.

    Args:
        path_or_url: where it is.
        map_location: as of ``torch.load``.
        weights_only: read plain data only; ``None``: unless the process allows pickled objects
            (:mod:`drivetrain.parity`).
    """
    restricted = not parity.current().pickle if weights_only is None else weights_only
    if not isinstance(path_or_url, (str, Path)):
        return torch.load(path_or_url, map_location, weights_only=restricted)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as stream:
        return torch.load(stream, map_location, weights_only=restricted)


def save_hparams_to_yaml(
    config_yaml: str | Path, hparams: dict[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write hyperparameters as YAML; what YAML does not take is left out, with a warning.

    Raises:
        ConfigurationError: the folder does not exist, or ``hparams`` is no mapping.
    """
    values = vars(hparams) if isinstance(hparams, Namespace) else hparams
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"hparams is a {type(hparams).__name__}. Pass a dictionary or a Namespace.")
    folder = os.path.dirname(os.path.abspath(config_yaml))
    if not files.is_remote(config_yaml) and not os.path.isdir(folder):
        raise ConfigurationError(f"There is no folder {folder} to write {config_yaml} to. Make it first.")
    kept = {}
    for name, value in values.items():
        if yaml_text.is_plain(value):
            kept[name] = value
        else:
            rank_zero_warn(f"The hyperparameter {name!r} is left out: YAML has no form for a {type(value).__name__}.")
    files.write(config_yaml, yaml_text.dump(kept).encode())


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> dict[str, Any]:
    """Hyperparameters from a YAML file of plain data; empty, with a warning, where there is no such file.

    Raises:
        ConfigurationError: PyYAML is not installed.
    """
    if not files.is_file(config_yaml):
        rank_zero_warn(f"There is no file {config_yaml}, so there are no hyperparameters.")
        return {}
    loaded = _yaml().safe_load(files.read(config_yaml).decode())
    return dict(loaded or {})


def update_hparams(hparams: MutableMapping[str, Any], updates: Mapping[str, Any]) -> None:
    """Change ``hparams`` in place; mappings in it are updated, not replaced."""
    for name, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(name), MutableMapping):
            update_hparams(hparams[name], value)
        else:
            hparams[name] = value


def _yaml() -> Any:
    if importlib.util.find_spec("yaml") is None:
        raise ConfigurationError("Hyperparameters as YAML need PyYAML, which is not installed. Run: pip install pyyaml")
    import yaml  # type: ignore[import-untyped]

    return yaml
