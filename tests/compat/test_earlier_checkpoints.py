"""Lightning's layouts become ours: counters, callbacks, precision and hyperparameters of 1.0 to 2.6."""

from __future__ import annotations

import argparse
import copy
import enum
import math
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import LightningDataModule, LightningModule
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint, Timer
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.checkpoints.foreign import Placeholder
from drivetrain.compat.earlier_checkpoints import fit_loop_of, migrate
from drivetrain.errors import CheckpointError
from drivetrain.loops.progress import Progress
from drivetrain.loops.window import Window

# ---- files as Lightning writes them ----------------------------------------------------------------------------------


def counts(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "completed": completed, "started": started, "processed": processed}


def fit_loop(
    epochs: tuple[int, int, int, int] = (1, 1, 1, 0),
    batches: tuple[int, int, int, int] = (4, 4, 4, 4),
    earlier: int = 0,
    is_last: bool = True,
    steps: int = 4,
    manual: int = 0,
    stepped: int | None = 4,
    validated: int = 0,
    version: str = "2.6.6",
) -> dict[str, Any]:
    """The counters in the order ready, started, processed, completed; a validation has 4 batches."""
    automatic, own, validation = {
        "2": ("automatic_optimization.optim_progress", "manual_optimization.optim_step_progress", "val_loop"),
        "1": (
            "batch_loop.optimizer_loop.optim_progress",
            "batch_loop.manual_loop.optim_step_progress",
            "val_loop.epoch_loop",
        ),
    }["2" if version[0] == "2" else "1"]
    step = {"total": {"ready": steps, "completed": steps}, "current": {"ready": steps, "completed": steps}}
    zero = {"total": counts(steps, steps, 0, steps), "current": counts(steps, steps, 0, steps)}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {} if stepped is None else {"_batches_that_stepped": stepped},
        "epoch_loop.batch_progress": {
            "total": {key: value + earlier for key, value in counts(*batches).items()},
            "current": counts(*batches),
            "is_last_batch": is_last,
        },
        "epoch_loop.scheduler_progress": {"total": {"ready": 0, "completed": 0}},
        f"epoch_loop.{automatic}": {"optimizer": {"step": step, "zero_grad": zero}},
        f"epoch_loop.{own}": {"total": {"ready": manual, "completed": manual}},
        f"epoch_loop.{validation}.batch_progress": {
            "total": counts(validated, validated, validated, validated),
            "current": counts(4, 4, validated, validated),
            "is_last_batch": validated >= 4,
        },
        "epoch_progress": {"total": counts(*epochs), "current": counts(*epochs)},
    }


def lightnings(version: str = "2.6.6", **parts: Any) -> dict[str, Any]:
    return {
        "epoch": 0,
        "global_step": 4,
        "pytorch-lightning_version": version,
        "state_dict": {},
        "loops": {"fit_loop": fit_loop(version=version)},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        **parts,
    }


def without_loops(version: str, **parts: Any) -> dict[str, Any]:
    found = lightnings(version, **parts)
    del found["loops"]
    return found


def progress_of(checkpoint: dict[str, Any]) -> Progress:
    progress = Progress()
    progress.load_state_dict(migrate(checkpoint)["loops"]["drivetrain"])
    return progress


def class_named(path: str) -> Any:
    return type("Placeholder", (Placeholder,), {"path": path})


class Colour(enum.Enum):
    RED = 1


# ---- where training was ----------------------------------------------------------------------------------------------

