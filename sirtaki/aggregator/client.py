"""A rank's side of the aggregator: it sends rows, gets the sums, and goes to a standby when the aggregator is gone."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from sirtaki.errors import AggregatorError, ConfigError
from sirtaki.host_port import Address, parse_address

from .wire import (
    HEADER_BYTES,
    MOST_FLOATS,
    Bytes,
    Floats,
    Kind,
    Numbers,
    Wire,
    floats_of,
    frames,
    groups,
    headers_of,
    packet,
    runs,
)

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
    def floats(self) -> int:
        """Values of a packet: at most one row of each register; of a long row, as many as there is room for."""
        rows = MOST_FLOATS // self.width
        return min(rows, self.registers or rows) * self.width or MOST_FLOATS

    @property
    def packets(self) -> int:
        """Of a step in which all rows are summed."""
        return -(-self.rows * self.width // self.floats)


REORDER = 32
"""Packets by which another may be overtaken without being taken for lost."""

MOST_AT_ONCE = 88
"""New packets between two looks at what has come."""

FEW = 8
LEAST_WINDOW = 16
ASK_EVERY_S, ASLEEP_S = 0.2, 0.1
FIRST_TIMEOUT_S, LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.1, 0.005, 0.5
MOST_RANKS = 65535


class _Step:
    """Packets of one step: what is sent, what has come. Used again for the step after the next."""

    def __init__(self, packets: int, floats: int, **fields: int) -> None:
        self._parts = frames(packets, floats, Kind.PART, **fields)
        self._sums = frames(packets, floats, Kind.SUM, **fields)  # sent only to take them elsewhere
        self._has, self._settled = np.zeros(packets, np.bool_), np.zeros(packets, np.bool_)
        self._sent_s, self._tries = np.zeros(packets), np.zeros(packets, np.int64)
        self.number, self._count, self.resent = -1, 0, 0

    def begin(self, number: int, values: Floats) -> None:
        """Takes the values of a step, (n,)."""
        into = floats_of(self._parts)
        floats = into.shape[1]
        whole, rest = divmod(values.size, floats)
        into[:whole] = values[: whole * floats].reshape(whole, floats)
        if rest:
            into[whole] = np.pad(values[whole * floats :], (0, floats - rest))
        for headers in (headers_of(self._parts), headers_of(self._sums)):
            headers["step"], headers["count"] = number, values.size
        self.number, self._count = number, whole + (rest > 0)
        self._has[:] = False
        self.enter()

    def enter(self) -> None:
        """Another aggregator knows nothing: it gets the sums that are here, and the parts of all others."""
        self._settled[:], self._tries[:], self._top = False, 0, 0

    @property
    def is_complete(self) -> bool:
        """All sums are here."""
        return bool(self._has[: self._count].all())

    def result(self, size: int) -> Floats:
        """The first `size` sums, a copy."""
        return floats_of(self._sums)[: self._count].reshape(-1)[:size].copy()

    def take(self, seqs: Numbers, values: Floats, now_s: float) -> float | None:
        """Takes sums, some perhaps once more; returns how long the last of those took that were sent once only."""
        known = seqs < self._count
        known[known] &= ~self._settled[seqs[known]]
        seqs, values = seqs[known], values[known]
        if not seqs.size:
            return None
        new = ~self._has[seqs]
        floats_of(self._sums)[seqs[new]] = values[new]
        self._has[seqs] = self._settled[seqs] = True
        self._top = max(self._top, int(seqs.max()))
        once = seqs[self._tries[seqs] == 1]
        return now_s - float(self._sent_s[once].max()) if once.size else 0.0

    def send(self, wire: Wire, now_s: float, *, window: int, usual_s: float) -> None:
        """Sends what the window lets out, and again what seems to be lost; now and then a packet if that is nothing."""
        missing = np.flatnonzero(~self._settled[: self._count])
        if not missing.size:
            if self._count and now_s - self._sent_s[0] > ASK_EVERY_S:  # is it still there, and the same?
                self._sent_s[0] = now_s
                wire.send_rows(self._sums[:1])
            return
        open_ = missing[missing < missing[0] + window]
        tries, waited_s = self._tries[open_], now_s - self._sent_s[open_]
        fresh = open_[tries == 0][:MOST_AT_ONCE]
        lost = (tries > 0) & (waited_s > np.minimum(usual_s * 2.0 ** (tries - 1), MOST_TIMEOUT_S))
        overtaken = open_ + REORDER < self._top
        # Of those that nothing has overtaken a few ask what has become of all: if ranks are late, they are not lost.
        again = np.concatenate((open_[lost & overtaken], open_[lost & ~overtaken][:FEW]))
        self.resent += again.size
        due = np.sort(np.concatenate((fresh, again)))
        self._sent_s[due] = now_s
        self._tries[due] += 1
        has = self._has[due]
        for source, chosen in ((self._parts, due[~has]), (self._sums, due[has])):
            for begin, end in runs(chosen):
                wire.send_rows(source[begin:end])


class AggregatorClient:
    """One rank of a job at an aggregator; of one thread.

    Args:
        addresses: `host:port` of the aggregator, and of its standbys, the same on all ranks.
        job: name that no other job has, the same on all ranks.
        rank: this one.
        ranks: of the job.
        layout: what is summed, the same on all ranks.
        lost_s: without any answer, before an aggregator is taken for gone.
        stall_s: without a new sum, before this rank gives up; others may be late for many reasons.
        connect: opens a socket to an address.

    Attributes:
        moves: how often it has gone to another aggregator.

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
        lost_s: float = 2.0,
        stall_s: float = 120.0,
        connect: Callable[[Address], Wire] = Wire.connected,
    ) -> None:
        if not addresses or not 0 <= rank < ranks <= MOST_RANKS:
            raise ConfigError(f"rank {rank} of {ranks} at {len(addresses)} aggregators: there has to be one of each")
        self._addresses = [parse_address(text) for text in addresses]
        self._names, self._connect, self._at = list(addresses), connect, 0
        self._layout, self._lost_s, self._stall_s = layout, lost_s, stall_s
        key = int.from_bytes(blake2b(job.encode(), digest_size=8).digest(), "little")
        self._fields = {"job": key, "rank": rank, "ranks": ranks}
        self._previous, self._current = (_Step(layout.packets, layout.floats, **self._fields) for _ in range(2))
        self._wire: Wire | None = None
        self._epoch, self._window, self._failures, self.moves = 0, LEAST_WINDOW, 0, 0
        self._mean_s = self._deviation_s = self._heard_s = self._progress_s = 0.0

    @property
    def resent(self) -> int:
        """Packets that were sent more than once."""
        return self._previous.resent + self._current.resent

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
        self._previous, self._current = self._current, self._previous
        self._current.begin(self._previous.number + 1, np.ascontiguousarray(values, np.float32).reshape(-1))
        self._run(lambda: self._current.is_complete)
        return self._current.result(values.size).reshape(values.shape)

    def linger(self, until: Callable[[], bool]) -> None:
        """Goes on serving other ranks until a condition holds; they may need what a dead aggregator told this one."""
        while not until():
            with contextlib.suppress(AggregatorError):
                self._run(until)
            time.sleep(0.002)

    def close(self) -> None:
        """Leaves; again is harmless. Not before all ranks have their last sums: see `linger`."""
        if self._wire is not None:
            for _ in range(3):  # as nobody answers
                self._wire.send(packet(Kind.BYE, body=b"", **self._fields))
            self._wire.close()
            self._wire = None

    def _run(self, done: Callable[[], bool]) -> None:
        self._heard_s = self._progress_s = time.monotonic()
        self._failures = 0
        while not done():
            now_s, wire = time.monotonic(), self._opened()
            usual_s = FIRST_TIMEOUT_S
            if self._mean_s:
                usual_s = min(max(self._mean_s + 4 * self._deviation_s, LEAST_TIMEOUT_S), MOST_TIMEOUT_S)
            for step in (self._previous, self._current):
                step.send(wire, now_s, window=self._window, usual_s=usual_s)
            wire.wait(0.002)
            before_s, self._now_s = now_s, time.monotonic()
            if self._now_s - before_s > ASLEEP_S:  # stopped or starved: that says nothing of the aggregator
                self._heard_s += self._now_s - before_s
            if not self._receive(wire):
                continue
            if (wire.refused and len(self._addresses) > 1) or self._now_s - self._heard_s > self._lost_s:
                self._move("does not answer")
            elif self._now_s - self._progress_s > self._stall_s:
                raise AggregatorError(
                    f"no sum has come from the aggregator at {self._names[self._at]} for {self._stall_s:g} s; "
                    "other ranks are late or gone"
                )

    def _receive(self, wire: Wire) -> bool:
        """Takes what has come; False where that told this rank to go elsewhere."""
        for rows, _ in wire.batches(8):
            for group in groups(rows):
                self._take(group)
                if self._wire is not wire:
                    return False
        return True

    def _opened(self) -> Wire:
        if self._wire is None:
            try:
                self._wire = self._connect(self._addresses[self._at])
            except ConfigError as err:
                raise AggregatorError(str(err)) from err
        return self._wire

    def _take(self, rows: Bytes) -> None:
        headers = headers_of(rows)
        first = headers[0]
        kind, epoch = int(first["kind"]), int(first["epoch"])
        if int(first["job"]) != self._fields["job"]:
            return
        self._heard_s = self._now_s
        if kind == Kind.REFUSED:
            reason = rows[0, HEADER_BYTES:].tobytes().decode(errors="replace")
            raise AggregatorError(f"the aggregator at {self._names[self._at]} refuses this job: {reason}")
        if kind == Kind.GONE and epoch == self._epoch:
            self._move("ends")
        elif kind in (Kind.SUM, Kind.ACK):
            self._failures, self._window = 0, max(int(first["window"]), 1)
            if epoch != self._epoch:  # its first word, or it was started anew
                if self._epoch:
                    self._enter()
                self._epoch = epoch
            for step in (self._previous, self._current):
                if kind == Kind.SUM and step.number == int(first["step"]):
                    took_s = step.take(headers["seq"].astype(np.int64), floats_of(rows), self._now_s)
                    if took_s is not None:
                        self._progress_s = self._now_s
                    if took_s:  # smoothed as TCP does (RFC 6298)
                        error_s = took_s - self._mean_s
                        self._deviation_s += (abs(error_s) - self._deviation_s) / 4
                        self._mean_s += error_s / 8 if self._mean_s else error_s

    def _enter(self) -> None:
        for step in (self._previous, self._current):
            step.enter()

    def _move(self, why: str) -> None:
        self._failures += 1
        if self._failures >= len(self._addresses):
            names = ", ".join(self._names)
            raise AggregatorError(f"no aggregator answers ({names}); sums have to be made by other means")
        before, self._at = self._names[self._at], (self._at + 1) % len(self._addresses)
        logger.warning(
            "the aggregator at %s %s; rank %d goes to %s", before, why, self._fields["rank"], self._names[self._at]
        )
        assert self._wire is not None
        self._wire.close()
        self._wire, self._epoch, self._window, self.moves = None, 0, LEAST_WINDOW, self.moves + 1
        self._heard_s = self._now_s
        self._enter()
