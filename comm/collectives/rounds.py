"""Rounds of eager operations: what all ranks have pending is found out, and performed in one order."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm import recorder, timeline
from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.failure import FailureBoard, poll_until
from sirtaki.comm.control.plane import gather
from sirtaki.comm.transports.mpi import ThreadWork
from sirtaki.errors import CommError

from .eager_work import EagerWork, record_operations, trace_operations
from .name_slots import CAPACITY, NameSlots
from .operations import Ranks, perform, zeros_for
from .pending import Pending, Snapshot
from .requests import DIGEST_BYTES, Presence, Signature, batches, mismatch

_ALL_BITS = (1 << 8 * DIGEST_BYTES) - 1

Bits = npt.NDArray[np.bool_]


class _Messages:
    """What the ranks tell each other in a round: bits, or everything that they have pending."""

    def __init__(self, comm: Communicator, failures: FailureBoard) -> None:
        """Keeps `comm`, which nobody else uses."""
        self._comm, self._failures = comm, failures

    def agree(self, digest: int, bits: Bits) -> tuple[bool, Bits]:
        """Collective: whether all ranks have this digest (0 = it equals none), and which bits all have set.

        Next to the digest goes its complement: the AND of both is what one rank sent only if all sent the same.
        """
        complement = digest ^ _ALL_BITS if digest else 0
        mine = digest.to_bytes(DIGEST_BYTES, "big") + complement.to_bytes(DIGEST_BYTES, "big")
        sent = np.concatenate([np.frombuffer(mine, dtype=np.uint8), np.packbits(bits)])
        poll_until(self._comm.all_reduce(sent, Op.AND), failures=self._failures)
        all_equal = bool(digest) and sent[: 2 * DIGEST_BYTES].tobytes() == mine
        return all_equal, np.unpackbits(sent[2 * DIGEST_BYTES :], count=bits.size).view(np.bool_)

    def exchange(self, mine: Presence) -> list[Presence]:
        """Collective: what every rank has pending."""
        return gather(mine, comm=self._comm)

    def close(self) -> None:
        """Frees the communicator; when all ranks do."""
        self._comm.free()


class Rounds:
    """Runs rounds, one at a time; what it remembers is the same on all ranks.

    Attributes:
        last_joined: the rank that joined last.
        concluded: how many operations have been performed or refused: each has the same number on all ranks.
        ended: all ranks have taken their leave.
    """

    def __init__(self, comm: Communicator, failures: FailureBoard, pending: Pending) -> None:
        """Collective over `comm`, of which two duplicates are kept."""
        self._messages, self._data = _Messages(comm.duplicate(), failures), comm.duplicate()
        self._ranks, self._size = Ranks(self._data, failures), comm.size
        self._pending = pending
        self.last_joined = -1
        self.concluded = 0
        self.ended = False
        self._names = NameSlots()
        self._joined: dict[int, int] = {}  # rank → its number of unnamed operations

    def run(self, mine: Snapshot) -> bool:
        """Collective: one round; True if anything was performed or refused."""
        all_equal, result = self._messages.agree(self._digest(mine), self._bits(mine))
        if all_equal:
            ready = {name: work.signature for name, work in mine.works.items()}
            for name in sorted(ready):
                self._names.remember(ready[name], mine.works[name].digest)
        elif result[0]:
            ready = self._names.known(np.flatnonzero(result[1:]).tolist())
        else:
            ready = self._exchange(mine.presence())
        for names in batches(ready):
            self._run_batch([ready[name] for name in names], [mine.works.get(name) for name in names])
        return self._end_join(mine.join) or bool(ready)

    @staticmethod
    def _digest(mine: Snapshot) -> int:
        """Of all that is pending; 0 = it must not be taken for any other rank's."""
        works = mine.works.values()
        if mine.join is not None or mine.closing or any(work.signature.problem for work in works):
            return 0
        return sum(work.digest for work in works) & _ALL_BITS

    def _bits(self, mine: Snapshot) -> Bits:
        """Whether bits say all that this rank has to say, and one for each name that is known."""
        known = all(self._names.digest(name) == work.digest for name, work in mine.works.items())
        bits = np.zeros(1 + CAPACITY, dtype=np.bool_)
        if mine.join is not None:
            bits[1:] = True
            bits[[1 + bit for bit in self._names.by_all()]] = False
            bits[0] = known and self._pending.join_told and not mine.closing
        else:
            # While a rank has joined, its bits say nothing about operations that it cannot take part in.
            refused = self._joined and any(work.signature.needs_data for work in mine.works.values())
            bits[0] = known and not refused and not mine.closing
        for name in mine.works:
            if (slot := self._names.slot(name)) is not None:
                bits[1 + slot] = True
        return bits

    def _exchange(self, mine: Presence) -> dict[str, Signature]:
        """Collective: everybody's pending operations; the ones that are pending everywhere and agree."""
        self._pending.join_told = mine.joined is not None
        everybody = self._messages.exchange(mine)
        self.ended = all(presence.closing for presence in everybody)
        newly_joined = [
            (presence.joined, rank)
            for rank, presence in enumerate(everybody)
            if presence.joined is not None and rank not in self._joined
        ]
        if newly_joined:
            self._joined |= {rank: everybody[rank].unnamed for _, rank in newly_joined}
            self.last_joined = max(newly_joined)[1]
        by_name: dict[str, dict[int, Signature]] = {}
        for rank, presence in enumerate(everybody):
            for signature in presence.signatures:
                by_name.setdefault(signature.name, {})[rank] = signature
        ready = {}
        for name in sorted(by_name):
            by_rank = by_name[name]
            problem = mismatch(by_rank) or self._join_problem(by_rank)
            if problem is not None:
                self.concluded += 1
                self._names.forget(name)
                self._pending.refuse(name, problem)  # the same error on all ranks
                continue
            some = next(iter(by_rank.values()))
            self._names.remember(some, some.digest())
            absent = 0 if some.by_all else len(self._joined.keys() - by_rank.keys())
            if len(by_rank) == self._size - absent:
                ready[name] = some
        return ready

    def _join_problem(self, by_rank: dict[int, Signature]) -> str | None:
        some = next(iter(by_rank.values()))
        if self._joined and some.needs_data:
            return f"{some.kind.value.capitalize()} is not supported with Join at this time."
        return None

    def _run_batch(self, signatures: list[Signature], works: list[EagerWork | None]) -> None:
        """Collective: performs agreed operations; a work is None where this rank has joined."""
        batch = []
        begin_s = time.perf_counter()
        error: CommError | None = None
        try:
            for signature, work in zip(signatures, works, strict=True):
                self._names.touch(signature.name)
                if work is not None and work.written is not None:
                    torch.cuda.current_stream(work.tensors[0].device).wait_event(work.written)
                batch.append((signature, zeros_for(signature)) if work is None else (work.signature, work.tensors))
            results = perform(batch, self._ranks)
            for work, result in zip(works, results, strict=True):
                if work is not None:
                    work.results = result
        except CommError as err:
            error = err
        except Exception as err:
            names = ", ".join(repr(signature.name) for signature in signatures)
            error = CommError(f"{signatures[0].kind.value.lower()} {names} failed: {err!r}")
        if (trace := timeline.active()) is not None:
            trace_operations(trace, signatures, works, begin_s)
        if (recording := recorder.active()) is not None:
            record_operations(recording, works, begin_s)
        self.concluded += len(signatures)
        mine = [work for work in works if work is not None]
        self._pending.remove(mine)
        for work in mine:
            work.finish(error)

    def _end_join(self, join: ThreadWork | None) -> bool:
        """If all ranks have joined, they all know it from the same exchange, and start anew together."""
        if join is None or len(self._joined) < self._size:
            return False
        self._pending.end_join(max(self._joined.values()))
        self._joined.clear()
        join.finish()
        return True

    def close(self) -> None:
        """Frees the communicators; when all ranks do."""
        self._messages.close()
        self._data.free()
