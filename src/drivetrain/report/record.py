"""Writes the record of a run: the file ``run.json`` in its log folder. The record is written when a fit begins, and
again when the fit ends.

Each fit adds an entry, called an attempt. Rank 0 writes the record into the folder of each logger whose
:attr:`~drivetrain.loggers.logger.Logger.keeps_run_record` is True. Nothing is written during a training step.
Environment variables and the command line are not recorded, because they may contain secrets.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from drivetrain.base import VERSION, files
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.report.code import version_of
from drivetrain.report.run_file import NAME, SCHEMA, load, plain
from drivetrain.settings import Settings
from drivetrain.strategies.agreement import text_of
from drivetrain.trainer.stopping import why_ended

Trainer = Any  # importing the Trainer here would be circular

_GIT_WAIT_S = 5.0  # how long the end of a fit waits for git, which was started when the fit began


def begin(trainer: Trainer, resumed_from: str | None) -> None:
    """Begin the record of a fit, after its set-up. Ranks other than 0 do nothing. An error becomes a warning.

    Args:
        trainer: the Trainer of the fit.
        resumed_from: the checkpoint from which the fit resumes.
    """
    _OPEN.pop(trainer, None)
    if trainer.is_global_zero and not trainer.fast_dev_run:
        loggers = _keepers(trainer)
        if loggers:
            _OPEN[trainer] = _Record(trainer, loggers, resumed_from)


def end(trainer: Trainer, error: BaseException | None = None) -> None:
    """Complete the record of the fit, if it has one. After an error, the process that has started the ranks does this,
    too.

    Args:
        trainer: the Trainer of the fit.
        error: the exception that has ended the fit.
    """
    if (record := _OPEN.pop(trainer, None)) is not None:
        record.end(trainer, error)
    elif error is not None and not trainer.engine.launcher.is_external:
        _end_for_ranks(trainer, error)


def _keepers(trainer: Trainer) -> list[Any]:
    return [each for each in trainer.loggers if getattr(each, "keeps_run_record", False)]


def _end_for_ranks(trainer: Trainer, error: BaseException) -> None:
    """Write why a fit has failed, in the process that has started the ranks. Rank 0 may have been killed before, or may
    only know that it lost the connection to the failed rank.
    """
    for folder in _folders(_keepers(trainer)):
        path = os.path.join(folder, NAME)
        record = load(path) if files.is_file(path) else {}
        attempt = record["attempts"][-1] if record.get("attempts") else {}
        if trainer._launch and attempt.get("launch") == trainer._launch:
            attempt.update(_ending(error.__cause__ or error, attempt["began"]))
            files.write(path, json.dumps(record, indent=1).encode())


def _folders(loggers: list[Any]) -> list[str]:
    return [*dict.fromkeys(folder for each in loggers if (folder := each.log_dir))]


def _ending(error: BaseException, began: float) -> dict[str, Any]:
    """Return the entries about the end of an attempt that began at ``began`` and ends now with ``error``."""
    asked, now = isinstance(error, (KeyboardInterrupt, SystemExit)), time.time()
    why = f"{type(error).__name__}: {error}"[:2000].removesuffix(": ")
    return {"ended": now, "seconds": now - began, "status": "stopped" if asked else "failed", "why": why}


class _Record:
    """The attempt of one fit, and the files run.json that contain it.

    Args:
        trainer: the Trainer of the fit.
        loggers: the loggers in whose folders the files are.
        resumed_from: the checkpoint from which the fit resumes.
    """

    def __init__(self, trainer: Trainer, loggers: list[Any], resumed_from: str | None) -> None:
        self._error: Exception | None = None
        self._folders: list[str] = []
        self._attempt: dict[str, Any] = {}
        self._diff = ""
        self._told = False  # whether the user was warned that another process writes into the log folder
        self._began_s = time.monotonic()
        self._carefully(lambda: self._describe(trainer, loggers, resumed_from))
        # In a thread, because git takes about 20 ms.
        self._thread = threading.Thread(
            target=self._carefully, args=(self._begin,), name="drivetrain record", daemon=True
        )
        self._thread.start()

    def _describe(self, trainer: Trainer, loggers: list[Any], resumed_from: str | None) -> None:
        self._folders = _folders(loggers)
        self._attempt = {
            "id": uuid.uuid4().hex[:12],
            "began": time.time(),
            "launch": trainer._launch,
            "status": "running",
            "process": _process(os.getpid()),
            "resumed_from": None if resumed_from is None else files.absolute(resumed_from),
            "first_step": trainer.global_step,
            "model": type(trainer.lightning_module).__qualname__,
            "plan": [asdict(each) for each in trainer.plan.decisions],
            "settings": _settings(trainer.settings),
            "environment": _environment(trainer),
        }

    def _begin(self) -> None:
        self._attempt["code"], self._diff = version_of()
        self._write()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write the end of the attempt, and warn if the record could not be written."""
        self._thread.join(_GIT_WAIT_S)
        self._carefully(lambda: self._end(trainer, error))
        if self._error is not None:
            failure = self._error
            # files.write puts a description into strerror
            why = getattr(failure, "strerror", None) or failure
            rank_zero_warn(
                f"The record of this run, {NAME} in {', '.join(self._folders) or 'its log folder'}, could not be "
                f"written: {why}. The fit is not affected; `drivetrain report` will not show all of it. Free disk "
                f"space or move the file away, or set logger.keeps_run_record = False to write no record."
            )

    def _end(self, trainer: Trainer, error: BaseException | None) -> None:
        if error is None:
            how = {"ended": time.time(), "status": "finished", "why": why_ended(trainer)[0]}
        else:
            how = _ending(error, self._attempt["began"])
        self._attempt.update(
            how,
            seconds=time.monotonic() - self._began_s,
            last_step=trainer.global_step,
            epochs=trainer.current_epoch,
            time=_time_spent(trainer),
            checkpoints=_checkpoints(trainer),
            ledger=next((each.path(trainer) for each in trainer._callbacks_like("GoodputMonitor")), None),
        )
        self._write()

    def _write(self) -> None:
        for folder in self._folders:
            path = os.path.join(folder, NAME)
            new: dict[str, Any] = {"schema": SCHEMA, "diffs": {}, "attempts": []}
            record = load(path) if files.is_file(path) else new
            if digest := self._attempt.get("code", {}).get("diff"):
                record["diffs"][digest] = self._diff
            earlier = [each for each in record["attempts"] if each.get("id") != self._attempt["id"]]
            self._warn_of_others(earlier, folder)
            record["attempts"] = [*earlier, plain(_inside(self._attempt, folder))]
            if not files.is_remote(folder):
                os.makedirs(folder, exist_ok=True)
            files.write(path, json.dumps(record, indent=1).encode())

    def _warn_of_others(self, attempts: list[dict[str, Any]], folder: str) -> None:
        """Warn once if another process on this machine is still writing into ``folder``."""
        for each in attempts:
            process, host = each.get("process") or [0, 0], (each.get("environment") or {}).get("host")
            if self._told or each.get("status") != "running" or host != self._attempt["environment"]["host"]:
                continue
            if process[0] != os.getpid() and process[1] and process == _process(process[0]):
                self._told = True
                rank_zero_warn(
                    f"The process {process[0]} writes into the same log folder, {folder}: fits that run at the same "
                    "time mix their logged values there. Run one after the other, or give each a default_root_dir of "
                    "its own."
                )

    def _carefully(self, act: Callable[[], None]) -> None:
        if self._error is None:
            try:
                act()
            except Exception as error:  # an error in the record must not end the fit
                self._error = error


_OPEN: weakref.WeakKeyDictionary[Trainer, _Record] = weakref.WeakKeyDictionary()


def _process(pid: int) -> list[int]:
    """Return ``pid`` and when this process started, in clock ticks since boot (0: unknown). The system may give ``pid``
    to a later process.
    """
    try:
        return [pid, int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])]
    except OSError:  # the process has ended, or the system is not Linux
        return [pid, 0]


def _settings(settings: Settings) -> dict[str, str]:
    """Return the Trainer's arguments that differ from their defaults, as texts."""
    texts = {name: text_of(getattr(settings, name)) for name in Settings.__dataclass_fields__}
    return {name: text for name, text in texts.items() if text != text_of(getattr(Settings, name))}


def _environment(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    memory = trainer.accelerator.total_memory(device)
    return {
        "drivetrain": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "device": str(device),
        "device memory": None if memory is None else f"{memory / (1 << 30):.1f} GiB",
        "machines": trainer.num_nodes,
        "processes": trainer.world_size,
    }


def _time_spent(trainer: Any) -> dict[str, Any] | None:
    """Return ``trainer.time_spent`` as plain data; ``None`` if no times were measured."""
    spent = getattr(trainer, "time_spent", None)
    if spent is None:
        return None
    verdict = spent.verdict
    named = None if verdict is None else {name: getattr(verdict, name) for name in ("cause", "text", "advice")}
    return {"seconds": dict(spent.seconds), "wall_s": spent.wall_s, "verdict": named}


def _checkpoints(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the files that callbacks have written, and the checkpoints that the Trainer has saved when it was asked to
    stop. A user's callback may lack some of the attributes.
    """
    at_stop = [SimpleNamespace(last_model_path=path) for path in trainer._saved_at_stop]
    return [
        {
            "monitor": getattr(each, "monitor", None),
            "best": getattr(each, "best_model_path", None) or None,
            "score": _number(getattr(each, "best_model_score", None)),
            "last": getattr(each, "last_model_path", None) or None,
            "kept": {path: _number(score) for path, score in getattr(each, "best_k_models", {}).items()},
        }
        for each in (*trainer.checkpoint_callbacks, *at_stop)
    ]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _inside(value: Any, folder: str) -> Any:
    """Make each path below ``folder`` in ``value`` relative, so that the folder can be moved."""
    if isinstance(value, Mapping):
        return {_inside(name, folder): _inside(each, folder) for name, each in value.items()}
    if isinstance(value, list):
        return [_inside(each, folder) for each in value]
    return value.removeprefix(os.path.join(folder, "")) if isinstance(value, str) else value
