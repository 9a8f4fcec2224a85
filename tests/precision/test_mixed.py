"""Mixed precision: autocast in the forward pass, 32-bit parameters and gradients, a scaled loss with float16."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.base.restoring import WrongForm
from drivetrain.errors import ConfigurationError
from drivetrain.precision import MixedPrecision, Precision

INF = float("inf")


class CountsReads(TorchDispatchMode):
    """Counts what would make a device wait: ``item``, ``bool`` and ``float`` of a tensor all go through these."""

    OPS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in self.OPS
        return func(*args, **(kwargs or {}))


def scaled(scale: float = 1024.0, **options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=scale, **options))


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (0.0,)))


def backward(plugin: MixedPrecision, parameter: nn.Parameter, *gradient: float) -> None:
    """Add ``gradient`` to this parameter, as a run would."""
    loss = (parameter * torch.tensor(gradient)).sum()
    plugin.backward(plugin.scale(loss))


def gradient_of(parameter: nn.Parameter) -> Any:
    assert parameter.grad is not None
    return parameter.grad.tolist()


def scale_of(plugin: MixedPrecision) -> float:
    assert plugin.scaler is not None
    return plugin.scaler.get_scale()


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_the_context_is_autocast(name: str, dtype: torch.dtype) -> None:
    context = MixedPrecision(name).forward_context()
    assert context is not None
    with context:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is dtype
    assert not torch.is_autocast_enabled("cpu")


def test_bf16_is_the_default() -> None:
    assert MixedPrecision().name == "bf16-mixed"


@pytest.mark.parametrize(("device", "expected"), [(None, "cuda"), ("cpu", "cpu")])
def test_c4_the_device_type_is_the_accelerators_unless_given(device: str | None, expected: str) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda kind, **options: made.append((kind, options)))
        plugin = MixedPrecision(device=device)
        plugin.device_type = "cuda"
        plugin.forward_context()
    assert made == [(expected, {"dtype": torch.bfloat16, "cache_enabled": False})]


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_t21_the_cast_cache_is_off_inside_and_as_it_was_outside(name: str) -> None:
    context = MixedPrecision(name).forward_context()
    assert context is not None
    before = torch.is_autocast_cache_enabled()
    with context:
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled() is before


@pytest.mark.parametrize(("name", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_parameters_and_gradients_stay_in_32_bits(name: str, dtype: torch.dtype) -> None:
    plugin, layer = MixedPrecision(name), nn.Linear(2, 1)
    assert isinstance(plugin, Precision)
    assert plugin.convert_module(layer) is layer
    with plugin.module_init_context() or nullcontext():
        assert nn.Linear(2, 1).weight.dtype == torch.float32
    context = plugin.forward_context()
    assert context is not None
    with context:
        out = layer(torch.ones(1, 2))
    assert out.dtype is dtype
    plugin.backward(plugin.scale(out.float().sum()))
    assert layer.weight.dtype is torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bf16-mix", r"MixedPrecision\('bf16-mix'\).* Did you mean 'bf16-mixed'\? Known: 16-mixed, bf16-mixed\."),
        ("32-true", r"MixedPrecision\('32-true'\).* Known: 16-mixed, bf16-mixed\."),
        (16, r"MixedPrecision\(16\).* Known: 16-mixed, bf16-mixed\."),
    ],
)
def test_an_unknown_name(name: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MixedPrecision(name)


# ---- bfloat16 scales nothing -----------------------------------------------------------------------------------------


def test_bf16_scales_nothing() -> None:
    plugin, parameter = MixedPrecision("bf16-mixed"), weight(1.0)
    optimizer, loss = SGD([parameter], lr=1.0), torch.ones(())
    assert not plugin.scales_loss
    assert plugin.scale(loss) is loss
    backward(plugin, parameter, INF)
    with CountsReads() as counted:
        plugin.unscale(optimizer)
        assert plugin.step(optimizer) is True
    assert counted.reads == 0
    assert parameter.tolist() == [-INF]
    assert plugin.scaler is None
    assert plugin.state_dict() == {}


def test_bf16_refuses_a_scaler() -> None:
    with pytest.raises(ConfigurationError, match=r"MixedPrecision\('bf16-mixed'\) got a GradScaler.* Leave scaler out"):
        MixedPrecision("bf16-mixed", scaler=GradScaler("cpu"))


# ---- one optimizer ---------------------------------------------------------------------------------------------------


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW])
def test_t21_training_is_bit_equal_to_torchs_recipe(kind: Any, clip: float, bound: bool) -> None:
    """With an overflow at first, one in between, and growth: the scale moves in both directions."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 8, 4), torch.randn(12, 8, 1)
    x[6, 0, 0] = INF
    options: dict[str, Any] = {"init_scale": 2.0**40, "growth_interval": 2, "backoff_factor": 2.0**-10}

    theirs, scales, really = make_net(), [], []
    optimizer, scaler = kind(theirs.parameters(), lr=0.05), GradScaler("cpu", **options)
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = F.mse_loss(theirs(batch), target)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        really.append(scaler.get_scale() >= scales[-1])
    assert len(set(scales)) > 3

    ours, plugin = make_net(), MixedPrecision("16-mixed", scaler=GradScaler("cpu", **options))
    optimizer = kind(ours.parameters(), lr=0.05)
    if bound:
        plugin.bind([optimizer])
    context = plugin.forward_context()
    assert context is not None
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        with context:
            loss = F.mse_loss(ours(batch), target)
        plugin.backward(plugin.scale(loss))
        plugin.unscale(optimizer)
        plugin.clip_gradients(optimizer, clip)
        assert scale_of(plugin) == scales.pop(0)
        assert plugin.step(optimizer) is really.pop(0)

    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    assert plugin.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [INF, float("nan")])
