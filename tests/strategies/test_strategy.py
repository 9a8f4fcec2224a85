"""The contract's own answers: what a strategy does with state unless it overrides the verb."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.accelerators import CPUAccelerator
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.errors import CheckpointError
from drivetrain.precision import DoublePrecision, HalfPrecision
from drivetrain.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry


def strategy_with(*optimizers: torch.optim.Optimizer, module: nn.Module | None = None) -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(accelerator=CPUAccelerator())
    strategy.connect(nn.Linear(2, 1) if module is None else module)
    strategy.optimizers = list(optimizers)
    return strategy


def stepped(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_each_optimizer_gets_its_entry() -> None:
    saved = [stepped(nn.Linear(2, 1), 0.1).state_dict(), stepped(nn.Linear(2, 1), 0.2).state_dict()]
    optimizers = [torch.optim.Adam(nn.Linear(2, 1).parameters()) for _ in saved]
    strategy_with(*optimizers).load_optimizer_state_dict({"optimizer_states": saved, "state_dict": {}})
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1, 0.2]
    for optimizer, state in zip(optimizers, saved, strict=True):
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_another_number_of_optimizers_is_an_error() -> None:
    strategy = strategy_with(stepped(nn.Linear(2, 1)))
    with pytest.raises(CheckpointError, match="holds 2 optimizer states, and configure_optimizers made 1"):
        strategy.load_optimizer_state_dict({"optimizer_states": [{}, {}]})


def test_a_state_that_does_not_fit_is_an_error_that_names_the_optimizer() -> None:
    state = stepped(nn.Linear(2, 1)).state_dict()
    del state["state"][0]["exp_avg"]
    strategy = strategy_with(stepped(nn.Linear(2, 1)))
    with pytest.raises(CheckpointError, match=r"optimizer 0 \(Adam\).*exp_avg"):
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})


def test_a_strategy_keeps_nothing_of_a_rank_unless_it_says_so() -> None:
    strategy = strategy_with()
    assert strategy.rank_state(nn.Linear(1, 1)) == {}
    strategy.load_rank_state(nn.Linear(1, 1), {})


@pytest.mark.parametrize("entry", list(StrategyRegistry.entries()), ids=lambda entry: entry.name)
def test_every_barrier_takes_the_arguments_of_other_libraries(entry: Any) -> None:
    inspect.signature(entry.cls.barrier).bind(None, "name", "more", tag="more")


def test_a_barrier_uses_its_name_alone() -> None:
    strategy_with().barrier("name", "more", tag="more")


def test_storage_options_reach_a_store_that_takes_them(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Store(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            asked.append(storage_options)
            super().save_checkpoint(checkpoint, path)

    strategy = SingleDeviceStrategy(accelerator=CPUAccelerator(), checkpoint_io=Store())
    strategy.save_checkpoint({"a": 1}, tmp_path / "one.ckpt", storage_options={"token": 1})
    assert asked == [{"token": 1}]
    with pytest.raises(TypeError, match="takes no storage_options"):
        strategy_with().save_checkpoint({"a": 1}, tmp_path / "two.ckpt", storage_options={"token": 1})


def test_what_to_read_into_is_a_hint(tmp_path: Path) -> None:
    strategy = strategy_with()
    strategy.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert strategy.load_checkpoint(tmp_path / "a.ckpt", None, {"model": nn.Linear(2, 1)}) == {"a": 1}
    assert strategy.load_checkpoint(tmp_path / "a.ckpt", weights_only=True, into=None) == {"a": 1}


# ---- before or after set-up ------------------------------------------------------------------------------------------


class Recording(SingleDeviceStrategy):
    """Writes down the order in which its verbs are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup(self, trainer: Any) -> None:
        self.calls.append("setup")
        super().setup(trainer)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("load_checkpoint")
        return super().load_checkpoint(*args, **kwargs)

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("load_model_state_dict")
        super().load_model_state_dict(*args, **kwargs)

    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        assert len(self.optimizers) == 1
        self.calls.append("load_optimizer_state_dict")
        super().load_optimizer_state_dict(*args, **kwargs)


class RecordingAfter(Recording):
    restore_checkpoint_after_setup = True


class Counting(Callback):
    """Has a state, which is restored with the rest."""

    batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


@pytest.mark.parametrize("kind", [Recording, RecordingAfter])
def test_a_checkpoint_is_restored_before_or_after_setup(
    kind: type[Recording], make_trainer: Any, regression: type[LightningModule], loader: Any, tmp_path: Path
) -> None:
    def fitted(epochs: int, path: Path | None = None, saves: Path | None = None) -> tuple[Any, Trainer, Counting]:
        torch.manual_seed(1)
        module, counting = regression(dropout=0.3), Counting()
        trainer = make_trainer(max_epochs=epochs, strategy=kind(), callbacks=[counting])
        trainer.fit(module, loader, ckpt_path=path)
        if saves is not None:
            trainer.save_checkpoint(saves)
        return module.state_dict(), trainer, counting

    first = tmp_path / "first.ckpt"
    fitted(1, saves=first)
    whole, _, _ = fitted(2)
    resumed, trainer, counting = fitted(2, first)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert counting.batches == 8
    after = kind is RecordingAfter
    expected = ["load_checkpoint", "load_model_state_dict"]
    assert trainer.strategy.calls == [  # type: ignore[attr-defined]
        *(["setup", *expected] if after else [*expected, "setup"]),
        "load_optimizer_state_dict",
    ]


@pytest.mark.parametrize(("precision", "dtype"), [(DoublePrecision(), torch.float64), (HalfPrecision(), torch.float16)])
def test_new_tensors_have_the_strategys_device_and_precision(precision: Any, dtype: torch.dtype) -> None:
    device = torch.device("meta")
    one = SingleDeviceStrategy(device, precision_plugin=precision)
    for strategy in (one, DDPStrategy(parallel_devices=[device], precision_plugin=precision)):
        with strategy.tensor_init_context():
            weight = nn.Linear(1, 1).weight
        assert (weight.dtype, weight.device) == (dtype, device)
    assert torch.ones(1).dtype is torch.float32


def test_a_launching_process_keeps_a_process_group_of_the_users() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        DDPStrategy().leave_process_group()  # as when the processes that it has started have ended
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_fit_in_one_process_keeps_a_process_group_of_the_users() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(accelerator="cpu", devices=1, strategy="ddp", fast_dev_run=True, enable_progress_bar=False)
    try:
        trainer.fit(BoringModel())
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
