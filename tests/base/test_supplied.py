"""Lower layers call functions that higher ones supply, and work without them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import LightningModule, Trainer
from drivetrain.base import supplied
from drivetrain.base.registry import load
from drivetrain.base.supplied import in_our_layout, instead_of
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.errors import UnknownArgumentError
from drivetrain.trainer.properties import Familiar

PACKAGE = Path(drivetrain.__file__).parent


def test_a_trainer_has_lightnings_names_which_are_imported_when_they_are_read() -> None:
    code = """
import sys
from drivetrain import Trainer
trainer = Trainer(logger=False, enable_checkpointing=False)
before = "drivetrain.compat" in sys.modules
print(before, trainer.fit_loop.max_epochs, "drivetrain.compat.loop_views" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-3:] == ["False", "1000", "True"], done.stderr


def test_a_name_that_lightning_cannot_set_cannot_be_set_here() -> None:
    assert isinstance(Trainer.__dict__.get("fit_loop", Trainer.fit_loop), Familiar)
    with pytest.raises(AttributeError, match=r"property .* of 'Trainer' object has no setter"):
        Trainer(logger=False).fit_loop = None


def test_the_view_of_checkpoints_is_one_object() -> None:
    trainer = Trainer(logger=False)
    assert trainer._checkpoint_connector is trainer._checkpoint_connector


@pytest.mark.parametrize("read", [None, [1], {}, {"state_dict": {}, "drivetrain_version": "1"}])
def test_what_is_no_checkpoint_of_lightnings_stays_as_it_is(read: object) -> None:
    assert in_our_layout(read) is read


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is supplied."""
    monkeypatch.setattr(supplied, "_suppliers", {})


def test_each_function_that_is_declared_is_supplied_with_its_arguments() -> None:
    declared = {
        f"drivetrain.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}:{name}"
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"@supplied\ndef (\w+)", path.read_text("utf-8"))
    }
    assert declared == supplied._suppliers.keys()
    for function, supplier in supplied._suppliers.items():
        names = [[*inspect.signature(load(each)).parameters] for each in (function, supplier)]
        assert len(names[0]) == len(names[1]), function
        assert inspect.unwrap(load(function)) is not load(supplier)


def test_a_supplied_function_is_called_in_place_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    @supplied.supplied
    def root(of: float) -> float:
        """Return it unchanged."""
        return of

    assert root(4.0) == 4.0
    monkeypatch.setattr(supplied, "_suppliers", {})
    supplied.supply({f"{__name__}:root": "math:sqrt"})
    assert root(4.0) == 2.0


@pytest.mark.usefixtures("alone")
def test_a_trainer_trains_with_the_callbacks_that_it_is_passed_alone(
    regression: Callable[..., LightningModule], data: Any, tmp_path: Path
) -> None:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=[store := ModelCheckpoint()], logger="csv")
    trainer.fit(regression(), DataLoader(data, batch_size=8))
    assert trainer.callbacks == [store]
    assert trainer.global_step > 0
    assert store.best_model_path
    assert trainer.progress_bar_callback is None
    with pytest.raises(AttributeError, match="has no fit_loop"):
        assert trainer.fit_loop


def test_without_what_is_supplied_a_message_has_no_name_of_other_libraries(request: pytest.FixtureRequest) -> None:
    assert instead_of("Engine", "prepare") is not None
    with pytest.raises(UnknownArgumentError, match='accelerator="gpu"'):
        Trainer(gpus=2)  # type: ignore[call-arg]
    request.getfixturevalue("alone")
    assert instead_of("Engine", "prepare") is None
    with pytest.raises(UnknownArgumentError) as refused:
        Trainer(gpus=2)  # type: ignore[call-arg]
    assert "accelerator=" not in str(refused.value)


@pytest.mark.usefixtures("alone")
def test_without_what_is_supplied_a_name_that_a_package_lacks_is_an_error_all_the_same() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Fabric'"):
        drivetrain.Fabric  # type: ignore[attr-defined]  # noqa: B018
