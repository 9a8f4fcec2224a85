"""One scale for several optimizers: it changes between rounds, and gradients that wait for their step move along."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from drivetrain.precision import MixedPrecision

INF = float("inf")


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


class Two:
    """Two optimizers of one parameter each, and a scale that every update moves, so that a wrong one shows."""

    def __init__(self, bound: bool = True, **options: Any) -> None:
        self.plugin = scaled(2.0**10, **{"growth_interval": 1, **options})
        self.p, self.q = weight(), weight()
        self.a, self.b = SGD([self.p], lr=1.0), SGD([self.q], lr=1.0)
        if bound:
            self.plugin.bind([self.a, self.b])

    def __iter__(self) -> Iterator[Optimizer]:
        return iter((self.a, self.b))


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("bad", [1.0, INF])
def test_both_losses_before_both_steps_are_torchs_recipe(bound: bool, bad: float) -> None:
    """The scale must not change between the two steps: the second's gradients were made with the old one."""
    two = Two(bound)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for _ in range(3):
        for optimizer in two:
            optimizer.zero_grad()
        backward(two.plugin, two.p, bad)
        backward(two.plugin, two.q, 3.0)
        two.plugin.step(two.a)
        before = two.q.item()
        assert two.plugin.step(two.b)
        assert two.q.item() == before - 3.0
        parameter = weight()  # the recipe: one update after all optimizers
        scaler.scale((parameter * bad).sum()).backward()
        scaler.step(SGD([parameter], lr=1.0))
        scaler.update()
    assert two.plugin.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("bound", [True, False])
def test_t22_what_is_unscaled_survives_the_step_of_another_optimizer(bound: bool) -> None:
    two = Two(bound)
    for _ in range(3):
        for optimizer in two:
            optimizer.zero_grad()
        backward(two.plugin, two.p, 1.0)
        backward(two.plugin, two.q, 3.0)
        two.plugin.clip_gradients(two.a, 5.0)
        two.plugin.clip_gradients(two.b, 5.0)
        assert two.plugin.step(two.a)
        assert gradient_of(two.q) == [3.0]
        two.plugin.unscale(two.b)
        assert gradient_of(two.q) == [3.0]
        assert two.plugin.step(two.b)
    assert (two.p.item(), two.q.item()) == (-3.0, -9.0)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("clip", [False, True])
def test_one_after_the_other(clip: bool, bound: bool) -> None:
    """The usual adversarial loop: backward and step of one, then of the other; old gradients may lie about."""
    two = Two(bound)
    for _ in range(4):
        for optimizer, parameter, gradient in ((two.a, two.p, 1.0), (two.b, two.q, 3.0)):
            optimizer.zero_grad()
            backward(two.plugin, parameter, gradient)
            if clip:
                two.plugin.clip_gradients(optimizer, 5.0)
            assert two.plugin.step(optimizer)
    assert (two.p.item(), two.q.item()) == (-4.0, -12.0)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [1.0, INF])
def test_one_accumulates_over_steps_of_the_other(bad: float, clip: bool) -> None:
    """The scale moves while gradients are held, and they move along; also when they were unscaled for clipping."""
    two = Two()
    scales = []
    for _ in range(4):
        two.a.zero_grad()
        backward(two.plugin, two.p, bad)
        backward(two.plugin, two.q, 0.5)
        if clip:
            two.plugin.clip_gradients(two.b, 99.0)
        two.plugin.step(two.a)
        scales.append(scale_of(two.plugin))
    assert two.plugin.step(two.b)
    assert two.q.item() == -2.0
    assert len(set(scales)) == 4


