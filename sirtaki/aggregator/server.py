"""The aggregator: sums rows of all ranks of a step."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sirtaki.host_port import Address

from .wire import (
    MOST_SEQS,
    PACKET_BYTES,
    Bytes,
    Floats,
    Headers,
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
    packet,
    runs,
    seqs_body,
    seqs_of,
)

Integers = npt.NDArray[np.int64]

ONE = 1 << 16
"""Logarithms have 16 binary places here."""

_NEAREST = 1 << 11  # of the difference j - i 5 bits before and 11 behind the point are a key
_FARTHEST = 31  # beyond so many powers of two the smaller number is nothing
_SPLIT = 12  # bits of the fraction behind its 11th
_LN2 = float(np.log(2.0))
_TINY = -(1 << 30)  # log2 of nothing


class Tables:
    """The tables, by the paper's names; an index is a key, an entry has 16 bits (one that is nothing: a mark)."""

    def __init__(self) -> None:
        high = np.arange(4096)
        m = 1.0 + (high & 2047) / 2048.0  # 1.f1…f11
        with np.errstate(divide="ignore"):
            self.exponent = np.arange(256, dtype=np.int64) - 127  # epoTable
            self.log_m = np.rint(ONE * np.log2(m)).astype(np.int64)
            self.log_rest = np.rint(256 * np.log2(high * 2.0**-23)).clip(_TINY).astype(np.int64)  # log Δm, 8 places
            self.log_m_ln2 = np.rint(256 * np.log2(m * _LN2)).astype(np.int64)
            keys = np.arange(65536)
            self.small = np.rint(ONE * 2.0 ** (-keys / 256)).astype(np.int64)  # 2^(log Δm - log(m ln 2))
            theta = -keys / _NEAREST
            self.plus = np.rint(ONE * np.log2(1.0 + 2.0**theta)).astype(np.int64)  # miTable
            self.minus = np.rint(ONE * np.log2(1.0 - 2.0**theta)).clip(_TINY).astype(np.int64)  # not the paper's
            self.power = np.rint(ONE * (2.0 ** (keys / ONE) - 1.0)).astype(np.int64)  # expTable: a fraction

    @property
    def papers_bytes(self) -> int:
        """Of the seven tables, at two bytes an entry."""
        seven = (self.exponent, self.log_m, self.log_rest, self.log_m_ln2, self.small, self.plus, self.power)
        return sum(2 * table.size for table in seven)


@cache
def tables() -> Tables:
    """They are made once."""
    return Tables()


