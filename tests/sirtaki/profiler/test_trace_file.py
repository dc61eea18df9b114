"""The trace of all ranks, held to the trace event format by hand: its own processor is a download of its own."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes import recordings

from sirtaki.analysis.alignment import align, trace_entries, write_trace


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


def test_a_rank_is_a_process_and_what_follows_each_other_a_thread() -> None:
    by_track = tracks(entries())
    assert {name for pid, name in by_track if pid == 1} == {
        "steps",
        "phases",
        "operators: train",
        "copies",
        "gradients",
        "gloo stream 0",
        "gloo stream 1",
        "collectives",
    }
    steps = by_track[0, "steps"]
    assert [one["name"] for one in steps] == ["iteration 102", "iteration 103", "iteration 104"]
    assert steps[0]["ts"] == 0.0
    assert steps[1]["ts"] == pytest.approx(1e5)
    assert steps[1]["dur"] == pytest.approx(1e5)


def test_spans_of_a_thread_never_overlap_but_lie_in_each_other() -> None:
    for spans in tracks(entries()).values():
        ordered = sorted((one for one in spans if one["ph"] == "X"), key=lambda one: one["ts"])
        for before, after in pairwise(ordered):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_a_unit_has_the_same_name_and_id_on_all_ranks_and_what_queues_is_told_apart() -> None:
    found = entries()
    units = [{one["args"]["unit"] for one in tracks(found)[rank, "gloo stream 0"]} for rank in (0, 1)]
    assert units[0] == units[1]
    assert len(units[0]) == 3
    begins = [one for one in found if one["ph"] == "b"]
    ends = {one["id"]: one for one in found if one["ph"] == "e"}
    assert begins
    assert all(one["ts"] < ends[one["id"]]["ts"] for one in begins)
    assert len({one["id"] for one in begins}) == len(begins)


def test_ranks_whose_clocks_differ_stand_on_one() -> None:
    whole = recordings.recording(2, ranks_per_host=1)
    found = entries(replace(whole, ranks={**whole.ranks, 1: recordings.shifted(whole.ranks[1], by_s=3.0)}))
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


def test_a_recording_without_iterations_is_an_empty_trace() -> None:
    empty = {number: replace(rank, iterations=()) for number, rank in recordings.recording().ranks.items()}
    assert {one["ph"] for one in entries(replace(recordings.recording(), ranks=empty))} == {"M"}
