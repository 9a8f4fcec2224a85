"""Validation, testing and prediction: one pass over the loaders of a stage."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from drivetrain import parity
from drivetrain.base.introspect import positional_arity, takes_iterator
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.tree import move_to_host
from drivetrain.data.feed import BatchIterator, feed, set_epoch
from drivetrain.data.indices import RecordedIndices
from drivetrain.errors import ConfigurationError, SignatureError, described
from drivetrain.logbook.logbook import Row
from drivetrain.loops.loaders import EvalLoader, check_counts, check_orders, no_batches, order_shared
from drivetrain.loops.pieces import in_forward_context, measured
from drivetrain.loops.progress import Phase
from drivetrain.loops.run import ENDLESS, Run, val_check_every
from drivetrain.strategies import familiar

with on_first_use:
    from drivetrain.loops import early
    from drivetrain.loops import uneven as uneven_inputs

Stage = Literal["validate", "test", "predict", "sanity_check"]


class _Kind(NamedTuple):
    """The properties of a stage: its name in the log, the word in the names of its hooks, and its first phase."""

    group: str
    word: str
    start: Phase


# Each stage has four consecutive phases: its start, the wait for a batch, the batch, and the stage's end.
_KINDS: dict[str, _Kind] = {
    "sanity_check": _Kind("validate", "validation", Phase.SANITY_START),
    "validate": _Kind("validate", "validation", Phase.VALIDATION_START),
    "test": _Kind("test", "test", Phase.TEST_START),
    "predict": _Kind("predict", "predict", Phase.PREDICT_START),
}
_NOTHING = object()  # fills the place of a rank that has no samples in the last global batch
_READ_AT = 64  # per-step values are read from the device every 64 batches


class Sink:
    """Receives the outputs of the evaluation steps over one loader; this base class discards them.

    Attributes:
        loader: the object to iterate over: the evaluation loader, or a wrapper that records indices.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def take(self, keeps: bool) -> None:
        """Called in ``predict`` before a batch's hooks. ``keeps``: whether the batch counts. It does not count if this
        rank repeats its last batch.
        """

    def write(self, batch_idx: int, outputs: Any, repeated: bool) -> None:
        """Called after the hooks of a batch. All ranks make equally many calls.

        ``repeated``: this rank had no batch left and repeated its last batch. The outputs of a repetition do not count.
        """

    def close(self) -> None:
        """Called after the loader's last batch."""


class _StepValues(Sink):
    """Collects logged per-step values, reads them at intervals, and logs each value at its step."""

    def __init__(self, run: Run, group: str, loader: Any, dataloader_idx: int) -> None:
        super().__init__(loader)
        self._run, self._group, self._dataloader_idx = run, group, dataloader_idx
        self._first_step = run.progress.eval_steps_of(group, dataloader_idx)
        self._rows: list[tuple[int, list[Row]]] = []  # pairs of a step and its rows, not yet read from the device

    def write(self, batch_idx: int, outputs: Any, repeated: bool) -> None:
        if values := self._run.book.step_values(self._group):
            self._rows.append((self._first_step + batch_idx, values))
        if (batch_idx + 1) % _READ_AT == 0:  # true on all ranks at the same batch
            self._publish()

    def close(self) -> None:
        self._publish()
        self._run.progress.end_evaluation_of(self._group, self._dataloader_idx)

    def _publish(self) -> None:
        run, rows = self._run, self._rows
        flattened = run.book.agree_on_steps([row for _, values in rows for row in values])
        flat = iter(flattened if run.log is None else run.book.read(flattened))
        for step, values in rows:
            read = [next(flat) for _ in values]
            if run.log is None:
                run.keep(read, step)
            elif metrics := {row.name: row.value for row in read if row.entry.to_logger}:
                run.log(metrics, step)
        rows.clear()


class _Outputs(Sink):
    """Collects prediction outputs in host memory; also the samples' indices, if a callback needs the indices."""

    def __init__(self, predictions: Predictions, loader: Any, pins: bool) -> None:
        self._recorded = RecordedIndices(loader, pins) if predictions.records else None
        super().__init__(loader if self._recorded is None else self._recorded)
        self._keeps = predictions.keeps
        self._outputs: list[Any] = []
        self._numbers: list[list[int]] = []
        predictions.outputs.append(self._outputs)
        predictions.batch_indices.append(self._numbers)

    def take(self, keeps: bool) -> None:
        numbers = [] if self._recorded is None else self._recorded.pop()
        if keeps:
            self._numbers.append(numbers)

    def write(self, batch_idx: int, outputs: Any, repeated: bool) -> None:
        if self._keeps and not repeated:
            self._outputs.append(move_to_host(outputs))


