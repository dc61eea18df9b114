"""Build HTML pages with text, tables and Plotly plots. A page is a single file that loads no other files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup, escape

from sirtaki.errors import ConfigError

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8a6d00", "#1b7837", "#a65628")
DEFAULT_COLOR = "#888888"

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
body { color: CanvasText; background: Canvas; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.wide { overflow-x: auto; overflow-wrap: normal; } .unsure { opacity: .55; }
td, th { padding: .2em .8em .2em 0; text-align: left; }
.number { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
.note { border-left: 3px solid #d1366b; padding: .1em .9em; } .quiet { opacity: .75; font-size: .93em; }
tr.sum td { border-top: 1px solid; } meter { width: 10em; }
@media (max-width: 600px) { meter { width: 3em; } table { font-size: .85em; } th.number { white-space: normal; }
  td, th { padding-right: .5em; } }
.js-plotly-plot text:not(.nums, .name) { fill: CanvasText !important; }
"""

Trace = dict[str, Any]
"""One Plotly trace: a line or a set of points in a plot (https://plotly.com/javascript/reference)."""

LOG = {"type": "log", "tickvals": [digit * 10.0**power for power in range(-4, 10) for digit in (1, 2, 5)]}
"""Settings of a logarithmic axis of a Plotly plot, with ticks at 1, 2 and 5 times powers of ten."""


def page(title: str, sections: Iterable[str]) -> str:
    """Return a complete HTML page that shows the title as a heading, and then the sections.

    The page's content security policy forbids all requests, and all scripts except its own.
    """
    body = Markup("\n").join(sections)
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", body, re.DOTALL)
    library = _plotly().offline.get_plotlyjs() if scripts else ""
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (library, *scripts))
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}"
    whole = Markup(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" content="{}">'
        "<title>Sirtaki: {}</title><style>{}</style><script>{}</script></head>\n"
        "<body>\n<h1>{}</h1>\n{}\n</body></html>\n"
    ).format(policy, title.lower(), Markup(STYLE), Markup(library), title, body)
    return str(whole)


def plot(traces: Sequence[Trace], *, x: str, y: str = "", height: int = 340, **layout: Any) -> Markup:
    """Return an interactive plot for a `page`.

    Args:
        traces: traces to draw. `hovertext` is escaped.
        x: title of the horizontal axis.
        y: title of the vertical axis.
        height: height in pixels.
        layout: additional entries of Plotly's layout. An entry that is a dict is merged with the default of the same
            name.

    Raises:
        ConfigError: the package Plotly is not installed.
    """
    axis = {"gridcolor": "rgba(136,136,136,0.27)", "zeroline": False, "automargin": True}
    usual: dict[str, Any] = {
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
        "hoverlabel": {"bgcolor": "#333", "font": {"color": "#fff"}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"l": 60, "r": 10, "t": 20, "b": 50},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "template": "none",
        "height": height,
    }
    for name, value in layout.items():
        usual[name] = {**usual.get(name, {}), **value} if isinstance(value, dict) else value
    shown = [
        {**trace, "hoverinfo": "text", "hovertext": [*map(escape, trace["hovertext"])]}
        if "hovertext" in trace
        else trace
        for trace in traces
    ]
    config = {"displayModeBar": False, "responsive": True}
    figure = {"data": shown, "layout": usual}
    return Markup(_plotly().io.to_html(figure, full_html=False, include_plotlyjs=False, config=config))


def _plotly() -> Any:
    try:
        import plotly.io
        import plotly.offline
    except ImportError as err:
        raise ConfigError(
            "the HTML page needs the package plotly, which is not installed; run: pip install 'sirtaki[plot]'"
        ) from err
    return plotly


def line(name: str, x: Sequence[float], y: Sequence[float], color: str, **style: Any) -> Trace:
    """Return a Plotly trace that draws a line. `style` contains Plotly's line styles, such as `dash` and `shape`."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": str(escape(name)),
        "x": x,
        "y": y,
        "line": {"color": color, **style},
    }


def dots(name: str, points: Iterable[tuple[Any, Any, str]], color: str, **more: Any) -> Trace:
    """Return a Plotly trace with a point for each `(x, y, text)`. The text is shown while the pointer is over the
    point.
    """
    x, y, texts = zip(*points, strict=True)
    marker = {"color": color, **more.pop("marker", {})}
    return {"type": "scatter", "mode": "markers", "name": str(escape(name)), "x": x, "y": y, "hovertext": texts,
            "marker": marker, **more}  # fmt: skip


def heading(words: str) -> Markup:
    """Return the HTML heading of a section."""
    return Markup("<h2>{}</h2>").format(words)


def paragraph(words: str, kind: str = "") -> Markup:
    """Return an HTML paragraph with the CSS class `kind`. The text is escaped unless it is `Markup`."""
    return _element("p", kind, words)


def details(summary: str, content: Markup) -> Markup:
    """Return an HTML element that shows the line `summary`.

    It shows `content` below the line once the reader opens it.
    """
    return Markup("<details><summary>{}</summary>{}</details>").format(summary, content)


def share_bar(share: float) -> Markup:
    """Return a horizontal HTML bar that is filled up to the fraction `share`."""
    return Markup('<meter value="{:.4f}"></meter>').format(share)


def swatch(color: str, name: str) -> Markup:
    """Return HTML that shows a name with a coloured square in front, as in a legend."""
    return Markup('<span style="color:{}">■</span> {}').format(color, name)


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Sequence[int] = (),
    last: Sequence[str] = (),
    unsure: Sequence[int] = (),
) -> Markup:
    """Return an HTML table.

    Args:
        titles: title of each column.
        rows: cells, which are escaped unless they are `Markup`.
        text: indices of columns that contain text instead of numbers.
        last: cells of a final row with sums; empty = no such row.
        unsure: indices of rows whose values are uncertain, which are shown in grey.
    """

    def row(cells: Sequence[str], tag: str = "td", kind: str = "") -> Markup:
        inside = (_element(tag, "" if place in text else "number", cell) for place, cell in enumerate(cells))
        return _element("tr", kind, Markup().join(inside))

    body = [row(cells, kind="unsure" if place in unsure else "") for place, cells in enumerate(rows)]
    sums = [row(last, kind="sum")] if last else []
    return Markup('<div class="wide"><table>{}</table></div>').format(Markup().join([row(titles, "th"), *body, *sums]))


def _element(tag: str, kind: str, content: str) -> Markup:
    of = Markup(' class="{}"').format(kind) if kind else ""
    return Markup("<{0}{1}>{2}</{0}>").format(tag, of, content)
