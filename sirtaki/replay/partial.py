"""A part of a graph by itself: dPRO's partial replay (section 5.3), such as the time that units take alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sirtaki.autotune.model.graph import Activity, Graph, Node
from sirtaki.autotune.model.replayer import replay

TOGETHER = frozenset({Activity.UNIT, Activity.COLLECTIVE})


def part(graph: Graph, kept: Callable[[Node], bool]) -> Graph:
    """The nodes that are kept, the edges between them, all lanes and servers."""
    places = {place: new for new, place in enumerate(place for place, node in enumerate(graph.nodes) if kept(node))}
    return replace(
        graph,
        nodes=[graph.nodes[place] for place in places],
        edges=[
            (places[before], places[after], gap_s)
            for before, after, gap_s in graph.edges
            if before in places and after in places
        ],
    )


def communication_s(graph: Graph) -> float:
    """What ranks do together, as if nobody had to wait for gradients."""
    return replay(part(graph, lambda node: node.activity in TOGETHER)).total_s


def computation_s(graph: Graph) -> float:
    """What the slowest rank does by itself, as if nobody waited for others."""
    return replay(part(graph, lambda node: node.activity not in TOGETHER)).total_s
