"""Write tensors on XLA devices to files that a machine without torch_xla can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain.base.configs import as_plain, is_config
from drivetrain.base.torch_private import tree_map
from drivetrain.base.tree import map_leaves
from drivetrain.checkpoints.file import TorchCheckpointIO


class XLACheckpointIO(TorchCheckpointIO):
    """Writes files as :class:`TorchCheckpointIO` does, with all tensors in host memory and configs as plain data.

    A machine without torch_xla can read these files.
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        # tree_map() visits no other containers: a config is a mapping or a sequence, too
        plain = tree_map(_for_a_file, dict(checkpoint), is_leaf=lambda part: type(part) not in (dict, list, tuple))
        super().save_checkpoint(plain, path, storage_options)


def _for_a_file(part: Any) -> Any:
    return as_plain(part) if is_config(part) else map_leaves(_on_host, part)


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" else leaf
