"""The part of the page on memory, read as text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from fakes import memories
from fakes.played_jobs import record, written

from sirtaki.analysis.page import MOST_MOMENTS, findings, memory_section, render
from sirtaki.analysis.recording import Recording


def section(folder: Path, recording: Recording) -> str:
    return "\n".join(memory_section(findings(written(folder, recording))))


def test_the_peak_is_named_with_what_holds_it(tmp_path: Path) -> None:
    text = section(tmp_path, memories.recorded_job())
    assert "At its peak rank 0 holds 2.89 KiB of cpu, 3500 ms into the step" in text
    assert "1.72 KiB activations, 1000 B parameters, 200 B flat buffers" in text
    for block in range(4):
        assert f"<td>blocks.{block}</td>" in text
    assert "The peak of each rank" not in text


def test_each_kind_of_memory_is_an_area_above_the_other(tmp_path: Path) -> None:
    text = section(tmp_path, memories.recorded_job())
    areas = re.findall(r'<polygon points="([^"]+)"[^>]*><title>([^<]+)', text)
    assert [name for _, name in areas] == ["parameters", "flat buffers", "gradients", "activations", "other"]
    assert all(points.count(" ") < 4 * MOST_MOMENTS for points, _ in areas)
    floor = max(float(point.split(",")[1]) for point in areas[0][0].split())
    assert all(float(point.split(",")[1]) <= floor for points, _ in areas for point in points.split())


def test_peaks_of_several_ranks_are_told(tmp_path: Path) -> None:
    text = section(tmp_path, memories.recorded_job(of=(0, 1)))
    assert "The peak of each rank" in text


def test_what_would_lower_it_is_shown_where_the_replay_is_believed(tmp_path: Path) -> None:
    recording = memories.recorded_job()
    assert "passes over parts of the batch" in section(tmp_path / "believed", recording)
    found = findings(written(tmp_path / "again", recording))
    assert "passes over" not in "\n".join(memory_section(replace(found, played=None)))


def test_a_recording_without_memory_says_so(tmp_path: Path) -> None:
    found = findings(written(tmp_path, record(memories.job())))
    assert list(memory_section(found)) == []
    assert "Memory was not recorded." in render(found)


def test_names_of_modules_are_escaped(tmp_path: Path) -> None:
    recording = memories.recorded_job()
    evil = tuple(replace(one, name=f"<b>.{one.name}", kind="<i>") for one in recording.ranks[0].modules)
    first = replace(recording.ranks[0], modules=evil)
    text = section(tmp_path, replace(recording, ranks={**recording.ranks, 0: first}))
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "<i>" not in text
