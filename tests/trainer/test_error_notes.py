"""The note below a traceback: which hook, batch, epoch and rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback
from drivetrain.errors import ConfigurationError

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")


class Indexed(Dataset[Any]):
    """The sample 20 cannot be read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            torch.zeros(3)[5]
        return torch.ones(4), torch.ones(1)


def note_of(error: Any) -> str:
    [note] = error.value.__notes__
    return str(note)


def module_that_fails_in(base: type, name: str, call: int = 0) -> Any:
    calls = 0

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > call:
            torch.ones(2, 8) @ torch.ones(4, 4)
        return getattr(base, name)(self, *args, **kwargs)

    fail.__name__ = name
    fail.__code__ = fail.__code__.replace(co_name=name)
    return type("Net", (base,), {name: fail})()


@pytest.mark.parametrize(
    ("name", "call", "note"),
    [
        ("training_step", 6, "In Net.training_step, batch 2 of epoch 1, on rank 0."),
        ("setup", 0, "In Net.setup, while fit was being set up, on rank 0."),
        ("on_train_start", 0, "In Net.on_train_start, at the start of training, on rank 0."),
        ("on_train_epoch_start", 1, "In Net.on_train_epoch_start, at the start of epoch 1, on rank 0."),
        ("on_train_batch_end", 1, "In Net.on_train_batch_end, batch 1 of epoch 0, on rank 0."),
        ("on_train_epoch_end", 1, "In Net.on_train_epoch_end, at the end of epoch 1, on rank 0."),
        ("on_train_end", 0, "In Net.on_train_end, at the end of training, on rank 0."),
        ("validation_step", 3, "In Net.validation_step, batch 1 of the validation in epoch 0, on rank 0."),
        ("on_validation_epoch_end", 1, "In Net.on_validation_epoch_end, after batch 3 of the validation in epoch 0"),
        ("on_validation_end", 0, "In Net.on_validation_end, at the end of the sanity check, on rank 0."),
    ],
)
def test_errors_of_torch_say_in_which_hook_batch_epoch_and_rank(
    make_trainer: Any, validated: Any, loader: Any, name: str, call: int, note: str
) -> None:
    with pytest.raises(RuntimeError) as error:
        make_trainer(max_epochs=2).fit(module_that_fails_in(validated, name, call), loader, loader)
    assert str(error.value).startswith("mat1 and mat2 shapes cannot be multiplied")  # the message is untouched
    assert note_of(error).startswith(note)


def test_a_callback_is_named_by_its_class(make_trainer: Any, validated: Any, loader: Any) -> None:
    class Reads(Callback):
        def on_test_batch_start(self, *args: Any) -> None:
            torch.zeros(3)[5]

    with pytest.raises(IndexError) as error:
        make_trainer(callbacks=[Reads()]).test(validated(), loader)
    assert note_of(error) == "In Reads.on_test_batch_start, batch 0 of the test, on rank 0."


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_dataset_says_after_which_batch(make_trainer: Any, regression: Any, workers: int) -> None:
    with pytest.raises(IndexError) as error:
        make_trainer().fit(regression(), DataLoader(Indexed(), batch_size=8, num_workers=workers))
    hook = "while fetching a batch" if workers else "in Indexed.__getitem__,"
    assert note_of(error).lower().startswith(hook.lower())
    assert "batch 1 of epoch 0" in note_of(error) or workers  # workers are asked ahead


def test_an_error_in_backward_says_so(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Net(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            powers = super().training_step(batch, batch_idx).exp()
            loss = powers.sum()
            powers.exp_()  # backward needs what it was
            return loss + powers

    with pytest.raises(RuntimeError) as error:
        make_trainer().fit(Net(), loader)
    assert note_of(error) == "In the backward pass, batch 0 of epoch 0, on rank 0."


def test_errors_that_say_what_to_do_and_interrupts_get_no_note(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Wrong(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 5

    with pytest.raises(ConfigurationError) as error:
        make_trainer().fit(Wrong(), loader)
    assert not hasattr(error.value, "__notes__")

    class Stops(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as interrupted:
        make_trainer().fit(Stops(), loader)
    assert not hasattr(interrupted.value.__cause__, "__notes__")


class Logs(Callback):
    """Logs in the way of ``call`` after the first batch."""

    def __init__(self, call: Callable[[Any], None], through: str) -> None:
        self.call, self.through = call, through

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.call(self if self.through == "callback" else pl_module)


@pytest.mark.parametrize("through", ["module", "callback"])
@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda it: it.log({"x": 1.0}), "Write self.log_dict(...) for a dictionary of names and values."),
        (lambda it: it.log("x"), "self.log takes a name and a value."),
        (lambda it: it.log("x", 1.0, progbar=True), "self.log has no argument 'progbar'. Did you mean 'prog_bar'?"),
        (lambda it: it.log_dict({"x": 1.0}, onstep=True), "self.log_dict has no argument 'onstep'. Did you mean 'on_s"),
    ],
    ids=["a dictionary", "no value", "a misspelt argument", "a misspelt argument of log_dict"],
)
def test_a_call_of_log_that_python_refuses_is_answered_with_the_right_one(
    regression: Any, loader: Any, make_trainer: Any, call: Any, cure: str, through: str
) -> None:
    with pytest.raises(TypeError) as raised:
        make_trainer(callbacks=Logs(call, through)).fit(regression(), loader)
    notes = raised.value.__notes__
    assert cure in notes[0]
    assert notes[1].startswith("In Logs.on_train_batch_end, batch 0")


def test_another_type_error_gets_no_cure_of_log(regression: Any, loader: Any, make_trainer: Any) -> None:
    with pytest.raises(TypeError) as raised:
        make_trainer(callbacks=Logs(lambda it: it.print(1, fyle=2), "module")).fit(regression(), loader)
    assert "log" not in note_of(raised)


def test_a_step_that_calls_backward_itself_learns_who_does(make_trainer: Any, loader: Any, regression: Any) -> None:
    class Twice(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            loss.backward()
            return loss

    with pytest.raises(RuntimeError, match="second time") as error:
        make_trainer().fit(Twice(), loader)
    assert any("the Trainer calls backward() on the loss" in note for note in error.value.__notes__)
