"""Probes of lanes: all ranks find the same, and more streams are used only where they are clearly faster."""

import pytest
from fakes.meshes import on_planes

from sirtaki.autotune.sparse.volume import Pace
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.engine.sparse_probe import _fewest_fast, _Times, measure


@pytest.mark.parametrize(("kind", "streams"), [(TransportKind.GLOO, None), (TransportKind.GLOO, 3), (None, None)])
def test_all_ranks_measure_the_same_pace(kind: TransportKind | None, streams: int | None) -> None:
    def act(control: ControlPlane) -> tuple[Pace, int, int]:
        lanes = SparseLanes(control, timeout_s=20.0, kind=kind, streams=streams or 4)
        pace = measure(control, lanes, streams=streams)
        lanes.close()
        control.reclaim()
        return pace, lanes.exchange_streams, lanes.reduce_streams

    found = on_planes(2, act)
    assert found[0] == found[1]
    pace, *counts = found[0]
    assert pace.exchange_bytes_per_s > 1e6
    assert pace.reduce_bytes_per_s > 1e6
    assert pace.add_bytes_per_s > 1e6
    if streams:
        assert counts == [streams] * 2
    if kind is None:
        assert counts == [1, 1]  # shared memory


def test_more_streams_are_used_where_they_are_clearly_faster() -> None:
    assert _fewest_fast({1: _Times(0.0, 1.0), 2: _Times(0.0, 0.95), 4: _Times(0.0, 0.92)}) == 1
    assert _fewest_fast({1: _Times(0.0, 1.0), 2: _Times(0.0, 0.5), 4: _Times(0.0, 0.3), 8: _Times(0.0, 0.29)}) == 4
