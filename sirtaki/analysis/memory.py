"""Memory of a replayed step: its peak, and what lowers it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.replayer import Activity, Phase

from .job_model import Iteration, JobModel, Piece, Program
from .recording import Allocation, Holds, ModuleCall, ModuleKey, StepMemory

_OF_SAMPLES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
_LAST = 1 << 30

_Event = tuple[float, int, int, int]
"""(moment, order among those of one moment, +1 or -1, place of the allocation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which most is held.

    Attributes:
        n_bytes: held then.
        at_s: when.
        held: bytes by `StepMemory.allocations`' place.
    """

    n_bytes: int
    at_s: float
    held: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is held from a moment on."""

    at_s: float
    n_bytes: Mapping[Holds, int]

    @property
    def total_bytes(self) -> int:
        """For whatever."""
        return sum(self.n_bytes.values())


def main_device(memory: StepMemory) -> int:
    """The one that a budget is for: the first that is not the CPU, else that."""
    return next((place for place, name in enumerate(memory.devices) if not name.startswith("cpu")), 0)


class MemoryReplay:
    """Of one device.

    Attributes:
        memory: of the step as it was recorded.
        device: by place.
    """

    def __init__(self, memory: StepMemory, device: int) -> None:
        self.memory, self.device = memory, device
        own = [(place, one) for place, one in enumerate(memory.allocations) if one.device == device]
        self._there = [place for place, one in own if one.begin_s is None]
        self._came = sorted((one.begin_s, place) for place, one in own if one.begin_s is not None)
        self._gone = [(one.end_s, place) for place, one in own if one.end_s is not None]
        self._gradients = [place for _, place in self._came if memory.allocations[place].holds is Holds.GRADIENTS]

    def saved(self, number: int, *, needed: Collection[int] = ()) -> list[int]:
        """What a call leaves for its backward pass and nobody else holds, by the allocations' places.

        Args:
            number: place of the call.
            needed: allocations that other calls need.
        """
        call = self.memory.calls[number]
        begin_s, end_s = call.backward_begin_s, call.backward_end_s
        if begin_s is None or end_s is None:
            return []
        kept = {*call.outputs, *needed}
        return [
            place
            for place in self._made_in(call)
            if place not in kept and begin_s <= (self.memory.allocations[place].end_s or 0.0) <= end_s
        ]

    def peak(self, recomputed: Sequence[int] = (), passes: int = 1) -> Peak:
        """The peak of a step.

        Args:
            recomputed: calls, by place, none within another.
            passes: over parts of the batch.
        """
        events = sorted(self._events(recomputed))
        if passes == 1:
            return self._highest(self._there, events, 1)
        # From the second pass on all gradients are there, and those that come are added to them.
        there, allocations, later = [*self._there, *self._gradients], self.memory.allocations, set(self._gradients)
        added = [(allocations[place].added_s or 0.0, _LAST, -1, place) for place in self._gradients]
        last = self._highest(there, sorted([*events, *added]), passes)
        if passes == 2:
            return last
        between = [
            event
            for event in events
            if (event[2] > 0 or event[3] not in later) and allocations[event[3]].phase is not Phase.UPDATE
        ]
        return max(self._highest(there, sorted([*between, *added]), passes), last, key=lambda one: one.n_bytes)

    def curve(self) -> list[Moment]:
        """What is held when, as it was recorded."""
        held: dict[Holds, int] = defaultdict(int)
        for place in self._there:
            one = self.memory.allocations[place]
            held[one.holds] += one.n_bytes
        found = [Moment(at_s=self.memory.begin_s, n_bytes=dict(held))]
        for at_s, _, sign, place in sorted(self._events(())):
            one = self.memory.allocations[place]
            held[one.holds] += sign * one.n_bytes
            found.append(Moment(at_s=at_s, n_bytes=dict(held)))
        return found

    def _made_in(self, call: ModuleCall) -> list[int]:
        first, last = bisect_left(self._came, (call.begin_s, 0)), bisect_left(self._came, (call.end_s, 0))
        return [place for _, place in self._came[first:last]]

    def _events(self, recomputed: Sequence[int]) -> list[_Event]:
        needed_s = self._needed_until_s(recomputed)
        found = [(begin_s, 0, 1, place) for begin_s, place in self._came]
        for end_s, place in self._gone:
            later_s = needed_s.get(place, 0.0)
            found.append((later_s, _LAST, -1, place) if later_s > end_s else (end_s, 0, -1, place))
        for number in recomputed:
            others = [place for other in recomputed if other != number for place in self.memory.calls[other].inputs]
            found += self._again(self.memory.calls[number], set(self.saved(number, needed=others)))
        return found

    def _again(self, call: ModuleCall, saved: Collection[int]) -> Iterator[_Event]:
        """What a call leaves goes when it ends, and comes again with all that it needs meanwhile."""
        if call.backward_begin_s is None:
            return
        again: list[tuple[float, int, int]] = []
        for place in self._made_in(call):
            one = self.memory.allocations[place]
            assert one.begin_s is not None
            if place in saved:
                yield call.end_s, 0, -1, place
                again.append((one.begin_s, 1, place))
            elif one.end_s is not None and one.end_s <= call.end_s:
                again += ((one.begin_s, 1, place), (one.end_s, -1, place))
        for order, (_, sign, place) in enumerate(sorted(again), start=-len(again)):
            yield call.backward_begin_s, order, sign, place

    def _needed_until_s(self, recomputed: Sequence[int]) -> dict[int, float]:
        """Until when there must be what calls got, since they are done again."""
        found: dict[int, float] = {}
        for number in recomputed:
            call = self.memory.calls[number]
            for place in call.inputs:
                found[place] = max(found.get(place, 0.0), call.backward_begin_s or 0.0)
        return found

    def _highest(self, there: Sequence[int], events: Sequence[_Event], passes: int) -> Peak:
        sizes = [_size(one, passes) for one in self.memory.allocations]
        now = most = sum(sizes[place] for place in there)
        highest = 0
        for number, (_, _, sign, place) in enumerate(events, start=1):
            now += sign * sizes[place]
            if now > most:
                most, highest = now, number
        held = Counter({place: sizes[place] for place in there})
        for _, _, sign, place in events[:highest]:
            held[place] += sign * sizes[place]
        return Peak(
            n_bytes=most,
            at_s=events[highest - 1][0] if highest else self.memory.begin_s,
            held={place: n_bytes for place, n_bytes in held.items() if n_bytes},
        )


def _size(one: Allocation, passes: int) -> int:
    of_samples = one.begin_s is not None and one.phase in _OF_SAMPLES and one.holds is not Holds.GRADIENTS
    return one.n_bytes // passes if of_samples else one.n_bytes


_Change = Callable[[Program], Program]

CALL_S, OPERATOR_S = 1e-3, 25e-6
"""What `torch.utils.checkpoint` itself takes for a module, and for each operator in it; as measured on two cores."""

AGAIN = "re-computation"
ADDING = "add gradients"


def with_recomputation(job: JobModel, modules: Collection[ModuleKey]) -> JobModel:
    """These modules do their forward pass again when their backward pass begins.

    Args:
        job: with what is known of each operator's module.
        modules: none within another.
    """
    return _changed(job, lambda program: tuple(_again(program, modules)))


def with_accumulation(job: JobModel, passes: int) -> JobModel:
    """A step is so many passes over parts of the batch, and gradients are exchanged in the last one.

    An operator takes the same time for a sample; what the script does between operators is done in each pass, and
    adding gradients takes as long as copying them.
    """
    return _changed(job, lambda program: tuple(_in_passes(program, passes)))


def _changed(job: JobModel, change: _Change) -> JobModel:
    return replace(
        job,
        iterations=tuple(
            Iteration(
                programs={rank: change(program) for rank, program in each.programs.items()}, operations=each.operations
            )
            for each in job.iterations
        ),
    )


def _again(program: Program, modules: Collection[ModuleKey]) -> Iterator[Piece]:
    owners = [_owner(piece.module, modules) for piece in program]
    owed_s: dict[ModuleKey, float] = {}
    last: ModuleKey | None = None
    gap_s = 0.0  # since the last operator, which counts for a module that has operators on both sides
    for piece, owner in zip(program, owners, strict=True):
        if piece.phase is Phase.FORWARD and not piece.name:
            gap_s += piece.seconds
        elif piece.phase is Phase.FORWARD:
            if owner is not None:
                again_s = piece.seconds + (gap_s if owner == last else 0.0)
                owed_s[owner] = owed_s.get(owner, CALL_S) + OPERATOR_S + again_s
            last, gap_s = owner, 0.0
        elif piece.phase is Phase.BACKWARD and owner is not None and owner in owed_s:
            seconds = owed_s.pop(owner)
            yield Piece(
                activity=Activity.COMPUTE, phase=Phase.BACKWARD, name=AGAIN, seconds=seconds, module=piece.module
            )
        yield piece


def _owner(module: ModuleKey | None, modules: Collection[ModuleKey]) -> ModuleKey | None:
    while module is not None and module not in modules:
        root, name = module
        module = (root, name.rpartition(".")[0]) if name else None
    return module


def _in_passes(program: Program, passes: int) -> Iterator[Piece]:
    body = [place for place, piece in enumerate(program) if piece.phase in (Phase.FORWARD, Phase.BACKWARD)]
    if not body:
        yield from program
        return
    first, last = body[0], body[-1] + 1
    yield from program[:first]
    for number in range(passes - 1):
        for piece in program[first:last]:
            if piece.activity is Activity.COPY:
                if number:
                    yield _added(piece)
            elif not piece.waits:
                yield replace(piece, seconds=_part_s(piece, passes), ready=(), issues=())
    for piece in program[first:last]:
        if piece.activity is Activity.COPY:
            yield _added(piece)
            yield piece
        else:
            yield replace(piece, seconds=_part_s(piece, passes))
    yield from program[last:]


def _added(copy: Piece) -> Piece:
    return replace(copy, activity=Activity.COMPUTE, name=ADDING, ready=(), issues=(), waits=())


def _part_s(piece: Piece, passes: int) -> float:
    return piece.seconds / passes if piece.name else piece.seconds
