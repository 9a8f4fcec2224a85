"""Corners of leaving and taking up, each of which was wrong once."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

from drivetrain import Callback, LightningModule, WeightedLoss, seed_everything
from drivetrain.callbacks import OnExceptionCheckpoint
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.logbook import Logbook
from drivetrain.loops.metrics import metrics_in
from drivetrain.loops.restart import Options
from drivetrain.precision import MixedPrecision


class Slope(LightningModule):
    """The gradient of each batch is 1; the steps that are taken are written down."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.weighted = weighted
        self.batches: list[int] = []
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch_idx)
        loss = self.weight.sum()
        return WeightedLoss(loss, 2) if self.weighted else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Slope):
    """Steps after every second batch, wherever that lies."""

    automatic_optimization = False
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.weight.sum() / 2)
        self.seen += 1
        if self.seen % 2 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def at(moment: str, do: Any, when: Any = lambda trainer: True) -> Callback:
    class Acting(Callback):
        position = "last"

    def hook(self: Any, trainer: Any, *_: Any) -> None:
        if when(trainer):
            do(trainer)

    setattr(Acting, moment, hook)
    return Acting()


def save_at(moment: str, path: Path, when: Any = lambda trainer: True) -> Callback:
    return at(moment, lambda trainer: trainer.save_checkpoint(path), when)


@pytest.fixture
def five(ready: Any) -> Any:
    return ready([torch.ones(1)] * 5)


@pytest.mark.parametrize("when", ["on_train_end", "on_fit_end"])
@pytest.mark.parametrize("max_steps", [3, 5])
def test_t26_saved_when_training_has_ended(
    make_trainer: Any, five: Any, tmp_path: Path, when: str, max_steps: int
) -> None:
    path = tmp_path / "a"
    make_trainer(max_epochs=-1, max_steps=max_steps, callbacks=save_at(when, path)).fit(Slope(), five)
    module = Slope()
    make_trainer(max_epochs=-1, max_steps=7).fit(module, five, ckpt_path=path)
    assert module.batches == [(max_steps + i) % 5 for i in range(7 - max_steps)]


def test_t26_the_checkpoint_of_the_very_last_step_still_has_the_epochs_end_before_it(
    make_trainer: Any, five: Any, tmp_path: Path
) -> None:
    saving = save_at("on_train_batch_end", tmp_path / "a")
    make_trainer(max_epochs=-1, max_steps=5, callbacks=saving).fit(Slope(), five)
    ended: list[int] = []
    noting = at("on_train_epoch_end", lambda trainer: ended.append(trainer.current_epoch))
    trainer = make_trainer(max_epochs=-1, max_steps=5, callbacks=noting)
    trainer.fit(Slope(), five, ckpt_path=tmp_path / "a")
    assert (ended, trainer.current_epoch) == ([0], 1)


