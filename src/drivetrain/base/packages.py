"""Import optional packages, and slow modules of torch, only when the program first uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.base.lazy import Later, text_beside

if TYPE_CHECKING:
    import fcntl

    import psutil
    import rich
    import rich.console as rich_console
    import rich.progress as rich_progress
    import rich.table as rich_table
    import torch.distributed.checkpoint.filesystem as dcp_files
    import torch.distributed.checkpoint.metadata as dcp
    import torch.distributed.checkpoint.state_dict_saver as dcp_saver
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.fsdp as fsdp
    import torch.distributed.tensor as dtensor
    import torch.distributed.tensor.parallel as tensor_parallel
    import tqdm.auto as tqdm_auto

    ipython_display: Any  # for mypy, which checks base/notebook.py before this file

__all__ = [  # type checkers know only these names
    "dcp", "dcp_files", "dcp_saver", "device_mesh", "dtensor", "fcntl", "fsdp", "psutil", "rich", "rich_console",
    "rich_progress", "rich_table", "tensor_parallel", "tqdm_auto",
]  # fmt: skip

_MODULES = dict(line.split() for line in text_beside(__name__, ".txt").splitlines()[1:])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(name)
    return Later(_MODULES[name])
