"""What a checkpoint holds (trap T24), and that a run which takes it back goes on as if it had never stopped."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import LightningDataModule, LightningModule, Trainer
from drivetrain.base.seed import seed_everything
from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers.logger import Logger
from drivetrain.loops.progress import TrainerFn
from drivetrain.module.loading import decode_parts
from drivetrain.precision import Precision
from drivetrain.trainer.checkpoint import check_storable, dump

INFORMATION = {"program", "epoch", "global_step", "pytorch-lightning_version", "drivetrain_version", "torch_version"}
WEIGHTS_ONLY = INFORMATION | {"state_dict"}
EVERYTHING = WEIGHTS_ONLY | {
    "loops", "callbacks", "optimizer_states", "optimizers", "lr_schedulers", "rng", "restart", "saved_under",
}  # fmt: skip


class Somewhere:
    """No plain data."""


class Net(LightningModule):
    """Everything that has a state: dropout, momentum or moments, a schedule, batch norm's running figures."""

    def __init__(self, optimizer: str = "sgd", hidden: int = 8, plateau: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 1)
        )
        self.kind, self.plateau = optimizer, plateau
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_step_loss", self.loss(batch), on_step=True, on_epoch=False)

    def configure_optimizers(self) -> Any:
        if self.kind == "none":
            return None
        optimizer: torch.optim.Optimizer
        if self.kind == "adam":
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


