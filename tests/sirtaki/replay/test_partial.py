"""Parts of graphs by themselves."""

from __future__ import annotations

import pytest
from fakes.graphs import graph, node
from fakes.replays import over_a_link

from sirtaki.analysis.global_graph import communication_s, computation_s, global_graph, part
from sirtaki.autotune.model.replayer import replay


def test_what_is_kept_keeps_its_edges() -> None:
    whole = graph([node(0, 1.0), node(1, 2.0), node(0, 4.0)], [(0, 1, 0.0), (1, 2, 0.0), (0, 2, 0.5)])
    small = part(whole, lambda one: one.lane == 0)
    assert list(small.edges) == [(0, 1, 0.5)]
    assert replay(small).total_s == 5.5


def test_computation_and_communication_alone() -> None:
    one = global_graph(over_a_link(cuts=(4,), streams=1, iterations=2))
    # 20 ms forward, 80 ms backward, 1 ms to copy, 10 ms update; 2 ms to start, 260 ms on the link
    assert computation_s(one) == pytest.approx(2 * 0.111)
    assert communication_s(one) == pytest.approx(2 * 0.262)
    assert replay(one).total_s == pytest.approx(2 * (0.111 + 0.262))
