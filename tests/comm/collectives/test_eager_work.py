"""An operation under way, and what the timeline is told of operations that travelled together."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm import recorder, timeline
from sirtaki.comm.collectives import engine
from sirtaki.comm.collectives.engine import EagerWork, tell_of_operations
from sirtaki.comm.collectives.operations import Kind, Signature
from sirtaki.errors import CommError


def work(name: str) -> EagerWork:
    tensors = [torch.zeros(2)]
    return EagerWork(Signature.of(tensors, name=name, kind=Kind.ALLREDUCE, op="sum"), tensors)


class Noting:
    """A timeline that keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self.overlaps: list[tuple[str, float, float, dict[str, Any]]] = []

    def span(self, track: str, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        self.spans.append((track, name, begin_s, end_s, arguments))

    def overlapping(self, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        self.overlaps.append((name, begin_s, end_s, arguments))


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Noting:
    noting = Noting()
    monkeypatch.setattr(timeline, "current", noting)
    return noting


def test_a_work_knows_what_was_submitted_and_when_and_ends_once() -> None:
    before_s = time.monotonic()
    made = work("a")
    assert before_s <= made.submitted_s <= time.monotonic()
    assert made.digest == made.signature.digest()
    assert made.written is None  # on the host a tensor has its values
    assert made.results == []
    assert not made.is_done()
    assert not made.wait(0.0)
    made.finish()
    assert made.is_done()
    assert made.wait(0.0)
    assert made.wait(0.0)


def test_an_operation_without_tensors_has_none_to_wait_for() -> None:
    assert EagerWork(Signature.of([], name="barrier", kind=Kind.BARRIER), []).written is None


def test_whoever_waits_for_a_failed_operation_gets_an_error_of_its_own() -> None:
    made = work("a")
    made.finish(CommError("rank 1 has ended"))
    raised = []
    for _ in range(2):
        with pytest.raises(CommError, match="rank 1 has ended") as caught:
            made.wait(0.0)
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_operations_of_one_message_share_a_span_and_each_has_its_own(trace: Noting) -> None:
    works = [work("a"), work("b")]
    begin_s = time.perf_counter()
    tell_of_operations([each.signature for each in works], works, begin_s)
    assert [(track, name, arguments) for track, name, _, _, arguments in trace.spans] == [
        ("eager", "ALLREDUCE", {"names": "a, b"}),
        ("eager", "a", {}),
        ("eager", "b", {}),
    ]
    assert {(begin, end) for _, _, begin, end, _ in trace.spans} == {(begin_s, trace.spans[0][3])}
    assert begin_s <= trace.spans[0][3] <= time.perf_counter()


def test_the_negotiation_of_each_begins_when_it_was_submitted_on_the_other_clock(
    trace: Noting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: time.perf_counter() + 1000.0)
    monkeypatch.setattr(engine, "time", other)
    early = work("early")
    early.submitted_s = time.monotonic() - 5.0
    begin_s = other.perf_counter()
    tell_of_operations([early.signature], [early], begin_s)
    ((name, submitted_s, negotiated_s, arguments),) = trace.overlaps
    assert (name, arguments) == ("NEGOTIATE_ALLREDUCE", {"operation": "early"})
    assert negotiated_s == begin_s
    assert begin_s - submitted_s == pytest.approx(5.0, abs=1.0)


def test_a_rank_that_has_joined_negotiated_nothing(trace: Noting) -> None:
    mine = work("a")
    others = Signature.of([torch.zeros(2)], name="b", kind=Kind.ALLREDUCE, op="sum")
    tell_of_operations([mine.signature, others], [mine, None], 0.0)
    assert [arguments["operation"] for _, _, _, arguments in trace.overlaps] == ["a"]
    assert len(trace.spans) == 3


def test_a_recorder_hears_of_this_ranks_operations_and_of_their_moments_on_one_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    mine = work("a")
    mine.submitted_s = time.monotonic() - 5.0
    agreed_s = time.perf_counter()
    monkeypatch.setattr(recorder, "current", SimpleNamespace(operation=heard.append))
    tell_of_operations([mine.signature] * 2, [mine, None], agreed_s)
    (told,) = heard
    assert (told.name, told.kind, told.agreed_s) == ("a", "ALLREDUCE", agreed_s)
    assert agreed_s - told.submitted_s == pytest.approx(5.0, abs=1.0)
    assert agreed_s <= told.done_s <= time.perf_counter()
    assert told.n_bytes == sum(tensor.numel() * tensor.element_size() for tensor in mine.tensors)
