"""Processes, hosts and TCP connections in simulated time.

TCP does not lose single messages. Either a message arrives, in order, or the connection ends. Hence network faults are:

- a *stall*: messages in flight wait until the network has healed, and arrive later. If only one direction is cut, the
  other direction carries a few more messages, until too many are unacknowledged;
- a *break*: messages in flight are lost, and each end notices after a time of its own;
- a host that *vanishes*: no process is notified.

Messages on different connections have no defined order, because each connection has random delays.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from sirtaki.run.elastic.job_members import ToAgent

Message = Any
Address = tuple[str, int]

_TO_AGENT = msgspec.json.Decoder(ToAgent)

DELAY_S = (0.0001, 0.004)
HANDSHAKE_S = 5.0


class Simulator:
    """The clock. Runs events in order of time.

    Attributes:
        now_s: simulated time.
        rng: generator of all random choices.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ordinal = itertools.count()

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._ordinal), what))

    def step(self) -> bool:
        """Run the next event. Return False if there is none."""
        if not self._events:
            return False
        self.now_s, _, what = heapq.heappop(self._events)
        what()
        return True


class Process:
    """A process on a host. It may be frozen, and runs until it exits."""

    def __init__(self, network: Network, host: str, name: str) -> None:
        self.network, self.sim = network, network.sim
        self.host, self.name = host, name
        self.alive = True
        self.exit_code: int | None = None
        self.children: list[Process] = []
        self.ends: list[End] = []
        self._frozen: list[Callable[[], None]] | None = None
        network.processes.append(self)

    def deliver(self, what: Callable[[], None]) -> None:
        """Run `what` in the process as soon as it is not frozen. Drop it if the process has exited."""
        if self._frozen is not None:
            self._frozen.append(what)
        elif self.alive:
            what()

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.sim.later(delay_s, lambda: self.deliver(what))

    def freeze(self) -> None:
        """Freeze the process, as by SIGSTOP."""
        if self._frozen is None:
            self._frozen = []

    def thaw(self) -> None:
        """Continue the process, as by SIGCONT. Run everything that was delivered meanwhile."""
        waiting, self._frozen = self._frozen or [], None
        for what in waiting:
            self.deliver(what)

    def exit(self, code: int = 137, *, silently: bool = False) -> None:
        """End the process and its children. With `silently`, its host is lost, so that peers are not notified."""
        if not self.alive:
            return
        self.alive, self.exit_code, self._frozen = False, code, None
        for child in self.children:
            child.exit(silently=silently)
        for end in list(self.ends):
            if silently:
                end.is_open = False
            else:
                end.close()
        self.network.forget(self)
        self.died()

    def died(self) -> None:
        """Do nothing. Subclasses override this hook, which runs after the exit."""


class End:
    """One end of a connection.

    Attributes:
        is_open: whether this end has not been closed.
    """

    def __init__(self, owner: Process, cable: Cable) -> None:
        self.owner, self._cable = owner, cable
        self.is_open = True
        self.on_message: Callable[[Message], None] = lambda message: None
        self.on_close: Callable[[], None] = lambda: None
        owner.ends.append(self)

    def send(self, message: Message) -> None:
        """Send a message, or drop it if this end is closed. A driver's bytes are decoded as an agent decodes them."""
        if self.is_open:
            self._cable.send(self, _TO_AGENT.decode(message[4:]) if isinstance(message, bytes) else message)

    def close(self) -> None:
        """Close this end. The other end notices after all messages sent before."""
        if self.is_open:
            self._gone()
            self._cable.send(self, None)

    def receive(self, message: Message | None) -> None:
        """Receive a message, or the end of the connection (None)."""
        if not self.is_open:
            return
        if message is None:
            self._gone()
            self.on_close()
        else:
            self.on_message(message)

    def _gone(self) -> None:
        self.is_open = False
        if self in self.owner.ends:
            self.owner.ends.remove(self)


