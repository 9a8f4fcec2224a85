"""A strategy's verbs: whatever overrides one is called, super() is right, and what nobody overrides is bypassed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, Engine, LightningModule, WeightedLoss
from drivetrain.callbacks import OnExceptionCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.precision import MixedPrecision
from drivetrain.strategies import SingleDeviceStrategy
from drivetrain.strategies.step_parts import HOOKS_IN_A_STEP, StepParts

VERBS = [
    "training_step", "validation_step", "test_step", "predict_step", "post_training_step", "batch_to_device",
    "pre_backward", "backward", "post_backward", "zero_grad", "optimizer_step", "clip_gradients_norm",
    "clip_gradients_value", "run", "process_dataloader", "setup_optimizers",
]  # fmt: skip


def noting(names: list[str], calls: Counter[str]) -> SingleDeviceStrategy:
    """A strategy that overrides ``names``, each as its base does it, and counts the calls."""

    def override(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(super(made, self), name)(*args, **kwargs)

        return call

    made = type("Noting", (SingleDeviceStrategy,), {name: override(name) for name in names})
    strategy: SingleDeviceStrategy = made()
    return strategy


@pytest.fixture
def program(make_trainer: Any, validated: Any, data: Any) -> Any:
    """Run everything under a strategy; returns weights, optimizer state, logged values, predictions."""

    def run(strategy: Any, optimizer: str = "adam", **arguments: Any) -> Any:
        class Module(validated):  # type: ignore[misc]
            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return self.net(batch[0])

            def configure_optimizers(self) -> Any:
                if optimizer == "lbfgs":
                    return torch.optim.LBFGS(self.parameters(), max_iter=3)
                return torch.optim.Adam(self.parameters(), lr=0.05)

        class ByHand(Module):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> None:
                own = self.optimizers()
                own.zero_grad()
                self.manual_backward(self.loss(batch))
                self.clip_gradients(own, 0.1)
                own.step()

        torch.manual_seed(3)
        module = ByHand() if optimizer == "manual" else Module()
        loader = DataLoader(data, batch_size=8)
        trainer = make_trainer(strategy=strategy, max_epochs=2, **arguments)
        trainer.fit(module, loader, loader)
        fitted = dict(trainer.callback_metrics)
        tested = trainer.validate(module, loader, verbose=False) + trainer.test(module, loader, verbose=False)
        predictions = trainer.predict(module, loader)
        return module.state_dict(), trainer.optimizers[0].state_dict(), fitted, tested, predictions, trainer.global_step

    return run


WAYS = [
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    {"precision": "bf16-mixed"},
    {"precision": "64-true"},
    {"optimizer": "lbfgs"},
    {"optimizer": "manual"},
    {"optimizer": "manual", "precision": "16-mixed"},
]


@pytest.mark.parametrize("arguments", WAYS, ids=str)
def test_overrides_that_call_super_change_no_bit(program: Any, arguments: Any) -> None:
    calls: Counter[str] = Counter()
    plain = program("auto", **arguments)
    torch.testing.assert_close(program(noting(VERBS, calls), **arguments), plain, rtol=0, atol=0)
    by_hand, clips = arguments.get("optimizer") == "manual", arguments.get("gradient_clip_algorithm", "norm")
    unused = {"zero_grad"} if by_hand else set()
    unused |= {"clip_gradients_norm", "clip_gradients_value"} - (
        {f"clip_gradients_{clips}"} if by_hand or "gradient_clip_val" in arguments else set()
    )
    assert set(VERBS) - calls.keys() == unused


@pytest.mark.parametrize("verb", VERBS)
def test_one_override_alone_is_called(program: Any, verb: str) -> None:
    calls: Counter[str] = Counter()
    arguments = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value" if "value" in verb else "norm"}
    torch.testing.assert_close(program(noting([verb], calls), **arguments), program("auto", **arguments))
    assert calls[verb] > 0


def test_every_verb_may_raise(make_trainer: Any, validated: Any, loader: Any) -> None:
    """No member of the contract is left out in silence: a strategy that raises in it ends the run."""

    def failing(name: str) -> Any:
        def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError(name)

        return type("Failing", (SingleDeviceStrategy,), {name: fail})()

    for verb in VERBS:
        module = validated()
        module.predict_step = lambda batch, batch_idx: batch
        clips = "value" if "value" in verb else "norm"
        trainer = make_trainer(strategy=failing(verb), gradient_clip_val=1.0, gradient_clip_algorithm=clips)

        def run_all(trainer: Any = trainer, module: Any = module) -> None:
            trainer.fit(module, loader, loader)
            trainer.test(module, loader, verbose=False)
            trainer.predict(module, loader)

        with pytest.raises(ZeroDivisionError, match=verb):
            run_all()


def test_an_override_counts_on_the_instance_and_when_it_is_set_during_a_run(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    calls: list[int] = []

    class Sets(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                own = trainer.strategy.backward
                trainer.strategy.backward = lambda loss, *args: (
                    calls.append(trainer.progress.batch_idx),
                    own(loss, *args),
                )
            if batch_idx == 3:
                del trainer.strategy.backward

    make_trainer(callbacks=Sets(), strategy=SingleDeviceStrategy()).fit(regression(), loader)
    assert calls == [2, 3]  # from the batch after the one in which somebody set it, until that after it was removed


def test_backward_gets_the_unscaled_loss(make_trainer: Any, regression: Any, loader: Any) -> None:
    seen: list[tuple[float, float]] = []

    class Own(SingleDeviceStrategy):
        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = closure_loss.item()
            assert isinstance(optimizer, torch.optim.SGD)
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
            seen.append((before, loss.item()))
            return loss

    class Looks(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.losses.append(loss.item())

    looks = Looks()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = MixedPrecision("16-mixed", scaler=scaler)
    make_trainer(strategy=Own(), plugins=plugin, callbacks=looks).fit(regression(), loader)
    assert [before for before, _ in seen] == [after for _, after in seen]
    assert [scaled / 8 for scaled in looks.losses] == pytest.approx([before for before, _ in seen])


def test_an_optimizer_step_of_the_strategys_own_gets_a_closure_that_trains(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    losses: list[Any] = []

    class TwiceRead(SingleDeviceStrategy):
        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            assert model is self.model
            losses.append(closure())
            return optimizer.step()

    trainer = make_trainer(strategy=TwiceRead(), accumulate_grad_batches=2)
    torch.manual_seed(0)
    module = regression()
    trainer.fit(module, loader)
    torch.manual_seed(0)
    plain = regression()
    make_trainer(accumulate_grad_batches=2).fit(plain, loader)
    assert len(losses) == trainer.global_step == 2
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_a_strategy_written_the_familiar_way_trains(make_trainer: Any, validated: Any, loader: Any) -> None:
    """Whole bodies, without super: what they reach for exists, and nothing is done twice."""
    made: list[Any] = []

    class Familiar(SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            self.accelerator.setup(trainer)  # type: ignore[union-attr]
            self.model_to_device()
            self.setup_optimizers(trainer)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.train_step_context():
                return self.lightning_module.training_step(*args, **kwargs)

        def validation_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.val_step_context():
                return self.lightning_module.validation_step(*args, **kwargs)

    class Module(validated):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            made.append(self)
            return super().configure_optimizers()

    results = []
    for strategy in (Familiar(), "auto"):
        torch.manual_seed(1)
        module = Module()
        trainer = make_trainer(strategy=strategy, precision="bf16-mixed")
        trainer.fit(module, loader, loader)
        results.append((module.state_dict(), trainer.callback_metrics))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert len(made) == 2


class FamiliarBodies(SingleDeviceStrategy):
    """Verbs that are written out, as strategies of the field have them."""

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        return self.precision_plugin.optimizer_step(optimizer, model=model or self.model, closure=closure, **kwargs)


@pytest.mark.parametrize("arguments", WAYS, ids=str)
def test_verbs_that_are_written_out_change_no_bit(program: Any, arguments: Any) -> None:
    torch.testing.assert_close(program(FamiliarBodies(), **arguments), program("auto", **arguments), rtol=0, atol=0)


def test_a_strategy_may_refuse_inference_mode(make_trainer: Any, validated: Any, loader: Any) -> None:
    modes: list[tuple[bool, bool]] = []

    class Module(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    class Careful(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(allows_inference_mode=False)

    make_trainer(strategy=Careful()).validate(Module(), loader, verbose=False)
    make_trainer().validate(Module(), loader, verbose=False)
    assert set(modes[:4]) == {(False, False)}
    assert set(modes[4:]) == {(True, False)}


def test_steps_may_go_through_the_call_of_a_module_that_is_its_own_wrapper(
    make_trainer: Any, validated: Any, loader: Any
) -> None:
    seen: Counter[bool] = Counter()

    class InPlace(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(calls_through_forward=True)

        def setup_module(self, module: Any, move_to_device: bool = True) -> Any:
            module = super().setup_module(module, move_to_device)
            module.register_forward_pre_hook(lambda module, args: seen.update([module.training]))
            return module

    results = []
    for strategy in (InPlace(), "auto"):
        torch.manual_seed(1)
        module = validated()
        trainer = make_trainer(strategy=strategy, num_sanity_val_steps=0)
        trainer.fit(module, loader, loader)
        results.append(module.state_dict())
    assert seen == {True: 4, False: 4}
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_an_engine_calls_the_same_verbs(data: Any) -> None:
    calls: Counter[str] = Counter()
    verbs = ["backward", "optimizer_step", "clip_gradients_norm", "accumulating", "pre_backward", "post_backward"]
    engine = Engine(accelerator="cpu", devices=1, strategy=noting(verbs, calls))
    engine.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with engine.no_backward_sync(model):
        engine.backward(model(data[0][0]).sum())
    engine.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    assert calls == dict.fromkeys(verbs, 1)


# ---- a strategy that owns its step -----------------------------------------------------------------------------------


class ByParts(SingleDeviceStrategy):
    """The loop's own step, put together by hand."""

    facts = SingleDeviceStrategy.facts.but(honoured_hooks=StepParts.HOOKS)

    def bind_step(self, parts: StepParts) -> Any:
        def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
            output = parts.training_step(batch, batch_idx)
            if index == 0:
                parts.begin(size)
            if (loss := parts.loss_of(output, index, last)) is not None:
                parts.backward(loss)
            if not last:
                return output, 0
            parts.before_step()
            return output, int(parts.optimizer_step())

        return step


