"""The note below a traceback: which hook, batch, epoch and rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Callback, LightningModule
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
        ("training_step", 6, "In Net.training_step, batch 2 of epoch 1 (counted from 0), on rank 0."),
        ("setup", 0, "In Net.setup, while fit was being set up, on rank 0."),
        ("on_train_start", 0, "In Net.on_train_start, at the start of training, on rank 0."),
        (
            "on_train_epoch_start",
            1,
            "In Net.on_train_epoch_start, at the start of epoch 1 (counted from 0), on rank 0.",
        ),
        ("on_train_batch_end", 1, "In Net.on_train_batch_end, batch 1 of epoch 0 (counted from 0), on rank 0."),
        ("on_train_epoch_end", 1, "In Net.on_train_epoch_end, at the end of epoch 1 (counted from 0), on rank 0."),
        ("on_train_end", 0, "In Net.on_train_end, at the end of training, on rank 0."),
        (
            "validation_step",
            3,
            "In Net.validation_step, batch 1 of the validation in epoch 0 (counted from 0), on rank 0.",
        ),
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
    assert note_of(error) == "In Reads.on_test_batch_start, batch 0 of the test (counted from 0), on rank 0."


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
    assert note_of(error) == "In the backward pass, batch 0 of epoch 0 (counted from 0), on rank 0."


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


def test_loaders_in_a_list_are_the_cause_of_a_batch_that_is_a_list(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    with pytest.raises(TypeError, match="not list") as error:
        make_trainer().fit(regression(), [loader, loader])
    cure, place = error.value.__notes__
    assert "a list of 2 loaders" in cure
    assert cure.endswith("write trainer.fit(model, train_loader, val_loader).")
    assert place.startswith("In Regression.training_step, batch 0")


def test_a_list_that_the_step_makes_itself_gets_no_note_on_loaders(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Wrong(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss([[batch[0]], batch[1]])

    with pytest.raises(TypeError, match="not list") as error:
        make_trainer().fit(Wrong(), loader)
    assert note_of(error).startswith("In Wrong.training_step")


LABELS = torch.ones(4, dtype=torch.int64)
FAILING: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda x: cross_entropy(x, LABELS.float()), "write y.long()."),
    (lambda x: cross_entropy(x, LABELS[:, None]), "write y.squeeze(1)"),
    (lambda x: cross_entropy(x, LABELS + 4), "counted from 0"),
    (lambda x: binary_cross_entropy_with_logits(x[:, 0], LABELS), "write y.float()"),
    (lambda x: binary_cross_entropy(x + 2, x.detach()), "write binary_cross_entropy_with_logits."),
    (lambda x: torch.optim.SGD(torch.nn.Linear(1, 1).parameters), "write self.parameters()."),  # type: ignore[arg-type]
    (lambda x: torch.optim.SGD([]), "torch.nn.ModuleList"),
]


@pytest.mark.parametrize(("fail", "cure"), FAILING, ids=[cure for _, cure in FAILING])
def test_errors_of_torch_that_newcomers_meet_are_answered(
    make_trainer: Any, regression: Any, loader: Any, fail: Callable[[torch.Tensor], Any], cure: str
) -> None:
    class Wrong(regression):  # type: ignore[misc]
        def training_step(self, batch: Any) -> Any:
            fail(batch[0][:4])

    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as error:  # of torch
        make_trainer().fit(Wrong(), loader)
    first, place = error.value.__notes__
    assert cure in first
    assert place.startswith("In test_error_notes.") or "training_step" in place or "<lambda>" in place


@pytest.mark.parametrize(("second", "noted"), [("y", True), ("batch_idx", False), ("i", False), ("_", False)])
def test_a_step_whose_second_argument_is_a_target_learns_that_it_is_an_index(
    make_trainer: Any, regression: Any, loader: Any, second: str, noted: bool
) -> None:
    names: dict[str, Any] = {}
    exec(f"def training_step(self, x, {second}): return self.loss([x, {second}])", names)
    with pytest.raises(TypeError, match="not list") as error:
        make_trainer().fit(type("Wrong", (regression,), {"training_step": names["training_step"]})(), loader)
    assert ("Write def training_step(self, batch), and x, y = batch in it." in error.value.__notes__[0]) == noted


@pytest.mark.parametrize(
    ("batch", "said", "entry"), [([0, 1], "a list of 2", "0"), ({"x": 0, "y": 1}, "a dict of 2", "'x'")]
)
def test_a_module_without_predict_step_learns_what_forward_was_given(
    make_trainer: Any, regression: Any, batch: Any, said: str, entry: str
) -> None:
    class Net(regression):  # type: ignore[misc]
        predict_step = LightningModule.predict_step

        def forward(self, x: Any) -> Any:
            return x @ torch.ones(4, 1)

    with pytest.raises(TypeError) as error:
        make_trainer().predict(Net(), DataLoader([batch], collate_fn=lambda samples: samples[0]))
    note = error.value.__notes__[0]
    assert note.startswith(f"Net has no predict_step, so predict calls forward with the whole batch, {said}. Define it")
    assert note.endswith(f"return self(batch[{entry}]).")


@pytest.mark.parametrize("layer", [torch.nn.Linear(4, 1), torch.nn.Conv1d(4, 1, 1), torch.nn.GRU(4, 1)])
def test_data_in_float64_are_named_where_they_meet_weights_in_float32(
    make_trainer: Any, regression: Any, layer: torch.nn.Module
) -> None:
    class Net(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch[..., None] if isinstance(layer, torch.nn.Conv1d) else batch)

    with pytest.raises((RuntimeError, ValueError)) as error:
        make_trainer().fit(Net(), DataLoader([torch.ones(4, dtype=torch.float64)]))
    assert error.value.__notes__[0].endswith("write torch.as_tensor(array, dtype=torch.float32).")


def test_another_error_about_types_gets_no_note_about_float64(make_trainer: Any, regression: Any) -> None:
    class Net(regression):  # type: ignore[misc]
        def training_step(self, batch: Any) -> Any:
            return torch.ones(2, 4) @ batch.long()[0]

    with pytest.raises(RuntimeError, match="(?i)float.*long|long.*float") as error:
        make_trainer().fit(Net(), DataLoader(torch.ones(8, 4)))
    assert len(error.value.__notes__) == 1


@pytest.mark.parametrize("doubles", [{"x"}, {"x", "y"}, set()])
def test_arrays_in_64_bits_are_named_with_the_cure(make_trainer: Any, doubles: set[str]) -> None:
    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    widths = {"x": 4 if doubles else 5, "y": 1}  # without doubles, another error
    x, y = (torch.ones(8, width, dtype=torch.float64 if name in doubles else None) for name, width in widths.items())
    with pytest.raises(RuntimeError) as error:
        make_trainer().fit(Net(), DataLoader(TensorDataset(x, y), 4))
    assert any("dtype=torch.float32" in note for note in error.value.__notes__) == bool(doubles)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_at_its_end_is_named_and_told_how_many_steps_there_are(
    make_trainer: Any, regression: Any, loader: Any, interval: str
) -> None:
    class Net(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    with pytest.raises(ValueError, match="Tried to step") as error:
        make_trainer(max_epochs=4).fit(Net(), loader)
    cure, place = error.value.__notes__
    assert "total_steps=self.trainer.estimated_stepping_batches" in cure
    assert place.startswith("In OneCycleLR.step, batch ")


@pytest.mark.parametrize("way", ["toggle_optimizer", "toggle_model"])
def test_a_loss_of_parameters_that_are_toggled_off_is_answered(
    make_trainer: Any, regression: Any, loader: Any, way: str
) -> None:
    class Swaps(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(4, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net, self.other)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()[0]
            if way == "toggle_model":
                with optimizer.toggle_model():
                    self.manual_backward(self.other(batch[0]).sum())
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.other(batch[0]).sum())

    with pytest.raises(RuntimeError, match="does not require grad") as error:
        make_trainer().fit(Swaps(), loader)
    start = "toggle_optimizer has switched off requires_grad of all parameters but those of optimizer 0 of self.optim"
    if way == "toggle_model":
        start = (
            "The loss depends on no parameter that requires a gradient. toggle_model and toggle_optimizer switch off"
        )
    assert error.value.__notes__[0].startswith(start)


def test_parameters_in_float16_under_16_mixed_are_answered(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Half(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([each.half() for each in batch], batch_idx)

    with pytest.raises(ValueError, match="unscale FP16") as error:
        make_trainer(precision="16-mixed").fit(Half().half(), loader)
    assert 'precision="16-mixed" needs parameters in float32' in error.value.__notes__[0]
