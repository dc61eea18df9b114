"""What the script reads is read here the same way."""

from dataclasses import replace

import pytest
from fakes.played_jobs import record
from fakes.recordings import recording as made
from fakes.replays import over_a_link

from sirtaki.analysis.global_graph import play
from sirtaki.analysis.job_model import Histories, histories, job_model
from sirtaki.analysis.timeline_plot import MOST_BOXES, TICKS_PER_S, Kind, Leg, Timeline, drawn_path, lanes_of, timeline

NAMES = {kind: kind.value for kind in Kind}


def of(found: Histories, *, paths: dict[int, tuple[Leg, ...]] | None = None, most: int = MOST_BOXES) -> Timeline:
    return timeline(found, found.ranks, paths or {}, kind_names=NAMES, most_boxes=most)


def boxes(drawn: Timeline, flat: list[int], stride: int) -> list[tuple[float, float, str, list[int]]]:
    found, now = [], 0
    for at in range(0, len(flat), stride):
        begin = now + flat[at]
        now = begin + flat[at + 1]
        name = drawn.data["names"][flat[at + 3]]
        found.append((begin / TICKS_PER_S, now / TICKS_PER_S, name, flat[at + 4 : at + stride]))
    return found


def test_boxes_come_back_as_they_were() -> None:
    found = histories(made(2))
    drawn = of(found)
    first = drawn.data["iterations"][0]
    step = next(step for step in found.steps if step.number == first["number"])
    begin_s = min(mine[0].begin_s for mine in step.stretches.values())
    lanes = lanes_of(found, step, found.ranks)
    assert [(lane["rank"], lane["name"]) for lane in first["lanes"]] == [(lane.rank, lane.name) for lane in lanes]
    for told, lane in zip(first["lanes"], lanes, strict=True):
        read = boxes(drawn, told["units"], 6) if "units" in told else boxes(drawn, told["boxes"], 4)
        assert [name for _, _, name, _ in read] == [span.name for span in lane.spans]
        for (from_s, to_s, _, more), span in zip(read, lane.spans, strict=True):
            assert (from_s, to_s) == pytest.approx((span.begin_s - begin_s, span.end_s - begin_s), abs=2e-7)
            if span.issued_s is not None:
                n_bytes, queued = more
                assert (n_bytes, queued / TICKS_PER_S) == (
                    span.n_bytes,
                    pytest.approx(span.begin_s - span.issued_s, abs=2e-7),
                )


def test_the_median_iteration_comes_first() -> None:
    recording = made(2, n_iterations=3)
    lengths_s = (0.1, 0.3, 0.2)

    def longer(rank):  # type: ignore[no-untyped-def]
        return replace(
            rank,
            iterations=tuple(
                replace(one, end_s=one.begin_s + length_s)
                for one, length_s in zip(rank.iterations, lengths_s, strict=True)
            ),
        )

    ranks = {number: longer(rank) for number, rank in recording.ranks.items()}
    drawn = of(histories(replace(recording, ranks=ranks)))
    assert [one["ms"] for one in drawn.data["iterations"]] == pytest.approx([200, 100, 300])
    assert drawn.notes == ()


def test_a_page_that_would_be_too_large_has_fewer_iterations_and_then_larger_boxes() -> None:
    found = histories(record(over_a_link(iterations=6)))
    whole = of(found)
    assert len(whole.data["iterations"]) == 6

    def count(drawn: Timeline) -> int:
        lanes = [lane for each in drawn.data["iterations"] for lane in each["lanes"]]
        return sum(
            (len(lane["under"]) + len(lane.get("boxes", ()))) // 4 + len(lane.get("units", ())) // 6 for lane in lanes
        )

    fewer = of(found, most=count(whole) - 1)
    assert len(fewer.data["iterations"]) == 3
    assert fewer.notes == ("Of 6 iterations the median, the shortest and the longest one are drawn.",)
    assert count(fewer) == count(whole) // 2
    most = count(whole) // 2 - 12
    smaller = of(found, most=most)
    assert count(smaller) <= most
    assert len(smaller.notes) == 3  # the median one is whole
    assert all("are drawn as one box" in note for note in smaller.notes[1:])
    assert not any(f"iteration {smaller.data['iterations'][0]['number']} " in note for note in smaller.notes)


def test_the_path_is_where_its_lanes_are_and_only_there() -> None:
    found = histories(record(over_a_link()))
    paths = drawn_path(found, play(job_model(found)))
    drawn = of(found, paths=paths)
    for each in drawn.data["iterations"]:
        assert len(each["path"]) == len(paths[each["number"]])
        assert each["path"][-1][1] == pytest.approx(each["ticks"], abs=2)
    one = timeline(found, (1,), paths, kind_names=NAMES)
    for each in one.data["iterations"]:
        assert {lane["rank"] for lane in each["lanes"]} == {1}
        assert len(each["path"]) == sum(leg.rank == 1 for leg in paths[each["number"]])
