"""Recordings: their files, their ranks on one clock, and their trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import memories, recordings
from fakes.played_jobs import record
from fakes.played_jobs import written as write
from fakes.replays import on_one_host

from sirtaki.analysis import recording as folder
from sirtaki.analysis.alignment import OffsetSource, align, headlines, rank_rows, trace_entries, write_trace
from sirtaki.analysis.global_graph import path_spans, play
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.recording import (
    FORMAT_VERSION,
    Detail,
    RankRecording,
    RecordedIteration,
    RecordedUnit,
    Recording,
    job_from_json,
    job_to_json,
    rank_from_json,
    rank_to_json,
)
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.errors import RecordingError

# ── recording ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slowed_steps_determine_the_step_time_only_if_there_are_no_others() -> None:
    recorded = recordings.recording()

    def marked(*marks: dict[str, bool]) -> tuple[int, ...]:
        return recordings.with_iterations(
            recorded, lambda one: replace(one, **marks[one.number - 102]), 1
        ).usual_iterations

    profiling, slowed = {"profiling": True}, {"slowed": True}
    assert marked({}, {}, {}) == (102, 103, 104)
    assert marked(slowed, slowed, {}) == (104,)
    assert marked(profiling, slowed, {}) == (104,)
    assert marked(profiling, slowed, slowed) == (103, 104)
    assert marked(profiling, profiling, profiling) == ()


def test_usual_iterations_follow_each_other() -> None:
    def without(*places: int) -> tuple[int, ...]:
        def kept(rank: RankRecording) -> RankRecording:
            return replace(rank, iterations=tuple(one for n, one in enumerate(rank.iterations) if n not in places))

        return recordings.with_ranks(recordings.recording(n_iterations=6), kept, 1).usual_iterations

    assert without() == (102, 103, 104, 105, 106, 107)
    assert without(1) == (104, 105, 106, 107)
    assert without(2, 5) == (105, 106)


def test_a_step_in_which_a_rank_had_joined_others_is_not_usual() -> None:
    recorded = recordings.recording()
    first, second, third = recorded.ranks[0].iterations
    assert not first.joined
    merged = replace(second, units=(*first.units, *second.units))
    assert merged.joined
    joined = recordings.with_ranks(recorded, lambda rank: replace(rank, iterations=(first, merged, third)), 0)
    assert joined.usual_iterations == (104,)


# ── recording json ────────────────────────────────────────────────────────────────────────────────────────────────


def again(rank: RankRecording) -> RankRecording:
    return rank_from_json(json.loads(json.dumps(rank_to_json(rank))))


def test_a_recording_is_read_as_written_to_the_nanosecond() -> None:
    rank = recordings.rank(1, late_s=0.01)
    back = again(rank)
    assert replace(back, iterations=()) == replace(rank, iterations=())
    for mine, theirs in zip(back.iterations, rank.iterations, strict=True):
        assert mine.units[0].unit == theirs.units[0].unit
        assert (mine.units[1].begin_s, mine.operators[1].after) == (None, (0,))
        assert mine.operators[0].begin_s == pytest.approx(theirs.operators[0].begin_s, abs=1e-9)
    assert again(back) == back
    rank = memories.recording().ranks[0]
    assert (again(rank).modules, again(rank).memory) == (rank.modules, rank.memory)
    rate = RateCurve(gamma_1=2.0, gamma_2=1.0, gamma_3=0.5)
    contention = ContentionModel(alpha_1=1.0, alpha_2=1e-4, overlapped=rate, alone=rate)
    job = replace(recordings.job(3, ranks_per_host=1), contention=contention)
    assert job_from_json(json.loads(json.dumps(job_to_json(job)))) == job


def test_names_of_operators_are_written_once() -> None:
    assert rank_to_json(recordings.rank(0))["operator_names"] == ["aten::linear", "AddmmBackward0"]
    rank = replace(memories.recording().ranks[0], memory=memories.chain())
    assert rank_to_json(rank)["memory"]["operators"] == ["", "aten::mm"]


# ── folder ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path, recordings.recording(4, ranks_per_host=2))


def test_a_whole_folder_is_read_without_a_word(written: Path) -> None:
    recording = folder.read_folder(written)
    assert recording.problems == ()
    assert sorted(recording.ranks) == [0, 1, 2, 3]
    assert recording.common_iterations == (102, 103, 104)
    assert recording.job == recordings.job(4)


def test_recordings_of_killed_ranks_are_shown(written: Path) -> None:
    folder.rank_path(written, 2).unlink()
    folder.write_rank(written, replace(recordings.rank(3, n_iterations=1), complete=False))
    recording = folder.read_folder(written)
    assert sorted(recording.ranks) == [0, 1, 3]
    assert recording.common_iterations == (102,)
    assert recording.problems == (
        "rank 2 of 4 is missing",
        "rank 3 recorded fewer iterations than the 3 wanted (1 at least)",
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read"),
        (b"\x1f\x8b\x08nonsense", "cannot be read"),
        (gzip.compress(b"{}", mtime=0)[:-9], "cannot be read"),
        (gzip.compress(b"[1, 2", mtime=0), "cannot be read"),
        (gzip.compress(json.dumps({"format": FORMAT_VERSION, "rank": 1}).encode(), mtime=0), "is damaged"),
        (None, "$.iterations[0].spans[0][1]"),
    ],
)
def test_a_damaged_file_is_named_and_left_out(written: Path, content: bytes | None, why: str) -> None:
    path = folder.rank_path(written, 1)
    if content is None:
        whole = json.loads(gzip.decompress(path.read_bytes()))
        whole["iterations"][0]["spans"][0][1] = "soon"
        content = gzip.compress(json.dumps(whole).encode())
    path.write_bytes(content)
    recording = folder.read_folder(written)
    assert sorted(recording.ranks) == [0, 2, 3]
    assert "rank-0001.json.gz" in recording.problems[0]
    assert why in recording.problems[0]


def test_a_folder_of_another_version_is_not_read(written: Path) -> None:
    data = json.loads((written / "job.json").read_text())
    (written / "job.json").write_text(json.dumps({**data, "format": 7}))
    with pytest.raises(RecordingError, match="must be 2 or 3, found 7; record the job again"):
        folder.read_folder(written)


def test_a_folder_of_the_version_before_is_read_without_modules_and_memory(written: Path) -> None:
    data = json.loads((written / "job.json").read_text())
    (written / "job.json").write_text(json.dumps({**data, "format": 2}))
    for number in range(4):
        path = folder.rank_path(written, number)
        rank = json.loads(gzip.decompress(path.read_bytes()))
        del rank["modules"], rank["memory"]
        for one in rank["iterations"]:
            one["operators"] = [row[:7] for row in one["operators"]]
        path.write_bytes(gzip.compress(json.dumps({**rank, "format": 2}).encode()))
    recording = folder.read_folder(written)
    assert recording.problems == ()
    assert sorted(recording.ranks) == [0, 1, 2, 3]
    assert recording.ranks[0].memory is None
    assert recording.ranks[0].iterations[0].operators[0].module == -1


def test_ranks_of_another_model_or_job_are_left_out(written: Path) -> None:
    folder.write_rank(written, replace(recordings.rank(2), model="another"))
    folder.write_rank(written, replace(recordings.rank(3), job="9.9"))
    recording = folder.read_folder(written)
    assert sorted(recording.ranks) == [0, 1]
    assert "the file rank-0003.json.gz belongs to another job and is ignored" in recording.problems
    assert "rank 2 trained another model than the other ranks and is ignored" in recording.problems


def test_a_recording_without_units_is_shown_with_a_word_about_clocks(tmp_path: Path) -> None:
    write(tmp_path, recordings.with_iterations(recordings.recording(), lambda one: replace(one, units=())))
    (problem,) = folder.read_folder(tmp_path).problems
    assert "no gradients were exchanged" in problem


def test_a_folder_with_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="there is no folder"):
        folder.read_folder(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="it is not a recording"):
        folder.read_folder(tmp_path)
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(RecordingError, match=r"is a file, but a recording is a folder.*`sirtaki plan`"):
        folder.read_folder(tmp_path / "log.jsonl")
    folder.write_rank(tmp_path, recordings.rank(0))
    with pytest.raises(RecordingError, match=r"files of 1 rank, but no file job.json"):
        folder.read_folder(tmp_path)
    folder.rank_path(tmp_path, 0).unlink()
    folder.write_job(tmp_path, recordings.job())
    with pytest.raises(RecordingError, match="no readable file of any rank"):
        folder.read_folder(tmp_path)


def test_only_a_recording_is_cleared(written: Path) -> None:
    (written / "notes.txt").write_text("mine")
    (written / folder.REPORT_FILE).write_text("made of it")
    assert folder.holds_recording(written)
    folder.clear(written)
    assert [path.name for path in written.iterdir()] == ["notes.txt"]
    assert not folder.holds_recording(written)


def test_many_ranks_are_counted() -> None:
    assert folder.of_ranks([3]) == "rank 3"
    assert folder.of_ranks([0, 2, 5]) == "ranks 0, 2 and 5"
    assert folder.of_ranks(range(64)) == "ranks 0, 1, 2, … (64)"


# ── alignment ─────────────────────────────────────────────────────────────────────────────────────────────────────

OFFSETS_S = (0.05, -0.05)

DRIFT = 20e-6

LEAST_TRANSFER_S = 100e-6


def drawn(
    n_ranks: int = 2,
    *,
    ranks_per_host: int = 1,
    iterations: int = 10,
    step_s: float = 0.2,
    units: int = 6,
    seed: int = 0,
) -> Recording:
    """Draw a recording with right clocks. The last rank changes from unit to unit; a transfer takes at least 100 µs."""
    rng = np.random.default_rng(seed)
    steps: list[list[RecordedIteration]] = [[] for _ in range(n_ranks)]
    for number in range(iterations):
        begin_s = 5000.0 + number * step_s
        of_rank: list[list[RecordedUnit]] = [[] for _ in range(n_ranks)]
        for unit in range(units):
            issue_s = begin_s + step_s * (unit + 1) / (units + 2) + rng.exponential(300e-6, n_ranks)
            done_s = issue_s.max() + LEAST_TRANSFER_S + rng.exponential(50e-6, n_ranks)
            for rank in range(n_ranks):
                moments_s = float(issue_s[rank]), None, float(done_s[rank])
                of_rank[rank].append(RecordedUnit(number, 0, unit, unit + 1, recordings.ROUTE, 0, *moments_s))
        for rank in range(n_ranks):
            steps[rank].append(
                RecordedIteration(number=number, begin_s=begin_s, end_s=begin_s + step_s, units=tuple(of_rank[rank]))
            )
    ranks = {rank: replace(recordings.rank(rank), iterations=tuple(steps[rank])) for rank in range(n_ranks)}
    return Recording(job=recordings.job(n_ranks, ranks_per_host=ranks_per_host), ranks=ranks)


def wrong(recording: Recording, clocks: dict[int, tuple[float, float]]) -> Recording:
    """Return the recording with wrong clocks: offset and drift by rank."""

    def moved(rank: RankRecording) -> RankRecording:
        by_s, drift = clocks[rank.rank]
        return recordings.shifted(rank, by_s=by_s, drift=drift)

    return recordings.with_ranks(recording, moved, *clocks)


def moments(rank: RankRecording) -> list[float]:
    return [moment for step in rank.iterations for unit in step.units for moment in (unit.issue_s, unit.done_s)]


def largest_error_s(true: Recording, told: Recording, rank: int) -> float:
    """After alignment, of all that the rank has recorded."""
    aligned = align(told)
    pairs = zip(moments(told.ranks[rank]), moments(true.ranks[rank]), strict=True)
    return max(abs(aligned.at(rank, moment) - wanted) for moment, wanted in pairs)


def smallest_round_trip_s(recording: Recording, one: int, other: int) -> float:
    """Return the sum of the quickest transfers in both directions between two ranks."""

    def way_s(there: int, back: int) -> float:
        issued = {u.unit: u.issue_s for step in recording.ranks[there].iterations for u in step.units}
        return min(u.done_s - issued[u.unit] for step in recording.ranks[back].iterations for u in step.units)

    return way_s(one, other) + way_s(other, one)


@pytest.mark.lengthy
@pytest.mark.parametrize("by_s", OFFSETS_S)
@pytest.mark.parametrize("drift", [0.0, DRIFT, -DRIFT])
@pytest.mark.parametrize("step_s", [0.02, 0.2, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_injected_error_is_recovered_within_half_the_smallest_round_trip(
    by_s: float, drift: float, step_s: float, seed: int
) -> None:
    true = drawn(step_s=step_s, seed=seed)
    told = wrong(true, {1: (by_s, drift)})
    bound_s = smallest_round_trip_s(true, 0, 1) / 2
    assert largest_error_s(true, told, 1) <= bound_s
    line = align(told).lines[1]
    assert line.known is OffsetSource.UNITS
    assert line.error_s == pytest.approx(bound_s, rel=0.5)


def test_several_hosts_whose_ranks_share_clocks_are_aligned_with_each_other() -> None:
    true = drawn(6, ranks_per_host=2, step_s=2.0, seed=4)
    told = wrong(true, {2: (0.05, DRIFT), 3: (0.05, DRIFT), 4: (-0.05, -DRIFT), 5: (-0.05, -DRIFT)})
    aligned = align(told)
    assert aligned.lines[2] == aligned.lines[3]
    assert aligned.lines[4] == aligned.lines[5]
    for rank in range(2, 6):
        assert largest_error_s(true, told, rank) <= smallest_round_trip_s(true, 0, rank) / 2


def test_a_rank_without_units_is_aligned_as_when_the_recording_began() -> None:
    silent = recordings.with_iterations(drawn(3, seed=3), lambda one: replace(one, units=()), 2)
    aligned = align(recordings.with_ranks(silent, lambda rank: replace(rank, offset_s=-0.05, round_trip_s=4e-5), 2))
    assert aligned.lines[2].known is OffsetSource.START
    assert aligned.at(2, 1000.0) == pytest.approx(999.95)
    assert aligned.lines[2].error_s == pytest.approx(2e-5)
    assert aligned.lines[1].known is OffsetSource.UNITS


def test_ranks_that_meet_only_through_another_are_aligned() -> None:
    true = drawn(3, seed=5)

    def every_other(first: int) -> Callable[[RecordedIteration], RecordedIteration]:
        return lambda step: replace(step, units=step.units[first::2])

    # Rank 1 takes part in all units, ranks 0 and 2 in every other one.
    true = recordings.with_iterations(true, every_other(0), 0)
    true = recordings.with_iterations(true, every_other(1), 2)
    told = wrong(true, {1: (0.03, 0.0), 2: (-0.05, 0.0)})
    bound_s = (smallest_round_trip_s(drawn(3, seed=5), 0, 1) + smallest_round_trip_s(drawn(3, seed=5), 1, 2)) / 2
    assert align(told).lines[2].known is OffsetSource.UNITS
    assert largest_error_s(true, told, 2) <= 1.5 * bound_s  # a chain knows less, and has fewer units


def test_without_rank_0_the_first_existing_rank_has_the_reference_clock() -> None:
    true = drawn(3)
    aligned = align(replace(true, ranks={rank: true.ranks[rank] for rank in (1, 2)}))
    assert aligned.reference == 1
    assert aligned.lines[1].known is OffsetSource.REFERENCE


# ── summary ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(recording: Recording) -> tuple[str, str]:
    return headlines(recording, align(recording))


def test_steps_and_phases_of_each_rank_are_shown() -> None:
    shown = recordings.recording()
    assert lines(shown) == (
        "3 iterations of 2 ranks on 1 host, with operators",
        "one clock; operator times within 2.0 µs",
    )
    first, _ = rank_rows(shown)
    assert list(first) == ["rank", "step_s", "data_s", "forward_s", "backward_s", "update_s", "exposed_s", "other_s"]
    values = [0, *(pytest.approx(one) for one in (0.1, 0.005, 0.025, 0.05)), None, 0.01, pytest.approx(0.01)]
    assert list(first.values()) == values
    bare = recordings.with_ranks(shown, lambda rank: replace(rank, detail=Detail.UNITS, clock_error_s=0.0))
    assert lines(bare) == ("3 iterations of 2 ranks on 1 host, units only", "one clock")
    none = recordings.with_ranks(shown, lambda rank: replace(rank, iterations=()))
    assert set(rank_rows(none)[0].values()) == {0, None}


def test_the_alignment_of_clocks_is_described() -> None:
    apart = recordings.recording(2, ranks_per_host=1)
    assert "2 ranks on 2 hosts" in lines(apart)[0]
    assert lines(apart)[1].startswith("clocks are aligned by units, within ")
    silent = recordings.with_iterations(apart, lambda one: replace(one, units=()), 1)
    assert "the offsets measured at the start, within 20 µs" in lines(silent)[1]


# ── trace file ────────────────────────────────────────────────────────────────────────────────────────────────────


def entries(recording: Any = None) -> list[dict[str, Any]]:
    found = recording or recordings.recording()
    return list(trace_entries(found, align(found)))


def tracks(found: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Events of each thread, by rank and the thread's name."""
    names = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in found
        if one["ph"] == "M" and one["name"] == "thread_name"
    }
    by_track = defaultdict(list)
    for one in found:
        if one["ph"] in ("X", "i"):
            by_track[one["pid"], names[one["pid"], one["tid"]]].append(one)
    return by_track


