"""What Engine.setup hands back stands in for what went in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from drivetrain import Engine
from drivetrain.base.restoring import WrongForm
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import FSDPStrategy, SingleDeviceStrategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.note = "hello"
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def encode(self, x: Tensor) -> Tensor:
        return self(x) * 2

    def describe(self) -> str:
        return f"net with {sum(p.numel() for p in self.parameters())}"

    def train(self, mode: bool = True) -> Net:
        self.modes.append(mode)
        super().train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"extra": 1, **super().state_dict(*args, **kwargs)}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def model(net: Net) -> Any:
    return Engine(accelerator="cpu").setup(net)


# ---- the module ------------------------------------------------------------------------------------------------------


def test_names_and_objects_are_the_originals(model: Any, net: Net) -> None:
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert all(a is b for a, b in zip(model.parameters(), net.parameters(), strict=True))
    assert dict(model.named_buffers()).keys() == {"count", "scratch"}
    assert [name for name, _ in model.named_children()] == ["layer"]
    assert set(model.state_dict()) == set(net.state_dict()) == {"extra", "layer.weight", "layer.bias", "count"}
    assert model.module is net
    assert isinstance(model, nn.Module)
    assert "layer" in repr(model)
    assert "describe" in dir(model)


def test_attributes_pass_through_both_ways(model: Any, net: Net) -> None:
    assert model.note == "hello"
    assert model.describe() == "net with 6"
    model.note = "bye"
    model.other = 3
    model.added = nn.Linear(1, 1)
    assert (net.note, net.other) == ("bye", 3)
    assert "added.weight" in dict(net.named_parameters())
    del model.other
    assert not hasattr(net, "other")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing


def test_it_says_where_and_what_its_parameters_are(model: Any, net: Net) -> None:
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    net.device = "its own"  # type: ignore[assignment]
    assert model.double().device == "its own"
    assert model.dtype is torch.float64
    assert Engine(accelerator="cpu").setup(nn.ReLU()).dtype is torch.float32


def test_modes_conversions_and_loading_reach_the_original(model: Any, net: Net) -> None:
    assert model.eval() is model
    assert (model.training, net.training, net.layer.training, net.modes) == (False, False, False, [False])
    assert model.train().training is net.training is True
    model.double()
    assert net.layer.weight.dtype is torch.float64
    model.apply(lambda module: setattr(module, "seen", True))
    assert net.seen is net.layer.seen is True  # type: ignore[union-attr]
    assert model.load_state_dict({"count": torch.ones(())}, strict=False).missing_keys == ["layer.weight", "layer.bias"]
    assert float(net.count) == 1
    model.requires_grad_(False)
    assert not net.layer.weight.requires_grad


def test_the_module_behaves_in_other_modules_copies_and_pickles(model: Any, net: Net) -> None:
    outer = nn.Sequential(model)
    assert {"0.layer.weight", "0.layer.bias", "0.count"} == set(outer.state_dict())
    x = torch.ones(1, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), net(x))
        with torch.no_grad():
            next(twin.parameters()).add_(1)
        assert not torch.equal(twin(x), net(x))
        assert torch.equal(twin(x), twin.module(x))
    doubled = {name: value * 2 for name, value in net.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, doubled, (x,)), net(x) * 2)


def test_hooks_on_the_wrapper_run_once(model: Any) -> None:
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("wrapper"))
    model.module.register_forward_hook(lambda *_: calls.append("module"))
    model(torch.ones(1, 2))
    assert calls == ["module", "wrapper"]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch 2.9 reads it
def test_a_compiled_module_and_compiling_the_wrapper(net: Net) -> None:
    x = torch.ones(1, 2)
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    expected = engine.setup(copy.deepcopy(net))(x)
    assert torch.equal(torch.compile(engine.setup(net), backend="eager")(x), expected)
    model = engine.setup(torch.compile(net, backend="eager"))
    assert torch.equal(model(x), expected)
    assert model.module is net  # compiled in place
    other = Engine(accelerator="cpu")
    for made in (other.setup, other.setup_module):
        again = made(torch.compile(copy.deepcopy(net), backend="eager"), _reapply_compile=False)
        assert not any("_orig_mod" in name for name in again.state_dict())
    assert not [name for name in model.state_dict() if "_orig_mod" in name]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_marked_method_runs_in_the_precision(net: Net, by_name: bool) -> None:
    model = Engine(accelerator="cpu", precision="64-true").setup(net)
    with pytest.raises(RuntimeError, match="dtype"), pytest.warns(UserWarning, match="mark_forward_method"):
        model.encode(torch.ones(1, 2))
    model.mark_forward_method("encode" if by_name else net.encode)
    assert model.encode(torch.ones(1, 2)).dtype is torch.float32  # in and out again


class Wrapped(nn.Module):
    """As a strategy wraps a module: it must see every forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += 1
        return self.inner(*args, **kwargs)


