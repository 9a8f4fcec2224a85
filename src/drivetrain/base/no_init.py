"""Create layers without initializing their parameters, because a checkpoint will be loaded."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class NoInit(TorchFunctionMode):
    """Return a context in which the functions of ``torch.nn.init`` do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
