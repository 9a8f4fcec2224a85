"""Print a table of the model when training begins."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain import parity
from drivetrain.base import notebook
from drivetrain.base.introspect import overrides
from drivetrain.base.packages import flop_counter
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.torch_private import DYNAMO
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, check_count
from drivetrain.module.export import example_pass

UNKNOWN = "?"
Sizes = list[Any] | str
"""The shape of a tensor, such as ``[8, 4]``; for a collection of tensors, a list of shapes; for anything else, ``"?"``.
"""


@dataclass(frozen=True)
class ModuleRow:
    """One submodule.

    Attributes:
        index: the position in the table, from 0.
        name: the submodule's name in ``named_modules``.
        type: the class's name.
        num_parameters: the number of elements in the parameters of the submodule and its children. A shared parameter
            counts once.
        training: whether the submodule is in training mode.
        is_lazy: whether a parameter of the submodule gets its shape only with the first batch. Such a parameter counts
            as 0.
        flops: the number of floating-point operations of the submodule and its children, by kind; ``None`` if torch
            could count none.
        in_sizes, out_sizes: the shapes of the inputs and outputs of the submodule's first call; ``None`` without an
            example input.
    """

    index: int
    name: str
    type: str
    num_parameters: int
    training: bool
    is_lazy: bool
    flops: Mapping[Any, int] | None = None
    in_sizes: Sizes | None = None
    out_sizes: Sizes | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of this submodule's row in the table."""
        count = human_count(self.num_parameters) + (" *" if self.is_lazy else "")
        sizes = [str(size).replace("'", "") for size in (self.in_sizes, self.out_sizes) if size is not None]
        flops = [] if self.flops is None else [human_count(sum(self.flops.values()))]
        return str(self.index), self.name, self.type, count, "train" if self.training else "eval", *flops, *sizes


@dataclass(frozen=True)
class Summary:
    """A summary of a module's submodules and totals, which ``str`` formats as a table.

    Attributes:
        rows: the submodules down to the requested depth, in order of definition.
        trainable, frozen: the number of elements in the parameters with and without ``requires_grad``. A shared
            parameter counts once.
        size_bytes: the number of bytes of all parameters.
        modules_in_train, modules_in_eval: the number of submodules in each mode, at any depth.
        has_lazy: whether a parameter has no shape yet, so that the totals are too low.
        flops: the number of floating-point operations that torch counts in a forward pass with the example input;
            ``None`` if torch could count none. A multiplication and an addition count as two operations.
    """

    rows: tuple[ModuleRow, ...]
    trainable: int
    frozen: int
    size_bytes: int
    modules_in_train: int
    modules_in_eval: int
    has_lazy: bool
    flops: int | None = None

    @property
    def header(self) -> tuple[str, ...]:
        """The column headings."""
        titles = ("", "Name", "Type", "Params", "Mode", *["FLOPs"] * any(row.flops is not None for row in self.rows))
        return (*titles, "In sizes", "Out sizes") if any(row.in_sizes is not None for row in self.rows) else titles

    @property
    def total(self) -> int:
        """The number of elements in all parameters."""
        return self.trainable + self.frozen

    def totals(self) -> list[tuple[str, str]]:
        """Return the lines below the table. Each line has a value and a label, such as "Total params"."""
        modes = self.modules_in_train, self.modules_in_eval
        lines = _totals(self.trainable, self.frozen, self.size_bytes / 1e6, modes, self.flops)
        if self.has_lazy:
            lines.append(("*", "Counted as 0 until the first batch gives them a shape"))
        return lines

    def as_arguments(self) -> dict[str, Any]:
        """Return the summary as the arguments of :meth:`ModelSummary.summarize`."""
        cells = [row.cells() for row in self.rows]
        return {
            "summary_data": [(title, [row[index] for row in cells]) for index, title in enumerate(self.header)],
            "total_parameters": self.total,
            "trainable_parameters": self.trainable,
            "model_size": self.size_bytes / 1e6,
            "total_training_modes": {"train": self.modules_in_train, "eval": self.modules_in_eval},
            "total_flops": self.flops or 0,
        }

    def _repr_html_(self) -> str:
        rows = notebook.table([row.cells() for row in self.rows], self.header) if self.rows else ""
        return rows + notebook.table([(", ".join(f"{meaning}: {value}" for value, meaning in self.totals()),)])

    def __str__(self) -> str:
        return _text(self.header, [row.cells() for row in self.rows], self.totals())


