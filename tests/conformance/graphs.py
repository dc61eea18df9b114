"""Hypothesis strategies of model graphs, and renumbered graphs."""

import random
from collections.abc import Iterable

from hypothesis import strategies as st

from sirtaki.registry.graph import ModelGraph, OperationLabel, model_graph
from sirtaki.registry.model_graph import shapes_graph

NODES = st.builds(
    OperationLabel,
    kind=st.sampled_from(["Convolution", "Addmm", "Add"]),
    detail=st.sampled_from(["", "3x3", "64x64"]),
    size=st.sampled_from([0, 9, 4096]),
)


@st.composite
def graphs(draw: st.DrawFn, *, max_nodes: int = 7) -> ModelGraph:
    """Draw any acyclic graph."""
    nodes = draw(st.lists(NODES, max_size=max_nodes))
    pairs = [(a, b) for b in range(len(nodes)) for a in range(b)]
    return model_graph(nodes, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else [])


def renumbered(graph: ModelGraph, seed: int) -> ModelGraph:
    """Return the graph with its nodes in another order."""
    order = list(range(len(graph)))
    random.Random(seed).shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    nodes = graph.labels
    return model_graph((nodes[old] for old in order), ((place[a], place[b]) for a, b in graph.edges))


def chain_graph(sizes: Iterable[int]) -> ModelGraph:
    """Return the graph of a model whose parameters are vectors of these sizes, in sequence."""
    return shapes_graph([(size,) for size in sizes])
