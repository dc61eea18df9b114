"""A few shapes of SVG with axes, enough for the report's plots.

A module of its own so that the report speaks of trials and arms, not of pixels. Text is escaped here and nowhere else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40


@dataclass(slots=True, kw_only=True)
class Plot:
    """A plot with linear axes, drawn into step by step.

    Attributes:
        x: smallest and largest value across.
        y: smallest and largest value upwards.
        x_label: under the axis.
        y_label: beside the axis.
        height: in pixels.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    height: int = HEIGHT
    _shapes: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], *, color: str, dashed: bool = False) -> None:
        """A polyline."""
        path = " ".join(f"{self._across(x):.1f},{self._up(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dash}/>')

    def steps(self, points: Sequence[tuple[float, float]], *, color: str) -> None:
        """A line that keeps each value until the next one, and the last to the right edge."""
        path: list[tuple[float, float]] = []
        for (x, y), (following, _) in zip(points, [*points[1:], (self.x[1], 0.0)], strict=True):
            path += [(x, y), (following, y)]
        self.line(path, color=color)

    def dot(self, x: float, y: float, *, color: str, title: str, large: bool = False) -> None:
        """A point with a tooltip."""
        self._shapes.append(
            f'<circle cx="{self._across(x):.1f}" cy="{self._up(y):.1f}" r="{5 if large else 3.2}" fill="{color}">'
            f"<title>{escape(title)}</title></circle>"
        )

    def cross(self, x: float, *, color: str, title: str) -> None:
        """A mark at the upper edge, for what has no value."""
        a, b = self._across(x), TOP + 6
        self._shapes.append(
            f'<path d="M{a - 4:.1f} {b - 4}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="1.6">'
            f"<title>{escape(title)}</title></path>"
        )

    def box(self, x: tuple[float, float], y: tuple[float, float], *, color: str, title: str = "") -> None:
        """A filled rectangle with a tooltip."""
        left, right, top, bottom = self._across(x[0]), self._across(x[1]), self._up(y[1]), self._up(y[0])
        self._shapes.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.6, right - left):.1f}" height="{bottom - top:.1f}" '
            f'fill="{color}"><title>{escape(title)}</title></rect>'
        )

    def render(self, *, y_ticks: Sequence[tuple[float, str]] | None = None) -> str:
        """The SVG element; `y_ticks` replaces the numbers beside the axis."""
        floor, right = self.height - BOTTOM, WIDTH - RIGHT
        parts = [f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" xmlns="http://www.w3.org/2000/svg">']
        for value in nice_ticks(*self.x):
            a = self._across(value)
            parts.append(f'<text x="{a:.1f}" y="{floor + 16}" text-anchor="middle">{value:g}</text>')
        for value, label in y_ticks if y_ticks is not None else [(v, f"{v:g}") for v in nice_ticks(*self.y)]:
            b = self._up(value)
            parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{b:.1f}" y2="{b:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{b + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        parts += self._shapes
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}" class="axis"/>')
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x_label)}</text>')
        beside = (TOP + floor) / 2
        parts.append(
            f'<text transform="translate(14 {beside}) rotate(-90)" text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return "\n".join([*parts, "</svg>"])

    def _across(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)

    def _up(self, value: float) -> float:
        floor = self.height - BOTTOM
        return floor - (floor - TOP) * (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)


def nice_ticks(low: float, high: float, *, about: int = 6) -> list[float]:
    """Round values from `low` to `high`."""
    if not high > low:
        return [low]
    magnitude = 10 ** math.floor(math.log10((high - low) / about))
    step = next(magnitude * m for m in (1, 2, 5, 10) if (high - low) / (magnitude * m) <= about)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]
