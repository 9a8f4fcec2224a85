"""Functions of Lightning's ``utilities.cloud_io``, ``utilities.distributed`` and ``core.saving``: read and write local
and remote files.
"""

from __future__ import annotations

import csv
import io
import os
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

import torch

from drivetrain import parity
from drivetrain.base import files, yaml_text
from drivetrain.base.packages import fsspec, yaml
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError, WrongTypeError, check_installed
from drivetrain.module.loading import literal as convert

CHECKPOINT_PAST_HPARAMS_KEYS = ("hparams", "module_arguments")
"""Keys of the hyperparameters in checkpoints of Lightning before 0.9."""


class NoPathError(ConfigurationError, FileNotFoundError):
    """The path does not exist."""


class NoFolderError(ConfigurationError, RuntimeError):
    """The folder in which to write a file does not exist."""


def get_filesystem(path: str | Path, **kwargs: Any) -> Any:
    """Return the fsspec file system of ``path``; ``kwargs`` are its options."""
    filesystem, _ = fsspec.core.url_to_fs(str(path), **kwargs)
    return filesystem


def is_shared_filesystem(strategy: Any, path: str | Path | None = None, timeout: float = 3) -> bool:
    """Return whether all ranks see the same files at ``path``; every rank must call this function.

    To find out, rank 0 creates a file in the folder, and every rank looks for this file.

    Args:
        strategy: the strategy of a Trainer or of Fabric.
        path: a folder to which all ranks can write, or a file in such a folder; ``None``: the working folder.
        timeout: the number of seconds after which a rank stops looking.

    Raises:
        NoPathError: ``path`` is missing on some rank.
    """
    if path is not None and files.is_remote(path):
        return True
    place = Path(path or Path.cwd()).resolve()
    if getattr(strategy, "world_size", 1) == 1:
        return True
    if not strategy.reduce_boolean_decision(strategy.broadcast(str(place)) == str(place)):
        return False
    if not strategy.reduce_boolean_decision(place.exists()):
        raise NoPathError(f"is_shared_filesystem({str(place)!r}): this path does not exist on every rank. Make it.")
    folder = place.parent if place.is_file() else place
    mark = None
    if strategy.is_global_zero:
        mark = str(folder / f".shared-{uuid.uuid4().hex}")
        Path(mark).touch(exist_ok=False)
    name = strategy.broadcast(mark)  # the file exists before the other ranks get its name
    found, deadline = os.path.exists(name), time.monotonic() + timeout
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)  # network file systems show another machine's new file late
        found = os.path.exists(name)
    everywhere: bool = strategy.reduce_boolean_decision(found)
    if mark is not None:
        os.unlink(mark)
    return everywhere


def _load(path_or_url: IO[bytes] | str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Call ``torch.load`` on a path, an open file, or an address that fsspec supports.

    Args:
        path_or_url: the path, the open file, or the address.
        map_location: as in ``torch.load``.
        weights_only: read only tensors and plain data. ``None``: True, unless the process allows pickled objects
            (:mod:`drivetrain.parity`), as after :func:`drivetrain.compat.install`.
    """
    restricted = not parity.current().pickle if weights_only is None else weights_only
    if not isinstance(path_or_url, (str, Path)):
        return torch.load(path_or_url, map_location, weights_only=restricted)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as stream:
        return torch.load(stream, map_location, weights_only=restricted)


def _load_from_checkpoint(cls: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    return cls.load_from_checkpoint(checkpoint_path, *args, **kwargs)


def _load_state(cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **cls_kwargs_new: Any) -> Any:
    """Call ``cls.load_from_checkpoint`` for a checkpoint that was already read."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return cls.load_from_checkpoint(file, strict=strict, weights_only=False, **cls_kwargs_new)


def save_hparams_to_yaml(
    config_yaml: str | Path, hparams: dict[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write hyperparameters as YAML. Leave out each value that YAML cannot represent, with a warning.

    Raises:
        NoFolderError: the folder does not exist.
        WrongTypeError: ``hparams`` is not a mapping.
    """
    values = vars(hparams) if isinstance(hparams, Namespace) else hparams
    if not isinstance(values, Mapping):
        raise WrongTypeError(f"hparams is a {type(hparams).__name__}. Pass a dictionary or a Namespace.")
    _check_folder(config_yaml)
    kept = {}
    for name, value in values.items():
        if yaml_text.is_plain(value):
            kept[name] = value
        else:
            rank_zero_warn(f"The hyperparameter {name!r} is left out: YAML has no form for a {type(value).__name__}.")
    files.write(config_yaml, yaml_text.dump(kept).encode())


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> dict[str, Any]:
    """Return hyperparameters from a YAML file of plain data; if there is no file, warn and return an empty dictionary.

    Raises:
        ConfigurationError: PyYAML is not installed.
    """
    if not files.is_file(config_yaml):
        rank_zero_warn(f"There is no file {config_yaml}, so there are no hyperparameters.")
        return {}
    check_installed("load_hparams_from_yaml", "yaml", install="pyyaml")
    loaded = yaml.safe_load(files.read(config_yaml).decode())
    return dict(loaded or {})


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: Mapping[str, Any] | Namespace) -> None:
    """Write hyperparameters as a table with the columns "key" and "value".

    Raises:
        NoFolderError: the folder does not exist.
    """
    _check_folder(tags_csv)
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(("key", "value"))
    rows.writerows((vars(hparams) if isinstance(hparams, Namespace) else hparams).items())
    files.write(tags_csv, text.getvalue().encode())


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """Return hyperparameters from a file of :func:`save_hparams_to_tags_csv`, and parse each value with
    :func:`convert`. If there is no file, warn and return an empty dictionary.
    """
    if not files.is_file(tags_csv):
        rank_zero_warn(f"There is no file {tags_csv}, so there are no hyperparameters.", category=RuntimeWarning)
        return {}
    rows = csv.reader(io.StringIO(files.read(tags_csv).decode(), newline=""))
    next(rows, None)  # skip the headings
    return {row[0]: convert(row[1]) for row in rows}


def update_hparams(hparams: MutableMapping[str, Any], updates: Mapping[str, Any]) -> None:
    """Update ``hparams`` in place, including the mappings inside."""
    for name, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(name), MutableMapping):
            update_hparams(hparams[name], value)
        else:
            hparams[name] = value


def _check_folder(path: str | Path) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    if not files.is_remote(path) and not os.path.isdir(folder):
        raise NoFolderError(f"There is no folder {folder} to write {path} to. Make it first.")
