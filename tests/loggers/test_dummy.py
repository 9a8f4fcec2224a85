from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from drivetrain import LightningModule, Trainer
from drivetrain.loggers import DummyLogger


def test_it_takes_any_method() -> None:
    logger = DummyLogger()
    logger.log_image("picture", [1], step=2)
    logger.watch(object()).anything["here"] = 1
    logger.experiment.config.update({"a": 1})
    with logger.experiment.run() as run:
        run.log(1)
    logger.log_hyperparams()
    assert logger[0] is logger
    assert (logger.name, logger.version) == ("", "")
    assert isinstance(pickle.loads(pickle.dumps(logger)), DummyLogger)
    copy.deepcopy(logger).log_table("a")


def test_fast_dev_run_takes_what_the_modules_logger_has() -> None:
    class Draws(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.logger is not None
            self.logger.log_image("picture", images=[batch])  # type: ignore[attr-defined]
            self.logger.experiment.add_histogram("weights", self.layer.weight)  # type: ignore[attr-defined]
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Draws(), [torch.ones(1, 1)])
    assert trainer.global_step == 1


def test_what_python_asks_for_is_not_answered() -> None:
    with pytest.raises(AttributeError):
        _ = DummyLogger().__length_hint__
