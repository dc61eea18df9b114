"""The page of a recorded job."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakes import memories
from fakes.played_jobs import record, written
from fakes.recordings import recording as made
from fakes.recordings import with_iterations, with_ranks
from fakes.replays import DURATIONS, SIZES, on_one_host, over_a_link
from fakes.trial_logs import svgs

from sirtaki.analysis import page as module
from sirtaki.analysis.global_graph import ms, parts, percent, play
from sirtaki.analysis.job_model import Histories, histories, job_model
from sirtaki.analysis.page import (
    MOST_MOMENTS,
    findings,
    heading,
    memory_section,
    problems,
    render,
    sentences,
)
from sirtaki.analysis.recording import JOB_FILE, Detail, Operator, RankRecording, Recording, rank_path
from sirtaki.analysis.timeline_plot import (
    MOST_BOXES,
    TICKS_PER_S,
    Kind,
    Lane,
    Leg,
    Span,
    coarsened,
    drawn_path,
    exposures,
    lanes_of,
    late_units,
    step_parts,
    timeline,
)
from sirtaki.autotune.model.replayer import Phase
from sirtaki.cli.__main__ import main
from sirtaki.errors import RecordingError, ReplayError

# ── step parts ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("detail", Detail)
def test_the_parts_of_each_rank_are_what_the_job_was_made_of_and_add_up_to_its_mean_step(detail: Detail) -> None:
    recording = record(over_a_link(ranks=3, iterations=3), detail=detail)
    found = step_parts(histories(recording))
    assert [one.rank for one in found] == [0, 1, 2]
    for one in found:
        iterations = recording.ranks[one.rank].iterations
        assert one.step_s == pytest.approx(sum(each.end_s - each.begin_s for each in iterations) / len(iterations))
    if detail is Detail.OPERATORS:
        parts_s = {Kind.FORWARD: 0.02, Kind.BACKWARD: 0.08, Kind.COPY: 0.003, Kind.UPDATE: 0.01}
        assert {kind: found[0].seconds[kind] for kind in parts_s} == pytest.approx(parts_s)
        assert found[0].seconds[Kind.EXPOSED] > 0.01


# ── exposure ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_for_a_late_rank_is_told_from_waiting_for_units() -> None:
    job = on_one_host(slow={1: 2.0}, cuts=(4,), seconds_per_byte=1e-6)
    quick, slow = exposures(histories(record(job)))
    unit_s = 4 * sum(SIZES) * 1e-6
    assert (quick.held_s, quick.moving_s) == pytest.approx((sum(DURATIONS), unit_s))
    assert (slow.held_s, slow.moving_s) == pytest.approx((0.0, unit_s), abs=1e-9)


def test_units_that_end_after_the_backward_pass_are_late() -> None:
    (last,) = late_units(histories(record(on_one_host(seconds_per_byte=1e-6, iterations=3))))
    assert (last.unit.name, last.unit.n_bytes, last.times) == ("w2 … w3 (2)", 10_000, 3)
    assert last.late_s == last.done_s == pytest.approx(0.01)
    assert last.begin_s == pytest.approx(0.0, abs=1e-9)
    assert last.issue_s == pytest.approx(0.0, abs=1e-9)


# ── lanes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lanes(found: Histories) -> dict[tuple[int, str], Lane]:
    return {(lane.rank, lane.name): lane for lane in lanes_of(found, found.steps[0], found.ranks)}


def test_every_rank_has_its_thread_its_copies_and_its_streams() -> None:
    found = histories(record(over_a_link()))
    drawn = lanes(found)
    names = ("training thread", "copies", "gloo stream 0", "gloo stream 1")
    assert list(drawn) == [(rank, name) for rank in (0, 1) for name in names]
    computes = [span for span in drawn[0, "training thread"].spans if span.kind is not Kind.EXPOSED]
    recorded = found.recording.ranks[0].iterations[0].operators
    assert [span.name for span in computes] == [one.name for one in recorded if one.end_s > one.begin_s]
    assert [len(drawn[0, name].spans) for name in names[1:]] == [3, 2, 1]


def test_a_units_box_begins_with_its_last_rank_and_knows_how_long_others_waited() -> None:
    drawn = lanes(histories(made(2)))
    boxes = [drawn[rank, "gloo stream 1"].spans[0] for rank in (0, 1)]
    late = boxes[1]
    assert {one.begin_s for one in boxes} == {late.begin_s}
    assert late.issued_s == late.begin_s
    assert boxes[0].issued_s == pytest.approx(late.begin_s - 0.01)
    assert (late.n_bytes, late.kind) == (832, Kind.EXPOSED)
    assert drawn[0, "gloo stream 0"].spans[0].kind is Kind.UNIT


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


def test_short_neighbours_of_one_kind_become_one_box_but_never_units() -> None:
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    spans = (
        Span(0, 1, forward, "a"), Span(1, 2, forward, "a"), Span(2, 3, forward, "b"), Span(3, 4, backward, "a"),
        Span(4, 40, backward, "a"), Span(60, 61, forward, "a"), Span(61, 62, forward, "a"),
    )  # fmt: skip
    (lane,) = coarsened([Lane(rank=0, name="x", spans=spans)], 10)
    told = [(span.begin_s, span.end_s, span.name) for span in lane.spans]
    assert told == [(0, 3, "3 × operators"), (3, 4, "a"), (4, 40, "a"), (60, 62, "2 × a")]
    units = [Lane(rank=0, name="x", spans=tuple(Span(at, at + 1, Kind.UNIT, "u", issued_s=at) for at in range(4)))]
    assert coarsened(units, 10) == units


# ── timeline ──────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = {kind: kind.value for kind in Kind}


class Drawn(NamedTuple):
    data: Mapping[str, Any]
    notes: list[str]


def of(found: Histories, *, paths: dict[int, tuple[Leg, ...]] | None = None, most: int = MOST_BOXES) -> Drawn:
    return Drawn(*timeline(found, found.ranks, paths or {}, kind_names=NAMES, most_boxes=most))


def boxes(drawn: Drawn, flat: list[int], stride: int) -> list[tuple[float, float, str, list[int]]]:
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
    lengths_s = {102: 0.1, 103: 0.3, 104: 0.2}
    recording = with_iterations(made(2), lambda one: replace(one, end_s=one.begin_s + lengths_s[one.number]))
    drawn = of(histories(recording))
    assert [one["ms"] for one in drawn.data["iterations"]] == pytest.approx([200, 100, 300])
    assert drawn.notes == []


def test_a_page_that_would_be_too_large_has_fewer_iterations_and_then_larger_boxes() -> None:
    found = histories(record(over_a_link(iterations=6)))
    whole = of(found)
    assert len(whole.data["iterations"]) == 6

    def count(drawn: Drawn) -> int:
        lanes = [lane for each in drawn.data["iterations"] for lane in each["lanes"]]
        return sum(
            (len(lane["under"]) + len(lane.get("boxes", ()))) // 4 + len(lane.get("units", ())) // 6 for lane in lanes
        )

    fewer = of(found, most=count(whole) - 1)
    assert len(fewer.data["iterations"]) == 3
    assert fewer.notes == ["Of 6 iterations the median, the shortest and the longest one are drawn."]
    assert count(fewer) == count(whole) // 2
    most = count(whole) // 2 - 12
    smaller = of(found, most=most)
    assert count(smaller) <= most
    assert len(smaller.notes) == 3  # the median one is whole
    assert all("are drawn as one box" in note for note in smaller.notes[1:])
    assert not any(f"iteration {smaller.data['iterations'][0]['number']} " in note for note in smaller.notes)


# ── drawn path ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_path_goes_through_the_slow_rank_and_the_last_unit_without_a_hole() -> None:
    job = on_one_host(slow={1: 2.0}, cuts=(4,), seconds_per_byte=1e-6)
    found = histories(record(job))
    paths = drawn_path(found, play(job_model(found)))
    assert list(paths) == [step.number for step in found.steps]
    for step in found.steps:
        legs = paths[step.number]
        assert legs[0].begin_s == pytest.approx(step.stretches[1][0].begin_s)
        assert legs[-1].end_s == pytest.approx(max(mine[-1].end_s for mine in step.stretches.values()))
        for before, after in pairwise(legs):
            assert after.begin_s == pytest.approx(before.end_s)
        backward = [leg for leg in legs if leg.lane == "training thread" and leg.end_s < step.barriers[0].begin_s]
        assert {leg.rank for leg in backward} <= {1}
        (unit,) = (leg for leg in legs if leg.lane == "gloo stream 0")
        assert (unit.begin_s, unit.end_s) == pytest.approx((step.barriers[0].begin_s, step.barriers[0].end_s))
        assert unit.rank == 1


# ── findings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_that_was_killed_is_said_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = written(tmp_path, record(over_a_link(ranks=3)))
    rank_path(folder, 2).write_bytes(rank_path(folder, 2).read_bytes()[:100])
    found = findings(folder)
    assert found.histories.ranks == (0, 1)
    assert any("cannot be read" in problem for problem in found.problems)
    assert "rank 2 of 3 is missing" in found.problems


def test_ranks_without_iterations_in_common_are_left_out_while_some_have_any(tmp_path: Path) -> None:
    def short(rank: RankRecording) -> RankRecording:
        return replace(rank, iterations=(), complete=False)

    found = findings(written(tmp_path / "one", with_ranks(made(3), short, 1)))
    assert found.histories.ranks == (0, 2)
    assert "rank 1 has no iteration that most others have recorded, and is left out" in found.problems
    with pytest.raises(RecordingError, match="no iteration was recorded"):
        findings(written(tmp_path / "all", with_ranks(made(2), short)))


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_replayed_is_shown_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ReplayError("it goes round in a circle")

    monkeypatch.setattr(module, "job_model", refuse)
    page = page_of(tmp_path, record(on_one_host()))
    assert '<p class="note">What is here cannot be replayed: it goes round in a circle.</p>' in page
    assert re.findall("<h2>(.*?)</h2>", page)[2:] == ["Exposed communication", "What this rests on"]


def test_the_most_important_comes_in_a_few_sentences(tmp_path: Path) -> None:
    found = findings(written(tmp_path / "job", record(over_a_link(ranks=3))))
    assert heading(found) == (
        "job: 2 iterations of 3 ranks on 3 hosts, with operators; gloo flat, 1 B units, 2 streams."
    )
    waits, length, path = sentences(found)
    share = percent(found.exposed_s / found.times.iteration_s)
    best = found.answers[0]
    assert best.is_sure
    assert waits == (
        f"Training waits for the network: {ms(found.exposed_s)} of a step, {share}, are not hidden; most would help if "
        f"{best.words}: {best.describe()}."
    )
    assert length == f"A step takes {ms(found.times.iteration_s)}."
    assert path == f"The largest part of the critical path: {parts(found.replay)[0].describe()}."
    assert list(problems(found)) == []


def test_the_first_sentence_says_so_where_nothing_is_waited_for_or_nothing_is_sure(tmp_path: Path) -> None:
    found = findings(written(tmp_path / "job", record(on_one_host())))
    hidden = next(sentences(replace(found, exposed_s=0.0, answers=())))
    assert hidden == (
        "Training does not wait for what its ranks exchange on one host (0.0 % of a step); nothing that was asked for "
        "is sure to help."
    )
    assert next(sentences(replace(found, base=None))).endswith("cannot be told, as the replay does not fit.")


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


def section(folder: Path, recording: Recording) -> str:
    return "\n".join(memory_section(findings(written(folder, recording))))


def test_the_peak_is_named_with_what_holds_it_and_what_would_lower_it(tmp_path: Path) -> None:
    text = section(tmp_path / "one", memories.recorded_job())
    assert "At its peak rank 0 holds 2.89 KiB of cpu, 3500 ms into the step" in text
    assert "1.72 KiB activations, 1000 B parameters, 200 B flat buffers" in text
    assert all(f"<td>blocks.{block}</td>" in text for block in range(4))
    assert "passes over parts of the batch" in text
    assert "How long a step then takes is not known until it is tried" in text
    areas = re.findall(r'<polygon points="([^"]+)"[^>]*><title>([^<]+)', text)
    assert [name for _, name in areas] == ["parameters", "flat buffers", "gradients", "activations", "other"]
    assert all(points.count(" ") < 4 * MOST_MOMENTS for points, _ in areas)
    floor = max(float(point.split(",")[1]) for point in areas[0][0].split())
    assert all(float(point.split(",")[1]) <= floor for points, _ in areas for point in points.split())
    several = section(tmp_path / "several", memories.recorded_job(of=(0, 1)))
    assert ("The peak of each rank" in text, "The peak of each rank" in several) == (False, True)


def test_names_of_modules_are_escaped(tmp_path: Path) -> None:
    recording = memories.recorded_job()
    evil = tuple(one._replace(name=f"<b>.{one.name}", kind="<i>") for one in recording.ranks[0].modules)
    text = section(tmp_path, with_ranks(recording, lambda rank: replace(rank, modules=evil), 0))
    assert ("&lt;b&gt;" in text, "<b>" in text, "<i>" in text) == (True, False, False)


# ── page ──────────────────────────────────────────────────────────────────────────────────────────────────────────

EVIL = "</script><script>alert(1)</script><b>&\"'"


class Tags(HTMLParser):
    """Checks that tags are closed; `scripts` are the texts of script elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def read(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def page_of(folder: Path, recording: Recording) -> str:
    return render(findings(written(folder, recording)))


def bars(page: str) -> dict[str, list[tuple[str, float]]]:
    """By rank: the words and the width of each part."""
    found: dict[str, list[tuple[str, float]]] = {}
    for element in svgs(page)[0].iter():
        if element.tag.endswith("rect"):
            title = next(iter(element)).text or ""
            rank, _, rest = title.partition(", ")
            found.setdefault(rank, []).append((rest, float(element.get("width", "0"))))
    return found


def test_the_page_says_all_that_is_known(tmp_path: Path) -> None:
    page = page_of(tmp_path / "job", record(over_a_link(ranks=3)))
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Where each rank’s time goes", "One iteration", "The critical path", "Exposed communication",
        "What would help", "What this rests on",
    ]  # fmt: skip
    assert "is the link between hosts" in page
    assert "if the links were twice as fast" in page
    assert "Memory was not recorded." in page
    assert "None: no rank waits for gradients." in page_of(tmp_path / "hidden", record(memories.job()))


