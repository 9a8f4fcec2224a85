"""self.log inside of a run: where it may be called, what it defaults to, and what arrives where."""

from __future__ import annotations

import csv
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.errors import LoggingError
from drivetrain.loggers import CSVLogger, Logger
from drivetrain.module.hooks import LOG_RULES


class Remembers(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.finalized: list[str] = []

    @property
    def name(self) -> str:
        return "remembers"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert all(type(value) in (float, int) for value in metrics.values())
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any) -> None:
        raise AssertionError("nothing to log here")

    def finalize(self, status: str) -> None:
        self.finalized.append(status)

    def of(self, name: str) -> list[tuple[int | None, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


def logging_in(regression: type[LightningModule], hook: str, **options: Any) -> Any:
    """A module that logs "x" in ``hook`` and nothing else."""

    def log_then(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log("x", 2.0, **options)
        return getattr(super(model, self), hook)(*args, **kwargs)

    def step(self: Any, batch: Any) -> Any:
        if hook.startswith(("validation", "test")):
            self.log("x", 2.0, **options)
        return self.loss(batch)

    methods: dict[str, Any] = {"validation_step": step} if "validation" in hook else {}
    if "test" in hook:
        methods["test_step"] = step
    if hook not in methods:
        methods[hook] = log_then
    model = type("Logs", (regression,), methods)
    return model()


def run(make_trainer: Any, model: Any, loader: Any, stage: str = "fit", **arguments: Any) -> tuple[Any, Remembers]:
    logger = Remembers()
    trainer = make_trainer(logger=logger, log_every_n_steps=1, gradient_clip_val=1.0, **arguments)
    if stage == "fit":
        validates = type(model).validation_step is not LightningModule.validation_step
        trainer.fit(model, loader, loader if validates else None)
    else:
        trainer.test(model, loader, verbose=False)
    return trainer, logger


@pytest.mark.parametrize("hook", sorted(LOG_RULES))
def test_every_hook_of_the_table_logs_with_its_defaults(
    regression: Any, loader: Any, make_trainer: Any, hook: str
) -> None:
    class WithScheduler(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    rule = LOG_RULES[hook]
    stage = "test" if "test" in hook else "fit"
    trainer, logger = run(make_trainer, logging_in(WithScheduler, hook), loader, stage, num_sanity_val_steps=0)
    seen = logger.of("x")
    assert seen, "nothing arrived"
    assert {value for _, value in seen} == {2.0}
    assert float(trainer.callback_metrics["x"]) == 2.0
    per_step = 1 if hook == "lr_scheduler_step" else 4
    assert len(seen) == (per_step if rule.on_step else 1)


FORBIDDEN = [
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "prepare_data",
    "configure_model", "configure_optimizers", "on_before_batch_transfer", "transfer_batch_to_device",
    "on_after_batch_transfer", "on_validation_model_eval", "on_save_checkpoint",
]  # fmt: skip


@pytest.mark.parametrize("hook", FORBIDDEN)
def test_other_hooks_may_not_log(regression: Any, loader: Any, make_trainer: Any, hook: str) -> None:
    assert hook not in LOG_RULES
    model = logging_in(regression, hook)
    with pytest.raises(LoggingError, match=r"self.log\('x', ...\) was called"):
        run(make_trainer, model, loader, enable_checkpointing=True)


def test_a_hook_reads_the_newest_values_of_the_bar_and_another_thread_those_of_the_last_flush(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    seen: list[tuple[dict[str, float], dict[str, float]]] = []

    class Reads(Callback):
        def look(self, trainer: Any, *args: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                in_thread = pool.submit(lambda: dict(trainer.progress_bar_metrics)).result()
            seen.append((in_thread, dict(trainer.progress_bar_metrics)))

        on_train_batch_end = look
        on_validation_epoch_end = look

    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("step", torch.tensor(float(batch_idx)), prog_bar=True, logger=False)
            self.log("hidden", 1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 3.0, prog_bar=True)

    trainer = make_trainer(max_epochs=1, log_every_n_steps=50, num_sanity_val_steps=0, callbacks=[Reads()])
    trainer.fit(Logs(), loader, loader)
    *steps, (before, after) = seen
    assert [now["step"] for _, now in steps] == [0.0, 1.0, 2.0, 3.0]
    assert [earlier for earlier, _ in steps] == [{}, {"step": 0.0}, {"step": 1.0}, {"step": 2.0}]
    assert "val" not in before
    assert after["val"] == 3.0
    assert "hidden" not in after


def test_both_give_two_names_and_a_plain_one_for_callbacks(regression: Any, loader: Any, make_trainer: Any) -> None:
    model = logging_in(regression, "training_step", on_step=True, on_epoch=True, prog_bar=True)
    trainer, logger = run(make_trainer, model, loader)
    assert [step for step, _ in logger.of("x_step")] == [0, 1, 2, 3]
    assert logger.of("x_epoch") == [(3, 2.0)]
    assert logger.of("x") == []
    assert set(trainer.callback_metrics) == {"x", "x_step", "x_epoch"}
    assert trainer.progress_bar_metrics == {"x_step": 2.0, "x_epoch": 2.0}


def test_t9_epoch_means_weigh_by_batch_size(regression: Any, data: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("batch", float(batch_idx), on_step=False, on_epoch=True)
            self.log("equal", float(batch_idx), on_step=False, on_epoch=True, batch_size=1)
            return self.loss(batch)

    _, logger = run(make_trainer, Logs(), DataLoader(data, batch_size=12))  # 12, 12 and 8
    assert logger.of("batch") == [(2, (0 * 12 + 1 * 12 + 2 * 8) / 32)]
    assert logger.of("equal") == [(2, 1.0)]


@pytest.mark.parametrize(
    ("every", "accumulate", "expected"),
    [(1, 1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, 1, [2, 5]), (2, 2, [1, 3]), (1, 3, [0, 1, 2, 3]), (0, 1, []), (8, 1, [7])],
)
def test_t11_when_and_where_steps_are_logged(
    regression: Any, loader: Any, make_trainer: Any, every: int, accumulate: int, expected: list[int]
) -> None:
    logger = Remembers()
    make_trainer(logger=logger, log_every_n_steps=every, max_epochs=2, accumulate_grad_batches=accumulate).fit(
        logging_in(regression, "training_step"), loader
    )
    assert [step for step, _ in logger.of("x")] == expected


def test_t11_a_metric_called_step_is_the_x_axis(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"x": 1.0, "step": 100.0 + batch_idx})
            return self.loss(batch)

    _, logger = run(make_trainer, Logs(), loader)
    assert logger.of("x") == [(100, 1.0), (101, 1.0), (102, 1.0), (103, 1.0)]
    assert logger.of("step") == []


def test_t11_epoch_metrics_carry_the_last_step_and_every_row_its_epoch(
    validated: Any, loader: Any, make_trainer: Any
) -> None:
    class Logs(validated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

    logger = Remembers()
    make_trainer(logger=logger, max_epochs=2).fit(Logs(), loader, loader)
    rows = [(step, sorted(row), row["epoch"]) for step, row in logger.rows]
    assert rows == [
        (3, ["epoch", "val_loss"], 0), (3, ["epoch", "loss"], 0),
        (7, ["epoch", "val_loss"], 1), (7, ["epoch", "loss"], 1),
    ]  # fmt: skip


def test_per_step_values_of_validation_have_their_own_steps_and_are_read_together(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Logs(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", torch.tensor(float(batch_idx)), on_step=True, on_epoch=True)

    logger = Remembers()
    trainer = make_trainer(logger=logger, max_epochs=2)
    trainer.fit(Logs(), loader, loader)
    assert logger.of("x_step") == [(i, float(i % 4)) for i in range(8)]
    assert logger.of("x_epoch") == [(3, 1.5), (7, 1.5)]
    assert trainer.logbook.flushes == 4  # in each of two epochs: the steps, and their mean


def test_the_epochs_value_wins_in_the_bar_over_the_steps_of_the_same_name(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Both(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("accuracy", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("accuracy", 100.0, prog_bar=True)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Both(), loader)
    assert trainer.progress_bar_metrics["accuracy"] == 100.0


def test_logger_false_and_prog_bar(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("private", 1.0, logger=False)
            self.log("shown", 2.0, prog_bar=True, logger=False)
            return self.loss(batch)

    trainer, logger = run(make_trainer, Logs(), loader)
    assert logger.rows == []
    assert trainer.progress_bar_metrics == {"shown": 2.0}
    assert set(trainer.callback_metrics) == {"private", "shown"}


def test_several_validation_loaders_get_a_suffix_unless_told_otherwise(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Logs(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", float(dataloader_idx))
            self.log(f"own{dataloader_idx}", 1.0, add_dataloader_idx=False)

    trainer = make_trainer()
    results = trainer.validate(Logs(), [loader, loader], verbose=False)
    assert results == [{"x/dataloader_idx_0": 0.0, "own0": 1.0}, {"x/dataloader_idx_1": 1.0, "own1": 1.0}]


def test_a_dictionary_is_logged_one_level_deep(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        nested: Any = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"plain": 1.0, "group": {"a": 2.0, "b": self.nested}})
            return self.loss(batch)

    trainer, _ = run(make_trainer, Logs(), loader)
    assert set(trainer.callback_metrics) == {"plain", "group/a", "group/b"}
    model = Logs()
    model.nested = {"c": 1.0}
    with pytest.raises(LoggingError, match="a dictionary inside a dictionary under 'b'"):
        run(make_trainer, model, loader)


def test_t10_the_same_options_aggregate(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for value in (1.0, 3.0):
                self.log("x", value, on_step=True, on_epoch=True)
            return self.loss(batch)

    _, logger = run(make_trainer, Logs(), loader)
    assert logger.of("x_epoch") == [(3, 2.0)]
    assert {value for _, value in logger.of("x_step")} == {3.0}


def test_t52_metric_objects_are_computed_at_the_end_and_reset(regression: Any, loader: Any, make_trainer: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Logs(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(float(batch_idx))
            self.log("x", self.mean, on_step=True, on_epoch=True)
            return self.loss(batch)

    model, logger = Logs(), Remembers()
    make_trainer(logger=logger, log_every_n_steps=1, max_epochs=2).fit(model, loader)
    assert logger.of("x_step") == [(i, float(i % 4)) for i in range(8)]
    assert logger.of("x_epoch") == [(3, 1.5), (7, 1.5)]  # not 1.5 over both epochs together with a leftover
    assert model.mean.update_count == 0


@pytest.mark.filterwarnings("ignore:This fit never validates")
def test_t18_the_sanity_check_leaves_no_metric(validated: Any, loader: Any, make_trainer: Any) -> None:
    seen: list[Any] = []

    class Looks(Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(sorted(trainer.callback_metrics))

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(sorted(trainer.callback_metrics))

    logger = Remembers()
    trainer = make_trainer(logger=logger, callbacks=[Looks()], check_val_every_n_epoch=5)
    trainer.fit(validated(), loader, loader)
    assert seen == [["val_loss"], []]
    assert logger.rows == []
    assert not any(trainer.progress.eval_steps.get("validate", ()))


def test_log_without_a_trainer_warns_once_and_does_nothing(regression: Any) -> None:
    class Alone(regression):  # type: ignore[misc]
        pass

    model = Alone()
    with pytest.warns(UserWarning, match="without a Trainer"):
        model.log("x", 1.0)
    model.log_dict({"y": 1.0})  # a second warning would be an error here


def test_loggers_are_finalized_with_what_happened(regression: Any, loader: Any, make_trainer: Any) -> None:
    good, bad = Remembers(), Remembers()
    make_trainer(logger=good).fit(regression(), loader)

    class Breaks(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(logger=[bad]).fit(Breaks(), loader)
    assert (good.finalized, bad.finalized) == (["success"], ["failed"])


def test_csv_rows_of_a_fit(validated: Any, loader: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Logs(validated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    trainer = make_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=2)
    trainer.fit(Logs(), loader, loader)
    assert trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    with open(Path(trainer.log_dir) / "metrics.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows if row["loss"]] == [1, 3]
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [3]


@pytest.mark.parametrize(("installed", "kind"), [(True, "TensorBoardLogger"), (False, "CSVLogger")])
def test_the_default_logger_is_tensorboard_if_installed_else_csv(
    make_trainer: Any, monkeypatch: Any, installed: bool, kind: str
) -> None:
    from importlib.util import find_spec

    import drivetrain.plan

    monkeypatch.setattr(
        drivetrain.plan, "find_spec", lambda name: (installed or None) if name == "tensorboard" else find_spec(name)
    )
    trainer = make_trainer(logger=True)
    assert [type(logger).__name__ for logger in trainer.loggers] == [kind]


def test_a_buffer_that_the_module_goes_on_writing_is_logged_as_it_was(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Running(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros(()))
            self.scale = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.running += 1
            if batch_idx == 1:
                self.log("running", self.running)
                self.log("scale", self.scale.squeeze())
            return self.loss(batch) * self.scale.squeeze()

    trainer = make_trainer(limit_train_batches=4)
    model = Running()
    trainer.fit(model, loader)
    assert float(trainer.callback_metrics["running"]) == 2.0
    assert float(trainer.callback_metrics["scale"]) != float(model.scale.detach())


def test_callbacks_may_log_by_themselves(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("mine", 1.0, on_step=False, on_epoch=True)
            self.log_dict({"a": 2.0, "b": 3.0})

    trainer = make_trainer(callbacks=[Logs()])
    trainer.fit(regression(), loader)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"mine": 1, "a": 2, "b": 3}


def test_a_module_inside_of_another_logs_into_the_same_run(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Inner(LightningModule):
        def forward(self, loss: torch.Tensor) -> torch.Tensor:
            self.log("inner", loss)
            return loss

    class Outer(regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner(self.loss(batch))

    trainer = make_trainer()
    trainer.fit(Outer(), loader)
    assert "inner" in trainer.callback_metrics


def test_what_is_logged_when_training_starts_is_seen_there(validated: Any, loader: Any, make_trainer: Any) -> None:
    seen: list[float] = []

    class Logs(validated):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.log("start", 5.0)

        def on_train_epoch_end(self) -> None:
            seen.append(float(self.trainer.callback_metrics["start"]))

    make_trainer().fit(Logs(), loader, loader)
    assert seen == [5.0]


def test_t11_each_evaluation_loader_counts_its_own_steps(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Logs(regression):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", 1.0, on_step=True, on_epoch=False)

    logger = Remembers()
    make_trainer(logger=logger, max_epochs=2, limit_val_batches=2).fit(Logs(), loader, [loader, loader])
    for index in (0, 1):
        assert [step for step, _ in logger.of(f"x/dataloader_idx_{index}")] == [0, 1, 2, 3]


def test_a_short_run_shows_its_numbers_and_says_what_no_logger_saw(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    model = logging_in(regression, "training_step", prog_bar=True)
    trainer = make_trainer(logger=Remembers())
    with pytest.warns(UserWarning, match=r"x: logged in training steps, but after 4 steps no logger has seen it"):
        trainer.fit(model, loader)
    assert trainer.progress_bar_metrics == {"x": 2.0}


def test_t52_a_metric_object_keeps_nothing_of_an_interrupted_run(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Logs(regression):  # type: ignore[misc]
        broken = True

        def __init__(self) -> None:
            super().__init__()
            self.sum = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.broken and batch_idx == 2:
                raise RuntimeError("broken")
            self.sum(1.0)
            self.log("x", self.sum, on_step=False, on_epoch=True)
            return self.loss(batch)

    model, trainer = Logs(), make_trainer()
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(model, loader)
    model.broken = False
    trainer.fit(model, loader)
    assert float(trainer.callback_metrics["x"]) == 4.0


def test_in_a_trial_run_a_program_may_still_call_its_loggers(regression: Any, loader: Any, make_trainer: Any) -> None:
    from drivetrain.callbacks import LearningRateMonitor

    class Calls(regression):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.logger.log_metrics({"x": 1.0}, step=0)
            self.logger.experiment.add_text("a", "b").anything.at_all()

    trainer = make_trainer(fast_dev_run=True, logger=True, callbacks=[LearningRateMonitor()])
    trainer.fit(Calls(), loader)
    assert type(trainer.logger).__name__ == "DummyLogger"


class Shares(LightningModule):
    """Logs ``names``, of training and of validation, and in validation with these options."""

    def __init__(self, names: tuple[str, str], **options: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.names, self.options = names, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log(self.names[0], loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(self.names[1], self.layer(batch[0]).pow(2).mean(), **self.options)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Shares(("loss", "loss")), "'loss' is logged in .* one curve of both"),
        (Shares(("a", "b"), add_dataloader_idx=False), r"'b', add_dataloader_idx=False\) was called for several load"),
        (Shares(("a", "b")), None),
        (Shares(("a", "b"), on_epoch=True), None),
    ],
)
def test_names_that_replace_each_other_are_warned_of_once(
    make_trainer: Any, loader: Any, model: Any, message: str | None, recwarn: Any
) -> None:
    several = [loader, loader] if "b" in model.names else loader
    make_trainer(max_epochs=2).fit(model, loader, several)
    found = [str(each.message) for each in recwarn]
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0])


def test_an_optimizer_step_may_log_before_its_closure_and_after_it(make_trainer: Any) -> None:
    class Logs(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.log("before", float(batch_idx), on_step=False, on_epoch=True)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self.log("after", float(batch_idx), on_step=False, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Logs(), [torch.ones(2, 2)] * 4)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"before": 1.5, "after": 1.5}
