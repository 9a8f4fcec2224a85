"""XLAStrategy's rules on the real torch_xla, with one replica. tests/strategies/test_xla.py has two, on a stand-in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.xla.rows import Model, loader, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine
from drivetrain.clusters import XLAEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import XLALauncher
from drivetrain.strategies import DDPStrategy, XLAStrategy


@pytest.fixture
def strategy() -> Any:
    """The strategy of an Engine that has launched."""
    engine = Engine(accelerator="xla", devices=1, strategy="xla")
    engine.launch()
    return engine.strategy


def on_device(strategy: Any, *values: Any, **options: Any) -> torch.Tensor:
    return torch.tensor(*values, device=strategy.root_device, **options)


def test_s4_1_s4_2_before_the_replica_runs() -> None:
    strategy = XLAStrategy()
    assert isinstance(strategy, DDPStrategy)
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size) == (0, 0, 0, 1)
    with pytest.raises(RuntimeError, match="unknown before the replicas run"):
        _ = strategy.root_device
    strategy.barrier("nowhere")
    with pytest.raises(TypeError, match="XLAStrategy has no argument gradient_as_bucket_view=True"):
        XLAStrategy(gradient_as_bucket_view=True)


def test_s4_3_ranks_and_device_are_the_runtimes(strategy: Any) -> None:
    assert strategy.root_device.type == "xla"
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size) == (0, 0, 0, 1)
    environment = XLAEnvironment()
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (1, 0, 0)
    assert environment.node_rank() == 0


def test_s4_4_tied_weights_stay_tied_and_s4_5_nothing_is_wrapped() -> None:
    seen: dict[str, Any] = {}

    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 16)
            self.other.weight = self.net[0].weight

        def on_train_start(self) -> None:
            seen["tied"] = self.other.weight is self.net[0].weight
            seen["device"] = self.other.weight.device.type
            seen["model"] = self.trainer.strategy.model is self

    trainer("xla", devices=1).fit(Tied(), loader())
    assert seen == {"tied": True, "device": "xla", "model": True}


@pytest.mark.parametrize("workers", [0, 2])
def test_s4_6_loaders_are_torch_xlas_and_wrapped_once(strategy: Any, workers: int) -> None:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    plain = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=workers)
    wrapped = strategy.process_dataloader(plain)
    assert isinstance(wrapped, MpDeviceLoader)
    assert strategy.process_dataloader(wrapped) is wrapped
    assert (wrapped.dataset, wrapped.batch_sampler, len(wrapped)) == (plain.dataset, plain.batch_sampler, 3)
    for _ in range(2):
        batches = [batch[0] for batch in wrapped]
        assert {batch.device.type for batch in batches} == {"xla"}
        assert torch.cat(batches).tolist() == list(range(6))
    next(iter(wrapped))  # a pass that is left early
    strategy.teardown()


def test_s4_6_a_fit_with_workers() -> None:
    model = Model()
    workers = DataLoader(loader().dataset, batch_size=8, num_workers=2)
    trainer("xla", devices=1, max_epochs=1).fit(model, workers)
    other = Model()
    trainer("xla", devices=1, max_epochs=1).fit(other, loader())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_s4_8_one_replica_stacks_as_several(strategy: Any) -> None:
    gathered = strategy.all_gather(on_device(strategy, [1.0, 2.0]))
    assert (tuple(gathered.shape), gathered.device.type) == ((1, 2), "xla")
    assert strategy.all_gather(on_device(strategy, 3)).tolist() == [3]
    assert strategy.all_gather(torch.tensor([True])).tolist() == [[True]]  # of the host, and back there
    assert strategy.all_gather(torch.tensor([True])).device.type == "cpu"
    assert strategy.all_gather(torch.tensor([1 + 2j])).tolist() == [[1 + 2j]]
    weight = on_device(strategy, [1.0, 2.0], requires_grad=True)
    (strategy.all_gather(weight, group=object(), sync_grads=True) * 3).sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]
    with pytest.raises(NotImplementedError, match="takes tensors, and got a list"):
        strategy.all_gather([1.0])


def test_s4_9_barrier(strategy: Any) -> None:
    strategy.barrier()
    strategy.barrier("a name", "more", tag="more")


def test_s4_10_broadcast_keeps_shape_and_device(strategy: Any) -> None:
    scalar = strategy.broadcast(on_device(strategy, 2.5))
    assert (scalar.shape, scalar.item(), scalar.device.type) == ((), 2.5, "xla")
    assert strategy.broadcast(torch.tensor([[1, 2]])).tolist() == [[1, 2]]
    assert strategy.broadcast(torch.tensor([True, False])).tolist() == [True, False]
    assert strategy.broadcast({"any": {1, 2}}) == {"any": {1, 2}}


def test_s4_11_reduce(strategy: Any) -> None:
    tensor = on_device(strategy, [1.0, 3.0])
    for operation in (None, "mean", "avg", "sum", "SUM", torch.distributed.ReduceOp.MAX):
        assert strategy.reduce(tensor, object(), operation).tolist() == [1.0, 3.0]
    assert strategy.reduce("text") == "text"
    assert strategy.reduce(7) == 7


def test_s4_12_s4_13_checkpoints(strategy: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    strategy.save_checkpoint({"weight": on_device(strategy, [1.0]) * 2}, path)
    assert torch.load(path, weights_only=True)["weight"].tolist() == [2.0]
    with pytest.raises(TypeError, match="takes no storage_options"):
        strategy.save_checkpoint({}, path, storage_options={"a": 1})
    strategy.remove_checkpoint(path)
    assert not path.exists()


def test_s4_14_debug_is_on_during_a_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PT_XLA_DEBUG", raising=False)
    seen: list[str | None] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(os.environ.get("PT_XLA_DEBUG"))

    trainer("xla_debug", devices=1, max_epochs=1, limit_train_batches=1, callbacks=[Look()]).fit(Model(), loader())
    assert seen == ["1"]
    assert "PT_XLA_DEBUG" not in os.environ


def test_s4_15_plain_strategies_are_refused() -> None:
    for name in ("ddp", "single_device"):
        with pytest.raises(ConfigurationError, match="needs a strategy that is made for it"):
            trainer(name, devices=1)
    assert type(trainer("auto", devices=1).strategy).__name__ == "SingleDeviceXLAStrategy"


def test_s4_16_a_second_fit_works_and_a_runtime_that_has_started_is_not_copied() -> None:
    model, again = Model(), trainer("xla", devices=1, max_epochs=1)
    again.fit(model, loader())
    before = [parameter.clone() for parameter in model.parameters()]
    again.fit_loop.max_epochs = 2
    again.fit(model, loader())
    assert not torch.equal(before[0], next(model.parameters()))
    with pytest.raises(ConfigurationError, match="runtime has started in this process"):
        XLALauncher(XLAEnvironment(), 2).launch(print)
