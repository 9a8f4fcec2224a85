"""Every member of the composed accelerator: in a loop of the user's, through a Trainer, and overridden."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.legacy.v1_3 import (
    Accelerator,
    CPUAccelerator,
    DataParallelPlugin,
    DDPPlugin,
    PrecisionPlugin,
    SingleDevicePlugin,
    TrainingTypePlugin,
)
from drivetrain.legacy.v1_3.training_type_plugin import NEVER_USED

Batch = namedtuple("Batch", "x y")


class Net(LightningModule):
    """Has every step and logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def composed(**changes: Any) -> Accelerator:
    return Accelerator(PrecisionPlugin(), SingleDevicePlugin("cpu"), **changes)


def set_up(model: LightningModule, accelerator: Accelerator | None = None) -> Accelerator:
    """An accelerator in a loop of the user's, after its set-up."""
    accelerator = accelerator or composed()
    accelerator.connect(model)
    accelerator.setup_environment()
    with accelerator.model_sharded_context():
        pass
    accelerator.setup(None, model)
    accelerator.pre_dispatch(None)
    return accelerator


def batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    return Batch(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator))


# ---- in a loop of the user's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Accelerator, CPUAccelerator], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("plugin", [SingleDevicePlugin, DDPPlugin, DataParallelPlugin], ids=lambda p: p.__name__)
def test_e2_a_loop_of_ones_own_trains_as_the_plain_one(kind: Any, plugin: Any) -> None:
    plain, model = Net(), Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    accelerator = set_up(model, kind(PrecisionPlugin(), plugin()))
    for index in range(3):
        optimizer.zero_grad()
        plain.loss(batch()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        [own] = accelerator.optimizers
        accelerator.optimizer_zero_grad(0, index, own, 0)
        loss = accelerator.training_step({"batch": batch(), "batch_idx": index})
        returned = accelerator.backward(loss, own, 0, False)
        assert returned.grad_fn is None
        accelerator.clip_gradients(own, 0.5)
        accelerator.optimizer_step(own, 0, lambda: None)
    assert torch.equal(plain.net.weight, model.net.weight)
    accelerator.teardown()


def test_an_accelerator_serves_one_run_after_the_other() -> None:
    calls: list[str] = []
    accelerator = recording(Accelerator, ["setup_environment"], calls)(PrecisionPlugin(), SingleDevicePlugin("cpu"))
    set_up(Net(), accelerator).teardown()
    models = [Net(), Net()]
    for model in models:
        quiet(accelerator=accelerator).fit(model, loader())
    assert torch.equal(models[0].net.weight, models[1].net.weight)
    assert calls == ["setup_environment"] * 3


def test_s2_1_the_constructor_takes_two_plugins() -> None:
    precision, plugin = PrecisionPlugin(), SingleDevicePlugin()
    accelerator = Accelerator(precision, plugin)
    assert (accelerator.precision_plugin, accelerator.training_type_plugin) == (precision, plugin)
    with pytest.raises(TypeError):
        Accelerator(precision)  # type: ignore[call-arg]


def test_s2_2_all_gather_without_a_group_returns_the_tensor() -> None:
    accelerator = set_up(Net())
    assert accelerator.all_gather(torch.ones(2, 3)).shape == (2, 3)


def test_s2_2_all_gather_of_one_rank_with_a_group_has_a_dimension_of_ranks() -> None:
    accelerator = set_up(Net(), Accelerator(PrecisionPlugin(), DDPPlugin()))
    try:
        tensor = torch.ones(2, 3, requires_grad=True)
        gathered = accelerator.all_gather(tensor, sync_grads=True)
        assert gathered.shape == (1, 2, 3)
        gathered.sum().backward()
        assert torch.equal(tensor.grad, torch.ones(2, 3))  # type: ignore[arg-type]
    finally:
        accelerator.teardown()


def test_s2_4_a_batch_keeps_its_type() -> None:
    moved = set_up(Net()).batch_to_device(batch(), torch.device("cpu"), 0)
    assert type(moved) is Batch


def test_s2_4_a_batch_goes_through_the_modules_handler() -> None:
    class Own(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return [device, dataloader_idx]

    seen = []

    class Step(Own):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch)
            return self.net.weight.sum()

    trainer = quiet(accelerator=composed(), limit_train_batches=1)
    trainer.fit(Step(), loader())
    assert seen == [[torch.device("cpu"), 0]]


def test_s2_5_broadcast_returns_any_object() -> None:
    assert set_up(Net()).broadcast({"a": [1]}, src=0) == {"a": [1]}


@pytest.mark.parametrize("value", [None, 0, 0.0, -1])
def test_s2_6_no_clipping(value: Any) -> None:
    model = Net()
    accelerator = set_up(model)
    model.net.weight.grad = torch.full_like(model.net.weight, 3.0)
    accelerator.clip_gradients(accelerator.optimizers[0], value)
    assert model.net.weight.grad.abs().max() == 3


def test_s2_6_a_precision_plugin_gets_the_default_algorithm() -> None:
    class Clips(PrecisionPlugin):
        def clip_gradients(self, optimizer: Any, clip_val: Any, algorithm: Any) -> Any:  # type: ignore[override]
            return clip_val, algorithm

    accelerator = Accelerator(Clips(), SingleDevicePlugin("cpu"))
    assert accelerator.clip_gradients(None, clip_val=2.0) == (2.0, "norm")


def test_s2_6_clipping_by_norm_and_by_value_leaves_other_optimizers_alone() -> None:
    model, other = Net(), nn.Linear(2, 2)
    accelerator = set_up(model)
    for parameter in [*model.parameters(), *other.parameters()]:
        parameter.grad = torch.full_like(parameter, 3.0)
    accelerator.clip_gradients(accelerator.optimizers[0], 1.0, "norm")
    total = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
    assert torch.isclose(total, torch.tensor(1.0))
    accelerator.clip_gradients(accelerator.optimizers[0], 0.01, "value")
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) == pytest.approx(0.01)  # type: ignore[union-attr, type-var]
    assert other.weight.grad.min() == 3  # type: ignore[union-attr]


