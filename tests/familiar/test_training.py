"""Training as programs written for Lightning expect it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningDataModule, LightningModule
from drivetrain.callbacks import LearningRateMonitor
from drivetrain.compat.loop_views import EvaluationView
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.loggers import CSVLogger, Logger
from drivetrain.loops.progress import RunningStage, TrainerFn

pytestmark = pytest.mark.filterwarnings("ignore:.* has a validation_step but there is no validation loader")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


FORMS: dict[str, tuple[Any, int]] = {  # what is returned, and how many schedulers it has
    "an optimizer": (lambda o, s: o, 0),
    "a list": (lambda o, s: [o], 0),
    "a tuple": (lambda o, s: (o,), 0),
    "two lists": (lambda o, s: ([o], [s]), 1),
    "a list and a scheduler": (lambda o, s: ([o], s), 1),
    "a list and a dictionary": (lambda o, s: ([o], {"scheduler": s, "interval": "step"}), 1),
    "a list, and a list of dictionaries": (lambda o, s: ([o], [{"scheduler": s}]), 1),
    "a dictionary": (lambda o, s: {"optimizer": o}, 0),
    "a dictionary with a scheduler": (lambda o, s: {"optimizer": o, "lr_scheduler": s}, 1),
    "a dictionary with a dictionary": (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s}}, 1),
    "a list of dictionaries": (lambda o, s: [{"optimizer": o, "lr_scheduler": s}], 1),
    "two lists, the second empty": (lambda o, s: ([o], []), 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_configure_optimizers_in_every_form(make_trainer: Any, loader: Any, form: str) -> None:
    make, schedulers = FORMS[form]

    class Configured(Net):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            return make(optimizer, step_lr(optimizer) if schedulers else None)

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Configured(), loader)
    assert len(trainer.lr_scheduler_configs) == schedulers
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert (rate < 0.1) is bool(schedulers)


class OfOwnMake:
    """A scheduler that torch does not know."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self, metric: Any = None) -> None:
        self.calls += 1

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("make", [OfOwnMake, torch.optim.lr_scheduler.ReduceLROnPlateau])
def test_by_hand_any_scheduler_goes_without_a_monitor(make_trainer: Any, loader: Any, make: Any) -> None:
    class ByHand(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step(loss.detach())

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            return [optimizer], [make(optimizer)]

    make_trainer().fit(ByHand(), loader)


def test_a_closure_has_gradients_where_the_optimizers_step_has_none(make_trainer: Any, loader: Any) -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            loss = closure()  # without enable_grad, as some optimizers have it
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad)
            return loss

    class Stepped(Net):
        def configure_optimizers(self) -> Any:
            return Plain(self.parameters())

    model = Stepped()
    before = model.layer.weight.detach().clone()
    make_trainer().fit(model, loader)
    assert not torch.equal(before, model.layer.weight)