class Cable:
    """A connection: two ends, and the messages in flight."""

    def __init__(self, network: Network, one: Process, other: Process, silence_s: float | None) -> None:
        self._network, self._sim = network, network.sim
        self.ends = End(one, self), End(other, self)
        self._stalled: tuple[deque[Message | None], deque[Message | None]] = deque(), deque()
        self._free_s = [0.0, 0.0]
        self._unacknowledged = [0, 0]
        self._silence_s = silence_s
        self._broken = False

    def send(self, end: End, message: Message | None) -> None:
        """Send a message from an end to the other one."""
        if self._broken:  # this end has not noticed yet
            return
        index = self.ends.index(end)
        there = self.ends[1 - index]
        if self._stalled[index] or self._network.cut(end.owner.host, there.owner.host):
            self._stall(index, message)
        elif self._network.cut(there.owner.host, end.owner.host):
            self._unacknowledged[index] += 1
            if self._unacknowledged[index] > 1 + self._sim.rng.randrange(6):
                self._stall(index, message)
            else:
                self._carry(index, message, 0.0)
        else:
            self._carry(index, message, 0.0)

    def heal(self, wait_s: float) -> None:
        """Deliver stalled messages within `wait_s`, unless a direction is still cut."""
        one, other = (end.owner.host for end in self.ends)
        if self._network.cut(one, other) or self._network.cut(other, one):
            return
        self._unacknowledged = [0, 0]
        for index in (0, 1):
            waiting, delay_s = self._stalled[index], self._sim.rng.uniform(0.0, wait_s)
            while waiting:
                self._carry(index, waiting.popleft(), delay_s)

    def cut_off(self) -> None:
        """Break the connection. Messages in flight and later messages are lost."""
        self._broken = True
        for end, stalled in zip(self.ends, self._stalled, strict=True):
            stalled.clear()
            end.owner.later(self._sim.rng.uniform(0.0, 3.0), lambda end=end: end.receive(None))

    def _carry(self, index: int, message: Message | None, delay_s: float) -> None:
        end = self.ends[1 - index]
        at_s = max(self._free_s[index], self._sim.now_s + delay_s + self._sim.rng.uniform(*DELAY_S))
        self._free_s[index] = at_s

        def arrive() -> None:
            if not self._broken:
                end.owner.deliver(lambda: end.receive(message))

        self._sim.later(at_s - self._sim.now_s, arrive)

    def _stall(self, index: int, message: Message | None) -> None:
        if not self._stalled[index] and self._silence_s is not None:

            def give_up() -> None:
                if self._stalled[index] and not self._broken:
                    self.cut_off()

            self._sim.later(self._silence_s, give_up)
        self._stalled[index].append(message)


class Listener(Protocol):
    """A process that accepts connections at an address."""

    process: Process

    def offer(self, key: str, own: int, other: int, end: End) -> bool:
        """Return whether to accept a connection of a peer that proves to know `key`, is `own`, and expects `other`."""
        ...


@dataclass(slots=True, eq=False)
class _Cut:
    hosts: frozenset[str]
    to: frozenset[str]


class Network:
    """Hosts with their processes, connections, and directions that are cut."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.processes: list[Process] = []
        self.listeners: dict[Address, Listener] = {}
        self.cables: list[Cable] = []
        self._cuts: list[_Cut] = []
        self._ports = itertools.count(1)

    def cut(self, host: str, other: str) -> bool:
        """Return whether no message gets from `host` to `other`."""
        return host != other and any(host in cut.hosts and other in cut.to for cut in self._cuts)

    def part(self, hosts: frozenset[str], to: frozenset[str], seconds: float) -> None:
        """Cut the direction from `hosts` to `to` for a time."""
        cut = _Cut(hosts, to)
        self._cuts.append(cut)

        def heal() -> None:
            self._cuts.remove(cut)
            self.cables = [cable for cable in self.cables if any(end.is_open for end in cable.ends)]
            for cable in self.cables:
                cable.heal(min(seconds, 10.0))

        self.sim.later(seconds, heal)

    def port(self, host: str) -> Address:
        """Return an unused address."""
        return host, next(self._ports)

    def cable(self, one: Process, other: Process, silence_s: float | None = None) -> tuple[End, End]:
        """Return the ends of a new connection."""
        cable = Cable(self, one, other, silence_s)
        self.cables.append(cable)
        return cable.ends

    def connect(
        self,
        process: Process,
        address: Address,
        *,
        key: str,
        own: int,
        other: int,
        then: Callable[[End | None], None],
        silence_s: float | None = None,
    ) -> None:
        """Try to connect to an address. Calls `then` with the own end, or with None."""

        def knock() -> None:
            if not process.alive:
                return
            listener = self.listeners.get(address)
            unreachable = self.cut(process.host, address[0]) or self.cut(address[0], process.host)
            if unreachable or (listener is not None and listener.process._frozen is not None):
                process.later(HANDSHAKE_S, lambda: then(None))
            elif listener is None or not listener.process.alive:
                process.later(self.sim.rng.uniform(*DELAY_S), lambda: then(None))
            else:
                own_end, their_end = self.cable(process, listener.process, silence_s)
                if listener.offer(key, own, other, their_end):
                    process.later(self.sim.rng.uniform(*DELAY_S), lambda: then(own_end))
                else:
                    own_end.is_open = their_end.is_open = False
                    process.later(self.sim.rng.uniform(*DELAY_S), lambda: then(None))

        self.sim.later(2 * self.sim.rng.uniform(*DELAY_S), knock)

    def forget(self, process: Process) -> None:
        """Stop listening at all addresses of a process."""
        for address in [address for address, each in self.listeners.items() if each.process is process]:
            del self.listeners[address]

    def on(self, host: str) -> list[Process]:
        """Return the processes that are alive on a host."""
        return [process for process in self.processes if process.alive and process.host == host]