def test_t52_a_metric_object_goes_on_where_it_was(make_trainer: Any, five: Any, tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Summing(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric.update(1.0)
            self.log("sum", self.metric, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    def run(callbacks: Any = None, path: Any = None) -> list[float]:
        sums: list[float] = []
        noting = at("on_train_epoch_start", lambda t: sums.append(float(t.callback_metrics.get("sum", 0))))
        trainer = make_trainer(max_epochs=3, callbacks=[noting, *(callbacks or [])])
        trainer.fit(Summing(), five, ckpt_path=path)
        return [*sums, float(trainer.callback_metrics["sum"])]

    last = lambda trainer: trainer.current_epoch == 1 and trainer.progress.batches_done == 5  # noqa: E731
    middle = lambda trainer: trainer.current_epoch == 1 and trainer.progress.batches_done == 2  # noqa: E731
    savers = [
        save_at("on_train_epoch_end", tmp_path / "end", lambda trainer: trainer.current_epoch == 1),
        save_at("on_train_batch_end", tmp_path / "last", last),
        save_at("on_train_batch_end", tmp_path / "middle", middle),
    ]
    assert run(savers) == [0.0, 5.0, 5.0, 5.0]
    for name in ("end", "last", "middle"):
        assert run(path=tmp_path / name)[-2:] == [5.0, 5.0], name


@pytest.mark.parametrize("weighted", [False, True])
def test_t12_a_window_keeps_its_length_when_accumulation_is_switched_off(
    make_trainer: Any, ready: Any, weighted: bool
) -> None:
    off = at("on_train_batch_end", lambda t: setattr(t, "accumulate_grad_batches", 1), lambda t: t.global_step == 0)
    module = Slope(weighted)
    make_trainer(accumulate_grad_batches=2, callbacks=off).fit(module, ready([torch.ones(1)] * 4))
    assert module.gradients == pytest.approx([1.0, 1.0, 1.0])


def test_t12_a_window_keeps_its_length_when_it_is_resumed_without_accumulation(
    make_trainer: Any, ready: Any, tmp_path: Path
) -> None:
    batches = ready([torch.ones(1)] * 6)
    saving = save_at("on_train_batch_end", tmp_path / "a", lambda t: t.progress.batches_done == 1)
    make_trainer(accumulate_grad_batches=3, callbacks=saving).fit(Slope(), batches)
    module = Slope()
    trainer = make_trainer()
    trainer.fit(module, batches, ckpt_path=tmp_path / "a")
    assert module.gradients == pytest.approx([1.0] * 4)
    assert trainer.current_run.window.batches_done == 0


def test_t18_validation_keeps_gradients_that_are_added_up_by_hand(make_trainer: Any, ready: Any) -> None:
    module, batches = ByHand(), ready([torch.ones(1)] * 4)
    make_trainer(val_check_interval=1).fit(module, batches, batches)
    assert module.gradients == [1.0, 1.0]


@pytest.mark.parametrize("moment", ["on_train_epoch_start", "on_train_epoch_end", "on_train_batch_end"])
def test_t26_gradients_by_hand_reach_over_an_epochs_end(
    make_trainer: Any, ready: Any, tmp_path: Path, moment: str
) -> None:
    batches = ready([torch.ones(1)] * 3)
    saving = save_at(moment, tmp_path / "a", lambda t: t.progress.total_batches == 3)
    arguments = {"max_epochs": 2, "limit_val_batches": 0}
    make_trainer(**arguments, callbacks=saving).fit(ByHand(), batches)
    module = ByHand()
    make_trainer(**arguments).fit(module, batches, ckpt_path=tmp_path / "a")
    assert module.gradients == [1.0, 1.0]


@pytest.mark.parametrize("own_step", [False, True])
def test_3_10_a_batch_is_stepped_by_the_optimizers_it_was_begun_with(
    make_trainer: Any, five: Any, own_step: bool
) -> None:
    class Own(Slope):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)

    module = Own() if own_step else Slope()
    fresh = torch.optim.SGD(module.parameters(), lr=0.5)
    swap = at("on_train_batch_start", lambda t: setattr(t, "optimizers", [fresh]), lambda t: t.global_step == 1)
    trainer = make_trainer(callbacks=swap, gradient_clip_val=0.5)
    trainer.fit(module, five)
    assert trainer.global_step == len(module.gradients) == 5
    assert trainer.optimizers == [fresh]
    assert module.weight.item() == pytest.approx(-0.5 * (2 * 0.1 + 3 * 0.5))


def test_a_limit_below_what_is_done_is_said(make_trainer: Any, five: Any, tmp_path: Path) -> None:
    saving = save_at("on_train_batch_end", tmp_path / "a", lambda t: t.progress.batches_done == 4)
    make_trainer(callbacks=saving).fit(Slope(), five)
    for limit in (2, 4):
        with pytest.raises(CheckpointError, match=f"4 batches of an epoch, which now has only {limit}"):
            make_trainer(limit_train_batches=limit).fit(Slope(), five, ckpt_path=tmp_path / "a")


def test_t21_a_resumed_window_whose_rest_gives_no_loss(make_trainer: Any, ready: Any, tmp_path: Path) -> None:
    class Sparse(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx else super().training_step(batch, batch_idx)

    def scaled() -> MixedPrecision:
        return MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))

    saving = save_at("on_train_batch_end", tmp_path / "a", lambda t: t.progress.batches_done == 1)
    batches = ready([torch.ones(1)] * 2)
    make_trainer(plugins=scaled(), accumulate_grad_batches=2, callbacks=saving).fit(Sparse(), batches)
    module = Sparse()
    make_trainer(plugins=scaled(), accumulate_grad_batches=2).fit(module, batches, ckpt_path=tmp_path / "a")
    assert module.gradients == [1.0]


def test_a_cut_fit_that_was_followed_by_a_validation_can_be_resumed(
    make_trainer: Any, five: Any, tmp_path: Path
) -> None:
    class Validated(Slope):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    trainer, module = make_trainer(max_steps=3), Validated()
    trainer.fit(module, five, five)
    trainer.validate(module, five, verbose=False)
    trainer.save_checkpoint(tmp_path / "a")
    again = make_trainer(max_epochs=-1, max_steps=5)
    again.fit(Validated(), five, five, ckpt_path=tmp_path / "a")
    assert again.global_step == 5


def test_t49_raising_max_steps_at_the_last_step_goes_on_in_the_epoch(make_trainer: Any, five: Any) -> None:
    module = Slope()
    more = at("on_train_batch_end", lambda t: setattr(t, "max_steps", 7), lambda t: t.global_step == 3)
    make_trainer(max_epochs=-1, max_steps=3, callbacks=more).fit(module, five)
    assert module.batches == [0, 1, 2, 3, 4, 0, 1]


def test_t34_switching_training_off_between_epochs_ends_it(make_trainer: Any, five: Any) -> None:
    module = Slope()
    off = at("on_train_epoch_end", lambda t: setattr(t, "limit_train_batches", 0))
    make_trainer(max_epochs=3, callbacks=off).fit(module, five)
    assert module.batches == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("saved_in", "made_later"), [(0, [2, 4]), (2, [4])])
