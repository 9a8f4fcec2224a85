from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain.callbacks import GradientAccumulationScheduler
from drivetrain.errors import ConfigurationError


def test_windows_follow_the_schedule(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    steps: list[int] = []

    class Counting(regression):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            steps.append(self.trainer.global_step)

    scheduler = GradientAccumulationScheduler({1: 4, 3: 2})
    trainer = make_trainer(max_epochs=4, callbacks=scheduler)
    trainer.fit(Counting(), loader)

    assert steps == [4, 5, 6, 8]
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop.max_epochs = 5
    trainer.fit(Counting(), loader)  # it may be used again


def test_after_an_exception_nothing_is_accumulated(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    class Broken(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    trainer = make_trainer(callbacks=GradientAccumulationScheduler({0: 4}))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), loader)
    assert trainer.accumulate_grad_batches == 1


def test_a_refusal_leaves_the_trainers_own_value(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    trainer = make_trainer(accumulate_grad_batches=2, callbacks=GradientAccumulationScheduler({0: 4}))
    with pytest.raises(ConfigurationError, match="both say how many batches"):
        trainer.fit(regression(), loader)
    assert trainer.accumulate_grad_batches == 2


def test_a_resumed_run_accumulates_as_its_epoch_says(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Any
) -> None:
    first = make_trainer(max_epochs=2, callbacks=GradientAccumulationScheduler({1: 2}))
    first.fit(regression(), loader)
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert first.global_step == 4 + 2
    second = make_trainer(max_epochs=3, callbacks=GradientAccumulationScheduler({1: 2}))
    second.fit(regression(), loader, ckpt_path=tmp_path / "a.ckpt")
    assert second.global_step == 4 + 2 + 2


def test_an_epoch_that_is_taken_up_in_its_middle_has_its_windows_from_the_start_of_training() -> None:
    trainer = SimpleNamespace(current_epoch=1, accumulate_grad_batches=1)
    GradientAccumulationScheduler({1: 2}).on_train_start(trainer, None)  # type: ignore[arg-type]
    assert trainer.accumulate_grad_batches == 2


def test_what_it_says_of_itself() -> None:
    scheduler = GradientAccumulationScheduler({5: 2, 2: 8})
    assert [scheduler.get_accumulate_grad_batches(epoch) for epoch in (0, 1, 2, 4, 5, 99)] == [1, 1, 8, 8, 2, 2]
    assert scheduler.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


@pytest.mark.parametrize("wrong", [{}, {-1: 2}, {0: 0}, {0: True}, {"0": 2}, {0.5: 2}, {0: 2.0}])
def test_wrong_schedules(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Write for example scheduling=\{0: 4"):
        GradientAccumulationScheduler(wrong)


def test_it_contradicts_the_trainers_own_accumulation_and_manual_optimization(
    regression: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    class Manual(regression):  # type: ignore[misc]
        automatic_optimization = False

    scheduler = GradientAccumulationScheduler({0: 4})
    with pytest.raises(ConfigurationError, match="both say how many batches to accumulate. Leave one out"):
        make_trainer(accumulate_grad_batches=2, callbacks=GradientAccumulationScheduler({0: 4})).fit(
            regression(), loader
        )
    with pytest.raises(ConfigurationError, match="automatic_optimization is False"):
        make_trainer(callbacks=scheduler).fit(Manual(), loader)


def test_t50_the_estimated_steps_follow_the_schedule(
    regression: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    estimated: list[float] = []

    class Asking(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            estimated.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer = make_trainer(max_epochs=4, callbacks=GradientAccumulationScheduler({1: 4, 3: 2}))
    trainer.fit(Asking(), loader)

    assert estimated == [trainer.global_step] == [8]