def test_the_scale_moves_at_once_when_nobody_else_holds_gradients() -> None:
    two = Two()
    backward(two.plugin, two.p, 1.0)
    assert two.plugin.step(two.a)
    assert scale_of(two.plugin) == 2.0**11


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [1.0, INF])
def test_t26_a_round_that_is_open_goes_on_from_its_state(bad: float, clip: bool) -> None:
    """Saving leaves it open, and a plugin that takes state and gradients goes on as this one does."""

    def go_on(two: Two) -> tuple[Any, ...]:
        steps = two.plugin.step(two.b)
        for optimizer in two:
            optimizer.zero_grad()
        backward(two.plugin, two.p, 1.0)
        return steps, two.q.item(), gradient_of(two.p), two.plugin.step(two.a), two.plugin.state_dict()

    def begin() -> Two:
        two = Two()
        backward(two.plugin, two.p, bad)
        backward(two.plugin, two.q, 3.0)
        if clip:
            two.plugin.clip_gradients(two.b, 99.0)
        two.plugin.step(two.a)
        return two

    whole, saved, resumed = begin(), begin(), Two()
    states = [saved.plugin.state_dict() for _ in range(2)]
    assert states[0] == states[1]
    resumed.plugin.load_state_dict(states[0])
    for name in ("p", "q"):
        parameter, new = getattr(saved, name), getattr(resumed, name)
        new.data.copy_(parameter.data)
        new.grad = None if parameter.grad is None else parameter.grad.clone()
    resumed.plugin.restored_gradients(torch.device("cpu"))
    assert go_on(saved) == go_on(resumed) == go_on(whole)


def test_t26_a_round_that_was_open_is_closed_where_its_gradients_are_not_restored() -> None:
    two, other = Two(), Two()
    backward(two.plugin, two.p, INF)
    backward(two.plugin, two.q, 3.0)
    two.plugin.step(two.a)
    other.plugin.load_state_dict(two.plugin.state_dict())
    backward(other.plugin, other.p, 1.0)
    assert scale_of(other.plugin) == 2.0**9


def test_overflow_of_held_gradients_is_not_forgotten() -> None:
    two = Two()
    backward(two.plugin, two.q, INF)
    two.plugin.clip_gradients(two.b, 99.0)
    backward(two.plugin, two.p, 1.0)
    assert two.plugin.step(two.a)
    assert not two.plugin.step(two.b)
    assert two.q.item() == 0.0


@pytest.mark.parametrize("upto", ["scale", "unscale", "step"])
def test_a_new_run_begins_clean(upto: str) -> None:
    """Whatever an interrupted one was doing."""
    two = Two()
    backward(two.plugin, two.p, 1.0)
    backward(two.plugin, two.q, 1.0)
    if upto != "scale":
        two.plugin.unscale(two.a)
    if upto == "step":
        two.plugin.step(two.a)
    for optimizer in two:
        optimizer.zero_grad()
    two.plugin.bind(list(two))
    with torch.no_grad():
        two.p.zero_()
    backward(two.plugin, two.p, 1.0)
    two.plugin.unscale(two.a)
    assert gradient_of(two.p) == [1.0]
    assert two.plugin.step(two.a)


def test_an_update_that_is_due_does_not_change_what_is_loaded() -> None:
    state = scaled(64.0).state_dict()
    two = Two()
    backward(two.plugin, two.p, 1.0)
    backward(two.plugin, two.q, 1.0)
    two.plugin.step(two.a)
    two.plugin.load_state_dict(state)
    assert two.plugin.scale(torch.ones(())).item() == 64.0
    assert two.plugin.state_dict() == state


@pytest.mark.parametrize("bound", [True, False])
def test_a_scaler_that_is_switched_off_changes_nothing(bound: bool) -> None:
    two = Two(bound, enabled=False)
    for _ in range(2):
        for optimizer in two:
            optimizer.zero_grad()
        backward(two.plugin, two.p, 1.0)
        backward(two.plugin, two.q, 3.0)
        for optimizer in two:
            two.plugin.clip_gradients(optimizer, 99.0)
        assert all([two.plugin.step(optimizer) for optimizer in two])
    assert (two.p.item(), two.q.item()) == (-2.0, -6.0)
    assert two.plugin.state_dict() == {}
