"""Every precision under every strategy of two processes: it trains, or says what to write instead."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.precision import MixedPrecision
from drivetrain.strategies import ModelParallelStrategy, PipelineStrategy

RANKS, BATCH, STEPS = 2, 8, 4
TYPES = {
    "32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.float32, "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16, "16-true": torch.float16,
}  # fmt: skip
IN_SHORT = (
    "16-mixed",
    "bf16-true",
)  # one that scales losses, and one of other types: the rest runs in make test-faults
LONG = bool(os.environ.get("DRIVETRAIN_FAULTS"))
PRECISIONS = [*TYPES] if LONG else [*IN_SHORT]


class Net(LightningModule):
    tp_plan: ClassVar = {"net.0": "colwise", "net.2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y.to(x.dtype))

    def configure_pipeline(self, num_stages: int) -> Any:
        return [self.net[:2], self.net[2:]], lambda output, target: F.mse_loss(output, target.to(output.dtype))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen |= {each.dtype for each in self.parameters() if not each.is_meta}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any, precision: str, **options: Any) -> tuple[dict[str, Tensor], Net]:
    """The weights after four steps, complete and in 32 bits, on rank 0."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 8, generator=generator)
    given: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # torch's first scale makes gradients overflow, and steps are skipped
        given = {"plugins": MixedPrecision(precision, scaler=torch.amp.GradScaler("cpu", init_scale=64.0))}
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=1.0,
        **given, **options,
    )  # fmt: skip
    net, data = Net(), TensorDataset(x, x.sum(1, keepdim=True))
    replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    trainer.fit(net, DataLoader(data, batch_size=BATCH // replicas))
    assert trainer.global_step == STEPS
    state = trainer.strategy.lightning_module_state_dict()
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
    return {name: each.float() for name, each in whole.items()}, net


def make(name: str) -> Any:
    if name == "model_parallel":
        return ModelParallelStrategy(tensor_parallel_size=RANKS)
    return PipelineStrategy(num_microbatches=2) if name == "pipeline" else name


def under_each_precision(name: str, precisions: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    done = {}
    for precision in precisions:
        if name == "pipeline" and precision == "16-mixed":
            with pytest.raises(ConfigurationError, match='Write precision="bf16-mixed"'):
                trained(make(name), precision, devices=RANKS)
            continue
        weights, net = trained(make(name), precision, devices=RANKS)
        assert net.seen == {TYPES[precision]}
        done[precision] = weights
    return done


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return trained("single_device", "32-true", devices=1)[0]


def check(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    near = 1e-5 if precision in ("32-true", "64-true") else 0.05
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "model_parallel", "pipeline", "horovod"])
def test_each_precision_trains_under_each_strategy(name: str, pool: Any, expected: dict[str, Tensor]) -> None:
    found = pool.run(under_each_precision, name, PRECISIONS, world_size=RANKS, group=False)[0]
    assert found.keys() == set(PRECISIONS) - ({"16-mixed"} if name == "pipeline" else set())
    for precision, weights in found.items():
        check(weights, expected, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_precision_trains_with_several_devices_in_one_process(precision: str, expected: dict[str, Tensor]) -> None:
    found, net = trained("dp", precision, devices=2)
    assert net.seen == {TYPES[precision]}
    check(found, expected, precision)