EPOCH_END = dict(epochs=(2, 2, 2, 1), earlier=4, steps=8, stepped=8, validated=4)
BATCH_END = dict(epochs=(2, 2, 1, 1), batches=(2, 2, 2, 1), earlier=4, is_last=False, steps=6, stepped=5)
LAST_BATCH_END = dict(epochs=(3, 3, 2, 2), batches=(4, 4, 4, 3), earlier=8, steps=12, stepped=11)
IN_WINDOW = dict(epochs=(1, 1, 0, 0), batches=(2, 2, 2, 1), is_last=False, steps=0, stepped=0)
VALIDATED = dict(epochs=(1, 1, 0, 0), batches=(2, 2, 2, 2), is_last=False, steps=2, stepped=1, validated=4)
VALIDATING = {**VALIDATED, "validated": 1}
AFTER_FIT = dict(epochs=(2, 2, 2, 2), earlier=4, steps=8, stepped=8, validated=4)
CUT = dict(epochs=(2, 2, 2, 1), batches=(2, 2, 2, 2), earlier=4, is_last=False, steps=6, stepped=6)
EPOCH_START = dict(epochs=(2, 1, 1, 1), earlier=0, steps=4, stepped=4)


@pytest.mark.parametrize("version", ["1.6.5", "1.9.5", "2.0.0", "2.6.6"])
@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (EPOCH_END, dict(current_epoch=1, batches_done=4, earlier_batches=4, global_step=8, stepped_batches=8,
                         epoch_ending=True, is_last_batch=True, validation="")),
        (BATCH_END, dict(current_epoch=1, batches_done=2, earlier_batches=4, global_step=6, stepped_batches=6,
                         epoch_ending=False, is_last_batch=False, validation="")),
        (LAST_BATCH_END, dict(current_epoch=2, batches_done=4, earlier_batches=8, global_step=12, stepped_batches=12,
                              epoch_ending=False, is_last_batch=True, validation="")),
        (IN_WINDOW, dict(current_epoch=0, batches_done=2, global_step=0, stepped_batches=0, epoch_ending=False)),
        (VALIDATED, dict(current_epoch=0, batches_done=2, earlier_batches=0, global_step=2, stepped_batches=2,
                         epoch_ending=False, is_last_batch=False, validation="done")),
        (VALIDATING, dict(batches_done=2, validation="running")),
        (AFTER_FIT, dict(current_epoch=2, batches_done=0, earlier_batches=8, global_step=8, stepped_batches=8,
                         epoch_ending=False, is_last_batch=False, validation="")),
        (CUT, dict(current_epoch=1, batches_done=2, earlier_batches=4, global_step=6, epoch_ending=True)),
        (EPOCH_START, dict(current_epoch=1, batches_done=0, earlier_batches=4, global_step=4, epoch_ending=False)),
    ],
    ids=["epoch end", "batch end", "last batch end", "in a window", "validated", "validating", "after fit", "cut",
         "epoch start"],
)  # fmt: skip
def test_t26_the_counters(version: str, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    progress = progress_of(lightnings(version, loops={"fit_loop": fit_loop(version=version, **saved)}))
    assert {key: getattr(progress, key) for key in expected} == expected
    assert progress.epoch_cut is False


def test_t26_the_counters_are_all_that_a_checkpoint_of_ours_has() -> None:
    ours = {*Progress().state_dict(), *Window().place()}
    assert set(migrate(lightnings())["loops"]["drivetrain"]) == ours
    assert set(migrate(without_loops("1.5.0"))["loops"]["drivetrain"]) <= ours


@pytest.mark.parametrize(("stepped", "expected"), [(2, 3), (3, 4)])
def test_t26_steps_of_manual_optimization(stepped: int, expected: int) -> None:
    """Two optimizers step on each batch; the batch counts when its hooks are over."""
    saved = {**BATCH_END, "steps": 0, "manual": 6, "stepped": stepped}
    progress = progress_of(lightnings(loops={"fit_loop": fit_loop(**saved)}))
    assert (progress.global_step, progress.stepped_batches) == (6, expected)


@pytest.mark.parametrize(
    "position",
    [
        {"current_epoch": 2, "earlier_batches": 8, "global_step": 8, "stepped_batches": 8},
        {"current_epoch": 1, "batches_done": 4, "earlier_batches": 4, "global_step": 8, "stepped_batches": 8,
         "is_last_batch": True, "epoch_ending": True},
        {"current_epoch": 1, "batches_done": 3, "earlier_batches": 4, "global_step": 7, "stepped_batches": 7},
    ],
    ids=["between epochs", "at an epoch's end", "inside an epoch"],
)  # fmt: skip
def test_a_position_of_ours_comes_back_from_lightnings_counters(position: dict[str, Any]) -> None:
    saved = {**lightnings(), "loops": {"fit_loop": fit_loop_of(position)}, "global_step": position["global_step"]}
    found = migrate(saved)["loops"]["drivetrain"]
    assert {key: found[key] for key in position} == position


@pytest.mark.parametrize("continued", ["automatic", "manual"])
def test_lightning_continues_one_of_the_two_counts_of_steps(continued: str) -> None:
    loop = fit_loop_of({"current_epoch": 2, "earlier_batches": 8, "global_step": 8, "stepped_batches": 8})
    if continued == "manual":
        loop["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"] = 12
    else:
        loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"] = 12
    found = migrate({**lightnings(), "loops": {"fit_loop": loop}, "global_step": 12})
    assert found["loops"]["drivetrain"]["global_step"] == 12


def test_t26_steps_were_not_counted_by_batch_before_1_6_5() -> None:
    progress = progress_of(lightnings("1.6.0", loops={"fit_loop": fit_loop(version="1.6.0", stepped=None)}))
    assert progress.stepped_batches == 4


def test_t26_a_file_without_loops() -> None:
    progress = progress_of(without_loops("1.2.10", epoch=3, global_step=12))
    assert (progress.current_epoch, progress.batches_done, progress.global_step) == (3, 0, 12)
    assert not progress.epoch_ending


def test_t26_loops_of_somebody_else_are_left_alone() -> None:
    migrated = migrate(lightnings(loops={"fit_loop": {"my": 1}}))
    assert migrated["loops"] == {"fit_loop": {"my": 1}}


def test_the_loops_of_the_file_stay_for_whoever_looks_for_them() -> None:
    checkpoint = lightnings()
    assert migrate(checkpoint)["loops"]["fit_loop"] == checkpoint["loops"]["fit_loop"]


@pytest.mark.parametrize(("version", "place"), [("2.6.6", False), ("1.4.9", True)])
def test_t26_what_the_file_does_not_know_is_said_when_training_goes_on(version: str, place: bool) -> None:
    checkpoint = without_loops(version) if place else lightnings(version)
    with pytest.warns(UserWarning, match=f"written by Lightning {version} and holds no random state") as caught:
        migrate(checkpoint, resuming=True)
    assert len(caught) == 1
    assert ("does not say where in an epoch" in str(caught[0].message)) == place


# ---- what is not Lightning's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "checkpoint",
    [
        {
            "state_dict": {},
            "drivetrain_version": "0.1.0",
            "global_step": 3,
            "hparams": 1,
            "callbacks": {"a{'b': 1}": 2},
        },
        {"w": torch.ones(1), "hparams": torch.ones(1)},
        {"state_dict": {}, "epoch": 1},
        {"state_dict": {}, "global_step": 3, "loops": {"drivetrain": {"global_step": 4}}, "restart": {"data": 1}},
    ],
)
def test_other_files_are_left_alone(checkpoint: dict[str, Any]) -> None:
    before = dict(checkpoint)
    assert migrate(checkpoint) == before