@pytest.mark.parametrize("unscaled", [False, True])
def test_t16_a_skipped_step_is_told(fused: bool, bad: float, unscaled: bool) -> None:
    plugin, parameter = scaled(), weight(1.0, 1.0)
    optimizer = SGD([parameter], lr=1.0, fused=fused)
    plugin.bind([optimizer])
    done = []
    for gradient in (0.5, bad, 0.25):
        optimizer.zero_grad()
        backward(plugin, parameter, gradient, 0.0)
        if unscaled:
            plugin.unscale(optimizer)
        done.append(plugin.step(optimizer))
    assert done == [True, False, True]
    assert parameter.tolist() == [0.25, 1.0]
    assert scale_of(plugin) == 512.0


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gradient", [1.0, INF])
def test_a_step_reads_the_device_once(bound: bool, fused: bool, gradient: float) -> None:
    plugin, parameter = scaled(), weight()
    optimizer = SGD([parameter], lr=1.0, fused=fused)
    if bound:
        plugin.bind([optimizer])
    with CountsReads() as counted:
        for _ in range(10):
            optimizer.zero_grad()
            backward(plugin, parameter, gradient)
            plugin.unscale(optimizer)
            plugin.clip_gradients(optimizer, 5.0)
            plugin.step(optimizer)
    assert counted.reads == 10


def test_t22_unscaling_twice_before_a_step_unscales_once() -> None:
    plugin, parameter = scaled(), weight()
    optimizer = SGD([parameter], lr=1.0)
    plugin.bind([optimizer])
    for _ in range(2):
        optimizer.zero_grad()
        backward(plugin, parameter, 3.0)
        assert gradient_of(parameter) == [3 * 1024.0]
        for _ in range(3):
            plugin.unscale(optimizer)
            assert gradient_of(parameter) == [3.0]
        plugin.step(optimizer)


def test_t22_clipping_clips_true_gradients() -> None:
    plugin, parameter = scaled(), weight(0.0, 0.0)
    optimizer = SGD([parameter], lr=1.0)
    plugin.bind([optimizer])
    backward(plugin, parameter, 3.0, 4.0)
    plugin.clip_gradients(optimizer, 6.0)
    assert gradient_of(parameter) == [3.0, 4.0]
    plugin.clip_gradients(optimizer, 3.5, "value")
    assert gradient_of(parameter) == [3.0, 3.5]
    assert plugin.step(optimizer)
    assert parameter.tolist() == [-3.0, -3.5]


