"""The checks for loggers."""

from __future__ import annotations

import contextlib
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.testing._regression import Small, data
from drivetrain.testing.checks import Part, Skipped, is_true, same
from drivetrain.trainer.trainer import Trainer

SETTINGS = ("keeps_files", "repeats_rows")

_NUMBERS = {"loss": 0.5, "val/accuracy": 1.0, "count": 3}


def _make(part: Part) -> Any:
    return part.make(save_dir=str(part.folder))


def _sizes(folder: Path) -> dict[str, int]:
    return {str(each): each.stat().st_size for each in folder.rglob("*") if each.is_file()}


def _begun(part: Part) -> Any:
    """Return a logger that has begun a run and logged one row."""
    logger = _make(part)
    logger.begin_run()
    logger.log_metrics(dict(_NUMBERS), 0)
    return logger


def try_it(part: Part) -> None:
    """Check that a logger can be created."""
    _make(part)


def a_run_has_a_name_and_a_version(part: Part) -> None:
    """name is a str or None, and version is a str, an int or None. Reading name, version or a folder writes no file."""
    logger = _make(part)
    is_true(isinstance(logger.name, (str, type(None))), f"name is {logger.name!r}")
    is_true(isinstance(logger.version, (int, str, type(None))), f"version is {logger.version!r}")
    for name in ("save_dir", "root_dir", "log_dir"):
        folder = getattr(logger, name)
        is_true(folder is None or isinstance(folder, (str, Path)), f"{name} is {folder!r}")
    same(_sizes(part.folder), {}, "files after reading the names")


def the_name_stays_the_same(part: Part) -> None:
    """name, version and log_dir do not change when values are logged or when the run ends."""
    logger = _make(part)
    logger.begin_run()
    found = []
    for action in (lambda: None, lambda: logger.log_metrics(dict(_NUMBERS), 0), lambda: logger.finalize("success")):
        action()
        found.append((logger.name, logger.version, logger.log_dir))
    same(found[1:], found[:1] * 2, "name, version and log_dir later")


def what_was_logged_is_written(part: Part) -> None:
    """If the logger keeps files, save() and finalize() write all logged values to files below save_dir. Text files
    contain each step.
    """
    logger = _make(part)
    if not part.settings.get("keeps_files", logger.save_dir is not None):
        raise Skipped("it keeps no files of its own")
    for end in (logger.save, lambda: logger.finalize("success")):
        before = _sizes(part.folder)
        logger.log_metrics({**_NUMBERS, "pi": math.pi}, len(before))
        end()
        is_true(_sizes(part.folder) != before, "no file below save_dir has grown")
    rows = [1000.0625 + row for row in range(6)]
    for step, row in enumerate(rows, 100):
        logger.log_metrics({"row": row}, step)
    logger.finalize("success")
    text = b"".join(path.read_bytes() for path in part.folder.rglob("*") if path.is_file())
    if found := [row for row in rows if str(row).encode() in text]:
        same(found, rows, "values of six steps that are in the files")


def any_number_can_be_logged(part: Part) -> None:
    """log_metrics accepts ints, finite and infinite floats, and NaN, works without a step, and does not change its
    argument.
    """
    logger = _make(part)
    metrics = {**_NUMBERS, "nan": math.nan, "inf": math.inf, "tiny": -1e-300, "name with spaces": 0.0}
    given = dict(metrics)
    for step in (0, 10**9, None):
        logger.log_metrics(metrics, step)
    logger.log_metrics({}, 11)
    logger.finalize("success")
    same(list(metrics), list(given), "names in the dictionary that was passed")
    same(repr(metrics), repr(given), "values in the dictionary that was passed")


def hyperparameters_can_be_logged(part: Part) -> None:
    """log_hyperparams accepts nested values, objects of any class, and None, and can be called several times."""
    logger = _make(part)
    params = {"lr": 0.1, "layers": [1, 2], "sizes": {"hidden": 8}, "dtype": torch.float32, "to": Path("x")}
    for each in (params, {}, None, {"momentum": 0.2}, params):
        logger.log_hyperparams(each)
    logger.finalize("success")


def another_run_may_follow(part: Part) -> None:
    """After finalize("success") or finalize("failed"), the logger can log again. finalize can be called twice."""
    logger = _begun(part)
    for status in ("success", "failed", "failed"):
        logger.finalize(status)
    logger.log_metrics(dict(_NUMBERS), 1)
    logger.save()
    logger.finalize("success")


def runs_do_not_mix(part: Part) -> None:
    """If numbers_runs is True, two loggers with the same arguments have different versions or folders."""
    first = _begun(part)
    first.finalize("success")
    second = _make(part)
    if not second.numbers_runs:
        raise Skipped("numbers_runs is False")
    second.log_metrics(dict(_NUMBERS), 0)
    second.finalize("success")
    runs = [(each.version, each.log_dir) for each in (first, second)]
    is_true(runs[0] != runs[1], f"both runs have the version and the folder {runs[0]}")


