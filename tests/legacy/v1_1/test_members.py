"""Every member of an accelerator of the 1.1 generation: in a loop of the user's, through a Trainer, and overridden."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule
from drivetrain.legacy.v1_1 import Accelerator, CPUAccelerator, DataParallelAccelerator, DDPAccelerator, DDPPlugin
from drivetrain.precision import Precision
from drivetrain.strategies.familiar import share


class Net(LightningModule):
    """Only trains, and logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Evaluated(Net):
    """Has every step."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def loader() -> DataLoader[Any]:
    x, y = batch()
    return DataLoader(list(zip(x, y, strict=True)), batch_size=4)


def set_up(model: LightningModule, accelerator: Any = None) -> Any:
    """An accelerator in a loop of the user's, after its set-up."""
    accelerator = accelerator or CPUAccelerator()
    accelerator.setup(model)
    return accelerator


# ---- in a loop of the user's -----------------------------------------------------------------------------------------


def on_ddp() -> Any:
    accelerator = DDPAccelerator()
    accelerator.hardware = "cpu"
    return accelerator


@pytest.mark.parametrize("make", [CPUAccelerator, DataParallelAccelerator, on_ddp])
def test_e3_a_loop_of_ones_own_trains_as_plain_torch(make: Any) -> None:
    expected, model, data = Net(), Net(), batch()
    optimizer = expected.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        expected.loss(data).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
    accelerator = make()
    accelerator.hardware = "cpu"
    set_up(model, accelerator)
    [mine] = accelerator.optimizers
    for index in range(3):
        loss = accelerator.training_step([data, index])
        accelerator.optimizer_zero_grad(index, mine, 0)
        returned = accelerator.backward(loss, mine, 0)
        assert returned.grad_fn is None
        accelerator.clip_gradients(mine, 0.1)
        accelerator.optimizer_step(mine, index, 0)
    accelerator.teardown()
    torch.testing.assert_close(model.net.weight, expected.net.weight)


def test_s3_3_setup_makes_everything_ready() -> None:
    model = Net()
    accelerator = set_up(model)
    assert accelerator.strategy.lightning_module is model
    assert accelerator.root_device == torch.device("cpu")
    assert isinstance(accelerator.optimizers[0], torch.optim.SGD)
    assert accelerator.get_reference_model(accelerator.strategy.model) is model
    assert accelerator.get_device_ids() is None
    assert accelerator.rpc_enabled is False


def test_s3_5_each_step_runs_the_modules() -> None:
    model = Evaluated()
    accelerator, data = set_up(model), batch()
    for name in ("training_step", "validation_step", "test_step"):
        torch.testing.assert_close(getattr(accelerator, name)([data, 0]), model.loss(data))
        accelerator.step_args = [data, 0]
        torch.testing.assert_close(getattr(accelerator, name)(), model.loss(data))
        assert getattr(accelerator, f"{name}_end")("output") == "output"


def test_s3_7_s3_8_and_s3_9_one_process_exchanges_with_itself() -> None:
    accelerator = set_up(Net())
    accelerator.barrier("name")
    assert accelerator.broadcast({"a": 1}) == {"a": 1}
    for operation in (None, "sum", "mean", "avg"):
        assert torch.equal(accelerator.sync_tensor(torch.tensor(3), reduce_op=operation), torch.tensor(3))
    assert torch.equal(accelerator.all_gather(torch.ones(2)), torch.ones(2))
    assert accelerator.require_distributed_sampler is False
    assert accelerator.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}


def test_states_and_loaders_are_plain() -> None:
    accelerator = set_up(Net())
    [optimizer] = accelerator.optimizers
    assert accelerator.optimizer_state(optimizer) == optimizer.state_dict()
    assert accelerator.on_save({"a": 1}) == {"a": 1}
    assert accelerator.process_dataloader(data := loader()) is data
    with accelerator.block_ddp_plugin_sync_behaviour():
        pass


# ---- through a Trainer -----------------------------------------------------------------------------------------------


class Noted(CPUAccelerator):
    """Writes down which of its members are called, and goes on."""

    def __init__(self) -> None:
        self.called: list[str] = []
        super().__init__()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in MEMBERS:
            self.called.append(name)
        return found


MEMBERS = {
    "setup", "setup_optimizers", "model_to_device", "train", "train_or_test", "training_step", "training_step_end",
    "validation_step", "validation_step_end", "batch_to_device", "backward", "clip_gradients", "optimizer_step",
    "optimizer_zero_grad", "process_dataloader", "on_train_epoch_end", "on_train_end", "on_save", "optimizer_state",
    "barrier", "teardown",
}  # fmt: skip


