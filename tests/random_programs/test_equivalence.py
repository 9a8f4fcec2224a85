"""The comparison of a Trainer with a plain loop sees what differs, and says which program it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.random_programs.equivalence import check_against_plain_loop, differences, run_trainer
from tests.random_programs.plain_loop import run_plain_loop
from tests.random_programs.programs import Program, random_program
from torch import Tensor

from drivetrain import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.precision import MixedPrecision


class Nudge(Callback):
    """Moves one parameter by the smallest step after the first batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            weight = pl_module.network[0].weight.data
            weight[0, 0] = torch.nextafter(weight[0, 0], weight[0, 0] + 1)


class Draw(Callback):
    """Draws one random number."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.rand(())


@pytest.mark.parametrize("callback", [Nudge, Draw])
def test_one_bit_and_one_draw_are_seen(callback: type[Callback]) -> None:
    plain = Program(3)
    expected = run_plain_loop(plain, torch.device("cpu"))
    assert differences(run_trainer(plain), expected) == []
    assert differences(run_trainer(plain, callbacks=callback()), expected)


def test_the_message_shows_a_program_that_can_be_run_again() -> None:
    with pytest.raises(AssertionError, match="seed=") as caught:
        check_against_plain_loop(30, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
    text = str(caught.value)
    number = int(text.partition("seed=")[2].partition(",")[0].rstrip(")"))
    assert str(random_program(number)) in text
    assert "parameters" in text


def test_a_seed_names_one_program() -> None:
    assert random_program(5) == random_program(5)
    assert len({str(random_program(seed)) for seed in range(50)}) == 50


def test_programs_use_every_feature() -> None:
    """The control of the sweep: nothing that a program can vary stays as it is."""
    programs = [random_program(seed) for seed in range(300)]
    for field in dataclasses.fields(Program):
        assert len({repr(getattr(program, field.name)) for program in programs}) > 1, field.name
    hooks = {hook for program in programs for hook in program.hooks}
    assert {"optimizer_step", "backward", "configure_gradient_clipping", "on_before_optimizer_step"} <= hooks


def test_a_callback_of_ones_own_can_be_checked() -> None:
    check_against_plain_loop(5, callbacks=Callback())


class Inexact(MixedPrecision):
    """Its gradients are off by a little."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 1.001, *args, **kwargs)


def test_a_precision_of_ones_own_is_compared_with_the_one_that_it_names() -> None:
    check_against_plain_loop(3, plugins=MixedPrecision("bf16-mixed"))
    with pytest.raises(AssertionError, match="precision='bf16-mixed'"):
        check_against_plain_loop(3, plugins=[Inexact("bf16-mixed")])


def test_a_precision_that_is_passed_chooses_the_programs() -> None:
    check_against_plain_loop(3, precision="64-true")
    with pytest.raises(ConfigurationError, match=r"no program in precision='16-true'. Write one of '32-true', "):
        check_against_plain_loop(3, precision="16-true")
