"""Capture the loop's state for a checkpoint, so that a resumed fit computes the same bits as an uninterrupted fit.

A window is the batches of one optimizer step. A fit can resume at the end of a batch, in a validation, at the end of an
epoch, and at the start of an epoch. A fit that resumes in a validation repeats the validation. If only the validation's
last hooks were left, only these hooks run. After an exception, a fit can resume at the start of the window in which the
exception was raised. If a checkpoint was saved in the middle of a batch, the fit resumes at the start of that batch,
and warns that the results may differ from the results of an uninterrupted fit.

[Note: callbacks at a restart point]
The restart point (the point at which a run resumes) may be earlier than the point at which the checkpoint was saved:
the start of a window, of a validation or of an epoch. The callbacks then need their states from the restart point. A
callback with a later state would count batches twice. The optimizers and schedulers also need their learning rates and
parameter groups from the restart point, because hooks of the resumed run will change the learning rates and groups
again. If a callback saves on exceptions, the fit therefore copies these states at each possible restart point. States
of callbacks that save checkpoints are not copied, because these states describe files, and the files remain.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from drivetrain.base.introspect import defined_by_user, overrides
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import Form, count, number, scheduler_state
from drivetrain.base.seed import kept_rng_state, rng_state
from drivetrain.base.torch_private import own_buffers, version_of
from drivetrain.base.tree import is_dtensor
from drivetrain.data.samplers import order_of, samples_in
from drivetrain.data.stateful import samples_of_all_ranks
from drivetrain.errors import CheckpointError
from drivetrain.loops.metrics import copied_states, metrics_in, state_of
from drivetrain.loops.progress import Phase, RunningStage, TrainerStatus, copied
from drivetrain.loops.run import Run
from drivetrain.precision.precision import Precision
from drivetrain.strategies.sharded_state import boxes_of

State = dict[str, Any]

# integers, because comparing integers is faster than comparing members of an enumeration
_INSIDE_EPOCH = (int(Phase.BATCH_END), int(Phase.FETCH))
_SIZE: Form = (int, None, count)
RESTART: Form = {
    "data?": (Mapping, None), "exact?": bool, "settled?": bool, "cut_off?": bool, "ahead?": [str],
    "samples?": (None, count), "loaders?": {str: count}, "callback_metrics?": {str: number},
    "agreed_steps?": {str: number}, "data_ranks?": (None, count), "divided_from?": count,
    "order?": (None, {"sampler": str, "samples": _SIZE, "dataset": _SIZE, "options": Mapping}),
}  # fmt: skip
"""The types of the entries of a result of :func:`capture`. ``restart_checks.py`` checks other entries separately."""


def capture(run: Run, metrics: Mapping[str, nn.Module] | None = None, deferred: bool = False) -> State:
    """Return the loop's state for a checkpoint, so that a run can resume at the present point.

    Args:
        run: the fit.
        metrics: the module's metric objects, from :func:`metrics_in`; ``None``: call :func:`metrics_in` now.
        deferred: leave out the entries that :func:`_window_start` adds later. The entry ``rng`` may then be a function.

    Returns:
        A dictionary with these entries, some of which may be missing:

        - ``progress``: the counters; ``rng``: the random state.
        - ``data``: this rank's position in the training loader.
        - ``samples``: the number of samples that all ranks have finished; with a user's batch sampler, of batches.
        - ``order``: see :func:`~drivetrain.data.samplers.order_of`; ``data_ranks``: how many ranks share the data.
        - ``divided_from``: the samples before the point at which the epoch was resumed with another batch size.
        - ``window``, ``gradients``: for an incomplete window; ``logged``: running reductions of the epoch's values.
        - ``exact``: whether a run that resumes here computes the same as an uninterrupted run.
        - ``cut_off``: true if the run ended after an optimizer's step, and before the end of that step's batch.
        - ``settled``: true if the loop has done all that follows the last batch: log, validate, step the schedulers.
        - ``callbacks``, ``buffers``, ``options``, ``rank_state``, ``precision``: states at an earlier restart point.
        - ``ahead``: the names of the callbacks whose saved states are later than the restart point.

    Raises:
        CheckpointError: an optimizer was interrupted in the middle of its step.
    """
    progress = run.progress
    state: State
    if run.restart is not None and not run.restored:  # the loop has not resumed yet, so save the loaded state
        state = {**run.restart, "progress": _saved_progress(run)}
        return {**state, **_at_epoch_start(run)}
    if run.kept.stepping:
        raise CheckpointError(
            "The run was interrupted while an optimizer was changing the parameters, so they are neither those before "
            "the step nor those after it. Resume from the last checkpoint."
        )
    in_batch = progress.in_batch
    if (in_batch or progress.status is TrainerStatus.INTERRUPTED) and (start := _window_start(run)) is not None:
        return start
    metrics = metrics_in(run.module) if metrics is None else metrics
    states_before = {} if run.uneven is None else run.uneven.states_before()
    state = {
        "progress": _saved_progress(run),
        "rng": kept_rng_state() if deferred else rng_state(),
        "data": _position(run),
        "logged": _logged(run, metrics),
        "callback_metrics": dict(run.book.refresh()),
        "agreed_steps": {**run.book.agreed_steps},
        "metrics": {place: states_before.get(id(metric)) or state_of(metric) for place, metric in metrics.items()},
        "exact": not in_batch,
    }
    if not deferred:
        state.update(_of_the_loaders(run, state["data"]))
    if in_batch and _has_stepped(run):  # a run that resumed here would repeat the optimizer's step
        done = {"batches_done": progress.batch_idx + 1, "stepped_batches": progress.stepped_batches + 1}
        state["progress"] |= {**done, "held": 0, "stepped": True, "flush_due": run.book.copies}
        state["cut_off"] = True
        return state
    if in_batch:
        state["settled"] = True  # the previous batch was finished before this batch began
        if state["data"] is not None and "given" in state["data"]:
            state["data"] = {**state["data"], "given": progress.batches_done}  # a resumed run repeats this batch
            state["samples"] = samples_done(run, state["data"])
            if "loader" not in state["data"]:
                state["progress"]["is_last_batch"] = False  # the previous batch was not the epoch's last
    sanity = progress.loop_stage is RunningStage.SANITY_CHECKING
    if sanity or progress.validation == "running":
        state.update(run.kept.before_validation)
        state["progress"]["eval_steps"] = state.pop("eval_steps")
        if not sanity and "callbacks" not in state:
            stateful = [each for each in run.hooks.stateful_callbacks() if each.changes_in_validation]
            state["ahead"] = [type(callback).__name__ for callback in stateful if callback.state_dict()]
    if run.kept.draws_undone:
        state.update({name: run.kept.before_validation[name] for name in ("rng", "val_loaders")})
    state.update(_at_epoch_start(run))
    if run.holds_gradients:
        state["window"] = run.window.state_dict()
        state["gradients"] = run.engine.strategy.open_gradients()
        state["shards"] = shard_places(run.module)
    return state


def shard_places(module: nn.Module) -> dict[str, list[list[int]]]:
    """Return the offset of this rank's shard in each sharded parameter. Parameters without shards have no entry.

    The shape does not identify a shard, because two strategies may make equally large shards at different offsets.
    """
    sharded = {name: parameter for name, parameter in module.named_parameters() if is_dtensor(parameter)}
    if not sharded:
        return {}

    return {name: [list(offsets) for offsets, _ in boxes_of(each)] for name, each in sharded.items()}


def _window_start(run: Run) -> State | None:
    """Return the state that was kept at the window's start; ``None`` if a parameter has changed since the window's
    start.
    """
    start, progress = run.kept.window_start, run.progress
    if start is None or progress.epoch_ending or progress.validation:
        return None
    if run.kept.unchanged is None or not run.kept.unchanged():
        return None  # code has changed a parameter without an optimizer step
    then = start["progress"]()
    # The number of windows is compared, too, because a step that was skipped after an overflow has changed the loss
    # scale.
    names = ("current_epoch", "global_step", "stepped_batches")
    if any(then[name] != getattr(progress, name) for name in names):
        return None
    start = {**start, "progress": {**then, **start.get("place", {})}}
    start.pop("place", None)
    if callable(start["rng"]):  # add the entries that ``deferred`` left out, which do not change during an epoch
        start.update(_of_the_loaders(run, start["data"]), rng=start["rng"]())
    return start


def _of_the_loaders(run: Run, data: State | None) -> State:
    passes = run.loaders.made_passes
    return {
        "loaders": dict(run.loaders.made_in),
        "val_loaders": run.loaders.evaluation_states("validate"),
        "samples": samples_done(run, data),
        "order": None if passes is None else order_of(passes.loader),
        **run.loaders.division(),
    }


def _versions(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the parameters' version counters, which torch increases in each in-place change."""
    try:
        return [*map(version_of, parameters)]
    except RuntimeError:  # tensors created in inference mode have no version counter
        return [0 if each.is_inference() else version_of(each) for each in parameters]