def test_t40_a_resumed_loader_is_as_old_as_it_was(
    make_trainer: Any, ready: Any, tmp_path: Path, saved_in: int, made_later: list[int], asks: bool
) -> None:
    class Loading(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[int] = []

        def configure_optimizers(self) -> Any:
            if asks:  # which makes the loader before the run knows its epoch
                assert self.trainer.num_training_batches == 2
            return super().configure_optimizers()

        def train_dataloader(self) -> Any:
            self.made.append(self.current_epoch)
            return ready([torch.ones(1)] * 2)

    arguments = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2}
    saving = save_at("on_train_epoch_end", tmp_path / "a", lambda t: t.current_epoch == saved_in)
    whole = Loading()
    make_trainer(**arguments, callbacks=saving).fit(whole)
    resumed = Loading()
    make_trainer(**arguments).fit(resumed, ckpt_path=tmp_path / "a")
    assert whole.made == [0, 2, 4]
    assert resumed.made[1:] == made_later


def test_t37_a_step_that_finds_no_further_batch_is_left_out(make_trainer: Any, five: Any) -> None:
    class Pairs(Slope):
        def training_step(self, dataloader_iter: Any) -> Any:
            taken = [next(dataloader_iter)[1], next(dataloader_iter)[1]]
            self.batches += taken
            return self.weight.sum()

        def validation_step(self, dataloader_iter: Any) -> None:
            next(dataloader_iter)
            next(dataloader_iter)

    module, trainer = Pairs(), make_trainer()
    trainer.fit(module, five, five)
    assert module.batches == [0, 1, 2, 3]
    assert trainer.global_step == 2
    assert trainer.current_run.batches is None


