"""Ranks agree on ready gradients, traces contain units, and a stalled device is detected."""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.meshes import at_once

from sirtaki.comm.control.communicator import Backend, Op
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.device import Device
from sirtaki.comm.gradients import trace
from sirtaki.comm.gradients.negotiation import ReadinessNegotiation
from sirtaki.comm.gradients.trace import InFlight, IterationEvents, IterationTrace
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import CommError

RANKS = 3


class Rounds:
    """All-reduces by AND among threads of this process: the n-th of every rank is one."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.ranks, self.lock = ranks, threading.Lock()
        self.given: list[list[np.ndarray]] = []

    def communicator(self) -> "Communicator":
        return Communicator(self)


class Communicator:
    backend = Backend.MPI

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self.used = rounds, 0

    def all_reduce(self, array: np.ndarray, op: Op) -> "Request":
        assert op is Op.AND
        with self._rounds.lock:
            if len(self._rounds.given) == self.used:
                self._rounds.given.append([])
            self._rounds.given[self.used].append(array.copy())
        self.used += 1
        return Request(self._rounds, self.used - 1, array)


class Request:
    def __init__(self, rounds: Rounds, number: int, result: np.ndarray) -> None:
        self._rounds, self._number, self._result = rounds, number, result

    def __call__(self) -> bool:
        with self._rounds.lock:
            given = self._rounds.given[self._number]
            if len(given) < self._rounds.ranks:
                return False
            self._result[:] = np.bitwise_and.reduce(given)
        return True


@pytest.mark.parametrize("granularity_bytes", [1, 40, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_learn_the_same_rounds_from_any_orders(seed: int, granularity_bytes: int) -> None:
    rounds, rng = Rounds(), random.Random(seed)
    n_gradients = rng.randrange(1, 30)
    sizes_bytes = np.array([rng.randrange(0, 50) for _ in range(n_gradients)])
    ready: list[set[int]] = [set() for _ in range(RANKS)]
    agreed: list[list[list[int]]] = [[] for _ in range(RANKS)]
    communicators = [rounds.communicator() for _ in range(RANKS)]

    def rank(number: int) -> None:
        own = random.Random(100 * seed + number)
        negotiation_ = ReadinessNegotiation(communicators[number], FailureBoard())  # type: ignore[arg-type]

        def on_agreed(indices: list[int]) -> None:
            assert all(set(indices) <= other for other in ready), "agreed before every rank was ready"
            assert indices == sorted(indices)
            agreed[number].append(indices)

        for _ in range(2):  # backward passes
            negotiation_.begin(sizes_bytes, granularity_bytes=granularity_bytes, on_agreed=on_agreed)
            left_out = own.randrange(n_gradients) if own.random() < 0.5 else None
            for index in own.sample(range(n_gradients), n_gradients):
                if index != left_out:
                    ready[number].add(index)
                    negotiation_.set_ready(index)
                if own.random() < 0.2:
                    time.sleep(0.001)
            if left_out is not None:  # the pass ends without it
                ready[number].add(left_out)
                negotiation_.end()
            assert negotiation_.wait()
            meeting.wait()
            ready[number].clear()
            meeting.wait()
        assert negotiation_.close()

    meeting = threading.Barrier(RANKS)
    at_once(rank, range(RANKS))
    assert agreed[0] == agreed[1] == agreed[2]
    everything = sorted(index for indices in agreed[0] for index in indices)
    assert everything == sorted(2 * list(range(n_gradients)))
    assert len({each.used for each in communicators}) == 1, "a rank began a round that no other one joins"


def test_an_interrupted_wait_can_be_continued() -> None:
    rounds = Rounds(ranks=2)
    alone = ReadinessNegotiation(rounds.communicator(), FailureBoard())  # type: ignore[arg-type]
    found: list[int] = []
    alone.begin(np.array([8]), granularity_bytes=1, on_agreed=found.extend)
    alone.set_ready(0)
    assert not alone.wait(lambda: True)
    other = rounds.communicator()
    other.all_reduce(np.packbits([True]), Op.AND)
    assert alone.wait(lambda: False)
    assert found == [0]
    assert alone.close()


def test_a_round_without_answers_is_given_up_and_reported() -> None:
    alone = ReadinessNegotiation(Rounds(ranks=2).communicator(), FailureBoard())  # type: ignore[arg-type]
    alone.begin(np.array([8]), granularity_bytes=1, on_agreed=lambda indices: None)
    alone.set_ready(0)
    time.sleep(0.05)
    assert not alone.close(), "the communicator is in use for ever"


def test_a_failed_job_ends_the_wait() -> None:
    failures = FailureBoard()
    alone = ReadinessNegotiation(Rounds(ranks=2).communicator(), failures)  # type: ignore[arg-type]
    alone.begin(np.array([8]), granularity_bytes=1, on_agreed=lambda indices: None)
    alone.set_ready(0)
    failures.report(CommError("rank 1 has ended"))
    with pytest.raises(CommError, match="rank 1 has ended"):
        alone.wait()


LAYOUT = GradientLayout(sizes=(10, 20, 30), names=("a", "b", "c"), itemsize_bytes=2)
GROUP = SimpleNamespace(layout=LAYOUT)


class Noting:
    """A timeline that keeps its entries."""

    def __init__(self) -> None:
        self.spans: list[tuple[Any, ...]] = []

    def span(self, *of: Any, **arguments: Any) -> None:
        self.spans.append((*of, *arguments.values()))

    overlapping = span


class OtherClock(Device):
    """Its clock is ten times as fast and counts from elsewhere; what is asked of it is converted."""

    def elapsed_s(self, begin: int, end: int) -> float:  # type: ignore[override]
        return (end - begin) / 10


@pytest.mark.parametrize(
    ("device", "moment"), [(Device(), float), (OtherClock(), lambda at_s: round(600 + 10 * (at_s - 100.0)))]
)
def test_a_trace_tells_of_an_iteration_and_of_each_unit_in_turn_on_the_hosts_clock(
    monkeypatch: pytest.MonkeyPatch, device: Device, moment: Callable[[float], Any]
) -> None:
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=lambda: 100.0))

    def unit(issued: float, begun: float | None, done: float | None, *, stream: int = 0, start: int = 0) -> Any:
        times = [at_s and moment(at_s) for at_s in (begun, done)]
        route = (TransportKind.GLOO, Algorithm.FLAT)
        one = SimpleNamespace(group=GROUP, start=start, stop=start + 5, stream=stream, route=route)
        return one, SimpleNamespace(times=lambda: times), moment(issued)

    units = [
        unit(91.0, 92.0, 94.0, stream=2, start=8),
        unit(91.0, None, 94.0),  # a transport that tells no beginning takes them one after the other
        unit(92.0, None, 96.0),
        unit(92.5, None, 95.0),  # it does not last less than nothing
        unit(97.0, None, None),  # its end is not known: that of all
    ]
    timeline, buffers = Noting(), SimpleNamespace(groups=[GROUP], layout_places=[])
    copies = [(moment(92.0), moment(92.5), 3)]
    tracing = IterationTrace(device, None, buffers, timeline, None, copies, units)  # type: ignore[arg-type]
    tracing.write(IterationEvents(7, moment(90.0), moment(95.0), moment(100.0)), profiling=False)
    assert timeline.spans == [
        ("iterations", "iteration 7", 90.0, 100.0, "scheduled"),
        ("iterations", "backward", 90.0, 95.0),
        ("iterations", "wait", 95.0, 100.0),
        ("copies", "copy 3 gradients", 92.0, 92.5),
        ("gloo stream 2 queue", 91.0, 92.0, "a … b (2)", 10),
        ("gloo stream 2", "a … b (2)", 92.0, 94.0, 10),
        ("gloo stream 0", "a", 91.0, 94.0, 10),
        ("gloo stream 0 queue", 92.0, 94.0, "a", 10),
        ("gloo stream 0", "a", 94.0, 96.0, 10),
        ("gloo stream 0 queue", 92.5, 96.0, "a", 10),
        ("gloo stream 0", "a", 96.0, 96.0, 10),
        ("gloo stream 0", "a", 97.0, 100.0, 10),
    ]
    # A backward pass that was over before the first gradient is none.
    timeline.spans.clear()
    IterationTrace(device, None, buffers, timeline, None).write(  # type: ignore[arg-type]
        IterationEvents(8, moment(95.0), moment(90.0), moment(100.0)), profiling=True
    )
    assert [span[1:] for span in timeline.spans] == [
        ("iteration 8", 95.0, 100.0, "order profiling"),
        ("wait", 95.0, 100.0),
    ]


class Reaching(Device):
    """Reaches events up to `now`."""

    now = 0.0

    def is_reached(self, event: float) -> bool:
        return event <= self.now


def made() -> tuple[Reaching, InFlight]:
    device = Reaching()
    in_flight = InFlight(device)  # type: ignore[arg-type]
    for number in range(3):
        in_flight.add(IterationEvents(number, 10.0 * number, 10.0 * number + 2, 10.0 * number + 5))
    return device, in_flight


def test_only_a_reduction_after_the_end_of_its_backward_pass_can_stall() -> None:
    device, in_flight = made()
    device.now = 11.0  # in the second backward pass
    assert in_flight.stalled() is None
    device.now = 13.0
    first = in_flight.stalled()
    assert first is not None
    assert first[0] == 1
    assert in_flight.stalled() == first  # since the first time that it was seen
    device.now = 16.0
    assert in_flight.stalled() is None
    device.now = 24.0
    second = in_flight.stalled()
    assert second is not None
    assert second[0] == 2
    assert in_flight.busy
    device.now = 25.0
    assert in_flight.stalled() is None
    assert not in_flight.busy
    assert not InFlight(device).busy  # type: ignore[arg-type]


def test_the_first_unit_that_is_not_reduced_is_named() -> None:
    _, in_flight = made()
    assert in_flight.unreduced_unit() == ""

    def unit(stream: int) -> Any:
        layout = SimpleNamespace(describe=lambda start, stop: f"elements {start} to {stop}")
        return SimpleNamespace(group=SimpleNamespace(layout=layout), start=stream, stop=9, stream=stream)

    works: list[Any] = [SimpleNamespace(is_done=lambda done=done: done) for done in (True, False, False)]
    in_flight.units = list(zip([unit(0), unit(1), unit(2)], works, strict=True))
    assert in_flight.unreduced_unit() == "unit 2 of 3 (elements 1 to 9) on stream 1"
