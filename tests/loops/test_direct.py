"""Direct calls of torch's functions: the same numbers as the public calls, and public calls where they could differ."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.base.rank_zero import log
from drivetrain.callbacks import OnExceptionCheckpoint, ReplayCheck
from drivetrain.loops import direct
from drivetrain.loops.progress import Progress
from drivetrain.loops.run import KeptStates
from drivetrain.precision import Precision
from drivetrain.strategies import SingleDeviceStrategy

ALL = {"zero_grad", "backward", "step"}
PUBLIC, DIRECT = "public calls", "direct calls"


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The public calls that were made. It looks behind them: a spy in their place would make all calls public."""
    called: set[str] = set()
    record_function, make_grads = torch.autograd.profiler.record_function, torch.autograd._make_grads  # type: ignore[attr-defined]

    def recorded(name: str, *args: Any) -> Any:
        called.add("zero_grad" if name.startswith("Optimizer.zero_grad") else "step")
        return record_function(name, *args)

    def made(*args: Any, **kwargs: Any) -> Any:
        called.add("backward")
        return make_grads(*args, **kwargs)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", recorded)
    monkeypatch.setattr(torch.autograd, "_make_grads", made)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        direct._of_toy(kind)  # trained before anything is spied on
    called.clear()
    return called


class Module(LightningModule):
    """A module that notes which public calls were made after each batch."""

    def __init__(self, spied: set[str] | None = None, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.extra = nn.Parameter(torch.ones(4))
        self.make = lambda: optimizer([*self.net.parameters()], **{"lr": 0.05, **options})
        self.__dict__["spied"], self.public = spied, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch * self.extra), batch.sum(1, keepdim=True))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.__dict__["spied"] is not None:
            self.public.append(sorted(self.__dict__["spied"]))
            self.__dict__["spied"].clear()

    def configure_optimizers(self) -> Any:
        return self.make()


