"""Mistakes in programs on Fabric."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.collectives import SingleDeviceCollective, TorchCollective
from lightning.fabric.plugins.precision import DoublePrecision
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.compat.mistakes.common import Mistakes, loader
from torch import nn


class Net(nn.Linear):
    """A layer with another method."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def other(self, value: Any) -> Any:
        return self(value)


def make(**arguments: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, **arguments)


def parts() -> tuple[Any, Any, Any]:
    """A Fabric, a model and its optimizer."""
    fabric = make()
    net = Net()
    return fabric, net, torch.optim.SGD(net.parameters(), lr=0.1)


def ready(fabric: Any = None) -> tuple[Any, Any, Any]:
    """The same, set up."""
    _, net, optimizer = parts()
    fabric = fabric or make()
    return fabric, *fabric.setup(net, optimizer)


def fsdp(method: str = "load_checkpoint", path: str = "a.ckpt", **arguments: Any) -> None:
    """Call a method of an FSDPStrategy that no Fabric has, with a file and a folder that are no checkpoints of it."""
    os.mkdir("empty")
    torch.save({"other": 1}, "a.ckpt")
    getattr(FSDPStrategy(parallel_devices=[torch.device("cpu")]), method)(path, **arguments)


def setup_again() -> None:
    fabric, net, _ = ready()
    fabric.setup(net)


def setup_optimizer_again() -> None:
    fabric, _, optimizer = ready()
    fabric.setup(Net(), optimizer)


def setup_module_again() -> None:
    fabric, net, _ = ready()
    fabric.setup_module(net)


def setup_optimizers_again() -> None:
    fabric, _, optimizer = ready()
    fabric.setup_optimizers(optimizer)


def setup_loader_again() -> None:
    fabric = make()
    fabric.setup_dataloaders(fabric.setup_dataloaders(loader()))


def clip(**options: Any) -> None:
    fabric, net, optimizer = ready()
    fabric.clip_gradients(net, optimizer, **options)


def marked(method: Any) -> None:
    _, net, _ = ready()
    net.mark_forward_method(method)


def other_method() -> None:
    _, net, _ = ready(make(precision="bf16-mixed"))
    net.other(torch.ones(1, 2))


def own_backward() -> None:
    _, net, _ = ready(make(precision="16-mixed"))
    net(torch.ones(1, 2)).sum().backward()


def load(state: Any, saved: Any = None, **options: Any) -> None:
    fabric = make()
    fabric.save("a.ckpt", {"a": 1} if saved is None else saved)
    fabric.load("a.ckpt", state, **options)


def collective_twice() -> None:
    collective = SingleDeviceCollective()
    collective.create_group()
    collective.create_group()


MISTAKES: Mistakes = {
    "accelerator": lambda: Fabric(accelerator="nonsense"),
    "accelerator_gpu": lambda: Fabric(accelerator="gpu", devices=1),
    "accelerator_cuda": lambda: Fabric(accelerator="cuda", devices=1),
    "devices": lambda: Fabric(accelerator="cpu", devices=0),
    "devices_text": lambda: Fabric(accelerator="cpu", devices="nonsense"),
    "num_nodes": lambda: make(num_nodes=0),
    "strategy": lambda: make(strategy="nonsense"),
    "strategy_type": lambda: make(strategy=3),
    "strategy_fsdp": lambda: make(strategy="fsdp"),
    "precision": lambda: make(precision="nonsense"),
    "plugin": lambda: make(plugins=[3]),
    "plugins_twice": lambda: make(plugins=[DoublePrecision(), DoublePrecision()]),
    "precision_twice": lambda: make(precision="64-true", plugins=[MixedPrecision("bf16-mixed", "cpu")]),
    "accelerator_in_strategy": lambda: make(strategy=DDPStrategy(accelerator=CPUAccelerator())),
    "precision_in_strategy": lambda: make(strategy=DDPStrategy(precision=DoublePrecision()), plugins=DoublePrecision()),
    "unknown": lambda: make(nonsense=1),
    "setup_again": setup_again,
    "setup_optimizer_again": setup_optimizer_again,
    "setup_module_again": setup_module_again,
    "setup_optimizers_again": setup_optimizers_again,
    "setup_loader_again": setup_loader_again,
    "setup_nothing": lambda: make().setup(),
    "setup_no_module": lambda: make().setup(3),
    "setup_no_optimizer": lambda: make().setup(Net(), 3),
    "setup_no_optimizers": lambda: make().setup_optimizers(),
    "setup_no_loaders": lambda: make().setup_dataloaders(),
    "setup_loader_list": lambda: make().setup_dataloaders([1, 2]),
    "setup_loader_number": lambda: make().setup_dataloaders(3),
    "spawn_without_function": lambda: Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(),
    "launch_number": lambda: make().launch(3),
    "launch_no_argument": lambda: make().launch(lambda: None),
    "backward_before_setup": lambda: make().backward(torch.zeros((), requires_grad=True)),
    "own_backward": own_backward,
    "other_method": other_method,
    "clip_both": lambda: clip(clip_val=1.0, max_norm=1.0),
    "clip_neither": lambda: clip(),
    "mark_forward": lambda: marked("forward"),
    "mark_unknown": lambda: marked("nonsense"),
    "mark_number": lambda: marked(3),
    "no_sync_before_setup": lambda: make().no_backward_sync(Net()).__enter__(),
    "save_filter_type": lambda: make().save("a.ckpt", {"a": 1}, filter=3),
    "save_filter_key": lambda: make().save("a.ckpt", {"a": 1}, filter={"b": lambda k, v: True}),
    "save_filter_value": lambda: make().save("a.ckpt", {"a": 1}, filter={"a": 3}),
    "save_number": lambda: make().save("a.ckpt", 3),
    "fsdp_load_missing": lambda: fsdp(path="nonexistent", state={"model": Net()}),
    "fsdp_load_empty_folder": lambda: fsdp(path="empty", state={"model": Net()}),
    "fsdp_load_without_the_model": lambda: fsdp(state={"model": Net()}),
    "fsdp_load_another_model": lambda: fsdp(state=Net()),
    "fsdp_save_options": lambda: fsdp("save_checkpoint", "b", state={"model": Net()}, storage_options={"a": 1}),
    "load_missing": lambda: make().load("nonexistent.ckpt"),
    "load_raw_missing": lambda: make().load_raw("nonexistent.ckpt", Net()),
    "load_missing_key": lambda: load({"b": 1}),
    "load_missing_model": lambda: load({"model": Net()}),
    "load_other_shapes": lambda: load({"model": nn.Linear(3, 3)}, {"model": Net()}),
    "load_number": lambda: load(3),
    "log_without_logger": lambda: make().log("a", 1.0),
    "logger_without_logger": lambda: make().logger,
    "call_nonsense": lambda: make().call("nonsense"),
    "run_missing": lambda: make().run(),
    "sharded_model": lambda: make().sharded_model().__enter__(),
    "module_trainer": lambda: make().setup(BoringModel()).trainer.nonsense,
    "seed": lambda: Fabric.seed_everything(-1),
    "all_reduce_op": lambda: make().all_reduce(torch.zeros(1), reduce_op="nonsense"),
    "collective_without_group": lambda: TorchCollective().group,
    "collective_teardown": lambda: SingleDeviceCollective().teardown(),
    "collective_twice": collective_twice,
    "scalars": lambda: convert_tensors_to_scalars({"a": torch.zeros(2)}),
}
