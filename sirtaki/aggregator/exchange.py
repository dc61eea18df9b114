"""A rank's side of one step: which parts have been sent, which sums have come, and what has to be sent again.

Packets go out in order, as many as the window allows beyond the first one that is not settled. One that was followed
by `REORDER` others of which something was heard is taken for lost at once, by fewer after a usual round trip (as RACK,
RFC 8985); one that nothing is heard of, after a timeout that follows the measured round trips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packets import MOST_SEQS, Floats, Kind, Numbers, floats_of, frames, headers_of, packet, runs, seqs_body
from .wire import Wire

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
