"""Memory and doorbells that ranks of one node share; in these tests they are threads of one process."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.transports import shared_memory
from sirtaki.comm.transports.shared_memory import Doorbell, _is_alive, open_peers, share_memory
from sirtaki.errors import TransportError

SIZE = 3


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_what_one_rank_writes_all_of_its_node_read() -> None:
    def act(control: ControlPlane) -> None:
        regions = share_memory(control, 100)
        assert [region.shape for region in regions] == [(100,)] * SIZE
        assert [int(region.max()) for region in regions] == [0] * SIZE
        control.barrier()
        regions[control.rank].fill_(control.rank + 1)
        control.barrier()
        assert [region.unique().tolist() for region in regions] == [[1], [2], [3]]

    on_planes(SIZE, act)


def test_each_node_has_regions_of_its_own() -> None:
    def act(control: ControlPlane) -> None:
        regions = share_memory(control, 1)
        assert len(regions) == 2
        regions[control.local_rank].fill_(10 * control.cross_rank + control.local_rank)
        control.barrier()
        assert [int(region) for region in regions] == [10 * control.cross_rank, 10 * control.cross_rank + 1]

    on_planes(4, act, local_size=2)


def test_a_region_without_bytes_is_one() -> None:
    assert on_planes(2, lambda control: [region.numel() for region in share_memory(control, 0)]) == [[0, 0]] * 2


def test_memory_lives_as_long_as_somebody_holds_it_and_no_descriptor_stays_open() -> None:
    kept: dict[int, torch.Tensor] = {}

    def act(control: ControlPlane) -> None:
        before = descriptors() if control.rank == 0 else set()
        control.barrier()
        for _ in range(3):
            regions = share_memory(control, 64)
        regions[control.rank].fill_(7)
        control.barrier()
        kept[control.rank] = regions[1 - control.rank]
        if control.rank == 0:
            assert descriptors() <= before

    on_planes(2, act)
    assert [region.tolist() for region in kept.values()] == [[7] * 64] * 2


@pytest.mark.parametrize("how", ["no memory", "no descriptor", "cannot be mapped"])
def test_what_one_rank_cannot_share_is_an_error_on_all_and_leaves_nothing(
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
        control.barrier()
        if control.rank == 0:
            assert descriptors() <= before
        return str(caught.value)

    messages = on_planes(SIZE, act)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0]
    assert {"no memory": "no space", "no descriptor": "too many", "cannot be mapped": "64 bytes"}[how] in messages[0]


def test_a_file_that_is_not_the_one_that_was_offered_means_another_container() -> None:
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
        with pytest.raises(TransportError, match="is not rank 1: they live in different containers"):
            open_peers(control, offered, os.O_RDONLY)
        control.barrier()
        if control.rank == 0:
            assert descriptors() <= before
        control.barrier()
        os.close(offered)
        os.close(other)

    on_planes(2, act)


def test_a_doorbell_wakes_the_others_or_oneself_and_nobody_without_it() -> None:
    def act(control: ControlPlane) -> None:
        bell = Doorbell(control)
        control.barrier()
        assert heard(bell) == 0
        control.barrier()
        if control.rank == 0:
            bell.ring_others()
        control.barrier()
        assert heard(bell) == (control.rank != 0)
        bell.ring_own()
        assert heard(bell) == 1
        for _ in range(3):
            bell.ring_own()
        assert bell.listen(1.0) == []  # nobody has ended
        assert heard(bell) == 0  # one look for all three
        control.barrier()
        bell.close()

    on_planes(SIZE, act)


def heard(bell: Doorbell) -> int:
    """Whether somebody has rung."""
    rung = bool(bell._poll.poll(0))
    bell.listen(0.0)
    return rung


def test_ringing_never_blocks_and_who_has_closed_the_bell_hurts_nobody() -> None:
    def act(control: ControlPlane) -> None:
        bell = Doorbell(control)
        for _ in range(70_000):  # more than a pipe holds
            bell.ring_own()
        control.barrier()
        if control.rank == 1:
            bell.close()
        control.barrier()
        if control.rank == 0:
            bell.ring_others()
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
def test_the_end_of_a_process_of_the_node_is_told_once(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:

        def no_pidfd(pid: int) -> int:
            raise OSError(38, "not implemented")

        monkeypatch.setattr(shared_memory.os, "pidfd_open", no_pidfd)
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    inbox, outbox = os.pipe()
    control: Any = SimpleNamespace(rank=0, local_rank=0, node_ranks=[0, 1], all_gather=lambda value: [value, other.pid])
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


def test_a_process_that_has_ended_is_not_alive_even_if_nobody_has_waited_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not _is_alive(process.pid)
    process.communicate()  # which closes its input, too
    assert not _is_alive(process.pid)
