"""Signatures count nodes by what they are; two graphs with different ones are different."""

import numpy as np
from conformance.graphs import graphs, renumbered
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.registry.graph import (
    KIND_BINS,
    LABEL_BINS,
    WIDTH,
    Graph,
    Node,
    from_bytes,
    is_signature,
    signature,
    to_bytes,
)


def graph_of(*nodes: Node, edges: int = 0) -> Graph:
    return Graph(nodes=nodes, edges=tuple((number, number + 1, "") for number in range(edges)), directed=True)


def test_a_signature_counts_nodes_and_edges_and_each_node_once_by_kind_and_once_by_label() -> None:
    counts = signature(graph_of(*[Node("Add", "", 3)] * 3, Node("Addmm", "2x2", 4), edges=2))
    assert counts.shape == (WIDTH,)
    assert counts[:2].tolist() == [4, 2]
    assert counts[2 : 2 + KIND_BINS].sum() == 4
    assert counts[2 + KIND_BINS :].sum() == 4
    assert counts[2 + KIND_BINS :].size == LABEL_BINS
    assert counts[2:].max() == 3
    assert signature(graph_of()).sum() == 0


def test_nodes_of_one_kind_that_differ_in_detail_or_size_share_a_bin_of_kinds_only() -> None:
    one, detail, size = (signature(graph_of(Node("Add", *rest))) for rest in (("", 3), ("x", 3), ("", 4)))
    for other in (detail, size):
        assert (one[: 2 + KIND_BINS] == other[: 2 + KIND_BINS]).all()
        assert (one[2 + KIND_BINS :] != other[2 + KIND_BINS :]).any()


@given(graphs(), st.integers(0, 5))
def test_the_order_of_nodes_does_not_matter(graph: Graph, seed: int) -> None:
    assert (signature(graph) == signature(renumbered(graph, seed))).all()


def test_what_is_kept_is_read_again_byte_for_byte_as_on_every_machine() -> None:
    many = [signature(graph_of(*[Node("Add", "", 1)] * number)) for number in (0, 1, 300)]
    kept = [to_bytes(counts) for counts in many]
    assert kept[2][:4] == b"\x2c\x01\x00\x00"  # 300 nodes, little-endian
    assert (from_bytes(kept) == np.stack(many)).all()
    assert from_bytes([]).shape == (0, WIDTH)


def test_what_has_another_length_or_type_cannot_be_read() -> None:
    kept = to_bytes(signature(graph_of()))
    assert is_signature(kept)
    for damaged in (kept[:-1], kept + b"\0", b"", None, kept.decode("latin-1")):
        assert not is_signature(damaged)