class Wrapping(SingleDeviceStrategy):
    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        return Wrapped(super().setup_module(module, move_to_device))


def test_t42_a_marked_method_goes_through_the_strategy_once(net: Net) -> None:
    model = Engine(accelerator="cpu", strategy=Wrapping()).setup(net)
    wrapped = model._forward_module
    with torch.no_grad():
        expected = net.encode(torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match=r'past the strategy.*mark_forward_method\("encode"\)'):
        model.encode(torch.ones(1, 2))
    assert model.describe() == "net with 6"  # runs no layer
    model.mark_forward_method("encode")
    assert torch.equal(model.encode(torch.ones(1, 2)), expected)
    assert wrapped.passes == 1
    with pytest.raises(RuntimeError, match="shapes"):
        model.encode(torch.ones(1, 3))
    model(torch.ones(1, 2))
    assert wrapped.passes == 3
    assert "forward" not in vars(net)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [True, False])
def test_a_marked_method_finds_the_parameters_that_fsdp_gathers(marks: bool) -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(3, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x))

        def training_step(self, x: Tensor) -> Tensor:
            return self.out(self.table(x)) + self(x)

        def encode(self, x: Tensor) -> Tensor:
            return self.table(x)

    torch.manual_seed(0)
    net = Stepping()
    index = torch.tensor([0, 2])
    step, code = net.training_step(index).detach(), net.encode(index).detach()
    engine = Engine(accelerator="cpu", devices=1, strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}))
    engine.launch()
    model = engine.setup(net)
    if marks:
        torch.testing.assert_close(model.training_step(index), step)  # a LightningModule's, marked by itself
        model.mark_forward_method("encode")
        torch.testing.assert_close(model.encode(index), code)
        engine.backward(model.encode(index).sum())
    else:  # the control: nothing is gathered
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            model.encode(index)
    engine.teardown()


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("on_wrapped", [False, True])
def test_a_scheduler_may_be_built_on_either_optimizer(net: Net, precision: Any, on_wrapped: bool) -> None:
    engine = Engine(accelerator="cpu", precision=precision)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.layer.bias.detach().clone()
    model, optimizer = engine.setup(net, plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if on_wrapped else plain, 1, gamma=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        engine.backward(model(torch.ones(1, 2)).sum() / 100)
        optimizer.step()
        scheduler.step()  # warns, and fails the test, if it has not seen the optimizer step
    assert plain.param_groups[0]["lr"] == pytest.approx(0.001)
    torch.testing.assert_close(net.layer.bias, before - 0.001 - 0.0001)


def test_what_the_optimizer_is_and_has_passes_through(net: Net) -> None:
    plain = torch.optim.Adam(net.parameters())
    optimizer = Engine(accelerator="cpu").setup_optimizers(plain)
    assert isinstance(optimizer, torch.optim.Adam)
    optimizer.note = 1
    assert plain.note == 1
    assert optimizer.state_dict() == plain.state_dict()
    assert "Adam" in repr(optimizer)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.001


def test_optimizers_follow_parameters_that_moving_makes_anew(net: Net) -> None:
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    plain.step()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model, optimizer = Engine(accelerator="cpu", precision="64-true").setup(net, plain)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(plain.param_groups[0]["params"], model.parameters(), strict=True))
    assert set(plain.state) == set(net.parameters())
    before = net.layer.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(net.layer.weight, before)


# ---- the loader ------------------------------------------------------------------------------------------------------


def test_t4_samplers_are_told_the_epoch() -> None:
    data = TensorDataset(torch.arange(8))
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = Engine(accelerator="cpu").setup_dataloaders(DataLoader(data, batch_size=4, sampler=sampler))
    assert len(loader) == 2
    orders = [torch.cat([x for (x,) in loader]).tolist() for _ in range(3)]
    assert sampler.epoch == 2
    assert sorted(orders[0]) == list(range(8))
    assert orders[0] != orders[1] != orders[2]
    assert loader.batch_size == 4
    assert loader.dataset is data
    assert "DataLoader" in repr(loader)