def test_e3_every_member_is_called_in_a_run(make_trainer: Any, tmp_path: Any) -> None:
    accelerator = Noted()
    trainer = make_trainer(
        accelerator=accelerator, gradient_clip_val=1.0, accumulate_grad_batches=2, num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Evaluated(), loader(), loader())
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert set(accelerator.called) == MEMBERS
    order = [
        "setup", "setup_optimizers", "train", "training_step", "backward", "optimizer_step", "clip_gradients",
        "validation_step", "on_train_epoch_end", "on_train_end", "teardown",
    ]  # fmt: skip
    first = {name: accelerator.called.index(name) for name in order}
    assert sorted(order, key=first.__getitem__) == order


def test_s3_6_the_loss_is_scaled_where_the_precision_scales(make_trainer: Any) -> None:
    class Doubled(Precision):
        scales_loss = True

        def scale(self, loss: Any) -> Any:
            return loss * 2

        def unscale(self, optimizer: Any) -> Any:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(2)

    seen: list[torch.Tensor] = []

    class Own(CPUAccelerator):
        def backward(self, closure_loss: Any, optimizer: Any = None, opt_idx: int = 0, *args: Any, **kw: Any) -> Any:
            loss = super().backward(closure_loss, optimizer, opt_idx, *args, **kw)
            seen.append(self.strategy.lightning_module.net.weight.grad.clone())
            return loss

    model, plain = Net(), Net()
    make_trainer(accelerator=Own(), plugins=[Doubled()], max_steps=1).fit(model, [batch()])
    plain.loss(batch()).backward()
    assert plain.net.weight.grad is not None
    torch.testing.assert_close(seen[0], 2 * plain.net.weight.grad)


def test_s3_6_manual_optimization_goes_through_backward(make_trainer: Any) -> None:
    calls: list[Any] = []

    class Own(CPUAccelerator):
        def backward(self, closure_loss: Any, optimizer: Any = None, opt_idx: int = 0, *args: Any, **kw: Any) -> Any:
            calls.append(opt_idx)
            return super().backward(closure_loss, optimizer, opt_idx, *args, **kw)

    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    model = Manual()
    before = model.net.weight.clone()
    make_trainer(accelerator=Own()).fit(model, loader())
    assert calls == [0, 0]
    assert not torch.equal(model.net.weight, before)


def test_several_optimizers_get_their_index(make_trainer: Any) -> None:
    steps: list[Any] = []

    class Own(CPUAccelerator):
        def training_step(self, args: Any = None) -> Any:
            steps.append(args[1:])
            return super().training_step(args)

    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:  # type: ignore[override]
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([each], lr=0.1) for each in self.parameters()]

    make_trainer(accelerator=Own()).fit(Two(), loader())
    assert steps == [[0, 0], [0, 1], [1, 0], [1, 1]]


