"""dPRO: follow the critical path of the simulated iteration, and fuse and partition the tensors that lie on it.

References are to the dPRO paper. Of its strategies, tensor fusion and tensor partition apply here (theorem 2); a
training script's computation is not ours to fuse, so theorem 1's saving is zero and its condition never holds.

Search speed-ups (section 5.3): *coarsened view*, gradients of one operation (ready within a moment) start as one
tensor; *partial replay*, t_sync(s, k) replays that tensor's messages alone, once for each size; *symmetry*, what
is decided for a pair of tensors is decided for all pairs of these sizes on the path, as in repeated blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sirtaki.comm.plan import Route
from sirtaki.measures import SMALLEST_UNIT_BYTES, LinkModel

from ..knobs import Cut
from ..model.planning import PlanningModel
from ..model.simulator import SimulatedIteration, Simulator
from .planner import Planner, cuts_for_groups

MAX_REPLAYS = 100  # the search's budget for one number of streams; counted, so that it is the same on any machine


class Dpro(Planner):
    """Proposes the schedule at which the search arrives, on the number of streams that does best."""

    name = "dpro"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """One search for each permitted number of streams; the simulator picks."""
        simulator = model.simulator(route)
        best = min(
            (CriticalPathSearch(simulator, streams=streams).run() for streams in self.space.streams_on(route)),
            key=lambda schedule: (round(schedule.timeline.span_s, 6), len(schedule.cuts)),
        )
        return best.cuts


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tensors as groups of gradients, each partitioned as its size asks for, and their replay.

    Attributes:
        simulator: what replays it.
        ends: index behind the last gradient of each tensor, `(n_tensors,)`; tensors without elements are not there.
        partitions: messages of each tensor (k), `(n_tensors,)`.
        streams: how many.
    """

    simulator: Simulator
    ends: tuple[int, ...]
    partitions: tuple[int, ...]
    streams: int

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """The schedule as explicit units."""
        return cuts_for_groups(self.simulator.layout, self.ends, streams=self.streams, slices=self.partitions)

    @cached_property
    def timeline(self) -> SimulatedIteration:
        """The full replay."""
        return self.simulator.run_cuts(self.cuts)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Size of each tensor, `(n_tensors,)`."""
        layout = self.simulator.layout
        stops = [layout.offsets[end] * layout.itemsize_bytes for end in self.ends]
        return tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False))

    @cached_property
    def tensor_stop_s(self) -> tuple[float, ...]:
        """When the last message of each tensor is through (q^e), `(n_tensors,)`."""
        stops: list[float] = []
        offsets, tensor = self.simulator.layout.offsets, 0
        for cut, stop_s in zip(self.cuts, self.timeline.stop_s, strict=True):
            if cut.stop > offsets[self.ends[tensor]]:
                tensor += 1
            if tensor == len(stops):
                stops.append(stop_s)
            stops[tensor] = max(stops[tensor], stop_s)
        return tuple(stops)

    def ready_s(self, tensor: int) -> float:
        """When the computation that makes the tensor's last gradient is done (p^e)."""
        return self.simulator.issuable_s[self.ends[tensor] - 1]

    def critical_tensors(self) -> range:
        """The communication at the end of the critical path, as tensors n with the one before them also on it.

        The path ends in the tensor reduced last and goes back over tensors that were still under way when the next
        was ready; the first that came to an idle link began where computation, the path's other part, let it.
        """
        stops = self.tensor_stop_s
        last = max(range(len(stops)), key=lambda tensor: stops[tensor])
        first = last
        while first > 0 and stops[first - 1] > self.ready_s(first):
            first -= 1
        return range(first + 1, last + 1)


