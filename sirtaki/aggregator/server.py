"""The aggregator: adds up the parts that the ranks of a job send, packet by packet, as Libra's switch does."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from functools import cache

import numpy as np
import numpy.typing as npt

from sirtaki.host_port import Address

from .wire import (
    HEADER_BYTES,
    PACKET_BYTES,
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

# ── Sums by tables: Libra (sparse), §3.5 ─────────────────────────────────────────────────────────────────────────────

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


def _is_nothing(bits: Numbers) -> npt.NDArray[np.bool_]:
    return np.asarray((bits >> 23) & 0xFF == 0)


def _log2(bits: Numbers) -> Numbers:
    """log2 of the magnitude, 16 places: equation 1."""
    found = tables()
    m, rest = (bits >> _SPLIT) & 0x7FF, bits & 0xFFF
    key = np.minimum(found.log_m_ln2[m] - found.log_rest[rest], 65535)
    correction = np.where(rest == 0, 0, found.small[key])
    return np.asarray(found.exponent[(bits >> 23) & 0xFF] * ONE + found.log_m[m] + correction)


def _power(logarithm: Numbers, sign: Numbers) -> npt.NDArray[np.float32]:
    """±2^logarithm; 0 where that is subnormal, infinite where it is too large."""
    exponent, fraction = (logarithm >> 16) + 127, tables().power[logarithm & 0xFFFF]
    carry = fraction >> 16
    exponent, fraction = exponent + carry, fraction & 0xFFFF
    bits = (exponent.clip(0, 255) << 23) | (fraction << 7)
    bits = np.where(exponent <= 0, 0, np.where(exponent >= 255, 0x7F800000, bits))
    return np.asarray((bits | (sign << 31)).astype(np.uint32).view(np.float32))


# ── Registers ────────────────────────────────────────────────────────────────────────────────────────────────────────


class StepRegisters:
    """Sums of one step, in packets."""

    def __init__(self, *, ranks: int, values: int, floats: int, by_tables: bool, **fields: int) -> None:
        packets = -(-values // floats)
        self.frames = frames(packets, floats, Kind.SUM, ranks=ranks, count=values, **fields)
        self._sums = floats_of(self.frames)
        self._seen = np.zeros((ranks, packets), np.bool_)  # the paper's guard against repeated writes
        self._final = np.zeros(packets, np.bool_)
        self._add = table_sum if by_tables else np.add
        self.values, self.bytes = values, self.frames.nbytes + self._seen.nbytes

    def add(self, rank: int, seqs: Numbers, values: Floats) -> tuple[Numbers, int]:
        """Adds the parts of one rank that are not in yet; a number comes once.

        Returns:
            Which packets have become complete, and how many parts were there already.
        """
        new = ~(self._seen[rank, seqs] | self._final[seqs])
        repeated = len(seqs) - int(new.sum())
        if repeated:
            seqs, values = seqs[new], values[new]
        self._seen[rank, seqs] = True
        self._sums[seqs] = self._add(self._sums[seqs], values)
        complete = seqs[self._seen[:, seqs].all(axis=0)]
        self._final[complete] = True
        return complete, repeated

    def put(self, seqs: Numbers, values: Floats) -> Numbers:
        """Takes sums that another aggregator has made, as they are; returns which were not complete here."""
        new = ~self._final[seqs]
        self._sums[seqs[new]] = values[new]
        self._final[seqs] = True
        return seqs[new]

    def final(self, seqs: Numbers) -> Numbers:
        """Those of the packets whose sums are there."""
        return seqs[self._final[seqs]]


class Job:
    """One job; it exists from its first packet until all ranks have left, or its place is needed and it is silent."""

    def __init__(self, ranks: int, floats: int) -> None:
        self.ranks, self.floats = ranks, floats
        self.epoch = secrets.randbits(63) | 1
        self.addresses: dict[int, Address] = {}
        self.steps: dict[int, StepRegisters] = {}  # two: a rank may need sums that others have got already
        self.left: set[int] = set()
        self.heard_s = 0.0

    @property
    def bytes(self) -> int:
        """Of its registers."""
        return sum(registers.bytes for registers in self.steps.values())


logger = logging.getLogger(__name__)

LEAST_WINDOW, MOST_WINDOW = 16, 1024


class Aggregator:
    """Serves jobs until it is stopped; of one thread, but for `stop`.

    Attributes:
        counters: what has happened since it was started: `parts` added, `repeated` ones that were not, `sums`,
            `taken_over` from an aggregator that is gone, `stale` and `malformed` packets, `refusals`.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        memory_bytes: int = 256 * 2**20,
        jobs: int = 16,
        silent_s: float = 15.0,
        by_tables: bool = False,
    ) -> None:
        """Serves at a socket.

        Args:
            wire: the socket, which becomes its own.
            memory_bytes: for the registers of all jobs.
            jobs: at once.
            silent_s: a job of which nothing was heard for so long gives its place to another one.
            by_tables: adds as Libra's switch does.
        """
        self._wire, self._memory_bytes, self._most_jobs, self._silent_s = wire, memory_bytes, jobs, silent_s
        self._by_tables = by_tables
        self._jobs: dict[int, Job] = {}
        self._stopping = False
        self.counters: Counter[str] = Counter()

    def serve(self) -> None:
        """Until `stop` is called; then ranks are told, and go elsewhere at once."""
        with np.errstate(all="ignore"):  # what ranks add up is theirs
            while not self._stopping:
                self._wire.wait(0.2)
                for rows, address in self._wire.batches():
                    known = groups(rows)
                    self.counters["malformed"] += len(rows) - sum(map(len, known))
                    for group in known:
                        self._take(group, address)
        for key, job in self._jobs.items():
            for address in job.addresses.values():
                self._wire.send(packet(Kind.GONE, job=key, epoch=job.epoch), address)
        self._wire.close()

    def stop(self) -> None:
        """Also from a signal handler or another thread."""
        self._stopping = True

    def _take(self, rows: Bytes, address: Address) -> None:
        headers = headers_of(rows)
        first = headers[0]
        kind, key, rank = int(first["kind"]), int(first["job"]), int(first["rank"])
        if kind == Kind.STATUS and rows.shape[1] >= PACKET_BYTES:  # no answer is longer than its question
            self._wire.send(packet(Kind.COUNTERS, body=self._told()), address)
        elif kind == Kind.BYE:
            if (job := self._jobs.get(key)) is not None:
                job.left.add(rank)
                if len(job.left) == job.ranks:
                    del self._jobs[key]
        elif kind in (Kind.PART, Kind.SUM) and rank < first["ranks"] and rows.shape[1] > HEADER_BYTES:
            seqs, once = np.unique(headers["seq"].astype(np.int64), return_index=True)
            size, floats = int(first["count"]), (rows.shape[1] - HEADER_BYTES) // 4
            if rows.shape[1] % 4 or not size or seqs[-1] >= -(-size // floats):
                self.counters["malformed"] += len(rows)
                return
            found = self._registers(key, int(first["ranks"]), floats, int(first["step"]), size)
            if isinstance(found, str):
                self.counters["refusals"] += 1
                self._wire.send(packet(Kind.REFUSED, job=key, body=found.encode()), address)
            elif found is not None:
                job, registers = found
                job.addresses[rank], job.heard_s = address, time.monotonic()
                self._add(kind, job, registers, rank, seqs, floats_of(rows)[once], address)
        else:
            self.counters["malformed"] += len(rows)

    def _registers(
        self, key: int, ranks: int, floats: int, step: int, size: int
    ) -> tuple[Job, StepRegisters] | str | None:
        """A job's registers of a step, made for its first packet; why it is refused; None for a step that is over."""
        job = self._jobs.get(key)
        if job is None:
            now_s = time.monotonic()
            if len(self._jobs) >= self._most_jobs:
                silent = {key for key, there in self._jobs.items() if now_s - there.heard_s > self._silent_s}
                self._jobs = {key: there for key, there in self._jobs.items() if key not in silent}
            if len(self._jobs) >= self._most_jobs:
                return f"it serves {len(self._jobs)} jobs already, which is its limit"
            job = Job(ranks, floats)
        if (ranks, floats) != (job.ranks, job.floats):
            return "ranks of this job differ in ranks or layout"
        newest = max(job.steps, default=step)
        if step < newest - 1:
            self.counters["stale"] += 1
            return None
        registers = job.steps.get(step)
        if registers is None:
            steps = {number: there for number, there in job.steps.items() if number >= max(step, newest) - 1}
            everyone = sum(there.ranks for there in {**self._jobs, key: job}.values())
            fits = self._wire.receive_bytes // 2 // (2 * (HEADER_BYTES + 4 * floats)) // everyone
            window = min(max(fits, LEAST_WINDOW), MOST_WINDOW)
            needed = size * 4 + -(-size // floats) * (HEADER_BYTES + ranks)
            free = self._memory_bytes - sum(there.bytes for there in self._jobs.values() if there is not job)
            free -= sum(there.bytes for there in steps.values())
            if needed > free:
                return f"the step needs {needed / 2**20:.1f} MiB of registers, and {free / 2**20:.1f} MiB are free"
            registers = StepRegisters(
                ranks=ranks,
                values=size,
                floats=floats,
                by_tables=self._by_tables,
                job=key,
                epoch=job.epoch,
                step=step,
                window=window,
            )
            job.steps = {**steps, step: registers}
            if self._jobs.setdefault(key, job) is job and len(job.steps) == 1:
                logger.info("a job of %d ranks has come, with %d values in its first step", ranks, size)
        if registers.values != size:
            return f"ranks give {size} and {registers.values} values in one step"
        return job, registers

    def _add(
        self,
        kind: int,
        job: Job,
        registers: StepRegisters,
        rank: int,
        seqs: Numbers,
        values: Floats,
        address: Address,
    ) -> None:
        if kind == Kind.SUM:
            complete, repeated = registers.put(seqs, values), len(seqs)
            self.counters["taken_over"] += len(complete)
        else:
            complete, repeated = registers.add(rank, seqs, values)
            self.counters["parts"] += len(seqs) - repeated
            self.counters["repeated"] += repeated
            self.counters["sums"] += len(complete)
        for to in job.addresses.values():
            self._send_sums(registers, complete, to)
        if repeated:  # this rank asks
            there = registers.final(seqs)
            self._send_sums(registers, np.setdiff1d(there, complete), address)
            if not len(there):
                self._wire.send(registers.frames[0, :HEADER_BYTES].tobytes().replace(_SUM, _ACK, 1), address)

    def _send_sums(self, registers: StepRegisters, seqs: Numbers, to: Address) -> None:
        for begin, end in runs(seqs):
            self._wire.send_rows(registers.frames[begin:end], to)

    def _told(self) -> bytes:
        jobs = self._jobs.values()
        return json.dumps(
            {
                "jobs": len(jobs),
                "ranks": sum(len(job.addresses) for job in jobs),
                "memory_bytes": sum(job.bytes for job in jobs),
                "memory_limit_bytes": self._memory_bytes,
                **self.counters,
            }
        ).encode()


_SUM, _ACK = (packet(kind)[:4] for kind in (Kind.SUM, Kind.ACK))


def ask_status(wire: Wire, timeout_s: float = 2.0) -> dict[str, int] | None:
    """What the aggregator at the other end of `wire` counts; None where nobody answers."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        wire.send(packet(Kind.STATUS, body=bytes(PACKET_BYTES - HEADER_BYTES)))
        wire.wait(0.3)
        for rows, _ in wire.batches():
            for group in groups(rows):
                if headers_of(group)["kind"][0] == Kind.COUNTERS:
                    with contextlib.suppress(ValueError):
                        return dict(json.loads(group[0, HEADER_BYTES:].tobytes()))
        if wire.refused:
            wire.refused = False
            time.sleep(0.1)
    return None
