"""The control planes of many ranks in one process: the product's code on a simulated system.

`python -m bench.simulated_scale` prints what each rank and rank 0 use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from simulation.system import LOOPBACK, Socket, Store, System, Thread, Usage, installed

from sirtaki.comm.control.handshake import Acceptor, connect, job_key
from sirtaki.comm.control.members import (
    Listeners,
    Member,
    Membership,
    StoreExchange,
    connect_members,
    listening,
    open_listeners,
    rendezvous,
)
from sirtaki.comm.control.mesh import Links, MeshCommunicator
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.stragglers import StragglerWatch
from sirtaki.comm.control.waiting import Deadline, Poll, retry, wait_for
from sirtaki.comm.control.watchdog import MessageBoard, PendingWait, Watchdog
from sirtaki.comm.gradients.negotiation import agree
from sirtaki.errors import CommError

T = TypeVar("T")

HEARTBEAT_S = 30.0
RANKS_PER_HOST = 8


@dataclass
class Run:
    """What ranks did in one call of `Job.on_all`.

    Attributes:
        results: result or error of each rank, by rank. None for ranks that did not take part or have died.
        seconds: simulated time.
        used: what each rank has used, by rank.
    """

    results: list[Any]
    seconds: float
    used: list[Usage]

    def most(self, what: str) -> float:
        """Return the largest value of a resource of all ranks but rank 0."""
        return max(getattr(each, what) for each in self.used[1:])

    def total(self, what: str) -> float:
        return sum(getattr(each, what) for each in self.used)

    @property
    def errors(self) -> list[Exception]:
        return [each for each in self.results if isinstance(each, Exception)]


class Job:
    """Ranks on hosts of a simulated system."""

    def __init__(self, system: System, size: int) -> None:
        self.system, self.size = system, size
        self.ranks = [system.process(f"10.0.{rank // RANKS_PER_HOST}.1") for rank in range(size)]
        self.comms: dict[int, MeshCommunicator] = {}
        self.controls: dict[int, ControlPlane] = {}
        self.watchdogs: dict[int, Watchdog] = {}
        self.stragglers: dict[int, StragglerWatch] = {}
        self.meetings = 0

    def on_all(
        self,
        act: Callable[[int], object],
        *,
        ranks: Sequence[int] | None = None,
        late_s: dict[int, float] | None = None,
        limit_s: float = 1000.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Run:
        """Call `act` with each rank's number in a thread of the rank. Run the system until all have returned.

        Args:
            act: the call. An error that it raises becomes the rank's result.
            ranks: ranks that take part. None = all that live.
            late_s: seconds after which a rank begins, by rank.
            limit_s: limit of the simulated time.
            meanwhile: called when all have begun.
        """
        results: list[Any] = [None] * self.size
        begin_s, before = self.system.sim.now_s, [each.usage.copy() for each in self.ranks]

        def run(rank: int) -> None:
            self.system.pause((late_s or {}).get(rank, 0.0))
            try:
                results[rank] = act(rank)
            except Exception as err:
                results[rank] = err
            running.discard(rank)

        chosen = range(self.size) if ranks is None else ranks
        running = {rank for rank in chosen if self.ranks[rank].alive}
        for rank in sorted(running):
            Thread(target=run, args=(rank,), process=self.ranks[rank]).start()
        self.system.sim.later(1e-3, meanwhile)
        self.system.run(lambda: not running or not any(self.ranks[rank].alive for rank in running), limit_s)
        used = [each.usage - earlier for each, earlier in zip(self.ranks, before, strict=True)]
        return Run(results, self.system.sim.now_s - begin_s, used)

    def meet(self, *, timeout_s: float = 300.0, **how: Any) -> Run:
        """Let all ranks that live find each other at the key-value store, and connect."""
        self.meetings += 1
        living = [rank for rank, process in enumerate(self.ranks) if process.alive]

        def act(rank: int) -> None:
            deadline, store = Deadline.after(timeout_s), Store(self.system, self.ranks[rank])
            exchange = StoreExchange(
                store,  # type: ignore[arg-type]
                living,
                own=rank,
                size=len(living),
                place="the store",
                deadline=deadline,
                prefix=f"{self.meetings}/",
            )
            assert exchange.claim()
            self.comms[rank] = rendezvous(
                exchange,
                rank=living.index(rank),
                number=rank,
                interface=None,
                secret=None,
                deadline=deadline,
                heartbeat_s=HEARTBEAT_S,
            )

        return self.on_all(act, **how)

    def recover(self) -> Run:
        """Let the ranks that are left close their connections, and meet again, as in an elastic job."""
        self.on_all(lambda rank: self.comms[rank].free())
        return self.meet()

    def open(self) -> Run:
        """Open the control planes, in which all ranks learn the hosts of all."""

        def act(rank: int) -> None:
            self.controls[rank] = ControlPlane(self.comms[rank])

        return self.on_all(act)

    def address(self) -> Run:
        """Let all ranks measure the round trip to rank 0."""
        return self.on_all(lambda rank: self.controls[rank].address())

    def sum(self, gradients: int = 1000) -> Run:
        """Let all ranks sum an array, as they do for the order of gradients."""
        return self.on_all(lambda rank: self.controls[rank].total(np.full(gradients, float(rank))).tolist())

    def agree(self, gradients: int = 1000, **how: Any) -> Run:
        """Let all ranks agree about which gradients are ready: rank r lacks gradient r."""

        def act(rank: int) -> int:
            comm = self.comms[rank]
            bits = np.ones(gradients, dtype=np.bool_)
            bits[rank % gradients] = False
            agreed = agree(bits, comm=comm, failures=comm.failures)
            assert agreed is not None
            return int(agreed.sum())

        return self.on_all(act, **how)

    def rest(self, seconds: float) -> Run:
        """Let all ranks do nothing for a time, except for what they do in the background."""
        return self.on_all(lambda rank: self.system.pause(seconds))

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def lose(self, lost: int, *, silently: bool = False) -> Run:
        """Let a rank die while the others wait for it in an agreement. They end the job, as after an exception.

        Args:
            lost: the rank.
            silently: end its whole host, without a message to other hosts.
        """
        host = [rank for rank in self.ranks if silently and rank.host == self.ranks[lost].host]

        def die() -> None:
            for each in host or [self.ranks[lost]]:
                each.kill(silently=silently)

        def act(rank: int) -> str:
            comm = self.comms[rank]
            try:
                agree(np.ones(1000, dtype=np.bool_), comm=comm, failures=comm.failures)
            except CommError as err:
                comm.abort(f"rank {rank} raised {type(err).__name__}: {err}")
                return str(err)
            return "no error"

        return self.on_all(act, ranks=[rank for rank in range(self.size) if rank != lost], meanwhile=die)

    def watch(self, *, warning_s: float, shutdown_s: float | None = None) -> Run:
        """Start the watchdogs, which also compare the times that ranks take for an iteration."""

        def act(rank: int) -> None:
            comm = self.comms[rank]
            courier = MessageBoard(comm.duplicate())
            stragglers = self.stragglers[rank] = StragglerWatch(courier, [each.host for each in self.ranks])
            self.watchdogs[rank] = Watchdog(
                courier, comm.failures, warning_s=warning_s, shutdown=lambda: shutdown_s, also=stragglers.check
            )

        return self.on_all(act)

    def hang(self, hanging: int, seconds: float) -> Run:
        """Let all ranks but one wait in an agreement for some time. The watchdogs must find out who is missing."""

        def act(rank: int) -> str:
            if rank == hanging:
                self.system.pause(seconds)
            wait = PendingWait(what="gradient 7", since_s=self.system.now_s())
            self.watchdogs[rank].watch(lambda: wait, lambda: "")
            comm = self.comms[rank]
            try:
                agree(np.ones(1000, dtype=np.bool_), comm=comm, failures=comm.failures)
            except CommError as err:
                return str(err)
            self.watchdogs[rank].unwatch(self.watchdogs[rank]._waits[-1], self.watchdogs[rank]._progress[-1])
            return ""

        return self.on_all(act)

    def train(self, iterations: int, slow: int, factor: float) -> Run:
        """Let all ranks train. One of them computes for longer, and all wait for it."""

        def act(rank: int) -> None:
            comm = self.comms[rank]
            for _ in range(iterations):
                self.system.pause(0.5 * (factor if rank == slow else 1.0))
                begun_s = self.system.now_s()
                agree(np.ones(1000, dtype=np.bool_), comm=comm, failures=comm.failures)
                self.stragglers[rank].iteration_ended(self.system.now_s() - begun_s, counts=True)

        return self.on_all(act)

    def leave(self) -> Run:
        """End the job: all ranks tell each other that they have ended, and close their connections."""

        def act(rank: int) -> bool:
            left = self.watchdogs[rank].leave(60.0)
            self.watchdogs[rank].close()
            self.comms[rank].free()
            return left

        return self.on_all(act)

    # ── parts of a mesh, for many ranks ──────────────────────────────────────────────────────────────────────────

    def link(self, peers: Callable[[int], Iterable[int]], *, heartbeat_s: float = HEARTBEAT_S) -> Run:
        """Connect each rank to `peers(rank)` only, without handshakes. A rank must send to no other peer."""
        sockets: list[dict[int, Socket]] = [_Peers(self.size) for _ in self.ranks]
        for rank, process in enumerate(self.ranks):
            for other in peers(rank):
                if other != rank and other not in sockets[rank]:
                    one, two = Socket(process), Socket(self.ranks[other])
                    one.peer, two.peer = two, one
                    sockets[rank][other], sockets[other][rank] = one, two

        def act(rank: int) -> None:
            links = Links(rank, sockets[rank], heartbeat_s=heartbeat_s)  # type: ignore[arg-type]
            self.comms[rank] = MeshCommunicator(links)

        return self.on_all(act)

    def exchange(self) -> Run:
        """Let rank 0 collect the addresses of all at the store, and rank 1 read its table. The others read nothing."""

        def act(rank: int) -> int:
            store, deadline = Store(self.system, self.ranks[rank]), Deadline.after(300.0)
            exchange = StoreExchange(
                store,  # type: ignore[arg-type]
                range(self.size),
                own=rank,
                size=self.size,
                place="the store",
                deadline=deadline,
            )
            table = exchange(Membership(members=(self._member(rank),), name="", secret=""))
            for other in self.ranks[2:]:
                other.alive = False
            return len(table)

        run = self.on_all(act)
        for other in self.ranks:
            other.alive = True
        return run

    def _member(self, rank: int) -> Member:
        address = f"10.0.{rank // RANKS_PER_HOST}.1", 1000 + rank
        return Member(number=rank, host=(address[0],), addresses=((LOOPBACK, 1000 + rank), address))

    def connect_one(self, rank: int, *, apart_s: float = 0.0) -> Run:
        """Connect one rank to all others, which connect to this rank only.

        Args:
            rank: the rank.
            apart_s: seconds between the attempts of two higher ranks.
        """
        listeners: dict[int, Listeners] = {}
        members: dict[int, Member] = {}

        def introduce(own: int) -> None:
            listeners[own] = open_listeners(None) if own <= rank else ()
            members[own] = listening(Member(number=own), listeners[own])

        self.on_all(introduce)
        everybody = tuple(members[own] for own in range(self.size))
        membership = Membership(members=everybody, name="job", secret="secret")
        key = job_key(membership.secret, membership.mesh_name)

        def act(own: int) -> None:
            if own == rank:
                self.comms[rank] = connect_members(
                    membership, listeners[rank], rank=rank, deadline=Deadline.after(300.0), heartbeat_s=HEARTBEAT_S
                )
            elif own < rank:
                acceptor = Acceptor(listeners[own], key=key, own=own, expected=[rank])
                wait_for(lambda: acceptor.is_complete, poll=Poll.SLICES)
                for each in acceptor.close().values():
                    each.setblocking(False)
            else:
                self.system.pause(apart_s * (own - rank))
                addresses = members[rank].addresses
                address = addresses[0] if members[own].host == members[rank].host else addresses[1]
                retry(lambda: connect(address, key=key, own=own, other=rank), OSError, Deadline.after(300.0))

        return self.on_all(act)


class _Peers(dict[int, Socket]):
    """Sockets of some peers, that count as those of all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __len__(self) -> int:
        return self._size - 1


def powers(size: int) -> Callable[[int], Iterable[int]]:
    """Return the peers of a rank in operations that take ⌈log₂ size⌉ messages, and its neighbours in the ring."""
    return lambda rank: ((rank + 2**power) % size for power in range((size - 1).bit_length()))


@contextmanager
def job(size: int) -> Iterator[Job]:
    """Simulate a job of `size` ranks."""
    gc.collect()
    gc.disable()
    try:
        with installed(System()) as system:
            yield Job(system, size)
    finally:
        gc.enable()
