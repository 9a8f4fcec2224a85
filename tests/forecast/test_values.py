"""Programs that read values: the plan gets those of the real batch where this machine can compute them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.forecast.planning import Said

from drivetrain.forecast import command
from drivetrain.forecast.values import MOST_UNKNOWN, UnreadableError, Values

PROGRAM = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from drivetrain import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = {automatic}
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def training_step(self, x, batch_idx):
        {step}

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.Adam(self.parameters())
        return torch.optim.Adam(self.first.parameters()), torch.optim.Adam(self.second.parameters())

torch.manual_seed(0)
Trainer(max_epochs=1).fit(Net(), DataLoader(torch.randn(64, 64), batch_size=16))
"""
GAN = """
        generator, discriminator = self.optimizers()
        d_loss = self.second(x).square().mean()
        self.manual_backward(d_loss)
        discriminator.step()
        if d_loss.item() > 0.1:
            self.manual_backward(self.second(self.first(x)).square().mean())
            generator.step()
"""
LOOP = """
        while x.norm().item() > 20:
            x = x * 0.9
        return self.first(x).mean()
"""
TOLIST = """
        which = self.first(x)[:, :4].argmax(-1)
        counts = torch.bincount(which, minlength=4).tolist()
        parts = x[which.argsort()].split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)]).square().mean()
"""
MASK = """
        which = self.first(x)[:, :4].argmax(-1)
        return sum(expert(x[which == at]).square().sum() for at, expert in enumerate(self.experts))
"""
ARRAY = """
        ends = np.asarray(x[:, 0]).cumsum() < x.detach().numpy()[:, 0].sum()
        print(f"{x.norm():.3f}")
        return self.first(x[: int(ends.sum())]).square().mean()
"""
WORDS = ("--devices", "1", "--device", "H100 80GB", "--json")


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no memory for a pass with values."""
    monkeypatch.setattr(command, "COPIES", 10**9)


def planned(plan: Callable[..., Said], step: str, automatic: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(PROGRAM.format(step=step.strip(), automatic=automatic), *WORDS).out)
    return found


def states(layers: int) -> int:
    """Bytes of Adam's state for so many layers: two tensors for each parameter, and its step."""
    return layers * (2 * 4 * (64 * 64 + 64) + 2 * 4)


def test_a_branch_that_a_loss_decides(plan: Callable[..., Said]) -> None:
    found = planned(plan, GAN, automatic=False)
    assert found["kinds"]["optimizer"] == states(2)
    assert (list(found["read"].values()), found["unreadable"]) == ([2], {})


def test_without_values_the_branch_takes_zero(plan: Callable[..., Said], no_memory: None) -> None:
    """The control: the generator's optimizer never steps."""
    found = planned(plan, GAN, automatic=False)
    assert found["kinds"]["optimizer"] == states(1)
    assert (found["read"], list(found["unreadable"].values())) == ({}, [2])


def test_as_many_iterations_as_the_values_want(plan: Callable[..., Said]) -> None:
    found = planned(plan, LOOP)
    (reads,) = found["read"].values()
    assert reads > 2 * 4  # 32 in the mean, for random values of this shape
    assert reads % 2 == 0  # as many in both windows, whose batch is the same


@pytest.mark.parametrize(("step", "reads"), [(TOLIST, 2 * (1 + 4)), (MASK, 2 * 4)])
def test_experts_get_the_tokens_that_the_values_give_them(step: str, reads: int, plan: Callable[..., Said]) -> None:
    found = planned(plan, step)
    assert list(found["read"].values()) == [reads]
    assert found["unreadable"] == {}


def test_an_array_has_the_values_of_the_batch(plan: Callable[..., Said]) -> None:
    found = planned(plan, ARRAY)
    assert list(found["read"].values()) == [2 * (16 + 16 * 64), 2]
    assert found["unreadable"] == {}


def test_without_values_an_array_has_zeros_and_its_line_is_named(plan: Callable[..., Said], no_memory: None) -> None:
    found = planned(plan, ARRAY)
    assert (found["read"], list(found["unreadable"].values())) == ({}, [2 * (16 + 16 * 64), 2])


def test_an_array_of_a_tensor_that_requires_a_gradient_fails_as_in_a_run(plan: Callable[..., Said]) -> None:
    assert "Use tensor.detach().numpy() instead" in planned(plan, "self.first(x).numpy()")["error"]


@pytest.mark.parametrize("step", [TOLIST, MASK])
def test_without_values_shapes_that_depend_on_them_end_the_plan(
    step: str, plan: Callable[..., Said], no_memory: None
) -> None:
    assert "train.py:17 needs the values of a tensor, for aten." in planned(plan, step)["error"]


def test_a_loop_that_waits_for_a_value_ends(plan: Callable[..., Said], no_memory: None) -> None:
    assert "needs the values" in planned(plan, "while x.norm().item() < 1: pass")["error"]


def test_a_pass_that_fails_leaves_the_line_named(plan: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(plan, "if x.norm().item(): raise KeyError\n        return self.first(x).mean()")
    assert (found["read"], list(found["unreadable"].values())) == ({}, [2])


KEY = ("train.py:3", "blocks.1", "aten.nonzero")


def test_results_come_back_in_their_order_and_again_from_the_first() -> None:
    values = Values({}, records=True)
    values.record(KEY, torch.ones(3, 2, dtype=torch.int64))
    values.record(KEY, 0.5)
    again = Values(values.known)
    shapes = [again.take(KEY)[1] for _ in range(3)]
    assert [shapes[0].shape, shapes[1], shapes[2].dtype] == [(3, 2), 0.5, torch.int64]
    assert again.take(("train.py:4", "", "aten.nonzero")) == (False, None)


def test_what_is_not_known_ends_the_first_pass_at_once_and_others_after_many() -> None:
    with pytest.raises(UnreadableError, match=r"train\.py:3 needs the values of a tensor, for aten\.nonzero"):
        Values(None).take(KEY)
    values = Values({})
    assert [values.take(KEY) for _ in range(MOST_UNKNOWN)] == [(False, None)] * MOST_UNKNOWN
    with pytest.raises(UnreadableError):
        values.take(KEY)
