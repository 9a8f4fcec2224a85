"""ModelCheckpoint in real fits: when it saves, under which name, and what is left on the disk."""

from __future__ import annotations

import copy
import math
import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError, NotLoggedError
from drivetrain.loggers import DummyLogger
from drivetrain.strategies import SingleDeviceStrategy

NAN, INF = float("nan"), float("inf")
STEPS = 4  # optimizer steps per epoch
AS_TRAINING = object()  # the validation loader is like the training loader


class Scripted(LightningModule):
    """Validates to a list of values given beforehand, one per epoch; everything else is as small as can be."""

    def __init__(self, scores: Any = (), raise_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.scores, self.raise_at = list(scores), raise_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.raise_at is not None and self.global_step == self.raise_at:
            raise RuntimeError("in the middle of it")
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.scores:
            self.log("score", self.scores[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(STEPS * 2, 1)), batch_size=2)


def fit(
    tmp_path: Path,
    callback: ModelCheckpoint,
    scores: Any = (),
    raise_at: int | None = None,
    ckpt_path: Any = None,
    val: Any = AS_TRAINING,
    **arguments: Any,
) -> Trainer:
    given: dict[str, Any] = {
        "max_epochs": len(scores) or 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": tmp_path, "accelerator": "cpu", "callbacks": [callback],
    }  # fmt: skip
    trainer = Trainer(**{**given, **arguments})
    validation = loader() if val is AS_TRAINING else val
    trainer.fit(Scripted(scores, raise_at), loader(), validation, ckpt_path=ckpt_path)
    return trainer


def files(folder: Any) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def names(callback: ModelCheckpoint) -> list[str]:
    return sorted(os.path.basename(path) for path in callback.best_k_models)


def load(path: Any) -> dict[str, Any]:
    return TorchCheckpointIO().load_checkpoint(path)


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "metrics", "name"),
    [
        ({}, {"epoch": torch.tensor(3), "step": torch.tensor(16)}, "epoch=3-step=16"),
        ({"filename": "{epoch:02d}"}, {"epoch": torch.tensor(3)}, "epoch=03"),
        (
            {"filename": "{epoch}-{val_loss:.2f}"},
            {"epoch": 3, "val_loss": torch.tensor(0.126)},
            "epoch=3-val_loss=0.13",
        ),
        ({"filename": "{missing:.2f}"}, {}, "missing=0.00"),
        ({"filename": "{missing}"}, {}, "missing=0"),
        ({"filename": "{val/acc:.1f}"}, {"val/acc": 0.5}, "val_acc=0.5"),
        ({"filename": "{epoch}_{x:.1f}", "auto_insert_metric_name": False}, {"epoch": 3, "x": 0.5}, "3_0.5"),
        ({"filename": "acc={val/acc:.1f}", "auto_insert_metric_name": False}, {"val/acc": 0.5}, "acc=0.5"),
        ({"filename": "fixed"}, {"epoch": 3}, "fixed"),
        ({"filename": "{x:.2e}"}, {"x": 0.000123}, "x=1.23e-04"),
        ({"filename": "{x}"}, {"x": torch.tensor(NAN)}, "x=nan"),
    ],
)
def test_format_checkpoint_name(arguments: dict[str, Any], metrics: dict[str, Any], name: str) -> None:
    assert ModelCheckpoint(**arguments).format_checkpoint_name(metrics) == f"{name}.ckpt"


def test_a_name_given_at_the_call_wins() -> None:
    assert ModelCheckpoint(filename="{epoch}").format_checkpoint_name({"x": 1}, "{x}") == "x=1.ckpt"


def test_a_path_has_the_folder_and_the_version(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, filename="{epoch}")
    assert callback.format_checkpoint_name({"epoch": 1}) == str(tmp_path / "epoch=1.ckpt")
    assert callback.format_checkpoint_name({"epoch": 1}, ver=3) == str(tmp_path / "epoch=1-v3.ckpt")


def test_a_format_that_does_not_suit_its_value() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write score=0.5 as 'd': .* Write \{score:.2f\}\."):
        ModelCheckpoint(filename="{score:d}").format_checkpoint_name({"score": torch.tensor(0.5)})


def test_a_name_with_a_metric_that_was_never_logged_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"names 'scor', which was not logged\. Did you mean 'score'\?"):
        fit(tmp_path, ModelCheckpoint(filename="{epoch}-{scor:.2f}"), [1.0, 2.0], num_sanity_val_steps=0)
    assert files(tmp_path) == []


def test_a_metric_that_the_first_validation_may_still_log_is_warned_of_once(tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="{step}-{score:.1f}", every_n_train_steps=1, save_top_k=-1)
    with pytest.warns(UserWarning, match="names 'score', which was not logged. .* contain 0 in its place") as caught:
        fit(tmp_path, callback, [3.0], max_epochs=1)
    assert len(caught) == 1
    assert "step=1-score=0.0.ckpt" in names(callback)


@pytest.mark.parametrize("moment", [{"every_n_epochs": 5}, {"every_n_train_steps": 1000}])
def test_a_fit_that_ends_before_the_first_moment_to_save_is_warned_of(tmp_path: Path, moment: dict[str, int]) -> None:
    [(name, value)] = moment.items()
    with pytest.warns(UserWarning, match=rf"{name}={value}\) saved nothing: training ended after 2 epochs and 8 steps"):
        fit(tmp_path, ModelCheckpoint(**moment), [1.0, 2.0])
    fit(tmp_path, ModelCheckpoint(**moment, save_last=True), [1.0, 2.0])  # saves at the end


def test_join_and_equals_characters_are_the_classes() -> None:
    class Own(ModelCheckpoint):
        CHECKPOINT_JOIN_CHAR = "_"
        CHECKPOINT_EQUALS_CHAR = ":"

    assert Own().format_checkpoint_name({"epoch": 1, "step": 2}) == "epoch:1_step:2.ckpt"


class Limited(ModelCheckpoint):
    """Whose names are asked for a few times only, so that an endless loop is an error."""

    asked = 0

    def _limit(self) -> None:
        self.asked += 1
        assert self.asked < 50


class OfTheEpochAndMetrics(Limited):
    def format_checkpoint_name(self, epoch: int, metrics: dict[str, Any], ver: int | None = None) -> str:  # type: ignore[override]
        self._limit()
        assert isinstance(epoch, int)
        assert isinstance(metrics["score"], torch.Tensor)
        return os.path.join(self.dirpath or "", f"e{epoch}" + ("" if ver is None else f"_{ver}") + ".ckpt")


class OfTheEpochAndStep(Limited):
    def format_checkpoint_name(self, epoch: int, step: int, metrics: Any, ver: int | None = None) -> str:  # type: ignore[override]
        self._limit()
        assert step == 4 * (epoch + 1)
        return os.path.join(self.dirpath or "", f"e{epoch}" + ("" if ver is None else f"_{ver}") + ".ckpt")


