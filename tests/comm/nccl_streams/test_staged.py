"""Units through host memory: each is copied out, reduced and copied back separately, and errors are reported."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes.meshes import until
from fakes.streams import FakeDevice

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.device import Device
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.transports.contract import (
    NOTHING_TO_DO,
    FlatBuffer,
    ReduceOp,
    StreamCost,
    StreamSpec,
    ThreadWork,
    Work,
)
from sirtaki.comm.transports.staged import StagedTransport
from sirtaki.errors import CommError


class Inner:
    """A transport between two ranks with equal values. Reductions are done when `go` is set."""

    kind, max_streams, threads = TransportKind.MPI, 5, ()
    stream_cost = StreamCost(descriptors=3, threads=1)

    def __init__(self) -> None:
        self.opened: list[StreamSpec] = []
        self.asked: list[tuple[int, int, StreamSpec, ReduceOp, float]] = []
        self.problem: Exception | None = None
        self.late: list[ThreadWork] = []
        self.holds = self.closed = False

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        self.opened += streams

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        if self.problem is not None:
            raise self.problem
        self.asked.append((start, stop, stream, op, scale))
        buffer.tensor[start:stop].mul_(2 * scale)
        work = ThreadWork()
        if self.holds:
            self.late.append(work)
        else:
            work.finish()
        return work

    def close(self) -> bool:
        self.closed = True
        return False


def own_threads() -> int:
    return sum(thread.name.startswith("sirtaki-staged") for thread in threading.enumerate())


def staged(device: Any = None, failures: FailureBoard | None = None) -> tuple[StagedTransport, Inner]:
    inner = Inner()
    transport = StagedTransport(inner, device or Device(), failures or FailureBoard())
    transport.open_streams([StreamSpec(1), StreamSpec(0)])
    return transport, inner


def buffer_of(numel: int) -> FlatBuffer:
    return FlatBuffer(torch.arange(float(numel)), mirror=FlatBuffer(torch.full((numel,), -1.0)))


def reduce(transport: StagedTransport, buffer: FlatBuffer, start: int, stop: int, *, stream: int = 0) -> Work:
    return transport.all_reduce(buffer, start, stop, stream=StreamSpec(stream), op=ReduceOp.SUM, scale=1.5)


def test_it_offers_the_streams_of_the_inner_one_and_takes_two_threads_more_for_each() -> None:
    transport, inner = staged()
    assert (transport.max_streams, transport.threads) == (5, ())
    assert transport.stream_cost == StreamCost(descriptors=3, threads=3)
    assert inner.opened == [StreamSpec(1), StreamSpec(0)]
    assert not transport.close()  # as the inner one says
    assert inner.closed


def test_a_unit_is_copied_out_and_back_and_nothing_beside_it_changes() -> None:
    transport, inner = staged()
    buffer = buffer_of(6)
    work = reduce(transport, buffer, 2, 4, stream=1)
    assert work.wait(5.0)
    assert work.is_done()
    assert buffer.tensor.tolist() == [0, 1, 6, 9, 4, 5]
    assert buffer.mirror is not None
    assert buffer.mirror.tensor.tolist() == [-1, -1, 6, 9, -1, -1]
    assert inner.asked == [(2, 4, StreamSpec(1), ReduceOp.SUM, 1.5)]
    begun, done = work.times()
    assert begun is not None
    assert done is not None
    assert begun <= done
    transport.close()


def test_an_empty_unit_is_not_sent() -> None:
    transport, inner = staged()
    assert reduce(transport, buffer_of(3), 1, 1) is NOTHING_TO_DO
    assert inner.asked == []
    transport.close()


def test_a_unit_is_done_when_it_is_reduced_and_not_before() -> None:
    transport, inner = staged()
    inner.holds = True
    buffer = buffer_of(2)
    work = reduce(transport, buffer, 0, 2)
    until(lambda: len(inner.late) == 1)
    assert not work.wait(0.02)
    assert not work.is_done()
    assert buffer.tensor.tolist() == [0, 1]
    inner.late[0].finish()
    assert work.wait(5.0)
    assert buffer.tensor.tolist() == [0, 3]
    transport.close()


@pytest.mark.parametrize("seed", range(5))
def test_on_a_device_with_late_streams_every_step_waits_for_the_one_before(seed: int) -> None:
    device = FakeDevice(seed)
    transport, _ = staged(device)
    buffer = buffer_of(40)
    for turn in range(3):
        device.launch(buffer.tensor.add_, 1.0)  # packing, on the current stream
        works = [reduce(transport, buffer, low, low + 5, stream=low // 5 % 2) for low in range(0, 40, 5)]
        for work in works:
            while not work.wait(0.5):
                pass
        result = torch.empty(40)
        device.launch(result.copy_, buffer.tensor)  # what the optimizer does, on the current stream
        device.synchronise()
        wanted = torch.arange(40.0)
        for _ in range(turn + 1):
            wanted = (wanted + 1.0) * 3.0
        assert torch.equal(result, wanted)
    transport.close()


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (CommError("rank 1 has ended"), "^rank 1 has ended$"),
        (RuntimeError("no such page"), r"staging elements \[1, 3\) failed: RuntimeError\('no such page'\)"),
    ],
)
def test_an_error_on_the_way_to_the_host_is_reported_and_the_next_unit_runs(problem: Exception, told: str) -> None:
    transport, inner = staged()
    inner.problem = problem
    buffer = buffer_of(4)
    with pytest.raises(CommError, match=told):
        reduce(transport, buffer, 1, 3).wait(5.0)
    inner.problem = None
    assert reduce(transport, buffer, 0, 1).wait(5.0)
    transport.close()


@pytest.mark.lengthy
def test_a_failed_reduction_is_reported_and_a_lost_job_ends_a_running_one() -> None:
    failures = FailureBoard()
    transport, inner = staged(failures=failures)
    inner.holds = True
    work = reduce(transport, buffer_of(2), 0, 2)
    until(lambda: len(inner.late) == 1)
    inner.late[0].finish(CommError("the connection is gone"))
    with pytest.raises(CommError, match="the connection is gone"):
        work.wait(5.0)
    work = reduce(transport, buffer_of(2), 0, 2)
    failures.report(CommError("rank 2 has ended"))
    with pytest.raises(CommError, match="rank 2 has ended"):
        work.wait(5.0)
    transport.close()


def test_more_streams_are_added_to_those_that_are_open_and_closing_ends_all_threads() -> None:
    before = own_threads()
    transport, _ = staged()
    transport.open_streams([StreamSpec(1)])
    assert own_threads() == before + 4
    transport.open_streams([StreamSpec(2)])
    assert own_threads() == before + 6
    assert reduce(transport, buffer_of(1), 0, 1, stream=2).wait(5.0)
    transport.close()
    transport.close()
    assert own_threads() == before
