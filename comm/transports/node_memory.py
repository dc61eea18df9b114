"""Memory and doorbells that the ranks of one node share.

Anonymous memory files and pipes, opened by the other ranks through `/proc/PID/fd`: nothing has a name that could be
left behind, a killed rank leaks nothing, and the size of /dev/shm does not matter (docs/decisions/0040).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
from typing import TYPE_CHECKING

import torch

from sirtaki.errors import CommError, TransportError
from sirtaki.machine import process_fields

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)


def open_peers(control: ControlPlane, descriptor: int, flags: int, problem: str = "") -> list[int]:
    """Collective over the job: opens the file that each rank of this node offers.

    Args:
        control: the ranks.
        descriptor: what this rank offers; may be closed afterwards. -1 = it has none because of `problem`.
        flags: as for `os.open`.
        problem: what went wrong on this rank already.

    Returns:
        Descriptors by local rank, this rank's among them; the caller closes them.

    Raises:
        TransportError: on all ranks alike, if any rank could not open one.
    """
    inode = -1 if problem else os.fstat(descriptor).st_ino
    offers = control.all_gather((os.getpid(), descriptor, inode, problem))
    problems = [offer[3] for offer in offers if offer[3]]
    opened: list[int] = []
    if not problems:
        try:
            for rank in control.node_ranks:
                pid, number, expected, _ = offers[rank]
                opened.append(os.open(f"/proc/{pid}/fd/{number}", flags))
                if os.fstat(opened[-1]).st_ino != expected:
                    raise OSError(f"process {pid} is not rank {rank}: they live in different containers")
        except OSError as err:
            problem = f"rank {control.rank}: {err}"
        # This gather also tells everyone that the descriptors on offer have been opened.
        problems = [text for text in control.all_gather(problem) if text]
    if problems:
        for number in opened:
            os.close(number)
        raise TransportError(f"ranks of one node cannot share memory: {problems[0]}")
    return opened


def share_memory(control: ControlPlane, size_bytes: int) -> list[torch.Tensor]:
    """Collective over the job: one zeroed region a rank, mapped by all ranks of its node.

    The memory lives as long as any rank holds a tensor of it.

    Returns:
        The regions of this node by local rank, uint8, `(size_bytes,)` each.

    Raises:
        TransportError: on all ranks alike, if any rank could not map a region.
    """
    length, descriptor, problem = max(1, size_bytes), -1, ""
    try:
        descriptor = os.memfd_create("sirtaki")
        # Reserving the pages now turns "out of memory" into an error here instead of a SIGBUS in mid-training.
        os.posix_fallocate(descriptor, 0, length)
    except (OSError, AttributeError) as err:  # AttributeError: not Linux
        problem = f"rank {control.rank}: {err}"
    peers: list[int] = []
    try:
        peers = open_peers(control, descriptor, os.O_RDWR, problem)
        try:
            regions = [_mapped(peer, length)[:size_bytes] for peer in peers]
        except (OSError, RuntimeError, MemoryError) as err:
            regions, problem = [], f"{length} bytes of shared memory cannot be mapped: {err}"
        control.agree_on_success(problem)
        return regions
    finally:
        for number in (*peers, descriptor):
            if number >= 0:
                os.close(number)


def _mapped(descriptor: int, length: int) -> torch.Tensor:
    """The memory behind `descriptor`, of which, unlike with `mmap.mmap`, no duplicate is kept open."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8)


class Doorbell:
    """Wakes a thread of each rank of the node: a pipe a rank, into which the others write single bytes.

    A byte carries no meaning: who is woken looks at the shared counters. A full pipe means that a wake-up is pending
    already, so ringing never blocks. The system calls also order the memory accesses of the two sides.
    """

    def __init__(self, control: ControlPlane) -> None:
        """Collective over the job.

        Raises:
            TransportError: see `open_peers`.
        """
        self._inbox = offered = -1
        self._outboxes: list[int] = []
        self._lives: dict[int, int] = {}  # descriptor of a peer's process → its rank
        self._polled: dict[int, int] = {}  # process number of a peer without such a descriptor → its rank
        problem = ""
        try:
            self._inbox, offered = os.pipe()
            os.set_blocking(self._inbox, False)
        except OSError as err:
            problem = f"rank {control.rank}: no pipe: {err}"
        try:
            self._outboxes = open_peers(control, offered, os.O_WRONLY | os.O_NONBLOCK, problem)
        except CommError:
            self.close()
            raise
        finally:
            if offered >= 0:
                os.close(offered)
        self._own = self._outboxes[control.local_rank]
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        pids = control.all_gather(os.getpid())
        for rank in control.node_ranks:
            if rank != control.rank:
                self._watch(pids[rank], rank)

    def _watch(self, pid: int, rank: int) -> None:
        """From now on notices the end of that process."""
        try:
            life = os.pidfd_open(pid)
        except (OSError, AttributeError) as err:  # kernels before 5.3, sandboxes, no descriptor left
            _say_once(f"the end of other ranks is looked for in /proc, as pidfd_open() does not work here ({err})")
            self._polled[pid] = rank
        else:
            self._lives[life] = rank
            self._poll.register(life, select.POLLIN)

    def ring_others(self) -> None:
        """Wakes the listening thread of every other rank of the node."""
        for outbox in self._outboxes:
            if outbox != self._own:
                self._ring(outbox)

    def ring_own(self) -> None:
        """Wakes this rank's listening thread."""
        self._ring(self._own)

    @staticmethod
    def _ring(outbox: int) -> None:
        # Pending wake-ups suffice; a peer that is gone is noticed by its process descriptor.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(outbox, b"\0")

    def listen(self, timeout_s: float) -> list[int]:
        """Blocks until somebody rings or dies, at most `timeout_s`.

        Returns:
            Ranks of this node that have ended; each is named once.
        """
        dead = []
        ready = self._poll.poll(timeout_s * 1000)
        if not ready:
            dead = [self._polled.pop(pid) for pid in list(self._polled) if not _is_alive(pid)]
        for descriptor, _ in ready:
            if descriptor == self._inbox:
                os.read(self._inbox, 65536)
            else:
                self._poll.unregister(descriptor)
                dead.append(self._lives.pop(descriptor))
                os.close(descriptor)
        return dead

    def close(self) -> None:
        """Closes the pipes. Nobody may listen any more; others may still ring."""
        for descriptor in (self._inbox, *self._outboxes, *self._lives):
            if descriptor >= 0:
                os.close(descriptor)
        self._inbox, self._outboxes, self._lives = -1, [], {}


def _is_alive(pid: int) -> bool:
    """Whether a process of this node has not ended; a zombie has."""
    try:
        return process_fields(pid)[0] not in "ZX"
    except OSError:
        return False


@functools.cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)
