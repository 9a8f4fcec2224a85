from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Regression, regression_data
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, parity
from drivetrain.callbacks import LearningRateFinder
from drivetrain.errors import ConfigurationError
from drivetrain.tuner import Tuner
from drivetrain.tuner.lr_finder import LRSweep


class Tuned(Regression):
    """Dropout, batch norm, Adam, a scheduler, and attributes that its step changes."""

    def __init__(self, lr: float = 0.01, scheduled: bool = True) -> None:
        torch.manual_seed(3)
        super().__init__(dropout=0.2)
        self.net.insert(1, nn.BatchNorm1d(8))
        self.lr, self.scheduled, self.steps, self.seen = lr, scheduled, 0, []
        self.save_hyperparameters("lr")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.seen.append(float(batch[0].sum()))
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(regression_data(), batch_size=8, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        if not self.scheduled:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def everything(module: Any, trainer: Any) -> dict[str, Any]:
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()) if trainer.optimizers else None,
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "progress": trainer.progress.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "steps": module.steps,
        "seen": module.seen,
        "random": (torch.get_rng_state(), random.getstate()),
        "modes": [each.training for each in module.modules()],
    }


def equal(one: Any, other: Any) -> bool:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


def test_a_fit_after_the_finder_is_a_fit_with_that_learning_rate_from_the_start(make_trainer: Any) -> None:
    finder = LearningRateFinder(min_lr=1e-5, num_training_steps=30)
    tuned, trainer = Tuned(), make_trainer(max_epochs=3, callbacks=finder)
    trainer.fit(tuned)
    assert finder.optimal_lr is not None
    rate = finder.optimal_lr.suggestion()
    assert tuned.lr == tuned.hparams.lr == rate != 0.01

    plain, other = Tuned(rate), make_trainer(max_epochs=3)
    other.fit(plain)
    for name, value in everything(tuned, trainer).items():
        assert equal(value, everything(plain, other)[name]) if name in ("weights", "optimizer") else True
    ours, theirs = everything(tuned, trainer), everything(plain, other)
    for name in ("schedulers", "progress", "metrics", "steps", "seen", "random", "modes"):
        assert str(ours[name]) == str(theirs[name]), name


def test_the_losses_are_those_of_a_loop_by_hand(make_trainer: Any) -> None:
    module = Tuned(scheduled=False)
    torch.manual_seed(7)
    sweep = Tuner(make_trainer(accumulate_grad_batches=2)).lr_find(
        module, num_training=6, min_lr=1e-3, max_lr=1e2, early_stop_threshold=None, update_attr=False
    )
    assert sweep is not None

    plain = Tuned(scheduled=False)
    optimizer = plain.configure_optimizers()
    torch.manual_seed(7)
    rates = [1e-3 * 10 ** (5 * step / 5) for step in range(6)]
    average, losses, waiting = 0.0, [], iter([])
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        window = []
        for _ in range(2):
            batch = next(waiting, None)
            if batch is None:
                waiting = iter(plain.train_dataloader())
                batch = next(waiting)
            loss = plain.loss(batch)
            (loss / 2).backward()
            window.append(loss.item())
        optimizer.step()
        average = 0.98 * average + 0.02 * sum(window) / 2
        losses.append(average / (1 - 0.98 ** (step + 1)))
    assert sweep.results["lr"] == pytest.approx(rates)
    assert sweep.results["loss"] == pytest.approx(losses, rel=1e-6)