class OfMetrics(Limited):
    def format_checkpoint_name(self, metrics: dict[str, Any], ver: int | None = None) -> str:  # type: ignore[override]
        self._limit()
        version = "" if ver is None else f"_{ver}"
        return os.path.join(self.dirpath or "", f"e{metrics['epoch']}{version}.ckpt")


@pytest.mark.parametrize("cls", [OfTheEpochAndMetrics, OfTheEpochAndStep, OfMetrics])
def test_an_override_of_earlier_years_gets_the_arguments_that_it_names(tmp_path: Path, cls: Any) -> None:
    for _ in range(3):
        fit(tmp_path, cls(tmp_path / "own", monitor="score", save_top_k=-1, save_last=True), [1.0, 2.0])
    assert files(tmp_path / "own") == [
        "e0.ckpt", "e0_1.ckpt", "e0_2.ckpt", "e1.ckpt", "e1_1.ckpt", "e1_2.ckpt", "last-v1.ckpt", "last-v2.ckpt",
        "last.ckpt",
    ]  # fmt: skip


@pytest.mark.parametrize("save_on_exception", [False, True])
def test_an_override_without_versions_replaces_no_file_and_ends(tmp_path: Path, save_on_exception: bool) -> None:
    class Same(Limited):
        def format_checkpoint_name(
            self, metrics: Any, filename: Any = None, ver: Any = None, prefix: Any = None
        ) -> str:
            self._limit()
            return os.path.join(self.dirpath or "", "same.ckpt")

    for _ in range(3):
        fit(tmp_path, Same(tmp_path / "own", monitor="score"), [1.0], max_epochs=1)
    assert files(tmp_path / "own") == ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]
    if save_on_exception:

        class Fails(Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                raise ZeroDivisionError

        saves = Same(tmp_path / "own", save_on_exception=True)
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path, saves, [1.0], callbacks=[saves, Fails()])
        assert "same-v3.ckpt" in files(tmp_path / "own")


# ---- where and when --------------------------------------------------------------------------------------------------


def test_the_default_keeps_the_newest_epoch_below_the_root_folder(tmp_path: Path) -> None:
    callback = ModelCheckpoint()
    fit(tmp_path, callback, max_epochs=3)
    assert callback.dirpath == str(tmp_path / "checkpoints")
    assert files(callback.dirpath) == ["epoch=2-step=12.ckpt"]
    assert callback.best_model_path == str(tmp_path / "checkpoints" / "epoch=2-step=12.ckpt")
    assert callback.best_model_score is None
    assert callback.last_model_path == ""


def test_below_the_loggers_folder_if_there_is_one(tmp_path: Path) -> None:
    from drivetrain.loggers import CSVLogger

    callback = ModelCheckpoint()
    fit(tmp_path, callback, logger=CSVLogger(tmp_path / "logs", name="run"), log_every_n_steps=1)
    assert callback.dirpath == str(tmp_path / "logs" / "run" / "version_0" / "checkpoints")
    assert files(callback.dirpath) == ["epoch=0-step=4.ckpt"]


def test_a_folder_of_ones_own_and_a_name_with_a_folder_in_it(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "own", filename="run/{epoch}")
    fit(tmp_path, callback)
    assert files(tmp_path / "own" / "run") == ["epoch=0.ckpt"]
    assert files(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]),
        ({"every_n_epochs": 1}, ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]),
        ({"every_n_epochs": 2}, ["epoch=1-step=8.ckpt"]),
        ({"every_n_epochs": 3}, ["epoch=2-step=12.ckpt"]),
        ({"every_n_epochs": 0}, []),
        ({"every_n_train_steps": 5}, ["epoch=1-step=5.ckpt", "epoch=2-step=10.ckpt"]),
        ({"every_n_train_steps": 6, "save_weights_only": True}, ["epoch=1-step=6.ckpt", "epoch=2-step=12.ckpt"]),
        ({"train_time_interval": timedelta(days=1)}, []),
    ],
)
def test_t28_when_to_save(tmp_path: Path, arguments: dict[str, Any], expected: list[str]) -> None:
    callback = ModelCheckpoint(save_top_k=-1, **arguments)
    fit(tmp_path, callback, max_epochs=3)
    assert files(callback.dirpath) == sorted(expected)
    assert names(callback) == sorted(expected)


def test_t28_by_time_after_each_batch(tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_top_k=-1, train_time_interval=timedelta(0, 0, 1))
    fit(tmp_path, callback)
    assert files(callback.dirpath) == [f"epoch=0-step={step}.ckpt" for step in range(1, 5)]


def test_every_n_train_steps_counts_steps_and_not_accumulated_batches(tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_top_k=-1, every_n_train_steps=1)
    fit(tmp_path, callback, accumulate_grad_batches=2)
    assert files(callback.dirpath) == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


