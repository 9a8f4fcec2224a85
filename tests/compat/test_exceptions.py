"""What a program catches by Lightning's class is caught here: every mistake raises what Lightning 2.6 raises."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain import compat
from drivetrain.errors import ConfigurationError, DrivetrainError

RAISED: dict[str, list[str] | None] = json.loads(Path(__file__).with_name("mistakes.json").read_text())
"""By mistake, the names of the exception's classes in Lightning, the most derived first; ``None`` if none is raised."""

MORE_WORKS = {
    "trainer.strategy_fsdp": "FSDP works on a CPU too",
    "trainer.store_in_strategy": "the one in plugins is used",
    "module.manual_backward_without_trainer": "calls backward, for modules in a loop of one's own",
    "module.clip_another_value": "what an override of configure_gradient_clipping passes is used",
    "module.clip_another_algorithm": "what an override of configure_gradient_clipping passes is used",
    "module.log_dict_nested": "a dictionary is logged as a group",
    "module.example_type": "a model summary without sizes",
    "data.train_loader_module": "a data module in the place of loaders; the module's loaders are used",
    "data.max_size_prediction": "predict_step gets the batches of all loaders",
    "data.min_size_prediction": "predict_step gets the batches of all loaders",
    "data.combined_length": "the length is known before the iteration",
    "data.predict_named_loader": "the loader is used as it is",
    "data.predict_needy_batch_sampler": "the loader is used as it is",
    "callbacks.checkpoint_link_at_an_address": "a file is written where links are impossible",
    "callbacks.swa_epoch_start_zero": "averages from the first epoch on",
    "callbacks.swa_two_schedulers": "replaces both",
    "callbacks.prediction_writer_batch": "the base class writes nothing",
    "callbacks.prediction_writer_epoch": "the base class writes nothing",
    "callbacks.progress_bar_disable": "the base class shows nothing",
    "callbacks.progress_bar_enable": "the base class shows nothing",
    "parts.kubeflow": "returns False",
    "parts.strategy_registered_again": "the same class again, as by a notebook cell that is run twice",
    "fabric.strategy_fsdp": "FSDP works on a CPU too",
    "fabric.setup_loader_list": "anything that can be iterated is a loader",
    "fabric.own_backward": "raised by optimizer.step(), if no backward pass was scaled",
}
"""Mistakes that Lightning refuses and drivetrain does not, or not there, and what happens instead."""

REFUSED = {
    "trainer.limit_train_batches_whole_float", "trainer.max_epochs_text", "trainer.max_time_negative",
    "trainer.accumulate_grad_batches", "trainer.accumulate_grad_batches_dict", "trainer.callback_type",
    "trainer.deterministic", "trainer.overfit_and_trial", "module.scheduler_unknown_key",
    "module.log_metric_of_words", "module.load_strict_conflict", "module.load_hparams_file_missing",
    "data.empty_train_loader", "data.empty_train_dataset", "data.from_datasets_unknown",
    "callbacks.early_stopping_patience", "callbacks.early_stopping_min_delta", "callbacks.checkpoint_save_last",
    "callbacks.checkpoint_filename", "callbacks.throughput_without_logger", "callbacks.throughput_window",
    "callbacks.swa_epoch_start_text", "callbacks.lambda_type", "parts.pytorch_unknown", "parts.mixed_lbfgs",
    "parts.half_precision", "fabric.run_missing", "fabric.all_reduce_op",
}  # fmt: skip
"""Mistakes that Lightning does not report, or only when something fails because of them."""

BY_ACCIDENT = {
    "trainer.max_time_type", "trainer.gradient_clip_algorithm_type", "trainer.callback_name",
    "module.no_init_of_the_base",
    "module.optimizers_and_number", "module.scheduler_text", "module.scheduler_class", "module.scheduler_none_in_dict",
    "module.scheduler_frequency", "module.log_dict_list", "module.dtype_set", "module.load_damaged",
    "data.combined_next", "data.datamodule_number", "callbacks.timer_duration_type", "fabric.setup_no_module",
    "fabric.save_number", "fabric.load_number", "fabric.logger_without_logger",
}  # fmt: skip
"""Mistakes that Lightning does not check: Python or torch fails somewhere inside, with a class that says little."""


@pytest.fixture(scope="module")
def outcome() -> Iterator[Callable[[str], BaseException | None]]:
    """Make the mistake of this name, and return its exception."""
    compat.install()
    try:
        from tests.compat.mistakes.run import outcome

        yield outcome
    finally:
        compat.uninstall()


def expected(classes: list[str]) -> type[BaseException]:
    """The class by which a program would catch what Lightning raises: the most derived one that is public."""
    found: object = DrivetrainError if "MisconfigurationException" in classes else getattr(builtins, classes[0])
    assert isinstance(found, type)
    assert issubclass(found, BaseException)
    return found


@pytest.mark.parametrize("name", sorted(RAISED.keys() - MORE_WORKS.keys() - REFUSED - BY_ACCIDENT))
def test_the_classes_of_the_original_catch_them(outcome: Callable[[str], BaseException | None], name: str) -> None:
    classes, raised = RAISED[name], outcome(name)
    if classes is None:
        assert raised is None
    else:
        assert isinstance(raised, expected(classes)), (classes, raised)


@pytest.mark.parametrize("name", sorted(REFUSED | BY_ACCIDENT))
def test_what_is_refused_here_alone_has_an_exception_of_its_own(
    outcome: Callable[[str], BaseException | None], name: str
) -> None:
    raised, plain = outcome(name), {"data.from_datasets_unknown", "fabric.run_missing", "module.dtype_set"}
    assert isinstance(raised, (DrivetrainError, TypeError, AttributeError, NotImplementedError))
    assert isinstance(raised, DrivetrainError) or name in {*plain, "data.combined_next"}
    assert "[Errno" not in str(raised)


def test_the_mistakes_are_those_that_were_recorded(outcome: Callable[[str], BaseException | None]) -> None:
    from tests.compat.mistakes.run import MISTAKES

    assert MISTAKES.keys() == RAISED.keys()
    assert RAISED.keys() >= MORE_WORKS.keys() | REFUSED | BY_ACCIDENT


def test_another_class_would_be_noticed() -> None:
    assert not issubclass(ConfigurationError, expected(["RuntimeError", "Exception"]))
    assert issubclass(ConfigurationError, expected(["MisconfigurationException", "Exception"]))
