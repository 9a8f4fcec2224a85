"""What user code may read of a Trainer (spec 3.2), and what it may write while it runs (spec 3.10)."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.module.optimizers import LightningOptimizer
from drivetrain.strategies import SingleDeviceStrategy

PROPERTIES = [
    "accelerator", "strategy", "precision_plugin", "precision", "scaler", "global_rank", "local_rank", "node_rank",
    "world_size", "num_nodes", "device_ids", "num_devices", "is_global_zero", "lightning_module", "model",
    "optimizers", "lr_scheduler_configs", "logger", "loggers", "log_dir", "default_root_dir", "callbacks",
    "checkpoint_callback", "checkpoint_callbacks", "early_stopping_callback", "early_stopping_callbacks",
    "progress_bar_callback", "ckpt_path", "callback_metrics", "logged_metrics", "progress_bar_metrics",
    "current_epoch", "global_step", "max_epochs", "min_epochs", "max_steps", "min_steps", "is_last_batch",
    "num_training_batches", "num_val_batches", "num_test_batches", "num_predict_batches", "num_sanity_val_batches",
    "train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders", "estimated_stepping_batches",
    "enable_validation", "training", "validating", "testing", "predicting", "sanity_checking", "evaluating",
    "interrupted", "received_sigterm", "should_stop", "distributed_sampler_kwargs", "state",
    "fit_loop", "validate_loop", "test_loop", "predict_loop",
]  # fmt: skip


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_can_be_read_before_during_and_after_a_run(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, name: str
) -> None:
    class Reading(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            getattr(trainer, name)

        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            getattr(trainer, name)

    trainer = make_trainer(callbacks=Reading())
    getattr(trainer, name)
    trainer.fit(validated(), loader, loader)
    getattr(trainer, name)


def test_what_the_properties_say(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    module = validated()
    checkpoint, stopping = ModelCheckpoint(), EarlyStopping("val_loss")
    trainer = make_trainer(callbacks=[checkpoint, stopping], enable_checkpointing=True, max_epochs=2)
    trainer.fit(module, loader, loader)

    assert trainer.lightning_module is trainer.model is module
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size) == (0, 0, 0, 1)
    assert (trainer.num_nodes, trainer.num_devices, trainer.device_ids, trainer.is_global_zero) == (1, 1, [0], True)
    assert trainer.checkpoint_callbacks == [checkpoint]
    assert trainer.early_stopping_callbacks == [stopping]
    assert trainer.progress_bar_callback is None
    assert trainer.scaler is None
    assert trainer.distributed_sampler_kwargs is None
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)
    assert (trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches) == (4, [4], [2])
    assert trainer.train_dataloader is trainer.val_dataloaders is loader
    assert trainer.state.fn == "fit"
    assert trainer.state.status == "finished"
    assert trainer.enable_validation
    assert not trainer.received_sigterm


def test_the_number_of_training_batches_is_known_while_a_fit_is_set_up(
    regression: type[LightningModule], data: Any, make_trainer: Any
) -> None:
    """Reading it makes the loader that the fit will use, once, and trains to the same weights."""

    class Asking(regression):  # type: ignore[misc, valid-type]
        def __init__(self, first: str) -> None:
            torch.manual_seed(1)
            super().__init__(dropout=0.5)
            self.first, self.made = first, 0
            self.found: list[float] = []

        def train_dataloader(self) -> Any:
            self.made += 1
            assert self.trainer.num_training_batches == float("inf")  # it is being made
            return DataLoader(data, batch_size=8, shuffle=True)

        def configure_optimizers(self) -> Any:
            if self.first:
                getattr(self.trainer, self.first)
                self.found += [self.trainer.num_training_batches, self.trainer.estimated_stepping_batches]
            return super().configure_optimizers()

        def on_fit_start(self) -> None:
            self.found += [self.trainer.num_training_batches, self.trainer.fit_loop.max_batches] if self.first else []

    weights = []
    for first in ("num_training_batches", "estimated_stepping_batches", ""):
        module, trainer = Asking(first), make_trainer(max_epochs=2, limit_train_batches=3, accumulate_grad_batches=2)
        torch.manual_seed(2)
        trainer.fit(module)
        assert (module.found, module.made) == ([3, 4, 3, 3] if first else [], 1)
        assert trainer.num_training_batches == 3
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[2])


def test_the_steps_that_a_test_asks_for_are_those_of_the_fit_before(
    regression: type[LightningModule], data: Any, make_trainer: Any
) -> None:
    class Asking(regression):  # type: ignore[misc, valid-type]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            found.append(self.trainer.estimated_stepping_batches)

    found: list[float] = []
    trainer, loader = make_trainer(max_epochs=2), DataLoader(data, batch_size=8)
    module = Asking()
    trainer.fit(module, loader)
    steps = trainer.global_step
    trainer.test(module, DataLoader(data, batch_size=len(data)), verbose=False)
    assert found == [steps]


def test_steps_that_are_asked_for_before_the_first_run_are_answered_with_when_they_are_known(
    make_trainer: Any, caplog: Any
) -> None:
    with caplog.at_level("INFO", "drivetrain"):
        assert make_trainer(max_steps=7).estimated_stepping_batches == 7
        assert caplog.text == ""
        assert make_trainer(max_epochs=2).estimated_stepping_batches == float("inf")
    assert "is inf before the first run, which brings the loader. Read it in configure_optimizers" in caplog.text


def test_the_number_of_training_batches_is_that_of_the_fit_that_is_set_up(
    regression: type[LightningModule], data: Any, make_trainer: Any
) -> None:
    found = []

    class Asking(regression):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.num_training_batches)
            return super().configure_optimizers()

    trainer = make_trainer()
    for batch_size, expected in ((8, 4), (16, 2)):
        trainer.fit(Asking(), DataLoader(data, batch_size=batch_size))
        assert found.pop() == trainer.num_training_batches == expected
    trainer.limit_train_batches = 0
    trainer.fit(Asking(), DataLoader(data, batch_size=8))
    assert found == [0]


def test_nobody_knows_how_many_training_batches_there_are_before_a_fit(
    validated: type[LightningModule], loader: DataLoader[Any], make_trainer: Any
) -> None:
    """pytorch-forecasting takes the lesser of this and ``limit_train_batches`` in ``configure_optimizers``."""
    found = []

    class Asking(validated):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.num_training_batches)
            return super().configure_optimizers()

    module, trainer = Asking(), make_trainer()
    trainer.validate(module, loader, verbose=False)
    assert trainer.num_training_batches == float("inf")
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)
    assert (found, trainer.num_training_batches) == ([4], 4)
    assert make_trainer(limit_train_batches=0).num_training_batches == 0


def at(moment: str, do: Callable[[Trainer], None], times: int = 1) -> Callback:
    """A callback that does something the first ``times`` times a hook runs."""

    class Once(Callback):
        done = 0

    def hook(self: Any, trainer: Trainer, *_: Any) -> None:
        if self.done < times:
            self.done += 1
            do(trainer)

    setattr(Once, moment, hook)
    return Once()


def set_to(name: str, value: Any) -> Callable[[Trainer], None]:
    return lambda trainer: setattr(trainer, name, value)


@pytest.mark.parametrize(
    ("moment", "name", "value", "batches"),
    [
        ("on_train_batch_end", "should_stop", True, 1),
        ("on_train_batch_end", "max_steps", 3, 3),
        ("on_train_epoch_end", "max_epochs", 1, 4),
        ("on_train_start", "max_epochs", 3, 12),
        ("on_train_start", "limit_train_batches", 1, 2),
        ("on_train_start", "limit_train_batches", 0.5, 4),
        ("on_fit_start", "max_steps", 5, 5),
    ],
)
def test_3_10_limits_may_be_written(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, moment: str, name: str, value: Any, batches: int
) -> None:
    trainer = make_trainer(max_epochs=2, callbacks=at(moment, set_to(name, value)))
    trainer.fit(regression(), loader)

    assert trainer.progress.total_batches == batches
    if name != "should_stop":
        assert getattr(trainer, name) == value


def test_3_10_min_epochs_may_be_written(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    trainer = make_trainer(
        max_epochs=5,
        callbacks=[
            at("on_train_start", set_to("min_epochs", 3)),
            at("on_train_batch_end", set_to("should_stop", True)),
        ],
    )
    trainer.fit(regression(), loader)

    assert trainer.current_epoch == 3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("val_check_interval", 2, [2, 4, 6, 8]),
        ("val_check_interval", 0.25, list(range(1, 9))),
        ("check_val_every_n_epoch", 2, [8]),
        ("limit_val_batches", 0, []),
    ],
)
def test_3_10_when_to_validate_may_be_written(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, name: str, value: Any, expected: list[int]
) -> None:
    seen: list[int] = []

    class Noting(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
            seen.append(trainer.global_step)

    trainer = make_trainer(
        max_epochs=2, num_sanity_val_steps=0, callbacks=[at("on_train_start", set_to(name, value)), Noting()]
    )
    trainer.fit(validated(), loader, loader)

    assert seen == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_epochs", -3, "max_epochs is an int of at least -1"),
        ("accumulate_grad_batches", 0, "accumulate_grad_batches is an int of at least 1"),
        ("limit_val_batches", 1.5, "a fraction from 0.0 to 1.0"),
        ("val_check_interval", "soon", "val_check_interval is a duration"),
        ("check_val_every_n_epoch", 0, "an int of at least 1"),
    ],
)
def test_3_10_a_write_is_checked_as_the_argument_is(make_trainer: Any, name: str, value: Any, message: str) -> None:
    trainer = make_trainer()
    before = getattr(trainer, name)
    with pytest.raises(ConfigurationError, match=message):
        setattr(trainer, name, value)
    assert getattr(trainer, name) == before


def test_3_10_every_limit_comes_back_as_it_was_written(make_trainer: Any) -> None:
    trainer = make_trainer()
    values = {
        "max_epochs": -1, "min_epochs": 2, "max_steps": 9, "min_steps": 3, "accumulate_grad_batches": 4,
        "log_every_n_steps": 7, "val_check_interval": timedelta(minutes=3), "check_val_every_n_epoch": None,
        "limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 2, "limit_predict_batches": 1.0,
        "reload_dataloaders_every_n_epochs": 2,
    }  # fmt: skip
    for name, value in values.items():
        setattr(trainer, name, value)
    assert {name: getattr(trainer, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "written", "default"),
    [
        ("max_epochs", 3, -1), ("min_epochs", 2, 0), ("min_steps", 5, None), ("log_every_n_steps", 7, 50),
        ("limit_train_batches", 3, 1.0), ("limit_val_batches", 3, 1.0), ("limit_test_batches", 3, 1.0),
        ("limit_predict_batches", 3, 1.0), ("val_check_interval", 2, 1.0),
    ],
)  # fmt: skip
def test_none_written_to_a_limit_is_its_default(make_trainer: Any, name: str, written: int, default: Any) -> None:
    trainer = make_trainer(**{name: written})
    assert getattr(trainer, name) == written
    setattr(trainer, name, None)
    assert getattr(trainer, name) == default


def test_a_limit_knows_its_docstring() -> None:
    assert Trainer.max_epochs.__doc__ == "Epochs at most; -1: no limit."


def test_3_10_callbacks_written_take_effect_at_the_next_batch(
    regression: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    seen: list[int] = []

    class Late(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen.append(batch_idx)

    def add(trainer: Trainer) -> None:
        trainer.callbacks = [*trainer.callbacks, Late()]

    make_trainer(callbacks=at("on_train_batch_end", add)).fit(regression(), loader)

    assert seen == [1, 2, 3]


def test_3_10_loggers_written_take_effect(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Any
) -> None:
    class Logging(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", float(batch_idx))
            return self.loss(batch)

    logger = CSVLogger(tmp_path, name="late")
    trainer = make_trainer(
        log_every_n_steps=1, callbacks=at("on_train_batch_end", set_to("logger", logger)), max_epochs=1
    )
    trainer.fit(Logging(), loader)

    assert trainer.loggers == [logger]
    with open(tmp_path / "late" / "version_0" / "metrics.csv") as file:
        assert [row["x"] for row in csv.DictReader(file)] == ["0.0", "1.0", "2.0", "3.0"]
    trainer.logger = None
    assert trainer.loggers == []


@pytest.mark.parametrize("manual", [False, True])
def test_3_10_optimizers_written_take_effect(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, manual: bool
) -> None:
    class Module(regression):  # type: ignore[misc]
        automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not manual:
                return self.loss(batch)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            return None

    weights: list[torch.Tensor] = []

    class Watching(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            weights.append(pl_module.net[0].weight.detach().clone())

    def stop_learning(trainer: Trainer) -> None:
        trainer.optimizers = [torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.0)]
        trainer.lr_scheduler_configs = []

    trainer = make_trainer(callbacks=[Watching(), at("on_train_batch_end", stop_learning)])
    trainer.fit(Module(), loader)

    assert torch.equal(weights[0], weights[-1])
    assert trainer.global_step == 4
    assert isinstance(trainer.lightning_module.optimizers(), LightningOptimizer)


def test_3_10_callback_metrics_may_be_written(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    def write(trainer: Trainer) -> None:
        trainer.callback_metrics["mine"] = torch.tensor(0.5)

    stopping = EarlyStopping("mine", patience=1)
    trainer = make_trainer(max_epochs=9, callbacks=[at("on_train_epoch_end", write, times=99), stopping])
    trainer.fit(regression(), loader)

    assert trainer.current_epoch == 2
    assert stopping.best_score == 0.5


def test_3_10_a_method_replaced_on_an_instance_counts_as_an_override(
    regression: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    seen: list[str] = []

    def replace(trainer: Trainer) -> None:
        module = trainer.lightning_module
        original = module.training_step
        module.training_step = lambda batch, batch_idx: seen.append("step") or original(batch, batch_idx)
        module.on_after_backward = lambda: seen.append("backward")

    trainer = make_trainer(max_epochs=2, callbacks=at("on_train_epoch_end", replace))
    trainer.fit(regression(), loader)

    assert seen == ["step", "backward"] * 4


def test_3_10_the_loops_show_their_progress(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    seen: list[Any] = []

    class Reading(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 2:
                epochs, batches = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress
                seen.append((epochs.current.ready, epochs.current.completed))
                seen.append((batches.current.ready, batches.current.completed))
                seen.append((batches.total.ready, batches.total.completed, batches.is_last_batch))
                seen.append((trainer.fit_loop.epoch_loop.batch_idx, trainer.fit_loop.total_batch_idx))
                seen.append((trainer.fit_loop.epoch_loop.global_step, trainer.fit_loop.restarting))

        def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, i: int) -> None:
            if trainer.current_epoch == 1 and not trainer.sanity_checking and i == 3:
                progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
                seen.append((progress.current.ready, progress.total.ready, progress.is_last_batch))
                assert progress == trainer.validate_loop.batch_progress

    trainer = make_trainer(max_epochs=2, callbacks=Reading())
    trainer.fit(validated(), loader, loader)

    assert seen == [(2, 1), (3, 2), (7, 6, False), (2, 6), (6, False), (4, 8, True)]
    assert trainer.fit_loop.epoch_progress.current.completed == 2
    assert trainer.fit_loop.done
    assert trainer.fit_loop.max_batches == 4
    trainer.fit_loop.max_epochs = 7
    trainer.fit_loop.epoch_loop.max_steps = 70
    assert (trainer.max_epochs, trainer.max_steps) == (7, 70)
    trainer.test(trainer.lightning_module, loader, verbose=False)
    assert trainer.test_loop.max_batches == [4]


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.filterwarnings("ignore:.*validation_step")
def test_3_10_whether_a_fit_has_loaders_is_known_in_configure_optimizers(
    validated: type[LightningModule], loader: DataLoader[Any], make_trainer: Any, passed: bool
) -> None:
    """As GluonTS asks."""
    found = []

    class Asking(validated):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            loop = self.trainer.fit_loop
            found.append((loop._data_source.is_defined(), loop.epoch_loop.val_loop._data_source.is_defined()))
            return super().configure_optimizers()

    trainer = make_trainer()
    assert not trainer.fit_loop._data_source.is_defined()
    trainer.fit(Asking(), loader, loader if passed else None)
    assert found == [(True, passed)]
    assert not trainer.test_loop._data_source.is_defined()


def test_3_10_restarting_is_told_until_a_batch_is_trained(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Any
) -> None:
    first = make_trainer()
    first.fit(regression(), loader)
    first.save_checkpoint(tmp_path / "a.ckpt")
    seen: list[bool] = []

    class Reading(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            seen.append(trainer.fit_loop.restarting)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.fit_loop.restarting)

    make_trainer(max_epochs=2, callbacks=Reading()).fit(regression(), loader, ckpt_path=tmp_path / "a.ckpt")

    assert seen == [True, False, False, False, False]


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_init_module_makes_layers_in_the_precision_of_the_run(make_trainer: Any) -> None:
    with make_trainer(precision="bf16-true").init_module():
        made = nn.Linear(2, 2)
    assert made.weight.dtype is torch.bfloat16
    assert torch.empty(0).dtype is torch.float32


def test_init_module_may_leave_out_the_initialisation(make_trainer: Any) -> None:
    state = torch.get_rng_state()
    with make_trainer().init_module(empty_init=True):
        nn.Linear(20, 20)
    assert torch.equal(state, torch.get_rng_state())
    with make_trainer().init_module():
        nn.Linear(20, 20)
    assert not torch.equal(state, torch.get_rng_state())


def test_print_speaks_on_global_rank_0_only(make_trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer()
    trainer.print("one", 2, sep="-")
    trainer.strategy.global_rank = 1
    trainer.print("never")
    assert capsys.readouterr().out == "one-2\n"


class Facts(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


def test_members_of_a_module_without_a_trainer() -> None:
    module = Facts()
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    assert module.logger is None
    assert module.loggers == []
    assert not module.on_gpu
    assert module.device_mesh is None
    assert module.fabric is None
    assert module.example_input_array is None
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        _ = module.trainer


def test_all_gather_of_one_process_is_the_identity(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    class Gathering(regression):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            data = {"a": torch.ones(2), "b": [torch.zeros(1), "text"]}
            found = self.all_gather(data)
            assert found["a"].shape == (2,)
            assert found["b"][1] == "text"

    make_trainer().fit(Gathering(), loader)
