"""Functions for authors of loggers: the decorator of ``experiment``, and conversion of parameters and metrics."""

from __future__ import annotations

import functools
import math
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.compat.rank_zero import rank_zero_only
from drivetrain.loggers.dummy import DummyLogger


def rank_zero_experiment(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a logger's property ``experiment``. On ranks other than 0, the property returns an object that
    accepts all calls and does nothing.

    Write the decorator on the line below ``@property``.
    """

    @functools.wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if rank_zero_only.rank == 0 else DummyLogger().experiment

    return experiment


def _scan_checkpoints(
    checkpoint_callback: Any, logged_model_time: Mapping[str, float]
) -> list[tuple[float, str, Any, str]]:
    """Return the checkpoints that a logger has not uploaded yet. Call this in ``after_save_checkpoint``.

    Args:
        checkpoint_callback: the callback.
        logged_model_time: the modification times of the uploaded files, by path.

    Returns:
        For each file its modification time, path, score, and "latest", "best" or "best_k". The oldest file is first.
    """
    found: dict[str, tuple[Any, str]] = {}
    for tag, path, score in (
        ("latest", "last_model_path", "current_score"),
        ("best", "best_model_path", "best_model_score"),
    ):
        if hasattr(checkpoint_callback, path) and hasattr(checkpoint_callback, score):
            found[getattr(checkpoint_callback, path)] = getattr(checkpoint_callback, score), tag
    found |= {path: (score, "best_k") for path, score in getattr(checkpoint_callback, "best_k_models", {}).items()}
    files = [(os.path.getmtime(path), path, *rest) for path, rest in found.items() if os.path.isfile(path)]
    new = [each for each in files if logged_model_time.get(each[1], -math.inf) < each[0]]
    return sorted(new, key=lambda each: each[:2])


def merge_dicts(
    dicts: Sequence[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Any] | None = None,
    default_func: Callable[[Sequence[float]], float] = statistics.fmean,
) -> dict[str, Any]:
    """Merge dictionaries. A function combines the values of each key. Nested dictionaries are merged, too.

    Args:
        dicts: the dictionaries; their keys can differ.
        agg_key_funcs: the function for each key. For a key with nested dictionaries, pass a dictionary of functions.
        default_func: the function for keys that ``agg_key_funcs`` lacks.
    """
    functions = agg_key_funcs or {}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in dicts for key in one):
        values = [one[key] for one in dicts if key in one]
        function = functions.get(key)
        if isinstance(values[0], Mapping):
            merged[key] = merge_dicts(values, function, default_func)
        else:
            merged[key] = (function or default_func)(values)
    return merged


# ---- private names that third-party loggers import -------------------------------------------------------------------


def _convert_params(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    return dict(vars(params)) if isinstance(params, Namespace) else dict(params or {})


def _flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Flatten nested mappings and namespaces into one dictionary with joined keys."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        value = vars(value) if isinstance(value, Namespace) else value
        flat.update(_flatten_dict(value, delimiter, name) if isinstance(value, Mapping) else {name: value})
    return flat


def _sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Call each function without arguments, and replace it by the result; if the call fails, by its name."""
    return {key: _called(value) for key, value in params.items()}


def _called(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    if callable(value):
        try:
            result = value()
        except Exception:  # a user's function can need arguments
            return getattr(value, "__name__", None)
        return getattr(value, "__name__", None) if callable(result) else result
    return value


def _sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values other than numbers, strings and tensors to strings."""
    return {key: value if isinstance(value, (bool, int, float, str, Tensor)) else str(value)
            for key, value in params.items()}  # fmt: skip


def _add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Add ``prefix`` to every key; an empty prefix changes nothing."""
    return {f"{prefix}{separator}{key}": value for key, value in metrics.items()} if prefix else metrics
