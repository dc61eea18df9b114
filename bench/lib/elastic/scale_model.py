"""What recovery takes where there are more ranks than anybody has here: messages counted, time by a model.

A message is on its way for `Machine.near_s` within a rack and `far_s` across; sending one, and taking one, keeps a
rank's core busy for `message_s`. Rounds of the mesh are those of the shipped mesh, played rank by rank; the
other phases are counted: who sends how many messages to whom.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sirtaki.comm.control import mesh
from sirtaki.comm.control.communicator import Array, Op
from sirtaki.comm.control.mesh_links import Sending


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The model.

    Attributes:
        ranks_per_host, hosts_per_rack: consecutive ones.
        near_s, far_s: one way within a rack, and across.
        message_s: of a core, for a message sent or taken.
        handshake_s: of a core, for its part in a connection's proof.
        bytes_per_s: of a host's link.
    """

    ranks_per_host: int = 8
    hosts_per_rack: int = 32
    near_s: float = 50e-6
    far_s: float = 200e-6
    message_s: float = 10e-6
    handshake_s: float = 100e-6
    bytes_per_s: float = 1.25e9

    def latency_s(self, one: int, other: int) -> float:
        """Between two ranks."""
        rack = self.ranks_per_host * self.hosts_per_rack
        return self.near_s if one // rack == other // rack else self.far_s


_SENT = Sending()
_SENT.done = True


@dataclass(slots=True)
class _Rank:
    """One rank of a barrier; see `Exchange`."""

    rank: int
    size: int
    play: Rounds
    free_s: float = 0.0
    arrived: defaultdict[int, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def send(self, array: Array, rank: int) -> Sending:
        self.free_s += self.play.machine.message_s
        self.play.carry(self.rank, rank, self.free_s)
        return _SENT

    def receive(self, array: Array, rank: int) -> Iterator[None]:
        while not self.arrived[rank]:
            yield
        self.free_s = max(self.free_s, self.arrived[rank].popleft()) + self.play.machine.message_s


class Rounds:
    """The shipped barrier over so many ranks, which all begin at once.

    Attributes:
        messages: in all.
        seconds: until the last rank is through.
        partners: of one rank, that it sends to; the most.
    """

    def __init__(self, size: int, machine: Machine) -> None:
        self.machine = machine
        self.messages = 0
        self._events: list[tuple[float, int, int]] = []
        peers: list[set[int]] = [set() for _ in range(size)]
        self._peers = peers
        ranks = [_Rank(rank, size, self) for rank in range(size)]
        nothing = np.empty(0, dtype=np.uint8)
        steps = [mesh.disseminate(rank, nothing, Op.AND) for rank in ranks]
        over = [next(each, True) is True for each in steps]
        while self._events:
            at_s, source, target = heapq.heappop(self._events)
            ranks[target].arrived[source].append(at_s)
            if not over[target]:
                over[target] = next(steps[target], True) is True
        assert all(over)
        self.seconds = max(rank.free_s for rank in ranks)
        self.partners = max(map(len, peers))

    def carry(self, source: int, target: int, at_s: float) -> None:
        """A message has been sent."""
        self.messages += 1
        self._peers[source].add(target)
        heapq.heappush(self._events, (at_s + self.machine.latency_s(source, target), source, target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of recovery.

    Attributes:
        name: what happens.
        messages: in all.
        busiest: messages that the busiest process sends and takes.
        seconds: by the model.
    """

    name: str
    messages: int
    busiest: int
    seconds: float


def phases(size: int, machine: Machine, *, member_bytes: int, decide_s: float) -> list[Phase]:
    """Recovery from the death of one rank.

    Args:
        size: ranks.
        machine: the model.
        member_bytes: of a generation's list, a member.
        decide_s: what the driver computes, once all have asked, and to write what it sends.
    """
    hosts = -(-size // machine.ranks_per_host)
    far_s = machine.far_s if hosts > machine.hosts_per_rack else machine.near_s
    others, message_s = size - 1, machine.message_s
    list_bytes = size * member_bytes
    rounds = Rounds(size, machine)
    return [
        # All connections of the dead rank end at once: everybody sees that, and tells everybody.
        Phase(
            name="lost: each tells all",
            messages=others * (others - 1),
            busiest=2 * others,
            seconds=2 * far_s + 2 * others * message_s,
        ),
        Phase(
            name="asked: rank, agent, driver",
            messages=2 * others,
            busiest=others,
            seconds=2 * far_s + (machine.ranks_per_host + others) * message_s,
        ),
        Phase(
            name="formed: driver, agent, rank",
            messages=hosts + others,
            busiest=hosts,
            seconds=decide_s
            + 2 * far_s
            + (hosts + machine.ranks_per_host) * message_s
            + hosts * list_bytes / machine.bytes_per_s,
        ),
        # Each connects to those before it, one after the other: four messages, the first two of them TCP's.
        Phase(
            name="met: each with each",
            messages=others * (others - 1) // 2 * 6,
            busiest=6 * others,
            seconds=others * (6 * far_s + machine.handshake_s),
        ),
        Phase(
            name="settled: two gathers and a barrier",
            messages=3 * rounds.messages,
            busiest=6 * (size - 1).bit_length(),
            seconds=3 * rounds.seconds + 2 * size * 64 / machine.bytes_per_s,
        ),
    ]