class EndsSteps(Evaluated):
    """Takes the outputs of its steps in ``*_step_end``."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}

    def training_step_end(self, output: Any) -> Any:
        self.ended.append(output["loss"].shape)
        return output["loss"].mean()

    def validation_step_end(self, output: Any) -> Any:
        self.ended.append(output.shape)
        return output


@pytest.mark.parametrize(
    ("make", "devices", "parts"), [(CPUAccelerator, 1, ()), (DataParallelAccelerator, 2, (2,)), (on_ddp, 1, ())]
)
def test_the_modules_step_end_is_called_under_every_accelerator(
    make_trainer: Any, make: Any, devices: int, parts: tuple[int, ...]
) -> None:
    accelerator, model = make(), EndsSteps()
    accelerator.hardware = "cpu"
    make_trainer(accelerator=accelerator, devices=devices, num_sanity_val_steps=0).fit(model, loader(), loader())
    assert model.ended == [torch.Size(parts)] * 4


def test_hiddens_pass_from_part_to_part(make_trainer: Any) -> None:
    steps: list[Any] = []

    class Own(CPUAccelerator):
        def training_step(self, args: Any = None) -> Any:
            steps.append((args[0].shape, args[2]))
            return super().training_step(args)

    class Recurrent(Net):
        truncated_bptt_steps = 2

        def tbptt_split_batch(self, batch: Any, split_size: int) -> Any:
            return list(batch.split(split_size, dim=1))

        def training_step(self, batch: Any, batch_idx: int, hiddens: Any) -> Any:  # type: ignore[override]
            return {"loss": self.net(batch).pow(2).mean(), "hiddens": len(steps)}

    make_trainer(accelerator=Own()).fit(Recurrent(), [torch.ones(3, 4, 4)])
    assert steps == [(torch.Size([3, 2, 4]), None), (torch.Size([3, 2, 4]), 1)]


class Logged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", loss := self.loss(batch), sync_dist=True, on_epoch=True)
        self.log("alone", 2.0)
        self.log_dict({"sum": 1.0}, sync_dist=True, reduce_fx="sum")
        return loss


def test_logged_values_go_through_an_overridden_sync_tensor(make_trainer: Any) -> None:
    asked: list[Any] = []

    class Own(CPUAccelerator):
        def sync_tensor(self, tensor: Any, group: Any = None, reduce_op: Any = None) -> Any:
            asked.append(reduce_op)
            return tensor + 100

    model = Logged()
    trainer = make_trainer(accelerator=Own())
    trainer.fit(model, loader())
    assert asked == ["mean", "sum"] * 2
    assert trainer.callback_metrics["loss_epoch"] >= 100
    assert (trainer.callback_metrics["alone"], trainer.callback_metrics["sum"]) == (2.0, 101.0)
    assert "log" not in vars(model)


def test_an_early_stop_of_the_accelerators(make_trainer: Any) -> None:
    class Own(DDPAccelerator):
        hardware = "cpu"

        def early_stopping_should_stop(self, pl_module: Any) -> bool:
            return bool(self.trainer.current_epoch == 1)

    trainer = make_trainer(accelerator=Own(), max_epochs=5)
    trainer.fit(Net(), loader())
    assert trainer.current_epoch == 2
    assert DDPAccelerator.early_stopping_should_stop(trainer.strategy.source, Net()) is True


def test_s3_25_the_samples_are_shared_as_the_accelerator_says() -> None:
    class Own(DDPAccelerator):
        hardware = "cpu"
        shares = True

        @property
        def distributed_sampler_kwargs(self) -> Any:
            return {"num_replicas": 4, "rank": 3}

        @property
        def require_distributed_sampler(self) -> bool:
            return self.shares

    strategy = (own := Own()).strategy
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
    assert [len(each[0]) for each in share(strategy, loader())] == [2]
    own.shares = False
    assert share(strategy, data := loader()) is data


def test_ddp_members_may_be_overridden(make_trainer: Any) -> None:
    called: list[Any] = []

    class Own(DDPAccelerator):
        hardware = "cpu"

        def init_ddp_connection(self, global_rank: int, world_size: int, is_slurm_managing_tasks: bool = True) -> None:
            called.append((global_rank, world_size, is_slurm_managing_tasks))
            super().init_ddp_connection(global_rank, world_size, is_slurm_managing_tasks)

        def model_to_device(self, model: Any = None, process_idx: Any = None) -> None:
            called.append("model_to_device")
            super().model_to_device(model, process_idx)

        def configure_ddp(self, model: Any, device_ids: Any) -> Any:
            called.append(device_ids)
            return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)

        @contextmanager
        def block_ddp_plugin_sync_behaviour(self) -> Any:
            called.append("blocked")
            with super().block_ddp_plugin_sync_behaviour():
                yield

    expected, model = Net(), Net()
    make_trainer(accumulate_grad_batches=2).fit(expected, loader())
    make_trainer(accelerator=Own(), accumulate_grad_batches=2).fit(model, loader())
    assert called == [(0, 1, False), "model_to_device", None, "blocked"]
    torch.testing.assert_close(model.net.weight, expected.net.weight)


def test_a_plugin_may_wrap_the_model_itself(make_trainer: Any) -> None:
    called: list[str] = []

    class Own(DDPPlugin):
        def configure_ddp(self, model: Any, device_ids: Any) -> Any:
            called.append("configure_ddp")
            return super().configure_ddp(model, device_ids)

        def init_ddp_connection(self, *args: Any, **kwargs: Any) -> None:
            called.append("init_ddp_connection")
            super().init_ddp_connection(*args, **kwargs)

    accelerator = DDPAccelerator(ddp_plugin=Own(find_unused_parameters=False))
    accelerator.hardware = "cpu"
    make_trainer(accelerator=accelerator).fit(Net(), loader())
    assert called == ["init_ddp_connection", "configure_ddp"]


def test_an_exception_in_train_is_raised_and_everything_is_freed(make_trainer: Any) -> None:
    class Fails(CPUAccelerator):
        gone = False

        def train(self) -> Any:
            raise ValueError("of the user's")

        def teardown(self) -> None:
            self.gone = True
            super().teardown()

    accelerator = Fails()
    trainer = make_trainer(accelerator=accelerator)
    with pytest.raises(ValueError, match="of the user's"):
        trainer.fit(Net(), loader())
    assert accelerator.gone


def test_an_accelerator_may_train_again_and_in_a_loop(make_trainer: Any) -> None:
    accelerator: Accelerator = CPUAccelerator()
    trainer = make_trainer(accelerator=accelerator)
    for _ in range(2):
        trainer.fit(Net(), loader())
    model = Net()
    set_up(model, accelerator)
    torch.testing.assert_close(accelerator.training_step([batch(), 0]), model.loss(batch()))
    assert accelerator.step_args == []
