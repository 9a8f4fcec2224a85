"""Mistakes for which programs catch an exception of Python: each raises the one that Lightning 2.6 raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Regression, Validated
from torch import nn

from drivetrain import Engine, Trainer
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
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


def test_checkpoints_and_parts_that_do_not_go_together(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    make_trainer(callbacks=ModelCheckpoint(tmp_path, filename="run"), enable_checkpointing=True).fit(
        Regression(), loader
    )
    path = tmp_path / "run.ckpt"
    engine = Engine(accelerator="cpu")
    wide = engine.setup(nn.Linear(9, 9))
    engine.save(tmp_path / "state.ckpt", {"model": nn.Linear(2, 2)})
    saver = ModelCheckpoint(tmp_path / "none", save_top_k=0)
    mistakes: list[tuple[type[Exception], Any]] = [
        (RuntimeError, lambda: Wide.load_from_checkpoint(path)),
        (RuntimeError, lambda: make_trainer().fit(Wide(), loader, ckpt_path=path)),
        (RuntimeError, lambda: make_trainer().fit(TwoOptimizers(), loader)),
        (RuntimeError, lambda: make_trainer(callbacks=[saver, ModelCheckpoint()], enable_checkpointing=True)),
        (ValueError, lambda: make_trainer().test(Validated(), loader, ckpt_path="best")),
        (RuntimeError, lambda: engine.load(tmp_path / "state.ckpt", {"model": wide})),
        (KeyError, lambda: engine.load(tmp_path / "state.ckpt", {"absent": 1})),
        (TypeError, lambda: engine.save(tmp_path / "x.ckpt", {"model": wide}, filter={"model": 5})),  # type: ignore[dict-item]
        (TypeError, lambda: engine.launch(5)),  # type: ignore[arg-type]
        (TypeError, lambda: engine.launch(lambda: None)),  # type: ignore[arg-type, misc]
    ]
    for kind, mistake in mistakes:
        with pytest.raises(kind) as caught:
            mistake()
        assert isinstance(caught.value, DrivetrainError)
        assert not str(caught.value).startswith(("'", '"'))


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(9, 9)


class TwoOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]
