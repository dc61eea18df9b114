"""Lanes carry parcels and sums of any size over several streams, and end waits when they are closed."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse import lanes as module
from sirtaki.comm.sparse.lanes import Closed, SparseLanes
from sirtaki.errors import ConfigError

SHARED, GLOO = TransportKind.SHARED_MEMORY, TransportKind.GLOO


def on_lanes(
    size: int, act: Callable[[SparseLanes], Any], *, kind: TransportKind | None, streams: int = 3
) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        lanes = SparseLanes(control, timeout_s=20.0, kind=kind, streams=streams)
        try:
            return act(lanes)
        finally:
            lanes.close()
            control.reclaim()

    return on_planes(size, run)


def parcel(sender: int, receiver: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * sender + receiver)
    return torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("kind", [SHARED, GLOO])
@pytest.mark.parametrize("scale", [0, 1, 50_000])
def test_parcels_arrive_as_they_were_sent(kind: TransportKind, scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_REGION_BYTES", 1 << 16)  # several turns
    lengths = [[scale * (3 * sender + receiver) % 200_003 for receiver in range(3)] for sender in range(3)]

    def act(lanes: SparseLanes) -> None:
        me = lanes.rank
        for _ in range(2):
            arrived = lanes.exchange([parcel(me, other, lengths[me][other]) for other in range(3)], lengths)
            assert all(torch.equal(arrived[other], parcel(other, me, lengths[other][me])) for other in range(3))
            mine = [lengths[rank][0] for rank in range(3)]
            arrived = lanes.all_gather(parcel(me, 0, mine[me]), mine)
            assert all(torch.equal(arrived[other], parcel(other, 0, mine[other])) for other in range(3))
            lanes.grow()
        assert lanes.gather_counts([me, 7]) == [[0, 7], [1, 7], [2, 7]]

    on_lanes(3, act, kind=kind)


@pytest.mark.parametrize("kind", [SHARED, GLOO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex128])
def test_sums_of_any_size(kind: TransportKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_REGION_BYTES", 1 << 12)

    def act(lanes: SparseLanes) -> None:
        for numel in (1, 1000, 70_001):
            tensor = (torch.arange(numel) % 7).to(dtype) * (lanes.rank + 1)
            lanes.all_reduce_(tensor)
            assert torch.equal(tensor, (torch.arange(numel) % 7).to(dtype) * 3)
            lanes.grow()

    on_lanes(2, act, kind=kind)


def test_shared_memory_grows_between_iterations_to_what_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_REGION_BYTES", 1 << 12)

    def act(lanes: SparseLanes) -> tuple[int, int]:
        lanes.all_reduce_(torch.zeros(10_000))
        before = lanes._region.tensor.numel()  # type: ignore[union-attr]
        lanes.grow()
        return before, lanes._region.tensor.numel()  # type: ignore[union-attr]

    assert on_lanes(2, act, kind=None) == [(1 << 12, 1 << 16)] * 2


def test_more_streams_may_be_opened_and_shared_memory_needs_one() -> None:
    assert on_lanes(2, lambda lanes: (lanes.streams, lanes.open_streams(4)), kind=GLOO, streams=2) == [(2, 4)] * 2
    assert on_lanes(2, lambda lanes: (lanes.streams, lanes.open_streams(4)), kind=SHARED) == [(1, 1)] * 2


def test_a_transport_that_there_is_not_is_refused_by_all() -> None:
    with pytest.raises(ConfigError, match="nccl cannot carry sparse gradients"):
        on_lanes(2, lambda _: None, kind=TransportKind.NCCL)


@pytest.mark.parametrize("kind", [SHARED, GLOO])
def test_a_wait_for_ranks_that_do_not_come_ends_when_lanes_are_stopped(kind: TransportKind) -> None:
    def act(lanes: SparseLanes) -> None:
        if lanes.rank == 0:
            threading.Timer(0.2, lanes.stop).start()
            with pytest.raises(Closed):
                lanes.gather_counts([1])

    on_lanes(2, act, kind=kind)