def test_s2_8_the_plain_members_connect_other_plugins() -> None:
    model = Net()
    accelerator = set_up(model)

    class Doubled(PrecisionPlugin):
        precision = 64

    class Own(SingleDevicePlugin):
        setups = 0

        def setup(self, model: Any) -> None:
            self.setups += 1

    precision, plugin = Doubled(), Own()
    with pytest.warns(FutureWarning, match=r"\(precision_plugin=Doubled\(\), ...\)"):
        accelerator.connect_precision_plugin(precision)
    with pytest.warns(FutureWarning, match=r"\(..., training_type_plugin=Own\(\)\)"):
        accelerator.connect_training_type_plugin(plugin, model)
    assert (accelerator.precision_plugin, accelerator.training_type_plugin) == (precision, plugin)
    assert plugin.setups == 1
    assert accelerator.strategy.precision_plugin is precision.today


def test_s2_14_a_closure_is_run_by_the_step_as_often_as_the_optimizer_wants() -> None:
    class Several(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    model = Several()
    accelerator = set_up(model)
    losses = []

    def closure() -> Any:
        model.zero_grad()
        loss = accelerator.training_step({"batch": batch(), "batch_idx": 0})
        losses.append(accelerator.backward(loss, accelerator.optimizers[0], 0, False))
        return losses[-1]

    accelerator.optimizer_step(accelerator.optimizers[0], 0, closure)
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def test_s2_18_and_s2_28_each_step_moves_its_batch_and_takes_values_by_position() -> None:
    class Renamed(Net):
        def validation_step(self, x: Any, i: int, which: int = 0) -> Any:
            return (type(x), i, which)

    accelerator = set_up(Renamed())
    kwargs = {"batch": batch(), "batch_idx": 3, "dataloader_idx": 1}
    assert accelerator.validation_step(kwargs) == (Batch, 3, 1)
    assert accelerator.test_step({"batch": batch(), "batch_idx": 0}).dim() == 0
    assert accelerator.predict_step({"batch": batch(), "batch_idx": 0}).shape == (8, 1)
    assert accelerator.to_device(kwargs)["batch"].x.device == accelerator.root_device


def test_s2_18_a_step_gets_as_many_values_as_it_takes() -> None:
    class Short(Net):
        def training_step(self, x: Any) -> Any:  # type: ignore[override]
            return self.loss(x)

    seen: list[Any] = []

    class Long(Net):
        def training_step(self, *args: Any) -> Any:
            seen.append(len(args))
            return self.loss(args[0])

    kwargs = {"batch": batch(), "batch_idx": 0}
    assert set_up(Short()).training_step(kwargs).requires_grad
    set_up(Long()).training_step(kwargs)
    quiet(accelerator=composed(), limit_train_batches=1).fit(Short(), loader())
    assert seen == [2]


def test_s2_22_rank_zero_writes_a_complete_checkpoint(tmp_path: Path) -> None:
    accelerator = set_up(Net())
    state = {"state_dict": accelerator.lightning_module_state_dict()}
    accelerator.save_checkpoint(state, tmp_path / "one.ckpt")
    assert torch.equal(torch.load(tmp_path / "one.ckpt")["state_dict"]["net.weight"], state["state_dict"]["net.weight"])


def test_s2_10_and_s2_13_states_are_plain() -> None:
    model = Net()
    accelerator = set_up(model)
    assert accelerator.lightning_module_state_dict().keys() == model.state_dict().keys()
    assert accelerator.optimizer_state(accelerator.optimizers[0])["param_groups"][0]["lr"] == 0.1


def test_s2_30_the_wrapped_model_and_the_users() -> None:
    model = Net()
    accelerator = set_up(model, CPUAccelerator(PrecisionPlugin(), DDPPlugin()))
    assert isinstance(accelerator.model, nn.parallel.DistributedDataParallel)
    assert accelerator.lightning_module is model
    accelerator.teardown()


# ---- through a Trainer -----------------------------------------------------------------------------------------------


def quiet(**arguments: Any) -> Trainer:
    return Trainer(**{
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0, **arguments,
    })  # fmt: skip


def loader() -> DataLoader[Any]:
    return DataLoader(list(zip(*batch(), strict=True)), batch_size=4)


def recording(base: type, names: list[str], calls: list[str], prefix: str = "") -> Any:
    def wrapped(name: str) -> Any:
        method = getattr(base, name)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(prefix + name)
            return method(self, *args, **kwargs)

        return call

    return type(base.__name__, (base,), {name: wrapped(name) for name in names})


ORDER = [
    "connect", "setup_environment", "module.setup", "model_sharded_context", "module.configure_sharded_model",
    "setup", "setup_training_type_plugin", "setup_optimizers", "module.configure_optimizers", "setup_precision_plugin",
    "module.on_fit_start", "pre_dispatch", "start_training", "dispatch", "on_train_start", "training_step",
    "on_train_epoch_end", "on_train_end", "post_dispatch", "teardown", "module.on_fit_end", "module.teardown",
]  # fmt: skip


@pytest.mark.parametrize("plugin", [SingleDevicePlugin, DDPPlugin], ids=lambda plugin: plugin.__name__)
def test_s2_20_the_order_of_a_run(plugin: Any) -> None:
    calls: list[str] = []

    class Sharded(Net):
        def configure_sharded_model(self) -> None:
            calls.append("module.configure_sharded_model")

    kind = recording(CPUAccelerator, [name for name in ORDER if "." not in name], calls)
    hooks = [name.partition(".")[2] for name in ORDER if "." in name and "sharded" not in name]
    model = recording(Sharded, hooks, calls, "module.")()
    trainer = quiet(accelerator=kind(PrecisionPlugin(), plugin()), limit_train_batches=1)
    trainer.fit(model, loader())
    assert calls == ORDER


def test_s2_9_s2_16_and_s2_23_the_order_of_the_plugins() -> None:
    calls: list[str] = []
    names = ["setup", "init_optimizers", "pre_dispatch", "dispatch", "post_dispatch"]
    plugin = recording(DDPPlugin, names, calls, "plugin.")()
    precision = recording(PrecisionPlugin, ["connect", *names[2:]], calls, "precision.")()
    quiet(accelerator=CPUAccelerator(precision, plugin), limit_train_batches=1).fit(Net(), loader())
    pairs = [f"{part}.{name}" for name in names[2:] for part in ("plugin", "precision")]
    assert calls == ["plugin.setup", "plugin.init_optimizers", "precision.connect", *pairs]


def test_s2_3_the_order_of_a_backward_pass() -> None:
    calls: list[str] = []

    class Own(Net):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            calls.append("module")
            loss.backward()

    plugin = recording(DDPPlugin, ["pre_backward", "post_backward"], calls)()
    kind = recording(CPUAccelerator, ["backward"], calls, "accelerator.")
    precision = recording(PrecisionPlugin, ["backward"], calls, "precision.")()
    quiet(accelerator=kind(precision, plugin), limit_train_batches=1).fit(Own(), loader())
    assert calls == ["accelerator.backward", "pre_backward", "precision.backward", "module", "post_backward"]


def test_s2_7_and_s2_24_module_and_ranks_are_known_in_the_setup_hook() -> None:
    seen = []

    class Own(Net):
        def setup(self, stage: str) -> None:
            plugin = accelerator.training_type_plugin
            seen.append((accelerator.lightning_module is self, torch.distributed.is_initialized(), plugin.world_size))

    accelerator = CPUAccelerator(PrecisionPlugin(), DDPPlugin())
    quiet(accelerator=accelerator, limit_train_batches=1).fit(Own(), loader())
    assert seen == [(True, True, 1)]


def test_s2_11_the_sharded_context_is_entered_once_around_the_hook() -> None:
    calls: list[str] = []

    class Own(CPUAccelerator):
        @contextmanager
        def model_sharded_context(self) -> Any:
            calls.append("in")
            with super().model_sharded_context():
                yield
            calls.append("out")

    class Sharded(Net):
        def configure_sharded_model(self) -> None:
            calls.append("hook")

    accelerator, model = Own(PrecisionPlugin(), SingleDevicePlugin()), Sharded()
    quiet(accelerator=accelerator, limit_train_batches=1).fit(model, loader())
    assert calls == ["in", "hook", "out"]


def test_s2_29_the_hook_is_called_once_for_a_module_whatever_trains_it() -> None:
    calls: list[str] = []

    class Sharded(Net):
        def configure_sharded_model(self) -> None:
            calls.append("hook")

    model = Sharded()
    for _ in range(2):
        accelerator = composed()
        assert accelerator.call_configure_sharded_model_hook
        quiet(accelerator=accelerator, limit_train_batches=1).fit(model, loader())
        assert accelerator.calls_sharded_hook(model) is False
    assert calls == ["hook"]


def test_s2_12_callbacks_module_and_accelerator_are_called_in_this_order() -> None:
    calls: list[str] = []
    names = ["on_train_start", "on_train_epoch_end", "on_train_end"]
    kind, net = recording(CPUAccelerator, names, calls, "a."), recording(Net, names, calls, "m.")
    callback = recording(Callback, names, calls, "c.")()
    trainer = quiet(accelerator=kind(PrecisionPlugin(), SingleDevicePlugin()), callbacks=[callback])
    trainer.fit(net(), loader())
    assert calls == [f"{party}.{name}" for name in names for party in "cma"]


@pytest.mark.filterwarnings("ignore:This epoch had losses")  # that is what a veto does
def test_s2_14_the_precision_plugin_may_veto_a_step() -> None:
    class Veto(PrecisionPlugin):
        def pre_optimizer_step(self, pl_module: Any, optimizer: Any, idx: int, closure: Any, **kwargs: Any) -> bool:
            closure()
            return False

    model = Net()
    before = model.net.weight.clone()
    trainer = quiet(accelerator=CPUAccelerator(Veto(), SingleDevicePlugin()))
    trainer.fit(model, loader())
    assert torch.equal(model.net.weight, before)
    assert trainer.global_step == 0


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_s2_25_only_a_fit_makes_optimizers(run: str) -> None:
    class Own(Net):
        def configure_optimizers(self) -> Any:
            raise AssertionError

    getattr(quiet(accelerator=composed(), limit_val_batches=1.0), run)(
        Own(), loader(), **({} if run == "predict" else {"verbose": False})
    )


def test_s2_26_a_plugin_that_swaps_the_optimizer_is_honoured() -> None:
    class Swap(PrecisionPlugin):
        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
            return model, [torch.optim.Adam(model.parameters())], lr_schedulers

    trainer = quiet(accelerator=CPUAccelerator(Swap(), SingleDevicePlugin()))
    trainer.fit(Net(), loader())
    assert [type(each) for each in trainer.optimizers] == [torch.optim.Adam]


def test_s2_27_teardown_waits_for_all_ranks_and_runs_after_an_exception() -> None:
    calls: list[str] = []
    kind = recording(CPUAccelerator, ["teardown", "barrier"], calls)

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("here")

    quiet(accelerator=kind(PrecisionPlugin(), SingleDevicePlugin())).fit(Net(), loader())
    assert calls[-2:] == ["teardown", "barrier"]
    with pytest.raises(RuntimeError, match="here"):
        quiet(accelerator=kind(PrecisionPlugin(), SingleDevicePlugin())).fit(Fails(), loader())
    assert calls[-1] == "teardown"  # without waiting for ranks that have failed


def test_s2_31_the_results_of_the_last_run() -> None:
    class Logs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.loss(batch))

    accelerator = composed()
    results = quiet(accelerator=accelerator, limit_val_batches=1.0).validate(Logs(), loader(), verbose=False)
    assert accelerator.results == results
    assert list(results[0]) == ["loss"]


