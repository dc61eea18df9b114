"""The timeline of one iteration: what overlaps, what follows what, and what is not written at all."""

from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients import iteration as iteration_trace
from sirtaki.comm.gradients.iteration import IssuedUnit, IterationEvents, IterationTrace
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind

LAYOUT = GradientLayout(sizes=(10, 20, 30), names=("a", "b", "c"), itemsize_bytes=2)
END_S = 100.0


class Noting:
    """A timeline that keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self.overlaps: list[tuple[str, float, float, dict[str, Any]]] = []

    def span(self, track: str, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        self.spans.append((track, name, begin_s, end_s, arguments))

    def overlapping(self, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        self.overlaps.append((name, begin_s, end_s, arguments))


class Moment:
    """An event of a device with a clock of its own."""

    def __init__(self, at: float) -> None:
        self.at = at


class OtherClock(HostDevice):
    """Its clock is ten times as fast and counts from elsewhere; what is asked of it is converted."""

    def elapsed_s(self, begin: Moment, end: Moment) -> float:  # type: ignore[override]
        return (end.at - begin.at) / 10


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_trace, "time", SimpleNamespace(perf_counter=lambda: END_S))


def trace() -> tuple[IterationTrace, Noting]:
    timeline = Noting()
    return IterationTrace(timeline, HostDevice()), timeline  # type: ignore[arg-type]


def unit(issued: float, begun: float | None, done: float | None, *, stream: int = 0, start: int = 0) -> IssuedUnit:
    work: Any = SimpleNamespace(times=lambda: (begun, done))
    return IssuedUnit(
        layout=LAYOUT,
        start=start,
        stop=start + 5,
        stream=stream,
        route=(TransportKind.GLOO, Algorithm.FLAT),
        work=work,
        issued=issued,
    )


def test_an_iteration_has_its_backward_pass_and_the_wait_behind_it() -> None:
    tracing, timeline = trace()
    tracing.write(IterationEvents(7, 90.0, 95.0, 99.0), profiling=False)
    assert timeline.spans == [
        ("iterations", "iteration 7", 90.0, END_S, {"kind": "scheduled"}),
        ("iterations", "backward", 90.0, 95.0, {}),
        ("iterations", "wait", 95.0, END_S, {}),
    ]


def test_a_backward_pass_that_was_over_before_the_first_gradient_is_none() -> None:
    tracing, timeline = trace()
    tracing.write(IterationEvents(0, 95.0, 90.0, 99.0), profiling=True)
    assert timeline.spans == [
        ("iterations", "iteration 0", 95.0, END_S, {"kind": "order profiling"}),
        ("iterations", "wait", 95.0, END_S, {}),
    ]


def test_copies_are_told_with_how_many_gradients_they_copied() -> None:
    tracing, timeline = trace()
    tracing.device = SimpleNamespace(record_event=lambda: 92.5)  # type: ignore[assignment]
    tracing.copied(92.0, 3)
    tracing.write(IterationEvents(0, 90.0, 95.0, 99.0), profiling=False)
    assert timeline.spans[3:] == [("copies", "copy 3 gradients", 92.0, 92.5, {})]


def test_a_unit_waits_in_the_queue_until_its_transport_begins() -> None:
    tracing, timeline = trace()
    tracing.units = [unit(91.0, 92.0, 94.0, stream=2, start=8)]
    tracing.write(IterationEvents(0, 90.0, 95.0, 99.0), profiling=False)
    assert timeline.spans[3:] == [("gloo stream 2", "a … b (2)", 92.0, 94.0, {"bytes": 10})]
    assert timeline.overlaps == [("gloo stream 2 queue", 91.0, 92.0, {"unit": "a … b (2)", "bytes": 10})]


def test_a_unit_that_begins_at_once_was_in_no_queue() -> None:
    tracing, timeline = trace()
    tracing.units = [unit(91.0, 91.0, 94.0)]
    tracing.write(IterationEvents(0, 90.0, 95.0, 99.0), profiling=False)
    assert timeline.overlaps == []


def test_a_transport_that_tells_no_beginning_takes_a_streams_units_one_after_the_other() -> None:
    tracing, timeline = trace()
    tracing.units = [
        unit(91.0, None, 94.0, stream=0),
        unit(91.5, None, 93.0, stream=1),
        unit(92.0, None, 96.0, stream=0),
        unit(97.0, None, None, stream=0),
    ]
    tracing.write(IterationEvents(0, 90.0, 95.0, 99.0), profiling=False)
    assert [(track, begin, end) for track, _, begin, end, _ in timeline.spans[3:]] == [
        ("gloo stream 0", 91.0, 94.0),
        ("gloo stream 1", 91.5, 93.0),
        ("gloo stream 0", 94.0, 96.0),
        ("gloo stream 0", 97.0, END_S),  # its end is not known: that of all
    ]
    assert timeline.overlaps == [("gloo stream 0 queue", 92.0, 94.0, {"unit": "a", "bytes": 10})]


def test_a_unit_that_ended_before_it_was_told_to_begin_does_not_last_less_than_nothing() -> None:
    tracing, timeline = trace()
    tracing.units = [unit(91.0, None, 96.0), unit(92.0, None, 95.0)]
    tracing.write(IterationEvents(0, 90.0, 95.0, 99.0), profiling=False)
    assert timeline.spans[-1][2:4] == (96.0, 96.0)


def test_moments_of_a_device_are_counted_back_from_the_end_of_the_iteration() -> None:
    timeline = Noting()
    tracing = IterationTrace(timeline, OtherClock())  # type: ignore[arg-type]
    tracing.units = [unit(Moment(520), Moment(540), Moment(580))]  # type: ignore[arg-type]
    tracing.write(IterationEvents(0, Moment(500), Moment(550), Moment(600)), profiling=False)
    assert [(begin, end) for _, _, begin, end, _ in timeline.spans] == [
        (90.0, END_S),
        (90.0, 95.0),
        (95.0, END_S),
        (94.0, 98.0),
    ]
    assert timeline.overlaps[0][1:3] == (92.0, 94.0)
