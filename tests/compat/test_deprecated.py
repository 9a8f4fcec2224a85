"""What Lightning 2.6 deprecates works in a program that was written for it, and warns with the class it filters by."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from tests.conftest import Regression
from torch import nn

from drivetrain.base.rank_zero import LightningDeprecationWarning
from drivetrain.compat import deprecated, table
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.compat.deprecated import RemovedError
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CometLogger
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision, XLAPrecision
from drivetrain.strategies import FSDPStrategy

PRECISIONS = "lightning.pytorch.plugins.precision"
FORMER: list[tuple[str, str, tuple[Any, ...], type]] = [
    (f"{PRECISIONS}.amp", "MixedPrecisionPlugin", ("bf16-mixed", "cpu"), MixedPrecision),
    (f"{PRECISIONS}.double", "DoublePrecisionPlugin", (), DoublePrecision),
    (f"{PRECISIONS}.half", "HalfPrecisionPlugin", ("bf16-true",), HalfPrecision),
    (f"{PRECISIONS}.fsdp", "FSDPPrecisionPlugin", ("bf16-mixed",), MixedPrecision),
    (f"{PRECISIONS}.fsdp", "FSDPMixedPrecisionPlugin", ("bf16-mixed", "cpu"), MixedPrecision),
    (f"{PRECISIONS}.deepspeed", "DeepSpeedPrecisionPlugin", ("bf16-mixed",), MixedPrecision),
    (f"{PRECISIONS}.precision_plugin", "PrecisionPlugin", (), Precision),
    (f"{PRECISIONS}.xla", "XLAPrecisionPlugin", ("32-true",), XLAPrecision),
    (f"{PRECISIONS}.tpu", "TPUPrecisionPlugin", (), XLAPrecision),
    (f"{PRECISIONS}.tpu_bf16", "TPUBf16PrecisionPlugin", (), XLAPrecision),
    (f"{PRECISIONS}.xlabf16", "XLABf16PrecisionPlugin", (), XLAPrecision),
    ("lightning.pytorch.plugins", "MixedPrecisionPlugin", ("bf16-mixed", "cpu"), MixedPrecision),
    ("lightning.fabric.plugins.precision.tpu", "TPUPrecision", (), XLAPrecision),
    ("lightning.fabric.plugins", "XLABf16Precision", (), XLAPrecision),
    ("lightning.fabric.plugins.precision.tpu_bf16", "TPUBf16Precision", (), XLAPrecision),
]


@pytest.mark.parametrize(("path", "name", "arguments", "current"), FORMER, ids=[f"{p}.{n}" for p, n, _, _ in FORMER])
def test_a_former_class_is_todays_and_warns(
    served: None, path: str, name: str, arguments: tuple[Any, ...], current: type
) -> None:
    former = getattr(importlib.import_module(path), name)
    with pytest.warns(LightningDeprecationWarning, match=f"{name} is the former name of") as caught:
        made = former(*arguments)
    assert isinstance(made, current)
    assert [warning.filename for warning in caught] == [__file__]
    assert issubclass(LightningDeprecationWarning, DeprecationWarning)


def test_every_former_class_is_served(served: None) -> None:
    classes = [value for value in vars(deprecated).values() if isinstance(value, type) and value is not RemovedError]
    sources = [source for module in table.LATEST.served.values() for source in module if "compat.deprecated:" in source]
    offered = {name for source in sources for name in source.partition(":")[2].split()}
    assert offered == {cls.__name__ for cls in classes if cls.__module__ == deprecated.__name__}


def test_the_former_bf16_precision_computes_in_it(served: None) -> None:
    with pytest.warns(LightningDeprecationWarning):
        assert deprecated.TPUBf16PrecisionPlugin().name == "bf16-true"


def test_what_no_longer_exists_can_be_imported_and_not_called(served: None) -> None:
    for path in ("accelerators.HPUAccelerator", "strategies.SingleHPUStrategy", "plugins.HPUCheckpointIO"):
        module, _, name = f"lightning.pytorch.{path}".rpartition(".")
        removed = getattr(importlib.import_module(module), name)
        with pytest.raises(NotImplementedError, match=f"{name} no longer exists") as caught:
            removed()
        assert isinstance(caught.value, (RemovedError, ConfigurationError))


class Sharded(Regression):
    """Makes its layers in the hook of the former name."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def configure_sharded_model(self) -> None:
        self.made += 1


class Both(Sharded):
    """Defines the hook under both names."""

    def configure_model(self) -> None:
        self.made += 1


def test_the_former_hook_does_the_work_of_configure_model(served: None, make_trainer: Any, loader: Any) -> None:
    module, trainer = Sharded(), make_trainer(max_epochs=1)
    for fits in (1, 2):
        with pytest.warns(LightningDeprecationWarning, match="Sharded.configure_sharded_model is the former name"):
            trainer.fit(module, loader)
        assert module.made == fits
    with pytest.warns(LightningDeprecationWarning), pytest.raises(RuntimeError, match="Keep configure_model alone"):
        make_trainer(max_epochs=1).fit(Both(), loader)


def test_the_former_argument_of_fsdp_warns(served: None) -> None:
    with pytest.warns(LightningDeprecationWarning, match="Write activation_checkpointing_policy"):
        strategy = FSDPStrategy(activation_checkpointing={nn.Linear})
    assert strategy.options.activation_checkpointing_policy == {nn.Linear}


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own advice, in a class that changes with its versions
def test_torchscript_warns(served: None) -> None:
    with pytest.warns(LightningDeprecationWarning, match="torch deprecates TorchScript"):
        BoringModel().to_torchscript(method="trace", example_inputs=torch.zeros(1, 32))


def test_nothing_of_this_warns_in_other_programs(make_trainer: Any, loader: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LightningDeprecationWarning)
        FSDPStrategy(activation_checkpointing={nn.Linear})
        with pytest.raises(NotImplementedError, match="this hook no longer exists"):
            make_trainer(max_epochs=1).fit(Sharded(), loader)


def test_the_earlier_arguments_of_the_comet_logger_are_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    comet = types.ModuleType("comet_ml")
    comet.__dict__.update(
        ExperimentConfig=lambda **config: config,
        start=lambda **arguments: started.update(arguments) or types.SimpleNamespace(
            get_key=lambda: "key", log_other=lambda *_: None
        ),
        __spec__=importlib.machinery.ModuleSpec("comet_ml", None),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    with pytest.warns(LightningDeprecationWarning) as caught:
        logger = CometLogger(experiment_name="a", project_name="b", offline=True, save_dir="c")
    assert [str(warning.message).partition("Write ")[2] for warning in caught] == [
        "name=... instead.",
        "project=... instead.",
        "online=not ... instead.",
        "offline_directory=... instead.",
    ]
    assert logger.experiment is not None
    assert (started["project"], started["online"]) == ("b", False)
    assert started["experiment_config"] == {"name": "a", "offline_directory": "c"}


def test_deprecations_are_shown_outside_of_main_too(served: None) -> None:
    shown = ("default", None, LightningDeprecationWarning, None, 0)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        importlib.import_module("lightning")
        assert warnings.filters[0] == shown
        warnings.simplefilter("ignore", LightningDeprecationWarning)  # a program's own filter wins
        importlib.import_module("lightning.pytorch.callbacks")
        assert warnings.filters[0][0] == "ignore"
