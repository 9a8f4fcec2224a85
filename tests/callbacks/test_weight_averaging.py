from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint, WeightAveraging
from drivetrain.errors import ConfigurationError


def normed(validated: Any) -> Any:
    """A model with dropout and batch norm, whose statistics are buffers, in 64 bits and with Adam."""

    class Normed(validated):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.manual_seed(3)
            super().__init__(dropout=0.2)
            self.net.insert(1, nn.BatchNorm1d(8))
            self.double()
            self.seen: list[Any] = []

        def loss(self, batch: Any) -> Any:
            return super().loss([each.double() for each in batch])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.seen.append(weights_of(self))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    return Normed()


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Steps(Callback):
    """Keeps a copy of the weights after each optimizer step; it runs before the callbacks that average."""

    position = "first"

    def __init__(self) -> None:
        self.weights: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.weights):
            self.weights.append(weights_of(pl_module))


def by_hand(steps: list[dict[str, Any]], decay: float) -> dict[str, Any]:
    """The moving average in 64 bits, begun with the first of the ``steps``; integers are those of the last."""
    average = dict(steps[0])
    for step in steps[1:]:
        for name, value in step.items():
            average[name] = decay * average[name] + (1 - decay) * value if value.is_floating_point() else value
    return average


def same(one: dict[str, Any], other: dict[str, Any], rtol: float = 0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=rtol, atol=rtol, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_moving_average_is_that_of_a_loop_by_hand(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, accumulate: int
) -> None:
    module, steps = normed(validated), Steps()
    trainer = make_trainer(
        max_epochs=3, callbacks=[EMAWeightAveraging(decay=0.8), steps], accumulate_grad_batches=accumulate
    )
    trainer.fit(module, loader, loader)

    expected = by_hand(steps.weights, 0.8)
    same(weights_of(module), expected, 1e-12)
    same(module.seen[-1], expected, 1e-12)  # validation had the average, too
    assert len(steps.weights) == trainer.global_step > 1


def test_the_average_is_bit_equal_to_torchs(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    class Torchs(Steps):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if not self.weights:
                functions = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
                self.models = [AveragedModel(pl_module.net, **options) for options in (functions, {})]
            for model in self.models:
                model.update_parameters(pl_module.net)
            self.weights.append({})

    for callback, which in [(EMAWeightAveraging(decay=0.9), 0), (WeightAveraging(), 1)]:
        module, theirs = normed(validated), Torchs()
        make_trainer(max_epochs=2, callbacks=[callback, theirs]).fit(module, loader, loader)
        expected = theirs.models[which].module
        for own, other in zip(module.net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0)


@pytest.mark.parametrize("functions", [{"avg_fn": lambda a, v, n: a + v}, {"multi_avg_fn": lambda a, v, n: None}])
def test_an_averaging_function_of_ones_own(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, functions: Any
) -> None:
    module, steps = normed(validated), Steps()
    make_trainer(callbacks=[WeightAveraging(**functions), steps]).fit(module, loader, loader)
    name = "net.0.weight"
    summed = sum(each[name] for each in steps.weights) if "avg_fn" in functions else steps.weights[0][name]
    torch.testing.assert_close(weights_of(module)[name], summed)


def test_training_goes_on_with_the_trained_weights_and_buffers_may_be_left_out(
    validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    plain, steps = normed(validated), Steps()
    make_trainer(max_epochs=2, callbacks=[plain_steps := Steps()]).fit(plain, loader, loader)
    module = normed(validated)
    make_trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5, use_buffers=False), steps]).fit(
        module, loader, loader
    )
    for one, other in zip(plain_steps.weights, steps.weights, strict=True):
        same(one, other)
    assert torch.equal(module.net[1].running_mean, steps.weights[-1]["net.1.running_mean"])
    assert not torch.equal(module.net[0].weight, steps.weights[-1]["net.0.weight"])