def test_anything_that_can_be_iterated_is_a_loader() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": torch.ones(1)}])

    one, other = Engine(accelerator="cpu").setup_dataloaders(Endless(), [1, 2])
    assert [batch["x"].item() for batch in one] == [1.0]
    assert list(other) == [1, 2]
    with pytest.raises(TypeError, match="len"):
        len(one)


def test_t47_workers_are_seeded_after_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    loader = DataLoader(TensorDataset(torch.arange(8)), num_workers=1)
    Engine(accelerator="cpu").setup_dataloaders(loader)
    assert loader.worker_init_fn is None
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    assert Engine.seed_everything(3) == 3
    Engine(accelerator="cpu").setup_dataloaders(loader)
    assert loader.worker_init_fn is not None


def test_compiling_in_place_and_a_loaders_epoch_in_a_checkpoint(model: Any) -> None:
    expected = model(torch.ones(1, 2))
    model.compile(backend="eager")
    assert torch.equal(model(torch.ones(1, 2)), expected)
    sampler: Any = DistributedSampler(TensorDataset(torch.arange(8)), num_replicas=1, rank=0)
    engine = Engine(accelerator="cpu")
    loader = engine.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), sampler=sampler))
    orders = [[int(x) for (x,) in loader] for _ in range(3)]
    fresh = engine.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), sampler=sampler))
    fresh.load_state_dict({"passes": 2, "loader": None})
    assert [int(x) for (x,) in fresh] == orders[2] != orders[0]
    assert fresh.state_dict() == {"passes": 3, "loader": None}


@pytest.mark.parametrize("state", [{}, {"passes": "x", "loader": None}, {"passes": -1, "loader": None}])
def test_a_loaders_state_of_another_form_is_refused(state: Any) -> None:
    loader = Engine(accelerator="cpu").setup_dataloaders(DataLoader(TensorDataset(torch.arange(8))))
    with pytest.raises(WrongForm, match=r"\['passes'\]"):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"passes": 0, "loader": None}


def test_what_cannot_run_as_forward_is_not_marked(net: Net) -> None:
    net.stream = lambda: None  # type: ignore[assignment]
    model = Engine(accelerator="cpu", precision="bf16-mixed").setup(net)
    with pytest.raises(ConfigurationError, match="cannot run as forward does"):
        model.mark_forward_method("layer")
    net.ask = lambda: torch.is_autocast_enabled("cpu")  # type: ignore[assignment]
    assert not model.ask()
    model.mark_forward_method("ask")
    assert model.ask()


def test_calling_the_original_past_a_precision_is_warned_of_once(net: Net) -> None:
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    engine.setup(net)
    with pytest.warns(UserWarning, match=r"The Net was called itself.*engine\.setup"):
        net(torch.ones(1, 2))
    net(torch.ones(1, 2))
    assert not net._forward_pre_hooks


def test_where_nothing_is_lost_nothing_is_said(net: Net) -> None:
    plain = copy.deepcopy(net)
    Engine(accelerator="cpu").setup(plain)
    plain(torch.ones(1, 2))  # the wrapper would have added nothing
    model = Engine(accelerator="cpu", precision="bf16-mixed").setup(net)
    with torch.no_grad():
        net(torch.ones(1, 2))
    model(torch.ones(1, 2))
    net(torch.ones(1, 2))  # some programs do this on purpose, after they have shown that they know the wrapper
    assert not net._forward_pre_hooks
    assert not model._forward_pre_hooks


def test_a_copy_of_a_module_that_was_set_up_is_looked_at_no_more(net: Net) -> None:
    Engine(accelerator="cpu", precision="bf16-mixed").setup(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(torch.ones(1, 2))


class Restarting:
    """A loader that is its own iterator and begins again with each ``iter``."""

    def __iter__(self) -> Restarting:
        self.left = [torch.tensor([number]) for number in (3, 2, 1)]
        return self

    def __next__(self) -> Tensor:
        if not self.left:
            raise StopIteration
        return self.left.pop()


def test_a_loader_that_is_its_own_iterator_is_started_once_a_pass() -> None:
    loader: Any = Engine(accelerator="cpu").setup_dataloaders(Restarting())
    assert [[batch.item() for batch in loader] for _ in range(2)] == [[1, 2, 3], [1, 2, 3]]