class Moments(Callback):
    """Writes down in which hook a checkpoint was saved."""

    def __init__(self) -> None:
        self.now = ""
        self.saved: list[tuple[str, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.now = "training"

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.now = "validation"

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.now = "validation end"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.now = "epoch end"

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.saved.append((self.now, trainer.global_step))


@pytest.mark.parametrize(
    ("given", "arguments", "saved"),
    [
        (None, {}, [("epoch end", 4), ("epoch end", 8)]),
        (None, {"limit_val_batches": 0}, [("epoch end", 4), ("epoch end", 8)]),
        (None, {"val_check_interval": 0.5}, [("validation end", step) for step in (2, 4, 6, 8)]),
        (None, {"val_check_interval": 2}, [("validation end", step) for step in (2, 4, 6, 8)]),
        (None, {"val_check_interval": 1}, [("validation end", step) for step in range(1, 9)]),
        (None, {"check_val_every_n_epoch": 2}, [("validation end", 8)]),
        (True, {"val_check_interval": 0.5}, [("epoch end", 4), ("epoch end", 8)]),
        (True, {"check_val_every_n_epoch": 2}, [("epoch end", 4), ("epoch end", 8)]),
        (False, {}, [("validation end", 4), ("validation end", 8)]),
        (False, {"limit_val_batches": 0}, []),
    ],
)  # fmt: skip
def test_t28_save_on_train_epoch_end(
    tmp_path: Path, given: bool | None, arguments: dict[str, Any], saved: list[Any]
) -> None:
    moments = Moments()
    callback = ModelCheckpoint(save_on_train_epoch_end=given)
    fit(tmp_path, callback, callbacks=[moments, callback], max_epochs=2, **arguments)
    assert moments.saved == saved


def test_t28_one_step_is_saved_once(tmp_path: Path) -> None:
    moments = Moments()
    by_step = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, by_step, callbacks=[moments, by_step], max_epochs=1, val_check_interval=2)
    assert [step for _, step in moments.saved] == [2, 4]


def test_t28_a_resumed_run_saves_no_step_again(tmp_path: Path) -> None:
    """Also not while its first window is still accumulating."""
    first = fit(tmp_path, ModelCheckpoint(every_n_train_steps=2, save_top_k=0), accumulate_grad_batches=2)
    first.save_checkpoint(tmp_path / "a.ckpt")
    moments, callback = Moments(), ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    arguments = {"callbacks": [moments, callback], "accumulate_grad_batches": 2, "max_epochs": 2}
    fit(tmp_path, callback, ckpt_path=tmp_path / "a.ckpt", **arguments)
    assert [step for _, step in moments.saved] == [4]


def test_t28_the_clock_starts_with_the_training(tmp_path: Path, monkeypatch: Any) -> None:
    """Neither set-up nor the sanity check counts."""
    now = [0.0]
    monkeypatch.setattr("drivetrain.callbacks.model_checkpoint.time.monotonic", lambda: now[0])

    class Slow(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            now[0] += 1000

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            now[0] += 20

    callback = ModelCheckpoint(save_top_k=-1, train_time_interval=timedelta(seconds=60))
    fit(tmp_path, callback, callbacks=[Slow(), callback])
    assert files(callback.dirpath) == ["epoch=0-step=3.ckpt"]


def test_t28_the_folder_is_the_one_that_global_rank_0_names(tmp_path: Path) -> None:
    class Told(SingleDeviceStrategy):
        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return str(tmp_path / "zero") if isinstance(obj, str) else obj

    callback = ModelCheckpoint(filename="{epoch}")
    fit(tmp_path, callback, strategy=Told())
    assert callback.dirpath == str(tmp_path / "zero")
    assert files(tmp_path / "zero") == ["epoch=0.ckpt"]


@pytest.mark.filterwarnings("ignore:This ModelCheckpoint has been used")
def test_t18_t28_nothing_in_fast_dev_run_and_in_the_sanity_check(tmp_path: Path) -> None:
    moments, callback = Moments(), ModelCheckpoint(save_last=True, save_on_train_epoch_end=False)
    fit(tmp_path, callback, callbacks=[moments, callback], fast_dev_run=2)
    assert files(tmp_path) == []
    fit(tmp_path, callback, callbacks=[moments, callback], num_sanity_val_steps=-1, max_epochs=1)
    assert moments.saved == [("validation end", 4)] * 2  # the checkpoint and the last one, none at step 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"monitor": "scor"}, "ModelCheckpoint watches 'scor', which was not logged.*score"),
        ({"filename": "{scor:.2f}"}, "names 'scor', which was not logged. Did you mean 'score'"),
        ({"monitor": "score", "filename": "{epoch}-{score:.2f}"}, None),
        ({"monitor": "scor", "save_top_k": 0}, None),
    ],
)
def test_a_trial_refuses_a_name_that_nothing_logged(tmp_path: Path, arguments: Any, said: str | None) -> None:
    refused = nullcontext() if said is None else pytest.raises(ConfigurationError, match=said)
    with refused:
        fit(tmp_path, ModelCheckpoint(tmp_path, **arguments), [1.0], fast_dev_run=True)
    assert files(tmp_path) == []


def test_validate_and_test_save_nothing(tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.validate(Scripted([1.0]), loader(), verbose=False)
    assert files(tmp_path) == []


# ---- which to keep ---------------------------------------------------------------------------------------------------

SCORES = [0.5, 0.2, 0.9, 0.1, 0.4]


@pytest.mark.parametrize(
    ("mode", "top_k", "scores", "kept"),
    [
        ("min", 1, SCORES, [3]),
        ("min", 2, SCORES, [3, 1]),
        ("min", 3, SCORES, [3, 1, 4]),
        ("max", 1, SCORES, [2]),
        ("max", 2, SCORES, [2, 0]),
        ("max", 3, SCORES, [2, 0, 4]),
        ("min", -1, SCORES, [3, 1, 4, 0, 2]),
        ("max", -1, SCORES, [2, 0, 4, 1, 3]),
        ("min", 2, [0.3, 0.3, 0.3], [0, 1]),
        ("min", 2, [NAN, 0.5, NAN, 0.4], [3, 1]),
        ("max", 2, [NAN, 0.5, NAN, 0.4], [1, 3]),
        ("min", 3, [0.5, NAN, 0.4], [2, 0, 1]),
        ("max", 3, [0.5, NAN, 0.4], [0, 2, 1]),
        ("min", 1, [NAN, NAN], [0]),
        ("max", 1, [-INF, -3.0], [1]),
    ],
)
def test_t28_the_best_k_are_kept_and_no_other_file(
    tmp_path: Path, mode: str, top_k: int, scores: list[float], kept: list[int]
) -> None:
    callback = ModelCheckpoint(monitor="score", mode=mode, save_top_k=top_k, filename="{epoch}")
    fit(tmp_path, callback, scores)
    assert files(callback.dirpath) == names(callback) == sorted(f"epoch={epoch}.ckpt" for epoch in kept)
    best, worst = (os.path.basename(path) for path in (callback.best_model_path, callback.kth_best_model_path))
    assert (best, worst) == (f"epoch={kept[0]}.ckpt", f"epoch={kept[-1]}.ckpt")
    worst_rank = INF if mode == "min" else -INF
    ranks = [worst_rank if math.isnan(score) else score for score in scores]
    assert callback.best_model_score == pytest.approx(ranks[kept[0]])
    assert callback.kth_value == pytest.approx(ranks[kept[-1]])
    for path in callback.best_k_models:  # each file holds the epoch that its name says
        assert f"epoch={load(path)['epoch']}.ckpt" == os.path.basename(path)


def test_t28_nan_ranks_last_and_is_kept_only_while_there_is_room(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="score", save_top_k=2, filename="{epoch}")
    fit(tmp_path, callback, [NAN, 0.5])
    assert float(callback.best_k_models[str(tmp_path / "epoch=0.ckpt")]) == INF
    assert callback.best_model_path == str(tmp_path / "epoch=1.ckpt")
    fit(tmp_path, ModelCheckpoint(tmp_path / "one", monitor="score", filename="{epoch}"), [NAN, 0.5])
    assert files(tmp_path / "one") == ["epoch=1.ckpt"]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_t28_of_equal_scores_the_older_is_the_best(tmp_path: Path, mode: str) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="score", mode=mode, save_top_k=3, filename="{epoch}")
    fit(tmp_path, callback, [0.5, 0.5, 0.5])
    assert callback.best_model_path == str(tmp_path / "epoch=0.ckpt")
    assert callback.kth_best_model_path == str(tmp_path / "epoch=2.ckpt")