def test_t18_the_sanity_check_draws_from_no_generator_of_the_users_own(make_trainer: Any) -> None:
    class Seen(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.order.append(int(batch))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def order(steps: int) -> list[int]:
        generator = torch.Generator().manual_seed(4)
        train, val = (DataLoader(list(range(8)), shuffle=True, generator=generator) for _ in range(2))  # type: ignore[arg-type]
        module = Seen()
        make_trainer(num_sanity_val_steps=steps).fit(module, train, val)
        return module.order

    assert order(0) == order(2)


def test_an_optimizer_that_needs_a_loss_says_so(make_trainer: Any, five: Any) -> None:
    class NoLoss(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match="LBFGS cannot do without. Return a loss for every batch"):
        make_trainer().fit(NoLoss(), five)


def test_t20_an_exception_between_toggle_and_untoggle_leaves_nothing_frozen(make_trainer: Any, five: Any) -> None:
    class Breaking(ByHand):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.toggle_optimizer(self.optimizers()[0])
            raise RuntimeError("broken")

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]

    module = Breaking()
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(limit_val_batches=0).fit(module, five)
    assert all(p.requires_grad for p in module.parameters())


def test_t19_accumulation_cannot_be_switched_on_under_manual_optimization(make_trainer: Any, five: Any) -> None:
    writing = at("on_train_start", lambda t: setattr(t, "accumulate_grad_batches", 4))
    with pytest.raises(ConfigurationError, match="would do nothing under manual optimization"):
        make_trainer(callbacks=writing, limit_val_batches=0).fit(ByHand(), five)


def test_a_wrapped_optimizer_can_be_copied(make_trainer: Any, five: Any) -> None:
    module, trainer = Slope(), make_trainer()
    trainer.fit(module, five)
    copied = copy.deepcopy(module.optimizers())
    assert copied.param_groups[0]["lr"] == 0.1


# ---- metric objects --------------------------------------------------------------------------------------------------


class Counting(Slope):
    """Counts its batches with metrics that are in a list, in a dictionary, and nowhere that can be found."""

    def __init__(self, nowhere: Any = None) -> None:
        super().__init__()
        self.kept, self.by_name = [SumMetric()], {"of one": (SumMetric(),)}
        reachable = [self.kept[0], self.by_name["of one"][0]]
        self.metrics = lambda: reachable if nowhere is None else [nowhere]  # nobody looks into a function

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for number, metric in enumerate(self.metrics()):
            metric.update(torch.ones(()))
            self.log(f"metric {number}", metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_in_a_list_goes_on_with_what_it_has_counted(make_trainer: Any, five: Any, tmp_path: Path) -> None:
    saving = save_at("on_train_batch_end", tmp_path / "a", lambda t: t.progress.batch_idx == 2)
    make_trainer(callbacks=saving).fit(Counting(), five)
    resumed = make_trainer()
    resumed.fit(Counting(), five, ckpt_path=tmp_path / "a")
    assert {name: float(value) for name, value in resumed.callback_metrics.items()} == {"metric 0": 5, "metric 1": 5}


def test_a_metric_that_no_checkpoint_can_hold_is_a_warning(make_trainer: Any, five: Any, tmp_path: Path) -> None:
    saving = save_at("on_train_batch_end", tmp_path / "a", lambda t: t.progress.batch_idx == 2)
    with pytest.warns(UserWarning, match="metric 0: the metric object that is logged under this name cannot"):
        make_trainer(callbacks=saving).fit(Counting(SumMetric()), five)


def test_metrics_are_found_by_places_that_are_no_two_alike() -> None:
    module: Any = Counting()
    both = SumMetric()
    module.both, module.more = both, {"both": both, "a": {"b": SumMetric()}, "a.b": [SumMetric(), module]}
    places = metrics_in(module)
    assert places["both"] is both
    assert set(places) == {"both", "kept[0]", "by_name['of one'][0]", "more['a']['b']", "more['a.b'][0]"}


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_exception_after_a_skipped_step_resumes_with_the_scale_at_the_start_of_the_window(
    make_trainer: Any, five: Any, tmp_path: Path, by_hand: bool
) -> None:
    class Overflowing(Slope):
        automatic_optimization = not by_hand
        fails = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.weight.sum() * (float("inf") if batch_idx == 2 else 1)
            if not by_hand:
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.fail(batch_idx)
            return None

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
            optimizer.step(closure=optimizer_closure)
            self.fail(batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None: ...

        def fail(self, batch_idx: int) -> None:
            if self.fails and batch_idx == 2:
                raise RuntimeError("broken")

    def run(fails: bool = False, path: Any = None) -> tuple[float, float, int]:
        plugin, module = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=64.0)), Overflowing()
        module.fails = fails
        saver = OnExceptionCheckpoint(tmp_path)
        trainer = make_trainer(plugins=plugin, enable_checkpointing=True, callbacks=[saver])
        trainer.fit(module, five, ckpt_path=path)
        return plugin.state_dict()["scale"], float(module.weight.detach()), trainer.global_step

    whole = run()
    with pytest.raises(RuntimeError, match="broken"):
        run(fails=True)
    assert run(path=tmp_path / "on_exception.ckpt") == whole == (32.0, pytest.approx(-0.4), 4)


def test_ctrl_c_where_a_cut_epoch_ends_is_resumed_in_that_epoch(
    make_trainer: Any, five: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(book: Any, group: str) -> None:
        raise KeyboardInterrupt

    arguments = {"enable_checkpointing": True, "callbacks": OnExceptionCheckpoint(tmp_path), "max_epochs": -1}
    with monkeypatch.context() as patched:
        patched.setattr(Logbook, "agree_on_epoch", interrupted)
        with pytest.raises(SystemExit):
            make_trainer(max_steps=3, **arguments).fit(Slope(), five)
    first = make_trainer(max_steps=3, **arguments)
    with monkeypatch.context() as patched:
        patched.setattr(Logbook, "agree_on_epoch", interrupted)
        with pytest.raises(SystemExit):
            first.fit(Slope(), five)
    module, trainer = Slope(), make_trainer(max_steps=7, **arguments)
    trainer.fit(module, five, ckpt_path=tmp_path / "on_exception.ckpt")
    assert module.batches == [3, 4, 0, 1]
    assert (trainer.current_epoch, trainer.progress.total_batches) == (2, 7)


class Samples(Slope):
    """Writes down the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples += batch.tolist()
        return super().training_step(batch.float(), batch_idx)


def saved_after_four_samples(make_trainer: Any, path: Path, shuffle: bool = False, **arguments: Any) -> list[int]:
    """Save a run after two batches of two; return all samples of its epoch."""
    save = at(
        "on_train_batch_end",
        lambda trainer: trainer.save_checkpoint(path),
        lambda trainer: trainer.progress.batches_done == 2,
    )
    module = Samples()
    torch.manual_seed(3)
    make_trainer(callbacks=[save], **arguments).fit(module, DataLoader(list(range(12)), batch_size=2, shuffle=shuffle))
    assert torch.load(path, weights_only=True)["restart"]["samples"] == 4
    return module.samples


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "batches"), [(2, 2), (4, 1), (1, 4), (3, 1), (5, 1)])
def test_with_another_batch_size_an_epoch_goes_on_at_its_next_sample(
    make_trainer: Any, tmp_path: Path, caplog: Any, batch_size: int, batches: int, shuffle: bool
) -> None:
    path, module = tmp_path / "a.ckpt", Samples()
    every = saved_after_four_samples(make_trainer, path, shuffle)
    trainer = make_trainer()
    with caplog.at_level("INFO"):
        trainer.fit(module, DataLoader(list(range(12)), batch_size=batch_size, shuffle=shuffle), ckpt_path=path)
    assert module.samples == every[4:]
    assert sorted(every) == list(range(12))
    assert trainer.progress.total_batches == batches - (-8 // batch_size)
    line = f"saved after 4 samples of an epoch, in 2 batches. They count as {batches} batch"
    assert (line in caplog.text) == (batch_size != 2)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            {"shuffle": True},
            "a SequentialSampler had ordered, and this DataLoader has a RandomSampler: samples",
        ),
        ({"batch_size": None, "dataset": [torch.tensor(number) for number in range(10)]}, "over 12 samples, and this"),
        ({"dataset": list(range(10))}, "in the middle of an epoch over 12 samples, and this DataLoader draws from 10"),
    ],
)
def test_an_order_in_which_samples_would_be_skipped_or_repeated_is_an_error(
    make_trainer: Any, tmp_path: Path, loader: dict[str, Any], message: str
) -> None:
    path, module = tmp_path / "a.ckpt", Samples()
    saved_after_four_samples(make_trainer, path)
    with pytest.raises(CheckpointError, match=message):
        make_trainer().fit(
            module, DataLoader(**{"dataset": list(range(12)), "batch_size": 2, **loader}), ckpt_path=path
        )
    assert module.samples == []


def test_a_longer_dataset_that_is_read_in_order_goes_on_exactly(make_trainer: Any, tmp_path: Path) -> None:
    path, module = tmp_path / "a.ckpt", Samples()
    saved_after_four_samples(make_trainer, path)
    make_trainer().fit(module, DataLoader(list(range(14)), batch_size=2), ckpt_path=path)
    assert module.samples == list(range(4, 14))


def test_a_window_goes_on_with_batches_of_another_size(make_trainer: Any, tmp_path: Path, caplog: Any) -> None:
    path, module = tmp_path / "a.ckpt", Samples()
    saved_after_four_samples(make_trainer, path, accumulate_grad_batches=3)
    trainer = make_trainer(accumulate_grad_batches=3)
    with caplog.at_level("INFO"):
        trainer.fit(module, DataLoader(list(range(12)), 4), ckpt_path=path)
    assert module.samples == list(range(4, 12))
    assert trainer.global_step == 2  # of three batches, and of the last one
    assert "In the unfinished window, each batch counts alike." in caplog.text


def test_the_rest_of_an_epoch_ends_with_a_batch_also_where_small_ones_are_left_out(
    make_trainer: Any, tmp_path: Path
) -> None:
    path, module = tmp_path / "a.ckpt", Samples()
    saved_after_four_samples(make_trainer, path)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, DataLoader(list(range(12)), batch_size=10, drop_last=True), ckpt_path=path)
    assert module.samples == [*range(4, 12), *range(10)]


def test_samples_without_batches_are_counted_too(make_trainer: Any, tmp_path: Path) -> None:
    path, module = tmp_path / "a.ckpt", Samples()
    saved_after_four_samples(make_trainer, path)
    single = DataLoader([torch.tensor([number]) for number in range(12)], batch_size=None)
    make_trainer().fit(module, single, ckpt_path=path)
    assert module.samples == list(range(4, 12))


def test_a_sampler_with_another_seed_is_refused_in_the_middle_of_an_epoch(make_trainer: Any, tmp_path: Path) -> None:
    data, path, module = list(range(12)), tmp_path / "a.ckpt", Samples()

    def loader(seed: int) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=seed)  # type: ignore[arg-type]
        return DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    save = at(
        "on_train_batch_end",
        lambda trainer: trainer.save_checkpoint(path),
        lambda trainer: trainer.progress.batches_done == 2,
    )
    make_trainer(callbacks=[save]).fit(Samples(), loader(3))
    with pytest.raises(CheckpointError, match="DistributedSampler had seed=3, and now it has seed=5: samples would be"):
        make_trainer().fit(module, loader(5), ckpt_path=path)
    make_trainer().fit(module, loader(3), ckpt_path=path)
    assert len(module.samples) == 8


# ---- states that are kept at the start of each window ----------------------------------------------------------------


def replaced_params(strategy: Any) -> None:
    strategy.optimizers[0].param_groups[0]["params"][0] = nn.Parameter(torch.zeros(1))


def renamed_option(strategy: Any) -> None:
    group = strategy.optimizers[0].param_groups[0]
    group["momentums"] = group.pop("momentum")


def set_option(name: str, value: Any) -> Any:
    return lambda strategy: strategy.optimizers[0].param_groups[0].__setitem__(name, value)


def scheduled(strategy: Any) -> None:
    strategy.lr_scheduler_configs.append(object())


CHANGES = {
    "learning rate": set_option("lr", 0.2), "new option": set_option("new", 1), "renamed": renamed_option,
    "a parameter": replaced_params,
    "more parameters": lambda strategy: strategy.optimizers[0].param_groups[0]["params"].append(object()),
    "no parameters": lambda strategy: strategy.optimizers[0].param_groups[0]["params"].clear(),
    "another group": lambda strategy: strategy.optimizers[0].param_groups.append({"params": []}),
    "another optimizer": lambda strategy: strategy.optimizers.append(torch.optim.SGD([nn.Parameter(torch.ones(1))])),
    "its copy": lambda strategy: strategy.optimizers.__setitem__(0, copy.deepcopy(strategy.optimizers[0])),
    "a scheduler": scheduled,
}  # fmt: skip


def with_an_optimizer(**options: Any) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))], **{"lr": 0.1, **options})
    return SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[])


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_options_are_copied_again_once_they_change(change: Any) -> None:
    strategy = with_an_optimizer()
    options = Options(strategy)
    assert options.hold(strategy)
    change(strategy)
    assert not options.hold(strategy)


@pytest.mark.parametrize("value", [torch.tensor(0.1), [1, 2]], ids=["tensor", "list"])
def test_options_that_may_change_in_place_are_always_copied_again(value: Any) -> None:
    strategy = with_an_optimizer()
    strategy.optimizers[0].param_groups[0]["own"] = value
    assert not Options(strategy).hold(strategy)


@pytest.mark.parametrize("stops_in", ["on_train_batch_start", "on_before_zero_grad", "on_after_backward"])
@pytest.mark.parametrize("changes", ["nothing", "rate", "buffer", "generators"])
def test_a_fit_resumes_exactly_whatever_changes_between_windows(
    make_trainer: Any, ready: Any, tmp_path: Path, stops_in: str, changes: str
) -> None:
    """Between most windows only some of the kept states change; the others are those of an earlier window."""

    class Drawing(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layer, self.losses = nn.Linear(4, 1), dict[int, float]()
            if changes == "buffer":
                self.register_buffer("count", torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(nn.functional.dropout(batch)).square().mean()
            if changes == "buffer":
                self.count += 1
                loss = loss * self.count
            if changes == "generators" and batch_idx % 3 == 1:
                loss = loss * (random.random() + random.gauss(0, 1) + np.random.rand())
            self.losses[batch_idx] = loss.item()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if changes == "rate" and batch_idx % 2:
                self.optimizers().param_groups[0]["lr"] *= 0.7

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def stop(trainer: Any) -> None:
        raise RuntimeError("stopped")

    loader = ready([torch.full((2, 4), 1.0 + index) for index in range(9)])
    saving: dict[str, Any] = {"enable_checkpointing": True}
    seed_everything(1)
    whole = Drawing()
    make_trainer(callbacks=[OnExceptionCheckpoint(tmp_path)], **saving).fit(whole, loader)
    seed_everything(1)
    stopping = at(stops_in, stop, lambda trainer: trainer.global_step == 6)
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(callbacks=[stopping, OnExceptionCheckpoint(tmp_path)], **saving).fit(Drawing(), loader)
    seed_everything(8)
    resumed = Drawing()
    make_trainer(callbacks=[OnExceptionCheckpoint(tmp_path)], **saving).fit(
        resumed, loader, ckpt_path=tmp_path / "on_exception.ckpt"
    )
    assert resumed.losses == {index: whole.losses[index] for index in (6, 7, 8)}
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