def _has_stepped(run: Run) -> bool:
    """Whether the optimizer has stepped in the current batch. The result is false if no callback saves on
    exceptions.
    """
    if run.kept.window_start is None or not run.module.automatic_optimization:
        return False
    return bool(run.kept.window_start["progress"]()["global_step"] != run.progress.global_step)


def _saved_progress(run: Run) -> State:
    """Return the counters. A request to stop is saved only if ``min_epochs`` or ``min_steps`` delay the stop. A request
    that has ended the run is not saved, because the request would end the resumed run, too.
    """
    progress = run.progress
    return {
        **progress.state_dict(),
        **run.window.place(),
        "should_stop": progress.should_stop and run.stop_is_delayed(),
    }


def _at_epoch_start(run: Run) -> State:
    """Return the states from the epoch's start if the epoch has begun, but not its first batch; else return {}."""
    progress = run.progress
    starts = progress.batch_idx == -1 and not (progress.epoch_ending or progress.between_epochs)
    return run.kept.at_epoch_start if starts else {}


def _position(run: Run) -> State | None:
    if run.restart is not None:  # the loader is not created yet
        return run.restart.get("data")
    passes = run.loaders.made_passes
    if passes is None:
        return None
    if (run.progress.epoch_ending or run.progress.between_epochs) and not run.progress.epoch_cut:
        return passes.position()  # the next epoch continues after the batches fetched ahead
    return passes.flight or passes.position()


