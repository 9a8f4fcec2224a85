from __future__ import annotations

from array import array
from typing import Any

import pytest
from tests.conftest import Regression, Validated

from drivetrain import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.loops.progress import Phase, Progress, RunningStage, TrainerFn, TrainerStatus


@pytest.mark.parametrize(
    ("stage", "prefix", "evaluating"),
    [
        (RunningStage.TRAINING, "train", False),
        (RunningStage.SANITY_CHECKING, "val", True),
        (RunningStage.VALIDATING, "val", True),
        (RunningStage.TESTING, "test", True),
        (RunningStage.PREDICTING, "predict", False),
    ],
)
def test_what_a_stage_says_of_itself(stage: RunningStage, prefix: str, evaluating: bool) -> None:
    assert (stage.dataloader_prefix, stage.evaluating) == (prefix, evaluating)


def test_a_status_is_stopped_however_the_run_ended() -> None:
    assert [status for status in TrainerStatus if status.stopped] == [TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED]


@pytest.mark.parametrize("fails", [False, True])
def test_the_state_says_whether_the_run_is_over(regression: Any, loader: Any, make_trainer: Any, fails: bool) -> None:
    seen = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append((trainer.state.finished, trainer.state.stopped))
            if fails:
                raise RuntimeError("stop")

    trainer = make_trainer(callbacks=Reading(), limit_train_batches=1)
    assert not trainer.state.stopped
    if fails:
        with pytest.raises(RuntimeError, match="stop"):
            trainer.fit(regression(), loader)
    else:
        trainer.fit(regression(), loader)
    assert seen == [(False, False)]
    assert (trainer.state.finished, trainer.state.stopped) == (not fails, True)


# ---- the phase -------------------------------------------------------------------------------------------------------


class Watching(Callback):
    """Writes down the phase in every hook."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Phase]] = []

    def _look(self, hook: str, trainer: Any) -> None:
        self.seen.append((hook, trainer.progress.phase))


def _watched(hook: str) -> Any:
    return lambda self, trainer, *args: self._look(hook, trainer)


for _hook in (
    "setup", "on_sanity_check_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end",
    "on_test_start", "on_test_end",
):  # fmt: skip
    setattr(Watching, _hook, _watched(_hook))


def test_each_hook_of_a_fit_sees_its_phase(make_trainer: Any, loader: Any) -> None:
    watching = Watching()
    make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, callbacks=watching).fit(
        Validated(), loader, loader
    )
    assert watching.seen == [
        ("setup", Phase.SET_UP),
        ("on_sanity_check_start", Phase.SANITY_START),
        ("on_validation_start", Phase.SANITY_START),
        ("on_validation_batch_start", Phase.SANITY_BATCH),
        ("on_validation_epoch_end", Phase.SANITY_FETCH),
        ("on_validation_end", Phase.SANITY_END),
        ("on_train_start", Phase.TRAIN_START),
        ("on_train_epoch_start", Phase.EPOCH_START),
        ("on_train_batch_start", Phase.BATCH_START),
        ("on_after_backward", Phase.BACKWARD),
        ("on_before_optimizer_step", Phase.OPTIMIZER_STEP),
        ("on_train_batch_end", Phase.BATCH_END),
        ("on_validation_start", Phase.VALIDATION_START),
        ("on_validation_batch_start", Phase.VALIDATION_BATCH),
        ("on_validation_epoch_end", Phase.VALIDATION_FETCH),
        ("on_validation_end", Phase.VALIDATION_END),
        ("on_train_epoch_end", Phase.EPOCH_END),
        ("on_train_end", Phase.TRAIN_END),
    ]


def test_a_test_has_phases_of_its_own_and_none_is_left(make_trainer: Any, loader: Any) -> None:
    watching = Watching()
    trainer = make_trainer(callbacks=watching)
    trainer.test(Validated(), loader)
    assert watching.seen == [
        ("setup", Phase.SET_UP),
        ("on_test_start", Phase.TEST_START),
        ("on_test_end", Phase.TEST_END),
    ]
    assert trainer.progress.phase is Phase.NONE
    assert trainer.progress.stage is None


@pytest.mark.parametrize(
    ("phases", "stage"),
    [
        ((Phase.NONE, Phase.SET_UP), None),
        ((Phase.TRAIN_START, Phase.FORWARD, Phase.VALIDATED, Phase.TRAIN_END), RunningStage.TRAINING),
        ((Phase.SANITY_START, Phase.SANITY_END), RunningStage.SANITY_CHECKING),
        ((Phase.VALIDATION_START, Phase.VALIDATION_END), RunningStage.VALIDATING),
        ((Phase.TEST_START, Phase.TEST_END), RunningStage.TESTING),
        ((Phase.PREDICT_START, Phase.PREDICT_END), RunningStage.PREDICTING),
    ],
)
def test_the_phase_tells_the_stage(phases: tuple[Phase, ...], stage: RunningStage | None) -> None:
    progress = Progress()
    for phase in phases:
        progress.enter(phase)
        assert progress.stage is stage


def test_the_phase_is_one_integer_that_can_be_in_shared_memory(make_trainer: Any, loader: Any) -> None:
    """What the loops write is seen through another view of the same memory, while a batch runs."""
    seen: list[int] = []

    class Sampled(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(view[0])
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(max_epochs=1, limit_train_batches=1)
    view = memoryview(words := array("q", trainer.progress.slot))
    trainer.progress.show_in(words)
    trainer.fit(Sampled(), loader)
    assert seen == [Phase.FORWARD]
    assert view[0] == Phase.NONE


def test_an_exception_leaves_the_phase_in_which_it_came(make_trainer: Any, loader: Any) -> None:
    class Failing(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise ConfigurationError("now")

    trainer = make_trainer(max_epochs=1)
    with pytest.raises(ConfigurationError, match="now"):
        trainer.fit(Failing(), loader)
    assert trainer.progress.phase is Phase.OPTIMIZER_STEP


@pytest.mark.parametrize(
    ("phase", "validation", "ending"),
    [
        (Phase.BATCH_END, "", False),
        (Phase.VALIDATION_DUE, "running", False),
        (Phase.VALIDATION_BATCH, "running", False),
        (Phase.VALIDATION_END, "done", False),
        (Phase.VALIDATED, "done", False),
        (Phase.EPOCH_END, "", True),
    ],
)
def test_a_checkpoint_keeps_what_the_phase_says_and_a_resumed_run_knows_it(
    phase: Phase, validation: str, ending: bool
) -> None:
    progress = Progress(batches_done=3)
    progress.begin_run(TrainerFn.FITTING)
    progress.enter(phase)
    state = progress.state_dict()
    assert (state["validation"], state["epoch_ending"]) == (validation, ending)

    resumed = Progress()
    resumed.begin_run(TrainerFn.FITTING)
    resumed.load_state_dict(state)
    assert (resumed.validation, resumed.epoch_ending) == (validation, ending)
    assert (resumed.stage, resumed.loop_stage) == (RunningStage.TRAINING, None)
    resumed.resume_at(Phase.BATCH_END)
    assert (resumed.validation, resumed.epoch_ending) == (validation, ending)
    assert resumed.stage is RunningStage.TRAINING
