"""Names, arguments and hooks that programs of 2020 and 2021 use, under each generation in which they existed."""

from __future__ import annotations

import importlib
import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import compat
from drivetrain.errors import ConfigurationError, UnknownArgumentError
from drivetrain.legacy import v1_3
from drivetrain.loggers import CSVLogger

from .conftest import loader, model_of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

Pair = namedtuple("Pair", "one other")


@pytest.fixture(params=["1.1", "1.3"])
def served(request: pytest.FixtureRequest) -> Iterator[str]:
    """The modules of a generation may be imported in this process."""
    compat.install(generation=request.param)
    yield request.param
    compat.uninstall()


def imported(path: str) -> Any:
    """The module of this path, or the name in it that its last part says."""
    home, _, name = f"pytorch_lightning.{path}".rpartition(".")
    try:
        return importlib.import_module(f"{home}.{name}")
    except ModuleNotFoundError:
        return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(
    "path",
    [
        "core.memory.ModelSummary", "core.memory.get_human_readable_count", "loggers.LoggerCollection",
        "loggers.base.LoggerCollection", "profiler.AdvancedProfiler", "profiler.BaseProfiler",
        "metrics.PSNR", "metrics.classification.Accuracy", "metrics.functional.accuracy",
        "metrics.functional.classification.auroc", "metrics.metric.Metric", "metrics.regression.MeanSquaredError",
        "profiler.PassThroughProfiler", "profiler.SimpleProfiler", "profiler.profilers.SimpleProfiler",
        "utilities.AMPType", "utilities.DeviceType", "utilities.DistributedType",
        "utilities.apply_func.apply_to_collection", "utilities.parsing.collect_init_args",
        "utilities.distributed.all_gather_ddp_if_available", "utilities.distributed.gather_all_tensors",
        "utilities.distributed.sync_ddp_if_available",
        "utilities.parsing.get_init_args", "utilities.parsing.lightning_getattr",
    ],
)  # fmt: skip
def test_a_program_imports(served: str, path: str) -> None:
    assert callable(imported(path))


def test_a_program_of_1_3_imports_besides() -> None:
    compat.install(generation="1.3")
    try:
        for path in (
            "utilities.enums.DistributedType", "utilities.grads.grad_norm", "utilities.types.STEP_OUTPUT",
            "utilities.signature_utils.is_param_in_hook_signature", "utilities.warnings.WarningCache",
            "utilities.warnings.LightningDeprecationWarning", "utilities.distributed.distributed_available",
        ):  # fmt: skip
            assert imported(path) is not None
    finally:
        compat.uninstall()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([1, 2.0, "x"], [11, 2.0, "x"]),
        ((1, (2,)), (11, (12,))),
        ({"a": 1, 2: [3]}, {"a": 11, 2: [13]}),
        (OrderedDict(a=1), OrderedDict(a=11)),
        (Pair(1, "s"), Pair(11, "s")),
        ("text", "text"),
        (None, None),
        ({1}, {1}),
        (1, 11),
    ],
)
def test_apply_to_collection_keeps_the_collections(served: str, data: Any, expected: Any) -> None:
    apply = imported("utilities.apply_func.apply_to_collection")
    found = apply(data, int, lambda value, times: value + times * 10, times=1)
    assert found == expected
    assert type(found) is type(expected)


def test_apply_to_collection_may_leave_out_a_type(served: str) -> None:
    apply = imported("utilities.apply_func.apply_to_collection")
    assert apply([1, True], int, lambda value: value + 10, wrong_dtype=bool) == [11, True]


def test_a_constructor_finds_its_arguments(served: str) -> None:
    class Base:
        def __init__(self) -> None:
            super().__init__()

    class Own(Base):
        def __init__(self, size: int, **kwargs: Any) -> None:
            self.found = imported("utilities.parsing.get_init_args")(inspect.currentframe())
            super().__init__()

    assert Own(3, depth=2).found == {"size": 3, "depth": 2}


