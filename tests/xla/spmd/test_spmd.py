"""All four of torch_xla's devices on the processor, driven from this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.xla.rows import TOLERANCES, near, trained, written_elsewhere

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import Strategy, XLASPMDStrategy
from drivetrain.testing._regression import Small
from drivetrain.testing.strategy_conformance import StrategyConformance

DEVICES = 4


class _Suite(StrategyConformance):
    """The suite for strategies; batches are global ones."""

    accelerator = "xla"
    resumes_bit_by_bit = False

    def trainer(self, strategy: Strategy | None = None, **arguments: Any) -> Trainer:
        return super().trainer(strategy, **{"devices": DEVICES, "num_nodes": 1, **arguments})


class TestData(_Suite):
    strategy = XLASPMDStrategy


def full() -> XLASPMDStrategy:
    return XLASPMDStrategy(sharding="full")


class TestFull(_Suite):
    strategy = full
    test_a_verb_that_only_calls_super_changes_nothing = None  # TestData has it, and it compiles much


def spec(tensor: Any) -> str:
    import torch_xla

    found: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return found


class Watched(Small):
    """Notes how its tensors lie on the devices."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_spec = spec(batch[0])

    def on_train_end(self) -> None:
        self.specs = {name: spec(parameter) for name, parameter in self.named_parameters()}
        optimizer: Any = self.optimizers()
        self.state_spec = spec(optimizer.state[self.net[0].weight]["exp_avg"])


def test_batches_are_sharded_and_parameters_only_if_asked() -> None:
    found = {}
    for sharding in ("data", "full"):
        strategy = XLASPMDStrategy(sharding=sharding)  # type: ignore[arg-type]
        module = Watched()
        suite = TestData()
        suite.fit(module, suite.trainer(strategy, precision="32-true", max_epochs=1))
        assert module.batch_spec == "{devices=[4,1]0,1,2,3}"
        assert strategy.world_size == 1
        found[sharding] = module
    whole = set(found["data"].specs.values()) | {found["data"].state_spec}
    assert all("devices=[" not in each for each in whole), whole
    assert found["full"].specs["net.0.weight"] == "{devices=[4,1]0,1,2,3}"  # (8, 4)
    assert found["full"].specs["net.2.weight"] == "{devices=[1,4]0,1,2,3}"  # (3, 8)
    assert "devices=[" not in found["full"].specs["scale"]  # three values
    assert found["full"].state_spec == "{devices=[4,1]0,1,2,3}"
    for name, weight in found["data"].state_dict().items():
        torch.testing.assert_close(found["full"].state_dict()[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["xla_spmd", "xla_spmd_full"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "bf16-mixed"])
def test_it_trains_to_the_numbers_of_64_bits_on_the_host(strategy: str, precision: str) -> None:
    near(trained(strategy, precision=precision), TOLERANCES[precision])


@pytest.mark.parametrize("strategy", ["xla_spmd", "xla_spmd_full"])
def test_it_resumes_from_a_file_that_was_written_elsewhere(strategy: str, tmp_path: Path) -> None:
    near(trained(strategy, written_elsewhere(tmp_path), precision="32-true"), TOLERANCES["32-true"])


def test_all_devices_or_none() -> None:
    with pytest.raises(ConfigurationError, match=r"computes on all 4 XLA devices, not on devices=1"):
        trained("xla_spmd", devices=1)
