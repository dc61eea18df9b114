"""The page of a recorded job."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fakes import memories
from fakes.pages import figures
from fakes.played_jobs import record, written
from fakes.recordings import recording as made
from fakes.recordings import with_iterations, with_ranks
from fakes.replays import DURATIONS, SIZES, on_one_host, over_a_link
from markupsafe import escape

from sirtaki.analysis import page as module
from sirtaki.analysis.global_graph import ms, parts, percent
from sirtaki.analysis.job_model import JobModel, Program, histories
from sirtaki.analysis.page import (
    MAX_MOMENTS,
    findings,
    heading,
    memory_section,
    problems,
    render,
    sentences,
)
from sirtaki.analysis.recording import JOB_FILE, Detail, RankRecording, RecordedIteration, Recording, rank_path
from sirtaki.analysis.step_parts import ExposureCause, RankExposure, TimeKind, exposures, late_units, step_parts
from sirtaki.autotune.model.replayer import Activity
from sirtaki.cli.__main__ import main
from sirtaki.errors import ConfigError, RecordingError, ReplayError
from sirtaki.measures import LinkModel

# ── step parts ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("detail", Detail)
def test_the_parts_of_each_rank_add_up_to_its_mean_step(detail: Detail) -> None:
    recording = record(over_a_link(ranks=3, iterations=3), detail=detail)
    found = step_parts(histories(recording))
    assert [one.rank for one in found] == [0, 1, 2]
    for one in found:
        iterations = recording.ranks[one.rank].iterations
        assert one.step_s == pytest.approx(sum(each.end_s - each.begin_s for each in iterations) / len(iterations))
    if detail is Detail.OPERATORS:
        parts_s = {TimeKind.FORWARD: 0.02, TimeKind.BACKWARD: 0.08, TimeKind.COPY: 0.003, TimeKind.UPDATE: 0.01}
        assert {kind: found[0].seconds[kind] for kind in parts_s} == pytest.approx(parts_s)
        assert found[0].seconds[TimeKind.EXPOSED] > 0.01


# ── exposure ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_for_a_late_rank_is_distinguished_from_waiting_for_units() -> None:
    job = on_one_host(slow={1: 2.0}, cuts=(4,), seconds_per_byte=1e-6)
    quick, slow = exposures(histories(record(job)))
    unit_s = 4 * sum(SIZES) * 1e-6
    slower_s, copy_s = sum(DURATIONS) - 0.001, 0.001  # the quick rank copies, too, before it waits
    assert caused(quick) == {
        ExposureCause.SLOW_RANK: slower_s,
        ExposureCause.COPY: copy_s,
        ExposureCause.TRANSFER: unit_s,
    }
    assert quick.slower_s == pytest.approx({1: slower_s})
    assert caused(slow) == {ExposureCause.TRANSFER: unit_s}


def caused(exposure: RankExposure) -> dict[ExposureCause, object]:
    return {cause: pytest.approx(seconds) for cause, seconds in exposure.seconds.items() if seconds > 1e-6}


def with_slow_copies(rank: int) -> JobModel:
    def slower(own: int, program: Program) -> Program:
        copies = Activity.COPY
        return tuple(replace(one, seconds=0.06) if own == rank and one.activity is copies else one for one in program)

    return on_one_host(cuts=(4,), seconds_per_byte=1e-9).changed(program=slower)


CAUSES = [
    (
        "a slow rank, although units are in flight meanwhile",
        over_a_link(slow={0: 3.0}, cuts=(1, 2, 3, 4), link=LinkModel(alpha_s=1e-3, throughput=(2e6,))),
        ExposureCause.SLOW_RANK,
        "rank 0, which computes longer",
    ),
    ("a slow link", over_a_link(cuts=(4,)), ExposureCause.TRANSFER, "the network"),
    (
        "one stream for many units",
        over_a_link(cuts=(1, 2, 3, 4), streams=1, link=LinkModel(alpha_s=1e-3, throughput=(3e4,))),
        ExposureCause.QUEUE,
        "the network",
    ),
    (
        "units that cost processor time",
        on_one_host(cuts=(4,), seconds_per_byte=1e-5),
        ExposureCause.TRANSFER,
        "communication on one host",
    ),
    ("slow copies of one rank", with_slow_copies(1), ExposureCause.COPY, "copies of gradients"),
]


@pytest.mark.parametrize(("job", "cause", "words"), [one[1:] for one in CAUSES], ids=[one[0] for one in CAUSES])
def test_the_headline_names_the_cause_that_was_injected(
    tmp_path: Path, job: JobModel, cause: ExposureCause, words: str
) -> None:
    found = findings(written(tmp_path / "job", record(job)))
    totals = {each: sum(one.seconds[each] for one in found.exposures) for each in ExposureCause}
    assert max(totals, key=lambda each: totals[each]) is cause
    assert next(sentences(found)).startswith(f"Training waits for {words}: {ms(found.exposed_s)} of a step")
    for one, parts_ in zip(found.exposures, step_parts(found.histories), strict=True):
        assert one.exposed_s == pytest.approx(parts_.seconds.get(TimeKind.EXPOSED, 0.0))


def test_a_rank_that_only_begins_later_is_not_said_to_compute_longer(tmp_path: Path) -> None:
    job = replace(on_one_host(cuts=(4,), seconds_per_byte=1e-9, iterations=1), begin_s={1: 0.05})
    found = findings(written(tmp_path / "job", record(job)))
    assert next(sentences(found)).startswith("Training waits for rank 1, which is behind the others: ")


def test_a_wait_stays_one_although_another_rank_recorded_its_issue_too_late() -> None:
    exact = record(on_one_host(slow={0: 3.0}, cuts=(4,), seconds_per_byte=1e-9))
    late = with_iterations(exact, issued_later, 0)
    expected, found = (exposures(histories(one))[1] for one in (exact, late))
    assert expected.exposed_s > 0.15
    assert found.exposed_s == pytest.approx(expected.exposed_s, abs=0.005)
    assert found.slower_s[0] == pytest.approx(expected.slower_s[0], abs=0.005)


def issued_later(one: RecordedIteration) -> RecordedIteration:
    units = tuple(unit._replace(issue_s=unit.issue_s + 0.003, done_s=unit.done_s + 0.003) for unit in one.units)
    return replace(one, units=units)


def test_ranks_that_are_slow_by_turns_are_not_blamed_alone(tmp_path: Path) -> None:
    first, second = (
        on_one_host(ranks=2, slow={rank: 3.0}, cuts=(4,), seconds_per_byte=1e-9, iterations=1) for rank in (0, 1)
    )
    job = replace(first, iterations=(*first.iterations, *second.iterations))
    found = findings(written(tmp_path / "job", record(job)))
    assert next(sentences(found)).startswith("Training waits for slower ranks, not always the same: ")


def test_units_that_end_after_the_backward_pass_are_late() -> None:
    (last,) = late_units(histories(record(on_one_host(seconds_per_byte=1e-6, iterations=3))))
    assert (last.unit.name, last.unit.n_bytes, last.times) == ("w2 … w3 (2)", 10_000, 3)
    assert last.late_s == last.done_s == pytest.approx(0.01)
    assert last.begin_s == pytest.approx(0.0, abs=1e-9)
    assert last.issue_s == pytest.approx(0.0, abs=1e-9)


# ── findings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_rank_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
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
    assert "rank 1 has no iteration in common with most ranks, and is omitted" in found.problems
    with pytest.raises(RecordingError, match="the recording contains no iteration"):
        findings(written(tmp_path / "all", with_ranks(made(2), short)))


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_recording_that_cannot_be_replayed_is_shown_without_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ReplayError("it goes round in a circle")

    monkeypatch.setattr(module, "job_model", refuse)
    page = page_of(tmp_path, record(on_one_host()))
    assert '<p class="note">The recording cannot be replayed: it goes round in a circle.</p>' in page
    assert re.findall("<h2>(.*?)</h2>", page)[1:] == ["Exposed communication", "Data of this page"]


def test_the_main_result_is_described_in_a_few_sentences(tmp_path: Path) -> None:
    found = findings(written(tmp_path / "job", record(over_a_link(ranks=3))))
    assert heading(found) == (
        "job: 2 iterations of 3 ranks on 3 hosts, with operators; gloo flat, 1 B units, 2 streams."
    )
    waits, length, path = sentences(found)
    share = percent(found.exposed_s / found.times.iteration_s)
    best = found.answers[0]
    assert best.is_sure
    assert waits == (
        f"Training waits for the network: {ms(found.exposed_s)} of a step, {share}, are not hidden; the largest gain "
        f"is predicted if {best.words}: {best.describe()}."
    )
    assert length == f"A step takes {ms(found.times.iteration_s)}."
    assert path == f"The largest part of the critical path: {parts(found.replay)[0].describe()}."
    assert list(problems(found)) == []


def test_the_first_sentence_reports_that_nothing_is_waited_for_or_certain(tmp_path: Path) -> None:
    found = findings(written(tmp_path / "job", record(on_one_host())))
    hidden = next(sentences(replace(found, exposures=(RankExposure(0, {}, {}),), answers=())))
    assert hidden == (
        "Training does not wait for communication on one host (0.0 % of a step); none of the simulated changes is sure "
        "to help."
    )
    assert next(sentences(replace(found, base=None))).endswith("because the replay does not match the recording.")


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


def section(folder: Path, recording: Recording) -> str:
    return "\n".join(memory_section(findings(written(folder, recording))))


def test_the_peak_is_reported_with_its_uses_and_remedies(tmp_path: Path) -> None:
    text = section(tmp_path / "one", memories.recorded_job())
    assert "At its peak rank 0 holds 2.89 KiB of cpu, 3500 ms into the step" in text
    assert "1.72 KiB activations, 1000 B parameters, 200 B flat buffers" in text
    assert all(f"<td>blocks.{block}</td>" in text for block in range(4))
    assert "passes over parts of the batch" in text
    assert "Only a trial shows the step time with a remedy" in text
    (areas,) = figures(text)
    assert [one["name"] for one in areas.traces] == ["parameters", "flat buffers", "gradients", "activations", "other"]
    assert all(len(one["x"]) == len(one["y"]) <= MAX_MOMENTS + 1 for one in areas.traces)
    assert max(map(sum, zip(*(one["y"] for one in areas.traces), strict=True))) == pytest.approx(2.89 / 1024, rel=1e-2)
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


def bars(page: str) -> dict[str, dict[str, float]]:
    """By rank: milliseconds of each kind of time."""
    found: dict[str, dict[str, float]] = {}
    for trace in figures(page)[0].traces:
        for rank, length_ms in zip(trace["y"], trace["x"], strict=True):
            found.setdefault(rank, {})[trace["name"]] = length_ms
    return found


def test_the_page_reports_all_known_facts(tmp_path: Path) -> None:
    page = page_of(tmp_path / "job", record(over_a_link(ranks=3)))
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Where each rank’s time goes", "The critical path", "Exposed communication",
        "What would help", "Data of this page",
    ]  # fmt: skip
    assert "is the link between hosts" in page
    assert "if the links were twice as fast" in page
    assert "Memory was not recorded." in page
    assert "None: no rank waits for gradients." in page_of(tmp_path / "hidden", record(memories.job()))


def test_a_ranks_bar_is_as_long_as_its_step(tmp_path: Path) -> None:
    job = on_one_host(ranks=3, slow={1: 2.0}, cuts=(4,), seconds_per_byte=1e-6)
    page = page_of(tmp_path, record(job))
    found = bars(page)
    assert list(found) == ["rank 0", "rank 1", "rank 2"]
    whole_ms = [sum(parts.values()) for parts in found.values()]
    assert whole_ms == pytest.approx([whole_ms[0]] * 3)  # all wait for the slow one
    exposed_ms = {rank: parts["exposed communication"] for rank, parts in found.items()}
    assert exposed_ms["rank 0"] > 2 * exposed_ms["rank 1"] > 0
    told = f"rank 0, exposed communication: {ms(exposed_ms['rank 0'] / 1e3)}"
    assert any(text.startswith(told) for text in figures(page)[0].texts())


def test_shares_of_the_path_add_up(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(over_a_link(ranks=3)))
    section = page.partition("<h2>The critical path")[2].partition("<h2>")[0]
    *shares, total = [float(share) for share in re.findall(r">([\d.]+) %<", section)]
    assert total == 100.0
    assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares))


def test_a_page_loads_nothing_and_allows_no_script_but_its_own(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(over_a_link()))
    library, *others = read(page).scripts
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", page.replace(library, ""))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None
    assert unescape(policy[1]).startswith("default-src 'none'; ")
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (library, *others)]
    assert re.findall("'sha256-(.*?)'", unescape(policy[1])) == digests


def test_the_command_for_the_timeline_is_shown(tmp_path: Path) -> None:
    folder = written(tmp_path / "a job", record(over_a_link()))
    assert f"<code>sirtaki trace {escape(shlex.quote(str(folder)))}</code>" in render(findings(folder))


def test_a_page_without_plotly_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, record(over_a_link()))
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'sirtaki\[plot\]'"):
        render(findings(folder))


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
    assert len(tags.scripts) == 2  # Plotly, and the bars
    assert "b" not in tags.seen
    assert "&lt;/script&gt;" in page
    assert "&lt;b&gt;job" in page


def test_without_operators_the_page_reports_no_phases(tmp_path: Path) -> None:
    page = page_of(tmp_path, record(over_a_link(), detail=Detail.UNITS))
    read(page)
    assert "divided only if operators are recorded" in page
    assert "Operators were not recorded on every rank" in page
    assert {"forward", "backward computation"} & set(bars(page)["rank 0"])


def test_without_units_the_rest_is_shown(tmp_path: Path) -> None:
    page = page_of(tmp_path, with_iterations(record(on_one_host()), lambda one: replace(one, units=())))
    read(page)
    assert "No gradients were exchanged." in page
    assert "No gradients were exchanged while this was recorded" in page
    assert "is the backward pass" in page


def test_a_replay_far_from_the_recording_makes_no_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ERROR", -1.0)
    page = page_of(tmp_path, record(on_one_host()))
    assert page.count("so there are no predictions here") == 2
    assert "if gradients travelled" not in page


def test_a_value_smaller_than_its_error_is_grey_and_marked(tmp_path: Path) -> None:
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
    monkeypatch.setattr(module, "MAX_RANKS", 2)
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    job = on_one_host(ranks=4, slow={2: 1.5}, cuts=(1, 2, 3, 4), seconds_per_byte=1e-5)
    page = page_of(tmp_path, record(job))
    assert "The plot shows the 2 busiest of 4 ranks." in page
    assert "rank 2" in bars(page)
    assert "Shown are the 2 ranks that wait longest, of 4." in page
    assert len(bars(page)) == 2


def test_the_command_writes_the_page_and_prints_the_main_result(
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


def test_an_unreadable_input_or_unwritable_output_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "job", record(on_one_host()))
    assert main(["report", str(folder), "-o", str(tmp_path / "nowhere" / "page.html")]) == 1
    assert "the report cannot be written to the output file" in capsys.readouterr().err
    (folder / JOB_FILE).unlink()
    assert main(["report", str(folder)]) == 1
    err = capsys.readouterr().err
    assert ("but no file job.json" in err, err.count("\n"), (folder / "report.html").exists()) == (True, 1, False)