class ListLogger(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loaders(workers: int = 0) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Four shuffled training batches (five with the smaller last one of 36 samples), two for validation."""
    return (
        DataLoader(data(36), batch_size=8, shuffle=True, num_workers=workers),
        DataLoader(data(16), batch_size=8),
    )


@pytest.fixture
def trainer_for(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # seed_everything writes them; they are put back after the test

    def make(epochs: int, logger: Any = False, **arguments: Any) -> Trainer:
        trainer: Trainer = make_trainer(max_epochs=epochs, logger=logger, log_every_n_steps=2, **arguments)
        return trainer

    return make


def load(path: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def saved_run(trainer_for: Any, path: Path, module: LightningModule | None = None, epochs: int = 1) -> Trainer:
    trainer: Trainer = trainer_for(epochs)
    trainer.fit(module or Net(), *loaders())
    trainer.save_checkpoint(path)
    return trainer


# ---- what it holds (trap T24) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights_only", "keys"), [(False, EVERYTHING), (True, WEIGHTS_ONLY)])
def test_t24_keys(trainer_for: Any, tmp_path: Path, weights_only: bool, keys: set[str]) -> None:
    module, trainer = Net(), trainer_for(3)
    trainer.fit(module, *loaders())
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=weights_only)
    saved = load(tmp_path / "run.ckpt")
    assert set(saved) == keys
    assert (saved["epoch"], saved["global_step"]) == (3, 15)
    assert saved["drivetrain_version"] == drivetrain.__version__
    assert saved["torch_version"] == torch.__version__
    assert saved["pytorch-lightning_version"].startswith("2.6")
    assert saved["state_dict"].keys() == module.state_dict().keys()
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())


def test_t24_states_are_those_of_the_parts(trainer_for: Any, tmp_path: Path) -> None:
    saved_run(trainer_for, tmp_path / "run.ckpt", epochs=2)
    saved = load(tmp_path / "run.ckpt")
    (optimizer,), (scheduler,) = saved["optimizer_states"], saved["lr_schedulers"]
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0.025)
    assert all("momentum_buffer" in state for state in optimizer["state"].values())
    assert scheduler["last_epoch"] == 2
    assert saved["loops"]["drivetrain"]["current_epoch"] == 2
    assert {"python", "torch"} <= set(saved["rng"])


def test_t24_parts_with_a_state_of_their_own_have_a_key(trainer_for: Any, tmp_path: Path) -> None:
    class Scaling(Precision):
        def state_dict(self) -> dict[str, Any]:
            return {"scale": 8.0}

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loaders()[0]

        def val_dataloader(self) -> Any:
            return loaders()[1]

        def state_dict(self) -> dict[str, Any]:
            return {"position": 3}

    stateless, stopping = Callback(), EarlyStopping("val_loss")
    trainer = trainer_for(1, plugins=Scaling(), callbacks=[stateless, stopping])
    trainer.fit(Net(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = load(tmp_path / "run.ckpt")
    assert set(saved) - EVERYTHING == {Scaling.__qualname__, Data.__qualname__}
    assert saved[Scaling.__qualname__] == {"scale": 8.0}
    assert saved[Data.__qualname__] == {"position": 3}
    assert set(saved["callbacks"]) == {stopping.state_key}


def test_before_a_run_there_is_nothing_to_save(trainer_for: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model to save yet"):
        trainer_for(1).save_checkpoint(tmp_path / "run.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_storage_options_reach_the_store(trainer_for: Any, tmp_path: Path) -> None:
    trainer = saved_run(trainer_for, tmp_path / "run.ckpt")
    with pytest.raises(TypeError, match="takes no storage_options"):
        trainer.save_checkpoint(tmp_path / "other.ckpt", storage_options={"key": 1})


# ---- going on as if it had never stopped -----------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Bit-equal trees of tensors and plain data."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("source", ["ModelCheckpoint", "save_checkpoint after fit"])
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("sgd", {}),
        ("adam", {}),
        ("sgd", {"accumulate_grad_batches": 2}),
        ("sgd", {"val_check_interval": 0.5}),
        ("adam", {"num_sanity_val_steps": 0, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}),
    ],
    ids=["sgd", "adam", "accumulated", "validated twice per epoch", "clipped in bf16"],
)
def test_t26_resumed_at_an_epochs_end_it_goes_on_bit_for_bit(
    trainer_for: Any, tmp_path: Path, optimizer: str, arguments: dict[str, Any], source: str
) -> None:
    def keep_all(folder: str) -> list[Callback]:
        return [ModelCheckpoint(tmp_path / folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]

    def run(epochs: int, folder: str, ckpt_path: Any = None) -> tuple[Trainer, Net, ListLogger]:
        seed_everything(11)
        module, logger = Net(optimizer), ListLogger()
        trainer = trainer_for(epochs, logger, callbacks=keep_all(folder), enable_checkpointing=True, **arguments)
        trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
        return trainer, module, logger

    whole_trainer, whole, whole_log = run(4, "whole")
    first_trainer, first, first_log = run(2, "parts")
    path = tmp_path / "parts" / "epoch=1.ckpt"
    if source != "ModelCheckpoint":
        path = tmp_path / "after.ckpt"
        first_trainer.save_checkpoint(path)
    torch.manual_seed(999)  # what happens in between must not matter
    second_trainer, second, second_log = run(4, "parts", path)

    assert first.losses == whole.losses[:10]
    assert second.losses == whole.losses[10:]
    assert same(second.state_dict(), whole.state_dict())
    assert same(
        [optimizer.state_dict() for optimizer in second_trainer.optimizers],
        [optimizer.state_dict() for optimizer in whole_trainer.optimizers],
    )
    assert same(
        [config.scheduler.state_dict() for config in second_trainer.lr_scheduler_configs],
        [config.scheduler.state_dict() for config in whole_trainer.lr_scheduler_configs],
    )
    if source == "ModelCheckpoint":  # it was saved before the epoch's row was logged
        assert second_log.rows.pop(0) == first_log.rows[-1]
    assert first_log.rows + second_log.rows == whole_log.rows
    assert len(second_log.rows) > 10
    assert same(second_trainer.callback_metrics, whole_trainer.callback_metrics)
    assert (second_trainer.current_epoch, second_trainer.global_step) == (
        whole_trainer.current_epoch,
        whole_trainer.global_step,
    )
    ours, theirs = (load(tmp_path / folder / "epoch=3.ckpt") for folder in ("parts", "whole"))
    other = {"callbacks": None, "program": None}  # paths, and the number of the fit in this process
    assert same({**ours, **other}, {**theirs, **other})


def test_without_the_checkpoints_random_state_it_would_not(trainer_for: Any, tmp_path: Path) -> None:
    """The control of the test above: the shuffle and the dropout do depend on it."""
    saved_run(trainer_for, tmp_path / "run.ckpt")
    losses = []
    for seed in (1, 1, 2):
        saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
        torch.manual_seed(seed)
        torch.save({**saved, "rng": {**saved["rng"], "torch": torch.get_rng_state()}}, tmp_path / "other.ckpt")
        module = Net()
        trainer_for(2).fit(module, *loaders(), ckpt_path=tmp_path / "other.ckpt")
        losses.append(module.losses)
    assert losses[0] == losses[1] != losses[2]


def test_a_finished_run_has_nothing_left_to_do(trainer_for: Any, tmp_path: Path) -> None:
    saved_run(trainer_for, tmp_path / "run.ckpt", epochs=2)
    module, trainer = Net(), trainer_for(2)
    trainer.fit(module, *loaders(), ckpt_path=tmp_path / "run.ckpt")
    assert module.losses == []
    assert (trainer.current_epoch, trainer.global_step) == (2, 10)


def test_max_steps_count_the_steps_before(trainer_for: Any, tmp_path: Path) -> None:
    saved_run(trainer_for, tmp_path / "run.ckpt", epochs=1)
    module, trainer = Net(), trainer_for(-1, max_steps=8)
    trainer.fit(module, *loaders(), ckpt_path=tmp_path / "run.ckpt")
    assert trainer.global_step == 8
    assert len(module.losses) == 3


def test_early_stopping_goes_on_waiting(trainer_for: Any, tmp_path: Path) -> None:
    class Constant(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    def stopping() -> EarlyStopping:
        return EarlyStopping("val_loss", patience=3)

    trainer = trainer_for(2, callbacks=stopping())
    trainer.fit(Constant(), *loaders())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    callback = stopping()
    trainer = trainer_for(10, callbacks=callback)
    trainer.fit(Constant(), *loaders(), ckpt_path=tmp_path / "run.ckpt")
    assert trainer.current_epoch == 4  # one look sets the best score, three wait: one of them before the checkpoint
    assert callback.wait_count == 3


# ---- refusals --------------------------------------------------------------------------------------------------------


def resume(trainer_for: Any, path: Any, module: LightningModule | None = None, **arguments: Any) -> Trainer:
    trainer: Trainer = trainer_for(arguments.pop("epochs", 5), **arguments)
    trainer.fit(module or Net(), *loaders(), ckpt_path=path)
    return trainer


class SaveAfter(Callback):
    """Saves after a number of steps, or after validation; it has no state that a resumed run would miss."""

    def __init__(self, when: int | str, path: Path) -> None:
        self.when, self.path = when, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.when:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "validation" and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


def test_t27_a_weights_only_file_is_refused_for_training(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1)
    trainer.fit(Net(), *loaders())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="saved with save_weights_only=True.* or load only its weights"):
        resume(trainer_for, tmp_path / "weights.ckpt")
    module = Net()
    trainer_for(1).validate(module, loaders()[1], ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert same(dict(module.state_dict()), load(tmp_path / "weights.ckpt")["state_dict"])


def test_t27_another_number_of_optimizers(trainer_for: Any, tmp_path: Path) -> None:
    saved_run(trainer_for, tmp_path / "run.ckpt")
    with (
        pytest.warns(UserWarning, match="returned no optimizer"),
        pytest.raises(CheckpointError, match="holds 1 optimizer states, and configure_optimizers made 0"),
    ):
        resume(trainer_for, tmp_path / "run.ckpt", Net("none"))


def test_another_number_of_schedulers(trainer_for: Any, tmp_path: Path) -> None:
    class Unscheduled(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    saved_run(trainer_for, tmp_path / "run.ckpt")
    with pytest.raises(CheckpointError, match="holds 1 scheduler states, and configure_optimizers made 0"):
        resume(trainer_for, tmp_path / "run.ckpt", Unscheduled())


def test_t27_a_module_that_does_not_fit(trainer_for: Any, tmp_path: Path) -> None:
    saved_run(trainer_for, tmp_path / "run.ckpt")
    with pytest.raises(
        CheckpointError, match=r"(?s)does not fit Net: .*size mismatch.*Build the module as it was trained"
    ):
        resume(trainer_for, tmp_path / "run.ckpt", Net(hidden=9))


def test_t27_strict_loading_can_be_switched_off(trainer_for: Any, tmp_path: Path) -> None:
    class Grown(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(1, 1)

    saved_run(trainer_for, tmp_path / "run.ckpt")
    trainer, module = trainer_for(1), Grown()
    with pytest.raises(CheckpointError, match="(?s)Missing key.*strict_loading = False"):
        trainer.validate(module, loaders()[1], ckpt_path=tmp_path / "run.ckpt", verbose=False)
    module.strict_loading = False
    trainer.validate(module, loaders()[1], ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert same(module.net.state_dict()["0.weight"], load(tmp_path / "run.ckpt")["state_dict"]["net.0.weight"])


def test_t26_a_checkpoint_beyond_max_epochs(trainer_for: Any, tmp_path: Path) -> None:
    saved_run(trainer_for, tmp_path / "run.ckpt", epochs=3)
    with pytest.raises(CheckpointError, match=r"saved after 3 epochs, and Trainer\(max_epochs=2\) is less. Raise"):
        resume(trainer_for, tmp_path / "run.ckpt", epochs=2)


def test_a_checkpoint_of_something_else(trainer_for: Any, tmp_path: Path) -> None:
    torch.save({"model": {}, "epoch": 1}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"no 'state_dict', only \['epoch', 'model'\]"):
        resume(trainer_for, tmp_path / "other.ckpt")


@pytest.mark.parametrize("loops", [3, "x", [1]])
def test_loops_of_another_kind_are_named(trainer_for: Any, tmp_path: Path, loops: Any) -> None:
    foreign = {"state_dict": {}, "pytorch-lightning_version": "2.6.0", "loops": loops}
    torch.save(foreign, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match=r"foreign\.ckpt.* entry for 'loops' is damaged.*is expected"):
        resume(trainer_for, tmp_path / "foreign.ckpt")


def test_a_checkpoint_that_is_not_there(trainer_for: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*missing\.ckpt"):
        resume(trainer_for, tmp_path / "missing.ckpt")


def test_a_tilde_in_ckpt_path_is_the_home_folder(
    trainer_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"There is no checkpoint at {re.escape(str(tmp_path))}/gone\.ckpt"):
        resume(trainer_for, Path("~/gone.ckpt"))


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Keeping(Callback):
    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.events: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.events.append("load_state_dict")
        self.value = state_dict["value"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert set(checkpoint) >= EVERYTHING
        checkpoint["from callback"] = self.value

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.events.append(("on_load_checkpoint", checkpoint["from callback"], dict(pl_module.state_dict())))


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["from module"] = [1, 2]
        checkpoint["seen"] = "from callback" in checkpoint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded.append((checkpoint["from module"], {k: v.clone() for k, v in self.state_dict().items()}))


def test_hooks_and_callback_state_round_trip(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1, callbacks=Keeping(7))
    trainer.fit(Hooked(), *loaders())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = load(tmp_path / "run.ckpt")
    assert (saved["from callback"], saved["from module"], saved["seen"]) == (7, [1, 2], True)

    module, callback = Hooked(), Keeping()
    fresh = {name: value.clone() for name, value in module.state_dict().items()}
    resume(trainer_for, tmp_path / "run.ckpt", module, epochs=1, callbacks=callback)
    ((extra, weights_then),) = module.loaded
    assert extra == [1, 2]
    assert same(weights_then, fresh)  # the module is asked before it takes the weights
    (name, value, weights_later), second = callback.events
    assert (name, value, second) == ("on_load_checkpoint", 7, "load_state_dict")
    assert same(weights_later, dict(saved["state_dict"]))  # callbacks come after it
    assert callback.value == 7


def test_a_module_may_change_the_weights_before_they_are_taken(trainer_for: Any, tmp_path: Path) -> None:
    class Renamed(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}

    saved_run(trainer_for, tmp_path / "run.ckpt")
    saved = load(tmp_path / "run.ckpt")
    torch.save({**saved, "state_dict": {f"old.{k}": v for k, v in saved["state_dict"].items()}}, tmp_path / "old.ckpt")
    module = Renamed()
    trainer_for(1).validate(module, loaders()[1], ckpt_path=tmp_path / "old.ckpt", verbose=False)
    assert same(dict(module.state_dict()), saved["state_dict"])


def test_with_weights_only_callbacks_are_not_asked(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1, callbacks=Keeping(7))
    trainer.fit(Hooked(), *loaders())
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    assert set(load(tmp_path / "run.ckpt")) == WEIGHTS_ONLY | {"from module", "seen"}


def test_evaluation_takes_weights_and_the_states_of_callbacks_and_no_progress(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1, callbacks=Keeping(7))
    trainer.fit(Hooked(), *loaders())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    module, callback = Hooked(), Keeping()
    evaluator = trainer_for(1, callbacks=callback)
    evaluator.validate(module, loaders()[1], ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert len(module.loaded) == 1
    assert [each if isinstance(each, str) else each[0] for each in callback.events] == [
        "on_load_checkpoint",
        "load_state_dict",
    ]
    assert callback.value == 7
    assert (evaluator.current_epoch, evaluator.global_step) == (0, 0)


def test_state_of_a_callback_that_is_gone_is_named(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1, callbacks=[Keeping(7), EarlyStopping("val_loss")])
    trainer.fit(Net(), *loaders())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.warns(UserWarning, match=r"does not have: EarlyStopping\{.*\}, Keeping\. Add them"):
        resume(trainer_for, tmp_path / "run.ckpt", epochs=1)


def test_datamodule_and_precision_take_their_state_back(trainer_for: Any, tmp_path: Path) -> None:
    class Scaling(Precision):
        scale = 1.0

        def state_dict(self) -> dict[str, Any]:
            return {"scale": self.scale}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.scale = state["scale"]

    class Data(LightningDataModule):
        position = 0

        def train_dataloader(self) -> Any:
            return loaders()[0]

        def val_dataloader(self) -> Any:
            return loaders()[1]

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.position = state_dict["position"]

    scaling, source = Scaling(), Data()
    trainer = trainer_for(1, plugins=scaling)
    trainer.fit(Net(), datamodule=source)
    scaling.scale, source.position = 8.0, 3
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    scaling, source = Scaling(), Data()
    trainer_for(1, plugins=scaling).fit(Net(), datamodule=source, ckpt_path=tmp_path / "run.ckpt")
    assert (scaling.scale, source.position) == (8.0, 3)


# ---- "best" and "last" -----------------------------------------------------------------------------------------------


class Worsening(Net):
    def on_validation_epoch_end(self) -> None:
        self.log("rank", float(self.current_epoch))


@pytest.fixture
def ranked(trainer_for: Any, tmp_path: Path) -> tuple[Trainer, ModelCheckpoint]:
    """Three epochs, of which the first is made the best."""
    callback = ModelCheckpoint(tmp_path / "kept", monitor="rank", save_last=True, filename="{epoch}")
    trainer: Trainer = trainer_for(3, callbacks=callback, enable_checkpointing=True)
    trainer.fit(Worsening(), *loaders())
    return trainer, callback


@pytest.mark.parametrize(("word", "epoch"), [("best", 0), ("last", 2)])
def test_best_and_last_name_the_callbacks_files(ranked: Any, word: str, epoch: int) -> None:
    trainer, callback = ranked
    module = Net()
    trainer.validate(module, loaders()[1], ckpt_path=word, verbose=False)
    saved = load(getattr(callback, f"{word}_model_path"))
    assert saved["epoch"] == epoch
    assert same(dict(module.state_dict()), saved["state_dict"])
    assert trainer.ckpt_path == getattr(callback, f"{word}_model_path")


def test_last_resumes_training(ranked: Any, trainer_for: Any) -> None:
    module, trainer = Worsening(), trainer_for(4, callbacks=ranked[1], enable_checkpointing=True)
    trainer.fit(module, *loaders(), ckpt_path="last")
    assert len(module.losses) == 5
    assert trainer.current_epoch == 4


def test_without_a_model_the_best_is_taken(ranked: Any) -> None:
    trainer, callback = ranked
    trainer.validate(dataloaders=loaders()[1], verbose=False)
    assert same(dict(trainer.lightning_module.state_dict()), load(callback.best_model_path)["state_dict"])
    trainer.validate(trainer.lightning_module, loaders()[1], ckpt_path="last", verbose=False)
    weights = dict(trainer.lightning_module.state_dict())
    trainer.validate(trainer.lightning_module, loaders()[1], verbose=False)  # a model that is given is taken as it is
    assert same(dict(trainer.lightning_module.state_dict()), weights)


@pytest.mark.parametrize("word", ["best", "last"])
def test_best_and_last_where_there_is_none(trainer_for: Any, word: str) -> None:
    trainer = trainer_for(1)
    with pytest.raises(CheckpointError, match=f'ckpt_path="{word}" names no checkpoint: there is no ModelCheckpoint'):
        trainer.fit(Net(), *loaders(), ckpt_path=word)
    trainer = trainer_for(1, callbacks=ModelCheckpoint(), enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=f'"{word}" names no checkpoint: its callbacks have saved none'):
        trainer.validate(Net(), loaders()[1], ckpt_path=word)


def test_last_without_any_checkpoint_starts_from_the_beginning(trainer_for: Any, caplog: Any) -> None:
    trainer = trainer_for(1, callbacks=ModelCheckpoint(), enable_checkpointing=True)
    with caplog.at_level("INFO", logger="drivetrain"):
        trainer.fit(Net(), *loaders(), ckpt_path="last")
    assert trainer.current_epoch == 1
    assert "no checkpoint of this program was found for this fit, so training starts from the beginning" in caplog.text


def test_last_without_a_last_one_is_the_newest_of_the_folder(trainer_for: Any, tmp_path: Path) -> None:
    def trainer() -> Any:
        return trainer_for(2, callbacks=ModelCheckpoint(tmp_path, save_top_k=-1), enable_checkpointing=True)

    first = trainer()
    first.fit(Net(), *loaders())
    again = trainer()
    again.validate(Net(), loaders()[1], ckpt_path="last", verbose=False)
    assert again.ckpt_path == first.checkpoint_callback.best_model_path
    os.utime(first.checkpoint_callback.best_model_path, (1, 1))
    again.validate(Net(), loaders()[1], ckpt_path="last", verbose=False)
    assert "epoch=0" in again.ckpt_path


def saving_in(hook: str, path: Path, base: type[Any], **arguments: Any) -> Any:
    """A module or a callback that saves in ``hook``."""

    def save(self: Any, *args: Any) -> Any:
        trainer = self.trainer if isinstance(self, LightningModule) else args[0]
        trainer.save_checkpoint(path, **arguments)
        return getattr(super(made, self), hook)(*args)

    made = type("Saving", (base,), {hook: save})
    return made()


@pytest.mark.parametrize(
    ("hook", "base"),
    [
        ("setup", Callback),
        ("setup", Net),
        ("prepare_data", Net),
        ("configure_model", Net),
        ("configure_optimizers", Net),
    ],
)
def test_what_nothing_could_resume_from_is_not_saved(
    trainer_for: Any, tmp_path: Path, hook: str, base: type[Any]
) -> None:
    def fit(**arguments: Any) -> None:
        saver = saving_in(hook, tmp_path / "a.ckpt", base, **arguments)
        module, callbacks = (Net(), [saver]) if base is Callback else (saver, [])
        trainer_for(1, callbacks=callbacks).fit(module, *loaders())

    with pytest.raises(CheckpointError, match="cannot be saved before the fit is set up: its optimizers do not exist"):
        fit()
    assert not (tmp_path / "a.ckpt").exists()
    fit(weights_only=True)
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 0


def test_in_on_fit_start_a_fit_that_resumes_is_not_saved_and_another_is(trainer_for: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    trainer_for(1, callbacks=saving_in("on_fit_start", first, Callback)).fit(Net(), *loaders())
    resumed = trainer_for(2)
    resumed.fit(Net(), *loaders(), ckpt_path=first)
    assert resumed.current_epoch == 2
    with pytest.raises(CheckpointError, match="its progress in .*first.ckpt is not restored yet. Save in"):
        trainer_for(2, callbacks=saving_in("on_fit_start", second, Callback)).fit(Net(), *loaders(), ckpt_path=first)
    assert not second.exists()


def test_a_fit_that_failed_in_its_set_up_is_not_saved(trainer_for: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1, callbacks=saving_in("on_exception", tmp_path / "a.ckpt", Callback))
    module = Net()
    module.configure_optimizers = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="failed: CheckpointError"), pytest.raises(ZeroDivisionError):
        trainer.fit(module, *loaders())
    with pytest.raises(CheckpointError, match="before the fit is set up"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


def test_pickling_must_be_asked_for_on_both_sides(trainer_for: Any, tmp_path: Path) -> None:
    class Remembering(Callback):
        state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"where": Somewhere()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.state = state_dict["where"]

    first = trainer_for(1, callbacks=Remembering())
    with pytest.warns(UserWarning, match="trainer.save_checkpoint would fail"):
        first.fit(Net(), *loaders())
    with pytest.raises(CheckpointError, match="pass allow_pickle=True to trainer.save_checkpoint"):
        first.save_checkpoint(tmp_path / "plain.ckpt")
    first.save_checkpoint(tmp_path / "any.ckpt", allow_pickle=True)
    with pytest.raises(CheckpointError, match="pass weights_only=False"):
        trainer_for(1).validate(Net(), loaders()[1], ckpt_path=tmp_path / "any.ckpt", verbose=False)
    second = Remembering()
    with pytest.warns(UserWarning, match="trainer.save_checkpoint would fail"):
        trainer_for(2, callbacks=second).fit(Net(), *loaders(), ckpt_path=tmp_path / "any.ckpt", weights_only=False)
    assert isinstance(second.state, Somewhere)


def test_what_cannot_be_stored_is_said_when_fit_starts(trainer_for: Any, tmp_path: Path) -> None:
    class Hoarding(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"history": [1, 2, Somewhere()]}

    module, checkpoint = Net(), ModelCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"\['history'\]\[2\]"):
        trainer_for(1, callbacks=[Hoarding(), checkpoint], enable_checkpointing=True).fit(module, *loaders())
    assert module.losses == []
    with pytest.warns(UserWarning, match="No callback saves in this fit, but trainer.save_checkpoint would fail"):
        trainer_for(1, callbacks=Hoarding()).fit(module, *loaders())
    light = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer_for(1, callbacks=[Hoarding(), light], enable_checkpointing=True).fit(module, *loaders())


# ---- values that weights_only refuses (trap T27) ---------------------------------------------------------------------


class Unstorable:
    def __repr__(self) -> str:
        return "Unstorable()"


class Holding(Callback):
    """Keeps one value as its state."""

    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"history": [0, self.value]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["history"][1]


class HoldingData(LightningDataModule):
    """The same."""

    value: Any = None

    def train_dataloader(self) -> Any:
        return loaders()[0]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


def attached(trainer_for: Any, module: Any = None) -> tuple[Trainer, Holding, HoldingData]:
    """A Trainer after a fit; what its parts then hold is for a checkpoint to store."""
    callback, data = Holding(), HoldingData()
    trainer: Trainer = trainer_for(1, callbacks=callback, limit_train_batches=1, limit_val_batches=0)
    trainer.fit(module or Net(), datamodule=data)
    return trainer, callback, data


def stored(trainer: Trainer, path: Path, **arguments: Any) -> dict[str, Any]:
    """What a run would take back from the file."""
    store = TorchCheckpointIO()
    store.save_checkpoint(dump(trainer, **arguments), path)
    return decode_parts(store.load_checkpoint(path))


def test_t27_states_come_back_as_they_were(trainer_for: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    values = {
        "best": Path("x"),
        "mode": TrainerFn.FITTING,
        "score": numpy.float32(0.1),
        "pair": (range(3), {Path("y")}),
    }
    trainer, callback, data = attached(trainer_for)
    callback.value, data.value = values, [Path("z")]
    read = stored(trainer, tmp_path / "x.ckpt")
    assert read["callbacks"]["Holding"] == {"history": [0, values]}
    assert type(read["callbacks"]["Holding"]["history"][1]["score"]) is numpy.float32
    assert read["HoldingData"] == {"value": [Path("z")]}
    load(tmp_path / "x.ckpt")


def test_t27_a_callbacks_state_goes_through_a_run(trainer_for: Any, tmp_path: Path) -> None:
    trainer, callback, _ = attached(trainer_for)
    callback.value = Path("x")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    callback = Holding()
    resume(trainer_for, tmp_path / "x.ckpt", epochs=1, callbacks=callback)
    assert callback.value == Path("x")


def test_t27_numbers_of_numpy_stay_what_they_are(
    regression: Any, loader: Any, make_trainer: Any, tmp_path: Path
) -> None:
    numpy = pytest.importorskip("numpy")

    class Scheduled(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: numpy.cos(epoch / 10))
            return [optimizer], [schedule]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"value": numpy.float32(1.5)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["mine"]["value"]

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Scheduled(), loader)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    load(tmp_path / "x.ckpt")
    module = Scheduled()
    make_trainer(max_epochs=3).fit(module, loader, ckpt_path=tmp_path / "x.ckpt")
    assert type(module.loaded) is numpy.float32


@pytest.mark.parametrize("place", ["callbacks['Holding']['history'][1]", "HoldingData['value']['a']"])
@pytest.mark.parametrize("work", [dump, check_storable])
def test_t27_a_state_that_cannot_be_stored_is_named(trainer_for: Any, place: str, work: Any) -> None:
    trainer, callback, data = attached(trainer_for)
    if place.startswith("callbacks"):
        callback.value = Unstorable()
    else:
        data.value = {"a": Unstorable()}
    with pytest.raises(CheckpointError) as caught:
        work(trainer)
    assert str(caught.value).startswith(f"{place} is of type ")
    assert "Unstorable()" in str(caught.value)
    assert str(caught.value).endswith("or pass allow_pickle=True to trainer.save_checkpoint.")


def test_t27_what_a_hook_adds_is_tried_when_it_is_saved(
    regression: Any, loader: Any, make_trainer: Any, tmp_path: Path
) -> None:
    class Adds(regression):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"where": [Unstorable()]}

    trainer = make_trainer()
    trainer.fit(Adds(), loader)
    with pytest.raises(CheckpointError, match=r"^mine\['where'\]\[0\] is of type .*Unstorable: Unstorable\(\)\."):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_t27_a_function_among_a_schedulers_state_is_refused(trainer_for: Any) -> None:
    class Warmup(torch.optim.lr_scheduler.StepLR):
        def __init__(self, optimizer: Any) -> None:
            self.shape = same  # torch would take it from the file and put it in the place of a method
            super().__init__(optimizer, 2)

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            return [optimizer], [Warmup(optimizer)]

    trainer, _, _ = attached(trainer_for, Scheduled())
    with pytest.raises(CheckpointError, match=r"^lr_schedulers\[0\]\['shape'\] is of type function"):
        dump(trainer)


def test_t27_hyperparameters_are_kept_or_described(trainer_for: Any, tmp_path: Path) -> None:
    module = Net()
    trainer, _, data = attached(trainer_for, module)
    module.hparams.update(root=Path("x"), fn=lambda: 1, lr=0.1)
    data.hparams.root = Unstorable()
    with pytest.warns(UserWarning, match="keep only a description of these hyperparameters of ") as caught:
        read = stored(trainer, tmp_path / "x.ckpt")
    assert [str(each.message).partition(". Pass")[0].rpartition(" of ")[2] for each in caught] == [
        f"HoldingData: root ({__name__}.Unstorable)", "Net: fn (function)",
    ]  # fmt: skip
    assert (read["hyper_parameters"]["root"], read["hyper_parameters"]["lr"]) == (Path("x"), 0.1)
    assert repr(read["hyper_parameters"]["fn"]).startswith("<only described: function: <function")
    assert repr(read["datamodule_hyper_parameters"]["root"]).endswith("Unstorable: Unstorable()>")
    assert set(read) >= {"hparams_name", "datamodule_hparams_name"}


def test_t27_hooks_see_the_values_themselves(trainer_for: Any) -> None:
    class Looking(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["hyper_parameters"]["root"]
            checkpoint["hyper_parameters"]["more"] = Path("y")

    module = Looking()
    trainer, _, _ = attached(trainer_for, module)
    module.hparams.root = Path("x")
    written = decode_parts(dump(trainer))
    assert module.seen == Path("x")
    assert written["hyper_parameters"] == {"root": Path("x"), "more": Path("y")}
    assert module.hparams == {"root": Path("x")}


def test_t27_after_a_trial_saving_does_not_warn_again(trainer_for: Any, tmp_path: Path) -> None:
    module = Net()
    trainer, _, data = attached(trainer_for, module)
    module.hparams.fn, data.hparams.root = lambda: 1, Unstorable()
    with pytest.warns(UserWarning, match="keep only a description") as caught:
        check_storable(trainer)
    assert len(caught) == 2
    stored(trainer, tmp_path / "x.ckpt")
    stored(trainer, tmp_path / "x.ckpt")


def test_t27_a_trial_leaves_out_what_will_not_be_saved(trainer_for: Any) -> None:
    class NotYet(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"begun": self.begun}  # type: ignore[attr-defined]

    trainer, callback, _ = attached(trainer_for)
    callback.value = Unstorable()
    check_storable(trainer, weights_only=True)
    trainer.callbacks = [NotYet()]
    check_storable(trainer)  # it may have a state once training has begun


def test_t27_whoever_asks_for_it_may_pickle(trainer_for: Any, tmp_path: Path) -> None:
    module = Net()
    trainer, callback, _ = attached(trainer_for, module)
    module.hparams.thing, callback.value = Unstorable(), Unstorable()
    kept = dump(trainer, allow_pickle=True)
    assert type(kept["callbacks"]["Holding"]["history"][1]) is Unstorable
    store = TorchCheckpointIO()
    store.save_checkpoint(kept, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="no plain data.*weights_only=False"):
        store.load_checkpoint(tmp_path / "x.ckpt")
    read = decode_parts(store.load_checkpoint(tmp_path / "x.ckpt", weights_only=False))
    assert type(read["callbacks"]["Holding"]["history"][1]) is Unstorable
    assert type(read["hyper_parameters"]["thing"]) is Unstorable


def test_t27_what_cannot_even_be_pickled_leaves_no_file(trainer_for: Any, tmp_path: Path) -> None:
    trainer, callback, _ = attached(trainer_for)
    callback.value = lambda: 1
    with pytest.raises(CheckpointError, match="x.ckpt was not written, because an object in it cannot be pickled"):
        TorchCheckpointIO().save_checkpoint(dump(trainer, allow_pickle=True), tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_a_file_that_holds_no_dictionary(trainer_for: Any, tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match=r"list.ckpt: The checkpoint is a list and no dictionary"):
        trainer_for(1).fit(Net(), *loaders(), ckpt_path=tmp_path / "list.ckpt")


def test_t27_a_state_whose_class_is_not_there_is_warned_of() -> None:
    lost = {"__drivetrain__": "enum", "value": ("no_such_module:Mode", "FAST")}
    with pytest.warns(UserWarning, match=r"restored as descriptions only: callbacks\['A'\]\['mode'\] \(enum no_such"):
        decode_parts({"state_dict": {}, "callbacks": {"A": {"mode": lost}}, "hyper_parameters": {"mode": lost}})
    decode_parts({"state_dict": {}, "hyper_parameters": {"mode": lost}})  # which a run does not use


def test_hpc_means_the_highest_number(trainer_for: Any, make_trainer: Any, tmp_path: Path) -> None:
    trainer = trainer_for(1)
    trainer.fit(Net(), *loaders())
    for number in (2, 10, 9):
        trainer.save_checkpoint(tmp_path / f"hpc_ckpt_{number}.ckpt")
    (tmp_path / "hpc_ckpt_x.ckpt").touch()
    trainer.validate(Net(), loaders()[1], ckpt_path="hpc", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "hpc_ckpt_10.ckpt")
    elsewhere = make_trainer(default_root_dir=tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="there is no hpc_ckpt_<n>.ckpt in"):
        elsewhere.validate(Net(), loaders()[1], ckpt_path="hpc")
