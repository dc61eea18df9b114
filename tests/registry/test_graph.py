"""Models' graphs: what is recorded stays what it was, and distances lie where the theory wants them."""

import io
import json
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import numpy as np
import pytest
from conformance.graphs import NODES, chain_graph, graphs, renumbered
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert, to_builtins

from sirtaki.errors import RegistryError
from sirtaki.fields import checked
from sirtaki.registry.cluster import Topology
from sirtaki.registry.documents import read_document
from sirtaki.registry.graph import (
    EDGE_COST,
    KIND_BINS,
    NODE_COST,
    WIDTH,
    GraphJson,
    ModelGraph,
    OperationLabel,
    assignment_bound,
    canonical_json,
    digest,
    distance,
    draw_match,
    fingerprint,
    from_bytes,
    gradients_fingerprint,
    graph_to_json,
    histogram_bounds,
    is_signature,
    label_bound,
    layout_fingerprint,
    least_distance,
    mass,
    model_graph,
    node_cost,
    normalised,
    signature,
    to_bytes,
    upper_bound,
)

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
A, B = OperationLabel("A"), OperationLabel("B", "3x3", 9)
TINY = 1e-9


# ── what earlier releases have stored ────────────────────────────────────────────────────────────────────────────────


def test_fingerprints_signatures_and_distances_are_those_of_earlier_releases() -> None:
    found = [checked(GraphJson, one["graph"]).graph() for one in RECORDED["graphs"]]
    for graph, one in zip(found, RECORDED["graphs"], strict=True):
        assert graph_to_json(graph) == one["graph"]
        assert fingerprint(graph) == one["fingerprint"]
        assert {str(place): count for place, count in enumerate(signature(graph).tolist()) if count} == one["signature"]
    assert [[distance(one, other) for other in found] for one in found] == RECORDED["distances"]
    for one in RECORDED["topologies"]:
        topology = convert(one["topology"], Topology)
        assert json.loads(json.dumps(to_builtins(topology))) == one["topology"]
        assert topology.fingerprint() == one["fingerprint"]
        assert json.loads(json.dumps(to_builtins(topology.shape()))) == one["shape"]


def test_entries_and_ways_of_earlier_releases_keep_their_ids_and_their_text() -> None:
    records = read_document(io.StringIO(json.dumps(RECORDED["document"])))
    written = json.loads(json.dumps([record.to_json() for record in records]))
    assert [record.id for record in records] == RECORDED["entries"] + RECORDED["ways"]
    assert written == RECORDED["document"]["entries"] + RECORDED["document"]["row_ways"]


def test_digests_do_not_change_from_process_to_process_nor_from_release_to_release() -> None:
    assert digest("key", "a")[:16] == "c04202bff8d9b8ca"
    assert layout_fingerprint([3, 5, 7], 4) == "96983cb03d5d00a34fd2ed103f5a2f82"
    assert gradients_fingerprint([("float32", [3, 1, 2])]) == "d88c3e263b366f25eef5e5a383716f4f"
    script = "from sirtaki.registry.graph import *; print(layout_fingerprint({3, 5, 7}, 4)[:8], digest('key', 'a'))"
    runs = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1", "PYTHONPATH": "."}, {"PYTHONHASHSEED": "2", "PYTHONPATH": "."})
    }
    assert len(runs) == 1


def test_a_digest_separates_parts_and_accepts_any_text() -> None:
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("ab", "c", "")}) == 4
    assert digest("\ud800") != digest("\ud801")  # no valid UTF-8, as names of files may be
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,null]}'
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json([number])


def test_fingerprints_of_gradients_and_layouts_depend_on_every_relevant_property() -> None:
    one = gradients_fingerprint([("float32", [3, 1, 2]), ("float16", [7])])
    assert one == gradients_fingerprint([("float16", [7]), ("float32", [1, 2, 3])])
    for other in ([("float32", [3, 1, 2])], [("float16", [3, 1, 2]), ("float32", [7])], [("float32", [31, 2])]):
        assert gradients_fingerprint(other) != one
    layouts = ([1, 2, 3], 4), ([1, 3, 2], 4), ([1, 2, 3], 2), ([12, 3], 4)
    assert len({layout_fingerprint(sizes, itemsize) for sizes, itemsize in layouts}) == 4


