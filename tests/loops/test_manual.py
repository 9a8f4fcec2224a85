"""Manual optimization: training_step calls backward and steps the optimizers itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.optimizers import LightningOptimizer
from drivetrain.precision import MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore:.* optimizes by hand")  # most look at other things than steps


class Gan(LightningModule):
    """Two nets, two optimizers, two steps per batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Linear(4, 4)
        self.discriminator = nn.Linear(4, 1)

    def losses(self, batch: Any) -> tuple[Any, Any]:
        x, _ = batch
        return (
            lambda: -self.discriminator(self.generator(x)).mean(),
            lambda: (self.discriminator(self.generator(x).detach()) - self.discriminator(x)).mean(),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, loss in zip((first, second), self.losses(batch), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]


def test_t19_bit_equal_to_the_plain_loop_and_steps_are_summed(make_trainer: Any, loader: DataLoader[Any]) -> None:
    ours = Gan()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(ours, loader)

    plain = Gan()
    optimizers = plain.configure_optimizers()
    for _ in range(2):
        for batch in loader:
            for optimizer, loss in zip(optimizers, plain.losses(batch), strict=True):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()

    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert trainer.global_step == 2 * 4 * 2
    assert trainer.progress.stepped_batches == 8  # the loggers' x axis counts batches (trap T11)


def test_t19_a_step_calls_its_hooks_and_a_backward_its_own(make_trainer: Any, loader: DataLoader[Any]) -> None:
    calls: list[str] = []

    class Recorder(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            calls.append("before_backward")

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            calls.append("after_backward")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            calls.append(type(optimizer).__name__)

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            calls.append("never")

    make_trainer(limit_train_batches=1, callbacks=Recorder()).fit(Gan(), loader)

    assert calls == ["before_backward", "after_backward", "Adam", "before_backward", "after_backward", "SGD"]


def scaled() -> MixedPrecision:
    """16-mixed that begins with a scale under which nothing here overflows."""
    return MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=16.0))


PRECISIONS: dict[str, Any] = {
    "32-true": lambda: {},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"plugins": scaled()},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.filterwarnings("ignore:Of the optimizers")  # the second one has no part in it
def test_t19_a_closure_is_run_inside_the_step(make_trainer: Any, loader: DataLoader[Any], precision: str) -> None:
    seen: list[bool] = []

    class Closing(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()

            def closure() -> Any:
                loss = self.losses(batch)[0]()
                first.zero_grad()
                self.manual_backward(loss)
                return loss

            seen.append(first.step(closure=closure) is not None)

    module = Closing()
    before = module.generator.weight.detach().clone()
    trainer = make_trainer(**PRECISIONS[precision]())
    trainer.fit(module, loader)

    assert seen == [True] * 4
    assert trainer.global_step == 4
    assert not torch.equal(before, module.generator.weight)


def test_t16_schedulers_are_the_modules_own_business(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Scheduled(Gan):
        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            steps = [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]
            return optimizers, [{"scheduler": steps[0], "interval": "step"}, {"scheduler": steps[1]}]

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers()[1].step()

    module = Scheduled()
    trainer = make_trainer(max_epochs=3)
    trainer.fit(module, loader)

    assert [c.scheduler.last_epoch for c in trainer.lr_scheduler_configs] == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"gradient_clip_val": 1.0}, "call self.clip_gradients"),
        ({"accumulate_grad_batches": 2}, "in every n-th training_step only"),
    ],
)
def test_t19_the_trainers_clipping_and_accumulation_are_refused(
    make_trainer: Any, loader: DataLoader[Any], arguments: dict[str, Any], cure: str
) -> None:
    with pytest.raises(ConfigurationError, match=cure):
        make_trainer(**arguments).fit(Gan(), loader)


@pytest.mark.parametrize("arguments", [{"gradient_clip_val": 0}, {"gradient_clip_val": 0.0}])
def test_t19_a_limit_of_0_clips_nothing_and_is_allowed(
    make_trainer: Any, loader: DataLoader[Any], arguments: dict[str, Any]
) -> None:
    trainer = make_trainer(**arguments)
    trainer.fit(Gan(), loader)
    assert trainer.global_step > 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:Of the optimizers")  # the second one has no part in it
