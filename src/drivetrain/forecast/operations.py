"""Records of one rank in a window (the batches of one optimizer step): allocations, operations, and exchanges with
other ranks, in the order in which Python issues them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["forward", "recompute", "backward", "clip", "optimizer"]
"""A part of a window. In "recompute", checkpointed blocks repeat their forward pass during the backward pass."""
PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered parameters", "gradients", "optimizer"
ACTIVATIONS, BUFFERS, BATCH, EXCHANGED, OTHER = "activations", "buffers", "batch", "exchange buffers", "temporary"
KINDS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, BATCH, EXCHANGED, OTHER)
"""The kinds of memory. ``OTHER`` is the gradients of activations, and intermediate results of the optimizer."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group: ``count`` ranks with a distance of ``stride`` between consecutive numbers.

    Ranks 0 to 7 are ``Ranks(8, 1)``, and ranks 0, 8, 16 and 24 are ``Ranks(4, 8)``.
    """

    count: int
    stride: int


@dataclass(frozen=True)
class Operation:
    """One kernel.

    Attributes:
        name: the name of torch's operation, such as "aten.mm".
        dtype: the dtype of the first floating-point input, such as "bfloat16", or "".
        flops: the number of floating-point operations, or 0 if torch has no formula. A fused multiplication and
            addition counts as two.
        bytes_moved: the bytes of all inputs and outputs, or 0 for a view.
        phase: the part of the window in which the operation was issued.
        block: the path of the repeated block in the model, such as "layers.3", or "" outside of blocks.
        line: the line of the user's program that caused the operation, such as "file.py:12", or "".
    """

    name: str
    dtype: str
    flops: int
    bytes_moved: int
    phase: Phase
    block: str
    line: str


@dataclass(frozen=True)
class Exchange:
    """One collective.

    Attributes:
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv".
        group_ranks: the ranks of the process group.
        bytes: the size of one rank's tensor. For all_gather, the size of the output, which has the parts of all ranks.
            For reduce_scatter, the size of the input, which has the parts of all ranks.
        dtype: the dtype of the exchanged tensor, such as "bfloat16".
        phase: the part of the window in which the exchange was issued.
        block: as in :class:`Operation`.
        waited_on_at: the index in :attr:`Recorded.steps` of the first operation after the rank has waited for the
            exchange. ``len(steps)`` if the rank does not wait in the window.
    """

    name: str
    group_ranks: Ranks
    bytes: int
    dtype: str
    phase: Phase
    block: str
    waited_on_at: int


@dataclass(frozen=True)
class Recorded:
    """One window of one rank.

    Attributes:
        steps: the operations and exchanges, in the order in which Python issues them.
        is_compiled: whether the Trainer compiles the module. The recorded operations are those of the module before
            compilation.
        allows_tf32: whether torch may multiply float32 matrices in TF32.
        pipeline: the numbers of ranks in a pipeline, of micro-batches in a batch, and of stages on a rank. ``None``
            without a pipeline.
    """

    steps: tuple[Operation | Exchange, ...]
    is_compiled: bool = False
    allows_tf32: bool = False
    pipeline: tuple[int, int, int] | None = None


@dataclass
class Event:
    """A change of the live bytes.

    Attributes:
        storage: the number that identifies the storage.
        size: the bytes by which the storage grows. Negative if the storage shrinks.
        phase, block, line: as in :class:`Operation`.
    """

    storage: int
    size: int
    phase: Phase
    block: str
    line: str


@dataclass
class Ledger:
    """The record of several windows of one rank.

    Attributes:
        events: the changes of live bytes, in order.
        steps: the operations and exchanges, in order. The attribute ``waited_on_at`` of exchanges is set at the end.
        kinds: the kind of each storage. The keys are numbers of storages.
        blocks: for each storage, the block whose forward pass has allocated the storage.
        makers: for each storage, the function of torch that has allocated the storage for an exchange, or "".
        set_up: the number of events before the first batch.
        unreadable: for each line of the program, how many unknown values the line reads.
        read: for each line of the program, how many recorded values the line reads. A run with real values has recorded
            these values.
    """

    events: list[Event] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    blocks: dict[int, str] = field(default_factory=dict)
    makers: dict[int, str] = field(default_factory=dict)
    set_up: int = 0
    unreadable: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
