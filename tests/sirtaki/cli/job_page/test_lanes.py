from dataclasses import replace

import pytest
from fakes.played_jobs import record
from fakes.recordings import recording as made
from fakes.replays import over_a_link

from sirtaki.analysis.job_model import Histories, histories
from sirtaki.analysis.recording import Detail, Operator
from sirtaki.analysis.timeline_plot import Kind, Lane, Span, coarsened, lanes_of
from sirtaki.autotune.model.replayer import Phase


def lanes(found: Histories) -> dict[tuple[int, str], Lane]:
    return {(lane.rank, lane.name): lane for lane in lanes_of(found, found.steps[0], found.ranks)}


def test_every_rank_has_its_thread_its_copies_and_its_streams() -> None:
    found = histories(record(over_a_link()))
    drawn = lanes(found)
    names = ("training thread", "copies", "gloo stream 0", "gloo stream 1")
    assert list(drawn) == [(rank, name) for rank in (0, 1) for name in names]
    thread = drawn[0, "training thread"]
    computes = [span for span in thread.spans if span.kind is not Kind.EXPOSED]
    recorded = found.recording.ranks[0].iterations[0].operators
    assert [span.name for span in computes] == [one.name for one in recorded if one.end_s > one.begin_s]
    assert sum(len(drawn[0, name].spans) for name in names[2:]) == 3
    assert len(drawn[0, "copies"].spans) == 3
    assert lanes_of(found, found.steps[0], (1,)) == [lane for lane in drawn.values() if lane.rank == 1]


def test_a_units_box_begins_with_its_last_rank_and_knows_how_long_others_waited() -> None:
    drawn = lanes(histories(made(2)))
    boxes = [drawn[rank, "gloo stream 1"].spans[0] for rank in (0, 1)]
    late = boxes[1]
    assert {one.begin_s for one in boxes} == {late.begin_s}
    assert late.issued_s == late.begin_s
    assert boxes[0].issued_s == pytest.approx(late.begin_s - 0.01)
    assert (late.n_bytes, late.kind) == (832, Kind.EXPOSED)
    assert drawn[0, "gloo stream 0"].spans[0].kind is Kind.UNIT


def test_phases_lie_under_the_operators_and_are_all_there_is_without_them() -> None:
    with_them, without = (
        lanes(histories(record(over_a_link(), detail=detail)))[0, "training thread"]
        for detail in (Detail.OPERATORS, Detail.UNITS)
    )
    assert {span.kind for span in with_them.under} >= {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE}
    assert {span.kind for span in without.spans} == {Kind.EXPOSED}
    assert {span.kind for span in without.under} >= {Kind.BACKWARD, Kind.UPDATE}


def test_other_threads_have_lanes_on_the_jobs_clock() -> None:
    recording = made(2)
    rank = recording.ranks[1]
    beside = Operator(name="pin", lane=1, begin_s=rank.iterations[0].begin_s + 0.01, end_s=rank.iterations[0].end_s,
                      phase=Phase.DATA)  # fmt: skip
    first = replace(rank.iterations[0], operators=(*rank.iterations[0].operators, beside))
    rank = replace(rank, lanes=("train", "thread 7"), iterations=(first, *rank.iterations[1:]))
    drawn = lanes(histories(replace(recording, ranks={**recording.ranks, 1: rank})))
    (span,) = drawn[1, "thread 7"].spans
    assert (span.name, span.kind) == ("pin", Kind.DATA)
    assert span.begin_s - drawn[1, "training thread"].under[0].begin_s == pytest.approx(0.01)


def test_short_neighbours_of_one_kind_become_one_box() -> None:
    def box(begin: float, end: float, kind: Kind = Kind.FORWARD, name: str = "a") -> Span:
        return Span(begin_s=begin, end_s=end, kind=kind, name=name)

    spans = (
        box(0, 1), box(1, 2), box(2, 3, name="b"), box(3, 4, Kind.BACKWARD), box(4, 40, Kind.BACKWARD), box(60, 61),
        box(61, 62),
    )  # fmt: skip
    (lane,) = coarsened([Lane(rank=0, name="x", spans=spans)], 10)
    told = [(span.begin_s, span.end_s, span.name) for span in lane.spans]
    assert told == [(0, 3, "3 × operators"), (3, 4, "a"), (4, 40, "a"), (60, 62, "2 × a")]


def test_units_are_never_put_together() -> None:
    spans = tuple(Span(begin_s=at, end_s=at + 1, kind=Kind.UNIT, name="u", issued_s=at) for at in range(4))
    (lane,) = coarsened([Lane(rank=0, name="x", spans=spans)], 10)
    assert lane.spans == spans
