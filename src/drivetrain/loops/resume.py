"""Resume a fit at the point of its checkpoint: at the start of an epoch, inside an epoch, or after its last batch.

``restart.py`` describes the saved state. This module restores the parts of the state in the order in which the loop of
a new run sets them. The random state is restored last, immediately before the next random number is drawn.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import naming, restoring
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.data.feed import Resumed, gives_up, position_after_end, set_epoch
from drivetrain.data.passes import is_replayed
from drivetrain.data.samplers import order_of, samples_in
from drivetrain.data.stateful import samples_of_all_ranks
from drivetrain.errors import CheckpointError, number_of
from drivetrain.loops.early import start_again
from drivetrain.loops.epoch import Batches, Bound, after_batch, batches_and_step
from drivetrain.loops.loaders import rank_batches
from drivetrain.loops.metrics import metrics_in, set_states
from drivetrain.loops.pieces import exchanges_always
from drivetrain.loops.progress import Phase
from drivetrain.loops.restart import counted, samples_done, states_now, validation_start
from drivetrain.loops.restart_checks import check_position
from drivetrain.loops.run import Run
from drivetrain.module.hooks import LOG_RULES

State = dict[str, Any]
Epoch = tuple[Batches, Bound]
"""The arguments of :func:`drivetrain.loops.epoch.run_batches`: the batches of an epoch, and the bound step."""


def enter_epoch(run: Run) -> Epoch | None:
    """Start the next epoch, or resume the epoch in which the checkpoint was saved.

    Every epoch of a fit begins in this function.

    Returns:
        The epoch's batches and its bound step; ``None`` if the checkpoint was saved after the epoch's last batch.
    """
    progress, state = run.progress, run.restart
    epoch: Epoch | None = None
    if state is None or not (progress.epoch_ending or progress.batches_done > 0):
        epoch = _start(run)
    elif progress.epoch_ending:
        _resume_end(run, state)
    else:
        epoch = _resume_middle(run, state)
    run.restart = None
    return epoch


def _start(run: Run) -> Epoch:
    """Start an epoch. If the run resumes at an epoch's start, restore the loop's state before the first batch."""
    progress, loaders = run.progress, run.loaders
    progress.start_epoch()
    run.book.leave_batch()
    run.book.begin("train")
    run.window.batches_done, run.window.size = 0, 1
    reloaded = loaders.reload("fit", run.limits.reload_every)
    loaders.divide_from(0)
    loader = loaders.training()
    progress.expect_batches(loaders.count_training())  # limits may have changed
    set_epoch(loader, progress.current_epoch)
    loaders.passes().start_epoch()
    if reloaded and parity.current().early_iterators:
        start_again(run)
    run.kept.window_start = None
    run.kept.at_epoch_start = states_now(run)
    run.hooks.call("on_train_epoch_start")
    if run.restart is not None:
        warn_if_inexact(run)
        _restore_window(run)
        _restore_between_passes(run)
        restore_random_state(run)
        run.restart = None
    epoch = batches_and_step(run, loader)
    if (keep_start := epoch[1].keep_start) is not None:
        keep_start()
    return epoch


def _resume_end(run: Run, state: State) -> None:
    run.progress.resume_at(Phase.EPOCH_END)
    _restore_loop(run, state)
    _restore_between_passes(run)
    if run.progress.epoch_cut and state.get("data") is not None:
        _count_in_batches_of_this_loader(run, state)
        _keep_position(run, state)
    restore_random_state(run)
    run.restored = True
    run.book.end_epoch()


def _resume_middle(run: Run, state: State) -> Epoch:
    """Resume inside an epoch. Finish the last batch (log, validate, step the schedulers), then prepare the remaining
    batches.
    """
    progress, loaders = run.progress, run.loaders
    progress.resume_at(Phase.BATCH_END)
    run.book.leave_batch()
    run.book.begin("train")
    set_epoch(loaders.training(), progress.current_epoch)
    _restore_loop(run, state)
    with naming(run.resumed_from):
        _check_order(run, state)
        _count_in_batches_of_this_loader(run, state)
        loader, passes = loaders.training(), loaders.passes()
        progress.expect_batches(loaders.count_training())
        data, done = state.get("data"), progress.batches_done
        _check_batches_done(run, data)
        if data is not None:
            check_position(data, passes)
    if is_replayed(loader) and not progress.is_last_batch:
        rank_zero_info(
            f"The loader {type(loader).__name__} does not know where it is: its first {done} batches are fetched again "
            "and left out."
        )
    caught_up: dict[str, Any] = {}  # the random state before the next batch is drawn
    batches, bound = batches_and_step(run, loader, Resumed(done, caught_up=lambda: set_rng_state(caught_up)))
    run.book.enter_if_left(run.hooks.scope("training_step"))
    _restore_end_of_pass(run, state, batches)
    run.restored = True  # from here on, a checkpoint contains this run's state, not the loaded state
    if progress.validation == "running":
        run.kept.before_validation = validation_start(run)
    if not state.get("settled"):
        after_batch(run, bound)  # the earlier run may not have logged the batch's values
    if progress.is_last_batch:
        return iter(()), bound
    if data is None or progress.global_step >= run.limits.max_steps or (progress.should_stop and run.may_stop()):
        _restore_between_passes(run)
        _keep_position(run, state)
        return iter(()), bound
    if bound.keep_start is not None:
        bound.keep_start()  # first, because fetching ahead changes the loader's position
    caught_up.update(rng_state())
    _restore_position(run, data, caught_up)
    return batches, bound


def _restore_end_of_pass(run: Run, state: State, batches: Batches) -> None:
    """Restore the random state. If the checkpoint was saved after an epoch's last batch, also exhaust the loader,
    because a loader may draw random numbers at its end.
    """
    progress, passes = run.progress, run.loaders.passes()
    data, own = state.get("data"), run.loaders.count_own_training()
    asks_for_end = progress.is_last_batch and progress.batches_done <= own and not gives_up(run.loaders.training(), own)
    if asks_for_end and data is not None:
        with naming(run.resumed_from):
            passes.resume(data)
        restore_random_state(run)
        next(batches, None)  # exhaust the loader
        # checkpoints that are saved in the following validation contain this position
        state["data"] = position_after_end(passes, data)
        return
    if progress.is_last_batch:
        _restore_between_passes(run)
    restore_random_state(run)


def _keep_position(run: Run, state: State) -> None:
    """Keep the position in the data for later checkpoints; called if the epoch ends without a further batch."""
    run.loaders.passes().flight = state.get("data")


def _restore_position(run: Run, data: dict[str, Any], caught_up: dict[str, Any]) -> None:
    """Restore the loader's position in its pass. ``caught_up``: the random state before the next batch is drawn."""
    passes = run.loaders.passes()
    with naming(run.resumed_from):
        if run.progress.batches_done < run.loaders.count_own_training():
            passes.resume(data)
            set_rng_state(data.get("rng", caught_up))  # "rng" exists if batches were fetched ahead
            return
        # this rank has no batch left, so it repeats its last batch while other ranks continue
        move, transfer = run.transfer
        batch = passes.last_batch(data)
        run.uneven.repeat(batch if transfer is not None else move(batch))
        passes.resume(data)
        set_rng_state(caught_up)
        next(iter(passes), None)  # exhaust the loader