def table_sum(x: Floats, y: Floats) -> Floats:
    """The sum of x and y by tables. Subnormal numbers count as 0; NaN and infinities are added as usual."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float32), np.asarray(y, np.float32))
    bits_x, bits_y = x.view(np.uint32).astype(np.int64), y.view(np.uint32).astype(np.int64)
    larger = (bits_x & 0x7FFFFFFF) >= (bits_y & 0x7FFFFFFF)
    first, second = np.where(larger, bits_x, bits_y), np.where(larger, bits_y, bits_x)
    i, j = _log2(first), _log2(second)
    found = tables()
    theta = i - j
    key = np.minimum((theta + 16) >> 5, 65535)  # 16 places → 11
    alike = (first ^ second) >> 31 == 0
    step = np.where(alike, found.plus[key], found.minus[key])
    step = np.where(theta >= _FARTHEST * ONE, 0, step)
    total = _power(i + step, first >> 31)
    total = np.where(~alike & (theta < 16), np.float32(0), total)
    nothing_x, nothing_y = _is_nothing(first), _is_nothing(second)
    values_first = first.astype(np.uint32).view(np.float32)
    total = np.where(nothing_y, np.where(nothing_x, np.float32(0), values_first), total)
    unusual = ((first >> 23) & 0xFF) == 0xFF
    if unusual.any():
        with np.errstate(invalid="ignore"):
            total[unusual] = x[unusual] + y[unusual]
    return total.astype(np.float32)


def _is_nothing(bits: Integers) -> npt.NDArray[np.bool_]:
    return np.asarray((bits >> 23) & 0xFF == 0)


def _log2(bits: Integers) -> Integers:
    """log2 of the magnitude, 16 places: equation 1."""
    found = tables()
    m, rest = (bits >> _SPLIT) & 0x7FF, bits & 0xFFF
    key = np.minimum(found.log_m_ln2[m] - found.log_rest[rest], 65535)
    correction = np.where(rest == 0, 0, found.small[key])
    return np.asarray(found.exponent[(bits >> 23) & 0xFF] * ONE + found.log_m[m] + correction)


def _power(logarithm: Integers, sign: Integers) -> npt.NDArray[np.float32]:
    """±2^logarithm; 0 where that is subnormal, infinite where it is too large."""
    exponent, fraction = (logarithm >> 16) + 127, tables().power[logarithm & 0xFFFF]
    carry = fraction >> 16
    exponent, fraction = exponent + carry, fraction & 0xFFFF
    bits = (exponent.clip(0, 255) << 23) | (fraction << 7)
    bits = np.where(exponent <= 0, 0, np.where(exponent >= 255, 0x7F800000, bits))
    return np.asarray((bits | (sign << 31)).astype(np.uint32).view(np.float32))


FEW_RUNS = 4
"""So many are added one by one without looking each packet up."""


class StepRegisters:
    """Sums of one step, in packets."""

    def __init__(self, *, ranks: int, packets: int, floats: int, summation: Summation) -> None:
        self.frames = frames(packets, floats, Kind.SUM)
        self._values = floats_of(self.frames)
        self._headers = headers_of(self.frames)
        self._seen = np.zeros((ranks, packets), np.bool_)
        self._parts = np.zeros(packets, np.uint16)
        self._final = np.zeros(packets, np.bool_)
        self._ranks, self._summation = ranks, summation
        self._final_count = 0
        self.step, self.count, self.values = -1, 0, 0

    @staticmethod
    def bytes_for(*, ranks: int, packets: int, floats: int) -> int:
        """What one of them takes."""
        return packets * (32 + 4 * floats + ranks + 3)

    def begin(self, step: int, *, session: int) -> None:
        """Everything is 0 again, for another step."""
        self.step, self.count, self.values, self._final_count = step, 0, 0, 0
        self._headers["session"], self._headers["step"] = session, step
        self._seen[:], self._parts[:], self._final[:] = False, 0, False

    @property
    def is_complete(self) -> bool:
        """All sums are there."""
        return 0 < self.count == self._final_count

    def takes(self, seqs: Numbers, values: int) -> bool:
        """Whether such packets belong here, of a step in which each rank gives so many values."""
        count = -(-values // self._values.shape[1])
        if not 0 < count <= len(self._parts) or self.values not in (0, values) or bool((seqs >= count).any()):
            return False
        if self.count == 0:
            self.count, self.values = count, values
            self._headers["count"] = values
        return True

    def differs(self, values: int) -> bool:
        """Whether other ranks have given another number of values, of those that are possible."""
        return self.values not in (0, values) and 0 < values <= self._values.size

    def add(self, rank: int, seqs: Numbers, values: Floats) -> tuple[Numbers, int]:
        """Adds the parts of one rank that are not in yet.

        Args:
            rank: whose.
            seqs: of the packets, (n,); a number may come twice.
            values: (n, floats).

        Returns:
            Which packets have become complete, ascending, and how many parts were there already.
        """
        pieces = runs(seqs) if len(seqs) == 1 or bool((seqs[1:] > seqs[:-1]).all()) else []
        if 0 < len(pieces) <= FEW_RUNS and self._are_new(rank, pieces):
            at = 0
            for begin, end in pieces:
                self._add_run(rank, begin, end, values[at : at + end - begin])
                at += end - begin
            return np.asarray(seqs[self._final[seqs]]), 0
        new = ~self._seen[rank, seqs] & ~self._final[seqs]
        if len(seqs) > 1 and not (np.diff(seqs) > 0).all():  # one batch may hold a packet twice
            first = np.zeros(len(seqs), np.bool_)
            first[np.unique(seqs, return_index=True)[1]] = True
            new &= first
        repeated = len(seqs) - int(new.sum())
        if repeated:
            seqs, values = seqs[new], values[new]
        self._seen[rank, seqs] = True
        self._accumulate(seqs, values)
        self._parts[seqs] += 1
        complete = np.sort(seqs[self._parts[seqs] == self._ranks])
        self._finish(complete)
        return complete, repeated

    def _are_new(self, rank: int, pieces: list[tuple[int, int]]) -> bool:
        """Whether nothing of this rank is in there, and no packet is empty while its neighbour is not."""
        for begin, end in pieces:
            empty = self._parts[begin:end] == 0
            if (self._seen[rank, begin:end] | self._final[begin:end]).any() or (empty != empty[0]).any():
                return False
        return self._summation is Summation.FLOAT32

    def _add_run(self, rank: int, begin: int, end: int, values: Floats) -> None:
        """The usual case, quickly: new packets that follow each other."""
        parts = self._parts[begin:end]
        if parts[0]:
            self._values[begin:end] += values
        else:
            self._values[begin:end] = values
        parts += 1
        self._seen[rank, begin:end] = True
        complete = parts == self._ranks
        self._final[begin:end] = complete
        self._final_count += int(complete.sum())

    def _accumulate(self, seqs: Numbers, values: Floats) -> None:
        empty = self._parts[seqs] == 0
        if empty.all():
            self._values[seqs] = values
            return
        if empty.any():
            self._values[seqs[empty]] = values[empty]
            seqs, values = seqs[~empty], values[~empty]
        if self._summation is Summation.TABLE:
            self._values[seqs] = table_sum(self._values[seqs], values)
        else:
            self._values[seqs] += values

    def put(self, seqs: Numbers, values: Floats) -> Numbers:
        """Takes sums that another aggregator has made, as they are; those that are here already stay.

        Returns:
            Which have become complete.
        """
        new = np.unique(seqs, return_index=True)[1]
        new = new[~self._final[seqs[new]]]
        seqs, values = seqs[new], values[new]
        self._values[seqs] = values
        self._finish(seqs)
        return seqs

    def _finish(self, seqs: Numbers) -> None:
        self._final[seqs] = True
        self._final_count += len(seqs)

    def waiting(self, rank: int, seqs: Numbers) -> Numbers:
        """Those of the packets in which this rank's part is, and another's is not."""
        return np.asarray(seqs[self._seen[rank, seqs] & ~self._final[seqs]])

    def final(self, seqs: Numbers) -> Numbers:
        """Those of the packets whose sums are there, ascending, once each."""
        return np.unique(seqs[self._final[seqs]])


STEPS = 2


class Entry(NamedTuple):
    """A rank that has come.

    Attributes:
        number: drawn by the rank each time it comes.
        address: where it is.
        step: the one that it works on.
    """

    number: int
    address: Address
    step: int


class Job:
    """One job; it exists from the first rank that comes until all have left, or nothing was heard for long."""

    def __init__(self, first: Registration, now_s: float) -> None:
        self.agreed, self.key = first.agreed, first.job
        self.ranks, self.floats, self.packets = first.ranks, first.floats, first.packets
        self.bytes = self.bytes_for(first)
        sizes = {"ranks": first.ranks, "packets": first.packets, "floats": first.floats}
        self._steps = [StepRegisters(**sizes, summation=Summation(first.summation)) for _ in range(STEPS)]
        self.entries: dict[int, Entry] = {}
        self.left: set[int] = set()
        self.heard_s = now_s
        self._draw_session()

    @staticmethod
    def bytes_for(registration: Registration) -> int:
        """What a job would take."""
        _, _, ranks, _, packets, floats, *_ = registration
        return STEPS * StepRegisters.bytes_for(ranks=ranks, packets=packets, floats=floats)

    def _draw_session(self) -> None:
        self.session = secrets.randbits(63) | 1
        self.first_step = -1

    @property
    def is_open(self) -> bool:
        """All ranks have come."""
        return self.first_step >= 0

    def enter(self, rank: int, entry: Entry) -> bool:
        """A rank has come, or says once more that it has.

        Returns:
            Whether a session was ended by it.
        """
        ended = self.is_open and self.entries[rank].number != entry.number
        if ended:
            self.entries.clear()
            self._draw_session()
        if not self.is_open:
            self.entries[rank] = entry
            self.left.discard(rank)
            if len(self.entries) == self.ranks:
                self.first_step = min(entry.step for entry in self.entries.values())
                for step in range(self.first_step, self.first_step + STEPS):
                    self._steps[step % STEPS].begin(step, session=self.session)
        return ended

    @property
    def is_torn(self) -> bool:
        """Ranks are further apart than is possible, so they do not train together."""
        steps = [entry.step for entry in self.entries.values()]
        return max(steps) - min(steps) >= STEPS

    def registers(self, step: int) -> StepRegisters | None:
        """Those of a step; the older step's are taken for the next one, once the one between is complete."""
        found = self._steps[step % STEPS]
        if found.step == step:
            return found
        between = self._steps[(step + 1) % STEPS]
        if step == found.step + STEPS and between.step == step - 1 and between.is_complete:
            found.begin(step, session=self.session)
            return found
        return None


