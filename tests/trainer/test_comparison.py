"""Ranks that a user's program started differently: every rank ends at once and is shown both sides."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.settings import Settings
from drivetrain.strategies import DDPStrategy
from drivetrain.trainer.comparison import MAY_DIFFER


class Net(LightningModule):
    def __init__(self, features: int = 3, frozen: bool = False, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.lr = nn.Linear(2, features), nn.Linear(features, 1), lr
        self.layer.requires_grad_(not frozen)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.head(self.layer(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.head(self.layer(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Late(Net):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def configure_model(self) -> None:
        self.late = nn.Linear(2, self.features)


class Prints(Callback):
    def on_train_epoch_end(self, *arguments: Any) -> None:
        print("an epoch has ended")


class Adds(Callback):
    """Gives the model a layer, as adapters do."""

    def __init__(self, features: int) -> None:
        self.features = features

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.adapter = nn.Linear(2, self.features)


def loader(batches: int = 4) -> Any:
    return DataLoader(TensorDataset(torch.ones(4 * batches, 2)), batch_size=2)


def fit(folder: Path, module: Any = None, val: Any = None, **arguments: Any) -> float:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
             "enable_checkpointing": False, "accelerator": "cpu", "devices": 2, "max_epochs": 2}  # fmt: skip
    trainer = Trainer(**{**quiet, "default_root_dir": folder, **arguments})
    module = module or Net()
    trainer.fit(module, loader(), loader(1) if val is None else val)
    return sum(float(parameter.detach().double().sum()) for parameter in module.parameters())


def hook(state: Any, bucket: Any) -> Any:
    raise AssertionError("the ranks differ, so no gradient is exchanged")


def fit_or_validate(folder: Path, rank: int) -> None:
    if rank == 0:
        fit(folder)
    else:
        Trainer(accelerator="cpu", devices=2, logger=False, default_root_dir=folder).validate(Net(), loader(1))


def set_later(folder: Path, rank: int) -> None:
    trainer = Trainer(accelerator="cpu", devices=2, logger=False, max_epochs=1, default_root_dir=folder)
    if rank:
        trainer.limit_train_batches = 2
    trainer.fit(Net(), loader(), loader(1))


def engine(features: int = 2, lr: float = 0.1, precision: str = "32-true") -> None:
    made = Engine(accelerator="cpu", devices=2, precision=precision)
    made.launch()
    module = nn.Linear(2, features)
    made.setup(module, torch.optim.SGD(module.parameters(), lr=lr))


def resumed(folder: Path, rank: int) -> None:
    path = folder / "first.ckpt"
    trainer = Trainer(accelerator="cpu", devices=2, logger=False, max_epochs=1, default_root_dir=folder)
    trainer.fit(Net(), loader(), loader(1))
    trainer.save_checkpoint(path)
    trainer.max_epochs = 2
    trainer.fit(Net(), loader(), loader(1), ckpt_path=path if rank == 0 else None)


DIFFERENT: dict[str, tuple[Callable[[Path, int], Any], str]] = {
    "clipping": (
        lambda folder, rank: fit(folder, **({"gradient_clip_val": 1.0} if rank == 0 else {})),
        "gradient_clip_val: rank 0 has 1.0, rank 1 has None",
    ),
    "accumulation": (
        lambda folder, rank: fit(folder, accumulate_grad_batches=1 + rank),
        "accumulate_grad_batches: rank 0 has 1, rank 1 has 2",
    ),
    "precision": (
        lambda folder, rank: fit(folder, precision=("32-true", "64-true")[rank]),
        "precision: rank 0 has '32-true' (Precision), rank 1 has '64-true' (DoublePrecision)",
    ),
    "epochs": (lambda folder, rank: fit(folder, max_epochs=1 + rank), "max_epochs: rank 0 has 1, rank 1 has 2"),
    "a limit that is set later": (set_later, "limit_train_batches: rank 0 has 1.0, rank 1 has 2"),
    "an option of DDP": (
        lambda folder, rank: fit(folder, strategy=DDPStrategy(find_unused_parameters=rank == 1)),
        "find_unused_parameters: rank 0 has False, rank 1 has True",
    ),
    "a hook of DDP": (
        lambda folder, rank: fit(folder, strategy=DDPStrategy(ddp_comm_hook=hook if rank else None)),
        "ddp_comm_hook: rank 0 has None, rank 1 has ",
    ),
    "a layer": (
        lambda folder, rank: fit(folder, Net(features=3 + rank)),
        "parameter layer.weight: rank 0 has float32 of shape (3, 2), rank 1 has float32 of shape (4, 2)",
    ),
    "a frozen layer": (
        lambda folder, rank: fit(folder, Net(frozen=rank == 1)),
        "layer.bias: rank 0 has float32 of shape (3,), rank 1 has float32 of shape (3,), frozen",
    ),
    "a layer of configure_model": (
        lambda folder, rank: fit(folder, Late(2 + rank)),
        "parameter late.bias: rank 0 has float32 of shape (2,), rank 1 has float32 of shape (3,)",
    ),
    "a layer that a callback adds": (
        lambda folder, rank: fit(folder, callbacks=Adds(2 + rank)),
        "parameter adapter.bias: rank 0 has float32 of shape (2,), rank 1 has float32 of shape (3,)",
    ),
    "a callback that adds a layer, on one rank": (
        lambda folder, rank: fit(folder, callbacks=[Adds(2)] if rank else []),
        "parameter adapter.weight: rank 0 has none, rank 1 has float32 of shape (2, 2)",
    ),
    "the learning rate": (
        lambda folder, rank: fit(folder, Net(lr=0.1 * (1 + rank))),
        "lr of optimizer 0, group 0: rank 0 has 0.1, rank 1 has 0.2",
    ),
    "EarlyStopping on one rank": (
        lambda folder, rank: fit(folder, callbacks=[EarlyStopping("value")] if rank == 0 else []),
        "callback EarlyStopping{'monitor': 'value', 'mode': 'min'}: rank 0 has 1, rank 1 has none",
    ),
    "ModelCheckpoint on one rank": (
        lambda folder, rank: fit(folder, callbacks=[ModelCheckpoint(folder)] if rank == 0 else [],
                                 enable_checkpointing=None if rank == 0 else False),
        "callback ModelCheckpoint{'monitor': None",
    ),
    "an accumulation schedule on one rank": (
        lambda folder, rank: fit(folder, callbacks=[GradientAccumulationScheduler({0: 2 + rank})]),
        "callback GradientAccumulationScheduler{'scheduling': {0: 2}}: rank 0 has 1, rank 1 has none",
    ),
    "what is called": (fit_or_validate, "the method called: rank 0 has trainer.fit, rank 1 has trainer.validate"),
    "validation loaders": (
        lambda folder, rank: fit(folder, val=[loader(1)] * (1 + rank)),
        "loaders of the stage 'validate': rank 0 has 1 passed, rank 1 has 2 passed",
    ),
    "a checkpoint to resume from": (resumed, "ckpt_path: rank 0 has a checkpoint, rank 1 has None"),
    "an Engine's model": (
        lambda folder, rank: engine(features=2 + rank),
        "parameter weight: rank 0 has float32 of shape (2, 2), rank 1 has float32 of shape (3, 2)",
    ),
    "an Engine's optimizer": (lambda folder, rank: engine(lr=1.0 + rank), "lr of optimizer 0, group 0: rank 0 has 1.0"),
    "an Engine's precision": (
        lambda folder, rank: engine(precision=("32-true", "bf16-mixed")[rank]),
        "precision: rank 0 has '32-true' (Precision), rank 1 has 'bf16-mixed' (MixedPrecision)",
    ),
}  # fmt: skip


def all_refused(folder: Path) -> dict[str, str]:
    """Every case in one job: the ranks stay together after each error."""
    found = {}
    for name, (start, _) in DIFFERENT.items():
        try:
            start(folder / name, int(os.environ["RANK"]))
            found[name] = "nothing"
        except ConfigurationError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def refused(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    found: list[dict[str, str]] = pool.run(all_refused, tmp_path_factory.mktemp("differ"), group=False)
    return found


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_were_started_differently_all_end_with_both_sides(refused: list[dict[str, str]], name: str) -> None:
    first, second = refused
    assert first[name] == second[name]
    assert first[name].startswith("The ranks of this job differ. ")
    assert DIFFERENT[name][1] in first[name]


def another_version() -> str:
    if os.environ["RANK"] == "1":
        torch.__version__ = "1.0"
    try:
        with pytest.raises(ConfigurationError) as caught:
            fit(Path("."))
    finally:
        torch.__version__ = torch.version.__version__
    return str(caught.value)


def test_versions_are_compared(pool: Any) -> None:
    for text in pool.run(another_version, group=False):
        assert f"the version of torch: rank 0 has {torch.__version__}, rank 1 has 1.0" in text


ALLOWED: dict[str, Callable[[Path, int], float]] = {
    "nothing": lambda folder, rank: fit(folder),
    "a callback of one's own on rank 0": lambda folder, rank: fit(folder, callbacks=[Prints()] if rank == 0 else []),
    "a logger on rank 0": lambda folder, rank: fit(folder, logger=CSVLogger(folder) if rank == 0 else False,
                                                   log_every_n_steps=1),
    "a bar and a summary on rank 0": lambda folder, rank: fit(folder, enable_progress_bar=rank == 0,
                                                              enable_model_summary=rank == 0),
    "a folder for each rank": lambda folder, rank: fit(folder / str(rank)),
}  # fmt: skip


def all_allowed(folder: Path) -> dict[str, float]:
    return {name: start(folder / name, int(os.environ["RANK"])) for name, start in ALLOWED.items()}


def test_what_belongs_to_one_rank_may_differ(pool: Any, tmp_path: Path) -> None:
    """The control: these train, and to the same weights."""
    first, second = pool.run(all_allowed, tmp_path, group=False)
    assert first == second
    assert len(set(first.values())) == 1
    assert list((tmp_path / "a logger on rank 0").rglob("metrics.csv"))


def seeded(apart: bool) -> list[str]:
    seed_everything(7 + apart * int(os.environ["RANK"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Path("."))
    return [str(each.message) for each in caught if "seed" in str(each.message)]


def test_different_seeds_are_a_warning_on_rank_zero(pool: Any) -> None:
    first, second = pool.run(seeded, True, group=False)
    assert second == []
    assert "The ranks have different seeds: rank 0 has 7, rank 1 has 8." in first[0]
    assert pool.run(seeded, False, group=False) == [[], []]


def test_every_setting_is_compared_or_has_a_reason_why_not() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    assert MAY_DIFFER.keys() <= names
    compared = names - MAY_DIFFER.keys()
    assert {"gradient_clip_val", "accumulate_grad_batches", "max_epochs", "sync_batchnorm", "num_nodes"} <= compared
