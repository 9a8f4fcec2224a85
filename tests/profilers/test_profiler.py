"""The contract, and the actions of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.profilers.rows import Model, Validated, loader, trainer

from drivetrain import Callback, LightningDataModule
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.profilers import (
    AdvancedProfiler,
    MemoryProfiler,
    PassThroughProfiler,
    Profiler,
    ProfilerRegistry,
    PyTorchProfiler,
    SimpleProfiler,
)


class Recording(Profiler):
    """Keeps what it was called with, and fails where actions are not nested."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.open: list[str] = []
        self.events: list[str] = []

    def start(self, action_name: str) -> None:
        assert action_name not in self.open
        self.open.append(action_name)
        self.calls[action_name] += 1

    def stop(self, action_name: str) -> None:
        assert self.open.pop() == action_name

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.events.append(f"setup {stage} {local_rank}")

    def describe(self) -> None:
        assert not self.open
        self.events.append("describe")

    def teardown(self, stage: str | None) -> None:
        self.events.append(f"teardown {stage}")


def test_names_stand_for_profilers() -> None:
    assert set(ProfilerRegistry.available()) == {"simple", "advanced", "pytorch", "memory", "xla", "passthrough"}
    for name, cls in (
        ("simple", SimpleProfiler), ("advanced", AdvancedProfiler), ("pytorch", PyTorchProfiler),
        ("memory", MemoryProfiler),
    ):  # fmt: skip
        assert type(trainer(profiler=name).profiler) is cls


def test_user_code_may_profile_without_a_profiler() -> None:
    run = trainer()
    run.fit(Model(), loader())
    assert isinstance(run.profiler, PassThroughProfiler)
    assert run.profiler is run.profiler


def test_the_actions_of_a_fit() -> None:
    own = Recording()
    run = trainer(profiler=own)
    run.fit(Validated(), loader(4), loader(3))
    assert own.events == ["setup fit None", "describe", "teardown fit"]
    expected = {
        "run_training": 1, "run_training_epoch": 1, "run_training_batch": 4, "training_step": 4, "my forward": 4,
        "backward": 4, "optimizer_step": 4, "optimizer_zero_grad": 4, "train_dataloader_next": 5,
        "run_validation": 1, "run_validation_batch": 3, "validation_step": 3, "val_dataloader_next": 4,
        "[LightningModule]Validated.on_train_batch_start": 4, "[LightningModule]Validated.configure_optimizers": 1,
    }  # fmt: skip
    assert {name: own.calls[name] for name in expected} == expected


def test_hooks_of_callbacks_log_flushes_and_checkpoints_are_actions(tmp_path: Path) -> None:
    class Own(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    own = Recording()
    saves = ModelCheckpoint(dirpath=tmp_path)
    trainer(profiler=own, callbacks=[Own(), saves], enable_checkpointing=True).fit(Model(), loader())
    assert own.calls["[Callback]Own.on_train_batch_end"] == 4
    assert own.calls["[Callback]ModelCheckpoint.on_train_epoch_end"] == 1
    assert own.calls["save_checkpoint"] == 1


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_actions_of_other_runs(stage: str) -> None:
    own = Recording()
    word = {"validate": "validation"}.get(stage, stage)
    getattr(trainer(profiler=own), stage)(Validated(), loader(3))
    assert own.events == [f"setup {stage} None", "describe", f"teardown {stage}"]
    assert own.calls[f"run_{word}"] == 1
    assert own.calls[f"run_{word}_batch"] == own.calls[f"{word}_step"] == 3


def test_manual_optimization_and_closures_are_measured_once() -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.layer(batch[0]).mean())
            self.optimizers().step()
            self.optimizers().zero_grad()

    class Closure(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    for module in (Manual(), Closure()):
        own = Recording()
        trainer(profiler=own).fit(module, loader())
        assert own.calls["optimizer_step"] == 4
        assert own.calls["backward"] >= 4


@pytest.mark.parametrize("way", ["raises", "skips the rest", "stops"])
def test_actions_end_however_the_run_does(way: str) -> None:
    class Ends(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if batch_idx == 1:
                if way == "raises":
                    raise RuntimeError("on purpose")
                self.trainer.should_stop = way == "stops"
                return -1 if way == "skips the rest" else None
            return None

    own = Recording()
    run = trainer(profiler=own, max_epochs=2)
    if way == "raises":
        with pytest.raises(RuntimeError, match="on purpose"):
            run.fit(Ends(), loader())
    else:
        run.fit(Ends(), loader())
    assert own.open == []
    assert own.events == ["setup fit None", "describe", "teardown fit"]


def test_a_profiler_in_callbacks_is_an_error_that_names_its_argument() -> None:
    with pytest.raises(ConfigurationError, match="Write Trainer\\(profiler=SimpleProfiler\\(...\\)\\)"):
        trainer(callbacks=[SimpleProfiler()])


def test_a_profiled_fit_trains_the_same() -> None:
    weights = []
    for profiler in (None, "simple"):
        torch.manual_seed(0)
        module = Model()
        trainer(profiler=profiler).fit(module, loader())
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", [str, Path])
def test_its_folder_is_read_back_during_and_after_a_run_as_it_was_passed(tmp_path: Path, kind: Any) -> None:
    folder, seen = kind(tmp_path), []

    class Reads(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.profiler.dirpath)

    profiler = SimpleProfiler(folder, "name")
    trainer(profiler=profiler, callbacks=Reads()).fit(Model(), loader())
    assert [(type(each), each) for each in (*seen, profiler.dirpath)] == [(type(folder), folder)] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["fit-name.txt"]  # no rank, because there is one process


def test_names_of_files_have_no_characters_that_other_systems_forbid(tmp_path: Path) -> None:
    trainer(profiler=SimpleProfiler(tmp_path, 'a:b/c*d?e"f')).fit(Model(), loader())
    assert [file.name for file in tmp_path.iterdir()] == ["fit-a_b_c_d_e_f.txt"]


def test_hooks_and_loaders_of_a_data_module_have_its_name() -> None:
    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            pass

        def train_dataloader(self) -> Any:
            return loader()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    profiler = Recording()
    trainer(profiler=profiler).fit(Model(), datamodule=Data())
    own = {name: calls for name, calls in profiler.calls.items() if name.startswith("[LightningDataModule]Data.")}
    assert own == {
        "[LightningDataModule]Data.setup": 1,
        "[LightningDataModule]Data.train_dataloader": 1,
        "[LightningDataModule]Data.on_before_batch_transfer": 4,
        "[LightningDataModule]Data.teardown": 1,
    }