logger = logging.getLogger(__name__)

LEAST_WINDOW, MOST_WINDOW = 16, 1024
TIDY_EVERY_S = 1.0

ASLEEP_S = 1.0
"""After so long between two turns this process was stopped or starved, and has not heard who was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an aggregator gives away.

    Attributes:
        memory_bytes: for the registers of all jobs.
        jobs: at once.
        ranks: of a job.
        silent_s: a job of which no rank has said anything for so long is forgotten; each says every 3 s that it lives.
    """

    memory_bytes: int = 256 * 2**20
    jobs: int = 16
    ranks: int = 1024
    silent_s: float = 15.0


@dataclass(slots=True)
class Counters:
    """What has happened since it was started, in packets but for `sums`, `sessions` and `refusals`.

    Attributes:
        parts: added.
        repeated: parts that were in already, and not added again.
        sums: made.
        taken_over: sums that ranks brought from another aggregator.
        stale: of steps that are over or have not come yet.
        unknown: of sessions that are not known here.
        foreign: of a rank, but not from its address.
        malformed: not understood.
        pulls: requests for sums that a rank misses.
        sessions: that all ranks of a job came to.
        refusals: of jobs.
    """

    parts: int = 0
    repeated: int = 0
    sums: int = 0
    taken_over: int = 0
    stale: int = 0
    unknown: int = 0
    foreign: int = 0
    malformed: int = 0
    pulls: int = 0
    sessions: int = 0
    refusals: int = 0


