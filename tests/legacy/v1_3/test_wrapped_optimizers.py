"""Optimizers in a wrapper of the user's, which is no optimizer of torch's but says that it is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.legacy import v1_1
from drivetrain.legacy import v1_3 as pl

from .test_trainer import Net, loader


class Wrapper:
    """As LARS was written then: it has the attributes that a Trainer of that time used, and no others."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim, self.steps = optimizer, 0
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict
        self.zero_grad, self.add_param_group = optimizer.zero_grad, optimizer.add_param_group

    @property
    def __class__(self) -> Any:
        return torch.optim.Optimizer

    @property
    def state(self) -> Any:
        return self.optim.state

    @property
    def param_groups(self) -> Any:
        return self.optim.param_groups

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.optim.step(closure=closure)


@pytest.mark.parametrize("trainer_class", [pl.Trainer, v1_1.Trainer])
def test_a_wrapper_without_step_hooks_is_stepped_and_counted(trainer_class: Any) -> None:
    class Wraps(Net):
        def configure_optimizers(self) -> Any:
            self.wrapper = Wrapper(torch.optim.SGD(self.parameters(), lr=0.1))
            return self.wrapper

    model = Wraps()
    before = [each.clone() for each in model.parameters()]
    trainer = trainer_class(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, loader())
    assert trainer.global_step == model.wrapper.steps == 2 * len(loader())
    assert not all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