def test_it_changes_nothing_in_place_and_nothing_twice() -> None:
    checkpoint = lightnings(
        callbacks={"Timer": {"time_elapsed": {"train": 1.0, "sanity_check": 2.0}}},
        hparams={"a": 1},
        MixedPrecisionPlugin=1,
    )
    before = copy.deepcopy(checkpoint)
    migrated = migrate(checkpoint)
    assert checkpoint == before
    assert migrate(migrated) is migrated
    assert migrate(3) == 3  # type: ignore[arg-type]  # what a store of somebody's has returned


# ---- callbacks -------------------------------------------------------------------------------------------------------

BEST = {
    "monitor": "val_loss",
    "best_model_score": torch.tensor(0.5),
    "best_model_path": "/runs/epoch=1-step=8.ckpt",
    "current_score": torch.tensor(0.7),
    "dirpath": "/runs",
    "best_k_models": {"/runs/epoch=1-step=8.ckpt": torch.tensor(0.5), "/runs/epoch=2-step=12.ckpt": torch.tensor(0.7)},
    "kth_best_model_path": "/runs/epoch=2-step=12.ckpt",
    "kth_value": torch.tensor(0.7),
    "last_model_path": "",
}


def callbacks_of(**states: Any) -> dict[str, Any]:
    found: dict[str, Any] = migrate(lightnings(callbacks=states))["callbacks"]
    return found


