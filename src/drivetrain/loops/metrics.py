"""Find the metric objects (torchmetrics) of a run, and copy, merge and restore their states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base.restoring import COUNT, Form

State = dict[str, Any]

_HOLDERS = (nn.Module, list, tuple, dict)
_OF_TORCH = frozenset(vars(nn.Module()))
"""The names of the attributes that every ``nn.Module`` has, such as ``_modules``. :func:`metrics_in` does not search
these attributes, because the function visits submodules separately.
"""


def metrics_in(owner: Any) -> dict[str, nn.Module]:
    """Return a dictionary of the torchmetrics objects that can be reached from ``owner``: the keys are paths.

    The function searches submodules, attributes, and items of lists, tuples and dictionaries, at any depth. A
    submodule's path is its name; an item's path is ``name[index]``.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", owner)]
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, nn.Module):
            new = [(name, child) for name, child in value.named_modules() if id(child) not in seen]
            seen.update(id(child) for _, child in new)
            for name, child in new:
                place = f"{path}.{name}".strip(".")
                states: dict[str, Any] = {}
                if _is_metric(child):
                    found[place], states = child, vars(child)["_defaults"]  # a metric's states are not searched
                waiting += [
                    (f"{place}.{key}".strip("."), held) for key, held in vars(child).items()
                    if isinstance(held, _HOLDERS) and key not in _OF_TORCH and key not in states
                ]  # fmt: skip
        elif id(value) not in seen:
            seen.add(id(value))
            items = enumerate(value) if isinstance(value, (list, tuple)) else _items(value)
            waiting += [(f"{path}[{key!r}]", held) for key, held in items if isinstance(held, _HOLDERS)]
    return found


def _items(holder: Any) -> Iterable[tuple[Any, Any]]:
    return holder.items() if isinstance(holder, dict) else getattr(holder, "__dict__", {}).items()


def _is_metric(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_defaults"), dict) and hasattr(module, "compute") and hasattr(module, "reset")


METRIC_STATE: Form = {"updates": COUNT, "states": Mapping}


def state_of(metric: nn.Module) -> State:
    """Return the complete state of a torchmetrics object, including states that its ``state_dict`` omits."""
    states = {key: getattr(metric, key) for key in vars(metric)["_defaults"]}
    return {"states": states, "updates": getattr(metric, "_update_count", 0)}


def set_state(metric: Any, saved: State, forget: bool = True) -> None:
    """Restore a result of :func:`state_of`. ``forget``: whether to drop the cached result of ``compute``, which belongs
    to the old state.
    """
    for key, value in saved["states"].items():
        setattr(metric, key, value.to(metric.device) if isinstance(value, Tensor) else value)
    metric._update_count = saved["updates"]
    if forget:
        metric._computed = None


def merged_states(metric: Any, saved: Sequence[State]) -> tuple[State, list[str]]:
    """Return the state that a metric object would have after the samples of all ``saved`` states. If ``saved`` is
    empty, return the metric's initial state.

    Returns:
        The state, and the names of the entries that could not be merged, because the metric has its own reduction.
        These entries come from the first of the ``saved`` states.
    """
    kept: list[str] = []
    if not saved:
        return {"states": copy.deepcopy(vars(metric)["_defaults"]), "updates": 0}, kept
    updates = [each["updates"] for each in saved]
    states = {}
    for key in vars(metric)["_defaults"]:
        values = [each["states"][key] for each in saved]
        reduction = getattr(getattr(metric, "_reductions", {}).get(key), "__name__", "")
        states[key] = values[0]
        if isinstance(values[0], list):
            states[key] = [item for value in values for item in value]
        elif reduction == "dim_zero_mean":
            states[key] = sum(value * count for value, count in zip(values, updates, strict=True)) / max(
                sum(updates), 1
            )
        elif reduction in _REDUCED:
            states[key] = _REDUCED[reduction](values)
        elif len(values) > 1:
            kept.append(key)
    return {"states": states, "updates": sum(updates)}, kept


_REDUCED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "dim_zero_sum": lambda values: torch.stack(values).sum(0),
    "dim_zero_max": lambda values: torch.stack(values).amax(0),
    "dim_zero_min": lambda values: torch.stack(values).amin(0),
    "dim_zero_cat": lambda values: torch.cat([value.reshape(-1, *value.shape[1:]) for value in values]),
}
"""The reductions of states over ranks, by the names of the corresponding torchmetrics functions."""


def copied_state(metric: nn.Module) -> State:
    """Return a copy of a metric object's state. Later updates of the metric do not change the copy."""
    saved = state_of(metric)
    values = {
        key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in saved["states"].items()
    }
    return {**saved, "states": values}


def copied_states(module: nn.Module) -> dict[str, State]:
    """For each metric object of ``module``, return a copy of the state; the keys are the objects' paths."""
    return {place: copied_state(metric) for place, metric in metrics_in(module).items()}


def set_states(owner: Any, states: Mapping[str, State], forget: bool = True) -> None:
    """Restore the state of each metric object of ``owner`` by its path."""
    metrics = metrics_in(owner)
    for place, saved in states.items():
        if (metric := metrics.get(place)) is not None:
            set_state(metric, saved, forget)