class Aggregator:
    """Serves jobs until it is stopped; of one thread, but for `stop`."""

    def __init__(self, wire: Wire, *, limits: Limits = Limits(), standby: str = "") -> None:
        self._wire, self._limits, self._standby = wire, limits, standby
        self._jobs: dict[bytes, Job] = {}
        self._sessions: dict[int, Job] = {}
        self.counters = Counters()
        self._complete: dict[tuple[Job, int], list[Numbers]] = {}
        self._come: dict[tuple[Job, int, Address], list[Numbers]] = {}
        self._stopping = False
        self._now_s = self._tidied_s = time.monotonic()

    def serve(self) -> None:
        """Until `stop` is called; then ranks are told, and go elsewhere at once."""
        with np.errstate(all="ignore"):  # what ranks add up is theirs
            while not self._stopping:
                self._wire.wait(0.2)
                self.turn()
        for job in self._jobs.values():
            for entry in job.entries.values():
                self._wire.send(packet(Kind.GONE, session=job.session), entry.address)
        self._wire.close()

    def stop(self) -> None:
        """Also from a signal handler or another thread."""
        self._stopping = True

    def turn(self) -> None:
        """Takes what has come."""
        before_s, self._now_s = self._now_s, time.monotonic()
        if self._now_s - before_s > ASLEEP_S:
            for job in self._jobs.values():
                job.heard_s = self._now_s
        for rows, address in self._wire.batches():
            taken = 0
            for group in groups(rows):
                taken += len(group)
                self._take(group, address)
            self.counters.malformed += len(rows) - taken
        self._answer()
        if self._now_s - self._tidied_s > TIDY_EVERY_S:
            self._tidy()

    def _take(self, rows: Bytes, address: Address) -> None:
        headers = headers_of(rows)
        kind = int(headers["kind"][0])
        if kind in (Kind.PART, Kind.SUM, Kind.PULL, Kind.PING, Kind.BYE, Kind.ALIVE):
            self._take_of_session(kind, rows, headers, address)
            return
        for header, row in zip(headers, rows, strict=True):
            body = row[32:].tobytes()
            if kind == Kind.REGISTER:
                self._register(int(header["rank"]), int(header["step"]), body, address)
            elif kind == Kind.LOOK and len(body) == 16:
                job = self._jobs.get(body)
                self._wire.send(packet(Kind.SEEN, count=len(job.entries) if job else 0), address)
            elif kind == Kind.STATUS and len(row) >= PACKET_BYTES:  # no answer is longer than its question
                self._wire.send(packet(Kind.COUNTERS, body=self._told()), address)
            else:
                self.counters.malformed += 1

    # ── ranks come ───────────────────────────────────────────────────────────────────────────────────────────────

    def _register(self, rank: int, step: int, body: bytes, address: Address) -> None:
        registration = Registration.decoded(body)
        if registration is None or rank >= registration.ranks:
            self.counters.malformed += 1
            return
        job = self._jobs.get(registration.job)
        refused = self._why_not(registration, job)
        if refused and job is None:
            # Of jobs that a rank has left no sum can be made any more; the others may have been killed.
            for ended in [job for job in self._jobs.values() if job.left]:
                self._forget(ended)
            refused = self._why_not(registration, None)
        if refused:
            self.counters.refusals += 1
            self._wire.send(packet(Kind.REFUSED, body=refused.encode()), address)
            return
        if job is None:
            job = self._jobs[registration.job] = Job(registration, self._now_s)
            logger.info("a job of %d ranks has come, with %d packets a step", job.ranks, job.packets)
        job.heard_s = self._now_s
        was_open, before = job.is_open, job.session
        if job.enter(rank, Entry(registration.entry, address, step)):
            self._sessions.pop(before, None)
            was_open = False
        if job.is_open and not was_open:
            self._sessions[job.session] = job
            self.counters.sessions += 1
        if job.is_open and job.is_torn:
            self._wire.send(packet(Kind.REFUSED, body=b"ranks of this job are several steps apart"), address)
        elif job.is_open:
            welcome = Welcome(job.session, job.first_step, self._window(job), self._standby)
            self._wire.send(packet(Kind.WELCOME, rank=rank, body=welcome.encoded()), address)
        else:
            self._wire.send(packet(Kind.WAIT, rank=rank, count=len(job.entries)), address)

    def _why_not(self, registration: Registration, job: Job | None) -> str:
        if job is not None:
            return "" if job.agreed == registration.agreed else "ranks of this job differ in ranks, layout or summation"
        if len(self._jobs) >= self._limits.jobs:
            return f"it serves {len(self._jobs)} jobs already, which is its limit"
        if registration.ranks > self._limits.ranks:
            return f"a job may have {self._limits.ranks} ranks, this one has {registration.ranks}"
        wanted = Job.bytes_for(registration)
        free = self._limits.memory_bytes - self._used_bytes()
        if wanted > free:
            return f"the job needs {wanted / 2**20:.1f} MiB of registers, and {max(free, 0) / 2**20:.1f} MiB are free"
        return ""

    def _used_bytes(self) -> int:
        return sum(job.bytes for job in self._jobs.values())

    def _window(self, job: Job) -> int:
        """Packets of a rank under way: those of all ranks fit into half of the socket's buffer."""
        ranks = sum(each.ranks for each in self._jobs.values())
        fits = self._wire.receive_bytes // 2 // (2 * (32 + 4 * job.floats)) // ranks
        return min(max(fits, LEAST_WINDOW), MOST_WINDOW)

    # ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_of_session(self, kind: int, rows: Bytes, headers: Headers, address: Address) -> None:
        rank, session, step = int(headers["rank"][0]), int(headers["session"][0]), int(headers["step"][0])
        job = self._sessions.get(session)
        if job is None:
            if kind == Kind.BYE:
                return  # it was said more than once, or the job was forgotten
            self.counters.unknown += len(rows)
            self._wire.send(packet(Kind.UNKNOWN, session=session), address)
            return
        if rank not in job.entries or job.entries[rank].address != address:
            self.counters.foreign += len(rows)
            return
        job.heard_s = self._now_s
        if kind == Kind.ALIVE:
            return
        if kind == Kind.PING:
            self._wire.send(packet(Kind.PONG, session=session), address)
        elif kind == Kind.BYE:
            job.left.add(rank)
            if len(job.left) == job.ranks:
                self._forget(job)
        elif kind == Kind.PULL:
            for row in rows:
                self._pull(job, rank, step, seqs_of(row[32:]))
        elif rows.shape[1] != 32 + 4 * job.floats:
            self.counters.malformed += len(rows)
        else:
            self._values(kind, job, rank, rows, headers, address)

    def _values(self, kind: int, job: Job, rank: int, rows: Bytes, headers: Headers, address: Address) -> None:
        registers = job.registers(int(headers["step"][0]))
        if registers is None:
            self.counters.stale += len(rows)
            return
        seqs, counts = headers["seq"].astype(np.int64), headers["count"]
        if bool((counts != counts[0]).any()) or not registers.takes(seqs, int(counts[0])):
            self.counters.malformed += len(rows)
            if registers.differs(int(counts[0])):
                reason = f"ranks give {counts[0]} and {registers.values} values in one step"
                for entry in job.entries.values():
                    self._wire.send(packet(Kind.REFUSED, session=job.session, body=reason.encode()), entry.address)
            return
        values = floats_of(rows)
        if kind == Kind.SUM:
            complete = registers.put(seqs, values)
            self.counters.taken_over += len(complete)
        else:
            complete, repeated = registers.add(rank, seqs, values)
            self.counters.repeated += repeated
            self.counters.parts += len(rows) - repeated
            self.counters.sums += len(complete)
            if repeated:
                self._send_sums(registers, np.setdiff1d(registers.final(seqs), complete), [address])
        if len(complete):
            self._complete.setdefault((job, registers.step), []).append(complete)
        if len(complete) < len(seqs) or kind == Kind.SUM:
            self._come.setdefault((job, registers.step, address), []).append(seqs)

    def _answer(self) -> None:
        """Sends what has become complete in this turn, and acknowledges what has come."""
        for (job, step), parts in self._complete.items():
            registers = job.registers(step)
            if registers is not None:
                addresses = [entry.address for entry in job.entries.values()]
                self._send_sums(registers, np.sort(np.concatenate(parts)), addresses)
        for (job, step, address), parts in self._come.items():
            seqs = np.concatenate(parts)
            for begin in range(0, len(seqs), MOST_SEQS):
                body = seqs_body(seqs[begin : begin + MOST_SEQS])
                self._wire.send(packet(Kind.ACK, session=job.session, step=step, body=body), address)
        self._complete.clear()
        self._come.clear()

    def _pull(self, job: Job, rank: int, step: int, seqs: Numbers) -> None:
        """A rank has heard nothing of some packets: it gets their sums, or hears that its parts have come."""
        address = job.entries[rank].address
        self.counters.pulls += 1
        registers = job.registers(step)
        if registers is None or not seqs.size or int(seqs.max()) >= job.packets:
            self.counters.stale += 1
            return
        self._send_sums(registers, registers.final(seqs), [address])
        if (waiting := registers.waiting(rank, seqs)).size:
            self._come.setdefault((job, step, address), []).append(waiting)

    def _send_sums(self, registers: StepRegisters, seqs: Numbers, addresses: list[Address]) -> None:
        for begin, end in runs(seqs):
            for address in addresses:
                self._wire.send_rows(registers.frames[begin:end], address)

    # ── jobs end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.key, None)
        self._sessions.pop(job.session, None)

    def _tidy(self) -> None:
        self._tidied_s = self._now_s
        for job in list(self._jobs.values()):
            if self._now_s - job.heard_s > self._limits.silent_s:
                logger.info(
                    "a job of %d ranks was silent for %.0f s and is forgotten", job.ranks, self._limits.silent_s
                )
                self._forget(job)

    def _told(self) -> bytes:
        return json.dumps(
            {
                "jobs": len(self._jobs),
                "open": len(self._sessions),
                "ranks": sum(len(job.entries) for job in self._jobs.values()),
                "memory_bytes": self._used_bytes(),
                "memory_limit_bytes": self._limits.memory_bytes,
                "standby": self._standby,
                **asdict(self.counters),
            }
        ).encode()


def ask_status(wire: Wire, timeout_s: float = 2.0) -> dict[str, int | str] | None:
    """What the aggregator at the other end of `wire` counts; None where nobody answers."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        wire.send(packet(Kind.STATUS, body=bytes(PACKET_BYTES - 32)))
        if not wire.wait(0.3):
            continue
        for rows, _ in wire.batches():
            for group in groups(rows):
                if headers_of(group)["kind"][0] == Kind.COUNTERS:
                    with contextlib.suppress(ValueError):
                        return dict(json.loads(group[0, 32:].tobytes()))
        if wire.refused:
            wire.refused = False
            time.sleep(0.1)
    return None


assert MOST_SEQS * 4 + 32 <= PACKET_BYTES
