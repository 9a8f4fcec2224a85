"""A Llama in plain torch, on the meta device, and the record of its training: what published rows are compared with.

The record is made from three parts: a block, the embedding, and the head with its loss. Each runs once, forward and
backward, and its operations are written down; the window repeats the block. Exchanges are added where torch's FSDP2,
tensor and context parallelism make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from drivetrain.forecast.exchange import COPY_IN
from drivetrain.forecast.operations import Exchange, Operation, Phase, Ranks
from drivetrain.forecast.roofline import Step, fused

SDPA = torch.ops.aten._scaled_dot_product_flash_attention
ATTENTION = {SDPA.default, torch.ops.aten._scaled_dot_product_flash_attention_backward.default}


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128_256

    @property
    def parameters(self) -> int:
        head = self.dim // self.heads
        block = 2 * self.dim * (self.heads + self.kv_heads) * head + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + 2 * self.vocab * self.dim + self.dim


LLAMA3_8B = Size(32, 4096, 32, 8, 14336)
LLAMA3_70B = Size(80, 8192, 64, 8, 28672)
LLAMA3_405B = Size(126, 16384, 128, 8, 53248)
LLAMA2_7B = Size(32, 4096, 32, 32, 11008, 32_000)
CODE_LLAMA_34B = Size(48, 8192, 64, 8, 22016, 32_000)
LLAMA2_13B = Size(40, 5120, 40, 40, 13824, 32_000)
LLAMA2_70B = Size(80, 8192, 64, 8, 28672, 32_000)


@dataclass(frozen=True)
class Run:
    """How a Llama is trained.

    Attributes:
        batch, length: of a rank's batch; ``length`` is that of the whole sequence, before context parallelism cuts it.
        sharded: ranks that share the parameters (FSDP), those of context parallelism included.
        replicas: groups of such ranks, which all_reduce their gradients (HSDP).
        reduced_bytes: bytes of a gradient when it is reduced.
        checkpoints: "none", "full", "layer" (every second block) or "op" (torchtitan's selection: every second matrix
            multiplication is computed again, and all that is no matrix operation).
        float8: the linear layers of blocks compute in float8, and FSDP gathers their weights in it.
    """

    size: Size
    batch: int
    length: int
    sharded: int
    checkpoints: str
    compiled: bool = False
    float8: bool = False
    tensor: int = 1
    async_tensor: bool = False
    context: int = 1
    stages: int = 1
    micro_batches: int = 1
    stages_per_rank: int = 1
    replicas: int = 1
    reduced_bytes: int = 4

    @property
    def tokens(self) -> float:
        """Tokens of a window for each device."""
        return self.batch * self.length / (self.context * self.tensor * self.stages)


class Float8(torch.autograd.Function):
    """A matrix multiplication of float8, scaled by tensor: each input is read for its largest value, and cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return scaled(grad, weight), scaled(grad.t(), x)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    one = torch.ones((), device=x.device)
    for each in (x, y):
        each.abs().max()
    first, second = x.to(torch.float8_e4m3fn).contiguous(), y.to(torch.float8_e4m3fn).t().contiguous().t()
    return torch._scaled_mm(first, second, one, one, out_dtype=torch.bfloat16)


