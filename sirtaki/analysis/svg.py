"""Plots as SVG and tables, for pages of their own that need nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8a6d00", "#1b7837", "#a65628")
DEFAULT_COLOR = "#888888"

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; }
body { color: #222; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
svg { width: 100%; height: auto; font-size: 11px; fill: #444; }
.grid { stroke: #e4e4e4; } .axis { stroke: #666; }
.plot { overflow-x: auto; } .plot > * { min-width: 540px; }
.pair { display: flex; gap: 1em; align-items: end; } .pair > div { flex: 1; min-width: 0; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; }
td.number { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
.legend span { margin-right: 1.1em; display: inline-block; }
@media (max-width: 640px) { .pair { display: block; } body { margin: 1em auto; } }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #16181b; }
  svg { fill: #b8bcc2; } .grid { stroke: #33373d; } .axis { stroke: #8a8f96; }
}
"""

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 80, 12, 12, 40


@dataclass(slots=True, kw_only=True)
class Plot:
    """A plot with linear axes, drawn into step by step.

    Attributes:
        x: smallest and largest value across.
        y: smallest and largest value upwards.
        x_label: under the axis.
        y_label: beside the axis.
        height: in pixels.
        width: in pixels; the page scales plots to the room they get.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    height: int = HEIGHT
    width: int = WIDTH
    _shapes: list[str] = field(default_factory=list)

    @classmethod
    def of_rows(cls, rows: int, *, x: tuple[float, float], x_label: str, height: int, width: int = WIDTH) -> Plot:
        """A plot of bars in rows, the first one at the top."""
        return cls(x=x, y=(0, rows), x_label=x_label, y_label="", height=height, width=width)

    def row(self, row: int) -> float:
        """The middle of a row, upwards."""
        return self.y[1] - 0.5 - row

    def bar(self, x: tuple[float, float], row: int, *, color: str, title: str = "", opacity: float = 1.0) -> None:
        """A box in a row."""
        self.box(x, (self.row(row) - 0.4, self.row(row) + 0.4), color=color, title=title, opacity=opacity)

    def line(self, points: Sequence[tuple[float, float]], *, color: str, dashed: bool = False) -> None:
        """A polyline."""
        dash = {"stroke_dasharray": "6 4"} if dashed else {}
        self._draw("polyline", points=self._path(points), fill="none", stroke=color, stroke_width="1.8", **dash)

    def steps(self, points: Sequence[tuple[float, float]], *, color: str) -> None:
        """A line that keeps each value until the next one, and the last to the right edge."""
        self.line(self._kept(points), color=color)

    def band(self, points: Sequence[tuple[float, float, float]], *, color: str, title: str) -> None:
        """What lies between a lower and an upper value, `(x, low, high)`; each keeps until the next one."""
        upper, lower = self._kept([(x, high) for x, _, high in points]), self._kept([(x, low) for x, low, _ in points])
        self._draw("polygon", title, points=self._path([*upper, *lower[::-1]]), fill=color)

    def dot(self, x: float, y: float, *, color: str, title: str, large: bool = False) -> None:
        """A point with a tooltip."""
        self._draw("circle", title, cx=self._across(x), cy=self._up(y), r="5" if large else "3.2", fill=color)

    def cross(self, x: float, *, color: str, title: str) -> None:
        """A cross at the upper edge, for what has no value."""
        d = f"M{self._across(x) - 4:.1f} {TOP + 2}l8 8m0 -8l-8 8"
        self._draw("path", title, d=d, stroke=color, stroke_width="1.6")

    def box(
        self, x: tuple[float, float], y: tuple[float, float], *, color: str, title: str = "", opacity: float = 1.0
    ) -> None:
        """A filled rectangle with a tooltip."""
        left, right, top, bottom = self._across(x[0]), self._across(x[1]), self._up(y[1]), self._up(y[0])
        size = {"width": max(0.6, right - left), "height": bottom - top}
        self._draw("rect", title, x=left, y=top, **size, fill=color, fill_opacity=f"{opacity:.3g}")

    def _draw(self, tag: str, title: str | None = None, **attributes: str | float) -> None:
        """An element; numbers are pixels, and a title is shown when the pointer is over it."""
        told = (
            (name.replace("_", "-"), one if isinstance(one, str) else f"{one:.1f}") for name, one in attributes.items()
        )
        opening = " ".join([tag, *(f'{name}="{value}"' for name, value in told)])
        inside = "/>" if title is None else f"><title>{escape(title)}</title></{tag}>"
        self._shapes.append(f"<{opening}{inside}")

    def render(
        self,
        *,
        y_ticks: Sequence[tuple[float, str]] | None = None,
        x_ticks: Sequence[tuple[float, str]] | None = None,
    ) -> str:
        """The SVG element; `y_ticks` and `x_ticks` replace the numbers at the axes."""
        floor, right = self.height - BOTTOM, self.width - RIGHT
        parts = [f'<svg viewBox="0 0 {self.width} {self.height}" role="img" xmlns="http://www.w3.org/2000/svg">']
        for value, label in x_ticks if x_ticks is not None else [(v, f"{v:g}") for v in nice_ticks(*self.x)]:
            a = self._across(value)
            parts.append(f'<text x="{a:.1f}" y="{floor + 16}" text-anchor="middle">{escape(label)}</text>')
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

    def _path(self, points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self._across(x):.1f},{self._up(y):.1f}" for x, y in points)

    def _kept(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Each point, and where the next one, or the right edge, ends its value."""
        ends = [*(x for x, _ in points[1:]), self.x[1]]
        return [(at, y) for (x, y), end in zip(points, ends, strict=False) for at in (x, end)]  # none ends nothing

    def _across(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)

    def _up(self, value: float) -> float:
        floor = self.height - BOTTOM
        return floor - (floor - TOP) * (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)


