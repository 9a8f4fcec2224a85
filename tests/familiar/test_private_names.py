"""Names of callbacks, modules and strategies that are private and that libraries override or set all the same."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Callback, LightningDataModule, callbacks, loggers
from drivetrain.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint
from drivetrain.compat.members import INSTEAD, UNCALLED
from drivetrain.module.optimizers import LRSchedulerConfig


class Falls(Callback):
    """Gives the metric a value for each epoch."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("score", self.values[trainer.current_epoch])


# ---- EarlyStopping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "sign"), [("min", -1), ("max", 1)])
def test_a_library_decides_when_to_stop(make_trainer: Any, regression: Any, loader: Any, mode: str, sign: int) -> None:
    class Twice(EarlyStopping):
        seen: list[float] = []  # noqa: RUF012

        def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str | None]:
            self.seen.append(float(current))
            return len(self.seen) == 2, "Two is enough."

    stopping = Twice("score", mode=mode, min_delta=0.5)
    trainer = make_trainer(max_epochs=5, callbacks=[Falls(3, 2, 1, 0, 0), stopping])
    trainer.fit(regression(), loader)
    assert (stopping.seen, trainer.current_epoch, stopping.stopped_epoch) == ([3, 2], 2, 1)
    assert stopping.stopping_reason_message == "Two is enough."
    assert stopping.min_delta == sign * 0.5  # as it is there: the override adds it with its sign


def test_an_override_may_ask_the_original(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Asks(EarlyStopping):
        def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str | None]:
            return super()._evaluate_stopping_criteria(current)

    ends = []
    for kind in (EarlyStopping, Asks):
        trainer = make_trainer(max_epochs=6, callbacks=[Falls(3, 2, 1.9, 1.8, 0, 0), kind("score", 0.5, patience=2)])
        trainer.fit(regression(), loader)
        ends.append((trainer.current_epoch, trainer.early_stopping_callback.stopping_reason))
    assert ends[0] == ends[1]
    assert ends[0][0] == 4