def test_the_types_are_words(served: str) -> None:
    kind = imported("utilities.DistributedType")
    assert kind("ddp_spawn") is kind.DDP_SPAWN
    assert (kind.DDP, kind.DP, kind.HOROVOD) == ("ddp", "dp", "horovod")


# ---- what a module could be asked ------------------------------------------------------------------------------------


def test_the_summary_has_a_mode(pl: Any, served: str) -> None:
    summary = imported("core.memory.ModelSummary")
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    assert summary(model).layer_names == summary(model, mode="top").layer_names == ["0"]
    assert summary(model, mode="full").layer_names == ["0", "0.0"]
    with pytest.raises(ConfigurationError, match=r"ModelSummary\(mode='all'\) is unknown"):
        summary(model, mode="all")
    own = model_of(pl, forward=lambda self, batch: batch)
    own.net = model
    assert own.summarize("full").layer_names == ["net", "net.0", "net.0.0"]
    assert own.summarize(None) is None


def test_the_module_finds_the_data_module_of_the_run(pl: Any) -> None:
    class Data(pl.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(1)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(self.datamodule)
        return self.weight.sum()

    seen: list[Any] = []
    model, data = model_of(pl, training_step=training_step), Data()
    assert model.datamodule is None
    trainer_of(pl, max_epochs=1).fit(model, datamodule=data)
    assert seen == [data]
    model.datamodule = other = Data()
    assert model.datamodule is other


def test_predictions_are_written_when_an_evaluation_ends(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes(self: Any, batch: Any, batch_idx: int) -> None:
        self.write_prediction("a", torch.tensor([batch_idx, 2.0]))
        self.write_prediction_dict({"b": [1, 2], "c": torch.tensor([3, 4])}, "other.pt")

    monkeypatch.chdir(tmp_path)
    trainer, model = trainer_of(pl), model_of(pl, test_step=writes, validation_step=writes)
    trainer.test(model, test_dataloaders=loader(2), verbose=False)
    first, last = [{"a": 0.0}, {"a": 2.0}], [{"a": 1.0}, {"a": 2.0}]
    assert torch.load("predictions.pt") == [*first, *last]
    assert torch.load("other.pt") == [{"b": 1, "c": 3}, {"b": 2, "c": 4}] * 2
    trainer.fit(model, loader(1), loader(1))
    assert torch.load("predictions.pt") == first


def test_names_that_are_written_apart_are_columns_of_one_file(pl: Any, tmp_path: Path) -> None:
    def writes(self: Any, batch: Any, batch_idx: int) -> None:
        self.write_prediction("a", torch.tensor([batch_idx, 2.0]), path)
        self.write_prediction("b", [batch_idx] * self.length, path)

    path, model = str(tmp_path / "new" / "own.pt"), model_of(pl, test_step=writes)
    model.length = 2
    trainer_of(pl).test(model, test_dataloaders=loader(2), verbose=False)
    assert torch.load(path) == [{"a": 0.0, "b": 0}, {"a": 2.0, "b": 0}, {"a": 1.0, "b": 1}, {"a": 2.0, "b": 1}]
    model.length = 1
    with pytest.raises(ConfigurationError, match=r"own\.pt' have different lengths: \{'a': 4, 'b': 2\}"):
        trainer_of(pl).test(model, test_dataloaders=loader(2), verbose=False)


def test_norms_of_gradients_have_the_names_and_digits_of_that_time(pl: Any, tmp_path: Path) -> None:
    def on_after_backward(self: Any) -> None:
        self.weight.grad.fill_(1.23456)
        seen.append(self.grad_norm(2))

    seen: list[Any] = []
    trainer = trainer_of(pl, max_epochs=1, track_grad_norm=2, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(model_of(pl, on_after_backward=on_after_backward), loader(1))
    assert seen == [{"grad_2.0_norm_weight": 1.2346, "grad_2.0_norm_total": 1.2346}]
    assert {"grad_2.0_norm_weight", "grad_2.0_norm_total"} <= set(trainer.logged_metrics)


def test_several_loggers_are_one(pl: Any, tmp_path: Path, served: str) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append([type(each).__name__ for each in self.logger])
        self.log("loss", 1.0)
        return self.weight.sum()

    seen: list[Any] = []
    one, other = CSVLogger(tmp_path / "one", name="a", version=1), CSVLogger(tmp_path / "other", name="b", version=2)
    collection = imported("loggers.LoggerCollection")
    for given in ([one, other], collection([one, other])):
        trainer = trainer_of(pl, max_epochs=1, logger=given, log_every_n_steps=1)
        assert isinstance(trainer.logger, collection)
        assert (trainer.logger[0], list(trainer.logger), len(trainer.logger)) == (one, [one, other], 2)
        assert (trainer.logger.name, trainer.logger.version) == ("a_b", "1_2")
        assert len(trainer.logger.experiment) == 2
        trainer.fit(model_of(pl, training_step=training_step), loader(1))
    assert seen == [["CSVLogger", "CSVLogger"]] * 2
    trainer.logger.log_metrics({"by_hand": 2.0}, step=7)
    trainer.logger.save()
    assert all("by_hand" in path.read_text() for path in tmp_path.rglob("metrics.csv"))
    assert trainer_of(pl, logger=one).logger is one
    assert trainer_of(pl).logger is None


# ---- hooks -----------------------------------------------------------------------------------------------------------

OF_MODULES = {
    "training_epoch_end": ([],), "validation_epoch_end": ([],), "test_epoch_end": ([],), "on_epoch_start": (),
    "on_epoch_end": (), "on_pretrain_routine_start": (), "on_pretrain_routine_end": (), "on_train_epoch_end": ([],),
    "on_train_batch_start": (1, 0, 0), "on_train_batch_end": (1, 1, 0, 0), "on_validation_batch_end": (1, 1, 0, 0),
    "on_test_batch_start": (1, 0, 0), "on_predict_epoch_end": ([],), "configure_sharded_model": (),
}  # fmt: skip
OF_CALLBACKS = {
    "on_init_start": (1,), "on_init_end": (1,), "on_epoch_start": (1, 2), "on_epoch_end": (1, 2),
    "on_batch_start": (1, 2), "on_batch_end": (1, 2), "on_pretrain_routine_start": (1, 2),
    "on_keyboard_interrupt": (1, 2), "on_train_epoch_end": (1, 2, []), "on_train_batch_start": (1, 2, 3, 4, 5),
    "on_train_batch_end": (1, 2, 3, 4, 5, 6), "on_validation_batch_end": (1, 2, 3, 4, 5, 6),
    "on_test_batch_start": (1, 2, 3, 4, 5), "on_load_checkpoint": ({},), "on_predict_epoch_end": (1, 2, []),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_modules_hook_may_call_that_of_its_base_class(pl: Any, name: str) -> None:
    model = model_of(pl)
    assert getattr(super(type(model), model), name)(*OF_MODULES[name]) is None


@pytest.mark.parametrize("name", OF_CALLBACKS)
def test_a_callbacks_hook_may_call_that_of_its_base_class(pl: Any, name: str) -> None:
    class Own(pl.Callback):  # type: ignore[misc]
        pass

    assert getattr(super(Own, Own()), name)(*OF_CALLBACKS[name]) is None


@pytest.mark.parametrize("stage", ["training", "validation", "test"])
def test_the_end_of_a_step_of_the_base_class_returns_the_output(pl: Any, stage: str) -> None:
    model = model_of(pl)
    assert getattr(super(type(model), model), f"{stage}_step_end")({"loss": 1}) == {"loss": 1}


def test_hooks_that_nobody_overrides_cost_nothing(pl: Any) -> None:
    """The Trainer sees none of them, and ``training_epoch_end`` of the base class keeps no outputs."""
    trainer, model = trainer_of(pl, max_epochs=1), model_of(pl)
    trainer.fit(model, loader(1))
    for name in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"):
        assert not any(True for _ in trainer.hooks.overriders(name) if _[0] is model)
    assert vars(model)["_outputs_of_epoch"] == []


def test_a_callback_sees_what_the_modules_epoch_end_has_logged(pl: Any) -> None:
    class Sees(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any, outputs: Any) -> None:
            seen.append(float(trainer.callback_metrics["train_end"]))

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(float(trainer.callback_metrics["val_end"]))

    seen: list[float] = []
    model = model_of(
        pl,
        validation_step=lambda self, batch, batch_idx: 1.0,
        training_epoch_end=lambda self, outputs: self.log("train_end", 1.0),
        validation_epoch_end=lambda self, outputs: self.log("val_end", 2.0),
    )
    trainer_of(pl, max_epochs=1, callbacks=[Sees()]).fit(model, loader(1), loader(1))
    assert seen == [1.0, 2.0]


def test_the_hooks_of_an_epoch_come_in_the_order_of_their_time(pl: Any) -> None:
    names = ("on_epoch_start", "on_epoch_end", "on_train_epoch_start", "on_train_epoch_end")
    more = ("on_fit_start", "on_pretrain_routine_start", "on_validation_epoch_start", "on_validation_epoch_end")
    ends = ("training_epoch_end", "validation_epoch_end")
    seen: list[str] = []

    def noting(who: str, name: str) -> Any:
        return lambda self, *args: seen.append(f"{who}.{name}")

    callback = type("Notes", (pl.Callback,), {name: noting("cb", name) for name in (*names, *more)})()
    members = {name: noting("m", name) for name in (*names, *more, *ends)}
    model = model_of(pl, validation_step=lambda self, batch, batch_idx: None, **members)
    trainer_of(pl, max_epochs=1, callbacks=[callback]).fit(model, loader(1), loader(1))
    both = {name: [f"cb.{name}", f"m.{name}"] for name in (*names, *more)}
    over, last = both["on_epoch_end"], pl is v1_3
    assert seen == [
        *both["on_fit_start"], *both["on_pretrain_routine_start"],
        *both["on_epoch_start"], *both["on_train_epoch_start"],
        "m.training_epoch_end", *(() if last else over), *both["on_train_epoch_end"], *(over if last else ()),
        *(both["on_epoch_start"] if last else ()), *both["on_validation_epoch_start"],
        "m.validation_epoch_end", *both["on_validation_epoch_end"], *(over if last else ()),
    ]  # fmt: skip


def test_a_method_of_the_modules_own_is_no_hook_of_batches(pl: Any) -> None:
    def on_batch_start(self: Any, *args: Any) -> None:
        raise AssertionError("the program calls this itself")

    model = model_of(pl, on_batch_start=on_batch_start, on_batch_end=on_batch_start)
    trainer_of(pl, max_epochs=1).fit(model, loader(1))


def test_toggling_takes_an_index(pl: Any) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
        seen.append((self.weight.requires_grad, self.other.requires_grad))
        if optimizer_idx == 1:
            self.untoggle_optimizer(1)
            seen.append((self.weight.requires_grad, self.other.requires_grad))
            self.toggle_optimizer(self.optimizers()[1], 1)
        return self.weight.sum() + self.other.sum()

    def toggle_optimizer(self: Any, optimizer: Any, optimizer_idx: int) -> None:
        toggled.append(optimizer_idx)
        pl.LightningModule.toggle_optimizer(self, optimizer, optimizer_idx)

    seen: list[Any] = []
    toggled: list[int] = []
    model = model_of(
        pl,
        training_step=training_step,
        configure_optimizers=lambda self: [torch.optim.SGD([each], lr=1.0) for each in (self.weight, self.other)],
        toggle_optimizer=toggle_optimizer,
    )
    model.other = torch.nn.Parameter(torch.zeros(1))
    trainer_of(pl, max_epochs=1).fit(model, loader(1))
    assert seen == [(True, False), (False, True), (True, True)]
    assert toggled == [0, 1, 1]


def test_a_callback_of_1_1_saves_its_state_without_the_checkpoint(pl: Any, tmp_path: Path) -> None:
    class Counts(pl.Callback):  # type: ignore[misc]
        count = 0

        def on_save_checkpoint(self, trainer: Any, pl_module: Any) -> Any:
            return {"count": 3}

        def on_load_checkpoint(self, state: Any) -> None:
            self.count = state["count"]

    trainer = trainer_of(pl, max_epochs=1, callbacks=[Counts()])
    trainer.fit(model_of(pl), loader(1))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Counts()
    trainer_of(pl, callbacks=[again], resume_from_checkpoint=str(tmp_path / "a.ckpt")).fit(model_of(pl), loader(1))
    assert again.count == 3


def test_the_end_of_a_prediction_gets_the_results() -> None:
    class Sees(v1_3.Callback):
        def on_predict_epoch_end(self, trainer: Any, pl_module: Any, outputs: Any) -> None:  # type: ignore[override]
            seen.append(("callback", outputs))

    seen: list[Any] = []
    model = model_of(
        v1_3,
        predict_step=lambda self, batch, batch_idx: batch_idx,
        on_predict_epoch_end=lambda self, results: seen.append(("module", results)),
    )
    assert trainer_of(v1_3, callbacks=[Sees()]).predict(model, loader(2)) == [0, 1]
    assert seen == [("callback", [[0, 1]]), ("module", [[0, 1]])]


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_a_lambda_callback_takes_hooks_and_arguments_of_that_time() -> None:
    from drivetrain.legacy.v1_3._callbacks import LambdaCallback

    seen: list[Any] = []
    callback = LambdaCallback(
        on_epoch_start=lambda trainer, module: seen.append("on_epoch_start"),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx, dataloader_idx: seen.append(batch_idx),
        on_train_epoch_end=lambda trainer, module, *args: seen.append("on_train_epoch_end"),
        on_train_end=None,
    )
    trainer_of(v1_3, max_epochs=1, callbacks=[callback]).fit(model_of(v1_3), loader(2))
    assert seen == ["on_epoch_start", 0, 1, "on_train_epoch_end"]
    with pytest.raises(UnknownArgumentError, match=r"no hook 'on_epoch_begin'"):
        LambdaCallback(on_epoch_begin=print)


def test_a_bar_of_ones_own_has_the_hooks_and_counters_of_that_time(pl: Any, served: str) -> None:
    class Percents(imported("callbacks.progress.ProgressBarBase")):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
            seen.append((self.train_batch_idx, self.total_train_batches))

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_validation_batch_end(trainer, pl_module, *args)
            seen.append((self.val_batch_idx, self.total_val_batches))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any, outputs: Any = None) -> None:
            super().on_train_epoch_end(trainer, pl_module, outputs)

        def on_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_epoch_start(trainer, pl_module)

    seen: list[Any] = []
    model = model_of(pl, validation_step=lambda self, batch, batch_idx: None)
    trainer = trainer_of(pl, max_epochs=1, progress_bar_refresh_rate=1, callbacks=[Percents()])
    trainer.fit(model, loader(2), loader(1))
    assert seen == [(1, 2), (2, 2), (1, 1)]


def test_the_bar_of_training_has_its_name(pl: Any, served: str) -> None:
    pytest.importorskip("tqdm")

    class Own(imported("callbacks.ProgressBar")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(refresh_rate=1, process_position=0)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, idx: int, loader: int
        ) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, idx, loader)
            seen.append(self.main_progress_bar.total)

    seen: list[Any] = []
    trainer_of(pl, max_epochs=1, progress_bar_refresh_rate=1, callbacks=[Own()]).fit(model_of(pl), loader(2))
    assert seen == [2, 2]


def test_the_loops_know_the_limits(pl: Any) -> None:
    trainer = trainer_of(pl, max_epochs=3)
    assert (trainer.fit_loop.max_epochs, trainer.fit_loop.min_epochs) == (3, 1)
    trainer.fit_loop.max_epochs = 2
    assert trainer.max_epochs == 2
