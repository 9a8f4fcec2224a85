"""Write tensors on XLA devices to files that a machine without torch_xla can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain.base.configs import as_plain, is_config
from drivetrain.base.tree import map_leaves
from drivetrain.checkpoints.file import TorchCheckpointIO


class XLACheckpointIO(TorchCheckpointIO):
    """Writes files as :class:`TorchCheckpointIO` does, with all tensors in host memory and configs as plain data.

    A machine without torch_xla can read these files.
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any = None) -> None:
        super().save_checkpoint(_for_a_file(dict(checkpoint)), path, storage_options)


def _for_a_file(tree: Any) -> Any:
    if is_config(tree):  # a config is a mapping or a sequence, too
        return as_plain(tree)
    if type(tree) in (dict, list, tuple):
        items = ((key, _for_a_file(value)) for key, value in tree.items()) if type(tree) is dict else None
        return type(tree)(map(_for_a_file, tree) if items is None else items)
    return map_leaves(_on_host, tree)


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" else leaf
