"""WandbLogger with the real wandb, offline: what was logged is read from the file that it will upload."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extras.logged import Net, cut_and_resumed, loader, trainer

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import WandbLogger


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, save_code=False)
    yield lambda **arguments: WandbLogger(save_dir=tmp_path, offline=True, settings=settings, **arguments)
    finish()


def rows(folder: Path, run_id: str) -> list[list[dict[str, Any]]]:
    """What a run logged, one list for each time it was begun."""
    found = []
    for path in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/*.wandb")):  # its process may write for a while
        one, until = [], time.monotonic() + 60
        while not (end := written(path)[-1:]) or end[0].WhichOneof("record_type") != "exit":
            assert time.monotonic() < until, "wandb's process has not ended the file"
            time.sleep(0.01)  # it writes after finish() has returned
        for record in written(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                one.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        found.append(one)
    return found


def written(path: Path) -> list[Any]:
    """What the file holds so far."""
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in records(path.read_bytes())]


def records(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, in which wandb keeps what it will upload: blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(content):
        if (rest := 32768 - place % 32768) < 7:
            place += rest
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield record
            record = b""


def finish(logger: Any = None) -> None:
    """What the end of the program does: the file is complete."""
    import wandb

    if wandb.run is not None:
        wandb.run.finish()


def test_a_fit_logs_values_and_hyperparameters(make: Any, tmp_path: Path) -> None:
    logger = make(project="mine", name="first", prefix="a")
    run = trainer(tmp_path, logger)
    run.fit(Net(rates={"lr": 0.1}), loader())
    assert dict(logger.experiment.config) == {"width": 2, "rates": {"lr": 0.1}}
    assert (logger.name, logger.save_dir) == ("mine", str(tmp_path))
    assert str(tmp_path / "mine" / logger.version / "checkpoints") in str(run.checkpoint_callback.best_model_path)
    finish()
    [logged] = rows(tmp_path, logger.version)
    assert [row["trainer/global_step"] for row in logged if "a-loss_step" in row] == [0, 1, 2, 3]
    assert [row["trainer/global_step"] for row in logged if "a-loss_epoch" in row] == [3]


def test_a_resumed_fit_continues_the_run_and_no_step_goes_back(make: Any, tmp_path: Path) -> None:
    def ends(logger: WandbLogger) -> None:
        finish()
        for number, path in enumerate(tmp_path.glob(f"wandb/offline-run-20*-{logger.version}")):
            path.rename(path.with_name(f"offline-run-{len(ended) + number}-{logger.version}"))  # named by the second
        ended.append(logger)

    ended: list[WandbLogger] = []
    first, second = cut_and_resumed(tmp_path, make, ends)
    assert first.version == second.version
    before, after = rows(tmp_path, first.version)
    for logged in (before, after):
        own = [row["_step"] for row in logged]
        assert own == sorted(set(own))  # the service's own step
    assert [row["trainer/global_step"] for row in before if "loss_step" in row] == list(range(8))
    assert [row["trainer/global_step"] for row in after if "loss_step" in row] == list(range(4, 12))


def test_media(make: Any, tmp_path: Path) -> None:
    logger = make()
    logger.log_image("picture", [np.zeros((4, 4, 3), "uint8")], step=3, caption=["black"])
    logger.log_text("words", columns=["a"], data=[["b"]])
    logger.log_table("numbers", columns=["a"], data=[[1]], step=4)
    (tmp_path / "film.gif").write_bytes(b"GIF89a")
    logger.log_video("film", [str(tmp_path / "film.gif")], caption=["short"])
    with pytest.raises(ConfigurationError, match="got 1 values and 2 of caption"):
        logger.log_image("picture", [np.zeros((4, 4, 3), "uint8")], caption=["a", "b"])
    finish()
    [logged] = rows(tmp_path, logger.version)
    text = json.dumps(logged)
    assert all(kind in text for kind in ("images/separated", "table-file", "video"))


def test_a_run_of_the_users_is_written_to(make: Any, tmp_path: Path) -> None:
    import wandb

    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off")) as run:
        logger = WandbLogger(experiment=run)
        assert logger.experiment is run
        assert WandbLogger(save_dir=tmp_path).experiment is run  # the process has begun it already
        copy = pickle.loads(pickle.dumps(WandbLogger(save_dir=tmp_path, id=run.id)))
        assert copy.version == run.id


def test_uploads_need_a_connection() -> None:
    with pytest.raises(ConfigurationError, match="offline=True, log_model='all'"):
        WandbLogger(offline=True, log_model="all")
    with pytest.raises(ConfigurationError, match="add_file_policy='any'"):
        WandbLogger(add_file_policy="any")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_variable_wandb_mode_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    import wandb

    wandb.teardown()  # it reads the variables once
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, settings=wandb.Settings(console="off", x_disable_stats=True))
    trainer(tmp_path, logger, enable_checkpointing=False).fit(Net(), loader())
    assert logger.version == logger.experiment.id
    assert (logger.experiment.offline, logger.experiment.disabled) == (mode == "offline", mode == "disabled")
    assert bool(list(tmp_path.glob("wandb/offline-run-*"))) == (mode == "offline")
    finish()
    wandb.teardown()
