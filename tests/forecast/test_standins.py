"""What stands for the other ranks of a planned job."""

from __future__ import annotations

import inspect
import re

from drivetrain.forecast.standins import ANSWERS
from drivetrain.strategies import group


def test_every_exchange_of_a_group_has_an_answer() -> None:
    used = set(re.findall(r"self\._exchange\(collectives\.(\w+)", inspect.getsource(group)))
    assert used == ANSWERS.keys()
