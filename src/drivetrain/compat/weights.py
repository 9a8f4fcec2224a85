"""Lightning's ``utilities.load`` and ``utilities.init``, for programs on Fabric: load weights and create layers."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain import parity
from drivetrain.base.no_init import NoInit
from drivetrain.errors import CheckpointError

_METADATA_FILENAME = "meta.pt"


def _EmptyInit(enabled: bool = True) -> AbstractContextManager[Any]:
    """Context in which new layers do not initialise their parameters, if ``enabled``."""
    return NoInit() if enabled else nullcontext()


class _NotYetLoadedTensor:
    """A name for imports. It has no objects, because :func:`_lazy_load` returns plain tensors."""


def _lazy_load(filename: str | Path) -> Any:
    """Return the contents of a file of ``torch.save``. The bytes of a tensor are read when it is first used."""
    if not Path(filename).is_file():
        raise CheckpointError(f"There is no file {str(filename)!r}. Check the path.")
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=not parity.current().pickle)


def _materialize_tensors(collection: Any) -> Any:
    """Return ``collection`` unchanged, because :func:`_lazy_load` returns plain tensors."""
    return collection


def _move_state_into(
    source: MutableMapping[str, Any], destination: MutableMapping[str, Any], keys: set[str] | None = None
) -> None:
    """Remove the entries ``keys``, by default all, from ``source``, and load them into the objects in
    ``destination``.
    """
    for key in list(source.keys() if keys is None else keys & source.keys()):
        state = source.pop(key)
        if key in destination and hasattr(destination[key], "load_state_dict"):
            destination[key].load_state_dict(state)
        else:
            destination[key] = state


def _materialize(module: nn.Module, device: torch.device | str | int) -> None:
    """Allocate and initialise the parameters and buffers of ``module``, but not of its children."""
    module.to_empty(device=torch.device(device), recurse=False)
    reset: Any = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise TypeError(
            f"{type(module).__name__} has parameters on the meta device, and no reset_parameters() that initialises "
            "them. Define it."
        )
    reset()


def _materialize_meta_tensors(module: nn.Module, device: torch.device | str | int) -> None:
    for each in module.modules():
        if _has_meta_device_parameters_or_buffers(each, recurse=False):
            _materialize(each, device)


def _has_meta_device_parameters_or_buffers(obj: Any, recurse: bool = True) -> bool:
    if isinstance(obj, torch.optim.Optimizer):
        return any(parameter.is_meta for group in obj.param_groups for parameter in group["params"])
    return any(tensor.is_meta for tensor in (*obj.parameters(recurse=recurse), *obj.buffers(recurse=recurse)))