def all_ranks_have_one_run(part: Part) -> None:
    """After agree_on_run, every rank has the version and the folder of rank 0. All ranks have called broadcast the same
    number of times.
    """
    sent: list[Any] = []
    ranks = [_make(part), _make(part)]
    for each in ranks:
        each.begin_run()

    def of_rank_0(value: Any) -> Any:
        sent.append(value)
        return value

    ranks[0].agree_on_run(of_rank_0)
    waiting = list(sent)
    ranks[1].agree_on_run(lambda value: waiting.pop(0))
    same(len(waiting), 0, "broadcasts of rank 0 that rank 1 does not take part in")
    same((ranks[1].version, ranks[1].log_dir), (ranks[0].version, ranks[0].log_dir), "version and log_dir of rank 1")


def a_resumed_fit_continues_the_run(part: Part) -> None:
    """state_dict is plain data. A new logger that loads the state has the version and folder of the first logger, and
    can log.
    """
    logger = _begun(part)
    logger.save()
    state = logger.state_dict()
    if not state:
        raise Skipped("state_dict is empty")
    restored = _stored(part, state)
    where = logger.name, logger.version, logger.log_dir
    logger.finalize("success")
    again = _make(part)
    again.load_state_dict(restored)
    again.log_metrics(dict(_NUMBERS), 1)
    if not again.numbers_runs:
        same((again.name, again.version, again.log_dir), where, "name, version and log_dir of the new logger")
    again.finalize("success")


def _stored(part: Part, state: Any) -> Any:
    """Save ``state`` in a checkpoint, load the checkpoint, and return the loaded state."""
    store, path = TorchCheckpointIO(), part.folder.parent / f"{part.folder.name}.state"
    try:
        store.save_checkpoint({"logger": state}, path)
        return store.load_checkpoint(path)["logger"]
    finally:
        path.unlink(missing_ok=True)


def a_resumed_fit_writes_each_row_once(part: Part) -> None:
    """Text files contain each row once, even if a resumed fit logs the rows after its checkpoint again.

    The setting "repeats_rows" skips this check.
    """
    if part.settings.get("repeats_rows"):
        raise Skipped('the setting "repeats_rows" is given')
    rows = [2000.0625 + row for row in range(8)]

    def log(logger: Any, steps: range) -> None:
        for step in steps:
            logger.log_metrics({"row": rows[step]}, step)
        logger.save()

    logger = _make(part)
    logger.begin_run()
    log(logger, range(2))
    log(logger, range(2, 4))
    state = _stored(part, logger.state_dict())  # the state in the checkpoint from which the fit resumes
    log(logger, range(4, 6))
    again = _make(part)
    if state:
        again.continue_run(state, str(part.folder / "last.ckpt"))
        again.load_state_dict(state)
    again.begin_run()
    again.agree_on_run(lambda value: value)
    again.log_hyperparams({"lr": 0.1})
    again.save()
    log(again, range(4, 8))
    again.finalize("success")
    texts = [path.read_bytes() for path in part.folder.rglob("*") if path.is_file()]
    ends = [text for text in texts if str(rows[-1]).encode() in text]
    if not ends:
        raise Skipped("the values are in no text file below save_dir")
    # If the resumed fit writes a new file, the file begins with the first row after the checkpoint.
    first = 0 if any(str(rows[0]).encode() in text for text in ends) else 4
    counts = {step: sum(text.count(str(rows[step]).encode()) for text in ends) for step in range(first, len(rows))}
    same(counts, dict.fromkeys(counts, 1), "how often each step is in the files (the checkpoint is after step 3)")


def a_copy_in_another_process_is_the_same(part: Part) -> None:
    """A logger can be pickled before its run begins. The unpickled copy has the same name and folder, and can log."""
    logger = _make(part)
    copy = pickle.loads(pickle.dumps(logger))
    same((copy.name, copy.save_dir), (logger.name, logger.save_dir), "name and save_dir of the copy")
    copy.log_metrics(dict(_NUMBERS), 0)
    copy.finalize("success")


def a_fit_logs_with_it(part: Part) -> None:
    """The logger works in a first and a second fit, and in a fit that ends with an exception."""

    def fit(kind: str, logger: Any) -> None:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=logger, log_every_n_steps=1, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[ModelCheckpoint(save_last=True)], default_root_dir=part.folder,
        )  # fmt: skip
        trainer.fit(_Logs(kind), DataLoader(data(2), batch_size=8), DataLoader(data(1), batch_size=8))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logger = _make(part)
        for kind in ("plain", "plain", "failing"):
            with contextlib.suppress(ZeroDivisionError):
                fit(kind, logger)
        failures = [text for each in said if f"{type(logger).__name__}." in (text := str(each.message))]
    same(failures, [], "warnings about the logger")


class _Logs(Small):
    """A module that logs a value in each step, and hyperparameters."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.save_hyperparameters({"lr": 0.05, "sizes": [4, 8]})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss
