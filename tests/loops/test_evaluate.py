"""Validation and testing: what they return, and what they leave untouched."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers.dummy import DummyLogger

ONE_IN_EVAL_MODE = pytest.mark.filterwarnings("ignore:Modules in eval mode")


def test_results_hold_one_dictionary_per_loader_with_exact_means(validated: Any, data: Any, make_trainer: Any) -> None:
    model = validated()
    whole = DataLoader(data, batch_size=32)
    uneven = DataLoader(data, batch_size=12)
    with torch.no_grad():
        expected = model.loss(next(iter(whole))).item()
    [one] = make_trainer().validate(model, uneven, verbose=False)
    assert one == {"val_loss": pytest.approx(expected, rel=1e-6)}
    [two] = make_trainer().test(model, [uneven], verbose=False)
    assert two == {"test_loss": pytest.approx(expected, rel=1e-6)}


def test_t39_values_of_epoch_hooks_are_in_every_dictionary(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", float(dataloader_idx))

        def on_test_epoch_end(self) -> None:
            self.log("shared", 5.0)

    results = make_trainer().test(Logs(), {"a": loader, "b": loader}, verbose=False)
    assert results == [{"x/dataloader_idx_0": 0.0, "shared": 5.0}, {"x/dataloader_idx_1": 1.0, "shared": 5.0}]


def test_t39_dataloader_idx_must_fit_the_number_of_loaders(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Without(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    class With(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            pass

    with pytest.raises(ConfigurationError, match="must take dataloader_idx, because there are several loaders"):
        make_trainer().validate(Without(), [loader, loader], verbose=False)
    with pytest.raises(ConfigurationError, match="takes dataloader_idx, but there is one loader"):
        make_trainer().validate(With(), loader, verbose=False)


def test_t39_batch_idx_restarts_and_hooks_learn_the_loader(regression: Any, data: Any, make_trainer: Any) -> None:
    seen: list[tuple[int, int]] = []

    class Watches(Callback):
        def on_test_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            seen.append((dataloader_idx, batch_idx))
            assert outputs == batch_idx

    class Returns(regression):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int:
            return batch_idx

    loaders = [DataLoader(data, batch_size=16), DataLoader(data, batch_size=11)]
    make_trainer(callbacks=[Watches()]).test(Returns(), loaders, verbose=False)
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(("inference_mode", "stage"), [(True, "validate"), (False, "validate"), (True, "test")])
def test_t44_inference_mode_alone_and_no_grad_inside_of_a_fit(
    validated: Any, loader: Any, make_trainer: Any, inference_mode: bool, stage: str
) -> None:
    seen: list[tuple[bool, bool]] = []

    class Looks(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

        test_step = validation_step

    getattr(make_trainer(inference_mode=inference_mode), stage)(Looks(), loader, verbose=False)
    assert set(seen) == {(False, inference_mode)}
    seen.clear()
    make_trainer(inference_mode=inference_mode).fit(Looks(), loader, loader)
    assert set(seen) == {(False, False)}


@ONE_IN_EVAL_MODE
def test_t18_every_submodule_gets_back_its_own_mode(validated: Any, loader: Any, make_trainer: Any) -> None:
    seen: list[bool] = []

    class Frozen(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(any(module.training for module in self.modules()))

    model = Frozen()
    model.net[2].eval()
    make_trainer().fit(model, loader, loader)
    assert set(seen) == {False}
    assert [module.training for module in model.net] == [True, True, False, True]


@ONE_IN_EVAL_MODE
def test_an_overridden_model_train_hook_replaces_the_restoring(validated: Any, loader: Any, make_trainer: Any) -> None:
    class Own(validated):  # type: ignore[misc]
        def on_validation_model_train(self) -> None:
            self.net.train()

    model = Own()
    model.eval()
    make_trainer().fit(model, loader, loader)
    assert model.net.training
    assert not model.training


@pytest.mark.filterwarnings("ignore:The validation loader shuffles")
def test_t18_the_sanity_check_disturbs_no_generator_and_no_progress(
    validated: Any, data: Any, make_trainer: Any
) -> None:
    draws: list[torch.Tensor] = []

    class Draws(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            torch.rand(3)

        def on_train_start(self) -> None:
            draws.append(torch.rand(3))
            assert self.trainer.progress.total_batches == 0

    for steps in (0, 2, -1):
        torch.manual_seed(5)
        trainer = make_trainer(num_sanity_val_steps=steps, limit_val_batches=3)
        trainer.fit(Draws(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8, shuffle=True))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (None, 2), (-1, 4), (10, 4)])
def test_num_sanity_val_steps(validated: Any, loader: Any, make_trainer: Any, steps: int | None, batches: int) -> None:
    seen: list[int] = []

    class Watches(Callback):
        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            assert trainer.sanity_checking
            seen.append(batch_idx)

    make_trainer(num_sanity_val_steps=steps, max_steps=1, callbacks=[Watches()]).fit(validated(), loader, loader)
    assert len(seen) == batches


def test_a_loader_that_keeps_what_a_generator_gives_loses_no_batch_to_the_sanity_check(
    validated: Any, loader: Any, make_trainer: Any
) -> None:
    seen: list[int] = []

    class Keeps:
        def __init__(self) -> None:
            self.source, self.kept = (batch for batch in loader), list[Any]()

        def __iter__(self) -> Any:
            yield from self.kept
            for batch in self.source:
                self.kept.append(batch)
                yield batch

    class Counts(validated):  # type: ignore[misc]
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                seen.append(batch_idx)

    make_trainer(max_epochs=2, num_sanity_val_steps=2).fit(Counts(), loader, Keeps())
    assert seen == [0, 1, 2, 3] * 2


def test_limits_count_batches_of_each_loader(validated: Any, loader: Any, make_trainer: Any) -> None:
    seen: list[int] = []

    class Counts(validated):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append(dataloader_idx)

    trainer = make_trainer(limit_test_batches=0.5)
    trainer.test(Counts(), [loader, loader], verbose=False)
    assert seen == [0, 0, 1, 1]
    assert trainer.num_test_batches == [2, 2]


def test_without_a_model_the_best_checkpoint_of_the_last_run_is_judged(
    validated: Any, loader: Any, make_trainer: Any
) -> None:
    class Worsens(validated):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                with torch.no_grad():
                    self.net[0].weight.fill_(100.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

    from drivetrain.callbacks import ModelCheckpoint

    trainer = make_trainer(
        max_epochs=3, limit_train_batches=1, callbacks=[ModelCheckpoint(monitor="val_loss")], enable_checkpointing=True
    )
    model = Worsens()
    trainer.fit(model, loader, loader)
    best = trainer.checkpoint_callback.best_model_score.item()
    assert trainer.validate(dataloaders=loader, verbose=False) == [{"val_loss": pytest.approx(best, rel=1e-6)}]
    assert trainer.ckpt_path == trainer.checkpoint_callback.best_model_path
    assert model.net[0].weight.abs().max() < 100


def test_a_checkpoint_that_is_not_there_is_an_error_before_anything_runs(
    recorded: Any, validated: Any, make_trainer: Any
) -> None:
    parties = recorded(validated)
    trainer = make_trainer(strategy=parties.strategy)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at nowhere\.ckpt"):
        trainer.validate(parties.module, datamodule=parties.datamodule, ckpt_path="nowhere.ckpt")
    with pytest.raises(CheckpointError, match='ckpt_path="best" names no checkpoint: there is no ModelCheckpoint'):
        trainer.validate(parties.module, datamodule=parties.datamodule, ckpt_path="best")
    assert parties.calls == []


def test_results_are_printed_unless_told_otherwise(validated: Any, loader: Any, make_trainer: Any, capsys: Any) -> None:
    make_trainer().validate(validated(), loader)
    assert "val_loss" in capsys.readouterr().out
    make_trainer().validate(validated(), loader, verbose=False)
    assert capsys.readouterr().out == ""


# ---- a step that takes several batches, and the x axis of several fits -----------------------------------------------


@pytest.mark.parametrize(("takes", "validated_after"), [(1, [3, 6, 9]), (2, [4, 6, 10]), (4, [4, 8, 10])])
def test_a_step_that_takes_several_batches_does_not_step_over_a_validation(
    make_trainer: Any, regression: Any, ready: Any, loader: Any, takes: int, validated_after: list[int]
) -> None:
    found: list[int] = []

    class Fetching(regression):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any:
            losses = [self.loss(batch) for batch, _, _ in itertools.islice(dataloader_iter, takes)]
            return torch.stack(losses).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def on_validation_start(self) -> None:
            found.append(self.trainer.progress.batches_done)

    batches = list(loader) * 3
    make_trainer(max_epochs=1, val_check_interval=3, num_sanity_val_steps=0).fit(
        Fetching(), ready(batches[:10]), loader
    )
    assert found == validated_after


def test_the_x_axis_of_a_second_fit_continues(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Logging(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("step_value", float(batch_idx), on_step=True, on_epoch=False)

    steps: list[int] = []

    class Noting(DummyLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "step_value" in metrics:
                assert step is not None
                steps.append(step)

    trainer = make_trainer(max_epochs=1, logger=Noting(), num_sanity_val_steps=0)
    trainer.fit(Logging(), loader, loader)
    trainer.max_epochs = 2
    trainer.fit(Logging(), loader, loader)
    assert steps == list(range(2 * len(loader)))
