"""Every member of a precision as the field knows it: called, refused, or harmless. None is left out in silence."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, Engine, Trainer
from drivetrain.compat.members import ENGINE_ONLY, TABLES, TRAINER_ONLY
from drivetrain.compat.overrides import members_of
from drivetrain.errors import ConfigurationError
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

# Precision and MixedPrecision of the 2.6 generation, private members that subclasses override included
FAMILIAR = frozenset({
    "__init__", "precision", "convert_module", "tensor_init_context", "module_init_context", "forward_context",
    "convert_input", "convert_output", "pre_backward", "backward", "post_backward", "optimizer_step", "main_params",
    "unscale_gradients", "state_dict", "load_state_dict", "teardown", "connect", "_after_closure", "_wrap_closure",
    "_clip_gradients", "clip_gradients", "clip_grad_by_value", "clip_grad_by_norm", "train_step_context",
    "val_step_context", "test_step_context", "predict_step_context", "on_save_checkpoint", "on_load_checkpoint",
    "autocast_context_manager",
})  # fmt: skip
REFUSED = TABLES["Precision"].refused
CALLED = FAMILIAR - REFUSED.keys()
NEEDS_TRAINER = TRAINER_ONLY["Precision"]
OF_ALL = ("__init__", "precision", "convert_output")  # not methods that a Trainer calls


def test_every_member_is_one_of_the_contract_or_in_the_table() -> None:
    assert REFUSED.keys() <= FAMILIAR | {"init_context", "step"}  # which were names of drivetrain's own
    assert CALLED - {"__init__"} <= members_of(Precision)
    assert CALLED > NEEDS_TRAINER | ENGINE_ONLY


# ---- called ----------------------------------------------------------------------------------------------------------


def recording(base: type[Precision], called: list[str]) -> type[Precision]:
    """A subclass whose overrides have the signatures of the field, note that they are called, and call the base's."""

    def method(name: str) -> Callable[..., Any]:
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(super(Recording, self), name)(*args, **kwargs)

        return override

    class Recording(base):  # type: ignore[misc, valid-type]
        def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            called.append("backward")
            super().backward(tensor, model, optimizer, *args, **kwargs)

        def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            called.append("optimizer_step")
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

        def clip_gradients(
            self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm"
        ) -> torch.Tensor | None:
            called.append("clip_gradients")
            return super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

        def clip_grad_by_value(self, optimizer: Any, clip_val: Any) -> None:
            called.append("clip_grad_by_value")
            super().clip_grad_by_value(optimizer, clip_val)

        def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> torch.Tensor | None:
            called.append("clip_grad_by_norm")
            return super().clip_grad_by_norm(optimizer, clip_val)

    for name in CALLED - {"__init__", "precision"}:
        if name not in vars(Recording):
            setattr(Recording, name, method(name))
    Recording.__init_subclass__()  # as for a class whose body holds them all
    return type("Recording", (Recording,), {})


