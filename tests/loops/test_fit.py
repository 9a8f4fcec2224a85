"""The training loop against the loop one would write by hand, and its limits."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import drivetrain
from drivetrain import Callback, Trainer
from drivetrain.errors import ConfigurationError, NotLoggedError

SAMPLES, BATCH, EPOCHS = 28, 8, 2  # four batches, the last one smaller


class Augmented(Dataset[Any]):
    """Every item draws from torch's generator: of the process, or of its worker."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = self.x[index] + 0.1 * torch.randn(4)
        return x, x.sum(0, keepdim=True)


def plain_loop(
    model: Any, loader: DataLoader[Any], accumulate: int, clip: float | None, autocast: bool, validate: Any = None
) -> list[float]:
    """What a person would write, partial windows averaged over what they hold."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for _ in range(EPOCHS):
        batches = len(loader)
        for index, batch in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
                loss = model.loss(batch)
            if index % accumulate == 0:
                optimizer.zero_grad()
            window = min(accumulate, batches - index // accumulate * accumulate)
            (loss / window).backward()
            if (index + 1) % accumulate == 0 or index + 1 == batches:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
            losses.append(loss.item())
        if validate is not None:
            model.eval()
            with torch.no_grad():
                for batch in validate:
                    model.loss(batch)
            model.train()
    return losses


class Records(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def build(regression: Any, workers: int, shuffle: bool) -> tuple[Any, DataLoader[Any]]:
    class Model(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    torch.manual_seed(3)
    return Model(dropout=0.5), DataLoader(Augmented(), batch_size=BATCH, shuffle=shuffle, num_workers=workers)


# every value of each column with each of the first two; not the full product, which says no more and takes minutes
CASES = [
    (0, True, 1, None, "32-true"),
    (0, False, 3, 0.5, "32-true"),
    (0, True, 3, None, "bf16-mixed"),
    (2, True, 3, 0.5, "32-true"),
    (2, False, 1, None, "bf16-mixed"),
]


@pytest.mark.parametrize(("workers", "shuffle", "accumulate", "clip", "precision"), CASES)
def test_losses_and_parameters_are_bit_equal_to_the_plain_loop(
    regression: Any, make_trainer: Any, workers: int, shuffle: bool, accumulate: int, clip: float | None, precision: str
) -> None:
    model, loader = build(regression, workers, shuffle)
    expected = plain_loop(model, loader, accumulate, clip, precision == "bf16-mixed")
    parameters = [p.detach().clone() for p in model.parameters()]

    model, loader = build(regression, workers, shuffle)
    records = Records()
    make_trainer(
        max_epochs=EPOCHS, callbacks=[records], accumulate_grad_batches=accumulate, gradient_clip_val=clip,
        precision=precision,
    ).fit(model, loader)  # fmt: skip
    assert records.losses == expected
    for ours, theirs in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_bit_equal_with_validation_a_logger_and_everything_attached(regression: Any, make_trainer: Any) -> None:
    model, loader = build(regression, 0, True)
    expected = plain_loop(model, loader, 1, None, False, validate=DataLoader(Augmented(), batch_size=BATCH))

    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("loss", outputs["loss"], on_step=True, on_epoch=True, prog_bar=True)

    model, loader = build(regression, 0, True)
    model.__class__.validation_step = lambda self, batch: self.log("val_loss", self.loss(batch))
    records = Records()
    make_trainer(
        max_epochs=EPOCHS, callbacks=[records, Logs()], logger=True, enable_checkpointing=True,
        enable_progress_bar=True, enable_model_summary=True, log_every_n_steps=1,
    ).fit(model, loader, DataLoader(Augmented(), batch_size=BATCH))  # fmt: skip
    assert records.losses == expected  # the sanity check has drawn nothing either (trap T18)


def test_the_comparison_can_fail(regression: Any, make_trainer: Any) -> None:
    """Negative control: one draw from the generator more, and the losses differ."""
    model, loader = build(regression, 0, True)
    expected = plain_loop(model, loader, 1, None, False)
    model, loader = build(regression, 0, True)
    records = Records()
    torch.rand(1)
    make_trainer(max_epochs=EPOCHS, callbacks=[records]).fit(model, loader)
    assert records.losses != expected


def test_t12_a_partial_window_without_known_length_is_averaged_over_what_it_holds(
    regression: Any, make_trainer: Any
) -> None:
    batches = [(torch.full((2, 4), float(i)), torch.ones(2, 1)) for i in range(5)]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(batches)

    def train(loader: Any) -> Any:
        torch.manual_seed(0)
        model = regression()
        make_trainer(accumulate_grad_batches=3).fit(model, loader)
        return model.net[0].weight.detach()

    class Sized:
        def __iter__(self) -> Any:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    torch.testing.assert_close(train(DataLoader(Stream(), batch_size=None)), train(Sized()))


def test_a_step_that_returns_none_is_not_a_step(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Skips(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else self.loss(batch)

    trainer = make_trainer()
    trainer.fit(Skips(), loader)
    assert trainer.global_step == 2


def test_t23_outputs_carry_the_unscaled_loss_and_extras_without_their_graph(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    seen: list[Any] = []

    class Extra(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "twice": [loss * 2]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    make_trainer(accumulate_grad_batches=2, limit_train_batches=2).fit(Extra(), loader)
    for outputs in seen:
        assert not outputs["loss"].requires_grad
        assert not outputs["twice"][0].requires_grad
        assert outputs["twice"][0] == outputs["loss"] * 2


@pytest.mark.parametrize(
    ("output", "message"),
    [({"lost": 1}, "no tensor under 'loss'"), (3.0, "returned a float"), ({"loss": 1.0}, "no tensor under 'loss'")],
)
def test_t23_other_outputs_are_errors(
    regression: Any, loader: Any, make_trainer: Any, output: Any, message: str
) -> None:
    class Wrong(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(ConfigurationError, match=message):
        make_trainer().fit(Wrong(), loader)


@pytest.mark.parametrize("step", [lambda self, batch: self.loss(batch), lambda self, b, i: self.loss(b),
                                  lambda self, *args: self.loss(args[0])])  # fmt: skip
def test_t51_batch_idx_is_optional_and_names_are_free(
    regression: Any, loader: Any, make_trainer: Any, step: Any
) -> None:
    model = type("Named", (regression,), {"training_step": step})()
    trainer = make_trainer()
    trainer.fit(model, loader)
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("arguments", "steps", "epochs"),
    [
        ({"max_epochs": 3}, 12, 3),
        ({"max_epochs": None, "max_steps": 6}, 6, 2),
        ({"max_epochs": 2, "max_steps": 100}, 8, 2),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6, 3),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4, 2),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 4, 2),
        ({"max_epochs": 0}, 0, 0),
        ({"max_epochs": 2, "max_steps": 0}, 0, 0),
        ({"max_epochs": 2, "limit_train_batches": 0}, 0, 0),
        ({"fast_dev_run": True}, 1, 1),
        ({"fast_dev_run": 3}, 3, 1),
    ],
)
def test_t49_limits(regression: Any, loader: Any, make_trainer: Any, arguments: Any, steps: int, epochs: int) -> None:
    trainer = make_trainer(**arguments)
    trainer.fit(regression(), loader)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


def test_t49_max_steps_counts_optimizer_steps(regression: Any, loader: Any, make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=-1, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(regression(), loader)
    assert (trainer.global_step, trainer.current_epoch, trainer.progress.total_batches) == (3, 2, 6)


class StopsAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.total_batches == self.batch:
            trainer.should_stop = True


def test_should_stop_ends_the_epoch_and_forces_a_validation(validated: Any, loader: Any, make_trainer: Any) -> None:
    validated_at = []

    class Watches(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            validated_at.append(trainer.progress.total_batches)

    trainer = make_trainer(max_epochs=3, callbacks=[StopsAt(6), Watches()], num_sanity_val_steps=0)
    trainer.fit(validated(), loader, loader)
    assert trainer.global_step == 6
    assert validated_at == [4, 6]


@pytest.mark.parametrize(("arguments", "steps"), [({"min_epochs": 2}, 8), ({"min_steps": 7}, 7), ({}, 2)])
def test_t29_min_epochs_and_min_steps_outlast_a_request_to_stop(
    regression: Any, loader: Any, make_trainer: Any, caplog: Any, arguments: Any, steps: int
) -> None:
    with caplog.at_level("INFO", logger="drivetrain"):
        trainer = make_trainer(max_epochs=5, callbacks=[StopsAt(2)], **arguments)
        trainer.fit(regression(), loader)
    assert trainer.global_step == steps
    assert ("training continues until" in caplog.text) == bool(arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [4, 8]),
        ({"val_check_interval": 2}, [2, 4, 6, 8]),
        ({"val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({"val_check_interval": 3}, [3, 7]),
        ({"check_val_every_n_epoch": 2}, [8]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, [6]),
        ({"limit_val_batches": 0}, []),
        ({"val_check_interval": 0.1}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_t17_when_validation_runs(
    validated: Any, loader: Any, make_trainer: Any, arguments: Any, expected: list[int]
) -> None:
    at: list[int] = []

    class Watches(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            at.append(trainer.progress.total_batches)

    make_trainer(max_epochs=2, callbacks=[Watches()], num_sanity_val_steps=0, **arguments).fit(
        validated(), loader, loader
    )
    assert at == expected


def test_t17_an_interval_longer_than_the_epoch_is_an_error(validated: Any, loader: Any, make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"exceeds the 4 training batches.*check_val_every_n_epoch=None"):
        make_trainer(val_check_interval=5).fit(validated(), loader, loader)


def test_t36_validation_follows_the_last_batch_of_a_loader_without_length(validated: Any, make_trainer: Any) -> None:
    at: list[tuple[int, bool]] = []

    class Watches(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            at.append((trainer.progress.total_batches, trainer.is_last_batch))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(4), torch.ones(1))] * 5)

    loader = DataLoader(Stream(), batch_size=2)
    make_trainer(callbacks=[Watches()], num_sanity_val_steps=0).fit(validated(), loader, loader)
    assert at == [(3, True)]
    with pytest.raises(ConfigurationError, match="no length"):
        make_trainer(val_check_interval=0.5).fit(validated(), loader, loader)


@pytest.mark.parametrize(
    ("interval", "frequency", "accumulate", "steps"),
    [("step", 1, 1, 8), ("step", 2, 3, 2), ("epoch", 1, 1, 2), ("epoch", 2, 1, 1), ("step", 3, 1, 2)],
)
def test_t14_schedulers_count_optimizer_steps_or_epochs(
    regression: Any, loader: Any, make_trainer: Any, interval: str, frequency: int, accumulate: int, steps: int
) -> None:
    class Scheduled(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            config = {"scheduler": scheduler, "interval": interval, "frequency": frequency}
            return {"optimizer": optimizer, "lr_scheduler": config}

    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(Scheduled(), loader)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**steps


def plateau(regression: Any, **config: Any) -> Any:
    class Scheduled(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "stuck", **config}}

        def validation_step(self, batch: Any) -> None:
            self.log("stuck", 1.0)

    return Scheduled()


@pytest.mark.parametrize(("config", "cuts"), [({}, 2), ({"interval": "step", "frequency": 4}, 2)])
def test_t15_plateau_schedulers_see_the_validation_before_them(
    regression: Any, loader: Any, make_trainer: Any, config: Any, cuts: int
) -> None:
    trainer = make_trainer(max_epochs=3)
    trainer.fit(plateau(regression, **config), loader, loader)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**cuts


def test_t15_a_missing_monitor_is_an_error_or_a_warning(regression: Any, loader: Any, make_trainer: Any) -> None:
    with pytest.raises(NotLoggedError, match=r"watches 'gone', which was not logged. Logged so far: stuck"):
        make_trainer().fit(plateau(regression, monitor="gone"), loader, loader)
    with pytest.raises(NotLoggedError, match=r"watches 'gone'.* does not validate: limit_val_batches is 0. Logged"):
        make_trainer(limit_val_batches=0).fit(plateau(regression, monitor="gone"), loader, loader)
    with pytest.warns(UserWarning, match="watches 'gone'"):
        make_trainer().fit(plateau(regression, monitor="gone", strict=False), loader, loader)


def test_a_value_of_validation_that_is_watched_after_a_step_is_answered_with_the_interval(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    with pytest.raises(ConfigurationError, match='If a validation logs the value, write "interval": "epoch"') as caught:
        make_trainer().fit(plateau(regression, interval="step"), loader, loader)
    assert "strict" not in str(caught.value)


def test_lbfgs_evaluates_its_closure_several_times(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Second(regression):  # type: ignore[misc]
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    model, trainer = Second(), make_trainer()
    trainer.fit(model, loader)
    assert trainer.global_step == 4
    assert model.steps > 8
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the loss several times"):
        make_trainer(accumulate_grad_batches=2).fit(Second(), loader)


def test_an_overridden_optimizer_step_counts_only_real_steps(regression: Any, loader: Any, make_trainer: Any) -> None:
    class EverySecond(regression):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    trainer = make_trainer()
    trainer.fit(EverySecond(), loader)
    assert trainer.global_step == 2
    trainer.optimizers[0].step()
    assert trainer.global_step == 2  # the counter went with the run


def test_training_without_an_optimizer_warns_and_updates_nothing(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Frozen(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> None:
            return None

    model = Frozen()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="returned no optimizer"):
        make_trainer().fit(model, loader)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("algorithm", "norm"), [(None, True), ("norm", True), ("value", False)])
def test_t22_clipping(regression: Any, loader: Any, make_trainer: Any, algorithm: str | None, norm: bool) -> None:
    after: list[float] = []

    class Watches(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            grads = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
            after.append((grads.norm() if norm else grads.abs().max()).item())

    make_trainer(gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm, callbacks=[Watches()]).fit(
        regression(), loader
    )
    assert after == pytest.approx([1e-3] * 4, rel=1e-3)


def test_gradients_live_until_the_next_window(regression: Any, loader: Any, make_trainer: Any) -> None:
    """zero_grad comes after the next window's training_step, so hooks in between can look at gradients."""
    seen: list[bool] = []

    class Looks(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.net[0].weight.grad is not None)
            return self.loss(batch)

    make_trainer().fit(Looks(), loader)
    assert seen == [False, True, True, True]