def test_a_library_writes_the_sentence_about_an_improvement(
    make_trainer: Any, regression: Any, loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Words(EarlyStopping):
        def _improvement_message(self, current: torch.Tensor) -> str:
            return f"from {self.best_score.item()} to {current.item()}"

    caplog.set_level("INFO", logger="drivetrain")
    trainer = make_trainer(max_epochs=3, callbacks=[Falls(3, 3, 1), Words("score", verbose=True)])
    trainer.fit(regression(), loader)  # without the warning of an override that is never called
    said = [record.message for record in caplog.records if record.message.startswith("from ")]
    assert said == ["from inf to 3.0", "from 3.0 to 1.0"]


def test_a_program_checks_at_another_time(make_trainer: Any, regression: Any, loader: Any) -> None:
    class AtTheEndOfEpochs(EarlyStopping):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch % 2:
                self._run_early_stopping_check(trainer)

    trainer = make_trainer(max_epochs=6, callbacks=[Falls(1, 1, 2, 2, 3, 3), AtTheEndOfEpochs("score", patience=1)])
    trainer.fit(regression(), loader)
    assert trainer.current_epoch == 4


def test_when_to_look_and_when_to_save_under_their_other_names() -> None:
    stopping, saves = EarlyStopping("score", check_on_train_epoch_end=True), ModelCheckpoint()
    assert (stopping._check_on_train_epoch_end, saves._save_on_train_epoch_end) == (True, None)
    stopping._check_on_train_epoch_end, saves._save_on_train_epoch_end = False, False
    assert (stopping.check_on_train_epoch_end, saves.save_on_train_epoch_end) == (False, False)


# ---- ModelCheckpoint -------------------------------------------------------------------------------------------------


def test_a_library_extends_what_ranks_checkpoints_and_sees_each_save(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    class Watches(ModelCheckpoint):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.saving, self.notes = "", []

        def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
            return {
                **super()._monitor_candidates(trainer),
                "half": torch.tensor([2.0, 1.0, 3.0][trainer.current_epoch]),
            }

        def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
            self.saving = before = self.best_model_path or "none"
            super()._save_topk_checkpoint(trainer, monitor_candidates)
            self.saving = ""
            self.notes.append((before != (self.best_model_path or "none"), float(monitor_candidates["half"])))

        def state_dict(self) -> dict[str, Any]:  # while a file is written the new best is known already
            return {**super().state_dict(), "is_better": bool(self.saving) and self.saving != self.best_model_path}

    saves = Watches(dirpath=tmp_path, monitor="half", filename="{epoch}", save_last=True)
    trainer = make_trainer(max_epochs=3, callbacks=saves, enable_checkpointing=True)
    trainer.fit(regression(), loader)
    assert saves.notes == [(True, 2.0), (True, 1.0), (False, 3.0)]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=1.ckpt", "last.ckpt"]
    (state,) = torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["callbacks"].values()
    assert state["is_better"]
    (state,) = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"].values()
    assert not state["is_better"]


def test_a_library_writes_something_beside_each_best_checkpoint(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    """As schnetpack, whose best model is written by ``_update_best_and_save``, and others by ``_save_checkpoint``."""

    class WritesBeside(ModelCheckpoint):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.best, self.calls = list[float](), list[str]()

        def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
            score = torch.tensor([2.0, 1.0, 3.0, 0.5][trainer.current_epoch])
            return {**super()._monitor_candidates(trainer), "score": score}

        def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
            return trainer.current_epoch == 3 or super()._should_skip_saving_checkpoint(trainer)

        def _update_best_and_save(self, current: Any, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
            super()._update_best_and_save(current, trainer, monitor_candidates)
            if current == self.best_model_score == self.current_score:
                self.best.append(float(monitor_candidates["score"]))

        def _save_none_monitor_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
            super()._save_none_monitor_checkpoint(trainer, monitor_candidates)
            self.calls.append("unranked")

        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            self.calls.append(f"saved {Path(filepath).name}")

        def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._remove_checkpoint(trainer, filepath)
            self.calls.append(f"removed {Path(filepath).name}")

    saves = WritesBeside(dirpath=tmp_path, monitor="score", filename="{epoch}")
    make_trainer(max_epochs=4, callbacks=saves, enable_checkpointing=True).fit(regression(), loader)
    assert saves.best == [2.0, 1.0]
    assert saves.calls == ["saved epoch=0.ckpt", "saved epoch=1.ckpt", "removed epoch=0.ckpt"]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=1.ckpt"]
    newest = WritesBeside(dirpath=tmp_path / "newest", filename="{epoch}")
    make_trainer(max_epochs=2, callbacks=newest, enable_checkpointing=True).fit(regression(), loader)
    assert newest.calls == [
        "saved epoch=0.ckpt", "unranked", "saved epoch=1.ckpt", "unranked", "removed epoch=0.ckpt",
    ]  # fmt: skip


def test_a_program_skips_the_first_checks(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Later(EarlyStopping):
        def _should_skip_check(self, trainer: Any) -> bool:
            return trainer.current_epoch < 2 or super()._should_skip_check(trainer)

    stops = Later("score", patience=1, mode="min", check_on_train_epoch_end=True)
    make_trainer(max_epochs=9, callbacks=[Falls(*map(float, range(9))), stops]).fit(regression(), loader)
    assert stops.stopped_epoch == 3


def test_what_is_never_called_is_named_when_the_callback_is_attached(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    class SavesTheLast(ModelCheckpoint):
        def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None: ...

    trainer = make_trainer(max_epochs=1, callbacks=SavesTheLast(tmp_path), enable_checkpointing=True)
    with pytest.warns(UserWarning, match="SavesTheLast overrides _save_last_checkpoint, which .*_update_best_and_save"):
        trainer.fit(regression(), loader)


def test_a_library_chooses_the_moment_of_a_save_and_asks_which_step_was_the_last(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    """As anomalib, which saves after validation, and in a run that only validates."""

    class SavesLater(ModelCheckpoint):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.steps = list[int]()

        def _should_save_on_train_epoch_end(self, trainer: Any) -> bool:
            assert super()._should_save_on_train_epoch_end(trainer)  # by default, at the end of a training epoch
            return False

        def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
            self.steps.append(self._last_global_step_saved)
            return trainer.sanity_checking or self._last_global_step_saved == trainer.global_step

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            before = len(self.steps)
            super().on_train_epoch_end(trainer, pl_module)
            assert len(self.steps) == before == trainer.current_epoch + 1  # after the epoch's validation

    saves = SavesLater(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(max_epochs=2, callbacks=saves, enable_checkpointing=True)
    model = regression()
    model.validation_step = lambda batch, batch_idx: None
    trainer.validate(model, loader)
    assert saves.steps == [0]
    assert list(tmp_path.glob("*.ckpt")) == []
    saves.steps.clear()
    trainer.fit(model, loader, loader)
    assert saves.steps == [0, trainer.global_step // 2]
    trainer.validate(model, loader)
    assert saves.steps[2:] == [trainer.global_step]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    saves._last_global_step_saved = 0
    trainer.validate(model, loader)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


@pytest.mark.parametrize("name", UNCALLED)
def test_what_is_said_of_private_methods_is_true(name: str) -> None:
    cls = getattr(callbacks, name)
    assert not [each for each in UNCALLED[name] if hasattr(cls, each)]
    assert [each for each in INSTEAD.get(name, ()) if not hasattr(cls, each)] == []


# ---- BaseFinetuning --------------------------------------------------------------------------------------------------


class KeepsItself(BaseFinetuning):
    """Keeps the groups of the optimizers in a state of its own, as finetuning-scheduler does."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for index, optimizer in enumerate(trainer.optimizers):
            known = len(self._internal_optimizer_metadata.get(index, []))
            if trainer.current_epoch == 1 and known == 1:
                self.make_trainable(pl_module.net[0])
                optimizer.add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.01})
                for config in trainer.lr_scheduler_configs:
                    config.scheduler.base_lrs.append(0.01)
            self._store(pl_module, index, known, optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._internal_optimizer_metadata}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._internal_optimizer_metadata, self._restarting = state_dict["kept"], True


def test_a_library_keeps_the_groups_of_the_optimizers_itself(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    class Thawed(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            optimizer = torch.optim.Adam(trained, lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    torch.manual_seed(5)
    whole = Thawed()
    trainer = make_trainer(max_epochs=3, callbacks=KeepsItself())
    trainer.fit(whole, loader)
    torch.manual_seed(5)
    half = make_trainer(max_epochs=2, callbacks=KeepsItself())
    half.fit(Thawed(), loader)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, rest = Thawed(), make_trainer(max_epochs=3, callbacks=KeepsItself())
    resumed.net[0].requires_grad_(True)
    rest.fit(resumed, loader, ckpt_path=tmp_path / "half.ckpt")
    assert [len(group["params"]) for group in rest.optimizers[0].param_groups] == [2, 2]
    assert [group["lr"] for group in rest.optimizers[0].param_groups] == [
        group["lr"] for group in trainer.optimizers[0].param_groups
    ]
    kept = KeepsItself._apply_mapping_to_param_groups(
        rest.optimizers[0].param_groups, {each: name for name, each in resumed.named_parameters()}
    )
    assert [group["params"] for group in kept] == [["net.3.weight", "net.3.bias"], ["net.0.weight", "net.0.bias"]]


# ---- a strategy's optimizers, and trainer.ckpt_path ------------------------------------------------------------------


def test_optimizers_and_schedulers_that_are_set_on_the_strategy(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Replaces(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.new = torch.optim.Adam(pl_module.parameters(), lr=0.1)
                self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.new, gamma=0.5)
                trainer.strategy.optimizers = [self.new]
                trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(self.scheduler)]

    replaces, module = Replaces(), regression()
    trainer = make_trainer(max_epochs=3, callbacks=replaces)
    trainer.fit(module, loader)
    assert trainer.optimizers == [replaces.new]
    assert module.optimizers().optimizer is replaces.new
    assert {float(each["step"]) for each in replaces.new.state.values()} == {8.0}
    assert replaces.new.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)


def test_a_checkpoint_path_that_was_set_before_the_run(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    class Sees(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.path = trainer.ckpt_path

    first = make_trainer(max_epochs=1)
    first.fit(regression(), loader)
    first.save_checkpoint(path := tmp_path / "one.ckpt")
    sees = Sees()
    trainer = make_trainer(max_epochs=2, callbacks=sees)
    assert trainer.ckpt_path is None
    trainer.ckpt_path = path
    trainer.fit(regression(), loader)
    assert (trainer.global_step, sees.path, trainer.ckpt_path) == (8, str(path), str(path))
    other = tmp_path / "two.ckpt"
    trainer.save_checkpoint(other)
    trainer.limits.max_epochs = 3
    with pytest.warns(UserWarning, match=r"was passed ckpt_path='.*two.ckpt', and trainer.ckpt_path was set to '.*one"):
        trainer.fit(regression(), loader, ckpt_path=other)
    assert trainer.global_step == 12
    trainer.fit(regression(), loader)
    assert (trainer.global_step, trainer.ckpt_path) == (12, None)  # from the beginning


def test_a_checkpoint_path_that_was_set_is_evaluated(
    make_trainer: Any, validated: Any, loader: Any, tmp_path: Path
) -> None:
    module = validated()
    trainer = make_trainer(max_epochs=2, callbacks=ModelCheckpoint(tmp_path), enable_checkpointing=True)
    trainer.fit(module, loader, loader)
    with torch.no_grad():
        module.net[0].weight.zero_()
    trainer.save_checkpoint(path := tmp_path / "zeros.ckpt")
    best = trainer.test(dataloaders=loader, verbose=False)
    trainer.ckpt_path = path
    zeros = trainer.test(dataloaders=loader, verbose=False)
    assert trainer.ckpt_path == str(path)
    assert zeros != best
    trainer.ckpt_path = None
    assert trainer.test(dataloaders=loader, verbose=False) == best


# ---- modules, and classes that are mixed in --------------------------------------------------------------------------


def test_whether_a_module_is_compiled(regression: Any) -> None:
    module = regression()
    assert module._compiler_ctx is None
    module_compiled: Any = torch.compile(module, backend="eager")
    from drivetrain.base.compiled import compiled_in_place

    assert compiled_in_place(module_compiled)._compiler_ctx["compiler"] == "dynamo"


ARGUMENTS: dict[str, Any] = {
    "EarlyStopping": {"monitor": "loss"}, "GradientAccumulationScheduler": {"scheduling": {0: 1}},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5}, "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ThroughputMonitor": {"batch_size_fn": len}, "OnExceptionCheckpoint": {"dirpath": "."},
    "WeightAveraging": {"avg_fn": max}, "Timer": {"duration": "00:00:01:00"},
}  # fmt: skip


@pytest.mark.parametrize("name", [*callbacks.__all__, "LightningDataModule", "CSVLogger", "DummyLogger"])
def test_a_class_that_is_mixed_in_is_initialized(name: str, tmp_path: Path) -> None:
    """finetuning-scheduler's callbacks are ``class FTSEarlyStopping(EarlyStopping, CallbackResolverMixin)``."""
    base: Any = next(getattr(home, name) for home in (callbacks, loggers, _HERE) if hasattr(home, name))

    class Mixin:
        def __init__(self) -> None:
            super().__init__()
            self.mixed_in = True

    kind = type("Mixed", (base, Mixin), {"__abstractmethods__": frozenset()})
    if not inspect.isclass(base) or not issubclass(base, (Callback, LightningDataModule, loggers.Logger)):
        pytest.skip("no class to extend")
    arguments = {"save_dir": tmp_path} if name == "CSVLogger" else ARGUMENTS.get(name, {})
    try:
        assert kind(**arguments).mixed_in
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


class _HERE:
    LightningDataModule = LightningDataModule
