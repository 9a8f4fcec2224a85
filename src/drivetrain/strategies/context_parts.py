"""What a strategy adds to split sequences over ranks: groups of them, and which part of a batch each gets."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.errors import ConfigurationError, did_you_mean
from drivetrain.strategies.context_parallel import KINDS, Context, Dims, leave_all, split
from drivetrain.strategies.parallel import ParallelStrategy
from drivetrain.strategies.strategy import Strategy

CONTEXT = "context_parallel"


class SequenceParts(ParallelStrategy):
    """Neighbours of the data group see the same samples, and each of them a part of every sequence."""

    context_parallel_size: int = 1

    def _split_sequences(self, size: int, dims: Dims | None, kind: str) -> None:
        """Take the arguments of the constructor.

        Raises:
            ConfigurationError: one is wrong, or they contradict each other.
        """
        name = type(self).__name__
        if type(size) is not int or size < 1:
            raise ConfigurationError(f"{name}({CONTEXT}_size={size!r}) is no number of processes. Write one.")
        if kind not in KINDS:
            raise ConfigurationError(
                f"{name}({CONTEXT}_attention={kind!r}) is unknown. {did_you_mean(str(kind), KINDS)}"
            )
        if dims is not None and size == 1:
            raise ConfigurationError(
                f"{name}(sequence_dims=...) splits sequences over the ranks of a context-parallel group, and "
                f"{CONTEXT}_size is 1. Write both, or none."
            )
        self.context_parallel_size, self.sequence_dims, self._kind = size, dims, kind
        self._context: tuple[Any, Context] | None = None  # with the data group that it is a part of

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in {**super().__getstate__(), "_context": None}.items() if name != _VERB}

    @property
    def context(self) -> Context:
        """The ranks among which sequences are split, of which this process is one."""
        data = self.data
        if self._context is None or self._context[0] is not data:
            first = data.index - data.index % self.context_parallel_size
            ranks = data.ranks[first : first + self.context_parallel_size]
            self._context = data, Context(self.world.new(ranks), self._kind)
        return self._context[1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.context_parallel_size
        return {"num_replicas": max(1, self.data.size // size), "rank": self.data.index // size}

    def setup_environment(self) -> None:
        super().setup_environment()
        leave_all()
        if self.context_parallel_size > 1:
            self.context.enter(self.root_device)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.context_parallel_size == 1:
            return
        module = self.lightning_module
        dims = getattr(module, "sequence_dims", None) if self.sequence_dims is None else self.sequence_dims
        if dims is None:
            raise ConfigurationError(
                f"{type(self).__name__}({CONTEXT}_size={self.context_parallel_size}) is to split sequences, and "
                'nothing says where they are. Write sequence_dims={"input_ids": 1, "labels": 1} with the fields of a '
                f"batch, or set sequence_dims in {type(module).__name__}."
            )

        def parts_to_device(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
            return split(Strategy.batch_to_device(self, batch, device, dataloader_idx), dims)

        vars(self)[_VERB] = parts_to_device  # on the instance: a run that splits nothing does not call it

    def leave_process_group(self) -> None:
        leave_all()
        super().leave_process_group()

    def teardown(self) -> None:
        leave_all()
        vars(self).pop(_VERB, None)
        super().teardown()


_VERB = "batch_to_device"
