"""TensorBoardLogger: what TensorBoard reads back, and that nothing stays behind."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import LightningModule
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import TensorBoardLogger

pytest.importorskip("tensorboard")


def read(source: TensorBoardLogger | Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(source) if isinstance(source, Path) else source.log_dir)
    events.Reload()
    return events


def scalars(logger: TensorBoardLogger, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(logger).Scalars(name)]


def test_scalars_are_read_back(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="a")
    logger.log_metrics({"loss": 0.5, "acc": 1.0}, step=0)
    logger.log_metrics({"loss": 0.25}, step=10)
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert scalars(logger, "a-loss") == [(0, 0.5), (10, 0.25)]
    assert scalars(logger, "a-acc") == [(0, 1.0)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_copied_process_opens_a_file_of_its_own(tmp_path: Path) -> None:
    """The writer's thread stays behind when a process is copied, and whoever waits for it hangs."""
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"before": 1.0}, step=0)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        for step in range(30):  # more than the writer's queue holds
            logger.log_metrics({"loss": float(step)}, step=step)
        logger.finalize("success")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    logger.finalize("success")
    assert len(scalars(logger, "loss")) == 30
    assert scalars(logger, "before") == [(0, 1.0)]


def test_nothing_exists_before_the_first_write(tmp_path: Path) -> None:
    threads = threading.active_count()
    logger = TensorBoardLogger(tmp_path)
    logger.log_graph(nn.Linear(1, 1))
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
    assert logger.version == 0
    assert threading.active_count() == threads


def test_finalize_leaves_no_thread_and_a_later_run_goes_on(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    assert set(threading.enumerate()) == before
    logger.log_metrics({"test": 2.0}, step=1)
    logger.finalize("success")
    assert set(threading.enumerate()) == before
    assert scalars(logger, "loss") == [(0, 1.0)]
    assert scalars(logger, "test") == [(1, 2.0)]


def test_save_makes_values_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    assert scalars(logger, "loss") == [(0, 1.0)]
    logger.finalize("success")


def test_a_mapping_becomes_one_chart(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": {"train": 1.0, "val": 2.0}}, step=0)
    logger.finalize("success")
    assert sorted(path.name for path in Path(logger.log_dir).iterdir() if path.is_dir()) == ["loss_train", "loss_val"]


def test_experiment_is_the_writer(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, sub_dir="events", filename_suffix=".mine")
    logger.experiment.add_text("note", "hello")
    assert logger.experiment is logger.experiment
    logger.finalize("success")
    (file,) = (tmp_path / "lightning_logs" / "version_0" / "events").iterdir()
    assert file.name.endswith(".mine")
    assert "note/text_summary" in read(logger).Tags()["tensors"]


def hparams_of(logger: TensorBoardLogger) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    metadata = read(logger).SummaryMetadata("_hparams_/session_start_info")
    data = HParamsPluginData.FromString(metadata.plugin_data.content)
    found = data.session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def test_hyperparameters_and_their_metric(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.5, "model": {"layers": [1, 2], "bias": True}, "name": None})
    logger.finalize("success")
    assert hparams_of(logger) == {"lr": 0.5, "model/layers": "[1, 2]", "model/bias": True, "name": "None"}
    assert scalars(logger, "hp_metric") == [(0, -1.0)]
    assert (Path(logger.log_dir) / "hparams.yaml").read_text().startswith("lr: 0.5\n")


@pytest.mark.parametrize(
    ("metrics", "expected"), [({"acc": 0.5}, {"acc": 0.5}), (0.25, {"hp_metric": 0.25}), (None, {})]
)
def test_metrics_for_hyperparameters(tmp_path: Path, metrics: Any, expected: dict[str, float]) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.5}, metrics)
    logger.finalize("success")
    found = {name: scalars(logger, name)[0][1] for name in read(logger).Tags()["scalars"]}
    assert found == expected
    assert hparams_of(logger) == {"lr": 0.5}


def nodes(logger: TensorBoardLogger) -> set[str]:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    logger.finalize("success")
    return {node.name for node in GraphDef.FromString(read(logger)._graph).node}


