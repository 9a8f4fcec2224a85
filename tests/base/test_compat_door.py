"""The core reaches Lightning's names and layouts through one file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain import Trainer
from drivetrain.base.compat_door import FromCompat, in_our_layout


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
    assert isinstance(Trainer.__dict__.get("fit_loop", Trainer.fit_loop), FromCompat)
    with pytest.raises(AttributeError, match=r"property .* of 'Trainer' object has no setter"):
        Trainer(logger=False).fit_loop = None


def test_the_view_of_checkpoints_is_one_object() -> None:
    trainer = Trainer(logger=False)
    assert trainer._checkpoint_connector is trainer._checkpoint_connector


@pytest.mark.parametrize("read", [None, [1], {}, {"state_dict": {}, "drivetrain_version": "1"}])
def test_what_is_no_checkpoint_of_lightnings_stays_as_it_is(read: object) -> None:
    assert in_our_layout(read) is read
