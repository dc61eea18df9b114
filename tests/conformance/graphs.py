"""Hypothesis strategies for registry graphs, a graph with its nodes numbered anew, and one as networkx has it."""

import random
from collections.abc import Iterable

import networkx
from hypothesis import strategies as st

from sirtaki.registry.graph import Graph, Node
from sirtaki.registry.model_graph import shapes_graph

NODES = st.builds(
    Node,
    kind=st.sampled_from(["Convolution", "Addmm", "Add"]),
    detail=st.sampled_from(["", "3x3", "64x64"]),
    size=st.sampled_from([0, 9, 4096]),
)


@st.composite
def graphs(draw: st.DrawFn, *, max_nodes: int = 7, directed: bool | None = None) -> Graph:
    """Acyclic if directed; any if not."""
    nodes = draw(st.lists(NODES, max_size=max_nodes))
    pairs = [(a, b) for b in range(len(nodes)) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Graph(
        nodes=tuple(nodes),
        edges=tuple((a, b, draw(st.sampled_from(["", "fast"]))) for a, b in chosen),
        directed=draw(st.booleans()) if directed is None else directed,
    )


def renumbered(graph: Graph, seed: int) -> Graph:
    """The same graph with its nodes in another order."""
    order = list(range(len(graph.nodes)))
    random.Random(seed).shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    return Graph(
        nodes=tuple(graph.nodes[old] for old in order),
        edges=tuple((place[a], place[b], label) for a, b, label in graph.edges),
        directed=graph.directed,
    )


def to_networkx(graph: Graph) -> "networkx.Graph[int]":
    """A `DiGraph` or `Graph`, for its routines as oracles; nodes bear kind, detail and size, edges their label."""
    made = networkx.DiGraph() if graph.directed else networkx.Graph()
    for index, node in enumerate(graph.nodes):
        made.add_node(index, kind=node.kind, detail=node.detail, size=node.size)
    for source, target, label in graph.edges:
        made.add_edge(source, target, label=label)
    return made


def chain_graph(sizes: Iterable[int]) -> Graph:
    """A model whose parameters are vectors of these sizes, one after the other."""
    return shapes_graph([(size,) for size in sizes])
