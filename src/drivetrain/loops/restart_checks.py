"""Check the loop's state in a checkpoint before the loop resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain.base.restoring import COUNT, Form, WrongForm, check_rng_state, count, entry, expect, restoring
from drivetrain.data.kept import LOADER_STATES
from drivetrain.data.loader_passes import POSITION, Passes
from drivetrain.errors import CheckpointError, shown
from drivetrain.logbook.entry import LOGGED_STATE
from drivetrain.loops.metrics import METRIC_STATE, metrics_in
from drivetrain.loops.progress import Progress
from drivetrain.loops.restart import RESTART, shard_places
from drivetrain.loops.window import Window
from drivetrain.module.hooks import LOG_RULES
from drivetrain.strategies import sharded_state

State = Mapping[str, Any]

# Checkpoints of every version contain these counters. Without these counters, training would start at a wrong point.
_COUNTERS = ("current_epoch", "batches_done", "earlier_batches", "global_step", "stepped_batches")


def _validation(value: Any, place: str) -> None:
    if value not in ("", "running", "done"):
        raise WrongForm(place, f"is {shown(value)}, and '', 'running' or 'done' is expected")


_PROGRESS: Form = {
    **dict.fromkeys(_COUNTERS, int),
    **{
        f"{name}?": bool if isinstance(own, bool) else count
        for name, own in {**Progress().state_dict(), **Window().place()}.items()
        if isinstance(own, int)
    },
    "should_stop?": bool, "validation?": _validation, "eval_steps?": {str: (list, [COUNT])},
}  # fmt: skip
"""The types of a checkpoint's counters, taken from the counters of a new fit."""


def check_progress(saved: Any) -> None:
    """Check the counters of a checkpoint.

    Raises:
        CheckpointError: a counter is missing or has another type.
    """
    with restoring("the progress of the fit"):
        expect(saved, _PROGRESS)
        held, divisor = saved.get("held", 0), saved.get("divisor", 1)
        if held >= divisor and (held or not divisor):
            raise WrongForm("['held']", f"is {held}, of a window of {divisor} batches that is not complete")
        # when an epoch ended early, current_epoch grew by 1 and earlier_batches by cut_batches
        if saved.get("epoch_cut") and not saved.get("epoch_ending"):
            for name, least in (("current_epoch", 1), ("earlier_batches", saved.get("cut_batches", 0))):
                if saved[name] < least:
                    raise WrongForm(f"[{name!r}]", f"is {saved[name]}, and at least {least} is expected")


def check_restart(restart: Any, module: nn.Module, complete: bool = False) -> None:
    """Check that the loop can resume at ``restart``.

    The position in the training data is checked later, when the loader is created.

    Args:
        restart: a result of :func:`~drivetrain.loops.restart.capture` from a checkpoint.
        module: the module to train.
        complete: whether this package wrote the checkpoint. If true, a missing entry is an error.

    Raises:
        CheckpointError: an entry has a wrong type. The message names the entry.
    """
    with restoring("the restart point"):
        written = ("data", "logged", "callback_metrics", "metrics") if complete else ()
        expect(restart, {**dict.fromkeys(written, object), **RESTART})
    with restoring("the validation loaders"):
        expect(restart.get("val_loaders", []), LOADER_STATES)
    with restoring("the random state"):
        expect(restart.get("rng"), (None, check_rng_state))
    with restoring("the logged values"):
        for index, state in enumerate(expect(restart.get("logged", []), (list, [LOGGED_STATE]))):
            _check_logged(state, f"[{index}]", module)
    with restoring("the gradients of a window"):
        _check_window(restart, module)
    with restoring("the metric objects"):
        metrics = metrics_in(module)
        for name, state in expect(restart.get("metrics", {}), {str: METRIC_STATE}).items():
            _check_metric(state["states"], metrics.get(name), f"[{name!r}]['states']")


def _check_metric(states: State, metric: nn.Module | None, place: str) -> None:
    if metric is None:  # the module no longer has this metric
        return
    own = vars(metric)["_defaults"]
    for key, value in states.items():
        if key not in own:
            raise WrongForm(f"{place}[{shown(key)}]", "is no state of this metric")
        if isinstance(own[key], list):
            expect(value, (list, Tensor), f"{place}[{key!r}]")
            continue
        expect(value, (Tensor, bool, int, float), f"{place}[{key!r}]")
        # If the initial state is a single number, its shape is not compared, because the first update may change the
        # shape.
        shape = own[key].shape if isinstance(own[key], Tensor) and own[key].numel() > 1 else None
        if shape is not None and isinstance(value, Tensor) and value.shape != shape:
            raise WrongForm(f"{place}[{key!r}]", f"has the shape {tuple(value.shape)}, and {tuple(shape)} is expected")


