"""Records of what one rank does in a window (the batches of one optimizer step): allocations, operations, and exchanges
with other ranks, in the order in which Python issues them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["forward", "recompute", "backward", "clip", "optimizer"]
"""Part of a window; ``recompute``: the forward pass of checkpointed blocks during the backward pass."""
PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered parameters", "gradients", "optimizer"
ACTIVATIONS, BUFFERS, BATCH, EXCHANGED, OTHER = "activations", "buffers", "batch", "exchange buffers", "temporary"
KINDS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, BATCH, EXCHANGED, OTHER)
"""What memory is used for; ``OTHER``: gradients of activations, and intermediate results of the optimizer."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group: ``count`` ranks whose numbers are ``stride`` apart.

    Ranks 0 to 7 are ``Ranks(8, 1)``; ranks 0, 8, 16 and 24 are ``Ranks(4, 8)``.
    """

    count: int
    stride: int


@dataclass(frozen=True)
class Operation:
    """One kernel.

    Attributes:
        name: the name of torch's operation, such as "aten.mm".
        dtype: of its first floating-point input, such as "bfloat16"; "" if it has none.
        flops: floating-point operations, a multiplication with an addition counted as two; 0 if torch has no formula.
        bytes_moved: bytes of the inputs it reads and of the outputs it writes; 0 for views.
        phase: the part of the window.
        block: the path of the repeated block in the model, such as "layers.3"; "" outside of blocks.
        line: "file.py:12" of the user's program that led to it; "" if none did.
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
        group_ranks: the ranks that take part.
        bytes: the size of the output of all_gather and of the input of reduce_scatter, which contain the parts of all
            ranks; for the others, the size of one rank's tensor.
        dtype: of the exchanged tensor, such as "bfloat16".
        phase: the part of the window in which it was issued.
        block: as in :class:`Operation`.
        waited_on_at: index in :attr:`Recorded.steps` of the first operation issued after the rank waited for the
            exchange; ``len(steps)``: the rank does not wait within the window.
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
        steps: operations and exchanges, in the order of issue.
        is_compiled: the Trainer compiles the module; the recorded operations are nevertheless those before fusion.
        allows_tf32: float32 matrices may be multiplied in TF32.
        pipeline: the ranks of a pipeline, the micro-batches of a batch, and the stages of a rank.
    """

    steps: tuple[Operation | Exchange, ...]
    is_compiled: bool = False
    allows_tf32: bool = False
    pipeline: tuple[int, int, int] | None = None


@dataclass
class Event:
    """A change of the live bytes.

    Attributes:
        storage: the number of the storage.
        size: the bytes by which the storage grows; negative if it shrinks.
        phase, block, line: as of an operation.
    """

    storage: int
    size: int
    phase: Phase
    block: str
    line: str


@dataclass
class Ledger:
    """The record of a run.

    Attributes:
        events: the changes of live bytes, in order.
        steps: operations and exchanges, in order; the index at which the rank waits for an exchange is filled in at the
            end.
        kinds: the kind of each storage, by its number.
        blocks: the block in whose forward pass a storage was made.
        makers: the function of torch that made a storage for an exchange, if one did.
        set_up: the number of events before the first batch.
        unreadable: the lines of the program that read unknown values, and how often.
        read: the lines of the program that read values recorded in a pass with real values, and how often.
    """

    events: list[Event] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    blocks: dict[int, str] = field(default_factory=dict)
    makers: dict[int, str] = field(default_factory=dict)
    set_up: int = 0
    unreadable: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
