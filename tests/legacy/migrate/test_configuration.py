"""Configurations in YAML: which values are paths of classes, and that the rest is kept."""

from __future__ import annotations

import pytest
import yaml

from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.migrate.configuration import Configuration

CONFIGURATION = """\
# lightning.pytorch==2.6.6
trainer:
  logger: pytorch_lightning.loggers.TensorBoardLogger  # curves
  callbacks:
    - class_path: 'lightning.pytorch.callbacks.ModelCheckpoint'
      init_args: {monitor: val_loss, dirpath: lightning.logs/last}
    - lightning.pytorch.callbacks.EarlyStopping
  strategy: {class_path: lightning.pytorch.strategies.DDPStrategy, init_args: {static_graph: true}}
  profiler: {"class_path": "lightning.pytorch.profilers.SimpleProfiler"}
optimizer:
  class_path: torch.optim.SGD
model:
  class_path: my_lightning.pytorch.Net
  init_args:
    text: made with lightning.pytorch.Trainer
"""


def test_each_path_of_a_class_is_rewritten_and_all_else_is_kept() -> None:
    found = Configuration("fit.yaml", CONFIGURATION.encode())
    expected = CONFIGURATION
    for old, new in (
        ("pytorch_lightning.loggers.TensorBoardLogger", "drivetrain.loggers.TensorBoardLogger"),
        ("lightning.pytorch.callbacks.ModelCheckpoint", "drivetrain.callbacks.ModelCheckpoint"),
        ("lightning.pytorch.callbacks.EarlyStopping", "drivetrain.callbacks.EarlyStopping"),
        ("lightning.pytorch.strategies.DDPStrategy", "drivetrain.strategies.DDPStrategy"),
        ("lightning.pytorch.profilers.SimpleProfiler", "drivetrain.profilers.SimpleProfiler"),
    ):
        assert old in expected
        expected = expected.replace(old, new)
    assert found.result() == expected
    assert [(each.line, each.is_left) for each in found.remarks] == [(line, False) for line in (3, 5, 7, 8, 9)]
    assert yaml.safe_load(found.result())["trainer"]["callbacks"][1] == "drivetrain.callbacks.EarlyStopping"
    again = Configuration("fit.yaml", found.content())
    assert (again.result(), again.remarks) == (found.result(), [])


def test_every_new_path_leads_to_a_class() -> None:
    for name in ("loggers.CSVLogger", "callbacks.Timer", "plugins.environments.SLURMEnvironment", "LightningModule"):
        found = Configuration("fit.yaml", f"class_path: lightning.pytorch.{name}\n".encode())
        module, _, cls = found.result().split()[1].rpartition(".")
        assert isinstance(load(f"{module}:{cls}"), type)


def test_a_name_that_is_not_there_is_left_with_its_reason() -> None:
    found = Configuration("fit.yaml", b"x: 1\nclass_path: lightning.pytorch.callbacks.Nothing")
    assert found.content() == b"x: 1\nclass_path: lightning.pytorch.callbacks.Nothing"
    [remark] = found.remarks
    assert (remark.line, remark.is_left) == (2, True)
    assert remark.text.startswith("left: lightning.pytorch.callbacks.Nothing: ")


def test_bytes_that_are_no_text_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"fit\.yaml: it cannot be read as UTF-8"):
        Configuration("fit.yaml", b"\xff")
