"""Lightning's ``utilities.model_summary``: drivetrain's summary under Lightning's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from drivetrain.callbacks.model_summary import UNKNOWN, Summary, human_count
from drivetrain.callbacks.model_summary import summarize as _summarize

UNKNOWN_SIZE = UNKNOWN


def _column(name: str, doc: str) -> Any:
    """Return a property with the values of one column of the summary's table; "?" stands for ``None``."""

    def read(summary: ModelSummary) -> list[Any]:
        column = [getattr(row, name) for row in summary._summary.rows]
        return [UNKNOWN if value is None else value for value in column]

    return property(read, doc=doc)


def _argument(name: str, doc: str) -> Any:
    """Return a property with an argument that the callback ModelSummary passes to its method ``summarize``."""
    return property(lambda summary: summary._summary.as_arguments()[name], doc=doc)


class ModelSummary:
    """The submodules of a module with their parameter counts.

    If the module has an ``example_input_array``, the summary includes input and output sizes. ``str`` formats the
    summary as a table.

    Args:
        model: any module.
        max_depth: levels of submodules: 1 for the children, -1 for all levels, 0 for only the totals.

    Raises:
        ConfigurationError: ``max_depth`` is below -1.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        self._model = model
        self._summary: Summary = _summarize(model, max_depth)

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The submodules by name."""
        return [(name, self._model.get_submodule(name)) for name in self.layer_names]

    layer_names: list[str] = _column("name", "The submodules' names.")
    layer_types: list[str] = _column("type", "The names of their classes.")
    in_sizes: list[Any] = _column("in_sizes", 'The input shapes; "?" if unknown.')
    out_sizes: list[Any] = _column("out_sizes", 'The output shapes; "?" if unknown.')
    param_nums: list[int] = _column("num_parameters", "The number of elements of each one's parameters.")
    training_modes: list[bool] = _column("training", "Whether each is in training mode.")

    total_training_modes: dict[str, int] = _argument(
        "total_training_modes", "The numbers of submodules, at any depth, in training mode and in evaluation mode."
    )
    total_parameters: int = _argument("total_parameters", "Number of elements of all parameters.")
    trainable_parameters: int = _argument("trainable_parameters", "Number of elements of trainable parameters.")
    model_size: float = _argument("model_size", "The size of all parameters, in MB.")
    total_flops: int = _argument("total_flops", "Operations of a forward pass of the example input; 0 if not counted.")

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """For each submodule, the number of floating-point operations in a forward pass of the example input, by
        operation.
        """
        return {row.name: dict(row.flops or {}) for row in self._summary.rows}

    @property
    def total_layer_params(self) -> int:
        """The sum of :attr:`param_nums`. A parameter is counted again for each submodule that contains it."""
        return sum(self.param_nums)

    def __str__(self) -> str:
        return str(self._summary)

    __repr__ = __str__


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return a :class:`ModelSummary` of a module."""
    return ModelSummary(lightning_module, max_depth)


get_human_readable_count = human_count


def get_formatted_model_size(total_model_size: float) -> str:
    """Return ``total_model_size`` (in megabytes) as text with three decimals."""
    return f"{total_model_size:,.3f}"


def parse_batch_shape(batch: Any) -> str | list[Any]:
    """Return the shape of a tensor, or the shapes of a list's items; "?" for anything else."""
    if isinstance(batch, Tensor):
        return list(batch.shape)
    return [parse_batch_shape(item) for item in batch] if isinstance(batch, (list, tuple)) else UNKNOWN
