"""Plans become communicators, and factors that NCCL does not take on the way are multiplied afterwards."""

import torch
from fakes.groups import LoneOpener

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.device import HOST
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.nccl_streams.communicators import CommunicatorKey, CommunicatorPool, Scope
from sirtaki.comm.nccl_streams.nccl import NcclHierarchicalTransport, NcclTransport
from sirtaki.comm.plan import Algorithm, TransportKind
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