@dataclass
class Predictions:
    """The results of a prediction pass so far, in host memory.

    Attributes:
        keeps: whether to return the outputs to the caller.
        outputs: one list per loader, one entry per batch.
        batch_indices: one list per loader, with a list of sample indices for each batch. If ``records`` is false, the
            lists of indices are empty.
        records: whether a callback needs ``batch_indices``.
    """

    keeps: bool = True
    records: bool = False
    outputs: list[list[Any]] = field(default_factory=list)
    batch_indices: list[list[list[int]]] = field(default_factory=list)

    @property
    def current_batch_indices(self) -> list[int]:
        """The sample indices of the current batch."""
        loaders = self.batch_indices
        return loaders[-1][-1] if loaders and loaders[-1] else []

    @property
    def result(self) -> list[Any]:
        """The result of ``predict``. With one loader: a list of outputs. With several loaders: a list of such lists."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs


def predict(run: Run, predictions: Predictions) -> list[Any]:
    """Run ``predict_step`` over every batch of the prediction loaders, without gradients."""
    loaders = run.loaders.evaluation("predict")
    evaluate(run, "predict", loaders, predictions=predictions)
    if not predictions.keeps:
        return []
    strategy = run.engine.strategy
    if strategy.facts.is_distributed:
        if 0 in strategy.data.ranks:  # all groups of ranks predict the same data, so one group is enough
            everyones = strategy.data.gather_objects(predictions.outputs)
            predictions.outputs = [_in_order(parts) for parts in zip(*everyones, strict=True)]
        if not strategy.is_global_zero:
            return []
    return predictions.result


def _in_order(parts: Sequence[list[Any]]) -> list[Any]:
    """Merge the ranks' outputs of one loader in the order of the data: by global batch, then by rank."""
    rounds = itertools.zip_longest(*parts, fillvalue=_NOTHING)
    return [output for outputs in rounds for output in outputs if output is not _NOTHING]


def evaluate(
    run: Run, stage: Stage, loaders: list[EvalLoader], predictions: Predictions | None = None
) -> list[dict[str, float]]:
    """Run the stage's step over every batch of ``loaders``, without gradients.

    Args:
        run: the run to evaluate.
        stage: determines which hooks and which step run. A sanity check runs the hooks and the step of validation, and
            discards the logged values.
        loaders: the loaders to evaluate, in this order, with one pass over each loader.
        predictions: collects the outputs of the steps.

    Returns: One dictionary of epoch metrics per loader. Each dictionary also contains the values that epoch hooks log.
    """
    progress, kind = run.progress, _KINDS[stage]
    agree_on_counts(run, stage, loaders)
    empty = [source.loader for source in loaders if source.num_batches == 0]
    if empty and stage != "sanity_check" and run.limits.batches(kind.group) != 0:
        rank_zero_warn(no_batches(empty, kind.group))
    if len(empty) == len(loaders):
        return []
    run.hooks.check_takes_index(kind.word, several=len(loaders) > 1)
    progress.enter(kind.start)
    progress.begin_evaluation_of(loaders[0].num_batches)  # for progress bars
    in_fit = progress.fn == "fit"
    own_train = None if stage == "predict" else run.hooks.bind_method(f"on_{kind.word}_model_train")
    modules, model = set(run.module.modules()), run.engine.strategy.model
    wrappers = set() if model is None else {model} - modules  # for example DistributedDataParallel
    modes = {each: each.training for each in (wrappers if own_train else wrappers | modules)}
    inference = run.limits.inference_mode and not in_fit and run.engine.strategy.facts.allows_inference_mode
    with torch.inference_mode() if inference else torch.no_grad():
        try:
            for wrapper in wrappers:
                wrapper.training = False
            rows = _evaluate_loaders(run, stage, loaders, predictions)
            if own_train is not None:
                own_train()
        finally:
            for module, training in modes.items():
                module.training = training  # module.train() would also set all submodules
    several = len(loaders) > 1
    return [
        {row.name: row.value for row in rows if row.entry.dataloader_idx in (None, index if several else None)}
        for index in range(len(loaders))
    ]


