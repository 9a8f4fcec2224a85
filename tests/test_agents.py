"""AGENTS.md: its program runs, its names exist, and each of its ten mistakes is one, and its right line is right."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.cli.command import main as drivetrain
from drivetrain.errors import ConfigurationError, RunError

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))


def test_the_page_is_short() -> None:
    assert len(PAGE.encode()) <= 6_000
    assert [*ROWS] == [str(number) for number in range(1, 11)]


def test_the_program_runs_and_its_report_has_the_keys_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "AGENTS.md", "exec"), names)
    capsys.readouterr()
    assert names["best"].hparams.lr == 0.01
    assert drivetrain(["report", names["trainer"].log_dir, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = re.search(r"LOG_FOLDER --json` \| `runs\[0\]`: (.*) \|$", PAGE, re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`(\w+)`", row[1])) <= report["runs"][0].keys()
    assert report["runs"][0]["values"]["val_loss"].keys() >= {"last", "lowest", "highest"}
    assert drivetrain(["checkpoint", "inspect", names["trainer"].checkpoint_callback.best_model_path, "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert (inspected["global_step"], inspected["resume"]["possible"]) == (8, True)
    assert "weights" in inspected


@pytest.mark.parametrize("cls", [Trainer, LightningModule, Engine], ids=lambda cls: cls.__name__)
def test_the_verbs_exist(cls: type) -> None:
    row = re.search(rf"^\| `{cls.__name__}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert row is not None
    missing = [name for name in re.findall(r"`(\w+)[`(]", row[1]) if not hasattr(cls, name)]
    assert [name for name in missing if name not in inspect.getsource(cls)] == []


def test_the_names_that_replace_lightnings_exist() -> None:
    text = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| Lightning \| drivetrain \|\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(drivetrain[\w.]*)`", table)
    assert len(names) == 11
    for name in names:
        pkgutil.resolve_name(name)
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("drivetrain.errors.MisconfigurationException")


# ---- the ten mistakes ------------------------------------------------------------------------------------------------


class Regression(LightningModule):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(features, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8)


def fit(model: LightningModule, path: Path, *, resume: Path | None = None, **arguments: Any) -> Trainer:
    """A fit of one epoch with 4 steps."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    arguments = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "default_root_dir": path, **quiet, **arguments}
    trainer = Trainer(**arguments)
    trainer.fit(model, loader(), loader() if isinstance(model, Validated) else None, ckpt_path=resume)
    return trainer


class Manual(Regression):
    """Steps its optimizer by itself; ``clips`` is row 4."""

    automatic_optimization = False

    def __init__(self, clips: bool = False) -> None:
        super().__init__()
        self.clips = clips

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.clips:
            self.clip_gradients(optimizer, 1.0)
        optimizer.step()


class Steps(Manual):
    automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward()
        self.optimizers().step()
        return loss


class OldHook(Validated):
    def validation_epoch_end(self, outputs: Any) -> None: ...


class NewHook(Validated):
    def on_validation_epoch_end(self) -> None: ...


class Cycle(Regression):
    def __init__(self, per_step: bool) -> None:
        super().__init__()
        self.per_step = per_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": cycle, "interval": "step"} if self.per_step else cycle]


class Wide(Regression):
    """A module with an argument that it keeps, or does not."""

    def __init__(self, features: int = 2) -> None:
        super().__init__(features=features)


class Kept(Wide):
    def __init__(self, features: int = 2) -> None:
        super().__init__(features)
        self.save_hyperparameters()


class Moved(Regression):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.at = device

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + torch.zeros((), device=self.at or self.device)


class Logged(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_loss", loss := self.loss(batch))
        return loss


def saved(model: LightningModule, path: Path) -> Path:
    fit(model, path).save_checkpoint(path / "a.ckpt")
    return path / "a.ckpt"


def loaded(cls: type[Wide], path: Path) -> None:
    cls.load_from_checkpoint(saved(cls(features=4), path))


def resumed(path: Path, epochs: int) -> None:
    trainer = fit(Regression(), path, resume=saved(Regression(), path), max_epochs=epochs)
    if trainer.global_step == 4:
        raise RunError("nothing was trained")


MISTAKES: list[tuple[Callable[[Path], object], str, Callable[[Path], object]]] = [
    (lambda path: fit(Steps(), path), "under automatic optimization", lambda path: fit(Manual(), path)),
    (lambda path: fit(OldHook(), path), "DT1015", lambda path: fit(NewHook(), path)),
    (lambda path: Trainer(gpus=2), "DT1049", lambda path: Trainer(accelerator="cpu", devices=2, logger=False)),
    (lambda path: fit(Manual(), path, gradient_clip_val=1.0), "would do nothing", lambda path: fit(Manual(True), path)),
    (lambda path: fit(Cycle(False), path), "once an epoch", lambda path: fit(Cycle(True), path)),
    (
        lambda path: fit(
            Regression(), path, enable_checkpointing=True, callbacks=[ModelCheckpoint(path, monitor="val_loss")]
        ),
        "DT1030",
        lambda path: fit(
            Validated(), path, enable_checkpointing=True, callbacks=[ModelCheckpoint(path, monitor="val_loss")]
        ),
    ),
    (lambda path: loaded(Wide, path), "DT1032", lambda path: loaded(Kept, path)),
    (lambda path: fit(Moved("meta"), path), "meta tensor", lambda path: fit(Moved(), path)),
    (lambda path: resumed(path, 1), "nothing was trained", lambda path: resumed(path, 2)),
    (
        lambda path: fit(Logged(), path).history["train_loss"],
        "log_every_n_steps",
        lambda path: fit(Logged(), path, log_every_n_steps=1).history["train_loss"],
    ),
]


@pytest.mark.parametrize(("wrong", "message", "right"), MISTAKES, ids=[*ROWS])
def test_a_mistake_is_found_and_the_right_line_works(
    wrong: Callable[[Path], object], message: str, right: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises((ConfigurationError, RuntimeError, UserWarning, LookupError), match=message):
        wrong(tmp_path / "wrong")
    right(tmp_path / "right")
