"""Read the files of a run: its record run.json, logged values, hyperparameters, and the ledger of GoodputMonitor."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import tb_events
from drivetrain.report import run_file

with on_first_use:
    from drivetrain.loops import goodput  # goodput imports torch

Points = list[tuple[float, float]]

_EVENTS = "events.out.tfevents"
_TABLE, _HPARAMS = "metrics.csv", "hparams.yaml"
_DEEPEST = 6  # how many levels of subfolders are searched
_HIGHEST = 3  # how many parent folders of a checkpoint are searched for run.json


class NothingToRead(Exception):
    """There is no run at a path. The message names a cure."""


@dataclass
class Run:
    """What the files in a run's folder tell about the run.

    Attributes:
        folder: the log folder of the run.
        attempts: the fits of the run, as in ``run.json``, the oldest first; empty without ``run.json``. Fits of earlier
            runs that this run continues come first.
        diffs: the diffs of the code, by the digests that the attempts contain.
        curves: for each logged name, steps and values, in the order of the steps.
        source: the file of the curves.
        hparams: the text of ``hparams.yaml``.
        goodput: how all runs of the training have spent their time, as the ledger of GoodputMonitor tells.
        notes: what is missing in the report, and what to do so that the next run has it.
    """

    folder: str
    attempts: list[dict[str, Any]] = field(default_factory=list)
    diffs: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Points] = field(default_factory=dict)
    source: str = ""
    hparams: str = ""
    goodput: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        """The newest attempt; without run.json, an empty dictionary."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def step_s(self) -> float | None:
        """The seconds per optimizer step, on average over all fits that have ended."""
        ended = [each for each in self.attempts if number(each.get("seconds")) is not None]
        steps = sum((number(each.get("last_step")) or 0) - (number(each.get("first_step")) or 0) for each in ended)
        return sum(each["seconds"] for each in ended) / steps if steps > 0 else None


