from typing import Any

import networkx
import numpy as np
import pytest
from conformance.graphs import NODES, chain_graph, graphs, renumbered, to_networkx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sirtaki.registry.graph import (
    EDGE_COST,
    NODE_COST,
    Graph,
    Node,
    assignment_bound,
    assignment_cost,
    distance,
    from_bytes,
    hausdorff_bound,
    histogram_bounds,
    label_bound,
    least_distance,
    mass,
    match_nodes,
    node_cost,
    normalised,
    signature,
    to_bytes,
    upper_bound,
)

TINY = 1e-9


def exact(first: Graph, second: Graph) -> float:
    """networkx's depth-first search over all edit paths."""

    def relabel(a: dict[str, Any], b: dict[str, Any]) -> float:
        return node_cost(Node(**a), Node(**b))

    cost = networkx.graph_edit_distance(
        to_networkx(first),
        to_networkx(second),
        node_subst_cost=relabel,
        node_del_cost=lambda _: NODE_COST,
        node_ins_cost=lambda _: NODE_COST,
        edge_subst_cost=lambda a, b: 0.0 if a == b else EDGE_COST,
        edge_del_cost=lambda _: EDGE_COST,
        edge_ins_cost=lambda _: EDGE_COST,
    )
    assert cost is not None
    return float(cost)


def lower_bounds(first: Graph, second: Graph) -> list[float]:
    return [
        float(histogram_bounds(signature(first), signature(second)[None])[0]),
        label_bound(first, second),
        hausdorff_bound(first, second),
        assignment_bound(first, second),
    ]


@given(graphs(max_nodes=4), graphs(max_nodes=4))
def test_the_exact_distance_lies_between_the_bounds(first: Graph, second: Graph) -> None:
    assume(first.directed == second.directed)
    true = exact(first, second)
    for bound in lower_bounds(first, second):
        assert bound <= true + TINY
    assert upper_bound(first, second) >= true - TINY


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(graphs(max_nodes=7), graphs(max_nodes=7))
def test_the_exact_distance_lies_between_the_bounds_up_to_seven_nodes(first: Graph, second: Graph) -> None:
    assume(first.directed == second.directed)
    true = exact(first, second)
    for bound in lower_bounds(first, second):
        assert bound <= true + TINY
    assert upper_bound(first, second) >= true - TINY


def random_graph(rng: np.random.Generator, n_nodes: int) -> Graph:
    nodes = [Node("ABC"[rng.integers(3)], ["", "x"][rng.integers(2)], [0, 9][rng.integers(2)]) for _ in range(n_nodes)]
    edges = [(a, b, "") for b in range(n_nodes) for a in range(b) if rng.random() < 0.4]
    return Graph(nodes=tuple(nodes), edges=tuple(edges))


def test_on_random_graphs_the_bounds_are_close() -> None:
    rng = np.random.default_rng(5)
    ratios = []
    for _ in range(60):
        first, second = (random_graph(rng, int(rng.integers(1, 6))) for _ in range(2))
        true = max(exact(first, second), TINY)
        ratios.append([*(bound / true for bound in lower_bounds(first, second)), upper_bound(first, second) / true])
    histogram, label, hausdorff, assignment, upper = np.mean(ratios, axis=0)
    assert histogram > 0.75
    assert label > 0.75
    assert hausdorff > 0.7
    assert assignment > 0.95
    assert upper < 1.05


@given(graphs(), graphs())
def test_lower_bounds_lie_below_the_upper_one_at_any_size(first: Graph, second: Graph) -> None:
    assume(first.directed == second.directed)
    assert max(lower_bounds(first, second)) <= upper_bound(first, second) + TINY


@given(graphs(), graphs())
def test_the_distance_is_symmetric_and_between_0_and_1(first: Graph, second: Graph) -> None:
    assume(first.directed == second.directed)
    assert distance(first, second) == distance(second, first)
    assert 0.0 <= least_distance(first, second) <= distance(first, second) + TINY <= 1.0 + 2 * TINY


@given(graphs(), st.integers())
def test_a_graph_is_no_way_from_itself(graph: Graph, seed: int) -> None:
    assert upper_bound(graph, graph) == distance(graph, graph) == 0.0
    assert all(abs(bound) < TINY for bound in lower_bounds(graph, renumbered(graph, seed)))


@given(graphs(max_nodes=3), graphs(max_nodes=3), graphs(max_nodes=3))
def test_the_normalised_exact_distance_keeps_the_triangle_inequality(a: Graph, b: Graph, c: Graph) -> None:
    assume(a.directed == b.directed == c.directed)

    def normal(first: Graph, second: Graph) -> float:
        return normalised(exact(first, second), mass(first) + mass(second))

    assert normal(a, c) <= normal(a, b) + normal(b, c) + TINY


@given(NODES, NODES, NODES)
def test_relabelling_is_a_metric_and_cheaper_than_replacing(a: Node, b: Node, c: Node) -> None:
    assert node_cost(a, a) == 0.0
    assert (node_cost(a, b) == 0.0) == (a == b)
    assert node_cost(a, b) == node_cost(b, a) <= 2 * NODE_COST
    assert node_cost(a, c) <= node_cost(a, b) + node_cost(b, c) + TINY


def test_from_nothing_every_node_and_edge_is_built() -> None:
    graph, nothing = chain_graph([1, 2, 3]), Graph(nodes=())
    assert upper_bound(graph, nothing) == mass(graph) == 3 * NODE_COST + 2 * EDGE_COST
    assert distance(graph, nothing) == 1.0
    assert hausdorff_bound(graph, nothing) == assignment_bound(graph, nothing) == mass(graph)


def test_a_deeper_model_is_about_as_far_as_what_it_has_more() -> None:
    shallow, deep = chain_graph([64] * 30), chain_graph([64] * 33)
    grown = 3 * NODE_COST + 3 * EDGE_COST
    assert grown <= upper_bound(shallow, deep) <= grown + 2 * EDGE_COST  # cut where the new layers go in


def test_a_wider_model_is_nearer_than_one_of_other_kinds() -> None:
    model, wider = chain_graph([64] * 30), chain_graph([128] * 30)
    other = Graph(nodes=tuple(Node("Scan", "64", 64) for _ in range(30)), edges=model.edges)
    assert 0 < distance(model, wider) < distance(model, other)


@pytest.mark.parametrize("n_nodes", [50, 400])  # with and without the optimal assignment
def test_large_strangers_are_paired_one_to_one(n_nodes: int) -> None:
    rng = np.random.default_rng(1)
    first, second = (random_graph(rng, n_nodes) for _ in range(2))
    partners = match_nodes(first, second)
    taken = [partner for partner in partners if partner >= 0]
    assert len(taken) == len(set(taken))
    assert assignment_cost(first, second, partners) < 0.8 * (mass(first) + mass(second))


def test_a_signature_survives_the_database_and_the_largest_graphs() -> None:
    marks = [signature(chain_graph(range(size))) for size in (0, 3, 20_000)]
    assert (from_bytes([to_bytes(mark) for mark in marks]) == marks).all()
    assert marks[2][0] == 20_000