def test_a_ranks_bar_is_as_long_as_its_step(tmp_path: Path) -> None:
    job = on_one_host(ranks=3, slow={1: 2.0}, cuts=(4,), seconds_per_byte=1e-6)
    found = bars(page_of(tmp_path, record(job)))
    assert list(found) == ["rank 0", "rank 1", "rank 2"]
    whole_px = [sum(width for _, width in parts) for parts in found.values()]
    assert whole_px == pytest.approx([whole_px[0]] * 3, abs=1.0)  # all wait for the slow one
    exposed = {
        rank: sum(width for words, width in parts if words.startswith("exposed")) for rank, parts in found.items()
    }
    assert exposed["rank 0"] > 2 * exposed["rank 1"] > 0


def test_shares_of_the_path_add_up(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(over_a_link(ranks=3)))
    section = page.partition("<h2>The critical path")[2].partition("<h2>")[0]
    *shares, total = [float(share) for share in re.findall(r">([\d.]+) %<", section)]
    assert total == 100.0
    assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares))


def test_nothing_is_fetched_and_only_its_own_script_runs(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(over_a_link()))
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    data, script = read(page).scripts
    allowed = re.search(r"script-src 'sha256-(.*?)'", page)
    assert allowed is not None
    assert base64.b64decode(allowed[1]) == hashlib.sha256(script.encode()).digest()
    assert "default-src 'none'" in page
    assert json.loads(data)["iterations"]


