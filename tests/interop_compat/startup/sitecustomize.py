"""Lets torchvision be imported beside a torch without CUDA, in every process of the libraries' environment.

The wheels of the package index are built for CUDA, and beside a torch for processors alone their operators do not load.
torchvision then fails at its import, because it describes two of these operators to torch, and so does torchmetrics.
They are declared here, without an implementation, for the programs that do not call them.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class Declaring(importlib.abc.MetaPathFinder):
    """Finds nothing, but declares the operators before torchvision describes them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision._meta_registrations":
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                self.library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, Declaring())