@pytest.mark.parametrize("arguments", [way for way in WAYS if "optimizer" not in way], ids=str)
def test_a_step_out_of_the_parts_equals_the_loops_own(program: Any, arguments: Any) -> None:
    torch.testing.assert_close(program(ByParts(), **arguments), program("auto", **arguments), rtol=0, atol=0)


class KeepsGradients(ByParts):
    """Adds gradients up in a place of its own, and puts them where the optimizer looks for them at the window's end."""

    def bind_step(self, parts: StepParts) -> Any:
        whole = super().bind_step(parts)
        parameters = [each for group in parts.optimizers[0].param_groups for each in group["params"]]
        before_step, self.kept = parts.before_step, {}

        def hide() -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    held = self.kept.setdefault(parameter, torch.zeros_like(parameter))
                    held.add_(parameter.grad)
                    parameter.grad = None

        def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
            if index == 0:
                self.kept.clear()
            output = whole(batch, batch_idx, index, last, size)
            hide()
            return output

        def show() -> None:
            hide()
            before_step()
            for parameter, held in self.kept.items():
                parameter.grad = held

        object.__setattr__(parts, "before_step", show)
        return step

    def rescale_gradients(self, optimizer: Any, factor: Any) -> None:
        for held in self.kept.values():
            held.mul_(factor)