def test_s2_32_optimizers_may_be_made_after_the_model_was_wrapped() -> None:
    class Late(DDPPlugin):
        setup_optimizers_in_pre_dispatch = True

    class Own(Net):
        def configure_optimizers(self) -> Any:
            seen.append(type(self.trainer.model).__name__)
            return super().configure_optimizers()

    seen: list[str] = []
    quiet(accelerator=CPUAccelerator(PrecisionPlugin(), Late())).fit(Own(), loader())
    quiet(accelerator=CPUAccelerator(PrecisionPlugin(), DDPPlugin())).fit(Own(), loader())
    assert seen == ["DistributedDataParallel", "Own"]


def test_s2_21_a_loader_may_be_replaced() -> None:
    class Own(CPUAccelerator):
        def process_dataloader(self, dataloader: Any) -> Any:
            return list(dataloader)[:1]

    trainer = quiet(accelerator=Own(PrecisionPlugin(), SingleDevicePlugin()))
    trainer.fit(Net(), loader())
    assert trainer.global_step == 1


def test_s2_19_the_modules_step_end_replaces_the_accelerators() -> None:
    calls: list[str] = []
    kind = recording(CPUAccelerator, ["training_step_end", "validation_step_end", "test_step_end"], calls)

    class Own(Net):
        def training_step_end(self, output: Any) -> Any:
            calls.append("own")
            return output

    trainer = quiet(accelerator=kind(PrecisionPlugin(), SingleDevicePlugin()), limit_train_batches=1)
    trainer.fit(Own(), loader())
    trainer = quiet(accelerator=kind(PrecisionPlugin(), SingleDevicePlugin()), limit_train_batches=1)
    trainer.fit(Net(), loader())
    trainer = quiet(accelerator=kind(PrecisionPlugin(), SingleDevicePlugin()), limit_val_batches=1.0)
    trainer.validate(Net(), loader(), verbose=False)
    trainer.test(Net(), loader(), verbose=False)
    assert calls == ["own", "training_step_end", *["validation_step_end"] * 2, *["test_step_end"] * 2]


