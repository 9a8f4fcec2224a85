"""What the loggers of several libraries get is heard, each value once."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from drivetrain.loggers import CSVLogger
from drivetrain.loggers.logger import Logger
from drivetrain.proof.logged import listen


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was heard; at the end of the test, nothing listens any more."""
    for kind in {Logger, CSVLogger}:
        monkeypatch.setattr(kind, "log_metrics", vars(kind)["log_metrics"])
    return []


def test_a_logger_of_drivetrain_is_heard_once_per_value(heard: list[Any], tmp_path: Path) -> None:
    for _ in range(2):  # it is called again, for loggers that were imported later
        listen(lambda *row: heard.append(row))
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=3)
    assert heard == [("loss", 0.5, 3)]
    logger.save()
    assert "0.5" in Path(logger.metrics_file_path).read_text()


class Family:
    """Base class of another library's loggers or trackers."""

    def __init__(self) -> None:
        self.state = types.SimpleNamespace(global_step=7)

    def log(self, values: Any, step: Any = None, **others: Any) -> None:
        """Do nothing."""

    log_metrics = log

    def add_scalar(self, tag: str, value: float, global_step: int) -> str:
        return "written"


class Member(Family):
    def log(self, values: Any, step: Any = None, **others: Any) -> None:
        """Do nothing either."""


@pytest.mark.parametrize(
    ("module", "name", "call", "row"),
    [
        ("lightning.fabric.loggers.logger", "Logger", lambda each: each.log_metrics({"a": 1.0}, step=2), ("a", 1.0, 2)),
        ("accelerate.tracking", "GeneralTracker", lambda each: each.log({"a": 1.0}, step=2), ("a", 1.0, 2)),
        ("transformers.trainer", "Trainer", lambda each: each.log({"a": 1.0}), ("a", 1.0, 7)),
        ("wandb.sdk.wandb_run", "Run", lambda each: each.log({"a": 1.0}, step=2), ("a", 1.0, 2)),
        ("tensorboardX.writer", "SummaryWriter", lambda each: each.add_scalar("a", 1.0, 2), ("a", 1.0, 2)),
    ],
)  # fmt: skip
def test_a_logger_of_another_library_is_heard(
    heard: list[Any], monkeypatch: pytest.MonkeyPatch, module: str, name: str, call: Any, row: Any
) -> None:
    for kind in (Family, Member):
        for method in ("log", "log_metrics", "add_scalar"):
            if method in vars(kind):
                monkeypatch.setattr(kind, method, vars(kind)[method])
    kind = Family if name in ("Run", "SummaryWriter") else Member
    library = types.ModuleType(module)
    setattr(library, name, Family)
    monkeypatch.setitem(sys.modules, module, library)
    listen(lambda *row: heard.append(row))
    call(kind())
    assert heard == [row]
