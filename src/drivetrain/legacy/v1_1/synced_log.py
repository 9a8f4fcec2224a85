"""``self.log(sync_dist=True)`` through the ``sync_tensor`` of an accelerator of the 1.1 generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def log_through(accelerator: Any, module: Any) -> Callable[..., None]:
    """Return ``module.log`` for a run whose accelerator has a ``sync_tensor`` of the user's.

    With ``sync_dist=True`` it logs what ``sync_tensor`` returns, on every rank. Metric objects exchange their own
    states, as always.
    """
    usual = module.log

    def log(name: str, value: Any, *args: Any, sync_dist: bool = False, **options: Any) -> None:
        if sync_dist and isinstance(value, Mapping):
            for key, item in value.items():
                log(f"{name}/{key}", item, *args, sync_dist=True, **options)
            return
        if sync_dist and not isinstance(value, torch.nn.Module):
            found = options.pop("sync_dist_op", None) or options.get("reduce_fx", "mean")
            operation = getattr(found, "__name__", found)  # torch.mean, for example
            tensor = torch.as_tensor(value, device=accelerator.root_device)
            value = accelerator.sync_tensor(tensor, group=options.get("sync_dist_group"), reduce_op=operation)
            sync_dist = False
        usual(name, value, *args, sync_dist=sync_dist, **options)

    return log
