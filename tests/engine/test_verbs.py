"""An Engine calls the verbs that a strategy overrides, as the Trainer does, and no others."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine
from drivetrain.compat.members import TRAINER_ONLY
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.precision import Precision
from drivetrain.strategies import DDPStrategy, SingleDeviceStrategy

BATCHES = [(torch.full((2, 4), float(i)), torch.ones(2, 1)) for i in range(4)]


def calling_super(base: type, names: set[str], calls: Counter[str]) -> Any:
    def override(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(super(made, self), name)(*args, **kwargs)

        return call

    made = type("Noting", (base,), {name: override(name) for name in names})
    return made()


def program(engine: Engine, folder: Path) -> dict[str, Any]:
    """Everything of a strategy that a loop of one's own reaches; returns what must not depend on who did it."""
    engine.launch()
    torch.manual_seed(0)
    with engine.init_module():
        net = nn.Linear(4, 1)
    with engine.sharded_model(), engine.init_tensor():
        torch.ones(1)
    model, optimizer = engine.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    loader = engine.setup_dataloaders(DataLoader(TensorDataset(*map(torch.cat, zip(*BATCHES, strict=True)))))
    for index, (x, y) in enumerate(loader):
        with engine.no_backward_sync(model, enabled=index % 2 == 0):
            engine.backward((model(x) - y).square().mean())
        if index % 2:
            engine.clip_gradients(model, optimizer, max_norm=1.0)
            engine.clip_gradients(model, optimizer, clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()
    moved = engine.to_device((torch.ones(1), 2))
    state = {"model": model, "optimizer": optimizer, "step": 3}
    engine.save(folder / "x.ckpt", state)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        net.weight.zero_()
    optimizer.state.clear()
    rest = engine.load(folder / "x.ckpt", state)
    found = {
        "weights": weights, "loaded": copy.deepcopy(net.state_dict()), "optimizer": optimizer.state_dict(),
        "moved": moved, "rest": rest, "file": torch.load(folder / "x.ckpt", weights_only=True),
        "reduced": engine.all_reduce(torch.ones(2)), "gathered": engine.all_gather(torch.ones(2)),
        "told": engine.broadcast(4),
    }  # fmt: skip
    engine.barrier()
    engine.teardown()
    return found


VERBS = {
    "setup_environment", "tensor_init_context", "model_sharded_context", "setup_module", "model_to_device",
    "process_dataloader", "batch_to_device", "backward", "pre_backward", "post_backward", "accumulating",
    "block_backward_sync", "clip_gradients_norm", "clip_gradients_value", "optimizer_step", "zero_grad", "reduce",
    "all_gather", "broadcast", "barrier", "lightning_module_state_dict", "load_model_state_dict", "optimizer_state",
    "load_optimizer_state_dict", "save_checkpoint", "load_checkpoint", "teardown",
}  # fmt: skip


@pytest.mark.parametrize("base", [SingleDeviceStrategy, DDPStrategy])
def test_an_engine_calls_every_verb_that_is_overridden_and_the_results_stay(base: type, tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    expected = program(Engine(accelerator="cpu", devices=1), tmp_path)
    found = program(Engine(accelerator="cpu", devices=1, strategy=calling_super(base, VERBS, calls)), tmp_path)
    assert set(calls) == VERBS
    assert (calls["batch_to_device"], calls["zero_grad"], calls["block_backward_sync"]) == (9, 4, 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_each_verb_alone(tmp_path: Path) -> None:
    expected = program(Engine(accelerator="cpu", devices=1), tmp_path)
    for verb in sorted(VERBS):
        calls: Counter[str] = Counter()
        strategy = calling_super(SingleDeviceStrategy, {verb}, calls)
        found = program(Engine(accelerator="cpu", devices=1, strategy=strategy), tmp_path)
        assert calls[verb] > 0, verb
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_verb_that_is_replaced_while_a_loop_runs_counts_from_then_on() -> None:
    engine = Engine(accelerator="cpu", devices=1)
    net = nn.Linear(4, 1)
    model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = engine.setup_dataloaders(BATCHES)
    seen: Counter[str] = Counter()
    strategy = engine.strategy

    def once() -> None:
        for x, _ in loader:
            engine.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            engine.to_device(x)
        scheduler.step()

    def noting(name: str) -> None:
        own = getattr(strategy, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return own(*args, **kwargs)

        setattr(strategy, name, call)

    once()
    for name in ("backward", "optimizer_step", "zero_grad", "batch_to_device"):
        noting(name)
    once()
    assert seen == {"backward": 4, "optimizer_step": 4, "zero_grad": 4, "batch_to_device": 8}
    for name in seen:
        delattr(strategy, name)
    once()
    assert sum(seen.values()) == 20


def test_batches_of_a_loader_and_by_hand_go_where_the_strategy_says_and_modules_do_not() -> None:
    class Doubling(SingleDeviceStrategy):
        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            assert device == self.root_device
            return [part * 2 for part in super().batch_to_device(batch, device, dataloader_idx)]

    engine = Engine(accelerator="cpu", strategy=Doubling())
    loader = engine.setup_dataloaders(BATCHES)
    assert [int(x[0, 0]) for x, _ in loader] == [0, 2, 4, 6]
    assert [int(x[0, 0]) for x, _ in copy.deepcopy(loader)] == [0, 2, 4, 6]
    assert [int(x[0, 0]) for x, _ in engine.setup_dataloaders(BATCHES, move_to_device=False)] == [0, 1, 2, 3]
    assert int(engine.to_device(BATCHES[1])[0][0, 0]) == 2
    net = nn.Linear(1, 1)
    assert engine.to_device(net) is net


def test_the_loader_that_a_strategy_puts_in_its_place_is_iterated() -> None:
    class Shorter(SingleDeviceStrategy):
        def process_dataloader(self, loader: Any) -> Any:
            return list(loader)[:2]

    loader = Engine(accelerator="cpu", strategy=Shorter()).setup_dataloaders(BATCHES)
    assert len(loader) == len(list(loader)) == 2


def test_block_backward_sync_is_for_the_model_of_the_block() -> None:
    seen: list[Any] = []

    class Own(SingleDeviceStrategy):
        def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
            return nn.Sequential(super().setup_module(module, move_to_device))

        @contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            seen.append(self.model)
            yield

    engine = Engine(accelerator="cpu", strategy=Own())
    one, other = engine.setup(nn.Linear(1, 1)), engine.setup(nn.Linear(1, 1))
    with engine.no_backward_sync(one), engine.no_backward_sync(other), engine.no_backward_sync(one, enabled=False):
        pass
    assert seen == [one._forward_module, other._forward_module]
    assert engine.strategy.model is None


def test_zero_grad_of_a_strategy_takes_no_arguments() -> None:
    class Keeping(SingleDeviceStrategy):
        def zero_grad(self, optimizer: Optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

    net = nn.Linear(1, 1)
    engine = Engine(accelerator="cpu", strategy=Keeping())
    model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine.backward(model(torch.ones(1, 1)).sum())
    optimizer.zero_grad(set_to_none=True)
    assert net.weight.grad is not None
    with pytest.raises(ConfigurationError, match=r"Keeping overrides zero_grad\(optimizer\).*Write optimizer.zero"):
        optimizer.zero_grad(set_to_none=False)


class OwnForm(SingleDeviceStrategy):
    """Keeps states in a form of its own, as a strategy for sharded models does, and knows whose they are."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {f"own/{name}": value for name, value in self.lightning_module.state_dict().items()}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        state = {name.removeprefix("own/"): value for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        names = [name for name, _ in self.lightning_module.named_parameters()]
        return {names[index]: dict(state) for index, state in optimizer.state_dict()["state"].items()}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            names = [name for name, _ in self.lightning_module.named_parameters()]
            groups = optimizer.state_dict()["param_groups"]
            state = {names.index(name): state for name, state in states.items()}
            optimizer.load_state_dict({"state": state, "param_groups": groups})


class OwnVerbs(SingleDeviceStrategy):
    """The same by the contract's verbs, which get the module and the optimizers."""

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        assert self.lightning_module is None  # nothing stands in for a run
        return {f"own/{name}": value for name, value in module.state_dict().items()}

    def load_module_state(self, module: nn.Module, state: Any, strict: bool = True) -> None:
        assert self.lightning_module is None
        module.load_state_dict({name.removeprefix("own/"): value for name, value in state.items()}, strict=strict)

    optimizer_state = OwnForm.optimizer_state

    def load_optimizer_states(self, optimizers: Any, states: Any, module_state: Any) -> None:
        (optimizer,), (state,) = optimizers, states
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": dict(enumerate(state.values())), "param_groups": groups})


def two_models(seed: int, base: type = OwnForm) -> tuple[Engine, dict[str, Any]]:
    torch.manual_seed(seed)
    engine, parts = Engine(accelerator="cpu", strategy=base()), {}
    for name, net in (("a", nn.Linear(2, 1)), ("b", nn.Sequential(nn.Linear(2, 1)))):
        model, optimizer = engine.setup(net, torch.optim.Adam(net.parameters()))
        engine.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        parts |= {name: model, f"{name}_optimizer": optimizer}
    return engine, parts


@pytest.mark.parametrize("kind", [OwnForm, OwnVerbs])
def test_states_in_a_strategys_own_form_go_to_a_file_and_back(tmp_path: Path, kind: type) -> None:
    engine, parts = two_models(0, kind)
    engine.save(tmp_path / "x.ckpt", parts)
    file = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert set(file["a"]) == {"own/weight", "own/bias"}
    assert set(file["b_optimizer"]) == {"0.weight", "0.bias"}
    other, new = two_models(1, kind)
    optimizers = list(other.strategy.optimizers)
    assert other.load(tmp_path / "x.ckpt", new) == {}
    for name in parts:
        torch.testing.assert_close(new[name].state_dict(), parts[name].state_dict(), rtol=0, atol=0)
    assert other.strategy.optimizers == optimizers
    assert other.strategy.lightning_module is None
    torch.save(file["a"], tmp_path / "raw.pt")
    _, third = two_models(2, kind)
    other.load_raw(tmp_path / "raw.pt", third["a"])
    assert torch.equal(third["a"].weight, parts["a"].weight)
    with pytest.raises(CheckpointError, match="does not fit EngineModule"):  # what a strategy without these verbs says
        two_models(0, SingleDeviceStrategy)[0].load_raw(tmp_path / "raw.pt", third["a"])


def test_a_strategys_refusal_to_load_is_a_checkpoint_error_that_names_the_entry(tmp_path: Path) -> None:
    class Refusing(SingleDeviceStrategy):
        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
            raise KeyError("no such shard")

    engine, parts = two_models(0, Refusing)
    engine.save(tmp_path / "x.ckpt", parts)
    with pytest.raises(CheckpointError, match=r"x.ckpt.*\ba\b.*no such shard"):
        engine.load(tmp_path / "x.ckpt", parts)


def test_a_familiar_tensor_init_context_may_pass_on_what_it_is_given() -> None:
    class Familiar(SingleDeviceStrategy):
        def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
            return super().tensor_init_context(empty_init)

    with Engine(accelerator="cpu", strategy=Familiar()).init_module(empty_init=True):
        nn.Linear(1, 1)


@pytest.mark.parametrize("name", sorted(TRAINER_ONLY["Strategy"]))
def test_an_override_that_only_a_trainer_calls_is_one_line(name: str) -> None:
    strategy = type("ForTrainers", (SingleDeviceStrategy,), {name: lambda self, *args: None})
    engine = Engine(accelerator="cpu", strategy=strategy())
    with pytest.warns(UserWarning, match=f"ForTrainers overrides {name}, which a Trainer calls and an Engine does not"):
        engine.setup(nn.Linear(1, 1))
    engine.setup(nn.Linear(1, 1))  # another line would fail the test


def test_an_engine_that_travels_keeps_its_strategys_verbs() -> None:
    engine = pickle.loads(pickle.dumps(Engine(accelerator="cpu", strategy=OwnForm())))
    net = nn.Linear(1, 1)
    engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine.strategy.batch_to_device = lambda batch, device: "moved"
    assert engine.to_device(3) == "moved"


@pytest.mark.parametrize("overridden", [set(), {"zero_grad"}])
def test_a_step_calls_nothing_of_a_strategy_that_overrides_nothing(overridden: set[str]) -> None:
    strategy = calling_super(SingleDeviceStrategy, overridden, Counter())
    engine = Engine(accelerator="cpu", devices=1, strategy=strategy)
    net, called = nn.Linear(4, 1), set()
    model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = iter(engine.setup_dataloaders(BATCHES))

    def note(frame: Any, event: str, argument: Any) -> None:
        if "drivetrain/strategies/" in frame.f_code.co_filename.replace("\\", "/"):
            called.add(frame.f_code.co_name)

    next(batches)
    sys.setprofile(note)
    try:
        x, _ = next(batches)
        optimizer.zero_grad()
        engine.backward(model(x).sum())
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert called == overridden


def test_an_engine_and_its_models_go_without_the_garbage_collector() -> None:
    class Wrapping(SingleDeviceStrategy):
        def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
            return nn.Sequential(super().setup_module(module, move_to_device))

        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            return super().batch_to_device(batch, device, dataloader_idx)

    gc.collect()
    gc.disable()
    try:
        engine, net = Engine(accelerator="cpu", strategy=Wrapping()), nn.Linear(1, 1)
        model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = engine.setup_dataloaders(BATCHES)
        wrapped = ref(model._forward_module)
        del model
        assert wrapped() is None  # the engine keeps the user's module only
        strategy, net = ref(engine.strategy), ref(net)
        del engine, optimizer, loader
        assert (strategy(), net()) == (None, None)
    finally:
        gc.enable()


def test_the_bare_optimizer_cannot_step_scaled_gradients() -> None:
    module = nn.Linear(2, 1)
    bare = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(accelerator="cpu", precision="16-mixed")
    model, optimizer = engine.setup(module, bare)
    before = module.weight.detach().clone()
    engine.backward(model(torch.ones(1, 2)).sum() / 100)
    with pytest.raises(ConfigurationError, match=r"The SGD itself was stepped, and not the wrapped optimizer"):
        bare.step()
    assert torch.equal(module.weight, before)
    optimizer.step()
    assert not torch.equal(module.weight, before)


def test_the_bare_optimizer_may_step_plain_gradients() -> None:
    module = nn.Linear(2, 1)
    bare = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _ = Engine(accelerator="cpu").setup(module, bare)
    model(torch.ones(1, 2)).sum().backward()
    bare.step()


class Doubled(Precision):
    """Scales the loss by two, and steps in a method of its own."""

    scales_loss = True

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(tensor * 2, module)

    def unscale_gradients(self, optimizer: Any) -> None:
        for parameter in self.main_params(optimizer):
            parameter.grad /= 2

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        loss = None if closure is None else closure()
        optimizer.step(**kwargs)
        return loss


@pytest.mark.parametrize("max_norm", [None, 0.1, 1e9])
@pytest.mark.parametrize("in_closure", [False, True])
def test_a_step_gets_unscaled_gradients_also_without_clipping(max_norm: float | None, in_closure: bool) -> None:
    def trained(engine: Engine) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def evaluate(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            engine.backward(loss)
            if max_norm is not None:
                engine.clip_gradients(model, optimizer, max_norm=max_norm)
            return loss

        for x, y in BATCHES:
            if in_closure:
                optimizer.step(functools.partial(evaluate, x, y))
            else:
                evaluate(x, y)
                optimizer.step()
        return model.weight

    scaled = trained(Engine(plugins=[Doubled()], accelerator="cpu", devices=1))
    assert torch.equal(scaled, trained(Engine(accelerator="cpu", devices=1)))
