"""One model on two ranks: four processes of which only two see different samples give the numbers of two processes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer, WeightedLoss, seed_everything
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import Logger
from drivetrain.strategies import DDPStrategy, Group
from drivetrain.strategies.group import TorchGroup

BATCH = 4


class Pairs(DDPStrategy):
    """Ranks 0 and 1 hold one model together, and ranks 2 and 3: rows of a 2 x 2 mesh, whose columns are data groups."""

    def make_data_group(self, world: Group) -> Group:
        return world.new(range(world.rank % 2, world.size, 2))


class OneModel(DDPStrategy):
    """All ranks hold one model together, and see the same samples."""

    def make_data_group(self, world: Group) -> Group:
        return world.new([world.rank])


class Averaging(Pairs):
    """The same mesh without DDP: a hook on each gradient takes the mean over the data group."""

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        self._wraps = False
        module = super().setup_module(module, move_to_device)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: self.data.all_reduce(gradient, "mean"))
        return module


STRATEGIES: dict[str, type[DDPStrategy]] = {
    "ddp": DDPStrategy, "pairs": Pairs, "one model": OneModel, "averaging": Averaging
}  # fmt: skip


def data_of(seed: int, samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    """Samples whose number nobody knows before they are over."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[index] for index in range(len(self.samples))])


class Augmented(Dataset[Any]):
    """Samples that are changed at random whenever they are asked for."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + random.random() + torch.rand(4), y


class Rows(Logger):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append({**metrics, "at": float(step or 0)})


class Total(nn.Module):
    """A metric object that synchronises itself as those of torchmetrics do: over all processes, unless it is told how.

    Importing torchmetrics in four processes would take longer than all of these tests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.process_group: Any = None
        self.dist_sync_fn: Any = None
        self.reset()

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()

    def forward(self, values: Tensor) -> None:
        self.update(values)

    def compute(self) -> Tensor:
        if self.dist_sync_fn is None:
            return TorchGroup(self.process_group).all_gather(self.total).sum()
        return torch.stack(self.dist_sync_fn(self.total, group=self.process_group)).sum()

    def reset(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)


class Regression(LightningModule):
    def __init__(self, case: dict[str, Any], part: int) -> None:
        super().__init__()
        torch.manual_seed(1 + part)
        norm = [nn.BatchNorm1d(8)] if case.get("norm") else []
        self.net = nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Linear(8, 1)).double()
        self.case, self.metric = case, None if "metric" not in case else Total()
        if case.get("metric") == "torchmetrics":
            from torchmetrics import SumMetric  # here, because importing it takes seconds

            self.metric = SumMetric()
        self.automatic_optimization = not case.get("by_hand")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("samples", float(len(x)), sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
        if self.metric is not None:
            self.metric.update(x)
            self.log("total", self.metric, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return WeightedLoss(loss, len(x)) if self.case.get("weighted") else loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", F.mse_loss(self.net(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        prediction: Tensor = self.net(batch[0])
        return prediction

    def configure_optimizers(self) -> Any:
        if self.case.get("closure"):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if "parts" in self.case:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class StopsOn(Callback):
    """Asks for a stop on one rank alone."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            trainer.should_stop = True


def job(kind: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One rank's fit and prediction."""
    warnings.filterwarnings("ignore", "The learning-rate schedulers that")  # the case by hand does not step its own
    rows, world_size = Rows(), case["world_size"]
    trainer = Trainer(
        accelerator="cpu", strategy=STRATEGIES[kind](), devices=world_size, max_epochs=2, precision="64-true",
        logger=rows, log_every_n_steps=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=case.get("callbacks", []),
        **case.get("options", {}),
    )  # fmt: skip
    module = Regression(case, case["parts"][trainer.global_rank] if "parts" in case else 0)
    place = trainer.distributed_sampler_kwargs
    assert place is not None
    index = place["rank"]
    torch.manual_seed(7 if trainer.is_global_zero else 100 + trainer.global_rank)  # rank 0 draws the order for all
    train: DataLoader[Any] = DataLoader(data_of(1, 23), batch_size=BATCH, shuffle=True)
    if case.get("augmented"):
        seed_everything(7)
        train = DataLoader(Augmented(data_of(1, 23)), batch_size=BATCH, shuffle=True)
    if "own" in case:  # each place in the data has a loader of its own, of its own length
        samples = data_of(2 + index, case["own"][index])
        train = DataLoader(Stream(samples) if case.get("stream") else samples, batch_size=BATCH)
    trainer.fit(module, train, DataLoader(data_of(11, 13), batch_size=BATCH))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(module, DataLoader(data_of(12, 13), batch_size=BATCH))
    assert trainer.strategy.world.size == world_size
    if world_size == 4:
        assert len(dist.distributed_c10d._world.pg_names) == 1 + (kind != "ddp")  # the same ones for both runs
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in module.parameters()]),
        "buffers": [buffer.clone() for buffer in module.buffers()],
        "metrics": metrics,
        "rows": rows.rows, "steps": trainer.global_step, "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "predictions": [prediction.tolist() for prediction in predictions],
        "place": place, "drawn": float(torch.rand(())) if trainer.is_global_zero else None,
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"metric": "own", "options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}},
    "weighted": {"weighted": True, "options": {"accumulate_grad_batches": 2}},
    "batch norm": {"norm": True, "options": {"sync_batchnorm": True}},
    "augmented": {"augmented": True},
    "optimized by hand": {"by_hand": True},
    "closure": {"closure": True},
    "split batches": {"options": {"split_batches": True}},
    "uneven loaders": {"own": [19, 9], "options": {"use_distributed_sampler": False}},
    "streams": {"own": [19, 9], "stream": True, "weighted": True, "options": {"use_distributed_sampler": False}},
    "stopped by one rank": {"callbacks": [StopsOn(1, 3)]},
}


