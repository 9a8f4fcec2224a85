"""What programs forget: the loss, train mode, samples, the closure, an argument. Each is said before it costs a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from drivetrain import Callback, LightningModule, WeightedLoss
from drivetrain.advice.losses import returns_nothing
from drivetrain.errors import ConfigurationError
from drivetrain.precision import HalfPrecision
from drivetrain.testing import FakeAccelerator

# ---- slow loaders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: Any) -> Callable[[str], list[str]]:
    """The lines of the log that contain a text."""
    caplog.set_level("INFO", logger="drivetrain")
    return lambda text: [each.getMessage() for each in caplog.records if text in each.getMessage()]


@pytest.mark.parametrize(("workers", "recorded", "count"), [(1, True, 1), (0, True, 0), (1, False, 0)])
def test_workers_without_pinned_memory_are_one_line(
    make_trainer: Any, regression: Any, data: Any, lines: Any, workers: int, recorded: bool, count: int
) -> None:
    """Without a recording, the simulated device declares no pinned memory."""
    batches = DataLoader(data, 8, num_workers=workers)
    with FakeAccelerator.recording() if recorded else nullcontext():
        make_trainer(accelerator="fake", devices=1, max_epochs=2).fit(regression(), batches)
    assert len(lines("num_workers=1 and pin_memory=False")) == count


@pytest.mark.parametrize(
    ("epochs", "part", "persistent", "count"),
    [(4, 0.0, False, 1), (1, 0.0, False, 0), (4, 2.0, False, 0), (4, 0.0, True, 0)],
    ids=["long", "one-epoch", "short", "persistent"],
)
def test_a_long_start_of_workers_in_each_epoch_is_one_line(
    make_trainer: Any, regression: Any, data: Any, lines: Any, monkeypatch: pytest.MonkeyPatch,
    epochs: int, part: float, persistent: bool, count: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("drivetrain.advice.data._LONG_WAIT", part)
    monkeypatch.setattr("drivetrain.advice.data._LONG_WAIT_S", 0.0)
    batches = DataLoader(data, 8, num_workers=1, persistent_workers=persistent)
    make_trainer(max_epochs=epochs).fit(regression(), batches)
    found = lines(
        "num_workers=1, starts its workers again in each epoch. Write DataLoader(..., persistent_workers=True)"
    )
    assert len(found) == count


# ---- no loss ---------------------------------------------------------------------------------------------------------


class Forgets(LightningModule):
    """A step without a ``return``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SkipsUntil(Forgets):
    """A step that returns None before its call number ``first``."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.layer(batch[0]).mean() if self.steps >= self.first else None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_without_a_return_is_an_error_after_the_first_window(
    loader: Any, make_trainer: Any, accumulate: int
) -> None:
    model = Forgets()
    with pytest.raises(ConfigurationError, match=r"Forgets\.training_step has no return statement .* `return loss`"):
        make_trainer(accumulate_grad_batches=accumulate).fit(model, loader)
    assert model.steps == accumulate


def test_a_step_of_which_all_batches_of_the_first_window_are_skipped_is_warned_of_once(
    loader: Any, make_trainer: Any
) -> None:
    with pytest.warns(UserWarning, match="None for every batch of the first") as caught:
        make_trainer(max_epochs=2).fit(SkipsUntil(6), loader)
    assert len(caught) == 1


def test_skipping_later_batches_or_a_part_of_the_first_window_is_fine(loader: Any, make_trainer: Any) -> None:
    class SkipsLater(Forgets):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean() if batch_idx == 0 else None

    make_trainer(max_epochs=2).fit(SkipsLater(), loader)
    make_trainer(accumulate_grad_batches=2).fit(SkipsUntil(2), loader)


def test_a_run_without_any_loss_ends_at_max_steps_windows(loader: Any, make_trainer: Any) -> None:
    model = SkipsUntil(float("inf"))
    trainer = make_trainer(max_epochs=-1, max_steps=6)
    never = pytest.raises(ConfigurationError, match="6 times .* max_steps=6 is never reached")
    with pytest.warns(UserWarning, match="None for every batch"), never:
        trainer.fit(model, loader)
    assert (model.steps, trainer.global_step) == (6, 0)


def test_a_loss_in_time_lets_max_steps_count_steps(loader: Any, make_trainer: Any) -> None:
    model = SkipsUntil(6)
    trainer = make_trainer(max_epochs=-1, max_steps=6)
    with pytest.warns(UserWarning, match="None for every batch"):
        trainer.fit(model, loader)
    assert (model.steps, trainer.global_step) == (11, 6)


@pytest.mark.parametrize("skipped", [1, 2])
def test_one_step_waits_for_a_loss_where_the_first_batches_are_skipped(
    loader: Any, make_trainer: Any, skipped: int
) -> None:
    model = SkipsUntil(skipped + 1)
    trainer = make_trainer(max_epochs=-1, max_steps=1)
    with pytest.warns(UserWarning, match="None for every batch of the first"):
        trainer.fit(model, loader)
    assert trainer.global_step == 1


class StopsAt(Forgets):
    """From a step on it has no loss any more, or skips its epochs; ``until``: for so many epochs."""

    def __init__(self, step: int, until: float = float("inf"), skips_epochs: bool = False) -> None:
        super().__init__()
        self.step, self.until, self.skips_epochs = step, until, skips_epochs

    @property
    def is_over(self) -> bool:
        return self.global_step >= self.step and self.current_epoch < self.until

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.skips_epochs and self.is_over else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.is_over else self.layer(batch[0]).mean()


@pytest.mark.parametrize("skips_epochs", [False, True])
def test_a_run_whose_losses_stop_coming_ends_where_only_max_steps_would_end_it(
    loader: Any, make_trainer: Any, skips_epochs: bool
) -> None:
    trainer = make_trainer(max_epochs=-1, max_steps=6)
    with pytest.raises(ConfigurationError, match="last 100 windows .* stays at 3, and max_steps=6.* pass max_epochs"):
        trainer.fit(StopsAt(3, skips_epochs=skips_epochs), loader)
    assert trainer.global_step == 3


def test_it_goes_on_where_losses_come_again_or_epochs_end_it(loader: Any, make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=-1, max_steps=6)
    trainer.fit(StopsAt(3, until=20), loader)
    assert trainer.global_step == 6
    trainer = make_trainer(max_epochs=120, max_steps=6)
    trainer.fit(StopsAt(3), loader)
    assert (trainer.global_step, trainer.current_epoch) == (3, 120)


def test_without_optimizers_and_under_manual_optimization_no_loss_is_expected(loader: Any, make_trainer: Any) -> None:
    class Reads(Forgets):
        def configure_optimizers(self) -> Any:
            return None

    with pytest.warns(UserWarning, match="no optimizer"):
        make_trainer().fit(Reads(), loader)

    class Manual(Forgets):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step()

    make_trainer().fit(Manual(), loader)


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any) -> None:
        function(*args)

    return inner


def _nested(self: Any, batch: Any) -> None:
    def loss() -> Any:
        return batch

    loss()


def _bare(self: Any, batch: Any) -> Any:
    if batch is None:
        return None
    return


def _returns(self: Any, batch: Any) -> Any:
    with torch.no_grad():
        for _ in range(2):
            return batch


def _yields(self: Any, batch: Any) -> Any:
    yield batch


@pytest.mark.parametrize(
    ("function", "nothing"),
    [
        (_nested, True),
        (_bare, True),
        (_wrapped(_returns), True),
        (_returns, False),
        (_yields, False),
        (lambda self, batch: batch, False),
        (len, False),
        (eval("lambda self, batch: None"), False),
    ],
)
def test_what_can_be_told_from_the_source(function: Any, nothing: bool) -> None:
    assert returns_nothing(function) is nothing


# ---- eval mode -------------------------------------------------------------------------------------------------------


def _modes(make_trainer: Any, loader: Any, prepare: Callable[[Any], Any], *callbacks: Callback) -> list[str]:
    class Net(Forgets):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.teacher = nn.Dropout(), nn.Sequential(nn.Linear(4, 1), nn.Dropout())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.drop(self.layer(batch[0])).mean()

    model = Net()
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callbacks=list(callbacks)).fit(model, loader)
    return [str(each.message) for each in caught]


def test_a_model_in_eval_mode_is_warned_of_with_its_count(make_trainer: Any, loader: Any) -> None:
    [message] = _modes(make_trainer, loader, lambda model: model.eval())
    assert message.startswith("Modules in eval mode: 6 of the 6 in Net (the model itself among them)")
    [message] = _modes(make_trainer, loader, lambda model: model.drop.eval())
    assert message.startswith("Modules in eval mode: 1 of the 6 in Net (for example 'drop')")
    assert "model.train()" in message


def test_a_frozen_part_in_eval_mode_is_meant(make_trainer: Any, loader: Any) -> None:
    assert _modes(make_trainer, loader, lambda model: model.teacher.eval().requires_grad_(False)) == []
    assert _modes(make_trainer, loader, lambda model: None) == []


def test_modes_that_are_set_in_on_train_start_count(make_trainer: Any, loader: Any) -> None:
    class Sets(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.train()

    assert _modes(make_trainer, loader, lambda model: model.eval(), Sets()) == []


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_a_parameter_that_no_checkpoint_contains_is_warned_of(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Outside(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.outside = [nn.Parameter(torch.ones(2, 3))]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), *self.outside], lr=0.1)

    with pytest.warns(UserWarning, match=r"optimizers have 1 parameters .* shape \(2, 3\).* do not contain"):
        make_trainer().fit(Outside(), loader)


class Layers(Forgets):
    """``chosen`` returns the parameters that its optimizer gets."""

    def __init__(self, chosen: Callable[[Any], Any]) -> None:
        super().__init__()
        self.head, self.chosen = nn.Linear(1, 1), chosen

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.layer(batch[0])).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.chosen(self), lr=0.1)


def test_parameters_that_are_in_no_optimizer_are_one_line(make_trainer: Any, loader: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", "drivetrain"):
        make_trainer().fit(Layers(lambda model: model.head.parameters()), loader)
        assert "2 of the 4 parameters of Layers that require a gradient are in no optimizer" in caplog.text
        caplog.clear()
        frozen = Layers(lambda model: model.head.parameters())
        frozen.layer.requires_grad_(False)
        make_trainer().fit(frozen, loader)
        make_trainer().fit(Layers(lambda model: model.parameters()), loader)
    assert "no optimizer" not in caplog.text


def test_optimizers_that_have_no_parameter_of_the_module_are_warned_of(make_trainer: Any, loader: Any) -> None:
    other = nn.Linear(4, 1)
    model = Layers(lambda _: other.parameters())
    no_parameter = pytest.warns(UserWarning, match="No optimizer has a parameter of Layers")
    with no_parameter, pytest.warns(UserWarning, match="2 parameters that are in no module"):
        make_trainer().fit(model, loader)


def test_optimizers_with_frozen_parameters_only_are_warned_of(make_trainer: Any, loader: Any) -> None:
    model = Layers(lambda model: model.layer.parameters())
    model.layer.requires_grad_(False)
    with pytest.warns(UserWarning, match="The 2 parameters of Layers that the optimizers have are all frozen"):
        make_trainer().fit(model, loader)


def test_an_eps_that_is_zero_in_float16_is_warned_of(make_trainer: Any, loader: Any) -> None:
    class Half(Layers):
        def __init__(self, eps: float) -> None:
            super().__init__(lambda model: model.parameters())
            self.eps = eps

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=self.eps)

    with pytest.warns(UserWarning, match=r"AdamW\(eps=1e-08\): in float16.* Write AdamW\(\.\.\., eps=1e-4\)"):
        make_trainer(precision="16-true").fit(Half(1e-8), loader)
    make_trainer(precision="16-true").fit(Half(1e-4), loader)
    make_trainer(precision="16-mixed").fit(Half(1e-8), loader)

    class Masters(HalfPrecision):
        """A precision that may step copies in 32 bits: nobody else knows which eps is zero."""

        def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
            return closure()

    make_trainer(plugins=[Masters("16-true")]).fit(Half(1e-8), loader)


def test_layers_in_a_plain_list_are_warned_of(make_trainer: Any, loader: Any) -> None:
    class Hides(Layers):
        def __init__(self, trains: bool) -> None:
            super().__init__(lambda model: model.parameters())
            self.blocks = [nn.Linear(1, 1).requires_grad_(trains)]
            self.same = {"head": self.head}  # is a submodule, too

    with pytest.warns(UserWarning, match=r"Hides has layers in the plain list 'blocks'.* Write nn\.ModuleList"):
        make_trainer().fit(Hides(True), loader)
    make_trainer().fit(Hides(False), loader)


def test_a_model_of_which_everything_is_frozen_is_an_error_that_says_so(make_trainer: Any, loader: Any) -> None:
    model = Layers(lambda model: model.parameters()).requires_grad_(False)
    with pytest.raises(ConfigurationError, match="No parameter of Layers requires a gradient"):
        make_trainer().fit(model, loader)


# ---- steps by hand ---------------------------------------------------------------------------------------------------


class ByHand(Forgets):
    """Optimizes by hand: ``step`` gets the module, once for each batch."""

    automatic_optimization = False

    def __init__(self, step: Callable[[Any], Any]) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.manual_backward(self.layer(batch[0]).mean())
        self.step(self)


@pytest.mark.filterwarnings("ignore:The gradients of two optimizer steps")
def test_a_module_that_steps_none_of_its_optimizers_is_warned_of(make_trainer: Any, loader: Any) -> None:
    def raw(model: Any) -> None:
        model.trainer.optimizers[0].step()

    for step in (raw, lambda model: None):
        with pytest.warns(UserWarning, match="ByHand optimizes by hand, .* stepped none of the optimizers") as caught:
            make_trainer(max_epochs=4).fit(ByHand(step), loader)
        assert len([each for each in caught if "by hand, and in this epoch" in str(each.message)]) == 1


def test_with_max_steps_alone_a_module_that_never_steps_is_an_error(make_trainer: Any, loader: Any) -> None:
    model = ByHand(lambda model: None)
    with pytest.raises(ConfigurationError, match="max_steps=3 would never be reached"):
        make_trainer(max_epochs=-1, max_steps=3).fit(model, loader)
    assert model.steps == 8  # two epochs: it might have accumulated over one


@pytest.mark.filterwarnings("ignore:The gradients of two optimizer steps")
def test_a_module_that_steps_or_accumulates_over_an_epoch_is_fine(make_trainer: Any, loader: Any) -> None:
    make_trainer(max_epochs=2).fit(ByHand(lambda model: model.optimizers().step()), loader)
    make_trainer(max_epochs=2).fit(ByHand(lambda m: m.optimizers().step() if m.steps % 6 == 0 else None), loader)


def test_stepping_an_optimizer_by_hand_under_automatic_optimization_is_an_error(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Both(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.optimizers().step()
            return super().training_step(batch, batch_idx)

    model = Both()
    with pytest.raises(ConfigurationError, match="called under automatic optimization.* Leave the call out"):
        make_trainer().fit(model, loader)
    model.optimizers().step()  # after the fit it is the user's


# ---- samples ---------------------------------------------------------------------------------------------------------


class _Nothing(SequentialSampler):
    def __len__(self) -> int:
        return 0


ROWS = TensorDataset(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("loader", "message", "cure"),
    [
        (
            DataLoader(TensorDataset(torch.ones(0, 4)), batch_size=4),
            "DataLoader over the TensorDataset of 0 samples, with batch_size=4 and drop_last=False",
            "Pass a dataset with samples.",
        ),
        (
            DataLoader(ROWS, batch_size=4, drop_last=True),
            "TensorDataset of 3 samples, with batch_size=4 and drop_last=True",
            "Write a smaller batch_size, or drop_last=False.",
        ),
        (DataLoader(ROWS, sampler=_Nothing(ROWS)), "TensorDataset of 3 samples", "a _Nothing, draws none"),
        ({"a": DataLoader([]), "b": DataLoader([])}, "a: the DataLoader over the list of 0 samples", "b: the Data"),
    ],
)
def test_a_training_loader_without_a_batch_is_an_error(
    make_trainer: Any, regression: Any, loader: Any, message: str, cure: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_trainer().fit(regression(), loader)
    assert "nothing to train on" in str(error.value)
    assert message in str(error.value)
    assert cure in str(error.value)


def test_an_own_loader_of_length_zero_is_an_error(make_trainer: Any, regression: Any, ready: Any) -> None:
    with pytest.raises(ConfigurationError, match="the Ready has the length 0. Pass a loader with at least one batch"):
        make_trainer().fit(regression(), ready([]))


def test_no_batches_on_purpose_are_no_error(make_trainer: Any, regression: Any) -> None:
    make_trainer(limit_train_batches=0).fit(regression(), DataLoader([]))
    make_trainer(max_epochs=0).fit(regression(), DataLoader([]))


# ---- the closure, an output, an argument -----------------------------------------------------------------------------


def test_an_optimizer_step_that_never_calls_its_closure_is_an_error(
    make_trainer: Any, regression: Any, loader: Any
) -> None:
    class Drops(regression):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step()

    with pytest.raises(ConfigurationError, match=r"Drops\.optimizer_step has not called the closure .*closure=closure"):
        make_trainer().fit(Drops(), loader)


def test_an_optimizer_that_never_calls_its_closure_is_named(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Ignores(torch.optim.LBFGS):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            pass

    class Model(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return Ignores(self.parameters())

    with pytest.raises(ConfigurationError, match=r"Ignores\.step has not called the closure"):
        make_trainer().fit(Model(), loader)


@pytest.mark.parametrize("output", [5, "loss", [1.0]])
def test_a_manual_step_that_returns_something_else_is_an_error(make_trainer: Any, loader: Any, output: Any) -> None:
    class Manual(Forgets):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(ConfigurationError, match="under manual optimization. Return a tensor, a dictionary, or None"):
        make_trainer().fit(Manual(), loader)


def test_a_manual_step_may_return_a_dictionary_without_a_loss(make_trainer: Any, loader: Any) -> None:
    seen: list[Any] = []

    class Manual(Forgets):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.optimizers().step()
            return {"extra": torch.ones(1, requires_grad=True) * 2}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    make_trainer(limit_train_batches=1).fit(Manual(), loader)
    assert list(seen[0]) == ["extra"]
    assert not seen[0]["extra"].requires_grad


class TwoLoaders(Forgets):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    test_step = validation_step


class ModuleLacks(TwoLoaders):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...  # type: ignore[override]


class CallbackLacks(Callback):
    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_a_hook_that_lacks_the_index_of_the_loader_is_an_error_where_there_are_several(
    make_trainer: Any, loader: Any, num_sanity_val_steps: int
) -> None:
    two = [loader, loader]
    given = {"num_sanity_val_steps": num_sanity_val_steps}
    with pytest.raises(ConfigurationError) as error:
        make_trainer(**given).fit(ModuleLacks(), loader, two)
    assert "ModuleLacks.on_validation_batch_end must take dataloader_idx" in str(error.value)
    assert "Write def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0)." in str(error.value)
    with pytest.raises(ConfigurationError, match=r"CallbackLacks\.on_validation_batch_start must take dataloader_idx"):
        make_trainer(callbacks=[CallbackLacks()], **given).fit(TwoLoaders(), loader, two)
    make_trainer(callbacks=[CallbackLacks()], **given).fit(ModuleLacks(), loader, loader)  # one loader has no index
    make_trainer(callbacks=[CallbackLacks()]).test(ModuleLacks(), two, verbose=False)  # not these hooks


class ModuleRequires(TwoLoaders):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...  # type: ignore[override]


class CallbackRequires(Callback):
    def on_test_batch_start(  # type: ignore[override]
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None: ...


def test_a_hook_that_requires_the_index_of_the_loader_is_an_error_where_there_is_one(
    make_trainer: Any, loader: Any
) -> None:
    with pytest.raises(RuntimeError) as error:
        make_trainer().fit(ModuleRequires(), loader, loader)
    assert "ModuleRequires.on_validation_batch_end requires dataloader_idx, and there is one loader" in str(error.value)
    assert "Write def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0)." in str(error.value)
    with pytest.raises(ConfigurationError, match=r"CallbackRequires\.on_test_batch_start requires dataloader_idx"):
        make_trainer(callbacks=CallbackRequires()).test(TwoLoaders(), loader, verbose=False)
    make_trainer().fit(ModuleRequires(), loader, [loader, loader])


# ---- what has no effect, or no result --------------------------------------------------------------------------------


class Weightless(Forgets):
    """A step that returns weights of 0 before its call number ``first``."""

    def __init__(self, first: float = float("inf")) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return WeightedLoss(self.layer(batch[0]).mean(), 0 if self.steps < self.first else 8)


def test_weights_of_zero_are_warned_of_once(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="a WeightedLoss of weight 0 for every batch of the first") as record:
        trainer.fit(Weightless(), loader)
    assert len(record) == 1
    assert trainer.global_step == 0
    with (
        pytest.warns(UserWarning, match="weight 0"),
        pytest.raises(ConfigurationError, match=r"a WeightedLoss of weight 0 .* max_steps=3 is never reached"),
    ):
        make_trainer(max_epochs=-1, max_steps=3).fit(Weightless(), loader)


def test_a_weight_of_zero_later_on_is_a_skipped_batch(make_trainer: Any, loader: Any) -> None:
    class Later(Weightless):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return WeightedLoss(self.layer(batch[0]).mean(), 8 if batch_idx == 0 else 0)

    trainer = make_trainer()
    trainer.fit(Later(), loader)
    assert trainer.global_step == 1


class Validates(Forgets):
    """Logs ``value`` in training and validation."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_value", self.value, prog_bar=True)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_value", self.value)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"max_epochs": 2, "check_val_every_n_epoch": 3}, "check_val_every_n_epoch=3 is more than max_epochs=2"),
        (
            {"max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 9},
            "val_check_interval=9 is more than the 8 batches of 2 epochs",
        ),
    ],
)
def test_a_fit_that_never_validates_is_warned_of(make_trainer: Any, loader: Any, given: Any, cause: str) -> None:
    with pytest.warns(UserWarning, match=f"This fit never validates: {cause}"):
        make_trainer(**given).fit(Validates(), loader, loader)


