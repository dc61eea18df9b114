"""The page is read as text and as HTML; what its script draws is looked at by people."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes.played_jobs import made_job, plan_of, record, written
from fakes.replays import SIZES, on_one_host, over_a_link
from fakes.trial_logs import svgs

from sirtaki.analysis import page as finding
from sirtaki.analysis import page as module
from sirtaki.analysis.page import findings, render
from sirtaki.analysis.recording import Detail, Recording
from sirtaki.analysis.recording_files import JOB_FILE, rank_path
from sirtaki.cli.__main__ import main

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


def of(folder: Path, recording: Recording) -> str:
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
    page = of(tmp_path / "job", record(over_a_link(ranks=3)))
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Where each rank’s time goes", "One iteration", "The critical path", "Exposed communication",
        "What would help", "What this rests on",
    ]  # fmt: skip
    assert "is the link between hosts" in page
    assert "if the links were twice as fast" in page
    assert "Memory was not recorded." in page


def test_a_ranks_bar_is_as_long_as_its_step(tmp_path: Path) -> None:
    slow = {0: (0.02, 0.01, 0.03, 0.02), 1: (0.04, 0.02, 0.06, 0.04), 2: (0.02, 0.01, 0.03, 0.02)}
    job = made_job(durations_s=slow, sizes=SIZES, plan=plan_of(SIZES, (4,)), seconds_per_byte=1e-6)
    found = bars(of(tmp_path, record(job)))
    assert list(found) == ["rank 0", "rank 1", "rank 2"]
    whole_px = [sum(width for _, width in parts) for parts in found.values()]
    assert whole_px == pytest.approx([whole_px[0]] * 3, abs=1.0)  # all wait for the slow one
    exposed = {
        rank: sum(width for words, width in parts if words.startswith("exposed")) for rank, parts in found.items()
    }
    assert exposed["rank 0"] > 2 * exposed["rank 1"] > 0


def test_shares_of_the_path_add_up(tmp_path: Path) -> None:
    page = of(tmp_path, record(over_a_link(ranks=3)))
    section = page.partition("<h2>The critical path")[2].partition("<h2>")[0]
    *shares, total = [float(share) for share in re.findall(r">([\d.]+) %<", section)]
    assert total == 100.0
    assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares))


def test_nothing_is_fetched_and_only_its_own_script_runs(tmp_path: Path) -> None:
    page = of(tmp_path, record(over_a_link()))
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
    ranks = {}
    for number, rank in recording.ranks.items():
        iterations = tuple(
            replace(one, operators=tuple(replace(operator, name=EVIL) for operator in one.operators))
            for one in rank.iterations
        )
        ranks[number] = replace(rank, iterations=iterations)
    folder = tmp_path / "<b>job"
    page = of(folder, replace(recording, job=job, ranks=ranks))
    tags = read(page)
    assert len(tags.scripts) == 2
    assert "b" not in tags.seen
    assert EVIL in json.loads(tags.scripts[0])["names"]
    assert "&lt;b&gt;job" in page


def test_without_operators_the_page_does_not_pretend_to_know_phases(tmp_path: Path) -> None:
    page = of(tmp_path, record(over_a_link(), detail=Detail.UNITS))
    read(page)
    assert "told apart only where operators are recorded" in page
    assert "Operators were not recorded on every rank" in page
    (words, _), *_ = bars(page)["rank 0"]
    assert words.startswith(("forward", "backward"))


def test_without_units_the_rest_is_shown(tmp_path: Path) -> None:
    recording = record(on_one_host())
    ranks = {
        number: replace(rank, iterations=tuple(replace(one, units=()) for one in rank.iterations))
        for number, rank in recording.ranks.items()
    }
    page = of(tmp_path, replace(recording, ranks=ranks))
    read(page)
    assert "No gradients were exchanged." in page
    assert "No gradients were exchanged while this was recorded" in page
    assert "is the backward pass" in page


def test_a_replay_that_is_far_off_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "FAR", -1.0)
    page = of(tmp_path, record(on_one_host()))
    assert page.count("too much to be believed") == 2
    assert 'id="timeline-path"' not in page
    assert "if gradients travelled" not in page


def test_a_gain_within_the_error_of_prices_is_no_gain(tmp_path: Path) -> None:
    found = findings(written(tmp_path, record(over_a_link())))
    assert found.played is not None
    assert "which is within the error" not in render(found)
    page = render(replace(found, played=replace(found.played, price_error=0.9, notes=("they are off",))))
    assert page.count("which is within the error") == sum(one.is_priced for one in found.played.answers) > 0
    assert '<p class="note">They are off.</p>' in page


def test_what_cannot_be_replayed_is_drawn(tmp_path: Path) -> None:
    found = replace(findings(written(tmp_path, record(on_one_host()))), played=None, problems=("that is why",))
    page = render(found)
    assert '<p class="note">That is why.</p>' in page
    assert re.findall("<h2>(.*?)</h2>", page)[2:] == ["Exposed communication", "What this rests on"]


def test_many_ranks_are_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RANKS", 2)
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    slow = {rank: (0.02 + 0.01 * (rank == 2),) * 4 for rank in range(4)}
    job = made_job(durations_s=slow, sizes=SIZES, plan=plan_of(SIZES, (1, 2, 3, 4)), seconds_per_byte=1e-5)
    page = of(tmp_path, record(job))
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
    assert "A step takes" in said
    assert "Rank 2 of 3 is missing." in said
    assert said.endswith(f"wrote {folder / 'report.html'}\n")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(folder), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / JOB_FILE).write_text('{"format": 7}'), "has format 7; this version of Sirtaki reads"),
        (lambda folder: (folder / JOB_FILE).unlink(), "but no job.json"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "it holds no recording"),
    ],
)
def test_what_cannot_be_read_gets_one_sentence(damage, words, tmp_path, capsys):  # type: ignore[no-untyped-def]
    folder = written(tmp_path / "job", record(on_one_host()))
    damage(folder)
    assert main(["report", str(folder)]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "job", record(on_one_host()))
    assert main(["report", str(folder), "-o", str(tmp_path / "nowhere" / "page.html")]) == 1
    assert "the report cannot be written" in capsys.readouterr().err


def test_the_plots_are_well_formed(tmp_path: Path) -> None:
    page = of(tmp_path, record(over_a_link()))
    for plot in re.findall("<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(plot)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    path = tmp_path / "timeline.js"
    path.write_text(files("sirtaki.analysis").joinpath("timeline.js").read_text(encoding="utf-8"))
    subprocess.run(["node", "--check", path], check=True)
