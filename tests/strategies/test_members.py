"""Every member of a strategy as the field knows it: called, refused, or harmless. None is left out in silence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.compat.members import TABLES
from drivetrain.compat.overrides import members_of
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

# Strategy, ParallelStrategy and DDPStrategy of the 2.6 generation, private members that subclasses override included
FAMILIAR = frozenset({
    "__init__", "__getstate__", "__setstate__", "_configure_launcher", "_enable_model_averaging",
    "_get_process_group_backend", "_register_ddp_hooks", "_reset_optimizers_and_schedulers", "_setup_model",
    "_setup_model_and_optimizers", "_setup_optimizer", "accelerator", "all_gather", "backward", "barrier",
    "batch_to_device", "block_backward_sync", "broadcast", "checkpoint_io", "configure_ddp", "connect",
    "determine_ddp_device_ids", "distributed_sampler_kwargs", "global_rank", "handles_gradient_accumulation",
    "is_distributed", "is_global_zero", "launcher", "lightning_module", "lightning_module_state_dict",
    "lightning_restore_optimizer", "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict",
    "local_rank", "model", "model_sharded_context", "model_to_device", "node_rank", "num_nodes", "num_processes",
    "on_exception", "on_predict_end", "on_predict_start", "on_test_end", "on_test_start", "on_train_batch_start",
    "on_train_end", "on_train_start", "on_validation_end", "on_validation_start", "optimizer_state",
    "optimizer_step", "optimizers", "parallel_devices", "post_backward", "post_training_step", "pre_backward",
    "precision_plugin", "predict_step", "process_dataloader", "process_group_backend", "reduce",
    "reduce_boolean_decision", "register_strategies", "remove_checkpoint", "restore_checkpoint_after_setup",
    "root_device", "save_checkpoint", "set_world_ranks", "setup", "setup_distributed", "setup_environment",
    "setup_optimizers", "setup_precision_plugin", "teardown", "tensor_init_context", "test_step", "training_step",
    "validation_step", "world_size",
})  # fmt: skip

REFUSED, HARMLESS = TABLES["Strategy"].refused, TABLES["Strategy"].harmless
CALLED = FAMILIAR - REFUSED.keys() - HARMLESS

# no method: how a class says one of these is an attribute, which is read or set in every run
ATTRIBUTES = frozenset(
    {
        "accelerator", "checkpoint_io", "precision_plugin", "optimizers", "model", "parallel_devices",
        "is_distributed", "handles_gradient_accumulation", "restore_checkpoint_after_setup",
        "lightning_restore_optimizer", "process_group_backend", "num_nodes", "register_strategies",
        "__init__", "__setstate__",
    }
)  # fmt: skip


def test_every_member_is_one_of_the_contract_or_in_the_table() -> None:
    assert REFUSED.keys() | HARMLESS <= FAMILIAR
    assert not REFUSED.keys() & HARMLESS
    assert CALLED - {"__init__", "__getstate__", "__setstate__"} <= members_of(DDPStrategy) | vars(DDPStrategy()).keys()


def recording(base: type, called: set[str]) -> type:
    """A subclass that overrides every member in the table that is called, notes it, and does what the base does."""

    def method(name: str) -> Callable[..., Any]:
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return override

    def getter(name: str) -> property:
        def read(self: Any) -> Any:
            called.add(name)
            return getattr(super(made, self), name)

        return property(read)

    members: dict[str, Any] = {}
    for name in CALLED - ATTRIBUTES:
        members[name] = method(name) if callable(getattr(base, name, None)) else getter(name)
    made = type("Recording", (base,), members)
    return made


def run_everything(strategy: Callable[[], Any], folder: Path, data: Any, validated: Any) -> None:
    class Steps(validated):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.log("of all", 1.0, sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    class Failing(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError

    def trainer(**arguments: Any) -> Trainer:
        return Trainer(
            accelerator="cpu", devices=1, strategy=strategy(), logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0, **arguments,
        )  # fmt: skip

    loader, module = DataLoader(data, batch_size=8), Steps()
    first = trainer(max_epochs=2, accumulate_grad_batches=2)
    first.fit(module, loader, loader)
    assert first.checkpoint_callback is not None
    second = trainer(max_epochs=3)
    second.fit(module, loader, loader, ckpt_path=first.checkpoint_callback.best_model_path)
    second.validate(module, loader, verbose=False)
    second.test(module, loader, verbose=False)
    second.predict(module, loader)
    second.strategy.all_gather(torch.ones(1))
    second.strategy.reduce_boolean_decision(True)
    assert (second.local_rank, second.node_rank) == (0, 0)
    assert second.distributed_sampler_kwargs in (None, {"num_replicas": 1, "rank": 0})
    copy.copy(second.strategy)
    with pytest.raises(RuntimeError):
        trainer(max_epochs=1).fit(Failing(), loader, loader)


@pytest.mark.parametrize("base", [SingleDeviceStrategy, DDPStrategy])
def test_what_the_table_calls_called_is_called(base: type, tmp_path: Path, data: Any, validated: Any) -> None:
    called: set[str] = set()
    run_everything(recording(base, called), tmp_path, data, validated)
    of_several = {"block_backward_sync", "num_processes", "distributed_sampler_kwargs"}
    assert CALLED - ATTRIBUTES - called == (of_several if base is SingleDeviceStrategy else set())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_override_that_nobody_would_call_is_refused_by_name(name: str) -> None:
    strategy = type("Own", (SingleDeviceStrategy,), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=rf"Own overrides {name}, which is never called here") as caught:
        Trainer(accelerator="cpu", strategy=strategy())
    assert str(caught.value).endswith(REFUSED[name])


def test_a_strategy_by_name_is_looked_at_too() -> None:
    cls = type("Named", (SingleDeviceStrategy,), {"configure_ddp": lambda self: None})
    StrategyRegistry.register("a_name_of_a_test", cls)
    try:
        with pytest.raises(ConfigurationError, match="Named overrides configure_ddp"):
            Trainer(accelerator="cpu", strategy="a_name_of_a_test")
    finally:
        StrategyRegistry.remove("a_name_of_a_test")


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_harmless_override_is_said_once(name: str) -> None:
    strategy = type("Own", (SingleDeviceStrategy,), {name: lambda self: None})
    with pytest.warns(UserWarning, match=f"Own overrides {name}, which is not called here"):
        Trainer(accelerator="cpu", strategy=strategy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(accelerator="cpu", strategy=strategy())


def test_own_members_of_a_strategy_are_nobodys_business() -> None:
    strategy = type("Own", (SingleDeviceStrategy,), {"anything": lambda self: None, "_helper": 3})
    Trainer(accelerator="cpu", strategy=strategy())
