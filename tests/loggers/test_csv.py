"""CSVLogger: what the table holds, and what survives a crash or a second logger."""

from __future__ import annotations

import argparse
import builtins
import csv
import io
import os
import pickle
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger


def table(logger: CSVLogger) -> list[dict[str, str]]:
    with open(logger.metrics_file_path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_hold_step_and_metrics(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.1, "epoch": 0}, step=4)
    logger.log_metrics({"loss": 1e-9, "epoch": 1}, step=9)
    logger.finalize("success")
    assert table(logger) == [
        {"step": "4", "loss": "0.1", "epoch": "0"},
        {"step": "9", "loss": "1e-09", "epoch": "1"},
    ]


def test_nothing_exists_before_the_version_is_decided(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")
    assert logger.is_undecided
    assert not (tmp_path / "logs").exists()
    assert logger.log_dir == str(tmp_path / "logs" / "lightning_logs" / "version_0")
    assert not logger.is_undecided
    logger.log_metrics({"loss": 1.0}, step=0)
    assert list(Path(logger.log_dir).iterdir()) == []
    logger.log_hyperparams({"lr": 0.1})
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["hparams.yaml"]
    logger.save()
    assert sorted(path.name for path in Path(logger.log_dir).iterdir()) == ["hparams.yaml", "metrics.csv"]


def test_a_run_without_a_word_leaves_no_folder(tmp_path: Path) -> None:
    CSVLogger(tmp_path).finalize("failed")
    assert list(tmp_path.iterdir()) == []


def test_columns_that_appear_later_widen_the_table(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_metrics({"val,loss": 0.7}, step=2)
    logger.log_metrics({"loss": 0.2}, step=3)
    assert table(logger) == [
        {"step": "0", "loss": "1.0", "val,loss": ""},
        {"step": "1", "loss": "0.5", "val,loss": ""},
        {"step": "2", "loss": "", "val,loss": "0.7"},
        {"step": "3", "loss": "0.2", "val,loss": ""},
    ]
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["metrics.csv"]


def test_a_name_more_in_each_flush_reads_no_row_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cost of a flush would grow with rows times columns."""

    def reading(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a row was read")

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(csv, "DictReader", reading)
        for step in range(4):
            logger.log_metrics({f"value{step}": step / 2}, step=step)
    assert Path(logger.metrics_file_path).read_text().splitlines() == [
        "step,value0,value1,value2,value3", "0,0.0,,,", "1,,0.5,,", "2,,,1.0,", "3,,,,1.5",
    ]  # fmt: skip


@pytest.mark.parametrize("written", ["step,loss\r\n0,1.0\r\n", "loss,step\n1.0,0\n", 'step,loss\n\n"0",1.0\n'])
def test_a_table_of_another_program_is_widened(tmp_path: Path, written: str) -> None:
    folder = tmp_path / "lightning_logs" / "version_3"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(written, newline="")
    logger = CSVLogger(tmp_path, version=3, flush_logs_every_n_steps=1)
    logger.log_metrics({"more": 2.0}, step=1)
    first, second = table(logger)
    assert first == {"step": "0", "loss": "1.0", "more": ""}
    assert second == {"step": "1", "loss": "", "more": "2.0"}


@pytest.mark.parametrize("flush_every", [1, 100])
def test_one_step_is_one_row_unless_a_name_has_two_values(tmp_path: Path, flush_every: int) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=flush_every)
    logger.log_metrics({"loss": 1.0}, step=5)
    logger.log_metrics({"val": 2.0, "loss": 1.0}, step=5)
    logger.log_metrics({"loss": 3.0}, step=5)
    logger.log_metrics({"val": 4.0}, step=6)
    logger.log_metrics({"loss": 5.0}, step=5)
    logger.save()
    assert [tuple(row.values()) for row in table(logger)] == [
        ("5", "1.0", "2.0"),
        ("5", "3.0", ""),
        ("6", "", "4.0"),
        ("5", "5.0", ""),
    ]


def test_rows_are_written_once_they_span_the_given_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.log_metrics({"loss": 1.0}, step=8)
    assert not Path(logger.metrics_file_path).exists()
    logger.log_metrics({"loss": 1.0}, step=9)
    assert len(table(logger)) == 3
    logger.log_metrics({"loss": 1.0}, step=10)
    assert len(table(logger)) == 3
    logger.log_metrics({"loss": 1.0}, step=19)
    assert len(table(logger)) == 5


def test_a_given_version_is_continued_in_order(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version="run")
    for step in range(3):
        first.log_metrics({"loss": float(step)}, step=step)
    first.finalize("failed")
    second = CSVLogger(tmp_path, version="run")
    second.log_metrics({"loss": 3.0}, step=3)
    second.save()
    second.log_metrics({"loss": 4.0, "val": 1.0}, step=4)
    second.finalize("success")
    assert [(row["step"], row["loss"], row["val"]) for row in table(second)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "3.0", ""),
        ("4", "4.0", "1.0"),
    ]


def test_a_resumed_run_does_not_double_the_last_row(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, "a", version=0)
    first.log_metrics({"loss": 0.1, "epoch": 0}, step=0)
    first.log_metrics({"loss": 0.3, "mean": 1e-7, "epoch": 1}, step=1)
    first.save()
    resumed = CSVLogger(tmp_path, "a", version=0)
    resumed.log_metrics({"mean": 1e-7, "epoch": 1}, step=1)  # the moment of saving, again
    resumed.log_metrics({"mean": 0.5, "epoch": 1}, step=1)  # another value is a row of its own
    resumed.log_metrics({"loss": 0.2, "new": 1.0, "epoch": 2}, step=2)
    resumed.save()
    table = (tmp_path / "a" / "version_0" / "metrics.csv").read_text()
    assert table == "step,loss,epoch,mean,new\n0,0.1,0,,\n1,0.3,1,1e-07,\n1,,1,0.5,\n2,0.2,2,,1.0\n"


@pytest.mark.parametrize("last", ["1,much,1", "one,0.3,1", "1,0.3", "1,0.3,2"])
def test_a_last_row_that_holds_something_else_stays_as_it_is(tmp_path: Path, last: str) -> None:
    path = tmp_path / "a" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(f"step,loss,epoch\n{last}\n")
    logger = CSVLogger(tmp_path, "a", version=0)
    logger.log_metrics({"loss": 0.3, "epoch": 1}, step=1)
    logger.save()
    assert path.read_text() == f"step,loss,epoch\n{last}\n1,0.3,1\n"


def test_a_row_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_bytes(b"step,loss\n0,0.5\n1,0.123456789")
    logger = CSVLogger(tmp_path, name="", version="run")
    logger.log_metrics({"loss": 2.0}, step=1)
    logger.save()
    assert table(logger) == [{"step": "0", "loss": "0.5"}, {"step": "1", "loss": "2.0"}]


def test_the_next_version_follows_the_highest(tmp_path: Path) -> None:
    for name in ("version_0", "version_12", "version_x", "other"):
        (tmp_path / "exp" / name).mkdir(parents=True)
    assert CSVLogger(tmp_path, "exp").version == 13
    assert CSVLogger(tmp_path, "none yet").version == 0


def test_the_version_is_settled_when_it_is_first_needed(tmp_path: Path) -> None:
    early, late = CSVLogger(tmp_path), CSVLogger(tmp_path)
    early.log_metrics({"a": 1.0}, step=0)
    early.save()
    assert (early.version, late.version) == (0, 1)
    assert early.version == 0


def test_a_run_that_changes_its_folder_writes_on_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    logger = CSVLogger("runs", name="a", flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 1.0}, step=0)
    monkeypatch.chdir(tmp_path / "elsewhere")
    logger.log_metrics({"loss": 2.0}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.save()
    folder = tmp_path / "runs" / "a" / "version_0"
    assert (folder / "metrics.csv").read_text() == "step,loss\n0,1.0\n1,2.0\n"
    assert sorted(os.listdir(folder)) == ["hparams.yaml", "metrics.csv"]
    assert logger.save_dir == "runs"
    assert os.listdir() == []
    assert not recwarn.list


def test_where_the_run_lives(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "exp", version="first")
    assert (logger.name, logger.version, logger.save_dir) == ("exp", "first", str(tmp_path))
    assert (logger.root_dir, logger.log_dir) == (str(tmp_path / "exp"), str(tmp_path / "exp" / "first"))


def test_prefix_step_and_values_of_other_types(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="a")
    logger.log_metrics({"x": torch.tensor(2), "ok": True})  # type: ignore[dict-item]  # what users pass by hand
    logger.log_metrics({"x": float("nan")})
    logger.save()
    assert table(logger) == [{"step": "0", "a-x": "2.0", "a-ok": "1.0"}, {"step": "1", "a-x": "nan", "a-ok": ""}]


def test_hyperparameters_are_yaml(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    params = {
        "lr": 1e-5, "big": 1e30, "n": 3, "flag": True, "none": None, "text": 'a "quoted": yes # \U0001f600\n',
        "layers": [1, 2.5, {"deep": "x"}], "no": "on", "inf": float("inf"), "nested": {"path": Path("a"), "1": [1e-9]},
    }  # fmt: skip
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams(params)
    logger.log_hyperparams(argparse.Namespace(n=4))  # type: ignore[arg-type]  # Lightning programs do
    logger.save()
    read = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text("utf-8"))
    assert read == {**params, "n": 4, "nested": {"path": "a", "1": [1e-9]}}


def test_hyperparameters_are_yaml_as_people_write_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "model": {"layers": [1, 2], "name": None}})
    logger.save()
    written = (Path(logger.log_dir) / "hparams.yaml").read_text("utf-8")
    assert written == "lr: 0.1\nmodel:\n  layers:\n    - 1\n    - 2\n  name: null\n"


# ---- runs beside each other ------------------------------------------------------------------------------------------


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path: Path) -> None:
    def begin(loggers: list[CSVLogger]) -> None:
        logger = CSVLogger(tmp_path)
        barrier.wait()
        for step in range(3):
            logger.log_metrics({"loss": 1.0}, step=step)
        logger.finalize("success")
        loggers.append(logger)

    barrier, loggers = threading.Barrier(8), []
    threads = [threading.Thread(target=begin, args=(loggers,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(logger.version for logger in loggers) == list(range(8))
    assert [len(table(logger)) for logger in loggers] == [3] * 8


def test_another_rank_expects_a_version_and_is_told_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    assert first.version == 0
    monkeypatch.setenv("RANK", "1")
    assert second.version == 1
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]  # only rank 0 makes one
    second.agree_on_run(lambda own: 0 if own is None else pytest.fail("rank 1 has nothing to say"))
    assert second.version == 0


def test_a_process_that_starts_others_gives_its_version_back(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    assert first.version == 0
    first.leave_run()
    assert first.is_undecided
    assert second.version == 0
    second.log_metrics({"a": 1.0}, step=0)
    second.save()
    second.leave_run()  # something was written: it stays
    assert second.version == 0
    assert len(table(second)) == 1


def test_two_writers_of_one_version_keep_each_others_rows(tmp_path: Path) -> None:
    first, second = (CSVLogger(tmp_path, version="run", flush_logs_every_n_steps=1) for _ in range(2))
    first.log_metrics({"loss": 1.0}, step=0)
    second.log_metrics({"val": 5.0}, step=0)  # it begins behind what is there
    with pytest.warns(UserWarning, match="Another logger writes to .*metrics.csv as well"):
        first.log_metrics({"loss": 2.0}, step=1)
    with pytest.warns(UserWarning, match="Another logger writes to .*metrics.csv as well"):
        second.log_metrics({"acc": 6.0}, step=0)
    first.log_metrics({"loss": 3.0}, step=2)  # each says it once
    second.log_metrics({"val": 7.0}, step=1)
    for logger in (first, second):
        logger.finalize("success")
    rows = [{name: value for name, value in row.items() if value} for row in table(first)]
    assert rows == [
        {"step": "0", "loss": "1.0"},
        {"step": "0", "val": "5.0"},
        {"step": "1", "loss": "2.0"},
        {"step": "0", "acc": "6.0"},
        {"step": "2", "loss": "3.0"},
        {"step": "1", "val": "7.0"},
    ]


@pytest.mark.parametrize("deleted", ["folder", "file"])
def test_a_table_that_was_deleted_is_named_and_begun_anew(tmp_path: Path, deleted: str) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_hyperparams({"lr": 1})
    for step in range(2):
        logger.log_metrics({"loss": float(step)}, step=step)
    if deleted == "folder":
        shutil.rmtree(logger.log_dir)
    else:
        os.unlink(logger.metrics_file_path)
    with pytest.warns(UserWarning, match="metrics.csv was deleted, and the rows in it are lost") as caught:
        logger.log_metrics({"loss": 2.0}, step=2)
    logger.log_metrics({"loss": 3.0}, step=3)
    logger.finalize("success")
    assert len(caught) == 1
    assert table(logger) == [{"step": "2", "loss": "2.0"}, {"step": "3", "loss": "3.0"}]
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 1\n"


def test_writers_of_one_version_in_threads_lose_no_row(tmp_path: Path) -> None:
    def write(name: str) -> None:
        logger = CSVLogger(tmp_path, version="run", flush_logs_every_n_steps=1)
        barrier.wait()
        for step in range(40):
            logger.log_metrics({name: float(step)}, step=step)
        logger.finalize("success")

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = table(CSVLogger(tmp_path, version="run"))
    for name in "abcd":
        assert [float(row[name]) for row in rows if row[name]] == list(map(float, range(40)))


def test_names_and_values_that_are_no_utf_8(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    params = {"path": "caf\udce9", "control": "a\x00\x07\x85\u2028b", "k\udce9\n": 1}
    logger = CSVLogger(folder, prefix="p\udce9")
    logger.log_hyperparams(params)
    for step in range(2):
        logger.log_metrics({"loss\udce9": 1.0, f"new{step}": 2.0}, step=step)
        logger.save()
    assert [row["p\\udce9-loss\\udce9"] for row in table(logger)] == ["1.0", "1.0"]
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text("utf-8")) == params


def test_a_full_disk_is_named_and_no_row_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    logger.log_metrics({"loss": 2.0}, step=1)
    real = builtins.open

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            raise OSError(28, "No space left on device")

    def full(path: Any, mode: str = "r", **options: Any) -> Any:
        return Full(path, "r+b") if mode == "r+b" else real(path, mode, **options)

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(OSError, match="no space left on device: .* bytes free in .*metrics.csv"):
        logger.save()
    monkeypatch.undo()
    logger.finalize("failed")
    assert [row["loss"] for row in table(logger)] == ["1.0", "2.0"]


def test_it_travels_to_another_process(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=3)
    logger.log_metrics({"a": 1.0}, step=0)
    logger.save()
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"a": 2.0}, step=1)
    copy.save()
    assert [row["a"] for row in table(logger)] == ["1.0", "2.0"]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_hyperparams({"lr": 1})
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"save_dir": "s33://bucket/x"}, "save_dir='s33://bucket/x'"),
        ({"save_dir": ".", "flush_logs_every_n_steps": 0}, "flush_logs_every_n_steps=0"),
        ({"save_dir": ".", "version": 1.5}, "version=1.5"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        CSVLogger(**kwargs)  # type: ignore[arg-type]


def test_its_experiment_has_the_rows_that_are_not_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    experiment = logger.experiment
    assert (experiment.NAME_HPARAMS_FILE, experiment.NAME_METRICS_FILE) == ("hparams.yaml", "metrics.csv")
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_metrics({"b": 2.0}, step=1)
    assert experiment.metrics == [{"a": 1.0, "step": 0}, {"b": 2.0, "step": 1}]
    assert experiment.metrics_keys == []
    logger.save()
    assert experiment.metrics == []
    assert sorted(experiment.metrics_keys) == ["a", "b", "step"]
    logger.log_metrics({"a": 3.0}, step=2)
    assert experiment.metrics == [{"a": 3.0, "step": 2}]


def test_its_experiment_writes_the_files(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.experiment.add_scalar("loss", 1.0, 0)
    logger.experiment.log_metrics({"more": 2}, step=1)
    logger.experiment.log_hparams({"width": 3})
    logger.experiment.save()
    assert Path(logger.experiment.metrics_file_path).read_text() == "step,loss,more\n0,1.0,\n1,,2\n"
    assert Path(logger.experiment.log_dir, "hparams.yaml").read_text() == "width: 3\n"
    assert logger.experiment.hparams == {"width": 3}
    with pytest.raises(AttributeError, match="CSVLogger.experiment has no add_image.*TensorBoardLogger"):
        logger.experiment.add_image("picture", 1)


def test_hyperparameters_without_arguments_write_those_that_are_there(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams()
    logger.save()
    assert (tmp_path / "lightning_logs/version_0/hparams.yaml").exists()


@pytest.mark.parametrize("base", [CSVLogger, TensorBoardLogger])
def test_overridden_names_and_versions_decide_the_folder(tmp_path: Path, base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(tmp_path)
            self.team = "blue"

        @property
        def name(self) -> str:
            return f"of-{self.team}"

        @property
        def version(self) -> str:
            return "today"

    logger = Own()
    logger.log_hyperparams()
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "of-blue" / "today")
    assert not logger.is_undecided
    assert [path.name for path in tmp_path.iterdir()] == ["of-blue"]
    assert [path.name for path in (tmp_path / "of-blue").iterdir()] == ["today"]


# ---- a run that resumes from a checkpoint ----------------------------------------------------------------------------


def interrupted(folder: Path) -> dict[str, Any]:
    """The state at a checkpoint after step 1, of a run that goes on to step 3 in the table of three columns."""
    logger = CSVLogger(folder, version="run")
    for step in range(2):
        logger.log_metrics({"loss": float(step)}, step=step)
    logger.save()
    state = logger.state_dict()
    logger.log_metrics({"mean": 0.5}, step=1)  # in the row of the checkpoint, and behind it
    for step in range(2, 4):
        logger.log_metrics({"loss": float(step)}, step=step)
    logger.finalize("failed")
    return state


def resumed(folder: Path, state: dict[str, Any], version: str = "run") -> list[tuple[str, str, str]]:
    logger = CSVLogger(folder, version=version)
    logger.load_state_dict(state)
    logger.save()  # as a fit does before it trains
    folder_now = os.path.dirname(logger.metrics_file_path)
    assert logger.state_dict() == {**state, "folder": folder_now}  # until something is logged: that of the checkpoint
    logger.log_metrics({"mean": 0.25}, step=1)
    logger.log_metrics({"loss": 20.0}, step=2)
    logger.finalize("success")
    return [(row["step"], row["loss"], row["mean"]) for row in table(logger)]


def test_a_resumed_run_replaces_the_rows_behind_its_checkpoint(tmp_path: Path) -> None:
    state = interrupted(tmp_path)
    assert resumed(tmp_path, state) == [("0", "0.0", ""), ("1", "1.0", "0.25"), ("2", "20.0", "")]
    replaced = next(tmp_path.rglob("metrics_replaced.csv"))
    assert replaced.read_text().splitlines() == ["step,loss,mean", "2,2.0,", "3,3.0,"]
    assert resumed(tmp_path, state)[1:] == [("1", "1.0", "0.25"), ("2", "20.0", "")]
    assert replaced.read_text().splitlines()[3:] == ["step,loss,mean", "2,20.0,"]


@pytest.mark.parametrize("rows", [[], [0], [5, 6, 7, 8]], ids=["no", "too few", "other"])
def test_a_table_without_the_row_of_the_checkpoint_is_continued_at_its_end(tmp_path: Path, rows: list[int]) -> None:
    state = interrupted(tmp_path / "first")
    other = CSVLogger(tmp_path, version="run")
    for step in rows:
        other.log_metrics({"loss": float(step)}, step=step)
    other.save()
    assert [step for step, *_ in resumed(tmp_path, state)] == [*map(str, rows), "1", "2"]
    assert not (Path(other.log_dir) / "metrics_replaced.csv").exists()


def test_a_logger_that_goes_on_in_its_program_replaces_its_rows_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version="run")
    for step in range(4):
        logger.log_metrics({"loss": float(step)}, step=step)
        if step == 1:
            state = logger.state_dict()
    logger.load_state_dict(state)
    logger.log_metrics({"loss": 20.0}, step=2)
    logger.save()
    assert [(row["step"], row["loss"]) for row in table(logger)] == [("0", "0.0"), ("1", "1.0"), ("2", "20.0")]


@pytest.mark.parametrize("params", [{"lr": 1}, {}, None])
def test_logging_hyperparameters_makes_the_folder(tmp_path: Path, params: Any) -> None:
    logger = CSVLogger(tmp_path, version=3)
    assert not os.path.exists(logger.log_dir)
    logger.log_hyperparams(params)
    assert os.listdir(logger.log_dir) == ["hparams.yaml"]


def test_a_checkpoint_before_the_first_row_takes_all_later_rows_back_but_not_those_of_an_earlier_run(
    tmp_path: Path,
) -> None:
    states = []
    for value in (1.0, 2.0):
        logger = CSVLogger(tmp_path, version="run")
        states.append(logger.state_dict())
        logger.save()  # as a fit does before it trains
        states.append(logger.state_dict())
        logger.log_metrics({"loss": value}, step=0)
        logger.finalize("failed")
    assert "rows" not in states[0]  # the table was not read yet
    resumed = CSVLogger(tmp_path, version="run")
    resumed.load_state_dict(states[3])
    resumed.log_metrics({"loss": 3.0}, step=0)
    resumed.finalize("success")
    assert [row["loss"] for row in table(resumed)] == ["1.0", "3.0"]
    for state in (states[0], {**states[1], "folder": str(tmp_path / "other")}, {**states[1], "rows": 5}):
        again = CSVLogger(tmp_path, version="run")
        again.load_state_dict(state)
        again.log_metrics({"loss": 4.0}, step=1)
        again.finalize("success")
        assert [row["loss"] for row in table(again)][:2] == ["1.0", "3.0"]


def test_a_row_that_was_taken_back_is_logged_again_with_the_same_values(tmp_path: Path) -> None:
    """The second run starts from the beginning, with the values of the first; the third resumes from the second."""
    for number in range(2):
        logger = CSVLogger(tmp_path, version="run")
        logger.save()
        logger.log_metrics({"loss": 0.5}, step=0)
        state = logger.state_dict()
        if number:
            logger.log_metrics({"loss": 0.25}, step=1)
        logger.finalize("failed")
    resumed = CSVLogger(tmp_path, version="run")
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 0.25}, step=1)
    resumed.finalize("success")
    assert [(row["step"], row["loss"]) for row in table(resumed)] == [("0", "0.5"), ("1", "0.25")]
