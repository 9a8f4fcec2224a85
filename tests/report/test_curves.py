"""Curves as pictures."""

from __future__ import annotations

import math
import random
import re

import pytest

from drivetrain.report.curves import Curve, chart, kind_of, thin


@pytest.mark.parametrize(
    ("name", "kind"),
    [("train_loss", "loss"), ("val_loss", "loss"), ("val/loss", "loss"), ("train_loss_epoch", "loss"),
     ("loss_step", "loss"), ("test.acc", "acc"), ("model/val_acc", "model/acc"), ("lr-SGD", "lr-SGD"),
     ("trainable", "trainable"), ("epoch", "epoch"), ("interval_s", "interval_s"), ("retrain_loss", "retrain_loss")],
)  # fmt: skip
def test_metrics_of_one_kind_share_a_chart(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_thinning_keeps_extremes_and_both_ends() -> None:
    draw = random.Random(1)
    points = [(float(at), draw.random()) for at in range(100_000)]
    points[70_001] = (70_001.0, 9.0)
    points[123] = (123.0, -9.0)
    found = thin(points, 200)
    assert len(found) <= 200
    assert {points[0], points[-1], points[123], points[70_001]} <= {*found}
    assert found == sorted(found)
    assert thin(points[:200], 200) == points[:200]
    assert len(thin([(float(at), math.nan) for at in range(1000)], 20)) <= 20


def test_a_value_that_is_not_finite_interrupts_the_line_and_is_told() -> None:
    page = chart(
        "loss", [Curve("loss", [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 3.0), (5, 1.0)])], [], 99
    )
    assert page.count("<polyline") == 2
    assert "Values that are not finite, and not drawn: 2, the first of loss at step 2." in page


@pytest.mark.parametrize(
    "values",
    [[1.0], [1.0, 1.0], [0.0, 0.0], [math.nan], [], [-1e308, 1e308], [5e-324, 0.0], [1.0, 1.0 + 2e-16], [1e-30, 1e30],
     [1e20, 1e20 + 1e5], [-3.0, -1.0]],
)  # fmt: skip
def test_any_values_make_a_chart_inside_its_bounds(values: list[float]) -> None:
    page = chart("x", [Curve("x", [(float(at), value) for at, value in enumerate(values)])], [0.0], 99)
    places = re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', page)))
    assert all(0 <= float(x) <= 1000 and -0.1 <= float(y) <= 300.1 for x, y in places)
    assert "nan" not in "".join(re.findall(r'points="([^"]*)"', page))


def test_values_over_several_powers_of_ten_have_a_logarithmic_axis() -> None:
    wide, narrow = ([(0.0, 1.0), (1.0, top)] for top in (1000.0, 10.0))
    assert "logarithmic" in chart("x", [Curve("x", wide)], [], 9)
    assert "logarithmic" not in chart("x", [Curve("x", narrow)], [], 9)


def test_names_are_escaped() -> None:
    page = chart("<b>&", [Curve('"<script>', [(0.0, 1.0)])], [], 9)
    assert "<script>" not in page
    assert "<b>&" not in page.replace("<b>&lt;b&gt;&amp;", "")
