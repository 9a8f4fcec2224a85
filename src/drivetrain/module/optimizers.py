"""Convert any valid result of ``configure_optimizers`` to a list of optimizers and a list of scheduler
configurations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.spelling import is_higher_better
from drivetrain.engine.wrappers import OptimizerHandle
from drivetrain.errors import (
    ConfigurationError,
    UnknownNameError,
    WrongTypeError,
    count_meant,
    described,
    did_you_mean,
    is_count,
    shown,
)

_FORMS = (
    "Return an optimizer, ([optimizers], [schedulers]), or a dictionary such as "
    '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}.'
)


class LightningOptimizer(OptimizerHandle):
    """Wraps an optimizer for ``self.optimizers()``. All attributes except ``step`` are the optimizer's.

    ``step`` first unscales gradients if the precision scales them. Then ``step`` calls ``on_before_optimizer_step``,
    and clips if the Trainer is configured to clip. After the optimizer's step, ``step`` increases ``global_step``.
    Outside training, ``step`` only calls the optimizer's own ``step``.
    """

    _OWN = OptimizerHandle._OWN | {"_module"}

    def __init__(self, optimizer: Optimizer, module: Any) -> None:
        super().__init__(optimizer)
        self._module = module

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Context in which only this optimizer's parameters require gradients.

        Args:
            sync_grad: accepted for compatibility and ignored: every backward pass averages the gradients over the
                processes.
        """
        return self._module.toggled_optimizer(self)


def loses_gradients(call: str, accumulate: int) -> ConfigurationError:
    """Return the error for code that clears gradients between the batches of one optimizer step. ``call`` describes the
    code.
    """
    return ConfigurationError(
        f"{call} was called between the batches of one optimizer step (accumulate_grad_batches={accumulate}), and "
        "would lose the gradients of the earlier ones. Leave the call out: the Trainer clears gradients itself."
    )


