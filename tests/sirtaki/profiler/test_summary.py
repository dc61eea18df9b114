from dataclasses import replace

from fakes import recordings

from sirtaki.analysis.alignment import align, summary
from sirtaki.analysis.recording import Detail, Recording


def lines(recording: Recording) -> list[str]:
    return list(summary(recording, align(recording)))


def test_steps_and_phases_of_each_rank_are_shown() -> None:
    shown = lines(recordings.recording())
    assert shown[0] == "3 iterations of 2 ranks on 1 host, with operators"
    assert shown[1] == "one clock; times of operators within 2.0 µs"
    assert shown[3].split() == ["rank", "step", "data", "forward", "backward", "update", "exposed"]
    assert shown[4].split() == ["0", "100.00", "5.00", "25.00", "50.00", "-", "10.00"]


def test_what_is_not_as_it_should_be_is_said() -> None:
    shown = lines(replace(recordings.recording(), problems=("rank 2 of 3 is missing",)))
    assert shown[1] == "  but: rank 2 of 3 is missing"


def test_how_clocks_were_found_is_said() -> None:
    apart = recordings.recording(2, ranks_per_host=1)
    assert "2 ranks on 2 hosts" in lines(apart)[0]
    assert lines(apart)[1].startswith("clocks are aligned by the units, within ")
    silent = replace(apart.ranks[1], iterations=tuple(replace(one, units=()) for one in apart.ranks[1].iterations))
    assert "what was asked for at the start, within 20 µs" in lines(replace(apart, ranks={**apart.ranks, 1: silent}))[1]


def test_units_alone_and_many_ranks_are_shown_shortly() -> None:
    many = recordings.recording(40, ranks_per_host=40)
    bare = {number: replace(rank, detail=Detail.UNITS, clock_error_s=0.0) for number, rank in many.ranks.items()}
    shown = lines(replace(many, ranks=bare))
    assert shown[0] == "3 iterations of 40 ranks on 1 host, units only"
    assert shown[1] == "one clock"
    assert "   and 24 more" in shown


def test_a_rank_that_recorded_nothing_has_no_times() -> None:
    whole = recordings.recording()
    empty = replace(whole.ranks[1], iterations=())
    assert lines(replace(whole, ranks={**whole.ranks, 1: empty}))[5].split() == ["1"] + ["-"] * 6