def test_before_the_first_update_validation_has_the_trained_weights(
    validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    module, steps = normed(validated), Steps()
    trainer = make_trainer(max_epochs=2, callbacks=[EMAWeightAveraging(update_starting_at_step=6), steps])
    trainer.fit(module, loader, loader)
    first = module.seen[2]  # after two batches of the sanity check
    same(first, steps.weights[3])
    same(weights_of(module), by_hand(steps.weights[6:], 0.999), 1e-12)


def test_when_the_average_is_updated() -> None:
    ema = EMAWeightAveraging(update_every_n_steps=2, update_starting_at_step=3, update_starting_at_epoch=2)
    assert [step for step in range(8) if ema.should_update(step_idx=step)] == [4, 6]
    assert [epoch for epoch in range(4) if ema.should_update(epoch_idx=epoch)] == [2, 3]
    assert not EMAWeightAveraging().should_update(epoch_idx=5)
    assert not EMAWeightAveraging(update_every_n_steps=0).should_update(step_idx=0)
    with pytest.raises(ConfigurationError, match="decay"):
        EMAWeightAveraging(decay=2)
    with pytest.raises(ConfigurationError, match="both avg_fn and multi_avg_fn"):
        WeightAveraging(avg_fn=lambda a, v, n: a, multi_avg_fn=lambda a, v, n: None)


def test_an_update_at_the_end_of_each_epoch(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    class ByEpoch(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    module, steps = normed(validated), Steps()
    make_trainer(max_epochs=3, callbacks=[ByEpoch(), steps]).fit(module, loader, loader)
    ends = [steps.weights[index]["net.0.weight"] for index in (3, 7, 11)]
    torch.testing.assert_close(weights_of(module)["net.0.weight"], sum(ends) / 3)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class SavesAt(Callback):
    """Saves at the end of one batch, or in the middle of a validation."""

    def __init__(self, path: Path, batch: int = -1, validation: int = -1, weights_only: bool = False) -> None:
        self.path, self.batch, self.validation, self.weights_only = path, batch, validation, weights_only
        self.batches = self.validations = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches == self.batch:
            trainer.save_checkpoint(self.path, self.weights_only)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.validations += not trainer.sanity_checking
        if self.validations == self.validation:
            trainer.save_checkpoint(self.path, self.weights_only)


@pytest.mark.parametrize("place", [{"batch": 5}, {"batch": 6}, {"batch": 8}, {"validation": 6}])
@pytest.mark.filterwarnings("ignore:The checkpoint was saved inside")
def test_a_resumed_run_is_bit_equal_in_weights_and_average(
    validated: Any, data: Any, make_trainer: Any, tmp_path: Path, place: dict[str, int]
) -> None:
    def fitted(resume: Path | None = None) -> Any:
        torch.manual_seed(5)
        module, saves, steps = normed(validated), SavesAt(tmp_path / "one.ckpt", **place), Steps()
        callbacks = [EMAWeightAveraging(decay=0.7), steps, *([] if resume else [saves])]
        trainer = make_trainer(max_epochs=3, callbacks=callbacks, accumulate_grad_batches=2)
        trainer.fit(
            module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8), ckpt_path=resume
        )
        return weights_of(module), trainer.callback_metrics, steps.weights[-1]

    whole, metrics, last = fitted()
    resumed, again, last_again = fitted(tmp_path / "one.ckpt")
    same(whole, resumed)
    same(last, last_again)
    assert metrics == again


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("place", [{"batch": 6}, {"validation": 6}])
def test_a_file_holds_both_and_never_in_each_others_place(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, place: Any, weights_only: bool
) -> None:
    module, steps, path = normed(validated), Steps(), tmp_path / "one.ckpt"
    saves = SavesAt(path, weights_only=weights_only, **place)
    trainer = make_trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.7), steps, saves])
    trainer.fit(module, loader, loader)
    found = torch.load(path, weights_only=True)
    then = steps.weights[:6] if "batch" in place else steps.weights
    same(dict(found["state_dict"]), then[-1])
    same(dict(found["averaged_state_dict"]), by_hand(then, 0.7), 1e-12)

    trainer.save_checkpoint(path)  # training is over, and the module has the average
    found = torch.load(path, weights_only=True)
    same(dict(found["state_dict"]), steps.weights[-1])
    same(dict(found["averaged_state_dict"]), weights_of(module))