@pytest.mark.parametrize(
    "given",
    [
        {"max_epochs": 3, "check_val_every_n_epoch": 3},
        {"max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 8},
        {"max_epochs": 2, "check_val_every_n_epoch": 3, "limit_val_batches": 0},
    ],
)
def test_a_fit_that_validates_or_is_not_to_is_not_warned_of(make_trainer: Any, loader: Any, given: Any) -> None:
    make_trainer(**given).fit(Validates(), loader, loader)


@pytest.mark.parametrize(
    ("given", "batches"),
    [
        ({"accumulate_grad_batches": 4}, None),
        ({"accumulate_grad_batches": 5}, "4 batches, fewer than accumulate_grad_batches=5"),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 1}, "1 batch, fewer than accumulate_grad_batches=2"),
        ({"accumulate_grad_batches": 2, "fast_dev_run": True}, None),
    ],
)
def test_an_epoch_shorter_than_a_window_is_said(
    make_trainer: Any, loader: Any, given: dict[str, Any], batches: str | None, caplog: Any
) -> None:
    with caplog.at_level("INFO", logger="drivetrain"):
        make_trainer(**given).fit(SkipsUntil(0), loader)
    assert ("fewer than accumulate_grad_batches" in caplog.text) is (batches is not None)
    assert f"An epoch has {batches}" in caplog.text or batches is None