def linear(x: Tensor, weight: nn.Parameter, float8: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return (Float8.apply(flat, weight) if float8 else flat @ weight.t()).view(*x.shape[:-1], -1)


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


class Block(nn.Module):
    """The part of a Llama's block that one rank of tensor parallelism computes, norms on that rank's part of the
    sequence."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        size, ways = run.size, run.tensor
        self.run, self.head = run, size.dim // size.heads
        self.heads, self.kv_heads = size.heads // ways, max(1, size.kv_heads // ways)
        self.q, self.o = weights(self.heads * self.head, size.dim), weights(size.dim, self.heads * self.head)
        self.k, self.v = (weights(self.kv_heads * self.head, size.dim) for _ in range(2))
        self.up, self.gate = (weights(size.hidden // ways, size.dim) for _ in range(2))
        self.down = weights(size.dim, size.hidden // ways)
        self.norms = nn.ParameterList([weights(size.dim), weights(size.dim)])

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(norm(x, self.norms[0]), angles)
        return x + self.feed_forward(norm(x, self.norms[1]))

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        float8 = self.run.float8
        x = gathered(x, self.run.tensor)
        batch, length, _ = x.shape
        q = linear(x, self.q, float8).view(batch, length, self.heads, self.head)
        k, v = (linear(x, each, float8).view(batch, length, self.kv_heads, self.head) for each in (self.k, self.v))
        q, k = turned(q, angles), turned(k, angles)
        repeat = self.heads // self.kv_heads
        k, v = (
            each[:, :, :, None, :].expand(batch, length, self.kv_heads, repeat, self.head).reshape(q.shape)
            for each in (k, v)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.run.context > 1:
            k = Rotate.apply(k)
        mixed = SDPA.default(q, k, v, 0.0, True)[0]
        if self.run.context > 1:
            mixed = Unrotate.apply(mixed)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return scattered(linear(mixed, self.o, float8), self.run.tensor)

    def feed_forward(self, x: Tensor) -> Tensor:
        float8, x = self.run.float8, gathered(x, self.run.tensor)
        hidden = F.silu(linear(x, self.gate, float8)) * linear(x, self.up, float8)
        return scattered(linear(hidden, self.down, float8), self.run.tensor)


class Gather(torch.autograd.Function):
    """The all_gather of the sequence before a column-parallel layer: its backward pass is a reduce_scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ways: int) -> Tensor:
        ctx.ways = ways
        return exchanged("all_gather", x.new_empty(x.shape[0], x.shape[1] * ways, x.shape[2]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchanged("reduce_scatter", grad)
        return grad.new_empty(grad.shape[0], grad.shape[1] // ctx.ways, grad.shape[2]), None


class Scatter(torch.autograd.Function):
    """The reduce_scatter after a row-parallel layer: its backward pass is an all_gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ways: int) -> Tensor:
        ctx.ways = ways
        exchanged("reduce_scatter", x)
        return x.new_empty(x.shape[0], x.shape[1] // ways, x.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchanged("all_gather", grad.new_empty(grad.shape[0], grad.shape[1] * ctx.ways, grad.shape[2])), None


def gathered(x: Tensor, ways: int) -> Tensor:
    return Gather.apply(x, ways) if ways > 1 else x


def scattered(x: Tensor, ways: int) -> Tensor:
    return Scatter.apply(x, ways) if ways > 1 else x


class Rotate(torch.autograd.Function):
    """Where context parallelism exchanges keys and values, and in the backward pass their gradients too."""

    @staticmethod
    def forward(ctx: Any, k: Tensor) -> Tensor:
        if Record.active is not None:
            Record.active.rotate(["all_gather"], k)
        return k.view_as(k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Unrotate(torch.autograd.Function):
    """The same, before the backward pass of attention."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Record.active is not None:
            Record.active.rotate(["all_gather", "reduce_scatter"], grad)
        return grad


def exchanged(name: str, whole: Tensor) -> Tensor:
    if Record.active is not None:
        Record.active.exchange(name, whole)
    return whole


class Record(TorchDispatchMode):
    """Writes down the operations that run while it is active."""

    active: Record | None = None

    def __init__(self, run: Run, block: str) -> None:
        super().__init__()
        self.run, self.block = run, block
        self.steps: list[Step] = []
        self.phase: Phase = "forward"

    def __enter__(self) -> Record:
        Record.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Record.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if (
            not func.is_view
            and "empty" not in func.__name__
            and "detach" not in func.__name__
            and "unsafe_view" not in func.__name__
            and outputs
        ):
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            # torch counts attention in full; a causal kernel computes half of it, context parallelism its share
            flops = flops * self.run.context // 2 if func in ATTENTION else flops
            moved = sum(each.numel() * each.element_size() for each in (*inputs, *outputs))
            dtype = str(next(each for each in (*inputs, *outputs)).dtype).removeprefix("torch.")
            self.steps.append(Operation(str(func), dtype, flops, moved, self.phase, self.block, ""))
        return out

    def exchange(self, name: str, whole: Tensor) -> None:
        """Write down an exchange of tensor parallelism, which the rank waits for at once.

        Asynchronous tensor parallelism hides an all_gather behind the matrix multiplication after it, and a
        reduce_scatter behind the one before. With float8, blocks gather in float8.
        """
        at = len(self.steps)
        if self.run.async_tensor and name == "reduce_scatter":
            at = next(
                (i for i in reversed(range(at)) if isinstance(each := self.steps[i], Operation) and each.flops), at
            )
        size = whole.numel() * (1 if self.run.float8 and name == "all_gather" and self.block else whole.element_size())
        until = len(self.steps) + 1 + (self.run.async_tensor and name == "all_gather")
        self.insert(at, Exchange(name, Ranks(self.run.tensor, 1), size, "bfloat16", self.phase, self.block, until))

    def rotate(self, names: Sequence[str], whole: Tensor) -> None:
        """Write down context parallelism's exchanges of keys and values, hidden behind the attention that follows."""
        run = self.run
        size = 2 * whole.numel() * whole.element_size() * run.context
        group = Ranks(run.context, run.tensor)
        for ahead, name in enumerate(names):
            until = len(self.steps) + len(names) - ahead + 1
            self.insert(len(self.steps), Exchange(name, group, size, "bfloat16", self.phase, self.block, until + ahead))

    def insert(self, at: int, new: Exchange) -> None:
        self.steps = [
            replace(each, waited_on_at=each.waited_on_at + 1)
            if isinstance(each, Exchange) and each.waited_on_at > at
            else each
            for each in self.steps
        ]
        self.steps.insert(at, new)


def selective() -> Any:
    """Return the contexts of torchtitan's selective checkpoints."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_matrix = func in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
        counts[context.is_recompute] += is_matrix
        is_saved = func in ATTENTION or (is_matrix and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def block_steps(run: Run, checkpoints: str) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return what a block does in the forward and in the backward pass."""
    block, length = Block(run), run.length // run.context
    batch = run.batch // run.micro_batches
    x = torch.empty(batch, length // run.tensor, run.size.dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    angles = torch.empty(length, 1, block.head // 2, dtype=torch.complex64, device="meta")
    with Record(run, "layers.0") as record:
        if checkpoints in ("full", "op"):
            contexts = selective if checkpoints == "op" else lambda: (nullcontext(), nullcontext())
            y = checkpoint(block, x, angles, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        else:
            y = block(x, angles)
        forward, record.steps, record.phase = record.steps, [], "backward"
        y.backward(torch.empty_like(y))
    return made(run, forward), made(run, record.steps)


@cache
def ends(run: Run) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return what the embedding and the head with its loss do, forward and backward."""
    size, length = run.size, run.length // run.context
    batch = run.batch // run.micro_batches
    table, head, scale = (
        weights(size.vocab // run.tensor, size.dim),
        weights(size.vocab // run.tensor, size.dim),
        weights(size.dim),
    )
    tokens = torch.empty(batch, length, dtype=torch.long, device="meta")
    with Record(run, "") as record:
        x = scattered(F.embedding(tokens, table), run.tensor)
        x = gathered(norm(x, scale), run.tensor)
        loss = F.cross_entropy(linear(x, head, False).float().flatten(0, 1), tokens.flatten())
        forward, record.steps, record.phase = record.steps, [], "backward"
        loss.backward()
    return tuple(forward), tuple(record.steps)


def made(run: Run, steps: Sequence[Step]) -> tuple[Step, ...]:
    bounded = [
        replace(each, waited_on_at=min(each.waited_on_at, len(steps))) if isinstance(each, Exchange) else each
        for each in steps
    ]
    return fused(bounded) if run.compiled else tuple(bounded)


class Window:
    """Puts the parts of a window together."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, steps: Iterable[Step]) -> None:
        """Append steps whose ``waited_on_at`` count from their own first one."""
        offset = len(self.steps)
        for each in steps:
            moved = replace(each, waited_on_at=each.waited_on_at + offset) if isinstance(each, Exchange) else each
            self.steps.append(moved)

    def operation(self, name: str, moved: float, phase: Phase) -> None:
        self.steps.append(Operation(name, "float32", 0, int(moved), phase, "", ""))

    def exchange(self, name: str, group: Ranks, size: float, phase: Phase) -> int:
        """Append an exchange and return its index, for :meth:`wait`."""
        self.steps.append(Exchange(name, group, int(size), "", phase, "", -1))
        return len(self.steps) - 1

    def wait(self, index: int | None) -> None:
        """Wait for an exchange before what comes next."""
        if index is not None:
            self.steps[index] = replace(self.steps[index], waited_on_at=len(self.steps))


def passes(run: Run) -> tuple[Step, ...]:
    """Return a forward and a backward pass on one device, without an optimizer."""
    built = Window()
    forward, backward = block_steps(run, run.checkpoints)
    for _ in range(run.size.layers):
        built.add(forward)
    for each in ends(run):
        built.add(each)
    for _ in range(run.size.layers):
        built.add(backward)
    return tuple(built.steps)


def window(run: Run) -> tuple[Step, ...]:
    """Return what a rank does in a window.

    FSDP2 gathers each block before its forward and its backward pass, the next one in advance, and reduces its
    gradients after it. A pipeline keeps parameters gathered through the window.
    """
    size, built = run.size, Window()
    count = -(-size.layers // run.stages)
    head = size.dim // size.heads
    linears = (2 * size.dim * (size.heads + size.kv_heads) * head + 3 * size.dim * size.hidden) / run.tensor
    outer = 2 * size.vocab * size.dim / run.tensor if run.stages == 1 else 0.0
    group = Ranks(run.sharded, run.tensor)
    pipeline = Ranks(run.stages, run.tensor * run.sharded)

    def gather(parameters: float, width: float, phase: Phase) -> int:
        built.operation(COPY_IN, parameters / run.sharded * (4 + width), phase)
        return built.exchange("all_gather", group, parameters * width, phase)

    def opened(index: int, parameters: float, width: float, phase: Phase) -> None:
        built.wait(index)
        built.operation("fsdp.split_with_sizes_copy", 2 * parameters * width, phase)

    def reduce(parameters: float, before: int | None) -> int:
        built.wait(before)
        built.operation("fsdp.chunk_cat", parameters * (2 + run.reduced_bytes), "backward")
        exchange = built.exchange("reduce_scatter", group, parameters * run.reduced_bytes, "backward")
        if run.replicas > 1:
            shard = parameters / run.sharded
            replicas = Ranks(run.replicas, run.tensor * run.sharded)
            exchange = built.exchange("all_reduce", replicas, shard * run.reduced_bytes, "backward")
        return exchange

    width = 1.0 if run.float8 else 2.0
    steps = {kind: block_steps(run, kind) for kind in {"none", "full"}} if run.checkpoints == "layer" else {}
    parts = [steps["full" if i % 2 else "none"] if steps else block_steps(run, run.checkpoints) for i in range(count)]
    reduced: int | None = None
    for micro_batch in range(run.micro_batches):
        first, last = micro_batch == 0, micro_batch == run.micro_batches - 1
        if outer and first:
            opened(gather(outer, 2.0, "forward"), outer, 2.0, "forward")
        for forward, _ in parts:
            if first:
                opened(gather(linears, width, "forward"), linears, width, "forward")
            built.add(forward)
        if run.stages > 1:
            sent = run.batch // run.micro_batches * run.length / run.context / run.tensor * size.dim * 2
            for _ in range(2):
                built.wait(built.exchange("send", pipeline, sent, "forward"))
        if outer:
            built.add(ends(run)[0])
            built.add(ends(run)[1])
        ahead: int | None = None
        for index, (_, backward) in reversed(list(enumerate(parts))):
            if ahead is not None:
                opened(ahead, linears, width, "backward")
            ahead = gather(linears, width, "backward") if run.stages == 1 and index else None
            built.add(backward)
            if last:
                reduced = reduce(linears, reduced)
    if outer:
        reduced = reduce(outer, reduced)
    built.wait(reduced)
    shard = (linears * count + outer) / run.sharded
    built.operation("aten.norm", shard * 4, "clip")
    built.operation("aten.mul", shard * 8, "clip")
    built.operation("aten.adamw", shard * 28, "optimizer")
    return tuple(built.steps)
