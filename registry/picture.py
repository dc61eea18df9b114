"""Two model graphs side by side, with what was matched in the same colour.

It needs matplotlib, which is an extra.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sirtaki.errors import RegistryError

from .edit_distance import match_nodes
from .graph import Graph, topological_order

_SAME, _CHANGED, _ALONE = "#2a9d8f", "#e9a23b", "#c0392b"

# More labels than this cannot be read.
_MAX_LABELLED = 60


def draw_match(first: Graph, second: Graph, path: Path, *, titles: tuple[str, str], caption: str) -> None:
    """Writes a picture; the file's suffix decides on its kind (.png, .svg, .pdf).

    Raises:
        RegistryError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise RegistryError("pictures need matplotlib: pip install 'sirtaki[plot]'") from err
    partners = match_nodes(first, second)
    back = {partner: index for index, partner in enumerate(partners) if partner >= 0}
    figure = Figure(figsize=(12, 14), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, first, [_colour(node, second, partner) for node, partner in zip(first.nodes, partners, strict=True)])
    colours = [_colour(node, first, back.get(index, -1)) for index, node in enumerate(second.nodes)]
    _draw(right, second, colours)
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_title(title)
        axes.axis("off")
    figure.suptitle(caption)
    for colour, meaning in ((_SAME, "the same in both"), (_CHANGED, "changed"), (_ALONE, "only here")):
        left.scatter([], [], c=colour, label=meaning)
    figure.legend(loc="outside lower center", ncols=3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as err:
        raise RegistryError(f"the picture {path} cannot be written: {err}") from err


def _colour(node: object, other: Graph, partner: int) -> str:
    if partner < 0:
        return _ALONE
    return _SAME if other.nodes[partner] == node else _CHANGED


def _draw(axes: Any, graph: Graph, colours: Sequence[str]) -> None:
    from matplotlib.collections import LineCollection

    places = _places(graph)
    axes.add_collection(
        LineCollection([(places[a], places[b]) for a, b, _ in graph.edges], colors="0.7", linewidths=0.8)
    )
    axes.scatter(
        [x for x, _ in places], [y for _, y in places], c=colours, s=max(4, 3000 / (len(places) + 30)), zorder=2
    )
    if len(places) <= _MAX_LABELLED:
        for node, place in zip(graph.nodes, places, strict=True):
            axes.annotate(f"{node!s:.40}", place, xytext=(6, 0), textcoords="offset points", fontsize=7, va="center")


def _places(graph: Graph) -> list[tuple[float, float]]:
    """From inputs above to outputs below, each node one step below the last that it needs; branches side by side."""
    before: list[list[tuple[int, str]]] = [[] for _ in graph.nodes]
    after: list[list[tuple[int, str]]] = [[] for _ in graph.nodes]
    for source, target, label in graph.edges:
        before[target].append((source, label))
        after[source].append((target, label))
    depth = [0] * len(graph.nodes)
    for index in topological_order(before, after) or range(len(graph.nodes)):
        depth[index] = max((depth[source] + 1 for source, _ in before[index]), default=0)
    taken: dict[int, int] = {}
    places = []
    for level in depth:
        places.append((float(taken.get(level, 0)), -float(level)))
        taken[level] = taken.get(level, 0) + 1
    return places
