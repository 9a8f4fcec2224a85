"""Gradient accumulation: what a window's gradient is, and who counts its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Callback, LightningModule, WeightedLoss
from drivetrain.errors import ConfigurationError
from drivetrain.loops.window import Window
from drivetrain.precision import MixedPrecision
from drivetrain.strategies import SingleDeviceStrategy


class Tokens(LightningModule):
    """A mean over a different number of tokens in every micro-batch."""

    def __init__(self, how: str = "number") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(4, 1).double()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        kinds = {"tensor": torch.int64, "8 bits": torch.uint8, "16 bits": torch.bfloat16}
        if self.how == "mixed" and batch_idx % 2:
            kinds["mixed"] = torch.float32
        weight = torch.tensor(len(x), dtype=kinds[self.how]) if self.how in kinds else len(x)
        return {"loss": WeightedLoss(loss, weight)} if self.how == "dictionary" else WeightedLoss(loss, weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ragged(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    y = torch.randn(sum(sizes), 1, generator=generator, dtype=torch.float64)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


@pytest.mark.parametrize("how", ["number", "tensor", "dictionary", "8 bits", "16 bits", "mixed"])
def test_t12_unequal_micro_batches_equal_one_large_batch(make_trainer: Any, ready: Any, how: str) -> None:
    small = ragged([1, 7, 4, 20, 2, 5, 201, 60, 233])  # three windows of three; the last has more than 8 bits can count
    large = [tuple(torch.cat(parts) for parts in zip(*small[i : i + 3], strict=True)) for i in (0, 3, 6)]
    accumulated, whole = Tokens(how), Tokens()

    make_trainer(accumulate_grad_batches=3, max_epochs=4).fit(accumulated, ready(small))
    make_trainer(max_epochs=4).fit(whole, ready(large))

    for mine, theirs in zip(accumulated.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_t12_plain_means_would_not_equal_it(make_trainer: Any, ready: Any) -> None:
    """The negative control: without weights the same batches give another model."""

    class Plain(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).loss

    small = ragged([1, 7, 4])
    plain, weighted = Plain(), Tokens()
    make_trainer(accumulate_grad_batches=3).fit(plain, ready(small))
    make_trainer(accumulate_grad_batches=3).fit(weighted, ready(small))

    assert not torch.allclose(plain.net.weight, weighted.net.weight)


@pytest.mark.parametrize("how", ["number", "tensor"])
def test_t12_a_weighted_partial_window(make_trainer: Any, ready: Any, how: str) -> None:
    small = ragged([3, 5])
    accumulated, whole = Tokens(how), Tokens()
    make_trainer(accumulate_grad_batches=7).fit(accumulated, ready(small))
    make_trainer().fit(whole, ready([tuple(torch.cat(parts) for parts in zip(*small, strict=True))]))

    torch.testing.assert_close(accumulated.net.weight, whole.net.weight)


class Slope(LightningModule):
    """The gradient of each batch is its number."""

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.skipped = skipped
        self.gradients: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else (self.weight * batch).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(torch.arange(1.0, self.count + 1))


@pytest.mark.parametrize("known", [True, False])
def test_t12_a_partial_last_window_is_divided_by_what_it_holds(make_trainer: Any, ready: Any, known: bool) -> None:
    loader: Any = ready([torch.tensor([float(n)]) for n in range(1, 8)])
    module = Slope()
    make_trainer(accumulate_grad_batches=3).fit(module, loader if known else DataLoader(Numbers(7), batch_size=1))

    assert module.gradients == pytest.approx([2.0, 5.0, 7.0])


def test_t12_a_batch_without_loss_does_not_count_as_zero(make_trainer: Any, ready: Any) -> None:
    module = Slope(skipped=(1, 3, 4, 5))
    loader = ready([torch.tensor([float(n)]) for n in range(1, 8)])
    trainer = make_trainer(accumulate_grad_batches=3)
    trainer.fit(module, loader)

    assert module.gradients == pytest.approx([2.0, 7.0])  # (1 + 3) / 2; the second window has no gradient at all
    assert trainer.global_step == 2


def test_t12_windows_begin_anew_with_each_epoch(make_trainer: Any, ready: Any) -> None:
    module = Slope()
    loader = ready([torch.tensor([float(n)]) for n in (1, 2, 3)])
    make_trainer(accumulate_grad_batches=2, max_epochs=2).fit(module, loader)

    assert module.gradients == pytest.approx([1.5, 3.0, 1.5, 3.0])


def test_t14_step_schedulers_count_optimizer_steps(make_trainer: Any, ready: Any) -> None:
    class Scheduled(Slope):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]

    trainer = make_trainer(accumulate_grad_batches=3)
    trainer.fit(Scheduled(), ready([torch.ones(1)] * 18))

    assert trainer.global_step == 6
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def test_a_change_of_accumulation_counts_from_the_next_window(make_trainer: Any, ready: Any) -> None:
    class Changing(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.accumulate_grad_batches = 3

    module = Slope()
    make_trainer(accumulate_grad_batches=2, callbacks=Changing()).fit(
        module, ready([torch.tensor([float(n)]) for n in range(1, 9)])
    )

    assert module.gradients == pytest.approx([1.5, 4.0, 7.0])


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_weighted_losses_do_not_overflow_in_fp16(make_trainer: Any, ready: Any, precision: str) -> None:
    class Half(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            nn.init.ones_(self.net.weight)
            self.grads: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weight = (1, 60_000, 5)[batch_idx]
            return WeightedLoss(self.net(batch).mean() * 8, weight)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.net.weight.grad is not None
            self.grads.append(self.net.weight.grad.float().clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    module = Half()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    given: Any = {"precision": precision}
    if precision == "16-mixed":
        given = {"plugins": MixedPrecision(precision, scaler=scaler)}
    trainer = make_trainer(**given, accumulate_grad_batches=3)
    trainer.fit(module, ready([torch.ones(2, 4), torch.ones(2, 4) * 2, torch.ones(2, 4)]))

    assert torch.isfinite(module.grads[0]).all()
    torch.testing.assert_close(module.grads[0], torch.full((1, 4), 16.0), rtol=1e-2, atol=0)
    assert trainer.global_step == 1


def test_weighted_and_plain_losses_in_one_window_are_an_error(make_trainer: Any, ready: Any) -> None:
    class Mixed(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weighted = super().training_step(batch, batch_idx)
            return weighted if batch_idx else weighted.loss

    with pytest.raises(ConfigurationError, match="Return a WeightedLoss for all of them, or for none"):
        make_trainer(accumulate_grad_batches=2).fit(Mixed(), ready(ragged([2, 3])))


def test_t13_a_strategy_that_accumulates_itself_is_stepped_after_every_batch(make_trainer: Any, ready: Any) -> None:
    class Accumulating(torch.optim.SGD):
        """Takes what has been added up in every second call, divided by itself."""

        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls % 2 == 0:
                for parameter in self.param_groups[0]["params"]:
                    parameter.grad /= 2
                super().step()

    class Own(SingleDeviceStrategy):
        handles_gradient_accumulation = True

    class Module(Slope):
        def configure_optimizers(self) -> Any:
            return Accumulating(self.parameters(), lr=1.0)

    batches = ready([torch.tensor([float(n)]) for n in (1, 3, 5, 7)])
    ours, plain = Module(), Slope()
    trainer = make_trainer(accumulate_grad_batches=2, strategy=Own())
    trainer.fit(ours, batches)
    plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), lr=1.0)  # type: ignore[method-assign]
    make_trainer(accumulate_grad_batches=2).fit(plain, batches)

    assert trainer.optimizers[0].calls == 4
    assert trainer.global_step == 2
    assert ours.weight.item() == plain.weight.item() == -(2.0 + 6.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_whose_weights_are_all_zero_changes_nothing(make_trainer: Any, ready: Any, accumulate: int) -> None:
    """The device has counted no token: there is no mean over nothing, however many batches the window has."""

    class Empty(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return WeightedLoss(self.net(batch).mean(), torch.zeros(()))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Empty()
    before = module.net.weight.detach().clone()
    make_trainer(accumulate_grad_batches=accumulate).fit(module, ready([torch.ones(2, 4)] * 4))
    assert torch.equal(module.net.weight, before)


def test_a_closure_without_a_loss_changes_nothing(make_trainer: Any, ready: Any) -> None:
    """An overridden optimizer_step runs the optimizer, whose momentum would move on zeroed gradients."""

    class Sometimes(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.weights: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).mean() if batch_idx == 0 else None

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def on_train_batch_end(self, *_: Any) -> None:
            self.weights.append(self.net.weight.detach().clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Sometimes()
    trainer = make_trainer()
    trainer.fit(module, ready([torch.ones(2, 4)] * 3))
    assert torch.equal(module.weights[0], module.weights[2])
    assert trainer.global_step == 1


# ---- how losses add up to one gradient -------------------------------------------------------------------------------


def parameter(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    return weight, torch.optim.SGD([weight], lr=0.1)


def run_window(slopes: list[float], weights: list[Any], expected: int | None = None) -> float:
    """The gradient of a window whose micro-batches have these slopes and weights."""
    weight, optimizer = parameter()
    window = Window()
    window.divisor = len(slopes) if expected is None else expected
    for position, (slope, share) in enumerate(zip(slopes, weights, strict=True), start=1):
        loss = (weight * slope).sum()
        window.part(loss, share, optimizer, position, last=position == len(slopes)).backward()
    factor = window.factor()
    assert weight.grad is not None
    if factor is not None:
        weight.grad.mul_(factor)
    return float(weight.grad)


@pytest.mark.parametrize("weights", [[1, 3], [3, 1], [1, 3, 2], [5.5, 0.5, 11], [1000, 1, 1], [1, 1, 100_000]])
@pytest.mark.parametrize("on_device", [False, True])
def test_t12_a_windows_gradient_is_the_weighted_mean(weights: list[float], on_device: bool) -> None:
    slopes = [2.0, -1.0, 7.0][: len(weights)]
    given = [torch.tensor(weight) for weight in weights] if on_device else weights

    found = run_window(slopes, given)

    expected = sum(w * s for w, s in zip(weights, slopes, strict=True)) / sum(weights)
    assert found == pytest.approx(expected, rel=1e-6 if on_device else 1e-14)


def test_no_micro_batch_is_ever_scaled_up() -> None:
    weight, optimizer = parameter()
    window = Window()
    scaled = []
    for share in (1, 4096, 3, 100_000, 7):
        loss = window.weigh(weight.sum(), share, optimizer)
        window.batches_with_gradients += 1
        loss.backward()
        scaled.append(float(loss.detach()))

    assert max(scaled) <= 1.0
    assert weight.grad is not None
    assert float(weight.grad) <= 5.0


def test_a_window_of_one_is_bit_equal_to_the_plain_loss() -> None:
    weight, optimizer = parameter(0.3)
    loss = weight.exp().sum()
    window = Window()

    assert window.weigh(loss, 17, optimizer) is loss
    window.batches_with_gradients = 1
    assert window.factor() is None


def test_t12_a_short_window_is_divided_by_what_it_holds() -> None:
    assert run_window([3.0], [None], expected=3) == pytest.approx(3.0)
    assert run_window([3.0, 6.0], [None, None], expected=3) == pytest.approx(4.5)


def test_weights_of_zero_on_the_device_give_zero_and_not_nan() -> None:
    assert run_window([0.0, 0.0], [torch.tensor(0), torch.tensor(0)]) == 0.0
    assert run_window([5.0, 2.0], [torch.tensor(0), torch.tensor(4)]) == pytest.approx(2.0)


@pytest.mark.parametrize("first", [True, False])
def test_weighted_and_plain_losses_do_not_mix(first: bool) -> None:
    with pytest.raises(ConfigurationError, match="Return a WeightedLoss for all of them, or for none"):
        run_window([1.0, 1.0], [2, None] if first else [None, 2])
