import json
from dataclasses import replace
from typing import Any

import networkx
import pytest
from conformance.graphs import graphs, renumbered, to_networkx
from hypothesis import assume, given
from hypothesis import strategies as st

from sirtaki.errors import RegistryError
from sirtaki.registry.graph import Graph, Node

A, B = Node(kind="A"), Node(kind="B", detail="3x3", size=9)


@given(graphs())
def test_json_comes_back_as_the_same_graph(graph: Graph) -> None:
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@given(graphs(), st.integers())
def test_the_fingerprint_does_not_depend_on_numbering(graph: Graph, seed: int) -> None:
    assert renumbered(graph, seed).fingerprint() == graph.fingerprint()


@given(graphs(max_nodes=5), graphs(max_nodes=5))
def test_the_same_graphs_share_a_fingerprint_and_graphs_of_other_nodes_do_not(first: Graph, second: Graph) -> None:
    assume(first.directed == second.directed)
    is_same = networkx.is_isomorphic(
        to_networkx(first),
        to_networkx(second),
        node_match=lambda a, b: a == b,
        edge_match=lambda a, b: a == b,
    )
    if is_same:
        assert first.fingerprint() == second.fingerprint()
    elif len(first.nodes) != len(second.nodes) or sorted(map(str, first.nodes)) != sorted(map(str, second.nodes)):
        assert first.fingerprint() != second.fingerprint()


@given(graphs(), st.data())
def test_the_fingerprint_changes_with_any_label(graph: Graph, data: st.DataObject) -> None:
    assume(graph.nodes)
    index = data.draw(st.integers(0, len(graph.nodes) - 1))
    nodes = list(graph.nodes)
    nodes[index] = nodes[index]._replace(detail="other")
    assert replace(graph, nodes=tuple(nodes)).fingerprint() != graph.fingerprint()


@given(graphs(), st.data())
def test_the_fingerprint_changes_with_any_edge(graph: Graph, data: st.DataObject) -> None:
    assume(graph.edges)
    index = data.draw(st.integers(0, len(graph.edges) - 1))
    source, target, _ = graph.edges[index]
    without = graph.edges[:index] + graph.edges[index + 1 :]
    assert replace(graph, edges=without).fingerprint() != graph.fingerprint()
    assert replace(graph, edges=(*without, (source, target, "new"))).fingerprint() != graph.fingerprint()


def test_the_order_of_layers_in_a_chain_counts() -> None:
    edges = tuple((index, index + 1, "") for index in range(5))
    first = Graph(nodes=(A, A, B, A, B, B), edges=edges)
    second = Graph(nodes=(A, B, A, A, B, B), edges=edges)
    assert first.fingerprint() != second.fingerprint()


def test_a_cycle_has_a_fingerprint_too() -> None:
    cycle = Graph(nodes=(A, A, B), edges=((0, 1, ""), (1, 2, ""), (2, 0, "")))
    assert cycle.fingerprint() == renumbered(cycle, 3).fingerprint()
    assert cycle.fingerprint() != replace(cycle, edges=((0, 1, ""), (1, 2, ""), (0, 2, ""))).fingerprint()


@pytest.mark.parametrize("edges", [((0, 0, ""),), ((0, 2, ""),), ((-1, 0, ""),), ((0, 1, ""), (0, 1, "x"))], ids=str)
def test_edges_that_do_not_fit_are_refused(edges: tuple[tuple[int, int, str], ...]) -> None:
    with pytest.raises(RegistryError):
        Graph(nodes=(A, B), edges=edges)


def test_an_undirected_edge_is_the_same_from_both_ends() -> None:
    assert Graph(nodes=(A, B), edges=((1, 0, ""),), directed=False) == Graph(
        nodes=(A, B), edges=((0, 1, ""),), directed=False
    )
    with pytest.raises(RegistryError, match="twice"):
        Graph(nodes=(A, B), edges=((1, 0, ""), (0, 1, "")), directed=False)


GOOD: dict[str, Any] = {"directed": True, "nodes": [["A", "", 0], ["B", "3x3", 9]], "edges": [[0, 1, ""]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directed": 1}, "directed"),
        ({"nodes": "AB"}, "nodes"),
        ({"nodes": [["A", "", True]]}, "size of node 0"),
        ({"nodes": [["A", "", -1]]}, "size of node 0"),
        ({"nodes": [["A", ""]]}, "node 0"),
        ({"nodes": [["A", "", 0], ["\x1b[2J", "", 0]]}, "node 1"),
        ({"nodes": [["A" * 3000, "", 0]]}, "node 0"),
        ({"nodes": [["A", "", 0]] * 20_001, "edges": []}, "too large"),
        ({"edges": [[0, 1]]}, "edge 0"),
        ({"edges": [[0, 1.0, ""]]}, "edge 0"),
        ({"edges": [[0, 7, ""]]}, "edge 0"),
        ({"more": 1}, "fields"),
    ],
)
def test_json_that_is_no_graph_is_refused_with_the_part_named(change: dict[str, Any], message: str) -> None:
    assert Graph.from_json(GOOD).nodes[1] == B
    with pytest.raises(RegistryError, match=message):
        Graph.from_json({**GOOD, **change})


@pytest.mark.timeout(20)
def test_a_long_path_into_a_cycle_takes_linear_time() -> None:
    nodes = (A,) * 20_000
    edges = (*((index, index + 1, "") for index in range(19_999)), (19_999, 19_990, ""))
    assert Graph(nodes=nodes, edges=edges).fingerprint() != Graph(nodes=nodes, edges=edges[:-1]).fingerprint()
    assert not Graph(nodes=nodes, edges=edges).is_acyclic


def test_edges_with_too_many_different_labels_are_refused() -> None:
    with pytest.raises(RegistryError, match="different labels"):
        Graph(nodes=(A,) * 101, edges=tuple((index, index + 1, str(index)) for index in range(100)))
