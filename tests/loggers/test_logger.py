"""The contract of a logger: what a class has that writes only what it must."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.loggers import CSVLogger, Logger, TensorBoardLogger


class Kept(Logger):
    """Keeps what it is given, and calls the contract's own methods."""

    name = "kept"
    version = 0

    def __init__(self) -> None:
        self.params: list[Any] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        super().log_hyperparams(params, *args, **kwargs)
        self.params.append((params, args, kwargs))


def test_hyperparameters_may_come_with_what_a_logger_takes_beside_them() -> None:
    logger = Kept()
    logger.log_hyperparams({"lr": 0.1}, 3, metrics={"loss": 1.0})
    assert logger.params == [({"lr": 0.1}, (3,), {"metrics": {"loss": 1.0}})]


def test_the_folder_of_an_experiment(tmp_path: Any) -> None:
    assert Kept().root_dir is None
    for logger in (CSVLogger(tmp_path, "runs"), TensorBoardLogger(tmp_path, "runs")):
        assert logger.root_dir == str(tmp_path / "runs")