def test_bf16_mixed_runs_the_steps_under_autocast_and_backward_outside(
    validated: Any, loader: Any, make_trainer: Any
) -> None:
    seen: dict[str, bool] = {}

    class Looks(validated):  # type: ignore[misc]
        def loss(self, batch: Any) -> Any:
            seen["train" if self.training else "eval"] = torch.is_autocast_enabled("cpu")
            seen["bf16"] = self.net(batch[0]).dtype is torch.bfloat16
            return F.mse_loss(self.net(batch[0]).float(), batch[1])

        def on_before_backward(self, loss: Any) -> None:
            seen["backward"] = torch.is_autocast_enabled("cpu")

    make_trainer(precision="bf16-mixed").fit(Looks(), loader, loader)
    assert seen == {"train": True, "eval": True, "bf16": True, "backward": False}


def test_t4_samplers_learn_the_epoch(regression: Any, data: Any, make_trainer: Any) -> None:
    epochs: list[int] = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    make_trainer(max_epochs=3).fit(regression(), DataLoader(data, batch_size=8, sampler=Sampler(data)))
    assert epochs == [0, 1, 2]


def test_the_loader_is_iterated_once_per_epoch(regression: Any, make_trainer: Any) -> None:
    made = itertools.count()

    class Counts:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            next(made)
            return iter([(torch.ones(2, 4), torch.ones(2, 1))] * 2)

    make_trainer(max_epochs=3).fit(regression(), Counts())
    assert next(made) == 3