_TICKS = 6  # about as many on an axis


def nice_ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`."""
    if not high > low:
        return [low]
    magnitude = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(magnitude * m for m in (1, 2, 5, 10) if (high - low) / (magnitude * m) <= _TICKS)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def log_ms(seconds: float) -> float:
    """Where a time lies on an axis of `log_ms_ticks`."""
    return math.log10(1e3 * seconds)


def log_ms_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Places and labels of round milliseconds from `low` to `high`, both by `log_ms`; few where there are decades."""
    steps = (1, 1.5, 2, 3, 5, 7) if high - low < 1.5 else (1, 3)
    ticks_ms = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    return [(math.log10(tick), f"{tick:g}") for tick in ticks_ms if low <= math.log10(tick) <= high]


def page(title: str, sections: Sequence[str], *, head: str = "") -> str:
    """A whole HTML page of its own: the title as a heading, then the sections; `head` goes into its head, last."""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{meta}<title>Sirtaki: {escape(title.lower())}</title><style>{STYLE}</style>{head}"
    body = "\n".join([f"<h1>{escape(title)}</h1>", *sections])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph of text, of a class."""
    of = f' class="{kind}"' if kind else ""
    return f"<p{of}>{escape(words)}</p>"


def framed(content: str) -> str:
    """A wide plot or table, to be scrolled where the window is narrow."""
    return f'<div class="plot">{content}</div>'


WIDEST_PX = 160


class Html(str):
    """What is HTML already."""

    __slots__ = ()


def share_bar(share: float, *classes: str) -> Html:
    """A bar as long as the share is large."""
    width_px = WIDEST_PX * min(max(share, 0.0), 1.0)
    return Html(f'<span class="{" ".join(("share", *classes))}" style="width:{width_px:.1f}px"></span>')


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Sequence[int] = (),
    last: Sequence[str] = (),
    unsure: Sequence[int] = (),
) -> str:
    """A table, framed.

    Args:
        titles: of the columns.
        rows: cells; those that are `Html` are taken as they are.
        text: places of columns that are no numbers.
        last: a row for sums.
        unsure: places of rows that are grey.
    """

    def row(cells: Sequence[str], kind: str = "td", of: str = "") -> str:
        words = (cell if isinstance(cell, Html) else escape(cell) for cell in cells)
        numbers = ("" if place in text else ' class="number"' for place in range(len(cells)))
        inside = "".join(f"<{kind}{number}>{word}</{kind}>" for number, word in zip(numbers, words, strict=True))
        return f"<tr{of}>{inside}</tr>"

    body = (row(cells, of=' class="unsure"' if place in unsure else "") for place, cells in enumerate(rows))
    sums = row(last, of=' class="sum"') if last else ""
    return framed(f"<table>{row(titles, 'th')}{''.join(body)}{sums}</table>")


def legend(colors: Mapping[str, str]) -> str:
    """A line of names with their colours."""
    entries = (f"<span>{swatch(color, name)}</span>" for name, color in colors.items())
    return f'<p class="legend">{"".join(entries)}</p>'


def swatch(color: str, name: str = "") -> Html:
    """A little square of that colour, before a name."""
    return Html(f'<span class="swatch" style="background:{color}"></span>{escape(name)}')
