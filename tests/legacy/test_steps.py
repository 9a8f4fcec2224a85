"""When generations 1.x count a step, and when 1.1 clears gradients: both with manual optimization and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.legacy import v1_1, v1_3

from .conftest import loader, model_of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def two_optimizers(self: Any) -> Any:
    return [torch.optim.SGD([each], lr=1.0) for each in (self.weight, self.other)]


def by_hand(pl: Any, training_step: Any, **members: Any) -> Any:
    """A module that steps two optimizers itself."""
    model = model_of(
        pl,
        automatic_optimization=False,
        training_step=training_step,
        **{"configure_optimizers": two_optimizers, **members},
    )
    model.other = torch.nn.Parameter(torch.zeros(1))
    return model


def steps_both(self: Any, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> None:
    for optimizer, weight in zip(self.optimizers(), (self.weight, self.other), strict=True):
        optimizer.zero_grad()
        self.manual_backward(weight.sum(), optimizer)
        optimizer.step()


# ---- the count -------------------------------------------------------------------------------------------------------


def test_a_batch_with_two_steps_by_hand_counts_once(pl: Any) -> None:
    def seen_by(self: Any, *args: Any) -> None:
        seen.append(self.trainer.global_step)

    seen: list[int] = []
    trainer = trainer_of(pl, max_epochs=5, max_steps=5)
    model = by_hand(pl, steps_both, on_train_batch_end=seen_by)
    trainer.fit(model, loader())
    assert seen == [0, 1, 2, 3, 4]
    assert trainer.global_step == 5
    assert (model.weight.item(), model.other.item()) == (-5.0, -5.0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # drivetrain says that steps are missing
def test_a_batch_that_is_not_stepped_counts_too(pl: Any) -> None:
    def every_other(self: Any, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> None:
        if batch_idx % 2:
            steps_both(self, batch, batch_idx)

    trainer = trainer_of(pl, max_epochs=1)
    trainer.fit(by_hand(pl, every_other), loader(4))
    assert trainer.global_step == 4
    trainer = trainer_of(pl, max_epochs=1)
    trainer.fit(model_of(pl, training_step=lambda self, batch, batch_idx: None), loader(4))
    assert trainer.global_step == 4


def test_a_window_counts_once(pl: Any) -> None:
    trainer, model = trainer_of(pl, max_epochs=1, accumulate_grad_batches=2), model_of(pl)
    trainer.fit(model, loader(4))
    assert (trainer.global_step, model.weight.item()) == (2, -2.0)


def test_a_trainer_of_today_counts_steps_under_an_accelerator_of_that_time() -> None:
    accelerator = v1_3.CPUAccelerator("32-true", "single_device")
    trainer = Trainer(
        accelerator=accelerator, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(by_hand(v1_3, steps_both), loader(2))
    assert trainer.global_step == 4


# ---- gradients in 1.1 ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The gradients of two optimizer steps")
def test_step_by_hand_clears_the_gradients_in_1_1(pl: Any) -> None:
    """In 1.1 programs did not call zero_grad; in 1.3 gradients add up without it: 1 + 2 + 3."""

    def steps(self: Any, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> None:
        for optimizer, weight in zip(self.optimizers(), (self.weight, self.other), strict=True):
            self.manual_backward(weight.sum(), optimizer)
            optimizer.step()

    model = by_hand(pl, steps)
    trainer_of(pl, max_epochs=1).fit(model, loader())
    expected = -3.0 if pl is v1_1 else -6.0
    assert (model.weight.item(), model.other.item()) == (expected, expected)


def test_step_by_hand_may_only_compute_gradients_in_1_1() -> None:
    def steps(self: Any, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> None:
        one, other = self.optimizers()

        def closure() -> None:
            self.manual_backward(self.weight.sum(), one)

        one.step(closure=closure, make_optimizer_step=batch_idx == 2)
        self.manual_backward(self.other.sum(), other)
        other.step(make_optimizer_step=True)

    seen: list[float] = []
    model = by_hand(v1_1, steps, on_train_batch_end=lambda self, *args: seen.append(self.weight.item()))
    trainer_of(v1_1, max_epochs=1).fit(model, loader())
    assert seen == [0.0, 0.0, -3.0]
    assert model.other.item() == -3.0


def test_the_hooks_of_clearing_come_after_the_step_in_1_1_and_before_the_backward_pass_in_1_3(pl: Any) -> None:
    """A target network that follows the weights in ``on_before_zero_grad`` has seen each step of 1.1."""

    class Follows(pl.Callback):  # type: ignore[misc]
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(("callback", pl_module.weight.item()))

    def zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int) -> None:
        seen.append(("zero", batch_idx, optimizer_idx))
        optimizer.zero_grad()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(("step", self.weight.grad is not None and self.weight.grad.item()))
        return self.weight.sum()

    seen: list[Any] = []
    model = model_of(
        pl,
        training_step=step,
        on_before_zero_grad=lambda self, optimizer: seen.append(("module", self.weight.item())),
        optimizer_zero_grad=zero_grad,
    )
    trainer_of(pl, max_epochs=1, callbacks=[Follows()]).fit(model, loader(2))
    if pl is v1_1:
        cleared = [[("callback", -1.0), ("module", -1.0), ("zero", 0, 0)], [("callback", -2.0), ("module", -2.0)]]
        assert seen == [("step", False), *cleared[0], ("step", False), *cleared[1], ("zero", 1, 0)]
    else:
        cleared = [[("callback", 0.0), ("module", 0.0), ("zero", 0, 0)], [("callback", -1.0), ("module", -1.0)]]
        assert seen == [("step", False), *cleared[0], ("step", 1.0), *cleared[1], ("zero", 1, 0)]


@pytest.mark.parametrize("several", [False, True])
def test_a_module_of_1_1_may_keep_its_gradients_over_batches(several: bool) -> None:
    def every_other(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()

    members: dict[str, Any] = {"optimizer_zero_grad": every_other}
    if several:
        members |= {
            "configure_optimizers": two_optimizers,
            "training_step": lambda self, batch, batch_idx, optimizer_idx: (self.weight, self.other)[
                optimizer_idx
            ].sum(),
        }
    model = model_of(v1_1, **members)
    model.other = torch.nn.Parameter(torch.zeros(1), requires_grad=several)
    trainer_of(v1_1, max_epochs=1).fit(model, loader(4))
    assert model.weight.item() == -6.0  # gradients of 1, 2, 1 and 2


def test_gradients_of_a_window_of_1_1_are_cleared_once() -> None:
    seen: list[float] = []
    model = model_of(v1_1, on_before_zero_grad=lambda self, optimizer: seen.append(self.weight.item()))
    trainer_of(v1_1, max_epochs=1, accumulate_grad_batches=2).fit(model, loader(4))
    assert seen == [-1.0, -2.0]


def test_a_trainer_of_today_clears_before_the_backward_pass_under_an_accelerator_of_1_1() -> None:
    seen: list[float] = []
    model = model_of(v1_1, on_before_zero_grad=lambda self, optimizer: seen.append(self.weight.item()))
    trainer = Trainer(
        accelerator=v1_1.CPUAccelerator(), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, loader(2))
    assert seen == [0.0, -1.0]


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [4, 5])
def test_an_optimizer_step_may_leave_its_last_arguments_unnamed(pl: Any, named: int) -> None:
    def five(
        self: Any, epoch: int, batch_idx: int, optimizer: Any, idx: int, closure: Any, *args: Any, **kw: Any
    ) -> None:
        seen.append((batch_idx, idx))
        optimizer.step(closure=closure)

    def four(self: Any, epoch: int, batch_idx: int, optimizer: Any, idx: int, *args: Any, **kw: Any) -> None:
        seen.append((batch_idx, idx))
        optimizer.step(closure=args[0])

    seen: list[Any] = []
    model = model_of(pl, optimizer_step={4: four, 5: five}[named])
    trainer_of(pl, max_epochs=1).fit(model, loader(2))
    assert seen == [(0, 0), (1, 0)]
    assert model.weight.item() == -2.0