class Loaders(Net):
    """Writes down when a loader is made."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.made = loader, []

    def train_dataloader(self) -> Any:
        self.made.append(f"train {self.current_epoch}")
        return self.loader

    def val_dataloader(self) -> Any:
        self.made.append(f"val {self.current_epoch} {self.trainer.global_step}")
        return self.loader


def test_validation_loaders_are_made_when_validation_comes(make_trainer: Any, loader: Any) -> None:
    model = Loaders(loader)
    make_trainer(max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=0).fit(model)
    assert model.made == ["train 0", "val 1 8"]


def test_validation_loaders_are_not_made_with_a_limit_of_0(make_trainer: Any, loader: Any) -> None:
    model = Loaders(loader)
    make_trainer(limit_val_batches=0).fit(model)
    assert model.made == ["train 0"]


def test_the_age_of_a_validation_loader_counts_from_the_first_validation(make_trainer: Any, loader: Any) -> None:
    model = Loaders(loader)
    make_trainer(
        max_epochs=6, check_val_every_n_epoch=2, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=2
    ).fit(model)
    assert [each for each in model.made if "val" in each] == ["val 1 8", "val 3 16", "val 5 24"]


def test_a_loader_that_was_passed_is_checked_at_the_start(make_trainer: Any, loader: Any) -> None:
    model = Net()
    with pytest.raises(Exception, match="val_dataloaders"):
        make_trainer(num_sanity_val_steps=0).fit(model, loader, 5)
    assert model.layer.weight.grad is None


@pytest.mark.parametrize("shape", ["one", "list", "dictionary", "nested"])
def test_train_dataloader_has_the_nesting_that_was_passed(
    make_trainer: Any, loader: Any, data: Any, shape: str
) -> None:
    other = DataLoader(data, batch_size=8)
    passed: Any = {
        "one": loader, "list": [loader, other], "dictionary": {"a": loader, "b": other},
        "nested": {"a": [loader, other], "b": other},
    }[shape]  # fmt: skip

    class Any_(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            while not isinstance(batch, torch.Tensor):
                batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            return self.layer(batch).pow(2).mean()

    trainer = make_trainer()
    trainer.fit(Any_(), passed)
    assert trainer.train_dataloader is passed or trainer.train_dataloader == passed
    leaf = {"one": lambda t: t, "list": lambda t: t[0], "dictionary": lambda t: t["a"], "nested": lambda t: t["a"][1]}
    assert leaf[shape](trainer.train_dataloader) is leaf[shape](passed)


def test_the_epoch_of_a_resumed_run_is_the_coming_one(make_trainer: Any, loader: Any, tmp_path: Any) -> None:
    seen = []

    class Sees(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.current_epoch)

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Net(), loader)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    make_trainer(max_epochs=3, callbacks=Sees()).fit(Net(), loader, ckpt_path=tmp_path / "end.ckpt")
    assert seen == [2]


class Logs(Net):
    def __init__(self, *hidden: str) -> None:
        super().__init__()
        self.hidden = hidden
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log("not_logged", loss, logger=False)
        self.log("at_both", float(batch_idx), on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(dict(self.trainer.logged_metrics))

    def on_train_epoch_end(self) -> None:
        self.log("late", 7.0)


def test_logged_metrics_holds_what_loggers_get_before_the_first_flush_too(make_trainer: Any, loader: Any) -> None:
    model = Logs()
    trainer = make_trainer(log_every_n_steps=3, logger=Keeps())
    trainer.fit(model, loader)
    assert {"loss", "at_both_step"} <= set(model.seen[0])
    assert all("not_logged" not in each for each in model.seen)
    assert "not_logged" not in trainer.logged_metrics
    assert {"late", "at_both_epoch"} <= set(trainer.logged_metrics)


class Reads(Net):
    """Logs in steps and for the epoch, and keeps what the two dictionaries hold at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {"train": [], "validation": [], "batch": []}
        self.count = 0

    def keep(self, where: str) -> None:
        trainer = self.trainer
        if not trainer.sanity_checking:
            self.kept[where].append((dict(trainer.logged_metrics), dict(trainer.callback_metrics)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("count", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(batch_idx), on_step=True, on_epoch=True)
        self.log("val_single", float(batch_idx), on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        self.keep("train")

    def on_validation_epoch_end(self) -> None:
        self.keep("validation")

    def on_validation_batch_end(self, *args: Any) -> None:
        self.keep("batch")


@pytest.mark.filterwarnings("ignore:.*no logger has seen it")
@pytest.mark.parametrize("has_logger", [True, False])
def test_logged_metrics_has_the_last_step_and_at_an_epochs_end_the_epoch(make_trainer: Any, has_logger: bool) -> None:
    model, batches = Reads(), [[torch.ones(2, 4)]] * 3
    trainer = make_trainer(max_epochs=2, logger=Keeps() if has_logger else False)  # log_every_n_steps=50: no flush
    trainer.fit(model, batches, batches)
    steps, validated = {"count_step": 2.0}, {"val_step": 2.0, "val_single": 2.0, "val_epoch": 1.0}
    epoch = {**steps, "count_epoch": 1.0, **validated}
    assert [logged for logged, _ in model.kept["train"]] == [epoch, epoch]
    assert model.kept["validation"][0][0] == {**steps, **validated}
    assert trainer.logged_metrics == epoch  # the logger gets "epoch" too, and nobody has logged it


@pytest.mark.filterwarnings("ignore:'shared' is logged in")
@pytest.mark.parametrize("every", [1.0, 2])
def test_logged_metrics_has_the_value_of_a_name_that_came_last(make_trainer: Any, every: float) -> None:
    class Shared(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("shared", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("shared", -1.0, on_step=True, on_epoch=False)

    batches = [[torch.ones(2, 4)]] * 3
    trainer = make_trainer(max_epochs=2, val_check_interval=every)
    trainer.fit(Shared(), batches, batches)
    assert trainer.logged_metrics == {"shared": -1.0 if every == 1.0 else 2.0}  # validation follows the last batch
    assert trainer.callback_metrics["shared"] == 2.0  # of an evaluation, it has epochs only


def test_callback_metrics_never_hold_a_value_of_one_validation_batch(make_trainer: Any) -> None:
    model, batches = Reads(), [[torch.ones(2, 4)]] * 3
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, batches, batches)
    assert [sorted(metrics) for _, metrics in model.kept["batch"]] == [["count", "count_step"]] * 3
    assert sorted(trainer.callback_metrics) == ["count", "count_epoch", "count_step", "val", "val_epoch"]
    trainer.validate(model, batches, verbose=False)
    assert sorted(trainer.callback_metrics) == ["val", "val_epoch"]
    assert model.kept["batch"][1][0]["val_step"] == 1.0  # loggers get it


def test_a_name_logged_in_the_step_and_at_the_epochs_end_shows_the_latter(make_trainer: Any, loader: Any) -> None:
    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("value", 5.0)

    trainer = make_trainer()
    trainer.fit(Both(), loader)
    assert float(trainer.callback_metrics["value"]) == 5.0


def test_the_loaders_number_is_the_third_argument_of_a_step_with_star_arguments(make_trainer: Any, loader: Any) -> None:
    seen = []

    class Star(Net):
        def validation_step(self, *args: Any) -> None:
            seen.append(args[1:])

    make_trainer().validate(Star(), [loader, loader])
    assert seen == [(i, k) for k in range(2) for i in range(4)]


class Sized(LightningDataModule):
    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.given = (batch_size, num_workers)


def test_a_datamodule_of_datasets_hands_its_arguments_on(data: Any) -> None:
    assert Sized.from_datasets(data, batch_size=3, num_workers=0).given == (3, 0)


def test_a_printed_datamodule_lists_its_loaders(data: Any) -> None:
    given = LightningDataModule.from_datasets(data, val_dataset=[data, data], batch_size=8)
    assert str(given).splitlines() == [
        "LightningDataModule",
        "  train_dataloader: DataLoader of 32 samples",
        "  val_dataloader: [DataLoader of 32 samples, DataLoader of 32 samples]",
    ]
    assert str(LightningDataModule()) == "LightningDataModule\n  no loaders"


def test_a_datamodule_that_is_not_set_up_can_be_printed() -> None:
    class Late(LightningDataModule):
        def test_dataloader(self) -> Any:
            return self.later  # type: ignore[attr-defined]

    assert "test_dataloader: not there yet (AttributeError: 'Late' object has no attribute 'later')" in str(Late())


def test_freeze_and_unfreeze_return_the_module() -> None:
    model = Net()
    assert model.freeze() is model
    assert not any(each.requires_grad for each in model.parameters())
    assert not model.training
    assert model.unfreeze() is model
    assert all(each.requires_grad for each in model.parameters())
    assert model.training


def test_strategies_have_their_names_in_any_case(make_trainer: Any) -> None:
    assert type(make_trainer(strategy="DDP", devices=1).strategy).__name__ == "DDPStrategy"


class Base(LightningModule):
    def __init__(self, first: int = 1, second: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


class Sub(Base):
    def __init__(self, first: int = 3, second: int = 4, third: int = 5) -> None:
        super().__init__(first, second)
        self.save_hyperparameters(ignore="first")


def test_ignoring_in_a_subclass_drops_what_the_base_saved() -> None:
    assert dict(Sub().hparams) == {"second": 4, "third": 5}


def test_strict_that_contradicts_strict_loading_is_an_error(make_trainer: Any, loader: Any, tmp_path: Any) -> None:
    class Loose(Net):
        @property
        def strict_loading(self) -> bool:
            return False

    trainer = make_trainer()
    trainer.fit(Loose(), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match="strict"):
        Loose.load_from_checkpoint(tmp_path / "a.ckpt", strict=True)
    Loose.load_from_checkpoint(tmp_path / "a.ckpt")


class Keeps(Logger):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "keeps"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def test_a_rates_name_has_group_and_momentum(make_trainer: Any, loader: Any) -> None:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "name": "biases"}]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            return [optimizer], [step_lr(optimizer)]

    keeps = Keeps()
    make_trainer(logger=keeps, callbacks=LearningRateMonitor("epoch", log_momentum=True)).fit(Groups(), loader)
    names = {name for row in keeps.rows for name in row}
    assert {"lr-SGD/pg1", "lr-SGD/biases", "lr-SGD/pg1-momentum", "lr-SGD/biases-momentum"} <= names


def test_a_logger_takes_its_arguments_by_keyword(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics(metrics={"a": 1.0}, step=3)
    logger.save()
    assert (Path(logger.log_dir) / "metrics.csv").read_text().split() == ["step,a", "3,1.0"]


def test_a_logger_gets_its_arguments_by_keyword(make_trainer: Any, loader: Any) -> None:
    class Reversed(Keeps):
        def log_metrics(self, *, step: Any, metrics: Any) -> None:
            super().log_metrics(metrics, step)

    logger = Reversed()
    make_trainer(logger=logger, log_every_n_steps=1, callbacks=LearningRateMonitor("step")).fit(Logs(), loader)
    assert {"loss", "lr-SGD"} <= {name for row in logger.rows for name in row}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's exporter itself
def test_a_model_is_exported_into_memory() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    buffer = io.BytesIO()
    model = Net()
    model.forward = model.layer.forward  # type: ignore[method-assign]
    model.to_onnx(buffer, torch.zeros(1, 4))
    assert buffer.getvalue()


class SelfShuffling:
    """A loader that is its own iterator and shuffles with each ``iter``, as those of some libraries do."""

    def __init__(self) -> None:
        self.data = torch.arange(24.0).reshape(6, 4)
        self.orders: list[list[int]] = []

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> SelfShuffling:
        self.orders.append(torch.randperm(6).tolist())
        self.left = list(self.orders[-1])
        return self

    def __next__(self) -> list[torch.Tensor]:
        if not self.left:
            raise StopIteration
        batch, self.left = self.left[:2], self.left[2:]
        return [self.data[batch]]


def test_a_loader_that_shuffles_itself_is_started_once_an_epoch(make_trainer: Any) -> None:
    training, validation = SelfShuffling(), SelfShuffling()
    make_trainer(max_epochs=2, num_sanity_val_steps=0).fit(Net(), training, validation)
    assert (len(training.orders), len(validation.orders)) == (2, 2)
    make_trainer().validate(Net(), validation, verbose=False)
    make_trainer().predict(Predicting(), validation)
    assert len(validation.orders) == 4


class Predicting(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])


class Unwrapped(Net):
    """Steps a torch optimizer that the Trainer does not see, and counts the steps itself, as PINA's solvers do."""

    def __init__(self, by_method: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.by_method = by_method
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch[0]).pow(2).mean())
        torch.optim.SGD.step(optimizer)

    def on_train_batch_end(self, *args: Any) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        steps = loop.manual_optimization.optim_step_progress
        if self.by_method:
            steps.increment_ready()
            steps.increment_completed()
        else:
            steps.total.completed += 1
        self.seen.append((loop.manual_optimization.optim_step_progress.total.completed, loop._batches_that_stepped))
        assert loop.automatic_optimization.optim_progress.optimizer_steps == 0


@pytest.mark.parametrize("by_method", [True, False])
def test_a_program_counts_the_steps_that_it_makes_past_the_trainer(make_trainer: Any, by_method: bool) -> None:
    model = Unwrapped(by_method)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(model, [[torch.ones(2, 4)]] * 2)
    assert trainer.global_step == 4
    assert model.seen == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_the_steps_of_automatic_optimization_are_read_from_the_loop(make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Net(), [[torch.ones(2, 4)]] * 3)
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    assert (steps.optimizer_steps, steps.optimizer.step.total.completed, steps.optimizer.step.total.ready) == (3, 3, 3)
    assert trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed == 0


class ShownElsewhere(EvaluationView):
    """A loop of torch-uncertainty's kind: it shows the results in a table of its own."""

    shown: list[Any] = []  # noqa: RUF012

    @staticmethod
    def _print_results(results: list[dict[str, Any]], stage: str) -> None:
        ShownElsewhere.shown.append((stage, [{name: value.item() for name, value in each.items()} for each in results]))


class WithTestStep(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", float(batch_idx))


def test_an_evaluation_loop_may_show_the_results(make_trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, batches = make_trainer(), [[torch.ones(2, 4)]] * 3
    trainer.test(WithTestStep(), batches)
    assert "test_loss" in capsys.readouterr().out
    trainer.test_loop = ShownElsewhere(trainer, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=True)
    assert trainer.test(WithTestStep(), batches) == [{"test_loss": 1.0}]
    trainer.test(WithTestStep(), batches, verbose=False)
    assert ShownElsewhere.shown == [("test", [{"test_loss": 1.0}])]
    assert "test_loss" not in capsys.readouterr().out
    assert trainer.test_loop.max_batches == [3]


def test_an_evaluation_loop_that_does_more_is_refused(make_trainer: Any) -> None:
    class Running(EvaluationView):
        def run(self) -> None: ...

    trainer = make_trainer()
    with pytest.raises(NotSupportedError, match=r"validate_loop was set to a Running, which defines run\."):
        trainer.validate_loop = Running(trainer, TrainerFn.VALIDATING)


# ---- what a loader counts, and a step that takes the iterator --------------------------------------------------------


class Counts(torch.utils.data.Sampler[int]):
    """Writes down, for each of its passes, its age and the last epoch that it was told."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int | None]] = []
        self.age, self.epoch = 0, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # type: ignore[assignment]

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        self.passes.append((self.age, self.epoch))
        self.age += 1
        return iter(range(8))


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_after_a_sanity_check_a_validation_loader_has_the_age_that_it_has_without_one(
    make_trainer: Any, data: Any, sanity_steps: int
) -> None:
    sampler, model = Counts(), Net()
    validation = DataLoader(data, batch_size=4, sampler=sampler)
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=sanity_steps)
    trainer.fit(model, DataLoader(data, batch_size=8), validation)
    assert sampler.passes[-2:] == [(0, 0), (1, 1)]
    trainer.validate(model, validation, verbose=False)
    assert sampler.passes[-1] == (2, 2)


def test_hooks_around_a_step_that_takes_dataloader_iter_get_the_batch_of_this_step(
    make_trainer: Any, loader: Any
) -> None:
    seen: list[tuple[str, int, float]] = []

    class Takes(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            assert dataloader_idx == 0
            seen.append(("step", batch_idx, float(batch[0].sum())))
            return super().training_step(batch, batch_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(("transfer", dataloader_idx, float(batch[0].sum())))
            return batch

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(("start", batch_idx, float(batch[0].sum())))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(("end", batch_idx, float(batch[0].sum())))

    make_trainer(limit_train_batches=2).fit(Takes(), loader)
    sums = [float(batch[0].sum()) for batch in loader]
    assert seen == [
        (kind, 0 if kind == "transfer" else index, sums[index])
        for index in (0, 1) for kind in ("transfer", "start", "step", "end")
    ]  # fmt: skip
