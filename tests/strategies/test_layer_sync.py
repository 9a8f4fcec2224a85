"""A layer sync of the user's: applied to the model of a fit before it is wrapped, and reverted at its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain import Engine
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy, LayerSync, LayerSyncRegistry, ParallelStrategy, TorchSyncBatchNorm
from drivetrain.strategies.batchnorm import _Synchronised


class Recording(LayerSync):
    """Replaces the first layer of the net for the time of a fit."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.layer: Any = None

    def apply(self, model: nn.Module) -> nn.Module:
        self.calls.append(f"apply to {type(model).__name__}")
        self.layer, model.net[0] = model.net[0], nn.Sequential(model.net[0])  # type: ignore[index, operator]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.calls.append(f"revert {type(model).__name__}")
        model.net[0] = self.layer  # type: ignore[operator]
        return model

    def count_batches(self, model: nn.Module, counts: bool) -> None:
        self.calls.append(f"counts {counts}")


def watched(base: type, sync: Recording) -> Any:
    class Watched(base):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sync.calls.append(f"step of {type(self.trainer.model).__name__}")
            assert isinstance(self.net[0], nn.Sequential)
            return super().training_step(batch, batch_idx)

    return Watched()


def test_it_is_applied_before_the_model_is_wrapped_and_reverted_at_the_end(
    make_trainer: Any, validated: Any, loader: Any
) -> None:
    sync = Recording()
    module = watched(validated, sync)
    trainer = make_trainer(plugins=[sync], strategy="ddp", devices=1, limit_train_batches=1)
    trainer.fit(module, loader, loader)
    assert sync.calls == ["apply to Watched", f"step of {DistributedDataParallel.__name__}", "revert Watched"]
    assert isinstance(module.net[0], nn.Linear)
    sync.calls.clear()
    trainer.validate(module, loader, verbose=False)
    assert sync.calls == []  # evaluation takes the layers as they are


def test_it_is_reverted_after_an_exception(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Fails(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("on purpose")

    sync, module = Recording(), Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(plugins=[sync], strategy="ddp", devices=1).fit(module, loader)
    assert sync.calls == ["apply to Fails", "revert Fails"]
    assert isinstance(module.net[0], nn.Linear)


def test_a_batch_that_a_rank_repeats_does_not_count() -> None:
    sync = Recording()
    strategy = DDPStrategy()
    strategy._sync = sync
    strategy.repeat_batch(True)
    strategy.repeat_batch(False)
    assert sync.calls == ["counts False", "counts True"]


def test_what_the_argument_means_is_one_too() -> None:
    sync = LayerSyncRegistry.get("sync_batchnorm")
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert isinstance(sync, TorchSyncBatchNorm)
    assert sync.apply(model) is model
    assert isinstance(model[0], _Synchronised)
    sync.count_batches(model, False)
    assert model[0].counts is False
    assert sync.revert(model) is model
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("plugin", [TorchSyncBatchNorm(), "sync_batchnorm"])
def test_it_may_stand_beside_the_argument(plugin: Any, make_trainer: Any, regression: Any, loader: Any) -> None:
    make_trainer(plugins=plugin, sync_batchnorm=True).fit(regression(), loader)


def test_two_that_change_layers_are_an_error(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match="sync_batchnorm=True.* and the Recording in plugins both change"):
        make_trainer(plugins=[Recording()], sync_batchnorm=True)


def test_a_strategy_that_would_not_apply_it_is_an_error(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Several(ParallelStrategy):
        world_size = property(lambda self: 2)  # type: ignore[assignment]

    strategy = Several(parallel_devices=[torch.device("cpu")])
    strategy.layer_sync = Recording()
    trainer = make_trainer()
    trainer.progress.fn = "fit"
    with pytest.raises(ConfigurationError, match="The Recording in plugins synchronises .*Several does not do"):
        strategy.setup(trainer)


def test_an_engine_says_that_it_applies_none() -> None:
    with pytest.raises(
        ConfigurationError, match="Engine got the Recording in plugins, and only a Trainer's fit applies"
    ):
        Engine(accelerator="cpu", plugins=[Recording()])