def test_process_wide_switches_are_put_back(regression: Any, loader: Any, make_trainer: Any, monkeypatch: Any) -> None:
    import os

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen: dict[str, Any] = {}

    class Looks(regression):  # type: ignore[misc]
        def on_train_start(self) -> None:
            seen.update(
                deterministic=torch.are_deterministic_algorithms_enabled(), anomaly=torch.is_anomaly_enabled(),
                grad=torch.is_grad_enabled(), workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                cudnn=(torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
            )  # fmt: skip

    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        make_trainer(deterministic=True, detect_anomaly=True, benchmark=True).fit(Looks(), loader)
        assert not torch.is_grad_enabled()
    assert seen == {
        "deterministic": True, "anomaly": True, "grad": True, "workspace": ":4096:8", "cudnn": (True, True),
    }  # fmt: skip
    assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_at_most_five_frames_between_fit_and_training_step(regression: Any, loader: Any, make_trainer: Any) -> None:
    import inspect

    frames: list[str] = []
    ours = str(Path(drivetrain.__file__).parent)

    class Looks(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not frames:
                stack = [frame.filename for frame in inspect.stack()[1:]]
                frames.extend(itertools.takewhile(lambda name: name.startswith(ours), stack))
            return self.loss(batch)

    make_trainer(precision="bf16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2).fit(Looks(), loader)
    assert 1 <= len(frames) <= 5


@pytest.mark.parametrize("same", [True, False])
def test_a_used_trainer_logs_where_another_model_begins(
    regression: Any, loader: Any, make_trainer: Any, caplog: Any, same: bool
) -> None:
    model, trainer = regression(), make_trainer(max_epochs=4)
    trainer.limits.max_epochs = 2
    with caplog.at_level("INFO", logger="drivetrain"):
        trainer.fit(model, loader)
        assert "continues at" not in caplog.text
        trainer.limits.max_epochs = 4
        trainer.fit(model if same else regression(), loader)
    assert ("continues at epoch 2, step 8, with another model" in caplog.text) == (not same)


def test_a_second_fit_that_has_nothing_left_to_do_says_so(
    regression: Any, loader: Any, make_trainer: Any, caplog: Any
) -> None:
    model, trainer = regression(), make_trainer(max_epochs=2)
    trainer.fit(model, loader)
    with caplog.at_level("INFO", logger="drivetrain"):
        trainer.fit(model, loader)
    assert trainer.global_step == 8
    assert "Nothing to train: 2 of 2 epochs are done. To train on, raise these limits; to train" in caplog.text


def test_a_loader_that_breaks_its_promise_is_named(regression: Any, make_trainer: Any) -> None:
    class Short:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return iter([(torch.ones(2, 4), torch.ones(2, 1))] * 3)

    with pytest.warns(UserWarning, match=r"Short has a length that promised 5 batches, and gave 3"):
        make_trainer().fit(regression(), Short())


class OwnStep:
    """Mixed into a module: overrides ``optimizer_step`` with what the base does."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)


def test_an_overridden_optimizer_step_logs_and_trains_as_the_base_does(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", float(batch_idx), on_epoch=True)
            return self.loss(batch)

    results = []
    for kind in (Logs, type("Own", (OwnStep, Logs), {})):
        torch.manual_seed(0)
        model, trainer = kind(), make_trainer(accumulate_grad_batches=3, gradient_clip_val=0.1)
        trainer.fit(model, loader)
        results.append((float(trainer.callback_metrics["x_epoch"]), trainer.global_step, model.net[0].weight.tolist()))
    assert results[0] == results[1]
    assert results[0][0] == 1.5


def test_a_closure_step_that_returns_none_is_not_counted(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Skips(OwnStep, regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else self.loss(batch)

    trainer = make_trainer()
    trainer.fit(Skips(), loader)
    assert trainer.global_step == 2


def test_a_closure_that_is_run_twice_does_not_change_the_scale(regression: Any, loader: Any, make_trainer: Any) -> None:
    """What sharpness-aware methods do: the second evaluation adds to the gradients, nothing divides them by three."""

    class Twice(regression):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            optimizer.step(closure=optimizer_closure)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            grads.append(self.net[0].weight.grad.clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    grads: list[torch.Tensor] = []
    model = Twice()
    make_trainer(accumulate_grad_batches=2, limit_train_batches=2).fit(model, loader)
    first, second = list(loader)[:2]
    model.zero_grad()
    (model.loss(first) / 2 + model.loss(second) / 2 * 2).backward()
    torch.testing.assert_close(grads[-1], model.net[0].weight.grad)


def test_a_one_shot_iterable_is_named_instead_of_spinning(regression: Any, make_trainer: Any) -> None:
    batches = ((torch.ones(2, 4), torch.ones(2, 1)) for _ in range(3))
    with pytest.raises(ConfigurationError, match="generator yielded no batch in epoch 1"):
        make_trainer(max_epochs=-1, max_steps=10).fit(regression(), batches)


def test_validation_follows_the_last_batch_of_a_dataset_that_ends_before_its_length(
    validated: Any, make_trainer: Any
) -> None:
    class Short(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(4), torch.ones(1))] * 6)

        def __len__(self) -> int:
            return 8

    trainer = make_trainer(num_sanity_val_steps=0)
    trainer.fit(validated(), DataLoader(Short(), batch_size=1), DataLoader(Short(), batch_size=8))
    assert "val_loss" in trainer.callback_metrics


def test_an_empty_validation_is_none(validated: Any, loader: Any, make_trainer: Any) -> None:
    seen: list[str] = []

    class Watches(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append("validation")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert not trainer.enable_validation

    make_trainer(callbacks=[Watches()]).fit(validated(), loader, [])
    with pytest.warns(UserWarning, match="nothing to validate on: the DataLoader over the list of 0 samples"):
        make_trainer(callbacks=[Watches()]).fit(validated(), loader, DataLoader([], batch_size=2))
    assert seen == []
    with pytest.warns(UserWarning, match="nothing to validate on: the DataLoader over the list of 0 samples"):
        assert make_trainer(callbacks=[Watches()]).validate(validated(), DataLoader([]), verbose=False) == []


def test_a_second_fit_after_an_interrupted_validation_trains_in_training_mode(
    validated: Any, loader: Any, make_trainer: Any
) -> None:
    modes: list[bool] = []

    class Breaks(validated):  # type: ignore[misc]
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            modes.append(self.training)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.broken:
                raise RuntimeError("broken")

    model, trainer = Breaks(), make_trainer(num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(model, loader, loader)
    model.broken = False
    trainer.fit(model, loader, loader)
    assert modes == [True] * 8


def test_hooks_and_clipping_see_the_finished_gradients_once_per_step_of_a_sharpness_aware_optimizer(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    """The module evaluates twice and steps once: what belongs to the step runs once (spec 3.3)."""

    class SharpnessAware(regression):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            optimizer.zero_grad()
            optimizer.step(closure=optimizer_closure)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            calls.append("before_step")

        def on_after_backward(self) -> None:
            calls.append("backward")

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            calls.append("clip")

    calls: list[str] = []
    trainer = make_trainer(limit_train_batches=2)
    trainer.fit(SharpnessAware(), loader)

    assert calls == ["backward", "backward", "before_step", "clip"] * 2
    assert trainer.global_step == 2


def test_barebones_leaves_nothing_on_but_the_step(validated: Any, loader: Any, make_trainer: Any, capsys: Any) -> None:
    class Logging(validated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0)
            return self.loss(batch)

    trainer = Trainer(barebones=True, max_epochs=1, accelerator="cpu")
    with pytest.warns(UserWarning, match="Logging.log was called with barebones=True, which logs nothing"):
        trainer.fit(Logging(), loader, loader)

    assert trainer.callbacks == []
    assert trainer.loggers == []
    assert trainer.num_sanity_val_batches == [0]
    assert trainer.callback_metrics == {}
    assert trainer.global_step == 4
    assert capsys.readouterr().out == ""


def test_synchronised_batch_norm_makes_no_difference_in_one_process(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    trainer = make_trainer(sync_batchnorm=True)
    trainer.fit(regression(), loader)
    assert trainer.global_step == 4


def test_epoch_schedulers_step_when_a_hook_cuts_the_epoch_short(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Cutting(regression):  # type: ignore[misc]
        rates: list[float]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == self.current_epoch + 1 else None

        def on_train_epoch_end(self) -> None:
            self.rates = [*getattr(self, "rates", []), self.trainer.optimizers[0].param_groups[0]["lr"]]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Cutting()
    make_trainer(max_epochs=4).fit(module, loader)
    assert module.rates == [5e-4, 2.5e-4, 1.25e-4, 6.25e-5]  # cut after 1, 2 and 3 batches, and whole


class Graph:
    """A batch that moves itself in place and returns nothing."""

    def __init__(self) -> None:
        self.x = torch.ones(2, 4)

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("own_hook", [False, True])
def test_a_batch_that_moves_itself_in_place_reaches_every_step(
    regression: Any, make_trainer: Any, ready: Any, own_hook: bool, precision: str
) -> None:
    seen: list[Any] = []

    class Steps(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch)
            return self.net(batch.x.to(self.dtype)).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    class Transfers(Steps):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch.to(device)

    batches = [Graph(), Graph()]
    make_trainer(num_sanity_val_steps=0, precision=precision).fit(
        Transfers() if own_hook else Steps(), ready(batches), ready(batches)
    )
    assert seen == batches * 2