@pytest.mark.parametrize("right", [True, False])
def test_a_strategy_that_keeps_gradients_itself_is_told_to_rescale_them(
    make_trainer: Any, regression: Any, loader: Any, right: bool
) -> None:
    class Weighted(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return WeightedLoss(super().training_step(batch, batch_idx), 1 + batch_idx)

    own = KeepsGradients if right else type("Forgets", (KeepsGradients,), {"rescale_gradients": lambda *_: None})
    found = []
    for strategy in (own(), "auto"):
        torch.manual_seed(2)
        module = Weighted()
        make_trainer(strategy=strategy, precision="64-true", accumulate_grad_batches=2).fit(module, loader)
        found.append(torch.cat([each.detach().flatten() for each in module.parameters()]))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-9) is right


def by_hand(module: Any, data: Any, step: Any) -> None:
    for batch in DataLoader(data, batch_size=8):
        step(module, module.configure_optimizers(), batch)


def test_a_step_may_make_two_optimizer_steps(make_trainer: Any, regression: Any, data: Any, loader: Any) -> None:
    class Twice(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(honoured_hooks=StepParts.HOOKS)

        def bind_step(self, parts: StepParts) -> Any:
            def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
                for _ in range(2):
                    parts.begin()
                    output = parts.training_step(batch, batch_idx)
                    parts.backward(parts.loss_of(output, 0, True))  # type: ignore[arg-type]
                    parts.before_step()
                    parts.optimizer_step()
                return output, 2

            return step

    def plainly(module: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()

    torch.manual_seed(2)
    module, trainer = regression(), make_trainer(strategy=Twice())
    trainer.fit(module, loader)
    torch.manual_seed(2)
    plain = regression()
    by_hand(plain, data, plainly)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert trainer.global_step == 8


def test_a_step_may_split_the_batch(make_trainer: Any, regression: Any, data: Any, loader: Any) -> None:
    class Splits(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(honoured_hooks=StepParts.HOOKS)

        def bind_step(self, parts: StepParts) -> Any:
            def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
                pieces = list(zip(*(tensor.split(2) for tensor in batch), strict=True))
                if index == 0:
                    parts.begin(size * len(pieces))
                for number, piece in enumerate(pieces):
                    output = parts.training_step(piece, batch_idx)
                    at = index * len(pieces) + number
                    parts.backward(parts.loss_of(output, at, last and number == len(pieces) - 1))  # type: ignore[arg-type]
                if last:
                    parts.before_step()
                return output, int(last and parts.optimizer_step())

            return step

    results = []
    for strategy in (Splits(), "auto"):
        torch.manual_seed(2)
        module = regression()
        trainer = make_trainer(strategy=strategy, precision="64-true", accumulate_grad_batches=2, gradient_clip_val=0.1)
        trainer.fit(module, loader)
        results.append((module.state_dict(), torch.tensor(trainer.global_step)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hook", sorted(HOOKS_IN_A_STEP))
def test_an_overridden_hook_that_an_own_step_does_not_call_is_refused(
    make_trainer: Any, regression: Any, loader: Any, hook: str
) -> None:
    class Own(ByParts):
        facts = ByParts.facts.but(honoured_hooks=HOOKS_IN_A_STEP - {hook})

    class Module(regression):  # type: ignore[misc]
        pass

    setattr(Module, hook, lambda self, *args, **kwargs: None)
    with pytest.raises(ConfigurationError, match=f"Own owns its training step and does not call {hook}, which Module"):
        make_trainer(strategy=Own()).fit(Module(), loader)
    Own.facts = Own.facts.but(honoured_hooks=HOOKS_IN_A_STEP)  # the control: one that calls it is not refused
    make_trainer(strategy=Own()).fit(Module(), loader)


def test_a_callbacks_hook_is_refused_too(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(ByParts):
        facts = ByParts.facts.but(honoured_hooks=frozenset())

    class Looks(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="does not call on_after_backward, which Looks overrides"):
        make_trainer(strategy=Own(), callbacks=Looks()).fit(regression(), loader)


def test_clipping_that_an_own_step_does_not_do_is_refused(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(ByParts):
        facts = ByParts.facts.but(honoured_hooks=frozenset())

    with pytest.raises(ConfigurationError, match=r"does not clip, and Trainer\(gradient_clip_val=0.5\) asks for it"):
        make_trainer(strategy=Own(), gradient_clip_val=0.5).fit(regression(), loader)
    make_trainer(strategy=Own(), gradient_clip_val=0).fit(regression(), loader)  # a limit of 0 clips nothing


def test_an_own_step_that_honours_all_is_believed(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(ByParts):
        facts = ByParts.facts.but(honoured_hooks="all")

    module = regression()
    module.optimizer_step = lambda *args: None
    make_trainer(strategy=Own(), gradient_clip_val=0.5).fit(module, loader)


def test_no_step_of_its_own_after_all(program: Any) -> None:
    class Own(SingleDeviceStrategy):
        def bind_step(self, parts: StepParts) -> Any:
            return None

    torch.testing.assert_close(program(Own()), program("auto"), rtol=0, atol=0)


def test_a_module_that_optimizes_by_hand_keeps_its_step(program: Any) -> None:
    arguments = {"optimizer": "manual"}
    torch.testing.assert_close(program(ByParts(), **arguments), program("auto", **arguments), rtol=0, atol=0)


@pytest.mark.parametrize("result", [None, 3, (1, -1), (1, 1.0), (1, True)], ids=str)
def test_what_an_own_step_returns_is_looked_at(make_trainer: Any, regression: Any, loader: Any, result: Any) -> None:
    class Own(SingleDeviceStrategy):
        def bind_step(self, parts: StepParts) -> Any:
            return lambda *args: result

    with pytest.raises(ConfigurationError, match=r"Own.bind_step returned .*Return \(output, optimizer_steps\)"):
        make_trainer(strategy=Own()).fit(regression(), loader)


def test_an_own_step_that_ignores_the_window_is_an_error(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(SingleDeviceStrategy):
        def bind_step(self, parts: StepParts) -> Any:
            return lambda *args: (None, 1)

    with pytest.raises(ConfigurationError, match="before its window's last batch, and Trainer"):
        make_trainer(strategy=Own(), accumulate_grad_batches=2).fit(regression(), loader)


def test_the_strategys_optimizer_step_is_that_of_the_parts(program: Any) -> None:
    calls: list[Any] = []

    class Own(ByParts):
        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            calls.append(closure())
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    torch.testing.assert_close(program(Own()), program("auto"), rtol=0, atol=0)
    assert calls == [None] * 8


class Weighted(LightningModule):
    """Two layers, each with an optimizer of its own; the loss is weighted, or the plain one."""

    def __init__(self, weights: list[float] | None, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.weights, self.number = weights, optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.second(torch.tanh(self.first(batch[0]))) - batch[1]).square().mean()
        return loss if self.weights is None else WeightedLoss(loss, self.weights[batch_idx % len(self.weights)])

    def configure_optimizers(self) -> Any:
        if self.number == 1:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.second)]


def test_an_own_step_weighs_the_gradients_of_all_optimizers(make_trainer: Any, loader: Any) -> None:
    class Both(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(honoured_hooks=StepParts.HOOKS)

        def bind_step(self, parts: StepParts) -> Any:
            def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
                if index == 0:
                    for optimizer in parts.optimizers:
                        parts.begin(size, optimizer)
                output = parts.training_step(batch, batch_idx)
                parts.backward(parts.loss_of(output, index, last))  # type: ignore[arg-type]
                if last:
                    for optimizer in parts.optimizers:
                        parts.before_step(optimizer)
                        parts.optimizer_step(optimizer)
                return output, int(last)

            return step

    arguments: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": 4}
    module, plain = Weighted([1.0, 5.0, 2.0, 7.0], optimizers=2), Weighted([1.0, 5.0, 2.0, 7.0])
    make_trainer(strategy=Both(), **arguments).fit(module, loader)
    make_trainer(**arguments).fit(plain, loader)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


class Sharp(SingleDeviceStrategy):
    """Evaluates twice: at the parameters, and a little up the gradient."""

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        closure()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        steps = [0.01 * parameter.grad for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, steps)
        loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, steps)
        optimizer.step()
        return loss


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_closure_that_is_evaluated_twice_weighs_each_gradient_once(
    make_trainer: Any, loader: Any, accumulate: int
) -> None:
    arguments: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": accumulate}
    plain, weighted = Weighted(None), Weighted([1.0])
    for module in (plain, weighted):
        make_trainer(strategy=Sharp(), **arguments).fit(module, loader)
    torch.testing.assert_close(weighted.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


class Raises(SingleDeviceStrategy):
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.lightning_module.trainer.progress.batch_idx == 2:
            raise ZeroDivisionError


class RaisesBetween(ByParts):
    def bind_step(self, parts: StepParts) -> Any:
        step = super().bind_step(parts)

        def twice(batch: Any, batch_idx: int, *args: Any) -> Any:
            step(batch, batch_idx, *args)
            if batch_idx == 2:
                raise ZeroDivisionError
            return step(batch, batch_idx, *args)[0], 2

        return twice


class RaisesPerturbed(Sharp):
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def second() -> Any:
            self.evaluations += 1
            if self.evaluations == 6:
                raise ZeroDivisionError
            return closure()

        return super().optimizer_step(optimizer, second, model, **kwargs)

    evaluations = 0


@pytest.mark.parametrize("strategy", [Raises, RaisesBetween, RaisesPerturbed])
def test_an_exception_behind_a_change_of_the_parameters_is_not_exact(
    make_trainer: Any, loader: Any, tmp_path: Any, strategy: Any
) -> None:
    saver = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ZeroDivisionError):
        make_trainer(strategy=strategy(), callbacks=saver, enable_checkpointing=True).fit(Weighted(None), loader)
    saved = torch.load(saver.ckpt_path, weights_only=True)
    assert saved["restart"]["exact"] is False


def test_gradients_of_a_window_that_is_the_strategys_own_are_saved(
    make_trainer: Any, loader: Any, tmp_path: Any
) -> None:
    class EveryThird(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(honoured_hooks=StepParts.HOOKS)

        def bind_step(self, parts: StepParts) -> Any:
            def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
                if batch_idx % 3 == 0:
                    parts.begin(1)
                output = parts.training_step(batch, batch_idx)
                parts.backward(parts.loss_of(output))  # type: ignore[arg-type]
                if batch_idx % 3 != 2:
                    return output, 0
                parts.before_step()
                return output, int(parts.optimizer_step())

            return step

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "open.ckpt")

    whole, resumed = Weighted(None), Weighted(None)
    make_trainer(strategy=EveryThird(), callbacks=Saves()).fit(whole, loader)
    make_trainer(strategy=EveryThird()).fit(resumed, loader, ckpt_path=tmp_path / "open.ckpt")
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_wrapper_is_used_or_refused(make_trainer: Any, regression: Any, loader: Any) -> None:
    calls: Counter[str] = Counter()

    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            calls["forward"] += 1
            return self.module(*args)

    class Late(SingleDeviceStrategy):
        def model_to_device(self) -> None:
            super().model_to_device()
            self.model = Wrapper(self.model)

    class Early(SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            self.model = Wrapper(self.model)
            super().setup(trainer)

    make_trainer(strategy=Late()).fit(regression(), loader)
    assert calls["forward"] == 4
    with pytest.raises(ConfigurationError, match="Early has wrapped the module before setup"):
        make_trainer(strategy=Early()).fit(regression(), loader)