def _check_logged(state: Any, place: str, module: nn.Module) -> None:
    if state["hook"] not in LOG_RULES:
        raise WrongForm(f"{place}['hook']", f"is {state['hook']!r}, in which nothing can be logged")
    # None if the metric object is in a list or no longer exists
    logged = dict(module.named_modules()).get(state["metric"])
    if logged is not None and state["metric"] and not (hasattr(logged, "compute") and hasattr(logged, "reset")):
        raise WrongForm(f"{place}['metric']", f"is {state['metric']!r}, a {type(logged).__name__} and no metric object")


def _check_window(restart: State, module: nn.Module) -> None:
    if "window" not in restart:
        return
    if not entry(restart, "window", Window.FORM)["expected"]:
        raise WrongForm("['window']['expected']", "is 0, and a window has at least one batch")
    gradients = entry(restart, "gradients", Mapping)
    own = dict(module.named_parameters())
    held, places = expect(restart.get("shards", {}), Mapping, "['shards']"), shard_places(module)
    for name, gradient in gradients.items():
        shape = expect(gradient, Tensor, f"['gradients'][{name!r}]").shape
        wrong = WrongForm(f"['gradients'][{name!r}]", f"is a gradient of shape {tuple(shape)}, of no such parameter")
        if name not in own:
            raise wrong
        here, place = sharded_state.local_shard(own[name]), held.get(name)
        is_elsewhere = place is not None and place != places.get(name) and shape != own[name].shape
        # A gradient may have the shape of this rank's shard, or, before an exchange, the shape of the complete
        # parameter.
        if shape not in (here.shape, own[name].shape) or is_elsewhere:
            if place is None and here is own[name]:
                raise wrong
            raise CheckpointError(
                "The checkpoint was saved inside a window of batches, where each rank keeps its part of the gradients. "
                f"This rank's part of {name} had the shape {tuple(shape)}{_at(place)}, and now it has the shape "
                f"{tuple(here.shape)}{_at(places.get(name))}. Resume with the strategy and the mesh that it was saved "
                "with, or from a checkpoint that was saved between two windows."
            )
        if gradient.is_complex() and not own[name].is_complex():
            raise WrongForm(f"['gradients'][{name!r}]", "is a complex gradient of a real parameter")


def _at(places: Any) -> str:
    return "" if not places else f" at {', '.join(str(tuple(each)) for each in places)}"


def check_position(position: Any, passes: Passes) -> None:
    """Check that ``position`` is a position in a pass over these loaders.

    Raises:
        CheckpointError: ``position`` does not have the form of a position of these loaders.
    """
    with restoring("the position in the training data"):
        _check_position(position, passes.position(states=False), "")  # a loader may have no state before its first pass


def _check_position(position: Any, own: State, place: str) -> None:
    expect(position, Mapping, place)
    if "parts" in own or "parts" in position:
        parts = expect(position.get("parts", []), (list, tuple), f"{place}['parts']")
        for index, (part, its_own) in enumerate(zip(parts, own.get("parts", ()), strict=False)):
            _check_position(part, its_own, f"{place}['parts'][{index}]")
        return
    expect(position, POSITION, place)
    for key in ("before", "drawing"):  # random states before the pass and before drawing samples
        if key == "before" or key in position:  # "drawing" only exists for loaders that draw samples
            _check_start(entry(position, key, Mapping, place), position, f"{place}[{key!r}]")


def _check_start(state: State, position: State, place: str) -> None:
    if not state:  # the pass had not begun
        if position["given"]:
            raise WrongForm(place, f"is empty, although {position['given']} batches were fetched")
        return
    check_rng_state(state, place)
    if len(entry(state, "generators", (list, tuple), place)) != len(position["generators"]):
        raise WrongForm(
            f"{place}['generators']",
            f"has {len(state['generators'])} items, and {len(position['generators'])} are expected",
        )