# ── fingerprints and JSON ────────────────────────────────────────────────────────────────────────────────────────────


@given(graphs(), st.integers())
def test_json_is_restored_and_numbering_does_not_matter(graph: ModelGraph, seed: int) -> None:
    back = checked(GraphJson, json.loads(json.dumps(graph_to_json(graph)))).graph()
    assert (back.labels, back.edges) == (graph.labels, graph.edges)
    other = renumbered(graph, seed)
    assert fingerprint(other) == fingerprint(graph)
    assert (signature(other) == signature(graph)).all()


@given(graphs(max_nodes=5), graphs(max_nodes=5))
def test_the_same_graphs_share_a_fingerprint_and_graphs_of_other_nodes_do_not(
    first: ModelGraph, second: ModelGraph
) -> None:
    if nx.is_isomorphic(with_attributes(first), with_attributes(second), node_match=lambda a, b: a == b):
        assert fingerprint(first) == fingerprint(second)
    elif sorted(first.labels) != sorted(second.labels):
        assert fingerprint(first) != fingerprint(second)


@given(graphs(), st.data())
def test_the_fingerprint_changes_with_any_node_or_edge(graph: ModelGraph, data: st.DataObject) -> None:
    nodes, edges = graph.labels, graph.edges
    for index in range(len(nodes)):
        other = [*nodes[:index], nodes[index]._replace(detail="other"), *nodes[index + 1 :]]
        assert fingerprint(model_graph(other, edges)) != fingerprint(graph)
    for edge in edges:
        assert fingerprint(model_graph(nodes, [other for other in edges if other != edge])) != fingerprint(graph)


def test_the_order_of_layers_in_a_chain_counts() -> None:
    edges = [(index, index + 1) for index in range(5)]
    assert fingerprint(model_graph((A, A, B, A, B, B), edges)) != fingerprint(model_graph((A, B, A, A, B, B), edges))


@pytest.mark.lengthy
@pytest.mark.timeout(20)
def test_a_long_path_takes_linear_time_and_a_cycle_has_no_fingerprint() -> None:
    nodes = (A,) * 20_000
    edges = [(index, index + 1) for index in range(19_999)]
    assert fingerprint(model_graph(nodes, edges)) != fingerprint(model_graph(nodes[1:], edges[:-1]))
    with pytest.raises(RegistryError, match="it has a cycle"):
        fingerprint(model_graph(nodes, [*edges, (19_999, 19_990)]))


@pytest.mark.parametrize("edges", [[(0, 0)], [(0, 2)], [(-1, 0)], [(0, 1), (0, 1)]], ids=str)
def test_edges_that_do_not_fit_are_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(RegistryError, match=r"of 2 nodes is damaged: it has the invalid edge"):
        model_graph((A, B), edges)


def test_a_graph_that_was_made_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        chain_graph([1, 2]).edges = ()  # type: ignore[misc]


GOOD: dict[str, Any] = {"directed": True, "nodes": [["A", "", 0], ["B", "3x3", 9]], "edges": [[0, 1, ""]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directed": 1}, "model.directed"),
        ({"directed": False}, "directed"),
        ({"nodes": "AB"}, "model.nodes"),
        ({"nodes": [["A", "", True]]}, r"model.nodes\[0\]\[2\]"),
        ({"nodes": [["A", "", -1]]}, r"model.nodes\[0\]\[2\]"),
        ({"nodes": [["A", ""]]}, r"model.nodes\[0\]"),
        ({"nodes": [["A", "", 0], ["\x1b[2J", "", 0]]}, r"model.nodes\[1\]\[0\]: expected printable text"),
        ({"nodes": [["A" * 3000, "", 0]]}, r"model.nodes\[0\]"),
        ({"nodes": [["A", "", 0]] * 20_001, "edges": []}, "model.nodes"),
        ({"edges": [[0, 1]]}, r"model.edges\[0\]"),
        ({"edges": [[0, 1.5, ""]]}, r"model.edges\[0\]\[1\]"),
        ({"edges": [[0, 1, "fast"]]}, r"model.edges\[0\]\[2\]"),
        ({"edges": [[0, 7, ""]]}, "of 2 nodes is damaged"),
        ({"more": 1}, "unknown field more"),
    ],
)
def test_json_that_is_no_graph_is_rejected_with_the_part_named(change: dict[str, Any], message: str) -> None:
    assert checked(GraphJson, GOOD).graph().labels[1] == B
    with pytest.raises(RegistryError, match=message):
        checked(GraphJson, {**GOOD, **change}, at="model").graph()


# ── signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_signature_counts_nodes_and_edges_and_each_node_once_by_kind_and_once_by_label() -> None:
    counts = signature(
        model_graph([*[OperationLabel("Add", "", 3)] * 3, OperationLabel("Addmm", "2x2", 4)], [(0, 1), (1, 2)])
    )
    assert counts.shape == (WIDTH,)
    assert counts[:2].tolist() == [4, 2]
    assert counts[2 : 2 + KIND_BINS].sum() == counts[2 + KIND_BINS :].sum() == 4
    one, *others = (signature(model_graph([OperationLabel("Add", *rest)])) for rest in (("", 3), ("x", 3), ("", 4)))
    for other in others:
        assert (one[: 2 + KIND_BINS] == other[: 2 + KIND_BINS]).all()
        assert (one[2 + KIND_BINS :] != other[2 + KIND_BINS :]).any()


def test_a_signature_survives_the_database_and_the_largest_graphs() -> None:
    many = [signature(chain_graph(range(size))) for size in (0, 300, 20_000)]
    kept = [to_bytes(counts) for counts in many]
    assert kept[1][:4] == b"\x2c\x01\x2b\x01"  # 300 nodes, little-endian
    assert (from_bytes(kept) == np.stack(many)).all()
    assert from_bytes([]).shape == (0, WIDTH)
    assert is_signature(kept[0])
    for damaged in (kept[0][:-1], kept[0] + b"\0", b"", None, kept[0].decode("latin-1")):
        assert not is_signature(damaged)


# ── distances ────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_attributes(graph: ModelGraph) -> "nx.DiGraph[int]":
    """Return a copy for networkx's routines. Its nodes have their labels."""
    made = nx.DiGraph(graph.edges)
    made.add_nodes_from((index, {"label": label}) for index, label in enumerate(graph.labels))
    return made


def exact(first: ModelGraph, second: ModelGraph) -> float:
    """networkx's depth-first search over all edit paths."""
    cost = nx.graph_edit_distance(
        with_attributes(first),
        with_attributes(second),
        node_subst_cost=lambda a, b: node_cost(a["label"], b["label"]),
        node_del_cost=lambda _: NODE_COST,
        node_ins_cost=lambda _: NODE_COST,
        edge_del_cost=lambda _: EDGE_COST,
        edge_ins_cost=lambda _: EDGE_COST,
    )
    return float(cost)


def lower_bounds(first: ModelGraph, second: ModelGraph) -> list[float]:
    return [
        float(histogram_bounds(signature(first), signature(second)[None])[0]),
        label_bound(first, second),
        assignment_bound(first, second),
    ]


def check_bounds(first: ModelGraph, second: ModelGraph) -> None:
    true = exact(first, second)
    assert max(lower_bounds(first, second)) <= true + TINY
    assert upper_bound(first, second) >= true - TINY


@given(graphs(max_nodes=4), graphs(max_nodes=4))
def test_the_exact_distance_is_between_the_bounds(first: ModelGraph, second: ModelGraph) -> None:
    check_bounds(first, second)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(graphs(), graphs())
def test_the_exact_distance_is_between_the_bounds_up_to_seven_nodes(first: ModelGraph, second: ModelGraph) -> None:
    check_bounds(first, second)


def random_graph(rng: np.random.Generator, n_nodes: int) -> ModelGraph:
    nodes = [
        OperationLabel("ABC"[rng.integers(3)], ["", "x"][rng.integers(2)], [0, 9][rng.integers(2)])
        for _ in range(n_nodes)
    ]
    return model_graph(nodes, [(a, b) for b in range(n_nodes) for a in range(b) if rng.random() < 0.4])


def test_on_random_graphs_the_bounds_are_close() -> None:
    rng = np.random.default_rng(5)
    ratios = []
    for _ in range(60):
        first, second = (random_graph(rng, int(rng.integers(1, 6))) for _ in range(2))
        true = max(exact(first, second), TINY)
        ratios.append([*(bound / true for bound in lower_bounds(first, second)), upper_bound(first, second) / true])
    *lower, upper = np.mean(ratios, axis=0)
    assert (np.array(lower) > [0.75, 0.75, 0.95]).all()
    assert upper < 1.05


