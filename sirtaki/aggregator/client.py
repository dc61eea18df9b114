"""A rank's side of the aggregator: exchange of rows, signs of life, failover, and one verdict on all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm.control.communicator import Op
from sirtaki.comm.control.failure import SPIN_S
from sirtaki.errors import AggregatorError, ConfigError, TransportError
from sirtaki.host_port import Address, parse_address

from .wire import (
    HEADER_BYTES,
    MOST_FLOATS,
    MOST_SEQS,
    Bytes,
    Floats,
    Kind,
    Numbers,
    Registration,
    Summation,
    Welcome,
    Wire,
    floats_of,
    frames,
    groups,
    headers_of,
    job_key,
    packet,
    runs,
    seqs_body,
    seqs_of,
)

if TYPE_CHECKING:
    from sirtaki.comm.control.communicator import Communicator
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatLayout:
    """Rows of one width in registers.

    Attributes:
        rows: how many, ordered by heat.
        width: float32 values of a row.
        registers: m; None = one for each row of a packet, the fewest without conflicts.

    Raises:
        ConfigError: a number is not positive.
    """

    rows: int
    width: int
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.width < 1 or (self.registers is not None and self.registers < 1):
            raise ConfigError(f"{self} cannot be laid out; rows, width and registers are whole numbers from 1")

    @property
    def register_count(self) -> int:
        """The paper's m."""
        return self.registers or max(1, MOST_FLOATS // self.width)

    @property
    def packet_rows(self) -> int:
        """Rows of a packet, at most one of each register; 0 where a row takes several packets."""
        return min(MOST_FLOATS // self.width, self.register_count)

    @property
    def floats(self) -> int:
        """Values of a packet."""
        return self.packet_rows * self.width or MOST_FLOATS

    @property
    def packets(self) -> int:
        """Of a step in which all rows are summed."""
        return -(-self.rows * self.width // self.floats)


REGISTER_EVERY_S = 0.05


class Contact:
    """An address, and what is known of who listens there.

    Attributes:
        session: of the sums that are made there; 0 = not all ranks have come.
        window: packets that may be under way.
        entry: drawn anew each time that this rank comes.
        heard_s: when something was last heard from there.
        asked_s: when it was last asked for something.
    """

    def __init__(self, address: Address, connect: Callable[[Address], Wire]) -> None:
        self._address, self._connect = address, connect
        self._wire: Wire | None = None
        self.session, self.window, self.entry = 0, 1, 0
        self.heard_s = self.asked_s = 0.0
        self.name = f"{address[0]}:{address[1]}"

    @property
    def wire(self) -> Wire:
        """Opened when it is needed.

        Raises:
            AggregatorError: there is no such host.
        """
        if self._wire is None:
            try:
                self._wire = self._connect(self._address)
            except ConfigError as err:
                raise AggregatorError(str(err)) from err
        return self._wire

    def enter(self, now_s: float) -> None:
        """Comes anew: whatever was said there before does not count any more."""
        self.session, self.entry = 0, secrets.randbits(63) | 1
        self.heard_s, self.asked_s = now_s, 0.0
        self.wire.refused = False

    def close(self) -> None:
        """Ends the wire; again is harmless."""
        if self._wire is not None:
            self._wire.close()
        self._wire, self.session = None, 0


REORDER = 32
"""Packets by which another may be overtaken without being taken for lost."""

MOST_AT_ONCE = 88
"""New packets between two looks at what has come."""

FEW = 8
"""Of more packets that seem to be lost it is asked first which have come."""

LEAST_WINDOW = 16
CHECK_EVERY_S = 0.0005
FIRST_TIMEOUT_S, LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.1, 0.005, 0.5


@dataclass(slots=True)
class RoundTrips:
    """How long it takes until something is heard of a packet, smoothed as TCP does (RFC 6298)."""

    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more was measured."""
        if not self.mean_s:
            self.mean_s, self.deviation_s = seconds, seconds / 2
            return
        self.deviation_s += (abs(seconds - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (seconds - self.mean_s) / 8

    @property
    def usual_s(self) -> float:
        """After so long a packet is sent again if something was heard of a later one."""
        return self.mean_s + 2 * self.deviation_s if self.mean_s else FIRST_TIMEOUT_S

    @property
    def timeout_s(self) -> float:
        """After so long a packet is sent again."""
        if not self.mean_s:
            return FIRST_TIMEOUT_S
        return min(max(self.mean_s + 4 * self.deviation_s, LEAST_TIMEOUT_S), MOST_TIMEOUT_S)


class Exchange:
    """One step of one rank; used again for the step after the next."""

    def __init__(self, *, rank: int, packets: int, floats: int) -> None:
        self._parts = frames(packets, floats, Kind.PART, rank)
        self._sums = frames(packets, floats, Kind.SUM, rank)
        self._part_headers, self._sum_headers = headers_of(self._parts), headers_of(self._sums)
        self._part_values, self._sum_values = floats_of(self._parts), floats_of(self._sums)
        self._rank = rank
        self.step, self.count = -1, 0
        self._session = 0
        self._has, self._acked, self._settled, self._brings = (np.zeros(packets, np.bool_) for _ in range(4))
        self._sent_s, self._asked_s = np.zeros(packets), np.zeros(packets)
        self._order, self._tries, self._asks = (np.zeros(packets, np.int64) for _ in range(3))
        self._low = self._next = self._sent = self._newest = self._top = self._has_count = 0
        self._checked_s = 0.0
        self.window_share = 1.0
        self.resent = 0

    def begin(self, step: int, values: Floats) -> None:
        """Takes the values of a step, (n,); their packets are not sent before `enter`."""
        floats = self._part_values.shape[1]
        whole, rest = divmod(values.size, floats)
        self.step, self.count = step, whole + (rest > 0)
        self._part_values[:whole] = values[: whole * floats].reshape(whole, floats)
        if rest:
            self._part_values[whole] = 0
            self._part_values[whole, :rest] = values[whole * floats :]
        self._has[:] = False
        self._has_count = self._session = 0
        for headers in (self._part_headers, self._sum_headers):
            headers["step"], headers["count"] = step, values.size

    def enter(self, session: int) -> None:
        """A session begins: nothing is sent yet; what has a sum already is brought, of all else the part is sent."""
        self._session = session
        self._part_headers["session"] = self._sum_headers["session"] = session
        self._brings[:] = self._has
        self._acked[:], self._settled[:], self._tries[:], self._asks[:] = False, False, 0, 0
        self._asked_s[:] = 0.0
        self._low = self._next = self._sent = self._newest = self._top = 0

    def rest(self) -> None:
        """All ranks have the sums of this step: nothing is sent."""
        self._session = 0

    @property
    def is_complete(self) -> bool:
        """All sums are here."""
        return self._has_count == self.count

    @property
    def awaits_answers(self) -> bool:
        """Something was sent of which nothing is heard."""
        under_way = slice(self._low, self._next)
        return not bool((self._settled[under_way] | self._acked[under_way]).all())

    def result(self, size: int) -> Floats:
        """The first `size` sums, a copy."""
        return np.ascontiguousarray(self._sum_values[: self.count]).reshape(-1)[:size].copy()

    # ── what has come ────────────────────────────────────────────────────────────────────────────────────────────

    def take_sums(self, seqs: Numbers, values: Floats, now_s: float, trips: RoundTrips) -> bool:
        """Sums have come, some perhaps once more; whether one of them is new."""
        known = seqs < self.count
        if not known.all():
            seqs, values = seqs[known], values[known]
        new = ~self._has[seqs]
        if not new.any():
            return False
        self._heard(seqs, now_s, trips)
        if not new.all():
            seqs, values = seqs[new], values[new]
        self._sum_values[seqs] = values
        self._has[seqs] = True
        self._has_count = int(self._has[: self.count].sum())
        self._settled[seqs] = True
        self._top = max(self._top, int(seqs.max()))
        self.window_share = min(1.0, self.window_share + len(seqs) / 4096)
        return True

    def take_acks(self, seqs: Numbers, now_s: float, trips: RoundTrips) -> None:
        """Parts have come, or sums that were brought."""
        seqs = seqs[seqs < self.count]
        fresh = seqs[~self._acked[seqs]]
        if fresh.size:
            self._heard(fresh, now_s, trips)
            self._acked[fresh] = True
            self._asked_s[fresh] = now_s
            self._settled[fresh] |= self._brings[fresh]

    def _heard(self, seqs: Numbers, now_s: float, trips: RoundTrips) -> None:
        first = seqs[(self._tries[seqs] == 1) & ~self._acked[seqs]]
        if first.size:
            trips.add(now_s - float(self._sent_s[first].max()))
        self._newest = max(self._newest, int(self._order[seqs].max()))

    # ── what is to be sent ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, wire: Wire, now_s: float, *, window: int, trips: RoundTrips) -> None:
        """Sends what may be sent now, and again what is lost; asks for sums that should have come."""
        if not self._session:
            return
        while self._low < self._next and self._settled[self._low]:
            ahead = self._settled[self._low : self._next]
            self._low += len(ahead) if ahead.all() else int(ahead.argmin())
        if self._low < self._next and now_s - self._checked_s > CHECK_EVERY_S:
            self._checked_s = now_s
            self._repeat(wire, now_s, trips)
        allowed = max(LEAST_WINDOW, int(window * self.window_share))
        end = min(self.count, self._low + allowed, self._next + MOST_AT_ONCE)
        if self._next < end:
            self._dispatch(wire, np.arange(self._next, end), now_s)
            self._next = end

    def _repeat(self, wire: Wire, now_s: float, trips: RoundTrips) -> None:
        timeout_s, usual_s = trips.timeout_s, trips.usual_s
        span = slice(self._low, self._next)
        silent = ~(self._settled[span] | self._acked[span])
        waited_s = now_s - self._sent_s[span]
        patience_s = timeout_s * 2.0 ** np.minimum(self._tries[span] - 1, 5)
        by_many = (self._order[span] + REORDER < self._newest) & (waited_s > LEAST_TIMEOUT_S / 5)
        overtaken = by_many | ((self._order[span] < self._newest) & (waited_s > usual_s))
        asked_s = now_s - self._asked_s[span]
        lost = np.flatnonzero(silent & (overtaken | (waited_s > patience_s)) & (asked_s > usual_s)) + self._low
        behind = np.arange(self._low, self._next) < self._top
        pause_s = np.where(behind, usual_s, 1.5 * timeout_s) * 2.0 ** np.minimum(self._asks[span], 5)
        asked = np.flatnonzero(self._acked[span] & ~self._settled[span] & (asked_s > pause_s)) + self._low
        if lost.size > FEW:  # maybe all that was lost is what acknowledged them
            first = self._asks[lost] == 0
            asked, lost = np.concatenate((asked, lost[first])), lost[~first]
        if lost.size:
            if lost.size > max(FEW, (self._next - self._low) // 8):  # the link's queue overflows, or a buffer
                self.window_share = max(self.window_share / 2, 1 / 64)
            self.resent += lost.size
            self._dispatch(wire, lost, now_s)
        if asked.size:
            asked = asked[:MOST_SEQS]
            self._asked_s[asked] = now_s
            self._asks[asked] += 1
            body = seqs_body(asked)
            wire.send(packet(Kind.PULL, rank=self._rank, session=self._session, step=self.step, body=body))

    def _dispatch(self, wire: Wire, seqs: Numbers, now_s: float) -> None:
        self._sent_s[seqs] = now_s
        self._tries[seqs] += 1
        self._order[seqs] = self._sent + np.arange(1, len(seqs) + 1)
        self._sent += len(seqs)
        brings = self._brings[seqs]
        for source, chosen in ((self._parts, seqs[~brings]), (self._sums, seqs[brings])):
            for begin, end in runs(chosen):
                wire.send_rows(source[begin:end])


MOST_RANKS = 65535
BUSY_S, IDLE_S, LINGER_S = 0.002, 0.01, 0.001
"""Longest sleeps between two looks: while answers are awaited, while other ranks are, and while a vote is."""

ASLEEP_S = 0.1
"""After so long between two looks this process was stopped or starved; its silence says nothing of the other."""

END_S = 2.0
"""How long the thread that says that this rank lives may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a rank waits.

    Attributes:
        heartbeat_s: for a sign of life, before it asks for one.
        alive_s: between the signs of life that it gives while it needs no sums.
        lost_s: for a sign of life, before it takes an aggregator for gone.
        look_s: without a new sum, before it looks whether other ranks have gone to a standby.
        stall_s: without a new sum, before it gives up; other ranks may be late for many reasons.
    """

    heartbeat_s: float = 0.2
    alive_s: float = 3.0
    lost_s: float = 2.0
    look_s: float = 0.3
    stall_s: float = 120.0


class AggregatorClient:
    """One rank of a job at an aggregator; of one thread.

    From its first sum until it is closed, another thread says now and then that it lives.

    Args:
        addresses: `host:port` of the aggregator, and of its standbys; an aggregator names its own standby, too.
        job: name that no other job has, the same on all ranks.
        rank: this one.
        ranks: of the job.
        layout: what is summed, the same on all ranks.
        summation: how.
        patience: how long it waits.
        connect: opens a socket to an address.
        check: called while it waits; what it raises ends the wait, such as the loss of the job.

    Raises:
        ConfigError: an address or number is invalid.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        job: str,
        rank: int,
        ranks: int,
        layout: HeatLayout,
        summation: Summation = Summation.FLOAT32,
        patience: Patience = Patience(),
        connect: Callable[[Address], Wire] = Wire.connected,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if not addresses or not 0 <= rank < ranks <= MOST_RANKS:
            raise ConfigError(f"rank {rank} of {ranks} at {len(addresses)} aggregators: there has to be one of each")
        self._contacts = [Contact(parse_address(text), connect) for text in addresses]
        self._connect, self._at = connect, 0
        self._rank, self._layout, self._patience = rank, layout, patience
        self._job = job_key(job)
        self._agreed = (ranks, summation, layout.packets, layout.floats, layout.register_count, layout.width)
        sizes = {"rank": rank, "packets": layout.packets, "floats": layout.floats}
        self._previous, self._current = Exchange(**sizes), Exchange(**sizes)
        self._step = -1
        self._trips = RoundTrips()
        self._check = check
        self._failures = 0
        self._progress_s = self._looked_s = 0.0
        self._heartbeat: threading.Thread | None = None
        self._closed = threading.Event()
        self.moves = 0
        """How often it has gone to another aggregator."""

    @property
    def resent(self) -> int:
        """Packets that were sent more than once."""
        return self._previous.resent + self._current.resent

    # ── what callers do ──────────────────────────────────────────────────────────────────────────────────────────

    def sum(self, values: Floats) -> Floats:
        """Collective: every rank gives values of one shape, and gets the sum over ranks, bit by bit the same on all.

        Args:
            values: (k, width) float32, k at most the layout's rows; the same k on all ranks. Not changed.

        Returns:
            A new array, (k, width).

        Raises:
            ConfigError: the shape does not fit the layout.
            AggregatorError: no aggregator answers or takes the job, or no sum has come for long. The client cannot be
                used any more; other ranks may have got this step's sums.
        """
        if values.ndim != 2 or values.shape[1] != self._layout.width or not 0 < len(values) <= self._layout.rows:
            expected = f"(1 … {self._layout.rows}, {self._layout.width})"
            raise ConfigError(f"values of shape {values.shape} cannot be summed; the layout expects {expected}")
        self._step += 1
        self._previous, self._current = self._current, self._previous
        self._current.begin(self._step, np.ascontiguousarray(values, np.float32).reshape(-1))
        if self._contact.session:
            self._current.enter(self._contact.session)
        self._run(lambda: self._current.is_complete)
        return self._current.result(values.size).reshape(values.shape)

    def linger(self, until: Callable[[], bool]) -> None:
        """Goes on serving other ranks until a condition holds; they may need what a dead aggregator told this one."""
        with contextlib.suppress(AggregatorError, OSError):
            self._run(until, longest_s=LINGER_S)
        while not until():
            time.sleep(LINGER_S)

    def close(self) -> None:
        """Leaves; again is harmless. Not before all ranks have their last sums: see `linger`."""
        self._closed.set()
        if self._heartbeat is not None:
            self._heartbeat.join(END_S)
        for contact in self._contacts:
            with contextlib.suppress(OSError):  # of a wire that has failed
                for _ in range(3 if contact.session else 0):  # as nobody answers
                    self._send(contact, Kind.BYE)
            contact.close()

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _contact(self) -> Contact:
        return self._contacts[self._at]

    def _send(self, contact: Contact, kind: Kind, *, step: int = 0, body: bytes = b"") -> None:
        contact.wire.send(packet(kind, rank=self._rank, session=contact.session, step=step, body=body))

    def _run(self, done: Callable[[], bool], *, longest_s: float = IDLE_S) -> None:
        now_s = time.monotonic()
        self._progress_s = self._looked_s = now_s
        self._failures = 0
        if self._heartbeat is None:
            self._contact.enter(now_s)
            self._heartbeat = threading.Thread(target=self._live, name="sirtaki-heartbeat", daemon=True)
            self._heartbeat.start()
        self._contact.wire.refused = False  # which was between steps, if it was
        self._contact.heard_s = turn_s = now_s  # it was not asked for anything between steps
        while not done():
            now_s = time.monotonic()
            if now_s - turn_s > ASLEEP_S:
                self._contact.heard_s += now_s - turn_s
            turn_s = now_s
            self._check()
            self._tend(now_s)
            contact = self._contact
            awaits = not contact.session
            if contact.session:
                for exchange in (self._previous, self._current):
                    exchange.send(contact.wire, now_s, window=contact.window, trips=self._trips)
                    awaits = awaits or exchange.awaits_answers
            contact.wire.wait(min(longest_s, BUSY_S if awaits else IDLE_S))
            self._receive(contact)

    def _live(self) -> None:
        """In a thread of its own: says now and then that this rank lives."""
        while not self._closed.wait(self._patience.alive_s):
            if (contact := self._contact).session:
                with contextlib.suppress(OSError):  # which the next sum will tell
                    self._send(contact, Kind.ALIVE)

    def _tend(self, now_s: float) -> None:
        """Sees to it that somebody is there who sums."""
        contact, patience = self._contact, self._patience
        refused = contact.wire.refused and len(self._contacts) > 1
        if refused or now_s - contact.heard_s > patience.lost_s:
            self._move(now_s, "does not answer")
        elif not contact.session:
            if now_s - contact.asked_s >= REGISTER_EVERY_S:
                contact.asked_s = now_s
                body = Registration(self._job, contact.entry, *self._agreed).encoded()
                self._send(contact, Kind.REGISTER, step=self._step, body=body)
        elif now_s - max(contact.heard_s, contact.asked_s) >= patience.heartbeat_s:
            contact.asked_s = now_s
            self._send(contact, Kind.PING)
        if now_s - self._progress_s > patience.stall_s and not self._current.is_complete:
            raise AggregatorError(
                f"no sum has come from the aggregator at {contact.name} for {patience.stall_s:g} s; "
                "other ranks are late or gone"
            )
        if now_s - self._progress_s > patience.look_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Asks the standbys whether other ranks are there; if so, follows them."""
        later = list(enumerate(self._contacts))[self._at + 1 :]
        if now_s - self._looked_s > self._patience.look_s:
            self._looked_s = now_s
            for _, standby in later:
                self._send(standby, Kind.LOOK, body=self._job)
        for number, standby in later:
            batches = standby.wire.batches() if standby.wire.wait(0.0) else ()
            seen = [headers_of(group) for rows, _ in batches for group in groups(rows)]
            if any(headers["kind"][0] == Kind.SEEN and headers["count"].max() > 0 for headers in seen):
                self._go(number, now_s, "was left by other ranks")
                break

    def _move(self, now_s: float, why: str) -> None:
        self._failures += 1
        if self._failures >= len(self._contacts):
            names = ", ".join(contact.name for contact in self._contacts)
            raise AggregatorError(f"no aggregator answers ({names}); sums have to be made by other means")
        self._go((self._at + 1) % len(self._contacts), now_s, why)

    def _go(self, number: int, now_s: float, why: str) -> None:
        before = self._contact
        self._at = number
        self.moves += 1
        logger.warning("the aggregator at %s %s; rank %d goes to %s", before.name, why, self._rank, self._contact.name)
        before.session = 0
        self._contact.enter(now_s)

    # ── what has come ────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, contact: Contact) -> None:
        for rows, _ in contact.wire.batches(8):
            now_s = time.monotonic()
            for group in groups(rows):
                self._take(contact, group, now_s)
            if contact is not self._contact:
                return

    def _take(self, contact: Contact, rows: Bytes, now_s: float) -> None:
        headers = headers_of(rows)
        kind, session, step = int(headers["kind"][0]), int(headers["session"][0]), int(headers["step"][0])
        if kind == Kind.REFUSED and session == contact.session:  # 0 before the welcome
            reason = rows[0, HEADER_BYTES:].tobytes().decode(errors="replace")
            raise AggregatorError(f"the aggregator at {contact.name} refuses this job: {reason}")
        if kind == Kind.WAIT:
            contact.heard_s = now_s
        elif kind == Kind.WELCOME:
            welcome = Welcome.decoded(rows[0, HEADER_BYTES:].tobytes())
            if welcome is not None and not contact.session:
                self._welcomed(contact, welcome, now_s)
        elif not contact.session or session != contact.session:
            return  # of something that is over
        elif kind == Kind.UNKNOWN:
            contact.enter(now_s)
        elif kind == Kind.GONE:
            self._move(now_s, "ends")
        else:
            contact.heard_s = now_s
            for exchange in (self._current, self._previous):
                if exchange.step != step:
                    continue
                if kind == Kind.SUM and rows.shape[1] == HEADER_BYTES + 4 * self._layout.floats:
                    seqs = headers["seq"].astype(np.int64)
                    if exchange.take_sums(seqs, floats_of(rows), now_s, self._trips):
                        self._progress_s = now_s
                elif kind == Kind.ACK:
                    for row in rows:
                        exchange.take_acks(seqs_of(row[HEADER_BYTES:]), now_s, self._trips)

    def _welcomed(self, contact: Contact, welcome: Welcome, now_s: float) -> None:
        contact.session, contact.window = welcome.session, welcome.window
        contact.heard_s = self._progress_s = now_s
        self._failures = 0
        if welcome.standby and all(known.name != welcome.standby for known in self._contacts):
            standby = Contact(parse_address(welcome.standby), self._connect)
            try:
                _ = standby.wire  # opened now: a host that is not known here must not end sums at the first
                self._contacts.append(standby)
            except AggregatorError as err:
                logger.warning("the standby of the aggregator at %s is not used: %s", contact.name, err)
        for exchange in (self._previous, self._current):
            if exchange.step >= welcome.first_step:
                exchange.enter(welcome.session)
            else:
                exchange.rest()


Vote = Callable[[], bool | None]
"""Whether all ranks said yes; None = not all have voted. Moves the vote on."""

GIVEN_UP = 1
"""Tag of what a rank that votes no sends to the others, which may still wait for its part: why."""


class Agreement:
    """Votes over a communicator of the control plane, which nobody else uses at the same time.

    A rank that votes no tells the others at once: without its part they would wait for long. Of one thread.
    """

    def __init__(self, comm: Communicator, *, check: Callable[[], None] | None = None) -> None:
        """`check`: called while it waits, ends waits by what it raises; None = CommError where the job is lost."""
        self._comm = comm
        self._check = check or comm.failures.check
        self._told = 0
        self._reason = ""

    def check(self) -> None:
        """For the client of the same rank, while it waits for sums.

        Raises:
            AggregatorError: another rank has voted no, and why.
            CommError: the job is lost.
        """
        self._check()
        self._hear()
        if self._told:
            raise AggregatorError(self._reason)

    @property
    def reason(self) -> str:
        """Why the first one that this rank has heard of has voted no; empty = nobody has."""
        return self._reason

    def _hear(self) -> None:
        while (posted := self._comm.collect()) is not None:
            rank, _, why = posted
            self._told += 1
            self._reason = self._reason or f"rank {rank} gets no sums: {why.decode()}"

    def begin(self, problem: str) -> Vote:
        """Collective: begins a vote; does not block. Of waits in it, see `check` in `__init__`.

        Args:
            problem: why this rank votes no; empty = it votes yes.
        """
        comm, yes = self._comm, not problem
        if not yes:
            for rank in range(comm.size):
                if rank != comm.rank:
                    comm.post(rank, GIVEN_UP, problem.encode())
        ballots = np.array([yes], dtype=np.int64)
        test = comm.all_reduce(ballots, Op.SUM)

        def vote() -> bool | None:
            self._check()
            if not test():
                return None
            others_against = comm.size - int(ballots[0]) - (not yes)
            self._hear()
            return None if self._told < others_against else bool(ballots[0] == comm.size)

        return vote


class AggregatedRows:
    """Rows of a fixed layout, the hot rows of an embedding for instance, that an aggregator sums.

    Attributes:
        is_open: it may be used; False from the first step that has failed on any rank.
    """

    def __init__(self, client: AggregatorClient, agreement: Agreement) -> None:
        """The client becomes its own; it was given the agreement's `check`."""
        self._client, self._agreement = client, agreement
        self.is_open = True

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over ranks of each rank's rows, bit by bit the same on all ranks.

        Args:
            values: (k, width) of a floating dtype on any device, k at most the layout's rows and the same on all
                ranks. Not changed. They are added as float32.

        Returns:
            A new tensor like `values`.

        Raises:
            ConfigError: the shape does not fit the layout.
            AggregatorError: on all ranks alike: on one of them the sums have not come. Nothing is summed for this
                step, and this object cannot be used any more; the caller sums by other means.
            CommError: the job is lost.
        """
        if not self.is_open:
            raise AggregatorError("the aggregator was given up in an earlier step; sums have to be made by other means")
        if not values.is_floating_point():
            raise ConfigError(
                f"values of {values.dtype} cannot be summed by an aggregator; it adds floating-point numbers"
            )
        problem: AggregatorError | None = None
        total: torch.Tensor | None = None
        try:
            sums = self._client.sum(values.detach().to("cpu", torch.float32).numpy())
            total = torch.from_numpy(sums).to(values.device, values.dtype)
        except AggregatorError as err:
            problem = err
        except OSError as err:
            problem = AggregatorError(f"the aggregator cannot be reached: {err.strerror or err}")
        vote = self._agreement.begin("" if problem is None else str(problem))
        verdict: bool | None = None

        def is_decided() -> bool:
            nonlocal verdict
            if verdict is None:
                verdict = vote()
            return verdict is not None

        spin_until_s = time.perf_counter() + SPIN_S
        while not is_decided() and time.perf_counter() < spin_until_s:
            os.sched_yield()
        self._client.linger(is_decided)
        if verdict and total is not None:
            return total
        self.close()
        raise problem or AggregatorError(self._agreement.reason)

    def close(self) -> None:
        """Leaves the aggregator; again is harmless."""
        if self.is_open:
            self.is_open = False
            self._client.close()


STEP_FLOATS = 1 << 19
"""Values that are summed at once; what is larger goes in several turns. Registers and buffers are as large."""


class HotRowAggregator:
    """Sums of flat float32 tensors of any size through an aggregator, until it is lost.

    Of one thread at a time, the same calls on all ranks.
    """

    def __init__(
        self, control: ControlPlane, addresses: Sequence[str], *, stall_s: float, check: Callable[[], None]
    ) -> None:
        """Collective: see `joined`; makes a first sum.

        Raises:
            AggregatorError: on all ranks, some rank does not get it.
        """
        self._scope = control.scope()
        self._is_root = control.rank == 0
        self._addresses = ",".join(addresses)
        agreement = Agreement(self._scope.duplicate(), check=check)
        client = AggregatorClient(
            addresses,
            job=control.broadcast(secrets.token_hex(16)),
            rank=control.rank,
            ranks=control.size,
            layout=HeatLayout(rows=STEP_FLOATS, width=1),
            patience=Patience(stall_s=stall_s),
            check=agreement.check,
        )
        self._rows = AggregatedRows(client, agreement)
        self._closed = False
        try:
            self._rows.sum_rows(torch.ones(1, 1))
        except BaseException:  # the job may be lost, too
            self.close()
            raise

    @classmethod
    def joined(
        cls,
        control: ControlPlane,
        addresses: tuple[str, ...] | None,
        *,
        used: bool,
        stall_s: float,
        check: Callable[[], None],
    ) -> HotRowAggregator | None:
        """Collective: on all ranks once each of them has got a first sum, else None on all, of which rank 0 warns.

        Args:
            control: the ranks.
            addresses: what `SIRTAKI_AGGREGATOR` names on this rank; rank 0's hold for all.
            used: hot rows may be sent there at all, the same on all ranks.
            stall_s: how long a rank waits for others that are late.
            check: called while this rank waits; what it raises ends the wait.
        """
        named, is_root = control.all_gather(addresses), control.rank == 0
        addresses, shown = named[0], ["nothing" if each is None else ",".join(each) for each in named]
        odd = [f"rank {rank} has {other}" for rank, other in enumerate(shown) if other != shown[0]]
        if odd and is_root:
            logger.warning(
                "SIRTAKI_AGGREGATOR differs between ranks; rank 0's holds for all, %s: %s", shown[0], ", ".join(odd[:3])
            )
        if addresses is None:
            return None
        if not used:
            if is_root:
                logger.warning(
                    "SIRTAKI_AGGREGATOR has no effect: "
                    "it sums hot rows, which there are with SIRTAKI_SPARSE=hot_cold, or auto where jobs are tuned"
                )
            return None
        problem = ""
        try:  # whether these hosts are known here; not whether anybody listens there
            for address in addresses:
                Wire.connected(parse_address(address)).close()
        except ConfigError as err:
            problem = str(err)
        try:
            control.agree_on_success(problem)
            found = cls(control, addresses, stall_s=stall_s, check=check)
        except (TransportError, AggregatorError) as err:
            if is_root:
                logger.warning("SIRTAKI_AGGREGATOR=%s is not used, ranks sum all rows themselves: %s", shown[0], err)
            return None
        if is_root:
            logger.info("hot rows of sparse gradients may be summed by the aggregator at %s", shown[0])
        return found

    @property
    def is_open(self) -> bool:
        """Sums are made; False, from the same step on all ranks, once they are not any more."""
        return self._rows.is_open

    def sum(self, values: torch.Tensor) -> torch.Tensor | None:
        """Collective: the sum over ranks of a contiguous 1-d tensor on the host, which is not changed.

        Returns:
            A tensor like it, bit by bit the same on all ranks; or, on all of them, None: it is not of float32, which is
            all that an aggregator adds, or the aggregator is lost, of which rank 0 warns.
        """
        if values.dtype is not torch.float32 or not self.is_open:
            return None
        try:
            parts = [self._rows.sum_rows(part[:, None]) for part in torch.split(values, STEP_FLOATS)]
        except AggregatorError as err:
            if self._is_root:
                logger.warning(
                    "the aggregator at %s is lost, ranks sum all rows themselves from this step on: %s",
                    self._addresses,
                    err,
                )
            return None
        return torch.cat(parts)[:, 0]

    def close(self) -> None:
        """Not collective, once no thread uses it: leaves. Again is harmless."""
        if not self._closed:
            self._closed = True
            self._rows.close()
            self._scope.release(lambda: None)