def test_t21_t22_manual_clipping_sees_true_gradients(
    make_trainer: Any, loader: DataLoader[Any], precision: str
) -> None:
    norms: list[float] = []

    class Clipping(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(self.losses(batch)[0]() * 100)
            self.clip_gradients(first, gradient_clip_val=0.5)
            grads = [p.grad.norm() for p in self.generator.parameters() if p.grad is not None]
            norms.append(float(torch.stack(grads).norm()))
            first.step()

    make_trainer(**PRECISIONS[precision](), limit_train_batches=2).fit(Clipping(), loader)

    assert norms == pytest.approx([0.5, 0.5], rel=1e-3)


class Shared(LightningModule):
    """Two optimizers that share one layer; one parameter is frozen from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b, self.common = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.a.bias.requires_grad = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD([*self.a.parameters(), *self.common.parameters()], lr=0.1),
            torch.optim.SGD([*self.b.parameters(), *self.common.parameters()], lr=0.1),
        ]

    def required(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self.named_parameters()}


def test_t20_toggling_keeps_shared_parameters_and_restores_frozen_ones(
    make_trainer: Any, loader: DataLoader[Any]
) -> None:
    seen: list[dict[str, bool]] = []

    class Toggling(Shared):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            seen.append(self.required())
            self.toggle_optimizer(first)
            seen.append(self.required())
            self.untoggle_optimizer(first)
            seen.append(self.required())
            with second.toggle_model():
                seen.append(self.required())
            seen.append(self.required())
            with pytest.raises(ZeroDivisionError), self.toggled_optimizer(second):
                1 / 0  # noqa: B018
            seen.append(self.required())

    make_trainer(limit_train_batches=1).fit(Toggling(), loader)

    start, first, after_first, second, after_second, after_error = seen
    assert start == after_first == after_second == after_error == ALL_FREE
    assert (first, second) == (ONLY_FIRST, ONLY_SECOND)


ALL_FREE = {"a.weight": True, "a.bias": False, "b.weight": True, "b.bias": True, "common.weight": True,
            "common.bias": True}  # fmt: skip
ONLY_FIRST = ALL_FREE | {"b.weight": False, "b.bias": False}
ONLY_SECOND = ALL_FREE | {"a.weight": False}


def toggling(make_trainer: Any, loader: DataLoader[Any], step: Any) -> None:
    """Run ``step(module, first, second)`` as a training step, and see that nothing stays frozen."""

    class Toggling(Shared):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            assert self.required() == ALL_FREE
            step(self, *self.optimizers())
            assert self.required() == ALL_FREE

    make_trainer(limit_train_batches=2).fit(Toggling(), loader)


@pytest.mark.parametrize("fails", [False, True])
def test_t20_leaving_a_block_inside_of_another_leaves_the_outer_one(
    make_trainer: Any, loader: DataLoader[Any], fails: bool
) -> None:
    def step(module: Any, first: Any, second: Any) -> None:
        with module.toggled_optimizer(first):
            for inner, required in ((second, ONLY_SECOND), (first, ONLY_FIRST)):
                with pytest.raises(ZeroDivisionError) if fails else nullcontext(), inner.toggle_model():
                    assert module.required() == required
                    with module.toggled_optimizer(second):
                        assert module.required() == ONLY_SECOND
                    assert module.required() == required
                    if fails:
                        1 / 0  # noqa: B018
                assert module.required() == ONLY_FIRST

    toggling(make_trainer, loader, step)


def test_t20_calls_may_be_nested_by_hand(make_trainer: Any, loader: DataLoader[Any]) -> None:
    def step(module: Any, first: Any, second: Any) -> None:
        module.toggle_optimizer(first)
        module.toggle_optimizer(second.optimizer)  # wrapped or not
        module.toggle_optimizer(first)
        assert module.required() == ONLY_FIRST
        module.untoggle_optimizer(first)
        assert module.required() == ONLY_SECOND
        module.untoggle_optimizer(second)
        assert module.required() == ONLY_FIRST
        module.untoggle_optimizer(first)
        assert module.required() == ALL_FREE
        module.untoggle_optimizer(first)  # nothing is left to undo

    toggling(make_trainer, loader, step)


def test_t20_undoing_an_outer_call_undoes_the_inner_ones(make_trainer: Any, loader: DataLoader[Any]) -> None:
    def step(module: Any, first: Any, second: Any) -> None:
        module.toggle_optimizer(first)
        module.toggle_optimizer(second)
        module.untoggle_optimizer(first)
        assert module.required() == ALL_FREE
        module.untoggle_optimizer(second)
        assert module.required() == ALL_FREE
        module.toggle_optimizer(first)
        module.toggle_optimizer(second)
        module.untoggle_optimizer(None)

    toggling(make_trainer, loader, step)


def test_t20_what_a_block_has_frozen_by_hand_is_free_again_behind_it(
    make_trainer: Any, loader: DataLoader[Any]
) -> None:
    def step(module: Any, first: Any, second: Any) -> None:
        with module.toggled_optimizer(first):
            module.common.weight.requires_grad = False
            with module.toggled_optimizer(second):
                assert module.required() == ONLY_SECOND
            assert module.required() == ONLY_FIRST | {"common.weight": False}

    toggling(make_trainer, loader, step)


def test_optimizers_look_like_what_they_wrap(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Looking(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            assert isinstance(first, torch.optim.Adam)
            assert isinstance(first, LightningOptimizer)
            assert first.param_groups is first.optimizer.param_groups
            first.marked = True
            assert self.optimizers(use_pl_optimizer=False)[0] is first.optimizer
            assert first.optimizer.marked
            assert "LightningOptimizer(Adam" in repr(first)

    make_trainer(limit_train_batches=1).fit(Looking(), loader)


def test_a_step_with_arguments_of_the_optimizers_own(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Extra(torch.optim.SGD):
        def step(self, closure: Any = None, *, bonus: int = 0) -> Any:
            self.bonus = bonus
            return super().step(closure)

    class Stepping(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step(bonus=7)

        def configure_optimizers(self) -> Any:
            return Extra(self.parameters(), lr=0.1)

    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(Stepping(), loader)

    assert trainer.optimizers[0].bonus == 7
    assert trainer.global_step == 1


def test_after_fit_an_optimizer_is_just_an_optimizer(make_trainer: Any, loader: DataLoader[Any]) -> None:
    module = Gan()
    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(module, loader)

    steps = trainer.global_step
    module.optimizers()[0].step()
    module.manual_backward(module.losses(next(iter(loader)))[0]())

    assert trainer.global_step == steps


def test_manual_backward_in_automatic_optimization_is_an_error(
    make_trainer: Any, loader: DataLoader[Any], regression: Any
) -> None:
    class Both(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self.loss(batch))

    with pytest.raises(ConfigurationError, match="Set self.automatic_optimization = False"):
        make_trainer().fit(Both(), loader)


def test_several_optimizers_need_manual_optimization(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Automatic(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self.generator(batch[0]), batch[0])

    with pytest.raises(ConfigurationError, match="returned 2 optimizers, and automatic optimization steps one"):
        make_trainer().fit(Automatic(), loader)


def test_t11_values_logged_by_hand_are_flushed_by_batches(make_trainer: Any, loader: DataLoader[Any]) -> None:
    from drivetrain.loggers import CSVLogger

    class Logging(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("loss", torch.tensor(float(batch_idx)))

    trainer = make_trainer(log_every_n_steps=2, max_epochs=1)
    trainer.loggers = [CSVLogger(trainer.default_root_dir)]
    trainer.fit(Logging(), loader)

    assert trainer.logged_metrics["loss"] == 3.0


def outputs_of_batch_end(trainer_outputs: list[Any]) -> Callback:
    class Collector(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer_outputs.append(outputs)

    return Collector()


def test_t23_outputs_of_a_manual_step_are_optional(make_trainer: Any, loader: DataLoader[Any]) -> None:
    class Returning(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.losses(batch)[0](), "idx": batch_idx} if batch_idx else None

    seen: list[Any] = []
    make_trainer(limit_train_batches=2, callbacks=outputs_of_batch_end(seen)).fit(Returning(), loader)

    assert seen[0] == {}
    assert seen[1]["idx"] == 1
    assert not seen[1]["loss"].requires_grad
