"""Restart points in hooks: what was under way when a run ended goes on, and nothing of it happens twice.

tests/faults/test_kill_points.py tries random points of random programs; each corner that it has found has a test here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.loggers.logger import Logger
from drivetrain.precision import MixedPrecision


class Broken(Exception):
    pass


class Net(LightningModule):
    """Logs what it sees; dropout and the validation draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.batches: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append((self.current_epoch, batch_idx))
        loss = self.net(batch.to(self.dtype).reshape(-1, 1)).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=batch_idx + 1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch.to(self.dtype).reshape(-1, 1)).pow(2).mean() + torch.rand(()), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Rows(Logger):
    name = "rows"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def __init__(self, fails_at: int | None = None) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.fails_at = fails_at

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if len(self.rows) == self.fails_at:
            raise KeyboardInterrupt  # any other exception would not end the fit
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any) -> None: ...


class Counter(Callback):
    """Counts hooks; its counts are in the checkpoint."""

    def __init__(self) -> None:
        self.counts = {"start": 0, "end": 0, "validation": 0, "epoch start": 0, "epoch end": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = state_dict

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts["start"] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts["end"] += 1

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.counts["validation"] += not trainer.sanity_checking

    def on_train_epoch_start(self, *_: Any) -> None:
        self.counts["epoch start"] += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        self.counts["epoch end"] += 1


class Ended(NamedTuple):
    """What a run has come to."""

    trainer: Any
    module: Any
    counter: Counter
    rows: list[Any]
    metrics: dict[str, float]
    rng: torch.Tensor


def at(moment: str, do: Any, position: str = "any") -> Callback:
    """A callback that calls ``do(trainer)`` in one hook."""
    acting = type("Acting", (Callback,), {"position": position, moment: lambda self, trainer, *_: do(trainer)})
    return acting()  # type: ignore[no-any-return]


def breaks(moment: str, when: Any = lambda trainer: True, error: type[BaseException] = Broken) -> Callback:
    """A callback that raises once in one hook."""
    done: list[bool] = []

    def act(trainer: Any) -> None:
        if not done and not trainer.sanity_checking and when(trainer):
            done.append(True)
            raise error

    return at(moment, act)


def after(batches: int) -> Any:
    return lambda trainer: trainer.progress.total_batches >= batches


@pytest.fixture
def fit(make_trainer: Any, ready: Any, tmp_path: Path) -> Any:
    """``fit(...)`` trains five batches per epoch and returns trainer, module, counter and rows."""

    def run(*callbacks: Callback, module: Any = None, logger: Any = None, val: int = 2, **arguments: Any) -> Any:
        path = arguments.pop("ckpt_path", None)
        module, counter, logger = module or Net(), Counter(), logger or Rows()
        trainer = make_trainer(
            **{"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True, **arguments},
            callbacks=[*callbacks, counter, OnExceptionCheckpoint(tmp_path / "saved")],
        )
        torch.manual_seed(3 if path is None else random.randrange(10**6))
        data, judged = (ready([torch.full((2,), float(i)) for i in range(count)]) for count in (5, val))
        with suppress(Broken, SystemExit):
            trainer.fit(module, data, judged if val else None, ckpt_path=path)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return Ended(trainer, module, counter, logger.rows, metrics, torch.get_rng_state())

    return run


@pytest.fixture
def rescue(tmp_path: Path) -> Path:
    return tmp_path / "saved" / "on_exception.ckpt"


def same(one: Ended, other: Ended) -> bool:
    """Whether two runs have ended alike."""
    states = zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True)
    return (
        all(torch.equal(a, b) for a, b in states)
        and torch.equal(one.rng, other.rng)
        and one.counter.counts == other.counter.counts
        and one.metrics == other.metrics
    )


def values(*runs: Ended) -> set[tuple[Any, ...]]:
    return {(step, *item) for run in runs for step, metrics in run.rows for item in metrics.items()}


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_t26_a_row_is_not_lost_if_on_train_batch_end_raises(fit: Any, rescue: Path) -> None:
    whole = fit()
    first = fit(breaks("on_train_batch_end", after(3)))
    resumed = fit(ckpt_path=rescue)
    assert values(first) < values(whole)
    assert values(first, resumed) == values(whole)
    assert same(resumed, whole)


def test_t26_a_row_is_not_lost_if_a_logger_is_interrupted(fit: Any, rescue: Path) -> None:
    whole = fit()
    first = fit(logger=Rows(fails_at=3))
    assert len(first.rows) == 3
    assert values(first, fit(ckpt_path=rescue)) == values(whole)


def test_t26_an_epochs_row_is_not_lost_if_the_run_ends_right_after_saving(fit: Any, tmp_path: Path) -> None:
    whole = fit()

    def save_and_end(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "a")
        raise Broken

    first = fit(at("on_train_epoch_end", save_and_end, position="last"))
    assert "loss_epoch" not in {name for _, name, _ in values(first)}
    resumed = fit(ckpt_path=tmp_path / "a")
    assert values(first, resumed) == values(whole)


def test_t26_a_mean_in_64_bits_is_added_up_in_the_same_order(make_trainer: Any, ready: Any, tmp_path: Path) -> None:
    """Saving after every batch adds up nothing, and a resumed run adds up what is left."""
    numbers = torch.rand(90, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    class Sums(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mean", numbers[batch_idx], on_step=False, on_epoch=True, batch_size=1 + batch_idx // 80)
            return self.net(batch.to(self.dtype)).sum()

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / str(trainer.progress.total_batches))

    def run(*callbacks: Callback, path: Any = None) -> float:
        trainer = make_trainer(precision="64-true", callbacks=list(callbacks), limit_val_batches=0)
        trainer.fit(Sums(), ready([torch.ones(1, 1)] * 90), ckpt_path=path)
        return float(trainer.callback_metrics["mean"])

    whole = run()
    assert run(at("on_train_batch_end", save, position="last")) == whole
    assert {run(path=tmp_path / str(done)) for done in (1, 7, 50, 70, 85)} == {whole}


# ---- validations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["on_validation_start", "on_validation_batch_end", "on_validation_end"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_t26_an_exception_inside_a_validation(fit: Any, rescue: Path, moment: str, error: Any, accumulate: int) -> None:
    arguments: dict[str, Any] = {"val_check_interval": 1, "accumulate_grad_batches": accumulate}
    whole = fit(**arguments)
    first = fit(breaks(moment, after(3), error), **arguments)
    resumed = fit(ckpt_path=rescue, **arguments)
    assert same(resumed, whole)
    assert values(first, resumed) == values(whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_t26_a_validation_is_not_repeated_for_the_window_after_it(fit: Any, rescue: Path, accumulate: int) -> None:
    arguments: dict[str, Any] = {"val_check_interval": 3, "accumulate_grad_batches": accumulate}
    whole = fit(**arguments)
    fit(breaks("on_before_backward", after(3)), **arguments)
    resumed = fit(ckpt_path=rescue, **arguments)
    assert resumed.counter.counts["validation"] == whole.counter.counts["validation"] == 4
    assert same(resumed, whole)


def test_t26_an_exception_in_the_validation_that_a_resumed_run_begins_with(fit: Any, rescue: Path) -> None:
    whole = fit(val_check_interval=2)
    fit(breaks("on_validation_start", after(2)), val_check_interval=2)
    for moment in ("on_validation_batch_end", "on_train_start", "on_validation_end", "on_before_backward"):
        fit(breaks(moment, after(2)), ckpt_path=rescue, val_check_interval=2)
    assert same(fit(ckpt_path=rescue, val_check_interval=2), whole)


def test_t26_saved_in_the_validation_that_a_resumed_run_begins_with(fit: Any, rescue: Path, tmp_path: Path) -> None:
    """At that moment the training loader has not been restored."""
    whole = fit(val_check_interval=2)
    fit(breaks("on_validation_start", after(2)), val_check_interval=2)
    saving = at("on_validation_end", lambda trainer: trainer.save_checkpoint(tmp_path / f"{trainer.global_step}"))
    fit(saving, ckpt_path=rescue, val_check_interval=2)
    resumed = fit(ckpt_path=tmp_path / "2", val_check_interval=2)
    assert resumed.module.batches == whole.module.batches[2:]


def test_t26_saved_in_a_validation_it_warns_of_callbacks_that_see_its_batches_again(
    make_trainer: Any, ready: Any, tmp_path: Path
) -> None:
    data = ready([torch.ones(2)] * 2)
    saving = at("on_validation_batch_end", lambda trainer: trainer.save_checkpoint(tmp_path / "a"))
    make_trainer(callbacks=[Counter(), saving], num_sanity_val_steps=0).fit(Net(), data, data)
    with pytest.warns(UserWarning, match="in the middle of a validation, .* the states of Counter are those"):
        make_trainer(callbacks=Counter()).fit(Net(), data, data, ckpt_path=tmp_path / "a")


def test_t52_a_metric_object_does_not_count_a_validation_twice(fit: Any, rescue: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Summing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.SumMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(1.0)
            self.log("sum", self.metric)

    fit(breaks("on_validation_batch_end", after(5)), module=Summing(), val=3, max_epochs=1)
    resumed = fit(module=Summing(), val=3, max_epochs=1, ckpt_path=rescue)
    assert resumed.metrics["sum"] == 3.0


@pytest.mark.parametrize("kind", ["generator", "persistent workers"])
@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_t26_validation_loaders_that_keep_something_from_pass_to_pass(
    make_trainer: Any, ready: Any, tmp_path: Path, kind: str, moment: str
) -> None:
    """A generator of their own goes on; workers that lived already draw no second seed from the global one."""

    class Order(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[int, list[float]]] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append((self.current_epoch, batch.tolist()))

    def run(*callbacks: Callback, path: Any = None) -> tuple[Any, ...]:
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(3)}
        if kind != "generator":
            own = {"num_workers": 1, "persistent_workers": True}
        val = DataLoader([float(i) for i in range(8)], 4, shuffle=True, **own)  # type: ignore[arg-type]
        module = Order()
        torch.manual_seed(1 if path is None else 2)
        trainer = make_trainer(max_epochs=3, callbacks=list(callbacks), num_sanity_val_steps=0)
        trainer.fit(module, ready([torch.ones(2)] * 2), val, ckpt_path=path)
        return torch.rand(()).item(), [order for epoch, order in module.seen if epoch == 2]

    def save(trainer: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(tmp_path / "a")

    whole = run(at(moment, save, position="last"))
    assert run(path=tmp_path / "a") == whole


@pytest.mark.parametrize("kind", ["global", "generator", "persistent workers"])
@pytest.mark.parametrize("moment", ["on_validation_batch_end", "on_validation_end", "on_train_epoch_end", ""])
def test_t26_the_validation_of_a_stopped_run_takes_no_random_numbers(
    make_trainer: Any, ready: Any, tmp_path: Path, kind: str, moment: str
) -> None:
    """A run that was not asked to stop would not validate there; ``""``: saved after the fit."""
    orders: list[tuple[int, list[float]]] = []

    class Order(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            orders.append((self.current_epoch, batch.tolist()))

    own: dict[str, Any] = {"generator": torch.Generator()} if kind == "generator" else {}
    if kind == "persistent workers":
        own = {"num_workers": 1, "persistent_workers": True}

    def run(*callbacks: Callback, path: Any = None, **arguments: Any) -> Any:
        orders.clear()
        if "generator" in own:
            own["generator"].manual_seed(3)
        data = [float(i) for i in range(8)]
        val = DataLoader(data, 4, shuffle=True, **own)  # type: ignore[arg-type]
        torch.manual_seed(1 if path is None else 2)
        trainer = make_trainer(max_epochs=3, callbacks=list(callbacks), num_sanity_val_steps=0, **arguments)
        trainer.fit(Order(), DataLoader(data, 3, shuffle=True), val, ckpt_path=path)  # type: ignore[arg-type]
        return trainer

    def state(trainer: Any) -> tuple[Any, ...]:
        drawn = torch.rand(()).item()
        return drawn, [order for epoch, order in orders if epoch], trainer.model.state_dict()["net.0.weight"].tolist()

    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    whole, path = state(run()), tmp_path / "a"
    more = [at(moment, lambda trainer: trainer.save_checkpoint(path))] if moment else []
    trainer = run(at("on_train_batch_end", stop), *more)
    assert len(orders) == 2
    if not moment:
        trainer.save_checkpoint(path)
    assert state(run(path=path)) == whole


# ---- windows, batches, epochs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["on_train_batch_start", "on_after_backward", "on_train_batch_end"])
def test_t26_callbacks_see_a_window_once(fit: Any, rescue: Path, moment: str) -> None:
    whole = fit(accumulate_grad_batches=3)
    fit(breaks(moment, after(4)), accumulate_grad_batches=3)
    assert same(fit(ckpt_path=rescue, accumulate_grad_batches=3), whole)


def test_t26_a_window_begins_again_although_its_step_was_bound_twice(fit: Any, rescue: Path) -> None:
    """A change of the Trainer inside a window lets the loop bind the step again; the parameters stay the same."""

    def change(trainer: Any) -> None:
        trainer.accumulate_grad_batches = 3

    changing = [at("on_train_batch_end", change), breaks("on_before_optimizer_step", after(2))]
    whole = fit(accumulate_grad_batches=3)
    fit(*changing, accumulate_grad_batches=3)
    assert same(fit(ckpt_path=rescue, accumulate_grad_batches=3), whole)


@pytest.mark.parametrize("moment", ["on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"])
def test_t26_callbacks_see_the_ends_of_an_epoch_once(fit: Any, rescue: Path, moment: str) -> None:
    whole = fit()
    fit(breaks(moment, after(5)))
    assert same(fit(ckpt_path=rescue), whole)


def test_with_a_saver_on_exceptions_all_see_the_end_of_a_batch_in_which_one_fails(fit: Any, rescue: Path) -> None:
    """And the first exception is what is raised."""

    def fail(trainer: Any) -> None:
        if trainer.global_step == 3:
            raise OSError("second")

    with pytest.warns(UserWarning, match="After Broken.*, another override of the same hook failed: OSError"):
        ended = fit(breaks("on_train_batch_end", after(3)), at("on_train_batch_end", fail))
    assert ended.counter.counts["end"] == 3


@pytest.mark.parametrize("moment", ["on_train_start", "on_train_epoch_start"])
def test_t26_an_exception_before_a_resumed_run_has_restored_its_state(fit: Any, rescue: Path, moment: str) -> None:
    """It must not leave a checkpoint behind that lacks what was not restored so far."""
    for done in (3, 5):
        whole = fit(accumulate_grad_batches=2)
        fit(breaks("on_train_batch_start", after(done)), accumulate_grad_batches=2)
        fit(breaks(moment), ckpt_path=rescue, accumulate_grad_batches=2)
        assert same(fit(ckpt_path=rescue, accumulate_grad_batches=2), whole)


def test_t26_a_batch_whose_optimizer_has_stepped_is_not_trained_twice(fit: Any, rescue: Path) -> None:
    class Breaks(Net):
        breaks = True

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
            optimizer.step(closure=optimizer_closure)
            if self.breaks and self.global_step == 3:
                raise Broken

    module = Breaks()
    fit(module=module)
    module = Breaks()
    module.breaks = False
    with pytest.warns(UserWarning, match="between the optimizer's step and the end of its batch"):
        resumed = fit(module=module, ckpt_path=rescue)
    assert module.batches[0] == (0, 3)
    assert resumed.trainer.global_step == 10


def test_t26_the_end_of_an_epoch_that_max_steps_cut_short_comes_once(fit: Any, tmp_path: Path) -> None:
    """Unless the resumed run has more steps: then that epoch has not ended."""
    saving = at("on_train_epoch_end", lambda trainer: trainer.save_checkpoint(tmp_path / "a"), position="last")
    arguments: dict[str, Any] = {"max_epochs": -1, "ckpt_path": tmp_path / "a"}
    whole = fit(saving, max_epochs=-1, max_steps=3)
    assert same(fit(max_steps=3, **arguments), whole)
    longer = fit(max_steps=5, **arguments)
    assert longer.module.batches == [(0, 3), (0, 4)]
    assert longer.counter.counts["epoch end"] == 2


def test_t29_a_request_to_stop_that_must_wait_is_not_forgotten(fit: Any, rescue: Path) -> None:
    def ask(trainer: Any) -> None:
        if trainer.global_step == 2:
            trainer.should_stop = True

    arguments: dict[str, Any] = {"max_epochs": 9, "min_epochs": 2}
    asking = at("on_train_batch_end", ask)
    assert fit(asking, **arguments).trainer.current_epoch == 2
    fit(asking, breaks("on_before_backward", after(6)), **arguments)
    assert fit(ckpt_path=rescue, **arguments).trainer.current_epoch == 2


@pytest.mark.parametrize("moment", ["on_train_end", "on_fit_end", "teardown"])
def test_t26_saved_when_all_is_over(fit: Any, tmp_path: Path, moment: str) -> None:
    whole = fit(at(moment, lambda trainer: trainer.save_checkpoint(tmp_path / "a"), position="last"))
    resumed = fit(ckpt_path=tmp_path / "a")
    assert whole.metrics
    assert same(resumed, whole)
    resumed.trainer.save_checkpoint(tmp_path / "b")
    longer = [fit(ckpt_path=tmp_path / name, max_epochs=3) for name in "ab"]
    assert same(*longer)


def test_t26_a_watched_value_is_there_when_an_epoch_begins(fit: Any, tmp_path: Path) -> None:
    """It was logged in the epoch before, and the next validation is far away."""
    saving = at("on_train_epoch_start", lambda trainer: trainer.save_checkpoint(tmp_path / str(trainer.current_epoch)))
    fit(saving)
    seen: list[float] = []
    noting = at("on_train_batch_end", lambda trainer: seen.append(float(trainer.callback_metrics["val_loss"])))
    fit(noting, ckpt_path=tmp_path / "1")
    assert len(seen) == 5


# ---- the sanity check ------------------------------------------------------------------------------------------------


def checks(run: Any, *callbacks: Callback, **arguments: Any) -> int:
    begun: list[int] = []
    run(*callbacks, at("on_sanity_check_start", lambda trainer: begun.append(1)), **arguments)
    return len(begun)


def test_t18_the_sanity_check_is_skipped_only_inside_an_epoch_or_a_validation(fit: Any, tmp_path: Path) -> None:
    def saving(moment: str) -> Callback:
        return at(moment, lambda trainer: trainer.save_checkpoint(tmp_path / moment), position="last")

    moments = ("on_train_epoch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end")
    assert checks(fit, *map(saving, moments), max_epochs=1) == 1
    found = {moment: checks(fit, ckpt_path=tmp_path / moment) for moment in moments}
    assert found == dict(zip(moments, (1, 0, 0, 1), strict=True))


def test_t18_the_sanity_check_runs_in_every_fit(make_trainer: Any, ready: Any) -> None:
    begun: list[int] = []
    data = ready([torch.ones(2)] * 2)
    trainer = make_trainer(callbacks=at("on_sanity_check_start", lambda trainer: begun.append(1)))
    trainer.fit(Net(), data, data)
    trainer.fit(Net(), data, data)  # nothing is left to train
    trainer.max_epochs = 2
    trainer.fit(Net(), data, data)
    assert len(begun) == 2


@pytest.mark.parametrize("kept", [False, True])
def test_t18_the_sanity_check_leaves_no_trace_in_workers(make_trainer: Any, ready: Any, kept: bool) -> None:
    class Noise:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(())

    class Judged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                self.seen += batch.tolist()

    def seen(steps: int) -> list[float]:
        torch.manual_seed(4)
        val: DataLoader[Any] = DataLoader(Noise(), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
        if kept:
            list(val)  # its workers are alive when the fit begins
        module = Judged()
        make_trainer(num_sanity_val_steps=steps, max_epochs=2).fit(module, ready([torch.ones(2)]), val)
        return [*module.seen, torch.rand(()).item()]

    assert seen(0) == seen(2)


# ---- several optimizers, 16 bits -------------------------------------------------------------------------------------


class Two(LightningModule):
    """Two optimizers; the second one accumulates while the first one steps."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward((self.q * batch).pow(2).sum())
        first.zero_grad()
        self.manual_backward((self.p * batch).pow(2).sum())
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        self.losses.append(float((self.p + self.q).detach()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.01, momentum=0.5) for p in (self.p, self.q)]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_t26_gradients_that_wait_while_another_optimizer_steps(
    make_trainer: Any, ready: Any, tmp_path: Path, precision: str
) -> None:
    """Saved twice after every step, which must change nothing either."""

    def run(*callbacks: Callback, path: Any = None) -> Any:
        plugin: Any = {"precision": precision}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
            plugin = {"plugins": MixedPrecision("16-mixed", scaler=scaler)}
        module, trainer = Two(), make_trainer(**plugin, callbacks=list(callbacks))
        trainer.fit(module, ready([torch.tensor([float(i)]) for i in range(6)]), ckpt_path=path)
        return module.losses, trainer.precision_plugin.state_dict()

    def save(trainer: Any) -> None:
        for name in "ab":
            trainer.save_checkpoint(tmp_path / f"{name}{trainer.progress.batches_done}")

    whole = run()
    assert run(at("on_train_batch_end", save)) == whole
    for done in range(1, 6):
        for name in "ab":
            losses, state = run(path=tmp_path / f"{name}{done}")
            assert (losses, state) == (whole[0][done:], whole[1])


def test_t26_a_step_that_was_skipped_is_not_repeated_at_another_scale(
    make_trainer: Any, ready: Any, tmp_path: Path
) -> None:
    """The window is over although no step was counted, and the scale has been lowered for the next."""

    def run(*callbacks: Callback, path: Any = None) -> tuple[list[float], Any]:
        class One(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.net(batch.reshape(-1, 1)).sum() * (float("inf") if batch_idx == 2 else 1.0)

        module = One()
        trainer = make_trainer(
            precision="16-mixed",
            callbacks=[*callbacks, OnExceptionCheckpoint(tmp_path)],
            enable_checkpointing=True,
            limit_val_batches=0,
        )
        torch.manual_seed(1)
        with suppress(Broken):
            trainer.fit(module, ready([torch.ones(1)] * 5), ckpt_path=path)
        return [float(p.detach().sum()) for p in module.parameters()], trainer.precision_plugin.state_dict()

    whole = run()
    run(breaks("on_train_batch_end", after(3)))
    assert run(path=tmp_path / "on_exception.ckpt") == whole


# ---- which files are kept --------------------------------------------------------------------------------------------


def test_t26_a_link_goes_on_pointing_to_the_newest_ranked_file(fit: Any, tmp_path: Path) -> None:
    class Worse(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.current_epoch))

    def run(**arguments: Any) -> str:
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val_loss", save_last="link")
        fit(saver, module=Worse(), **arguments)
        return Path(saver.last_model_path).resolve().name

    assert run(max_epochs=3) == "epoch=0.ckpt"
    assert run(max_epochs=5, ckpt_path="last") == "epoch=0.ckpt"


def test_t26_no_second_file_for_a_step_that_was_saved_before_resuming(fit: Any, tmp_path: Path) -> None:
    """Two validations in one window fall on the same step."""

    def run(folder: str, **arguments: Any) -> list[str]:
        saver = ModelCheckpoint(
            tmp_path / folder, filename="{step}", save_top_k=-1, save_last=True, save_on_train_epoch_end=False
        )
        fit(
            *arguments.pop("more", ()), saver, val_check_interval=1, accumulate_grad_batches=2, max_epochs=1,
            limit_train_batches=4, **arguments,
        )  # fmt: skip
        return sorted(path.name for path in (tmp_path / folder).iterdir())

    whole = run("whole")
    run("parts", more=[breaks("on_train_batch_start", after(2))])
    assert run("parts", ckpt_path=tmp_path / "parts" / "last.ckpt") == whole


# ---- saved by hand in the middle of a batch, or in the sanity check --------------------------------------------------


def by_hand(make_trainer: Any, ready: Any, callback: Callback | None, path: Path | None = None) -> Ended:
    """Two epochs of five batches, with a validation after each second batch; no callback saves on exceptions."""
    module, counter, logger = Net(), Counter(), Rows()
    trainer = make_trainer(
        max_epochs=2,
        val_check_interval=2,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[counter] if callback is None else [callback, counter],
    )
    torch.manual_seed(3 if path is None else 99)
    data, judged = (ready([torch.full((2,), float(i)) for i in range(count)]) for count in (5, 2))
    with suppress(Broken):
        trainer.fit(module, data, judged, ckpt_path=path)
    return Ended(trainer, module, counter, logger.rows, {}, torch.get_rng_state())


def saves(moment: str, path: Path, when: Any = lambda trainer: True) -> Callback:
    """A callback that saves in one hook and ends the run there."""

    def save(trainer: Any) -> None:
        if when(trainer):
            trainer.save_checkpoint(path)
            raise Broken

    return at(moment, save)


@pytest.mark.parametrize("moment", ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("batch", range(10))
def test_t26_a_batch_in_whose_middle_was_saved_comes_again(
    make_trainer: Any, ready: Any, tmp_path: Path, moment: str, batch: int
) -> None:
    whole = by_hand(make_trainer, ready, None)
    path = tmp_path / "saved.ckpt"
    callback = saves(moment, path, lambda trainer: trainer.progress.total_batches == batch)
    first = by_hand(make_trainer, ready, callback)
    assert path.exists()
    with pytest.warns(UserWarning, match=r"saved in the middle of a batch|saved in the first batch of an epoch"):
        second = by_hand(make_trainer, ready, None, path)
    assert second.module.batches == whole.module.batches[batch:]
    validated = [[step for step, row in run.rows if "val_loss" in row] for run in (whole, first, second)]
    assert validated[1] + validated[2] == validated[0]  # none is missing, and none comes twice


@pytest.mark.parametrize(
    "moment",
    ["on_sanity_check_start", "on_validation_batch_start", "on_validation_epoch_end", "on_sanity_check_end"],
)
def test_t18_a_run_that_resumes_from_the_sanity_check_is_the_same(
    make_trainer: Any, ready: Any, tmp_path: Path, moment: str
) -> None:
    whole = by_hand(make_trainer, ready, None)
    by_hand(make_trainer, ready, saves(moment, tmp_path / "saved.ckpt"))
    again = by_hand(make_trainer, ready, None, tmp_path / "saved.ckpt")
    assert again.rows == whole.rows
    assert same(again, whole)
