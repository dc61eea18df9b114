"""A rank's side of an aggregator: sums over ranks through it, whatever is lost on the way, or through its standby."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sirtaki.errors import AggregatorError, ConfigError
from sirtaki.host_port import Address, parse_address

from .contact import Contact
from .exchange import Exchange, RoundTrips
from .heartbeat import Heartbeat
from .layout import HeatLayout
from .packets import (
    Bytes,
    Floats,
    Kind,
    Registration,
    Summation,
    Welcome,
    floats_of,
    groups,
    headers_of,
    job_key,
    packet,
    seqs_of,
)
from .wire import Wire

logger = logging.getLogger(__name__)

MOST_RANKS = 65535
BUSY_S, IDLE_S, LINGER_S = 0.002, 0.01, 0.001
"""Longest sleeps between two looks: while answers are awaited, while other ranks are, and while a vote is."""

ASLEEP_S = 0.1


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
        self._registration = Registration(
            job=job_key(job),
            entry=0,
            ranks=ranks,
            summation=summation,
            packets=layout.packets,
            floats=layout.floats,
            registers=layout.register_count,
            width=layout.width,
        )
        sizes = {"rank": rank, "packets": layout.packets, "floats": layout.floats}
        self._previous, self._current = Exchange(**sizes), Exchange(**sizes)
        self._step = -1
        self._trips = RoundTrips()
        self._check = check
        self._failures = 0
        self._progress_s = self._looked_s = 0.0
        self._heartbeat: Heartbeat | None = None
        self.moves = 0
        """How often it has gone to another aggregator."""

    @property
    def layout(self) -> HeatLayout:
        """What is summed."""
        return self._layout

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
        if self._contact.is_open:
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
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for contact in self._contacts:
            contact.leave(self._rank)
            contact.close()
            contact.session = 0

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _contact(self) -> Contact:
        return self._contacts[self._at]

    def _run(self, done: Callable[[], bool], *, longest_s: float = IDLE_S) -> None:
        now_s = time.monotonic()
        self._progress_s = self._looked_s = now_s
        self._failures = 0
        if self._heartbeat is None:
            self._contact.enter(now_s)
            self._heartbeat = Heartbeat(self._say_that_it_lives, every_s=self._patience.alive_s)
        self._contact.wire.refused = False  # which was between steps, if it was
        self._contact.heard_s = turn_s = now_s  # it was not asked for anything between steps
        while not done():
            now_s = time.monotonic()
            if (
                now_s - turn_s > ASLEEP_S
            ):  # this process was stopped or starved, so its silence says nothing of the other
                self._contact.heard_s += now_s - turn_s
            turn_s = now_s
            self._check()
            self._tend(now_s)
            contact = self._contact
            awaits = not contact.is_open
            if contact.is_open:
                for exchange in (self._previous, self._current):
                    exchange.send(contact.wire, now_s, window=contact.window, trips=self._trips)
                    awaits = awaits or exchange.awaits_answers
            contact.wire.wait(min(longest_s, BUSY_S if awaits else IDLE_S))
            self._receive(contact)

    def _say_that_it_lives(self) -> None:
        """In the thread of the heartbeat."""
        contact = self._contact
        if contact.is_open:
            with contextlib.suppress(OSError):  # which the next sum will tell
                contact.wire.send(packet(Kind.ALIVE, rank=self._rank, session=contact.session))

    def _tend(self, now_s: float) -> None:
        """Sees to it that somebody is there who sums."""
        contact, patience = self._contact, self._patience
        refused = contact.wire.refused and len(self._contacts) > 1
        if refused or now_s - contact.heard_s > patience.lost_s:
            self._move(now_s, "does not answer")
        elif not contact.is_open:
            contact.register(replace(self._registration, entry=contact.entry), self._rank, self._step, now_s)
        else:
            contact.ping(self._rank, now_s, patience.heartbeat_s)
        if now_s - self._progress_s > patience.stall_s and not self._current.is_complete:
            raise AggregatorError(
                f"no sum has come from the aggregator at {contact.name} for {patience.stall_s:g} s; "
                "other ranks are late or gone"
            )
        if now_s - self._progress_s > patience.look_s:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Asks the standbys whether other ranks are there; if so, follows them."""
        later = range(self._at + 1, len(self._contacts))
        if now_s - self._looked_s > self._patience.look_s:
            self._looked_s = now_s
            for number in later:
                self._contacts[number].wire.send(packet(Kind.LOOK, rank=self._rank, body=self._registration.job))
        for number in later:
            if self._others_are_at(self._contacts[number]):
                self._go(number, now_s, "was left by other ranks")
                break

    def _others_are_at(self, contact: Contact) -> bool:
        if not contact.wire.wait(0.0):
            return False
        found = False
        for rows, _ in contact.wire.batches():
            for group in groups(rows):
                headers = headers_of(group)
                found = found or bool(headers["kind"][0] == Kind.SEEN and headers["count"].max() > 0)
        return found

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
            reason = rows[0, 32:].tobytes().decode(errors="replace")
            raise AggregatorError(f"the aggregator at {contact.name} refuses this job: {reason}")
        if kind == Kind.WAIT:
            contact.heard_s = now_s
        elif kind == Kind.WELCOME:
            self._welcomed(contact, Welcome.decoded(rows[0, 32:].tobytes()), now_s)
        elif not contact.is_open or session != contact.session:
            return  # of something that is over
        elif kind == Kind.UNKNOWN:
            contact.enter(now_s)
        elif kind == Kind.GONE:
            self._move(now_s, "ends")
        else:
            contact.heard_s = now_s
            for exchange in (self._current, self._previous):
                if exchange.step == step:
                    self._take_of_step(exchange, kind, rows, now_s)

    def _take_of_step(self, exchange: Exchange, kind: int, rows: Bytes, now_s: float) -> None:
        if kind == Kind.SUM and rows.shape[1] == 32 + 4 * self._layout.floats:
            seqs = headers_of(rows)["seq"].astype(np.int64)
            if exchange.take_sums(seqs, floats_of(rows), now_s, self._trips):
                self._progress_s = now_s
        elif kind == Kind.ACK:
            for row in rows:
                exchange.take_acks(seqs_of(row[32:]), now_s, self._trips)

    def _welcomed(self, contact: Contact, welcome: Welcome | None, now_s: float) -> None:
        if welcome is None or contact.is_open:
            return
        contact.open(welcome)
        contact.heard_s = self._progress_s = now_s
        self._failures = 0
        if welcome.standby and all(known.name != welcome.standby for known in self._contacts):
            self._contacts += _standby(welcome.standby, contact.name, self._connect)
        for exchange in (self._previous, self._current):
            if exchange.step >= welcome.first_step:
                exchange.enter(welcome.session)
            else:
                exchange.rest()


def _standby(name: str, of: str, connect: Callable[[Address], Wire]) -> list[Contact]:
    """What an aggregator has named; nothing where this host does not know it: that must not end sums at the first."""
    contact = Contact(parse_address(name), connect)
    try:
        _ = contact.wire  # opened now
    except AggregatorError as err:
        logger.warning("the standby of the aggregator at %s is not used: %s", of, err)
        return []
    return [contact]