def test_t28_what_is_monitored_may_need_a_gradient_or_be_a_plain_number(tmp_path: Path) -> None:
    """User code may write into callback_metrics; the scores that are kept are detached and on the host."""

    class Writes(Callback):
        monitors = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            value = float(trainer.current_epoch)
            trainer.callback_metrics["tensor"] = torch.tensor(value, requires_grad=True)
            trainer.callback_metrics["number"] = value

    for monitor in ("tensor", "number"):
        callback = ModelCheckpoint(tmp_path / monitor, monitor=monitor, mode="max", filename="{epoch}")
        fit(tmp_path, callback, max_epochs=3, callbacks=[Writes(), callback])
        assert callback.best_model_score is not None
        assert not callback.best_model_score.requires_grad
        assert callback.best_model_score == 2.0
        assert files(tmp_path / monitor) == ["epoch=2.ckpt"]


@pytest.mark.filterwarnings("ignore:This ModelCheckpoint has been used")
def test_t28_a_smaller_top_k_prunes_what_a_resumed_run_brings_along(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", monitor="score", save_top_k=3, filename="{epoch}")
    fit(tmp_path, first, [0.5, 0.25, 0.75])
    second = ModelCheckpoint(tmp_path / "a", monitor="score", save_top_k=1, filename="{epoch}")
    second.load_state_dict(first.state_dict())
    fit(tmp_path, second, [0.375])  # better than the worst that was kept, and yet not among the best 1
    assert files(tmp_path / "a") == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    fit(tmp_path, second, [0.125])
    assert files(tmp_path / "a") == names(second) == ["epoch=0.ckpt"]  # in the place of one that is dropped


def test_t28_top_k_0_keeps_none(tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_top_k=0)
    fit(tmp_path, callback, max_epochs=2)
    assert files(callback.dirpath) == []
    assert callback.best_model_path == ""


def test_t28_the_new_file_is_whole_before_the_old_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    remove = TorchCheckpointIO.remove_checkpoint

    def recording(self: Any, path: Any) -> None:
        seen.append(files(os.path.dirname(path)))
        remove(self, path)

    monkeypatch.setattr(TorchCheckpointIO, "remove_checkpoint", recording)
    fit(tmp_path, ModelCheckpoint(filename="{epoch}"), max_epochs=2)
    assert seen == [["epoch=0.ckpt", "epoch=1.ckpt"]]


def test_t28_the_file_a_run_was_resumed_from_stays(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", filename="{epoch}")
    fit(tmp_path, first)
    second = ModelCheckpoint(tmp_path / "a", filename="{epoch}")
    fit(tmp_path, second, max_epochs=3, ckpt_path=first.best_model_path)
    assert files(tmp_path / "a") == ["epoch=0.ckpt", "epoch=2.ckpt"]
    assert names(second) == ["epoch=2.ckpt"]


def test_t28_the_file_a_run_was_resumed_from_is_not_overwritten_either(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", filename="run")
    fit(tmp_path, first)
    second = ModelCheckpoint(tmp_path / "a", filename="run")
    fit(tmp_path, second, max_epochs=3, ckpt_path=first.best_model_path)
    assert files(tmp_path / "a") == ["run-v1.ckpt", "run.ckpt"]
    assert load(tmp_path / "a" / "run.ckpt")["epoch"] == 0
    assert load(second.best_model_path)["epoch"] == 2


def test_t28_the_version_counter_spares_another_runs_files(tmp_path: Path) -> None:
    for expected in (["run.ckpt"], ["run-v1.ckpt", "run.ckpt"], ["run-v1.ckpt", "run-v2.ckpt", "run.ckpt"]):
        callback = ModelCheckpoint(tmp_path, filename="run")
        fit(tmp_path, callback, max_epochs=2)  # the second epoch overwrites its own file, not the others'
        assert files(tmp_path) == expected
        assert load(callback.best_model_path)["epoch"] == 1


def test_t28_without_the_version_counter_it_is_overwritten(tmp_path: Path) -> None:
    for epochs in (1, 2):
        fit(tmp_path, ModelCheckpoint(tmp_path, filename="run", enable_version_counter=False), max_epochs=epochs)
        assert files(tmp_path) == ["run.ckpt"]
        assert load(tmp_path / "run.ckpt")["epoch"] == epochs - 1


def test_t28_one_fixed_name_for_several_ranked_files(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, filename="run", monitor="score", save_top_k=2)
    fit(tmp_path, callback, SCORES)
    assert files(tmp_path) == names(callback) == ["run-v1.ckpt", "run.ckpt"]
    assert {load(path)["epoch"]: float(score) for path, score in callback.best_k_models.items()} == {
        3: pytest.approx(0.1), 1: pytest.approx(0.2)
    }  # fmt: skip


# ---- the last one ----------------------------------------------------------------------------------------------------


def test_t28_save_last_writes_the_newest_state(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="score", save_last=True, filename="{epoch}")
    fit(tmp_path, callback, [0.1, 0.5, 0.9])
    assert files(tmp_path) == ["epoch=0.ckpt", "last.ckpt"]
    assert callback.last_model_path == str(tmp_path / "last.ckpt")
    assert not os.path.islink(callback.last_model_path)
    assert load(callback.last_model_path)["epoch"] == 2
    assert load(callback.best_model_path)["epoch"] == 0


@pytest.mark.skipif(os.name != "posix", reason="Windows asks for a privilege to make links")
def test_t28_save_last_link_points_to_the_newest_file(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "a", save_last="link", filename="{epoch}")
    fit(tmp_path, callback, max_epochs=3)
    assert files(tmp_path / "a") == ["epoch=2.ckpt", "last.ckpt"]
    assert os.readlink(callback.last_model_path) == "epoch=2.ckpt"
    (tmp_path / "a").rename(tmp_path / "b")  # the folder can be moved
    assert load(tmp_path / "b" / "last.ckpt")["epoch"] == 2


@pytest.mark.skipif(os.name != "posix", reason="Windows asks for a privilege to make links")
def test_t28_a_link_never_points_to_a_file_that_was_pruned(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_last="link", monitor="score", filename="{epoch}")
    fit(tmp_path, callback, [0.5, 0.2, 0.9, 0.1, 0.4])
    assert load(callback.last_model_path)["epoch"] == 3
    alone = ModelCheckpoint(tmp_path / "alone", save_last="link", save_top_k=0)
    fit(tmp_path, alone, max_epochs=1)
    assert files(tmp_path / "alone") == ["last.ckpt"]
    assert load(alone.last_model_path)["epoch"] == 0


def test_t28_the_last_ones_name_is_the_classes(tmp_path: Path) -> None:
    class Own(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "newest"
        FILE_EXTENSION = ".pt"

    fit(tmp_path, Own(tmp_path, save_last=True, save_top_k=0))
    assert files(tmp_path) == ["newest.pt"]


def test_t28_the_last_ones_name_may_hold_metrics_and_only_the_newest_stays(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    callback.CHECKPOINT_NAME_LAST = "{epoch}-last"
    trainer = fit(tmp_path, callback, max_epochs=3)
    assert files(tmp_path) == ["epoch=2-last.ckpt"]
    assert callback.resume_candidates(trainer) == [callback.last_model_path] == [str(tmp_path / "epoch=2-last.ckpt")]


def test_t28_the_last_one_of_another_run_is_spared(tmp_path: Path) -> None:
    for expected in (["last.ckpt"], ["last-v1.ckpt", "last.ckpt"]):
        callback = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
        fit(tmp_path, callback, max_epochs=2)
        assert files(tmp_path) == expected
    fit(tmp_path, ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, enable_version_counter=False))
    assert files(tmp_path) == expected
    assert (load(tmp_path / "last.ckpt")["epoch"], load(tmp_path / "last-v1.ckpt")["epoch"]) == (0, 1)


@pytest.mark.parametrize("resumed_from", ["epoch=0.ckpt", "last.ckpt"])
def test_t28_a_resumed_run_goes_on_with_its_last_one(tmp_path: Path, resumed_from: str) -> None:
    arguments: dict[str, Any] = {"save_last": True, "save_top_k": -1, "filename": "{epoch}"}
    fit(tmp_path, ModelCheckpoint(tmp_path / "a", **arguments))
    second = ModelCheckpoint(tmp_path / "a", **arguments)
    fit(tmp_path, second, max_epochs=2, ckpt_path=tmp_path / "a" / resumed_from)
    assert files(tmp_path / "a") == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert load(tmp_path / "a" / "last.ckpt")["epoch"] == 1


@pytest.mark.parametrize("save_last", [True, "link"])
def test_t28_a_last_one_that_a_kill_has_prevented_is_written_by_the_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_last: Any
) -> None:
    """The file of the last epoch was there when the process died; ``last.ckpt`` was that of the epoch before."""

    class Killed(BaseException):
        pass

    def dies(self: Any, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            raise Killed
        save(self, trainer, *_)

    arguments: dict[str, Any] = {"save_last": save_last, "save_top_k": -1, "filename": "{epoch}"}
    save = ModelCheckpoint._save_last
    with monkeypatch.context() as patched:
        patched.setattr(ModelCheckpoint, "_save_last", dies)
        with pytest.raises(Killed):
            fit(tmp_path, ModelCheckpoint(tmp_path / "a", **arguments), max_epochs=2)
    last = tmp_path / "a" / "last.ckpt"
    assert load(last)["global_step"] == STEPS
    fit(tmp_path, ModelCheckpoint(tmp_path / "a", **arguments), max_epochs=2, ckpt_path=tmp_path / "a" / "epoch=1.ckpt")
    assert load(last)["global_step"] == 2 * STEPS
    assert files(tmp_path / "a") == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    before = last.stat()
    fit(tmp_path, ModelCheckpoint(tmp_path / "a", **arguments), max_epochs=2, ckpt_path=last)
    assert (last.stat().st_ino, last.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_t28_where_links_are_not_allowed_the_last_one_is_a_copy(tmp_path: Path, monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise OSError("a privilege is missing")

    monkeypatch.setattr(os, "symlink", refused)
    callback = ModelCheckpoint(tmp_path, save_last="link", filename="{epoch}")
    fit(tmp_path, callback, max_epochs=2)
    assert files(tmp_path) == ["epoch=1.ckpt", "last.ckpt"]
    assert load(callback.last_model_path)["epoch"] == 1


@pytest.mark.parametrize("failing_write", [2, 4], ids=["the first last one", "the second"])
def test_t28_a_last_one_that_fails_leaves_the_one_before(tmp_path: Path, failing_write: int) -> None:
    class FullDisk(TorchCheckpointIO):
        writes = 0

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.writes += 1
            if self.writes == failing_write:
                raise CheckpointError("disk full")
            super().save_checkpoint(checkpoint, path, storage_options)

    callback = ModelCheckpoint(tmp_path, save_last=True, filename="{epoch}")
    callback.CHECKPOINT_NAME_LAST = "last-{epoch}"
    with pytest.raises(CheckpointError, match="disk full"):
        fit(tmp_path, callback, max_epochs=3, plugins=[FullDisk()])
    left = [] if failing_write == 2 else ["last-epoch=0.ckpt"]
    assert files(tmp_path)[1:] == left
    assert callback.last_model_path == (str(tmp_path / left[0]) if left else "")


def test_t28_resume_candidates_are_the_files_of_the_folder_and_the_last_one_of_this_run(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "a", save_last=True)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback], default_root_dir=tmp_path)
    assert callback.resume_candidates(trainer) == []
    (tmp_path / "a").mkdir()
    for name in ("last.ckpt", "last-v1.ckpt", "epoch=0.ckpt", "last.txt"):
        (tmp_path / "a" / name).touch()
    expected = [str(tmp_path / "a" / name) for name in ("epoch=0.ckpt", "last-v1.ckpt", "last.ckpt")]
    assert callback.resume_candidates(trainer) == expected
    callback.last_model_path = str(tmp_path / "gone.ckpt")
    assert callback.resume_candidates(trainer) == [*expected, str(tmp_path / "gone.ckpt")]


def test_t28_without_a_folder_of_its_own_candidates_lie_in_the_default_one(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(save_last=True))
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint()], default_root_dir=tmp_path)
    callback = trainer.checkpoint_callback
    assert callback is not None
    names = ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert callback.resume_candidates(trainer) == [str(tmp_path / "checkpoints" / name) for name in names]


# ---- what is in it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [False, True])
def test_save_weights_only(tmp_path: Path, weights_only: bool) -> None:
    callback = ModelCheckpoint(save_weights_only=weights_only)
    fit(tmp_path, callback)
    saved = load(callback.best_model_path)
    assert set(saved["state_dict"]) == {"layer.weight", "layer.bias"}
    assert ({"optimizer_states", "lr_schedulers", "callbacks", "loops", "rng"} <= set(saved)) is not weights_only


def test_its_own_state_is_in_the_file_up_to_date(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="score", mode="max", filename="{epoch}")
    fit(tmp_path, callback, [0.5, 0.75])
    (state,) = load(callback.best_model_path)["callbacks"].values()
    assert state["best_model_path"] == str(tmp_path / "epoch=1.ckpt")
    assert state["best_model_score"] == 0.75
    assert list(state["best_k_models"]) == [str(tmp_path / "epoch=1.ckpt")]


def test_state_dict_round_trip(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path, monitor="score", save_top_k=2, save_last=True, filename="{epoch}")
    fit(tmp_path, first, [0.5, 0.2, 0.9])
    second = ModelCheckpoint(tmp_path, monitor="score", save_top_k=2, save_last=True, filename="{epoch}")
    assert second.state_key == first.state_key
    assert second.state_dict() != first.state_dict()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    fit(tmp_path, second, [9.0, 9.0, 9.0, 0.3])  # ranks against what the first one kept
    assert sorted(float(score) for score in second.best_k_models.values()) == pytest.approx([0.2, 0.3])


def test_in_another_folder_only_the_best_path_is_taken_over(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", monitor="score")
    fit(tmp_path, first, [0.5])
    second = ModelCheckpoint(tmp_path / "b", monitor="score")
    with pytest.warns(UserWarning, match="restores only best_model_path, and ranks only its own files"):
        second.load_state_dict(first.state_dict())
    assert second.best_model_path == first.best_model_path
    assert second.best_k_models == {}
    assert second.kth_value is None


@pytest.mark.parametrize(
    "other",
    [
        {"monitor": "b"}, {"mode": "max"}, {"every_n_train_steps": 3}, {"every_n_epochs": 3},
        {"train_time_interval": timedelta(minutes=1)}, {"every": "auto"},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_t48_the_state_key_tells_two_of_them_apart(other: dict[str, Any]) -> None:
    one = {"monitor": "a", "mode": "min"}
    assert ModelCheckpoint(**one).state_key == ModelCheckpoint(**one).state_key  # type: ignore[arg-type]
    assert ModelCheckpoint(**{**one, **other}).state_key != ModelCheckpoint(**one).state_key  # type: ignore[arg-type]


def test_t48_two_of_them_coexist(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="score", filename="{epoch}")
    all_of_them = ModelCheckpoint(tmp_path / "all", save_top_k=-1, filename="{epoch}")
    fit(tmp_path, best, [0.5, 0.9], callbacks=[best, all_of_them])
    assert files(tmp_path / "best") == ["epoch=0.ckpt"]
    assert files(tmp_path / "all") == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert len(load(tmp_path / "all" / "epoch=1.ckpt")["callbacks"]) == 2


def test_t48_two_of_them_share_a_folder(tmp_path: Path) -> None:
    """Each prunes only its own files and has a last one of its own."""

    def pair() -> list[ModelCheckpoint]:
        lowest = ModelCheckpoint(tmp_path / "a", monitor="score", save_last=True, filename="{epoch}")
        return [
            lowest,
            ModelCheckpoint(tmp_path / "a", monitor="score", mode="max", save_last=True, filename="{epoch}"),
        ]

    lowest, highest = pair()
    fit(tmp_path, lowest, [0.5, 0.25, 0.75], callbacks=[lowest, highest])
    assert files(tmp_path / "a") == ["epoch=1.ckpt", "epoch=2.ckpt", "last-v1.ckpt", "last.ckpt"]
    assert (names(lowest), names(highest)) == (["epoch=1.ckpt"], ["epoch=2.ckpt"])

    again = pair()
    newest = max((first.last_model_path for first in (lowest, highest)), key=os.path.getmtime)
    fit(tmp_path, again[0], [9.0, 9.0, 9.0, 0.0], callbacks=again, ckpt_path=newest)
    assert (names(again[0]), names(again[1])) == (["epoch=3.ckpt"], ["epoch=2.ckpt"])
    assert files(tmp_path / "a") == ["epoch=2.ckpt", "epoch=3.ckpt", "last-v1.ckpt", "last.ckpt"]


# ---- exceptions and errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False])
def test_t28_save_on_exception(tmp_path: Path, wanted: bool) -> None:
    callback = ModelCheckpoint(tmp_path, save_on_exception=wanted, save_top_k=0)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        fit(tmp_path, callback, max_epochs=3, raise_at=6)
    assert files(tmp_path) == (["epoch=1-step=6.ckpt"] if wanted else [])
    if wanted:
        assert load(tmp_path / "epoch=1-step=6.ckpt")["global_step"] == 6


def test_save_on_exception_before_the_first_step_saves_the_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in the middle of it"):
        fit(tmp_path, ModelCheckpoint(tmp_path, save_on_exception=True), raise_at=0)
    assert files(tmp_path) == ["epoch=0-step=0.ckpt"]


def test_last_is_what_was_saved_after_an_exception_and_its_name_is_honoured(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_on_exception=True, filename="mine-{step}", save_top_k=0)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        fit(tmp_path, callback, raise_at=2)
    assert files(tmp_path) == ["mine-step=2.ckpt"]
    from drivetrain.trainer.checkpoint import resolve_path

    again = ModelCheckpoint(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=again, default_root_dir=tmp_path)
    assert resolve_path(trainer, "last", fitting=True) == str(tmp_path / "mine-step=2.ckpt")


def test_save_on_exception_has_the_name_and_the_monitor_of_the_callback(tmp_path: Path) -> None:
    for name in ("x", "{epoch}-{score:.1f}"):
        callback = ModelCheckpoint(tmp_path, name, "score", save_on_exception=True)
        with pytest.raises(RuntimeError, match="in the middle of it"):
            fit(tmp_path, callback, [0.5], max_epochs=2, raise_at=6)
    assert files(tmp_path) == ["epoch=0-score=0.5.ckpt", "epoch=1-score=0.5.ckpt", "x-v1.ckpt", "x.ckpt"]


def test_save_on_exception_where_the_epochs_checkpoint_was_not_kept(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_on_exception=True, save_top_k=0)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        fit(tmp_path, callback, max_epochs=3, raise_at=STEPS)
    assert files(tmp_path) == ["epoch=1-step=4.ckpt"]


@pytest.mark.filterwarnings("ignore:This ModelCheckpoint has been used")
def test_t28_save_on_exception_is_not_put_off_by_what_an_earlier_run_saved(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_on_exception=True, filename="{epoch}")
    fit(tmp_path, callback, limit_train_batches=2)  # has saved at step 2
    with pytest.raises(RuntimeError, match="in the middle of it"):
        fit(tmp_path, callback, raise_at=2)
    assert "epoch=0.ckpt" in files(tmp_path)


def test_t58_save_on_exception_before_training_has_begun_saves_nothing(tmp_path: Path) -> None:
    """The steps that the Trainer counts are those of its first fit."""

    class Breaks(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step:
                raise RuntimeError("in set-up")

    callback = ModelCheckpoint(tmp_path, save_on_exception=True, save_top_k=0)
    trainer = fit(tmp_path, callback, callbacks=[Breaks(), callback])
    with pytest.raises(RuntimeError, match="in set-up"):
        trainer.fit(Scripted(), loader(), loader())
    assert files(tmp_path) == []


@pytest.mark.parametrize("validated", [False, True])
def test_t28_in_a_resumed_run_the_monitor_may_still_come_too(tmp_path: Path, validated: bool) -> None:
    """Unless the run before has logged it: then its value is the last one that was logged."""
    arguments: dict[str, Any] = {"monitor": "score", "every_n_train_steps": 3, "filename": "{step}"}
    first = fit(tmp_path, ModelCheckpoint(tmp_path / "b"), [0.5], max_steps=4 if validated else 2)
    first.save_checkpoint(tmp_path / "a.ckpt")
    callback = ModelCheckpoint(tmp_path / "a", **arguments)
    missing = nullcontext() if validated else pytest.warns(UserWarning, match="'score', which was not logged")
    with pytest.warns(UserWarning, match="holds the state of callbacks"), missing:
        fit(tmp_path, callback, [0.5, 0.4, 0.3], ckpt_path=tmp_path / "a.ckpt")
    assert files(tmp_path / "a") == ["step=12.ckpt"]  # ranked by the validation that follows that step


# ---- steps and validations -------------------------------------------------------------------------------------------


def test_a_save_that_a_validation_follows_is_ranked_by_it(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="score", every_n_train_steps=STEPS, save_top_k=-1)
    fit(tmp_path, callback, [3.0, 1.0, 2.0])
    scores = {os.path.basename(path): float(score) for path, score in callback.best_k_models.items()}
    assert scores == {"step=4.ckpt": 3.0, "step=8.ckpt": 1.0, "step=12.ckpt": 2.0}
    assert callback.best_model_path == str(tmp_path / "step=8.ckpt")


def test_a_save_that_no_validation_follows_names_the_step_of_its_score(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="score", every_n_train_steps=2, save_top_k=-1)
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="'score', which was not logged"):
        fit(tmp_path, callback, [3.0, 1.0, 2.0])
    scores = {os.path.basename(path): float(score) for path, score in callback.best_k_models.items()}
    assert scores == {f"step={step}.ckpt": score for step, score in ((4, 3), (6, 3), (8, 1), (10, 1), (12, 2))}
    told = [record.message for record in caplog.records if "because no validation follows" in record.message]
    assert len(told) == 1
    assert "ranks the checkpoint of step 6 by score of step 4" in told[0]


def test_a_training_metric_has_no_age(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="train_loss", every_n_train_steps=2, save_top_k=-1)
    with caplog.at_level("INFO"):
        fit(tmp_path, callback, [3.0, 1.0])
    assert len(callback.best_k_models) == 4
    assert "because no validation follows" not in caplog.text


@pytest.mark.parametrize("interval", [2, 0.5, timedelta(microseconds=1)])
def test_saves_wait_for_validations_of_every_kind(tmp_path: Path, interval: Any) -> None:
    class Counting(Scripted):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", float(self.global_step))

    callback = ModelCheckpoint(tmp_path, "{step}", monitor="score", mode="max", every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        callbacks=callback, val_check_interval=interval, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Counting(), loader(), loader())
    scores = {os.path.basename(path): float(score) for path, score in callback.best_k_models.items()}
    assert scores == {f"step={step}.ckpt": step for step in (2, 4, 6, 8)}


@pytest.mark.parametrize(
    "arguments",
    [{"every_n_epochs": 2}, {"every_n_train_steps": 5}, {"every_n_epochs": 0}, {"save_top_k": 0, "every_n_epochs": 2}],
)
def test_save_last_holds_the_end_of_the_fit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    callback = ModelCheckpoint(tmp_path, save_last=True, **arguments)
    fit(tmp_path, callback, max_epochs=3)
    assert load(tmp_path / "last.ckpt")["global_step"] == 3 * STEPS
    assert callback.last_model_path == str(tmp_path / "last.ckpt")


def test_save_last_is_not_written_twice_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    save = Trainer.save_checkpoint
    monkeypatch.setattr(
        Trainer,
        "save_checkpoint",
        lambda self, path, *a: (written.append(os.path.basename(path)), save(self, path, *a)),
    )
    fit(tmp_path, ModelCheckpoint(tmp_path, save_last=True, save_top_k=0), max_epochs=2)
    assert written == ["last.ckpt"] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_loggers_save_before_the_checkpoint_is_there(tmp_path: Path, fails: bool) -> None:
    """A kill behind the checkpoint would lose rows that a run which resumes from it does not log again."""
    events: list[str] = []

    class Saving(DummyLogger):
        def save(self) -> None:
            if trainer.global_step == 0:
                return  # the hyperparameters
            events.append("logger")
            if fails:
                raise OSError("no space for rows")

    class Saves(Scripted):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            events.append("checkpoint")

    trainer = Trainer(
        max_epochs=1, logger=Saving(), enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        callbacks=ModelCheckpoint(tmp_path), log_every_n_steps=1,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="Saving.save failed.*no space for rows") if fails else nullcontext():
        trainer.fit(Saves(), loader(), loader())
    assert events[:2] == ["logger", "checkpoint"]
    assert len(files(tmp_path)) == 1  # a logger that fails costs no checkpoint


def test_a_link_stays_with_the_newest_ranked_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, "{step}", save_last="link", every_n_epochs=2), max_epochs=3)
    assert os.readlink(tmp_path / "last.ckpt") == "step=8.ckpt"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_to_yaml(tmp_path: Path, mode: str) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="score", mode=mode, save_top_k=-1, filename="{epoch}")
    with pytest.raises(ConfigurationError, match="does not know its folder before the first run. Pass a path."):
        ModelCheckpoint().to_yaml()
    callback.to_yaml(tmp_path / "empty.yaml")
    assert yaml.safe_load((tmp_path / "empty.yaml").read_text()) == {}
    fit(tmp_path, callback, [1e-5, NAN, 3.0])
    callback.to_yaml()
    written = yaml.safe_load((tmp_path / "best_k_models.yaml").read_text())
    assert written == {path: float(score) for path, score in callback.best_k_models.items()}
    assert written[str(tmp_path / "epoch=0.ckpt")] == 1e-5
    assert written[str(tmp_path / "epoch=1.ckpt")] == (INF if mode == "min" else -INF)


def test_file_exists(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, filename="run")
    trainer = fit(tmp_path, callback)
    assert callback.file_exists(tmp_path / "run.ckpt", trainer) is True
    assert callback.file_exists(str(tmp_path / "other.ckpt"), trainer) is False


def test_a_monitor_that_was_never_logged(tmp_path: Path) -> None:
    with pytest.raises(NotLoggedError) as caught:
        fit(tmp_path, ModelCheckpoint(monitor="val_acc", mode="max"), [0.5])
    assert "'val_acc', which was not logged. Logged so far: score, train_loss. Log it" in str(caught.value)
    assert files(tmp_path / "checkpoints") == []


@pytest.mark.filterwarnings("ignore:.*validat")  # that it is missing, or has no batch
@pytest.mark.parametrize("callback", [ModelCheckpoint(monitor="score"), ModelCheckpoint(filename="{epoch}-{score}")])
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"limit_val_batches": 0}, "limit_val_batches is 0"),
        ({"val": None}, "there is no validation loader"),
        ({"val": DataLoader(TensorDataset(torch.ones(0, 1)))}, "the validation loaders have no batch"),
    ],
    ids=["limit", "no loader", "empty loader"],
)
def test_a_missing_metric_of_a_fit_without_validation_says_why_there_is_none(
    tmp_path: Path, callback: Any, arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"This fit does not validate: {why}. [A-Z]"):
        fit(tmp_path, copy.deepcopy(callback), [0.5], **arguments)