class CriticalPathSearch:
    """Listing 1 for one number of streams."""

    def __init__(self, simulator: Simulator, *, streams: int) -> None:
        self.simulator = simulator
        self.streams = streams
        self._best_partition: dict[int, tuple[float, int]] = {}
        self._replays = 0

    def run(self) -> Schedule:
        """Rounds of theorem 2 over the critical path until the replay gets no shorter (lines 4 to 27)."""
        best = self._replayed(coarsened_ends(self.simulator))
        while self._replays < MAX_REPLAYS:
            ends = self._fused(best)
            if len(ends) == len(best.ends):
                break
            found = self._replayed(ends)
            if found.timeline.span_s >= best.timeline.span_s:
                found = self._first_fusion_that_helps(best)
                if found is best:
                    break
            best = found
        return best

    def sync_s(self, tensor_bytes: int) -> float:
        """t_sync(s, k*[s])."""
        return self._partition(tensor_bytes)[0]

    def _partition(self, tensor_bytes: int) -> tuple[float, int]:
        """t_sync with the best number of partitions, and that number (OPTPARTNUM: grid search, partial replay).

        Messages of one tensor start together on streams of their own, so their replay has a closed form.
        """
        if tensor_bytes not in self._best_partition:
            most = min(self.streams, max(1, tensor_bytes // SMALLEST_UNIT_BYTES))
            self._best_partition[tensor_bytes] = min(
                (partial_replay_s(self.simulator.link, tensor_bytes, k), k) for k in range(1, most + 1)
            )
        return self._best_partition[tensor_bytes]

    def _replayed(self, ends: Sequence[int]) -> Schedule:
        """The schedule with these tensors, each with its best partition; counts as a replay."""
        self._replays += 1
        offsets, itemsize = self.simulator.layout.offsets, self.simulator.layout.itemsize_bytes
        sizes = [(offsets[end] - offsets[begin]) * itemsize for begin, end in zip([0, *ends], ends, strict=False)]
        return Schedule(
            simulator=self.simulator,
            ends=tuple(ends),
            partitions=tuple(self._partition(size)[1] for size in sizes),
            streams=self.streams,
        )

    def _worth_fusing(self, ends_s: float, ready_s: float, before_bytes: int, own_bytes: int) -> bool:
        """Theorem 2."""
        return ends_s > ready_s + self.sync_s(before_bytes + own_bytes) - self.sync_s(own_bytes)

    def _fused(self, schedule: Schedule) -> list[int]:
        """One walk along the critical path's communication (lines 17 to 25); the ends that remain.

        A tensor that was just fused goes on as the next one's predecessor, with the end that the fused tensor has.
        """
        dropped: set[int] = set()
        symmetric: set[tuple[int, int]] = set()
        sizes = schedule.tensor_bytes
        path = schedule.critical_tensors()
        if not path:
            return list(schedule.ends)
        before_bytes, before_end_s = sizes[path[0] - 1], schedule.tensor_stop_s[path[0] - 1]
        begin_s = before_end_s - self.sync_s(before_bytes)
        for tensor in path:
            ready_s, pair = schedule.ready_s(tensor), (before_bytes, sizes[tensor])
            if pair in symmetric or self._worth_fusing(before_end_s, ready_s, *pair):
                symmetric.add(pair)
                dropped.add(tensor - 1)
                begin_s = max(begin_s, ready_s)
                before_bytes += sizes[tensor]
                before_end_s = begin_s + self.sync_s(before_bytes)
            else:
                begin_s = max(before_end_s, ready_s)
                before_bytes = sizes[tensor]
                before_end_s = begin_s + self.sync_s(before_bytes)
        return [end for tensor, end in enumerate(schedule.ends) if tensor not in dropped]

    def _first_fusion_that_helps(self, schedule: Schedule) -> Schedule:
        """Where all fusions together do harm: the first of them that shortens the replay alone, else no change.

        Theorem 2 takes tensors as one behind the other; with several streams they overlap, and only a replay tells.
        """
        for tensor in schedule.critical_tensors():
            before_end_s, ready_s = schedule.tensor_stop_s[tensor - 1], schedule.ready_s(tensor)
            sizes = schedule.tensor_bytes
            if not self._worth_fusing(before_end_s, ready_s, sizes[tensor - 1], sizes[tensor]):
                continue
            if self._replays >= MAX_REPLAYS:
                break
            found = self._replayed([*schedule.ends[: tensor - 1], *schedule.ends[tensor:]])
            if found.timeline.span_s < schedule.timeline.span_s:
                return found
        return schedule


def partial_replay_s(link: LinkModel, tensor_bytes: int, partitions: int) -> float:
    """t_sync(s, k): k equal messages of one tensor side by side, nothing else under way."""
    return link.together_s(tensor_bytes / partitions, streams=partitions)


def coarsened_ends(simulator: Simulator) -> list[int]:
    """The coarsened view: gradients that become ready together are one tensor, and empty ones join a neighbour.

    Together is: less than a start-up time after the first of them. Gradients of one operation are never measured as
    ready at one time, since hooks run one after the other, and so close theorem 2 would fuse them on an idle link, too.
    """
    layout, issuable_s = simulator.layout, simulator.issuable_s
    ends: list[int] = []
    for end in range(1, len(layout.sizes) + 1):
        last = end == len(layout.sizes)
        after_s = 0.0 if last else issuable_s[end] - issuable_s[ends[-1] if ends else 0]
        together = not last and (after_s == 0.0 or after_s < simulator.link.startup_s)
        empty = layout.offsets[end] == (layout.offsets[ends[-1]] if ends else 0)
        if not together and not empty:
            ends.append(end)
    if ends and ends[-1] != len(layout.sizes):
        ends[-1] = len(layout.sizes)
    return ends
