"""Curves over one axis, as an SVG picture; for the scripts beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, EDGE = 720, 300, 45
_GREY = "#444"


@dataclass
class Curve:
    """One line of the picture: points (x, y), and how it is drawn."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    width: float = 1.8
    dots: bool = False  # instead of a line


def chart(curves: Sequence[Curve], x_axis: str, y_axis: str, ticks: Sequence[float], logarithmic: bool = False) -> str:
    """Return the picture: the first curve lies below the others.

    Args:
        curves: with their labels.
        x_axis, y_axis: what they show.
        ticks: where the horizontal axis has numbers; the first and the last are its ends.
        logarithmic: whether the horizontal axis is.
    """
    top = max(y for curve in curves for _, y in curve.points)
    first, last = (math.log10(tick) if logarithmic else tick for tick in (ticks[0], ticks[-1]))

    def place(x: float, y: float) -> tuple[float, float]:
        part = ((math.log10(x) if logarithmic else x) - first) / (last - first)
        return EDGE + part * (WIDTH - 2 * EDGE), HEIGHT - EDGE - y / top * (HEIGHT - 2 * EDGE)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for number, curve in enumerate(curves):
        places = [place(*point) for point in curve.points]
        if curve.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{curve.width}" fill="{curve.color}"/>' for x, y in places]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            line = f'fill="none" stroke="{curve.color}" stroke-width="{curve.width}"'
            parts.append(f'<polyline points="{path}" {line}/>')
        parts.append(f'<text x="{WIDTH - 280}" y="{40 + 20 * number}" fill="{curve.color}">{curve.label}</text>')
    left, right, bottom = EDGE, WIDTH - EDGE, HEIGHT - EDGE
    parts.append(f'<path d="M{left} {EDGE}V{bottom}H{right}" fill="none" stroke="{_GREY}"/>')
    for tick in ticks:
        parts.append(_text(place(tick, 0)[0], bottom + 18, f"{tick:g}", "middle"))
    parts.append(_text((left + right) / 2, HEIGHT - 8, x_axis, "middle"))
    parts.append(_text(left - 6, EDGE + 4, f"{top:.2g}", "end"))
    parts.append(_text(left - 6, bottom, "0", "end"))
    parts.append(_text(left, EDGE - 12, y_axis, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
    return f'{head}font-size="13">\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_GREY}" text-anchor="{anchor}">{text}</text>'