def number(value: Any) -> float | None:
    """Return ``value`` if it is a finite number, otherwise ``None``."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def find(path: str) -> tuple[str, int]:
    """Return the folder of the run at ``path``, or of the newest run below it, and the number of runs found.

    A run without ``run.json`` counts as older than all runs with it.

    Raises:
        NothingToRead: there is no run at or below ``path``.
    """
    if files.is_remote(path):
        raise NothingToRead(f"{path} is an address. Copy the folder of the run to this machine, and pass the copy.")
    if os.path.isfile(path) and _is_of_run(os.path.basename(path)):
        return os.path.dirname(os.path.abspath(path)), 1
    found: dict[str, tuple[bool, float]] = {}
    for folder, inner, names in os.walk(path):
        marks = [name for name in names if _is_of_run(name) and os.path.isfile(os.path.join(folder, name))]
        if marks:
            newest = max(os.path.getmtime(os.path.join(folder, name)) for name in marks)
            # predict, for example, writes no run.json
            found[folder] = (run_file.NAME in marks, newest)
        if marks or folder[len(path) :].count(os.sep) >= _DEEPEST:
            inner.clear()  # subfolders with event files belong to this run
    if not found:
        there = "has no run in it" if os.path.isdir(path) else "is no run.json"
        what = there if os.path.exists(path) else "does not exist"
        raise NothingToRead(
            f"{path} {what}. Pass the log folder of a run, such as lightning_logs/version_0, in which a fit with "
            'Trainer(logger="csv") or Trainer(logger="tensorboard") has written run.json.'
        )
    return max(found, key=lambda each: found[each]), len(found)


def _is_of_run(name: str) -> bool:
    """Return whether a file of this name marks the folder of a run."""
    return name in (run_file.NAME, _TABLE) or name.startswith(_EVENTS)


def read(folder: str, continues: bool = True) -> Run:
    """Read the files in the log folder of a run. If one cannot be read, a note says why.

    Args:
        folder: the log folder.
        continues: whether to include the fits and values of an earlier run, if the run resumed from its checkpoint.
    """
    run = Run(folder)
    try:
        record = run_file.load(os.path.join(folder, run_file.NAME))
        run.attempts, run.diffs = record["attempts"], record["diffs"]
    except FileNotFoundError:
        run.notes.append(
            "There is no run.json, so plan, settings, environment, code and duration are unknown. A fit writes it "
            "into the log folder of CSVLogger and TensorBoardLogger, unless keeps_run_record is False."
        )
    except (OSError, ValueError) as error:
        run.notes.append(f"run.json cannot be read: {error}.")
    _read_curves(run)
    if os.path.isfile(path := os.path.join(folder, _HPARAMS)):
        with contextlib.suppress(OSError):
            run.hparams = files.read(path).decode(errors="replace").strip()
    _read_ledger(run)
    if continues:
        _read_earlier(run)
    return run


def _read_earlier(run: Run) -> None:
    """If ``run`` continues runs in other folders, put their fits and values in front."""
    seen = {os.path.realpath(run.folder)}
    while (source := _elsewhere(run)) is not None:
        step = number(run.attempts[0].get("first_step")) or 0.0
        folder = _folder_of(source, run)
        if folder is None or os.path.realpath(folder) in seen:
            run.notes.append(
                f"This training resumed at step {step:g} from {source}, and no record of the run before is found, so "
                "what is shown begins there."
            )
            return
        seen.add(os.path.realpath(folder))
        earlier = read(folder, continues=False)
        run.notes.append(f"The steps before {step:g} are those of {os.path.relpath(folder, run.folder)}.")
        begins = min((points[0][0] for points in run.curves.values() if points), default=step)
        for name, points in earlier.curves.items():
            before = [point for point in points if point[0] < begins]
            if before:
                run.curves[name] = before + run.curves.get(name, [])
        before_it = [each for each in earlier.attempts if (number(each.get("first_step")) or 0.0) < step]
        run.attempts = [*(before_it or earlier.attempts[:1]), *run.attempts]
        run.diffs = {**earlier.diffs, **run.diffs}


def _elsewhere(run: Run) -> str | None:
    """Return the checkpoint from which the first fit of ``run`` resumed. Return ``None`` if there is none, or if it is
    in the folder of ``run``.
    """
    source = run.attempts[0].get("resumed_from") if run.attempts else None
    return source if isinstance(source, str) and (os.path.isabs(source) or files.is_remote(source)) else None


def _folder_of(checkpoint: str, run: Run) -> str | None:
    """Return the log folder of the run that wrote ``checkpoint``. It is the nearest folder above the checkpoint that
    contains run.json. Otherwise it is a folder beside that of ``run``: the one of the newest earlier run whose run.json
    names the checkpoint.
    """
    above = checkpoint
    for _ in range(_HIGHEST):
        above = os.path.dirname(above)
        if os.path.isfile(os.path.join(above, run_file.NAME)):
            return above
    began, named = number(run.attempts[0].get("began")) or math.inf, json.dumps(checkpoint)
    found: list[tuple[float, str]] = []
    for folder in (each.path for each in os.scandir(os.path.dirname(os.path.abspath(run.folder)))):
        path = os.path.join(folder, run_file.NAME)
        with contextlib.suppress(OSError, ValueError, LookupError):
            first = number(run_file.load(path)["attempts"][0].get("began"))
            if first is not None and first < began and named in json.dumps(run_file.load(path)):
                found.append((first, folder))
    return max(found)[1] if found else None


def _read_curves(run: Run) -> None:
    names = sorted(each.name for each in os.scandir(run.folder) if each.is_file())
    events = [name for name in names if name.startswith(_EVENTS)]
    try:
        if _TABLE in names:
            run.source, run.curves = _TABLE, _table(os.path.join(run.folder, _TABLE))
        elif events:
            run.source, run.curves = "TensorBoard's event files", _scalars(run.folder)
    except ModuleNotFoundError:
        run.notes.append("The values are in TensorBoard's event files. To see them, pip install tensorboard.")
        return
    except Exception as error:  # tensorboard may raise any exception for a damaged file
        run.notes.append(f"The values in {run.source or _TABLE} cannot be read: {error}.")
    if {y for _, y in run.curves.get("hp_metric", ())} == {-1.0}:
        del run.curves["hp_metric"]  # TensorBoardLogger's placeholder
    if not run.curves:
        run.notes.append(
            'There are no logged values here. Log some with self.log, and pass Trainer(logger="csv") or '
            'Trainer(logger="tensorboard"), whose files are read.'
        )


def _table(path: str) -> dict[str, Points]:
    found: dict[str, dict[float, float]] = {}
    with open(path, encoding="utf-8", errors="backslashreplace", newline="") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(ValueError, TypeError):  # the process may have ended in the middle of a line
                step = float(row["step"])
                for name, text in row.items():
                    if text and name not in (None, "step"):
                        found.setdefault(name, {})[step] = float(text)
    return {name: sorted(points.items()) for name, points in found.items()}


def _scalars(folder: str) -> dict[str, Points]:
    # tensorboard would warn about graphs in the file
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = tb_events.EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: sorted({float(each.step): float(each.value) for each in events.Scalars(name)}.items())
        for name in events.Tags()["scalars"]
    }


def _read_ledger(run: Run) -> None:
    paths = [run.last.get("ledger"), os.path.join("checkpoints", "ledger.jsonl")]
    path = next(
        (full for each in paths if isinstance(each, str) and os.path.isfile(full := os.path.join(run.folder, each))),
        None,
    )
    if path is not None:
        try:
            report = goodput.account(*goodput.read(path))
        except OSError as error:
            run.notes.append(f"The ledger {path} cannot be read: {error}.")
        else:
            run.goodput = {"goodput": report.goodput, **asdict(report), "notes": report.notes()}
