"""TensorBoardLogger: what TensorBoard reads back, and that nothing stays behind."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import TensorBoardLogger

pytest.importorskip("tensorboard")


def read(logger: TensorBoardLogger) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
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


def test_nothing_exists_before_the_first_write(tmp_path: Path) -> None:
    threads = threading.active_count()
    logger = TensorBoardLogger(tmp_path)
    logger.log_graph(nn.Linear(1, 1))
    logger.save()
    logger.finalize("success")
    assert logger.version == 0
    assert list(tmp_path.iterdir()) == []
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
    assert (Path(logger.log_dir) / "hparams.yaml").read_text().startswith('"lr": 0.5\n')


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own tracing for TensorBoard
def test_graph(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.example_input_array = torch.ones(1, 2)
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(model)
    logger.finalize("success")
    assert read(logger).Tags()["graph"]


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
