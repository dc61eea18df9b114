"""The aggregator: a process that adds up what ranks send, packet by packet, and sends all of them the sums.

What Libra's switch does (§3.5, §3.6), in user space over UDP. It needs no timers but the one that forgets jobs: ranks
ask again for what they miss. Whatever it does not understand, or is not of a job that it knows, it drops and counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import asdict, dataclass

import numpy as np

from sirtaki.host_port import Address

from .job import Entry, Job
from .packets import (
    MOST_SEQS,
    PACKET_BYTES,
    Bytes,
    Headers,
    Kind,
    Numbers,
    Registration,
    Welcome,
    floats_of,
    groups,
    headers_of,
    packet,
    runs,
    seqs_body,
    seqs_of,
)
from .step_registers import StepRegisters
from .wire import Wire

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
            self._forget_ended()
            refused = self._why_not(registration, job)
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
            welcome = Welcome(
                session=job.session, first_step=job.first_step, window=self._window(job), standby=self._standby
            )
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
        each = {"ranks": 0, "packets": 0, "floats": 0}
        total = 0
        for job in self._jobs.values():
            each.update(ranks=job.ranks, packets=job.packets, floats=job.floats)
            total += 2 * StepRegisters.bytes_for(**each)
        return total

    def _window(self, job: Job) -> int:
        """Packets of a rank under way: those of all ranks fit into half of the socket's buffer."""
        ranks = sum(each.ranks for each in self._jobs.values())
        fits = self._wire.receive_bytes // 2 // (2 * (32 + 4 * job.floats)) // ranks
        return min(max(fits, LEAST_WINDOW), MOST_WINDOW)

    # ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_of_session(self, kind: int, rows: Bytes, headers: Headers, address: Address) -> None:
        rank, session, step = int(headers["rank"][0]), int(headers["session"][0]), int(headers["step"][0])
        job = self._sessions.get(session)
        if job is None and kind == Kind.BYE:
            return  # it was said more than once, or the job was forgotten
        if job is None:
            self.counters.unknown += len(rows)
            self._wire.send(packet(Kind.UNKNOWN, session=session), address)
            return
        if not job.is_at(rank, address):
            self.counters.foreign += len(rows)
            return
        job.heard_s = self._now_s
        if kind == Kind.ALIVE:
            return
        if kind == Kind.PING:
            self._wire.send(packet(Kind.PONG, session=session), address)
        elif kind == Kind.BYE:
            self._leave(job, rank)
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

    def _leave(self, job: Job, rank: int) -> None:
        job.left.add(rank)
        if len(job.left) == job.ranks:
            self._forget(job)

    def _forget_ended(self) -> None:
        """Of jobs that a rank has left no sum can be made any more; the others may have been killed."""
        for job in [job for job in self._jobs.values() if job.left]:
            self._forget(job)

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
        told = {
            "jobs": len(self._jobs),
            "open": len(self._sessions),
            "ranks": sum(len(job.entries) for job in self._jobs.values()),
            "memory_bytes": self._used_bytes(),
            "memory_limit_bytes": self._limits.memory_bytes,
            "standby": self._standby,
            **asdict(self.counters),
        }
        return json.dumps(told).encode()


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