def agree_on_counts(run: Run, stage: Stage, loaders: Sequence[EvalLoader]) -> None:
    """Exchange the ranks' numbers of batches. All ranks must call this function. With one process, the function does
    nothing.

    Raises:
        ConfigurationError: a loader has batches on some ranks, and no batch on other ranks. All ranks raise the error.
    """
    if run.window.gather is None:
        return
    data = run.engine.strategy.data
    everyones = data.gather_objects([(source.num_batches, order_shared(source.loader)) for source in loaders])
    if len({len(counts) for counts in everyones}) > 1:
        raise ConfigurationError(
            f"The ranks have {', '.join(str(len(counts)) for counts in everyones)} {_KINDS[stage].word} loaders. "
            "Give all ranks as many."
        )
    for source, facts in zip(loaders, zip(*everyones, strict=True), strict=True):
        counts, orders = zip(*facts, strict=True)
        check_orders(orders, data.ranks, _KINDS[stage].word)
        check_counts(counts, _KINDS[stage].word)
        source.counts = list(counts)


def _evaluate_loaders(run: Run, stage: Stage, loaders: list[EvalLoader], predictions: Predictions | None) -> list[Row]:
    hooks, book, progress = run.hooks, run.book, run.progress
    group, word, start = _KINDS[stage]
    book.leave_batch()
    book.begin(group)
    if parity.current().early_iterators and not (predictions and predictions.records):
        early.start_evaluation(run, group, loaders)
    hooks.call_method(f"on_{word}_model_eval")
    hooks.call(f"on_{word}_start")
    hooks.call(f"on_{word}_epoch_start")
    for index, loader in enumerate(loaders):
        _evaluate_loader(run, stage, loader, index if len(loaders) > 1 else None, predictions)
    book.leave_batch()
    book.agree_on_epoch(group)  # callbacks may read all ranks' values in the next hook
    book.end_epoch()
    hooks.call(f"on_{word}_epoch_end")
    book.agree_on_epoch(group)
    hooks.notify("results_agreed", stage)
    book.refresh()
    rows: list[Row] = []
    if stage != "sanity_check":
        in_fit = progress.fn == "fit"
        between_steps = not in_fit or run.window.batches_done > 0  # if true, log at the index of the next window
        step = progress.stepped_batches if between_steps else progress.logger_step
        rows = run.publish(book.epoch_values(group), step, read_all=not in_fit)
    book.reset(group)
    progress.enter(Phase(start + 3))  # a run that resumes after this point does not repeat the stage
    hooks.call(f"on_{word}_end")
    return rows


def _evaluate_loader(
    run: Run, stage: Stage, source: EvalLoader, index: int | None, predictions: Predictions | None
) -> None:
    """Evaluate one loader. ``index``: the loader's number if there are several loaders, else ``None``."""
    hooks, book, progress, slot = run.hooks, run.book, run.progress, run.progress.slot
    group, word, start = _KINDS[stage]
    fetch, work = int(start) + 1, int(start) + 2
    dataloader_idx = 0 if index is None else index
    hook_idx: tuple[int, ...] = () if index is None else (index,)
    batch_start = hooks.bind(f"on_{word}_batch_start", index)
    batch_end = hooks.bind(f"on_{word}_batch_end", index)
    move, transfer = run.transfer
    progress.begin_evaluation_of(source.num_batches)
    set_epoch(source.loader, progress.current_epoch)
    scope = hooks.scope(f"{word}_step", index)
    sink = Sink(source.loader)
    if predictions is not None:
        sink = _Outputs(predictions, source.loader, run.loaders.pins)
    elif stage != "sanity_check":
        sink = _StepValues(run, group, source.loader, dataloader_idx)
    to_device = None if transfer else move
    batches = feed(
        sink.loader, source.num_batches, to_device, source.ahead, started=source.started, pins=run.loaders.pins
    )
    source.started = None
    uneven = None
    if run.window.gather is not None:
        uneven = uneven_inputs.UnevenInputs(run, source.loader)
        batches = uneven.over(batches, source.counts)
        progress.begin_evaluation_of(max(source.counts))
    uneven_from = float("inf") if uneven is None else uneven.uneven_from
    if hooks.spans is not None:
        batches = hooks.spans.batches(word, batches)
    step = bind_eval_step(run, stage, index, batches)
    slot[0] = fetch
    for batch, _ in batches:
        slot[0] = work
        slot[1] += 1
        progress.eval_batch_idx = batch_idx = progress.eval_batch_idx + 1
        repeated, drawn = False, True
        if uneven is not None and batch_idx >= uneven_from:
            uneven.begin(batch_idx)
            repeated = uneven.factor == 0
            drawn = uneven.draws or not repeated
        if transfer is not None:
            batch = transfer(batch, dataloader_idx)
        book.begin_batch(batch, scope, copies=True)
        if predictions is not None and drawn:
            sink.take(keeps=not repeated)
        for hook in batch_start:
            hook(batch, batch_idx, *hook_idx)
        outputs = step(batch, batch_idx)
        for hook in () if repeated and predictions is not None else batch_end:
            hook(outputs, batch, batch_idx, *hook_idx)
        if uneven is not None and batch_idx >= uneven_from:
            uneven.end()
        sink.write(batch_idx, outputs, repeated)
        if run.stop is not None:  # a signal or another thread may have set ``run.stop``
            run.stop.at_batch_end()
        slot[0] = fetch
    if progress.eval_batch_idx < 0 and source.num_batches:
        expected = "" if source.num_batches == ENDLESS else f", and {source.num_batches:.0f} were expected"
        rank_zero_warn(
            f"The {word} loader, a {type(source.loader).__name__}, gave no batch{expected}, so it has no results "
            "in this pass. An iterator or a generator is used up by its first pass: pass an object that can be "
            "iterated again and again."
        )
    sink.close()