def test_the_tuner_leaves_no_trace_but_the_attribute(make_trainer: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    class Watches(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append(stage)

    trainer = make_trainer(max_epochs=1, callbacks=Watches(), logger=True, log_every_n_steps=1)
    module = Tuned()
    module.net.eval()
    before, files = everything(module, trainer), sorted(tmp_path.rglob("*"))
    limits = copy.copy(trainer.limits)
    sweep = Tuner(trainer).lr_find(module, num_training=20)
    assert sweep is not None
    after = everything(module, trainer)
    for name, value in before.items():
        assert str(value) == str(after[name]), name
    assert equal(before["weights"], after["weights"])
    assert (limits, seen, files) == (trainer.limits, [], sorted(tmp_path.rglob("*")))
    assert module.lr == sweep.suggestion()
    module.net.train()
    trainer.fit(module)  # and it works as before
    assert seen == ["fit"]


def test_the_finder_may_run_at_later_epochs(make_trainer: Any) -> None:
    class Later(LearningRateFinder):
        def on_fit_start(self, *_: Any) -> None: ...

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.before = everything(pl_module, trainer)
                self.lr_find(trainer, pl_module)
                self.after = everything(pl_module, trainer)

    finder, module = Later(num_training_steps=15), Tuned(scheduled=False)
    trainer = make_trainer(max_epochs=2, callbacks=finder)
    trainer.fit(module)
    assert equal(finder.before["weights"], finder.after["weights"])
    assert equal(finder.before["optimizer"]["state"], finder.after["optimizer"]["state"])
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.lr != 0.01
    assert trainer.global_step == module.steps == 8
    assert finder.before["progress"] == finder.after["progress"]


def test_it_stops_where_the_loss_explodes_and_skips_a_fit_that_resumes(make_trainer: Any, tmp_path: Path) -> None:
    finder = LearningRateFinder(min_lr=1e-3, max_lr=1e6, num_training_steps=60)
    trainer = make_trainer(max_epochs=1, callbacks=finder)
    module = Tuned()
    trainer.fit(module)
    assert finder.optimal_lr is not None
    assert 10 < len(finder.optimal_lr.results["loss"]) < 60
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again, other = LearningRateFinder(), Tuned()
    make_trainer(max_epochs=2, callbacks=again).fit(other, ckpt_path=tmp_path / "one.ckpt")
    assert again.optimal_lr is None
    assert other.lr == 0.01


def test_the_suggestion_and_the_plot() -> None:
    sweep = LRSweep("exponential", 1e-4, 1.0, 5)
    assert [sweep.rate(step) for step in range(5)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert [LRSweep("linear", 0.0001, 0.4001, 5).rate(step) for step in (1, 4)] == pytest.approx([0.1001, 0.4001])
    sweep.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [5.0, 4.0, 1.0, 0.9, float("nan")]}
    assert sweep.suggestion(skip_begin=0, skip_end=0) == 1e-3
    with pytest.warns(UserWarning, match="too few to suggest"):
        assert sweep.suggestion() is None

    class Axes:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: self.calls.append(name) or self

    sweep.results = {"lr": [sweep.rate(step) for step in range(20)], "loss": [20.0 - step**2 for step in range(20)]}
    axes = Axes()
    assert sweep.plot(suggest=True, ax=axes) is axes
    assert axes.calls == ["plot", "set_xscale", "set_xlabel", "set_ylabel", "plot", "get_figure"]


def test_what_it_refuses(make_trainer: Any) -> None:
    for arguments in [{"mode": "x"}, {"min_lr": 1.0, "max_lr": 0.1}, {"num_training_steps": 1}]:
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            LearningRateFinder(**arguments)
    with pytest.raises(ConfigurationError, match="sets 'rate', and neither Tuned"):
        make_trainer(callbacks=LearningRateFinder(attr_name="rate")).fit(Tuned())
    with pytest.raises(ConfigurationError, match="only a fit has a learning rate"):
        Tuner(make_trainer()).lr_find(Tuned(), method="test")
    with pytest.raises(ConfigurationError, match="Pass train_dataloaders"):
        Tuner(make_trainer()).lr_find(Tuned(), dataloaders=[1])


def test_a_scheduler_of_the_whole_fit_is_made_during_the_search_too(make_trainer: Any) -> None:
    seen: list[tuple[int, float]] = []

    class Cycled(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer, steps = torch.optim.SGD(self.parameters(), lr=self.lr), self.trainer.estimated_stepping_batches
            seen.append((self.trainer.max_epochs, steps))
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=int(steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module, trainer = Cycled(), make_trainer(max_epochs=2)
    sweep = Tuner(trainer).lr_find(module, num_training=20)
    assert sweep is not None
    assert len(sweep.results["lr"]) == 20
    trainer.fit(module)
    assert set(seen) == {(2, 8)}
    assert trainer.global_step == 8


class ByHand(Tuned):
    """Makes its optimizer steps itself, and those of its scheduler."""

    batch_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return loss


def test_a_module_that_steps_by_hand_has_the_same_sweep_and_its_scheduler_stands_still(make_trainer: Any) -> None:
    results = []
    for module in (ByHand(), Tuned()):
        torch.manual_seed(7)
        sweep = Tuner(make_trainer()).lr_find(module, num_training=12, update_attr=False)
        assert sweep is not None
        results.append(sweep.results)
    assert len(results[0]["lr"]) == 12
    assert results[0] == results[1]

    trainer = make_trainer(max_epochs=2, callbacks=LearningRateFinder(num_training_steps=20))
    trainer.fit(module := ByHand())
    assert module.lr != 0.01
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == trainer.global_step == 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(module.lr * 0.7**8)


def test_a_batch_size_is_found_for_a_module_that_steps_its_scheduler_by_hand(make_trainer: Any) -> None:
    assert Tuner(make_trainer()).scale_batch_size(ByHand(), max_trials=2) is not None


@pytest.mark.parametrize("offset", [0.0, -100.0])
def test_a_sweep_ends_when_the_loss_has_grown_also_below_zero(make_trainer: Any, offset: float) -> None:
    class Shifted(Tuned):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) + offset

    def tried(**arguments: Any) -> int:
        sweep = Tuner(make_trainer()).lr_find(Shifted(scheduled=False), update_attr=False, num_training=20, **arguments)
        assert sweep is not None
        return len(sweep.results["loss"])

    assert tried(max_lr=1e-3) == 20
    assert 1 < tried(max_lr=1e4) < 20


@pytest.mark.filterwarnings("ignore:.*returned None", "ignore:There are 0 finite losses")
def test_a_batch_that_the_step_leaves_out_is_no_loss_of_a_sweep(make_trainer: Any) -> None:
    class LeavesOut(Tuned):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    found = Tuner(make_trainer(max_epochs=1)).lr_find(LeavesOut(), num_training=4)
    assert len(found.results["loss"]) == 4


def test_layers_that_are_also_in_a_list_are_trained_by_a_sweep(make_trainer: Any) -> None:
    """The attempt copies plain attributes, and a list of layers with the same layers in it."""

    class Listed(Tuned):
        def __init__(self) -> None:
            super().__init__(scheduled=False)
            self.layers = list(self.net)
            self.kept = {"weight": self.net[0].weight}

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x * self.kept["weight"].sum()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads.append([parameter.grad is not None for parameter in self.parameters()])

    grads: list[list[bool]] = []
    Tuner(make_trainer()).lr_find(Listed(), num_training=20, early_stop_threshold=None)
    assert len(grads) == 20
    assert all(map(all, grads))


def test_the_rate_is_set_in_hyperparameters_of_omegaconf(make_trainer: Any) -> None:
    omegaconf = pytest.importorskip("omegaconf")

    class Configured(Tuned):
        def __init__(self, config: Any) -> None:
            super().__init__()
            del self.lr
            self._hparams = None
            self.save_hyperparameters(config)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)

    module = Configured(omegaconf.DictConfig({"learning_rate": 0.5}))
    sweep = Tuner(make_trainer()).lr_find(module, num_training=20)
    assert sweep is not None
    assert module.hparams.learning_rate == sweep.suggestion() != 0.5


@pytest.fixture
def uneven() -> Any:
    before = parity.use(parity.Parity(uneven_sweeps=True))
    yield
    parity.use(before)


def test_a_switch_makes_sweeps_those_of_the_original(make_trainer: Any, uneven: Any) -> None:
    sweep = LRSweep("exponential", 1e-3, 0.5, 6)
    assert [sweep.rate(step) for step in (0, 1, 5)] == pytest.approx([1e-3, 1e-3 * 500 ** (2 / 6), 0.5])
    validated: list[int] = []

    class Validated(Tuned):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(batch_idx)

        def val_dataloader(self) -> Any:
            return DataLoader(regression_data(), batch_size=32)

    def losses(module: Any, max_epochs: int = 10, num_training: int = 4) -> list[float]:
        arguments: dict[str, Any] = {"early_stop_threshold": None, "update_attr": False}
        found = Tuner(make_trainer(max_epochs=max_epochs)).lr_find(module, num_training=num_training, **arguments)
        assert found is not None
        return found.results["loss"]

    there = losses(Validated())
    assert validated
    assert len(losses(Tuned(), max_epochs=1, num_training=9)) == 4  # the original ends with the fit's epochs
    parity.use(parity.Parity())
    assert len(losses(Tuned(), max_epochs=1, num_training=9)) == 9
    assert there[0] == pytest.approx(losses(Tuned())[0] * 0.02 / (1 - 0.98**2), rel=1e-5)


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
@pytest.mark.filterwarnings("ignore:.*returned None", "ignore:There are [01] finite losses")
def test_a_trial_ends_where_the_module_skips_all_batches_from_one_step_on(make_trainer: Any, search: str) -> None:
    class SkipsTheBatch(Tuned):
        batch_size = 8

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if self.global_step < 2 else None

    class SkipsTheEpoch(Tuned):
        batch_size = 8

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.global_step == 2 else None

    for kind in (SkipsTheBatch, SkipsTheEpoch):
        tuner, module = Tuner(make_trainer(max_epochs=1)), kind()
        options: Any = {"num_training": 6} if search == "lr_find" else {"max_trials": 1}
        with pytest.warns(UserWarning, match=r"trial of (6|3) optimizer steps ends after 2: the next 100 windows"):
            found = getattr(tuner, search)(module, **options)
        assert (found if search == "scale_batch_size" else len(found.results["lr"])) == 2
