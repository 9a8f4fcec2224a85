"""A loop of one's own on the Engine: nothing is added, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule
from drivetrain.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from drivetrain.checkpoints import TorchCheckpointIO, writer
from drivetrain.errors import ConfigurationError, UnknownArgumentError, UnknownNameError
from drivetrain.loggers import DummyLogger
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.precision import MixedPrecision, Precision
from drivetrain.strategies import SingleDeviceStrategy, StrategyRegistry
from drivetrain.testing import FakeAccelerator


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def make_loader(data: TensorDataset) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(data, batch_size=8, shuffle=True)


def bare_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[Tensor]:
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
    return losses


def engine_loop(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> list[Tensor]:
    model, optimizer = engine.setup(model, optimizer)
    loader = engine.setup_dataloaders(loader)
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            engine.backward(loss)
            engine.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.detach())
    engine.teardown()
    return losses


def test_a_loop_on_the_engine_is_the_bare_loop_bit_for_bit(data: TensorDataset) -> None:
    bare, ours = net(), net()
    expected = bare_loop(bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9), make_loader(data))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    losses = engine_loop(Engine(accelerator="cpu"), ours, optimizer, make_loader(data))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), bare.parameters(), strict=True))
    assert len({float(loss) for loss in losses}) == len(losses)  # it did train


def test_bf16_mixed_is_autocast_and_keeps_parameters_in_32_bits(data: TensorDataset) -> None:
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    model = engine.setup(net())
    x, _ = data[:8]
    assert not torch.is_autocast_enabled("cpu")
    with engine.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        assert model.module[0](x).dtype is torch.bfloat16  # a layer by itself
    assert not torch.is_autocast_enabled("cpu")
    assert model(x).dtype is torch.float32  # the model casts what it hands out
    assert not torch.equal(model.eval()(x), model.module(x))
    torch.testing.assert_close(model(x), model.module(x), rtol=0.1, atol=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_32_true_needs_no_context() -> None:
    engine = Engine(accelerator="cpu")
    assert engine.forward_context() is None
    with engine.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_the_context_can_be_entered_again_and_again() -> None:
    context = Engine(accelerator="cpu", precision="bf16-mixed").forward_context()
    assert context is not None
    for _ in range(3):
        with context:
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("how", "expected", "norm"),
    [
        ({"max_norm": 1.0}, [0.6, 0.8], 5.0),
        ({"max_norm": 10.0}, [3.0, 4.0], 5.0),
        ({"max_norm": 2.0, "norm_type": float("inf")}, [1.5, 2.0], 4.0),
        ({"clip_val": 3.5}, [3.0, 3.5], None),
        ({"max_norm": 0.0}, [3.0, 4.0], None),
    ],
)
def test_clip_gradients(how: dict[str, float], expected: list[float], norm: float | None) -> None:
    engine = Engine(accelerator="cpu")
    parameter, unused, other = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    parameter.grad, other.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    optimizer = torch.optim.SGD([{"params": [parameter]}, {"params": [unused]}], lr=0.1)
    found = engine.clip_gradients(net(), optimizer, **how)
    torch.testing.assert_close(parameter.grad, torch.tensor(expected))
    assert other.grad.tolist() == [30.0, 40.0]  # not this optimizer's
    assert unused.grad is None
    assert found == norm if norm is None else float(found) == pytest.approx(norm)


def test_clipping_a_norm_that_is_no_number_is_an_error_unless_the_scaler_skips_the_step() -> None:
    for precision, strict in (("32-true", True), ("16-mixed", False)):
        engine = Engine(accelerator="cpu", precision=precision)
        model = nn.Linear(2, 1)
        model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.weight.clone()
        engine.backward(model(torch.full((1, 2), 1e30)).sum() * float("inf"))
        if strict:
            with pytest.raises(RuntimeError, match="non-finite"):
                engine.clip_gradients(model, optimizer, max_norm=1.0)
        else:
            engine.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            assert torch.equal(model.weight, before)  # skipped


@pytest.mark.parametrize(("how", "said"), [({}, "neither"), ({"clip_val": 1.0, "max_norm": 2.0}, "clip_val=1.0 and")])
def test_clipping_needs_one_way(how: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{said}.*Give one of them"):
        Engine(accelerator="cpu").clip_gradients(net(), torch.optim.SGD(net().parameters()), **how)


def test_a_model_and_an_optimizer_that_are_swapped_are_said() -> None:
    model = net()
    engine, optimizer = Engine(accelerator="cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"got a module as the optimizer\. Write \(model, optimizer\)"):
        engine.clip_gradients(optimizer, model, max_norm=1.0)  # type: ignore[arg-type]
    model, optimizer = engine.setup(model, optimizer)
    with pytest.raises(ConfigurationError, match=r"got a module as the optimizer\. Write \(model, optimizer\)"):
        engine.clip_gradients(optimizer, model, max_norm=1.0)  # type: ignore[arg-type]


class MetaAccelerator(Accelerator):
    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("meta") for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"accelerator": MetaAccelerator()},
        {"strategy": SingleDeviceStrategy(accelerator=MetaAccelerator())},
    ],
    ids=["accelerator", "both"],
)
def test_everything_goes_to_the_root_device(arguments: dict[str, Any]) -> None:
    engine = Engine(**arguments)
    assert engine.device == torch.device("meta")
    batch = {"x": [torch.ones(2)], "name": "text"}
    moved = engine.to_device(batch)
    assert moved["x"][0].device == engine.device
    assert moved["name"] == "text"
    model = net()
    assert engine.setup(model).module is model
    assert {p.device for p in model.parameters()} == {engine.device}


class MovesInPlace:
    """A batch that moves itself and returns nothing."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


