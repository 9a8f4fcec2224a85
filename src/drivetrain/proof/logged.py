"""Observe the values that a program logs through the loggers of this library, torch, Lightning, transformers and
others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

See = Callable[[str, Any, Any], None]
"""A function that is called with three arguments: the name of a logged value, the value, and the step of the value."""

_LOGGERS = ("drivetrain.loggers.logger", "lightning.fabric.loggers.logger", "lightning_fabric.loggers.logger")
"""Modules that define a base class ``Logger`` with a method ``log_metrics(metrics, step)``."""
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
"""Modules that define a class ``SummaryWriter`` with a method ``add_scalar(tag, value, step)``."""


def listen(see: See) -> None:
    """Call ``see`` with each value that the program logs from now on. Loggers of modules that are imported later are
    not observed.
    """
    for name in _WRITERS:
        if (kind := getattr(sys.modules.get(name), "SummaryWriter", None)) is not None:
            _wrap(kind, "add_scalar", lambda _, tag, value, step=None, *rest, **more: see(tag, value, step))
    for name in _LOGGERS:
        for kind in _family(getattr(sys.modules.get(name), "Logger", None)):
            _wrap(kind, "log_metrics", lambda _, metrics, step=None, *rest, **more: _each(see, metrics, step))
    for kind in _family(getattr(sys.modules.get("accelerate.tracking"), "GeneralTracker", None)):
        _wrap(kind, "log", lambda _, values, step=None, *rest, **more: _each(see, values, step))
    for kind in _family(getattr(sys.modules.get("transformers.trainer"), "Trainer", None)):
        _wrap(kind, "log", lambda self, logs, *rest, **more: _each(see, logs, self.state.global_step))
    if (kind := getattr(sys.modules.get("wandb.sdk.wandb_run"), "Run", None)) is not None:
        _wrap(kind, "log", lambda _, data, step=None, *rest, **more: _each(see, data, step))


def _each(see: See, metrics: Mapping[str, Any], step: Any) -> None:
    for name, value in dict(metrics).items():
        see(str(name), value, step)


def _family(kind: Any) -> Iterator[Any]:
    if kind is not None:
        yield kind
        for each in kind.__subclasses__():
            yield from _family(each)


def _wrap(kind: Any, name: str, hear: Callable[..., None]) -> None:
    """Replace the method ``name`` of the class ``kind``, so that each call of the method first calls ``hear``. Do
    nothing if the class inherits the method, or if the method is already replaced.
    """
    method = vars(kind).get(name)
    if method is None or hasattr(method, "_is_heard"):
        return

    @functools.wraps(method)
    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        hear(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    heard._is_heard = True  # type: ignore[attr-defined]  # of a function
    setattr(kind, name, heard)
