"""Names that look like hooks of the user's classes, and are none."""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Regression
from torch import nn

from drivetrain import Callback, LightningDataModule
from drivetrain.errors import ConfigurationError
from drivetrain.trainer.attach import check_hooks
from drivetrain.tuner import Tuner

HEAD = """
import functools
from drivetrain import Callback, LightningDataModule, LightningModule

def register(function):
    return function

class Mixin:
    def on_button_click(self): ...
"""


def warned_of(tmp_path: Path, kind: str, body: str, head: str = HEAD) -> list[str]:
    """The warnings about a class ``Own`` of this kind with this body, each as "line of the definition: message"."""
    path = tmp_path / "own_classes.py"
    source = f"{head}\nclass Own({kind}):\n{body}\n"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own_classes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own_classes", module)
        spec.loader.exec_module(module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_hooks([module.Own()])
    lines = source.splitlines()
    return [f"{lines[warning.lineno - 1].strip()} {warning.message}" for warning in caught]


@pytest.mark.parametrize(
    ("kind", "method", "hook"),
    [
        ("LightningModule", "on_train_begin", "on_train_start"),
        ("LightningModule", "on_fit_begin", "on_fit_start"),
        ("LightningModule", "on_train_epoch_finish", "on_train_epoch_end"),
        ("LightningModule", "on_validation_epoch_finished", "on_validation_epoch_end"),
        ("LightningModule", "on_val_epoch_end", "on_validation_epoch_end"),
        ("LightningModule", "validate_step", "validation_step"),
        ("LightningModule", "validation_dataloader", "val_dataloader"),
        ("LightningDataModule", "valid_dataloader", "val_dataloader"),
        ("LightningDataModule", "train_loader", "train_dataloader"),
        ("LightningModule", "test_loader", "test_dataloader"),
        ("Callback", "on_val_epoch_end", "on_validation_epoch_end"),
        ("Callback", "on_train_epoch_finish", "on_train_epoch_end"),
        ("Callback", "after_train_epoch", "on_train_epoch_end"),
        ("Callback", "after_epoch", "on_train_epoch_end"),
        ("Callback", "before_fit", "on_fit_start"),
    ],
)
def test_a_name_that_means_a_hook_is_warned_of_once_where_it_is_defined(
    tmp_path: Path, kind: str, method: str, hook: str
) -> None:
    [warning] = warned_of(tmp_path, kind, f"    def {method}(self, *args): ...")
    assert warning.startswith(f"def {method}(self, *args): ... Own.{method} is never called by the Trainer")
    assert f"Did you mean {hook}?" in warning


def test_a_name_that_is_like_no_hook_is_warned_of_without_a_guess(tmp_path: Path) -> None:
    [warning] = warned_of(tmp_path, "LightningModule", "    def on_full_moon(self): ...")
    assert "Own.on_full_moon is never called" in warning
    assert "Did you mean" not in warning


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("LightningModule", "    def on_train_start(self): ..."),
        ("LightningModule", "    def on_full_moon(self): ...\n    def forward(self, x): return self.on_full_moon()"),
        (
            "LightningModule",
            "    def generator_step(self): ...\n    def forward(self, x): getattr(self, 'generator_step')",
        ),
        ("LightningModule", "    @register\n    def on_button_click(self): ..."),
        ("LightningModule", "    def _on_full_moon(self): ...\n    def before_noon(self): ...\n    on_moon = 3"),
        ("Callback", "    def step_after_step(self): ..."),
    ],
    ids=["a hook", "called by the class", "called by its name", "decorated", "no name of a hook", "nothing like one"],
)
def test_what_is_no_forgotten_hook_is_left_alone(tmp_path: Path, kind: str, body: str) -> None:
    assert warned_of(tmp_path, kind, body) == []


def test_a_loader_hook_that_is_a_property_is_refused_though_it_cannot_answer_yet(
    make_trainer: Any, regression: Any
) -> None:
    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.samples = [torch.ones(4)]

        @property
        def train_dataloader(self) -> Any:
            return self.samples

    with pytest.raises(
        ConfigurationError, match=r"Data\.train_dataloader is no method but a .*property.* without the dec"
    ):
        make_trainer().fit(regression(), datamodule=Data())


def test_a_method_of_another_package_is_left_alone(tmp_path: Path) -> None:
    own = warned_of(tmp_path, "Mixin, LightningModule", "    pass")
    assert ["on_button_click" in warning for warning in own] == [True]  # its own mixin: the control
    other = HEAD.replace("class Mixin:", "class Mixin:\n    __module__ = 'another.package'")
    assert warned_of(tmp_path, "Mixin, LightningModule", "    pass", other) == []
    overriding = "    def on_button_click(self): ..."
    assert warned_of(tmp_path, "Mixin, LightningModule", overriding, other) == []


class Part(nn.Module, Callback):
    """A callback that is a layer of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.batches = nn.Parameter(torch.ones(1)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        self.log("scale", self.scale.detach())


class HasPart(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.net.append(self.part)

    def configure_callbacks(self) -> Any:
        return [self.part]


def test_a_callback_may_be_a_layer_of_the_module(make_trainer: Any, loader: Any, tmp_path: Path) -> None:
    module, names = HasPart(), list(HasPart().state_dict())
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, loader)
    assert module.part.pl_module is module
    assert module.part.batches == 2 * len(loader)
    assert "scale" in trainer.logged_metrics
    assert list(module.state_dict()) == names
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = HasPart()
    make_trainer(max_epochs=3).fit(resumed, loader, ckpt_path=tmp_path / "one.ckpt")
    assert resumed.part.batches == len(loader)  # of the one epoch that was left
    Tuner(make_trainer(max_epochs=1)).lr_find(module, loader, num_training=14, update_attr=False)
    assert module.part.pl_module is module
    assert copy.deepcopy(module).part.pl_module is not module
