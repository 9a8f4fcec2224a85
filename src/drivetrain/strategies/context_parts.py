"""Split sequences over ranks: the groups of ranks, and which part of a batch each gets."""

from __future__ import annotations

from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError, did_you_mean
from drivetrain.strategies.context_parallel import KINDS, Context, Dims
from drivetrain.strategies.group import Group

CONTEXT = "context_parallel"


class SequenceParts:
    """Groups of neighbouring ranks of the data group: they see the same samples, each a part of every sequence.

    Args:
        owner: the name of the strategy's class, for messages.
        size, dims, kind: its arguments ``context_parallel_size``, ``sequence_dims`` and ``context_parallel_attention``.

    Raises:
        ConfigurationError: an argument is wrong, or two contradict each other.
    """

    def __init__(self, owner: str, size: int, dims: Dims | None, kind: str) -> None:
        if type(size) is not int or size < 1:
            raise ConfigurationError(f"{owner}({CONTEXT}_size={size!r}) is no number of processes. Write one.")
        if kind not in KINDS:
            raise ConfigurationError(
                f"{owner}({CONTEXT}_attention={kind!r}) is unknown. {did_you_mean(str(kind), KINDS)}"
            )
        if dims is not None and size == 1:
            raise ConfigurationError(
                f"{owner}(sequence_dims=...) splits sequences over the ranks of a context-parallel group, and "
                f"{CONTEXT}_size is 1. Write both, or none."
            )
        self.owner, self.size, self.dims, self._kind = owner, size, dims, kind
        self._context: tuple[Group, Context] | None = None  # with the data group for which it was made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_context": None}

    def context(self, world: Group, data: Group) -> Context:
        """Return this process's group of ranks among which sequences are split."""
        if self._context is None or self._context[0] is not data:
            first = data.index - data.index % self.size
            self._context = data, Context(world.new(data.ranks[first : first + self.size]), self._kind)
        return self._context[1]

    def sampler_kwargs(self, data: Group) -> dict[str, Any]:
        """Return this rank's index among the parts of the data, and the number of parts."""
        return {"num_replicas": max(1, data.size // self.size), "rank": data.index // self.size}

    def dims_for(self, module: nn.Module) -> Dims:
        """Return which dimensions of a batch are sequences.

        Raises:
            ConfigurationError: neither the argument nor the module names them.
        """
        dims: Dims | None = getattr(module, "sequence_dims", None) if self.dims is None else self.dims
        if dims is None:
            raise ConfigurationError(
                f"{self.owner}({CONTEXT}_size={self.size}) is to split sequences, and "
                'nothing says where they are. Write sequence_dims={"input_ids": 1, "labels": 1} with the fields of a '
                f"batch, or set sequence_dims in {type(module).__name__}."
            )
        return dims