def test_graph(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.example_input_array = torch.ones(1, 2)
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(model)
    logger.finalize("success")
    assert read(logger).Tags()["graph"]


class Model(LightningModule):
    """Normalisation, dropout, a part that stays in evaluation mode, and ``self.log`` in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)
        self.head.eval()
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor, shift: float | torch.Tensor = 0.0) -> Any:
        self.modes.append(self.training)
        self.log("mean", x.mean())
        return {"y": self.head(self.body(x)) + shift}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])["y"].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(make_trainer: Any, loader: Any, logger: Any, **arguments: Any) -> Model:
    torch.manual_seed(5)
    model = Model()
    model.example_input_array = torch.full((3, 4), 100.0)
    make_trainer(logger=logger, log_every_n_steps=1, **arguments).fit(model, loader)
    return model


@pytest.mark.filterwarnings("ignore:Modules in eval mode")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_t18_a_run_does_not_notice_the_graph(tmp_path: Path, make_trainer: Any, loader: Any, precision: str) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    model = fitted(make_trainer, loader, logger, precision=precision)
    plain = fitted(make_trainer, loader, False, precision=precision)
    assert "Model/Sequential[body]/BatchNorm1d[1]/running_mean/running_mean" in nodes(logger)
    assert not any(model.modes[:-4])
    assert len(plain.modes) == 4
    assert [part.training for part in model.modules()] == [part.training for part in plain.modules()]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_graph_of_inputs_with_names(tmp_path: Path) -> None:
    model = Model()  # and without a Trainer
    model.example_input_array = {"shift": torch.ones(1), "x": torch.ones(2, 4)}
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(model)
    assert any("Model[model]/Linear[head]" in name for name in nodes(logger))
    assert [part.training for part in model.modules()] == [part.training for part in Model().modules()]


def test_a_model_that_cannot_be_traced_is_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.warns(UserWarning, match="tracing Linear failed .*Set example_input_array to inputs that forward"):
        logger.log_graph(model, torch.ones(1, 3))
    assert model.training
    logger.finalize("success")
    assert not read(logger).Tags()["graph"]


def test_graph_without_an_example_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Set self.example_input_array"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(nn.Linear(1, 1))


def test_it_travels_to_another_process(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    copy = pickle.loads(pickle.dumps(logger))
    logger.finalize("success")
    copy.log_metrics({"loss": 2.0}, step=1)
    copy.finalize("success")
    assert scalars(logger, "loss") == [(0, 1.0), (1, 2.0)]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.add_image("picture", torch.zeros(3, 2, 2))
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_missing_package_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install tensorboard`, or use CSVLogger"):
        TensorBoardLogger(tmp_path)


def test_the_package_is_imported_at_the_first_write_only() -> None:
    import subprocess

    code = (
        "import sys; from drivetrain.loggers import TensorBoardLogger; TensorBoardLogger('x');"
        "sys.exit('tensorboard' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def event_files(logger: TensorBoardLogger) -> list[Path]:
    return sorted(Path(logger.log_dir).glob("events.out.tfevents*"))


def test_a_run_has_one_event_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    logger.log_metrics({"test": 2.0}, step=1)
    logger.finalize("success")
    logger.log_hyperparams({"lr": 0.2}, {"acc": 0.5})
    logger.finalize("success")
    assert len(event_files(logger)) == 1
    assert scalars(logger, "loss") == [(0, 1.0)]
    assert scalars(logger, "test") == [(1, 2.0)]
    assert scalars(logger, "acc") == [(0, 0.5)]


def test_a_copy_in_another_process_has_its_own(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 2.0}, step=1)
    copy.finalize("success")
    assert len(event_files(logger)) == 2
    assert sorted(scalars(logger, "loss")) == [(0, 1.0), (1, 2.0)]


def test_steps_behind_a_restart_are_purged(tmp_path: Path) -> None:
    before = TensorBoardLogger(tmp_path, version="run")
    for step in range(4):
        before.log_metrics({"loss": float(step)}, step=step)
    before.finalize("failed")
    after = TensorBoardLogger(tmp_path, version="run", purge_step=2)
    after.log_metrics({"loss": 9.0}, step=2)
    after.finalize("success")
    assert scalars(after, "loss") == [(0, 0.0), (1, 1.0), (2, 9.0)]


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    logger = TensorBoardLogger(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    logger.log_hyperparams({"path": Path("caf\udce9"), "k\udce9": "a\x00\u2028"})
    logger.log_metrics({"loss\udce9": 1.0}, step=0)
    logger.finalize("success")
    assert len(event_files(logger)) == 1
    copied = tmp_path / "copy"
    copied.mkdir()
    (copied / event_files(logger)[0].name).write_bytes(event_files(logger)[0].read_bytes())
    assert "loss\\udce9" in read(copied).Tags()["scalars"]


def test_a_fit_and_a_test_have_one_event_file(tmp_path: Path, make_trainer: Any, validated: Any, loader: Any) -> None:
    logger = TensorBoardLogger(tmp_path)
    module = validated()
    module.save_hyperparameters({"lr": 0.1})
    trainer = make_trainer(logger=logger, log_every_n_steps=1)
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)
    assert len(event_files(logger)) == 1
    assert scalars(logger, "val_loss")
    assert scalars(logger, "test_loss")


@pytest.mark.parametrize("deleted", ["folder", "file"])
@pytest.mark.parametrize("closed", [False, True])
def test_an_event_file_that_was_deleted_is_named_and_another_one_begun(
    tmp_path: Path, deleted: str, closed: bool
) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"loss": 0.0}, step=0)
    logger.save()
    if closed:
        logger.finalize("success")
    (file,) = Path(logger.log_dir).glob("events*")
    if deleted == "folder":
        shutil.rmtree(logger.log_dir)
    else:
        file.unlink()
    with pytest.warns(UserWarning, match=f"{file.name} was deleted, and the curves in it are lost") as caught:
        logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.finalize("success")
    assert len(caught) == 1
    assert scalars(logger, "loss") == [(1, 1.0), (2, 2.0)]
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 1\n"


def test_an_event_file_that_was_deleted_is_named_at_the_end_too(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 0.0}, step=0)
    shutil.rmtree(tmp_path)
    with pytest.warns(UserWarning, match="was deleted, and the curves in it are lost"):
        logger.finalize("success")
    assert not tmp_path.exists()


# ---- a run that resumes from a checkpoint ----------------------------------------------------------------------------


def continued(folder: Path, state: dict[str, Any], value: float, version: str = "run") -> TensorBoardLogger:
    """A process that resumes there, logs the checkpoint's step again and then two more, and is killed."""
    logger = TensorBoardLogger(folder, version=version)
    logger.load_state_dict(state)
    logger.save()  # as a fit does before it trains
    now = {**state, "folder": logger.log_dir}
    assert logger.state_dict() == now  # until something is logged, the position is that of the checkpoint
    logger.log_hyperparams({"lr": 1})
    for step in range(1, 4):
        logger.log_metrics({"loss": value * step}, step=step)
    logger.log_metrics({"per_step": value}, step=100)
    logger.save()
    return logger


def interrupted(folder: Path) -> dict[str, Any]:
    """The state at a checkpoint after step 1, of a run that goes on to step 3; one curve has steps of its own."""
    logger = TensorBoardLogger(folder, version="run")
    logger.log_hyperparams({"lr": 1})
    for step in range(4):
        logger.log_metrics({"loss": float(step), "per_step": 0.0}, step=step)
        logger.log_metrics({"per_step": 1.0}, step=50 + step)
        if step == 1:
            state = logger.state_dict()
    logger.save()
    return state


def test_a_resumed_run_continues_the_curves_at_its_checkpoint(tmp_path: Path) -> None:
    state = interrupted(tmp_path)
    for value in (10.0, 20.0):  # the first one is killed before it has a checkpoint of its own
        resumed = continued(tmp_path, state, value)
        assert sorted(scalars(resumed, "loss")) == [(0, 0.0), (1, 1.0), (2, 2 * value), (3, 3 * value)]
        assert sorted(step for step, _ in scalars(resumed, "per_step")) == [0, 1, 50, 51, 100]
        assert scalars(resumed, "hp_metric") == [(0, -1.0)]
    later = continued(tmp_path, resumed.state_dict(), 5.0)
    assert sorted(step for step, _ in scalars(later, "loss")) == [0, 1, 2, 3]
    assert len(list(Path(later.log_dir).glob("events_replaced.*"))) == 2


def test_a_resumed_run_leaves_the_events_of_other_runs_and_programs(tmp_path: Path) -> None:
    state = interrupted(tmp_path)
    first = continued(tmp_path, state, 10.0)
    other = TensorBoardLogger(tmp_path, version="run")  # as for a test in a program of its own
    other.log_metrics({"test": 1.0}, step=9)
    other.finalize("success")
    sizes = {file: file.stat().st_size for file in event_files(first)}
    moved = continued(tmp_path, state, 20.0, version="elsewhere")
    assert scalars(moved, "loss") == [(1, 20.0), (2, 40.0), (3, 60.0)]
    assert {file: file.stat().st_size for file in event_files(first)} == sizes
    assert scalars(continued(tmp_path, state, 20.0), "test") == [(9, 1.0)]


def test_a_result_that_a_resumed_run_logs_at_an_earlier_step_counts(tmp_path: Path) -> None:
    resumed = continued(tmp_path, interrupted(tmp_path), 10.0)
    resumed.log_hyperparams(metrics=0.75)
    resumed.finalize("success")
    assert sorted(scalars(resumed, "hp_metric")) == [(0, -1.0), (0, 0.75)]


KILLED = """
import os, signal, sys
import torch
from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import LambdaCallback, ModelCheckpoint
from drivetrain.loggers import TensorBoardLogger

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean(), on_step=True, on_epoch=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def chart(trainer, *rest):
    trainer.logger.log_metrics({"chart": {"a": trainer.global_step, "b": 0}}, step=trainer.global_step)

def kill(trainer, *rest):
    if trainer.global_step == 7:
        trainer.logger.save()
        os.kill(os.getpid(), signal.SIGKILL)

def fit(version, *callbacks):
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=2)
    saves = ModelCheckpoint(version, every_n_train_steps=4)
    logger = TensorBoardLogger("logs", name=None, version=version)
    callbacks = [LambdaCallback(on_train_batch_end=chart), saves, *callbacks]
    Trainer(max_epochs=2, logger=logger, callbacks=callbacks, log_every_n_steps=1, val_check_interval=3,
        enable_progress_bar=False).fit(Net(), data, data)

if sys.argv[1] == "killed":
    fit("run", LambdaCallback(on_train_batch_end=kill))
fit("run")
fit("whole")
"""


def test_a_run_that_is_killed_and_resumed_has_each_step_once(tmp_path: Path, programs: Any) -> None:
    """The fit is killed behind its checkpoint, and the command started again."""
    environ = {**os.environ, "DRIVETRAIN_RESUME": "auto"}
    for how, code in (("killed", -signal.SIGKILL), ("resumed", 0)):
        done = programs.run("-c", KILLED, how, cwd=tmp_path, env=environ)
        assert done.returncode == code, done.stderr

    def steps(folder: str) -> dict[str, list[int]]:
        events = read(tmp_path / "logs" / folder)
        return {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}

    assert steps("run") == steps("whole")
    assert steps("run")["loss_step"] == list(range(20))
    for curve in ("chart_a", "chart_b"):
        assert steps(f"run/{curve}")["chart"] == steps(f"whole/{curve}")["chart"] == list(range(1, 21))
    assert list((tmp_path / "logs" / "run").glob("events_replaced.*"))


def test_a_checkpoint_is_loaded_with_the_file_of_hyperparameters_of_a_module_without_any(
    tmp_path: Path, make_trainer: Any, validated: Any, loader: Any
) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer = make_trainer(logger=logger, max_epochs=1)
    trainer.fit(validated(), loader, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    hparams_file = os.path.join(logger.log_dir, "hparams.yaml")
    assert Path(hparams_file).read_text() == "{}\n"
    validated.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=hparams_file)


def test_its_folders_are_read_back_as_they_were_passed(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), "name", version="first")
    assert (logger.save_dir, logger.root_dir) == (str(tmp_path), str(tmp_path / "name"))
    assert logger.log_dir == str(tmp_path / "name" / "first")
    assert TensorBoardLogger("relative").save_dir == "relative"