def test_a_checkpoint_is_evaluated_with_its_average_if_the_callback_is_there(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, caplog: Any
) -> None:
    steps, best = Steps(), ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=True)
    module = normed(validated)
    trainer = make_trainer(
        max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.7), steps, best], enable_checkpointing=True
    )
    trainer.fit(module, loader, loader)
    path = best.best_model_path
    [result] = trainer.validate(module, loader, ckpt_path=path, verbose=False)
    assert result["val_loss"] == pytest.approx(float(best.best_model_score))  # what was measured is what is loaded

    caplog.set_level("INFO", logger="drivetrain")
    other = normed(validated)
    make_trainer().test(other, loader, ckpt_path=path, verbose=False)
    same(other.seen[0], dict(torch.load(path, weights_only=True)["state_dict"]))
    assert "The checkpoint also holds averaged weights, 'averaged_state_dict'" in caplog.text


def test_an_exception_during_validation_leaves_the_trained_weights(
    validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    module, steps = normed(validated), Steps()

    def fails(batch: Any, batch_idx: int) -> None:
        if module.global_step:
            raise RuntimeError("once")

    module.validation_step = fails
    with pytest.raises(RuntimeError, match="once"):
        make_trainer(callbacks=[EMAWeightAveraging(decay=0.7), steps]).fit(module, loader, loader)
    same(weights_of(module), steps.weights[-1])


def test_lightnings_file_is_resumed(validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path) -> None:
    module, steps, path = normed(validated), Steps(), tmp_path / "one.ckpt"
    trainer = make_trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.7), steps, SavesAt(path, batch=6)])
    trainer.fit(module, loader, loader)
    file = torch.load(path, weights_only=True)
    file["current_model_state"] = file["state_dict"]
    file["state_dict"] = file.pop("averaged_state_dict")
    file["averaging_state"] = {"n_averaged": torch.tensor(6)}
    file["callbacks"] = {"EMAWeightAveraging": {"latest_update_step": 6}}
    torch.save(file, path)
    other = normed(validated)
    make_trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.7)]).fit(other, loader, loader, ckpt_path=path)
    same(weights_of(other), weights_of(module))


class Raises(Callback):
    """Raises at the end of one batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise KeyError("here")


@pytest.mark.parametrize("use_buffers", [True, False])
def test_after_an_exception_inside_a_window_buffers_are_those_of_an_undisturbed_run(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, use_buffers: bool
) -> None:
    def fitted(*callbacks: Any, ckpt_path: Path | None = None) -> dict[str, Any]:
        torch.manual_seed(7)
        module, average = normed(validated), EMAWeightAveraging(decay=0.9, use_buffers=use_buffers)
        trainer = make_trainer(
            max_epochs=2,
            accumulate_grad_batches=3,
            callbacks=[average, *callbacks],
            enable_checkpointing=bool(callbacks),
        )
        trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
        return weights_of(module)

    expected = fitted()
    with pytest.raises(KeyError, match="here"):
        fitted(OnExceptionCheckpoint(tmp_path, "stopped"), Raises())
    same(fitted(ckpt_path=tmp_path / "stopped.ckpt"), expected)


def test_a_device_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"EMAWeightAveraging\(device='nonsense'\)"):
        EMAWeightAveraging(device="nonsense")


def test_two_averages_are_refused(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    two = [EMAWeightAveraging(), WeightAveraging()]
    with pytest.raises(ConfigurationError, match="2 callbacks that average weights: EMAWeightAveraging, Weight"):
        make_trainer(max_epochs=1, callbacks=two).fit(normed(validated), loader, loader)


def test_a_fit_without_an_update_says_so(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=1, callbacks=EMAWeightAveraging(update_starting_at_step=1000))
    with pytest.warns(UserWarning, match="EMAWeightAveraging has made no update in"):
        trainer.fit(normed(validated), loader, loader)


@pytest.mark.parametrize("name", ["update_every_n_steps", "update_starting_at_step", "update_starting_at_epoch"])
@pytest.mark.parametrize("value", [-1, 1.5, "a"])
def test_ema_refuses_what_is_no_count(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        EMAWeightAveraging(**{name: value})