@given(graphs(), graphs(), st.integers())
def test_distances_are_symmetric_from_0_to_1_and_0_from_a_graph_to_itself(
    first: ModelGraph, second: ModelGraph, seed: int
) -> None:
    assert max(lower_bounds(first, second)) <= upper_bound(first, second) + TINY
    assert distance(first, second) == distance(second, first)
    assert 0.0 <= least_distance(first, second) <= distance(first, second) + TINY <= 1.0 + 2 * TINY
    assert upper_bound(first, first) == distance(first, first) == 0.0
    assert all(abs(bound) < TINY for bound in lower_bounds(first, renumbered(first, seed)))


@given(graphs(max_nodes=3), graphs(max_nodes=3), graphs(max_nodes=3))
def test_the_normalised_exact_distance_keeps_the_triangle_inequality(
    a: ModelGraph, b: ModelGraph, c: ModelGraph
) -> None:
    def normal(first: ModelGraph, second: ModelGraph) -> float:
        return normalised(exact(first, second), mass(first) + mass(second))

    assert normal(a, c) <= normal(a, b) + normal(b, c) + TINY


@given(NODES, NODES, NODES)
def test_relabelling_is_a_metric_and_cheaper_than_replacing(
    a: OperationLabel, b: OperationLabel, c: OperationLabel
) -> None:
    assert (node_cost(a, b) == 0.0) == (a == b)
    assert node_cost(a, b) == node_cost(b, a) <= 2 * NODE_COST
    assert node_cost(a, c) <= node_cost(a, b) + node_cost(b, c) + TINY


def test_from_nothing_every_node_and_edge_is_built() -> None:
    graph, nothing = chain_graph([1, 2, 3]), model_graph(())
    assert upper_bound(graph, nothing) == mass(graph) == 3 * NODE_COST + 2 * EDGE_COST
    assert distance(graph, nothing) == 1.0
    assert assignment_bound(graph, nothing) == mass(graph)


def test_a_deeper_or_wider_model_is_nearer_than_one_of_other_kinds() -> None:
    model, deeper, wider = chain_graph([64] * 30), chain_graph([64] * 33), chain_graph([128] * 30)
    grown = 3 * NODE_COST + 3 * EDGE_COST
    assert grown <= upper_bound(model, deeper) <= grown + 2 * EDGE_COST  # cut where the new layers go in
    other = model_graph([OperationLabel("Scan", "64", 64)] * 30, model.edges)
    assert 0 < distance(model, wider) < distance(model, other)


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TITLES = ("this job", "another one")


@pytest.mark.lengthy
def test_a_picture_names_both_graphs_and_labels_readable_nodes(tmp_path: Path) -> None:
    path = tmp_path / "match.svg"
    draw_match(chain_graph([5, 7]), chain_graph([5] * 70), path, titles=TITLES, caption="distance 0.5")
    text = path.read_text()
    ElementTree.fromstring(text)
    for words in (*TITLES, "distance 0.5", "the same in both", "changed", "only here"):
        assert f"<!-- {words} -->" in text
    assert text.count(f"<!-- {chain_graph([5]).labels[0]!s:.40}") == 1  # of the small one; 70 cannot be read


def test_a_node_is_drawn_one_level_below_its_last_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    monkeypatch.setattr(nx, "draw_networkx_nodes", lambda graph, where, **_: places.append(where))
    graph = model_graph(
        [OperationLabel("Add", "", size) for size in range(5)], [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)]
    )
    draw_match(graph, model_graph(()), tmp_path / "match.svg", titles=TITLES, caption="")
    assert places == [{0: (0, 0), 4: (1, 0), 1: (0, -1), 2: (1, -1), 3: (0, -2)}, {}]


def test_an_unwritable_picture_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain_graph([5])
    for path in (tmp_path / "nowhere" / "match.svg", tmp_path / "match.nothing"):
        with pytest.raises(RegistryError, match=f"the picture .*{path.name} cannot be written"):
            draw_match(graph, graph, path, titles=TITLES, caption="")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RegistryError, match=r"pip install 'sirtaki\[plot\]'"):
        draw_match(graph, graph, tmp_path / "x.svg", titles=TITLES, caption="")