def test_a_missing_metric_of_a_fit_that_validates_does_not_blame_the_validation(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'val_acc', which was not logged") as caught:
        fit(tmp_path, ModelCheckpoint(monitor="val_acc", mode="max"), [0.5])
    assert "validate" not in str(caught.value)


def test_a_monitor_that_may_still_come_is_awaited(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="score", every_n_train_steps=3, filename="{step}")
    with pytest.warns(UserWarning, match="'score', which was not logged. Logged so far: train_loss"):
        fit(tmp_path, callback, [0.5, 0.4])
    assert files(tmp_path) == ["step=6.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_train_steps": 1, "every_n_epochs": 1}, "every_n_train_steps=1, every_n_epochs=1.*Keep one"),
        ({"every_n_train_steps": 1, "train_time_interval": timedelta(1)}, "only one of these can decide"),
        ({"every_n_epochs": 1, "train_time_interval": timedelta(1)}, "only one of these can decide"),
        ({"every_n_epochs": 1, "every": "auto"}, "every_n_epochs=1, every='auto'.*only one of these can decide"),
        ({"every": 100}, 'every=100.*: every is None or "auto"'),
        ({"mode": "auto"}, 'mode=\'auto\'.* "min" or "max"'),
        ({"save_top_k": -2}, "save_top_k=-2.*at least -1"),
        ({"save_top_k": 2}, "save_top_k=2.*cannot rank checkpoints without monitor"),
        ({"save_last": "copy"}, "save_last='copy'"),
        ({"every_n_epochs": -1}, r"every_n_epochs=-1\).* an int of at least 0 or None. Write every_n_epochs=1."),
        ({"every_n_train_steps": -3}, r"every_n_train_steps=-3\).* at least 0 or None. Write every_n_train_steps=1."),
        ({"every_n_train_steps": 2.5}, r"every_n_train_steps=2.5\): every_n_train_steps is an int"),
        ({"every_n_epochs": True}, r"every_n_epochs=True\): every_n_epochs is an int"),
        ({"train_time_interval": timedelta(0)}, r"train_time_interval is a timedelta above zero"),
        ({"train_time_interval": 60}, r"train_time_interval=60\).* Write train_time_interval=timedelta\(minutes=30\)"),
    ],
)
def test_constructor_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelCheckpoint(**arguments)


