from __future__ import annotations

from typing import Any

import pytest

from drivetrain import Callback
from drivetrain.loops.progress import RunningStage, TrainerStatus


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
