"""Callbacks whose arguments had other names or defaults in Lightning 1.3."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from types import MethodType
from typing import Any, ClassVar

import drivetrain.callbacks
from drivetrain.base.introspect import reads
from drivetrain.errors import UnknownArgumentError, did_you_mean
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.module import Callback


class ModelCheckpoint(drivetrain.callbacks.ModelCheckpoint):
    """drivetrain's ModelCheckpoint, which also accepts ``every_n_val_epochs`` and ``period``.

    Without ``monitor``, the callback monitors "val_loss" if a program logs this name.

    Args:
        save_top_k: the number of checkpoints to keep; ``None``: one.
        every_n_val_epochs, period: now ``every_n_epochs``.
        kwargs: further arguments of drivetrain's class.
    """

    watched_by_default: ClassVar[tuple[str, ...]] = ("val_loss",)

    def __init__(
        self,
        dirpath: Any = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int | None = None,
        save_weights_only: bool = False,
        mode: str = "min",
        every_n_val_epochs: int | None = None,
        period: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("every_n_val_epochs", every_n_val_epochs), ("period", period)):
            if value is not None:
                kwargs["every_n_epochs"] = value
                warn_deprecated(f"ModelCheckpoint({name}={value})", f"every_n_epochs={value}")
        super().__init__(
            dirpath, filename, monitor, verbose, save_last, 1 if save_top_k is None else save_top_k,
            save_weights_only=save_weights_only, mode=mode, **kwargs,
        )  # fmt: skip
        self._key = super().state_key

    state_key = reads("_key")  # the key contains the constructor's ``monitor``

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor = self.monitor or state_dict.get("monitor")
        super().load_state_dict(state_dict)

    def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
        metrics = super()._monitor_candidates(trainer)
        found = next((name for name in self.watched_by_default if name in metrics), None)
        if self.monitor is None and found is not None:
            what = f"ModelCheckpoint without monitor watches {found!r}, because it was logged; this"
            warn_deprecated(what, f"ModelCheckpoint(monitor={found!r})")
            self.monitor, self.best_k_models = found, {}
        return metrics

    def format_checkpoint_name(self, *args: Any, **kwargs: Any) -> str:
        """Return the path. Earlier signatures are accepted too: epoch and step before the metrics, and ``ver`` after
        the metrics.
        """
        counts = dict(zip(("epoch", "step"), takewhile(lambda value: isinstance(value, int), args), strict=False))
        given = dict(zip(("metrics", "filename", "ver"), args[len(counts) :], strict=False))
        if isinstance(given.get("filename"), int):
            given["ver"] = given.pop("filename")
        given.update(kwargs)
        counts.update({name: given.pop(name) for name in ("epoch", "step") if name in given})
        given["metrics"] = {**counts, **given["metrics"]}
        return super().format_checkpoint_name(**given)


class EarlyStopping(drivetrain.callbacks.EarlyStopping):
    """drivetrain's EarlyStopping; the defaults are ``monitor="early_stop_on"`` and ``mode="min"``.

    Args: as for drivetrain's class.
    """

    def __init__(
        self, monitor: str | None = None, min_delta: float = 0.0, patience: int = 3, verbose: bool = False,
        mode: str = "min", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(monitor or "early_stop_on", min_delta, patience, verbose, mode, **kwargs)


class StochasticWeightAveraging(drivetrain.callbacks.StochasticWeightAveraging):
    """drivetrain's StochasticWeightAveraging, whose argument ``swa_lrs`` is optional here.

    Args:
        swa_lrs: the learning rates; ``None``: the optimizer's learning rates when averaging begins.
        kwargs: further arguments of drivetrain's class.
    """

    def __init__(self, swa_epoch_start: int | float = 0.8, swa_lrs: Any = None, **kwargs: Any) -> None:
        super().__init__(1.0 if swa_lrs is None else swa_lrs, swa_epoch_start, **kwargs)
        self._keeps_rates = swa_lrs is None

    def _set_scheduler(self, trainer: Any) -> None:
        if self._keeps_rates:
            self.swa_lrs = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        super()._set_scheduler(trainer)


class LambdaCallback(Callback):
    """A callback whose hooks are functions.

    Args:
        functions: a function for each hook, by the hook's name. The function can have the parameters that the hook had
            in Lightning 1.3.

    Raises:
        UnknownArgumentError: the hook does not exist.
    """

    def __init__(self, **functions: Any) -> None:
        for name, function in functions.items():
            if name not in _HOOKS:
                raise UnknownArgumentError(f"A callback has no hook {name!r}. {did_you_mean(name, _HOOKS)}")
            if function is not None:
                setattr(self, name, MethodType(_method(name, function), self))


_HOOKS = sorted(name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for the hook ``name`` that calls ``function``, which can have Lightning 1.3's parameters."""

    def method(self: Any, *args: Any) -> Any:
        return function(*args)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:
        taken = inspect.signature(function).parameters.values()
        method.__signature__ = inspect.Signature([own, *taken])  # type: ignore[attr-defined]
    except ValueError:  # builtins can lack a signature
        return method
    return hooks.adapted(method, *hooks.OF_CALLBACKS[name]) if name in hooks.OF_CALLBACKS else method


class GPUStatsMonitor(drivetrain.callbacks.DeviceStatsMonitor):
    """drivetrain's DeviceStatsMonitor, which logs all statistics; arguments to select statistics are ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warn_deprecated("GPUStatsMonitor", "DeviceStatsMonitor()")
        super().__init__()
