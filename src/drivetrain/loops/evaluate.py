"""Validation and testing: one pass over the loaders of a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch

from drivetrain.data.feed import feed, set_epoch
from drivetrain.errors import ConfigurationError
from drivetrain.logbook import Row
from drivetrain.loops.loaders import EvalLoader
from drivetrain.loops.progress import RunningStage
from drivetrain.loops.run import Run
from drivetrain.loops.step import positional_arity
from drivetrain.seed import isolate_rng

Stage = Literal["validate", "test"]

_WORDS: dict[str, str] = {"validate": "validation", "test": "test"}
_STAGES = {"validate": RunningStage.VALIDATING, "test": RunningStage.TESTING}
_READ_AT = 64  # per-step values kept on the device before they are read together


def evaluate(run: Run, stage: Stage, loaders: list[EvalLoader], sanity: bool = False) -> list[dict[str, float]]:
    """Run the stage's step over every batch of ``loaders``, without gradients.

    Args:
        run: what to evaluate.
        stage: whose hooks and step.
        loaders: one pass over each, in order.
        sanity: a trial before training: nothing is logged.

    Returns:
        One dictionary of epoch metrics per loader; values logged in epoch hooks are in each of them.
    """
    progress = run.progress
    if not any(source.num_batches for source in loaders):
        return []
    progress.stage = RunningStage.SANITY_CHECKING if sanity else _STAGES[stage]
    in_fit = progress.fn == "fit"
    own_train = run.hooks.bind_method(f"on_{_WORDS[stage]}_model_train")
    modes = {module: module.training for module in run.module.modules()}
    with torch.inference_mode() if run.limits.inference_mode and not in_fit else torch.no_grad():
        try:
            rows = _evaluate_loaders(run, stage, loaders, sanity, read_all=not in_fit)
            if own_train is not None:
                own_train()
        finally:
            if own_train is None:
                for module, training in modes.items():
                    module.training = training  # not train(): it overwrites the submodules' own modes (trap T18)
    several = len(loaders) > 1
    return [
        {row.name: row.value for row in rows if row.entry.dataloader_idx in (None, index if several else None)}
        for index in range(len(loaders))
    ]


def _evaluate_loaders(run: Run, stage: Stage, loaders: list[EvalLoader], sanity: bool, read_all: bool) -> list[Row]:
    hooks, book, word = run.hooks, run.book, _WORDS[stage]
    book.leave_batch()
    book.group, book.epoch_done, book.copies = stage, False, True
    hooks.call_method(f"on_{word}_model_eval")
    hooks.call(f"on_{word}_start")
    hooks.call(f"on_{word}_epoch_start")
    for index, loader in enumerate(loaders):
        _evaluate_loader(run, stage, loader, index if len(loaders) > 1 else None, sanity)
    book.leave_batch()
    book.epoch_done = True
    hooks.call(f"on_{word}_epoch_end")
    book.refresh()
    rows = [] if sanity else run.publish(book.epoch_values(stage), run.progress.logger_step, read_all)
    book.reset(stage)
    hooks.call(f"on_{word}_end")
    return rows


def _evaluate_loader(run: Run, stage: Stage, source: EvalLoader, index: int | None, sanity: bool) -> None:
    """One loader. ``index`` is its number if there are several, else ``None``."""
    hooks, book, progress, word = run.hooks, run.book, run.progress, _WORDS[stage]
    step = bind_eval_step(run, stage, index)
    dataloader_idx = 0 if index is None else index
    hook_idx: tuple[int, ...] = () if index is None else (index,)
    batch_start = hooks.bind(f"on_{word}_batch_start", index)
    batch_end = hooks.bind(f"on_{word}_batch_end", index)
    move, transfer = run.transfer
    steps = progress.eval_steps_of(stage, dataloader_idx)
    rows: list[tuple[int, list[Row]]] = []  # per-step values, still on the device
    progress.num_eval_batches, progress.eval_batch_idx = source.num_batches, -1
    set_epoch(source.loader, progress.current_epoch)
    step_scope = hooks.scope(f"{word}_step", index)
    for batch_idx, (batch, _) in enumerate(
        feed(source.loader, source.num_batches, None if transfer else move, source.ahead)
    ):
        progress.eval_batch_idx = batch_idx
        if transfer is not None:
            batch = transfer(batch, dataloader_idx)
        book.scope = step_scope
        book.batch, book.size = batch, None
        for hook in batch_start:
            hook(batch, batch_idx, *hook_idx)
        outputs = step(batch, batch_idx)
        for hook in batch_end:
            hook(outputs, batch, batch_idx, *hook_idx)
        if not sanity and (values := book.step_values(stage)):
            rows.append((steps + batch_idx, values))
            if len(rows) >= _READ_AT:
                _publish_steps(run, rows)
    _publish_steps(run, rows)
    if not sanity:
        progress.eval_steps[stage][dataloader_idx] = steps + progress.eval_batch_idx + 1


def _publish_steps(run: Run, rows: list[tuple[int, list[Row]]]) -> None:
    """Read per-step values together, then log each at its own step."""
    if run.log is not None:
        flat = iter(run.book.read([row for _, values in rows for row in values]))
        for step, values in rows:
            read = [next(flat) for _ in values]
            if metrics := {row.name: row.value for row in read if row.entry.to_logger}:
                run.log(metrics, step)
    rows.clear()


def bind_eval_step(run: Run, stage: Stage, index: int | None) -> Callable[[Any, int], Any]:
    """``validation_step`` or ``test_step`` with the arguments its signature asks for (traps T39, T51)."""
    name = f"{_WORDS[stage]}_step"
    fn = getattr(run.module, name)
    parameters = inspect.signature(fn).parameters
    takes_index = "dataloader_idx" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if index is not None and not takes_index:
        raise ConfigurationError(
            f"{type(run.module).__name__}.{name} must take dataloader_idx, because there are several loaders. "
            f"Write def {name}(self, batch, batch_idx, dataloader_idx=0)."
        )
    if index is None and "dataloader_idx" in parameters and parameters["dataloader_idx"].default is inspect._empty:
        raise ConfigurationError(
            f"{type(run.module).__name__}.{name} takes dataloader_idx, but there is one loader. "
            f"Write def {name}(self, batch, batch_idx, dataloader_idx=0)."
        )
    arity = min(positional_arity(fn), 2)
    extra = {} if index is None else {"dataloader_idx": index}
    context = run.engine.forward_context()

    def step(batch: Any, batch_idx: int) -> Any:
        if context is None:
            return fn(*(batch, batch_idx)[:arity], **extra)
        with context:
            return fn(*(batch, batch_idx)[:arity], **extra)

    return step


def sanity_check(run: Run) -> None:
    """Try a few validation batches before training, so that a mistake there shows at once.

    It leaves nothing behind: no metric, no progress, no draw from a random generator (trap T18).
    """
    limits, progress, book = run.limits, run.progress, run.book
    if limits.sanity_batches == 0 or limits.val_batches == 0 or not run.loaders.defined("validate"):
        return
    if progress.global_step > 0 or limits.max_epochs == 0 or limits.max_steps == 0:
        return  # resuming, or nothing to train
    progress.stage = RunningStage.SANITY_CHECKING
    with isolate_rng():
        run.hooks.call_callbacks("on_sanity_check_start")
        loaders = [
            EvalLoader(source.loader, min(source.num_batches, limits.sanity_batches), source.ahead)
            for source in run.loaders.evaluation("validate")
        ]
        evaluate(run, "validate", loaders, sanity=True)
        run.hooks.call_callbacks("on_sanity_check_end")
    book.callback_metrics.clear()
    book.bar_metrics = {}


def validates_in(run: Run, epoch: int) -> bool:
    """Whether ``epoch`` has any validation at all."""
    period = run.limits.check_val_every_n_epoch
    return run.validates() and (period is None or (epoch + 1) % period == 0)


def validation_due(run: Run, every: float, is_last: bool) -> bool:
    """Whether validation follows the batch that is just done, in an epoch that validates (trap T17)."""
    progress = run.progress
    if progress.should_stop and run.may_stop():
        return True
    if every == float("inf"):
        return is_last
    across_epochs = run.limits.check_val_every_n_epoch is None
    return (progress.total_batches if across_epochs else progress.batch_idx + 1) % every == 0
