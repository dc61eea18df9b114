"""Plans become communicators, and factors that NCCL does not take on the way are multiplied afterwards."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.groups import LoneGroup, LoneOpener
from fakes.streams import FakeDevice, FakeWork

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.device import HOST
from sirtaki.comm.nccl_streams.transport import (
    CommunicatorKey,
    CommunicatorPool,
    Group,
    GroupWork,
    NcclHierarchicalTransport,
    NcclTransport,
    Scope,
)
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.comm.router import streams_of
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec


def pool_of(opener: LoneOpener) -> CommunicatorPool:
    return CommunicatorPool(opener, limit=24, worst=lambda value: value)


def test_a_plan_needs_a_communicator_for_each_stream_and_number_of_ctas() -> None:
    cuts = (
        Cut(stop=10, stream=1, threads=2048),
        Cut(stop=20, stream=0),
        Cut(stop=30, stream=1, threads=2048),
        Cut(stop=40, stream=1, threads=512),
    )
    knobs = Knobs(unit_bytes=4, streams=2, transport=TransportKind.NCCL, cuts=cuts)
    streams = streams_of(knobs.to_plan(GradientLayout(sizes=(40,))), Algorithm.FLAT)
    opener = LoneOpener()
    pool = pool_of(opener)
    flat = NcclTransport(pool, HOST, opener=opener)
    assert flat.keys(streams) == [CommunicatorKey(1, 4), CommunicatorKey(0, None), CommunicatorKey(1, 1)]
    flat.open_streams(streams)
    assert set(pool.keys()) == set(flat.keys(streams))
    assert streams_of(knobs.to_plan(GradientLayout(sizes=(40,))), Algorithm.HIERARCHICAL) == []


def test_the_hierarchical_algorithm_needs_three_for_each() -> None:
    opener = LoneOpener()
    tree = NcclHierarchicalTransport(pool_of(opener), HOST, opener=opener, local_size=1, local_rank=0)
    assert tree.keys([StreamSpec(2)]) == [CommunicatorKey(2, None, scope) for scope in Scope]


def test_an_algorithm_offers_as_many_streams_as_it_can_have_communicators_for() -> None:
    opener = LoneOpener()
    opener.max_streams = 24
    node = {"local_size": 1, "local_rank": 0}
    assert NcclTransport(pool_of(opener), HOST, opener=opener).max_streams == 24
    tree = NcclHierarchicalTransport(pool_of(opener), HOST, opener=opener, **node)
    assert tree.max_streams == 8
    tree.open_streams([StreamSpec(number) for number in range(tree.max_streams)])


def test_a_factor_is_applied_once_whoever_does_it() -> None:
    for multiplies in (False, True):
        opener = LoneOpener(multiplies=multiplies)
        pool = pool_of(opener)
        streams = [StreamSpec(0)]
        for transport in (
            NcclTransport(pool, HOST, opener=opener),
            NcclHierarchicalTransport(pool, HOST, opener=opener, local_size=1, local_rank=0),
        ):
            transport.open_streams(streams)
            buffer = FlatBuffer(torch.ones(7))
            work = transport.all_reduce(buffer, 2, 5, stream=streams[0], op=ReduceOp.SUM, scale=0.25)
            assert work.wait(1.0)
            assert work.wait(1.0)  # again, which must not multiply again
            assert buffer.tensor.tolist() == [1.0, 1.0, 0.25, 0.25, 0.25, 1.0, 1.0]


def test_nothing_is_sent_for_an_empty_range() -> None:
    opener = LoneOpener()
    flat = NcclTransport(pool_of(opener), HOST, opener=opener)
    assert flat.all_reduce(FlatBuffer(torch.ones(3)), 2, 2, stream=StreamSpec(5), op=ReduceOp.SUM, scale=1.0).wait(0.0)


class SlowGroup(LoneGroup):
    """Reduces on a stream of its own, does something meanwhile, and notes when it began and ended."""

    def __init__(self, device: FakeDevice, notes: list[str], meanwhile: Callable[[], object]) -> None:
        super().__init__(multiplies=False)
        self._device, self._notes, self._meanwhile = device, notes, meanwhile
        self._stream = device.make_stream()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        unit = int(tensor[0])

        def reduce() -> None:
            self._notes.append(f"begin {unit}")
            self._meanwhile()
            self._notes.append(f"end {unit}")

        packed = self._device.record_event()
        with self._device.on(self._stream):
            self._device.order_after(packed)
            self._device.launch(reduce)
            return FakeWork(self._device, self._device.record_event())


class SlowOpener(LoneOpener):
    def __init__(self, device: FakeDevice, notes: list[str], meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._device, self._notes, self._meanwhile = device, notes, meanwhile

    def open(self, key: CommunicatorKey) -> Group:
        return SlowGroup(self._device, self._notes, self._meanwhile)


@pytest.mark.parametrize("kind", [NcclTransport, NcclHierarchicalTransport])
def test_units_of_one_stream_follow_one_another_whatever_their_threads(kind: Any) -> None:
    """On communicators of their own, which nothing else would keep from overlapping."""
    device, notes = FakeDevice(), list[str]()
    opener = SlowOpener(device, notes, lambda: time.sleep(0.01))
    node = {} if kind is NcclTransport else {"local_size": 8, "local_rank": 0}  # units are too small for shares
    transport = kind(pool_of(opener), device, opener=opener, **node)
    streams = [StreamSpec(0, threads) for threads in (None, 2048, None, 512, 512, 2048)]
    transport.open_streams(streams)
    buffer = FlatBuffer(torch.arange(len(streams), dtype=torch.float32))
    works = [
        transport.all_reduce(buffer, unit, unit + 1, stream=stream, op=ReduceOp.SUM, scale=1.0)
        for unit, stream in enumerate(streams)
    ]
    for work in works:
        assert work.wait(1.0)
    device.synchronise()
    assert notes == [f"{what} {unit}" for unit in range(len(streams)) for what in ("begin", "end")]


def test_streams_overlap_whatever_their_threads() -> None:
    device, notes, all_at_work = FakeDevice(), list[str](), threading.Barrier(4)
    opener = SlowOpener(device, notes, lambda: all_at_work.wait(20.0))
    transport = NcclTransport(pool_of(opener), device, opener=opener)
    streams = [StreamSpec(number, threads) for number in range(4) for threads in (None, 2048)]
    transport.open_streams(streams)
    buffer = FlatBuffer(torch.arange(len(streams), dtype=torch.float32))
    for unit, stream in enumerate(streams):
        transport.all_reduce(buffer, unit, unit + 1, stream=stream, op=ReduceOp.SUM, scale=1.0)
    device.synchronise()
    assert sorted(notes) == sorted(f"{what} {unit}" for unit in range(len(streams)) for what in ("begin", "end"))
