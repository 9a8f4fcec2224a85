"""What the model consists of, printed before training begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module import LightningModule
    from drivetrain.trainer import Trainer


@dataclass(frozen=True)
class ModuleRow:
    """One submodule.

    Attributes:
        index: position in the table, from 0.
        name: path from the root, as in ``named_modules``.
        type: the class's name.
        num_parameters: its own and those below it, each counted once.
        training: whether it is in training mode.
        is_lazy: some of its parameters get their shape with the first batch and are counted as 0.
    """

    index: int
    name: str
    type: str
    num_parameters: int
    training: bool
    is_lazy: bool

    def cells(self) -> tuple[str, ...]:
        """What the table shows, column by column."""
        count = human_count(self.num_parameters) + (" *" if self.is_lazy else "")
        return str(self.index), self.name, self.type, count, "train" if self.training else "eval"


@dataclass(frozen=True)
class Summary:
    """A module's parts and totals; ``str`` makes a table of it.

    Attributes:
        rows: the submodules down to the depth that was asked for, in order of definition.
        trainable, frozen: elements of parameters with and without ``requires_grad``; shared ones count once.
        size_bytes: of all parameters, each by the size of its own elements.
        modules_in_train, modules_in_eval: submodules of any depth by their mode.
        has_lazy: some parameters have no shape yet, so the totals are too low.
    """

    rows: tuple[ModuleRow, ...]
    trainable: int
    frozen: int
    size_bytes: int
    modules_in_train: int
    modules_in_eval: int
    has_lazy: bool

    HEADER = ("", "Name", "Type", "Params", "Mode")

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return self.trainable + self.frozen

    def totals(self) -> list[tuple[str, str]]:
        """What stands below the table: pairs of value and meaning."""
        lines = [
            (human_count(self.trainable), "Trainable params"),
            (human_count(self.frozen), "Non-trainable params"),
            (human_count(self.total), "Total params"),
            (f"{self.size_bytes / 1e6:,.3f}", "Total params size (MB)"),
            (str(self.modules_in_train), "Modules in train mode"),
            (str(self.modules_in_eval), "Modules in eval mode"),
        ]
        return [*lines, ("*", "Counted as 0 until the first batch gives them a shape")] if self.has_lazy else lines

    def __str__(self) -> str:
        lines = list(_table([self.HEADER, *(row.cells() for row in self.rows)])) if self.rows else []
        return "\n".join([*lines, *(f"{value:<10}{meaning}" for value, meaning in self.totals())])


class ModelSummary(Callback):
    """Prints the model's children, parameter counts and modes when ``fit`` starts.

    Args:
        max_depth: levels of submodules to list: 1 for the children, -1 for all, 0 for the totals alone.

    Raises:
        ConfigurationError: ``max_depth`` is below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        _check_depth(max_depth)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print it, once per job."""
        if trainer.is_global_zero:
            self.show(summarize(pl_module, self.max_depth))

    def show(self, summary: Summary) -> None:
        """Print ``summary``; override it to put it elsewhere."""
        print(summary)


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Count what ``module`` consists of; no batch is run through it.

    Args:
        module: the root, which has no row of its own.
        max_depth: levels of submodules that get a row: -1 for all, 0 for none.

    Raises:
        ConfigurationError: ``max_depth`` is below -1.
    """
    _check_depth(max_depth)
    submodules = [(name, child) for name, child in module.named_modules() if child is not module]
    shown = [(name, child) for name, child in submodules if max_depth == -1 or name.count(".") < max_depth]
    parameters = list(module.parameters())
    in_train = sum(child.training for _, child in submodules)
    return Summary(
        rows=tuple(_row(index, name, child) for index, (name, child) in enumerate(shown)),
        trainable=_count(p for p in parameters if p.requires_grad),
        frozen=_count(p for p in parameters if not p.requires_grad),
        size_bytes=sum(p.numel() * p.element_size() for p in parameters if not is_lazy(p)),
        modules_in_train=in_train,
        modules_in_eval=len(submodules) - in_train,
        has_lazy=any(map(is_lazy, parameters)),
    )


def human_count(number: int) -> str:
    """``number`` with three or four digits: 999, 1.2 K, 3.4 M, 7.0 B, 1.1 T."""
    value = float(number)
    for unit in ("", " K", " M", " B"):
        if round(value, 1) < 1000:
            return f"{value:.1f}{unit}" if unit else str(number)
        value /= 1000
    return f"{value:,.1f} T"


def _row(index: int, name: str, module: nn.Module) -> ModuleRow:
    parameters = list(module.parameters())
    lazy = any(map(is_lazy, parameters))
    return ModuleRow(index, name, type(module).__name__, _count(parameters), module.training, lazy)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if not is_lazy(p))


def _table(lines: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "-" * (sum(widths) + 3 * len(widths) - 3)
    for position, line in enumerate(lines):
        yield " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        if position in (0, len(lines) - 1):
            yield rule


def _check_depth(max_depth: int) -> None:
    if max_depth < -1:
        raise ConfigurationError(
            f"A model summary got max_depth={max_depth}. Pass a number of levels, 0 for totals only, or -1 for all."
        )
