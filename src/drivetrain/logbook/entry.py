"""Store and reduce the values of one logged name."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from drivetrain import parity
from drivetrain.base import torch_private
from drivetrain.base.restoring import NUMBER, Form, WrongForm, entry, expect
from drivetrain.errors import CheckpointError, LoggingError, UnloggableError, described, is_number, shown

if TYPE_CHECKING:
    from drivetrain.logbook.logbook import Logbook

Reduction = Literal["mean", "sum", "min", "max"]
Value = Tensor | float

_FOLD_AT = 64
_REDUCTIONS: dict[Any, Reduction] = {
    "mean": "mean", "avg": "mean", torch.mean: "mean",
    "sum": "sum", torch.sum: "sum", sum: "sum",
    "min": "min", torch.min: "min", min: "min",
    "max": "max", torch.max: "max", max: "max",
}  # fmt: skip
for _name in ("mean", "avg", "sum", "min", "max"):
    _REDUCTIONS[_name.upper()] = _REDUCTIONS[_name.title()] = _REDUCTIONS[_name]
STACKED: dict[Reduction, Callable[..., Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
"""The torch functions that reduce a tensor of values to one value, by reduction."""


class LogRule(NamedTuple):
    """The defaults of ``self.log`` in one hook, and whether the hook may log per-step values."""

    on_step: bool
    on_epoch: bool
    step_allowed: bool = True


class Options(NamedTuple):
    """The arguments of ``self.log`` that must be equal in all calls with the same name in the same hook."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Any
    enable_graph: bool
    add_dataloader_idx: bool
    sync_dist: bool = False


def _reduction(value: Any, place: str) -> None:
    if not isinstance(value, str) or value not in get_args(Reduction):
        raise WrongForm(place, f"is {shown(value)}, which is no reduction")


def _known_options(value: Any, place: str) -> None:
    if unknown := [key for key in value if key not in Options._fields]:
        raise WrongForm(place, f"has the unknown entry {shown(unknown[0])}")


def _pending(value: Any, place: str) -> None:
    pending = expect(value.get("pending"), (Tensor, None), f"{place}['pending']")
    if pending is None:
        return
    if pending.ndim != 1 or not len(pending) or pending.is_complex():
        raise WrongForm(f"{place}['pending']", f"has the shape {tuple(pending.shape)}, and a list is expected")
    entry(value, "pending_weight", NUMBER, place)


_SWITCH: Form = (bool, None)
_OPTIONS: Form = {
    "reduce_fx": _reduction, "prog_bar": bool, "enable_graph": bool, "add_dataloader_idx": bool, "logger": _SWITCH,
    "on_step": _SWITCH, "on_epoch": _SWITCH,
}  # fmt: skip
LOGGED_STATE: Form = ({
    "name": str, "hook": str, "dataloader_idx": (int, None), "options": (_OPTIONS, _known_options),
    "total": (*NUMBER, None), "last": (*NUMBER, None), "weight": NUMBER, "last_weight?": NUMBER, "fresh": bool,
    "metric": (str, None),
}, _pending)  # fmt: skip
"""The form of an entry in :meth:`Logbook.state_dict`. In files of earlier versions, "pending" is missing."""


class Logged(NamedTuple):
    """The options with which a name was logged."""

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    sync_dist: bool
    is_metric: bool