def test_names_from_the_recording_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    recording = record(over_a_link())
    (buffer,) = recording.job.buffers
    layout = replace(buffer.layout, names=tuple(f"{EVIL}{index}" for index in range(len(buffer.layout.names))))
    place = replace(recording.job.placement[0], host_name=EVIL)
    job = replace(
        recording.job,
        buffers=(replace(buffer, layout=layout),),
        placement=(place, *recording.job.placement[1:]),
    )
    recording = with_iterations(
        replace(recording, job=job),
        lambda one: replace(one, operators=tuple(operator._replace(name=EVIL) for operator in one.operators)),
    )
    page = page_of(tmp_path / "<b>job", recording)
    tags = read(page)
    assert len(tags.scripts) == 2
    assert "b" not in tags.seen
    assert EVIL in json.loads(tags.scripts[0])["names"]
    assert "&lt;b&gt;job" in page


def test_without_operators_the_page_does_not_pretend_to_know_phases(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(over_a_link(), detail=Detail.UNITS))
    read(page)
    assert "told apart only where operators are recorded" in page
    assert "Operators were not recorded on every rank" in page
    (words, _), *_ = bars(page)["rank 0"]
    assert words.startswith(("forward", "backward"))


def test_without_units_the_rest_is_shown(tmp_path: Path) -> None:
    page = page_of(tmp_path, with_iterations(record(on_one_host()), lambda one: replace(one, units=())))
    read(page)
    assert "No gradients were exchanged." in page
    assert "No gradients were exchanged while this was recorded" in page
    assert "is the backward pass" in page


