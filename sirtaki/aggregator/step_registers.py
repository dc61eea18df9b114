"""What an aggregator holds of one step of a job: the registers, and which ranks' parts are in them.

A sum stands where it was added up, in a packet that is ready to be sent. Which rank's part has come is kept for each
packet, so a part that comes twice is added once (the paper's guard against repeated writes).
"""

from __future__ import annotations

import numpy as np

from .packets import Floats, Kind, Numbers, Summation, floats_of, frames, headers_of, runs
from .table_sum import table_sum

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
