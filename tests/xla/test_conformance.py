"""The strategies and the accelerator on one XLA device, through the suites that authors of such run."""

from __future__ import annotations

import torch

from drivetrain import seed_everything
from drivetrain.accelerators import XLAAccelerator
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.strategies import SingleDeviceXLAStrategy, XLAStrategy
from drivetrain.testing.conformance import AcceleratorConformance
from drivetrain.testing.strategy_conformance import StrategyConformance


class TestSingleDeviceXLA(StrategyConformance):
    strategy = SingleDeviceXLAStrategy
    accelerator = "xla"
    resumes_bit_by_bit = False  # torch_xla compiles a window in other pieces where a checkpoint has read its gradients


class TestXLA(StrategyConformance):
    strategy = XLAStrategy
    accelerator = "xla"
    resumes_bit_by_bit = False  # torch_xla compiles a window in other pieces where a checkpoint has read its gradients


class TestTheAccelerator(AcceleratorConformance):
    accelerator = XLAAccelerator

    def test_random_state_is_saved_and_restored(self) -> None:
        """The suite's row, with ``seed_everything``: ``torch.manual_seed`` does not reach torch_xla's generator."""
        device = self.device
        torch.zeros(1, device=device)
        seed_everything(3)
        state = rng_state()
        first, second = (torch.rand(100, device=device).cpu() for _ in range(2))
        assert not torch.equal(first, second)
        set_rng_state(state)
        assert torch.equal(torch.rand(100, device=device).cpu(), first)
        seed_everything(3)
        assert torch.equal(torch.rand(100, device=device).cpu(), first)