def test_a_rank_is_a_process_and_each_sequence_a_thread() -> None:
    found = entries()
    by_track = tracks(found)
    assert {name for pid, name in by_track if pid == 1} == {
        "steps", "phases", "operators: train", "copies", "gradients", "gloo stream 0", "gloo stream 1", "collectives",
    }  # fmt: skip
    steps = by_track[0, "steps"]
    assert [one["name"] for one in steps] == ["iteration 102", "iteration 103", "iteration 104"]
    assert (steps[0]["ts"], steps[1]["ts"], steps[1]["dur"]) == (0.0, pytest.approx(1e5), pytest.approx(1e5))
    units = [{one["args"]["unit"] for one in by_track[rank, "gloo stream 0"]} for rank in (0, 1)]
    assert units[0] == units[1]
    assert len(units[0]) == 3
    begins, ends = ([one for one in found if one["ph"] == kind] for kind in "be")  # of units that wait
    assert len({one["id"] for one in begins}) == len(begins) > 0
    assert all(begin["ts"] < end["ts"] and begin["id"] == end["id"] for begin, end in zip(begins, ends, strict=True))


def test_the_critical_path_is_a_process_above_the_ranks_that_fills_each_replayed_iteration() -> None:
    recording = record(on_one_host(slow={1: 2.0}, cuts=(4,), seconds_per_byte=1e-6))
    past = histories(recording)
    found = list(trace_entries(recording, align(recording), path_spans(past, play(job_model(past)))))
    path = [one for one in found if one["pid"] == 2 and one["ph"] == "X"]
    assert [one["args"]["sort_index"] for one in found if one["name"] == "process_sort_index"] == [0, 1, -1]
    for before, after in pairwise(path):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1.0)
    steps = [one for one in found if one["ph"] == "X" and one["name"].startswith("iteration")]
    assert path[0]["ts"] == min(one["ts"] for one in steps)
    assert path[-1]["ts"] + path[-1]["dur"] == pytest.approx(max(one["ts"] + one["dur"] for one in steps), abs=1.0)
    where = [one["name"].partition(":")[0] for one in path]
    assert set(where[: where.index("gloo stream 0")]) == {"rank 1"}  # the unit waits for the slow rank


def test_ranks_with_different_clocks_are_shown_on_one() -> None:
    found = entries(wrong(recordings.recording(2, ranks_per_host=1), {1: (3.0, 0.0)}))
    begins = [tracks(found)[rank, "steps"][0]["ts"] for rank in (0, 1)]
    assert begins[1] == pytest.approx(begins[0], abs=2e4)  # units of 20 ms


def test_the_file_is_json_that_the_format_allows(tmp_path: Path) -> None:
    recording = recordings.recording()
    data = json.loads(write_trace(tmp_path, recording, align(recording)).read_text())
    assert data["displayTimeUnit"] == "ms"
    for one in data["traceEvents"]:
        assert one["ph"] in "MXibe"
        assert isinstance(one["pid"], int)
        assert isinstance(one["tid"], int)
        assert one["ph"] == "M" or one["ts"] >= 0.0
        assert one["ph"] != "X" or one["dur"] >= 0.0
        assert one["ph"] != "i" or one["s"] == "t"
