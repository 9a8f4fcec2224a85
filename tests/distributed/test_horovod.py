"""``horovod``: its semantics over torch.distributed, and over a stand-in for the package that exchanges for real."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer
from drivetrain.callbacks import OnExceptionCheckpoint
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.strategies import HorovodStrategy
from drivetrain.strategies.group import Group
from drivetrain.testing.groups import check_group

RANKS, BATCH = 2, 4


def data(samples: int = 27) -> TensorDataset:
    """By default the ranks have uneven parts of the last global batch."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(samples, features, generator=generator).double() for features in (4, 1)))


class Net(LightningModule):
    """Each rank draws other parameters; in ``branching`` steps each rank uses another layer."""

    def __init__(self, seed: int = 1, branching: bool = False, thaws: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(4, 1).double() for _ in range(2)])
        self.never = nn.Linear(4, 1).double()
        self.branching, self.thaws = branching, thaws
        self.layers[1].requires_grad_(not thaws)
        self.after_backward: list[Tensor] = []

    def on_train_epoch_start(self) -> None:
        if self.thaws and self.current_epoch == 1:
            self.layers[1].requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        used = [self.layers[self.global_rank]] if self.branching else self.layers
        return F.mse_loss(sum(layer(batch[0]) for layer in used), batch[1])  # type: ignore[arg-type]

    def on_after_backward(self) -> None:
        self.after_backward.append(self.layers[0].weight.grad.clone())  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean of ranks", float(self.global_rank), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer(strategy: Any = "horovod", **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "strategy": strategy, "accelerator": "cpu", "devices": RANKS, "precision": "64-true", "max_epochs": 2,
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def near(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def fit(module: Net, strategy: Any = "horovod", **arguments: Any) -> Trainer:
    run = trainer(strategy, **arguments)
    run.fit(module, DataLoader(data(), batch_size=BATCH), DataLoader(data(8), batch_size=BATCH))
    return run


def same_on_all_ranks(run: Trainer, module: nn.Module) -> None:
    for state in run.strategy.world.gather_objects(
        {name: value.clone() for name, value in module.state_dict().items()}
    ):
        torch.testing.assert_close(dict(module.state_dict()), state, rtol=0, atol=0)


# ---- over torch.distributed ------------------------------------------------------------------------------------------


def like_ddp(arguments: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    weights, seen = [], []
    for strategy in ("ddp_find_unused_parameters_true", "horovod"):
        run = fit(module := Net(seed=1 + rank), strategy, **arguments)  # rank 0's parameters count
        same_on_all_ranks(run, module)
        weights.append(dict(module.state_dict()))
        seen.append(module.after_backward)
    near(weights[1], weights[0])
    near(seen[1][-1], seen[0][-1])  # means, when the hook after the backward pass runs


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_numbers_are_those_of_ddp(pool: Any, arguments: dict[str, Any]) -> None:
    pool.run(like_ddp, arguments, world_size=RANKS, group=False)


def branching() -> None:
    run = fit(module := Net(branching=True))
    same_on_all_ranks(run, module)
    fit(reference := Net(branching=True), "ddp_find_unused_parameters_true")
    near(dict(module.state_dict()), dict(reference.state_dict()))
    assert module.never.weight.grad is None
    run = fit(module := Net(thaws=True))
    same_on_all_ranks(run, module)
    fit(reference := Net(thaws=True), "ddp_find_unused_parameters_true")
    near(dict(module.state_dict()), dict(reference.state_dict()))


def test_ranks_may_use_other_parameters_and_layers_may_thaw(pool: Any) -> None:
    pool.run(branching, world_size=RANKS, group=False)


class Breaking(Net):
    """Fails on every rank within a window, when it is told to."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.breaks and batch_idx == 1:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


def broken(folder: Path, breaks: bool, resumes: bool) -> Any:
    module = Breaking(breaks)
    ours = Trainer(
        accelerator="cpu", devices=RANKS, strategy="horovod", max_epochs=2, accumulate_grad_batches=2, logger=False,
        callbacks=OnExceptionCheckpoint(folder), enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=True, limit_val_batches=0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="broken") if breaks else nullcontext():
        path = folder / "on_exception.ckpt" if resumes else None
        ours.fit(module, DataLoader(data(), BATCH, shuffle=True), ckpt_path=path)
    return dict(module.state_dict())


def test_t57_each_rank_saves_alone_after_an_exception_and_the_next_run_ends_as_an_undisturbed_one(
    pool: Any, tmp_path: Path
) -> None:
    [undisturbed, _] = pool.run(broken, tmp_path / "other", False, False, world_size=RANKS, group=False)
    pool.run(broken, tmp_path, True, False, world_size=RANKS, group=False)
    assert len(list(tmp_path.glob("on_exception.ckpt*"))) == RANKS
    for resumed in pool.run(broken, tmp_path, False, True, world_size=RANKS, group=False):
        torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)


def scaled() -> list[Any]:
    found = []
    for scale in (False, True):
        module = Net()
        run = fit(module, HorovodStrategy(scale_lr=scale))
        scheduler: Any = run.lr_scheduler_configs[0].scheduler
        group = run.optimizers[0].param_groups[0]
        found.append((group["lr"], group["initial_lr"], scheduler.base_lrs))
    return found


def test_learning_rates_are_scaled_where_that_is_asked_for(pool: Any) -> None:
    for found in pool.run(scaled, world_size=RANKS, group=False):
        near(found, [(0.05 / 4, 0.05, [0.05]), (0.1 / 4, 0.1, [0.1])])


def with_optimizer_state() -> None:
    class Warm(Net):
        """Its optimizer begins with a state that differs between the ranks."""

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            for parameter in self.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(self.global_rank))
            return optimizer

    run = fit(module := Warm())
    same_on_all_ranks(run, module)

    class Differs(Warm):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if self.global_rank == 1:
                optimizer.state.clear()
            return optimizer

    with pytest.raises(ConfigurationError, match="The state of SGD has other entries on some ranks"):
        fit(Differs())


def test_optimizer_state_is_that_of_rank_0(pool: Any) -> None:
    pool.run(with_optimizer_state, world_size=RANKS, group=False)


def on_engine() -> None:
    weights = []
    for strategy in ("ddp", "horovod"):
        engine = Engine(strategy=strategy, accelerator="cpu", devices=RANKS)
        engine.launch()
        torch.manual_seed(int(os.environ["RANK"]))
        module = nn.Linear(4, 1).double()
        model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for index, (x, y) in enumerate(engine.setup_dataloaders(DataLoader(data(), batch_size=BATCH))):
            with engine.no_backward_sync(model, enabled=index % 2 == 0):
                loss = F.mse_loss(model(x), y)
                engine.backward(loss) if index % 3 else loss.backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        weights.append(dict(module.state_dict()))
        engine.teardown()
    near(weights[1], weights[0])


def test_an_engine_trains_with_it(pool: Any) -> None:
    pool.run(on_engine, world_size=RANKS, group=False)


# ---- over the package ------------------------------------------------------------------------------------------------


class FakeHorovod(ModuleType):
    """The functions of ``horovod.torch`` that the strategy calls, over a process group of Gloo of their own."""

    Sum = "sum"

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.calls: list[str] = []
        self.group: Any = None

    def init(self) -> None:
        if self.group is None:
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), self.size(), self.rank() == 0)
            self.group = dist.ProcessGroupGloo(store, self.rank(), self.size(), timedelta(seconds=30))

    def rank(self) -> int:
        return int(os.environ["HOROVOD_RANK"])

    def size(self) -> int:
        return int(os.environ["HOROVOD_SIZE"])

    def allreduce_async_(self, tensor: Tensor, name: str, op: str) -> Any:
        assert op == self.Sum
        self.calls.append(name)
        return self.group.allreduce([tensor])

    def synchronize(self, handle: Any) -> None:
        handle.wait()

    def broadcast(self, tensor: Tensor, root_rank: int) -> Tensor:
        assert not torch.is_inference_mode_enabled()  # its thread could not write to the tensors
        found = tensor.clone()
        self.group.broadcast(found, root_rank).wait()
        return found

    def broadcast_object(self, obj: Any, root_rank: int) -> Any:
        return self.allgather_object(obj)[root_rank]

    def allgather_object(self, obj: Any) -> list[Any]:
        assert not torch.is_inference_mode_enabled()
        packed = io.BytesIO()
        torch.save(obj, packed)
        size = torch.tensor([packed.getbuffer().nbytes])
        sizes = [torch.zeros_like(size) for _ in range(self.size())]
        self.group.allgather([sizes], [size]).wait()
        most = int(max(sizes))
        here = torch.zeros(most, dtype=torch.uint8)
        here[: int(size)] = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        everyones = [torch.zeros_like(here) for _ in range(self.size())]
        self.group.allgather([everyones], [here]).wait()
        return [
            torch.load(io.BytesIO(each[: int(length)].numpy().tobytes()), weights_only=False)
            for each, length in zip(everyones, sizes, strict=True)
        ]


def under_horovodrun() -> FakeHorovod:
    """Make this process of the pool one that horovodrun has started, where the package is installed."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    for name, value in {"RANK": os.environ["RANK"], "SIZE": str(RANKS), "LOCAL_RANK": os.environ["RANK"],
                        "LOCAL_SIZE": str(RANKS)}.items():  # fmt: skip
        os.environ[f"HOROVOD_{name}"] = value
    hvd = FakeHorovod()
    package = ModuleType("horovod")
    package.torch = hvd  # type: ignore[attr-defined]
    sys.modules["horovod"], sys.modules["horovod.torch"] = package, hvd
    return hvd


def over_the_package() -> dict[str, Any]:
    hvd = under_horovodrun()
    try:
        rank = int(os.environ["RANK"])
        run = fit(module := Net(seed=1 + rank), accumulate_grad_batches=2, gradient_clip_val=0.1)
        assert not dist.is_initialized()
        same_on_all_ranks(run, module)
        strategy: Any = run.strategy
        validated = run.validate(module, DataLoader(data(8), batch_size=BATCH), verbose=False)
        assert validated == [{"mean of ranks": 0.5}]
        check_group(strategy.world)
        with pytest.raises(NotSupportedError, match="a group|process group of torch"):
            strategy.reduce(torch.ones(1), group=object())
        return {
            "weights": dict(module.state_dict()), "calls": list(hvd.calls), "world": type(strategy.world).__name__,
            "environment": type(run.plan.environment).__name__,
        }  # fmt: skip
    finally:
        for name in ("horovod", "horovod.torch"):
            del sys.modules[name]


class SavesWhileRank1IsWriting(Callback):
    """Saves; rank 1 cannot write its part before training continues."""

    def __init__(self, path: Path) -> None:
        self.path, self.continues, self.seen = path, threading.Event(), list[bool]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch or batch_idx != 1:
            return
        store = trainer.strategy.checkpoint_io
        if trainer.global_rank == 1:
            write = store.write_records
            store.write_records = lambda *args, **options: self.continues.wait(60) and write(*args, **options)
        trainer.save_checkpoint(self.path)
        self.seen.append(self.path.exists())
        trainer.strategy.barrier()
        self.continues.set()


def saved_in_the_background(folder: Path) -> dict[str, Any]:
    under_horovodrun()
    try:
        saver, options = SavesWhileRank1IsWriting(folder / "a.ckpt"), {"accumulate_grad_batches": 2}
        fit(module := Net(), callbacks=[saver], plugins=[AsyncCheckpointIO()], **options)
        assert not dist.is_initialized()
        loaders = DataLoader(data(), batch_size=BATCH), DataLoader(data(8), batch_size=BATCH)
        trainer(**options).fit(resumed := Net(), *loaders, ckpt_path=saver.path)
        return {"seen": saver.seen, "weights": [dict(each.state_dict()) for each in (module, resumed)]}
    finally:
        for name in ("horovod", "horovod.torch"):
            del sys.modules[name]


def test_in_a_job_without_a_store_the_ranks_agree_on_a_save_in_the_background_through_a_file(
    pool: Any, tmp_path: Path
) -> None:
    for rank in pool.run(saved_in_the_background, tmp_path, world_size=RANKS, group=False):
        assert rank["seen"] == [False]  # training continued before the checkpoint was complete
        near(*rank["weights"])
    names = sorted(os.listdir(tmp_path))  # the last rank has removed the file through which they agreed
    assert [name.split(".")[-1] for name in names] == ["ckpt", "rank1"]


def over_torch() -> dict[str, Any]:
    run = fit(module := Net(), accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert isinstance(run.strategy.world, Group)
    return dict(module.state_dict())


def test_under_horovodrun_it_exchanges_through_the_package(pool: Any) -> None:
    found = pool.run(over_the_package, world_size=RANKS, group=False)
    expected = pool.run(over_torch, world_size=RANKS, group=False)[0]
    for each in found:
        near(each["weights"], expected)
        assert set(each["calls"]) == {"drivetrain.gradients.0"}
        assert len(each["calls"]) == 4  # one for each window: the two epochs have four batches each
        assert (each["world"], each["environment"]) == ("HorovodGroup", "HorovodEnvironment")


def under_mpirun() -> tuple[str, int]:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    for name, value in (("RANK", os.environ["RANK"]), ("SIZE", RANKS), ("LOCAL_RANK", os.environ["RANK"]),
                        ("LOCAL_SIZE", RANKS)):  # fmt: skip
        os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    run = fit(module := Net())
    same_on_all_ranks(run, module)
    return type(run.plan.environment).__name__, run.world_size


@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py tells the ranks then")
def test_under_mpirun_it_exchanges_through_torch(pool: Any) -> None:
    found = pool.run(under_mpirun, world_size=RANKS, group=False)
    assert found == [("HorovodEnvironment", RANKS)] * RANKS


def test_the_package_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(ConfigurationError, match="package=True.*neither horovodrun nor mpirun.*horovodrun"):
        trainer(HorovodStrategy(package=True), devices=1).fit(Net(), *[DataLoader(data(), batch_size=BATCH)] * 2)


def test_with_one_process_it_trains_alone() -> None:
    run = fit(Net(), devices=1)
    assert run.world_size == 1
    assert run.global_step == 14