def test_a_replay_that_is_far_off_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAR", -1.0)
    page = page_of(tmp_path, record(on_one_host()))
    assert page.count("too much to be believed") == 2
    assert 'id="timeline-path"' not in page
    assert "if gradients travelled" not in page


def test_what_is_smaller_than_its_error_is_grey_and_says_so(tmp_path: Path) -> None:
    found = findings(written(tmp_path, record(over_a_link())))
    unsure = tuple(
        replace(one, gain=share, is_sure=False) for one, share in zip(found.answers, (0.2, 0.0), strict=False)
    )
    page = render(replace(found, answers=(*unsure, *found.answers[2:]), notes=("they are off",)))
    assert page.count('<tr class="unsure">') == 2 + sum(not one.is_sure for one in found.answers[2:])
    assert "<td>20 % less, within its error</td>" in page
    assert "<td>as long, within its error</td>" in page
    assert '<p class="note">They are off.</p>' in page
    assert f"{found.answers[0].low_s * 1e3:.3g} to {found.answers[0].high_s * 1e3:.3g}" in page


def test_many_ranks_are_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RANKS", 2)
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    job = on_one_host(ranks=4, slow={2: 1.5}, cuts=(1, 2, 3, 4), seconds_per_byte=1e-5)
    page = page_of(tmp_path, record(job))
    assert "The 2 ranks with most to do are drawn, of 4." in page
    assert "rank 2" in bars(page)
    assert "Shown are the 2 ranks that wait longest, of 4." in page
    assert {lane["rank"] for lane in json.loads(read(page).scripts[0])["iterations"][0]["lanes"]} == {0, 2}


def test_the_command_writes_the_page_and_says_the_most_important(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "job", record(over_a_link(ranks=3)))
    rank_path(folder, 2).unlink()
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "Training waits for the network" in said
    assert "Rank 2 of 3 is missing." in said
    assert said.endswith(f"wrote {folder / 'report.html'}\n")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(folder), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_what_cannot_be_read_or_written_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "job", record(on_one_host()))
    assert main(["report", str(folder), "-o", str(tmp_path / "nowhere" / "page.html")]) == 1
    assert "the report cannot be written" in capsys.readouterr().err
    (folder / JOB_FILE).unlink()
    assert main(["report", str(folder)]) == 1
    err = capsys.readouterr().err
    assert ("but no job.json" in err, err.count("\n"), (folder / "report.html").exists()) == (True, 1, False)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    path = tmp_path / "timeline.js"
    path.write_text(files("sirtaki.analysis").joinpath("timeline.js").read_text(encoding="utf-8"))
    subprocess.run(["node", "--check", path], check=True)