def test_a_batch_that_moves_itself_in_place_stays_itself() -> None:
    engine = Engine(accelerator=MetaAccelerator())
    batch = MovesInPlace()
    assert engine.to_device(batch) is batch
    assert batch.x.device == engine.device
    batches = [MovesInPlace() for _ in range(3)]
    assert list(engine.setup_dataloaders(batches)) == batches
    assert {batch.x.device for batch in batches} == {engine.device}


def test_to_device_hands_back_what_is_there_already() -> None:
    batch = [torch.ones(2), torch.ones(1)]
    assert Engine(accelerator="cpu").to_device(batch) is batch


class Recording(Precision):
    name = "recording"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.calls.append("convert")
        return module.double()

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        self.calls.append(f"context {device_type}")
        return None

    def clip_gradients(self, optimizer: Any, clip_val: float, algorithm: Any = "norm", *args: Any) -> None:
        self.calls.append(f"clip {clip_val} {algorithm}")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"backward {sorted(kwargs)}")
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize("strategy", ["auto", "instance"])
def test_a_precision_of_ones_own_does_the_work(strategy: str) -> None:
    plugin = Recording()
    own = SingleDeviceStrategy() if strategy == "instance" else "auto"
    engine = Engine(accelerator="cpu", strategy=own, plugins=[plugin])
    assert engine.precision is plugin
    model = engine.setup(nn.Linear(2, 1))
    assert model.weight.dtype is torch.float64
    with engine.autocast():
        loss = model(torch.ones(1, 2, dtype=torch.float64)).sum()
    engine.backward(loss, retain_graph=True)
    engine.clip_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_val=2.0)
    assert plugin.calls == ["convert", "context cpu", "context cpu", "backward ['retain_graph']", "clip 2.0 value"]
    assert model.weight.grad is not None


def test_a_plan_is_taken_as_it_is() -> None:
    plan = Engine(accelerator="cpu", precision="bf16-mixed").plan
    engine = Engine(plan=plan, precision="32-true")
    assert engine.plan is plan
    assert isinstance(engine.precision, MixedPrecision)


def test_setup_returns_as_much_as_it_was_given() -> None:
    engine, model = Engine(accelerator="cpu"), net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
    assert engine.setup(net()).module is not model
    wrapped, one, two, same = engine.setup(model, first, second, scheduler=scheduler)
    assert (wrapped.module, one.optimizer, two.optimizer, same) == (model, first, second, scheduler)
    assert engine.strategy.optimizers == [first, second]
    assert isinstance(one, torch.optim.SGD)
    assert [id(p) for p in one.param_groups[0]["params"]] == [id(p) for p in wrapped.parameters()]
    assert len(engine.setup(net(), scheduler=scheduler)) == 2