@pytest.mark.parametrize(
    ("arguments", "theirs"),
    [
        ({"monitor": "val_loss"}, "0, 'every_n_epochs': 1, 'train_time_interval': None}"),
        ({"monitor": "val_loss"},
         "0, 'every_n_epochs': 1, 'train_time_interval': None, 'save_on_train_epoch_end': True}"),
        ({"monitor": "val_loss", "every_n_train_steps": 3},
         "3, 'every_n_epochs': 0, 'train_time_interval': None, 'save_on_train_epoch_end': None}"),
        ({"monitor": "val_loss", "train_time_interval": timedelta(hours=30, seconds=2, microseconds=7)},
         "0, 'every_n_epochs': 0, 'train_time_interval': "
         "datetime.timedelta(days=1, seconds=21602, microseconds=7)}"),
    ],
)  # fmt: skip
def test_t48_the_key_of_a_model_checkpoint(arguments: dict[str, Any], theirs: str) -> None:
    key = f"ModelCheckpoint{{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': {theirs}"
    ours = ModelCheckpoint("/runs", **arguments)
    assert list(callbacks_of(**{key: BEST})) == [ours.state_key]
    ours.load_state_dict(callbacks_of(**{key: BEST})[ours.state_key])
    assert ours.best_model_path == "/runs/epoch=1-step=8.ckpt"
    assert ours.best_k_models == BEST["best_k_models"]
    assert ours.kth_best_model_path == "/runs/epoch=2-step=12.ckpt"


@pytest.mark.parametrize(
    "key",
    ["Mine", "Mine{'a': <object object at 0x1>}", "Mine{1, 2}", "Mine{'t': datetime.timedelta(weeks=x)}", "Odd{",
     "Mine{'t': datetime.timedelta(nothing=1)}"],
)  # fmt: skip
def test_t48_somebodys_own_key_stays(key: str) -> None:
    assert callbacks_of(**{key: {"n": 1}}) == {key: {"n": 1}}


def test_t48_two_states_under_one_key() -> None:
    key = "ModelCheckpoint{'monitor': None, 'every_n_train_steps': 0, 'save_on_train_epoch_end': %s}"
    with pytest.warns(UserWarning, match="two states under the name ModelCheckpoint"):
        (state,) = callbacks_of(**{key % True: BEST, key % False: {**BEST, "best_model_path": "b"}}).values()
    assert state["best_model_path"] == BEST["best_model_path"]


@pytest.mark.parametrize(
    "key", [class_named("pytorch_lightning.callbacks.early_stopping.EarlyStopping"), EarlyStopping]
)
def test_t27_before_1_5_the_class_was_the_key(key: Any) -> None:
    state = {"wait_count": 2, "stopped_epoch": 0, "best_score": torch.tensor(0.25), "patience": 3}
    found = migrate(without_loops("1.2.10", callbacks={key: state}))["callbacks"]
    assert list(found) == ["EarlyStopping"]