@dataclass
class LRSchedulerConfig:
    """When and how one scheduler steps.

    Attributes:
        scheduler: any object with ``step()`` and ``state_dict()``.
        name: the name under which LearningRateMonitor logs the scheduler's rates.
        interval: "epoch": the scheduler steps after the last batch of an epoch. "step": it steps after an optimizer
            step.
        frequency: the scheduler steps after every ``frequency`` epochs or optimizer steps (see ``interval``).
        reduce_on_plateau: whether the scheduler's ``step`` takes the monitored value. If so, the scheduler steps after
            validation.
        monitor: the name of the monitored value.
        strict: True: if the monitored value was not logged, the Trainer raises an error. False: the Trainer warns.
    """

    scheduler: Any
    name: str | None = None
    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def normalise(returned: Any, by_hand: bool = False) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and scheduler configurations in a result of ``configure_optimizers``.

    Args:
        returned: the result of ``configure_optimizers``.
        by_hand: whether the module itself steps the schedulers. If so, no scheduler needs a monitored value.

    Raises:
        ConfigurationError: the value is not valid, or a scheduler's dictionary is wrong.
    """
    monitor: str | None = None
    schedulers: list[Any] = []
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        optimizers: list[Any] = [returned]
    elif isinstance(returned, Mapping):
        optimizers, schedulers, monitor = _from_dict(returned)
    elif isinstance(returned, (list, tuple)) and len(returned) == 2 and _is_list(returned[0]):
        optimizers = list(returned[0])
        schedulers = list(returned[1]) if _is_list(returned[1]) else [returned[1]]
    elif isinstance(returned, (list, tuple)) and returned and all(isinstance(item, Mapping) for item in returned):
        optimizers = []
        for item in returned:
            its_optimizers, its_schedulers, its_monitor = _from_dict(item)
            optimizers += its_optimizers
            schedulers += [_with_monitor(scheduler, its_monitor) for scheduler in its_schedulers]
    elif _is_list(returned):
        optimizers = list(returned)
    else:
        raise ConfigurationError(f"configure_optimizers returned {described(returned)}. {_FORMS} [DT1005]")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"configure_optimizers returned {described(optimizer)}, where an optimizer belongs. {_FORMS} [DT1005]"
            )
    configs = [_config(_with_monitor(scheduler, monitor), optimizers, by_hand) for scheduler in schedulers]
    for entry, config in zip(schedulers, configs, strict=True):
        if isinstance(entry, Mapping) and "monitor" in entry and not config.reduce_on_plateau and config.monitor:
            rank_zero_info(
                f'{type(config.scheduler).__name__} steps without looking at a metric, so "monitor": '
                f"{config.monitor!r} has no effect. For a scheduler whose step takes a metric, add "
                '"reduce_on_plateau": True.'
            )
    return optimizers, configs


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _from_dict(entry: Mapping[str, Any]) -> tuple[list[Any], list[Any], str | None]:
    known = ("optimizer", "lr_scheduler", "monitor", "frequency")
    for key in entry:
        if key not in known:
            hint = did_you_mean(str(key), known)
            if len(entry) > 1 and all(isinstance(value, Optimizer) for value in entry.values()):
                hint = "For several optimizers, return a list of them: list(optimizers.values())."
            raise ConfigurationError(
                f"configure_optimizers returned a dictionary with the unknown key {key!r}. {hint} [DT1006]"
            )
    if "optimizer" not in entry:
        raise UnknownNameError(
            f"configure_optimizers returned a dictionary with no key 'optimizer', only {sorted(entry)}. {_FORMS}"
        )
    scheduler = entry.get("lr_scheduler")
    return [entry["optimizer"]], [] if scheduler is None else [scheduler], entry.get("monitor")


def _with_monitor(scheduler: Any, monitor: str | None) -> Any:
    if monitor is None:
        return scheduler
    if isinstance(scheduler, Mapping):
        return {"monitor": monitor, **scheduler}
    return {"scheduler": scheduler, "monitor": monitor}


def _config(entry: Any, optimizers: list[Any], by_hand: bool) -> LRSchedulerConfig:
    known = [field.name for field in dataclasses.fields(LRSchedulerConfig)]
    settings = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    for key in settings:
        if key not in known:
            raise ConfigurationError(
                f"A scheduler's dictionary has the unknown key {key!r}. {did_you_mean(key, known)} [DT1006]"
            )
    if "scheduler" not in settings:
        raise ConfigurationError(f"A scheduler's dictionary has no key 'scheduler', only {sorted(settings)}. {_FORMS}")
    scheduler = settings["scheduler"]
    needed = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
    lacking = f", which has no {needed[0]}" if needed else ""
    if isinstance(scheduler, type) or needed:
        raise WrongTypeError(
            f"A scheduler is an object with step(), state_dict() and load_state_dict(), and configure_optimizers "
            f"returned {described(scheduler)}{lacking}. {_FORMS}"
        )
    if settings.get("interval", "epoch") not in ("epoch", "step"):
        raise ConfigurationError(
            f'A scheduler\'s interval is "epoch" or "step", not {settings["interval"]!r}. Write one '
            "of the two. [DT1009]"
        )
    frequency = settings.get("frequency", 1)
    if not is_count(frequency, 1):
        raise ConfigurationError(
            f"A scheduler's frequency is an int of at least 1, not {frequency!r}. Write {count_meant(frequency, 1, 1)}."
        )
    for key, kinds, kind in (("monitor", str, "a text"), ("name", str, "a text"), ("strict", bool, "a bool")):
        if not isinstance(value := settings.get(key), (kinds, type(None))):
            raise ConfigurationError(
                f"A scheduler's {key} is {kind}, not {shown(value)}. Write {kind} or leave it out."
            )
    settings.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    config = LRSchedulerConfig(**settings)
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "min" and is_higher_better(config.monitor):
        rank_zero_warn(
            f'ReduceLROnPlateau treats the lowest {config.monitor!r} as the best, because its mode is "min". Write '
            'ReduceLROnPlateau(optimizer, mode="max") if a higher value is better.'
        )
    if config.reduce_on_plateau and config.monitor is None and not by_hand:
        raise ConfigurationError(
            f"{type(scheduler).__name__} needs the name of the value it watches. "
            'Return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}. [DT1007]'
        )
    owner = getattr(scheduler, "optimizer", None)
    if isinstance(scheduler, LRScheduler) and not any(owner is optimizer for optimizer in optimizers):
        raise ConfigurationError(
            f"{type(scheduler).__name__} was built for an optimizer that configure_optimizers did not return. "
            "Return that optimizer too. [DT1008]"
        )
    return config
