"""Where the search stands: a candidate's replay, its tensors, and which of them lie on the critical path."""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.autotune.model.graph import ALL_RANKS
from sirtaki.autotune.model.replayer import Replay
from sirtaki.comm.layout import GradientLayout
from sirtaki.replay.critical_path import critical_path
from sirtaki.replay.job_model import JobModel

from .change import Candidate, Choices
from .schedule import Tensor, units_of
from .view import View


class Spot:
    """A `Position`."""

    def __init__(self, view: View, choices: Choices, candidate: Candidate, job: JobModel, played: Replay) -> None:
        """Takes a candidate that has been replayed; `job` is the view's with it."""
        self.candidate, self.choices, self._view, self._played = candidate, choices, view, played
        self.layout: GradientLayout = view.subject.layout
        self.tensors: Sequence[Tensor] = candidate.schedule.tensors_of(self.layout)
        places = {one.key: len(job.ranks) + number for number, one in enumerate(job.iterations[0].operations)}
        number, start = view.subject.buffers[0].number, 0
        self._units: list[list[int]] = [[] for _ in self.tensors]
        for tensor, stop in units_of(self.tensors):
            self._units[tensor].append(places[number, start, stop])
            start = stop
        self._issued_s = [0.0] * len(played.graph.nodes)
        for before, after, _ in played.graph.edges:
            if played.graph.nodes[before].rank != ALL_RANKS:  # else it is the unit before it on its stream
                self._issued_s[after] = max(self._issued_s[after], played.end_s[before])

    def n_bytes(self, tensor: int) -> int:
        """See `Position`."""
        start = self.tensors[tensor - 1].stop if tensor else 0
        return (self.tensors[tensor].stop - start) * self.layout.itemsize_bytes

    def ready_s(self, tensor: int) -> float:
        """See `Position`."""
        return max(self._issued_s[place] for place in self._units[tensor])

    def end_s(self, tensor: int) -> float:
        """See `Position`."""
        return max(self._played.end_s[place] for place in self._units[tensor])

    def best_parts(self, n_bytes: int) -> tuple[int, float]:
        """See `Position`."""
        most = max(1, min(self.candidate.schedule.streams, n_bytes // self.choices.least_bytes))
        took_s = {parts: self._view.sync_s(self.candidate, n_bytes, parts) for parts in range(1, most + 1)}
        best = min(took_s, key=lambda parts: (took_s[parts], parts))
        return best, took_s[best]

    @property
    def critical(self) -> list[int]:
        """Tensors on the critical path, and those beside them, in their order."""
        tensor_of = {place: tensor for tensor, places in enumerate(self._units) for place in places}
        visited = {tensor_of[visit.place] for visit in critical_path(self._played) if visit.place in tensor_of}
        beside = {tensor + 1 for tensor in visited if tensor + 1 < len(self.tensors)}
        return sorted(visited | beside)
