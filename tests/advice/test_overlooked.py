"""Attributes and arguments without an effect are said, and a program's own are not."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.callbacks import ModelCheckpoint


@pytest.mark.parametrize(
    ("name", "meant"), [("shold_stop", "should_stop"), ("max_epoch", "max_epochs"), ("curent_epoch", "current_epoch")]
)
def test_a_misspelt_attribute_of_a_trainer_is_warned_of(make_trainer: Any, name: str, meant: str) -> None:
    trainer = make_trainer()
    with pytest.warns(UserWarning, match=f"no attribute {name!r}, .* Did you mean {meant!r}"):
        setattr(trainer, name, 1)
    setattr(trainer, name, 2)  # said once: a second warning would be an error here


def test_attributes_of_a_programs_own_are_not_warned_of(make_trainer: Any) -> None:
    trainer = make_trainer()
    for name in ("logger2", "experiment", "_max_epoch", "my_model"):
        setattr(trainer, name, 1)
    trainer.should_stop = False


def test_a_request_to_stop_before_a_run_is_warned_of(make_trainer: Any, loader: Any, regression: Any) -> None:
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="should_stop = True has no effect before or after a run"):
        trainer.should_stop = True
    trainer.fit(regression(), loader)
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"fast_dev_run": True}, "fast_dev_run=True: this fit is a trial, of 1 batch of each loader"),
        ({"limit_train_batches": 1}, "limit_train_batches=1: each epoch trains on 1 batch at most."),
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5: each epoch trains on 0.5 of its batches."),
        ({"overfit_batches": 2}, "overfit_batches=2: each epoch trains on 2 batches at most."),
        ({"limit_train_batches": 1.0}, None),
        ({}, None),
    ],
)
def test_an_argument_that_shortens_epochs_is_one_line(
    make_trainer: Any, loader: Any, regression: Any, caplog: Any, arguments: Any, line: str | None
) -> None:
    with caplog.at_level("INFO", "drivetrain"):
        make_trainer(**arguments).fit(regression(), loader)
    lines = [text for text in caplog.messages if "this fit is a trial" in text or "each epoch trains on" in text]
    assert [text[: len(line or "")] for text in lines] == ([] if line is None else [line])


def test_a_misspelt_attribute_of_a_module_is_warned_of(make_trainer: Any, loader: Any, regression: Any) -> None:
    model = regression()
    model.automatic_optimisation = False
    with pytest.warns(UserWarning, match="Regression has no attribute .* Did you mean 'automatic_optimization'"):
        make_trainer().fit(model, loader)


def test_a_clipping_algorithm_without_a_value_is_warned_of(make_trainer: Any, loader: Any, regression: Any) -> None:
    with pytest.warns(UserWarning, match=r"gradient_clip_algorithm='norm'\) has no effect without gradient_clip_val"):
        make_trainer(gradient_clip_algorithm="norm").fit(regression(), loader)
    make_trainer(gradient_clip_algorithm="norm", gradient_clip_val=1.0).fit(regression(), loader)


def test_a_hook_that_is_given_the_algorithm_may_use_it(make_trainer: Any, loader: Any, regression: Any) -> None:
    class Clips(regression):  # type: ignore[misc]
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None: ...

    make_trainer(gradient_clip_algorithm="value").fit(Clips(), loader)


def test_callbacks_of_another_models_fit_are_warned_of(
    make_trainer: Any, loader: Any, validated: Any, tmp_path: Any
) -> None:
    saver, first = ModelCheckpoint(tmp_path, monitor="val_loss", mode="min"), validated()
    make_trainer(callbacks=[saver], enable_checkpointing=True).fit(first, loader, loader)
    make_trainer(callbacks=[saver], enable_checkpointing=True).fit(first, loader, loader)  # the same model goes on
    again = make_trainer(callbacks=[saver], enable_checkpointing=True)
    again.fit(validated(), loader, loader, ckpt_path=saver.best_model_path)  # its state comes from there
    with pytest.warns(UserWarning, match="This ModelCheckpoint has been used by another Trainer for another model"):
        make_trainer(callbacks=[saver], enable_checkpointing=True).fit(validated(), loader, loader)