# ---- overridden ------------------------------------------------------------------------------------------------------

IN_A_RUN = {
    Accelerator: [
        "all_gather", "backward", "batch_to_device", "broadcast", "clip_gradients", "connect", "dispatch",
        "lightning_module_state_dict", "model_sharded_context", "on_train_start", "on_train_epoch_end", "on_train_end",
        "optimizer_state", "optimizer_step", "optimizer_zero_grad", "pre_dispatch", "post_dispatch", "predict_step",
        "test_step", "validation_step", "training_step", "training_step_end", "validation_step_end", "test_step_end",
        "process_dataloader", "save_checkpoint", "setup", "setup_environment", "setup_optimizers",
        "setup_precision_plugin", "setup_training_type_plugin", "teardown", "to_device", "barrier", "start_training",
        "start_evaluating", "start_predicting", "run_optimizer_step", "post_training_step",
    ],
    PrecisionPlugin: [
        "connect", "backward", "pre_optimizer_step", "post_optimizer_step", "clip_gradients", "clip_grad_by_norm",
        "train_step_context", "val_step_context", "test_step_context", "predict_step_context", "pre_dispatch",
        "dispatch", "post_dispatch", "clip_grad_by_value", "master_params",
    ],
    DDPPlugin: [
        "connect", "setup_environment", "setup", "model_to_device", "init_optimizers", "pre_dispatch", "dispatch",
        "start_training", "start_evaluating", "start_predicting", "post_dispatch", "teardown", "train_step_context",
        "val_step_context", "test_step_context", "predict_step_context", "training_step", "validation_step",
        "test_step", "predict_step", "training_step_end", "validation_step_end", "test_step_end", "pre_backward",
        "post_backward", "optimizer_step", "post_optimizer_step", "barrier", "broadcast", "reduce", "all_gather",
        "process_dataloader", "on_save", "save_checkpoint", "lightning_module_state_dict", "optimizer_state",
        "model_sharded_context", "block_backward_sync", "reduce_boolean_decision", "configure_ddp",
        "pre_configure_ddp", "init_ddp_connection", "post_training_step",
    ],
}  # fmt: skip


