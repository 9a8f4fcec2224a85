"""Store logged values on the device that computed them, and read the values at intervals.

``self.log`` only stores the detached value, without a transfer to the host. A *flush* transfers the numbers of each
device at once, every ``log_every_n_steps`` steps and at the end of an epoch.

[Note: when a value is copied]
``self.log`` copies a tensor that later code may write into: a parameter, a buffer, or a view of a parameter or buffer.
``self.log`` also copies every value of an epoch mean. If a flush will follow the step, ``self.log`` copies every value
of the step. All other values are new results of operations, such as a loss. These values are not copied, because only
``callback_metrics`` shows them and only the step itself could change them. It takes as long to check whether a value is
a new result as to copy it. The logbook therefore checks only the first value of each name in an epoch.

[Note: exact epoch means]
The weight of a value is the batch size, so a smaller last batch has a smaller weight. The logbook collects at most
``_FOLD_AT`` values with equal weights, and then sums the values in float64 on the device. So a long evaluation needs
memory for only ``_FOLD_AT`` small tensors per name. The weights are summed on the host as Python numbers. The sum is
divided only when the mean is read, and integers are never truncated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.tree import batch_sizes
from drivetrain.errors import LoggingError, LogNameError
from drivetrain.logbook.entry import Entry, Logged, LogRule, Options, Value, check_arguments, check_same
from drivetrain.logbook.history import History
from drivetrain.logbook.reading import as_tensor, read_together


class Row(NamedTuple):
    """A value for the loggers, with its name and its entry."""

    name: str
    value: Any
    entry: Entry
    parts: tuple[Any, float] | None = None  # the result of Entry.parts(), if the ranks exchange the value


class Scope:
    """A hook's rule for calls of ``self.log``, and the entries that the hook has logged."""

    def __init__(self, hook: str, rule: LogRule | None) -> None:
        self.hook = hook
        self.rule = rule
        self.entries: dict[str, Entry] = {}
        self.dataloader_idx: int | None = None  # only an evaluation with several loaders sets this index