def test_a_hook_that_has_nothing_to_do_is_idle() -> None:
    assert ModelCheckpoint().idle_hooks == {"on_train_batch_end"}
    assert ModelCheckpoint(every_n_train_steps=1).idle_hooks == frozenset()
    assert ModelCheckpoint(train_time_interval=timedelta(1)).idle_hooks == frozenset()
    assert ModelCheckpoint(every="auto").idle_hooks == frozenset()


def test_the_loggers_are_flushed_and_told(tmp_path: Path) -> None:
    from drivetrain.loggers import CSVLogger

    told: list[str] = []

    class Recording(CSVLogger):
        def save(self) -> None:
            told.append("save")
            super().save()

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            told.append(os.path.basename(checkpoint_callback.best_model_path))

    fit(tmp_path, ModelCheckpoint(filename="{epoch}"), logger=Recording(tmp_path), log_every_n_steps=1)
    assert told[:3] == ["save", "save", "epoch=0.ckpt"]  # the first when fit starts, with the hyperparameters


def test_t28_a_save_that_fails_forgets_nothing(tmp_path: Path) -> None:
    """The table of kept files says what is on disk, also when the second write fails."""
    from drivetrain.checkpoints import TorchCheckpointIO

    class FullDisk(TorchCheckpointIO):
        writes = 0

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.writes += 1
            if self.writes == 2:
                raise OSError("disk full")
            super().save_checkpoint(checkpoint, path, storage_options)

    callback = ModelCheckpoint(dirpath=tmp_path, monitor="score")
    with pytest.raises(OSError, match="disk full"):
        fit(tmp_path, callback, [2.0, 1.0], plugins=[FullDisk()])
    [kept] = tmp_path.glob("*.ckpt")
    assert callback.best_model_path == str(kept)
    assert list(callback.best_k_models) == [str(kept)]