def same(ranks: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], indices: Sequence[int]) -> None:
    """Whether each rank has what the rank of its place in the data has in the run that is expected."""
    for rank, (found, index) in enumerate(zip(ranks, indices, strict=True)):
        wanted = expected[index]
        torch.testing.assert_close(found["weights"], wanted["weights"], rtol=0, atol=0)
        torch.testing.assert_close(found["buffers"], wanted["buffers"], rtol=0, atol=0)
        for what in ("metrics", "steps", "rate", "place"):
            assert found[what] == wanted[what], (rank, what)
        assert {"loss_epoch", "samples", "val"} <= set(found["metrics"])
    for what in ("rows", "predictions", "drawn"):
        assert ranks[0][what] == expected[0][what], what
    assert ranks[0]["rows"]
    assert ranks[0]["predictions"]
    assert not any(found["rows"] or found["predictions"] for found in ranks[1:])


@pytest.mark.parametrize("name", CASES)
def test_two_pairs_of_ranks_give_the_numbers_of_two_ranks(pool: Any, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    expected = pool.run(job, "ddp", {**case, "world_size": 2}, tmp_path, group=False)
    found = pool.run(job, "pairs", {**case, "world_size": 4}, tmp_path, group=False, world_size=4)
    same(found, expected, [0, 0, 1, 1])


def test_four_ranks_that_all_see_different_samples_do_not(pool: Any, tmp_path: Path) -> None:
    """The negative control: what is compared differs where every rank is a rank of data."""
    expected = pool.run(job, "ddp", {"world_size": 2}, tmp_path, group=False)
    found = pool.run(job, "ddp", {"world_size": 4}, tmp_path, group=False, world_size=4)
    with pytest.raises(AssertionError):
        same(found, expected, [0, 0, 1, 1])


@pytest.mark.parametrize("name", ["accumulated", "weighted"])
def test_gradients_may_be_averaged_over_the_data_group_by_hooks(pool: Any, tmp_path: Path, name: str) -> None:
    expected = pool.run(job, "ddp", {**CASES[name], "world_size": 2}, tmp_path, group=False)
    found = pool.run(job, "averaging", {**CASES[name], "world_size": 4}, tmp_path, group=False, world_size=4)
    for rank, mine in enumerate(found):
        torch.testing.assert_close(mine["weights"], expected[rank // 2]["weights"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["accumulated", "weighted", "optimized by hand", "closure"])
def test_one_model_on_all_ranks_gives_the_numbers_of_one_rank(pool: Any, tmp_path: Path, name: str) -> None:
    case = {**CASES[name], **({"metric": "torchmetrics"} if name == "accumulated" else {})}
    expected = pool.run(job, "ddp", {**case, "world_size": 1}, tmp_path, group=False, world_size=1)
    found = pool.run(job, "one model", {**case, "world_size": 2}, tmp_path, group=False)
    same(found, expected, [0, 0])


@pytest.mark.parametrize(("kind", "ranks"), [("pairs", 4), ("one model", 2)])
def test_ranks_of_one_model_keep_different_weights(pool: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    case = {"norm": True, "options": {"sync_batchnorm": True}}
    of_data = ranks // 2
    each = [
        pool.run(job, "ddp", {**case, "parts": [part] * 2, "world_size": of_data}, tmp_path, group=False,
                 world_size=of_data)
        for part in range(2)
    ]  # fmt: skip
    parts = [rank % 2 for rank in range(ranks)]
    found = pool.run(job, kind, {**case, "parts": parts, "world_size": ranks}, tmp_path, group=False, world_size=ranks)
    for rank, mine in enumerate(found):
        torch.testing.assert_close(mine["weights"], each[rank % 2][rank // 2]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(mine["buffers"], each[rank % 2][rank // 2]["buffers"], rtol=0, atol=0)
    assert not torch.equal(found[0]["weights"], found[1]["weights"])


def test_a_rank_without_a_batch_is_named_as_it_is_in_the_job(pool: Any, tmp_path: Path) -> None:
    case = {"own": [19, 0], "stream": True, "options": {"use_distributed_sampler": False}, "world_size": 4}
    with pytest.raises(ConfigurationError, match=r"no batch at all on rank [23], and others"):
        pool.run(job, "pairs", case, tmp_path, group=False, world_size=4)


def interrupted(kind: str, world_size: int, folder: Path, at: int | None) -> Tensor:
    """The weights after two epochs, resumed from after ``at`` steps; ``None``: without a break."""
    case = {"own": [19, 9], "weighted": True}
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": world_size, "precision": "64-true", "logger": False,
        "use_distributed_sampler": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, "num_sanity_val_steps": 0, "limit_val_batches": 0, "enable_checkpointing": False,
    }  # fmt: skip

    def fit(max_steps: int = -1, ckpt_path: Path | None = None) -> tuple[Trainer, Regression]:
        trainer = Trainer(strategy=STRATEGIES[kind](), max_epochs=2, max_steps=max_steps, **options)
        kwargs = trainer.distributed_sampler_kwargs
        assert kwargs is not None
        module, index = Regression({**case, "parts": [0] * world_size}, 0), kwargs["rank"]
        torch.manual_seed(3)
        trainer.fit(
            module, DataLoader(data_of(2 + index, case["own"][index]), BATCH, shuffle=True), ckpt_path=ckpt_path
        )
        return trainer, module

    if at is None:
        module = fit()[1]
    else:
        trainer, _ = fit(max_steps=at)
        trainer.save_checkpoint(folder / "mid.ckpt")
        module = fit(ckpt_path=folder / "mid.ckpt")[1]
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_pairs_resume_where_some_repeat_their_last_batch(pool: Any, tmp_path: Path) -> None:
    whole = pool.run(interrupted, "ddp", 2, tmp_path, None, group=False)
    found = pool.run(interrupted, "pairs", 4, tmp_path, 4, group=False, world_size=4)  # ranks 2 and 3 have 3 batches
    for weights in found:
        torch.testing.assert_close(weights, whole[0], rtol=0, atol=0)


def driven(kind: str, world_size: int) -> Any:
    """The same with an Engine."""
    engine = Engine(accelerator="cpu", devices=world_size, strategy=STRATEGIES[kind](), precision="64-true")
    engine.launch()
    torch.manual_seed(1)
    module = nn.Linear(4, 1)
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    torch.manual_seed(7 if engine.is_global_zero else 100 + engine.global_rank)
    loader = engine.setup_dataloaders(DataLoader(data_of(1, 23), batch_size=BATCH, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            engine.backward(
                F.mse_loss(model(x).to(y.dtype), y)
            )  # the model returns 32 bits; torch 2.9 mixes no types here
            optimizer.step()
    gathered = engine.all_gather(engine.global_rank).tolist(), engine.strategy.data.all_gather(torch.ones(1)).shape
    return module.weight.detach(), gathered


def test_an_engine_shares_data_and_gradients_in_the_data_group(pool: Any) -> None:
    expected = pool.run(driven, "ddp", 2, group=False)
    found = pool.run(driven, "pairs", 4, group=False, world_size=4)
    for weight, (ranks, shape) in found:
        torch.testing.assert_close(weight, expected[0][0], rtol=0, atol=0)
        assert (ranks, shape) == ([0, 1, 2, 3], (2, 1))


def place_before_the_processes_meet() -> Any:
    trainer = Trainer(accelerator="cpu", strategy=Pairs(), devices=4, logger=False)
    with pytest.raises(ConfigurationError, match="are not connected yet"):
        trainer.strategy.data.gather_objects(1)
    return trainer.distributed_sampler_kwargs


def test_the_place_in_the_data_is_known_before_the_processes_meet(pool: Any) -> None:
    found = pool.run(place_before_the_processes_meet, group=False, world_size=4)
    assert found == [{"num_replicas": 2, "rank": rank // 2} for rank in range(4)]