def test_the_state_of_an_early_stopping() -> None:
    state = {
        "wait_count": 2, "stopped_epoch": 0, "best_score": torch.tensor(0.25), "patience": 3,
        "stopping_reason": 0, "stopping_reason_message": None,
    }  # fmt: skip
    ours = EarlyStopping("val_loss", patience=9)
    found = callbacks_of(**{"EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": state})
    ours.load_state_dict(found[ours.state_key])
    assert (ours.wait_count, ours.patience, float(ours.best_score)) == (2, 9, 0.25)
    assert not {"stopping_reason", "stopping_reason_message"} & set(found[ours.state_key])
    assert callbacks_of(EarlyStopping={"wait_count": 1, "patience": 2}) == {}  # it does not say the best value


def test_the_state_of_a_timer() -> None:
    ours = Timer()
    ours.load_state_dict(callbacks_of(Timer={"time_elapsed": {"train": 5, "sanity_check": 1, "tune": 0}})["Timer"])
    assert (ours.time_elapsed("train"), ours.time_elapsed("test")) == (5.0, 0.0)
    assert set(ours.state_dict()["time_elapsed"]) == {"train", "validate", "test", "predict"}


def test_without_monitor_the_best_file_is_the_one_to_be_replaced() -> None:
    newest = {**BEST, "monitor": None, "best_model_score": None, "current_score": None, "best_k_models": {},
              "kth_best_model_path": "", "kth_value": torch.tensor(math.inf)}  # fmt: skip
    (state,) = callbacks_of(ModelCheckpoint=newest).values()
    assert state["best_k_models"] == {BEST["best_model_path"]: torch.tensor(4.0)}
    assert state["kth_best_model_path"] == BEST["best_model_path"]
    assert state["kth_value"] is None


def test_a_model_checkpoint_of_1_0() -> None:
    old = {"best_model_score": torch.tensor(0.5), "best_model_path": "runs/a.ckpt"}
    key = class_named("pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint")
    (state,) = migrate(without_loops("1.0.8", callbacks={key: old}))["callbacks"].values()
    ModelCheckpoint("runs").load_state_dict(state | {"dirpath": str(Path("runs").absolute())})
    assert state["best_k_models"] == {"runs/a.ckpt": torch.tensor(0.5)}
    assert state["dirpath"] == "runs"


def test_the_keys_of_before_0_10() -> None:
    migrated = migrate(
        without_loops("0.9.0", checkpoint_callback_best_model_path="a.ckpt", checkpoint_callback_best_model_score=0.5)
    )
    assert migrated["callbacks"]["ModelCheckpoint"]["best_model_path"] == "a.ckpt"
    assert migrated["callbacks"]["ModelCheckpoint"]["best_model_score"] == torch.tensor(0.5)
    assert not [key for key in migrated if key.startswith("checkpoint_callback")]


def test_t15_a_scheduler_that_watches_a_value_finds_it() -> None:
    migrated = migrate(lightnings(callbacks={"ModelCheckpoint": BEST}))
    assert migrated["restart"] == {"callback_metrics": {"val_loss": torch.tensor(0.7)}}


def test_t27_what_a_scheduler_was_built_with_is_not_replaced_by_a_placeholder() -> None:
    state = {
        "last_epoch": 3,
        "anneal_func": class_named("torch.optim.lr_scheduler._annealing_cos"),
        "lrs": [Placeholder()],
    }
    assert migrate(lightnings(lr_schedulers=[state]))["lr_schedulers"] == [{"last_epoch": 3}]


@pytest.mark.parametrize(
    "key", ["MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state"]
)
def test_t21_the_state_of_the_scaler(key: str) -> None:
    migrated = migrate(lightnings(**{key: {"scale": 4.0}, "amp_scaling_state": {"apex": 1}}))
    assert migrated["MixedPrecision"] == {"scale": 4.0}
    assert not {key, "amp_scaling_state"} & (set(migrated) - {"MixedPrecision"})


