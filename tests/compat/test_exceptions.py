"""Mistakes for which programs catch an exception of Python: each raises the one that Lightning 2.6 raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Regression, Validated
from torch import nn

from drivetrain import Trainer
from drivetrain.callbacks import EarlyStopping
from drivetrain.errors import DrivetrainError


class Logs(Regression):
    def __init__(self, name: Any, value: Any) -> None:
        super().__init__()
        self.logged = name, value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(*self.logged)
        return self.loss(batch)


def test_the_classes_of_the_original_catch_them(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.ckpt")
    mistakes: list[tuple[type[Exception], Any]] = [
        (TypeError, lambda: Trainer(accelerator="cpu", devices="nonsense")),
        (TypeError, lambda: make_trainer().fit(nn.Linear(2, 2), loader)),
        (TypeError, lambda: make_trainer().validate(dataloaders=loader)),
        (FileNotFoundError, lambda: make_trainer().fit(Regression(), loader, ckpt_path=missing)),
        (FileNotFoundError, lambda: Regression.load_from_checkpoint(missing)),
        (RuntimeError, lambda: make_trainer(callbacks=EarlyStopping("absent")).fit(Validated(), loader, loader)),
        (ValueError, lambda: make_trainer().fit(Logs("name", "text"), loader)),
        (KeyError, lambda: Trainer(accelerator="cpu", strategy="nonsense")),
        (TypeError, lambda: Trainer(nonsense=True)),  # type: ignore[call-arg]
        (ValueError, lambda: Trainer(accelerator="cpu", precision="nonsense")),  # type: ignore[arg-type]
    ]
    for kind, mistake in mistakes:
        with pytest.raises(kind) as caught:
            mistake()
        assert isinstance(caught.value, DrivetrainError)
        assert "[Errno" not in str(caught.value)
