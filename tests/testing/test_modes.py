"""What is a move, a sync or a mistake on pretend devices: the same as on CUDA."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.testing import FakeAccelerator, Record

HOST, FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu", 1)
MIXED = "Expected all tensors to be on the same device, but found at least two devices, fake:0 and cpu!"


@pytest.fixture
def record() -> Iterator[Record]:
    with FakeAccelerator.recording(devices=2) as record:
        yield record


def ways(record: Record) -> list[tuple[int | None, int | None]]:
    return [(move.source, move.target) for move in record.moves]


def names(device: torch.device = FIRST) -> dict[str, Any]:
    """What the expressions below are made of: x, w, m and i are on a device, h and s on the host."""
    x = torch.arange(16.0, device=device).reshape(4, 4)
    return {
        "torch": torch, "F": F, "np": np, "FIRST": device, "x": x, "w": torch.ones_like(x), "h": torch.ones(4, 4),
        "s": torch.tensor(2.0), "m": torch.arange(4, device=device) > 1,
        "i": torch.ones((), dtype=torch.long, device=device),
    }  # fmt: skip


SYNCS = [  # each makes the host wait once
    "x.sum().item()", "float(x.sum())", "int(i)", "bool(m[0])", "x.tolist()", "str(x)", "f'{x}'", "f'{x.sum():.2f}'",
    "x[m]", "x[x > 3]", "x[i]", "3 in x", "torch.where(m)", "x.nonzero()", "x.unique()", "torch.equal(x, x)",
    "torch.allclose(x, x)", "torch.masked_select(x, x > 3)", "x.repeat_interleave(i.expand(4), 0)", "F.one_hot(i)",
    "torch.bincount(i.reshape(1))", "torch.multinomial(x + 1, 1)", "torch.linalg.inv(torch.eye(3, device=FIRST))",
    "x.__setitem__(m, torch.zeros(2, 4, device=FIRST))", "x[0].add_(x[1], alpha=x.sum())", "torch.tensor([i])",
]  # fmt: skip
COPIES = [  # each copies between host and device, and makes the host wait for that
    "x.cpu()", "x.to('cpu')", "x.numpy(force=True)", "h.to(FIRST)", "h.to(x)", "h.type_as(x)", "x.copy_(h)",
    "h.copy_(x)", "torch.tensor([1.0], device=FIRST)", "torch.as_tensor(h, device=FIRST)", "x.new_tensor([1.0])",
    "torch.as_tensor(np.ones(3), device=FIRST)", "x[[0, 2]]", "x[torch.tensor([0])]", "h[0].fill_(x.sum())",
]  # fmt: skip
QUIET = [  # nothing moves, and nobody waits
    "x + 1", "x + s", "s + x", "x @ x", "x.clamp(min=s)", "torch.where(m, x, 0.0)", "x.masked_fill(x > 3, s)",
    "x.__setitem__(0, 3.0)", "x.__setitem__((0, 0), 3.0)", "x.__setitem__(m, 1.0)", "x.__setitem__(0, s)",
    "F.one_hot(i, num_classes=3)", "torch.zeros(3, device=FIRST)", "torch.full((), 3.0, device=FIRST)", "x[0, 1:]",
    "torch.randn(3, device=FIRST, generator=torch.Generator())", "torch.zeros_like(x) + x", "x.new_zeros(4) + x",
    "x.to(FIRST)", "x.to(x)", "x.to(torch.float64)", "x.float()", "h.to('cpu')", "x.shape", "x.is_floating_point()",
    "F.embedding(i, x)", "F.dropout(x)", "x.sort()", "x.topk(2)", "list(x)", "h.tolist()", "h[h > 0]", "h.numpy()",
    "F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)", "x.to_sparse().to_dense() + x",
    "torch.zeros_like(x, device='cpu') + h", "torch.func.vmap(lambda row: row * 2)(x) + x",
    "torch.nn.utils.clip_grad_norm_([w], 1)",
]  # fmt: skip
MIXES = [  # each fails as on hardware
    "x + h", "h + x", "x @ h", "h + x.sum()", "torch.zeros(4) + x", "torch.cat([x, h])", "torch.stack([x.sum(), s])",
    "F.mse_loss(x, h)", "F.embedding(torch.tensor([1]), x)", "F.cross_entropy(x, torch.zeros(4).long())",
    "x.__setitem__(m, torch.zeros(2, 4))", "torch.add(x, x, out=torch.empty(4, 4))", "s.add_(x.sum())",
    "x.index_select(0, torch.tensor([0]))", "torch.zeros_like(x, device='cpu') + x", "F.linear(h, x)",
    "torch._foreach_add([x, h], [x, x])",
]  # fmt: skip


@pytest.mark.parametrize("expression", SYNCS)
def test_the_host_waits_once(record: Record, expression: str) -> None:
    known = names()
    record.clear()
    eval(expression, known)
    assert (len(record.syncs), ways(record)) == (1, [])
    assert record.syncs[0].device == 0


@pytest.mark.parametrize("expression", COPIES)
def test_a_copy_between_host_and_device_is_a_move_and_a_sync(record: Record, expression: str) -> None:
    known = names()
    record.clear()
    eval(expression, known)
    assert (len(record.syncs), len(record.moves)) == (1, 1)
    assert record.moves[0].blocking
    assert {record.moves[0].source, record.moves[0].target} == {None, 0}


@pytest.mark.parametrize("expression", QUIET)
def test_nothing_moves_and_nobody_waits(record: Record, expression: str) -> None:
    known = names()
    record.clear()
    eval(expression, known)
    assert (record.syncs, record.moves) == ([], [])


@pytest.mark.parametrize("expression", MIXES)
def test_tensors_of_two_places_do_not_mix(record: Record, expression: str) -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        eval(expression, names())
    eval(expression, names(HOST))  # negative control: nothing is wrong with the expression itself


def test_what_is_mixed_is_found_in_its_line(record: Record) -> None:
    with pytest.raises(
        RuntimeError, match=r"fake:0 and fake:1! \(when calling aten::mul, at .*test_modes.py:\d+ in test_"
    ):
        torch.ones(2, device=FIRST) * torch.ones(2, device=SECOND)


# ---- moves -----------------------------------------------------------------------------------------------------------


def test_a_move_is_a_copy(record: Record) -> None:
    here = torch.ones(3)
    there = here.to(FIRST)
    there.add_(1)
    assert (here.tolist(), there.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert (here.device, there.device, there[1:].device) == (HOST, FIRST, FIRST)
    assert (there.get_device(), there.to(SECOND).device) == (0, SECOND)


def test_a_move_says_how_much_went_where(record: Record) -> None:
    x = torch.ones(3, 5).to(FIRST, non_blocking=True)
    x.to(SECOND)
    x.to("cpu", non_blocking=True)
    x.half().to("cpu", torch.float64)
    sizes = [(move.source, move.target, move.bytes, move.blocking) for move in record.moves]
    assert sizes == [(None, 0, 60, False), (0, 1, 60, True), (0, None, 60, False), (0, None, 120, True)]
    assert [sync.what for sync in record.syncs] == ["to"]  # copies between devices do not hold the host up


def test_what_is_there_already_is_not_moved(record: Record) -> None:
    x = torch.ones(3, device=FIRST)
    assert x.to(FIRST) is x
    assert x.to(x) is x
    assert x.to(FIRST, torch.float32) is x
    assert x.to(FIRST, copy=True) is not x
    assert torch.as_tensor(x, device=FIRST).data_ptr() == x.data_ptr()
    assert record.moves == []


def test_gradients_go_back_the_way_the_values_came(record: Record) -> None:
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to(FIRST).mul(2).to(SECOND).double() * 3).sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.device, leaf.grad.tolist()) == (HOST, [6, 6, 6])
    assert ways(record) == [(None, 0), (0, 1), (1, 0), (0, None)]


def test_second_derivatives_pass_through_a_move(record: Record) -> None:
    leaf = torch.full((1,), 3.0, requires_grad=True)
    (first,) = torch.autograd.grad((leaf.to(FIRST) ** 3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert (first.item(), second.item(), second.device) == (27, 18, HOST)


def test_a_device_that_is_not_there(record: Record) -> None:
    for mistake in (lambda: torch.ones(1).to("cpu:2"), lambda: torch.ones(1, device="cpu:2")):
        with pytest.raises(RuntimeError, match=r"invalid device ordinal: .*2.* is none of the 2 simulated devices"):
            mistake()


def test_numpy_wants_a_tensor_of_the_host(record: Record) -> None:
    x = torch.ones(3, device=FIRST)
    for read in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="can't convert fake:0 device type tensor to numpy"):
            read()
    assert x.cpu().numpy().tolist() == [1, 1, 1]


def test_tensors_are_made_where_the_program_says(record: Record) -> None:
    with FIRST:
        layer = nn.Linear(2, 2)
        assert (layer.weight.device, torch.tensor(1.0).device) == (FIRST, FIRST)
    assert torch.ones(2).device == HOST
    assert torch.tensor([1.0], device=FIRST, requires_grad=True).is_leaf


# ---- modules, files, copies ------------------------------------------------------------------------------------------


def test_a_module_moves_in_place_with_its_gradients(record: Record) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    model(torch.randn(4, 2)).sum().backward()
    model.to(FIRST)
    assert model[0].weight is weight
    assert weight.grad is not None
    assert {weight.device, weight.grad.device, *(buffer.device for buffer in model.buffers())} == {FIRST}
    assert len(record.moves) == 2 * len(list(model.parameters())) + len(list(model.buffers()))
    model.cpu()
    assert weight.device == HOST


def test_copies_of_a_tensor_stay_where_it_is(record: Record) -> None:
    leaf = torch.ones(2, device=FIRST, requires_grad=True)
    leaf.sum().backward()
    copied, layer = copy.deepcopy(leaf), copy.deepcopy(nn.Linear(2, 2, device=SECOND))
    assert copied.grad is not None
    assert (copied.device, copied.grad.device, layer.weight.device) == (FIRST, FIRST, SECOND)
    assert (record.moves, record.syncs) == ([], [])


def test_saving_brings_tensors_to_the_host_and_loading_back(record: Record) -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(3, device=FIRST), "h": torch.ones(5)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=FIRST)
    file.seek(0)
    assert torch.load(file)["x"].device == HOST
    assert [(move.source, move.target, move.bytes) for move in record.moves] == [
        (0, None, 12),
        (None, 0, 12),
        (None, 0, 20),
    ]
    assert [sync.what for sync in record.syncs] == ["save", "load", "load"]
    assert (loaded["h"].device, loaded["h"].sum().item()) == (FIRST, 5)


# ---- backward --------------------------------------------------------------------------------------------------------


def test_what_a_hook_does_in_backward_is_seen(record: Record) -> None:
    leaf = torch.ones(3, device=FIRST, requires_grad=True)
    seen = []
    leaf.register_hook(lambda gradient: seen.append((gradient.device, gradient.sum().item())))
    leaf.mul(2).sum().backward()
    assert (seen, [sync.what for sync in record.syncs]) == ([(FIRST, 6.0)], ["item"])


def test_a_device_that_backward_forgets_is_found(record: Record) -> None:
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient + torch.zeros(3)

    leaf = torch.ones(3, device=FIRST, requires_grad=True)
    with pytest.raises(RuntimeError, match=MIXED):
        Forgetful.apply(leaf).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_in_backward_knows_its_device(record: Record, reentrant: bool) -> None:
    leaf = torch.ones(4, device=FIRST, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.arange(4.0, device=x.device) + torch.ones(4).to(x.device, non_blocking=True)).exp()

    checkpoint(block, leaf, use_reentrant=reentrant).sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.device, record.syncs, ways(record)) == (FIRST, [], [(None, 0)] * 2)


def test_activations_are_offloaded_to_the_host(record: Record) -> None:
    leaf = torch.ones(4, device=FIRST, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = leaf.exp().sum()
    assert (0, None) in ways(record)
    y.backward()
    assert ways(record)[-1] == (None, 0)
    assert leaf.grad is not None
    assert leaf.grad.device == FIRST


# ---- whole layers ----------------------------------------------------------------------------------------------------

LAYERS: dict[str, Any] = {
    "linear": lambda device: nn.Linear(4, 4, device=device),
    "convolution": lambda device: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, device=device)),
    "norm": lambda device: nn.Sequential(nn.LayerNorm(4, device=device), nn.BatchNorm1d(4, device=device)),
    "lstm": lambda device: _First(nn.LSTM(4, 4, device=device)),
    "gru": lambda device: _First(nn.GRU(4, 4, num_layers=2, bidirectional=True, device=device)),
    "packed": lambda device: _Packed(nn.LSTM(4, 4, batch_first=True, device=device)),
    "attention": lambda device: _First(nn.MultiheadAttention(4, 2, add_zero_attn=True, device=device), times=3),
    "transformer": lambda device: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, device=device),
    "embedding": lambda device: nn.Sequential(_Long(), nn.Embedding(16, 3, device=device), nn.Flatten()),
    "sparse": lambda device: nn.Sequential(_Long(), nn.Embedding(16, 3, sparse=True, device=device), nn.Flatten()),
}  # fmt: skip


class _First(nn.Module):
    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.layer(*[x] * self.times)[0]
        return first


class _Packed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(2, -1, 4), torch.tensor([2, 1]), batch_first=True)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        assert lengths.tolist() == [2, 1]
        return padded


class _Long(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().long().clamp(max=15)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_and_moves_nothing(name: str) -> None:
    def trained(device: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = LAYERS[name](device)
        if recorded:
            recorded[0].clear()  # a norm counts its batches in a number, which building it has moved
        y = layer(torch.randn(4, 4, device=device))
        (y**2).mean().backward()
        values = [y, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]
        assert all(value.device == device for value in values)
        return [value.detach().to("cpu", non_blocking=True) for value in values]

    recorded: list[Record] = []
    expected = trained(HOST)
    with FakeAccelerator.recording() as record:
        recorded.append(record)
        values = trained(FIRST)
    assert len(values) == len(expected) > 1
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(values, expected, strict=True))
    assert (ways(record), record.syncs) == ([(0, None)] * len(values), [])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("second", [FIRST, SECOND], ids=["one-device", "two-devices"])
def test_an_optimizer_steps_as_on_the_cpu_and_nobody_waits(name: str, second: torch.device) -> None:
    def trained(first: torch.device, second: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one, two = nn.Linear(4, 8).to(first), nn.Linear(8, 1).to(second)
        optimizer = OPTIMIZERS[name]([*one.parameters(), *two.parameters()])
        x = torch.randn(8, 4).to(first)
        if recorded:
            recorded[0].clear()
        for _ in range(3):
            optimizer.zero_grad()
            two(one(x).relu().to(second)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_([*one.parameters(), *two.parameters()], 0.5)
            optimizer.step()
        return [parameter.detach() for layer in (one, two) for parameter in layer.parameters()]

    recorded: list[Record] = []
    expected = trained(HOST, HOST)
    with FakeAccelerator.recording(devices=2) as record:
        recorded.append(record)
        values = trained(FIRST, second)
        assert record.syncs == []
        assert [step.devices for step in record.steps] == [(0,) if second == FIRST else (0, 1)] * 3
        assert (ways(record) != []) == (second == SECOND)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_sums_over_words_take_their_lengths_from_the_host(record: Record) -> None:
    scores = torch.randn(5, 2, 4, device=FIRST).log_softmax(-1)
    targets = torch.ones(2, 2, dtype=torch.long, device=FIRST)
    loss = F.ctc_loss(scores, targets, torch.tensor([5, 5]), torch.tensor([2, 2]))
    assert loss.device == FIRST
