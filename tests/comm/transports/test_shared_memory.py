"""Units, memory and doorbells that a node shares; in these tests its ranks are threads of one process."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes, until

from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.transports import shared_memory
from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, ReduceOp, StreamCost, StreamSpec, Work
from sirtaki.comm.transports.shared_memory import (
    Doorbell,
    SharedMemoryTransport,
    open_peers,
    reduce_share,
    share_memory,
)
from sirtaki.errors import CommError, PeerLostError, TransportError

SIZE = 3


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, (numel,), generator=generator).to(dtype)


def wanted(size: int, numel: int, op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
    parts = torch.stack([values(rank, numel).double() for rank in range(size)])
    return {
        ReduceOp.SUM: parts.sum(0),
        ReduceOp.PRODUCT: parts.prod(0),
        ReduceOp.MIN: parts.amin(0),
        ReduceOp.MAX: parts.amax(0),
    }[op]


def shared(control: ControlPlane, tensor: torch.Tensor) -> FlatBuffer:
    """Return a buffer with these values that the node shares. Collective."""
    regions = share_memory(control, tensor.numel() * tensor.dtype.itemsize)
    peers = tuple(region.view(tensor.dtype) for region in regions)
    peers[control.local_rank].copy_(tensor)
    return FlatBuffer(peers[control.local_rank], peers)


def reduce(
    transport: SharedMemoryTransport,
    buffer: FlatBuffer,
    start: int,
    stop: int,
    *,
    stream: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    scale: float = 1.0,
) -> Work:
    return transport.all_reduce(buffer, start, stop, stream=StreamSpec(stream), op=op, scale=scale)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_halves_are_accumulated_wide_and_rounded_once(op: ReduceOp) -> None:
    buffers = [torch.tensor([value]).half() for value in (2048.0, 1.0, 1.0)]
    reduce_share(buffers, 0, 1, op=op, scale=2.0, outputs=buffers)
    assert buffers[2].tolist() == [4100.0 if op is ReduceOp.SUM else 4096.0]


def test_overflow_in_sums_is_silent_as_in_torch() -> None:
    buffers = [torch.tensor([3e38, torch.inf]), torch.tensor([3e38, -torch.inf])]
    reduce_share(buffers, 0, 2, op=ReduceOp.SUM, scale=1.0, outputs=buffers)
    torch.testing.assert_close(buffers[1], torch.tensor([torch.inf, torch.nan]), equal_nan=True)


def test_a_unit_waits_for_the_last_rank_and_all_ranks_sleep_meanwhile() -> None:
    def act(control: ControlPlane) -> None:
        transport = SharedMemoryTransport(control)
        transport.open_streams([StreamSpec(0)])
        buffer = shared(control, torch.ones(4))
        control.barrier()
        if control.rank:
            work = reduce(transport, buffer, 0, 4)
            assert not work.wait(0.05)
            assert buffer.tensor.tolist() == [1.0] * 4
        control.barrier()
        if not control.rank:
            work = reduce(transport, buffer, 0, 4)
        assert work.wait(10.0)
        assert buffer.tensor.tolist() == [3.0] * 4
        control.barrier()
        transport.close()

    on_planes(SIZE, act)


class Crossing:
    """Reduces over the nodes through the control plane; what it is asked for is noted."""

    kind, max_streams, threads = TransportKind.GLOO, 7, ()
    stream_cost = StreamCost(descriptors=5, threads=2)

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.opened: list[StreamSpec] = []
        self.ranges: list[tuple[int, int]] = []
        self.closed = False

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        self.opened += streams

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        self.ranges.append((start, stop))
        unit = buffer.tensor[start:stop]
        return _Crosses(self._comm, unit, Op(op.value), scale) if unit.numel() else NOTHING_TO_DO

    def close(self) -> bool:
        self.closed = True
        return True


class _Crosses:
    def __init__(self, comm: Communicator, unit: torch.Tensor, op: Op, scale: float) -> None:
        self._comm, self._unit, self._scale = comm, unit, scale
        self._test = comm.all_reduce(unit.numpy(), op)

    def wait(self, timeout_s: float) -> bool:
        wait_for(self._test, failures=self._comm.failures)
        self._unit.mul_(self._scale)
        return True

    def is_done(self) -> bool:
        return self._test()

    def times(self) -> tuple[None, None]:
        return None, None


def test_where_nodes_are_of_different_sizes_some_ranks_carry_nothing_across() -> None:
    def act(control: ControlPlane) -> list[tuple[int, int]]:
        # Ranks 0 and 1 are on one node, rank 2 is alone.
        control.local_sizes = [2, 2, 1]
        control.node_ranks = [2] if control.rank == 2 else [0, 1]
        control.local_rank, control.local_size = control.node_ranks.index(control.rank), len(control.node_ranks)
        across = control.comm.subset([0, 2] if control.local_rank == 0 else [1])
        crossings: list[Crossing] = []

        def make() -> Crossing:
            crossings.append(Crossing(across))
            return crossings[-1]

        transport = SharedMemoryTransport(control, across=make)
        transport.open_streams([StreamSpec(0)])
        buffer = shared(control, values(control.rank, 5))
        control.barrier()
        assert reduce(transport, buffer, 0, 5).wait(10.0)
        control.barrier()
        assert torch.equal(buffer.tensor.double(), wanted(3, 5))
        control.barrier()
        transport.close()
        return crossings[1].ranges

    assert on_planes(3, act) == [[(0, 5)], [(0, 0)], [(0, 5)]]


def test_the_last_rank_to_post_a_unit_needs_no_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = Doorbell.listen
    monkeypatch.setattr(Doorbell, "listen", lambda bell, timeout_s: listen(bell, 60.0))

    def act(control: ControlPlane) -> None:
        transport = SharedMemoryTransport(control)
        transport.open_streams([StreamSpec(0)])
        assert reduce(transport, shared(control, torch.ones(2)), 0, 2).wait(20.0)
        transport.close()

    on_planes(1, act)


def test_a_failure_across_the_nodes_is_reported_on_this_rank() -> None:
    class Fails(Crossing):
        def all_reduce(self, *args: Any, **named: Any) -> Work:
            class Failed(_Crosses):
                def __init__(self) -> None:
                    pass

                def wait(self, timeout_s: float) -> bool:
                    raise CommError("the link is gone")

            return Failed()

    def act(control: ControlPlane) -> None:
        transport = SharedMemoryTransport(control, across=lambda: Fails(control.cross))
        transport.open_streams([StreamSpec(0)])
        work = reduce(transport, shared(control, torch.ones(2)), 0, 2)
        until(lambda: control.failures.error is not None)
        assert str(control.failures.error) == "the link is gone"
        assert not work.is_done()
        transport.close()

    on_planes(1, act)


def test_a_rank_that_exits_fails_operations_that_wait_for_it_and_nothing_else() -> None:
    def act(control: ControlPlane) -> None:
        transport = SharedMemoryTransport(control)
        transport.open_streams([StreamSpec(0)])
        buffer = shared(control, torch.ones(4))
        if control.rank == 0:
            (stream,) = transport.streams
            ended, listen = [1], stream._doorbell.listen
            stream._doorbell.listen = lambda timeout_s: [ended.pop()] if ended else listen(0.01)  # type: ignore[method-assign]
            stream._doorbell.ring_own()
            until(lambda: not ended)
            assert control.failures.error is None
            work = reduce(transport, buffer, 0, 4)
            ended += [1, 1]  # as where two ranks end at once
            with pytest.raises(PeerLostError, match="rank 1 has ended while rank 0 waited for its gradients"):
                work.wait(10.0)
            until(lambda: not ended)
            assert isinstance(control.failures.error, PeerLostError)
        transport.close()

    on_planes(2, act)


def test_an_error_in_a_streams_thread_is_reported_to_its_waiters_only() -> None:
    def act(control: ControlPlane) -> None:
        transport = SharedMemoryTransport(control)
        transport.open_streams([StreamSpec(0)])
        reduce(transport, FlatBuffer(torch.ones(2), (torch.ones(2), "no tensor")), 0, 2)  # type: ignore[arg-type]
        until(lambda: control.failures.error is not None)
        assert "shared memory failed on rank 0: " in str(control.failures.error)
        assert control.failures.error.__cause__ is not None
        transport.close()

    on_planes(1, act)


def test_a_stream_that_one_rank_cannot_open_is_closed_on_all_and_training_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlucky: set[int] = set()

    class Scarce(threading.Thread):
        def start(self) -> None:
            if threading.get_ident() in unlucky and self.name.startswith("sirtaki-shm"):
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(shared_memory.threading, "Thread", Scarce)

    def act(control: ControlPlane) -> None:
        transport = SharedMemoryTransport(control)
        transport.open_streams([StreamSpec(0)])
        control.barrier()
        before = len(descriptors())
        control.barrier()
        if control.rank == 1:
            unlucky.add(threading.get_ident())
        with pytest.raises(TransportError, match="rank 1: shared-memory stream 1: can't start new thread"):
            transport.open_streams([StreamSpec(2)])
        control.barrier()
        assert len(descriptors()) <= before + 1  # whoever lists them opens one
        assert len(transport.streams) == 1
        buffer = shared(control, torch.ones(4))
        control.barrier()
        assert reduce(transport, buffer, 0, 4).wait(10.0)
        assert buffer.tensor.tolist() == [2.0] * 4
        control.barrier()
        transport.close()

    on_planes(2, act)


def test_a_closed_transport_leaves_no_thread_and_no_descriptor_and_closing_twice_is_fine() -> None:
    def act(control: ControlPlane) -> None:
        before = len(os.listdir("/proc/self/fd"))
        transport = SharedMemoryTransport(control)
        transport.open_streams([StreamSpec(1)])
        taken = len(os.listdir("/proc/self/fd")) - before
        assert 0 < taken <= 2 * transport.stream_cost.descriptors
        threads = [thread for stream in transport.streams for thread in stream._threads]
        assert len(threads) == 2 * transport.stream_cost.threads
        assert transport.close()
        assert transport.close()
        assert not any(thread.is_alive() for thread in threads)
        assert len(os.listdir("/proc/self/fd")) == before

    on_planes(1, act)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_memory_lives_as_long_as_a_reference_and_no_descriptor_stays_open() -> None:
    kept: dict[int, torch.Tensor] = {}

    def act(control: ControlPlane) -> None:
        before = descriptors() if control.rank == 0 else set()
        control.barrier()
        for _ in range(3):
            regions = share_memory(control, 64)
        regions[control.rank].fill_(7)
        control.barrier()
        kept[control.rank] = regions[1 - control.rank]
        del regions  # a rank's own one has a descriptor, for children that it forks
        control.barrier()
        if control.rank == 0:
            assert descriptors() <= before

    on_planes(2, act)
    assert [region.tolist() for region in kept.values()] == [[7] * 64] * 2


@pytest.mark.parametrize("how", ["no memory", "no descriptor", "cannot be mapped"])
def test_memory_that_one_rank_cannot_share_is_an_error_on_all_and_leaves_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlucky: set[int] = set()

    def guarded(function: Any, error: Exception) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if threading.get_ident() in unlucky:
                raise error
            return function(*args, **named)

        return call

    if how == "no memory":
        monkeypatch.setattr(shared_memory.os, "posix_fallocate", guarded(os.posix_fallocate, OSError(28, "no space")))
    elif how == "no descriptor":
        monkeypatch.setattr(shared_memory.os, "memfd_create", guarded(os.memfd_create, OSError(24, "too many files")))
    else:
        monkeypatch.setattr(shared_memory, "_mapped", guarded(shared_memory._mapped, RuntimeError("mmap failed")))

    def act(control: ControlPlane) -> str:
        if control.rank == 1:
            unlucky.add(threading.get_ident())
        before = descriptors() if control.rank == 0 else set()
        control.barrier()
        with pytest.raises(TransportError) as caught:
            share_memory(control, 64)
        message = str(caught.value)
        del caught  # whose traceback has what was mapped
        gc.collect()
        control.barrier()
        if control.rank == 0:
            assert descriptors() <= before
        return message

    messages = on_planes(SIZE, act)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0]
    assert {"no memory": "no space", "no descriptor": "too many", "cannot be mapped": "64 bytes"}[how] in messages[0]


def test_a_file_that_differs_from_the_offered_one_means_another_container() -> None:
    def act(control: ControlPlane) -> None:
        offered, other = os.pipe()
        control.barrier()
        before = descriptors() if control.rank == 0 else set()  # whoever lists them opens one
        control.barrier()
        wrong = control.rank == 1
        gather = control.all_gather
        # What rank 1 says is true of another process namespace.
        control.all_gather = lambda value: gather(  # type: ignore[method-assign]
            (value[0], value[1], 12345, value[3]) if wrong and isinstance(value, tuple) else value
        )
        with pytest.raises(TransportError, match="of rank 1 belongs to a different process here, because"):
            open_peers(control, offered, os.O_RDONLY)
        control.barrier()
        if control.rank == 0:
            assert descriptors() <= before
        control.barrier()
        os.close(offered)
        os.close(other)

    on_planes(2, act)


def test_ringing_never_blocks_and_a_closed_bell_does_no_harm() -> None:
    def act(control: ControlPlane) -> None:
        bell = Doorbell(control)
        for _ in range(70_000):  # more than a pipe holds
            bell.ring_own()
        control.barrier()
        if control.rank == 1:
            bell.close()
        control.barrier()
        if control.rank == 0:
            bell.ring_peers()
            bell.close()

    on_planes(2, act)


def test_a_doorbell_leaves_no_descriptor_whether_it_was_hung_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_peers(*args: Any) -> list[int]:
        raise TransportError("rank 1: no such process")

    def act(control: ControlPlane) -> None:
        before = descriptors()
        bell = Doorbell(control)
        bell.close()
        bell.close()
        assert descriptors() == before
        monkeypatch.setattr(shared_memory, "open_peers", no_peers)
        with pytest.raises(TransportError, match="no such process"):
            Doorbell(control)
        assert descriptors() == before

    on_planes(1, act)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_exit_of_a_process_of_the_node_is_reported_once(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:

        def no_pidfd(pid: int) -> int:
            raise OSError(38, "not implemented")

        monkeypatch.setattr(shared_memory.os, "pidfd_open", no_pidfd)
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    inbox, outbox = os.pipe()
    control: Any = SimpleNamespace(
        rank=0, local_rank=0, local_size=2, node_ranks=[0, 1], all_gather=lambda value: [value, other.pid]
    )
    monkeypatch.setattr(shared_memory, "open_peers", lambda control, own, flags, problem: [os.dup(own), outbox])
    try:
        bell = Doorbell(control)
        assert bell.listen(0.01) == []
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert bell.listen(5.0 if has_pidfd else 0.01) == [1]
        assert bell.listen(0.01) == []
        bell.close()
    finally:
        other.communicate()
        os.close(inbox)