def test_a_name_may_have_a_prefix() -> None:
    callback = ModelCheckpoint(filename="{epoch}")
    assert callback.format_checkpoint_name({"epoch": 1}, ver=2, prefix="own") == "own-epoch=1-v2.ckpt"
    assert callback.format_checkpoint_name({"epoch": 1}, prefix="") == "epoch=1.ckpt"


def test_whether_a_score_would_be_kept() -> None:
    trainer = Trainer(logger=False, enable_progress_bar=False)
    score = torch.tensor(0.3)
    assert not ModelCheckpoint(monitor="x", save_top_k=0).check_monitor_top_k(trainer, score)
    assert ModelCheckpoint(monitor="x", save_top_k=-1).check_monitor_top_k(trainer, score)
    for mode, better, worse in (("min", 0.2, 0.4), ("max", 0.4, 0.2)):
        callback = ModelCheckpoint(monitor="x", save_top_k=1, mode=mode)
        assert not callback.check_monitor_top_k(trainer)
        assert callback.check_monitor_top_k(trainer, score)  # there is room
        callback.best_k_models, callback.kth_value = {"a.ckpt": score}, score
        assert callback.check_monitor_top_k(trainer, torch.tensor(better))
        assert not callback.check_monitor_top_k(trainer, torch.tensor(worse))
        assert not callback.check_monitor_top_k(trainer, score)


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"dirpath": "runs/best.ckpt"}, "dirpath='runs', filename='best'"), ({"filename": "a.ckpt"}, "filename='a'"),
        ({"dirpath": "runs", "filename": "a"}, ""),
    ],
)  # fmt: skip
def test_a_file_where_a_folder_or_a_stem_belongs_is_a_warning(given: dict[str, str], cure: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ModelCheckpoint(**given)  # type: ignore[arg-type]
    assert [cure in str(each.message) for each in caught] == ([True] if cure else [])