def test_a_module_may_stay_where_it_is() -> None:
    engine = Engine(accelerator=MetaAccelerator())
    assert next(engine.setup(net(), move_to_device=False).parameters()).device.type == "cpu"
    assert next(engine.setup_module(net()).parameters()).device.type == "meta"
    (batch,) = engine.setup_dataloaders([torch.ones(1)], move_to_device=False)
    assert batch.device.type == "cpu"
    (batch,) = engine.setup_dataloaders([torch.ones(1)])
    assert batch.device.type == "meta"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e, m, o: e.setup(e.setup(m)), "set up already"),
        (lambda e, m, o: e.setup(m, e.setup_optimizers(o)), "set up already"),
        (lambda e, m, o: e.setup(m, o, o), "set up already"),
        (lambda e, m, o: e.setup_dataloaders(e.setup_dataloaders([1])), "set up already"),
        (lambda e, m, o: e.setup(o, m), "as the module. Pass an nn.Module first"),
        (lambda e, m, o: e.setup(m, m), "where an optimizer belongs"),
        (lambda e, m, o: e.setup_dataloaders(3), "Pass a DataLoader"),
        (lambda e, m, o: e.setup_dataloaders([DataLoader([1]), DataLoader([2])]), "Pass each loader as an argument"),
        (lambda e, m, o: e.setup_dataloaders(), "Pass one"),
        (lambda e, m, o: e.setup_optimizers(), "Pass one"),
        (lambda e, m, o: e.launch(lambda: 1), "engine as its first argument"),
        (lambda e, m, o: e.launch("main"), "engine as its first argument"),
        (lambda e, m, o: e.no_backward_sync(m).__enter__(), "Pass what Engine.setup returned"),
        (lambda e, m, o: e.logger, "has no logger"),
        (lambda e, m, o: e.setup(m).mark_forward_method("forwards"), "Did you mean 'forward'"),
        (lambda e, m, o: e.setup(m).mark_forward_method("forward"), "marked already"),
    ],
)
def test_what_is_wrong_is_said(call: Any, said: str) -> None:
    model = net()
    with pytest.raises(ConfigurationError, match=said):
        call(Engine(accelerator="cpu"), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_unknown_argument_is_answered_with_a_likely_one() -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean 'precision'"):
        Engine(precison="bf16-mixed")  # type: ignore[call-arg]


# ---- start -----------------------------------------------------------------------------------------------------------


def test_launch_runs_a_function_with_the_engine() -> None:
    engine = Engine(accelerator="cpu")
    assert engine.launch() is None
    assert engine.launch(lambda e, a, b: (e, a + b), 1, b=2) == (engine, 3)


class Program(Engine):
    def run(self, steps: int) -> tuple[bool, int]:  # type: ignore[override]
        return self._launched, steps


class Derived(Program):
    def run(self, steps: int) -> tuple[bool, int]:  # type: ignore[override]
        return super().run(steps + 1)


def test_a_subclass_may_hold_the_program_in_run() -> None:
    assert Program(accelerator="cpu").run(3) == (True, 3)
    assert Derived(accelerator="cpu").run(steps=3) == (True, 4)
    with pytest.raises(NotImplementedError, match="launch"):
        Engine(accelerator="cpu").run()


def test_the_device_is_made_current_once() -> None:
    calls: list[str] = []

    class Counting(SingleDeviceStrategy):
        def setup_environment(self) -> None:
            calls.append("environment")
            super().setup_environment()

    engine = Engine(accelerator="cpu", strategy=Counting())
    engine.setup(net())
    engine.launch()
    engine.setup(net())
    assert calls == ["environment"]


def test_arguments_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_RUN_PRECISION", "bf16-mixed")
    monkeypatch.setenv("DRIVETRAIN_RUN_DEVICES", "1")
    assert Engine(accelerator="cpu").precision.name == "bf16-mixed"
    assert Engine(accelerator="cpu", precision="bf16-mixed", devices=1).precision.name == "bf16-mixed"
    with pytest.raises(ConfigurationError, match="--precision=bf16-mixed. Leave it out of one"):
        Engine(accelerator="cpu", precision="64-true")


@pytest.mark.parametrize("data", [torch.ones(2), 3, {}, "text"])
def test_an_unknown_operation_is_an_error_with_one_process_too(data: Any) -> None:
    engine = Engine(accelerator="cpu")
    for reduce in (engine.all_reduce, engine.strategy.reduce):
        with pytest.raises(UnknownNameError, match="reduce_op='averge'.*: unknown. "):
            reduce(data, reduce_op="averge")


def test_facts_of_one_process() -> None:
    engine = Engine(accelerator="cpu")
    assert (engine.world_size, engine.global_rank, engine.local_rank, engine.node_rank) == (1, 0, 0, 0)
    assert engine.is_global_zero
    data = {"a": torch.arange(3), "b": [torch.ones(()), "text"]}
    assert engine.all_gather(data)["a"].shape == (3,)
    assert engine.all_reduce(data)["b"][1] == "text"
    assert engine.all_gather(data["a"]) is data["a"]  # a tensor is what it is; a number is what it would be on several
    numbers = engine.all_reduce({"i": 3, "f": 0.1, "b": True})
    assert {name: (number.dtype, number.item()) for name, number in numbers.items()} == {
        "i": (torch.float64, 3.0), "f": (torch.float64, 0.1), "b": (torch.float64, 1.0)
    }  # fmt: skip
    assert engine.all_gather((3, None))[0].dtype is torch.int64
    assert engine.all_gather((3, None))[1] is None
    assert engine.broadcast("x") == "x"
    with engine.rank_zero_first(), engine.sharded_model():
        engine.barrier("here")


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["64-true", "16-true", "bf16-true"])
def test_true_precisions_convert_what_goes_in_and_comes_out(precision: Any) -> None:
    engine = Engine(accelerator="cpu", precision=precision)
    seen: list[torch.dtype] = []

    class Net(nn.Linear):
        def forward(self, input: Tensor, *, scale: Tensor) -> Any:  # type: ignore[override]
            seen.extend([input.dtype, scale.dtype, torch.ones(1).dtype])
            return {"out": super().forward(input), "index": torch.arange(2)}

    model = engine.setup(Net(2, 1))
    kept = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]
    out = model(torch.ones(1, 2), scale=torch.ones(1))
    assert seen == [kept] * 3
    assert model.weight.dtype is kept
    assert (out["out"].dtype, out["index"].dtype) == (torch.float32, torch.int64)
    assert torch.get_default_dtype() is torch.float32
    with engine.init_tensor():
        assert torch.ones(1).dtype is kept
    with engine.init_module():
        assert nn.Linear(1, 1).weight.dtype is kept