def _check_order(run: Run, state: State) -> None:
    """Check that the loader's order of samples is equal to the order in the checkpoint's run.

    Raises:
        CheckpointError: the samplers, their options or their numbers of samples differ.
    """
    loader = run.loaders.training()
    then, now = state.get("order"), order_of(loader)
    found = next(_differences(then, now, type(loader).__name__), None) if then and now else None
    if found is not None:
        raise CheckpointError(
            f"The checkpoint was saved in the middle of an epoch {found[0]}: samples would be skipped or repeated. "
            f"Pass a loader {found[1]}, or resume from a checkpoint that was saved at the end of an epoch."
        )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
    """Yield the differences between two orders of samples. Each difference is two phrases of an error message: what
    differs, and which loader the user should pass.
    """
    sampler = now["sampler"]
    if then["sampler"] != sampler:
        what = f"whose samples a {then['sampler']} had ordered, and this {kind} has a {sampler}"
        yield what, "with the same shuffle and sampler"
    if then.get("own_batches", now["own_batches"]) != now["own_batches"]:
        yield "whose position is in batches on one side and in samples on the other", "with the same batches"
    for name, value in now["options"].items():
        if (before := then["options"].get(name, value)) != value:
            yield f"whose {sampler} had {name}={before}, and now it has {name}={value}", "with the same sampler"
    for key in ("samples", "dataset"):
        before, after = then[key], now[key]
        grows = sampler == "SequentialSampler" and None not in (before, after) and before <= after
        if before != after and not grows and None not in (before, after):
            yield f"over {before} samples, and this {kind} draws from {after}", "over the same data"


