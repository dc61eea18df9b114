"""Probes of lanes: all ranks find the same, and other streams are used only where they are clearly faster."""

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.autotune.sparse import Pace
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.engine import sparse_carrier as module
from sirtaki.engine.sparse_carrier import _fastest, _Times, measure


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


def test_another_number_of_streams_is_used_only_where_it_is_clearly_faster() -> None:
    times = {4: _Times(0.0, 1.0), 8: _Times(0.0, 0.95), 2: _Times(0.0, 0.92)}
    assert _fastest(times, usual=4) == 4
    assert _fastest({**times, 1: _Times(0.0, 0.8)}, usual=4) == 1
    assert _fastest({3: _Times(0.0, 1.0)}, usual=4) == 3  # all that may be used


def test_the_streams_in_use_are_measured_however_slow_the_network_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.0)

    def act(control: ControlPlane) -> tuple[int, int]:
        lanes = SparseLanes(control, timeout_s=20.0, kind=TransportKind.GLOO, streams=4)
        measure(control, lanes, streams=None)
        lanes.close()
        control.reclaim()
        return lanes.exchange_streams, lanes.reduce_streams

    assert on_planes(2, act) == [(4, 4)] * 2


class Elsewhere:
    """Sums over ranks by other lanes; ends after so many."""

    def __init__(self, lanes: SparseLanes, most: int) -> None:
        self._lanes, self._left = lanes, most

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def sum(self, values: torch.Tensor) -> torch.Tensor | None:
        self._left -= 1
        total = values.clone()
        self._lanes.all_reduce_(total)
        return total if self.is_open else None

    def close(self) -> None:
        self._lanes.close()


@pytest.mark.parametrize("most", [0, 3, 100])
def test_sums_elsewhere_are_measured_where_they_are_possible(most: int) -> None:
    def act(control: ControlPlane) -> bool:
        lanes, others = (SparseLanes(control, timeout_s=20.0, kind=None, streams=1) for _ in range(2))
        lanes.hot_sums = Elsewhere(others, most)
        pace = measure(control, lanes, streams=None)
        lanes.close()
        control.reclaim()
        return pace.aggregator is not None and pace.aggregator.bytes_per_s > 1e6

    assert on_planes(2, act) == [most == 100] * 2