def fp16_by_hand(losses: int) -> list[Tensor]:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    for index in range(losses):
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            out = second(first(torch.full((2, 4), 1.0 + index)))
        loss = out.float().square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return [*first.parameters(), *second.parameters(), torch.tensor(scaler.get_scale())]


def test_16_mixed_goes_through_wrapped_optimizers_as_by_hand() -> None:
    torch.manual_seed(0)
    plugin = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2))
    engine = Engine(accelerator="cpu", plugins=[plugin])
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, second)]
    one, first_optimizer = engine.setup(first, optimizers[0])
    two, second_optimizer = engine.setup(second, optimizers[1])
    for index in range(8):
        loss = two(one(torch.full((2, 4), 1.0 + index))).square().mean()
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        engine.backward(loss)
        first_optimizer.step()
        second_optimizer.step()
    assert plugin.scaler is not None
    ours = [*first.parameters(), *second.parameters(), torch.tensor(plugin.scaler.get_scale())]
    expected = fp16_by_hand(8)
    assert float(expected[-1]) != 2.0**24  # some steps overflowed
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_overflows_leaves_a_fused_optimizer_as_it_was(fused: bool) -> None:
    """Its kernel would make momentum buffers without values, and the next step would take them for momentum."""
    torch.manual_seed(0)
    plugin = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    engine, model = Engine(accelerator="cpu", plugins=[plugin]), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    wrapped, handle = engine.setup(model, optimizer)
    for factor in (float("inf"), 0.0):
        handle.zero_grad()
        engine.backward(wrapped(torch.ones(2, 4)).sum() * factor)
        handle.step()
        assert bool(optimizer.state) is (factor == 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_needs_its_closure_and_a_scaled_loss_do_not_go_together() -> None:
    model = net()
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the loss several times"):
        Engine(accelerator="cpu", precision="16-mixed").setup(model, torch.optim.LBFGS(model.parameters()))
    model, optimizer = Engine(accelerator="cpu").setup(model, torch.optim.LBFGS(model.parameters()))
    first = optimizer.step(lambda: closure(model, optimizer))
    assert optimizer.step(lambda: closure(model, optimizer)).item() < first.item()


def closure(model: nn.Module, optimizer: Any) -> Tensor:
    torch.manual_seed(3)
    optimizer.zero_grad()
    loss = F.mse_loss(model.eval()(torch.ones(4, 4)), torch.zeros(4, 1))
    loss.backward()
    return loss


def test_a_closure_runs_before_a_scaled_step() -> None:
    model = nn.Linear(2, 1)
    plugin = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    engine = Engine(accelerator="cpu", plugins=[plugin])
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def evaluate() -> Tensor:
        loss = model(torch.ones(1, 2)).sum()
        engine.backward(loss)
        return loss

    before, expected = model.weight.detach().clone(), model(torch.ones(1, 2)).item()
    assert optimizer.step(evaluate).item() == expected
    torch.testing.assert_close(model.weight, before - 0.1)


# ---- saying things ---------------------------------------------------------------------------------------------------


def test_callbacks_are_called_by_name() -> None:
    class Callback:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_thing(self, a: int, b: int) -> None:
            self.calls.append((a, b))

    one, other = Callback(), object()
    engine = Engine(accelerator="cpu", callbacks=[one, other])
    engine.call("on_thing", 1, b=2)
    engine.call("on_nothing")
    assert one.calls == [(1, 2)]
    assert Engine(accelerator="cpu", callbacks=one).callbacks == [one]


def test_logging_reaches_every_logger_as_plain_numbers() -> None:
    class Lines(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.lines.append((dict(metrics), step))

    first, second = Lines(), Lines()
    engine = Engine(accelerator="cpu", loggers=[first, second])
    engine.log("loss", torch.tensor(1.5), step=3)
    engine.log_dict({"a": 1, "b": 2.0})
    assert first.lines == second.lines == [({"loss": 1.5}, 3), ({"a": 1, "b": 2.0}, None)]
    assert engine.logger is first


def test_print_is_for_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(accelerator="cpu")
    engine.print("one")
    engine.strategy.global_rank = 1
    engine.print("two")
    assert capsys.readouterr().out == "one\n"


def test_a_lightning_module_logs_and_steps_through_the_engine() -> None:
    class Lines(DummyLogger):
        lines: list[Any]

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.lines.append(dict(metrics))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            self.log("both", {"a": 1.0, "b": torch.tensor(2.0)})
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return torch.tensor(float(torch.is_autocast_enabled("cpu")))

    logger = Lines()
    logger.lines = []
    engine = Engine(accelerator="cpu", precision="bf16-mixed", loggers=logger)
    module = Module()
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = module.layer.weight.clone()
    assert model.training_step(torch.ones(1, 2), 0) == 1.0  # a step is a way in, like forward
    assert logger.lines[0]["loss"] != 0
    assert logger.lines[1] == {"both/a": 1.0, "both/b": 2.0}
    assert not torch.equal(before, module.layer.weight)
    assert module.fabric is engine
    assert (module.optimizers(), module.loggers, module.logger) == (optimizer, [logger], logger)


def test_teardown_brings_back_everything_that_was_set_up() -> None:
    with FakeAccelerator.recording():
        engine = Engine(accelerator="fake", devices=1)
        module = nn.Linear(2, 1)
        model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        engine.backward(model(engine.to_device(torch.ones(1, 2))).sum())
        optimizer.step()
        engine.teardown()
        module(torch.ones(1, 2)).sum().backward()  # on the host, as its optimizer's state is
        optimizer.step()


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-mixed", "bf16-true"])
def test_a_precision_that_the_hardware_does_not_claim_is_refused(precision: Any) -> None:
    class Old(CPUAccelerator):
        supports_float16 = supports_bfloat16 = False

    with pytest.raises(ConfigurationError, match=f"precision='{precision}'.*has no b?float16. Write"):
        Engine(accelerator=Old(), precision=precision)


def test_the_same_strategy_may_serve_engines_with_an_accelerator_by_name() -> None:
    strategy = SingleDeviceStrategy()
    for _ in range(2):
        assert Engine(accelerator="cpu", strategy=strategy).accelerator.name == "cpu"
    why = "(this build|torch.cuda sees no device)"  # the wheels of torch for the CPU, and the others
    with pytest.raises(ConfigurationError, match=f"carries a CUDAAccelerator, which is not available here: {why}"):
        Engine(strategy=SingleDeviceStrategy(accelerator=CUDAAccelerator()))


def test_what_a_model_of_transformers_hands_out_survives_a_precision() -> None:
    class ModelOutput(dict[str, Tensor]):
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise TypeError("You cannot use update")

    class Net(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return ModelOutput(logits=super().forward(input))

    out = Engine(accelerator="cpu", precision="bf16-mixed").setup(Net(2, 1))(torch.ones(1, 2))
    assert type(out) is ModelOutput
    assert out["logits"].dtype is torch.float32


def test_a_strategy_of_ones_own_by_name_is_built_with_what_it_was_registered_with() -> None:
    class Named(SingleDeviceStrategy):
        def __init__(self, more: int) -> None:
            super().__init__()
            self.more = more

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            strategy_registry.register("named_by_a_test", cls, more=3)

    try:
        engine = Engine(accelerator="cpu", strategy="named_by_a_test", precision="64-true")
        assert isinstance(engine.strategy, Named)
        assert (engine.strategy.more, engine.precision.name) == (3, "64-true")
    finally:
        StrategyRegistry.remove("named_by_a_test")


def test_an_optimizer_of_another_model_is_warned_of() -> None:
    other = torch.optim.SGD(net().parameters(), 0.1)
    with pytest.warns(UserWarning, match="SGD that has no parameter of the Sequential it is set up with"):
        Engine(accelerator="cpu").setup(net(), other)


def test_an_optimizer_of_two_models_is_not_warned_of() -> None:
    first, second = net(), net()
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    Engine(accelerator="cpu").setup(first, both)


def test_callbacks_hear_of_each_optimizer_step() -> None:
    class Listener:
        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            heard.append((strategy, optimizer))

    heard: list[Any] = []
    engine = Engine(accelerator="cpu", callbacks=Listener())
    net = nn.Linear(1, 1)
    model, optimizer = engine.setup(net, plain := torch.optim.SGD(net.parameters(), lr=0.1))
    for steps in (1, 2):
        engine.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        assert heard == steps * [(engine.strategy, plain)]


def test_a_hook_takes_the_engine_under_the_name_that_it_has() -> None:
    class OfFabric:
        def on_after_setup(self, fabric: Any, module: Any) -> None:
            heard.append(fabric)

    class Own:
        def on_after_setup(self, engine: Any) -> None:
            heard.append(engine)

    heard: list[Any] = []
    engine = Engine(accelerator="cpu", callbacks=[OfFabric(), Own()])
    engine.setup(nn.Linear(1, 1))
    assert heard == [engine, engine]


def test_the_process_that_writes_in_the_background_starts_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(writer, "_PROGRAM", ["-c", "raise SystemExit(3)"])
    engine = Engine(accelerator="cpu", plugins=AsyncCheckpointIO())
    model = engine.setup(nn.Linear(2, 1))
    assert caplog.text.count("does not work: it has ended with the exit code 3") == 1
    engine.save(tmp_path / "a.ckpt", {"model": model})
    engine.teardown()
    assert caplog.text.count("does not work") == 1
    assert "model" in TorchCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