def samples_done(run: Run, data: State | None) -> int | None:
    """Return the number of the epoch's samples that all ranks together have finished at position ``data``; ``None``:
    unknown.
    """
    if (samples := samples_of_all_ranks(data)) is not None:
        return samples
    passes = run.loaders.made_passes
    return None if passes is None or data is None or "given" not in data else samples_in(passes.loader, data["given"])


def counted(state: Mapping[str, Any]) -> str:
    """Return the number of finished samples in a result of :func:`capture`, for example "30 samples"; "" if it is
    unknown.
    """
    if state.get("samples") is None:
        return ""
    own_batches = (state.get("order") or {}).get("own_batches")
    return f"{state['samples']} {'batches' if own_batches else 'samples'}"


def states_now(run: Run) -> State:
    """If a callback saves on exceptions, return copies of the states ``callbacks``, ``buffers``, ``options`` and
    ``rank_state``; else {}.

    See [Note: callbacks at a restart point]. Parameters are not copied, because only the optimizers change them.
    """
    if not run.kept.saves_on_exception:
        return {}
    strategy = run.engine.strategy
    states: State = {"callbacks": _callback_states(run), "buffers": _buffers(run), "options": Options(strategy)}
    if defined_by_user(strategy, "rank_state"):
        states["rank_state"] = copy.deepcopy(strategy.rank_state(run.module))
    return states


def _callback_states(run: Run) -> State:
    stateful = run.hooks.stateful_callbacks()
    return {callback.state_key: copy.deepcopy(callback.state_dict()) for callback in stateful}


def _buffers(run: Run) -> State:
    return {name: buffer.clone() for name, buffer in run.module.named_buffers()}


class Options:
    """A snapshot of a strategy's parameter groups, their options, and the schedulers' states."""

    def __init__(self, strategy: Any) -> None:
        self._groups = [
            (each, [{key: _copied_option(value) for key, value in group.items()} for group in each.param_groups])
            for each in strategy.optimizers
        ]
        self.schedulers = [copy.deepcopy(scheduler_state(config.scheduler)) for config in strategy.lr_scheduler_configs]
        self._parts = _parts(strategy)
        options = [group[key] for _, groups in self._groups for group in groups for key in group if key != "params"]
        self._may_change = bool(self.schedulers) or any(isinstance(each, (Tensor, list)) for each in options)

    def hold(self, strategy: Any) -> bool:
        """Return whether the snapshot is up to date. Return false if there are schedulers, or options that are tensors
        or lists, because such objects may change in place.
        """
        if self._may_change or strategy.lr_scheduler_configs:
            return False
        now = _parts(strategy)
        return len(now) == len(self._parts) and all(map(operator.is_, now, self._parts))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which the optimizers have the snapshot's parameter groups. A checkpoint that is saved inside
        contains them.
        """
        now = [(optimizer, list(optimizer.param_groups)) for optimizer, _ in self._groups]
        try:
            for optimizer, groups in self._groups:
                optimizer.param_groups[:] = groups
            yield
        finally:
            for optimizer, groups in now:
                optimizer.param_groups[:] = groups


def _parts(strategy: Any) -> list[Any]:
    """Return all objects in the optimizers' parameter groups. The caller compares the objects by identity."""
    parts: list[Any] = []
    for optimizer in strategy.optimizers:
        for group in optimizer.param_groups:
            parts += (optimizer, *group, *group.values(), *group["params"])
    return parts