def _count_in_batches_of_this_loader(run: Run, state: State) -> None:
    """If the batch size or the number of ranks has changed, convert the saved position into batches of this run's
    loader.

    Raises:
        CheckpointError: the number of ranks has changed, and the position cannot be converted for this loader.
    """
    loaders = run.loaders
    saved, data, ranks = state.get("samples"), state.get("data"), state.get("saved_by")
    replays = ranks is not None and data is not None and data.get("loader", data) is None
    loaders.divide_from(state.get("divided_from", 0), shares=replays and run.window.gather is None)
    loaders.passes()
    found, loader = samples_done(run, data), loaders.training()
    if (of_all := samples_of_all_ranks(data)) is not None:
        size = (getattr(loader, "batch_size", None) or 0) * run.engine.strategy.data.size
        if ranks is not None and size and of_all // size != run.progress.batches_done:
            _count_as(run, state, of_all // size)
        return
    has_own_loader = run.window.gather is not None and rank_batches(loader) is None  # only rank 0's count was saved
    if ranks is not None and (has_own_loader or found is None):
        raise CheckpointError(
            f"The checkpoint was saved in the middle of an epoch by {ranks} processes, and the samples of this "
            f"{type(loader).__name__} are not shared out by the Trainer, so it cannot go on there. Resume with "
            f"{ranks} processes, or from a checkpoint that was saved at the end of an epoch."
        )
    if saved is None or found is None or data is None or found == saved or has_own_loader:
        return
    batches = bisect.bisect_left(range(saved), saved, key=lambda number: samples_in(loader, number) or 0)
    if samples_in(loader, batches) != saved:
        batches = loaders.divide_from(saved)
    _count_as(run, state, batches)


def _count_as(run: Run, state: State, batches: int) -> None:
    """Count the finished samples of the epoch as ``batches`` batches of this run's loader."""
    progress, data, loader = run.progress, state["data"], run.loaders.training()
    rank_zero_info(
        f"The checkpoint was saved after {counted(state)} of an epoch, in {progress.batches_done} batches. They count "
        f"as {number_of(batches, 'batch')} of this {type(loader).__name__}, and training continues with the "
        "next one."
        + (" In the unfinished window, each batch counts alike." if run.window.batches_done else "")
        + (" Its workers draw other random numbers than before." if data.get("workers") else "")
    )
    state["data"] = {**{key: value for key, value in data.items() if key != "workers"}, "given": batches}
    progress.count_batches_as(batches)


def _check_batches_done(run: Run, data: dict[str, Any] | None) -> None:
    """Check that the checkpoint contains a position in the training data, and that this position is inside the epoch.

    Raises:
        CheckpointError: the checkpoint does not contain the position, or the epoch now has fewer batches.
    """
    progress = run.progress
    done = progress.batches_done
    if data is None and not progress.is_last_batch:
        raise CheckpointError(
            f"The checkpoint was saved after {done} batches of epoch {progress.current_epoch}, and contains no "
            "position in the training data. Resume from one that was saved at the end of an epoch, or load only its "
            "weights."
        )
    if done >= progress.num_training_batches and not progress.is_last_batch:
        raise CheckpointError(
            f"The checkpoint was saved after {done} batches of an epoch, which now has only "
            f"{progress.num_training_batches:.0f}. Resume with limit_train_batches as it was."
        )


# ---- the parts -------------------------------------------------------------------------------------------------------


def restore_validation_loaders(run: Run) -> None:
    """Create the validation loaders that the checkpoint's run had created, and restore their states.

    A sanity check calls this function after ``on_sanity_check_start``. The random state is restored later, because
    ``val_dataloader`` may draw random numbers. The random state was saved after such draws.
    """
    if run.restart is None or run.loaders.is_made("validate"):
        return
    if (states := run.restart.get("val_loaders")) and run.validates():
        with naming(run.resumed_from):
            run.loaders.restore_evaluation("validate", states)


def _restore_loop(run: Run, state: State) -> None:
    """Restore the loop's state, except the position in the data and the random state."""
    warn_if_inexact(run)
    with naming(run.resumed_from), restoring("the restart point"):
        children: dict[str | None, Any] = dict(run.module.named_modules())
        children.update(metrics_in(run.module))
        logged = [{**entry, "metric": children.get(entry["metric"])} for entry in state.get("logged", [])]
        run.book.load_state_dict("train", logged, LOG_RULES, run.resumed_from)
    restore_results(run)
    _restore_window(run)


def restore_results(run: Run) -> None:
    """Restore the values that callbacks and schedulers monitor, and the states of metric objects."""
    if run.restart is None:
        return
    with naming(run.resumed_from), restoring("the metric objects"):
        run.book.callback_metrics.update(run.restart.get("callback_metrics", {}))
        run.book.agreed_steps.update(run.restart.get("agreed_steps", {}))
        set_states(run.module, run.restart.get("metrics", {}))


def _restore_window(run: Run) -> None:
    """Restore the state and the gradients of an incomplete window. In manual optimization, a window may span epochs."""
    if run.restart is None or "window" not in run.restart:
        return
    window = run.window
    with naming(run.resumed_from), restoring("the gradients of a window"):
        gradients, exchanged = run.restart["gradients"], run.restart["window"].get("exchanged", True)
        window.load_state_dict(run.restart["window"])
        if "saved_by" in run.restart:
            if window.reference is not None and exchanges_always(run):
                ranks = run.engine.strategy.data.size  # the saved gradients are sums over all ranks
                window.reference, window.total = window.reference * ranks, window.total * ranks
        elif not exchanged and run.engine.strategy.data.size > 1 and exchanges_always(run):
            gradients = _means_over_ranks(run, gradients)
        window.holds_own = run.module.automatic_optimization and window.batches_done == 0
        run.engine.strategy.load_open_gradients(gradients)
        run.engine.precision.restored_gradients(run.engine.device)


def _means_over_ranks(run: Run, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the means of the ``gradients`` of all ranks. The saved gradients were not exchanged yet, but this run's
    strategy exchanges gradients in every backward pass. If losses have weights, the means are weighted, too.
    """
    window, data, named = run.window, run.engine.strategy.data, dict(run.module.named_parameters())
    asked = data.gather_objects((list(gradients), window.reference, window.total))
    factor = 1.0
    if window.reference is not None:
        total = sum(float(each) for *_, each in asked)
        factor = float(window.reference) * data.size / (total or 1)
        window.reference = window.total = total
    means = {}
    for name in sorted({name for names, *_ in asked for name in names}):  # ranks may have used different parameters
        wide = torch.promote_types(named[name].dtype, torch.float32)
        own = gradients[name] if name in gradients else torch.zeros(named[name].shape)
        means[name] = data.all_reduce(own.to(run.engine.device, wide) * factor).to(named[name].dtype)
    return means


def _restore_between_passes(run: Run) -> None:
    """Restore the state that the training loader keeps between two epochs."""
    if run.restart is not None and (data := run.restart.get("data")) is not None:
        passes = run.loaders.passes()
        with naming(run.resumed_from):
            check_position(data, passes)
            passes.carry_over(data)


def restore_random_state(run: Run) -> None:
    """Restore the random generators."""
    if run.restart is not None and (rng := run.restart.get("rng")) is not None:
        with naming(run.resumed_from), restoring("the random state"):
            set_rng_state(rng)


# ---- what is not exact -----------------------------------------------------------------------------------------------


def warn_if_inexact(run: Run) -> None:
    """Warn if the resumed run will compute other numbers than an uninterrupted run."""
    state = run.restart or {}
    if ahead := state.get("ahead"):
        rank_zero_warn(
            "The checkpoint was saved in the middle of a validation, which is run again, and the states of "
            f"{', '.join(ahead)} are those at the time of saving. Save in on_validation_end or later to resume "
            "exactly."
        )
    if state.get("cut_off"):
        rank_zero_warn(
            "The checkpoint was saved between the optimizer's step and the end of its batch. Training continues behind "
            "that batch, but its end hooks and learning-rate schedulers may have been left out."
        )
    elif not state.get("exact", True):
        if not run.progress.batches_done:
            rank_zero_warn(
                "The checkpoint was saved in the first batch of an epoch. The epoch begins again with other random "
                "numbers. Save in on_train_epoch_start or on_train_batch_end to resume exactly."
            )
            return
        again = "given" in (state.get("data") or {}) and "loader" not in state["data"]
        rank_zero_warn(
            "The checkpoint was saved in the middle of a batch, which "
            + ("is run again with other random numbers" if again else "this kind of loader cannot yield again")
            + ". Save in on_train_batch_end or later to resume exactly."
        )