class ModelSummary(Callback):
    """Prints the model's children, parameter counts and modes when ``fit`` starts.

    If the module has an ``example_input_array``, the callback runs one forward pass with this input. The table then
    also shows each child's input and output shapes, and an estimate of its operations. The pass does not change the
    run. If the pass fails, a warning gives the reason, and the table has no shapes.

    Args:
        max_depth: the number of levels of submodules to list: 1 for the children, -1 for all levels, 0 for the totals
            alone.
        summarize_kwargs: further arguments for a subclass's :meth:`summarize`.

    Raises:
        ConfigurationError: ``max_depth`` is below -1.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__()
        check_count(type(self).__name__, "max_depth", max_depth, lowest=-1)
        self.max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary on rank 0."""
        # every rank makes the summary, because the strategy's forward pass may need all ranks
        summary = summarize(pl_module, self.max_depth)
        if trainer.is_global_zero:
            self.show(summary)

    def show(self, summary: Summary) -> None:
        """Print ``summary``. To write to another place, override this method or :meth:`summarize`."""
        if overrides(self, "summarize", ModelSummary) or self._summarize_kwargs:
            self.summarize(**summary.as_arguments(), **self._summarize_kwargs)
        else:
            notebook.show(str(summary), summary._repr_html_())

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print a summary from its columns.

        Args:
            summary_data: the heading and the cells of each column.
            total_parameters: the number of elements in all parameters.
            trainable_parameters: the number of elements in the parameters with ``requires_grad``.
            model_size: the size of all parameters, in MB.
            total_training_modes: the number of submodules in each mode, "train" and "eval".
            total_flops: the number of operations of one forward pass; 0 if torch could count none.
            summarize_kwargs: the constructor's further arguments, which this class ignores.
        """
        titles, columns = zip(*summary_data, strict=True)
        totals = _totals(
            trainable_parameters, total_parameters - trainable_parameters, model_size,
            (total_training_modes["train"], total_training_modes["eval"]), total_flops or None,
        )  # fmt: skip
        print(_text(titles, list(zip(*columns, strict=True)), totals))


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Return a summary of ``module``.

    Args:
        module: the root, which gets no row. If the root has an ``example_input_array``, the root runs forward once (see
            :func:`~drivetrain.module.export.example_pass`). If the pass fails, a warning gives the reason.
        max_depth: the number of levels of submodules that get a row: -1 for all, 0 for none.

    Raises:
        ConfigurationError: ``max_depth`` is below -1.
    """
    check_count("summarize", "max_depth", max_depth, lowest=-1)
    submodules = [(name, child) for name, child in module.named_modules() if child is not module]
    shown = [(name, child) for name, child in submodules if max_depth == -1 or name.count(".") < max_depth]
    parameters = list(module.parameters())
    in_train = sum(child.training for _, child in submodules)
    trial = _try(module, [child for _, child in shown])
    return Summary(
        rows=tuple(_row(index, name, child, trial) for index, (name, child) in enumerate(shown)),
        trainable=_count(p for p in parameters if p.requires_grad),
        frozen=_count(p for p in parameters if not p.requires_grad),
        size_bytes=sum(p.numel() * p.element_size() for p in parameters if not is_lazy(p)),
        modules_in_train=in_train,
        modules_in_eval=len(submodules) - in_train,
        has_lazy=any(map(is_lazy, parameters)),
        flops=None if trial is None else trial.flops,
    )


def human_count(number: int) -> str:
    """Return ``number`` with three or four digits: 999, 1.2 K, 3.4 M, 7.0 B, 1.1 T."""
    value = float(number)
    for unit in ("", " K", " M", " B"):
        if round(value, 1) < 1000:
            return f"{value:.1f}{unit}" if unit else str(number)
        value /= 1000
    return f"{value:,.1f} T"


def _row(index: int, name: str, module: nn.Module, trial: _Trial | None) -> ModuleRow:
    parameters = list(module.parameters())
    lazy = any(map(is_lazy, parameters))
    sizes = (None, None) if trial is None else trial.sizes.get(id(module), (UNKNOWN, UNKNOWN))
    flops = None if trial is None or trial.flops is None else trial.counts.get(name, {})
    return ModuleRow(index, name, type(module).__name__, _count(parameters), module.training, lazy, flops, *sizes)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if not is_lazy(p))


