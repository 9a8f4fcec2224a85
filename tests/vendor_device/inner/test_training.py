"""What training needs of a device: gradients like the host's, optimizers, autocast, scaled losses, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vendor_device  # noqa: F401  # registers the device
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

lab: Any = torch.lab  # type: ignore[attr-defined]
DEVICES = ["cpu", "lab:0", "lab:1"]


def mlp(device: str = "cpu", dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3)
    ).to(device)  # fmt: skip


def batch(device: str, step: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return x.to(device), (x[:, 0] > 0).long().to(device)


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().cpu() for p in module.parameters() if p.grad is not None])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.unfold(1, 3, 1).transpose(1, 2).repeat(1, 1, 2)[..., :6])
        return out


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(5, 4), nn.RNN(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(self.embedding(x.abs().long().clamp(max=4)))[0]
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2, bias=False), nn.MaxPool2d(2), nn.Flatten(),
    ),
    "attention": Attention,
    "embedding and recurrence": Embedded,
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_outputs_and_gradients_are_the_hosts(model: str, device: str) -> None:
    torch.manual_seed(1)
    host = MODELS[model]()
    there = MODELS[model]()
    there.load_state_dict(host.state_dict())
    there.to(device)
    expected = host(batch("cpu")[0])
    lab.reset_counters()
    out = there(batch(device)[0])
    assert out.device == torch.device(device)
    torch.autograd.backward([expected.square().mean(), out.square().mean()])
    assert lab.waits() == 0
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(there), gradients(host), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_step_as_on_the_host(optimizer: Any, how: dict[str, bool]) -> None:
    weights = []
    for device in DEVICES[::2]:
        model = mlp(device)
        step = optimizer(model.parameters(), lr=0.05, **how)
        for index in range(5):
            x, y = batch(device, index)
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            lab.reset_counters()
            step.step()
            assert lab.waits() == 0
            step.zero_grad()
        weights.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


# ---- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_widths_that_cuda_uses(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 4, device="lab"), torch.randn(4, 4, device="lab")
    half = x.to(dtype)
    with torch.autocast("lab", dtype):
        low = [x @ weight, nn.functional.linear(x, weight), torch.addmm(x, x, weight), torch.bmm(x[None], weight[None])]
        full = [
            half.exp(), half.log_softmax(1), half.sum(), half.norm(), nn.functional.mse_loss(half, half),
            nn.functional.layer_norm(half, (4,)), nn.functional.cross_entropy(half, torch.arange(4, device="lab")),
        ]  # fmt: skip
        widest = [torch.addcmul(half, half, x), torch.dot(half[0], x[0])]
        unchanged = [half + half, half.relu()]
        double = x.double() @ weight.double()
        with torch.autocast("lab", enabled=False):
            off = x @ weight
    assert {value.dtype for value in low + unchanged} == {dtype}
    assert {value.dtype for value in full + widest} == {torch.float32}
    assert double.dtype == torch.float64
    assert off.dtype == torch.float32
    assert (x @ weight).dtype == torch.float32


def test_autocast_refuses_a_type_that_the_device_does_not_have() -> None:
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("lab", torch.float64):
        assert (torch.ones(2, 2, device="lab") @ torch.ones(2, 2, device="lab")).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_training_in_16_bits_learns(device: str, dtype: torch.dtype) -> None:
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("lab", enabled=dtype == torch.float16, init_scale=2.0**40)
    losses, steps = [], 0
    for index in range(60):
        x, y = batch(device, index)
        with torch.autocast("lab", dtype):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
        assert logits.dtype == dtype
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        steps += scaler.get_scale() >= scale
        losses.append(loss.item())
    if dtype == torch.float16:
        assert scaler.get_scale() < 2.0**40, "steps that were not finite were skipped, and the scale fell"
        assert 0 < steps < 60
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss])
def test_losses_and_their_gradients(loss: Any, reduction: str) -> None:
    found = []
    for device in DEVICES[::2]:
        x = torch.linspace(-2, 2, 12).view(3, 4).to(device).requires_grad_()
        value = loss(x, torch.zeros(3, 4, device=device), reduction=reduction)
        torch.autograd.backward(value.sum())
        assert x.grad is not None
        found.append((value.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(found[1], found[0])


# ---- the rest ------------------------------------------------------------------------------------------------------


def test_recomputed_activations_drop_the_same_values() -> None:
    model, found = mlp("lab:1", dropout=0.5), []
    x, y = batch("lab:1")
    for recompute in (False, True):
        torch.manual_seed(7)
        out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        torch.autograd.backward(nn.functional.cross_entropy(out, y))
        found.append(gradients(model))
        model.zero_grad()
    assert torch.equal(*found)


def test_dropout_in_evaluation_and_at_its_ends() -> None:
    x = torch.ones(50, device="lab", requires_grad=True)
    for p, expected in ((0.0, 50.0), (1.0, 0.0)):
        out = nn.functional.dropout(x, p)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert out.sum().item() == gradient.sum().item() == expected
    assert torch.equal(nn.functional.dropout(x, 0.5, training=False), x)
    out, mask = torch.native_dropout(x, 0.5, False)
    assert torch.equal(out, x)
    assert bool(mask.all())


def test_views_share_their_memory() -> None:
    x = torch.zeros(4, 6, device="lab:1")
    x.view(2, 12)[0, 0] = 1
    x.t()[1, 0] = 2
    x.unfold(1, 2, 2)[0, 1, 0] = 3
    x[:, 3:].select(0, 0).narrow(0, 0, 1).fill_(4)
    x.as_strided((1,), (1,), 4).fill_(5)
    x.diagonal()[3] = 6
    torch.view_as_complex(x.view(4, 3, 2))[3, 2] = torch.tensor(7 + 8j)
    torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)))[2, 0, 0] = 9
    assert x.tolist() == [[1, 2, 3, 4, 5, 0], [0, 0, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0], [0, 0, 0, 6, 7, 8]]
    other = torch.empty(0, device="lab:1").set_(x)  # type: ignore[call-overload]  # not in its stub
    other[1, 1] = 10
    assert x[1, 1].item() == 10
    whole = torch.empty(0, device="lab:1").set_(x.untyped_storage())
    assert whole.shape == (24,)


def test_conjugates_and_negatives_are_read_right() -> None:
    x = torch.tensor([1 + 2j], device="lab")
    assert x.conj().is_conj()
    assert x.conj().cpu().item() == x.conj().item() == 1 - 2j
    assert x.conj().imag.is_neg()
    assert x.conj().imag.cpu().item() == x.conj().imag.to("lab:1").item() == -2
    assert (x.conj() * x).item() == 5


def test_an_error_in_an_operator_leaves_counting_on() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device="lab") @ torch.ones(2, 3, device="lab")
    lab.reset_counters()
    torch.ones(1, device="lab").item()
    assert lab.waits() == 1
