"""Curves as SVG pictures inside HTML. Curves with many points lose some of them, but no extreme values. Metrics of one
kind, such as "loss", share a chart.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drivetrain.base import files
from drivetrain.report.reading import Points

COLORS = 6
"""How many colours for curves the page's style sheet has: ``--c0`` and so on."""

_WIDTH, _HEIGHT = 1000, 300  # the drawing's size, which the page stretches to the available space
_LOG_FROM = 100.0  # the axis is logarithmic if the largest value is this many times the smallest, or more
_KIND = re.compile(
    r"(?:^|(?<=[_/.-]))(?:train(?:ing)?|val(?:id(?:ation)?)?|test)(?=[_/.-])[_/.-]|[_/.-](?:step|epoch)$"
)


@dataclass
class Curve:
    """One line of a chart.

    Attributes:
        label: the name of the line.
        points: steps and values, in the order of the steps.
        color: a number below :data:`COLORS`.
    """

    label: str
    points: Points
    color: int = 0


def kind_of(name: str) -> str:
    """Return the kind of a metric, such as "loss" for "train_loss_epoch" and "val/loss"."""
    return _KIND.sub("", _KIND.sub("", name)) or name


def thin(points: Points, most: int) -> Points:
    """Return about ``most`` of the points. Divide the curve into stretches, and keep its ends and the lowest and the
    highest point of each stretch.
    """
    if len(points) <= most:
        return points
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for index in range(stretches):
        stretch = range(index * len(points) // stretches, (index + 1) * len(points) // stretches)
        finite = [at for at in stretch if drawn(points[at][1])]
        kept |= (
            {min(finite, key=lambda at: points[at][1]), max(finite, key=lambda at: points[at][1])}
            if finite
            else {stretch[0]}
        )
    return [points[at] for at in sorted(kept)]


def chart(title: str, curves: Sequence[Curve], resumed_at: Iterable[float], most: int) -> str:
    """Return a chart as HTML: its title, a legend, the axes and the curves.

    Args:
        title: the name of the values.
        curves: the lines.
        resumed_at: steps at which to draw a dashed vertical line.
        most: how many points to keep of each curve.
    """
    finite = [(x, y) for curve in curves for x, y in curve.points if drawn(y)]
    lost = [(x, curve.label) for curve in curves for x, y in curve.points if not drawn(y)]
    legend = "".join(
        f'<span class="key" style="--c:var(--c{each.color})"><i></i>{text(each.label)}</span>' for each in curves
    )
    note = ""
    if lost:
        first = f"the first of {text(lost[0][1])} at step {lost[0][0]:g}"
        note = f"<p class=note>Values that are not finite, and not drawn: {len(lost)}, {first}.</p>"
    if not finite:
        return f"<figure><figcaption><b>{text(title)}</b>{legend}</figcaption>{note}</figure>"
    left, right = min(x for x, _ in finite), max(x for x, _ in finite)
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    logarithmic = low > 0 and high / low >= _LOG_FROM
    at = math.log10 if logarithmic else float
    bottom, top = at(low), at(high)
    if top - bottom < 1e-12 * abs(top) or top - bottom < 1e-290:
        bottom, top = bottom - (abs(bottom) or 1.0) / 2, top + (abs(top) or 1.0) / 2
    if right == left:
        left, right = left - 0.5, right + 0.5

    def place(x: float, y: float) -> str:
        return f"{(x - left) / (right - left) * _WIDTH:.0f},{(top - at(y)) / (top - bottom) * _HEIGHT:.1f}"

    parts = []
    labels = []
    for tick in _powers(bottom, top) if logarithmic else _ticks(bottom, top):
        share = (top - at(tick)) / (top - bottom)
        parts.append(f'<path class=grid d="M0 {share * _HEIGHT:.1f}H{_WIDTH}"/>')
        labels.append(f'<span style="top:{share:.1%}">{tick:.4g}</span>')
    for x in {x for x in resumed_at if left < x < right}:
        parts.append(f'<path class=resumed d="M{place(x, low).split(",")[0]} 0V{_HEIGHT}"/>')
    # curves with few points come last, so that no other curve hides them
    for curve in sorted(curves, key=lambda each: -len(each.points)):
        for line in _unbroken(thin(curve.points, most)):
            path = " ".join(place(x, y) for x, y in line)
            path = f"{path} {path}" if len(line) == 1 else path  # a line back to its start is drawn as a dot
            parts.append(f'<polyline class="line" style="--c:var(--c{curve.color})" points="{path}"/>')
    name = f"{text(title)}{' <small>logarithmic</small>' if logarithmic else ''}"
    return (
        f"<figure><figcaption><b>{name}</b>{legend}</figcaption><div class=chart><div class=y>{''.join(labels)}</div>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title)} over the step">{"".join(parts)}</svg>'
        f"<div class=x><span>{left:g}</span><span>step</span><span>{right:g}</span></div></div>{note}</figure>"
    )


def text(value: object) -> str:
    """Return ``value`` as escaped text for HTML, also inside an attribute."""
    return html.escape(files.encodable(str(value)))


def drawn(value: float) -> bool:
    """Return whether a chart can show this value. It cannot show NaN and infinity."""
    return abs(value) < 1e300  # False for NaN


def _unbroken(points: Points) -> list[Points]:
    lines: list[Points] = [[]]
    for point in points:
        if drawn(point[1]):
            lines[-1].append(point)
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers between ``low`` and ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return at most six powers of ten from ``10**low`` to ``10**high``."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    return [10.0**power for power in powers[:: max(1, math.ceil(len(powers) / 6))]]