def bind_eval_step(
    run: Run, stage: Stage, index: int | None, batches: Iterator[tuple[Any, bool]]
) -> Callable[[Any, int], Any]:
    """Return a function of a batch and its index that calls the stage's step with the arguments that the step
    accepts.
    """
    name = f"{_KINDS[stage].word}_step"
    fn = getattr(run.module, name)
    if not callable(fn):
        raise ConfigurationError(
            f"{type(run.module).__name__}.{name} is {described(fn)}, and the Trainer calls it for each batch. "
            f"Write def {name}(self, batch, batch_idx)."
        )
    call = measured(run, name, familiar.bind_step_of(run.engine.strategy, name))
    if takes_iterator(fn):
        progress = run.progress

        def advance(is_last: bool) -> int:
            progress.eval_batch_idx += 1
            return progress.eval_batch_idx

        return in_forward_context(run, BatchIterator(batches, advance, run.transfer[1], index or 0).bound(call))
    parameters = inspect.signature(fn).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    by_place = inspect.Parameter.VAR_POSITIONAL in kinds
    if run.engine.strategy.facts.earlier.step_arguments:  # earlier versions pass dataloader_idx by position
        by_place = by_place or positional_arity(fn) > 2
    as_third = "dataloader_idx" not in parameters and by_place
    takes_index = "dataloader_idx" in parameters or as_third or inspect.Parameter.VAR_KEYWORD in kinds
    wrong = ""
    if index is not None and not takes_index:
        wrong = "must take dataloader_idx, because there are several loaders"
    elif index is None and "dataloader_idx" in parameters and parameters["dataloader_idx"].default is inspect._empty:
        wrong = "takes dataloader_idx, but there is one loader"
    if wrong:
        raise SignatureError(
            f"{type(run.module).__name__}.{name} {wrong}. Write def {name}(self, batch, batch_idx, dataloader_idx=0)."
        )
    arity = min(positional_arity(fn), 2)
    extra = {} if index is None or as_third else {"dataloader_idx": index}
    third = (index,) if as_third and index is not None else ()

    def step(batch: Any, batch_idx: int) -> Any:
        return call(*(batch, batch_idx)[:arity], *third, **extra)

    return in_forward_context(run, step)


def validates_in(run: Run, epoch: int) -> bool:
    """Whether the run validates, and ``check_val_every_n_epoch`` allows a validation in ``epoch``."""
    period = run.limits.check_val_every_n_epoch
    return run.validates() and (period is None or (epoch + 1) % period == 0)


def validation_due(run: Run, every: float, is_last: bool) -> bool:
    """Whether a validation follows the batch that has just ended, if :func:`validates_in` is true for the epoch."""
    progress = run.progress
    if progress.should_stop and run.may_stop():
        return True
    if (seconds := run.limits.val_check_seconds) is not None:
        return run.clock.is_over(seconds, progress.total_batches, run.engine.strategy)
    return _interval_ends(run, every, is_last)


def only_stops(run: Run, every: float, is_last: bool) -> bool:
    """Whether validation is due only because of a request to stop. The checkpoint that a run resumes may contain the
    request.
    """
    if run.limits.val_check_seconds is not None:
        return run.progress.should_stop
    return not _interval_ends(run, every, is_last)


def _interval_ends(run: Run, every: float, is_last: bool) -> bool:
    progress = run.progress
    if every == float("inf"):
        return is_last
    across_epochs = run.limits.check_val_every_n_epoch is None
    done = progress.total_batches if across_epochs else progress.batch_idx + 1
    taken = 1 if run.batches is None else run.batches.taken  # the step may have fetched several batches
    return done // every > (done - taken) // every


def validation_follows(run: Run) -> bool:
    """Whether validation follows the batch whose hooks are running."""
    progress, limits = run.progress, run.limits
    if not validates_in(run, progress.current_epoch):
        return False
    return validation_due(run, val_check_every(limits, progress.num_training_batches), progress.is_last_batch)