def _totals(
    trainable: int, frozen: int, megabytes: float, modes: tuple[int, int], flops: int | None
) -> list[tuple[str, str]]:
    lines = [
        (human_count(trainable), "Trainable params"),
        (human_count(frozen), "Non-trainable params"),
        (human_count(trainable + frozen), "Total params"),
        (f"{megabytes:,.3f}", "Total params size (MB)"),
        (str(modes[0]), "Modules in train mode"),
        (str(modes[1]), "Modules in eval mode"),
    ]
    return lines if flops is None else [*lines, (human_count(flops), "Total estimated FLOPs")]


def _text(titles: tuple[str, ...], rows: list[tuple[str, ...]], totals: list[tuple[str, str]]) -> str:
    lines = _table([titles, *rows]) if rows else ()
    return "\n".join([*lines, *(f"{value:<10}{meaning}" for value, meaning in totals)])


def _table(lines: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "-" * (sum(widths) + 3 * len(widths) - 3)
    for position, line in enumerate(lines):
        yield " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        if position in (0, len(lines) - 1):
            yield rule


# ---- the example input -----------------------------------------------------------------------------------------------


class _Trial(NamedTuple):
    """The result of one forward pass.

    Attributes:
        sizes: the input and output sizes of each submodule that ran, by the submodule's ``id``.
        flops: the number of operations of the complete pass.
        counts: the number of operations, by the submodule's name, then by the kind of operation.
    """

    sizes: dict[int, tuple[Sizes, Sizes]]
    flops: int | None
    counts: dict[str, dict[Any, int]]


def _try(module: nn.Module, shown: list[nn.Module]) -> _Trial | None:
    """Run ``forward`` with the example input. Return ``None`` if there is no example input. If the pass fails, log a
    warning and return ``None``.
    """
    try:
        try:
            return _run(module, shown, counts=True)
        # the error may come from torch's counter of operations, which does not support all arguments of an operation
        except Exception:
            return _run(module, shown, counts=False)
    except Exception as error:
        rank_zero_warn(
            f"The model summary has no sizes, because {type(module).__name__} failed on its example_input_array "
            f"({type(error).__name__}: {error}). Set it to inputs that forward takes, or to None for no sizes."
        )
    return None


def _run(module: nn.Module, shown: list[nn.Module], counts: bool) -> _Trial | None:
    sizes: dict[int, tuple[Sizes, Sizes]] = {}

    def record(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [*args, *kwargs.values()]
        sizes.setdefault(id(child), (_sizes(inputs[0] if len(inputs) == 1 else inputs), _sizes(output)))

    with example_pass(module, draws=parity.current().summary_draws) as inputs, ExitStack() as stack:
        if inputs is None:
            return None
        if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
            raise ConfigurationError("the first batch must initialize its lazy parameters, not an example")
        for child in shown:
            if not isinstance(child, torch.jit.ScriptModule):  # a ScriptModule does not support Python hooks
                stack.enter_context(child.register_forward_hook(record, with_kwargs=True))
        _make_plain(stack)
        args, kwargs = inputs
        if not counts:
            module(*args, **kwargs)
            return _Trial(sizes, None, {})

        with flop_counter.FlopCounterMode(display=False) as counter:
            module(*args, **kwargs)
        root = f"{type(module).__name__}."
        by_name = {path.removeprefix(root): counts for path, counts in counter.get_flop_counts().items()}
        # 0 means that torch has no formula for any of the operations
        return _Trial(sizes, counter.get_total_flops() or None, by_name)


def _make_plain(stack: ExitStack) -> None:
    """Until ``stack`` is closed, turn off compilation and torch's fused attention, because both skip forward hooks."""
    # if torch._dynamo is not imported, nothing is compiled; importing torch._dynamo is slow
    if DYNAMO in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # this warning about the hooks of torch's counter of operations is harmless
        warnings.filterwarnings("ignore", "Using `torch.compile")
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)


def _sizes(value: Any) -> Sizes:
    if isinstance(value, Tensor):
        return UNKNOWN if value.is_nested else list(value.shape)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and value:
        return [_sizes(item) for item in value]
    return UNKNOWN