def _copied_option(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value


def validation_start(run: Run) -> State:
    """Return the state before a validation. A checkpoint that is saved in the validation contains this state."""
    return {
        "rng": rng_state(),
        "eval_steps": copied(run.progress.eval_steps),
        "metrics": copied_states(run.module),
        "val_loaders": run.loaders.evaluation_states("validate"),
        **states_now(run),
    }


def _logged(run: Run, metrics: Mapping[str, nn.Module]) -> list[State]:
    """Return the epoch's running reductions of logged values. Metric objects are replaced by their paths in the
    module.
    """
    if not (states := run.book.state_dict("train")):
        return []
    places = {id(metric): place for place, metric in metrics.items()}
    places |= {id(child): name for name, child in run.module.named_modules()}
    lost = [entry["name"] for entry in states if entry["metric"] is not None and id(entry["metric"]) not in places]
    if lost and not run.progress.epoch_ending:
        rank_zero_warn(
            f"{', '.join(lost)}: the metric object that is logged under this name cannot be reached from an attribute "
            f"of {type(run.module).__name__}, so the checkpoint lacks its state. Keep it in an attribute, or in a list "
            "or dictionary that is one."
        )
    return [{**entry, "metric": places.get(id(entry["metric"]))} for entry in states]


# ---- exceptions ------------------------------------------------------------------------------------------------------


def watch_exceptions(run: Run) -> Callable[[], None]:
    """Prepare for saving after an exception. Return a function that the loop calls at the start of each window."""
    kept, progress, window, book, loaders = run.kept, run.progress, run.window, run.book, run.loaders
    strategy, precision = run.engine.strategy, run.engine.precision

    def before(*_: Any) -> None:
        kept.stepping = True

    def after(*_: Any) -> None:
        kept.stepping = False

    kept.step_hooks = [before, after]
    for optimizer in strategy.optimizers:
        run.optimizers.unbinders.append(optimizer.register_step_pre_hook(before).remove)
        run.optimizers.unbinders.append(optimizer.register_step_post_hook(after).remove)
    metrics, parameters, modules = metrics_in(run.module), list(run.module.parameters()), list(run.module.modules())
    options = Options(strategy)
    has_rank_state = defined_by_user(strategy, "rank_state")
    has_precision_state = any(overrides(precision, f"{form}state_dict", Precision) for form in ("", "deferred_"))

    def keep() -> None:
        nonlocal options
        kept.window_start = None  # the earlier snapshot is out of date
        inside = progress.slot[0] in _INSIDE_EPOCH and progress.batch_idx >= 0 and not progress.end_began
        if inside and run.restart is None and not metrics and not run.holds_gradients:
            # this does the same as capture(), but faster, because most entries are constant in this case
            passes = loaders.made_passes
            start = {
                "progress": progress.deferred_state_dict(), "rng": kept_rng_state(),
                "place": {
                    "held": 0, "divisor": window.size, "should_stop": progress.should_stop and run.stop_is_delayed(),
                },
                "data": None if passes is None else passes.flight or passes.position(),
                "agreed_steps": {**book.agreed_steps}, "logged": [], "callback_metrics": {}, "metrics": {},
                "exact": True, "settled": True,
            }  # fmt: skip
            if book.has_entries("train"):
                start["logged"] = copy.deepcopy(_logged(run, metrics))
                book.refresh()
            if book.callback_metrics:
                start["callback_metrics"] = copy.deepcopy(book.callback_metrics)
        else:
            start = capture(run, metrics, deferred=True)
            start["progress"] = functools.partial(dict, start["progress"])
            start["exact"] = start["settled"] = True
            for part in ("logged", "callback_metrics", "metrics", "window", "gradients"):
                if start.get(part):
                    start[part] = copy.deepcopy(start[part])
        # A window may change the loss scale even if its optimizer step is skipped.
        start["precision"] = (
            precision.deferred_state_dict(run.module, strategy.optimizers) if has_precision_state else dict
        )
        if "callbacks" not in start:
            options = options if options.hold(strategy) else Options(strategy)
            start["options"] = options
            start["callbacks"] = _callback_states(run)
            start["buffers"] = _buffers(run) if any(map(own_buffers, modules)) else {}
            if has_rank_state:  # the exchange of gradients may change this state
                start["rank_state"] = copy.deepcopy(strategy.rank_state(run.module))
        versions = _versions(parameters)
        kept.window_start = start
        # set here for each window, because the loop may bind its step again inside a window
        kept.unchanged = lambda: _versions(parameters) == versions and _same(parameters, run.module.parameters())

    return keep


def _same(values: Iterable[Any], now: Iterable[Any]) -> bool:
    return [*map(id, values)] == [*map(id, now)]
