"""ReplayCheck on one device: deterministic steps are left alone, others are named; training does not notice it."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import Regression, Validated, regression_data
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from drivetrain import Callback, Trainer
from drivetrain.callbacks import ReplayCheck
from drivetrain.callbacks.replay_check import ReplayMismatchError
from drivetrain.errors import ConfigurationError
from drivetrain.loops.replay import ReplayedWindow
from drivetrain.strategies import DDPStrategy, ParallelStrategy

HERE = os.path.relpath(__file__)


class Lively(Regression):
    """Draws from every generator, and changes buffers, a metric, lists and the weights of a teacher in its step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.teacher = nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("newest", torch.zeros(1))
        self.mean, self.kept, self.calls = MeanMetric(), [], 0
        self.own = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)
        self.own_torch, self.own_python, self.own_numpy = self.own
        self.backwards = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x += torch.rand(x.shape) + torch.rand(x.shape, generator=self.own_torch)  # in place
        noise = random.random() + np.random.rand() + self.own_python.random() + self.own_numpy.random()
        loss = (self.net(x) - y + noise).square().mean()
        with torch.no_grad():
            self.teacher.weight.data.lerp_(self.net[-1].weight, 0.1)
        loss = loss + (self.teacher.weight * self.net[-1].weight).sum()
        self.newest = self.newest + loss.detach()
        self.mean(loss.detach())
        self.kept.append(loss)
        self.calls += 1
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("mean", self.mean, on_epoch=True)
        return loss + 0 * self.newest.sum()

    def on_after_backward(self) -> None:
        self.backwards += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class Counts(Callback):
    """Counts the hooks around the backward pass, and keeps what is logged."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[Any] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls.append("zero")

    def on_before_backward(self, *_: Any) -> None:
        self.calls.append("before")

    def on_after_backward(self, *_: Any) -> None:
        self.calls.append("after")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append((float(outputs["loss"]), trainer.global_step, torch.get_rng_state().sum().item()))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trained(make_trainer: Any, **arguments: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module, counts = Lively(), Counts()
    trainer = make_trainer(max_epochs=3, log_every_n_steps=1, callbacks=[counts], **arguments)
    trainer.fit(module, DataLoader(regression_data(56), 8))
    generators = [module.own_torch.get_state().tolist(), module.own_python.random(), module.own_numpy.random()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    losses = [loss.item() for loss in module.kept]
    moments = [each["exp_avg"].clone() for each in trainer.optimizers[0].state.values()]
    return state, moments, (counts.calls, counts.seen, losses, module.calls, module.backwards, generators)


class PartlyTrained(Regression):
    """Has a layer that computes gradients and is in no optimizer: they are summed over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.first(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


def test_gradients_that_no_step_clears_are_no_difference(make_trainer: Any) -> None:
    sums = []
    for replays in ({}, {"callbacks": ReplayCheck(1, on_mismatch="stop")}):
        torch.manual_seed(0)
        module = PartlyTrained()
        make_trainer(max_epochs=1, **replays).fit(module, DataLoader(regression_data(32), 8))
        sums.append(module.first.weight.grad)
    assert sums[0].equal(sums[1])


class SetBefore(Regression):
    """A hook before each batch sets what the step reads: an attribute, a buffer or a weight."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.factor = what, 1.0
        self.register_buffer("scale", torch.ones(1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.what == "attribute":
            self.factor = 1.0 + batch_idx
        else:
            with torch.no_grad():
                (self.scale if self.what == "buffer" else next(self.parameters())).add_(0.125)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0] * self.factor * self.scale, batch[1]), batch_idx)


@pytest.mark.parametrize("what", ["attribute", "buffer", "weight"])
def test_what_a_hook_before_each_batch_sets_counts_in_windows_of_several_batches_alone(
    make_trainer: Any, what: str
) -> None:
    data = DataLoader(regression_data(32), 8)
    make_trainer(max_epochs=1, callbacks=ReplayCheck(1, on_mismatch="stop")).fit(SetBefore(what), data)
    several = make_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=ReplayCheck(1, on_mismatch="stop"))
    with pytest.raises(ReplayMismatchError, match="Optimizer step [12] is not deterministic"):
        several.fit(SetBefore(what), data)


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from the generator of which dropout draws too."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4), torch.ones(1)


def test_what_draws_between_the_batches_of_a_window_is_no_difference(make_trainer: Any) -> None:
    check, module = ReplayCheck(1, on_mismatch="stop"), Validated(dropout=0.5)
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=3, val_check_interval=2, callbacks=check)
    trainer.fit(module, DataLoader(Augmented(), 4), DataLoader(regression_data(8), 4))
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        {"precision": "16-mixed", "gradient_clip_val": 0.5},
    ],
)
def test_a_run_with_replays_has_the_bits_of_a_run_without(make_trainer: Any, arguments: Any) -> None:
    state, moments, rest = trained(make_trainer, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, moments_again, rest_again = trained(make_trainer, replay_every=1, **arguments)
    assert rest_again == rest
    assert all(torch.equal(again[name], value) for name, value in state.items())
    assert all(map(torch.equal, moments, moments_again))


def test_a_compiled_model_is_replayed(make_trainer: Any) -> None:
    def weights(**arguments: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module = Regression(dropout=0.5)
        trainer = make_trainer(compile={"backend": "aot_eager"}, **arguments)
        trainer.fit(module, DataLoader(regression_data(), 8))
        return list(module.parameters())

    assert all(map(torch.equal, weights(), weights(callbacks=ReplayCheck(1, on_mismatch="stop"))))


def test_every_nth_step_is_replayed_from_the_second_window_on(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    trainer = make_trainer(max_steps=12, max_epochs=-1, replay_every=4)
    differences = ReplayedWindow.differences
    monkeypatch.setattr(
        ReplayedWindow, "differences", lambda self: steps.append(trainer.global_step + 1) or differences(self)
    )
    trainer.fit(Regression(), DataLoader(regression_data(), 8))
    assert steps == [4, 8, 12]


# ---- steps that are not deterministic ------------------------------------------------------------------------


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + int.from_bytes(os.urandom(4), "little") / 2**33)


class NoisyBackward(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (Noise.apply(self.net(x)) - y).square().mean()  # type: ignore[no-untyped-call]


class Counter(Regression):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return self.loss(batch) * self.calls


NUMBERS = count(1)


class CounterOutside(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * next(NUMBERS)


class DrawsMore(Regression):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        np.random.rand(self.calls)
        return self.loss(batch)


class NoisyClipping(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any) -> None:
        for parameter in self.net[3].parameters():
            parameter.grad *= 1 + int.from_bytes(os.urandom(4), "little") / 2**33


GRADIENTS = "the gradients of 'net.0.weight', 'net.0.bias', 'net.3.weight'"
PLANTED: list[tuple[Callable[[], Regression], str, str]] = [
    (
        NoisyBackward,
        f"and {GRADIENTS}.* differ",
        rf"is aten\.mul\.Tensor in {HERE}:\d+: return gradients\[0\] \* \(1 \+ int",
    ),
    (
        Counter,
        f"the loss of batch 2 and {GRADIENTS}.* differ",
        rf"is aten\.mul\.Tensor in {HERE}:\d+: return self\.loss\(batch\) \* self\.calls",
    ),
    (CounterOutside, "the loss of batch 2", rf"is aten\.mul\.Tensor in {HERE}:\d+: return self\.loss\(batch\) \* next"),
    (DrawsMore, "and the random state of numpy differ", "In 4 further passes, no operation differed"),
    (NoisyClipping, "and the clipped gradients of 'net.3.weight', 'net.3.bias' differ", "In 4 further passes"),
]


@pytest.mark.parametrize(("make", "what", "operation"), PLANTED)
def test_a_step_that_is_not_deterministic_is_named(make_trainer: Any, make: Any, what: str, operation: str) -> None:
    trainer = make_trainer(max_steps=4, max_epochs=-1, callbacks=ReplayCheck(3, on_mismatch="stop"))
    module = make()
    with pytest.raises(ReplayMismatchError) as caught:
        trainer.fit(module, DataLoader(regression_data(), 8))
    message = str(caught.value)
    assert message.startswith("Optimizer step 3 is not deterministic")
    assert re.search(what, message)
    assert re.search(operation, message)
    assert (trainer.global_step, getattr(module, "calls", 3)) == (2, 3)


def test_a_warning_is_logged_once_and_training_goes_on_with_its_own_bits(make_trainer: Any) -> None:
    def run(**arguments: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module = Counter()
        make_trainer(max_steps=8, max_epochs=-1, **arguments).fit(module, DataLoader(regression_data(), 8))
        assert module.calls == 8
        return list(module.parameters())

    alone = run()
    with pytest.warns(UserWarning, match="^(Optimizer step 2|4 of the 4)") as warned:
        assert all(map(torch.equal, alone, run(replay_every=2)))
    first, last = (str(each.message) for each in warned)
    assert first.startswith("Optimizer step 2 is not deterministic")
    assert last.startswith("4 of the 4 optimizer steps that were computed again gave other results")


def test_the_place_of_a_plain_backward_pass_is_the_line_of_its_forward_pass(make_trainer: Any) -> None:
    class Overwritten(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            factor = torch.ones(())
            scaled = factor * self.net(x)
            factor.numpy()[...] = next(NUMBERS)  # what the backward pass reads
            return (scaled - y).square().mean()

    trainer = make_trainer(max_steps=4, max_epochs=-1, callbacks=ReplayCheck(2, on_mismatch="stop"))
    with pytest.raises(ReplayMismatchError, match=rf"mul\.Tensor in the backward pass of {HERE}:\d+: scaled = factor"):
        trainer.fit(Overwritten(), DataLoader(regression_data(), 8))


# ---- arguments -----------------------------------------------------------------------------------------------


def checks(trainer: Trainer) -> list[ReplayCheck]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ReplayCheck)]


def test_the_argument_adds_the_callback_and_none_is_added_without_it(make_trainer: Any) -> None:
    (check,) = checks(make_trainer(replay_every=7))
    assert (check.every_n_steps, check.on_mismatch) == (7, "warn")
    assert checks(make_trainer()) == []
    with pytest.raises(ConfigurationError, match=r"replay_every=7.* and the ReplayCheck .* Keep one\."):
        make_trainer(replay_every=7, callbacks=ReplayCheck(7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, r"ReplayCheck\(every_n_steps=0\)"),
        ({"on_mismatch": "heal"}, r"ReplayCheck\(on_mismatch='heal'\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplayCheck(**arguments)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnStep(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Fetches(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter))


class Owning(ParallelStrategy):
    def bind_step(self, parts: Any) -> Any:
        return None


REFUSED: list[tuple[type[Regression], dict[str, Any], str]] = [
    (Manual, {}, "Manual optimizes manually"),
    (OwnStep, {}, "OwnStep.optimizer_step computes the last one"),
    (Fetches, {}, "Fetches.training_step fetches its own"),
    (Regression, {"split_on_oom": True}, "split_on_oom=True"),
    (Regression, {"cuda_graphs": "auto"}, "cuda_graphs"),
    (Regression, {"strategy": "dp"}, "does not work with DataParallelStrategy"),
    (Regression, {"strategy": Owning()}, "Owning or its precision makes the step"),
    (Regression, {"strategy": DDPStrategy(ddp_comm_state=[], ddp_comm_hook=print)}, "DDPStrategy has a ddp_comm_state"),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), REFUSED)
def test_steps_that_cannot_be_replayed_are_refused_before_anything_runs(
    make_trainer: Any, kind: Any, arguments: Any, message: str
) -> None:
    class Untouched(kind):  # type: ignore[misc]
        def prepare_data(self) -> None:
            raise AssertionError

    Untouched.__name__ = kind.__name__
    with pytest.raises(
        ConfigurationError, match=rf"^Trainer\(replay_every=2\) .*{message}.* Leave replay_every out\.$"
    ):
        make_trainer(replay_every=2, **arguments).fit(Untouched(), DataLoader(regression_data(), 8))


def test_the_callback_refuses_them_too(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^ReplayCheck .*Manual optimizes manually.* Leave it out\.$"):
        make_trainer(callbacks=ReplayCheck(2)).fit(Manual(), DataLoader(regression_data(), 8))


def test_an_optimizer_that_computes_gradients_itself_is_refused(make_trainer: Any) -> None:
    class Closure(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match="and LBFGS computes them inside of its step"):
        make_trainer(replay_every=2).fit(Closure(), DataLoader(regression_data(), 8))