class Data:
    def __init__(self, count: int = 6) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batches = [torch.randn(5, 4, generator=generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def trainer_of(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def step_of(trainer: Trainer) -> Any:
    return next(each for each in trainer.plan.decisions if each.what == "step")


def fitted(module: Any, *callbacks: Callback, count: int = 6, **arguments: Any) -> Any:
    """What the plan says of the step, after a fit."""
    trainer = trainer_of(callbacks=list(callbacks), **arguments)
    trainer.fit(module, Data(count))
    return step_of(trainer)


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(direct._KINDS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_a_toy_is_trained_alike_with_every_optimizer_of_torchs(kind: Any) -> None:
    assert direct._trains_alike(kind)


def test_no_private_name_is_missing_in_the_torch_that_is_installed() -> None:
    assert direct._names().missing is None


def trained(monkeypatch: pytest.MonkeyPatch, switch: str, make: Callable[[], Any], **arguments: Any) -> list[Tensor]:
    monkeypatch.setenv(direct.SWITCH, switch)
    torch.manual_seed(1)
    module = make()
    decision = fitted(module, **arguments)
    assert decision.choice == (PUBLIC if switch == "0" else DIRECT)
    optimizer = module.optimizers().optimizer
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return [*(each.detach().clone() for each in module.parameters()), *states, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"capturable": False, "centered": True}),
    ],
)
@pytest.mark.parametrize(
    "arguments", [{}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str
)
def test_fits_are_equal_bit_for_bit(monkeypatch: Any, optimizer: Any, options: Any, arguments: Any) -> None:
    ways = [
        trained(monkeypatch, switch, lambda: Module(None, optimizer, **options), **arguments) for switch in ("0", "1")
    ]
    assert all(map(torch.equal, *ways))


def test_one_switch_makes_all_calls_public(monkeypatch: Any, spy: set[str]) -> None:
    monkeypatch.setenv(direct.SWITCH, "0")
    module = Module(spy)
    assert fitted(module).why == f"{direct.SWITCH} is 0"
    assert module.public == [sorted(ALL)] * 6


def test_by_default_no_public_call_is_made(spy: set[str]) -> None:
    module = Module(spy)
    assert fitted(module, gradient_clip_val=1.0, accumulate_grad_batches=2).choice == DIRECT
    assert module.public == [[]] * 6


def test_a_fit_that_saves_on_exceptions_makes_no_public_call(spy: set[str], tmp_path: Path) -> None:
    module = Module(spy)
    assert fitted(module, OnExceptionCheckpoint(tmp_path), enable_checkpointing=True).choice == DIRECT
    assert module.public == [[]] * 6


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_on_the_step_is_called_while_a_fit_saves_on_exceptions(
    spy: set[str], tmp_path: Path, register: str
) -> None:
    seen: list[bool] = []

    class Hooked(Module):
        def on_train_start(self) -> None:
            getattr(self.optimizers(), register)(lambda *_: seen.append(True))

    module = Hooked(spy)
    fitted(module, OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    assert (seen, module.public) == ([True] * 6, [["step"]] * 6)


@pytest.mark.parametrize("called", [1, 4])
def test_an_exception_inside_a_direct_step_is_not_saved(monkeypatch: Any, tmp_path: Path, called: int) -> None:
    home, calls = sys.modules["torch.optim.sgd"], itertools.count(1)
    compute = vars(home)["sgd"]

    def interrupted(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if next(calls) == called:
            params[0].zero_()
            raise RuntimeError("in the middle")
        compute(params, *args, **kwargs)

    direct._of_toy(torch.optim.SGD)
    monkeypatch.setattr(home, "sgd", interrupted)
    saver = OnExceptionCheckpoint(tmp_path)
    with (
        pytest.warns(UserWarning, match="while an optimizer was changing"),
        pytest.raises(RuntimeError, match="middle"),
    ):
        fitted(Module(), saver, enable_checkpointing=True)
    assert not Path(saver.ckpt_path).exists()


def test_the_plan_and_a_line_at_level_debug_say_which_calls(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.DEBUG, log.name):
        trainer = trainer_of()
        trainer.fit(Module(), Data())
    said = [record.getMessage() for record in caplog.records if "zero_grad, backward and step" in record.getMessage()]
    assert said == [
        "A step makes direct calls of zero_grad, backward and step, because no code overrides or watches zero_grad, "
        "backward and step, and a small model, trained with SGD both ways, had equal weights"
    ]
    assert "direct calls" in str(trainer.plan)


# ---- what is checked when a step is bound ----------------------------------------------------------------------------


class Backward(Module):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class OptimizerStep(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)


class ZeroGrad(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class Clipping(Module):
    def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


class ClipGradients(Module):
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().clip_gradients(optimizer, 0.1, "norm")


@pytest.mark.parametrize("cls", [Backward, OptimizerStep, ZeroGrad, Clipping, ClipGradients])
def test_what_a_module_overrides_makes_public_calls(spy: set[str], cls: Any) -> None:
    module = cls(spy)
    decision = fitted(module)
    assert (decision.choice, decision.why.split()[0]) == (PUBLIC, cls.__name__)
    assert module.public == [sorted(ALL)] * 6


class BackwardOfPrecision(Precision):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class AroundBackwardOfPrecision(Precision):
    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return super().pre_backward(tensor, module)


class StepOfPrecision(Precision):
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(optimizer, *args, **kwargs)


class ClippingOfPrecision(Precision):
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().clip_gradients(optimizer, *args, **kwargs)


class NormOfPrecision(Precision):
    def clip_grad_by_norm(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().clip_grad_by_norm(optimizer, *args, **kwargs)


class ValueOfPrecision(Precision):
    def clip_grad_by_value(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().clip_grad_by_value(optimizer, *args, **kwargs)


class BackwardOfStrategy(SingleDeviceStrategy):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(loss, *args, **kwargs)


class AroundBackwardOfStrategy(SingleDeviceStrategy):
    def pre_backward(self, loss: Tensor) -> None:
        pass


class StepOfStrategy(SingleDeviceStrategy):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)


class ZeroGradOfStrategy(SingleDeviceStrategy):
    def zero_grad(self, optimizer: Any) -> None:
        optimizer.zero_grad()


class ClippingOfStrategy(SingleDeviceStrategy):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return super().clip_gradients(*args, **kwargs)


class NormOfStrategy(SingleDeviceStrategy):
    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Any:
        return super().clip_gradients_norm(*args, **kwargs)


class ValueOfStrategy(SingleDeviceStrategy):
    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        super().clip_gradients_value(*args, **kwargs)


class WrapsModel(SingleDeviceStrategy):
    def setup_module(self, module: Any) -> Any:
        return Wrapper(super().setup_module(module))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


PRECISIONS = [
    (BackwardOfPrecision, "backward"), (AroundBackwardOfPrecision, "backward"), (StepOfPrecision, "optimizer_step"),
    (ClippingOfPrecision, "clips"), (NormOfPrecision, "clips"), (ValueOfPrecision, "clips"),
]  # fmt: skip
STRATEGIES = [
    (BackwardOfStrategy, "backward"), (AroundBackwardOfStrategy, "backward"), (StepOfStrategy, "optimizer_step"),
    (ZeroGradOfStrategy, "zero_grad"), (ClippingOfStrategy, "clips"), (NormOfStrategy, "clips"),
    (ValueOfStrategy, "clips"), (WrapsModel, "WrapsModel changes how gradients are computed"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "why"), [*PRECISIONS, *STRATEGIES])
def test_what_a_precision_or_a_strategy_overrides_makes_public_calls(spy: set[str], cls: Any, why: str) -> None:
    part = {"strategy": cls()} if issubclass(cls, SingleDeviceStrategy) else {"plugins": cls()}
    module = Module(spy)
    decision = fitted(module, **part)
    assert decision.choice == PUBLIC
    assert why in decision.why
    assert module.public == [sorted(ALL)] * 6


def test_a_scaled_loss_makes_public_calls() -> None:
    assert fitted(Module(), precision="16-mixed").why == "precision 16-mixed scales the loss"


def run_of(model: Any, is_distributed: bool = True) -> Any:
    strategy = SimpleNamespace(model=model, facts=SimpleNamespace(is_distributed=is_distributed))
    return SimpleNamespace(engine=SimpleNamespace(strategy=strategy), module=model)


def test_a_strategy_that_exchanges_gradients_without_a_wrapper_makes_public_calls() -> None:
    assert direct._of_model(run_of(Module(), is_distributed=False)) == ""
    assert "changes how gradients are computed" in direct._of_model(run_of(Module()))


def test_a_communication_hook_makes_public_calls() -> None:
    wrapped: Any = DistributedDataParallel.__new__(DistributedDataParallel)  # a real one needs several processes
    vars(wrapped)["_comm_hooks"] = []
    assert direct._of_model(run_of(wrapped)) == ""
    vars(wrapped)["_comm_hooks"].append("a hook and its state")
    assert direct._of_model(run_of(wrapped)) == "a communication hook exchanges the gradients"


def test_batches_that_may_be_split_make_public_calls() -> None:
    assert fitted(Module(), split_on_oom=True).why == "split_on_oom may run a batch in parts"


class OwnSGD(torch.optim.SGD):
    pass


def test_an_optimizer_of_the_users_makes_public_calls(spy: set[str]) -> None:
    module = Module(spy, OwnSGD)
    assert fitted(module).why == "OwnSGD is not one of torch's optimizers that step without a closure"
    assert module.public == [sorted(ALL)] * 6


def test_lbfgs_makes_public_calls() -> None:
    assert fitted(Module(None, torch.optim.LBFGS)).why.startswith("LBFGS is not one of torch's optimizers")


def test_a_differentiable_optimizer_makes_public_calls() -> None:
    assert direct._of_optimizer(sgd(differentiable=True)) == "the optimizer is differentiable"


def sgd(**options: Any) -> Any:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, **options)


def replaced_class_step(monkeypatch: Any, optimizer: Any) -> None:
    plain = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: plain(self, closure))


def decorated_class_step(monkeypatch: Any, optimizer: Any) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", torch.inference_mode()(torch.optim.SGD.step))


def wrapped_class_step(monkeypatch: Any, optimizer: Any) -> None:
    plain = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> Any:
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", torch.no_grad()(step))


def mocked_class_step(monkeypatch: Any, optimizer: Any) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", SimpleNamespace())


def replaced_step(monkeypatch: Any, optimizer: Any) -> None:
    optimizer.step = lambda closure=None: type(optimizer).step(optimizer, closure)


def step_of_another(monkeypatch: Any, optimizer: Any) -> None:
    other = sgd()
    torch.optim.lr_scheduler.StepLR(other, 1)
    optimizer.step = other.step


def step_of_a_user_under_a_scheduler(monkeypatch: Any, optimizer: Any) -> None:
    class Own:
        def step(self, closure: Any = None) -> None:
            pass

    optimizer.step = Own().step
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def step_that_claims_to_be_a_schedulers(monkeypatch: Any, optimizer: Any) -> None:
    kept = torch.optim.SGD.step

    def step(closure: Any = None) -> Any:
        return kept(optimizer, closure)

    step._wrapped_by_lr_sched, step.__wrapped__ = True, kept  # type: ignore[attr-defined]
    optimizer.step = step


def step_of_a_user_with_the_code_of_a_scheduler(monkeypatch: Any, optimizer: Any) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    del optimizer.step._wrapped_by_lr_sched


def globals_of_a_user(monkeypatch: Any, optimizer: Any) -> None:
    def step(self: Any, closure: Any = None) -> None:
        pass

    step.__module__ = "torch.optim.sgd"  # as a decorator that copies it
    monkeypatch.setattr(torch.optim.SGD, "step", step)


def step_that_looks_like_a_schedulers(monkeypatch: Any, optimizer: Any) -> None:
    reference, kept = weakref.ref(optimizer), torch.optim.SGD.step

    def step(closure: Any = None) -> Any:
        return kept(reference(), closure)

    step._wrapped_by_lr_sched, step.__wrapped__ = True, kept  # type: ignore[attr-defined]
    optimizer.step = step


def replaced_zero_grad(monkeypatch: Any, optimizer: Any) -> None:
    optimizer.zero_grad = lambda set_to_none=True: None


def replaced_class_zero_grad(monkeypatch: Any, optimizer: Any) -> None:
    monkeypatch.setattr(torch.optim.SGD, "zero_grad", lambda self, set_to_none=True: None)


REPLACED = {
    "step": [
        replaced_class_step, decorated_class_step, wrapped_class_step, mocked_class_step, replaced_step,
        step_of_a_user_with_the_code_of_a_scheduler, globals_of_a_user, step_that_looks_like_a_schedulers,
        step_of_another, step_of_a_user_under_a_scheduler, step_that_claims_to_be_a_schedulers,
        step_of_a_user_with_the_code_of_a_scheduler, globals_of_a_user, step_that_looks_like_a_schedulers,
    ],
    "zero_grad": [replaced_zero_grad, replaced_class_zero_grad],
}  # fmt: skip


@pytest.mark.parametrize(("name", "replace"), [(name, each) for name, those in REPLACED.items() for each in those])
def test_what_was_replaced_before_the_step_is_bound_is_seen(monkeypatch: Any, name: str, replace: Any) -> None:
    optimizer = sgd()
    assert direct._of_optimizer(optimizer) == ""
    replace(monkeypatch, optimizer)
    assert direct._of_optimizer(optimizer) == f"SGD.{name} was replaced"


def test_the_step_that_a_scheduler_wraps_is_called_directly() -> None:
    optimizer = sgd()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert direct._of_optimizer(optimizer) == ""


def test_a_missing_name_makes_public_calls_and_the_plan_says_so(monkeypatch: Any) -> None:
    direct._names.cache_clear()
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    try:
        missing = direct._names().missing
    finally:
        monkeypatch.undo()
        direct._names.cache_clear()
    assert missing is not None
    assert "_engine_run_backward" in missing
    monkeypatch.setattr(direct, "_names", lambda: direct._Names(missing=missing))
    decision = fitted(Module())
    assert decision.choice == PUBLIC
    assert decision.why == f"torch {torch.__version__} has not the private name that they need: {missing}"


def test_a_toy_that_differs_makes_public_calls_and_the_plan_says_so(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(direct, "_EQUAL", {})
    toy = direct._train_toy
    monkeypatch.setattr(
        direct, "_train_toy", lambda kind, is_direct: [each + is_direct * 1e-6 for each in toy(kind, is_direct)]
    )
    with caplog.at_level(logging.INFO, log.name):
        decision = fitted(Module())
    assert (decision.choice, decision.why) == (PUBLIC, "a toy trained with SGD is not equal")
    assert "trains a toy with SGD to other numbers" in caplog.text


def test_a_toy_that_fails_makes_public_calls(monkeypatch: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("it has other arguments")

    monkeypatch.setattr(direct, "_direct", fails)
    assert not direct._trains_alike(torch.optim.SGD)


def test_a_toy_is_trained_once_in_a_process(monkeypatch: Any) -> None:
    trainings: list[Any] = []
    monkeypatch.setattr(direct, "_EQUAL", {})
    monkeypatch.setattr(direct, "_trains_alike", lambda kind: not trainings.append(kind))
    fitted(Module(), max_epochs=2)
    fitted(Module())
    assert trainings == [torch.optim.SGD]


def test_no_one_sees_a_toy_being_trained(monkeypatch: Any) -> None:
    """A hook on all optimizers would be called for the toy's, too."""
    monkeypatch.setattr(direct, "_EQUAL", {})
    seen: list[Any] = []
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda optimizer, *_: seen.append(optimizer))
        try:
            module = Module()
            assert "would see a toy" in fitted(module).why
        finally:
            handle.remove()
    with anomalies():
        assert "would see a toy" in direct._of_toy(torch.optim.Adam)
    assert len(set(map(id, seen))) == 2
    assert len(seen) == 12


def test_a_toy_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    direct._trains_alike(torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), before)


# ---- what each call checks -------------------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


@contextmanager
def compiled_autograd() -> Iterator[None]:
    import torch._dynamo.compiled_autograd as compiled

    compiled.compiled_autograd_enabled = True  # as enable() sets it: without a compiler that would run for seconds
    try:
        yield
    finally:
        compiled.compiled_autograd_enabled = False


@contextmanager
def functorch() -> Iterator[None]:
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "default device": lambda: torch.device("cpu"),
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "anomaly mode": anomalies,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "compiled autograd": compiled_autograd,
    "functorch": functorch,
}


def test_nothing_is_watched_by_default() -> None:
    assert not direct._names().is_watched()


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_watches_is_seen(name: str) -> None:
    with CONTEXTS[name]():
        assert direct._names().is_watched()


@pytest.mark.parametrize("name", ["function mode", "profiler", "anomaly mode", "saved tensors"])
def test_what_watches_is_seen_by_each_call(spy: set[str], name: str) -> None:
    optimizer = sgd()
    calls = direct._direct(optimizer, direct._names())
    loss = loss_of(optimizer)
    with CONTEXTS[name]():
        calls.zero_grad()
        assert spy == {"zero_grad"}
        calls.backward(loss)
        assert spy == {"zero_grad", "backward"}
        calls.train(None, False, True)
    assert spy == ALL


def test_a_batch_looks_once_for_what_watches_and_each_batch_looks(
    spy: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    names, watched = direct._names(), False

    def look() -> bool:
        looks.append(1)
        return watched

    monkeypatch.setattr(direct, "_names", lambda: names._replace(is_watched=look))
    optimizer = sgd()
    train = direct._direct(optimizer, direct._names()).train
    for count in (1, 2):
        train(loss_of(optimizer), True, True)
        assert len(looks) == count
    assert spy == set()
    watched = True
    train(loss_of(optimizer), True, True)
    assert spy == ALL


def parts_in_a_fit(monkeypatch: pytest.MonkeyPatch, module: Any, *callbacks: Callback, **arguments: Any) -> list[str]:
    """For each batch, the parts that each direct call has made together."""
    made: list[str] = []
    bind = direct._direct

    def bound(*args: Any) -> Any:
        train = bind(*args).train

        def noted(loss: Any, clears: bool, steps: bool) -> None:
            made.append("clear " * clears + "backward " * (loss is not None) + "step" * steps)
            train(loss, clears, steps)

        return direct.Calls(noted)

    monkeypatch.setattr(direct, "_direct", bound)
    fitted(module, *callbacks, count=2, **arguments)
    return [each.strip() for each in made]


class HookBetween(Callback):
    def on_after_backward(self, *args: Any) -> None:
        pass


class HookBeforeStep(Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


class HookBeforeZeroGrad(Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


class NoLoss(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx else super().training_step(batch, batch_idx)


def test_one_call_makes_the_whole_step_where_nothing_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_in_a_fit(monkeypatch, Module()) == ["clear backward step"] * 2


@pytest.mark.parametrize(
    ("callbacks", "arguments", "parts"),
    [
        ([HookBetween()], {}, ["clear", "backward", "step"]),
        ([HookBeforeZeroGrad()], {}, ["clear", "backward", "step"]),
        ([], {"profiler": "simple"}, ["clear", "backward", "step"]),
        ([HookBeforeStep()], {}, ["clear backward", "step"]),
        ([], {"gradient_clip_val": 1.0}, ["clear backward", "step"]),
        ([ReplayCheck(1)], {}, ["clear backward", "step"]),
    ],
    ids=["after backward", "before zero_grad", "profiler", "before step", "clipping", "replays"],
)
def test_parts_are_called_alone_where_something_comes_between(
    monkeypatch: pytest.MonkeyPatch, callbacks: Any, arguments: Any, parts: list[str]
) -> None:
    assert parts_in_a_fit(monkeypatch, Module(), *callbacks, **arguments) == parts * 2


def test_a_window_of_two_batches_clears_in_the_first_and_steps_after_the_second(monkeypatch: Any) -> None:
    made = parts_in_a_fit(monkeypatch, Module(), accumulate_grad_batches=2)
    assert made == ["clear backward", "backward", "step"]


def test_a_batch_without_a_loss_clears_gradients_and_does_not_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_in_a_fit(monkeypatch, NoLoss()) == ["clear backward step", "clear"]


class Odd(Tensor):
    pass


def loss_of(optimizer: Any) -> Tensor:
    loss: Tensor = optimizer.param_groups[0]["params"][0].square().mean()
    return loss


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda loss: loss.as_subclass(Odd),  # type: ignore[arg-type]
    "one element": lambda loss: loss.reshape(1),
    "sparse": lambda loss: loss.to_sparse(),
    "half of a complex number": lambda loss: loss.to(torch.complex64),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_plain_number_makes_the_public_call(spy: set[str], name: str) -> None:
    optimizer = sgd()
    calls = direct._direct(optimizer, direct._names())
    calls.backward(loss_of(optimizer))
    assert spy == set()
    with suppress(RuntimeError):  # of torch's: a sparse loss has no gradient
        calls.backward(LOSSES[name](loss_of(optimizer)))
    assert spy == {"backward"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: w.mean() * 1j, "real scalar outputs"),
        (lambda w: w.mean().detach(), "does not require grad"),
        (lambda w: w, "scalar outputs"),
        (lambda w: w.mean().to(torch.float32).int(), "does not require grad"),
    ],
)
def test_errors_are_those_of_the_public_call(spy: set[str], make: Any, message: str) -> None:
    optimizer = sgd()
    weights = optimizer.param_groups[0]["params"][0]
    with pytest.raises(RuntimeError, match=message) as error:
        direct._direct(optimizer, direct._names()).backward(make(weights))
    with pytest.raises(RuntimeError) as expected:
        make(weights).backward()
    assert str(error.value) == str(expected.value)
    assert spy == {"backward"}


def test_a_second_backward_pass_raises_torchs_error() -> None:
    optimizer = sgd()
    calls, loss = direct._direct(optimizer, direct._names()), loss_of(optimizer)
    calls.backward(loss)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        calls.backward(loss)


def test_arguments_of_backward_make_the_public_call(spy: set[str]) -> None:
    optimizer = sgd()
    calls, loss = direct._direct(optimizer, direct._names()), loss_of(optimizer)
    calls.backward(loss, retain_graph=True)
    assert spy == {"backward"}
    spy.clear()
    calls.backward(loss, torch.tensor(2.0))
    assert spy == {"backward"}
    assert torch.allclose(optimizer.param_groups[0]["params"][0].grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "_engine_run_backward")],
)
def test_a_backward_that_a_program_replaces_is_called(monkeypatch: Any, owner: Any, name: str) -> None:
    optimizer = sgd()
    calls, plain, seen = direct._direct(optimizer, direct._names()), getattr(owner, name), []

    def backward(*args: Any, **kwargs: Any) -> None:
        seen.append(1)
        plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, backward)
    calls.backward(loss_of(optimizer))
    assert seen == [1]


def test_a_communication_hook_that_is_registered_later_makes_the_public_call(spy: set[str]) -> None:
    optimizer, hooks = sgd(), []
    wrapped: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    vars(wrapped)["_comm_hooks"] = hooks
    run = run_of(wrapped)
    run.kept, run.progress = KeptStates(), Progress()
    calls = direct._direct(optimizer, direct._names(), (), run)
    calls.backward(loss_of(optimizer))
    assert spy == set()
    hooks.append("hook")
    calls.backward(loss_of(optimizer))
    assert spy == {"backward"}


def test_gradients_share_no_memory_with_what_is_kept() -> None:
    """The node of this loss passes its gradient on: two parameters would have one gradient, for all batches."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    calls = direct._direct(torch.optim.SGD([first, second], 0.1), direct._names())
    for _ in range(2):
        calls.zero_grad()
        calls.backward(first.squeeze() + second.squeeze() * 3)
        first.grad.mul_(5)  # type: ignore[union-attr]
        assert second.grad is not None
        assert second.grad.item() == 3
    assert all(each.item() == 1 for each in direct._names().ones.values())


def hook_on_loss(loss: Any, hook: Any) -> None:
    loss.register_hook(hook)


def hook_on_node(loss: Any, hook: Any) -> None:
    loss.grad_fn.register_prehook(lambda gradients: hook(gradients[0]) and None)


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (hook_on_loss, lambda gradient: gradient.data.mul_(2)),
        (hook_on_loss, lambda gradient: gradient.mul_(2)),
        (hook_on_node, lambda gradient: gradient.mul_(2).numel() and None),
    ],
)
def test_a_root_gradient_that_a_hook_changes_counts_in_one_backward_pass(
    monkeypatch: Any, register: Any, hook: Any
) -> None:
    names = direct._names()._replace(ones={torch.float32: torch.ones(())})
    monkeypatch.setattr(direct, "_names", lambda: names)
    optimizer = sgd()
    calls, weights = direct._direct(optimizer, direct._names()), optimizer.param_groups[0]["params"][0]
    loss = loss_of(optimizer)
    register(loss, hook)
    calls.backward(loss)
    assert torch.allclose(weights.grad, torch.full((3,), 4 / 3))
    calls.zero_grad()
    calls.backward(loss_of(optimizer))
    assert torch.allclose(weights.grad, torch.full((3,), 2 / 3))


def test_the_engines_log_of_nodes_is_written(caplog: Any) -> None:
    optimizer = sgd()
    with caplog.at_level(logging.DEBUG, "torch.autograd.graph"):
        direct._direct(optimizer, direct._names()).backward(loss_of(optimizer))
    assert "MeanBackward0" in caplog.text


@pytest.mark.parametrize("available", [False, True])
def test_the_engines_threads_of_other_devices_get_the_context_of_torchs_function(
    monkeypatch: Any, available: bool
) -> None:
    """They may run nodes of the graph even if the loss is on the host."""
    optimizer, stashed = sgd(), list[str]()
    stash = torch._C._stash_obj_in_tls
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", lambda *args: (stashed.append(args[0]), stash(*args)))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    direct._direct(optimizer, direct._names()).backward(loss_of(optimizer))
    torchs = torch.autograd.graph._engine_run_backward.__code__.co_names  # the function of torch 2.9 stashes nothing
    assert stashed == (["context"] if available and "_stash_obj_in_tls" in torchs else [])


def added(optimizer: Any) -> nn.Parameter:
    optimizer.add_param_group({"params": [parameter := nn.Parameter(torch.ones(2))]})
    return parameter


def appended(optimizer: Any) -> nn.Parameter:
    optimizer.param_groups[0]["params"].append(parameter := nn.Parameter(torch.ones(2)))
    return parameter


def exchanged(optimizer: Any) -> nn.Parameter:
    optimizer.param_groups[0]["params"][0] = parameter = nn.Parameter(torch.ones(2))
    return parameter


class OwnParameter(nn.Parameter):
    pass


def of_another_class(optimizer: Any) -> nn.Parameter:
    optimizer.param_groups[0]["params"].append(parameter := OwnParameter(torch.ones(2)))
    return parameter


@pytest.mark.parametrize("change", [added, appended, exchanged, of_another_class])
def test_parameters_that_an_optimizer_gets_later_are_cleared_and_stepped(spy: set[str], change: Any) -> None:
    optimizer = sgd()
    calls = direct._direct(optimizer, direct._names())
    calls.zero_grad()
    parameter = change(optimizer)
    parameter.grad = torch.ones(2)
    calls.train(None, False, True)
    assert torch.allclose(parameter.detach(), torch.full((2,), 0.9))
    calls.zero_grad()
    assert parameter.grad is None
    assert spy == set()


def own_hook(register: str) -> Callable[[Any, Any], Any]:
    return lambda optimizer, hook: getattr(optimizer, register)(hook)


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "before": own_hook("register_step_pre_hook"),
    "after": own_hook("register_step_post_hook"),
    "before, of all": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
    "after, of all": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_is_registered_while_a_fit_runs_is_called_from_the_next_step_on(name: str) -> None:
    seen: list[int] = []

    class Registers(Callback):
        handle: Any = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.handle = HOOKS[name](trainer.optimizers[0], lambda *_: seen.append(trainer.global_step))
            if batch_idx == 4:
                self.handle.remove()

    assert fitted(Module(), Registers()).choice == DIRECT
    assert seen == [2, 3]


def exchange_class(monkeypatch: Any, optimizer: Any) -> None:
    optimizer.__class__ = type("Counts", (torch.optim.SGD,), {})


def make_differentiable(monkeypatch: Any, optimizer: Any) -> None:
    optimizer.defaults["differentiable"] = True


@pytest.mark.parametrize(
    "change",
    [replaced_class_step, wrapped_class_step, replaced_step, exchange_class, make_differentiable],
    ids=lambda change: change.__name__,
)
def test_a_step_that_is_replaced_later_is_called(monkeypatch: Any, spy: set[str], change: Any) -> None:
    optimizer = sgd()
    calls = direct._direct(optimizer, direct._names())
    calls.train(None, False, True)
    assert spy == set()
    change(monkeypatch, optimizer)
    calls.train(None, False, True)
    assert spy == {"step"}


@pytest.mark.parametrize("change", [replaced_zero_grad, replaced_class_zero_grad], ids=lambda change: change.__name__)
def test_a_zero_grad_that_is_replaced_later_is_called(monkeypatch: Any, change: Any) -> None:
    optimizer = sgd()
    calls, weights = direct._direct(optimizer, direct._names()), optimizer.param_groups[0]["params"][0]
    weights.grad = torch.ones(3)
    change(monkeypatch, optimizer)
    calls.zero_grad()
    assert weights.grad is not None  # the new one does nothing


def test_a_scheduler_sees_that_the_optimizer_has_stepped() -> None:
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = direct._direct(optimizer, direct._names())
    calls.train(None, False, True)
    assert optimizer._opt_called
    scheduler.step()  # a warning is an error here


def test_a_scheduler_that_is_made_later_sees_it_too() -> None:
    optimizer = sgd()
    calls = direct._direct(optimizer, direct._names())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls.train(None, False, True)
    scheduler.step()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_runs_without_gradients_and_leaves_their_mode_as_it_was(enabled: bool) -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    calls = direct._direct(optimizer, direct._names())
    with nullcontext() if enabled else torch.no_grad():
        calls.train(None, False, True)
        assert torch.is_grad_enabled() is enabled
    assert optimizer.param_groups[0]["params"][0].grad_fn is None


def test_an_exception_in_a_step_leaves_the_mode_of_gradients_as_it_was() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    calls = direct._direct(optimizer, direct._names())
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        calls.train(None, False, True)
    assert torch.is_grad_enabled()


# ---- while a fit runs ------------------------------------------------------------------------------------------------


class Meanwhile(Callback):
    """Is inside of a context from batch 2 to batch 4."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.context = make()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.context.__enter__()
        if batch_idx == 4:
            self.context.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["function mode", "dispatch mode", "profiler", "anomaly mode", "saved tensors"])
def test_what_begins_while_a_fit_runs_is_seen_in_the_same_batch(spy: set[str], name: str) -> None:
    module = Module(spy)
    assert fitted(module, Meanwhile(CONTEXTS[name])).choice == DIRECT
    assert module.public == [[], [], sorted(ALL), sorted(ALL), [], []]


def test_a_profiler_sees_the_ranges_of_the_steps_that_it_is_there_for() -> None:
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        fitted(Module())
    names = [each.name for each in profile.function_events]
    assert names.count("Optimizer.step#SGD.step") == names.count("Optimizer.zero_grad#SGD.zero_grad") == 6


def test_copies_and_pickles_of_an_optimizer_in_the_middle_of_a_fit_work() -> None:
    copies: list[Any] = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            optimizer = trainer.optimizers[0]
            file = io.BytesIO()
            torch.save(optimizer, file)
            file.seek(0)
            copies.extend([copy.deepcopy(optimizer), torch.load(file, weights_only=False)])

    fitted(Module(), Copies())
    for each in copies:
        each.zero_grad()
        each.step()


def test_a_scheduler_of_a_fit_steps_without_a_warning() -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = self.make()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Scheduled()
    assert fitted(module).choice == DIRECT
    assert module.optimizers().optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**6)
