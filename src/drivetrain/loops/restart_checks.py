"""Check what a checkpoint says about the restart point of a fit, before the loop relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain.base.restoring import (
    WrongForm,
    check_generators,
    check_rng_state,
    count,
    entry,
    expect,
    number,
    restoring,
)
from drivetrain.data.kept import check_loader_states, check_worker_state
from drivetrain.data.loader_passes import Passes
from drivetrain.data.passes import CombinedPasses
from drivetrain.errors import CheckpointError, shown
from drivetrain.logbook.entry import Options
from drivetrain.loops.metrics import metrics_in
from drivetrain.loops.progress import Progress
from drivetrain.loops.restart import shard_places
from drivetrain.loops.window import Window
from drivetrain.module.hooks import LOG_RULES

State = Mapping[str, Any]

_REDUCTIONS = ("mean", "sum", "min", "max")

# What every version has written, and what without which training would silently begin elsewhere.
_COUNTERS = ("current_epoch", "batches_done", "earlier_batches", "global_step", "stepped_batches")


def check_progress(saved: Any) -> None:
    """Check that the counters are counters.

    Raises:
        CheckpointError: one is missing or of another kind.
    """
    with restoring("the progress of the fit"):
        for name in _COUNTERS:
            entry(saved, name, int)
        for name, own in {**Progress().state_dict(), **Window().place()}.items():
            if name not in saved:
                continue
            value, place = saved[name], f"[{name!r}]"
            if isinstance(own, bool):
                expect(value, bool, place)
            elif isinstance(own, int):
                count(value, place)
        expect(saved.get("should_stop", False), bool, "['should_stop']")
        if (validation := saved.get("validation", "")) not in ("", "running", "done"):
            raise WrongForm("['validation']", f"is {shown(validation)}, and '', 'running' or 'done' is expected")
        for stage, counts in expect(saved.get("eval_steps", {}), Mapping, "['eval_steps']").items():
            place = f"['eval_steps'][{shown(stage)}]"
            expect(stage, str, place)
            for each in expect(counts, list, place):
                count(each, place)
        held, divisor = saved.get("held", 0), saved.get("divisor", 1)
        if held >= divisor and (held or not divisor):
            raise WrongForm("['held']", f"is {held}, of a window of {divisor} batches that is not complete")
        if saved.get("epoch_cut") and not saved.get("epoch_ending"):  # the counters are past an epoch that was cut
            for name, least in (("current_epoch", 1), ("earlier_batches", saved.get("cut_batches", 0))):
                if saved[name] < least:
                    raise WrongForm(f"[{name!r}]", f"is {saved[name]}, and at least {least} is expected")


def check_restart(restart: Any, module: nn.Module, complete: bool = False) -> None:
    """Check that the loop can resume at ``restart``.

    The position in the training data is checked later, when the loader is made.

    Args:
        restart: the entry of a checkpoint, with the random state.
        module: what is trained.
        complete: this package wrote it, so nothing may be missing; files of other makes know less.

    Raises:
        CheckpointError: something is of another kind; the message names it.
    """
    with restoring("the restart point"):
        expect(restart, Mapping)
        for name in ("data", "logged", "callback_metrics", "metrics") if complete else ():
            if name not in restart:
                raise WrongForm(f"[{name!r}]", "is missing")
        expect(restart.get("data"), (Mapping, type(None)), "['data']")
        for name in ("exact", "settled", "cut_off"):
            expect(restart.get(name, False), bool, f"[{name!r}]")
        for index, name in enumerate(expect(restart.get("ahead", []), (list, tuple), "['ahead']")):
            expect(name, str, f"['ahead'][{index}]")
        if restart.get("samples") is not None:
            count(restart["samples"], "['samples']")
        if (order := expect(restart.get("order"), (Mapping, type(None)), "['order']")) is not None:
            entry(order, "sampler", str, "['order']")
            for key in ("samples", "dataset"):
                if entry(order, key, (int, type(None)), "['order']") is not None:
                    count(order[key], f"['order'][{key!r}]")
            entry(order, "options", Mapping, "['order']")
        for stage, epoch in expect(restart.get("loaders", {}), Mapping, "['loaders']").items():
            expect(stage, str, "['loaders']")
            count(epoch, f"['loaders'][{stage!r}]")
        for name, value in expect(restart.get("callback_metrics", {}), Mapping, "['callback_metrics']").items():
            expect(name, str, "['callback_metrics']")
            number(value, f"['callback_metrics'][{name!r}]")
    with restoring("the validation loaders"):
        check_loader_states(restart.get("val_loaders", []))
    if (rng := restart.get("rng")) is not None:
        with restoring("the random state"):
            check_rng_state(rng)
    with restoring("the logged values"):
        for index, state in enumerate(expect(restart.get("logged", []), list)):
            _check_logged(state, f"[{index}]", module)
    with restoring("the gradients of a window"):
        _check_window(restart, module)
    with restoring("the metric objects"):
        metrics = metrics_in(module)
        for name, state in expect(restart.get("metrics", {}), Mapping).items():
            expect(name, str)
            count(entry(state, "updates", int, f"[{name!r}]"), f"[{name!r}]['updates']")
            _check_metric(entry(state, "states", Mapping, f"[{name!r}]"), metrics.get(name), f"[{name!r}]['states']")


def _check_metric(states: State, metric: nn.Module | None, place: str) -> None:
    if metric is None:  # the module has no such metric any more, and nothing reads the states
        return
    own = vars(metric)["_defaults"]
    for key, value in states.items():
        if key not in own:
            raise WrongForm(f"{place}[{shown(key)}]", "is no state of this metric")
        if isinstance(own[key], list):
            expect(value, (list, Tensor), f"{place}[{key!r}]")
            continue
        expect(value, (Tensor, bool, int, float), f"{place}[{key!r}]")
        # A state that begins as a single number may take another shape with its first update.
        shape = own[key].shape if isinstance(own[key], Tensor) and own[key].numel() > 1 else None
        if shape is not None and isinstance(value, Tensor) and value.shape != shape:
            raise WrongForm(f"{place}[{key!r}]", f"has the shape {tuple(value.shape)}, and {tuple(shape)} is expected")


def _check_logged(state: Any, place: str, module: nn.Module) -> None:
    expect(entry(state, "name", str, place), str)
    if entry(state, "hook", str, place) not in LOG_RULES:
        raise WrongForm(f"{place}['hook']", f"is {state['hook']!r}, in which nothing can be logged")
    expect(entry(state, "dataloader_idx", (int, type(None)), place), (int, type(None)))
    options = entry(state, "options", Mapping, place)
    if not isinstance(reduction := options.get("reduce_fx"), str) or reduction not in _REDUCTIONS:
        raise WrongForm(f"{place}['options']['reduce_fx']", f"is {shown(reduction)}, which is no reduction")
    if unknown := [key for key in options if key not in Options._fields]:
        raise WrongForm(f"{place}['options']", f"has the unknown entry {shown(unknown[0])}")
    for key in ("prog_bar", "enable_graph", "add_dataloader_idx"):
        entry(options, key, bool, f"{place}['options']")
    for key in ("logger", "on_step", "on_epoch"):
        entry(options, key, (bool, type(None)), f"{place}['options']")
    for key in ("total", "last"):
        if (value := entry(state, key, (Tensor, bool, int, float, type(None)), place)) is not None:
            number(value, f"{place}[{key!r}]")
    number(entry(state, "weight", (Tensor, bool, int, float), place), f"{place}['weight']")
    entry(state, "fresh", bool, place)
    if (metric := entry(state, "metric", (str, type(None)), place)) is not None:
        logged = dict(module.named_modules()).get(metric)  # None: it is in a list, or the module has it no more
        if logged is not None and not (hasattr(logged, "compute") and hasattr(logged, "reset")):
            raise WrongForm(f"{place}['metric']", f"is {metric!r}, a {type(logged).__name__} and no metric object")
    number(expect(state.get("last_weight", 1), (Tensor, bool, int, float), f"{place}['last_weight']"), place)
    if (pending := state.get("pending")) is not None:  # files of earlier versions have none
        if expect(pending, Tensor, f"{place}['pending']").ndim != 1 or not len(pending) or pending.is_complex():
            raise WrongForm(f"{place}['pending']", f"has the shape {tuple(pending.shape)}, and a list is expected")
        number(entry(state, "pending_weight", (Tensor, bool, int, float), place), f"{place}['pending_weight']")


def _check_window(restart: State, module: nn.Module) -> None:
    from drivetrain.strategies.sharded_state import local_shard  # here, so that importing the Trainer stays quick

    if "window" not in restart:
        return
    window = entry(restart, "window", Mapping)
    for key in ("expected", "graded", "position"):
        count(entry(window, key, int, "['window']"), f"['window'][{key!r}]")
    if not window["expected"]:
        raise WrongForm("['window']['expected']", "is 0, and a window has at least one batch")
    number(entry(window, "total", (Tensor, int, float), "['window']"), "['window']['total']")
    if entry(window, "reference", (Tensor, int, float, type(None)), "['window']") is not None:
        number(window["reference"], "['window']['reference']")
    gradients = entry(restart, "gradients", Mapping)
    # Of a sharded parameter it is this rank's shard, or the whole where a strategy has not exchanged it yet.
    shapes = {name: {local_shard(each).shape, each.shape} for name, each in module.named_parameters()}
    own = dict(module.named_parameters())
    held, places = expect(restart.get("shards", {}), Mapping, "['shards']"), shard_places(module)
    complex_ = {name: parameter.is_complex() for name, parameter in module.named_parameters()}
    for name, gradient in gradients.items():
        shape = expect(gradient, Tensor, f"['gradients'][{name!r}]").shape
        wrong = WrongForm(f"['gradients'][{name!r}]", f"is a gradient of shape {tuple(shape)}, of no such parameter")
        if name not in own:
            raise wrong
        here, place = local_shard(own[name]), held.get(name)
        is_elsewhere = place is not None and place != places.get(name) and shape != own[name].shape
        if shape not in shapes[name] or is_elsewhere:
            if place is None and here is own[name]:
                raise wrong
            raise CheckpointError(
                "The checkpoint was saved inside a window of batches, where each rank keeps its part of the gradients. "
                f"Of {name} this rank had shape {tuple(shape)}{_at(place)}, and now it holds shape "
                f"{tuple(here.shape)}{_at(places.get(name))}. Resume with the strategy and the mesh that it was saved "
                "with, or from a checkpoint that was saved between two windows."
            )
        if gradient.is_complex() and not complex_[name]:
            raise WrongForm(f"['gradients'][{name!r}]", "is a complex gradient of a real parameter")


def _at(places: Any) -> str:
    return "" if not places else f" at {', '.join(str(tuple(each)) for each in places)}"


def check_position(position: Any, passes: Passes | CombinedPasses) -> None:
    """Check that ``position`` is a position in a pass over these loaders.

    Raises:
        CheckpointError: it is not.
    """
    with restoring("the position in the training data"):
        _check_position(position, passes.position(states=False), "")  # a loader may have no state before it is iterated


def _check_position(position: Any, own: State, place: str) -> None:
    expect(position, Mapping, place)
    if "parts" in own or "parts" in position:
        parts = expect(position.get("parts", []), (list, tuple), f"{place}['parts']")
        for index, (part, its_own) in enumerate(zip(parts, own.get("parts", ()), strict=False)):
            _check_position(part, its_own, f"{place}['parts'][{index}]")
        return
    for key in ("given", "begun"):
        count(entry(position, key, int, place), f"{place}[{key!r}]")
    entry(position, "ended", bool, place)
    check_generators(entry(position, "generators", (list, tuple), place), f"{place}['generators']")
    if "rng" in position:
        check_rng_state(position["rng"], f"{place}['rng']")
    for key in ("before", "drawing"):  # the random states in which the pass and its draws of samples began
        if key == "before" or key in position:  # only some loaders draw samples
            _check_start(entry(position, key, Mapping, place), position, f"{place}[{key!r}]")
    for key in ("workers", "workers_after"):
        for worker, state in expect(position.get(key, {}), Mapping, f"{place}[{key!r}]").items():
            count(worker, f"{place}[{key!r}]")
            if state is not None:
                check_worker_state(state, f"{place}[{key!r}][{worker}]")


def _check_start(state: State, position: State, place: str) -> None:
    if not state:  # there was none yet
        if position["given"]:
            raise WrongForm(place, f"is empty, although {position['given']} batches were fetched")
        return
    check_rng_state(state, place)
    if len(entry(state, "generators", (list, tuple), place)) != len(position["generators"]):
        raise WrongForm(
            f"{place}['generators']",
            f"has {len(state['generators'])} items, and {len(position['generators'])} are expected",
        )
