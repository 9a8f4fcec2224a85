"""Private names of torch that several files need, each with what it is for: no other file spells them.

A private name that one file alone needs is spelt there. ``tests/test_torch_names.py`` lists both kinds, and checks that
the installed torch has them.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_map

from drivetrain.base.packages import c10d

__all__ = ["BatchNorm", "DispatchMode", "tree_map"]

without_torch_function = torch._C.DisableTorchFunction
"""Context in which subclasses of Tensor, and function modes, do not see torch's functions."""

# One kernel for all tensors of a list.
foreach_add_, foreach_copy_, foreach_div_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_div_
foreach_mul_, foreach_sub = torch._foreach_mul_, torch._foreach_sub


# ---- processes -------------------------------------------------------------------------------------------------------


def signal_at_parents_end(number: int) -> None:
    """Let the system send this process a signal when its parent process ends; on Linux."""
    torch.multiprocessing._prctl_pr_set_pdeathsig(number)  # type: ignore[attr-defined]  # no types


def default_store() -> Any:
    """Return the store over which the processes of the job have met."""
    return c10d._get_default_store()


def names_ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Return the names of tensors that a program has told DistributedDataParallel not to synchronise."""
    found: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return found


def rebuild_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Let DDP do what it does before a forward pass: check the last backward pass and order the buckets."""
    model.reducer._rebuild_buckets()


# ---- optimizers ------------------------------------------------------------------------------------------------------


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a SequentialLR or a ChainedScheduler contains; none for others."""
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


def mark_as_stepped(optimizer: Any) -> None:
    """Let torch's schedulers know of a step that was not made by ``optimizer.step``; otherwise they warn."""
    optimizer._opt_called = True


def states_of_scaler(scaler: Any) -> MutableMapping[int, dict[str, Any]]:
    """Return what a GradScaler has noted of each optimizer since its last update; nothing if it is disabled."""
    found: MutableMapping[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return found


# ---- tensors, modules, loaders ---------------------------------------------------------------------------------------


def storage_key(storage: Any) -> int:
    """Return a number that is the same for all Python objects of one storage."""
    key: int = storage._cdata
    return key


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation, which names its arguments and those that it writes to."""
    return operation._schema


def non_persistent_buffers(module: nn.Module) -> Collection[str]:
    """Return the names of the module's own buffers that are not in its ``state_dict``."""
    return module._non_persistent_buffers_set


def kept_iterator(loader: Any) -> Any:
    """Return the iterator with the persistent workers of a DataLoader; ``None`` without them, and for other loaders."""
    return getattr(loader, "_iterator", None)


def keep_iterator(loader: Any, iterator: Any) -> None:
    """Set the iterator that the next pass of a DataLoader uses; workers of one that is dropped end."""
    loader._iterator = iterator