class Uses(Net):
    """Also calls the collectives, as a program may."""

    def on_train_start(self) -> None:
        self.all_gather(torch.ones(1))
        self.trainer.strategy.broadcast(1)
        self.log("of all", 1.0, sync_dist=True)
        self.trainer.strategy.reduce_boolean_decision(True)


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The overridden members of each of the three classes that one run of each kind has called."""
    calls: dict[str, list[str]] = {cls.__name__: [] for cls in IN_A_RUN}
    kind, precision, plugin = (recording(cls, names, calls[cls.__name__]) for cls, names in IN_A_RUN.items())
    arguments: dict[str, Any] = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "limit_val_batches": 1.0}
    by_value = {**arguments, "gradient_clip_algorithm": "value"}
    quiet(accelerator=kind(precision(), plugin()), **by_value).fit(Net(), loader(), loader())
    trainer = quiet(accelerator=kind(precision(), plugin()), **arguments)
    trainer.fit(Uses(), loader(), loader())
    trainer.save_checkpoint(tmp_path_factory.mktemp("members") / "a.ckpt")
    trainer.validate(Net(), loader(), verbose=False)
    trainer.test(Net(), loader(), verbose=False)
    trainer.predict(Net(), loader())
    return {name: set(found) for name, found in calls.items()}


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls, names in IN_A_RUN.items() for name in names],
    ids=[f"{cls.__name__}.{name}" for cls, names in IN_A_RUN.items() for name in names],
)  # fmt: skip
def test_e2_an_override_of_any_member_is_called_by_a_trainer(called: dict[str, set[str]], cls: type, name: str) -> None:
    assert name in called[cls.__name__]


OF_TODAY = {
    "as_settings", "calls_sharded_hook", "make_today", "settings", "strategy_arguments", "take_precision",
    "connect_precision_plugin", "connect_training_type_plugin", "determine_ddp_device_ids",
}  # fmt: skip
"""Members that only this version has, or that only programs call."""


@pytest.mark.parametrize("cls", IN_A_RUN, ids=lambda cls: cls.__name__)
def test_no_member_is_missing_from_the_table_above(cls: type) -> None:
    bases = [base for base in cls.__mro__ if base.__module__.startswith("drivetrain.legacy")]
    own = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
    assert {name for name in own if not name.startswith("_")} - OF_TODAY == set(IN_A_RUN[cls])


@pytest.mark.parametrize("name", sorted(NEVER_USED))
def test_an_override_that_is_never_used_is_warned_of_by_name(name: str) -> None:
    with pytest.warns(UserWarning, match=f"Own overrides {name}, which is never used"):
        type("Own", (DDPPlugin,), {name: lambda self: None})


class WrapsItself(DDPPlugin):
    """Wraps the model as plugins of that time did."""

    def pre_configure_ddp(self) -> None:
        self._ddp_kwargs["find_unused_parameters"] = False

    def configure_ddp(self) -> None:
        self.pre_configure_ddp()
        self._model = DistributedDataParallel(
            self.model, device_ids=self.determine_ddp_device_ids(), bucket_cap_mb=7, **self._ddp_kwargs
        )
        self._register_ddp_hooks()


class ChangesArguments(DDPPlugin):
    def pre_configure_ddp(self) -> None:
        self._ddp_kwargs |= {"find_unused_parameters": False, "bucket_cap_mb": 7}


@pytest.mark.parametrize("plugin", [WrapsItself, ChangesArguments])
def test_the_model_is_wrapped_as_the_plugin_says(plugin: type[DDPPlugin]) -> None:
    class Looks(Net):
        def on_train_start(self) -> None:
            wrapper = self.trainer.strategy.model
            assert isinstance(wrapper, DistributedDataParallel)
            seen.append((wrapper.find_unused_parameters, wrapper.bucket_bytes_cap >> 20))

    seen: list[Any] = []
    model, plain = Looks(), Net()
    quiet(accelerator=CPUAccelerator(PrecisionPlugin(), plugin())).fit(model, loader())
    quiet().fit(plain, loader())
    assert seen == [(False, 7)]
    assert torch.equal(model.net.weight, plain.net.weight)


def test_the_processes_meet_as_the_plugin_says() -> None:
    class Meets(DDPPlugin):
        def init_ddp_connection(self, global_rank: Any = None, world_size: Any = None) -> None:
            seen.append((global_rank, world_size, torch.distributed.is_initialized()))
            super().init_ddp_connection(global_rank, world_size)
            seen.append(torch.distributed.is_initialized())

    seen: list[Any] = []
    quiet(accelerator=CPUAccelerator(PrecisionPlugin(), Meets())).fit(Net(), loader())
    assert seen == [(0, 1, False), True]


def test_the_sampler_of_a_plugin_is_used() -> None:
    class Shares(DDPPlugin):
        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            return {"num_replicas": 2, "rank": 1}

    class Counts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    seen: list[int] = []
    quiet(accelerator=CPUAccelerator(PrecisionPlugin(), Shares())).fit(Counts(), loader())
    assert seen == [4]  # of 8 samples


def test_the_epoch_ends_for_an_accelerator_that_takes_no_argument() -> None:
    class Ends(CPUAccelerator):
        def on_train_epoch_end(self) -> None:  # type: ignore[override]
            calls.append("on_train_epoch_end")

    calls: list[str] = []
    quiet(accelerator=Ends(PrecisionPlugin(), SingleDevicePlugin())).fit(Net(), loader())
    assert calls == ["on_train_epoch_end"]


def test_a_plugin_of_ones_own_from_the_base_class() -> None:
    class Own(TrainingTypePlugin):
        steps = 0

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu")

        def training_step(self, *args: Any) -> Any:
            self.steps += 1
            return super().training_step(*args)

    plugin = Own()
    quiet(accelerator=CPUAccelerator(PrecisionPlugin(), plugin)).fit(Net(), loader())
    assert plugin.steps == 2