class Entry:
    """The last value of a name in a hook, and the running reduction over the epoch."""

    def __init__(
        self, book: Logbook, name: str, options: Options, rule: LogRule, dataloader_idx: int | None = None
    ) -> None:
        self.name = name
        self.dataloader_idx = dataloader_idx
        self.options = options
        self.on_step = rule.on_step if options.on_step is None else options.on_step
        self.on_epoch = rule.on_epoch if options.on_epoch is None else options.on_epoch
        # the names of the values per step and over the epoch
        self.step_name, self.epoch_name = self._suffixed("step"), self._suffixed("epoch")
        self.names = [self.step_name] * self.on_step + [self.epoch_name] * self.on_epoch
        self.once = not rule.step_allowed  # whether the hook runs once per epoch, so that the first value is final
        self.to_logger = options.logger is not False
        self.to_bar = options.prog_bar
        self.keep_graph = options.enable_graph
        self.reduction: Reduction = _REDUCTIONS[options.reduce_fx]
        self.last: Value | None = None
        self.fresh = False  # whether `last` was set since the last flush
        self._book = book
        self._pending: list[Tensor] = []
        self._pending_weight: float = 1
        # the name of the checkpoint that the entry comes from, until self.log is called again
        self.source: str | None = None
        self._restored = False  # whether pending values come from a checkpoint, and are in host memory
        self._total: Value | None = None
        self._weight: float = 0
        self._last_weight: float = 1
        self.metric: Any = None  # the metric object logged under this name, or None if numbers are logged
        self._is_without_value = False  # whether the metric object's last compute() returned None
        # whether the values of the ranks are reduced to one value
        self.shared = options.sync_dist and book.reduce is not None
        self.agreed: Value | None = None  # the epoch's value after the exchange between ranks
        # whether values need no copy, because the epoch's first value was a new result of an operation
        self._borrows = False
        self._lent: Value | None = None  # the last value from :meth:`lend`

    def logged(self) -> Logged:
        """Return how the name was logged."""
        options = self.options
        return Logged(self.name, self.on_step, self.on_epoch, self.to_bar, options.sync_dist, self.metric is not None)

    def _suffixed(self, suffix: str) -> str:
        if not (self.on_step and self.on_epoch):
            return self.name
        base, separator, loader = self.name.partition("/dataloader_idx_")
        return f"{base}_{suffix}{separator}{loader}"

    def push(self, value: Any, batch_size: float | None) -> None:
        """Store one value, without a transfer to the host. See [Note: when a value is copied] in logbook.py."""
        if self._book.muted:
            self._push_nothing(value)
            return
        if self._borrows and not self._book.copies and isinstance(value, Tensor):
            self.last = value.data
            self.fresh = True
            return
        if isinstance(value, Tensor):
            if value.ndim:
                value = self._as_scalar(value)
            self._borrows = not (self.on_epoch or self.keep_graph or value.is_leaf or torch_private.is_view(value))
            value = value.clone() if self.keep_graph else value.detach().clone()
        elif isinstance(value, nn.Module):
            self._push_metric(value)
            return
        elif not isinstance(value, (int, float)):
            value = self._as_number(value)
        self.last = value
        self.fresh = True
        if not (self.on_epoch or self.shared):
            return
        weight = 1.0
        if self.reduction == "mean":
            weight = (self._book.size or self._book.find_batch_size()) if batch_size is None else batch_size
            self._last_weight = weight
        if not self.on_epoch:
            return
        if self.reduction == "mean":
            self._weight += weight
        if isinstance(value, Tensor):
            if weight != self._pending_weight or len(self._pending) >= _FOLD_AT:
                self._fold()
                self._pending_weight = weight
            self._pending.append(value.detach() if self.keep_graph else value)
        else:
            self._combine(value * weight if self.reduction == "mean" else value)

    def lend(self, value: Tensor) -> None:
        """Store a value without a copy. A graph of the device replays the step, so the next replay overwrites the
        value.
        """
        # a new tensor object, because the logbook compares identities to detect a new value
        self.last = self._lent = value.detach()
        self.fresh = True

    def _push_nothing(self, value: Any) -> None:
        """Record that this rank's batch does not count. If the ranks exchange values of this name, this rank's weight
        is 0.
        """
        if self.shared:
            self.last, self.fresh, self._last_weight = None, True, 0
        if isinstance(value, nn.Module):
            self.metric = value  # all ranks must compute the metric together

    def _push_metric(self, metric: nn.Module) -> None:
        """Record a metric object of torchmetrics. The metric's own state is the running reduction."""
        if not (hasattr(metric, "compute") and hasattr(metric, "reset")):
            raise LoggingError(
                f"self.log({self.name!r}, ...) got a {type(metric).__name__}. "
                "Log a number, a tensor with one element, or a metric object with compute() and reset()."
            )
        if self.metric is not metric:
            self._begin_metric(metric)
        if (value := getattr(metric, "_forward_cache", None)) is not None:
            self.last, self.fresh = self._from_metric(value).clone(), True

    def _begin_metric(self, metric: nn.Module) -> None:
        """Record ``metric``, which was not logged yet in this epoch.

        Raises:
            LoggingError: the metric is also logged in another stage. Or only step values are logged, and the metric has
                no step value.
        """
        self._book.check_metric(self, metric)
        if not self.on_epoch and getattr(metric, "_forward_cache", None) is None and hasattr(metric, "_forward_cache"):
            raise LoggingError(
                f"self.log({self.name!r}, ..., on_step=True, on_epoch=False) got a {type(metric).__name__} that has no "
                "value of this step, because it was given its batch by update(). Call it, metric(preds, target), or "
                "log it with on_epoch=True."
            )
        self.metric = metric

    def _as_scalar(self, value: Tensor) -> Tensor:
        if value.numel() != 1:
            raise UnloggableError(
                f"self.log({self.name!r}, ...) got a tensor of shape {tuple(value.shape)}. "
                "Log one number per name: reduce it first, for example with .mean(). [DT1026]"
            )
        return value.reshape(())

    def last_scalar(self) -> Value | None:
        """Return the last value as a scalar. This method checks a value that was stored without a copy, and raises an
        error if the value has several elements. A value from :meth:`lend` is copied here.
        """
        last = self._as_scalar(self.last) if isinstance(self.last, Tensor) and self.last.ndim else self.last
        return last.clone() if isinstance(last, Tensor) and self.last is self._lent else last

    def _as_number(self, value: Any) -> Value:
        if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a numpy number, or an array of one element
            return value.item()
        raise UnloggableError(
            f"self.log({self.name!r}, ...) got {described(value)}. "
            "Log a number, a tensor with one element, or a metric object. [DT1026]"
        )

    def _fold(self) -> None:
        """Reduce the pending tensors, which have equal weights, and add the result to the total."""
        if not self._pending:
            return
        if self._restored:
            device, self._restored = self._pending[-1].device, False
            self._pending = [value.to(device) for value in self._pending]
        stacked = torch.stack(self._pending)
        self._pending.clear()
        if self.reduction in ("mean", "sum"):
            summed = stacked.sum(dtype=self._book.sum_dtype)
            self._combine(summed * self._pending_weight if self.reduction == "mean" else summed)
        else:
            self._combine(STACKED[self.reduction](stacked))

    def _combine(self, value: Value) -> None:
        if self._total is None:
            self._total = value
        elif self.reduction in ("mean", "sum"):
            self._total = self._total + value
        else:
            pick = torch.minimum if self.reduction == "min" else torch.maximum
            self._total = pick(torch.as_tensor(self._total), torch.as_tensor(value))

    def epoch_value(self) -> Value | None:
        """Return the reduction of all values since the last :meth:`reset`, or ``None`` if there are no values."""
        if self.agreed is not None or self._is_without_value:
            return self.agreed
        if self.metric is not None:
            return self._computed()
        self._fold()
        if self._total is None or self.reduction != "mean":
            return self._total
        return self._total / self._weight if self._weight else float("nan")

    def parts(self, epoch: bool) -> tuple[Value, float]:
        """Return two numbers for the exchange between ranks. For a mean, they are the weighted sum and the weight. For
        any other reduction, they are the value and 0.
        """
        if epoch:
            self._fold()
            value, weight = self._total, self._weight
        else:
            value, weight = self.last_scalar(), self._last_weight
            value = value * weight if self.reduction == "mean" and value is not None else value
        if value is None:  # this rank has logged no value
            value = {"min": float("inf"), "max": float("-inf")}.get(self.reduction, 0.0)
        return value, (weight if self.reduction == "mean" else 0)

    @property
    def sign(self) -> int:
        """The factor by which a value is multiplied before the ranks compute a maximum: 1 for "max", and -1 for "min".
        It is 0 for "mean" and "sum", because the ranks then compute a sum.
        """
        return {"max": 1, "min": -1}.get(self.reduction, 0)

    def combine(self, value: Tensor, weight: Any, ranks: int) -> Tensor:
        """Return the final value. ``value`` and ``weight`` are the results of :meth:`parts`, reduced over ``ranks``
        ranks.
        """
        if self.reduction != "mean":
            return value
        if parity.current().averaged_batch_sizes:
            return (value / ranks) / (weight / ranks).trunc()
        return value / weight

    def combine_by(self, reduce: Callable[..., Any], value: Tensor, mean: Any) -> Tensor:
        """Reduce this rank's ``value`` with ``reduce``, the method of a user's strategy. For a mean, ``reduce`` gets a
        number whose average over the ranks is the weighted mean. If the weights are equal, the number is the rank's own
        mean.
        """
        if self.reduction == "mean":
            value = value / (mean.trunc() if parity.current().averaged_batch_sizes else mean)
        return self._as_scalar(torch.as_tensor(reduce(value, reduce_op=self.reduction), device=value.device).detach())

    def compute_together(self, sync: Callable[..., list[Tensor]] | None = None) -> None:
        """Compute the metric object. All ranks must call this method, because the ranks exchange the metric's state.

        ``sync`` gathers a tensor of the state from the ranks that see different samples. If ``sync`` is ``None``,
        torchmetrics gathers from all ranks.
        """
        metric = self.metric
        if sync is None or getattr(metric, "process_group", None) or getattr(metric, "dist_sync_fn", sync) is not None:
            self.agreed = self._computed()
            return
        metric.dist_sync_fn = sync
        try:
            self.agreed = self._computed()
        finally:
            metric.dist_sync_fn = None

    def _computed(self) -> Tensor | None:
        value = self.metric.compute()
        self._is_without_value = value is None
        return None if value is None else self._as_scalar(self._from_metric(value))

    def _from_metric(self, value: Any) -> Tensor:
        """Return ``value``, a result of the metric object, as a tensor."""
        if is_number(value):
            return torch.tensor(float(value), dtype=torch.float64)
        if isinstance(value, Tensor):
            return value.detach()
        raise UnloggableError(
            f"self.log({self.name!r}, ...) got a {type(self.metric).__name__}, which computes {described(value)}. "
            "Log its parts: compute it in an epoch hook, pass them to self.log_dict, and reset it there."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the running reduction as plain data. The only exception is "metric", which is the metric object
        itself.

        This method does not add the pending values up, because another order of additions could change the last bit of
        a sum.
        """
        options = {**self.options._asdict(), "reduce_fx": self.reduction}
        pending = [value.to(self._pending[-1].device) for value in self._pending]
        return {"options": options, "total": self._total, "weight": self._weight, "last": self.last_scalar(),
                "last_weight": self._last_weight, "fresh": self.fresh, "metric": self.metric,
                "pending": torch.stack(pending) if pending else None,
                "pending_weight": self._pending_weight}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""
        self._total, self._weight = state["total"], state["weight"]
        self.last, self.fresh, self.metric = state["last"], state["fresh"], state["metric"]
        self._last_weight = state.get("last_weight", 1)
        if (pending := state.get("pending")) is not None:
            self._pending, self._pending_weight = list(pending.unbind()), state["pending_weight"]
            self._restored = True

    def include(self, other: Entry) -> None:
        """Add the running reduction of another rank's entry."""
        self._fold()
        other._fold()
        if other._total is not None:
            self._combine(other._total)
        self._weight += other._weight
        if self.options.sync_dist:
            self._include_last(other)

    def _include_last(self, other: Entry) -> None:
        """Reduce the last values of two ranks to one value, as an exchange between the ranks would."""
        self.fresh = self.fresh or other.fresh
        there = [(each.last_scalar(), each._last_weight) for each in (self, other) if each.last is not None]
        values, weights = [torch.as_tensor(value) for value, _ in there], [weight for _, weight in there]
        self._last_weight = sum(weights)
        if len(values) < 2 or not (self._last_weight or self.reduction != "mean"):
            self.last = values[0] if values else None
        elif self.reduction == "mean":
            self.last = sum(value * weight for value, weight in zip(values, weights, strict=True)) / self._last_weight
        else:
            self.last = STACKED[self.reduction](torch.stack(values))

    def reset(self) -> None:
        """Remove all values, and reset the metric object."""
        if self.metric is not None:
            self.metric.reset()
        self._pending.clear()
        self._total, self._weight, self.last, self.fresh, self.agreed = None, 0, None, False, None
        self._is_without_value = False


def check_arguments(name: str, value: Any, options: Options, batch_size: Any) -> None:
    """Check the arguments of ``self.log``.

    Raises:
        LoggingError: an argument is wrong.
    """
    if not isinstance(options.reduce_fx, Hashable) or options.reduce_fx not in _REDUCTIONS:
        raise LoggingError(
            f"self.log({name!r}, reduce_fx={shown(options.reduce_fx)}) is no known reduction. "
            "Write 'mean', 'sum', 'min' or 'max', or log a metric object for anything else."
        )
    for field in ("prog_bar", "logger", "on_step", "on_epoch"):
        if not isinstance(given := getattr(options, field), (int, type(None))):
            raise LoggingError(f"self.log({name!r}, {field}={shown(given)}): {field} is a bool. Write {field}=True.")
    # The value of a tensor batch_size is not checked, because a check would need a transfer.
    if not (batch_size is None or isinstance(batch_size, Tensor) or (is_number(batch_size) and batch_size >= 0)):
        raise LoggingError(
            f"self.log({name!r}, batch_size={shown(batch_size)}): batch_size is a number of samples. "
            "Write batch_size=len(x)."
        )
    if isinstance(value, Tensor) and value.is_complex():
        raise LoggingError(
            f"self.log({name!r}, ...) got a tensor of dtype {value.dtype}, and a curve is made of real numbers. "
            "Log its .real, .imag or .abs()."
        )


def same_options(one: Options, other: Options) -> bool:
    """Return whether the options of two calls are equal. Different forms of ``reduce_fx``, such as "mean" and
    torch.mean, are equal.
    """
    return one._replace(reduce_fx=_REDUCTIONS[one.reduce_fx]) == other._replace(reduce_fx=_REDUCTIONS[other.reduce_fx])


def check_same(name: str, entry: Entry, options: Options, hook: str) -> None:
    """Check that a further call of ``self.log`` in ``hook`` has the same options as ``entry``.

    Raises:
        LoggingError: the options differ.
        CheckpointError: the options differ from the options in the resumed checkpoint.
    """
    if same_options(entry.options, options):
        return
    changed = ", ".join(
        f"{field}={new!r} (was {old!r})"
        for field, new, old in zip(Options._fields, options, entry.options, strict=True)
        if new != old
    )
    if entry.source is not None:
        raise CheckpointError(
            f"{entry.source}: self.log({name!r}, ...) in {hook} has other options than when this checkpoint was saved "
            f"in the middle of an epoch: {changed}. Use the same options, or resume from a checkpoint that was saved "
            "at the end of an epoch."
        )
    raise LoggingError(
        f"self.log({name!r}, ...) was called twice in {hook} with different options: {changed}. Use the same options, "
        "or two names. [DT1025]"
    )