def test_gradients_of_a_window_add_up() -> None:
    plugin, parameter = scaled(), weight()
    optimizer = SGD([parameter], lr=1.0)
    plugin.bind([optimizer])
    for _ in range(4):
        backward(plugin, parameter, 0.5)
    assert plugin.step(optimizer)
    assert parameter.tolist() == [-2.0]


def test_a_step_without_gradients_is_a_step() -> None:
    """As in every other precision, and the scaler is not asked: it has nothing to look at."""
    plugin = scaled()
    optimizer = SGD([weight()], lr=1.0)
    plugin.bind([optimizer])
    plugin.unscale(optimizer)
    assert plugin.step(optimizer) is True


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("first", ["unscale", "step", "clip_gradients"])
def test_t19_gradients_of_a_loss_that_was_not_scaled_are_refused(first: str, bound: bool) -> None:
    plugin, parameter = scaled(), weight()
    optimizer = SGD([parameter], lr=1.0)
    if bound:
        plugin.bind([optimizer])
    call = getattr(plugin, first)
    arguments: Any = (optimizer, 1.0) if first == "clip_gradients" else (optimizer,)
    message = r"SGD has gradients, but no scaled loss was computed .*'16-mixed'.* Call self.manual_backward\(loss\)"
    (parameter * 2).sum().backward()
    with pytest.raises(ConfigurationError, match=message):
        call(*arguments)
    optimizer.zero_grad()
    backward(plugin, parameter, 1.0)
    assert plugin.step(optimizer)
    with pytest.raises(ConfigurationError, match=message):  # nor are gradients that have been stepped already
        call(*arguments)
    assert parameter.tolist() == [-1.0]


