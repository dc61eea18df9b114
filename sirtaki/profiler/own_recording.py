"""What this rank has noted, iteration by iteration, and the recording that becomes of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from sirtaki.autotune.model.graph import Phase
from sirtaki.comm.recorder import TracedIteration, TracedOperation

from .borrowed_operators import Moments, borrowed
from .kineto import Event, Seen
from .module_calls import ModuleCalls
from .operators import BACKWARD, Interval, Step, StepOperators, operators_of
from .recording import Buffer, Collective, Copy, PhaseSpan, ReadyGradient, RecordedIteration, RecordedUnit, UnitId

Reducer = tuple[int, int]
"""The number of a process set, and that of what reduces gradients there."""


def buffer_number(reducer: Reducer, layout: int) -> int:
    """Of a flat buffer among all of the job; every rank finds the same, also one that knows no other buffers."""
    process_set, serial = reducer
    return process_set << 20 | serial << 8 | layout


def model_digest(buffers: Iterable[Buffer]) -> str:
    """Equal on ranks that train the same."""
    common = [(buffer.number, buffer.layout) for buffer in buffers if buffer.reducer[0] == 0]
    return hashlib.sha256(repr(sorted(common, key=lambda item: item[0])).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Draft:
    """One step while it lasts.

    Attributes:
        slowed: torch.profiler was on.
        traced: iterations of synchronisers that ended in it, each with whose it was.
        operations: eager ones; another thread adds to them.
        updates: of optimizers.
        beside_s: see `RecordedIteration`.
    """

    begin_s: float
    slowed: bool = False
    traced: list[tuple[Reducer, TracedIteration]] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)
    updates: list[Interval] = field(default_factory=list)
    number: int = -1
    end_s: float = 0.0
    beside_s: float = 0.0

    @property
    def profiling(self) -> bool:
        """The order of gradients was negotiated in it."""
        return any(traced.profiling for _, traced in self.traced)

    @property
    def moments(self) -> Moments:
        """When what every step has happened in it."""
        found: dict[tuple[object, ...], float] = {("begin",): self.begin_s, ("end",): self.end_s}
        for number, update in enumerate(self.updates):
            found["update", number], found["updated", number] = update
        copied: Counter[Reducer] = Counter()
        for reducer, traced in self.traced:
            found["backward", reducer] = traced.backward_ended_s
            found["reduced", reducer] = traced.end_s
            found.update({("ready", reducer, one.layout, one.place): one.ready_s for one in traced.ready})
            for copy in traced.copies:
                found["copy", reducer, copied[reducer]] = copy.begin_s
                copied[reducer] += copy.n_gradients
                found["copied", reducer, copied[reducer]] = copy.end_s
        return found

    @property
    def step(self) -> Step:
        """What telling its operators takes."""
        copies = [(copy.begin_s, copy.end_s) for _, traced in self.traced for copy in traced.copies]
        waits = [(traced.backward_ended_s, traced.end_s) for _, traced in self.traced]
        return Step(
            begin_s=self.begin_s, end_s=self.end_s, updates=tuple(self.updates), cuts=tuple(sorted(copies + waits))
        )


def operators_of_drafts(
    drafts: Sequence[Draft], seen: Seen | None, calls: ModuleCalls | None = None
) -> tuple[list[StepOperators | None], tuple[str, ...]]:
    """Of each one, and the names of lanes; those that torch.profiler did not see have what others had at that place.

    Args:
        drafts: those that it saw come first.
        seen: None = nothing.
        calls: of modules; None = not known.
    """
    lenders = [draft for draft in drafts if draft.slowed]
    if seen is None or not lenders:
        return [None] * len(drafts), ()
    _, module_of_call = ((), []) if calls is None else calls.modules()

    def module_of(event: Event) -> int:
        if calls is None:
            return -1
        call = calls.of_node(event.sequence) if event.name.startswith(BACKWARD) else calls.at(event.begin_s)
        return module_of_call[call] if call >= 0 else -1

    found, lanes = operators_of(seen, [draft.step for draft in lenders], module_of)
    pairs = list(zip(found, lenders, strict=True))
    turns = cycle([pair for pair in pairs if not pair[1].profiling] or pairs)
    borrowers = zip(drafts[len(lenders) :], turns, strict=False)
    return [*found, *(borrowed(own, lender.moments, one.moments) for one, (own, lender) in borrowers)], lanes


def recorded(draft: Draft, operators: StepOperators | None) -> RecordedIteration:
    """A step that has ended; without operators, what its phases are is less exact."""
    spans: Sequence[PhaseSpan]
    if operators is None:
        spans = [
            *(
                PhaseSpan(phase=Phase.BACKWARD, begin_s=traced.first_ready_s, end_s=traced.backward_ended_s)
                for _, traced in draft.traced
            ),
            *(PhaseSpan(phase=Phase.UPDATE, begin_s=begin_s, end_s=end_s) for begin_s, end_s in draft.updates),
        ]
        spans.sort(key=lambda span: span.begin_s)
    else:
        spans = operators.spans
    return RecordedIteration(
        number=draft.number,
        begin_s=draft.begin_s,
        end_s=draft.end_s,
        profiling=draft.profiling,
        slowed=draft.slowed,
        spans=tuple(spans),
        operators=() if operators is None else operators.operators,
        ready=tuple(
            sorted(
                (
                    ReadyGradient(buffer=buffer_number(reducer, ready.layout), index=ready.place, ready_s=ready.ready_s)
                    for reducer, traced in draft.traced
                    for ready in traced.ready
                ),
                key=lambda one: one.ready_s,
            )
        ),
        copies=tuple(
            Copy(begin_s=copy.begin_s, end_s=copy.end_s, n_gradients=copy.n_gradients)
            for _, traced in draft.traced
            for copy in traced.copies
        ),
        units=tuple(_units(draft.traced)),
        collectives=tuple(
            Collective(
                name=one.name,
                kind=one.kind,
                begin_s=one.submitted_s,
                agreed_s=one.agreed_s,
                end_s=one.done_s,
                n_bytes=one.n_bytes,
            )
            for one in sorted(draft.operations, key=lambda one: one.submitted_s)
        ),
        exposed_s=sum(max(0.0, traced.end_s - traced.backward_ended_s) for _, traced in draft.traced),
        beside_s=draft.beside_s,
    )


def _units(traced: Iterable[tuple[Reducer, TracedIteration]]) -> Iterable[RecordedUnit]:
    for reducer, iteration in traced:
        for unit in iteration.units:
            identity = UnitId(
                iteration=iteration.number,
                buffer=buffer_number(reducer, unit.layout_number),
                start=unit.start,
                stop=unit.stop,
                route=unit.route,
                stream=unit.stream,
            )
            yield RecordedUnit(unit=identity, issue_s=unit.issued_s, begin_s=unit.began_s, done_s=unit.done_s)


def all_buffers(of_ranks: Sequence[Sequence[Buffer]]) -> tuple[Buffer, ...]:
    """Those that any rank knows, each once."""
    known: Mapping[int, Buffer] = {buffer.number: buffer for buffers in of_ranks for buffer in buffers}
    return tuple(known[number] for number in sorted(known))