# ---- hyperparameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "hparams", "name"),
    [
        ({"hyper_parameters": {"lr": 1}, "hparams_name": "kwargs"}, {"lr": 1}, "kwargs"),
        ({"hyper_parameters": argparse.Namespace(lr=1), "hparams_name": "conf"}, {"lr": 1}, "conf"),
        ({"hparams": {"lr": 1}}, {"lr": 1}, "hparams"),
        ({"hparams": argparse.Namespace(lr=1), "hparams_name": "conf"}, {"lr": 1}, "conf"),
        ({"module_arguments": {"lr": 1}}, {"lr": 1}, None),
        ({"hparams": {"lr": 2}, "hyper_parameters": {"lr": 1}}, {"lr": 1}, None),
        ({"hyper_parameters": {"lr": 1, "colour": Placeholder(), "deep": {"a": [Placeholder()]}}}, {"lr": 1}, None),
        ({"hyper_parameters": Placeholder(), "hparams_type": class_named("omegaconf.DictConfig")}, None, None),
    ],
)
def test_t27_the_hyperparameters(parts: dict[str, Any], hparams: Any, name: str | None) -> None:
    for checkpoint in (lightnings(**parts), {"state_dict": {}, **parts}):
        migrated = migrate(checkpoint)
        assert migrated.get("hyper_parameters") == hparams
        assert migrated.get("hparams_name") == name
        assert not {"hparams", "module_arguments"} & set(migrated)


def test_t27_the_hyperparameters_of_a_datamodule() -> None:
    migrated = migrate(lightnings(datamodule_hyper_parameters=argparse.Namespace(size=3, colour=Placeholder())))
    assert migrated["datamodule_hyper_parameters"] == {"size": 3}


# ---- whole files -----------------------------------------------------------------------------------------------------


