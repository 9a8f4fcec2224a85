"""Lets ``self.log(sync_dist=True)`` reduce values with an accelerator's ``sync_tensor``, as in Lightning 1.1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain.module.module import LightningModule

# the parameters of LightningModule.log after self, name and value
_OPTIONS = list(inspect.signature(LightningModule.log).parameters)[3:]


def log_through(accelerator: Any, module: Any) -> Callable[..., None]:
    """Return a replacement of ``module.log`` for an accelerator that overrides ``sync_tensor``.

    With ``sync_dist=True``, every rank logs the result of ``sync_tensor``. Metric objects are an exception, because
    they exchange their own states.
    """
    usual = module.log

    def log(name: str, value: Any, *args: Any, **given: Any) -> None:
        options = {**dict(zip(_OPTIONS, args, strict=False)), **given}
        if not options.get("sync_dist") or isinstance(value, torch.nn.Module):
            usual(name, value, **options)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                log(f"{name}/{key}", item, **options)
        else:
            found = options.pop("sync_dist_op", None) or options.get("reduce_fx", "mean")
            operation = getattr(found, "__name__", found)  # torch.mean, for example
            tensor = torch.as_tensor(value, device=accelerator.root_device)
            value = accelerator.sync_tensor(tensor, group=options.get("sync_dist_group"), reduce_op=operation)
            usual(name, value, **{**options, "sync_dist": False})

    return log