class Logbook:
    """The logged values of a run, and the reduced metrics.

    Attributes:
        scope: the scope of the running hook.
        batch, size: the current batch, and the batch's size, which is ``None`` until a mean needs the size.
        muted: whether logged values are discarded, because this rank has no more batches and repeats a batch.
        copies: whether logged values are copied, because the logbook reads them after the step.
        group: "train", "validate" or "test". ``epoch_done``: whether the group's reductions are final.
        callback_metrics: the latest value of every name, as a tensor on its device.
        bar_metrics: floats of the last flush. The dictionary is never modified, so any thread can read it.
        agreed_steps: the last step values after an exchange between ranks, by name. Callbacks get these values.
        logged_metrics: the latest value that loggers get, by the loggers' name, as a tensor on its device.
        flushes: the number of transfers from devices.
        sum_dtype: the dtype of sums over an epoch. It is float64 if the device supports float64.
        reduce: a function over the ranks that see different samples. The function checks that the ranks log equal
            names. It returns the sums of one list of numbers and the maxima of another. ``None``: there is one rank.
            ``reduce_world``: a function over all ranks.
        own_reduce: the method ``reduce`` of a user's strategy. If it is ``None``, the results of ``reduce`` are used.
        history: on rank 0, the values of all runs of the Trainer that loggers get.
        sync_metric: a function that gathers a metric object's states, or ``None`` if all ranks see different samples.
    """

    def __init__(self, sum_dtype: torch.dtype = torch.float64) -> None:
        self.sum_dtype = sum_dtype
        self.history = History(sum_dtype is torch.float64)
        self.reduce: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.reduce_world: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.own_reduce: Callable[..., Any] | None = None
        self.sync_metric: Callable[..., list[Tensor]] | None = None
        self.device = torch.device("cpu")
        self.copies = True
        self.flushes = 0
        self._groups: dict[str, dict[str, Scope]] = {}
        self.start_run()

    # ---- for the loops -----------------------------------------------------------------------------------------

    def scope_for(self, group: str, hook: str, rule: LogRule | None, dataloader_idx: int | None = None) -> Scope:
        """Return the :class:`Scope` of ``hook`` in ``group`` ("train", "validate", ...), created on first use."""
        key = hook if dataloader_idx is None else f"{hook}/{dataloader_idx}"
        scopes = self._groups.setdefault(group, {})
        if key not in scopes:
            scopes[key] = Scope(hook, rule)
            scopes[key].dataloader_idx = dataloader_idx
        return scopes[key]

    def start_run(self) -> None:
        """Remove all values of an earlier run. The thread of the new run must call this method."""
        self._thread = threading.get_ident()
        for group in self._groups:
            self.reset(group)  # a metric object may have the state of an interrupted run
        self._groups = {}
        self.group, self.epoch_done, self.muted = "train", False, False
        self.scope: Scope | None = None
        self.batch: Any = None
        self.size: int | None = 1
        self.callback_metrics: dict[str, Any] = {}
        self.bar_metrics: dict[str, float] = {}
        self.logged_metrics: dict[str, Any] = {}
        self._compared_sizes = False
        self._logged_before: dict[str, list[Logged]] = {}  # the results of logged() in the last epoch, by group
        self._held: dict[Entry, Value | None] = {}  # the training's step values before the last evaluation
        self.agreed_steps: dict[str, Value] = {}
        # the group and the scope that first logged each full name, or None after a warning
        self._logged_first: dict[str, tuple[str, Scope] | None] = {}

    def join(self, device: torch.device, data: Any, world: Any, own_reduce: Callable[..., Any] | None = None) -> None:
        """Set the device for sums, and the groups of ranks that exchange values.

        Args:
            device: the device of this process.
            data: the group of the ranks that see different samples. world: the group of all ranks.
            own_reduce: the strategy's ``reduce``, if a user's strategy overrides ``reduce``: ``reduce(tensor, group,
                reduce_op)``.
        """
        self.device = device
        asked = own_reduce is not None  # call a user's reduce even with one process
        all_ranks = data.size == world.size
        self.own_reduce = own_reduce and partial(own_reduce, group=None if all_ranks else data)
        self.ranks, self._is_first = data.size, world.rank == world.ranks[0]
        self.reduce = data.reduce_keyed if data.size > 1 or asked else None
        self.reduce_world = world.reduce_keyed if world.size > 1 or asked else None
        self.sync_metric = None if all_ranks else lambda tensor, group=None: data.gather_objects(tensor)

    def reset(self, group: str) -> None:
        """Start a new epoch of ``group`` with new running reductions. ``callback_metrics`` keeps its values."""
        self._logged_before[group] = self.logged(group)
        for scope in self._groups.get(group, {}).values():
            for entry in scope.entries.values():
                entry.reset()
            scope.entries.clear()

    def logged(self, group: str) -> list[Logged]:
        """Return the options of each name that was logged in this epoch of ``group``, or else in the previous epoch."""
        return [entry.logged() for entry in self._entries(group)] or self._logged_before.get(group, [])

    def begin(self, group: str) -> None:
        """Set the running group: "train", "validate", "test" or "predict"."""
        if self.group == "train" and group != "train":  # older training values must not replace the evaluation's
            self.refresh()
            self._held = {entry: self._newest(entry) for entry in self._entries("train") if entry.on_step}
        self.group, self.epoch_done, self.copies = group, False, True

    def begin_batch(self, batch: Any, scope: Scope, copies: bool) -> None:
        """Begin a step on ``batch``. ``copies``: whether the logbook reads the step's values after the step."""
        self.batch, self.size, self.scope, self.copies = batch, None, scope, copies

    def enter(self, scope: Scope | None) -> Scope | None:
        """Set the current :class:`Scope`. Return the previous scope, which the caller must restore."""
        outer, self.scope = self.scope, scope
        return outer

    def enter_if_left(self, scope: Scope) -> None:
        """Set the current scope if no hook is running."""
        if self.scope is None:
            self.scope = scope

    def within(self, scope: Scope, *calls: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls each of ``calls`` in ``scope``, and returns the last result."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self.scope, result = self.scope, scope, None
            try:
                for fn in calls:
                    result = fn(*args, **kwargs)
                return result
            finally:
                self.scope = outer

        return call

    def end_epoch(self) -> None:
        """Mark the reductions as final, after the last batch of the epoch."""
        self.epoch_done = self.copies = True

    def mute(self, muted: bool) -> None:
        """Set whether logged values are discarded, because a rank without more batches must repeat a batch."""
        self.muted = muted

    def put_back(self, rows: Sequence[Row]) -> None:
        """Let :meth:`step_values` return ``rows`` again, because the loggers have not got these rows."""
        for row in rows:
            row.entry.fresh = True

    def forget_results(self) -> None:
        """Remove the values that a sanity check has logged."""
        self.callback_metrics.clear()
        self.logged_metrics.clear()
        self._held.clear()
        self.bar_metrics = {}

    def restore_results(self, callback: Any, bar: dict[str, float], logged: Any, history: History) -> None:
        """Set the results of a run in another process."""
        self.callback_metrics, self.bar_metrics, self.logged_metrics, self.history = callback, bar, logged, history

    def leave_batch(self) -> None:
        """Forget the current batch after a step. Values of an epoch hook then have the weight 1."""
        self.scope = self.batch = None
        self.size = 1

    def find_batch_size(self) -> int:
        """Return the size of the current batch: the first dimension of its first tensor."""
        batch = self.batch
        if self._compared_sizes:  # compare sizes only once per run: the comparison is slow
            if type(batch) in (list, tuple) and batch:
                batch = batch[0]
            if isinstance(batch, Tensor):
                self.size = batch.shape[0] if batch.ndim else 1
                return self.size
        sizes = batch_sizes(self.batch, parity.current().iterated_batches)
        first = next(sizes, None)
        if first is None:
            raise LoggingError(
                "self.log(..., on_epoch=True) weighs each value by the batch size, but this batch holds no tensor. "
                "Pass batch_size=... to self.log."
            )
        if not self._compared_sizes:
            self._compared_sizes = True
            if any(size != first for size in sizes):
                rank_zero_warn(
                    f"The tensors of this batch differ in their first dimension; {first}, that of the first one, is "
                    "taken as the batch size. Pass batch_size=... to self.log if it is another."
                )
        self.size = first
        return first

    def step_values(self, group: str) -> list[Row]:
        """Return the per-step values of ``group`` since the last call, without a transfer."""
        rows = []
        for entry in self._entries(group):
            if entry.on_step and entry.fresh and (entry.last is not None or entry.shared):
                entry.fresh = False
                parts = entry.parts(epoch=False) if entry.shared else None
                rows.append(Row(entry.step_name, entry.last_scalar(), entry, parts))
        return rows

    def epoch_values(self, group: str) -> list[Row]:
        """Return the reductions of ``group`` over the epoch so far, without a transfer."""
        return [
            Row(entry.epoch_name, value, entry)
            for entry in self._entries(group)
            if entry.on_epoch and (value := entry.epoch_value()) is not None
        ]

    def agree_on_steps(self, rows: list[Row]) -> list[Row]:
        """Return ``rows``. Values that were logged with ``sync_dist=True`` are reduced over the ranks. Every rank must
        call this method.
        """
        if self.reduce is None:
            return rows
        shared = [row for row in rows if row.parts is not None]
        agreed = self._agree([(row.name, row.entry, row.parts) for row in shared if row.parts is not None])
        found = dict(zip(map(id, shared), agreed, strict=True))
        for row in shared:
            self.agreed_steps[row.name] = row.entry.last = found[id(row)]
        return [row._replace(value=found[id(row)]) if id(row) in found else row for row in rows]

    def agree_on_epoch(self, group: str) -> None:
        """Exchange the epoch values of ``group`` that are not exchanged yet. Every rank must call this method."""
        if self.reduce_world is None:
            return
        new = [(entry.epoch_name, entry) for entry in self._entries(group) if entry.on_epoch and entry.agreed is None]
        metrics = sorted((item for item in new if item[1].metric is not None), key=lambda item: item[0])
        waiting = [name for name, entry in metrics if getattr(entry.metric, "sync_on_compute", True)]
        shared = [
            (name, entry, entry.parts(epoch=True)) for name, entry in new if entry.shared and entry.metric is None
        ]
        if self.reduce is not None:
            for (_, entry, _), value in zip(shared, self._agree(shared, waiting), strict=True):
                entry.agreed = value
        for _, entry in metrics:
            entry.compute_together(self.sync_metric)

    def of_rank_zero(self, name: str, value: Any) -> Any:
        """Return rank 0's value of the metric ``name``, so that all ranks make the same decision."""
        if self.reduce_world is None:
            return value
        summed, _ = self.reduce_world([name], self._vector([value if self._is_first else 0.0]), self._vector([]))
        return summed[0]

    def _agree(self, named: list[tuple[str, Entry, tuple[Any, float]]], also: Sequence[str] = ()) -> list[Tensor]:
        """Check that all ranks have the same names in ``named`` and ``also``, and reduce the numbers of ``named``."""
        assert self.reduce is not None  # the callers have checked self.reduce
        sums = [number for _, entry, parts in named if not entry.sign for number in parts]
        most = [entry.sign * parts[0] for _, entry, parts in named if entry.sign]
        numbers = self._vector(sums), self._vector(most)
        summed, largest = (iter(each.unbind()) for each in self.reduce([*also, *(each[0] for each in named)], *numbers))
        by, agreed = self.own_reduce, list[Tensor]()
        own = self._vector([parts[0] for *_, parts in named]) if by else named
        for mine, (_, entry, _) in zip(own, named, strict=True):
            value, weight = (next(largest) * entry.sign, 0) if entry.sign else (next(summed), next(summed))
            value = entry.combine_by(by, mine, weight / self.ranks) if by else entry.combine(value, weight, self.ranks)
            agreed.append(value)
        return agreed

    def _vector(self, numbers: Sequence[Any]) -> Tensor:
        each = [torch.as_tensor(number, dtype=self.sum_dtype, device=self.device) for number in numbers]
        return torch.stack(each) if each else torch.zeros(0, dtype=self.sum_dtype, device=self.device)

    def read(self, rows: list[Row]) -> list[Row]:
        """Return ``rows`` with plain floats, with one transfer for each device. Update ``bar_metrics``."""
        values, transfers = read_together([row.value for row in rows], self.sum_dtype is torch.float64)
        self.flushes += transfers
        read = [Row(row.name, float(value), row.entry) for row, value in zip(rows, values, strict=True)]
        if shown := {row.name: row.value for row in read if row.entry.to_bar}:
            # a new dictionary, because another thread may be reading the old dictionary
            self.bar_metrics = {**self.bar_metrics, **shown}
        return read

    def newest_bar_metrics(self) -> dict[str, float]:
        """Return the newest values for the bar. Outside of the run's thread, return the values of the last flush."""
        if threading.get_ident() == self._thread:
            metrics = self.refresh()
            shown = [(name, each) for each in self._entries(self.group) if each.to_bar for name in each.names]
            self.read([Row(name, metrics[name], each) for name, each in shown if name in metrics])
        return self.bar_metrics

    def refresh(self) -> dict[str, Any]:
        """Update ``callback_metrics`` and ``logged_metrics``, without a transfer, and return ``callback_metrics``.

        ``callback_metrics`` has no per-step values of an evaluation.
        """
        metrics, trains = self.callback_metrics, self.group == "train"
        for entry in self._entries(self.group):
            if entry.on_step and entry.last is not None and self._held.get(entry) is not self._newest(entry):
                name, agreed = entry.step_name, self._agreed(entry)
                value = as_tensor(entry.last_scalar() if agreed is None else agreed)
                if trains:
                    metrics[entry.name] = metrics[name] = value
                if entry.to_logger:
                    self.logged_metrics[name] = value
            known = self.epoch_done or (entry.once and not entry.shared and entry.metric is None)
            if known and entry.on_epoch and (result := entry.epoch_value()) is not None:
                name = entry.epoch_name
                metrics[entry.name] = metrics[name] = value = as_tensor(result)
                if entry.to_logger:
                    self.logged_metrics[name] = value
        return metrics

    def _agreed(self, entry: Entry) -> Value | None:
        """Return the last step value after an exchange between ranks, or ``None`` if there was no exchange."""
        return self.agreed_steps.get(entry.step_name) if entry.shared else None

    def _newest(self, entry: Entry) -> Value | None:
        return entry.last if (agreed := self._agreed(entry)) is None else agreed

    def has_entries(self, group: str) -> bool:
        """Return whether anything has been logged in ``group``."""
        for scope in self._groups.get(group, {}).values():  # noqa: SIM110  # a generator would add a call
            if scope.entries:
                return True
        return False

    def state_dict(self, group: str) -> list[dict[str, Any]]:
        """Return the state of each entry of ``group``, with the entry's hook."""
        return [
            {"hook": scope.hook, "dataloader_idx": scope.dataloader_idx, "name": name, **entry.state_dict()}
            for scope in self._groups.get(group, {}).values()
            for name, entry in scope.entries.items()
        ]

    def load_state_dict(
        self, group: str, states: list[dict[str, Any]], rules: Mapping[str, LogRule], source: str | None = None
    ) -> None:
        """Restore results of :meth:`state_dict`. States of one name from different ranks are reduced to one state.
        ``source`` is the checkpoint's name for messages.
        """
        restored = dict[Any, Entry]()
        for state in states:
            scope = self.scope_for(group, state["hook"], rules.get(state["hook"]), state["dataloader_idx"])
            rule = rules[state["hook"]]
            entry = Entry(self, state["name"], Options(**state["options"]), rule, state["dataloader_idx"])
            entry.load_state_dict(state)
            entry.source = source or "the checkpoint"
            if (key := (scope, state["name"])) in restored:
                restored[key].include(entry)
            else:
                scope.entries[state["name"]] = restored[key] = entry

    def is_of_one_step(self, name: str) -> bool:
        """Return whether ``name`` is logged only per step in training, so that its value belongs to one batch."""
        found = [entry for entry in self._entries("train") if name in (entry.name, entry.step_name)]
        return bool(found) and all(entry.on_step and not (entry.on_epoch and name == entry.name) for entry in found)

    def check_metric(self, entry: Entry, metric: Any) -> None:
        """Check that the metric object is logged in only one stage, because each stage resets the object.

        Raises:
            LoggingError: the metric is logged in several stages.
        """
        for group in self._groups:
            entries = list(self._entries(group))
            other = next((each for each in entries if each.metric is metric), None)
            if other is not None and entry not in entries:
                raise LoggingError(
                    f"self.log({entry.name!r}, ...) got a {type(metric).__name__} that is also logged as "
                    f"{other.name!r} in another stage ({group!r}), and would add up both. Make one for each stage: "
                    "self.train_metric, self.val_metric."
                )

    def metrics(self) -> list[Any]:
        """Return the metric objects that are logged in any group."""
        entries = [entry for group in self._groups for entry in self._entries(group)]
        return [entry.metric for entry in entries if entry.metric is not None]

    def _entries(self, group: str) -> Iterator[Entry]:
        for scope in self._groups.get(group, {}).values():
            yield from scope.entries.values()

    # ---- for self.log ------------------------------------------------------------------------------------------

    def open_entry(self, name: str, value: Any, options: Options, batch_size: Any = None) -> Entry:
        """Check the arguments of ``self.log``, and return the entry for ``name`` in the running hook. This method is
        slow, so ``self.log`` calls it only once for each name.

        Raises:
            LoggingError: ``self.log`` must not be called in this hook, an argument is wrong, or an earlier call in this
                hook had other options.
            CheckpointError: the options differ from the options in the resumed checkpoint.
        """
        scope = self.scope
        if scope is None or scope.rule is None:
            where = f"in {scope.hook}" if scope else "outside of any hook"
            raise LoggingError(
                f"self.log({name!r}, ...) was called {where}, where no step or epoch is running. "
                "Call it in a step, in a batch hook or in an epoch hook."
            )
        if not isinstance(name, str) or "/dataloader_idx_" in name:
            raise LogNameError(
                f"self.log got the name {name!r}. A name is a text without '/dataloader_idx_', which is added "
                "when there are several loaders."
            )
        check_arguments(name, value, options, batch_size)
        rule = scope.rule
        on_step = rule.on_step if options.on_step is None else options.on_step
        on_epoch = rule.on_epoch if options.on_epoch is None else options.on_epoch
        if on_step and not rule.step_allowed:
            raise LoggingError(
                f"self.log({name!r}, on_step=True) was called in {scope.hook}, which runs once per epoch. "
                "Leave out on_step."
            )
        if not (on_step or on_epoch):
            raise LoggingError(
                f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing. Set one of them to True."
            )
        if (known := scope.entries.get(name)) is not None:
            check_same(name, known, options, scope.hook)
            # equal options may have another form, such as torch.mean for "mean"
            known.options, known.source = options, None
            return known
        full = name
        if scope.dataloader_idx is not None and options.add_dataloader_idx:
            full = f"{name}/dataloader_idx_{scope.dataloader_idx}"
        self._check_name(full, scope)
        entry = scope.entries[name] = Entry(self, full, options, rule, scope.dataloader_idx)
        self.history.logged.update(dict.fromkeys(entry.names, entry.to_logger))
        return entry

    def _check_name(self, name: str, scope: Scope) -> None:
        """Warn once if steps of training and validation, or steps with different loaders, log the same ``name``."""
        known = self._logged_first.setdefault(name, (self.group, scope))
        if known is None or known[1] is scope:
            return
        group, first = known
        if not (first.hook.endswith("_step") and scope.hook.endswith("_step")):
            return
        if group == self.group and first.dataloader_idx != scope.dataloader_idx:
            rank_zero_warn(
                f"self.log({name!r}, add_dataloader_idx=False) was called for several loaders, and the value of the "
                "last one replaces the others. Leave out add_dataloader_idx=False, or give each loader a name."
            )
        elif {group, self.group} == {"train", "validate"}:
            rank_zero_warn(
                f"{name!r} is logged in {first.hook} and in {scope.hook}: loggers get one curve of both, and callbacks "
                f"see the value that came last. Write self.log('train_{name}', ...) and self.log('val_{name}', ...)."
            )
        else:
            return
        self._logged_first[name] = None
