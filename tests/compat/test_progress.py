from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.compat.progress import Tqdm, convert_inf, get_standard_metrics


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1"), (12345, "12345"), (1.5, "1.500"), (0.25, "0.250"), ("1", "1.000"), ("loss", "loss"), (1e9, "1e+9")],
)
def test_fractions_have_a_width_of_five_in_a_bar(number: Any, text: str) -> None:
    assert Tqdm.format_num(number) == text


@pytest.mark.parametrize(
    ("given", "end"), [(3, 3), (2.5, 2.5), (None, None), (float("inf"), None), (float("nan"), None)]
)
def test_an_infinite_total_is_none(given: Any, end: Any) -> None:
    assert convert_inf(given) == convert_inf(x=given) == end


@pytest.mark.parametrize(
    ("versions", "shown"),
    [([], {}), ([3], {"v_num": 3}), (["version_12"], {"v_num": "n_12"}), ([1, 2, 1], {"v_num": "1_2"}), ([None], {})],
)
def test_the_standard_metrics_are_the_version(versions: list[Any], shown: dict[str, Any]) -> None:
    trainer: Any = SimpleNamespace(loggers=[SimpleNamespace(version=version) for version in versions])
    assert get_standard_metrics(trainer) == shown