def test_the_steps_arguments_reach_the_optimizer() -> None:
    class Takes(SGD):
        def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
            self.factor = factor
            return super().step(closure)

    plugin, parameter = scaled(), weight()
    optimizer = Takes([parameter], lr=1.0)
    backward(plugin, parameter, 1.0)
    assert plugin.step(optimizer, factor=3.0)
    assert optimizer.factor == 3.0


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    class Fails(SGD):
        failing = True

        def step(self, closure: Any = None) -> Any:
            if self.failing:
                raise KeyError("failing")
            return super().step(closure)

    plugin, parameter = scaled(), weight()
    optimizer = Fails([parameter], lr=1.0)
    hooks = len(optimizer._optimizer_step_post_hooks)
    backward(plugin, parameter, 1.0)
    with pytest.raises(KeyError):
        plugin.step(optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    optimizer.failing = False
    backward(plugin, parameter, 2.0)  # adds to what is there
    assert plugin.step(optimizer)
    assert parameter.tolist() == [-3.0]
    assert len(optimizer._optimizer_step_post_hooks) == hooks


def test_a_hundred_skipped_steps_in_a_row_are_told_once() -> None:
    plugin, parameter = scaled(), weight()
    optimizer = SGD([parameter], lr=1.0)
    plugin.bind([optimizer])

    def skip(times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            backward(plugin, parameter, INF)
            assert not plugin.step(optimizer)

    skip(99)
    optimizer.zero_grad()
    backward(plugin, parameter, 0.0)
    assert plugin.step(optimizer)  # a row ends here
    skip(99)
    plugin.bind([optimizer])  # and here: another run
    skip(99)
    with pytest.warns(UserWarning, match=r"SGD has skipped 100 steps in a row.* not finite.* write precision") as told:
        skip(60)
    assert len(told) == 1


# ---- the scaler and its state ----------------------------------------------------------------------------------------


def test_the_scaler_is_there_before_the_first_batch() -> None:
    plugin = MixedPrecision("16-mixed")
    assert plugin.scales_loss
    scaler = plugin.scaler
    plugin.forward_context()
    assert plugin.scaler is scaler
    assert isinstance(scaler, GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 2.0**16
    plugin.forward_context()
    assert plugin.scaler is scaler


def test_without_a_context_the_loss_says_where_it_is() -> None:
    plugin = MixedPrecision("16-mixed")
    assert plugin.scale(torch.ones(())).item() == 2.0**16
    assert isinstance(plugin.scaler, GradScaler)


def test_a_scaler_of_ones_own_is_used() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    plugin = MixedPrecision("16-mixed", scaler=scaler)
    plugin.forward_context()
    assert plugin.scaler is scaler
    assert plugin.scale(torch.ones(())).item() == 8.0


def trained(plugin: MixedPrecision, steps: int) -> MixedPrecision:
    parameter = weight()
    optimizer = SGD([parameter], lr=1.0)
    plugin.bind([optimizer])
    for _ in range(steps):
        optimizer.zero_grad()
        backward(plugin, parameter, INF)
        plugin.step(optimizer)
    return plugin


@pytest.mark.parametrize("when", ["before the scaler exists", "after its context was asked for", "in the middle"])
def test_t21_the_scale_survives_a_restart(when: str) -> None:
    state = trained(MixedPrecision("16-mixed"), 3).state_dict()
    assert state["scale"] == 2.0**13
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    plugin = MixedPrecision("16-mixed")
    if when != "before the scaler exists":
        plugin.forward_context()
    if when == "in the middle":
        trained(plugin, 1)
    plugin.load_state_dict(torch.load(buffer, weights_only=True))
    assert plugin.state_dict() == state
    plugin.forward_context()
    assert plugin.state_dict() == state
    assert trained(plugin, 1).state_dict()["scale"] == 2.0**12


@pytest.mark.parametrize("steps", [0, 1])
def test_an_empty_state_is_no_harm(steps: int) -> None:
    """Saved before the first step, by bf16-mixed or with a scaler that was switched off."""
    plugin = trained(MixedPrecision("16-mixed"), steps)
    before = plugin.state_dict()
    assert bool(before) is bool(steps)
    plugin.load_state_dict({})
    plugin.load_state_dict(MixedPrecision("bf16-mixed").state_dict())
    assert plugin.state_dict() == before
    assert trained(plugin, 1).state_dict()["scale"] == 2.0 ** (15 - steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": ...}, r"\['scale'\] is missing"),
        ({"scale": float("nan")}, r"\['scale'\] is nan, and a finite number above 0 is expected"),
        ({"scale": 0.0}, r"\['scale'\] is 0.0"),
        ({"growth_factor": INF}, r"\['growth_factor'\] is inf"),
        ({"backoff_factor": "x"}, r"\['backoff_factor'\] is 'x', and int or float is expected"),
        ({"growth_interval": -1}, r"\['growth_interval'\] is -1, and a count is expected"),
        ({"_growth_tracker": 1.5}, r"\['_growth_tracker'\] is 1.5, and int is expected"),
        ({"optimizers": 3}, r"\['optimizers'\] is 3, and list or tuple is expected"),
        ({"optimizers": [3]}, r"\['optimizers'\]\[0\] is 3, and Mapping is expected"),
        ({"optimizers": [{"unscaled": True, "found_inf": None}]}, r"\['optimizers'\]\[0\]\['stepped'\] is missing"),
        ({"optimizers": [{"stepped": True, "unscaled": None}]}, r"\[0\]\['unscaled'\] is None, and bool is expected"),
        ({"optimizers": [{"stepped": True, "unscaled": True, "found_inf": "x"}]}, r"\[0\]\['found_inf'\] is 'x'"),
    ],
)
def test_a_state_of_another_form_is_refused_before_anything_changes(change: dict[str, Any], message: str) -> None:
    plugin = trained(MixedPrecision("16-mixed"), 1)
    before = plugin.state_dict()
    state = {key: value for key, value in {**before, **change}.items() if value is not ...}
    with pytest.raises(WrongForm, match=message):
        plugin.load_state_dict(state)
    assert plugin.state_dict() == before


def test_bf16_ignores_a_scalers_state() -> None:
    plugin = MixedPrecision("bf16-mixed")
    plugin.load_state_dict(trained(MixedPrecision("16-mixed"), 1).state_dict())
    assert plugin.state_dict() == {}
    assert plugin.scaler is None


# ---- optimizers that can skip a step themselves ----------------------------------------------------------------------


class SkipsItself(SGD):
    """A user's optimizer that says it can handle a scaled loss itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        assert found is None
        assert scale is None  # the gradients are divided by it already
        return super().step(closure)


FUSED: dict[str, Any] = {
    "sgd": lambda p, fused: SGD(p, lr=0.1, momentum=0.9, fused=fused),
    "nesterov": lambda p, fused: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=fused),
    "adam": lambda p, fused: torch.optim.Adam(p, lr=0.1, fused=fused),
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=fused),
    "adagrad": lambda p, fused: torch.optim.Adagrad(p, lr=0.1, fused=fused),
    "own": lambda p, fused: (SkipsItself if fused else SGD)(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", list(FUSED))
def test_t16_an_optimizer_is_not_called_for_gradients_that_overflowed(name: str, unscaled: bool) -> None:
    """A fused kernel that is called for them leaves state behind: SGD's momentum buffer without values, to begin with.

    The first step is a bad one, and what follows is that of an ordinary optimizer.
    """
    found: list[Any] = []
    for fused in (True, False):
        plugin, parameter = scaled(), weight(1.0, -2.0, 3.0)
        optimizer = FUSED[name]([parameter], fused)
        claim = getattr(optimizer, "_step_supports_amp_scaling", False)
        if fused and not claim and name == "adagrad":
            pytest.skip("the fused Adagrad of torch 2.9 knows nothing of a scaler")
        assert claim is fused
        own = set(vars(optimizer))
        plugin.bind([optimizer])
        called: set[int] = set()
        done: list[bool] = []
        state = None
        optimizer.register_step_pre_hook(lambda *_, called=called, done=done: called.add(len(done)))
        for gradient in (INF, 0.5, float("nan"), 0.25, 0.125):
            optimizer.zero_grad()
            backward(plugin, parameter, gradient, 1.0, -1.0)
            if unscaled:
                plugin.unscale(optimizer)
            done.append(plugin.step(optimizer))
            state = dict(optimizer.state) if state is None and name != "adagrad" else state  # which makes its at once
        assert done == [False, True, False, True, True]
        assert (called, state or {}) == ({1, 3, 4}, {})
        assert getattr(optimizer, "_step_supports_amp_scaling", False) is claim
        assert set(vars(optimizer)) == own  # what a scaler lends to such an optimizer is gone
        found.append((parameter.tolist(), plugin.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == found[1][1]


def test_several_fused_optimizers_skip_each_for_itself() -> None:
    plugin = scaled()
    parameters = [weight(), weight()]
    one, other = (SGD([parameter], lr=1.0, momentum=0.5, fused=True) for parameter in parameters)
    plugin.bind([one, other])
    for gradient in (INF, 1.0):
        for optimizer, parameter in zip((one, other), parameters, strict=True):
            optimizer.zero_grad()
            backward(plugin, parameter, gradient if optimizer is one else 2.0)
        assert [plugin.step(one), plugin.step(other)] == [gradient == 1.0, True]
    assert [parameter.tolist() for parameter in parameters] == [[-1.0], [-5.0]]
    assert scale_of(plugin) == 512.0


def test_a_fused_optimizer_whose_step_fails_is_as_it_was() -> None:
    plugin, parameter = scaled(), weight()
    optimizer = SGD([parameter], lr=1.0, fused=True)
    plugin.bind([optimizer])
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(plugin, parameter, 1.0)
    with pytest.raises(ZeroDivisionError):
        plugin.step(optimizer)
    assert optimizer._step_supports_amp_scaling is True