class Net(LightningModule):
    def __init__(self, width: int = 2, colour: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


class OfObject(LightningModule):
    def __init__(self, conf: Any) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.layer = torch.nn.Linear(conf.width, 1)


class Data(LightningDataModule):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture
def lightning_1(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a file while modules of Lightning 1.x seem to be there; when it is read they are not."""
    names = {
        "pytorch_lightning.utilities.parsing": ("AttributeDict", dict),
        "pytorch_lightning.callbacks.early_stopping": ("EarlyStopping", object),
    }

    def write(path: Path, build: Any, zipped: bool = True) -> None:
        with monkeypatch.context() as patch:
            classes = []
            for module, (name, base) in names.items():
                for package in ("pytorch_lightning", module.rpartition(".")[0], module):
                    patch.setitem(sys.modules, package, types.ModuleType(package))
                classes.append(type(name, (base,), {"__module__": module}))
                setattr(sys.modules[module], name, classes[-1])
            torch.save(build(*classes), path, _use_new_zipfile_serialization=zipped)

    return write


@pytest.mark.parametrize("zipped", [True, False])
def test_t27_a_module_of_1_x_loads(tmp_path: Path, lightning_1: Any, zipped: bool) -> None:
    path, weights = tmp_path / "old.ckpt", Net(3).state_dict()
    lightning_1(
        path,
        lambda attribute_dict, stopping: without_loops(
            "1.2.10",
            state_dict=weights,
            hyper_parameters=attribute_dict(width=3, colour=Colour.RED),
            hparams_name="kwargs",
            datamodule_hyper_parameters=attribute_dict(size=7),
            callbacks={stopping: {"wait_count": 1, "best_score": torch.tensor(1.0), "patience": 3}},
        ),
        zipped,
    )
    with pytest.warns(UserWarning, match="hyper_parameters/colour"):
        net = Net.load_from_checkpoint(path)
    assert net.hparams == {"width": 3, "colour": None}
    assert all(torch.equal(net.state_dict()[key], weight) for key, weight in weights.items())
    with pytest.warns(UserWarning, match="hyper_parameters/colour"):
        assert Net.load_from_checkpoint(path, colour=Colour.RED).hparams.colour is Colour.RED
    with pytest.warns(UserWarning, match="hyper_parameters/colour"):
        assert Data.load_from_checkpoint(path).hparams == {"size": 7}


def test_t27_hyperparameters_that_were_one_object(tmp_path: Path, lightning_1: Any) -> None:
    path = tmp_path / "old.ckpt"
    weights = OfObject(argparse.Namespace(width=3)).state_dict()
    lightning_1(
        path,
        lambda *_: without_loops(
            "1.0.8", state_dict=weights, hyper_parameters=argparse.Namespace(width=3), hparams_name="conf"
        ),
    )
    assert OfObject.load_from_checkpoint(path).hparams == {"width": 3}


# ---- resuming --------------------------------------------------------------------------------------------------------


def as_lightnings(path: Path, loop: dict[str, Any] | None) -> None:
    """What a Trainer of ours has saved, as Lightning would have; without a loop, as Lightning 1.4."""
    checkpoint = TorchCheckpointIO().load_checkpoint(path)
    for key in ("drivetrain_version", "torch_version", "rng", "restart", "loops"):
        del checkpoint[key]
    if loop is not None:
        checkpoint["loops"] = {"fit_loop": loop}
    else:
        checkpoint["epoch"] += 1
        checkpoint["pytorch-lightning_version"] = "1.4.9"
        checkpoint["callbacks"] = {key.partition("{")[0]: state for key, state in checkpoint["callbacks"].items()}
    torch.save(checkpoint, path)


@pytest.mark.parametrize("version", ["2.6.6", "1.9.5", "1.4.9"])
def test_t26_a_run_goes_on_at_the_end_of_an_epoch(
    version: str, validated: Any, loader: Any, make_trainer: Any, tmp_path: Path
) -> None:
    def run(epochs: int, **arguments: Any) -> tuple[Any, Any]:
        torch.manual_seed(1)
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val_loss", save_top_k=-1)
        stopping = EarlyStopping("val_loss", patience=50)
        trainer = make_trainer(max_epochs=epochs, callbacks=[saving, stopping], enable_checkpointing=True)
        net = validated()
        trainer.fit(net, loader, loader, **arguments)
        return trainer, net

    trainer, net = run(3)
    loop = fit_loop(version=version, **EPOCH_END) if version != "1.4.9" else None  # type: ignore[arg-type]
    as_lightnings(tmp_path / "epoch=1.ckpt", loop)
    with pytest.warns(UserWarning, match="holds no random state"):
        resumed, again = run(3, ckpt_path=tmp_path / "epoch=1.ckpt")
    for key, weight in net.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight)
    assert (resumed.global_step, resumed.current_epoch) == (trainer.global_step, trainer.current_epoch) == (12, 3)
    assert resumed.early_stopping_callback.best_score == trainer.early_stopping_callback.best_score


def test_t26_the_middle_of_an_epoch_is_refused(regression: Any, loader: Any, make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(max_epochs=2)
    trainer.fit(regression(), loader)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    as_lightnings(tmp_path / "run.ckpt", fit_loop(**BATCH_END))  # type: ignore[arg-type]
    with (
        pytest.warns(UserWarning, match="holds no random state"),
        pytest.raises(CheckpointError, match="after 2 batches of epoch 1"),
    ):
        make_trainer(max_epochs=2).fit(regression(), loader, ckpt_path=tmp_path / "run.ckpt")


def test_t26_saved_after_the_last_batch(regression: Any, loader: Any, make_trainer: Any, tmp_path: Path) -> None:
    """In its hooks, or when validation that follows it ends: which batches are done needs no saying."""
    trainer = make_trainer(max_epochs=2)
    net = regression()
    trainer.fit(net, loader)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = {**LAST_BATCH_END, "epochs": (2, 2, 1, 1), "earlier": 4, "steps": 8, "stepped": 7}
    as_lightnings(tmp_path / "run.ckpt", fit_loop(**saved))  # type: ignore[arg-type]
    resumed, again = make_trainer(max_epochs=2), regression()
    with pytest.warns(UserWarning, match="holds no random state"):
        resumed.fit(again, loader, ckpt_path=tmp_path / "run.ckpt")
    assert (resumed.current_epoch, resumed.global_step) == (2, 8)
    assert all(torch.equal(again.state_dict()[key], weight) for key, weight in net.state_dict().items())
