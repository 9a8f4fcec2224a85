"""Checkpoints of FSDP: files and folders, each resumed on one, two and three processes."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import Saves, on_two_dimensions, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.base.tree import map_leaves
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.cli.command import main
from drivetrain.errors import CheckpointError, ConfigurationError, PeerError
from drivetrain.strategies import FSDPStrategy, ModelParallelStrategy

PARTS = ("weights", "optimizer", "loss")


def data(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


class Net(LightningModule):
    """Widths that two and three ranks do not divide, tied weights, and a parameter smaller than the number of ranks.

    Args:
        frozen: ``before`` is frozen from the start, and thawed in the second epoch.
    """

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 5)
        self.blocks = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
        self.head, self.out = nn.Linear(5, 4, bias=False), nn.Linear(4, 5, bias=False)
        self.out.weight = nn.Parameter(self.out.weight.detach())
        self.again = nn.Linear(4, 5)
        self.again.weight = self.before.weight
        self.last = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros(()))
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks(self.before(x)))
        x = self.again(self.head(x)) + self.out(self.head(x))
        return self.last(x) * self.scale  # type: ignore[no-any-return]

    def on_train_epoch_start(self) -> None:
        if self.frozen:
            self.before.requires_grad_(self.current_epoch == 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer(kind: str, ranks: int, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "devices": ranks, "split_batches": ranks > 1,
        "strategy": FSDPStrategy(state_dict_type=kind) if kind in ("full", "sharded") else kind,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def loader(count: int = 48) -> Any:
    return DataLoader(data(count), batch_size=12)


def state_of(module: LightningModule, ours: Trainer) -> dict[str, Any]:
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "optimizer": map_leaves(whole, ours.optimizers[0].state_dict()["state"]) if ours.optimizers else {},
        "loss": float(ours.callback_metrics["loss"]),
        "steps": ours.global_step,
    }


def fitted(kind: str, ranks: int, resume: Path | None = None, frozen: bool = False, **arguments: Any) -> dict[str, Any]:
    module, ours = Net(frozen), trainer(kind, ranks, **arguments)
    ours.fit(module, loader(), loader(24), ckpt_path=resume)
    return state_of(module, ours)


def saved(kind: str, ranks: int, path: Path, frozen: bool = False, **arguments: Any) -> dict[str, Any]:
    """Train one epoch, test, and save."""
    module, ours = Net(frozen), trainer(kind, ranks, max_epochs=1, **arguments)
    ours.fit(module, loader(), loader(24))
    ours.test(module, loader(24), verbose=False)
    ours.save_checkpoint(path)
    return state_of(module, ours)


@functools.cache
def uninterrupted(frozen: bool = False) -> dict[str, Any]:
    return fitted("single_device", 1, frozen=frozen)


# ---- from each to each -----------------------------------------------------------------------------------------------


def resumed(kind: str, ranks: int, paths: list[Path], frozen: bool) -> list[dict[str, Any]]:
    return [fitted(kind, ranks, path, frozen) for path in paths]


LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
SAVED = ["full-2", "sharded-2", "sharded-3"]
RESUMED = {"single_device-1": SAVED, "full-2": ["sharded-3"], "sharded-3": ["full-2", "sharded-2"]}
if LONG:  # each from each
    SAVED = ["single_device-1", *(f"{kind}-{ranks}" for kind in ("full", "sharded") for ranks in (1, 2, 3))]
    RESUMED = dict.fromkeys(SAVED, SAVED)


@pytest.mark.parametrize("frozen", [False, True] if LONG else [True], ids=lambda frozen: "thawed" if frozen else "")
def test_files_and_folders_are_resumed_on_one_two_and_three_ranks(pool: Any, tmp_path: Path, frozen: bool) -> None:
    """Also parameters that are frozen in the first epoch and thawed in the second."""

    def run(name: str, function: Any, *args: Any) -> Any:
        kind, _, ranks = name.partition("-")
        if kind == "single_device":
            return function(kind, 1, *args)
        return pool.run(function, kind, int(ranks), *args, world_size=int(ranks), group=False, timeout=200.0)[0]

    for name in SAVED:
        run(name, saved, tmp_path / f"{name}.ckpt", frozen)
        assert (tmp_path / f"{name}.ckpt").is_dir() is name.startswith("sharded")
    one_file = tmp_path / "consolidated.ckpt"
    assert main(["checkpoint", "consolidate", str(tmp_path / "sharded-3.ckpt"), str(one_file)]) == 0
    for name, listed in RESUMED.items():
        sources = [*listed, "consolidated"] if name == "single_device-1" else listed
        paths = [tmp_path / f"{source}.ckpt" for source in sources]
        for source, state in zip(sources, run(name, resumed, paths, frozen), strict=True):
            for part in PARTS:
                says = f"{source} on {name}: {part}: {{}}".format
                torch.testing.assert_close(state[part], uninterrupted(frozen)[part], rtol=1e-9, atol=1e-9, msg=says)


def test_a_resumed_run_depends_on_the_optimizers_state(tmp_path: Path) -> None:
    """The control: without the state of the optimizer the numbers are others."""
    saved("single_device", 1, tmp_path / "one.ckpt")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()
    torch.save(checkpoint, tmp_path / "one.ckpt")
    found = fitted("single_device", 1, tmp_path / "one.ckpt")
    assert not torch.allclose(found["weights"]["last.weight"], uninterrupted()["weights"]["last.weight"], rtol=1e-6)


def evaluated(kind: str, ranks: int, path: Path) -> list[float]:
    module, ours = Net(), trainer(kind, ranks)
    validated = ours.validate(module, loader(24), ckpt_path=path, verbose=False)
    return [validated[0]["loss"], ours.test(module, loader(24), ckpt_path=path, verbose=False)[0]["loss"]]


def test_a_folder_is_evaluated_and_loaded_as_a_file_is(pool: Any, tmp_path: Path) -> None:
    weights = pool.run(saved, "sharded", 2, tmp_path / "one.ckpt", group=False)[0]["weights"]
    module = Net.load_from_checkpoint(tmp_path / "one.ckpt").double()
    torch.testing.assert_close(dict(module.state_dict()), weights, rtol=1e-6, atol=1e-6)  # it has 32 bits
    expected = evaluated("single_device", 1, tmp_path / "one.ckpt")
    for found in pool.run(evaluated, "sharded", 2, tmp_path / "one.ckpt", group=False):
        assert found == pytest.approx(expected, abs=1e-9)


def inside_a_window(folder: Path, exchange: str) -> Any:
    found = []
    for resume in (None, folder / "one.ckpt"):
        strategy = FSDPStrategy(state_dict_type="sharded", gradient_exchange=exchange)
        found.append(
            fitted(
                "sharded", 2, resume, strategy=strategy, accumulate_grad_batches=3,
                callbacks=[] if resume else [Saves(folder / "one.ckpt", 6)],
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("exchange", ["batch", "window"])
def test_a_folder_saved_inside_a_window_resumes_exactly(pool: Any, tmp_path: Path, exchange: str) -> None:
    for whole_run, resumed in pool.run(inside_a_window, tmp_path, exchange, group=False):
        for part in PARTS:
            torch.testing.assert_close(resumed[part], whole_run[part], rtol=0, atol=0)


def exchanged_in_another_way(folder: Path) -> str:
    inside_a_window(folder, "batch")
    with pytest.raises(CheckpointError) as caught:
        fitted(
            "sharded", 2, folder / "one.ckpt", strategy=FSDPStrategy(gradient_exchange="window"),
            accumulate_grad_batches=3,
        )  # fmt: skip
    return str(caught.value)


def test_shards_of_gradients_are_refused_where_complete_ones_are_needed(pool: Any, tmp_path: Path) -> None:
    for message in pool.run(exchanged_in_another_way, tmp_path, group=False):
        assert "inside a window of batches, where each rank keeps its shard of the gradients" in message
        assert 'Resume with gradient_exchange="batch"' in message


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_has_a_manifest_and_nothing_pickled(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    pool.run(saved, "sharded", 2, path, group=False)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(os.listdir(path))
    assert {name.partition(".")[2] for name in manifest["files"]} == {"state.json", "rank0.bin", "rank1.bin"}
    for name, record in manifest["files"].items():
        content = (path / name).read_bytes()
        assert len(content) == record["size"]
        assert b"PK\x03\x04" not in content[:4]
        assert not content.startswith(b"\x80\x02")
    names = set(manifest["tensors"])
    assert {"model.blocks.0.weight", "optimizers.0.state.blocks.0.weight.exp_avg"} <= names
    [piece, other] = manifest["tensors"]["model.blocks.0.weight"]["pieces"]
    assert (piece["offsets"], piece["shape"], other["offsets"], other["shape"]) == ([0, 0], [3, 5], [3, 0], [2, 5])
    assert len(manifest["tensors"]["model.scale"]["pieces"]) == 1  # it is smaller than the number of ranks


def saved_twice(path: Path) -> list[str]:
    saved("sharded", 2, path)
    saved("sharded", 2, path)
    return sorted(os.listdir(path))


def test_a_second_save_to_a_folder_leaves_only_its_own_files(pool: Any, tmp_path: Path) -> None:
    pool.run(saved_twice, tmp_path / "one.ckpt", group=False)
    listed = os.listdir(tmp_path / "one.ckpt")
    manifest = json.loads((tmp_path / "one.ckpt" / "manifest.json").read_text())
    assert sorted(listed) == sorted([*manifest["files"], "manifest.json"])
    assert sorted(path.name.partition(".ckpt")[2][-6:] for path in tmp_path.iterdir()) == ["", ".rank1"]


def damaged(source: Path, path: Path, damage: str) -> str:
    """Copy the folder ``source`` to ``path``, damage it, and return what the error must name."""
    shutil.copytree(source, path)
    [shards] = path.glob("*.rank1.bin")
    [state] = path.glob("*.state.json")
    content = bytearray(shards.read_bytes())
    if damage == "flipped":
        content[0] ^= 1
        shards.write_bytes(content)
    elif damage == "cut":
        shards.write_bytes(content[:-8])
    elif damage == "gone":
        shards.unlink()
    elif damage == "state":
        state.write_text(state.read_text().replace("epoch", "epocH", 1))
    else:
        (path / "manifest.json").unlink()
    return {"no manifest": "no save to it was finished", "state": state.name}.get(damage, shards.name)


def test_a_damaged_folder_is_an_error_that_names_the_file_on_all_ranks(pool: Any, tmp_path: Path) -> None:
    pool.run(saved, "sharded", 2, tmp_path / "one.ckpt", group=False)
    for damage in ("flipped", "cut", "gone", "state", "no manifest"):
        path = tmp_path / f"{damage}.ckpt"
        named = damaged(tmp_path / "one.ckpt", path, damage)
        for message in (refused("single_device", 1, path), *pool.run(refused, "full", 2, path, group=False)):
            assert named in message
        assert not TorchCheckpointIO().is_complete(path)


def refused(kind: str, ranks: int, path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        fitted(kind, ranks, path)
    return str(caught.value)


def ranked(folder: Path) -> Any:
    module, saver = Net(), ModelCheckpoint(folder, monitor="loss", save_top_k=1, save_last=True)
    ours = trainer("sharded", 2, enable_checkpointing=True, callbacks=[saver], max_epochs=3)
    ours.fit(module, loader(), loader(24))
    names = sorted(path.name for path in folder.iterdir())
    again = ModelCheckpoint(folder, monitor="loss", save_top_k=1, save_last=True)
    resumed = trainer("sharded", 2, enable_checkpointing=True, callbacks=[again], max_epochs=4)
    resumed.fit(Net(), loader(), loader(24), ckpt_path="last")
    return names, os.path.basename(saver.best_model_path), resumed.current_epoch, resumed.global_step


def test_modelcheckpoint_keeps_removes_and_finds_folders(pool: Any, tmp_path: Path) -> None:
    for names, best, epochs, steps in pool.run(ranked, tmp_path, group=False):
        folders = [name for name in names if name.endswith(".ckpt")]
        assert sorted(folders) == sorted(["last.ckpt", best])
        assert all(name.startswith(tuple(folders)) for name in names)
        assert (epochs, steps) == (4, 16)


def onto_a_file(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        saved("sharded", 2, path)
    return str(caught.value)


def test_a_file_at_the_folders_path_is_an_error_and_stays(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "one.ckpt").write_text("mine")
    for message in pool.run(onto_a_file, tmp_path / "one.ckpt", group=False):
        assert "a file has this name" in message
    assert (tmp_path / "one.ckpt").read_text() == "mine"


class Uploads(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)


def into_another_store(path: Path) -> str:
    strategy = FSDPStrategy(state_dict_type="sharded", checkpoint_io=Uploads())
    module, ours = Net(), trainer("sharded", 2, strategy=strategy, max_epochs=1)
    ours.fit(module, loader(), loader(24))
    with pytest.raises(ConfigurationError) as caught:
        ours.save_checkpoint(path, weights_only=True)
    return str(caught.value)


def test_a_store_of_the_users_is_not_passed_by(pool: Any, tmp_path: Path) -> None:
    for message in pool.run(into_another_store, tmp_path / "one.ckpt", group=False):
        assert "the checkpoint store is Uploads" in message
        assert 'write state_dict_type="full"' in message
    assert not (tmp_path / "one.ckpt").exists()


# ---- gradients of an open window, and shards of another strategy -----------------------------------------------------


class Columns(LightningModule):
    """One layer whose shards have one shape, and other places, under FSDP on four ranks and on a mesh of two by two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 8)
        self.tp_plan = {"layer": "colwise_gather_output"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.ckpt_path is None:
            self.trainer.should_stop = True
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SavesOpenWindow(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def open_window(path: Path, on_a_mesh: bool, resumes: bool) -> str:
    strategy: Any = FSDPStrategy(auto_wrap_policy={nn.Linear})
    if on_a_mesh:
        strategy = ModelParallelStrategy(auto_wrap_policy={nn.Linear}, data_parallel_size=2, tensor_parallel_size=2)
    ours = Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, accumulate_grad_batches=3, logger=False,
        callbacks=[] if resumes else [SavesOpenWindow(path)], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    try:
        ours.fit(Columns(), DataLoader(TensorDataset(torch.randn(24, 4)), 1), ckpt_path=path if resumes else None)
    except (CheckpointError, PeerError) as error:  # of ranks whose own shards are where they were
        return str(error)
    return ""


@on_two_dimensions
def test_gradients_of_other_shards_are_refused_by_what_they_are(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert not any(pool.run(open_window, path, False, False, world_size=4, group=False))
    said = pool.run(open_window, path, True, True, world_size=4, group=False)
    assert any(
        "saved inside a window of batches, where each rank keeps its part of the gradients" in one for one in said
    )
    assert all(said)
    assert not any("damaged" in one for one in said)
    assert not any(pool.run(open_window, path, False, True, world_size=4, group=False))