def test_an_iterator_that_validates_once_is_warned_of(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match=r"The validation loader, a \w+, gave no batch.*used up by its first pass"):
        trainer.fit(Validates(), loader, iter(list(loader)))


def test_a_value_that_is_nan_is_said_once(make_trainer: Any, loader: Any) -> None:
    with pytest.warns(UserWarning, match="train_value: logged as nan at step 0") as record:
        make_trainer(max_epochs=3, log_every_n_steps=1).fit(Validates(float("nan")), loader, loader)
    assert len(record) == 1


class Predicts(Forgets):
    """A ``predict_step`` that returns nothing unless asked."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]) if self.returns else None


class Writes(Callback):
    def on_predict_batch_end(self, *args: Any) -> None: ...


def test_predictions_of_none_are_warned_of(make_trainer: Any, loader: Any) -> None:
    with pytest.warns(UserWarning, match=r"Predicts\.predict_step returned None for every batch"):
        make_trainer().predict(Predicts(False), loader)
    make_trainer().predict(Predicts(False), loader, return_predictions=False)
    make_trainer(callbacks=Writes()).predict(Predicts(False), loader)


def test_predictions_in_a_random_order_are_warned_of(make_trainer: Any, data: Any) -> None:
    with pytest.warns(UserWarning, match="predictions shuffles"):
        make_trainer().predict(Predicts(True), DataLoader(data, batch_size=8, shuffle=True))


def test_loaders_that_look_swapped_are_warned_of(make_trainer: Any, loader: Any, data: Any) -> None:
    shuffled = DataLoader(data, batch_size=8, shuffle=True)
    with pytest.warns(UserWarning, match="The validation loader shuffles, and the training loader does not"):
        make_trainer().fit(Validates(), loader, shuffled)
    make_trainer().fit(Validates(), shuffled, loader)
    make_trainer().fit(Validates(), shuffled, shuffled)


def test_parameters_of_two_optimizers_are_warned_of(make_trainer: Any, loader: Any) -> None:
    class Doubled(Forgets):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.warns(UserWarning, match="Two optimizers of Doubled have the same parameters"):
        make_trainer().fit(Doubled(), loader)


@pytest.mark.parametrize(("interval", "warns"), [("epoch", True), ("step", False)])
def test_a_schedule_of_steps_that_steps_once_an_epoch_is_warned_of(
    make_trainer: Any, loader: Any, interval: str, warns: bool
) -> None:
    class Cycles(Validates):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2).fit(Cycles(), loader, loader)
    assert (
        len([each for each in record if "OneCycleLR(total_steps=8) steps once an epoch" in str(each.message)]) == warns
    )


class Anneals(Forgets):
    """Returns the scheduler that it is given, with its interval and frequency."""

    def __init__(self, make: Any, **given: Any) -> None:
        super().__init__()
        self.make, self.given = make, given

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), **self.given}]


def cosine(t_max: int) -> Any:
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, t_max)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Anneals(cosine(12)), r"CosineAnnealingLR\(T_max=12\) steps once an epoch, 3 times in this fit"),
        (Anneals(steps, frequency=4), 'StepLR never steps in this fit: "frequency": 4 is more than its 3 epochs'),
        (Anneals(steps, interval="step", frequency=13), '"frequency": 13 is more than its 12 steps'),
    ],
)
def test_schedules_of_another_length_than_the_fit_are_warned_of(
    make_trainer: Any, loader: Any, model: Any, message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        make_trainer(max_epochs=3).fit(model, loader)


@pytest.mark.parametrize(
    "model",
    [
        Anneals(cosine(3)), Anneals(cosine(12), interval="step"),
        Anneals(cosine(5)), Anneals(cosine(4), interval="step"), Anneals(cosine(3), interval="step"),
        Anneals(steps, frequency=3), Anneals(steps, interval="step", frequency=12),
    ],
)  # fmt: skip
def test_schedules_that_fit_are_not_warned_of(make_trainer: Any, loader: Any, model: Any) -> None:
    make_trainer(max_epochs=3).fit(model, loader)
