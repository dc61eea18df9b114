"""Parts of graphs by themselves."""

from __future__ import annotations

import pytest
from fakes.replays import over_a_link

from sirtaki.analysis.global_graph import communication_s, computation_s, global_graph
from sirtaki.autotune.model.replayer import replay


def test_computation_and_communication_alone() -> None:
    one = global_graph(over_a_link(cuts=(4,), streams=1, iterations=2))
    # 20 ms forward, 80 ms backward, 1 ms to copy, 10 ms update; 2 ms to start, 260 ms on the link
    assert computation_s(one) == pytest.approx(2 * 0.111)
    assert communication_s(one) == pytest.approx(2 * 0.262)
    assert replay(one).total_s == pytest.approx(2 * (0.111 + 0.262))
