"""Operators of each step from what torch.profiler has seen: those that nobody called but the script, lane by lane.

A step has its phases by names that PyTorch itself gives: the data loader's, autograd's. What comes before a backward
pass of the same step is forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.graph import Phase

from .kineto import Event, Seen
from .recording import Operator, PhaseSpan
from .tensor_edges import Reader, with_edges

BACKWARD = "autograd::engine::evaluate_function: "
LOADER = "enumerate(DataLoader)#"
ZEROING = "Optimizer.zero_grad#"

Interval = tuple[float, float]
"""(begin_s, end_s)."""

LEAST_S = 1e-9
"""What is shorter than a clock can tell is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, as the recorder knows it.

    Attributes:
        updates: of its optimizers.
        cuts: when gradients were copied, or waited for, by the thread that trains; no operator lies there.
    """

    begin_s: float
    end_s: float
    updates: tuple[Interval, ...]
    cuts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperators:
    """What is known of it then."""

    operators: tuple[Operator, ...]
    spans: tuple[PhaseSpan, ...]


ModuleOf = Callable[[Event], int]
"""The place of the module that an operator on the training thread belongs to; -1 = none."""


def _of_none(_: Event) -> int:
    return -1


def operators_of(
    seen: Seen, steps: Sequence[Step], module_of: ModuleOf = _of_none
) -> tuple[list[StepOperators], tuple[str, ...]]:
    """Of each step, and what the lanes are."""
    lanes, names = _lanes(seen)
    ordered = sorted(seen.events, key=lambda event: (event.begin_s, -event.end_s))
    begins = [event.begin_s for event in ordered]
    found = []
    for step in steps:
        events = ordered[bisect_right(begins, step.begin_s) : bisect_right(begins, step.end_s)]
        found.append(_of_step(step, events, lanes, module_of, seen.readers))
    return found, names


def _lanes(seen: Seen) -> tuple[dict[tuple[bool, int], int], tuple[str, ...]]:
    """Numbers of threads and of devices' streams, the training thread's being 0, and what they are."""
    keys = sorted({(event.on_device, event.thread) for event in seen.events} - {(False, seen.thread)})
    names = [f"stream {thread} of the device" if on_device else f"thread {thread}" for on_device, thread in keys]
    return {key: number for number, key in enumerate([(False, seen.thread), *keys])}, ("training thread", *names)


def _of_step(
    step: Step,
    events: Sequence[Event],
    lanes: Mapping[tuple[bool, int], int],
    module_of: ModuleOf,
    readers: Sequence[Reader],
) -> StepOperators:
    loading = [(event.begin_s, event.end_s) for event in events if event.annotation and event.name.startswith(LOADER)]
    zeroing = [(event.begin_s, event.end_s) for event in events if event.annotation and event.name.startswith(ZEROING)]
    top = list(_top_level([event for event in events if not event.annotation]))
    on_host = [event for event in top if not event.on_device]
    backward = [event for event in on_host if event.name.startswith(BACKWARD)]
    forward_s, last_backward_s = _forward_from(step, on_host, backward, loading), _last_begin_s(step, backward)

    def phase_of(event: Event) -> Phase:
        if event.name.startswith(BACKWARD):
            return Phase.BACKWARD
        for phase, spans in ((Phase.UPDATE, step.updates), (Phase.DATA, loading), (Phase.OTHER, zeroing)):
            if any(begin_s <= event.begin_s < end_s for begin_s, end_s in spans):
                return phase
        return Phase.FORWARD if forward_s <= event.begin_s < last_backward_s else Phase.OTHER

    phases = [phase_of(event) for event in on_host]
    launched = _launched(events, on_host, phases)
    operators = [
        *(_operator(event, phase, lanes, module_of(event)) for event, phase in zip(on_host, phases, strict=True)),
        *(_operator(event, launched.get(event.launch, Phase.OTHER), lanes, -1) for event in top if event.on_device),
    ]
    pieces = [
        (place, piece)
        for place, one in enumerate(operators)
        for piece in (_cut(one, step.cuts) if one.lane == 0 else (one,))
    ]
    pieces.sort(key=lambda pair: pair[1].begin_s)
    spans = [
        *(PhaseSpan(phase=Phase.DATA, begin_s=begin_s, end_s=end_s) for begin_s, end_s in loading),
        *_runs([one for _, one in pieces if one.lane == 0]),
        *(PhaseSpan(phase=Phase.UPDATE, begin_s=begin_s, end_s=end_s) for begin_s, end_s in step.updates),
    ]
    return StepOperators(
        operators=with_edges(pieces, readers),
        spans=tuple(sorted(spans, key=lambda span: span.begin_s)),
    )


def _last_begin_s(step: Step, events: Sequence[Event]) -> float:
    return max((event.begin_s for event in events), default=step.begin_s)


def _forward_from(
    step: Step, on_host: Sequence[Event], backward: Sequence[Event], loading: Sequence[Interval]
) -> float:
    """What comes before the data is not forward, such as metrics of the step before; unless it has a backward."""
    numbers = {event.sequence for event in backward if event.sequence >= 0}
    # What makes no node of the graph bears the number of the next one, too: the last of a number has made it.
    made = {event.sequence: event.begin_s for event in on_host if not event.name.startswith(BACKWARD)}
    first_s = min((made[number] for number in numbers & made.keys()), default=0.0)
    return next((end_s for _, end_s in loading if end_s <= first_s), step.begin_s)


def _top_level(events: Iterable[Event]) -> Iterator[Event]:
    """Those that lie in no other one of their lane; `events` by their begin, the longest first."""
    ends_s: dict[tuple[bool, int], float] = {}
    for event in events:
        key = event.on_device, event.thread
        if event.begin_s >= ends_s.get(key, 0.0):
            ends_s[key] = event.end_s
            yield event


def _launched(events: Sequence[Event], on_host: Sequence[Event], phases: Sequence[Phase]) -> dict[int, Phase]:
    """By what joins them, the phase of what has put something on a device."""
    begins = [event.begin_s for event in on_host]
    found: dict[int, Phase] = {}
    if any(event.on_device for event in events):
        for event in events:
            place = bisect_right(begins, event.begin_s) - 1
            if event.launch and not event.on_device and place >= 0:
                found[event.launch] = phases[place]
    return found


def _operator(event: Event, phase: Phase, lanes: Mapping[tuple[bool, int], int], module: int) -> Operator:
    return Operator(
        name=event.name.removeprefix(BACKWARD).removeprefix("torch::autograd::"),
        lane=lanes[event.on_device, event.thread],
        begin_s=event.begin_s,
        end_s=event.end_s,
        phase=phase,
        sequence=event.sequence,
        module=module,
    )


def _cut(operator: Operator, cuts: Sequence[Interval]) -> Iterator[Operator]:
    """What is left of it outside of these intervals, which follow each other."""
    begin_s = operator.begin_s
    for cut_begin_s, cut_end_s in cuts:
        if cut_end_s > begin_s and cut_begin_s < operator.end_s:
            if cut_begin_s - begin_s > LEAST_S:
                yield replace(operator, begin_s=begin_s, end_s=cut_begin_s)
            begin_s = cut_end_s
    if operator.end_s - begin_s > LEAST_S:
        yield replace(operator, begin_s=begin_s)


def _runs(operators: Sequence[Operator]) -> Iterator[PhaseSpan]:
    """Forward and backward passes: neighbours of one phase, whatever other phases have in between."""
    run: PhaseSpan | None = None
    for one in sorted(operators, key=lambda one: one.begin_s):
        if one.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        if run is not None and run.phase is one.phase:
            run = replace(run, end_s=max(run.end_s, one.end_s))
            continue
        if run is not None:
            yield run
        run = PhaseSpan(phase=one.phase, begin_s=one.begin_s, end_s=one.end_s)
    if run is not None:
        yield run
