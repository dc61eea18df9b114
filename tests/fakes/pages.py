"""Plots of an HTML page, as the page passes them to Plotly."""

import json
import re
from typing import Any, NamedTuple


class Figure(NamedTuple):
    traces: list[dict[str, Any]]
    layout: dict[str, Any]

    def texts(self) -> list[str]:
        """Return the texts that are shown under the pointer."""
        return [text for trace in self.traces for text in trace.get("hovertext", ())]


def figures(page: str) -> list[Figure]:
    found = []
    for begin in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",\s*', page):
        traces, end = json.JSONDecoder().raw_decode(page, begin.end())
        layout, _ = json.JSONDecoder().raw_decode(page, page.index("{", end))
        found.append(Figure(traces, layout))
    return found