@pytest.mark.parametrize("base", [Precision, MixedPrecision, HalfPrecision, DoublePrecision])
def test_what_the_table_calls_called_is_called(
    base: type[Precision], tmp_path: Path, data: Any, validated: Any
) -> None:
    called: list[str] = []
    cls = recording(base, called)

    class Steps(validated):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    def trainer(**arguments: Any) -> Trainer:
        precision = cls("16-mixed") if base is MixedPrecision else cls()  # type: ignore[call-arg]
        return Trainer(
            accelerator="cpu", devices=1, plugins=[precision], logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, **arguments,
        )  # fmt: skip

    loader, module = DataLoader(data, batch_size=8), Steps()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recording overrides convert_output")
        first = trainer(max_epochs=1, gradient_clip_val=0.5)
        first.fit(module, loader, loader)
        assert first.checkpoint_callback is not None
        second = trainer(max_epochs=2, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        second.fit(module, loader, loader, ckpt_path=first.checkpoint_callback.best_model_path)
        second.test(module, loader, verbose=False)
        second.predict(module, loader)
    state = set() if base is MixedPrecision else {"load_state_dict"}  # the others save none
    assert CALLED - set(called) - state == {*OF_ALL}
    steps = 8
    assert called.count("backward") == called.count("pre_backward") == called.count("post_backward") == steps
    assert called.count("optimizer_step") == called.count("clip_gradients") == steps
    assert called.count("train_step_context") == steps

    called.clear()
    precision = cls("16-mixed") if base is MixedPrecision else cls()  # type: ignore[call-arg]
    with pytest.warns(UserWarning, match="overrides connect, .* which a Trainer calls and an Engine does not"):
        train_by_hand(Engine(accelerator="cpu", plugins=[precision]), dtype=getattr(precision, "dtype", None))
    of_trainer = NEEDS_TRAINER | {"state_dict", "load_state_dict", "clip_grad_by_value"}
    assert CALLED - set(called) == of_trainer | {"__init__", "precision"}


def train_by_hand(engine: Engine, dtype: torch.dtype | None = None) -> nn.Module:
    engine.launch()
    with engine.init_module():
        model = nn.Linear(2, 1)
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = model(torch.ones(3, 2))
    assert output.dtype is torch.float32
    engine.backward(output.sum())
    engine.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    engine.teardown()
    return model


class Scaled(Precision):
    """A scaled loss as one writes it in the field: by ``pre_backward`` and ``optimizer_step``."""

    precision = "scaled"
    scales_loss = True

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(tensor * 8, module)

    def unscale_gradients(self, optimizer: Any) -> None:
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                parameter.grad /= 8

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        loss = closure()
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return loss


class Written(Precision):
    """Mixed precision as one writes it in the field, with a scaler of one's own."""

    precision = "16-mixed"

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            yield

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(self.scaler.scale(tensor), module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        loss = closure()
        self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return loss

    def unscale_gradients(self, optimizer: Any) -> None:
        self.scaler.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_mixed_precision_as_one_writes_it_in_the_field_has_the_numbers_of_drivetrains(
    clip: float | None, make_trainer: Any, regression: Any, loader: Any
) -> None:
    trained = []
    ours = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", growth_interval=2))
    for precision in (ours, Written(), type("Declared", (Written,), {"scales_loss": True})()):
        if clip is not None and type(precision) is Written:
            precision.scales_loss = True
        torch.manual_seed(0)
        module = regression()
        trainer = make_trainer(plugins=[precision], gradient_clip_val=clip)
        trainer.fit(module, loader)
        trained.append((trainer.scaler.get_scale(), module.state_dict()))
    assert trained[0][0] == 2**15  # two steps were skipped and two were not, so all of it was needed
    for scale, weights in trained[1:]:
        assert scale == trained[0][0]
        assert all(torch.equal(value, trained[0][1][name]) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:This epoch had losses")
def test_a_skipped_step_may_say_so(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Skipping(Precision):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            loss, self.stepped = closure(), False
            return loss

    trainer = make_trainer(plugins=[Skipping()])
    trainer.fit(regression(), loader)
    assert trainer.global_step == 0


@pytest.mark.parametrize("arguments", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("manual", [False, True])
def test_a_scaled_loss_of_ones_own_changes_no_number(
    arguments: dict[str, Any], manual: bool, make_trainer: Any, regression: Any, loader: Any
) -> None:
    if manual and arguments:
        return

    class Module(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

    trained = []
    for plugins in ([], [Scaled()]):
        torch.manual_seed(0)
        module = Module()
        trainer = make_trainer(plugins=plugins, **arguments)
        trainer.fit(module, loader)
        assert trainer.global_step == (2 if "accumulate_grad_batches" in arguments else 4)
        trained.append([parameter.detach() for parameter in module.parameters()])
    assert trainer.precision == "scaled"
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))  # powers of two are exact


def test_a_scaled_loss_of_ones_own_in_a_loop_of_ones_own() -> None:
    trained = []
    for plugins in ([], [Scaled()]):
        torch.manual_seed(0)
        engine = Engine(accelerator="cpu", plugins=plugins)
        layer = nn.Linear(2, 1)
        model, optimizer = engine.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            engine.backward(model(torch.ones(3, 2)).square().sum())
            engine.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
        trained.append(layer.weight.detach())
    assert torch.equal(*trained)


@pytest.mark.parametrize("passed", [{"model": None}, {"model": nn.Linear(2, 1)}, None, nn.Linear(2, 1)])
def test_mixed_precision_built_alone_scales_the_loss_and_unscales_the_step(passed: Any) -> None:
    precision, layer = MixedPrecision("16-mixed", "cpu"), nn.Linear(2, 1)
    assert precision.scaler is not None
    assert precision.scaler.is_enabled()
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=1.0), layer.weight.detach().clone()
    loss = layer(torch.ones(1, 2)).sum()
    precision.backward(loss, **passed) if isinstance(passed, dict) else precision.backward(loss, passed)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((1, 2), 2.0**16))
    precision.optimizer_step(optimizer)
    assert torch.allclose(before - layer.weight.detach(), torch.ones(1, 2))


def test_backward_of_the_field_gets_model_and_optimizer_between_the_hooks(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    calls: list[Any] = []

    class Own(Precision):
        def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            calls.append((model, optimizer))
            model.backward(tensor * 2, *args, **kwargs)

    class Hooks(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            calls.append("before")

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            calls.append("after")

    module, trainer = regression(), make_trainer(plugins=[Own()], callbacks=[Hooks()], limit_train_batches=1)
    trainer.fit(module, loader)
    assert calls == ["before", (module, trainer.optimizers[0]), "after"]


def test_a_strategy_that_writes_out_the_fields_body_calls_it_once(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    from drivetrain.strategies import SingleDeviceStrategy

    calls: list[str] = []

    class Own(Precision):
        def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            calls.append("backward")
            super().backward(tensor, model, optimizer, *args, **kwargs)

    class Written(SingleDeviceStrategy):
        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            precision = self.precision_plugin
            loss = precision.pre_backward(closure_loss, self.lightning_module)
            precision.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
            return precision.post_backward(loss, self.lightning_module)

    make_trainer(strategy=Written(precision_plugin=Own()), limit_train_batches=2).fit(regression(), loader)
    assert calls == ["backward", "backward"]


@pytest.mark.parametrize("member", ["forward_context", "train_step_context"])
def test_a_context_that_can_be_entered_once_is_made_for_each_step(
    member: str, make_trainer: Any, validated: Any, loader: Any
) -> None:
    entered: list[str] = []

    @contextmanager
    def context(self: Any) -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    class Module(validated):  # type: ignore[misc]
        def loss(self, batch: Any) -> Any:
            entered.append("train" if self.training else "validate")
            return super().loss(batch)

    own = type("Own", (Precision,), {member: context})
    make_trainer(plugins=[own()], limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0).fit(
        Module(), loader, loader
    )
    validated_in = ["in", "validate", "out"] if member == "forward_context" else ["validate"]
    assert entered == ["in", "train", "out"] * 2 + validated_in


def test_a_step_context_replaces_that_of_the_base(make_trainer: Any, validated: Any, loader: Any) -> None:
    dtypes: dict[bool, torch.dtype] = {}

    class Half(MixedPrecision):
        def val_step_context(self) -> Any:
            return nullcontext()

    class Module(validated):  # type: ignore[misc]
        def loss(self, batch: Any) -> Any:
            dtypes[self.training] = self.net(batch[0]).dtype
            return super().loss(batch)

    make_trainer(plugins=[Half()]).fit(Module(), loader, loader)
    assert dtypes == {True: torch.bfloat16, False: torch.float32}


def test_the_old_signature_of_forward_context_gets_the_type_of_the_device() -> None:
    class Own(Precision):
        def forward_context(self, device_type: str) -> None:
            asked.append(device_type)

    asked: list[str] = []
    Engine(accelerator="cpu", plugins=[Own()]).forward_context()
    assert asked == ["cpu"]


def test_connect_may_replace_the_optimizer(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(Precision):
        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
            assert isinstance(model, nn.Module)
            return model, [torch.optim.Adam(model.parameters()) for _ in optimizers], lr_schedulers

    trainer = make_trainer(plugins=[Own()])
    trainer.fit(regression(), loader)
    assert isinstance(trainer.optimizers[0], torch.optim.Adam)
    assert trainer.optimizers[0].state


def test_the_step_of_fabrics_signature(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(Precision):
        def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            calls.append("backward")
            super().backward(tensor, model, *args, **kwargs)

        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            calls.append(f"step {sorted(kwargs)}")
            return super().optimizer_step(optimizer, **kwargs)

    calls: list[str] = []
    train_by_hand(Engine(accelerator="cpu", plugins=[Own()]))
    assert calls == ["backward", "step []"]
    calls.clear()
    make_trainer(plugins=[Own()], limit_train_batches=1).fit(regression(), loader)
    assert calls == ["step ['closure']", "backward"]


def test_a_norm_that_an_override_does_not_know_is_an_error() -> None:
    class Own(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
            super().clip_grad_by_norm(optimizer, clip_val)

    layer = nn.Linear(2, 1)
    layer(torch.ones(2)).backward()
    engine, optimizer = Engine(accelerator="cpu", plugins=[Own()]), torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"norm_type=1\.0: Own overrides clip_grad_by_norm without"):
        engine.clip_gradients(layer, optimizer, max_norm=1.0, norm_type=1.0)
    engine.clip_gradients(layer, optimizer, max_norm=1.0)
    assert layer.weight.grad is not None
    assert layer.weight.grad.norm() < 1


def test_a_run_in_other_processes_takes_the_overrides_along() -> None:
    precision = pickle.loads(pickle.dumps(Scaled()))
    assert (precision.name, precision.precision) == ("scaled", "scaled")


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_override_that_nobody_would_call_is_refused_by_name(name: str) -> None:
    precision = type("Own", (MixedPrecision,), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=rf"Own overrides {name}, which is never called here") as caught:
        Trainer(accelerator="cpu", plugins=[precision()])
    assert str(caught.value).endswith(REFUSED[name])


def test_two_that_override_backward_are_refused(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Own(Precision):
        def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
            super().backward(tensor, *args, **kwargs)

    class Module(regression):  # type: ignore[misc]
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

    with pytest.raises(ConfigurationError, match="Module and Own both override backward, and only the module's"):
        make_trainer(plugins=[Own()]).fit(Module(), loader)


@pytest.mark.parametrize("user", ["clipping", "callback", "a limit of 0", "nobody"])
def test_scaled_gradients_that_somebody_would_see_are_refused(
    user: str, make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Watching(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pass

    class Own(Precision):
        def pre_backward(self, tensor: Any, module: Any) -> Any:
            return super().pre_backward(tensor * 8, module)

        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            loss = closure()
            for parameter in self.main_params(optimizer):
                if parameter.grad is not None:
                    parameter.grad /= 8
            optimizer.step(**kwargs)
            return loss

    arguments: dict[str, Any] = {
        "clipping": {"gradient_clip_val": 0.1}, "callback": {"callbacks": [Watching()]},
        "a limit of 0": {"gradient_clip_val": 0}, "nobody": {},
    }[user]  # fmt: skip
    users = {"clipping": r"Trainer\(gradient_clip_val=0\.1\)", "callback": r"Watching\.on_before_optimizer_step"}
    trainer = make_trainer(plugins=[Own()], **arguments)
    if user not in users:
        trainer.fit(regression(), loader)
        return
    with pytest.raises(ConfigurationError, match=rf"{users[user]} uses the gradients before optimizer_step"):
        trainer.fit(regression(), loader)


# ---- harmless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ENGINE_ONLY))
def test_what_only_an_engine_calls_is_said_once(name: str, make_trainer: Any, regression: Any, loader: Any) -> None:
    own = type("Own", (Precision,), {name: lambda self, data: data})
    with pytest.warns(UserWarning, match=f"Own overrides {name}, which an Engine calls and a Trainer does not"):
        make_trainer(plugins=[own()], limit_train_batches=1).fit(regression(), loader)
    make_trainer(plugins=[own()], limit_train_batches=1).fit(regression(), loader)  # a second warning is an error here


def test_own_members_of_a_precision_are_nobodys_business() -> None:
    own = type("Own", (Precision,), {"anything": lambda self: None, "_helper": 3})
    Trainer(accelerator="cpu", plugins=[own()])


# ---- a scaler that is given ------------------------------------------------------------------------------------------


class ShardedScaler(torch.amp.GradScaler):
    """Like torch's ShardedGradScaler: a subclass with arguments of its own that overrides the steps of unscaling."""

    def __init__(self, device: str, process_group: Any, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.process_group, self.calls = process_group, []

    def unscale_(self, optimizer: Any) -> None:
        self.calls.append("unscale")
        super().unscale_(optimizer)

    def update(self, new_scale: Any = None) -> None:
        self.calls.append("update")
        super().update(new_scale)


def test_a_scaler_that_is_given_is_used_saved_and_restored(
    tmp_path: Path, make_trainer: Any, regression: Any, loader: Any
) -> None:
    def scaler(**kwargs: Any) -> ShardedScaler:
        return ShardedScaler("cpu", object(), growth_interval=2, **kwargs)

    class Module(regression):  # type: ignore[misc]
        def loss(self, batch: Any) -> Any:
            return F.mse_loss(self.net(batch[0]).float(), batch[1])

    given = scaler(init_scale=4.0)
    trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=given)])
    trainer.fit(Module(), loader)
    assert trainer.scaler is given
    assert given.calls == ["unscale", "update"] * 4
    assert given.get_scale() == 16.0
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again = scaler(init_scale=1024.0)
    trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=again)], max_epochs=2)
    trainer.fit(Module(), loader, ckpt_path=tmp_path / "saved.ckpt")
    assert again.get_scale() == 64.0
